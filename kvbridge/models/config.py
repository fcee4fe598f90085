"""What a model keeps of each token, read from its config.json: layers, heads, widths, windows. Pure.

A family that has no reader here is refused: guessing which cache it has would say "carried" of one that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvbridge_proto.pool import Layer

from ..adapters.engine.records import State
from ..errors import OperatorError, did_you_mean

Text = Mapping[str, Any]
NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
KIND_OF_LAYER_TYPE = {"full_attention": "full", "sliding_attention": "sliding", "chunked_attention": "chunked"}


@dataclass(frozen=True, slots=True)
class ModelCache:
    """The cache of a model.

    layers      each layer's keys and values, latents, or state; None for a layer that keeps none of its own
    index       the layers with index keys of sparse attention: of 128 fp8 numbers and a scale beside latents, of
                `index_width` plain numbers beside K and V
    ratios      how many tokens a row stands for beside each layer's window, 0 where there is only the window; empty for
                other caches than DeepSeek V4's
    state       what each layer of kind `state` keeps, or each of attention beside it (`has_states_beside`)
    state_dtype    of that state but for its convolution, where the model says so, else ""
    kinds       what else it keeps (`adapters/engine/unsupported.py`)
    drafts      the layers that predict further tokens, with the model's own weights (MTP)
    dtype       of the model's numbers
    kv_dtype    of its cache where the checkpoint says so, else ""
    quantization    of the checkpoint, as SGLang calls it, "" for none
    has_one_pool    SGLang keeps all tokens of its windows, in the pool of the full layers
    has_longer_window    SGLang's windows have one token more than the config says
    has_interleaved_index    the rotary embedding of index keys is interleaved, and SGLang does not rotate them further
    """

    family: str
    layers: tuple[Layer | None, ...]
    index: frozenset[int] = frozenset()
    index_width: int = 128
    ratios: tuple[int, ...] = ()
    state: State | None = None
    state_dtype: str = ""
    has_states_beside: bool = False
    kinds: tuple[str, ...] = ()
    drafts: tuple[Layer, ...] = ()
    dtype: str = "bfloat16"
    kv_dtype: str = ""
    quantization: str = ""
    has_one_pool: bool = False
    has_longer_window: bool = False
    has_interleaved_index: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """How the configs of one model_type are read. `period`: without layer_types, each period-th layer is a full one.

    `drafts`: its own layers that predict further tokens, if a config does not say how many.
    """

    layers: Callable[[Text, Family], list[Layer | None]]
    kinds: tuple[str, ...] = ()
    period: int = 0
    has_one_pool: bool = False
    has_longer_window: bool = False
    index: Callable[[Text, int], frozenset[int]] | None = None
    state: Callable[[Text], State] | None = None
    state_dtype: str = ""
    has_states_beside: bool = False
    drafts: int = 0


def read(config: Text) -> ModelCache:
    """Raises OperatorError for a family that is not known, and for a config without what its family has."""
    text = config
    while (inner := next((text[name] for name in NESTED if isinstance(text.get(name), Mapping)), None)) is not None:
        text = inner
    name = str(text.get("model_type") or config.get("model_type") or "")
    if name == "minimax_m2" and _sparse(text):
        name = "minimax_m3"  # its checkpoint calls the language model so
    family = FAMILIES.get(name)
    if family is None:
        raise OperatorError(
            "model_unknown",
            f"model_type: {name!r}, {did_you_mean(name, FAMILIES)}; needs a pool instead, from an engine that runs the "
            "model: kvbridge status --pool",
        )
    try:
        layers = family.layers(text, family)
        state = family.state(text) if family.state else None
        drafts = _drafts(text, layers, family.drafts)
        index = family.index(text, len(layers) + len(drafts)) if family.index else frozenset()
        ratios = _ratios(text, len(layers) + len(drafts)) if family.layers is _compressed else ()
    except (KeyError, TypeError, ValueError, ZeroDivisionError, IndexError) as error:
        raise OperatorError("bad_model_config", f"model_type {name}: {type(error).__name__}: {error}") from error
    quantization = text.get("quantization_config") or config.get("quantization_config") or {}
    return ModelCache(
        family=name,
        layers=tuple(layers),
        index=index,
        index_width=int(_sparse(text).get("sparse_index_dim") or 128),
        ratios=ratios,
        state=state,
        state_dtype=str(text.get("mamba_ssm_cache_dtype") or text.get("mamba_ssm_dtype") or family.state_dtype),
        has_states_beside=family.has_states_beside,
        kinds=(*family.kinds, *(["index values"] if _has_index_values(text, index) else [])),
        drafts=drafts,
        dtype=str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "bfloat16"),
        kv_dtype=_checkpoint_dtype(quantization),
        quantization=_quantization(quantization),
        has_one_pool=family.has_one_pool,
        has_longer_window=family.has_longer_window,
        has_interleaved_index=bool(text.get("indexer_rope_interleave", False)),
    )


def _index(text: Text, layers: int) -> frozenset[int]:
    """The layers that choose their own tokens. The others use an earlier layer's choice, and keep no index keys.

    As SGLang's `dsa_layer_skips_topk` and vLLM's models/deepseek_v32/attention.py say it. A draft's layers choose.
    """
    depth, types, pattern = _depth(text), text.get("indexer_types"), text.get("index_topk_pattern")
    period, first = int(text.get("index_topk_freq") or 1), int(text.get("index_skip_topk_offset") or 2)

    def shares(layer: int) -> bool:
        if types is not None:
            return layer < len(types) and types[layer] == "shared"
        if pattern is not None:
            return layer < len(pattern) and pattern[layer] == "S"
        return max(layer - first + 1, 0) % period != 0

    return frozenset(layer for layer in range(layers) if layer >= depth or not shares(layer))


def _index_of_some(text: Text, layers: int) -> frozenset[int]:
    """HY V4's sparse layers, but those that use an earlier one's choice. Its drafts choose nothing."""
    sparse, kinds = ("sparse", "sparse_attention", "deepseek_sparse_attention"), text.get("layer_types") or ()
    usual = ["full" if layer % 4 == 1 or not layer else "shared" for layer in range(layers)]
    types = text.get("indexer_types") or usual
    return frozenset(layer for layer, kind in enumerate(kinds) if kind in sparse and types[layer] != "shared")


def _index_of_blocks(text: Text, layers: int) -> frozenset[int]:
    """MiniMax M3's layers that choose blocks. A draft's layers choose."""
    chosen, depth = [int(each) for each in _sparse(text)["sparse_attention_freq"]], _depth(text)
    return frozenset(layer for layer in range(layers) if layer >= depth or chosen[layer])


def _has_index_values(text: Text, index: frozenset[int]) -> bool:
    """Whether a layer that chooses blocks has values to choose by. If a config does not say, all have."""
    chooses = [layer for layer in index if layer < _depth(text)]
    unused = _sparse(text).get("sparse_disable_index_value") or ()
    return bool(_sparse(text)) and any(layer >= len(unused) or not unused[layer] for layer in chooses)


def _sparse(text: Text) -> Text:
    found = text.get("sparse_attention_config")
    return found if isinstance(found, Mapping) else {}


def _checkpoint_dtype(quantization: Mapping[str, Any]) -> str:
    """The KV dtype that a checkpoint brings scales for."""
    named = str(quantization.get("kv_cache_quant_algo") or "").lower()
    return "fp8" if named == "fp8" or quantization.get("kv_cache_scheme") else named


def _quantization(said: Mapping[str, Any]) -> str:
    """What SGLang calls that of the weights: `_resolve_quant_method` in its overrides for MiniMax M3."""
    named, experts = str(said.get("quant_method") or "").lower(), str(said.get("moe_quant_algo") or "").upper()
    is_packed = (experts, said.get("moe_quant_format")) == ("NVFP4", "nvfp4-pack-quantized")
    return "minimax_m3_nvfp4" if named == "mxfp8" and is_packed else named


def _drafts(text: Text, layers: list[Layer | None], usual: int) -> tuple[Layer, ...]:
    said = [text[name] for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if text.get(name) is not None]
    count = int(max(said, default=usual)) * str(text.get("mtp_hybrid_override_pattern") or "*").count("*")
    last = next((layer for layer in reversed(layers) if layer is not None and layer.kind != "state"), None)
    return (last,) * count if last is not None else ()


def _depth(text: Text) -> int:
    return int(text["num_hidden_layers"])


def _width(text: Text) -> int:
    return int(text.get("head_dim") or int(text["hidden_size"]) // int(text["num_attention_heads"]))


def _heads(text: Text) -> int:
    named = ("num_key_value_heads", "num_attention_groups", "num_kv_heads", "multi_query_group_num")
    return int(next((text[name] for name in named if text.get(name)), None) or text["num_attention_heads"])


def _layer(kind: str, heads: int, width: int, window: int = 0, value: int = 0) -> Layer:
    return Layer(kind=kind, kv_heads=heads, key_width=width, value_width=value or width, window=window)  # type: ignore[arg-type]


def _window(text: Text) -> int:
    return int(text.get("sliding_window") or text.get("sliding_window_size") or 0)


def _types(text: Text, period: int) -> list[str]:
    """What each layer is, in the words of `layer_types`. Raises ValueError for any other."""
    depth = _depth(text)
    if types := text.get("layer_types"):
        if unknown := sorted(set(map(str, types)) - set(KIND_OF_LAYER_TYPE)):
            raise ValueError(f"layer_types: {unknown[0]!r}, known are {', '.join(KIND_OF_LAYER_TYPE)}")
        return [str(each) for each in types[:depth]]
    period = int(text.get("sliding_window_pattern") or 0) or period
    if period and _window(text):
        return ["sliding_attention" if (index + 1) % period else "full_attention" for index in range(depth)]
    return ["full_attention"] * depth


def _attention(text: Text, family: Family) -> list[Layer | None]:
    """Keys and values in each layer."""
    heads, width = _heads(text), _width(text)
    kinds = [KIND_OF_LAYER_TYPE[each] for each in _types(text, family.period)]
    return [_layer(kind, heads, width, _window(text) if kind == "sliding" else 0) for kind in kinds]


def _uniform(text: Text, family: Family) -> list[Layer | None]:
    """All layers alike: with a window if the config has one and does not say that it is not used."""
    is_used = text.get("use_sliding_window", text.get("model_type") in ("mistral", "mixtral", "phi3"))
    if text.get("layer_types"):
        return _attention(text, family)
    window = _window(text) if is_used else 0
    first = int(text.get("max_window_layers") or 0) if text.get("use_sliding_window") else 0
    full, sliding = _layer("full", _heads(text), _width(text)), _layer("sliding", _heads(text), _width(text), window)
    return [sliding if window and index >= first else full for index in range(_depth(text))]


def _gemma4(text: Text, family: Family) -> list[Layer | None]:
    """Full layers have wider heads and, where keys are values, fewer. The last layers may read others' KV."""
    windowed = _layer("sliding", _heads(text), _width(text), _window(text))
    full_heads = int(text.get("num_global_key_value_heads") or 0) if text.get("attention_k_eq_v") else 0
    full = _layer("full", full_heads or _heads(text), int(text.get("global_head_dim") or _width(text)))
    own = _depth(text) - int(text.get("num_kv_shared_layers") or 0)
    types = _types(text, family.period)
    return [(full if each == "full_attention" else windowed) if i < own else None for i, each in enumerate(types)]


def _llama4(text: Text, family: Family) -> list[Layer | None]:
    """Layers with rotary positions attend within chunks, each fourth layer to all tokens."""
    chunk, heads, width = int(text["attention_chunk_size"]), _heads(text), _width(text)
    rotated = text.get("no_rope_layers") or [int((index + 1) % 4 != 0) for index in range(_depth(text))]
    return [_layer("chunked", heads, width, chunk) if each else _layer("full", heads, width) for each in rotated]


def _mimo(text: Text, family: Family) -> list[Layer | None]:
    """Windows and full layers with heads and widths of their own; values are narrower than keys."""
    full = _layer("full", _heads(text), _width(text), value=int(text["v_head_dim"]))
    windowed = _layer(
        "sliding",
        int(text["swa_num_key_value_heads"]),
        int(text["swa_head_dim"]),
        _window(text),
        int(text["swa_v_head_dim"]),
    )
    return [windowed if each else full for each in text["hybrid_layer_pattern"]]


def _minimax(text: Text, family: Family) -> list[Layer | None]:
    """Layers that choose blocks keep all of them."""
    return [_layer("full", _heads(text), _width(text))] * _depth(text)


def _latent(text: Text, family: Family) -> list[Layer | None]:
    rope = int(text.get("qk_rope_head_dim") or 0)
    width = int(text["kv_lora_rank"]) + rope
    return [Layer(kind="mla", kv_heads=1, key_width=width, value_width=0, rope_width=rope)] * _depth(text)


def _compressed(text: Text, family: Family) -> list[Layer | None]:
    """DeepSeek V4 and V4.1: a window in each layer, beside most of them rows of several tokens."""
    widths = {"key_width": int(text["head_dim"]), "value_width": 0, "rope_width": int(text["qk_rope_head_dim"])}
    return [Layer(kind="mla", kv_heads=1, window=_window(text), **widths)] * _depth(text)


def _ratios(text: Text, layers: int) -> tuple[int, ...]:
    """A draft's layers have a window only. Of V4.1, layers that are no source of rows read those of one before them.

    Raises ValueError for rows of which we do not know what is beside them.
    """
    sources = text.get("kv_source_layer_ids") or ()
    said = [int(ratio) for ratio in text["compress_ratios"]][: _depth(text)]
    own = [0 if ratio in (1, 2) and layer not in sources else ratio for layer, ratio in enumerate(said)]
    if set(said) - {0, 1, 4, 128, *([2] if sources else [])} or len(own) != _depth(text):
        raise ValueError(f"compress_ratios: {text['compress_ratios']}, known are 0, 1, 4 and 128 for each layer")
    return (*own, *[0] * (layers - len(own)))


def _latents_beside_states(text: Text, family: Family) -> list[Layer | None]:
    full = {int(each) - 1 for each in text["linear_attn_config"]["full_attn_layers"]}
    state = family.state(text).record if family.state else None
    return [layer if index in full else state for index, layer in enumerate(_latent(text, family))]


def _bailing(text: Text, family: Family) -> list[Layer | None]:
    """The last layer of each group is attention; in the third version so are those after the last group."""
    size, state = int(text["layer_group_size"]), _bailing_state(text).record
    grouped = _depth(text) // size * size if KDA_KERNEL in text else _depth(text)
    return [
        layer if (index + 1) % size == 0 or index >= grouped else state
        for index, layer in enumerate(_latent(text, family))
    ]


def _beside_states(text: Text, family: Family) -> list[Layer | None]:
    """Hybrids: `layer_types` or another list says which layers are attention, and which ones have a state."""
    layer, state = _layer("full", _heads(text), _width(text)), family.state(text).record if family.state else None
    depth = _depth(text)
    if types := text.get("layer_types") or text.get("layers_block_type") or text.get("hybrid_override_pattern"):
        attention, states = ("full_attention", "attention", "*"), ("linear_attention", "mamba", "M", "conv")
        return [layer if each in attention else state if each in states else None for each in types]
    if every := text.get("full_attention_interval") or text.get("attn_layer_period"):
        offset = int(text.get("attn_layer_offset", every - 1))
        return [layer if index % every == offset else state for index in range(depth)]
    return [layer] * depth


def _gated_delta(text: Text) -> State:
    named = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    return State.gated_delta(*(int(text[f"linear_{name}"]) for name in named))


def _kda(text: Text) -> State:
    said = text["linear_attn_config"]
    heads, width, kernel = (int(said[name]) for name in ("num_heads", "head_dim", "short_conv_kernel_size"))
    return State.gated_delta(heads, heads, width, width, kernel)


def _bailing_state(text: Text) -> State:
    """Version 2.5 has lightning attention, 3 KDA."""
    heads, width = int(text["num_attention_heads"]), _width(text)
    if KDA_KERNEL not in text:
        return State.lightning(heads, width)
    return State.gated_delta(heads, heads, width, width, int(text[KDA_KERNEL]))


def _jamba(text: Text) -> State:
    channels = int(text["mamba_expand"]) * int(text["hidden_size"])
    return State.mamba1(channels, int(text["mamba_d_state"]), int(text["mamba_d_conv"]))


def _lfm2(text: Text) -> State:
    return State.short_conv(int(text.get("conv_dim") or text["hidden_size"]), int(text.get("conv_L_cache") or 3))


def _nemotron(text: Text) -> State:
    named = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
    return State.mamba2(*(int(text[name]) for name in named))


def _granite(text: Text) -> State:
    named = ("n_heads", "d_head", "d_state", "n_groups", "d_conv")
    return State.mamba2(*(int(text[f"mamba_{name}"]) for name in named))


def _unread(text: Text, family: Family) -> list[Layer | None]:
    """Nothing of it is carried, so nothing is described."""
    return [None] * _depth(text)


UNIFORM = Family(_uniform, has_one_pool=True)
MLA = Family(_latent)
KDA_KERNEL = "short_conv_kernel_size"
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        (
            *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "glm4", "glm4_moe"),
            *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "glm4v_text", "glm4v_moe_text"),
            *("minimax_m2", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "ernie4_5", "ernie4_5_moe", "seed_oss"),
            *("gemma", "granite", "granitemoe", "olmo2", "phi3", "opt", "internlm2"),
        ),
        UNIFORM,
    ),
    "gemma2": Family(_attention, period=2, has_one_pool=True),
    "gemma3_text": Family(_attention, period=6, has_one_pool=True),
    "gpt_oss": Family(_attention, period=2),
    **dict.fromkeys(("beam", "muse_spark_text", "laguna", "flint"), Family(_attention)),
    "step3p5": Family(_attention, has_longer_window=True),
    "gemma4_text": Family(_gemma4, period=6),
    "llama4_text": Family(_llama4),
    "mimo_v2_flash": Family(_mimo, has_longer_window=True),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), MLA),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), Family(_latent, index=_index)),
    "hy_v4": Family(_latent, index=_index_of_some),
    "dots3_note": Family(_unread, ("padded",)),
    **dict.fromkeys(
        ("minimax_m3", "minimax_m3_text", "minimax_m3_vl_text", "minimax_m3_vl"),
        Family(_minimax, index=_index_of_blocks),
    ),
    **dict.fromkeys(("deepseek_v4", "deepseek_v41"), Family(_compressed)),
    **dict.fromkeys(("glm5_next", "glm5_next_text"), Family(_unread, ("compressed", "state", "ring"))),
    "qwen3_next": Family(_beside_states, state=_gated_delta, drafts=1),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), Family(_beside_states, state=_gated_delta)),
    "nemotron_h": Family(_beside_states, state=_nemotron, state_dtype="float32"),
    "granitemoehybrid": Family(_beside_states, state=_granite),
    "falcon_h1": Family(_uniform, state=_granite, has_states_beside=True),
    "jamba": Family(_beside_states, state=_jamba),
    **dict.fromkeys(("lfm2", "lfm2_moe"), Family(_beside_states, state=_lfm2)),
    **dict.fromkeys(("kimi_linear", "kimi_k3"), Family(_latents_beside_states, state=_kda, state_dtype="float32")),
    "bailing_hybrid": Family(_bailing, state=_bailing_state),
    **dict.fromkeys(("minimax_text_01", "inkling_text"), Family(_unread, ("state",))),
    "qwen4_exp_text": Family(_unread, ("state", "ring")),
    "step5": Family(_unread, ("compressed", "ring")),
    "whisper": Family(_unread, ("cross",)),
}
