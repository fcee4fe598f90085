"""What moves between one source and one sink, cut into slot-sized chunks. Pure.

Both agents derive the same plan from the two pools; they compare its digest, then speak of chunks by number.

A plan is a grid: token spans x bands of strips. Chunk i is band `i % bands` of span `i // bands`, so that the
first tokens leave first while a prompt is still being computed. Nothing is listed: a chunk is arithmetic, and
only its moves are spelled out when its turn comes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm

import msgspec
import numpy as np
import numpy.typing as npt
from kvbridge_proto.peer import Take
from kvbridge_proto.pool import Codec, Plane, Pool
from kvbridge_proto.words import Blocks

from ..errors import KVBridgeError, OperatorError, PeerError
from .fold import fold
from .layers import align
from .shard import common
from .strip import Strip, pair, split_heads
from .tokens import BlockTable, Places
from .wire import is_same_row, is_same_scales, scales_of

# Strips begin at multiples of this in a slot, so that rows can be moved as wide words.
ALIGN = 16
# Tokens are cut so that a strip has about this much in a chunk: less costs a call per few rows, more delays the
# first chunk of a prompt that is still being computed.
PIECE_BYTES = 128 << 10

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Rows of one plane <-> bytes of a slot.

    The plane's own heads [first_head, first_head + heads) at `places` lie in the slot from `slot_offset` on
    as `[head][place][row]` in the codec `wire`. `plane.codec` is the memory's; its scales are none, one, or one
    for each of the plane's heads; those of `wire` are none, one, or one for each of the move's heads. Place p
    is unit `p % units` of block `p // units`, `units` being the count of the plane's token axis.
    """

    plane: Plane
    first_head: int
    heads: int
    wire: Codec
    slot_offset: int
    places: Places
    unit_tokens: int = 1

    @property
    def size_bytes(self) -> int:
        return self.heads * len(self.places) * self.wire.row_bytes

    @property
    def is_bitwise(self) -> bool:
        """True if the bytes move as they are: the same codec with the same scales."""
        memory = scales_of(self.plane.codec, self.first_head, self.heads)
        return is_same_row(self.plane.codec, self.wire) and is_same_scales(memory, self.wire.scales)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Strips [first_strip, end_strip) of tokens [first_token, end_token); to be gathered once all those are there."""

    index: int
    first_token: int
    end_token: int
    first_strip: int
    end_strip: int
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The grid, see the module. `bands` are where a band of strips begins, and the end; `digest` names all of it."""

    first_token: int
    end_token: int
    strips: tuple[Strip, ...]
    unit_tokens: Numbers
    unit_bytes: Numbers
    span_tokens: int
    bands: tuple[int, ...]
    digest: str
    _known_bytes: dict[tuple[int, int], int] = field(default_factory=dict, init=False, repr=False)
    _spelled: dict[int, Chunk] = field(default_factory=dict, init=False, repr=False)  # asked for many times each

    @property
    def chunks(self) -> int:
        return -(-(self.end_token - self.first_token) // self.span_tokens) * (len(self.bands) - 1)

    @property
    def total_bytes(self) -> int:
        """Slot bytes of all chunks together."""
        spans, tail = divmod(self.end_token - self.first_token, self.span_tokens)
        full = int(self._sizes(0, len(self.strips), self.span_tokens).sum())
        return spans * full + int(self._sizes(0, len(self.strips), tail).sum())

    def chunk(self, index: int) -> Chunk:
        """Chunk `index` of [0, chunks)."""
        if (known := self._spelled.get(index)) is not None:
            return known
        if not 0 <= index < self.chunks:
            raise IndexError(f"chunk: {index} of {self.chunks}")
        span, band = divmod(index, len(self.bands) - 1)
        first_token = self.first_token + span * self.span_tokens
        end_token = min(first_token + self.span_tokens, self.end_token)
        first, end = self.bands[band], self.bands[band + 1]
        size = self._bytes_of(band, end_token - first_token)
        chunk = self._spelled[index] = Chunk(index, first_token, end_token, first, end, size)
        return chunk

    def _bytes_of(self, band: int, tokens: int) -> int:
        """Of a chunk; most are alike."""
        size = self._known_bytes.get((band, tokens))
        if size is None:
            size = int(self._sizes(self.bands[band], self.bands[band + 1], tokens).sum())
            self._known_bytes[band, tokens] = size
        return size

    def source_moves(self, chunk: Chunk, tables: Mapping[int, BlockTable]) -> tuple[Move, ...]:
        """How the source gathers the chunk into a slot; `tables` are its block tables, by group."""
        sides = [(strip.source, strip.source_head) for strip in self.strips[chunk.first_strip : chunk.end_strip]]
        return self._moves(chunk, sides, tables)

    def sink_moves(self, chunk: Chunk, tables: Mapping[int, BlockTable]) -> tuple[Move, ...]:
        """How the sink scatters the chunk from a slot; `tables` are its block tables, by group."""
        sides = [(strip.sink, strip.sink_head) for strip in self.strips[chunk.first_strip : chunk.end_strip]]
        return self._moves(chunk, sides, tables)

    def _moves(
        self, chunk: Chunk, sides: Sequence[tuple[Plane, int]], tables: Mapping[int, BlockTable]
    ) -> tuple[Move, ...]:
        sizes = self._sizes(chunk.first_strip, chunk.end_strip, chunk.end_token - chunk.first_token)
        offsets = (np.cumsum(sizes) - sizes).tolist()
        places: dict[tuple[int, int], Places] = {}
        moves: list[Move] = []
        strips = self.strips[chunk.first_strip : chunk.end_strip]
        for strip, (plane, first_head), offset in zip(strips, sides, offsets, strict=True):
            key = (plane.group, strip.unit_tokens)
            if key not in places:
                places[key] = tables[plane.group].places(chunk.first_token, chunk.end_token, strip.unit_tokens)
            moves.append(Move(plane, first_head, strip.heads, strip.wire, offset, places[key], strip.unit_tokens))
        return tuple(moves)

    def _sizes(self, first_strip: int, end_strip: int, tokens: int) -> Numbers:
        return _sizes(self.unit_tokens[first_strip:end_strip], self.unit_bytes[first_strip:end_strip], tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One chunk as one side of a plan sees it; `tables` are that side's block tables, by group."""

    plan: Plan
    chunk: Chunk
    tables: Mapping[int, BlockTable]
    is_source: bool

    def moves(self) -> tuple[Move, ...]:
        find = self.plan.source_moves if self.is_source else self.plan.sink_moves
        return find(self.chunk, self.tables)

    def places(self, group: int, unit_tokens: int) -> Places:
        """The places of every move of this group whose rows are `unit_tokens` long."""
        return self.tables[group].places(self.chunk.first_token, self.chunk.end_token, unit_tokens)

    @property
    def form(self) -> object:
        """Equal for parts whose moves differ in their places only, while the plan's strips exist."""
        chunk = self.chunk
        tokens = chunk.end_token - chunk.first_token
        return id(self.plan.strips), chunk.first_strip, chunk.end_strip, tokens, self.is_source


@dataclass(frozen=True, slots=True, eq=False)
class Weave:
    """What plans of the same rows share, however many tokens they are of: the strips, and a digest of all of them."""

    strips: tuple[Strip, ...]
    unit_tokens: Numbers
    unit_bytes: Numbers
    digest: bytes


class Planner:
    """Makes the plans between two pools. Keeps what it has woven: requests mostly differ in their tokens only."""

    KEPT = 64

    def __init__(self, source: Pool, sink: Pool) -> None:
        self._source = align(source, sink)
        self._sink = sink
        self._period = lcm(*(group.block_tokens for group in source.groups))
        self._woven: dict[object, Weave] = {}

    def plan(self, takes: Sequence[Take], first_token: int, end_token: int, slot_bytes: int) -> Plan:
        """The plan by which the source gives the rows `takes` of tokens [first_token, end_token) to the sink.

        Raises PeerError for takes or tokens that cannot be, OperatorError if a slot is too small for a row.
        """
        if not 0 <= first_token <= end_token:
            raise PeerError("bad_tokens", f"end_token: {end_token}, first_token: {first_token}")
        if not takes or first_token == end_token:
            return _sealed(first_token, first_token, NOTHING, slot_bytes, 1, (0,))
        key = (tuple(takes), first_token % self._period, slot_bytes)
        if (weave := self._woven.pop(key, None)) is None:
            weave = _weave(self._source, self._sink, takes, first_token, slot_bytes)
            if len(self._woven) == self.KEPT:
                del self._woven[next(iter(self._woven))]
        self._woven[key] = weave  # the newest last
        return _cut(weave, first_token, end_token, slot_bytes)

    def samples(self, slot_bytes: int, is_source: bool) -> list[Part]:
        """A chunk from a block's border on and one from inside a block, as one side sees them: what is to be expected.

        Their blocks are any. Empty where the two pools have no rows in common.
        """
        takes, own = common(self._source, self._sink), self._source if is_source else self._sink
        tokens = max(group.block_tokens for pool in (self._source, self._sink) for group in pool.groups)
        tables = {}
        for index, group in enumerate(own.groups):
            entries = -(-(tokens + 1) // group.block_tokens)
            if entries > group.blocks:
                return []
            tables[index] = BlockTable.of(group, Blocks(index, 0, tuple(range(entries))))
        try:
            plans = [self.plan(takes, first, first + tokens, slot_bytes) for first in (0, 1)]
        except KVBridgeError:  # whoever wants something will be told
            return []
        return [Part(each, each.chunk(0), tables, is_source) for each in plans if each.chunks]


def plan(source: Pool, sink: Pool, takes: Sequence[Take], first_token: int, end_token: int, slot_bytes: int) -> Plan:
    """One plan, see Planner."""
    return Planner(source, sink).plan(takes, first_token, end_token, slot_bytes)


def _weave(source: Pool, sink: Pool, takes: Sequence[Take], first_token: int, slot_bytes: int) -> Weave:
    usable = slot_bytes // ALIGN * ALIGN
    rows = pair(source, sink, takes)
    folded = fold(rows, source, sink, first_token, usable)
    strips = _fitted(folded, usable) or _fitted(rows, usable)
    if strips is None:
        widest = max(rows, key=lambda strip: strip.wire.row_bytes)
        raise OperatorError(
            "slot_too_small",
            f"slot_bytes: {slot_bytes}, a row of layer {widest.sink.layer} {widest.sink.part} "
            f"has {widest.wire.row_bytes} bytes",
        )
    return Weave(tuple(strips), *_columns(strips), _seal(rows, strips))


def _cut(weave: Weave, first_token: int, end_token: int, slot_bytes: int) -> Plan:
    usable, tokens = slot_bytes // ALIGN * ALIGN, end_token - first_token
    unit_tokens, unit_bytes = weave.unit_tokens, weave.unit_bytes
    span_tokens = _span(unit_tokens, unit_bytes, tokens, usable)
    sizes = _sizes(unit_tokens, unit_bytes, min(span_tokens, tokens))
    return _sealed(first_token, end_token, weave, slot_bytes, span_tokens, _bands(sizes, usable))


def _fitted(strips: Sequence[Strip], slot_bytes: int) -> list[Strip] | None:
    """The strips, cut by heads so that the fewest tokens of a span fit a slot; None where one head does not."""
    grain = lcm(*{strip.unit_tokens for strip in strips})
    fitted: list[Strip] = []
    for strip in strips:
        heads = slot_bytes // (grain // strip.unit_tokens * strip.wire.row_bytes)
        if not heads:
            return None
        fitted += split_heads(strip, heads)
    return fitted


def _columns(strips: Sequence[Strip]) -> tuple[Numbers, Numbers]:
    unit_tokens = np.array([strip.unit_tokens for strip in strips], np.int64)
    return unit_tokens, np.array([strip.unit_bytes for strip in strips], np.int64)


def _sizes(unit_tokens: Numbers, unit_bytes: Numbers, tokens: int) -> Numbers:
    """Slot bytes of each strip for a span of so many tokens."""
    return -(-(-(-tokens // unit_tokens) * unit_bytes) // ALIGN) * ALIGN


def _span(unit_tokens: Numbers, unit_bytes: Numbers, tokens: int, slot_bytes: int) -> int:
    """Tokens of a span: enough to fill a slot, or strips of about PIECE_BYTES; no strip more than a slot.

    A multiple of every unit, and of ALIGN where it can be (then nothing is padded); all about equal.
    """
    grain = int(np.lcm.reduce(unit_tokens))
    grain_bytes = grain // unit_tokens * unit_bytes
    all_bytes, most_bytes = int(grain_bytes.sum()), int(grain_bytes.max())
    wanted = max(slot_bytes, PIECE_BYTES * len(unit_bytes)) // all_bytes
    limit = max(1, min(wanted, slot_bytes // most_bytes)) * grain
    step = lcm(grain, ALIGN)
    if limit < step:
        step = grain
    limit -= limit % step
    spans = -(-tokens // limit)
    return -(-tokens // (spans * step)) * step


def _bands(sizes: Numbers, slot_bytes: int) -> tuple[int, ...]:
    """Where to cut a span's strips so that each band fits a slot."""
    ends = np.cumsum(sizes)
    bands = [0]
    while bands[-1] < len(sizes):
        done = int(ends[bands[-1] - 1]) if bands[-1] else 0
        bands.append(int(np.searchsorted(ends, done + slot_bytes, side="right")))
    return tuple(bands)


def _seal(rows: Sequence[Strip], strips: Sequence[Strip]) -> bytes:
    """A digest of all that both sides must see alike: the rows before folding and the strips after."""
    seal = [
        (strip.sink.layer, strip.sink.part, strip.sink.first_head + strip.sink_head, strip.heads, strip.wire)
        for strip in (*rows, *strips)
    ]
    return hashlib.blake2b(msgspec.msgpack.encode(seal), digest_size=16).digest()


def _sealed(
    first_token: int, end_token: int, weave: Weave, slot_bytes: int, span_tokens: int, bands: tuple[int, ...]
) -> Plan:
    """The plan with its digest."""
    tokens = (first_token, end_token, span_tokens)
    whole = ("kvbridge plan 1", ALIGN, slot_bytes, tokens, bands, weave.unit_tokens.tolist(), weave.digest)
    digest = hashlib.blake2b(msgspec.msgpack.encode(whole), digest_size=16).hexdigest()
    unit_tokens, unit_bytes = weave.unit_tokens, weave.unit_bytes
    return Plan(first_token, end_token, weave.strips, unit_tokens, unit_bytes, span_tokens, bands, digest)


NOTHING = Weave((), np.zeros(0, np.int64), np.zeros(0, np.int64), b"")
