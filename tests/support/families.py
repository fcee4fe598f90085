"""Families of models and what kvbridge says of each: the one table behind docs/models.md, and of the tests of it.

What a line says of "carried" is not written here: `kvbridge plan --model` says it of the line's config, the adapters
say it of the engines' own objects (tests/integration/adapters/test_families_vllm.py and test_families_sglang.py), and
they must agree. The configs have the fields of the public ones that decide a cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbridge.errors import KVBridgeError
from kvbridge.geometry.compat import Incompatible, verdict
from kvbridge.geometry.shard import assign
from kvbridge.models.config import read
from kvbridge.models.described import pools_of
from kvbridge.models.engine_command import parse

GPU_LLAMA = "[GPU](../tests/system/gpu/vllm_pairs.py)"
GPU_SGLANG = "[GPU](../tests/system/gpu/sglang_pairs.py)"
GPU_ACROSS = "[GPU](../tests/system/gpu/cross_pairs.py)"
GPU_INDEX_KEYS = "[GPU](../tests/system/gpu/sparse_pairs.py)"
GPU_WINDOWS = "[GPU](../tests/system/gpu/window_pairs.py)"
GPU_DRAFTS = "[GPU](../tests/system/gpu/draft_pairs.py)"
GPU_STATES = "[GPU](../tests/system/gpu/state_pairs.py)"
CPU_LLAMA = "[CPU](../tests/system/engines/test_engines.py)"
CPU_SGLANG = "[CPU](../tests/system/sglang/test_pairs.py)"
CPU_ACROSS = "[CPU](../tests/system/cross/test_cross.py)"
CPU_STATES = "[CPU](../tests/system/engines/test_states.py)"
CPU_DRAFTED_STATES = "[CPU](../tests/system/engines/test_state_drafts.py)"
CPU_SGLANG_DRAFTED_STATES = "[CPU](../tests/system/sglang/test_state_drafts.py)"
CPU_SGLANG_STATES = "[CPU](../tests/system/sglang/test_states.py)"
GPU_SGLANG_STATES = "[GPU](../tests/system/gpu/sglang_state_pairs.py)"
CPU_STATES_ACROSS = "[CPU](../tests/system/cross/test_states.py)"
CPU_LATENTS = "[CPU](../tests/system/engines/test_latents.py)"
CPU_INDEX_KEYS = "[CPU](../tests/system/engines/test_index_keys.py)"
CPU_SGLANG_INDEX_KEYS = "[CPU](../tests/system/sglang/test_index_keys.py)"
CPU_PLAIN_INDEX_KEYS = "[CPU](../tests/system/engines/test_plain_index_keys.py)"
CPU_SGLANG_PLAIN_INDEX_KEYS = "[CPU](../tests/system/sglang/test_plain_index_keys.py)"
CPU_SGLANG_LATENTS = "[CPU](../tests/system/sglang/test_latents.py)"
CPU_DRAFTS = "[CPU](../tests/system/engines/test_drafts.py)"
CPU_SGLANG_DRAFTS = "[CPU](../tests/system/sglang/test_drafts.py)"
CPU_DRAFTS_ACROSS = "[CPU](../tests/system/cross/test_drafts.py)"
CPU_WINDOWS = "[CPU](../tests/system/engines/test_windows.py)"
CPU_SGLANG_WINDOWS = "[CPU](../tests/system/sglang/test_windows.py)"


@dataclass(frozen=True)
class Family:
    """A line of the page.

    config      of one of its models; `sides` are options of the prefill and the decode side, by engine
    caches      what vLLM and SGLang call what they keep
    pool        SGLang's class for it; "" if SGLang does not run it
    on_engines  where pairs of real engines ran: vLLM, SGLang, across
    stopped     how many of the 315 recipes it stops, or carries
    """

    name: str
    models: str
    config: Mapping[str, Any]
    caches: str
    pool: str
    sides: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    on_engines: tuple[str, str, str] = ("", "", "")
    stopped: int = 0


def config(model_type: str, layers: int, heads: int, kv_heads: int, width: int, **more: Any) -> dict[str, Any]:
    common = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {"model_type": model_type, **common, "head_dim": width, "torch_dtype": "bfloat16", **more}


def latents(model_type: str, layers: int, **more: Any) -> dict[str, Any]:
    rank = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_nextn_predict_layers": 1}
    return {"model_type": model_type, "num_hidden_layers": layers, "torch_dtype": "bfloat16", **rank, **more}


def windows(layers: int, period: int) -> list[str]:
    """Of each `period` layers the last is a full one."""
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]


CHOOSING = [0] * 3 + [1] * 57
BLOCKS_CHOSEN: dict[str, Any] = {
    "sparse_attention_config": {
        **{"sparse_index_dim": 128, "sparse_num_index_heads": 4, "sparse_topk_blocks": 16, "sparse_block_size": 128},
        **{"sparse_attention_freq": CHOOSING, "sparse_disable_index_value": CHOOSING},
    }
}
NVFP4_EXPERTS = {"quant_method": "mxfp8", "moe_quant_algo": "NVFP4", "moe_quant_format": "nvfp4-pack-quantized"}
LLAMA = config("llama", 32, 32, 8, 128)
INDEX: dict[str, Any] = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
STATES: dict[str, Any] = {
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
}
KDA: dict[str, Any] = {
    **{"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4},
}
FALCON = {"n_heads": 32, "d_head": 128, "d_state": 256, "n_groups": 1, "d_conv": 4}
JAMBA = {"mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4}
MAMBA2: dict[str, Any] = {
    **{"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4},
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
}
DEEPSEEK_V4 = config("deepseek_v4", 43, 64, 1, 512, qk_rope_head_dim=64, sliding_window=128) | {
    **{"compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "num_nextn_predict_layers": 1}
}
V41 = {
    **{"model_type": "deepseek_v41", "compress_ratios": [0, 0, *[2] * 20, *[1] * 20, 0]},
    "kv_source_layer_ids": [2, 7, 12, 17, 22, 27, 32, 37],
}
GEMMA4 = config("gemma4_text", 30, 16, 8, 256, layer_types=windows(30, 6), sliding_window=1024) | {
    **{"num_global_key_value_heads": 2, "global_head_dim": 512, "attention_k_eq_v": True}
}
MIMO = config("mimo_v2_flash", 48, 64, 4, 192, v_head_dim=128, sliding_window=128) | {
    **{"swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128},
    "hybrid_layer_pattern": [int(layer % 6 != 0) for layer in range(48)],
}
ONE_DRAFTS = {
    "vllm": ("", """--speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'"""),
    "sglang": ("", "--speculative-algorithm EAGLE"),
}
BOTH_DRAFT = {engine: (decode, decode) for engine, (_, decode) in ONE_DRAFTS.items()}
FULL, LATENT = "MHATokenToKVPool", "MLATokenToKVPool"

FAMILIES = (
    Family(
        "full attention",
        "Llama 3, Qwen3, Qwen3-Coder, Qwen3-VL, GLM-4.5 to 4.7, MiniMax M2, Hunyuan, ERNIE 4.5, Mistral",
        LLAMA,
        "full",
        FULL,
        on_engines=(f"{GPU_LLAMA}, {CPU_LLAMA}", f"{GPU_SGLANG}, {CPU_SGLANG}", f"{GPU_ACROSS}, {CPU_ACROSS}"),
    ),
    Family(
        "windows, in SGLang without memory of their own",
        "Gemma 2, Gemma 3",
        config("gemma3_text", 62, 32, 16, 128, sliding_window=1024),
        "sliding + full",
        FULL,
        on_engines=(CPU_WINDOWS, CPU_ACROSS, CPU_ACROSS),
    ),
    Family(
        "windows",
        "gpt-oss, Beam, Muse Spark, Laguna",
        config("gpt_oss", 36, 64, 8, 64, sliding_window=128, layer_types=windows(36, 2)),
        "sliding + full",
        "SWAKVPool",
        on_engines=(
            f"{GPU_WINDOWS}, {CPU_WINDOWS}",
            f"{GPU_WINDOWS}, {CPU_SGLANG_WINDOWS}",
            f"{GPU_WINDOWS}, {CPU_ACROSS}",
        ),
    ),
    Family(
        "windows, in vLLM alone",
        "Flint",
        config("flint", 49, 32, 4, 128, sliding_window=513, layer_types=windows(49, 4)),
        "sliding + full",
        "",
    ),
    Family(
        "windows that are one token longer in SGLang",
        "Step-3.5, Step-3.7",
        config("step3p5", 45, 64, 8, 128, sliding_window=512, layer_types=windows(45, 4)),
        "sliding + full",
        "SWAKVPool",
        on_engines=(CPU_WINDOWS, CPU_SGLANG_WINDOWS, ""),
    ),
    Family(
        "chunks",
        "Llama 4",
        {"text_config": config("llama4_text", 48, 40, 8, 128, attention_chunk_size=8192)},
        "chunked + full",
        "SWAKVPool",
        on_engines=(CPU_WINDOWS, "", ""),
    ),
    Family(
        "windows with heads and widths of their own",
        "Gemma 4",
        {"text_config": GEMMA4},
        "sliding + full",
        "SWAKVPool",
        on_engines=(CPU_WINDOWS, "", ""),
    ),
    Family(
        "values narrower than keys",
        "MiMo V2",
        MIMO,
        "sliding + full, K 192 and V 128",
        "SWAKVPool",
        on_engines=("", "[CPU](../tests/system/sglang/test_windows.py)", ""),
    ),
    Family(
        "latents",
        "DeepSeek V3 and R1, Kimi K2, Mistral Large 3, GLM-4.7-Flash",
        latents("deepseek_v3", 61),
        "MLA",
        LATENT,
        on_engines=(CPU_LATENTS, CPU_SGLANG_LATENTS, CPU_ACROSS),
        stopped=25,
    ),
    Family(
        "latents with drafts on both sides",
        "the same with MTP",
        latents("deepseek_v3", 61),
        "MLA, and the draft's layers",
        LATENT,
        sides=BOTH_DRAFT,
        on_engines=(f"{GPU_DRAFTS}, {CPU_DRAFTS}", f"{GPU_DRAFTS}, {CPU_SGLANG_DRAFTS}", CPU_DRAFTS_ACROSS),
        stopped=13,
    ),
    Family(
        "latents with drafts on the decode side",
        "the same with MTP",
        latents("deepseek_v3", 61),
        "MLA, and the draft's layers",
        LATENT,
        sides=ONE_DRAFTS,
        on_engines=(f"{GPU_DRAFTS}, {CPU_DRAFTS}", f"{GPU_DRAFTS}, {CPU_SGLANG_DRAFTS}", ""),
    ),
    Family(
        "latents and index keys",
        "GLM-5.x whose config.json has indexer_rope_interleave: true (5.2)",
        latents("glm_moe_dsa", 78, indexer_rope_interleave=True, **INDEX),
        "MLA, index keys",
        "DSATokenToKVPool",
        on_engines=(f"{GPU_INDEX_KEYS}, {CPU_INDEX_KEYS}", CPU_SGLANG_INDEX_KEYS, CPU_ACROSS),
        stopped=51,
    ),
    Family(
        "latents and index keys that SGLang rotates",
        "DeepSeek V3.2, other GLM-5.x",
        latents("deepseek_v32", 61, **INDEX),
        "MLA, index keys",
        "DSATokenToKVPool",
        on_engines=(f"{GPU_INDEX_KEYS}, {CPU_INDEX_KEYS}", CPU_SGLANG_INDEX_KEYS, CPU_ACROSS),
    ),
    Family(
        "latents, of some layers index keys",
        "HY V4",
        latents("hy_v4", 34, layer_types=["full_attention"] * 2 + ["sparse"] * 32, **INDEX),
        "MLA, index keys",
        "",
    ),
    Family(
        "padded latents",
        "Dots 3 Note (SGLang's pool for it is refused, too)",
        latents("dots3_note", 48, **INDEX),
        "MLA as wide as its windows' latents, index keys",
        "",
    ),
    Family(
        "full attention and index keys",
        "MiniMax M3",
        {"model_type": "minimax_m3_vl", "text_config": config("minimax_m3", 60, 64, 4, 128, **BLOCKS_CHOSEN)},
        "full, index keys",
        "MiniMaxSparseKVPool",
        on_engines=(
            f"{GPU_INDEX_KEYS}, {CPU_PLAIN_INDEX_KEYS}",
            CPU_SGLANG_PLAIN_INDEX_KEYS,
            CPU_ACROSS,
        ),
        stopped=96,
    ),
    Family(
        "full attention and index keys, both packed by SGLang on Blackwell",
        "MiniMax M3 with experts in NVFP4",
        {
            "model_type": "minimax_m3_vl",
            "text_config": config("minimax_m3", 60, 64, 4, 128, **BLOCKS_CHOSEN),
            "quantization_config": NVFP4_EXPERTS,
        },
        "full, index keys",
        "MiniMaxM3Nvfp4KVPool",
    ),
    Family(
        "compressed latents",
        "DeepSeek V4",
        DEEPSEEK_V4,
        "latents of 4 and 128 tokens, windows, compressor states, index keys",
        "DeepSeekV4TokenToKVPool",
        sides=ONE_DRAFTS,
        on_engines=(
            "[CPU](../tests/system/engines/test_compressed.py)",
            "",
            "[CPU](../tests/system/cross/test_compressed.py)",
        ),
        stopped=90,
    ),
    Family(
        "compressed latents with windows that are computed again",
        "DeepSeek V4.1",
        DEEPSEEK_V4 | V41,
        "latents of 1 and 2 tokens that layers share, windows, rings, index keys",
        "DeepSeekV4TokenToKVPool",
    ),
    Family(
        "states and full attention",
        "Qwen3-Next, Qwen3.5 to 3.8",
        config("qwen3_next", 48, 16, 2, 256, **STATES),
        "Gated DeltaNet states, full",
        "HybridLinearKVPool",
        on_engines=(f"{GPU_STATES}, {CPU_STATES}", f"{GPU_SGLANG_STATES}, {CPU_SGLANG_STATES}", CPU_STATES_ACROSS),
        stopped=16,
    ),
    Family(
        "states and full attention with drafts on both sides",
        "the same with MTP",
        config("qwen3_next", 48, 16, 2, 256, **STATES),
        "Gated DeltaNet states, full, and the draft's layer",
        "HybridLinearKVPool",
        sides=BOTH_DRAFT,
        on_engines=(f"{GPU_STATES}, {CPU_DRAFTED_STATES}", CPU_SGLANG_DRAFTED_STATES, ""),
        stopped=21,
    ),
    Family(
        "states and latents",
        "Kimi-Linear, Kimi K3",
        latents("kimi_linear", 27, linear_attn_config=KDA),
        "KDA states, MLA",
        "HybridLinearKVPool",
        on_engines=(GPU_STATES, "", ""),
        stopped=3,
    ),
    Family(
        "Mamba 2 states and full attention",
        "Nemotron-H, Nemotron 3, Granite 4 H",
        config("nemotron_h", 52, 32, 8, 128, **MAMBA2),
        "Mamba 2 states, full",
        "HybridLinearKVPool",
        on_engines=(f"{GPU_STATES}, {CPU_STATES}", "", ""),
    ),
    Family(
        "Mamba 2 states and full attention in one layer",
        "Falcon-H1",
        config("falcon_h1", 44, 12, 2, 128, **{f"mamba_{name}": size for name, size in FALCON.items()}),
        "Mamba 2 states, full",
        "HybridLinearKVPool",
        on_engines=(f"{GPU_STATES}, {CPU_STATES}", "", ""),
    ),
    Family(
        "Mamba 1 states and full attention",
        "Jamba",
        config("jamba", 32, 32, 8, 128, hidden_size=4096, attn_layer_period=8, attn_layer_offset=4, **JAMBA),
        "Mamba 1 states, full",
        "",
        on_engines=(GPU_STATES, "", ""),
    ),
    Family(
        "convolution states and full attention",
        "LFM2",
        config("lfm2", 16, 32, 8, 64, hidden_size=2048, layer_types=["conv", "conv", "full_attention", "conv"] * 4),
        "convolutions, full",
        "HybridLinearKVPool",
        on_engines=(GPU_STATES, CPU_SGLANG_STATES, ""),
    ),
    Family(
        "lightning states and latents",
        "Ring and Ling 2.5",
        latents("bailing_hybrid", 32, num_attention_heads=64, head_dim=128, layer_group_size=8),
        "lightning states, MLA",
        "HybridLinearKVPool",
        on_engines=(GPU_STATES, "", ""),
    ),
    Family(
        "states, latents, index keys and rings",
        "GLM-5-Next",
        latents("glm5_next", 48, **INDEX),
        "KDA states, index keys of 4 tokens, tail rings",
        "HybridLinearKVPool",
    ),
    Family(
        "states, sparse attention and rings",
        "Qwen4-exp",
        {"text_config": config("qwen4_exp_text", 48, 16, 2, 256)},
        "states, QSA, rings",
        "QSATokenToKVPool",
    ),
    Family(
        "summaries and rings",
        "Step5",
        config("step5", 48, 64, 8, 128),
        "full, summaries of 8 tokens, rings",
        "",
    ),
    Family(
        "windows with convolution states",
        "Inkling",
        {"text_config": config("inkling_text", 48, 64, 8, 128)},
        "sliding + full, sconv",
        "SWAKVPool",
    ),
    Family("cross attention", "Whisper", config("whisper", 32, 20, 20, 64), "cross", ""),
    Family(
        "rows of 4 bits",
        "those of full attention with a cache in NVFP4",
        LLAMA,
        "full, a scale for 16 numbers",
        "MHATokenToKVPool",
        sides=dict.fromkeys(("vllm", "sglang"), ("--kv-cache-dtype nvfp4",) * 2),
    ),
    Family(
        "packed rows",
        "any model with a TurboQuant or UltraQuant cache",
        LLAMA,
        "packed full",
        "",
        sides={"vllm": ("--kv-cache-dtype turboquant_4bit_nc",) * 2},
    ),
)
ENGINES = ("vllm", "sglang")
SIZES = {
    "vllm": ("-tp 2 --block-size 64", "-tp 4 --block-size 16"),
    "sglang": ("--tp 2 --page-size 64", "--tp 4 --page-size 16"),
}


def commands(family: Family, prefill: str, decode: str) -> tuple[str, str]:
    """What starts the two sides, with sizes that differ."""
    engines = (prefill, decode)
    options = [family.sides.get(engine, ("", ""))[side] for side, engine in enumerate(engines)]
    said = [f"{engine} {SIZES[engine][side]} {options[side]}".strip() for side, engine in enumerate(engines)]
    return said[0], said[1]


def obstacles_of(family: Family, prefill: str, decode: str) -> tuple[str, ...]:
    """Why a pair is not carried, as `kvbridge plan --model` has it; empty if it is."""
    model, reasons, pools = read(family.config), [], []
    for role, command in zip(("prefill", "decode"), commands(family, prefill, decode), strict=True):
        try:
            pools.append(pools_of(model, parse(command), family.name, role, role == "decode"))
        except KVBridgeError as error:
            reasons += list(error.reasons)
    if not reasons:
        senders, receivers = pools
        found = [verdict(sender, receiver) for sender in senders for receiver in receivers]
        reasons = [reason for each in found if isinstance(each, Incompatible) for reason in each.reasons]
        if not reasons:
            for receiver in receivers:
                assign(senders, receiver)
    return tuple(dict.fromkeys(reasons))


def is_run(family: Family, engine: str) -> bool:
    return engine == "vllm" or bool(family.pool)


def carried_recipes() -> int:
    """How many of the 315 recipes are carried, by their caches."""
    drafts = next(family for family in FAMILIES if family.sides is BOTH_DRAFT)
    has_drafts = not obstacles_of(drafts, "sglang", "sglang")
    return sum(
        family.stopped
        for family in FAMILIES
        if all(not obstacles_of(family, engine, engine) for engine in ENGINES)
        and (has_drafts or not (set(read(family.config).kinds) or family.sides))
    )
