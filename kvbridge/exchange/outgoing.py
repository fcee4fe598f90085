"""Offers and outgoing transfers as the sender keeps them: their records and states. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvbridge_proto.peer import Claim, SlotLease, Sum

from ..geometry.plan import Plan
from ..geometry.tokens import BlockTable
from ..states import OfferState, OutgoingState
from .leases import Promise
from .session import Session


@dataclass(slots=True)
class OpenOffer:
    """One request of our engine whose KV may be read. `want` is the receivers' name for what it was given to."""

    request: str
    rendezvous: str
    tables: Mapping[int, BlockTable]
    first_token: int = 0
    tokens: int = 0
    is_last: bool = False
    fence: int = 0  # what the engine's fence must have reached before `tokens` may be read
    steps: deque[tuple[int, int]] = field(default_factory=deque)  # (fence, tokens) that the fence had not reached
    readable: int = 0  # tokens that it had
    want: str | None = None
    receivers: int = 0
    is_declined: bool = False  # they said that they need nothing
    served: set[int] = field(default_factory=set)
    outgoing_transfers: dict[str, OutgoingTransfer] = field(
        default_factory=dict, repr=False, compare=False
    )  # that read it, until they end
    state: OfferState = OfferState.OPEN
    over: tuple[str, str] | None = None  # (code, reason) why it ended early
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
class OutgoingTransfer:
    """One transfer as the sender sees it: what one claim takes."""

    claim: Claim
    session: Session
    plan: Plan
    started: float
    state: OutgoingState = OutgoingState.WAITING
    offered: OpenOffer | None = None
    early: tuple[SlotLease, ...] = ()  # lent before there was an order
    lent: int = 0
    shipped: int = 0
    progress: int = 0  # chunks that the data plane knows to be ready
    told_ready: int = 0
    is_ordered: bool = False  # the data plane has an order of it, and is not through
    is_gathering: bool = False  # it may read the engine's blocks for that
    says: tuple[str, str] = ("", "")
    is_lost: bool = False
    promise: Promise | None = None  # on the route `pull`: what its receiver may count on
    asked: set[int] = field(default_factory=set)  # chunks that its receiver has read and wants to compare
    checks: deque[Sum] = field(default_factory=deque)  # what it read of those that are not digested yet
    is_settled: bool = False  # its receiver is through
    digesting: int = 0  # chunks that are being digested
    checked: list[Sum] = field(default_factory=list)  # what is to be told it

    @property
    def transfer(self) -> str:
        return self.claim.transfer

    @property
    def incarnation(self) -> str:
        """Of the agent that takes it."""
        return self.session.peer.incarnation

    @property
    def is_promised(self) -> bool:
        """Whether its receiver may read our engine's blocks: until it says that it is through, or its lease ends."""
        return self.promise is not None and self.promise.ends is not None

    @property
    def is_reading(self) -> bool:
        """Whether anybody reads our engine's blocks for it."""
        return self.is_gathering or self.is_promised or self.digesting > 0

    @property
    def is_busy(self) -> bool:
        """Whether anything of it is under way."""
        return self.is_ordered or self.is_reading

    @property
    def will_read(self) -> bool:
        """Whether chunks of the offer are still to be gathered, or may be read by its receiver."""
        return self.state is OutgoingState.FLOWING and (self.is_gathering or self.promise is not None)

    @property
    def can_digest(self) -> bool:
        """Whether there is a chunk to compare."""
        return self.state is OutgoingState.FLOWING and bool(self.checks)


@dataclass(slots=True)
class ReceiverClaims:
    """What one receiver has claimed and is not over. `unused` counts its leases under which nothing was shipped."""

    outgoing_transfers: dict[str, OutgoingTransfer] = field(default_factory=dict)
    unused: int = 0
