"""Random chunks for the kernels, and the comparison of a kernel with its twin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from kvbridge_kernels.codecs_ref import DTYPES, Cast, Number
from kvbridge_kernels.digest_ref import sum64
from kvbridge_kernels.field import Axis, Field
from kvbridge_kernels.launch_ref import move
from kvbridge_kernels.prepared import Prepared
from kvbridge_kernels.segment import Places, Segment, Span
from kvbridge_kernels.tables import Work
from kvbridge_kernels.tiling import TILINGS, Tiling

BEFORE = 77  # what a digest is added to
POISON = 0xA5
GUARD = 64  # bytes before and after a slot that must stay as they are
Move = Callable[..., None]  # of launch.py or of launch_ref.py


def gather(segments: Sequence[Segment], slot: Span, sums: torch.Tensor | None, work: Work, by: Move = move) -> None:
    by(Prepared(segments, None, slot.size_bytes).chunk, work, slot, sums)


def digest(segments: Sequence[Segment], size: int, sums: torch.Tensor, work: Work, by: Move = move) -> None:
    by(Prepared(segments, None, size).chunk, work, None, sums)


def scatter(segments: Sequence[Segment], slot: Span, sums: torch.Tensor | None, work: Work, by: Move = move) -> None:
    by(Prepared(None, segments, slot.size_bytes).chunk, work, slot, sums)


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of plane: how its axes lie, how many there are, where its bytes begin."""

    layout: str
    heads: int = 2
    width: int = 64
    size: int = 2
    block_tokens: int = 4
    planes: int = 1
    shift: int = 0
    slot_shift: int = 0
    skip: int = 0  # bytes between blocks that are no one's


LAYOUTS = ["nhd", "hnd", "columns", "tiled", "folded"]
MOVES = [
    *(Shape(layout, planes=2, skip=32) for layout in LAYOUTS),
    *(Shape("nhd", width=width) for width in (80, 96, 128, 576, 8, 24, 7, 1)),
    *(Shape("hnd", heads=heads, width=16) for heads in (1, 3, 6, 32)),
    *(Shape(layout, width=40, shift=shift) for layout, shift in zip(LAYOUTS, (1, 2, 4, 8, 2), strict=True)),
    *(Shape(layout, width=8, shift=1) for layout in LAYOUTS),
    Shape("nhd", width=5, size=1, heads=3),
    Shape("nhd", slot_shift=4),
    Shape("hnd", width=9, size=1, slot_shift=3, shift=5, skip=1),
    Shape("nhd", size=4, block_tokens=1),
    Shape("folded", width=1536, heads=8),
    *(Shape("turned", width=width, size=1, block_tokens=16) for width in (4, 8)),
    Shape("interleaved", width=4, size=1, block_tokens=64),
]


def field_of(shape: Shape, blocks: int, memory: torch.Tensor, offset: int) -> Field:
    tokens, heads, width, size = shape.block_tokens, shape.heads, shape.width, shape.size
    row = width * size
    block = tokens * heads * row
    axes = {
        "nhd": ((Axis(tokens, heads * row),), Axis(heads, row), (Axis(width, size),)),
        "hnd": ((Axis(tokens, row),), Axis(heads, tokens * row), (Axis(width, size),)),
        "columns": ((Axis(tokens, size),), Axis(heads, tokens * row), (Axis(width, tokens * size),)),
        "tiled": (
            (Axis(tokens // 2, 2 * row), Axis(2, 8 * size)),
            Axis(heads, tokens * row),
            (Axis(width // 8, 16 * size), Axis(8, size)),
        ),
        # Scales of NVFP4's V in vLLM on SM100, of which four tokens share four rows, and of MXFP8 in SGLang
        "turned": (
            (Axis(tokens // 4, 4 * row), Axis(4, size)),
            Axis(heads, tokens * row),
            (Axis(4, row), Axis(width // 4, 4 * size)),
        ),
        "interleaved": (
            (Axis(tokens // 32, row), Axis(32, tokens // 32 * row)),
            Axis(heads, tokens * row),
            (Axis(width, size),),
        ),
        "spread": ((Axis(tokens, 2 * size),), Axis(heads, 2 * tokens * row), (Axis(width, 2 * tokens * size),)),
        "folded": ((Axis(1, 1),), Axis(1, 1), (Axis(block, 1),)),
    }[shape.layout]
    stride = block + shape.skip
    each = size if shape.layout != "folded" else 1
    return Field(memory, offset + shape.shift, Axis(shape.planes, blocks * stride), Axis(blocks, stride), *axes, each)


def rows_by_head(memory: torch.Tensor, rows: int, heads: int, width: int, size: int) -> Field:
    """Dense rows of `width` elements, each a block of its own, one head after another."""
    row = width * size
    tokens, elements = (Axis(1, 0),), (Axis(width, size),)
    return Field(memory, 0, Axis(1, 0), Axis(rows, row), tokens, Axis(heads, rows * row), elements, size)


def chunk_of(
    shapes: Sequence[Shape], blocks: int, wanted: int, cast: Cast | None = None, seed: int = 0, tame: bool = False
) -> tuple[list[Segment], int]:
    """Segments with `wanted` random places each in one memory, 16-byte aligned in the slot; the slot's bytes."""
    rng = np.random.default_rng(seed)
    sizes = [
        shape.planes * blocks * (shape.block_tokens * shape.heads * shape.width * shape.size + shape.skip)
        for shape in shapes
    ]
    memory = content(rng, sum(sizes) + 64 * len(shapes), tame)
    segments: list[Segment] = []
    shared: dict[int, Places] = {}
    start, slot = 0, 0
    for shape, size in zip(shapes, sizes, strict=True):
        field = field_of(shape, blocks, memory, start)
        if field.places not in shared:
            shared[field.places] = Places(torch.from_numpy(rng.permutation(field.places)[:wanted].astype(np.int64)))
        segment = Segment(field, shared[field.places], slot + shape.slot_shift, 0, cast)
        pitch = -(-segment.plane_bytes // 16) * 16
        segments.append(replace(segment, slot_pitch=pitch))
        start, slot = start + -(-(size + 32) // 16) * 16, segments[-1].slot_offset + shape.planes * pitch
        slot = -(-slot // 16) * 16
    return segments, slot + 48


def content(rng: np.random.Generator, size: int, tame: bool) -> torch.Tensor:
    """Random bytes; tame ones are no infinity, NaN or subnormal in any codec, which the interpreter reads wrongly."""
    found = rng.integers(0x04, 0x78, size, dtype=np.uint8) if tame else rng.integers(0, 0x80, size, dtype=np.uint8)
    return torch.from_numpy(found | (rng.integers(0, 2, size, dtype=np.uint8) << 7))


def memory_of(segment: Segment) -> torch.Tensor:
    memory = segment.field.memory
    assert isinstance(memory, torch.Tensor)
    return memory


def on(segments: Sequence[Segment], device: str) -> list[Segment]:
    """The same in copied memory."""
    copied = segments[0].field.memory.clone().to(device)
    return [replace(segment, field=replace(segment.field, memory=copied)) for segment in segments]


def slot_on(device: str, size: int) -> tuple[torch.Tensor, Span]:
    """Poisoned, with guards."""
    whole = torch.full((size + 2 * GUARD,), POISON, dtype=torch.uint8, device=device)
    return whole, Span(whole.data_ptr() + GUARD, size)


def work_on(device: str) -> Work:
    """Small tiles and short launches, so that small chunks take several of both: the interpreter is slow."""
    small = Tiling(4 << 10, 4, 8)
    if device != "cpu":
        return Work(device, launch_us=1.0)
    return Work(device, tilings=dict.fromkeys(TILINGS, small), launch_us=0.1)


def added(sums: torch.Tensor) -> int:
    """What was added to BEFORE, int64 as it wraps."""
    return int(sums.cpu() - BEFORE)


def check_gather(by: Move, segments: Sequence[Segment], size: int, device: str = "cpu") -> None:
    """The kernel's slot and digest against the twin's; guards stay, gaps are zeros."""
    wanted, wanted_span = slot_on("cpu", size)
    gather(segments, wanted_span, torch.zeros(1, dtype=torch.int64), Work("cpu"))
    for has_sums in (True, False) if device != "cpu" or segments[0].cast is None else (True,):
        found, span = slot_on(device, size)
        sums = torch.full((1,), BEFORE, dtype=torch.int64, device=device)
        gather(on(segments, device), span, sums if has_sums else None, work_on(device), by)
        slot = found.cpu()
        assert_same_rows(segments, slot[GUARD:-GUARD], wanted[GUARD:-GUARD])
        assert (slot[:GUARD] == POISON).all() and (slot[-GUARD:] == POISON).all()
        if has_sums:
            assert added(sums) == sum64(segments, slot[GUARD:-GUARD])


def check_digest(by: Move, segments: Sequence[Segment], size: int, device: str = "cpu") -> None:
    """The kernel's digest and the twin's against that of the twin's slot."""
    slot, span = slot_on("cpu", size)
    gather(segments, span, None, Work("cpu"))
    wanted = sum64(segments, slot[GUARD:-GUARD])
    found, twins = (torch.full((1,), BEFORE, dtype=torch.int64, device=each) for each in (device, "cpu"))
    digest(on(segments, device), size, found, work_on(device), by)
    digest(segments, size, twins, Work("cpu"))
    assert added(found) == added(twins) == wanted != 0


def check_scatter(
    by: Move,
    segments: Sequence[Segment],
    size: int,
    device: str = "cpu",
    tame: bool = False,
    sent: torch.Tensor | None = None,
) -> None:
    """All of the kernel's memory against the twin's, from slots of random bytes or of these."""
    if sent is None:
        sent = content(np.random.default_rng(1), size, tame)
    twins = on(segments, "cpu")
    wanted_slot, wanted_span = slot_on("cpu", size)
    wanted_slot[GUARD:-GUARD] = sent
    wanted = torch.zeros(1, dtype=torch.int64)
    scatter(twins, wanted_span, wanted, Work("cpu"))
    found = on(segments, device)
    slot, span = slot_on(device, size)
    slot[GUARD:-GUARD] = sent.to(device)
    sums = torch.full((1,), BEFORE, dtype=torch.int64, device=device)
    scatter(found, span, sums, work_on(device), by)
    assert added(sums) == int(wanted)
    assert torch.equal(slot.cpu(), wanted_slot)
    assert_same_memory(segments, found[0].field.memory.cpu(), twins[0].field.memory)


def assert_same_rows(segments: Sequence[Segment], found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Bit for bit, but that any NaN is as good as another."""
    covered = torch.zeros(found.numel(), dtype=torch.bool)
    for segment in segments:
        for plane in range(segment.field.planes.count):
            start = segment.slot_offset + plane * segment.slot_pitch
            part = slice(start, start + segment.plane_bytes)
            covered[part] = True
            name = segment.cast.wire.name if segment.cast else None
            assert_same_numbers(found[part], wanted[part], name, f"{segment.field.shape} plane {plane}")
    assert torch.equal(found[~covered], wanted[~covered])


def assert_same_memory(segments: Sequence[Segment], found: torch.Tensor, wanted: torch.Tensor) -> None:
    """The segments of a chunk are in address order: each covers what follows its offset up to the next."""
    starts = [segment.field.offset for segment in segments]
    assert torch.equal(found[: starts[0]], wanted[: starts[0]])
    for segment, start, end in zip(segments, starts, [*starts[1:], found.numel()], strict=True):
        end -= (end - start) % 4
        name = segment.cast.memory.name if segment.cast else None
        assert_same_numbers(found[start:end], wanted[start:end], name, str(segment.field.shape))


def assert_same_numbers(found: torch.Tensor, wanted: torch.Tensor, name: str | None, where: str) -> None:
    differ = found != wanted
    if name not in (None, "int8") and differ.any():
        kind = DTYPES[name]
        nan = [part.clone().view(kind).float().isnan() for part in (found, wanted)]
        differ &= ~(nan[0] & nan[1]).repeat_interleave(kind.itemsize)
    first = differ.nonzero()[:4].flatten().tolist()
    assert not first, f"{where}: {int(differ.sum())} bytes differ, at {first}: {found[first]} for {wanted[first]}"


def number(name: str, shape: tuple[int, int] | None, seed: int = 0, is_exact: bool = False) -> Number:
    """A codec with scales of that shape, [planes or 1, heads or 1]; exact ones are powers of two."""
    if shape is None:
        return Number(name)
    scales = np.random.default_rng(seed).uniform(0.01, 3.0, shape).astype(np.float32)
    return Number(name, torch.from_numpy(np.exp2(np.round(np.log2(scales))) if is_exact else scales))
