"""What moves between one sender and one receiver, cut into slot-sized chunks. Pure.

Both agents derive the same plan from the two pools; they compare its digest, then speak of chunks by number.

A plan is a list of legs, each a grid of chunks (see group_plan.py): first the full layers, then what keeps a window,
then states. Nothing is listed: a chunk is arithmetic, and only its moves are spelled out when its turn comes.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm

import msgspec
import numpy as np
from kvbridge_proto.common import Blocks
from kvbridge_proto.peer import Take
from kvbridge_proto.pool import Codec, Group, Plane, Pool

from ..errors import KVBridgeError, OperatorError, PeerError
from .coalesce import fold
from .group_plan import ALIGN as ALIGN
from .group_plan import ORDER, GroupPlan, GroupTemplate, fitted
from .layers import align
from .plane_pair import PlanePair, pair
from .shard import common
from .token_shard import TokenShard
from .tokens import BlockTable, Places
from .wire import is_same_row, is_same_scales, scales_of


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Rows of one plane <-> bytes of a slot.

    The plane's own heads [first_head, first_head + heads) at `places` lie in the slot from `slot_offset` on
    as `[head][place][row]` in the codec `wire`. `plane.codec` is the memory's; its scales are none, one, or one
    for each of the plane's heads; those of `wire` are none, one, or one for each of the move's heads. Place p
    is unit `p % units` of block `p // units`, `units` being the count of the plane's token axis. `scale` is where
    the plane's rows have a scale each: numbers are converted, and their scales read or made anew.
    """

    plane: Plane
    first_head: int
    heads: int
    wire: Codec
    slot_offset: int
    places: Places
    unit_tokens: int = 1
    scale: Plane | None = None

    @property
    def size_bytes(self) -> int:
        return self.heads * len(self.places) * self.wire.row_bytes

    @property
    def is_bitwise(self) -> bool:
        """True if the bytes move as they are: the same codec with the same scales."""
        memory = scales_of(self.plane.codec, self.first_head, self.heads)
        is_same = is_same_row(self.plane.codec, self.wire) and is_same_scales(memory, self.wire.scales)
        return is_same and self.scale is None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Strips [first_strip, end_strip) of marks [first_mark, end_mark) of a leg, to be gathered once it may be.

    That is once `needs_tokens` tokens are there, and if it `is_late`, once no more will come.
    """

    index: int
    leg: int
    first_mark: int
    end_mark: int
    first_strip: int
    end_strip: int
    size_bytes: int
    needs_tokens: int
    is_late: bool


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The legs, see the module; `strips` are those of all legs, `digest` names all of it."""

    first_token: int
    end_token: int
    strips: tuple[PlanePair, ...]
    legs: tuple[GroupPlan, ...]
    chunks: int
    digest: str
    _spelled: dict[int, Chunk] = field(default_factory=dict, init=False, repr=False)  # asked for many times each

    @property
    def total_bytes(self) -> int:
        """Slot bytes of all chunks together."""
        return sum(leg.total_bytes for leg in self.legs)

    @property
    def early_chunks(self) -> int:
        """How many chunks, the first ones, may be gathered while tokens are still being computed."""
        return sum(leg.chunks for leg in self.legs if not leg.is_late)

    def chunk(self, index: int) -> Chunk:
        """Chunk `index` of [0, chunks)."""
        if (known := self._spelled.get(index)) is not None:
            return known
        if not 0 <= index < self.chunks:
            raise IndexError(f"chunk: {index} of {self.chunks}")
        number, at = 0, index
        while at >= self.legs[number].chunks:
            at -= self.legs[number].chunks
            number += 1
        leg = self.legs[number]
        span, band = divmod(at, len(leg.bands) - 1)
        first = leg.first + span * leg.span_tokens
        end = min(first + leg.span_tokens, leg.end)
        chunk = self._spelled[index] = Chunk(
            index,
            number,
            first,
            end,
            leg.first_strip + leg.bands[band],
            leg.first_strip + leg.bands[band + 1],
            leg.bytes_of(band, end - first),
            self.end_token if leg.is_late else leg.comb.token(end - 1) + 1,
            leg.is_late,
        )
        return chunk

    def sender_moves(self, chunk: Chunk, tables: Mapping[int, BlockTable]) -> tuple[Move, ...]:
        """How the sender gathers the chunk into a slot; `tables` are its block tables, by group."""
        return Part(self, chunk, tables, is_sender=True).moves()

    def receiver_moves(self, chunk: Chunk, tables: Mapping[int, BlockTable]) -> tuple[Move, ...]:
        """How the receiver scatters the chunk from a slot; `tables` are its block tables, by group."""
        return Part(self, chunk, tables, is_sender=False).moves()


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One chunk as one side of a plan sees it; `tables` are that side's block tables, by group."""

    plan: Plan
    chunk: Chunk
    tables: Mapping[int, BlockTable]
    is_sender: bool

    def moves(self) -> tuple[Move, ...]:
        chunk, leg = self.chunk, self.plan.legs[self.chunk.leg]
        first, end = chunk.first_strip - leg.first_strip, chunk.end_strip - leg.first_strip
        sizes = leg.sizes(bisect_left(leg.bands, first), chunk.end_mark - chunk.first_mark)
        offsets = (np.cumsum(sizes) - sizes).tolist()
        places: dict[tuple[int, int], Places] = {}
        moves: list[Move] = []
        for strip, offset in zip(leg.strips[first:end], offsets, strict=True):
            if self.is_sender:
                plane, first_head, scale = strip.sender, strip.sender_head, strip.sender_scale
            else:
                plane, first_head, scale = strip.receiver, strip.receiver_head, strip.receiver_scale
            unit_tokens = strip.unit_tokens
            key = (plane.group, unit_tokens)
            if key not in places:
                places[key] = self.places(*key)
            moves.append(Move(plane, first_head, strip.heads, strip.wire, offset, places[key], unit_tokens, scale))
        return tuple(moves)

    def places(self, group: int, unit_tokens: int) -> Places:
        """The places of every move of this group whose rows are `unit_tokens` long."""
        chunk, leg = self.chunk, self.plan.legs[self.chunk.leg]
        table = self.tables[group]
        if leg.kind == "state":
            return table.last(self.plan.end_token)
        return table.at(leg.comb, chunk.first_mark, chunk.end_mark, unit_tokens)

    @property
    def form(self) -> object:
        """Equal for parts whose moves differ in their places only, while the plan's strips exist.

        The strips tell the leg: each is of one.
        """
        chunk = self.chunk
        marks = chunk.end_mark - chunk.first_mark
        return id(self.plan.strips), chunk.first_strip, chunk.end_strip, marks, self.is_sender


@dataclass(frozen=True, slots=True, eq=False)
class PlanTemplate:
    """What plans of the same rows share, whichever tokens they are of; `digest` is of all of it."""

    strips: tuple[PlanePair, ...]
    strands: tuple[GroupTemplate, ...]
    digest: bytes


NOTHING = PlanTemplate((), (), b"")


class Planner:
    """Makes the plans between two pools. Keeps what it has woven: requests mostly differ in their tokens only."""

    KEPT = 64

    def __init__(self, sender: Pool, receiver: Pool) -> None:
        self._sender = align(sender, receiver)
        self._receiver = receiver
        ours, theirs = TokenShard.of(sender.shard), TokenShard.of(receiver.shard)
        self._comb = ours & theirs
        self._is_whole = self._comb == ours == theirs
        self._period = lcm(*(group.block_tokens for group in sender.groups if group.kind != "state"))
        self._woven: dict[object, PlanTemplate] = {}

    def plan(self, takes: Sequence[Take], first_token: int, end_token: int, slot_bytes: int) -> Plan:
        """The plan by which the sender gives the rows `takes` of tokens [first_token, end_token) to the receiver.

        It has no chunks where the two have no tokens in common. Raises PeerError for takes or tokens that cannot be,
        OperatorError if a slot is too small for a row.
        """
        if not 0 <= first_token <= end_token:
            raise PeerError("bad_tokens", f"end_token: {end_token}, first_token: {first_token}")
        if not takes or first_token == end_token:
            return _cut(NOTHING, first_token, first_token, slot_bytes)
        first_mark = self._comb.count(first_token) % self._period if self._is_whole else 0
        key = (tuple(takes), first_mark, slot_bytes)
        if (weave := self._woven.pop(key, None)) is None:
            weave = self._weave(takes, first_mark, slot_bytes)
            if len(self._woven) == self.KEPT:
                del self._woven[next(iter(self._woven))]
        self._woven[key] = weave  # the newest last
        return _cut(weave, first_token, end_token, slot_bytes)

    def samples(self, slot_bytes: int, is_sender: bool) -> list[Part]:
        """The first chunk of each leg, from a block's border on and from inside a block: what is to be expected.

        As one side sees them; their blocks are any. Empty where the two pools have no rows in common.
        """
        takes, own = common(self._sender, self._receiver), self._sender if is_sender else self._receiver
        if not self._comb.marks:
            return []
        groups = [group for pool in (self._sender, self._receiver) for group in pool.groups if group.kind != "state"]
        end_token = self._comb.token(max((group.block_tokens for group in groups), default=1) - 1) + 1
        share = TokenShard.of(own.shard)
        tables = {}
        for index, group in enumerate(own.groups):
            entries = -(-share.count(end_token + 1) // group.block_tokens)
            if group.kind == "state":  # the last two entries: the peer's blocks say how many there are
                piece = Blocks(index, max(0, entries - 2), (0,) * min(2, entries))
            elif entries <= group.blocks:
                piece = Blocks(index, 0, tuple(range(entries)))
            else:
                return []
            tables[index] = BlockTable.of(group, piece, share=share)
        try:
            plans = [self.plan(takes, first, end_token + first, slot_bytes) for first in (0, 1)]
        except KVBridgeError:  # whoever wants something will be told
            return []
        return [Part(each, each.chunk(index), tables, is_sender) for each in plans for index in _first_of_legs(each)]

    def _weave(self, takes: Sequence[Take], first_mark: int, slot_bytes: int) -> PlanTemplate:
        usable, groups = slot_bytes // ALIGN * ALIGN, self._receiver.groups
        strands: list[GroupTemplate] = []
        sealed: list[object] = [self._comb.period, self._comb.marks]
        first_strip = 0
        for group, rows in _by_leg(pair(self._sender, self._receiver, takes), groups):
            strips = None
            if group.kind != "state":  # a window does not begin at `first_mark`, by which rows are folded
                is_whole = self._is_whole and group.kind == "full"
                strips = fitted(fold(rows, self._sender, self._receiver, first_mark, usable, is_whole), usable)
            strips = strips or fitted(rows, usable)
            if strips is None:
                widest = max(rows, key=lambda strip: strip.wire.row_bytes)
                raise OperatorError(
                    "slot_too_small",
                    f"slot_bytes: {slot_bytes}, a row of layer {widest.receiver.layer} {widest.receiver.part} "
                    f"has {widest.wire.row_bytes} bytes",
                )
            strands.append(GroupTemplate.of(group, self._receiver.shard, self._comb, strips, first_strip))
            first_strip += len(strips)
            sealed += [*_leg_of(group), _seal(rows), _seal(strips)]
        digest = hashlib.blake2b(msgspec.msgpack.encode(sealed), digest_size=16).digest()
        return PlanTemplate(tuple(strip for strand in strands for strip in strand.strips), tuple(strands), digest)


def plan(
    sender: Pool, receiver: Pool, takes: Sequence[Take], first_token: int, end_token: int, slot_bytes: int
) -> Plan:
    """One plan, see Planner."""
    return Planner(sender, receiver).plan(takes, first_token, end_token, slot_bytes)


def _by_leg(strips: Sequence[PlanePair], groups: Sequence[Group]) -> list[tuple[Group, list[PlanePair]]]:
    """The strips of each leg, in the order of the legs, with a group that is like all of its groups."""
    legs: dict[tuple[int, int, int], tuple[Group, list[PlanePair]]] = {}
    of = [legs.setdefault(_leg_of(group), (group, []))[1] for group in groups]
    for strip in strips:
        of[strip.receiver.group].append(strip)
    return [legs[key] for key in sorted(legs) if legs[key][1]]


def _leg_of(group: Group) -> tuple[int, int, int]:
    """Groups for which this is the same need the same tokens."""
    is_window = group.kind in ("sliding", "chunked")
    return ORDER.index(group.kind), *((group.window, group.block_tokens) if is_window else (0, 0))


def _seal(strips: Sequence[PlanePair]) -> list[object]:
    """All of these strips that both sides must see alike."""
    return [
        (
            strip.receiver.layer,
            strip.receiver.part,
            strip.receiver.first_head + strip.receiver_head,
            strip.heads,
            strip.wire,
            strip.unit_tokens,
        )
        for strip in strips
    ]


def _cut(weave: PlanTemplate, first_token: int, end_token: int, slot_bytes: int) -> Plan:
    """The plan of some tokens, with its digest."""
    usable = slot_bytes // ALIGN * ALIGN
    found = [strand.cut(first_token, end_token, usable) for strand in weave.strands]
    legs = tuple(leg for leg in found if leg is not None)
    grids = [(leg.kind, leg.first, leg.end, leg.span_tokens, leg.bands) for leg in legs]
    whole = ("kvbridge plan 2", ALIGN, slot_bytes, first_token, end_token, grids, weave.digest)
    digest = hashlib.blake2b(msgspec.msgpack.encode(whole), digest_size=16).hexdigest()
    return Plan(first_token, end_token, weave.strips, legs, sum(leg.chunks for leg in legs), digest)


def _first_of_legs(planned: Plan) -> list[int]:
    """The first chunk of each leg."""
    firsts, done = [], 0
    for leg in planned.legs:
        firsts.append(done)
        done += leg.chunks
    return firsts
