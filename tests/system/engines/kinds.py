"""Small models of other kinds than the demo's: attention over a latent, attention in windows, experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from demo.model import (
    GAINS,
    HEAD_WIDTH,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    QUERY_HEADS,
    VOCABULARY,
    model_shapes,
    write_config,
    write_model,
    write_weights,
)

WINDOW = 96
SEEN = 80  # the window of the models with halves, as their configurations say it
GPT_OSS_WINDOW = 128
CHUNK = 128
LATENT, ROPE = 512, 64  # the only ones that vLLM's CPU backend for latents has kernels for
ALTERNATING = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(LAYERS)]
GEMMA_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA_NORMS = {name: (HIDDEN,) for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm")}
ENDS: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCABULARY, HIDDEN),
}


def write_windowed(folder: Path) -> Path:
    """Every second layer sees the last WINDOW tokens only."""
    return write_model(folder, layer_types=ALTERNATING, sliding_window=WINDOW)


def write_scaled(folder: Path) -> Path:
    """With scales for an fp8 cache, as llm-compressor leaves them; each layer has its own, for k and for v."""
    import torch
    from safetensors.torch import load_file, save_file

    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    said = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": []}
    write_model(folder, quantization_config=said | {"kv_cache_scheme": scheme})
    weights = load_file(folder / "model.safetensors")
    for layer in range(LAYERS):
        for part, scale in (("k", 0.03 + layer / 100), ("v", 0.07 + layer / 100)):
            weights[f"model.layers.{layer}.self_attn.{part}_scale"] = torch.tensor([scale])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_experts(folder: Path) -> Path:
    """Qwen3 with experts, which replicas of data parallelism share. Each layer has four; a token asks two of them."""
    changes: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN}
    changes |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    write_config(folder, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", attention_bias=False, **changes)
    dense = model_shapes(json.loads((folder / "config.json").read_text()))
    shapes = {name: shape for name, shape in dense.items() if ".mlp." not in name}
    for layer in range(LAYERS):
        mlp = f"model.layers.{layer}.mlp"
        shapes[f"{mlp}.gate.weight"] = (changes["num_experts"], HIDDEN)
        for expert in range(changes["num_experts"]):
            for name in ("gate_proj", "up_proj", "down_proj"):
                shapes[f"{mlp}.experts.{expert}.{name}.weight"] = (HIDDEN, HIDDEN)
    return write_weights(folder, shapes, GAINS, 1.0)


def write_latent(folder: Path, **changes: object) -> Path:
    """DeepSeek-V2 without experts."""
    config: dict[str, object] = dict(
        architectures=["DeepseekV2ForCausalLM"],
        model_type="deepseek_v2",
        num_key_value_heads=QUERY_HEADS,
        kv_lora_rank=LATENT,
        q_lora_rank=None,
        qk_nope_head_dim=HEAD_WIDTH,
        qk_rope_head_dim=ROPE,
        v_head_dim=HEAD_WIDTH,
        head_dim=ROPE,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_layer_freq=1,
        first_k_dense_replace=LAYERS,  # all of them
        routed_scaling_factor=1.0,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
    )
    write_config(folder, **config | changes)
    shapes = _shapes(json.loads((folder / "config.json").read_text()))
    return write_weights(folder, shapes, {"lm_head": 4.0}, 1.5)


def write_halves(folder: Path) -> Path:
    """MiMo-V2 without experts: layers 1 and 2 have a window, more heads, and memory of their own in SGLang.

    Keys are wider than values. SGLang's window has SEEN tokens before the current one, one more than vLLM's.
    """
    write_config(
        folder,
        architectures=["MiMoV2FlashForCausalLM"],
        model_type="mimo_v2_flash",
        hybrid_layer_pattern=[0, 1, 1, 0],
        num_key_value_heads=2,
        swa_num_key_value_heads=4,
        swa_num_attention_heads=QUERY_HEADS,
        head_dim=2 * HEAD_WIDTH,
        swa_head_dim=2 * HEAD_WIDTH,
        v_head_dim=HEAD_WIDTH,
        swa_v_head_dim=HEAD_WIDTH,
        sliding_window=SEEN,
        sliding_window_size=SEEN,
        attention_bias=False,
        add_swa_attention_sink_bias=False,
        add_full_attention_sink_bias=False,
        attention_value_scale=0.707,
        partial_rotary_factor=0.5,
        swa_rope_theta=10000.0,
        layernorm_epsilon=1e-5,
        moe_layer_freq=[0] * LAYERS,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        n_group=1,
        topk_group=1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        norm_topk_prob=True,
    )
    shapes = [_layer(layer, heads, 2 * HEAD_WIDTH) for layer, heads in enumerate((2, 4, 4, 2))]
    return _write_windows(folder, shapes)


def write_alike_halves(folder: Path, width: int = HEAD_WIDTH, window: int = SEEN) -> Path:
    """Laguna without experts and gates: as above, but all layers are alike, and the window is the same in both engines.

    SGLang's has one token less before the current one. GPUs have no kernels for heads as narrow as HEAD_WIDTH.
    """
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    write_config(
        folder,
        architectures=["LagunaForCausalLM"],
        model_type="laguna",
        layer_types=["sliding_attention" if layer in (1, 2) else "full_attention" for layer in range(LAYERS)],
        mlp_layer_types=["dense"] * LAYERS,
        mlp_only_layers=list(range(LAYERS)),  # as vLLM 0.26 reads it
        head_dim=width,
        sliding_window=window,
        rope_parameters={"full_attention": rope, "sliding_attention": rope},
        gating=False,
        num_experts=4,
        num_experts_per_tok=2,
    )
    norms = _head_norms(width)
    return _write_windows(folder, [_layer(layer, KV_HEADS, width, width, **norms) for layer in range(LAYERS)])


def write_gpt_oss(folder: Path) -> Path:
    """gpt-oss without packed weights: every second layer has a window, all have sinks and experts."""
    width, inner, experts = 64, HIDDEN, 4
    rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    write_config(
        folder,
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        head_dim=width,
        layer_types=ALTERNATING,
        sliding_window=GPT_OSS_WINDOW,
        rope_parameters=rope | {"truncate": False, "original_max_position_embeddings": 4096},
        attention_bias=True,
        intermediate_size=inner,
        num_local_experts=experts,
        num_experts_per_tok=2,
        swiglu_limit=7.0,
    )
    shapes = dict(ENDS)
    for layer in range(LAYERS):
        dense = _layer(layer, KV_HEADS, width, width)
        shapes |= {name: shape for name, shape in dense.items() if ".mlp." not in name}
        at, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        shapes |= {f"{at}.{name}_proj.bias": dense[f"{at}.{name}_proj.weight"][:1] for name in "qkvo"}
        shapes |= {f"{at}.sinks": (QUERY_HEADS,), f"{mlp}.router.weight": (experts, HIDDEN)}
        shapes |= {f"{mlp}.router.bias": (experts,), f"{mlp}.experts.gate_up_proj": (experts, HIDDEN, 2 * inner)}
        shapes |= {f"{mlp}.experts.gate_up_proj_bias": (experts, 2 * inner)}
        shapes |= {f"{mlp}.experts.down_proj": (experts, inner, HIDDEN)}
        shapes |= {f"{mlp}.experts.down_proj_bias": (experts, HIDDEN)}
    return write_weights(folder, shapes, GAINS | _raised(0, 2), 1.0)


def write_gemma4(folder: Path) -> Path:
    """Gemma 4 without experts. Every second layer sees the last WINDOW tokens, with KV_HEADS heads.

    The others have one head, twice as wide, and make keys and values of one matrix. Their rows are half as long, so
    vLLM's blocks of them have twice as many tokens.
    """
    wide = 2 * HEAD_WIDTH
    write_config(
        folder,
        architectures=["Gemma4ForCausalLM"],
        model_type="gemma4_text",
        layer_types=ALTERNATING,
        sliding_window=WINDOW,
        global_head_dim=wide,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        hidden_activation="gelu_pytorch_tanh",
        rope_parameters={"sliding_attention": GEMMA_ROPE, "full_attention": GEMMA_ROPE},
    )
    shapes = dict(ENDS)
    for layer in range(LAYERS):
        heads, width = (1, wide) if layer % 2 else (KV_HEADS, HEAD_WIDTH)
        shapes |= _layer(layer, heads, width, width, **_head_norms(width), **GEMMA_NORMS)
        if layer % 2:
            del shapes[f"model.layers.{layer}.self_attn.v_proj.weight"]
    return write_weights(folder, shapes, GAINS, 1.0)


def write_gemma3(folder: Path) -> Path:
    """Every second layer sees the last WINDOW tokens, and vLLM keeps no more of it; SGLang keeps all layers alike."""
    write_config(
        folder,
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        layer_types=ALTERNATING,
        sliding_window=WINDOW,
        query_pre_attn_scalar=HEAD_WIDTH,
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        rope_local_base_freq=10000.0,
        rope_parameters={"sliding_attention": GEMMA_ROPE, "full_attention": GEMMA_ROPE},
    )
    shapes = {name: shape for name, shape in ENDS.items() if "lm_head" not in name}
    for layer in range(LAYERS):
        shapes |= _layer(layer, KV_HEADS, HEAD_WIDTH, HEAD_WIDTH, **GEMMA_NORMS, **_head_norms(HEAD_WIDTH))
    return write_weights(folder, shapes, GAINS, 1.0)


def write_llama4(folder: Path) -> Path:
    """Llama 4 without experts. Every second layer sees the tokens of its own chunk of CHUNK only."""
    has_chunks = [1 - layer % 2 for layer in range(LAYERS)]
    write_config(
        folder,
        architectures=["Llama4ForCausalLM"],
        model_type="llama4_text",
        no_rope_layers=has_chunks,
        attention_chunk_size=CHUNK,
        intermediate_size_mlp=2 * HIDDEN,
        interleave_moe_layer_step=0,
        moe_layers=[],
    )
    dense = model_shapes(json.loads((folder / "config.json").read_text()))
    shapes = {name.replace(".mlp.", ".feed_forward."): shape for name, shape in dense.items()}
    return write_weights(folder, shapes, GAINS, 1.0)


def _write_windows(folder: Path, layers: list[dict[str, tuple[int, ...]]]) -> Path:
    """What layers 1 and 2 add is raised, or no token would tell whether the rows of their windows are there."""
    shapes = dict(ENDS)
    for layer in layers:
        shapes |= layer
    return write_weights(folder, shapes, GAINS | _raised(1, 2), 1.0)


def _raised(*layers: int) -> dict[str, float]:
    return {f"layers.{layer}.self_attn.{name}": 2.0 for layer in layers for name in ("v_proj", "o_proj")}


def _head_norms(width: int) -> dict[str, tuple[int, ...]]:
    return {name: (width,) for name in ("self_attn.q_norm", "self_attn.k_norm")}


def _layer(
    layer: int, kv_heads: int, key_width: int, value_width: int = HEAD_WIDTH, **more: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    shapes = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (QUERY_HEADS * key_width, HIDDEN),
        "self_attn.k_proj": (kv_heads * key_width, HIDDEN),
        "self_attn.v_proj": (kv_heads * value_width, HIDDEN),
        "self_attn.o_proj": (HIDDEN, QUERY_HEADS * value_width),
        "mlp.gate_proj": (2 * HIDDEN, HIDDEN),
        "mlp.up_proj": (2 * HIDDEN, HIDDEN),
        "mlp.down_proj": (HIDDEN, 2 * HIDDEN),
    }
    return {f"model.layers.{layer}.{name}.weight": shape for name, shape in (shapes | more).items()}


def write_sparse(folder: Path, **changes: object) -> Path:
    """DeepSeek V3.2 without experts: latents, and index keys in every second layer. It chooses up to 2048 tokens."""
    config: dict[str, object] = dict(
        architectures=["DeepseekV32ForCausalLM"],
        model_type="deepseek_v32",
        q_lora_rank=128,
        index_topk=2048,
        index_head_dim=128,
        index_n_heads=4,
        index_topk_freq=2,
        index_skip_topk_offset=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
    )
    return write_latent(folder, **config | changes)


def write_plain_sparse(folder: Path, query_heads: int = QUERY_HEADS, has_images: bool = True) -> Path:
    """MiniMax M3 without experts: K and V in all layers, index keys in all but the first. It chooses 2048 tokens.

    `has_images`: the language model inside a model of images, as it is published. SGLang would want their processor.
    """
    width = 128  # the only one of its kernels
    chooses = [0] + [1] * (LAYERS - 1)
    text: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        dense_intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=query_heads,
        num_key_value_heads=KV_HEADS,
        head_dim=width,
        max_position_embeddings=16384,
        rope_theta=10000.0,
        rotary_dim=width // 2,
        partial_rotary_factor=0.5,
        rms_norm_eps=1e-5,
        use_qk_norm=True,
        qk_norm_type="per_head",
        use_gemma_norm=True,
        hidden_act="swigluoai",
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_layer_freq=[0] * LAYERS,
        num_mtp_modules=0,
        torch_dtype="bfloat16",
        sparse_attention_config=dict(
            use_sparse_attention=True,
            sparse_index_dim=width,
            sparse_num_index_heads=KV_HEADS,
            sparse_topk_blocks=16,
            sparse_block_size=128,
            sparse_disable_index_value=chooses,
            sparse_score_type="max",
            sparse_init_block=0,
            sparse_local_block=1,
            sparse_attention_freq=chooses,
        ),
    )
    inner = {"text_config": text | {"model_type": "minimax_m3_text"}} if has_images else text
    write_config(folder, architectures=["MiniMaxM3SparseForCausalLM"], model_type="minimax_m3_vl", **inner)
    shapes = dict(ENDS)
    norms = _head_norms(width)
    queries = {"self_attn.q_proj": (query_heads * width, HIDDEN), "self_attn.o_proj": (HIDDEN, query_heads * width)}
    index: dict[str, tuple[int, ...]] = {
        "self_attn.index_q_proj": (KV_HEADS * width, HIDDEN),
        "self_attn.index_k_proj": (width, HIDDEN),
        "self_attn.index_q_norm": (width,),
        "self_attn.index_k_norm": (width,),
    }
    for layer in range(LAYERS):
        shapes |= _layer(layer, KV_HEADS, width, width, **queries, **norms, **(index if chooses[layer] else {}))
    return write_weights(folder, shapes, GAINS, 1.0)


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of a model with latents. Its index keys are in the layers that vLLM gives an indexer."""
    inner, heads, rank = config["intermediate_size"], config["num_attention_heads"], config["q_lora_rank"]
    plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
    shapes = dict(ENDS)
    for layer in range(LAYERS):
        named = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.kv_a_proj_with_mqa": (LATENT + ROPE, HIDDEN),
            "self_attn.kv_a_layernorm": (LATENT,),
            "self_attn.kv_b_proj": (heads * (plain + value), LATENT),
            "self_attn.o_proj": (HIDDEN, heads * value),
            "mlp.gate_proj": (inner, HIDDEN),
            "mlp.up_proj": (inner, HIDDEN),
            "mlp.down_proj": (HIDDEN, inner),
        }
        query = (heads * (plain + ROPE), rank or HIDDEN)
        if rank is None:
            named |= {"self_attn.q_proj": query}
        else:
            named |= {"self_attn.q_a_proj": (rank, HIDDEN), "self_attn.q_a_layernorm": (rank,)}
            named |= {"self_attn.q_b_proj": query}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in named.items()}
        if "index_topk" in config and layer % config["index_topk_freq"] == 0:
            shapes |= _indexer(config, f"model.layers.{layer}.self_attn.indexer")
    return shapes


def _indexer(config: dict[str, Any], at: str) -> dict[str, tuple[int, ...]]:
    rank, heads, width = config["q_lora_rank"], config["index_n_heads"], config["index_head_dim"]
    return {
        f"{at}.wq_b.weight": (heads * width, rank),
        f"{at}.wk.weight": (width, HIDDEN),
        f"{at}.weights_proj.weight": (heads, HIDDEN),
        f"{at}.k_norm.weight": (width,),
        f"{at}.k_norm.bias": (width,),
    }
