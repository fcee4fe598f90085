"""One want as the receiver keeps it, the transfers that satisfy it, and what it asks of their routes. Pure."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import ClassVar, Literal

from kvbridge_proto.common import attachment_name
from kvbridge_proto.engine import Failed, Refused, Want
from kvbridge_proto.peer import Claim, ProcessCard, RouteToReceiver, SlotLease, Take

from ..geometry.plan import Plan
from ..geometry.tokens import BlockTable
from ..geometry.unfilled import Filling
from ..states import TransferState, WantState
from .actions import Action, Tell
from .containers import Deadlines
from .orders import Fill, RouteReport
from .session import AttachedEngine, Session
from .transfer import Transfer

MOST_NAME = 256  # characters, of a want (peer.py of the protocol)
# A session that ends with one of these may have a successor under another epoch. The next Hello shows it.
GOES_ON = ("peer_left", "stale_epoch")


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


@dataclass(frozen=True, slots=True)
class OpenTransfers:
    """What a receiver shares with its routes: its transfers, sessions by address, and deadlines (kind, name)."""

    transfers: dict[str, IncomingTransfer]
    sessions: dict[str, Session]
    deadlines: Deadlines[tuple[str, str]]


# Who may still write under leases: a process, those who do so by our fabric only, or anybody.
Writers = ProcessCard | Literal["far", "all"]


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


def claim_of(
    wanted: OpenWant,
    session: Session,
    transfer: str,
    token: bytes,
    plan: Plan,
    takes: tuple[Take, ...],
    leases: tuple[SlotLease, ...],
    now: float,
) -> Claim:
    """The claim to send for a transfer."""
    want, engine = wanted.want, wanted.engine
    return Claim(
        transfer=transfer,
        want=want_name(want, engine),
        receiver=engine.rank,
        receivers=engine.rank_count,
        rendezvous=want.rendezvous,
        sender_epoch=session.peer_epoch,
        receiver_epoch=session.our_epoch,  # a want that has failed may be told of under a later one
        first_token=want.first_token,
        end_token=want.end_token,
        takes=takes,
        plan=plan.digest,
        token=token,
        leases=leases,
        deadline_s=max(0.0, wanted.started + want.deadline_s - now),
        is_offered=want.is_offered,
    )


def want_name(want: Want, engine: AttachedEngine) -> str:
    """What senders call a want: the same on all ranks of our engine. Too long a name is replaced by its digest."""
    name = f"{engine.pool.engine.id}/{want.request}/{want.number if engine.rank_count == 1 else want.common}"
    return name if len(name) <= MOST_NAME else blake2b(name.encode(), digest_size=20).hexdigest()


def fill_of(transfer: str, wanted: OpenWant, filling: Filling) -> Fill:
    """The order to write zeros where no sender has rows. Raises KVBridgeError."""
    want = wanted.want
    plan = filling.plan(want.first_token, want.end_token)
    tables = wanted.tables
    return Fill(transfer, want.request, plan, filling.zeros, filling.tables(tables), tables, want.fence)


def can_begin_again(wanted: OpenWant, code: str) -> bool:
    """Whether a want may return to REACHING after its session ended with `code`.

    Otherwise it fails: the sender may be gone or may still hold the claim, rows have come, or another rank's claim is
    still open.
    """
    if wanted.state is WantState.REACHING:
        return code in GOES_ON
    if wanted.state is not WantState.FLOWING or code != "peer_left":
        return False
    incoming_transfers = wanted.incoming_transfers.values()
    return not wanted.has_rows and all(incoming.state is TransferState.ENDED for incoming in incoming_transfers)


def why_late(wanted: OpenWant, lacks: str) -> str:
    """How far a want was when its deadline passed; `lacks` says which ranks were not reached."""
    passed = f"deadline_s: {wanted.want.deadline_s} passed"
    if wanted.state is WantState.REACHING:
        return f"{passed} while reaching {lacks}" if lacks else f"{passed} while agreeing with the sender"
    incoming_transfers = wanted.incoming_transfers.values()
    done, total = (
        sum(incoming.placed for incoming in incoming_transfers),
        sum(incoming.plan.chunks for incoming in incoming_transfers),
    )
    silent = ", ".join(incoming.address for incoming in incoming_transfers if incoming.is_silent)
    return f"{passed} with {done} of {total} chunks" + (f"; nothing came from {silent}" if silent else "")


def why_refused(want: Want, session: Session | None, code: str, reason: str) -> tuple[str, str]:
    """Why a sender refused a claim, as it says; or better, if `session`, with the want's `sender`, shows more.

    A sender cannot know what was offered to the one before it. We see that another attachment took the offer.
    """
    if code != "unknown_offer" or session is None or not want.offered_to:
        return code, reason
    if (now := attachment_name(session.peer, session.peer_epoch)) == want.offered_to:
        return code, reason
    reason = f"offered to attachment {want.offered_to}, which is over; now {want.sender} has attachment {now}"
    return "started_after_it_was_offered", reason


def duplicate(want: Want) -> Tell:
    """The answer to another want under an open number. The first goes on, so this is Refused, not Failed."""
    reasons = (f"number: want {want.number} is open already",)
    return Tell(Refused(code="duplicate_request", reasons=reasons, about=f"want {want.number}"))


def failed(want: Want, code: str, reason: str) -> Tell:
    """The answer to a want that ended without its rows."""
    return Tell(Failed(number=want.number, request=want.request, code=code[:64], reason=reason[:1024]))
