"""Group plans: plane pairs that move for the same tokens, as a grid of token spans x bands of pairs. Pure.

A group plan counts local tokens of what sender and receiver have in common (see tokens.py). All full layers are
one, or one for each kind of rows, and apart by the tokens that a row stands for. Layers that keep a window are apart by
kind, window and block size too. The states, one row each however many tokens, are the last. A pair belongs to the
group plan of its group in the receiver's pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import lcm
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from kvbridge_proto.pool import Group, GroupKind, Shard

from ..cache_kinds import comes_last, is_one_row, needed
from ..values import Value
from .check import is_beside
from .plane_pair import PlanePair, split_heads
from .tokens import TokenShard

# Plane pairs begin at multiples of this in a slot, so that rows can be moved as wide words.
ALIGN = 16
# Spans are cut so that a pair has about this much in a chunk: less costs a call per few rows, more delays the
# first chunk of a prompt that is still being computed.
PIECE_BYTES = 128 << 10
# A copier lists where a chunk's rows are: 8 bytes each, on both sides of a pull. For all lists of a chunk it has a
# sixteenth of a slot, and more of a small one. A kind of rows has one list a side, so with this they take half of it;
# rows whose scales lie elsewhere have two lists a side. Both agents must cut alike, so this is no option of a copier.
LISTED_BYTES = 512
LEAST_SLOT_BYTES = 1 << 20  # a smaller slot may list as much as one of this size
# A plan of more chunks is not taken apart: a peer names how many tokens there are, and the order of chunks is a list.
MOST_APART = 1024

Numbers = npt.NDArray[np.int64]
Size = TypeVar("Size", int, Numbers)


class GroupTemplate(Value, eq=False):
    """A group plan before its tokens are known. `first_pair` is where its pairs begin among those of the plan.

    `alike` has the same pairs apart by what one launch moves; it is empty if they are all alike.
    """

    group: Group  # the receiver's, or one like it: it says which tokens are needed
    shard: Shard  # the receiver's
    token_shard: TokenShard
    pairs: tuple[PlanePair, ...]
    first_pair: int
    units: Units
    row_tokens: int
    comes_last: bool
    sender_groups: frozenset[int]  # of the sender's pool, that the pairs are in
    alike: tuple[GroupTemplate, ...] = ()

    @classmethod
    def of(
        cls, group: Group, shard: Shard, token_shard: TokenShard, pairs: Sequence[PlanePair], first_pair: int
    ) -> GroupTemplate:
        """With the pairs in an order of its own: those that are alike are neighbours."""
        ordered = sorted(pairs, key=_launched)
        at, alike = first_pair, []
        for _, found in groupby(ordered, _launched):
            kind = tuple(found)
            alike.append(cls._of(group, shard, token_shard, kind, at))
            at += len(kind)
        if len(alike) == 1:
            return alike[0]
        return cls._of(group, shard, token_shard, tuple(ordered), first_pair, tuple(alike))

    @classmethod
    def _of(
        cls,
        group: Group,
        shard: Shard,
        token_shard: TokenShard,
        pairs: tuple[PlanePair, ...],
        first_pair: int,
        alike: tuple[GroupTemplate, ...] = (),
    ) -> GroupTemplate:
        sender_groups = frozenset(pair.sender.group for pair in pairs)
        derived = Units.of(pairs), pairs[0].receiver.row_tokens, comes_last(group.kind), sender_groups
        return cls(group, shard, token_shard, pairs, first_pair, *derived, alike)

    def cut(self, first_token: int, end_token: int, slot_bytes: int) -> list[GroupPlan]:
        """The group plans of tokens [first_token, end_token), at least one; none if this group needs none of them.

        Several chunks would each hold a few rows of every kind, and each kind costs a launch. So each kind has chunks
        of its own then.
        """
        whole = self._cut(first_token, end_token, slot_bytes)
        if whole is None:
            return []
        if not self.alike or not 1 < whole.chunks <= MOST_APART or len(whole.bands) > 2:
            return [whole]
        apart = [template._cut(first_token, end_token, slot_bytes) for template in self.alike]
        return [group_plan for group_plan in apart if group_plan is not None]

    def _cut(self, first_token: int, end_token: int, slot_bytes: int) -> GroupPlan | None:
        kind, token_shard = self.group.kind, self.token_shard
        if is_one_row(kind):
            first, end = 0, 1
        else:
            first_token = needed(self.group, first_token, end_token, self.shard)
            row = self.row_tokens  # only whole rows: those of the last tokens are not there yet
            first, end = (token_shard.count(token) // row * row for token in (first_token, end_token))
        if first == end:
            return None
        span = self.units.span(end - first, slot_bytes)
        first_span = min(span, end - first)
        span_bytes = self.units.bytes_of(first_span)
        is_one_band = span_bytes <= slot_bytes
        bands = (0, len(self.pairs)) if is_one_band else _bands(self.units.sizes(first_span), slot_bytes)
        chunks = -(-(end - first) // span) * (len(bands) - 1)
        spans, tail = divmod(end - first, first_span)
        total_bytes = spans * span_bytes + (self.units.bytes_of(tail) if tail else 0)
        of = kind, self.comes_last, token_shard, first, end, self.pairs, self.first_pair, self.sender_groups
        return GroupPlan(*of, self.units, span, bands, chunks, span_bytes, total_bytes)


class Units(Value, eq=False):
    """The units in which the pairs of a group plan move: for each pair, its tokens and its bytes."""

    tokens: Numbers
    bytes_each: Numbers
    alike: tuple[tuple[int, int, int], ...]  # (tokens, bytes, how many pairs): few, whatever the number of pairs
    grain: int  # the least number of tokens that is a multiple of every unit
    grain_bytes: int  # of all pairs together
    most_grain_bytes: int  # of one pair
    lists: int  # on a side, of places
    _limits: dict[int, tuple[int, int]] = msgspec.field(default_factory=dict)  # by slot_bytes

    @classmethod
    def of(cls, pairs: Sequence[PlanePair]) -> Units:
        tokens = np.array([pair.unit_tokens for pair in pairs], np.int64)
        bytes_each = np.array([pair.unit_bytes for pair in pairs], np.int64)
        grain = int(np.lcm.reduce(tokens))
        grain_bytes = grain // tokens * bytes_each
        alike = Counter((pair.unit_tokens, pair.unit_bytes) for pair in pairs)
        kinds = tuple((*unit, count) for unit, count in alike.items())
        lists = 2 if any(map(_has_scales_elsewhere, pairs)) else 1
        return cls(tokens, bytes_each, kinds, grain, int(grain_bytes.sum()), int(grain_bytes.max()), lists)

    def rows(self, tokens: int) -> tuple[int, ...]:
        """How many rows of each kind there are in a span of `tokens` tokens."""
        return tuple(-(-tokens // each) for each, _, _ in self.alike)

    def bytes_of(self, tokens: int) -> int:
        """Slot bytes of all pairs together for a span of `tokens` tokens."""
        total = 0
        for each, size, count in self.alike:
            total += count * _aligned(-(-tokens // each) * size)
        return total

    def sizes(self, tokens: int, first: int = 0, end: int | None = None) -> Numbers:
        """Slot bytes of each of the pairs [first, end) for a span of `tokens` tokens."""
        return _aligned(-(-tokens // self.tokens[first:end]) * self.bytes_each[first:end])

    def span(self, tokens: int, slot_bytes: int) -> int:
        """Tokens of a span, of `tokens` in all: enough to fill a slot or to give each pair PIECE_BYTES.

        No pair has more than a slot, nor more rows than a copier has room to list. A multiple of every unit and, if
        possible, of ALIGN (then nothing is padded). All spans are about equal.
        """
        if (known := self._limits.get(slot_bytes)) is None:
            known = self._limits[slot_bytes] = self._limit(slot_bytes)
        limit, step = known
        spans = -(-tokens // limit)
        return -(-tokens // (spans * step)) * step

    def _limit(self, slot_bytes: int) -> tuple[int, int]:
        """The longest span, and what spans are multiples of. Kept: a session has one size of slots."""
        wanted = max(slot_bytes, PIECE_BYTES * len(self.tokens)) // self.grain_bytes
        listed = max(slot_bytes, LEAST_SLOT_BYTES) // (LISTED_BYTES * self.lists) * int(self.tokens.min()) // self.grain
        limit = max(1, min(wanted, listed, slot_bytes // self.most_grain_bytes)) * self.grain
        step = lcm(self.grain, ALIGN)
        if limit < step:
            step = self.grain
        return limit - limit % step, step


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlan:
    """Local tokens [first, end) of `token_shard` for each pair; [0, 1) for states.

    `bands` are where each band begins among the pairs, and where the last ends. With n bands, chunk i is band `i % n`
    of span `i // n`, so the first tokens leave first while a prompt is still being computed.
    """

    kind: GroupKind
    comes_last: bool  # see cache_kinds.py
    token_shard: TokenShard
    first: int
    end: int
    pairs: tuple[PlanePair, ...]
    first_pair: int
    sender_groups: frozenset[int]  # of the sender's pool, that the pairs are in
    units: Units
    span_tokens: int
    bands: tuple[int, ...]
    chunks: int
    span_bytes: int  # slot bytes of the first span, in all its bands
    total_bytes: int  # slot bytes of all chunks together
    _known_bytes: dict[tuple[int, int], int] = field(default_factory=dict, init=False, repr=False)

    def end_of(self, chunk: int) -> int:
        """One past the last of the local tokens of this plan's chunk `chunk`."""
        return min(self.first + (chunk // (len(self.bands) - 1) + 1) * self.span_tokens, self.end)

    def sizes(self, band: int, tokens: int) -> Numbers:
        """Slot bytes of each pair of a band, for a span of `tokens` tokens."""
        return self.units.sizes(tokens, self.bands[band], self.bands[band + 1])

    def bytes_of(self, band: int, tokens: int) -> int:
        """Slot bytes of a chunk. Remembered, as most chunks are alike."""
        if len(self.bands) == 2 and tokens == min(self.span_tokens, self.end - self.first):
            return self.span_bytes
        size = self._known_bytes.get((band, tokens))
        if size is None:
            size = self._known_bytes[band, tokens] = int(self.sizes(band, tokens).sum())
        return size


def fitted(pairs: Sequence[PlanePair], slot_bytes: int) -> list[PlanePair] | None:
    """The pairs, cut by heads so that the shortest possible span fits a slot; None if one head does not fit."""
    grain = lcm(*{pair.unit_tokens for pair in pairs})
    fitting: list[PlanePair] = []
    for pair in pairs:
        heads = slot_bytes // (grain // pair.unit_tokens * pair.wire.row_bytes)
        if not heads:
            return None
        fitting += split_heads(pair, heads)
    return fitting


def _has_scales_elsewhere(pair: PlanePair) -> bool:
    """True if rows and their own scales have other strides, so that two lists say where they are."""
    sides = (pair.sender, pair.sender_scale), (pair.receiver, pair.receiver_scale)
    return any(scale is not None and not is_beside(plane, scale) for plane, scale in sides)


def _launched(pair: PlanePair) -> tuple[object, ...]:
    """Equal for pairs that one launch moves, as far as their rows decide it."""
    return pair.unit_tokens, pair.wire.row_bytes, pair.heads, pair.sender.codec.name, pair.receiver.codec.name


def _aligned(size_bytes: Size) -> Size:
    """Rounded up to ALIGN: a number, or an array of them."""
    return -(-size_bytes // ALIGN) * ALIGN


def _bands(sizes: Numbers, slot_bytes: int) -> tuple[int, ...]:
    """Where to cut a span's pairs so that each band fits a slot."""
    ends = np.cumsum(sizes)
    bands = [0]
    while bands[-1] < len(sizes):
        done = int(ends[bands[-1] - 1]) if bands[-1] else 0
        bands.append(int(np.searchsorted(ends, done + slot_bytes, side="right")))
    return tuple(bands)
