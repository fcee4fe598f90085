"""Blocks -> blocks on a GPU: rows of one memory become rows of another in one pass, without a slot.

The kernel reads and converts as gather does, sums what gather would put into the slot, then converts and writes as
scatter does, all in registers. So the result and the digest equal theirs, bit for bit. Rows are rounded to the codec on
the wire. That is the sender's or the receiver's codec wherever possible, so that a conversion rounds once and equal
codecs not at all. Between rows that have a scale each on both sides it is fp32.
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
from .launch import UINTS, access, added, arithmetic, check_device, check_sums, compiled, enqueue, offsets_of
from .prepared_pull import PlacedPull, PreparedPull, PulledGroup
from .scales import Steps
from .segment_layout import SegmentLayout, low_bit
from .sheet import GroupLaunch, Kernel, LaunchSide, Sheet
from .tables import LaunchTables, Work
from .tiling import tile_of, tiles_at_once

ARGUMENTS = [f"{end}_{table}" for end in ("sender", "receiver") for table in ("records", "columns", "scales")]
ARGUMENTS += ["sums", "planes", "places", "heads", "row", "first_tile", "end_tile"]


def pull(
    chunk: PlacedPull,
    sums: torch.Tensor | None,
    work: Work,
    stream: torch.cuda.Stream | None = None,
    programs: int | None = None,
) -> None:
    """Write the receiver's rows from the sender's. Adds the sum64 of the chunk's slot to `sums`, int64 [1].

    Enqueued on `stream`, or on the current stream of `work.device`, in launches of at most about `work.launch_us` and
    at most `programs` programs (CTAs). Allocates nothing and waits for nothing. Places and scales are read before this
    returns; `work` is read until the launches have run. The device must be able to reach both memories; the sender's
    may be a peer GPU's (`field.Mapped`). The receiver's places must not repeat, and none of the rows that this writes
    may be among those it reads. Raises ValueError if something does not fit, and NotCompiled unless `work.compiles`,
    both before anything is enqueued.
    """
    check_sums(sums, work)
    chunk.check_digest(sums is not None)
    _check(chunk, work)
    tables = LaunchTables(work, chunk.chunks * chunk.prepared.size_bytes)
    lists = offsets_of(chunk.prepared.sender, chunk.senders, tables)
    lists += offsets_of(chunk.prepared.receiver, chunk.receivers, tables)
    sheet = _sheet(chunk.prepared, sums is not None, work)
    launches = sheet.put(tables, lists, 0 if sums is None else sums.data_ptr(), chunks=chunk.chunks)
    enqueue(launches, tables, work, stream, programs)


def warm(chunk: PlacedPull, has_sums: bool, work: Work) -> None:
    """Compile what `pull` would launch; NotCompiled unless `work.compiles`. The number of places does not matter."""
    check_sums(None, work)
    _check(chunk, work)
    lists = [0] * (len(chunk.prepared.sender.offsets) + len(chunk.prepared.receiver.offsets))
    tables = LaunchTables(work, chunk.prepared.size_bytes)
    compiled(_sheet(chunk.prepared, has_sums, work).put(tables, lists, added(has_sums, work)), work)


def chunks_at_once(prepared: PreparedPull, work: Work) -> int:
    """How many such chunks without sums the tables of `work` have room for, at least 1. 0 if kernels are missing."""
    sheet = _sheet(prepared, False, work)
    if any(group.kernel.compiled is None for group, _ in sheet.groups):
        return 0
    sides = prepared.sender, prepared.receiver
    words = sum(lists.places[which].count for lists in sides for which, *_ in lists.offsets)
    return max(1, (len(work.words) - len(sheet.words)) // max(1, words))


def _check(chunk: PlacedPull, work: Work) -> None:
    check_device(chunk.prepared.sender, work)
    check_device(chunk.prepared.receiver, work)


def _sheet(prepared: PreparedPull, has_sums: bool, work: Work) -> Sheet:
    """The tables of all launches. The receiver's lists of places are numbered after the sender's."""
    first_lists = 0, len(prepared.sender.offsets)

    def launched(packed: PulledGroup) -> GroupLaunch:
        groups = packed.sender.group, packed.receiver.group
        sender, receiver = (group.layout for group in groups)
        aligns = tuple(low_bit(group.near_bits | group.layout.stride_bits | 16) for group in groups)
        scales = groups[0].scales(True, work.steps), groups[1].scales(False, work.steps)
        steps = scales[0].steps, scales[1].steps
        key = (pull_tiles, aligns, steps, has_sums, sender.key, receiver.key)
        kernel = work.kernels.get(key)
        if kernel is None:
            kernel = work.kernels[key] = _kernel(sender, receiver, *aligns, *steps, has_sums, work)
        ends = [
            LaunchSide(end, columns, scaled.table, first_list)
            for end, columns, scaled, first_list in zip(packed, kernel.columns, scales, first_lists, strict=True)
        ]
        sizes = groups[0].planes, groups[0].places, sender.heads
        return GroupLaunch(pull_tiles, kernel, kernel.tiles_of(*sizes), ends, (*sizes, kernel.row))

    return work.sheet(prepared, has_sums, lambda: Sheet.of(map(launched, prepared.groups)))


def _kernel(
    sender: SegmentLayout,
    receiver: SegmentLayout,
    sender_align: int,
    receiver_align: int,
    sender_steps: Steps,
    receiver_steps: Steps,
    has_sums: bool,
    work: Work,
) -> Kernel:
    align = min(sender_align, receiver_align, low_bit(sender.run_bytes), low_bit(receiver.run_bytes))
    wire = next((layout.codecs[1] for layout in (sender, receiver) if layout.codecs is not None), None)
    if wire is None:
        kind, sizes = "pull_sum" if has_sums else "pull", (min(8, align),) * 3
    else:
        names = [wire if layout.codecs is None else layout.codecs[0] for layout in (sender, receiver)]
        kind, sizes = "pull_cast", tuple(DTYPES[name].itemsize for name in (names[0], wire, names[1]))
        sender_align = min(sender_align, access(sizes[0], max(sizes), True))
        receiver_align = min(receiver_align, access(sizes[2], max(sizes), has_sums))
    tiling = work.tilings[kind]
    row = sender.row_bytes // sizes[0]
    is_whole = receiver.row_scale is not None or receiver.rotates
    walked = sender if sender.head_stride < sender.token_stride else receiver
    tile = tile_of(walked, row, max(sizes), 16 // min(sizes), tiling, is_whole)
    word = word_bytes(sender.wire_row_bytes) if has_sums else 0
    # If 8-bit numbers are both summed and written, either write the words that are summed or do not let the processor
    # round them: see `write_words` in tiles.py.
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
        None if layout.is_dense else layout.columns(size, size if align >= size else 1)
        for layout, size, align in ((sender, sizes[0], sender_align), (receiver, sizes[2], receiver_align))
    ]
    tile_bytes = tile[0] * tile[1] * tile[2] * max(sizes)
    has_own = sender.row_scale is not None or is_whole
    at_once = tiles_at_once("own" if has_own else kind, tile_bytes, align, work.launch_us)
    return Kernel(constants, tiling.warps, tiling.tiles, at_once, row, tile, columns, receiver.rotates)


def _constants_of(layout: SegmentLayout, size: int, align: int, columns: int) -> dict[str, object]:
    """The constants for one end's memory, whose elements have `size` bytes."""
    return {
        "TYPE": UINTS[size],
        "CODEC": None if layout.codecs is None else TYPES[layout.codecs[0]],
        "ALIGN": align,
        "RUN": columns if layout.is_dense else min(columns, low_bit(layout.run_bytes // size)),
        "DENSE": layout.is_dense,
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
    SENDER_SCALE: tl.constexpr,
    SENDER_SCALE_AT: tl.constexpr,
    SENDER_SCALE_HEAD: tl.constexpr,
    SENDER_ROTATE: tl.constexpr,
    SENDER_NATIVE: tl.constexpr,
    RECEIVER_TYPE: tl.constexpr,
    RECEIVER_CODEC: tl.constexpr,
    RECEIVER_ALIGN: tl.constexpr,
    RECEIVER_RUN: tl.constexpr,
    RECEIVER_DENSE: tl.constexpr,
    RECEIVER_MULTIPLY: tl.constexpr,
    RECEIVER_DIVIDE: tl.constexpr,
    RECEIVER_SCALE: tl.constexpr,
    RECEIVER_SCALE_AT: tl.constexpr,
    RECEIVER_SCALE_HEAD: tl.constexpr,
    RECEIVER_ROTATE: tl.constexpr,
    RECEIVER_NATIVE: tl.constexpr,
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
            own = m_row
            if SENDER_SCALE != "":
                own = tiles.scales(
                    sender_records, plane, first_head, first_place, places, PLACES, HEADS,
                    SENDER_SCALE_AT, SENDER_SCALE_HEAD,
                )  # fmt: skip
            elements = cast(
                elements, SENDER_CODEC, WIRE_CODEC, sender_scales, planes, plane, heads, i_head,
                SENDER_MULTIPLY, SENDER_DIVIDE, SENDER_NATIVE, own, m_row, SENDER_SCALE, SENDER_ROTATE,
            )  # fmt: skip
        if WORD:
            words = words_of(elements, WORD)
            position = tiles.start(sender_records, plane) + i_row * row * SIZE
            total += sum_of(words, position + first_column * SIZE, WORD)
        if JOINED:
            tiles.write_words(receiver, words, first_column, row, m_row, WORD // SIZE, STEP, RECEIVER_ALIGN)
        else:
            if RECEIVER_CODEC is not None:
                own = m_row
                if RECEIVER_SCALE != "":
                    own = tiles.scales(
                        receiver_records, plane, first_head, first_place, places, PLACES, HEADS,
                        RECEIVER_SCALE_AT, RECEIVER_SCALE_HEAD,
                    )  # fmt: skip
                elements = cast(
                    elements, WIRE_CODEC, RECEIVER_CODEC, receiver_scales, planes, plane, heads, i_head,
                    RECEIVER_MULTIPLY, RECEIVER_DIVIDE, RECEIVER_NATIVE, own, m_row, RECEIVER_SCALE, RECEIVER_ROTATE,
                )  # fmt: skip
            o_column = tiles.in_memory(
                receiver_columns, i_column, m_column, RECEIVER_TYPE, RECEIVER_ALIGN, RECEIVER_DENSE
            )
            tiles.write(receiver, o_column, elements, mask, RECEIVER_ALIGN, RECEIVER_RUN)
        tile += tl.num_programs(0)
    if WORD:
        tl.atomic_add(sums.to(tl.pointer_type(tl.int64)), tl.sum(total.to(tl.int64)), sem="relaxed")
