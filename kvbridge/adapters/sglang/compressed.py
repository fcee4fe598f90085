"""The caches of DeepSeek V4 and V4.1 in SGLang: where each part lies, and which rows an offer or a want names.

Pages of all tokens hold one row for 4 or 128 tokens, and index keys of 4. Those of V4.1 hold one for 1 or 2 tokens, and
index keys of each, in some layers only, whose rows the next layers read. Layers keep a window, in pages of their own,
and the kv and the scores of the tokens that the next row will be made of:
- Of a row of 4: the last tokens of each page of the window, in a ring that the page has. A row needs 8 tokens: those of
  the row before it, too. On the decode side their group has blocks of one token, so rings of other lengths are only
  other numbers. On the prefill side it has blocks of 4, as vLLM, whose prefix cache hands out whole blocks, takes no
  others. The ring may have given up the tokens of a window's first block; they are read again only where that block
  ends a page, and then it is in the ring of the page before, which has them.
- Of a row of 2 or 128: in a ring of each request, at its number in `req_to_token`, of one block of as many tokens, or
  more. Only those of the row that is not whole are read again.
SGLang keeps raw scores, vLLM adds a weight (`ape`) to those for rows of 4 and 128 tokens; for rows of 2 there is none.
So parts of the former have other names than vLLM's, and `engine/scores.py` changes what comes from there. For vLLM a
prompt is computed without its last token: after it the rings have too little of what is read for that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from kvbridge_proto.common import Blocks
from kvbridge_proto.pool import Codec, Group, Layer, Plane
from msgspec.structs import replace

from ...cache_kinds import INDEX_KEY, OPEN_4, RAW, ROTATED_INDEX_KEY, window_start
from ...errors import EngineError, OperatorError
from ..engine.codecs import INDEX_KEYS, INDEX_SCALES, INDEX_WIDTH, V4_FORMS, plain_rows, scaled_rows
from ..engine.memory import CODEC_OF, plane_of
from ..engine.records import WHOLE
from ..engine.scores import Compressor, Scores
from ..engine.unsupported import refusal

KIND = "DeepSeekV4TokenToKVPool"
PARTS = ("DeepSeekV4SingleKVPool", "DeepSeekV4IndexerPool", "CompressStatePool")  # what it is made of
ALL, WINDOW = 0, 1  # groups
RATIOS = (4, 128, 2)  # of rows that are made of several tokens


def _state_group(ratio: int) -> Group:
    """What rows of so many tokens will be made of. Its blocks are not counted yet."""
    if ratio != 4:
        return Group(kind="chunked", block_tokens=ratio, blocks=1, window=ratio)
    return Group(kind="sliding", block_tokens=4, blocks=1, window=OPEN_4)


@dataclass(frozen=True, slots=True)
class Found:
    """What a rank keeps: the record of each layer, the groups, each plane with its tensor, the draft model's layers.

    And what finishes scores that come from vLLM, if that is possible.
    """

    layers: dict[int, Layer]
    groups: tuple[Group, ...]
    planes: list[tuple[torch.Tensor, Plane]]
    drafts: tuple[int, ...]
    scores: Scores | None = None


def is_compressed(pool: Any) -> bool:
    """Whether it is DeepSeek V4's pool."""
    return type(pool).__name__ == KIND


def check(pool: Any) -> None:
    """Raise OperatorError if this pool, or that of a draft model, holds rows in a form that is not carried."""
    if unknown := set(pool.compression_ratios) - {0, 1, *RATIOS}:
        raise refusal("cache_unsupported", "sglang", "compressed", f"KV pool: {KIND} of {sorted(unknown)}")
    states = [each for each in pool.compress_state_pools if each is not None]
    form = getattr(getattr(getattr(pool, "kv_layout", None), "encoding", None), "value", "unknown")
    refused = {
        "a ring of the window's rows for each request": pool.swa_kv_pool is None or pool.swa_req_ring_size is not None,
        "rows of 512 fp8 numbers (--dsv4-attn-backend trtllm)": getattr(pool, "uniform_fp8", False),
        f"rows in the form {form} (SGLANG_DSV4_KV_LAYOUT)": form not in V4_FORMS,
        "sums in place of rows (SGLANG_OPT_USE_ONLINE_COMPRESS)": any(each.online for each in states),
        "index keys in AITER's order": any(each.uses_aiter_fp4_layout for each in pool.index_pools.values()),
    }
    if found := [what for what, is_so in refused.items() if is_so]:
        raise OperatorError("cache_unsupported", f"KV pool: {KIND} with {' and '.join(found)}; needs none of it")
    parts = [pool.swa_kv_pool, *(item and item[2] for item in pool.layer_mapping), *pool.index_pools.values()]
    parts += [*pool.compress_state_pools, *pool.indexer_compress_state_pools]
    if others := sorted({type(each).__name__ for each in parts if each is not None} - set(PARTS)):
        raise refusal("cache_unsupported", "sglang", "compressed", f"KV pool: {KIND} of {' and '.join(others)}")
    if pool.full_to_swa_index_mapping is None:
        raise OperatorError("cache_unsupported", f"KV pool: {KIND} whose window is not in pages: nothing maps slots")
    for dtype in {each.kv_score_buffer.kv_score.dtype for each in states}:
        if dtype not in CODEC_OF:
            raise OperatorError("codec_unknown", f"KV pool: {KIND} with states in {dtype}")


def check_draft(pool: Any, model: Any) -> None:
    """Raise OperatorError unless these are a draft model's layers with a window each, in the model's slots."""
    check(pool)
    if set(pool.compression_ratios) != {0} or pool.full_to_swa_index_mapping is not model.full_to_swa_index_mapping:
        reason = f"draft model's KV pool: {KIND} of {pool.compression_ratios}, must have the model's windows only"
        raise OperatorError("cache_unsupported", reason)


def found(pool: Any, drafts: list[Any], depth: int, is_decoder: bool, model: Any) -> Found:
    """What a rank keeps. A draft's layers come after the model's `depth`, in order. Every rank has all of it whole."""
    page = int(pool.page_size)
    numbers = dict.fromkeys(range(pool._stage_start, pool._stage_end))
    of_ratio = {ratio: _state_group(ratio) for ratio in RATIOS}
    planes = [each for layer in numbers for each in _layer(pool, layer, layer, of_ratio)]
    of_drafts: list[int] = []
    for draft in drafts:
        for layer in range(draft._stage_start, draft._stage_end):
            of_drafts.append(depth + len(of_drafts))
            planes += _layer(draft, layer, of_drafts[-1], of_ratio)
    # The decode side needs no row before the window: its prefix cache hands out rows of all tokens only.
    window = int(pool.sliding_window)
    kept = [
        Group(kind="full", block_tokens=page, blocks=1),
        Group(kind="sliding", block_tokens=page, blocks=1, window=window, begins_inside=is_decoder),
        *(of_ratio[ratio] for ratio in _state_groups(pool)),
    ]
    rope, width = int(pool.qk_rope_head_dim), int(pool.qk_nope_head_dim) + int(pool.qk_rope_head_dim)
    record = Layer(kind="mla", kv_heads=1, key_width=width, value_width=0, rope_width=rope, window=window)
    layers = dict.fromkeys([*numbers, *of_drafts], record)
    return Found(layers, tuple(counted(kept, planes)), planes, tuple(of_drafts), _scores(planes, model))


def _scores(planes: list[tuple[torch.Tensor, Plane]], model: Any) -> Scores | None:
    """What finishes scores: SGLang keeps them without their weight."""
    modules = [module for module in model.modules() if type(module).__name__ == "Compressor" and hasattr(module, "ape")]
    of = {(int(each.layer_id), "index_" * each.is_in_indexer): each for each in modules}
    found = []
    for view, plane in planes:
        if plane.part.startswith(RAW):
            module = of.get((plane.layer, plane.part.removeprefix(RAW).removesuffix("compressor")))
            found.append(module and Compressor(view.squeeze(1), plane.group, partial(_weight, module)))
    return Scores.of(found, -1)


def _weight(compressor: Any) -> torch.Tensor:
    """`ape` as the checkpoint has it: [ratio, W / 2]. SGLang has the halves of its rows one after the other."""
    rows: torch.Tensor = compressor.ape.data.view(-1, int(compressor.head_dim))
    return torch.cat(rows.chunk(2), 1) if compressor.overlap else rows


def counted(groups: Iterable[Group], planes: list[tuple[torch.Tensor, Plane]]) -> Iterator[Group]:
    """The groups of the pool, by number, with as many blocks as all planes have."""
    for number, group in enumerate(groups):
        sizes = [
            view.shape[0] * view.stride(0) * view.element_size() // plane.block_stride
            for view, plane in planes
            if plane.group == number
        ]
        yield replace(group, blocks=min(sizes)) if sizes else group


def _state_groups(pool: Any) -> dict[int, int]:
    """The groups of what the next rows will be made of, by how many tokens such a row stands for."""
    held = {each.ratio for each in pool.compress_state_pools if each is not None}
    return {ratio: 2 + place for place, ratio in enumerate(ratio for ratio in RATIOS if ratio in held)}


def _layer(pool: Any, layer: int, number: int, of_ratio: dict[int, Group]) -> Iterator[tuple[torch.Tensor, Plane]]:
    """The planes of a layer of the pool, under its number in the model's record. `of_ratio`: see `_state_group`."""
    pieces, rows = partial(_pieces, number=number, page=int(pool.page_size)), pool.swa_kv_pool
    yield from pieces(*_latents(rows, layer - pool._stage_start), part="latent", group=WINDOW, ratio=1)
    ratio, place, rows = pool.layer_mapping[layer]
    if layer not in pool.sources_by_ratio.get(ratio, ()):
        return
    yield from pieces(*_latents(rows, place), part="compressed_latent", group=ALL, ratio=ratio)
    if (index := pool.index_pools.get(ratio)) is not None:
        keys, size = index.index_k_with_scale_buffer[place], int(index.page_size)
        codecs = scaled_rows("mxfp4", INDEX_WIDTH) if index.use_fp4_indexer else (INDEX_KEYS, INDEX_SCALES)
        part = ROTATED_INDEX_KEY if ratio == 4 else INDEX_KEY  # `rotate_activation` of compressor_v2.py, not V4.1's
        strides = codecs[0].row_bytes, size * codecs[0].row_bytes, codecs[1].row_bytes
        yield from pieces(keys, codecs, strides, size, part=part, group=ALL, ratio=ratio)
    for name, pools in (("", pool.compress_state_pools), ("index_", pool.indexer_compress_state_pools)):
        if (state := pools[layer]) is not None:
            part = f"{name}compressor" if ratio == 2 else f"{RAW}{name}compressor"
            yield _state(state, part, number, _state_groups(pool)[ratio], of_ratio[ratio].block_tokens)


def _latents(rows: Any, place: int) -> tuple[torch.Tensor, tuple[Codec, Codec], tuple[int, int, int], int]:
    """The first arguments of `_pieces`, for latents."""
    size, form = int(rows.page_size), rows.kv_layout
    return rows.kv_buffer[place], V4_FORMS[form.encoding.value], form.row_addressing(size), size


def _pieces(
    tensor: torch.Tensor,
    codecs: tuple[Codec, Codec],
    strides: tuple[int, int, int],
    rows: int,
    *,
    part: str,
    number: int,
    group: int,
    page: int,
    ratio: int,
) -> Iterator[tuple[torch.Tensor, Plane]]:
    """Of [pages, bytes], with so many `rows` a page: their numbers, and their scales.

    `strides` are those of numbers, where scales begin, and those of scales.
    """
    row, begin, scale = strides
    for codec, more, at, stride in zip(codecs, ("", "_scale"), (0, begin), (row, scale), strict=True):
        shape, steps = (len(tensor), 1, rows, codec.row_bytes), (tensor.stride(0), 0, stride, 1)
        view = tensor.view(torch.uint8).as_strided(shape, steps, int(tensor.storage_offset()) + at)
        where = codec, WHOLE, number, group
        yield view, plane_of(view, *where, part=part + more, block_tokens=page, row_tokens=ratio)


def _state(state: Any, part: str, number: int, group: int, block: int) -> tuple[torch.Tensor, Plane]:
    """Rows of kv and score, in blocks of so many."""
    tensor = state.kv_score_buffer.kv_score
    view = tensor[: len(tensor) // block * block].unflatten(0, (-1, block)).unsqueeze(1)
    codec = plain_rows(CODEC_OF[tensor.dtype], tensor.shape[1], tensor.element_size())
    return view, plane_of(view, codec, WHOLE, number, group, part=part, block_tokens=block)


def beside(
    pool: Any, window: tuple[Blocks, ...], args: Any, state_indices: list[Any] | None, tokens: int, is_decoder: bool
) -> tuple[Blocks, ...]:
    """What the next rows after `tokens` tokens will be made of, as blocks. `window` are those of the window.

    `args` and `state_indices` are SGLang's. These name the block of a row of 128 tokens that is not whole, or the
    request of a row of 2. Raises EngineError.
    """
    from sglang.srt.disaggregation.base.conn import StateType

    if not is_compressed(pool) or not window:
        return ()
    found, groups = [], _state_groups(pool)
    if (number := groups.get(4)) is not None:
        block = _state_group(4).block_tokens
        first = window_start("sliding", OPEN_4, tokens, block)
        found.append(Blocks(number, first // block, tuple(_blocks(pool, window[0], range(first, tokens, block)))))
    for ratio in {2, 128} & groups.keys():
        if state_indices is not None and tokens % ratio:
            (block,) = state_indices[args.state_types.index(StateType.DSV4_REQUEST_STATE)]
            if ratio == 2:
                block = (block * (ring := _ring(pool, 2)) + tokens % ring) // 2
            found.append(Blocks(groups[ratio], tokens // ratio, (int(block),)))
    return tuple(found)


def _ring(pool: Any, ratio: int) -> int:
    return next(int(each.ring_size) for each in pool.compress_state_pools if each is not None and each.ratio == ratio)


def _blocks(pool: Any, window: Blocks, firsts: range) -> Iterator[int]:
    """Which blocks begin with these tokens: as `translate_from_swa_loc_to_state_loc` of SGLang's CompressStatePool.

    A page of the window has a ring.
    """
    page, ring = int(pool.page_size), _ring(pool, 4)
    for token in firsts:
        entry = token // page - window.first
        if not 0 <= entry < len(window.ids):
            raise EngineError("blocks_too_few", f"tokens: {token} is in the window, and has no slot in swa_kv_pool")
        yield (window.ids[entry] * ring + token % ring) // firsts.step
