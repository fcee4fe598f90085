"""Offers and outgoing transfers as the source keeps them: their records and states. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kvbridge_proto.peer import Claim, Lease, Sum

from ..geometry.plan import Plan
from ..geometry.tokens import BlockTable
from .reading import Promise
from .slots import LocalSlot
from .table import Table


class OutState(Enum):
    WAITING = auto()  # claimed; nothing offered in that room yet
    FLOWING = auto()
    STOPPING = auto()  # over, but writes are under way
    ENDED = auto()


class OutEvent(Enum):
    BIND = auto()
    FINISH = auto()  # the last chunk is written
    STOP_BUSY = auto()
    STOP = auto()
    QUIET = auto()  # the last write under way has ended


OUT_TABLE = Table(
    {
        (OutState.WAITING, OutEvent.BIND): OutState.FLOWING,
        (OutState.WAITING, OutEvent.STOP): OutState.ENDED,
        (OutState.FLOWING, OutEvent.FINISH): OutState.ENDED,
        (OutState.FLOWING, OutEvent.STOP): OutState.ENDED,
        (OutState.FLOWING, OutEvent.STOP_BUSY): OutState.STOPPING,
        (OutState.STOPPING, OutEvent.QUIET): OutState.ENDED,
    }
)


@dataclass(slots=True)
class Offered:
    """One request of our engine whose KV may be read. `want` is the sinks' name for what it was given to."""

    request: str
    room: str
    tables: Mapping[int, BlockTable]
    first_token: int = 0
    tokens: int = 0
    is_last: bool = False
    fence: int = 0  # what the engine's fence must have reached before `tokens` may be read
    steps: deque[tuple[int, int]] = field(default_factory=deque)  # (fence, tokens) that the fence had not reached
    readable: int = 0  # tokens that it had
    want: str | None = None
    sinks: int = 0
    is_declined: bool = False  # they said that they need nothing
    served: set[int] = field(default_factory=set)
    gathering: int = 0
    outlets: dict[str, Outlet] = field(default_factory=dict, repr=False, compare=False)  # that read it, until they end
    over: tuple[str, str] | None = None  # (code, reason): no new gathers
    is_told_out: bool = False  # its engine says no more of it
    short: tuple[str, str] | None = None  # (code, reason): of the first transfer that ended without all its chunks
    began: float = 0.0
    told_at: float = 0.0  # when its engine said something of it last
    hold_s: float = 0.0

    def grew(self, fence: int, tokens: int) -> None:
        """So many tokens are there once the engine's fence has reached this."""
        self.fence, self.tokens = max(self.fence, fence), tokens
        if not self.steps or self.steps[-1] != (self.fence, tokens):
            self.steps.append((self.fence, tokens))

    def look(self, has_reached: Callable[[int], bool]) -> int | None:
        """See how far its engine's fence is; which count comes next, if any does."""
        while self.steps and has_reached(self.steps[0][0]):
            self.readable = self.steps.popleft()[1]
        return self.steps[0][0] if self.steps else None

    @property
    def blocks(self) -> int:
        """How many blocks its engine keeps for it."""
        return sum(len(table.ids) for table in self.tables.values())


@dataclass(slots=True)
class Outlet:
    """One transfer as the source sees it: what one claim takes.

    Where the receiver reads our engine's blocks itself, what it was promised counts as one chunk being gathered and
    written until it says that it is through, or its lease ends.
    """

    claim: Claim
    boot: str
    plan: Plan
    digest_kind: str
    leases: deque[Lease]
    started: float
    state: OutState = OutState.WAITING
    offered: Offered | None = None
    next_chunk: int = 0
    lent: int = 0
    gathering: int = 0
    writing: int = 0  # shipped and not ended, gathers included
    shipped: int = 0
    told_ready: int = 0
    turn: int = 0  # when it came, or had a slot to gather into last
    late: set[LocalSlot] = field(default_factory=set)  # what is written out of these is past its deadline
    says: tuple[str, str] = ("", "")
    is_lost: bool = False
    promise: Promise | None = None  # on the route `pull`: what its receiver may count on
    asked: set[int] = field(default_factory=set)  # chunks that its receiver has read and wants to compare
    checks: deque[Sum] = field(default_factory=deque)  # what it read of those that are not digested yet
    is_settled: bool = False  # its receiver is through
    digesting: int = 0  # chunks that are being digested; each counts as being gathered and written
    checked: list[Sum] = field(default_factory=list)  # what is to be told it

    @property
    def transfer(self) -> str:
        return self.claim.transfer

    @property
    def is_reading(self) -> bool:
        """Whether chunks of the offer are still to be gathered, or may be read by its receiver."""
        return self.state is OutState.FLOWING and self.next_chunk < self.plan.chunks

    @property
    def can_ship(self) -> bool:
        """Whether the next chunk is computed and has a slot to go to."""
        if not self.is_reading or not self.leases:
            return False
        offered = self.offered
        assert offered is not None
        chunk = self.plan.chunk(self.next_chunk)
        return offered.over is None and chunk.needs_tokens <= offered.tokens and chunk.is_late <= offered.is_last

    @property
    def can_digest(self) -> bool:
        """Whether there is a chunk to compare."""
        return self.state is OutState.FLOWING and bool(self.checks)

    def lend(self, leases: Sequence[Lease]) -> None:
        self.leases.extend(leases)
        self.lent += len(leases)


@dataclass(slots=True)
class OfSink:
    """What one sink has claimed and is not over. `unused` counts the leases that it lent for it, ended ones too."""

    outlets: dict[str, Outlet] = field(default_factory=dict)
    unused: int = 0
