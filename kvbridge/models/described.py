"""The pools that an engine will have for a model, as its adapter will describe them, before anything is started. Pure.

Where a row lies (layout, blocks, addresses) only the started engine knows, and so do scales: here they are the usual
ones. What decides whether a pair is carried is what an engine's command and the model's config say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvbridge_proto.pool import (
    Codec,
    CodecName,
    Engine,
    Group,
    GroupKind,
    Layer,
    Plane,
    Pool,
    Region,
    Shard,
    Step,
)

from ..adapters.engine.codecs import (
    BLOCK_SCALED,
    CODEC_PER_TOKEN_HEAD,
    INDEX_KEYS,
    INDEX_SCALES,
    INDEX_WIDTH,
    V4_ROWS,
    V4_SCALES,
    head_scaled_rows,
    plain_rows,
    scaled_rows,
)
from ..adapters.engine.records import WHOLE, Heads, model_record
from ..adapters.engine.unsupported import UNSUPPORTED, draft_refusal, refusal
from ..adapters.vllm.backends import BACKENDS
from ..cache_kinds import INDEX_KEY, OPEN_4, RAW, ROTATED_INDEX_KEY, is_one_row
from ..errors import KVBridgeError, OperatorError
from .config import ModelCache
from .engine_command import EngineCommand

BLOCKS = 64  # any number: a plan is about tokens
STATE_BLOCK = 1 << 20  # any number: with vLLM it is max_model_len
CODEC_OF_DTYPE: dict[str, tuple[CodecName, int]] = {
    **dict.fromkeys(("bfloat16", "bf16"), ("bf16", 2)),
    **dict.fromkeys(("float16", "half", "fp16"), ("fp16", 2)),
    **dict.fromkeys(("float32", "float"), ("fp32", 4)),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_inc"), ("fp8_e4m3", 1)),
    "fp8_e5m2": ("fp8_e5m2", 1),
}
PartRows = tuple[str, Codec]  # a plane of a layer before it has a place
CODE = {"vllm": "layer_unsupported", "sglang": "cache_unsupported"}
M3_PACKED = "minimax_m3_nvfp4"
PACKED: dict[str, tuple[CodecName, int]] = {"fp8_ds_mla": ("fp8_ds_mla", 656)}
# DeepSeek V4: blocks of rows of 4 and 128 tokens. In vLLM those of windows, and of what these will be made of, by their
# ratio; in SGLang all are of this size, and see `found` in adapters/sglang/compressed.py.
COMPRESSED_BLOCK, WINDOW_BLOCK = 256, 64
OPEN_BLOCKS = {4: (4, OPEN_4), 128: (8, 128)}  # in vLLM: a block and the window
# Of V4.1 in vLLM, on Hopper: blocks of all rows, of windows, and the ring for rows of 2 tokens.
V41_BLOCK, V41_WINDOW_BLOCK, V41_RING = 64, 32, 8


def pools_of(
    model: ModelCache, command: EngineCommand, name: str, engine_id: str, is_decoder: bool = False
) -> list[Pool]:
    """The pools of all ranks. Raises KVBridgeError with each reason for which the adapter will refuse this cache."""
    errors = [*_refusals(model, command, is_decoder), *_refused_options(model, command, is_decoder)]
    if errors:
        raise OperatorError(errors[0].code, *(reason for error in errors for reason in error.reasons))
    as_run = _as_run(model, command)
    return [
        _pool(as_run, command, name, engine_id, pp_rank, rank, is_decoder)
        for pp_rank in range(command.pp)
        for rank in range(command.pcp * command.tp)
    ]


def _refusals(model: ModelCache, command: EngineCommand, is_decoder: bool) -> Iterator[KVBridgeError]:
    engine, code = command.engine, CODE[command.engine]
    for kind in model.kinds:
        if kind in UNSUPPORTED:
            yield refusal(code, engine, kind, model.family)
    if model.state is not None:
        yield from _refused_states(model, command, is_decoder)
    if model.ratios:
        yield from _refused_rows(model, command)
    if engine == "sglang" and command.drafts in ("dflash", "dspark"):
        yield refusal(code, engine, "beside rows", f"--speculative-algorithm {command.drafts.upper()}")
    elif command.drafts and not (model.drafts and command.has_own_drafts):
        yield OperatorError(
            "model_unknown",
            f"{model.family}: drafts by {command.drafts}, whose layers are not in this config.json; needs a pool "
            "instead, from an engine that runs them: kvbridge status --pool",
        )
    elif command.drafts and engine == "sglang" and _has_window_pool(model, command):
        yield draft_refusal("SWAKVPool")  # the draft's pool is then of the model's class
    if engine == "sglang" and _is_packed_by_sglang(model, command):
        yield refusal(code, engine, "packed checkpoint", "KV pool: MiniMaxM3Nvfp4KVPool, of quantization " + M3_PACKED)
    said = _dtype(model, command, is_decoder)
    plain = {*CODEC_OF_DTYPE, *CODEC_PER_TOKEN_HEAD, *PACKED}
    if said not in plain and not (said in BLOCK_SCALED[engine] and _takes_block_scales(model, command, said)):
        yield refusal("codec_unknown", engine, "packed", f"kv_cache_dtype {said}")
    known = ("", "auto", *(("fp8", "mxfp4") if model.ratios else CODEC_OF_DTYPE))
    if (model.index or model.ratios) and command.index_dtype not in known:
        yield OperatorError(
            "codec_unknown",
            f"--attention-config.indexer_kv_dtype {command.index_dtype}: kvbridge carries index keys in "
            f"{'fp8 and mxfp4' if model.ratios else 'bf16 and fp8'}; needs one of these",
        )
    cut = {layer.kv_heads for layer in model.layers if layer is not None and layer.kind not in ("mla", "state")}
    for heads in sorted(cut):
        if heads % command.tp and command.tp % heads:
            yield OperatorError("bad_option", f"tp size {command.tp}: {heads} KV heads, one must divide the other")


def _takes_block_scales(model: ModelCache, command: EngineCommand, said: str) -> bool:
    """K and V alone. SGLang's pools of 4 bits have no windows of their own (`_build_hybrid_swa_kv_pool`)."""
    is_plain = not (model.index or model.ratios or _has_latents(model))
    return is_plain and (command.engine == "vllm" or said == "mxfp8" or not _has_window_pool(model, command))


def _refused_states(model: ModelCache, command: EngineCommand, is_decoder: bool) -> Iterator[KVBridgeError]:
    """As `state_of` in adapters/vllm/states.py and `check` in adapters/sglang/states.py refuse them."""
    if command.replays_states:
        yield refusal(CODE[command.engine], command.engine, "replayed state", model.family)
    if command.engine == "sglang":
        if command.has_decode_cache and command.has_host_cache and is_decoder:
            found = f"{model.family}: --enable-hierarchical-cache"
            yield refusal("cache_unsupported", "sglang", "state", found)
        return
    if command.pcp > 1:
        reason = f"{model.family}: recurrent states, prefill_context_parallel_size {command.pcp}; needs 1"
        yield OperatorError("context_parallel_unsupported", reason)
    if command.state_mode == "all" and not command.has_private_blocks:
        yield refusal("layer_unsupported", "vllm", "cached state", f"{model.family}: mamba_cache_mode all")
    if command.is_drafting and model.state is not None and not model.state.takes_drafts_back:
        yield refusal("layer_unsupported", "vllm", "drafted state", f"{model.family}: --speculative-config")


def _refused_rows(model: ModelCache, command: EngineCommand) -> Iterator[KVBridgeError]:
    """What engines refuse of DeepSeek V4, `_check` in adapters/vllm/layers.py and `check` in sglang/compressed.py."""
    if command.v4_backend == "trtllm":
        yield OperatorError("cache_unsupported", f"{model.family}: --dsv4-attn-backend trtllm; needs another")
    if command.cp > 1:
        reason = f"{model.family}: rows of several tokens, decode_context_parallel_size {command.cp}; needs 1"
        yield OperatorError("context_parallel_unsupported", reason)
    said = command.kv_cache_dtype
    known = said in ("auto", "fp8_e4m3") if command.engine == "sglang" else said == "auto" or said.startswith("fp8")
    if not (known or _has_plain_rows(command)):
        reason = f"{model.family}: --kv-cache-dtype {said}, which {command.engine} refuses for rows of fp8 and bf16"
        yield OperatorError("codec_unknown", f"{reason}; needs auto")


def _is_v41(model: ModelCache) -> bool:
    """DeepSeek V4.1: rows of 1 or 2 tokens."""
    return not {1, 2}.isdisjoint(model.ratios)


def _has_plain_rows(command: EngineCommand) -> bool:
    """Of DeepSeek V4: `_select_dsv4_attn_cls` in vLLM, which has one more backend of the kind, for SM120."""
    known = "FLASHINFER_MLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV41"
    return command.engine == "vllm" and command.backend.upper() in known


def _refused_options(model: ModelCache, command: EngineCommand, is_decoder: bool) -> Iterator[KVBridgeError]:
    """What an adapter refuses whatever the model."""
    if command.is_hisparse:
        yield refusal(CODE[command.engine], command.engine, "host rows", "hisparse")
    if command.engine == "vllm":
        yield from _refused_by_vllm(model, command)
    else:
        yield from _refused_by_sglang(model, command, is_decoder)


def _refused_by_vllm(model: ModelCache, command: EngineCommand) -> Iterator[KVBridgeError]:
    """As `describe` in the adapter's pool.py, `shard_of` in versions.py and `check_backend` in backends.py."""
    if command.can_sleep:
        yield OperatorError("sleep_mode_unsupported", "enable_sleep_mode: True, must be off")
    if command.pcp > 1 and command.cp > 1:
        sizes = f"prefill_context_parallel_size {command.pcp}, decode_context_parallel_size {command.cp}"
        yield OperatorError("context_parallel_unsupported", f"{sizes}; needs one of them 1")
    if (backend := command.backend.upper()) in ("", "AUTO"):
        return
    if backend not in BACKENDS:
        reason = f"attention backend {backend}, whose order of rows kvbridge does not know; needs another"
        yield OperatorError("backend_unsupported", reason)
    elif (kind := BACKENDS[backend].rows) in UNSUPPORTED:
        yield refusal("layer_unsupported", "vllm", kind, f"attention backend {backend}")
    elif backend == "FLASHINFER_MLA_SPARSE_SM120" and not model.family.startswith("glm"):
        reason = f"attention backend {backend} reads scales of {model.family} as powers of two; needs another"
        yield OperatorError("scales_unknown", reason)


def _refused_by_sglang(model: ModelCache, command: EngineCommand, is_decoder: bool) -> Iterator[KVBridgeError]:
    """As `_check_parallel` in the adapter's manager.py, and `check` and `_groups` in its pool.py."""
    if command.is_unified:
        yield refusal("cache_unsupported", "sglang", "unified", "KV pool: of --enable-unified-memory")
    if command.has_decode_cache and is_decoder and command.block_tokens == 1 and _has_window_pool(model, command):
        reason = "page_size: 1, must be larger beside layers with a window and a radix cache on the decode side"
        yield OperatorError("cache_unsupported", reason)
    for name, size in (("attn_dcp_size", command.attn_dcp), ("attn_cp_size", command.attn_cp if is_decoder else 1)):
        if size != 1:
            yield OperatorError("context_parallel_unsupported", f"{name}: {size}, must be 1")
    switches = (
        ("enable_kv_cache_sharding", command.is_sharded),
        ("enable_dsa_cache_layer_split", command.is_layer_split),
        ("enable_cp_tp_group_sharing", command.shares_groups),
    )
    for name, is_on in switches:
        if is_on:
            yield OperatorError("context_parallel_unsupported", f"{name}: on, must be off")


def _as_run(model: ModelCache, command: EngineCommand) -> ModelCache:
    """The model as this engine runs it."""
    if command.engine != "sglang" or not model.has_longer_window:
        return model
    layers = tuple(layer and _longer(layer) for layer in model.layers)
    return replace(model, layers=layers, drafts=tuple(map(_longer, model.drafts)))


def _longer(layer: Layer) -> Layer:
    if not layer.window:
        return layer
    widths = {"key_width": layer.key_width, "value_width": layer.value_width, "rope_width": layer.rope_width}
    return Layer(kind=layer.kind, kv_heads=layer.kv_heads, window=layer.window + 1, **widths)


def _has_window_pool(model: ModelCache, command: EngineCommand) -> bool:
    """Whether SGLang gives windows memory of their own."""
    held = [layer for layer in model.layers if layer is not None and not is_one_row(layer.kind)]
    alike = len({(layer.kv_heads, layer.key_width, layer.value_width) for layer in held}) == 1
    has_windows = {layer.kind for layer in held} > {"full"}
    return has_windows and not model.has_one_pool and not (command.keeps_all and alike)


def _is_packed_by_sglang(model: ModelCache, command: EngineCommand) -> bool:
    """As `uses_minimax_m3_nvfp4_native_stack` says on Blackwell. Plan takes the GPU for one, but FA3 is Hopper's."""
    chooses_blocks = bool(model.index) and not _has_latents(model)
    return chooses_blocks and (command.quantization or model.quantization) == M3_PACKED and command.backend != "fa3"


def _dtype(model: ModelCache, command: EngineCommand, is_decoder: bool) -> str:
    own = model.dtype if command.dtype == "auto" else command.dtype
    said = (model.kv_dtype or own) if command.kv_cache_dtype == "auto" else command.kv_cache_dtype
    if not (model.index and _has_latents(model)):
        return said
    return _by_vllm(said, command) if command.engine == "vllm" else _by_sglang(said, command, is_decoder)


def _has_latents(model: ModelCache) -> bool:
    return any(layer is not None and layer.kind == "mla" for layer in model.layers)


def _by_vllm(said: str, command: EngineCommand) -> str:
    """What sparse attention makes of a dtype: `_canonicalize_sparse_mla_kv_cache_dtype`, 0.26 to 0.33.

    Without a backend in the command it is Hopper's (platforms/cuda.py): FLASHMLA_SPARSE takes "fp8"; "fp8_e4m3", which
    a checkpoint says, only FLASHINFER_MLA_SPARSE_SM90 does. On B200 FLASHINFER_MLA_SPARSE keeps plain rows of both,
    and for GLM "auto" is fp8 there.
    """
    backend = command.backend.upper()
    is_fp8 = said in CODEC_OF_DTYPE and CODEC_OF_DTYPE[said][0] == "fp8_e4m3"
    takes = is_fp8 if backend == "FLASHMLA_SPARSE" else not backend and command.kv_cache_dtype == "fp8"
    return "fp8_ds_mla" if takes or backend == "FLASHINFER_MLA_SPARSE_SM120" else said


def _by_sglang(said: str, command: EngineCommand, is_decoder: bool) -> str:
    """SGLang 0.5.23 on Hopper: `_dsa_kv_cache_dtype_default`; by a role's backend `calculate_mla_kv_cache_dim`."""
    if command.kv_cache_dtype == "auto":
        return "bfloat16"
    both = command.prefill_backend, command.decode_backend
    is_plain = both[is_decoder] == "trtllm" or both == ("tilelang", "tilelang")
    return "fp8_ds_mla" if said in CODEC_OF_DTYPE and CODEC_OF_DTYPE[said][0] == "fp8_e4m3" and not is_plain else said


def _index_rows(model: ModelCache, command: EngineCommand, said: str) -> tuple[PartRows, ...]:
    """Beside latents: `_index_part` in adapters/sglang/pool.py. Those beside K and V have a dtype of their own.

    In vLLM that is bf16 if no option says otherwise. In SGLang an fp8_e4m3 cache has them in fp8 on H100, and on B200
    with its usual backend (`get_minimax_sparse_index_dtype`), else they are in the model's dtype.
    """
    if _has_latents(model):
        part = ROTATED_INDEX_KEY if command.engine == "sglang" and not model.has_interleaved_index else INDEX_KEY
        return (part, INDEX_KEYS), (f"{part}_scale", INDEX_SCALES)
    own = model.dtype if command.dtype == "auto" else command.dtype
    if command.engine == "vllm":
        own = "bf16" if command.index_dtype in ("", "auto") else command.index_dtype
    elif said in CODEC_OF_DTYPE and CODEC_OF_DTYPE[said][0] == "fp8_e4m3":
        own = "fp8"
    name, size = CODEC_OF_DTYPE[own]
    return ((INDEX_KEY, plain_rows(name, model.index_width, size)),)


def _rows(layer: Layer, said: str) -> Iterator[PartRows]:
    """K and V, or a latent, each with its scales behind it if its dtype has some of its own."""
    parts = [("latent", layer.key_width)] if layer.kind == "mla" else [("k", layer.key_width), ("v", layer.value_width)]
    block_scaled = (BLOCK_SCALED["vllm"] | BLOCK_SCALED["sglang"]).get(said)
    for part, width in parts:
        if layer.kind == "mla" and said in PACKED:
            name, size = PACKED[said]
            yield part, Codec(name=name, width=width, element_bytes=1, row_bytes=size)
        elif said in CODEC_PER_TOKEN_HEAD:
            yield from zip((part, f"{part}_scale"), head_scaled_rows(said, width), strict=True)
        elif block_scaled is not None:
            yield from zip((part, f"{part}_scale"), scaled_rows(block_scaled, width), strict=True)
        else:
            name, size = CODEC_OF_DTYPE["fp8" if said in PACKED else said]
            yield part, plain_rows(name, width, size)


def _compressed_rows(
    command: EngineCommand, layer: Layer, ratio: int, said: str, is_decoder: bool, is_v41: bool
) -> Iterator[tuple[PartRows, Group, int]]:
    """What a layer of DeepSeek V4 keeps: each part, its group, and how many tokens a row of it stands for."""
    is_sglang, width = command.engine == "sglang", layer.key_width
    is_ringed = is_v41 and not is_sglang
    whole = Group(kind="full", block_tokens=V41_BLOCK if is_ringed else COMPRESSED_BLOCK, blocks=BLOCKS)
    window_block = V41_WINDOW_BLOCK if is_ringed else COMPRESSED_BLOCK if is_sglang else WINDOW_BLOCK

    def kept(block: int, window: int, kind: GroupKind = "sliding") -> Group:
        inside = window != OPEN_4 and (is_decoder if is_sglang else command.has_private_blocks)
        windowed = Group(
            kind=kind, block_tokens=block, blocks=BLOCKS, window=window, begins_inside=inside, never_cached=is_ringed
        )
        return whole if command.keeps_all and not is_sglang else windowed

    def state(ratio: int) -> Group:
        if is_ringed:
            return kept(V41_RING, ratio, "chunked")
        if ratio == 4 or not is_sglang:
            return kept(*OPEN_BLOCKS[ratio], "sliding" if ratio == 4 else "chunked")
        return Group(kind="chunked", block_tokens=ratio, blocks=BLOCKS, window=ratio)

    rows = [("", V4_ROWS), ("_scale", V4_SCALES)]
    if _has_plain_rows(command):
        rows = [("", plain_rows(CODEC_OF_DTYPE[said][0], width, CODEC_OF_DTYPE[said][1]))]
    for more, codec in rows:
        yield (f"latent{more}", codec), kept(window_block, layer.window), 1
    if not ratio:
        return
    for more, codec in rows:
        yield (f"compressed_latent{more}", codec), whole, ratio
    raw = RAW if is_sglang and ratio != 2 else ""
    index_key = ROTATED_INDEX_KEY if is_sglang and ratio == 4 else INDEX_KEY
    states = [(f"{raw}compressor", width)] if ratio > 1 else []
    if ratio != 128:
        is_small = (is_sglang and ratio < 4) or command.index_dtype == "mxfp4" or command.has_small_index_keys
        index = scaled_rows("mxfp4", INDEX_WIDTH) if is_small else (INDEX_KEYS, INDEX_SCALES)
        for more, codec in zip(("", "_scale"), index, strict=True):
            yield (f"{index_key}{more}", codec), whole, ratio
    if ratio == 4:
        states.append((f"{raw}index_compressor", INDEX_WIDTH))
    for part, each in states:
        numbers = 2 * each * (2 if ratio == 4 else 1)
        yield (part, plain_rows("fp32", numbers, 4)), state(ratio), 1


def _keepings(
    model: ModelCache, command: EngineCommand, layers: dict[int, Layer], said: str, is_decoder: bool
) -> dict[int, Group]:
    """How each layer keeps its tokens. vLLM makes all pages equal, so layers of other kinds have other blocks.

    Beside states it makes blocks larger than it is told, which matters to nothing.

    Whether a window may begin inside a block: `_groups` in `adapters/sglang/pool.py` and `adapters/vllm/pool.py`.
    """
    block = command.block_tokens
    keeps_all = command.keeps_all if command.engine == "vllm" else not _has_window_pool(model, command)
    kinds: dict[int, tuple[GroupKind, int]] = {}
    for index, layer in layers.items():
        is_whole = not is_one_row(layer.kind) and (keeps_all or layer.kind in ("full", "mla"))
        kinds[index] = ("full", 0) if is_whole else (layer.kind, layer.window)  # type: ignore[assignment]
    tokens = {
        index: sum(codec.row_bytes for _, codec in _rows(layer, said))
        * (1 if layer.kind == "mla" else Heads.of(layer.kv_heads, 0, command.tp).count)
        for index, layer in layers.items()
        if not is_one_row(layer.kind)
    }
    most = max(tokens.values(), default=1)
    is_mixed = command.engine == "vllm" and len({kinds[index] for index in tokens}) > 1
    blocks = {index: block * (most // each if is_mixed and most % each == 0 else 1) for index, each in tokens.items()}
    begins_inside = is_decoder if command.engine == "sglang" else command.has_private_blocks
    return {
        index: Group(
            kind=kinds[index][0],
            block_tokens=blocks.get(index, STATE_BLOCK),
            blocks=BLOCKS,
            window=kinds[index][1],
            begins_inside=begins_inside and bool(kinds[index][1]),
        )
        for index in layers
    }


def _state_codecs(model: ModelCache, command: EngineCommand) -> tuple[tuple[CodecName, int], tuple[CodecName, int]]:
    """Of the convolution and of the state proper. SGLang's environment may name others."""
    is_sglang = command.engine == "sglang"
    own = "bfloat16" if is_sglang else model.dtype if command.dtype == "auto" else command.dtype
    conv = own if command.conv_dtype == "auto" else command.conv_dtype
    state = (
        (model.state_dtype or ("float32" if is_sglang else conv))
        if command.state_dtype == "auto"
        else command.state_dtype
    )
    return CODEC_OF_DTYPE[conv], CODEC_OF_DTYPE[state]


@dataclass(frozen=True, slots=True)
class Rows:
    """One part of a layer before it has a place. A row stands for `row_tokens` tokens."""

    layer: int
    part: str
    codec: Codec
    heads: Heads
    group: Group
    row_tokens: int = 1


def _parts(
    model: ModelCache, command: EngineCommand, layers: dict[int, Layer], tp_rank: int, is_decoder: bool
) -> Iterator[Rows]:
    """What a rank holds of these layers."""
    said = _dtype(model, command, is_decoder)
    if model.ratios:
        for number, layer in layers.items():
            ratio = model.ratios[number]
            rows = _compressed_rows(command, layer, ratio, said, is_decoder, _is_v41(model))
            for (part, codec), group, row_tokens in rows:
                yield Rows(number, part, codec, WHOLE, group, row_tokens)
        return
    keepings = _keepings(model, command, layers, said, is_decoder)
    index_rows = _index_rows(model, command, said) if model.index else ()
    for number, layer in layers.items():
        heads = WHOLE if layer.kind == "mla" else Heads.of(layer.kv_heads, tp_rank, command.tp)
        if is_one_row(layer.kind):
            assert model.state is not None
            codecs = _state_codecs(model, command)
            for part, held, width in model.state.parts(tp_rank, command.tp):
                row = plain_rows(codecs[part == "state"][0], width, codecs[part == "state"][1])
                yield Rows(number, part, row, held, keepings[number])
            continue
        for part, codec in (*_rows(layer, said), *(index_rows if number in model.index else ())):
            yield Rows(number, part, codec, WHOLE if "index_key" in part else heads, keepings[number])


def _pool(
    model: ModelCache,
    command: EngineCommand,
    name: str,
    engine_id: str,
    pp_rank: int,
    rank: int,
    is_decoder: bool,
) -> Pool:
    """Of one of a stage's ranks. Those of prefill context parallelism each have what their tensor-parallel one has."""
    depth = len(model.layers)
    layers = (*model.layers, *(model.drafts if command.drafts else ()))
    drafts = range(depth, len(layers)) if pp_rank == command.pp - 1 else range(0)
    stage = (*_stage(depth, pp_rank, command.pp), *drafts)
    mine = {index: layer for index in stage if (layer := layers[index]) is not None}
    if (
        model.state is not None and model.has_states_beside
    ):  # under numbers after the model's, as the adapter gives them
        mine |= {depth + index: model.state.record for index in mine}
    if not mine:
        raise OperatorError("cache_empty", f"pp rank {pp_rank} of {command.pp}: no layer of it owns any KV")
    parts = list(_parts(model, command, mine, rank % command.tp, is_decoder))
    groups = list(dict.fromkeys(each.group for each in parts))
    planes: list[Plane] = []
    offset = 0
    for each in parts:
        planes.append(_plane(each, groups.index(each.group), offset))
        offset += planes[-1].block_stride * BLOCKS
    return Pool(
        engine=Engine(kind=command.engine, version="", id=engine_id),
        model=model_record(name, mine, depth=depth, pp_size=command.pp, drafts=drafts, draft=name),
        shard=_shard(command, pp_rank, rank),
        groups=tuple(groups),
        regions=(Region(offset),),
        planes=tuple(planes),
        finishes_scores=bool(model.ratios) and 2 not in model.ratios,
    )


def _shard(command: EngineCommand, pp_rank: int, rank: int) -> Shard:
    return Shard(
        tp_rank=rank,
        tp_size=command.pcp * command.tp,
        pp_rank=pp_rank,
        pp_size=command.pp,
        cp_rank=rank % command.cp,
        cp_size=command.cp,
        cp_interleave=command.cp_interleave if command.cp > 1 else 1,
    )


def _plane(rows: Rows, group: int, offset: int) -> Plane:
    """Token after token, each with its heads side by side. A block of states has one row."""
    size, codec = rows.codec.row_bytes, rows.codec
    token = rows.heads.count * size
    count = 1 if is_one_row(rows.group.kind) else rows.group.block_tokens // rows.row_tokens
    return Plane(
        layer=rows.layer,
        part=rows.part,
        group=group,
        offset=offset,
        block_stride=count * token,
        token_axis=(Step(count, token),),
        head_stride=size,
        element_axis=(Step(size // codec.element_bytes, codec.element_bytes),),
        first_head=rows.heads.first,
        heads=rows.heads.count,
        total_heads=rows.heads.total,
        codec=codec,
        row_tokens=rows.row_tokens,
    )


def _stage(layers: int, pp_rank: int, pp_size: int) -> range:
    """The layers of a pipeline stage: what is left over goes to the last stages but one, as both engines do it."""
    each, over = divmod(layers, pp_size)
    sizes = [each] * pp_size
    for place in range(2, over + 2):
        sizes[-place] += 1
    return range(sum(sizes[:pp_rank]), sum(sizes[: pp_rank + 1]))
