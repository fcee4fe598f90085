"""Describes SGLang's KV pool as a Pool: its planes, and the allocations that hold them.

A `SWAKVPool` has two halves: layers that see all tokens, and layers with a window. Each half has tensors of its own,
and is a group, because a token has another slot in each (`windows.py`). Any other pool is one half. Index keys of
sparse attention are beside K and V or latents, in the same slots. Recurrent states are in a pool of their own
(`states.py`), and so is all of DeepSeek V4 (`compressed.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from kvbridge_proto.pool import Codec, Engine, Group, Layer, LayerKind, Plane, Shard
from msgspec.structs import replace

from ...cache_kinds import INDEX_KEY, ROTATED_INDEX_KEY
from ...errors import OperatorError
from ..engine.codecs import INDEX_KEYS, INDEX_SCALE_BYTES, INDEX_SCALES, INDEX_WIDTH, plain_rows
from ..engine.memory import CODEC_OF, Memory, plane_of
from ..engine.names import draft_name
from ..engine.records import WHOLE, Heads, model_record
from ..engine.unsupported import DRAFT_POOLS, UNSUPPORTED, draft_refusal, refusal
from . import block_scales, compressed, drafts, states
from .compressed import Found, counted

LAYOUTS = ("nhd", "hnd")
ATTENTION, INDEXER = "RadixAttention", "Indexer"
Modules = dict[tuple[str, int], Any]  # by class and layer
# By the class itself: each subclass stores its rows differently.
POOLS = {
    "MHATokenToKVPool": "kv",
    "MLATokenToKVPool": "latent",
    "SWAKVPool": "halves",
    "DSATokenToKVPool": "latent",  # and index keys
    "MiniMaxSparseKVPool": "kv and index keys",
    "HybridLinearKVPool": "beside states",
    "QSATokenToKVPool": "state",
    compressed.KIND: "rows of several tokens",
    "MHATokenToKVPoolFP4": "packed",
    "MLATokenToKVPoolFP4": "packed",
    block_scales.MXFP8: "kv",
    "MiniMaxM3Nvfp4KVPool": "packed checkpoint",
    "HiSparseDSATokenToKVPool": "host rows",
    **dict.fromkeys(
        [f"Unified{name}" for name in ("MHATokenToKVPool", "MLATokenToKVPool", "HybridLinearKVPool", "SWAKVPool")],
        "unified",
    ),
}
HALF_KINDS = ("MHATokenToKVPool", block_scales.MXFP8)  # what each half of a `SWAKVPool` must be
BESIDE_STATES = (*HALF_KINDS, "MLATokenToKVPool")  # what a `HybridLinearKVPool` may have for attention
WINDOW_GROUP = 1  # the number of the group whose layers have a window; the full layers' is 0


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose rows lie under one block table. `layers` are the model's numbers of the pool's layers, in order.

    `uncounted` is the group, before its blocks are counted. `index` are the index keys of the layers that have some.
    """

    pool: Any
    number: int
    layers: tuple[int, ...]
    heads: Heads
    uncounted: Group
    index: Mapping[int, torch.Tensor]


def describe(
    queue: Any,
    shard: Shard,
    *,
    model_name: str,
    engine_id: str,
    weights: str = "default",
    draft: str = "",
    is_decoder: bool = False,
    replica: int = 0,
) -> Memory:
    """The memory of one rank; `queue` is the scheduler's queue. Raises OperatorError for a pool we cannot describe.

    `draft` is what the operator calls the draft model, "" for the last part of its path.
    """
    from sglang.version import __version__

    check(queue)
    found = _found(queue, shard, is_decoder)
    return Memory.of(
        Engine(kind="sglang", version=__version__[:256], id=engine_id[:256], replica=replica),
        model_record(
            model_name,
            found.layers,
            depth=_depth(queue),
            pp_size=shard.pp_size,
            weights=weights,
            drafts=found.drafts,
            draft=_draft_name(queue, model_name, draft) if found.drafts else "",
        ),
        shard,
        found.groups,
        found.planes,
        found.scores,
    )


def _depth(queue: Any) -> int:
    """How many layers the model itself has."""
    return int(queue.scheduler.model_config.hf_text_config.num_hidden_layers)


def _found(queue: Any, shard: Shard, is_decoder: bool) -> Found:
    model = queue.scheduler.tp_worker.model_runner.model
    if compressed.is_compressed(pool := queue.token_to_kv_pool):
        return compressed.found(pool, drafts.pools(queue), _depth(queue), is_decoder, model)
    modules = _modules(model)
    of_model = _groups(queue, shard, modules, is_decoder)
    of_draft = _draft_layers(queue, shard, modules, states.first_draft(queue, _depth(queue)))
    groups = [*of_model, *of_draft]
    rows = [each for group in groups for each in _planes(group, modules)]
    state = states.found(queue, shard)
    return Found(
        _layers(groups, [plane for _, plane in rows], modules) | (state.layers if state else {}),
        (*counted((group.uncounted for group in of_model), rows), *([state.group] if state else [])),
        [*rows, *(state.planes if state else [])],
        tuple(layer for group in of_draft for layer in group.layers),
    )


def _draft_name(queue: Any, model_name: str, said: str) -> str:
    args = queue.scheduler.server_args
    path = str(args.model_path)
    return said or draft_name(model_name, path, str(args.speculative_draft_model_path or path))


def has_windows(pool: Any) -> bool:
    """Whether its layers with a window have memory of their own."""
    return POOLS.get(type(pool).__name__) == "halves"


def check(queue: Any) -> None:
    """Raise OperatorError if this cache is not supported yet, with SGLang's name for it."""
    pool = queue.token_to_kv_pool
    _check_kind("KV pool", pool)
    if (kind := type(pool).__name__) not in POOLS:
        known = ", ".join(name for name, rows in POOLS.items() if rows not in UNSUPPORTED)
        raise _unsupported(f"KV pool: {kind}, supported are {known}")
    if getattr(queue.scheduler, "enable_hisparse", False):
        raise refusal("cache_unsupported", "sglang", "host rows", "hisparse")
    states.check(queue)
    if (device := queue.metadata_buffers.output_ids.device.type) != "cpu":
        raise _unsupported(f"metadata buffers: on {device}, must be on the CPU")
    if is_compressed := compressed.is_compressed(pool):
        compressed.check(pool)
    if has_windows(pool):
        _check_halves(pool)
    if states.has_states(pool):
        _check_kind("KV pool: HybridLinearKVPool whose full_kv_pool", pool.full_kv_pool)
    if _is_minimax(pool):
        _check_minimax(pool)
    for half in _pools(pool):
        _check_rows(half)
    if states.has_states(pool) and (kind := type(pool.full_kv_pool).__name__) not in BESIDE_STATES:
        raise _unsupported(f"KV pool: HybridLinearKVPool of {kind}, must be of {' or '.join(BESIDE_STATES)}")
    if states.has_states(pool) and not states.attention(pool):
        reason = "KV pool: HybridLinearKVPool of states alone, must have an attention layer on each rank"
        raise _unsupported(f"{reason}; fewer pipeline stages help, unless the model itself has none")
    for draft in drafts.pools(queue):
        _check_kind("draft model's KV pool", draft)
        rows, supported = states.beside(draft), (compressed.KIND,) if is_compressed else DRAFT_POOLS
        if (kind := type(rows).__name__) not in supported:
            raise draft_refusal(kind, supported)
        if (ours := int(draft.page_size)) != (theirs := int(pool.page_size)):
            raise _unsupported(f"draft model's KV pool: pages of {ours} tokens, the model's {theirs}")
        if is_compressed:
            compressed.check_draft(draft, pool)
        else:
            _check_rows(rows)


def _check_kind(place: str, pool: Any) -> None:
    """Raise OperatorError if the pool holds rows that nothing carries."""
    kind = type(pool).__name__
    if POOLS.get(kind) in UNSUPPORTED:
        raise refusal("cache_unsupported", "sglang", POOLS[kind], f"{place}: {kind}")


def _unsupported(reason: str) -> OperatorError:
    return OperatorError("cache_unsupported", reason)


def _check_halves(pool: Any) -> None:
    for name, half, layers in (
        ("full_kv_pool", getattr(pool, "full_kv_pool", None), pool.full_layer_nums),
        ("swa_kv_pool", getattr(pool, "swa_kv_pool", None), pool.swa_layer_nums),
    ):
        found = "none" if half is None else type(half).__name__
        if POOLS.get(found) in UNSUPPORTED:
            raise refusal("cache_unsupported", "sglang", POOLS[found], f"KV pool: SWAKVPool whose {name} is {found}")
        if found not in HALF_KINDS or not layers:
            reason = f"KV pool: SWAKVPool whose {name} is {found} of {layers} layers"
            raise _unsupported(f"{reason}, must be {' or '.join(HALF_KINDS)} of some")
    if pool.full_to_swa_index_mapping is None or pool.swa_req_ring_size is not None:
        reason = "its slots are a ring of each request's" if pool.swa_req_ring_size else "nothing maps slots to it"
        raise _unsupported(f"KV pool: SWAKVPool whose swa_kv_pool is not in pages: {reason}")


def _check_minimax(pool: Any) -> None:
    """Raises OperatorError unless each layer has K and V in slots, and its index keys, if any, are rows of as many."""
    main, keys = pool.main_pool, pool.index_k_pool
    if pool.index_kv_pool is not None:
        raise refusal("cache_unsupported", "sglang", "index values", "KV pool: MiniMaxSparseKVPool")
    found = [type(each).__name__ for each in (main, keys, pool.dense_pool) if each is not None]
    layout = getattr(main, "kv_cache_layout", "nhd")
    if found not in ([HALF_KINDS[0]], [HALF_KINDS[0], "MHATokenToKOnlyPool"]) or layout != "nhd":
        reason = f"KV pool: MiniMaxSparseKVPool of {' and '.join(found)}, layout {layout}"
        raise _unsupported(f"{reason}, must be {HALF_KINDS[0]} and MHATokenToKOnlyPool, layout nhd")
    if keys is not None and keys.dtype not in CODEC_OF:
        known = ", ".join(map(str, CODEC_OF))
        raise OperatorError("codec_unknown", f"KV pool: index keys in {keys.dtype}, supported are {known}")


def _check_rows(pool: Any) -> None:
    if (layout := getattr(pool, "kv_cache_layout", "nhd")) not in LAYOUTS:
        raise _unsupported(f"KV pool: layout {layout}, supported are {', '.join(LAYOUTS)}")
    block_scales.check(pool)
    if block_scales.codec_name(pool) is None and pool.dtype not in CODEC_OF:
        raise OperatorError("codec_unknown", f"KV pool: {pool.dtype}, supported are {', '.join(map(str, CODEC_OF))}")
    if hasattr(pool, "index_key_cache"):
        _check_index(pool)


def _check_index(pool: Any) -> None:
    """Raises OperatorError unless index keys lie in pages as on CUDA: all keys of a page, then their scales."""
    import torch.version

    page, kpool = int(pool.page_size), int(pool.index_kpool)
    if kpool != 1:
        raise refusal("cache_unsupported", "sglang", "compressed", f"KV pool: index keys of {kpool} tokens each")
    widths = {buffer.shape[1] for buffer in pool.index_k_with_scale_buffer}
    expected = page * (INDEX_WIDTH + INDEX_SCALE_BYTES)
    if widths != {expected} or pool.index_page_size != page or torch.version.hip:
        found = " or ".join(map(str, sorted(widths)))
        raise _unsupported(
            f"KV pool: index keys in pages of {found} bytes and {pool.index_page_size} of {page} tokens, must be "
            f"{expected} bytes for all: {INDEX_WIDTH} fp8 numbers of each token in order, then a scale of each; "
            "no setting of the engine helps"
        )


def moved(pool: Any) -> None:
    """Update the addresses that SGLang keeps, after a CPU pool's tensors have moved into shared memory."""
    for half in _pools(pool):
        if hasattr(half, "_init_data_ptrs_and_strides"):
            half._init_data_ptrs_and_strides()
        elif getattr(half, "data_ptrs", None) is not None:
            addresses = [tensor.data_ptr() for tensor in half.kv_buffer]
            half.data_ptrs = torch.tensor(addresses, dtype=torch.uint64, device=half.device)


def _pools(pool: Any) -> tuple[Any, ...]:
    """The pools whose tensors are rows of every token."""
    if compressed.is_compressed(pool):
        return ()
    if _is_minimax(pool):
        return (pool.main_pool,)
    return (pool.full_kv_pool, pool.swa_kv_pool) if has_windows(pool) else (states.beside(pool),)


def _groups(queue: Any, shard: Shard, modules: Modules, is_decoder: bool) -> list[LayerGroup]:
    pool, config = queue.token_to_kv_pool, queue.scheduler.model_config
    if not has_windows(pool):
        (rows,) = _pools(pool)
        layers = _numbers(pool if states.has_states(pool) else rows)
        return [_group(rows, layers, config.get_total_num_kv_heads, shard, _index(pool))]
    if is_decoder and pool.page_size == 1 and queue.scheduler.server_args.disaggregation_decode_enable_radix_cache:
        # SGLang would also hand out slots before the window, which nobody has written.
        raise _unsupported(
            "page_size: 1, must be larger beside layers with a window and a radix cache on the decode side"
        )
    full = _group(pool.full_kv_pool, _mapped(pool, False), config.get_total_num_kv_heads, shard, {})
    layers = _mapped(pool, True)
    # The decode side needs no row before the window: its prefix cache hands out rows of full layers only.
    kept = replace(_window(queue, modules, layers, int(pool.page_size)), begins_inside=is_decoder)
    total = int(config.hf_text_config.swa_num_key_value_heads if config.is_hybrid_swa_compress else full.heads.total)
    window = pool.swa_kv_pool
    return [full, LayerGroup(window, WINDOW_GROUP, layers, _heads(window, total, shard), kept, {})]


def _draft_layers(queue: Any, shard: Shard, modules: Modules, first: int) -> list[LayerGroup]:
    """The draft model's layers, in the same pages as the model's full ones. Adds their modules.

    Each pool counts from a number of its own. Here they come after the model's, in order, from `first` on.
    """
    found: list[LayerGroup] = []
    for runner in drafts.runners(queue):
        pool = runner.token_to_kv_pool
        numbers = {layer: first + place for place, layer in enumerate(_numbers(pool))}
        first += len(numbers)
        own = _modules(runner.model).items()
        modules |= {(kind, numbers[layer]): module for (kind, layer), module in own if layer in numbers}
        index = {numbers[layer]: keys for layer, keys in _index(pool).items()}
        total = runner.model_config.get_total_num_kv_heads
        found.append(_group(states.beside(pool), tuple(numbers.values()), total, shard, index))
    return found


def _group(
    pool: Any, layers: tuple[int, ...], total: Callable[[], int], shard: Shard, index: Mapping[int, torch.Tensor]
) -> LayerGroup:
    """Layers that keep all tokens, of `total()` heads on all ranks; those of latents are whole on each."""
    heads = WHOLE if _is_latent(pool) else _heads(pool, int(total()), shard)
    return LayerGroup(pool, 0, layers, heads, Group(kind="full", block_tokens=int(pool.page_size), blocks=1), index)


def _window(queue: Any, modules: Modules, layers: tuple[int, ...], page: int) -> Group:
    """What these layers keep. Their window counts the current token; SGLang's does not."""
    kept = int(queue.scheduler.sliding_window_size or 0)  # before the current token
    before = {_before(modules, layer) for layer in layers}
    chunk = int(getattr(queue.scheduler.model_config, "attention_chunk_size", None) or 0)
    if before == {0} and 0 < chunk <= kept:
        return Group(kind="chunked", block_tokens=page, blocks=1, window=chunk)
    if len(before) != 1 or not 0 < (tokens := max(before)) <= kept:
        reason = f"window: layers see {sorted(before)} tokens before the current one, SGLang keeps {kept}"
        raise _unsupported(f"{reason}; must be one number, and kept")
    return Group(kind="sliding", block_tokens=page, blocks=1, window=tokens + 1)


def _before(modules: Modules, layer: int) -> int:
    """How many tokens before the current one a layer sees, 0 for all. SGLang's window excludes the current token."""
    return max(0, int(getattr(modules.get((ATTENTION, layer)), "sliding_window_size", None) or 0))


def _numbers(pool: Any) -> tuple[int, ...]:
    if states.has_states(pool):
        return states.attention(pool)
    return tuple(range(pool.start_layer, pool.start_layer + pool.layer_num))


def _index(pool: Any) -> dict[int, torch.Tensor]:
    """The index keys of each layer that has some. One that uses another's choice has none, or no pages."""
    if _is_minimax(pool):
        keys = pool.index_k_pool
        return {layer: keys.k_buffer[at].view(keys.dtype) for layer, at in pool.index_k_layer_id_mapping.items()}
    buffers = pool.index_k_with_scale_buffer if hasattr(pool, "index_key_cache") else ()
    return {layer: keys for layer, keys in zip(_numbers(pool), buffers, strict=False) if len(keys)}


def _mapped(pool: Any, is_window: bool) -> tuple[int, ...]:
    """The model's numbers of the layers of a half, in the order of its tensors."""
    places = sorted((at, layer) for layer, (at, has_window) in pool.layers_mapping.items() if has_window == is_window)
    return tuple(layer for _, layer in places)


def _heads(pool: Any, total: int, shard: Shard) -> Heads:
    heads = Heads.of(total, shard.tp_rank, shard.tp_size)
    if int(pool.head_num) != heads.count:
        reason = f"KV pool: {pool.head_num} heads on rank {shard.tp_rank} of {shard.tp_size}, expected {heads.count}"
        raise OperatorError("heads_unknown", reason)
    return heads


def _is_minimax(pool: Any) -> bool:
    return POOLS.get(type(pool).__name__) == "kv and index keys"


def _is_latent(pool: Any) -> bool:
    return hasattr(pool, "kv_lora_rank")


def _modules(model: Any) -> Modules:
    """This rank's attention layers, which have the scales and windows, and the modules that choose tokens."""
    return {
        (kind, module.layer_id): module
        for module in model.modules()
        if (kind := type(module).__name__) in (ATTENTION, INDEXER)
    }


def _index_part(layer: int, indexer: Any) -> str:
    """`Indexer._maybe_rotate` in sglang/srt/layers/attention/dsa/dsa_indexer.py; on ROCm we refuse such a pool.

    DeepSeek V3.2's keys are rotated, those of GLM-5 are not, where its config.json has `indexer_rope_interleave`.
    """
    if (is_fused := getattr(indexer, "use_dsa_indexer_fusion", None)) is None:
        reason = f"KV pool: index keys of layer {layer}, whose module does not say whether it rotates them"
        raise _unsupported(f"{reason}; no setting of the engine helps")
    return INDEX_KEY if is_fused else ROTATED_INDEX_KEY


def _planes(group: LayerGroup, modules: Modules) -> Iterator[tuple[torch.Tensor, Plane]]:
    """Each plane with its rows as [pages, heads, tokens, width]; tokens may be two axes."""
    page, number = group.uncounted.block_tokens, group.number
    for place, layer in enumerate(group.layers):
        for part, view, codec, heads in _parts(group, place, layer, modules):
            where = codec, heads, layer, number
            yield view, plane_of(view, *where, part=part, block_tokens=page, token_axes=view.dim() - 3)


def _parts(
    group: LayerGroup, place: int, layer: int, modules: Modules
) -> Iterator[tuple[str, torch.Tensor, Codec, Heads]]:
    pool, page, attention = group.pool, group.uncounted.block_tokens, modules.get((ATTENTION, layer))
    parts = {"latent": pool.kv_buffer} if _is_latent(pool) else {"k": pool.k_buffer, "v": pool.v_buffer}
    name = block_scales.codec_name(pool)
    for part, buffers in parts.items():
        if name is not None:
            rows, scales = block_scales.codecs_of(pool, name, part, buffers[place].shape[-1], attention)
            yield part, _paged(buffers[place], page), rows, group.heads
            beside = block_scales.scales_of(pool, part, place, scales.width)
            yield f"{part}_scale", _paged(beside, page), scales, group.heads
            continue
        codec = _codec(pool, part, buffers[place], _scale(attention, "v" if part == "v" else "k"))
        yield part, _paged(buffers[place], page), codec, group.heads
    if (keys := group.index.get(layer)) is None:
        return
    part = _index_part(layer, modules.get((INDEXER, layer))) if _is_latent(pool) else INDEX_KEY
    if keys.dim() == 2:
        yield from _scaled_index_keys(keys, part, page)
    else:
        yield part, _paged(keys, page), _codec(pool, part, keys, _scale(attention, "idx_k")), WHOLE


def _codec(pool: Any, part: str, tensor: torch.Tensor, scale: float) -> Codec:
    size, width = tensor.element_size(), tensor.shape[-1]
    if part == "latent" and width != (numbers := int(pool.kv_lora_rank) + int(pool.qk_rope_head_dim)):
        # Packed: fp8 numbers, four scales, the rope in bf16, in the order of vLLM's `fp8_ds_mla`
        # (`_quantize_k_cache_ref` in sglang/test/kernels/dsa_k_cache_reference.py).
        return Codec(name="fp8_ds_mla", width=numbers, element_bytes=size, row_bytes=width * size)
    # SGLang keeps fp8 as bytes: only the pool says so.
    return plain_rows(CODEC_OF[tensor.dtype if part == INDEX_KEY else pool.dtype], width, size, (scale,))


def _paged(tensor: torch.Tensor, page: int) -> torch.Tensor:
    """Of [slots, heads, width], or of pages already: in the layout `hnd`, and scales."""
    if tensor.dim() > 3:
        return tensor
    (slots, heads, width), (slot, head, element) = tensor.shape, tensor.stride()
    return tensor.as_strided((slots // page, heads, page, width), (page * slot, head, slot, element))


def _scaled_index_keys(tensor: torch.Tensor, part: str, page: int) -> Iterator[tuple[str, torch.Tensor, Codec, Heads]]:
    """Of [pages, bytes], as `_set_k_and_s_triton` in sglang/kernels/ops/kvcache/dsa_index_k_cache.py writes them.

    Keys at token * 128, scales behind all keys of the page. Scales are fp32: powers of two by the fallback, any number
    by `fused_store_index_k_cache`, whose readers take them whole. So they travel byte for byte, and must never be
    packed to exponents.
    """
    for name, at, codec in ((part, 0, INDEX_KEYS), (f"{part}_scale", page * INDEX_WIDTH, INDEX_SCALES)):
        shape, strides = (len(tensor), 1, page, codec.row_bytes), (tensor.stride(0), 0, codec.row_bytes, 1)
        yield name, tensor.as_strided(shape, strides, int(tensor.storage_offset()) + at), codec, WHOLE


def _scale(attention: Any, part: str) -> float:
    """The factor from a stored number to its value; 1 if the checkpoint has none."""
    said = getattr(attention, f"{part}_scale_float", None)
    if said is None and (tensor := getattr(attention, f"{part}_scale", None)) is not None:
        said = float(tensor)
    return 1.0 if said is None else float(said)


def _layers(groups: list[LayerGroup], planes: list[Plane], modules: Modules) -> dict[int, Layer]:
    """A record for each layer of this rank."""
    mine: dict[int, Layer] = {}
    widths = {(plane.layer, plane.part): plane.codec.width for plane in planes}
    for group, layer in ((each, layer) for each in groups for layer in each.layers):
        if _is_latent(group.pool):
            rope, width = int(group.pool.qk_rope_head_dim), widths[layer, "latent"]
            mine[layer] = Layer(kind="mla", kv_heads=1, key_width=width, value_width=0, rope_width=rope)
            continue
        kind: LayerKind = group.uncounted.kind
        window = group.uncounted.window
        if not window and (before := _before(modules, layer)):  # a window whose memory is not given up
            kind, window = "sliding", before + 1
        key, value = widths[layer, "k"], widths[layer, "v"]
        total = group.heads.total
        mine[layer] = Layer(kind=kind, kv_heads=total, key_width=key, value_width=value, window=window)
    return mine
