"""Offers and outgoing transfers as the sender keeps them: their records and states. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvbridge_proto.peer import Claim, SlotLease, Sum

from ..geometry.plan import Plan
from ..geometry.tokens import BlockTable
from ..states import OfferState, OutgoingState
from .leases import GrantedLease
from .session import Session


@dataclass(slots=True)
class OpenOffer:
    """One request of our engine whose KV may be read. `want` names the want it serves, once claimed."""

    request: str
    rendezvous: str
    tables: Mapping[int, BlockTable]
    first_token: int = 0
    tokens: int = 0
    is_last: bool = False
    fence: int = 0  # the engine's fence must reach this before `tokens` may be read
    steps: deque[tuple[int, int]] = field(default_factory=deque)  # (fence, tokens) that the fence has not reached
    readable: int = 0  # tokens that the fence has passed
    want: str | None = None
    receivers: int = 0
    is_declined: bool = False  # the receivers need nothing
    served: set[int] = field(default_factory=set)
    outgoing_transfers: dict[str, OutgoingTransfer] = field(
        default_factory=dict, repr=False, compare=False
    )  # that read it, until they end
    state: OfferState = OfferState.OPEN
    over: tuple[str, str] | None = None  # (code, reason) why it ended early
    is_complete: bool = False  # its engine sends nothing more about it
    short: tuple[str, str] | None = None  # (code, reason) of the first transfer that ended without all its chunks
    began: float = 0.0
    grown_at: float = 0.0  # when its engine last sent something about it
    hold_s: float = 0.0

    def grew(self, fence: int, tokens: int) -> None:
        """`tokens` are computed once the engine's fence reaches `fence`."""
        self.fence, self.tokens = max(self.fence, fence), tokens
        if not self.steps or self.steps[-1] != (self.fence, tokens):
            self.steps.append((self.fence, tokens))

    def update_readable(self, has_reached: Callable[[int], bool]) -> int | None:
        """Update `readable` from the engine's fence. Returns the next fence count to wait for, or None."""
        while self.steps and has_reached(self.steps[0][0]):
            self.readable = self.steps.popleft()[1]
        return self.steps[0][0] if self.steps else None

    @property
    def blocks(self) -> int:
        """How many blocks the engine keeps for this offer."""
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
    early: tuple[SlotLease, ...] = ()  # lent before the data plane had an order
    lent: int = 0
    shipped: int = 0
    progress: int = 0  # chunks the data plane was told are ready
    announced: int = 0  # chunks the receiver was told are ready
    is_ordered: bool = False  # the data plane has an order for it and has not finished
    is_gathering: bool = False  # the data plane may read the engine's blocks for it
    stopped_by: tuple[str, str] = ("", "")  # (code, reason) why it stopped
    is_lost: bool = False  # the session with its receiver is over
    granted: GrantedLease | None = None  # on the route `pull`: what its receiver may count on
    asked: set[int] = field(default_factory=set)  # chunks its receiver has read and wants to compare
    checks: deque[Sum] = field(default_factory=deque)  # the receiver's digests of chunks we have not digested yet
    is_settled: bool = False  # its receiver has finished
    digesting: int = 0  # chunks being digested
    checked: list[Sum] = field(default_factory=list)  # our digests, not sent to the receiver yet

    @property
    def transfer(self) -> str:
        return self.claim.transfer

    @property
    def incarnation(self) -> str:
        """The receiver's incarnation."""
        return self.session.peer.incarnation

    @property
    def chunks_done(self) -> int | None:
        """How many chunks it has written. None if its receiver reads them itself, and so far says nothing of it."""
        return None if self.granted is not None and self.granted.ready else self.shipped

    @property
    def is_promised(self) -> bool:
        """Whether its receiver may read our engine's blocks: until it says it has finished, or its lease ends."""
        return self.granted is not None and self.granted.ends is not None

    @property
    def is_reading(self) -> bool:
        """Whether anybody reads our engine's blocks for it."""
        return self.is_gathering or self.is_promised or self.digesting > 0

    @property
    def is_busy(self) -> bool:
        """Whether any work on it is under way."""
        return self.is_ordered or self.is_reading

    @property
    def will_read(self) -> bool:
        """Whether chunks are still to be gathered, or its receiver may still read them."""
        return self.state is OutgoingState.FLOWING and (self.is_gathering or self.granted is not None)

    @property
    def can_digest(self) -> bool:
        """Whether there is a chunk to compare."""
        return self.state is OutgoingState.FLOWING and bool(self.checks)


@dataclass(slots=True)
class ReceiverClaims:
    """The open claims of one receiver. `unused` counts its leases that nothing was shipped under."""

    outgoing_transfers: dict[str, OutgoingTransfer] = field(default_factory=dict)
    unused: int = 0
