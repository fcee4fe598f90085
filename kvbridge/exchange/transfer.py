"""The interface of a route, and a transfer's life: it waits, is bound, flows, stops, is quiet, ends. Pure.

The sender's side waits for its offer, the receiver's until it is claimed. Once bound, rows flow as its route says. If
it ends before all of them are there, it stops: nothing new begins, and what is under way goes on until it is quiet.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Literal, NamedTuple

from kvbridge_proto.common import Prefixes
from kvbridge_proto.engine import Want
from kvbridge_proto.peer import Announce, Claim, ProcessCard, RouteToReceiver, RouteToSender, SlotLease

from ..geometry.plan import Plan
from ..geometry.tokens import BlockTable
from ..state_machines import TRANSFER_TABLE, OfferState, TransferEvent, TransferState, WantState
from ..values import Value
from .actions import Action
from .containers import Deadlines
from .orders import Failure, RouteReport
from .session import AttachedEngine, Session


@dataclass(slots=True, eq=False)
class Transfer(abc.ABC):
    """What one sender gives to one want, as one of the two sees it. Each side and route has a kind of its own."""

    transfer: str
    session: Session
    plan: Plan
    state: TransferState = field(default=TransferState.WAITING, init=False)
    is_ordered: bool = field(default=False, init=False)  # the data plane has an order for it and has not finished
    is_lost: bool = field(default=False, init=False)  # its session ended before it did
    failure: Failure = field(default=None, init=False)  # set by its route: why it is to be stopped

    @property
    def is_open(self) -> bool:
        return self.state in (TransferState.WAITING, TransferState.FLOWING)

    def bind(self) -> None:
        """It is claimed, and has met its offer: rows flow from now on."""
        self.state = TRANSFER_TABLE[self.state, TransferEvent.BIND]

    def finish(self) -> None:
        """All its rows are there."""
        self.state = TRANSFER_TABLE[self.state, TransferEvent.FINISH]

    def stop(self) -> None:
        """It is over early, but not quiet: something of it is under way. `end` follows."""
        self.state = TRANSFER_TABLE[self.state, TransferEvent.STOP]

    def end(self) -> None:
        """It is over early, and quiet."""
        self.state = TRANSFER_TABLE[self.state, TransferEvent.QUIET]


@dataclass(slots=True)
class OpenWant:
    """One want and its progress."""

    want: Want
    engine: AttachedEngine
    tables: Mapping[int, BlockTable]
    started: float
    state: WantState = WantState.REACHING
    incoming_transfers: dict[str, IncomingTransfer] = field(default_factory=dict)
    filling: str = ""  # the data plane has an order of this name to write zeros
    unfilled_layers: int = 0  # how many get zeros, since no sender has them
    other_scores: bool = False  # our engine must finish them
    late_cancels: list[Action] = field(default_factory=list)  # sent to senders once no read is under way
    failure: tuple[str, str] = ("", "")
    # By rank that got a claim without rows: its transfer, "" once the loss of the claim is noted.
    unneeded: dict[str, str] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        return self.state in (WantState.REACHING, WantState.FLOWING, WantState.RETURNING)

    @property
    def is_carried(self) -> bool:
        """Whether the data plane may touch its blocks."""
        return bool(self.filling) or any(incoming.is_ordered for incoming in self.incoming_transfers.values())

    @property
    def has_rows(self) -> bool:
        """Whether any rows may be in its blocks."""
        return any(incoming.has_rows for incoming in self.incoming_transfers.values())


@dataclass(slots=True, eq=False)
class IncomingTransfer(Transfer):
    """A transfer as the receiver sees it (transfer.py). Each route has a kind of its own.

    The methods are the route's; the receiver calls them. Where they return actions, they may set `failure` instead.
    """

    wanted: OpenWant = field(repr=False)
    address: str
    token: bytes
    ready: int = 0  # chunks that the sender has announced
    placed: int = 0  # chunks in our engine's blocks

    reads_peer: ClassVar[bool] = False  # we read the sender's blocks: until that is over, it must not hear of the end

    @property
    def is_silent(self) -> bool:
        """Whether it was claimed, and no chunk has come or been announced as ready."""
        return self.state is TransferState.FLOWING and not self.ready and not self.placed

    @property
    def is_lost_unanswered(self) -> bool:
        """Whether its session ended before the sender has said anything to the claim: it may not have heard it."""
        return self.is_lost and not self.ready and not self.placed

    @property
    def has_rows(self) -> bool:
        """Whether any rows may be in our engine's blocks."""
        return bool(self.placed)

    @property
    def is_complete(self) -> bool:
        """Whether all its rows are there and count."""
        return self.placed >= self.plan.chunks

    @abc.abstractmethod
    def claim(self, now: float) -> tuple[list[Action], tuple[SlotLease, ...]]:
        """It is claimed now. Returns what to order before that, and the slots to lend with the claim."""

    def awaits(self) -> list[Action]:
        """All that its want needs is claimed. Returns what to order while the senders' answers are awaited."""
        return []

    @abc.abstractmethod
    def on_message(self, body: RouteToReceiver, now: float) -> list[Action]:
        """Its sender says this while it is claimed."""

    @abc.abstractmethod
    def on_report(self, report: RouteReport, now: float) -> list[Action]:
        """The data plane reports this, perhaps after the transfer has ended."""

    def on_time(self, kind: str, now: float) -> list[Action]:
        """A deadline (kind, transfer) that it had set has passed while it is claimed."""
        return []

    def on_end(self, is_finished: bool = False) -> None:
        """It flows no more: it is finished, or over early. Of one that is over early this may be said twice."""
        return

    def quarantine(self, now: float) -> bool:
        """It is over early: quarantine what its sender may still write. Returns whether that is anything."""
        return False

    def on_drained(self) -> None:
        """Its sender will not write for it again."""
        return

    def on_quiet(self) -> bool:
        """The data plane moves nothing of it any more. Returns whether its sender may still write for it."""
        return False


# Who may still write under leases: a process, those who do so by our fabric only, or anybody.
Writers = ProcessCard | Literal["far", "all"]


class OpenTransfers(Value):
    """What a receiver shares with its routes: its transfers, sessions by address, and deadlines (kind, name)."""

    transfers: dict[str, IncomingTransfer]
    sessions: dict[str, Session]
    deadlines: Deadlines[tuple[str, str]]


class ReceivingRoute(abc.ABC):
    """A route's receiving half. The defaults are those of a route by which senders write nothing."""

    @property
    def waiting(self) -> int:
        """How many transfers have ready chunks without a slot."""
        return 0

    @property
    def lent(self) -> int:
        """How many slots are lent to open transfers."""
        return 0

    @abc.abstractmethod
    def begin(
        self, wanted: OpenWant, transfer: str, address: str, session: Session, plan: Plan, token: bytes
    ) -> IncomingTransfer:
        """A transfer that will be claimed."""

    @abc.abstractmethod
    def prepare(self, session: Session) -> list[Action]:
        """A session by this route will open: prepare for what will come."""

    def lend(self) -> list[Action]:
        """Something may have become free: use it."""
        return []

    def announced(self, incarnation: str, key: str, announce: Announce) -> None:
        """This sender says, unasked, where its offer lies."""
        return

    def lost(self, session: Session) -> None:
        """The session with this sender is over."""
        return

    def met(self, address: str, incarnation: str, key: str) -> list[Action]:
        """This incarnation answers at the address: ask it what it may still write."""
        return []

    def on_drained(self, transfer: str, incarnation: str, key: str) -> None:
        """It says that it will not write for this transfer again, which is forgotten or another's."""
        return

    def on_time(self, kind: str, name: str, now: float) -> list[Action]:
        """A deadline of its own has passed."""
        return []

    def writing_processes(self) -> set[ProcessCard]:
        """The processes whose end would prove that slots are not written, now or once their sessions are lost."""
        return set()

    def quarantined(self, writers: Writers) -> frozenset[tuple[int, int]]:
        """The leases of quarantined slots under which only these may still write."""
        return frozenset()

    def cannot_write(self, writers: Writers) -> None:
        """These write nothing any more under leases of transfers that have ended."""
        return


class NotOffered(NamedTuple):
    code: str
    reason: str


class Known(NotOffered, Enum):
    """What a sender knows of the offers under a rendezvous id if none of them is free for a claim: why it refuses it.

    It does so once the prefill is known to have ended, by the receiver (`Claim.is_offered`) or the engine (`NoOffer`),
    and all is read that the engine had said when the claim came. Before that an offer may still come: equal prompts
    share a rendezvous id, and a claim may be first.
    """

    NOTHING = NotOffered(
        code="unknown_offer", reason="nothing was offered under this id since our engine attached, as far as we know"
    )
    TAKEN = NotOffered(code="already_fetched", reason="another request fetches what was offered under this id")
    FETCHED = NotOffered(
        code="already_fetched", reason="what was offered under this id went to another request: an offer serves one"
    )
    DECLINED = NotOffered(
        code="already_declined", reason="what was offered under this id was declined: its receiver needed none of it"
    )
    ENDED = NotOffered(code="offer_over", reason="what was offered under this id is over")


@dataclass(slots=True)
class OpenOffer:
    """One request of our engine whose KV may be read. `want` names the want it serves, once claimed.

    What is kept serves any number of wants, each by one of its `shares`: an offer of the same blocks that is `of` the
    kept one. That stays unclaimed, and is released when no share is left.
    """

    number: int
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
    lost: set[int] = field(default_factory=set)  # ranks that had claimed it, were lost, and have not come again
    outgoing_transfers: dict[str, OutgoingTransfer] = field(
        default_factory=dict, repr=False, compare=False
    )  # that read it, until they end
    state: OfferState = OfferState.OPEN
    over: tuple[str, str] | None = None  # (code, reason) why it ended early
    short: tuple[str, str] | None = None  # (code, reason) of the first transfer that ended without all its chunks
    began: float = 0.0
    computed_by: float | None = None  # when its rows were first seen to be computed, while its engine lacked blocks
    hold_s: float = 0.0
    is_kept: bool = False  # for requests that begin with the same tokens
    announced: int = 0  # the number under which receivers were told of all its blocks
    prefixes: Prefixes = ()
    of: OpenOffer | None = field(default=None, repr=False)
    shares: dict[int, OpenOffer] = field(default_factory=dict, repr=False)

    def share(self, number: int, now: float) -> OpenOffer:
        """What one want may read of this kept offer."""
        share = OpenOffer(
            number,
            self.request,
            self.rendezvous,
            self.tables,
            self.first_token,
            self.tokens,
            self.is_last,
            self.fence,
            deque(self.steps),
            self.readable,
            began=now,
            hold_s=self.hold_s,
            of=self,
        )
        self.shares[number] = share
        return share

    @property
    def engines_number(self) -> int:
        """The number by which our engine knows it."""
        return self.number if self.of is None else self.of.number

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
    def ended_as(self) -> tuple[Known, tuple[str, str] | None]:
        """What is known of it once it is released, with (code, reason) if it ended before anybody had it."""
        if self.over is not None and not self.served:
            return Known.ENDED, self.over
        return (Known.DECLINED if self.is_declined else Known.FETCHED), None

    @property
    def blocks(self) -> int:
        """How many blocks the engine keeps for this offer."""
        return sum(len(table.ids) for table in self.tables.values())


@dataclass(slots=True, eq=False)
class OutgoingTransfer(Transfer):
    """A transfer as the sender sees it (transfer.py): what one claim takes. Each route has a kind of its own.

    The methods are the route's; the sender calls them. Where they return actions, they may set `failure` instead.
    """

    claim: Claim
    started: float
    offered: OpenOffer | None = None
    has_read: bool = False  # all that was claimed has been read out of our engine's blocks
    is_over: bool = False  # and its receiver has it
    cancelled: tuple[str, str] | None = None  # (code, reason) of a claim without rows that waits for a moment longer
    stopped_by: tuple[str, str] = ("", "")  # (code, reason) why it stopped
    incarnation: str = field(init=False)  # the receiver's

    def __post_init__(self) -> None:
        self.incarnation = self.session.peer.incarnation

    @property
    @abc.abstractmethod
    def chunks_done(self) -> int | None:
        """How many chunks its receiver has; None if it reads them itself, and so far says nothing of it."""

    @property
    def is_promised(self) -> bool:
        """Whether its receiver may read our engine's blocks: until it says it has finished, or its lease ends."""
        return False

    @property
    @abc.abstractmethod
    def is_reading(self) -> bool:
        """Whether anybody reads our engine's blocks for it."""

    @property
    def read_until(self) -> float | None:
        """When that ends at the latest; None if it is not known."""
        return None

    @property
    def is_busy(self) -> bool:
        """Whether any work on it is under way."""
        return self.is_ordered or self.is_reading

    @property
    def will_read(self) -> bool:
        """Whether anything is still to be read."""
        return self.state is TransferState.FLOWING and not self.has_read

    @abc.abstractmethod
    def flow(self) -> list[Action]:
        """It has met its offer."""

    @abc.abstractmethod
    def grow(self) -> list[Action]:
        """More of its offer is computed."""

    @abc.abstractmethod
    def on_message(self, body: RouteToSender) -> list[Action]:
        """Its receiver says this, whatever its state."""

    @abc.abstractmethod
    def on_report(self, report: RouteReport) -> list[Action]:
        """The data plane reports this."""

    def answer(self, now: float, heard_at: float, has_reached: Callable[[int], bool]) -> list[Action]:
        """What its receiver waits for, if it is `pending`. All is read that our engine had sent by `heard_at`."""
        return []

    def on_time(self, kind: str) -> list[Action]:
        """A deadline (kind, transfer) that it had set has passed."""
        return []

    def on_cancel(self) -> None:
        """Its receiver takes nothing more: what it reads from now on does not count."""
        return

    def forget(self) -> None:
        """It has ended."""
        return


@dataclass(frozen=True, slots=True)
class OpenAnswers:
    """What a sender shares with its routes: deadlines (kind, transfer), and transfers whose answer is pending."""

    deadlines: Deadlines[tuple[str, str]] = field(default_factory=Deadlines)
    pending: dict[str, OutgoingTransfer] = field(default_factory=dict)


class SendingRoute(abc.ABC):
    """A route's sending half."""

    @abc.abstractmethod
    def begin(self, claim: Claim, session: Session, plan: Plan, now: float) -> OutgoingTransfer:
        """A transfer that is claimed. Raises KVBridgeError, with nothing changed, if the claim asks for too much."""

    def announce(self, offered: OpenOffer, now: float) -> list[Action]:
        """All of an offer is known, and nobody has claimed it: tell receivers that may."""
        return []

    def lost(self, incarnation: str) -> None:
        """The session with this receiver is over."""
        return

    def next(self) -> list[Action]:
        """What may begin now that others have gone on."""
        return []
