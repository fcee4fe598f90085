"""What moves between one sender and one receiver, cut into slot-sized chunks. Pure.

Both agents derive the same plan from the two pools; they compare its digest, then speak of chunks by number.

A plan is a list of group plans, each a grid of chunks (see group_plan.py): first the full layers, then layers that keep
a window, then states. Chunks are computed when their turn comes, and so are their moves.
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

from ..cache_kinds import CACHE_KINDS, comes_last, has_window, is_one_row
from ..errors import KVBridgeError, OperatorError, PeerError
from ..values import Value
from .coalesce import coalesce
from .group_plan import ALIGN as ALIGN
from .group_plan import GroupPlan, GroupTemplate, fitted
from .layers import align
from .plane_pair import PlanePair, pair_planes
from .shard import common
from .tokens import BlockTable, Places, TokenShard, counted_by
from .wire import is_same_row, is_same_scales, scales_of


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Rows of one plane <-> bytes of a slot.

    The plane's own heads [first_head, first_head + heads) at `places` lie in the slot from `slot_offset` on
    as `[head][place][row]` in the codec `wire`. `plane.codec` is the memory's; its scales are none, one, or one
    for each of the plane's heads; those of `wire` are none, one, or one for each of the move's heads. Place p
    is unit `p % units` of block `p // units`, where `units` is the count of the plane's token axis. If the rows have a
    scale each and are converted, `scale` is the plane of these scales, which are read or computed. With `rotates` rows
    are multiplied by a Hadamard matrix when they are written.
    """

    plane: Plane
    first_head: int
    heads: int
    wire: Codec
    slot_offset: int
    places: Places
    unit_tokens: int = 1
    scale: Plane | None = None
    rotates: bool = False

    @property
    def size_bytes(self) -> int:
        return self.heads * len(self.places) * self.wire.row_bytes

    @property
    def is_bitwise(self) -> bool:
        """True if the bytes move as they are: the same codec with the same scales."""
        memory = scales_of(self.plane.codec, self.first_head, self.heads)
        is_same = is_same_row(self.plane.codec, self.wire) and is_same_scales(memory, self.wire.scales)
        return is_same and self.scale is None and not self.rotates


class Chunk(Value):
    """Plane pairs [first_pair, end_pair) for local tokens [first_local, end_local) of a group plan.

    It may be gathered once `needs_tokens` tokens are there and, if it `comes_last`, no more will come.
    """

    index: int
    group_plan: int
    first_local: int
    end_local: int
    first_pair: int
    end_pair: int
    size_bytes: int
    needs_tokens: int
    comes_last: bool


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The group plans, see the module. `pairs` are those of all group plans; `digest` covers everything."""

    first_token: int
    end_token: int
    pairs: tuple[PlanePair, ...]
    group_plans: tuple[GroupPlan, ...]
    chunks: int
    total_bytes: int  # slot bytes of all chunks together
    digest: str
    order: Sequence[int]  # of each chunk, its number if the group plans' chunks are counted one after another
    _chunk_cache: dict[int, Chunk] = field(default_factory=dict, init=False, repr=False)  # each is asked for many times

    @property
    def early_chunks(self) -> int:
        """How many chunks may be gathered while tokens are still being computed; they come first."""
        return sum(group_plan.chunks for group_plan in self.group_plans if not group_plan.comes_last)

    def bytes_of(self, first_chunk: int, end_chunk: int) -> int:
        """Slot bytes of chunks [first_chunk, end_chunk)."""
        if end_chunk - first_chunk == self.chunks:
            return self.total_bytes
        return sum(self.chunk(index).size_bytes for index in range(first_chunk, end_chunk))

    def chunk(self, index: int) -> Chunk:
        """Chunk `index` of [0, chunks)."""
        if (known := self._chunk_cache.get(index)) is not None:
            return known
        if not 0 <= index < self.chunks:
            raise IndexError(f"chunk: {index} of {self.chunks}")
        number, at = 0, self.order[index]
        while at >= self.group_plans[number].chunks:
            at -= self.group_plans[number].chunks
            number += 1
        group_plan = self.group_plans[number]
        span, band = divmod(at, len(group_plan.bands) - 1)
        first = group_plan.first + span * group_plan.span_tokens
        end = min(first + group_plan.span_tokens, group_plan.end)
        chunk = self._chunk_cache[index] = Chunk(
            index,
            number,
            first,
            end,
            group_plan.first_pair + group_plan.bands[band],
            group_plan.first_pair + group_plan.bands[band + 1],
            group_plan.bytes_of(band, end - first),
            self.end_token if group_plan.comes_last else group_plan.token_shard.token(end - 1) + 1,
            group_plan.comes_last,
        )
        return chunk

    def whole_at(self, chunk: Chunk) -> int:
        """From how many computed tokens on nothing that moves with this chunk is written any more.

        Where blocks move whole, the last one may have tokens beyond the chunk's.
        """
        group_plan = self.group_plans[chunk.group_plan]
        if group_plan.comes_last:
            return self.end_token
        grain = group_plan.units.grain
        return group_plan.token_shard.token(-(-chunk.end_local // grain) * grain - 1) + 1


class Part(Value, eq=False):
    """One chunk as one side of a plan sees it; `tables` are that side's block tables, by group."""

    plan: Plan
    chunk: Chunk
    tables: Mapping[int, BlockTable]
    is_sender: bool

    def moves(self) -> tuple[Move, ...]:
        chunk, group_plan = self.chunk, self.plan.group_plans[self.chunk.group_plan]
        first, end = chunk.first_pair - group_plan.first_pair, chunk.end_pair - group_plan.first_pair
        sizes = group_plan.sizes(bisect_left(group_plan.bands, first), chunk.end_local - chunk.first_local)
        offsets = (np.cumsum(sizes) - sizes).tolist()
        places: dict[tuple[int, int], Places] = {}
        moves: list[Move] = []
        for pair, offset in zip(group_plan.pairs[first:end], offsets, strict=True):
            if self.is_sender:
                plane, first_head, scale = pair.sender, pair.sender_head, pair.sender_scale
            else:
                plane, first_head, scale = pair.receiver, pair.receiver_head, pair.receiver_scale
            unit_tokens = pair.unit_tokens
            key = (plane.group, unit_tokens)
            if key not in places:
                places[key] = self.places(*key)
            rotates = pair.rotates and not self.is_sender
            where = offset, places[key], unit_tokens
            moves.append(Move(plane, first_head, pair.heads, pair.wire, *where, scale, rotates))
        return tuple(moves)

    def places(self, group: int, unit_tokens: int) -> Places:
        """The places of every move of this group whose rows are `unit_tokens` long."""
        chunk, group_plan = self.chunk, self.plan.group_plans[self.chunk.group_plan]
        table = self.tables[group]
        if is_one_row(group_plan.kind):
            return table.last(self.plan.end_token)
        return table.at(group_plan.token_shard, chunk.first_local, chunk.end_local, unit_tokens)

    @property
    def template_key(self) -> object:
        """Equal for parts whose moves differ in their places only, while the plan's pairs exist.

        The pairs imply the group plan: each belongs to one. Prompts mostly differ in their tokens, and where whole
        blocks move as one row those with equally many blocks are alike.
        """
        chunk = self.chunk
        rows = self.plan.group_plans[chunk.group_plan].units.rows(chunk.end_local - chunk.first_local)
        return id(self.plan.pairs), chunk.first_pair, chunk.end_pair, rows, self.is_sender


class PlanTemplate(Value, eq=False):
    """What all plans of the same rows share, whatever their tokens. `digest` covers everything."""

    pairs: tuple[PlanePair, ...]
    group_templates: tuple[GroupTemplate, ...]
    digest: bytes


NOTHING = PlanTemplate((), (), b"")


class Planner:
    """Makes the plans between two pools. Keeps its templates: requests mostly differ in their tokens only.

    `moves_units`: see `coalesce`. Both agents must say the same.
    """

    KEPT_TEMPLATES = 64

    def __init__(self, sender: Pool, receiver: Pool, moves_units: bool = True) -> None:
        self._moves_units = moves_units
        self._sender = align(sender, receiver)
        self._receiver = receiver
        ours, theirs = TokenShard.of(sender.shard), TokenShard.of(receiver.shard)
        self._token_shard = ours & theirs
        self._is_whole = self._token_shard == ours == theirs
        self._period = lcm(*(group.block_tokens for group in sender.groups if not is_one_row(group.kind)))
        self._templates: dict[object, PlanTemplate] = {}

    def plan(self, takes: Sequence[Take], first_token: int, end_token: int, slot_bytes: int) -> Plan:
        """The plan by which the sender gives the rows `takes` of tokens [first_token, end_token) to the receiver.

        It has no chunks if the two have no tokens in common. Raises PeerError for invalid takes or tokens,
        OperatorError if a slot is too small for a row.
        """
        if not 0 <= first_token <= end_token:
            raise PeerError("bad_tokens", f"end_token: {end_token}, first_token: {first_token}")
        if not takes or first_token == end_token:
            return _cut(NOTHING, first_token, first_token, slot_bytes)
        first_local = self._token_shard.count(first_token) % self._period if self._is_whole else 0
        key = (tuple(takes), first_local, slot_bytes)
        if (template := self._templates.pop(key, None)) is None:
            template = self._template(takes, first_local, slot_bytes)
            if len(self._templates) == self.KEPT_TEMPLATES:
                del self._templates[next(iter(self._templates))]
        self._templates[key] = template  # the newest last
        return _cut(template, first_token, end_token, slot_bytes)

    def samples(self, slot_bytes: int, is_sender: bool) -> list[Part]:
        """Chunks to expect: the first of each group plan, beginning on a block's border and inside a block.

        They are as one side sees them, with arbitrary blocks. Empty if the two pools have nothing in common.
        """
        takes, own = common(self._sender, self._receiver), self._sender if is_sender else self._receiver
        groups = [
            group for pool in (self._sender, self._receiver) for group in pool.groups if not is_one_row(group.kind)
        ]
        token_shard = TokenShard.of(own.shard)
        counted = self._token_shard if self._token_shard.residues else token_shard  # else they share states only
        end_token = counted.token(max((group.block_tokens for group in groups), default=1) - 1) + 1
        tables = {}
        for index, group in enumerate(own.groups):
            entries = -(-counted_by(group, token_shard).count(end_token + 1) // group.block_tokens)
            if is_one_row(group.kind):  # only the last two entries: large blocks of the peer may make many
                piece = Blocks(index, max(0, entries - 2), (0,) * min(2, entries))
            elif entries <= group.blocks:
                piece = Blocks(index, 0, tuple(range(entries)))
            else:
                return []
            tables[index] = BlockTable.of(group, piece, token_shard=token_shard)
        try:
            plans = [self.plan(takes, first, end_token + first, slot_bytes) for first in (0, 1)]
        except KVBridgeError:  # the first real request will report it
            return []
        return [
            Part(each, each.chunk(index), tables, is_sender) for each in plans for index in _first_of_group_plans(each)
        ]

    def _template(self, takes: Sequence[Take], first_local: int, slot_bytes: int) -> PlanTemplate:
        usable, groups = slot_bytes // ALIGN * ALIGN, self._receiver.groups
        group_templates: list[GroupTemplate] = []
        sealed: list[object] = [self._token_shard.period, self._token_shard.residues]
        first_pair = 0
        for group, rows in _by_group_plan(pair_planes(self._sender, self._receiver, takes), groups):
            pairs = None
            if not is_one_row(group.kind):  # a window does not begin at `first_local`, as coalescing assumes
                is_whole = self._is_whole and not comes_last(group.kind)
                how = first_local, usable, is_whole, self._moves_units
                pairs = fitted(coalesce(rows, self._sender, self._receiver, *how), usable)
            pairs = pairs or fitted(rows, usable)
            if pairs is None:
                widest = max(rows, key=lambda pair: pair.wire.row_bytes)
                raise OperatorError(
                    "slot_too_small",
                    f"slot_bytes: {slot_bytes}, a row of layer {widest.receiver.layer} {widest.receiver.part} "
                    f"has {widest.wire.row_bytes} bytes",
                )
            template = GroupTemplate.of(group, self._receiver.shard, self._token_shard, pairs, first_pair)
            group_templates.append(template)
            first_pair += len(pairs)
            sealed += [*_group_plan_of(group), _seal(rows), _seal(template.pairs)]  # in the order that slots have
        digest = hashlib.blake2b(msgspec.msgpack.encode(sealed), digest_size=16).digest()
        return PlanTemplate(
            tuple(pair for group_template in group_templates for pair in group_template.pairs),
            tuple(group_templates),
            digest,
        )


def plan(
    sender: Pool, receiver: Pool, takes: Sequence[Take], first_token: int, end_token: int, slot_bytes: int
) -> Plan:
    """One plan, see Planner."""
    return Planner(sender, receiver).plan(takes, first_token, end_token, slot_bytes)


def any_tables(plan: Plan, sender: Pool) -> dict[int, BlockTable]:
    """Tables as long as the sender's for this plan, or longer. Their blocks mean nothing."""
    token_shard, tables = TokenShard.of(sender.shard), {}
    for index in frozenset[int]().union(*(group_plan.sender_groups for group_plan in plan.group_plans)):
        group = sender.groups[index]
        counted = counted_by(group, token_shard)
        entries = -(-counted.count(plan.end_token) // group.block_tokens)
        tables[index] = BlockTable(group, 0, np.zeros(entries, np.int64), counted)
    return tables


def _by_group_plan(pairs: Sequence[PlanePair], groups: Sequence[Group]) -> list[tuple[Group, list[PlanePair]]]:
    """The pairs of each group plan, in order, with a group that stands for all of its groups."""
    keys = [_group_plan_of(group) for group in groups]
    whose = {key: group for key, group in reversed([*zip(keys, groups, strict=True)])}
    group_plans: dict[tuple[tuple[int, int, int], int], list[PlanePair]] = {}
    for pair in pairs:
        group_plans.setdefault((keys[pair.receiver.group], pair.receiver.row_tokens), []).append(pair)
    return [(whose[key[0]], group_plans[key]) for key in sorted(group_plans)]


def _group_plan_of(group: Group) -> tuple[int, int, int]:
    """The key of a group's plan. Groups with the same key need the same tokens."""
    order = [*CACHE_KINDS].index(group.kind)
    if not has_window(group.kind):
        return order, 0, 0
    begins = 0 if group.never_cached else 1 if group.begins_inside else group.block_tokens
    return order, group.window, begins


# Of a pair's wire codec. `scale_codec` is left out: scales cross as a pair of their own, if at all.
SEALED = ("name", "width", "element_bytes", "row_bytes", "scales")


def _seal(pairs: Sequence[PlanePair]) -> list[object]:
    """What both sides must agree on about these pairs."""
    sealed: list[object] = []
    known: dict[Codec, msgspec.Raw] = {}
    last = None
    for pair in pairs:
        receiver, wire = pair.receiver, pair.wire
        if last is None or wire != last:  # mostly it is equal, and to compare costs less than to hash
            if (raw := known.get(wire)) is None:
                raw = known[wire] = msgspec.Raw(msgspec.msgpack.encode({name: getattr(wire, name) for name in SEALED}))
            last = wire
        first_head = receiver.first_head + pair.receiver_head
        sealed.append((receiver.layer, receiver.part, first_head, pair.heads, raw, pair.unit_tokens))
    return sealed


def _cut(template: PlanTemplate, first_token: int, end_token: int, slot_bytes: int) -> Plan:
    """The plan of some tokens, with its digest."""
    usable = slot_bytes // ALIGN * ALIGN
    group_plans: list[GroupPlan] = []
    for group_template in template.group_templates:
        group_plans += group_template.cut(first_token, end_token, usable)
    grids, chunks, total_bytes = [], 0, 0
    for each in group_plans:
        grids.append((each.kind, each.first, each.end, each.span_tokens, each.bands))
        chunks += each.chunks
        total_bytes += each.total_bytes
    whole = ("kvbridge plan 2", ALIGN, slot_bytes, first_token, end_token, grids, template.digest)
    digest = hashlib.blake2b(msgspec.msgpack.encode(whole), digest_size=16).hexdigest()
    order = range(chunks) if len(group_plans) < 2 else _order(group_plans, chunks)
    return Plan(first_token, end_token, template.pairs, tuple(group_plans), chunks, total_bytes, digest, order)


def _order(group_plans: Sequence[GroupPlan], chunks: int) -> Sequence[int]:
    """The chunks of several group plans that may be gathered early, by what they need; then those that come last."""
    early = [group_plan for group_plan in group_plans if not group_plan.comes_last]  # they come first
    if len(early) < 2:  # perhaps with more chunks than could be listed
        return range(chunks)
    needed = [group_plan.end_of(at) for group_plan in early for at in range(group_plan.chunks)]
    return (*sorted(range(len(needed)), key=needed.__getitem__), *range(len(needed), chunks))


def _first_of_group_plans(planned: Plan) -> list[int]:
    """The first chunk of each group plan."""
    firsts, done = [], 0
    for group_plan in planned.group_plans:
        firsts.append(planned.order.index(done))
        done += group_plan.chunks
    return firsts
