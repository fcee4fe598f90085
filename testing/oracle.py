"""Pools whose every element names its own (layer, part, head, token, element).

`testing.pools` makes a pool of any layout, with poison in all of its memory. `fill` writes the rows of a request:
every element is a hash of its five coordinates. `mismatch` says which row is wrong, and where its bytes came from.
`read` is the slow reference for everything else.

This file says independently of kvbridge's code which tokens a rank keeps, and where. A context-parallel rank keeps
those with `(token // interleave) % size == rank`, in order. A window keeps the blocks in which the next query sees a
token. A state keeps one row for all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from kvbridge_proto.common import Blocks
from kvbridge_proto.pool import CodecName, Group, Plane, Pool, Shard, Step

from kvbridge.geometry.tokens import BlockTable, TokenShard
from kvbridge.geometry.wire import ROW_SCALED
from testing.pools import EIGHT_BITS, STATES, Held
from testing.pools import LAYOUTS as LAYOUTS
from testing.pools import PARTS as PARTS
from testing.pools import POISON as POISON
from testing.pools import More as More
from testing.pools import Shape as Shape
from testing.pools import build as build
from testing.pools import build_all as build_all
from testing.pools import describe as describe
from testing.pools import mla as mla
from testing.pools import split as split
from tests.unit.kernels import slow_codecs

MORE = ("index_key", "x", "b", "c", "rotated_index_key", "of_4", "of_128")  # parts of other shapes than K and V
ALL_PARTS = (
    *PARTS,
    "latent",
    *STATES,
    "k_scale",
    "v_scale",
    "latent_scale",
    *MORE,
    *(f"{part}_scale" for part in MORE),
)
# In a row of fp8_ds_mla.
DS_SCALES, DS_ROPE = slice(512, 528), slice(528, 656)
NAMES_OF_8_BITS: dict[CodecName, CodecName] = {
    **{name: name for name in EIGHT_BITS},
    **ROW_SCALED,
    "fp8_ds_mla": "fp8_e4m3",
}

# The blocks of a request from its first token on: the same for every group, or by group.
Table = Sequence[int] | Mapping[int, Sequence[int]]


def value(layer: int, part: str, head: Any, token: Any, element: Any) -> Any:
    """The 64-bit number of an element. An element of n bytes keeps the lowest n."""
    mixed: Any = np.uint64((layer * 16 + ALL_PARTS.index(part) + 1) * 0x9E3779B97F4A7C15 % (1 << 64))
    with np.errstate(over="ignore"):
        for coordinate in (head, token, element):
            mixed = (mixed ^ np.asarray(coordinate, np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = mixed ^ (mixed >> np.uint64(29))
    return mixed


def rows(plane: Plane, tokens: range | np.ndarray, is_tame: bool = False) -> np.ndarray:
    """What the plane's heads must hold for these tokens: bytes [token, head, row]. Scales are powers of two.

    Tame numbers are finite. Those of more than 8 bits are in [-8, 8), where conversions lose more.
    """
    codec = plane.codec
    token = np.asarray(tokens, np.int64)[:, None, None]
    head = np.arange(plane.first_head, plane.first_head + plane.heads)[None, :, None]
    elements = np.arange(codec.row_bytes // codec.element_bytes)[None, None, :]
    numbers = value(plane.layer, plane.part, head, token, elements)
    if plane.part.endswith("_scale") and codec.name in ("fp32", "pow2_fp32"):
        return _scales(numbers)
    if plane.part.endswith("_scale") and codec.name == "ue8m0_x4":
        return _scales(numbers)[..., 3:].repeat(4, axis=-1) * 2 + 1  # any exponent near 1
    whole = numbers.astype("<u8").view(np.uint8).reshape(*numbers.shape, 8)
    found = whole[..., : codec.element_bytes].reshape(len(token), plane.heads, codec.row_bytes)
    if is_tame and codec.element_bytes > 1:
        found = _tame(numbers, codec.name)
    elif is_tame and codec.name in NAMES_OF_8_BITS:
        found = np.where(np.isfinite(slow_codecs.numbers(NAMES_OF_8_BITS[codec.name]))[found], found, 0x33)
    if codec.name == "fp8_ds_mla":
        found[..., DS_SCALES] = _scales(numbers[..., :4])
        found[..., DS_ROPE] = _tame(numbers[..., :64], "bf16")
    return found.astype(np.uint8)


def _tame(numbers: np.ndarray, name: str) -> np.ndarray:
    """Numbers in [-8, 8): bytes [..., element_bytes * numbers]."""
    stored = _tame_patterns(name)[numbers % np.uint64(1 << 16)]
    return np.ascontiguousarray(stored).view(np.uint8)


@cache
def _tame_patterns(name: str) -> np.ndarray:
    """What each 16 bits of an element's number stand for. Encoding them each time took half of test_matrix."""
    stored = slow_codecs.encode(np.arange(1 << 16, dtype=np.float32) / 4096 - 8, name)
    return stored.astype("<f4" if name == "fp32" else "<u2")


def _scales(numbers: np.ndarray) -> np.ndarray:
    """One of eight fp32 scales for each number: bytes [..., 4 * numbers]."""
    return np.ldexp(np.float32(1), (numbers % np.uint64(8)).astype(int) - 6).astype("<f4").view(np.uint8)


def at(axis: Sequence[Step], index: int) -> int:
    """The byte offset of position `index` on an axis of several steps, the outermost first."""
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


def _index(plane: Plane, places: np.ndarray) -> tuple[Any, ...]:
    counts = [step.count for step in plane.token_axis]
    units = int(np.prod(counts))
    return (places // units, *np.unravel_index(places % units, counts))


def take_rows(held: Held, plane: Plane, places: np.ndarray) -> np.ndarray:
    """Rows at these places: bytes [place, head, row]."""
    found = _field(held, plane)[_index(plane, places)]
    return found.reshape(len(places), found.shape[1], plane.codec.row_bytes)


def put_rows(held: Held, plane: Plane, places: np.ndarray, what: np.ndarray) -> None:
    """Write bytes [place, head, row] at these places."""
    field = _field(held, plane)
    field[_index(plane, places)] = what.reshape(*what.shape[:2], *field.shape[2 + len(plane.token_axis) :])


def places_of(table: Sequence[int], tokens: range, block_tokens: int) -> np.ndarray:
    """The places of tokens, by the definition of a block table."""
    token = np.arange(tokens.start, tokens.stop)
    return np.asarray(table, np.int64)[token // block_tokens] * block_tokens + token % block_tokens


def ids_of(table: Table, group: int) -> Sequence[int]:
    """The blocks of one group."""
    return table[group] if isinstance(table, Mapping) else table


def is_own(shard: Shard, tokens: np.ndarray) -> np.ndarray:
    """Which tokens this context-parallel rank keeps."""
    return (tokens // shard.cp_interleave) % shard.cp_size == shard.cp_rank


def first_seen(group: Group, end_token: int, cp_size: int = 1) -> int:
    """The first token in the first block of which the next query, at `end_token`, sees a token.

    Or that token, if nobody else gets the block.
    """
    if group.kind == "full":
        return 0
    seen = end_token
    while seen and is_seen(group, seen - 1, end_token):
        seen -= 1
    whole = group.block_tokens * cp_size
    while seen % whole and not group.begins_inside:
        seen -= 1
    return seen


def is_seen(group: Group, token: int, query: int) -> bool:
    """Whether a query sees a token before it."""
    if group.kind == "chunked":
        return token // group.window == query // group.window
    return group.kind == "full" or query - token < group.window


def rows_at(pool: Pool, group: int, table: Table, tokens: range, row_tokens: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """The tokens whose rows a rank has in this group after computing or receiving `tokens`, and their places.

    If rows stand for several tokens each: the numbers of the rows that are whole.
    """
    kept, ids = pool.groups[group], np.asarray(ids_of(table, group), np.int64)
    if not tokens:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if kept.kind == "state":
        return np.array([tokens.stop - 1]), ids[[(tokens.stop - 1) // kept.block_tokens]]
    if row_tokens > 1:
        row = np.array([row for row in range(tokens.stop) if tokens.start < (row + 1) * row_tokens <= tokens.stop], int)
        each = kept.block_tokens // row_tokens
        return row, ids[row // each] * each + row % each
    every = np.arange(tokens.stop)
    own = is_own(pool.shard, every)
    index = np.cumsum(own) - 1  # for each token: how many of the rank's tokens precede it
    token = every[own & (every >= max(tokens.start, first_seen(kept, tokens.stop, pool.shard.cp_size)))]
    index = index[token]
    return token, ids[index // kept.block_tokens] * kept.block_tokens + index % kept.block_tokens


def fill(held: Held, table: Table, tokens: range, is_tame: bool = False) -> None:
    """Write the rows that this rank keeps of a request. `table` has its blocks from token 0 on."""
    for plane in held.pool.planes:
        token, places = rows_at(held.pool, plane.group, table, tokens, plane.row_tokens)
        put_rows(held, plane, places, rows(plane, token, is_tame))


def mismatch(held: Held, before: Held, table: Table, tokens: range, tail: range = range(0)) -> str:
    """How `held` differs from `before` with exactly the rows of `tokens` written. Empty if it does not.

    In groups that keep all tokens, rows of `tail` (the rest of a last block) may hold anything.
    """
    expected = before.copy()
    fill(expected, table, tokens)
    return difference(held, expected, table, tokens, tail)


def difference(held: Held, expected: Held, table: Table, tokens: range, tail: range = range(0)) -> str:
    """How `held` differs from `expected`, in words. Empty if it does not."""
    found, expected = held.copy(), expected.copy()
    for each in (found, expected):
        for plane in each.pool.planes:
            places = _tail(each.pool, plane.group, table, tail, plane.row_tokens)
            put_rows(each, plane, places, np.zeros((len(places), plane.heads, plane.codec.row_bytes), np.uint8))
    for region, (ours, theirs) in enumerate(zip(found.memory, expected.memory, strict=True)):
        if not np.array_equal(ours, theirs):
            wrong = _wrong_row(found, expected, table, tokens)
            byte = int(np.flatnonzero(ours != theirs)[0])
            return wrong or f"region {region} byte {byte}: wrote {ours[byte]:#x} outside of the wanted rows"
    return ""


def _tail(pool: Pool, group: int, table: Table, tail: range, row_tokens: int) -> np.ndarray:
    """The places of the tokens of `tail` that have a block, or of rows that end there."""
    kept, ids = pool.groups[group], np.asarray(ids_of(table, group), np.int64)
    if kept.kind != "full" or not tail:
        return np.zeros(0, np.int64)
    if row_tokens > 1:
        each = kept.block_tokens // row_tokens
        row = np.arange(tail.start // row_tokens, len(ids) * each)
        return ids[row // each] * each + row % each
    own = is_own(pool.shard, np.arange(tail.stop))
    index = np.arange(np.count_nonzero(own[: tail.start]), np.count_nonzero(own))
    index = index[index < len(ids) * kept.block_tokens]
    return ids[index // kept.block_tokens] * kept.block_tokens + index % kept.block_tokens


def _wrong_row(held: Held, expected: Held, table: Table, tokens: range) -> str:
    known: dict[bytes, str] = {}
    for plane in held.pool.planes:
        token, places = rows_at(held.pool, plane.group, table, tokens, plane.row_tokens)
        for (which, head), _ in np.ndenumerate(np.zeros((len(token), plane.heads))):
            row = take_rows(expected, plane, places[which : which + 1])[0, head]
            known[row.tobytes()] = _name(plane, plane.first_head + head, int(token[which]))
    for plane in held.pool.planes:
        token, places = rows_at(held.pool, plane.group, table, tokens, plane.row_tokens)
        found, wanted = take_rows(held, plane, places), take_rows(expected, plane, places)
        for which, head in np.argwhere((found != wanted).any(axis=2)):
            row = found[which, head].tobytes()
            sender = known.get(row, "poison" if row == bytes([POISON]) * len(row) else row.hex())
            return f"{_name(plane, plane.first_head + int(head), int(token[which]))} holds {sender}"
    return ""


def _name(plane: Plane, head: int, token: int) -> str:
    return f"layer {plane.layer} {plane.part} head {head} token {token}"


def table_of(pool: Pool, tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Blocks of the first group for `tokens` tokens, in shuffled order."""
    return _shuffled(pool, 0, tokens, seed)


def tables_of(pool: Pool, tokens: int, seed: int = 0) -> dict[int, tuple[int, ...]]:
    """Blocks of every group for `tokens` tokens. As with a scheduler, the same for all ranks of an engine."""
    return {group: _shuffled(pool, group, tokens, seed + 100 * group) for group in range(len(pool.groups))}


def _shuffled(pool: Pool, group: int, tokens: int, seed: int) -> tuple[int, ...]:
    kept, shard = pool.groups[group], pool.shard
    if kept.kind != "state" and shard.cp_size > 1:
        ranks = np.arange(tokens) // shard.cp_interleave % shard.cp_size
        tokens = int(np.bincount(ranks, minlength=1).max()) if tokens else 0
    needed = -(-tokens // kept.block_tokens)
    assert needed <= kept.blocks, f"{needed} blocks needed, {kept.blocks} there"
    return tuple(int(block) for block in np.random.default_rng(seed).permutation(kept.blocks)[:needed])


def block_table(pool: Pool, table: Table, first_block: int = 0, end_token: int = 0) -> dict[int, BlockTable]:
    """The table that an adapter would send: entries from `first_block` on.

    With `end_token`, windows have only the entries of the tokens that they keep. States have all entries, so that it
    shows which one is used.
    """
    tables = {}
    for index, group in enumerate(pool.groups):
        ids, first = ids_of(table, index), first_block
        if group.kind in ("sliding", "chunked") and end_token:
            before = np.count_nonzero(is_own(pool.shard, np.arange(first_seen(group, end_token, pool.shard.cp_size))))
            first = max(first, int(before) // group.block_tokens)
        piece = Blocks(index, first, tuple(ids[first:]))
        tables[index] = BlockTable.of(group, piece, token_shard=TokenShard.of(pool.shard))
    return tables


def tail_of(senders: Sequence[Held], receiver: Held, table: Table, tokens: range) -> range:
    """The tokens after these in the receiver's last blocks, if a sender may send whole blocks."""
    shares = [(held.pool.shard.cp_size, held.pool.shard.cp_rank, held.pool.shard.cp_interleave) for held in senders]
    shard = receiver.pool.shard
    if not tokens or (shard.cp_size, shard.cp_rank, shard.cp_interleave) not in shares:
        return range(0)
    longest = max(len(ids_of(table, i)) * group.block_tokens for i, group in enumerate(receiver.pool.groups))
    return range(tokens.stop, max(tokens.stop, (longest + shard.cp_interleave) * shard.cp_size))
