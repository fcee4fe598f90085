"""A transfer whose receiver reads the sender's blocks itself: what it was told, and until when that holds. Pure.

The read lease. Of a claim or renewal the receiver's lease begins when it is sent, and the sender's when it is answered:
so the receiver's ends first, whatever was late in between, and no two clocks are compared. A sender answers only if it
has found its engine silent within HEARD_S. So a lease ends before an engine that waits READERS_S after its withdrawal
uses the blocks again, even if nobody hears that withdrawal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import READERS_S
from kvbridge_proto.peer import BlockTables

from ..errors import PeerError
from ..geometry.plan import Plan
from ..geometry.token_shard import TokenShard
from ..geometry.tokens import BlockTable
from .block_tables import ready_chunks
from .session import Session

DRIFT = 1e-3  # by which one clock's rate differs from that of true time at most
LEASE_S = 0.4  # how long a promise lasts, on the sender's clock
COUNTED_S = LEASE_S * (1 - 2 * DRIFT)  # the same on the receiver's, which may be the slower one
HEARD_S = 0.1  # how old what a sender knows of its engine may be when it promises
CHECK_EVERY = {"always": 1, "sampled": 64, "never": 0}  # which chunks are compared, by the option `verify`

assert READERS_S * (1 - DRIFT) > (LEASE_S + HEARD_S) * (1 + DRIFT)


@dataclass(slots=True)
class Promise:
    """What the sender of a transfer has promised its receiver."""

    renewal: int = 0  # the number of the last one that came; 0 is the claim
    is_asked: bool = False  # whether that one waits for its answer
    ready: int = 0  # chunks that it can read, as it was told
    ends: float | None = None  # on the sender's clock; None where nothing is promised
    _entries: dict[int, int] = field(default_factory=dict)  # by group: one past the last that was told

    def answer(
        self, transfer: str, plan: Plan, tables: Mapping[int, BlockTable], tokens: int, is_last: bool
    ) -> BlockTables:
        """What to say when `tokens` are there. Windows and states are told once they are whole."""
        pieces = []
        for group in _groups(plan, is_last):
            table = tables[group]
            first = _first_entry(plan, table) if table.group.kind == "full" else 0
            begin = max(self._entries.get(group, first), table.first_block)
            end = min(_end_entry(min(tokens, plan.end_token), table), table.first_block + len(table.ids))
            if begin < end:
                ids = table.ids[begin - table.first_block : end - table.first_block]
                pieces.append(Blocks(group, begin, tuple(ids.tolist())))
                self._entries[group] = end
        self.is_asked, self.ready = False, ready_chunks(plan, tokens, is_last)
        return BlockTables(
            transfer=transfer, tokens=tokens, is_last=is_last, renewal=self.renewal, blocks=tuple(pieces)
        )


def _groups(plan: Plan, is_last: bool) -> list[int]:
    """Of the sender's pool: those that the plan reads, and can already."""
    group_plans = [group_plan for group_plan in plan.group_plans if is_last or not group_plan.is_late]
    return sorted({pair.sender.group for group_plan in group_plans for pair in group_plan.pairs})


def _first_entry(plan: Plan, table: BlockTable) -> int:
    return table.share.count(plan.first_token) // table.group.block_tokens


def _end_entry(tokens: int, table: BlockTable) -> int:
    return -(-table.share.count(tokens) // table.group.block_tokens)


class ReadLease:
    """Until when what a receiver reads counts, on its own clock. The loop moves it on, the data thread looks at it."""

    def __init__(self, now: float) -> None:
        self.ends = float("-inf")
        self.asked_at = now
        self.number = 0  # of the renewal that was asked for last; 0 is the claim
        self.is_given_up = False  # the transfer has ended: read no more
        self._asked: dict[int, float] = {0: now}

    def renew(self, now: float) -> int:
        """Ask for it; the number under which."""
        self.number += 1
        self.asked_at = self._asked[self.number] = now
        return self.number

    def answered(self, number: int) -> None:
        """By the sender. Whatever was asked for before is answered too, or never will be."""
        if (asked_at := self._asked.get(number)) is None:
            return
        self.ends = max(self.ends, asked_at + COUNTED_S)
        self._asked = {each: at for each, at in self._asked.items() if each > number}

    def counts(self, now: float) -> bool:
        """Whether what was read counts, asked after its end was seen."""
        return now < self.ends


class Sampling:
    """Which of the chunks that are read are compared with the sender's: one in `every`, the first among them."""

    def __init__(self, every: int) -> None:
        self._every = every  # 0: none
        self._count = 0  # chunks read so far

    def choose(self, first_chunk: int, end_chunk: int) -> frozenset[int]:
        """Of chunks that are read next."""
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
        """Whether chunks are read with a digest: all that occurs, what comes first at the head."""
        return {0: (False,), 1: (True,)}.get(self._every, (True, False))


@dataclass(slots=True)
class Reading:
    """What the receiver of a transfer knows of the sender's blocks."""

    lease: ReadLease
    session: Session
    tables: dict[int, BlockTable] = field(default_factory=dict)
    begun: int = 0  # chunks that are read, or being read
    is_busy: bool = False  # some are being read
    unchecked: dict[int, int] = field(default_factory=dict)  # digests by chunk, which the sender has not confirmed

    def learn(self, told: BlockTables, plan: Plan) -> None:
        """Raises KVBridgeError for blocks that its pool or its plan does not have, or that leave some out."""
        pool = self.session.peer_pool
        for piece in told.blocks:
            if piece.group >= len(pool.groups):
                raise PeerError("unknown_group", f"group: got {piece.group}, the pool has {len(pool.groups)}")
            table = self.tables.get(piece.group) or BlockTable.of(
                pool.groups[piece.group], share=TokenShard.of(pool.shard)
            )
            if piece.first + len(piece.ids) > (most := _end_entry(plan.end_token, table)):
                raise PeerError("blocks_too_many", f"blocks: up to entry {piece.first + len(piece.ids)} of {most}")
            self.tables[piece.group] = table.extended(piece)
