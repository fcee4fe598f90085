"""Blocks -> blocks on a GPU: rows of one memory become rows of another in one pass, with no slot between.

What gather and scatter do, in registers: read and convert as gather would, sum what it would have put into the slot,
convert and write as scatter would. So the result and the digest are theirs, bit for bit, and rounding is theirs too:
to the codec on the way, which is the sender's or the receiver's own wherever one of them can be (a conversion is then
one rounding, equal codecs none), and fp32 between rows that have scales of their own on both sides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import tiles
from .codecs import TYPES, cast
from .codecs_ref import DTYPES
from .digest import sum_of, words_of
from .digest_ref import word_bytes
from .form import Form, low_bit, tile_of, tiles_at_once
from .launch import (
    UINTS,
    Kernel,
    Launch,
    access,
    arithmetic,
    check_device,
    check_sums,
    compiled,
    enqueue,
    offsets_of,
    put_columns,
    put_records,
    put_scales,
)
from .prepared_pull import PlacedPull, PulledGroup
from .scales import Steps
from .tables import LaunchTables, Work

ARGUMENTS = [f"{end}_{table}" for end in ("sender", "receiver") for table in ("records", "columns", "scales")]
ARGUMENTS += ["sums", "planes", "places", "heads", "row", "first_tile", "end_tile"]


def pull(
    chunk: PlacedPull,
    sums: torch.Tensor | None,
    work: Work,
    stream: torch.cuda.Stream | None = None,
    programs: int | None = None,
) -> None:
    """Write the receiver's rows from the sender's; the sum64 of the chunk's slot is added to `sums`, int64 [1].

    Enqueued on `stream`, or the current one of `work.device`, in launches of about `work.launch_us` at most, each of
    `programs` programs (CTAs) at most; nothing is allocated or waited for. Places and scales are read before this
    returns, `work` until the launches have run. Both memories must be such as the device can reach: the sender's may be
    a peer's, as `field.Mapped`. Places of the receiver must not repeat, and no row may be read here that is written
    here. ValueError, or NotCompiled as `work` says, before anything is enqueued.
    """
    check_sums(sums, work)
    tables = LaunchTables(work, chunk.recipe.size_bytes)
    lists = _checked(chunk, work, tables)
    total = None if sums is None else sums.data_ptr()
    launches = [_launch(group, lists, total, tables, work) for group in chunk.recipe.groups]
    enqueue(launches, tables, work, stream, programs)


def warm(chunk: PlacedPull, has_sums: bool, work: Work) -> None:
    """Compile what `pull` would launch for these, or NotCompiled, as `work` says. The number of places is no matter."""
    check_sums(None, work)
    tables = LaunchTables(work, chunk.recipe.size_bytes)
    lists = _checked(chunk, work, tables)
    total = work.table.data_ptr() if has_sums else None  # zero is added to it
    compiled([_launch(group, lists, total, tables, work) for group in chunk.recipe.groups], work)


def _checked(chunk: PlacedPull, work: Work, tables: LaunchTables) -> tuple[list[int], list[int]]:
    """The addresses of both ends' offsets."""
    recipe = chunk.recipe
    check_device(recipe.sender, work)
    check_device(recipe.receiver, work)
    return offsets_of(recipe.sender, chunk.senders, tables), offsets_of(recipe.receiver, chunk.receivers, tables)


def _launch(
    packed: PulledGroup, lists: tuple[list[int], list[int]], total: int | None, tables: LaunchTables, work: Work
) -> Launch:
    groups = packed.sender.group, packed.receiver.group
    sender, receiver = (group.form for group in groups)
    aligns = tuple(low_bit(group.near_bits | group.form.stride_bits | 16) for group in groups)
    scales = groups[0].scales(True, work.steps), groups[1].scales(False, work.steps)
    steps = scales[0].steps, scales[1].steps
    key = (pull_tiles, aligns, steps, total is not None, sender.key, receiver.key)
    kernel = work.kernels.get(key)
    if kernel is None:
        kernel = work.kernels[key] = _kernel(sender, receiver, *aligns, *steps, total is not None, work)
    tables_at = [
        address
        for end, of, columns, scaled in zip(packed, lists, kernel.columns, scales, strict=True)
        for address in (put_records(end, of, tables), put_columns(columns, tables), put_scales(scaled, tables))
    ]
    sizes = (groups[0].planes, groups[0].places, sender.heads, kernel.row)
    return Launch(pull_tiles, kernel, kernel.tiles_of(groups[0]), (*tables_at, total or 0, *sizes))


def _kernel(
    sender: Form,
    receiver: Form,
    sender_align: int,
    receiver_align: int,
    sender_steps: Steps,
    receiver_steps: Steps,
    has_sums: bool,
    work: Work,
) -> Kernel:
    align = min(sender_align, receiver_align, low_bit(sender.run_bytes), low_bit(receiver.run_bytes))
    wire = next((form.codecs[1] for form in (sender, receiver) if form.codecs is not None), None)
    if wire is None:
        kind, sizes = "pull_sum" if has_sums else "pull", (min(8, align),) * 3
    else:
        names = [wire if form.codecs is None else form.codecs[0] for form in (sender, receiver)]
        kind, sizes = "pull_cast", tuple(DTYPES[name].itemsize for name in (names[0], wire, names[1]))
        sender_align = min(sender_align, access(sizes[0], max(sizes), True))
        receiver_align = min(receiver_align, access(sizes[2], max(sizes), has_sums))
    tiling = work.tilings[kind]
    row = sender.row_bytes // sizes[0]
    is_whole = receiver.row_scale is not None
    walked = sender if sender.head_stride < sender.token_stride else receiver
    tile = tile_of(walked, row, max(sizes), 16 // min(sizes), tiling, is_whole)
    word = word_bytes(sender.wire_row_bytes) if has_sums else 0
    # Numbers of 8 bits that the processor rounded are written as the words that are summed (see gather.py), or else
    # rounded by arithmetic.
    is_rounded = has_sums and sender.codecs is not None and sizes[1] == 1
    is_joined = is_rounded and receiver.codecs is None and receiver.is_dense
    constants = {
        "PLACES": tile[0],
        "HEADS": tile[1],
        "COLUMNS": tile[2],
        "WIRE": UINTS[sizes[1]],
        "WIRE_CODEC": None if wire is None else TYPES[wire],
        "STEP": low_bit(row | 64),
        "WORD": word,
        "JOINED": is_joined,
        "MANY_HEADS": sender.heads > tile[1],
        "MANY_COLUMNS": row > tile[2],
    }
    is_native = work.is_native and row % 4 == 0
    sender_end = _constants_of(sender, sizes[0], sender_align, tile[2])
    sender_end |= arithmetic(sender, sender_steps, True, work) | {"NATIVE": is_native and (is_joined or not is_rounded)}
    receiver_end = _constants_of(receiver, sizes[2], receiver_align, tile[2])
    receiver_end |= arithmetic(receiver, receiver_steps, False, work) | {"NATIVE": is_native}
    constants |= {f"SENDER_{key}": value for key, value in sender_end.items()}
    constants |= {f"RECEIVER_{key}": value for key, value in receiver_end.items()}
    columns = [
        None if form.is_dense else form.columns(size, size if align >= size else 1)
        for form, size, align in ((sender, sizes[0], sender_align), (receiver, sizes[2], receiver_align))
    ]
    tile_bytes = tile[0] * tile[1] * tile[2] * max(sizes)
    has_own = sender.row_scale is not None or is_whole
    at_once = tiles_at_once("own" if has_own else kind, tile_bytes, align, work.launch_us)
    return Kernel(constants, tiling.warps, tiling.tiles, at_once, row, tile, columns)


def _constants_of(form: Form, size: int, align: int, columns: int) -> dict[str, object]:
    """What the kernel knows of one end's memory, whose elements have `size` bytes, when it is compiled."""
    return {
        "TYPE": UINTS[size],
        "CODEC": None if form.codecs is None else TYPES[form.codecs[0]],
        "ALIGN": align,
        "RUN": columns if form.is_dense else min(columns, low_bit(form.run_bytes // size)),
        "DENSE": form.is_dense,
        "SCALE_AT": 0 if form.row_scale is None else form.row_scale.at,
        "SCALE_SKEW": 0 if form.row_scale is None else form.row_scale.head_stride - form.head_stride,
    }


@triton.jit(do_not_specialize=ARGUMENTS)
def pull_tiles(
    sender_records: tl.int64,
    sender_columns: tl.int64,
    sender_scales: tl.int64,
    receiver_records: tl.int64,
    receiver_columns: tl.int64,
    receiver_scales: tl.int64,
    sums: tl.int64,
    planes: tl.int32,
    places: tl.int32,
    heads: tl.int32,
    row: tl.int32,
    first_tile: tl.int32,
    end_tile: tl.int32,
    PLACES: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIRE: tl.constexpr,
    WIRE_CODEC: tl.constexpr,
    STEP: tl.constexpr,
    WORD: tl.constexpr,
    JOINED: tl.constexpr,
    MANY_HEADS: tl.constexpr,
    MANY_COLUMNS: tl.constexpr,
    SENDER_TYPE: tl.constexpr,
    SENDER_CODEC: tl.constexpr,
    SENDER_ALIGN: tl.constexpr,
    SENDER_RUN: tl.constexpr,
    SENDER_DENSE: tl.constexpr,
    SENDER_MULTIPLY: tl.constexpr,
    SENDER_DIVIDE: tl.constexpr,
    SENDER_NATIVE: tl.constexpr,
    SENDER_SCALE_AT: tl.constexpr,
    SENDER_SCALE_SKEW: tl.constexpr,
    RECEIVER_TYPE: tl.constexpr,
    RECEIVER_CODEC: tl.constexpr,
    RECEIVER_ALIGN: tl.constexpr,
    RECEIVER_RUN: tl.constexpr,
    RECEIVER_DENSE: tl.constexpr,
    RECEIVER_MULTIPLY: tl.constexpr,
    RECEIVER_DIVIDE: tl.constexpr,
    RECEIVER_NATIVE: tl.constexpr,
    RECEIVER_SCALE_AT: tl.constexpr,
    RECEIVER_SCALE_SKEW: tl.constexpr,
):
    SIZE: tl.constexpr = WIRE.primitive_bitwidth // 8
    if WORD:
        total = tl.zeros([PLACES * HEADS, COLUMNS * SIZE // WORD], tl.uint64)
    tile = first_tile + tl.program_id(0)
    while tile < end_tile:  # a `for` over tensors stops the interpreter under numpy 2.4
        first_column, first_head, first_place, plane = tiles.split(
            tile, places, heads, row, PLACES, HEADS, COLUMNS, MANY_HEADS, MANY_COLUMNS
        )
        sender, i_row, i_head, m_row = tiles.rows(sender_records, plane, first_head, first_place, places, PLACES, HEADS)
        receiver, _, _, _ = tiles.rows(receiver_records, plane, first_head, first_place, places, PLACES, HEADS)
        i_column, m_column = tiles.columns_of(first_column, row, COLUMNS, STEP)
        mask = m_row[:, None] & m_column[None, :]
        o_column = tiles.in_memory(sender_columns, i_column, m_column, SENDER_TYPE, SENDER_ALIGN, SENDER_DENSE)
        elements = tiles.read(sender, o_column, mask, SENDER_TYPE, SENDER_ALIGN, SENDER_RUN)
        if SENDER_CODEC is not None:
            own = sender + SENDER_SCALE_AT + i_head.to(tl.int64) * SENDER_SCALE_SKEW
            elements = cast(
                elements, SENDER_CODEC, WIRE_CODEC, sender_scales, planes, plane, heads, i_head,
                SENDER_MULTIPLY, SENDER_DIVIDE, SENDER_NATIVE, own, m_row,
            )  # fmt: skip
        if WORD:
            words = words_of(elements, WORD)
            position = tiles.start(sender_records, plane) + i_row * row * SIZE
            total += sum_of(words, position + first_column * SIZE, WORD)
        if JOINED:
            MANY: tl.constexpr = WORD // SIZE
            i_word, m_word = tiles.columns_of(first_column // MANY, row // MANY, words.shape[1], STEP // MANY)
            o_word = tiles.in_slot(i_word, words.dtype, RECEIVER_ALIGN)
            tiles.write(receiver, o_word, words, m_row[:, None] & m_word[None, :], RECEIVER_ALIGN, words.shape[1])
        else:
            if RECEIVER_CODEC is not None:
                own = receiver + RECEIVER_SCALE_AT + i_head.to(tl.int64) * RECEIVER_SCALE_SKEW
                elements = cast(
                    elements, WIRE_CODEC, RECEIVER_CODEC, receiver_scales, planes, plane, heads, i_head,
                    RECEIVER_MULTIPLY, RECEIVER_DIVIDE, RECEIVER_NATIVE, own, m_row,
                )  # fmt: skip
            o_column = tiles.in_memory(
                receiver_columns, i_column, m_column, RECEIVER_TYPE, RECEIVER_ALIGN, RECEIVER_DENSE
            )
            tiles.write(receiver, o_column, elements, mask, RECEIVER_ALIGN, RECEIVER_RUN)
        tile += tl.num_programs(0)
    if WORD:
        tl.atomic_add(sums.to(tl.pointer_type(tl.int64)), tl.sum(total.to(tl.int64)), sem="relaxed")
