"""Small models with recurrent states, and their states as vLLM's own layers see them: nothing here knows of planes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from demo.model import HIDDEN, VOCABULARY

GATED: dict[str, Any] = dict(
    model_type="qwen3_next",
    architectures=["Qwen3NextForCausalLM"],
    num_hidden_layers=4,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
    full_attention_interval=4,
    head_dim=64,
    linear_num_value_heads=8,
    linear_num_key_heads=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_conv_kernel_dim=4,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    shared_expert_intermediate_size=128,
    mlp_only_layers=[0, 1, 2],  # vLLM wants one with experts
)
# Its own layer for further tokens counts from 0, and must have experts.
GATED_MTP = GATED | dict(mlp_only_layers=[1, 2, 3], num_nextn_predict_layers=1)
MAMBA2: dict[str, Any] = dict(
    model_type="nemotron_h",
    architectures=["NemotronHForCausalLM"],
    num_hidden_layers=6,
    hybrid_override_pattern="M-M*M*",
    head_dim=64,
    mamba_num_heads=8,
    mamba_head_dim=64,
    ssm_state_size=64,
    n_groups=2,
)
# Of one group: B and C are on every rank.
ONE_GROUP: dict[str, Any] = dict(
    model_type="granitemoehybrid",
    architectures=["GraniteMoeHybridForCausalLM"],
    num_hidden_layers=4,
    layer_types=["mamba", "mamba", "attention", "mamba"],
    mamba_n_heads=8,
    mamba_n_groups=1,
    mamba_d_state=64,
    mamba_d_head=64,
    mamba_d_conv=4,
    mamba_expand=2,
    num_local_experts=0,
    num_experts_per_tok=0,
    shared_intermediate_size=512,
    position_embedding_type="rope",
    attention_multiplier=0.125,
)
# A state and attention in each layer.
BESIDE: dict[str, Any] = dict(
    model_type="falcon_h1",
    architectures=["FalconH1ForCausalLM"],
    num_hidden_layers=3,
    head_dim=64,
    mamba_d_ssm=512,
    mamba_n_heads=8,
    mamba_d_head=64,
    mamba_n_groups=2,
    mamba_d_state=64,
    mamba_d_conv=4,
)
QWEN35: dict[str, Any] = {name: value for name, value in GATED.items() if "expert" not in name} | dict(
    model_type="qwen3_5_text",
    architectures=["Qwen3_5ForCausalLM"],
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [6, 5, 5],
    },
)
MAMBA1: dict[str, Any] = dict(
    model_type="jamba",
    architectures=["JambaForCausalLM"],
    num_hidden_layers=4,
    attn_layer_period=4,
    attn_layer_offset=2,
    num_experts=1,
    num_experts_per_tok=1,
    mamba_d_state=16,
    mamba_dt_rank=16,
)
SHORT_CONV: dict[str, Any] = dict(
    model_type="lfm2",
    architectures=["Lfm2ForCausalLM"],
    num_hidden_layers=4,
    layer_types=["conv", "conv", "full_attention", "conv"],
    conv_L_cache=3,
    conv_dim=HIDDEN,
    block_dim=HIDDEN,
    block_auto_adjust_ff_dim=False,
)
_LATENT: dict[str, Any] = dict(
    num_hidden_layers=4,
    num_key_value_heads=4,
    kv_lora_rank=512,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
# Latents in layer 2. Transformers has neither of these two.
KDA: dict[str, Any] = _LATENT | dict(
    model_type="kimi_linear",
    architectures=["KimiLinearForCausalLM"],
    mla_use_nope=True,
    linear_attn_config=dict(
        kda_layers=[1, 2, 4], full_attn_layers=[3], num_heads=4, head_dim=128, short_conv_kernel_size=4
    ),
)
# Ring 2.5 without experts; its own type of configuration is code beside the checkpoint.
LIGHTNING: dict[str, Any] = _LATENT | dict(
    model_type="deepseek_v2",
    architectures=["BailingMoeV2_5ForCausalLM"],
    layer_group_size=3,
    head_dim=64,
    group_norm_size=4,
    use_qk_norm=True,
    use_bias=False,
    use_qkv_bias=False,
    num_experts=1,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
CONV_ROWS = 3
CYCLE = 3  # tokens
Shapes = dict[str, tuple[int, ...]]  # of weights, by name


def writer(fields: dict[str, Any], faint: float = 0.0) -> Callable[[Path], Path]:
    """Writes a model with these fields."""
    return lambda folder: write_hybrid(folder, fields, faint)


def write_hybrid(folder: Path, fields: dict[str, Any], faint: float = 0.0) -> Path:
    """With weights that any number of ranks loads alike. If `faint`, layers add so much less, and most tokens go on in
    cycles: most drafts are accepted, and what the layers say turns up between them."""
    import torch
    from safetensors.torch import save_file

    usual = dict(vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_attention_heads=4)
    usual |= dict(num_key_value_heads=2, bos_token_id=1, eos_token_id=2, max_position_embeddings=16384)
    usual |= dict(tie_word_embeddings=False)
    said, shapes = _by_hand(usual | fields) if "kv_lora_rank" in fields else _of_transformers(usual, fields)
    generator = torch.Generator().manual_seed(1)
    weights = {name: _weight(name, shape, generator) for name, shape in shapes.items()}
    if faint:
        _go_in_cycles(weights, faint)
    if fields["model_type"] == "nemotron_h":
        weights = {name.replace("model.", "backbone."): weight for name, weight in weights.items()}
    if fields.get("num_nextn_predict_layers"):
        weights |= _module(weights, fields["num_hidden_layers"] - 1)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(said | {"torch_dtype": "bfloat16"}, indent=1))
    return folder


def _weight(name: str, shape: tuple[int, ...], generator: Any) -> Any:
    import torch

    values = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        values = torch.rand(shape, generator=generator)
    elif name.endswith(("dt_bias", "conv1d.bias")):
        values *= 0.3
    elif "conv1d" in name:
        values *= 0.5
    elif len(shape) == 1:
        values = torch.ones(shape)
    elif "embed" not in name:
        values *= (4.0 if "lm_head" in name else 1.2) / shape[-1] ** 0.5
    return values.to(torch.bfloat16)


def _go_in_cycles(weights: dict[str, Any], faint: float) -> None:
    """Have each token's embedding speak for the next of CYCLE tokens, and the layers speak low."""
    import torch

    for name in weights:
        if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
            weights[name] *= faint
    tokens = torch.arange(VOCABULARY - VOCABULARY % CYCLE)
    next_ones = tokens + torch.where(tokens % CYCLE == CYCLE - 1, 1 - CYCLE, 1)
    (embeddings,) = (weight for name, weight in weights.items() if "embed" in name and weight.dim() == 2)
    weights["lm_head.weight"][next_ones] += 0.1 * embeddings[tokens]


def _of_transformers(usual: dict[str, Any], fields: dict[str, Any]) -> tuple[dict[str, Any], Shapes]:
    """The configuration and the weights' shapes of a model that transformers has."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    named = {name: value for name, value in fields.items() if name not in ("model_type", "architectures")}
    config = AutoConfig.for_model(fields["model_type"], **(usual | named))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).state_dict()
    shapes = dict(each for name, weight in model.items() for each in _in_checkpoint(name, tuple(weight.shape)))
    return config.to_dict() | fields, shapes


def _by_hand(config: dict[str, Any]) -> tuple[dict[str, Any], Shapes]:
    """The same of KDA and LIGHTNING."""
    is_kda, wide, heads = config["model_type"] == "kimi_linear", (HIDDEN,), config["num_attention_heads"]
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key, value, inner = config["qk_nope_head_dim"], config["v_head_dim"], config["intermediate_size"]
    attention: Shapes = {"q_proj.weight": (heads * (key + rope), HIDDEN), "o_proj.weight": (HIDDEN, heads * value)}
    attention |= {"kv_a_proj_with_mqa.weight": (latent + rope, HIDDEN), "kv_a_layernorm.weight": (latent,)}
    attention |= {"kv_b_proj.weight": (heads * (key + value), latent)}
    state = _kda(config["linear_attn_config"]) if is_kda else _lightning(heads, config["head_dim"])
    table = "embed_tokens" if is_kda else "word_embeddings"
    shapes: Shapes = {f"model.{table}.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    shapes |= {"model.norm.weight": wide}
    for layer in range(config["num_hidden_layers"]):
        at, mixer = f"model.layers.{layer}", attention if layer == 2 else state
        shapes |= {f"{at}.{name}_layernorm.weight": wide for name in ("input", "post_attention")}
        shapes |= {f"{at}.self_attn.{name}": shape for name, shape in mixer.items()}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (inner, HIDDEN) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, inner)
    return config, shapes


def _kda(config: dict[str, Any]) -> Shapes:
    heads, width = config["num_heads"], config["head_dim"]
    whole = heads * width
    shapes: Shapes = {f"{name}_proj.weight": (whole, HIDDEN) for name in "qkv"}
    shapes |= {f"{name}_conv1d.weight": (whole, 1, config["short_conv_kernel_size"]) for name in "qkv"}
    shapes |= {f"{name}_a_proj.weight": (width, HIDDEN) for name in "fg"}
    shapes |= {f"{name}_b_proj.weight": (whole, width) for name in "fg"}
    shapes |= {"b_proj.weight": (heads, HIDDEN), "A_log": (heads,), "dt_bias": (whole,)}
    return shapes | {"o_norm.weight": (width,), "o_proj.weight": (HIDDEN, whole)}


def _lightning(heads: int, width: int) -> Shapes:
    whole = heads * width
    shapes: Shapes = {"query_key_value.weight": (3 * whole, HIDDEN)}
    shapes |= {f"{name}_layernorm.weight": (width,) for name in ("query", "key")}
    shapes |= {"g_proj.weight": (whole, HIDDEN), "g_norm.weight": (whole,)}
    return shapes | {"dense.weight": (HIDDEN, whole)}


def _module(weights: dict[str, Any], attention: int) -> dict[str, Any]:
    """The layer that predicts a further token: this layer's attention and the first layer's experts again."""
    import torch

    first, last, module = "model.layers.0.mlp.", f"model.layers.{attention}.", "mtp.layers.0."
    made = {name.replace(last, module): each for name, each in weights.items() if last in name and ".mlp." not in name}
    made |= {name.replace(first, f"{module}mlp."): each for name, each in weights.items() if first in name}
    width = len(weights["model.norm.weight"])
    made["mtp.fc.weight"] = torch.cat([torch.eye(width), torch.eye(width)], dim=1).to(torch.bfloat16)
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    return {name: each.clone() for name, each in made.items()} | {
        f"mtp.{name}.weight": weights["model.norm.weight"].clone() for name in norms
    }


def _in_checkpoint(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Experts lie one by one in a checkpoint."""
    if ".experts." not in name:
        yield name, shape
        return
    at, _, part = name.rpartition(".")
    halves = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
    for expert in range(shape[0]):
        yield from ((f"{at}.{expert}.{half}.weight", (shape[1] // len(halves), shape[2])) for half in halves)


def without_checkpoints() -> None:
    """Have Mamba 2's prompts computed in pieces that end where the prefix cache keeps a state.

    On GPUs vLLM takes that state out of the middle of a piece. Its scan on CPUs (0.32) returns the last one only.
    """
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec


def read_states(worker: Any, tables: Sequence[Sequence[int]], tokens: int) -> dict[str, np.ndarray]:
    """On a worker, as bytes after `tokens` tokens: "LAYER.conv PIECE" [channels, rows] and "LAYER.state" [heads, ...].

    `tables` are the request's blocks in each group.
    """
    import torch
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    found = {}
    layers = worker.vllm_config.compilation_config.static_forward_context
    for table, group in zip(tables, worker.model_runner.kv_cache_config.kv_cache_groups, strict=True):
        spec = group.kv_cache_spec
        for name in group.layer_names:
            if not isinstance(layers[name].kv_cache, tuple):
                continue
            block = table[(tokens - 1) // spec.block_size]
            *convs, state = (each[block].clone().cpu() for each in layers[name].kv_cache)
            if not convs and state.dim() == 2:  # a convolution alone
                convs, state = [state], None
            if hasattr(layers[name], "key_dim") and worker.device.type == "cpu":  # Gated DeltaNet, [heads, K, V] there
                heads, values, keys = state.shape
                state = state.view(heads, keys, values).transpose(1, 2)
            number = next(int(part) for part in name.split(".") if part.isdigit())
            parts = {} if state is None else {"state": state}
            for conv in convs:
                rows, at = (conv.T if is_conv_state_dim_first() else conv)[:CONV_ROWS], 0
                for part, size in _pieces(layers[name], rows.shape[1]):
                    parts[part] = rows[:, at : at + size].T
                    at += size
            for part, each in parts.items():
                raw = each.contiguous().view(torch.uint8)
                found[f"{number}.{part}"] = raw.reshape(*each.shape, -1).numpy()
    return found


def _pieces(layer: Any, channels: int) -> Iterator[tuple[str, int]]:
    """The convolution's pieces on a rank: names, and how many channels. Of "same" ones every rank has all."""
    if hasattr(layer, "key_dim"):
        sizes = layer.key_dim, layer.key_dim, layer.value_dim
        yield from ((f"conv {place}", size // layer.tp_size) for place, size in enumerate(sizes))
    elif hasattr(layer, "local_projection_size"):  # KDA
        yield from ((f"conv {place}", layer.local_projection_size) for place in range(3))
    elif not hasattr(layer, "norm"):  # Mamba 1, or a convolution alone
        yield "conv x", channels
    else:
        inner = layer.intermediate_size // layer.tp_size
        yield "conv x", inner
        is_same = layer.norm.n_groups == 1
        yield from ((f"conv {name}{' same' * is_same}", (channels - inner) // 2) for name in "BC")


def of_one_rank(ranks: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The states of all ranks as one rank has them. Raises ValueError if what every rank has is not the same."""
    joined = {}
    for key in {key: None for rank in ranks for key in rank}:
        held = [rank[key] for rank in ranks if key in rank]  # those of the layer's stage
        if key.endswith("same") and any(not np.array_equal(held[0], other) for other in held):
            raise ValueError(f"{key}: ranks have other bytes")
        joined[key] = held[0] if key.endswith("same") else np.concatenate(held)
    return joined
