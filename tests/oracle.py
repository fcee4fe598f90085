"""Pools whose every element knows its own (layer, part, head, token, element), and a mover in plain numpy.

`build` makes a pool of a layout that an engine uses, poison in all of its memory; `fill` writes the rows of a
request, every element a hash of its five coordinates; `mismatch` says which row of a pool is wrong and where what
is there came from. `read` is the slow reference that everything else is measured by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from kvbridge_proto.pool import Codec, CodecName, Engine, Group, Layer, Model, Plane, Pool, Region, Shard, Step
from kvbridge_proto.words import Blocks

from kvbridge.geometry.plan import Move, Plan, plan
from kvbridge.geometry.shard import assign
from kvbridge.geometry.tokens import BlockTable

POISON = 0xA5
PARTS = ("k", "v")
ELEMENT_BYTES: dict[CodecName, int] = {
    "bf16": 2,
    "fp16": 2,
    "fp32": 4,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
    "opaque": 1,
}

# Axes of one region, outermost first: L layer, P part, B block, T token, H head, E element. A letter that is missing
# means a region for each of its values.
LAYOUTS = {
    "nhd": "BTHE",  # K and V apart
    "hnd": "BHTE",
    "two_first": "PBTHE",  # (2, NB, ...)
    "block_first": "BPTHE",  # (NB, 2, ...)
    "packed": "BTHPE",  # K|V in one row
    "packed_hnd": "BHTPE",
    "cross_layer": "BLPTHE",  # block outermost, all layers in one region
    "cross_layer_hnd": "BLPHTE",
    "token_outer": "BTLPHE",
    "cpu_vec": "BHP*",  # vLLM's CPU cache: K column-major, V row-major, K half before V half in (block, head)
    "cpu_amx": "BHP*",  # the same on a machine with AMX: both tiled
}


@dataclass(frozen=True, slots=True)
class Held:
    """One rank's pool and its memory, one byte array for each region."""

    pool: Pool
    memory: tuple[np.ndarray, ...]

    def copy(self) -> Held:
        return Held(self.pool, tuple(region.copy() for region in self.memory))


@dataclass(frozen=True, slots=True)
class Shape:
    """The model and how an engine keeps it; a rank of it is `build(shape, ...)`."""

    layout: str = "nhd"
    layers: int = 2
    kv_heads: int = 4
    key_width: int = 8
    value_width: int = 8
    block_tokens: int = 16
    blocks: int = 12
    codec: CodecName = "bf16"
    scales: Mapping[str, tuple[float, ...]] | None = None
    tp_size: int = 1
    pp_size: int = 1
    pad_bytes: int = 0
    model: str = "oracle"


def split(count: int, rank: int, size: int) -> range:
    """What rank `rank` of `size` holds of `count` heads or layers; with more ranks than heads they are repeated."""
    first = rank * count // size
    return range(first, max((rank + 1) * count // size, first + 1))


def build(shape: Shape, tp_rank: int = 0, pp_rank: int = 0) -> Held:
    """One rank's pool, all poison."""
    pool = describe(shape, tp_rank, pp_rank)
    return Held(pool, tuple(np.full(region.size_bytes, POISON, np.uint8) for region in pool.regions))


def describe(shape: Shape, tp_rank: int = 0, pp_rank: int = 0) -> Pool:
    """The record of one rank's pool."""
    heads = split(shape.kv_heads, tp_rank, shape.tp_size)
    layers = split(shape.layers, pp_rank, shape.pp_size)
    assert shape.pp_size <= shape.layers
    planes, sizes = _planes(shape, heads, layers)
    kept = Layer(kind="full", kv_heads=shape.kv_heads, key_width=shape.key_width, value_width=shape.value_width)
    return Pool(
        engine=Engine(kind="oracle", version="0", id=shape.layout),
        model=Model(name=shape.model, layers=(kept,) * shape.layers),
        shard=Shard(tp_rank=tp_rank, tp_size=shape.tp_size, pp_rank=pp_rank, pp_size=shape.pp_size),
        groups=(Group(kind="full", block_tokens=shape.block_tokens, blocks=shape.blocks),),
        regions=tuple(Region(size) for size in sizes),
        planes=tuple(planes),
    )


def build_all(shape: Shape) -> list[Held]:
    """Every rank of an engine."""
    return [build(shape, tp, pp) for pp in range(shape.pp_size) for tp in range(shape.tp_size)]


def _planes(shape: Shape, heads: range, layers: range) -> tuple[list[Plane], list[int]]:
    axes = LAYOUTS[shape.layout]
    planes: list[Plane] = []
    sizes: list[int] = []
    regions: dict[tuple[int, str], int] = {}
    for layer in layers:
        for part in PARTS:
            key = (layer if "L" not in axes else 0, part if "P" not in axes else "")
            strides, size = _strides(shape, axes, len(heads), len(layers), part)
            region = regions.setdefault(key, len(regions))
            if region == len(sizes):
                sizes.append(shape.pad_bytes + size)
            offset = shape.pad_bytes + (layer - layers.start) * strides["L"] + strides["P"]
            width = shape.key_width if part == "k" else shape.value_width
            token_axis, element_axis = _inner_axes(shape, part, width, strides)
            element_bytes = ELEMENT_BYTES[shape.codec]
            planes.append(
                Plane(
                    layer=layer,
                    part=part,
                    region=region,
                    offset=offset,
                    block_stride=strides["B"],
                    token_axis=token_axis,
                    head_stride=strides["H"],
                    element_axis=element_axis,
                    first_head=heads.start,
                    heads=len(heads),
                    total_heads=shape.kv_heads,
                    codec=Codec(
                        name=shape.codec,
                        width=width,
                        element_bytes=element_bytes,
                        row_bytes=width * element_bytes,
                        scales=_scales(shape, part, heads),
                    ),
                )
            )
    return planes, sizes


def _scales(shape: Shape, part: str, heads: range) -> tuple[float, ...]:
    """`Shape.scales` has one for all, or one for each of the model's heads."""
    scales = (shape.scales or {}).get(part, ())
    return scales[heads.start : heads.stop] if len(scales) > 1 else scales


def _strides(shape: Shape, axes: str, heads: int, layers: int, part: str) -> tuple[dict[str, int], int]:
    """Bytes between neighbours of each axis for this part (of P: where the part begins), and the region's size."""
    widths = {"k": shape.key_width, "v": shape.value_width}
    element = ELEMENT_BYTES[shape.codec]
    counts = {"L": layers, "B": shape.blocks, "T": shape.block_tokens, "H": heads}
    sizes = {name: element for name in PARTS}
    strides = {axis: 0 for axis in "LPBTHE"}
    for axis in reversed(axes):
        if axis == "P":
            strides["P"] = 0 if part == "k" else sizes["k"]
            sizes = {name: sum(sizes.values()) for name in PARTS}
        elif axis == "*":
            sizes = {name: element * shape.block_tokens * widths[name] for name in PARTS}
        elif axis == "E":
            strides["E"] = element
            sizes = {name: element * widths[name] for name in PARTS}
        else:
            if axis == "B":
                sizes = {name: size + shape.pad_bytes for name, size in sizes.items()}
            strides[axis] = sizes[part]
            sizes = {name: size * counts[axis] for name, size in sizes.items()}
    return strides, sizes[part]


def _inner_axes(
    shape: Shape, part: str, width: int, strides: Mapping[str, int]
) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    tokens, element = shape.block_tokens, ELEMENT_BYTES[shape.codec]
    if shape.layout == "cpu_vec":
        if part == "k":
            return (Step(tokens, element),), (Step(width, tokens * element),)
        return (Step(tokens, width * element),), (Step(width, element),)
    if shape.layout == "cpu_amx":
        assert element == 2
        if part == "k":
            return (Step(tokens // 16, 16 * width * 2), Step(16, 4)), (Step(width // 2, 64), Step(2, 2))
        return (Step(tokens // 2, 64), Step(2, 2)), (Step(width // 16, tokens * 32), Step(16, 4))
    return (Step(tokens, strides["T"]),), (Step(width, element),)


def value(layer: int, part: str, head: Any, token: Any, element: Any) -> Any:
    """The 64-bit number that element has; an element of n bytes keeps the lowest n."""
    mixed: Any = np.uint64((layer * 2 + PARTS.index(part) + 1) * 0x9E3779B97F4A7C15 % (1 << 64))
    with np.errstate(over="ignore"):
        for coordinate in (head, token, element):
            mixed = (mixed ^ np.asarray(coordinate, np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = mixed ^ (mixed >> np.uint64(29))
    return mixed


def rows(plane: Plane, tokens: range) -> np.ndarray:
    """What the plane's heads must hold for these tokens: bytes [token, head, row]."""
    codec = plane.codec
    token = np.arange(tokens.start, tokens.stop)[:, None, None]
    head = np.arange(plane.first_head, plane.first_head + plane.heads)[None, :, None]
    numbers = value(plane.layer, plane.part, head, token, np.arange(codec.width)[None, None, :])
    whole = numbers.astype("<u8").view(np.uint8).reshape(*numbers.shape, 8)
    return whole[..., : codec.element_bytes].reshape(len(tokens), plane.heads, codec.row_bytes)


def at(axis: Sequence[Step], index: int) -> int:
    """Where place `index` of an axis is: a mixed radix number, outermost step first."""
    offset = 0
    for step in reversed(axis):
        index, digit = divmod(index, step.count)
        offset += digit * step.stride
    return offset


def read(held: Held, table: Sequence[int], layer: int, part: str, head: int, token: int) -> bytes:
    """One row by the definition of a plane, byte by byte. `table` has the request's blocks from token 0 on."""
    (plane,) = [each for each in held.pool.planes if (each.layer, each.part) == (layer, part)]
    block_tokens = held.pool.groups[plane.group].block_tokens
    row = bytearray()
    for element in range(plane.codec.row_bytes // plane.codec.element_bytes):
        where = (
            plane.offset
            + table[token // block_tokens] * plane.block_stride
            + at(plane.token_axis, token % block_tokens)
            + (head - plane.first_head) * plane.head_stride
            + at(plane.element_axis, element)
        )
        row += held.memory[plane.region][where : where + plane.codec.element_bytes].tobytes()
    return bytes(row)


def _field(held: Held, plane: Plane) -> np.ndarray:
    """The plane as an array: [block, *token axis, head, *element axis, byte]."""
    codec, group = plane.codec, held.pool.groups[plane.group]
    steps = [Step(group.blocks, plane.block_stride), *plane.token_axis, Step(plane.heads, plane.head_stride)]
    steps += [*plane.element_axis, Step(codec.element_bytes, 1)]
    shape, strides = [step.count for step in steps], [step.stride for step in steps]
    end = plane.offset + 1 + sum((step.count - 1) * step.stride for step in steps)
    assert end <= held.memory[plane.region].size, f"{plane} ends at {end}"
    return np.lib.stride_tricks.as_strided(held.memory[plane.region][plane.offset :], shape, strides)


def _index(plane: Plane, places: np.ndarray, heads: slice) -> tuple[Any, ...]:
    counts = [step.count for step in plane.token_axis]
    units = int(np.prod(counts))
    return (places // units, *np.unravel_index(places % units, counts), heads)


def take_rows(held: Held, plane: Plane, places: np.ndarray, heads: slice = slice(None)) -> np.ndarray:
    """Rows at these places: bytes [place, head, row]."""
    found = _field(held, plane)[_index(plane, places, heads)]
    return found.reshape(len(places), found.shape[1], plane.codec.row_bytes)


def put_rows(held: Held, plane: Plane, places: np.ndarray, what: np.ndarray, heads: slice = slice(None)) -> None:
    """Write bytes [place, head, row] at these places."""
    field = _field(held, plane)
    field[_index(plane, places, heads)] = what.reshape(*what.shape[:2], *field.shape[2 + len(plane.token_axis) :])


def places_of(table: Sequence[int], tokens: range, block_tokens: int) -> np.ndarray:
    """Where tokens are, by the definition of a block table."""
    token = np.arange(tokens.start, tokens.stop)
    return np.asarray(table, np.int64)[token // block_tokens] * block_tokens + token % block_tokens


def fill(held: Held, table: Sequence[int], tokens: range) -> None:
    """Write the rows of a request whose blocks from token 0 on are `table`."""
    for plane in held.pool.planes:
        places = places_of(table, tokens, held.pool.groups[plane.group].block_tokens)
        put_rows(held, plane, places, rows(plane, tokens))


def mismatch(held: Held, before: Held, table: Sequence[int], tokens: range, tail: range = range(0)) -> str:
    """Empty if `held` is `before` with the rows of `tokens` written and nothing else; or what is wrong, in words.

    Rows of `tail` (the rest of a last block) may hold anything.
    """
    found, expected = held.copy(), before.copy()
    fill(expected, table, tokens)
    for each in (found, expected):
        for plane in each.pool.planes:
            places = places_of(table, tail, each.pool.groups[plane.group].block_tokens)
            put_rows(each, plane, places, np.zeros((len(tail), plane.heads, plane.codec.row_bytes), np.uint8))
    for region, (ours, theirs) in enumerate(zip(found.memory, expected.memory, strict=True)):
        if not np.array_equal(ours, theirs):
            wrong = _wrong_row(found, table, tokens)
            byte = int(np.flatnonzero(ours != theirs)[0])
            return wrong or f"region {region} byte {byte}: wrote {ours[byte]:#x} outside of the wanted rows"
    return ""


def _wrong_row(held: Held, table: Sequence[int], tokens: range) -> str:
    known = {
        rows(plane, range(token, token + 1))[0, head].tobytes(): _name(plane, plane.first_head + head, token)
        for plane in held.pool.planes
        for head in range(plane.heads)
        for token in tokens
    }
    for plane in held.pool.planes:
        places = places_of(table, tokens, held.pool.groups[plane.group].block_tokens)
        found, expected = take_rows(held, plane, places), rows(plane, tokens)
        for token, head in np.argwhere((found != expected).any(axis=2)):
            row = found[token, head].tobytes()
            source = known.get(row, "poison" if row == bytes([POISON]) * len(row) else row.hex())
            return f"{_name(plane, plane.first_head + int(head), tokens[int(token)])} holds {source}"
    return ""


def _name(plane: Plane, head: int, token: int) -> str:
    return f"layer {plane.layer} {plane.part} head {head} token {token}"


def gather(held: Held, moves: Iterable[Move], slot: np.ndarray) -> None:
    """Rows into the slot, bit for bit."""
    for move in moves:
        assert move.is_bitwise
        heads = slice(move.first_head, move.first_head + move.heads)
        found = take_rows(held, move.plane, move.places, heads).transpose(1, 0, 2)  # [head, place, row]
        slot[move.slot_offset : move.slot_offset + move.size_bytes] = found.reshape(-1)


def scatter(held: Held, moves: Iterable[Move], slot: np.ndarray) -> None:
    """The slot into rows, bit for bit."""
    for move in moves:
        assert move.is_bitwise
        heads = slice(move.first_head, move.first_head + move.heads)
        found = slot[move.slot_offset : move.slot_offset + move.size_bytes]
        found = found.reshape(move.heads, len(move.places), move.wire.row_bytes).transpose(1, 0, 2)
        put_rows(held, move.plane, move.places, found, heads)


def table_of(pool: Pool, tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Blocks for so many tokens in a shuffled order."""
    group = pool.groups[0]
    needed = -(-tokens // group.block_tokens)
    assert needed <= group.blocks, f"{needed} blocks needed, {group.blocks} there"
    return tuple(int(block) for block in np.random.default_rng(seed).permutation(group.blocks)[:needed])


def block_table(pool: Pool, table: Sequence[int], first_block: int = 0) -> dict[int, BlockTable]:
    """What the adapter would send: entries from `first_block` on."""
    return {0: BlockTable.of(pool.groups[0], Blocks(0, first_block, tuple(table[first_block:])))}


def run(planned: Plan, source: Held, source_table: Sequence[int], sink: Held, sink_table: Sequence[int]) -> None:
    """Carry out a plan through one poisoned slot."""
    ours, theirs = block_table(source.pool, source_table), block_table(sink.pool, sink_table)
    for index in range(planned.chunks):
        chunk = planned.chunk(index)
        slot = np.full(chunk.size_bytes, POISON, np.uint8)
        gather(source, planned.source_moves(chunk, ours), slot)
        scatter(sink, planned.sink_moves(chunk, theirs), slot)


def transfer(
    sources: Sequence[Held], sinks: Sequence[Held], tokens: range, slot_bytes: int = 1 << 16, prompt: int = 0
) -> str:
    """Fill the sources, carry `tokens` to every sink, and say what is wrong there; empty if nothing is.

    The prompt is `prompt` tokens long, or ends where `tokens` do.
    """
    end = max(prompt, tokens.stop)
    source_table = table_of(sources[0].pool, end, seed=1)
    for source in sources:
        fill(source, source_table, range(end))
    for sink in sinks:
        before, table = sink.copy(), table_of(sink.pool, end, seed=2)
        takes = assign([source.pool for source in sources], sink.pool)
        for source, taken in zip(sources, takes, strict=True):
            planned = plan(source.pool, sink.pool, taken, tokens.start, tokens.stop, slot_bytes)
            run(planned, source, source_table, sink, table)
        block_tokens = sink.pool.groups[0].block_tokens
        tail = range(tokens.stop, len(table) * block_tokens if tokens else tokens.stop)
        wrong = mismatch(sink, before, table, tokens, tail)
        if wrong:
            return f"{sink.pool.engine.id}: {wrong}"
    return ""
