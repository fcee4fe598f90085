"""One want as the receiver keeps it: the transfers that satisfy it, and the slots lent to them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from kvbridge_proto.common import attachment_name
from kvbridge_proto.engine import Failed, Refused, Want
from kvbridge_proto.peer import Claim, Grant, SlotLease, Take
from kvbridge_proto.pool import Pool

from ..geometry.plan import Plan
from ..geometry.tokens import BlockTable
from ..geometry.unfilled import Filling
from ..states import IncomingState, WantState
from .actions import Action, Send, Tell
from .containers import FairQueue
from .leases import Reading
from .orders import Fill, Lend, Pull, ReceiveOrder
from .session import AttachedEngine, Session, engine_ranks, rank_index
from .slots import ReceiveSlots

MOST_NAME = 256  # characters, of a want (peer.py of the protocol)
# A session that ends with one of these may have a successor under another epoch. The next Hello shows it.
GOES_ON = ("peer_left", "stale_epoch")


@dataclass(slots=True)
class IncomingTransfer:
    """One transfer as the receiver sees it: what one sender gives to one want."""

    transfer: str
    address: str
    session: Session
    plan: Plan
    token: bytes
    state: IncomingState = IncomingState.CLAIMED
    ready: int = 0
    turn: int = 0  # when it came, or was last lent a slot
    placed: int = 0  # chunks in our engine's blocks: scattered, or read on the route `pull`
    is_carried: bool = False  # the data plane has an order for it, or reads
    is_drained: bool = False  # the sender has stopped writing, but the data plane may still read what it wrote
    reading: Reading | None = None  # on the route `pull`
    is_lost: bool = False  # its session ended before it did

    @property
    def is_silent(self) -> bool:
        """Whether it was claimed, and no chunk has come or been announced as ready."""
        return self.state is IncomingState.CLAIMED and not self.ready and not self.placed

    @property
    def is_lost_unanswered(self) -> bool:
        """Whether its session ended before the sender has said anything to the claim: it may not have heard it."""
        return self.is_lost and not self.ready and not self.placed


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
        return bool(self.filling) or any(incoming.is_carried for incoming in self.incoming_transfers.values())

    @property
    def has_rows(self) -> bool:
        """Whether the data plane has reported any rows, or is reading some."""
        incoming_transfers = self.incoming_transfers.values()
        return any(each.placed or (each.reading is not None and each.reading.is_busy) for each in incoming_transfers)


def claim_of(
    wanted: OpenWant, incoming: IncomingTransfer, takes: tuple[Take, ...], leases: tuple[SlotLease, ...], now: float
) -> Claim:
    """The claim to send for an incoming transfer."""
    want, engine = wanted.want, wanted.engine
    return Claim(
        transfer=incoming.transfer,
        want=want_name(want, engine.pool),
        receiver=rank_index(engine.pool),
        receivers=engine_ranks(engine.pool),
        rendezvous=want.rendezvous,
        sender_epoch=incoming.session.peer_epoch,
        receiver_epoch=incoming.session.our_epoch,  # a want that has failed may be told of under a later one
        first_token=want.first_token,
        end_token=want.end_token,
        takes=takes,
        plan=incoming.plan.digest,
        token=incoming.token,
        leases=leases,
        deadline_s=max(0.0, wanted.started + want.deadline_s - now),
        is_offered=want.is_offered,
    )


def want_name(want: Want, pool: Pool) -> str:
    """What senders call a want: the same on all ranks of our engine. Too long a name is replaced by its digest."""
    name = f"{pool.engine.id}/{want.request}/{want.number if engine_ranks(pool) == 1 else want.common}"
    return name if len(name) <= MOST_NAME else blake2b(name.encode(), digest_size=20).hexdigest()


def order_of(wanted: OpenWant, incoming: IncomingTransfer) -> ReceiveOrder:
    """The data plane's order for an incoming transfer."""
    session = incoming.session
    return ReceiveOrder(
        incoming.transfer,
        wanted.want.request,
        incoming.plan,
        wanted.tables,
        incoming.token,
        session.peer.incarnation,
        wanted.engine.agent.incarnation,
        session.peer_epoch,
        wanted.engine.epoch,
        session.digest,
        session.routed.route,
        wanted.want.fence,
    )


def pull_of(
    wanted: OpenWant, incoming: IncomingTransfer, reading: Reading, end_chunk: int, compared: frozenset[int]
) -> Pull:
    """The order to read from the first unread chunk up to `end_chunk`. Chunks in `compared` get a digest."""
    return Pull(
        incoming.transfer,
        wanted.want.request,
        incoming.session.memory_id,
        incoming.plan,
        dict(reading.tables),
        wanted.tables,
        reading.begun,
        end_chunk,
        reading.lease,
        wanted.want.fence,
        compared,
    )


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
    return not wanted.has_rows and all(incoming.state is IncomingState.ENDED for incoming in incoming_transfers)


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


def lend_early(slots: ReceiveSlots, incoming: IncomingTransfer) -> tuple[SlotLease, ...]:
    """Slots for a transfer that is being claimed. This saves a round trip once chunks are ready."""
    plenty = slots.free - len(slots) // 2  # half stays for transfers with ready chunks
    return _lend(slots, min(max(plenty, 0), incoming.plan.chunks), incoming)


def queue(slots: ReceiveSlots, awaiting: FairQueue[IncomingTransfer], incoming: IncomingTransfer) -> None:
    """Queue the transfer for a slot, if it can use one."""
    if incoming.state is IncomingState.CLAIMED and _ready_without_slot(slots, incoming) > 0:
        awaiting.add(incoming.transfer, incoming.turn, incoming)


def grants(slots: ReceiveSlots, awaiting: FairQueue[IncomingTransfer]) -> list[Action]:
    """Lend free slots to transfers with ready chunks, one each in turn. Returns what to tell whom."""
    lent: dict[tuple[str, str], tuple[SlotLease, ...]] = {}
    while slots.free and (incoming := awaiting.take()) is not None:
        whom = incoming.address, incoming.transfer
        lent[whom] = lent.get(whom, ()) + _lend(slots, 1, incoming)
        queue(slots, awaiting, incoming)
    actions: list[Action] = []
    for (address, transfer), leases in lent.items():
        actions += [Lend(transfer, leases), Send(address, Grant(transfer=transfer, leases=leases))]
    return actions


def _lend(slots: ReceiveSlots, count: int, incoming: IncomingTransfer) -> tuple[SlotLease, ...]:
    if leases := slots.lend(count, incoming.transfer):
        incoming.turn = slots.turn
    return leases


def _ready_without_slot(slots: ReceiveSlots, incoming: IncomingTransfer) -> int:
    """How many ready chunks have no slot."""
    return incoming.ready - incoming.placed - slots.lent_to(incoming.transfer)
