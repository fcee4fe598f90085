"""The `pull` route: what the sender has told its receiver, and the read lease that bounds it. Pure.

A claim asks for a lease, and each renewal for another. The sender promises LEASE_S from when it answers. The receiver
counts on a little less, COUNTED_S, from when it asked. So its lease always ends first, and no two clocks are compared.

A sender answers only if, less than LEASE_HEARD_S ago, it had read everything that its engine had sent. An engine waits
READERS_S after a withdrawal before it reuses the blocks. So the lease ends before that reuse, even if nobody reads the
withdrawal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import READERS_S
from kvbridge_proto.peer import BlockTables

from ...cache_kinds import is_late
from ...errors import PeerError
from ...exchange.session import Session
from ...geometry.plan import Plan
from ...geometry.tokens import BlockTable, TokenShard

DRIFT = 1e-3  # the most by which a clock's rate differs from true time
LEASE_S = 0.4  # how long a promise lasts, on the sender's clock
COUNTED_S = LEASE_S * (1 - 2 * DRIFT)  # the same on the receiver's clock, which may be slower
LEASE_HEARD_S = 0.1  # a sender may promise only if it had read all its engine's messages within this time
CHECK_EVERY = {"always": 1, "sampled": 64, "never": 0}  # one chunk in so many is compared; by the option `verify`

assert READERS_S * (1 - DRIFT) > (LEASE_S + LEASE_HEARD_S) * (1 + DRIFT)


@dataclass(slots=True)
class GrantedLease:
    """What the sender of a transfer has promised its receiver."""

    renewal: int = 0  # the number of the last renewal received; 0 is the claim
    is_asked: bool = False  # whether that renewal still needs an answer
    ready: int = 0  # chunks the receiver was told it can read
    ends: float | None = None  # on the sender's clock; None if nothing is promised
    _entries: dict[int, int] = field(default_factory=dict)  # by group: where the entries already sent end

    def answer(
        self, transfer: str, plan: Plan, tables: Mapping[int, BlockTable], tokens: int, is_last: bool, ready: int
    ) -> BlockTables:
        """The block tables to send when `tokens`, or `ready` chunks, are computed.

        Windows and states are sent once they are complete.
        """
        pieces = []
        for group in _groups(plan, is_last):
            table = tables[group]
            first_local = 0 if is_late(table.group.kind) else table.token_shard.count(plan.first_token)
            begin = max(self._entries.get(group, first_local // table.group.block_tokens), table.first_block)
            end = min(_end_entry(min(tokens, plan.end_token), table), table.first_block + len(table.ids))
            if begin < end:
                ids = table.ids[begin - table.first_block : end - table.first_block]
                pieces.append(Blocks(group, begin, tuple(ids.tolist())))
                self._entries[group] = end
        self.is_asked, self.ready = False, ready
        return BlockTables(
            transfer=transfer, tokens=tokens, is_last=is_last, renewal=self.renewal, blocks=tuple(pieces)
        )


def _groups(plan: Plan, is_last: bool) -> list[int]:
    """Groups of the sender's pool that the plan reads and that are readable now."""
    groups: set[int] = set()
    for group_plan in plan.group_plans:
        if is_last or not group_plan.is_late:
            groups |= group_plan.sender_groups
    return sorted(groups)


def _end_entry(tokens: int, table: BlockTable) -> int:
    return -(-table.token_shard.count(tokens) // table.group.block_tokens)


class ReadLease:
    """How long a receiver's reads count, on its own clock. The loop renews it; the data thread checks it."""

    def __init__(self, now: float) -> None:
        self.ends = float("-inf")
        self.asked_at = now
        self.number = 0  # of the last renewal requested; 0 is the claim
        self.is_given_up = False  # the transfer has ended: read no more
        self._asked: dict[int, float] = {0: now}

    def renew(self, now: float) -> int:
        """Record that a renewal is requested. Returns its number."""
        self.number += 1
        self.asked_at = self._asked[self.number] = now
        return self.number

    def answered(self, number: int) -> None:
        """The sender answered this renewal. Earlier ones are answered by it too, or never will be."""
        if (asked_at := self._asked.get(number)) is None:
            return
        self.ends = max(self.ends, asked_at + COUNTED_S)
        while self._asked and (oldest := next(iter(self._asked))) <= number:
            del self._asked[oldest]

    def counts(self, now: float) -> bool:
        """Whether a read counts. `now` must be taken after the read was seen to end."""
        return now < self.ends


class Sampling:
    """Chooses the chunks to compare with the sender's: one in `every`, starting with the first."""

    def __init__(self, every: int) -> None:
        self._every = every  # 0: none
        self._count = 0  # chunks read so far

    def choose(self, first_chunk: int, end_chunk: int) -> frozenset[int]:
        """The chunks to compare among [first_chunk, end_chunk), which are read next."""
        if not self._every:
            return frozenset()
        skipped = -self._count % self._every
        self._count += end_chunk - first_chunk
        return frozenset(range(first_chunk + skipped, end_chunk, self._every))

    @property
    def is_all(self) -> bool:
        return self._every == 1

    @property
    def kinds(self) -> tuple[bool, ...]:
        """The values of "read with a digest" that occur; the one that occurs first comes first."""
        return {0: (False,), 1: (True,)}.get(self._every, (True, False))


@dataclass(slots=True)
class Reading:
    """What the receiver of a transfer knows of the sender's blocks."""

    lease: ReadLease
    session: Session
    tables: dict[int, BlockTable] = field(default_factory=dict)
    begun: int = 0  # chunks that have been read or are being read
    unchecked: dict[int, int] = field(default_factory=dict)  # by chunk: digests the sender has not confirmed

    def learn(self, answer: BlockTables, plan: Plan) -> None:
        """Add the sender's block tables. Raises KVBridgeError for blocks outside its pool or plan, or for a gap."""
        pool = self.session.peer_pool
        for piece in answer.blocks:
            if piece.group >= len(pool.groups):
                raise PeerError("unknown_group", f"group: got {piece.group}, the pool has {len(pool.groups)}")
            table = self.tables.get(piece.group) or BlockTable.of(
                pool.groups[piece.group], token_shard=TokenShard.of(pool.shard)
            )
            if piece.first + len(piece.ids) > (most := _end_entry(plan.end_token, table)):
                raise PeerError("blocks_too_many", f"blocks: up to entry {piece.first + len(piece.ids)} of {most}")
            self.tables[piece.group] = table.extended(piece)
