"""One or two wants between one sender and one receiver, with the real machines of both, as states for a search.

Everything that may happen next is a move. The adversary's moves (cuts, restarts, writes that fail or are late) may be
made a limited number of times. One of them is a lie: a chunk under way is written again under a lease that was meant
for another. A state knows everything under way: messages, gathers, writes, notices, scatters, and what the exchange and
the data plane of each side have told each other.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter
from typing import Any, cast

from kvbridge_proto.engine import Done, Failed, Released
from kvbridge_proto.peer import Cancel, Claim, Drained, Notice, Refuse, Settled, SlotLease
from msgspec import Struct
from msgspec.structs import replace as changed

from kvbridge.dataplane.receive_orders import LandedChunk, ReceiveOrders
from kvbridge.dataplane.send_orders import LeavingChunk, SendOrders
from kvbridge.exchange.actions import Ask, Notable, Reach, Send, Tell
from kvbridge.exchange.incoming import OpenWant
from kvbridge.exchange.orders import (
    Credit,
    Failure,
    Lend,
    Progress,
    ReceiveOrder,
    ReceivingOrder,
    ReceivingReport,
    SendingOrder,
    SendingReport,
    SendOrder,
)
from kvbridge.exchange.receiver import Receiver
from kvbridge.exchange.sender import Sender
from kvbridge.exchange.session import AttachedEngine, Session, accept, answer, hello, welcome
from kvbridge.exchange.slots import ReceiveSlots
from kvbridge.geometry.plan import Plan
from kvbridge.geometry.tokens import BlockTable
from kvbridge.states import SlotState
from tests.unit.exchange.world import NOTHING, World, hear_receiver, hear_sender, notice_of, offer_of, take_up, want_of

Move = tuple[Any, ...]
ADDRESS = "P0"
VALUES = (Struct, AttachedEngine, Session, Plan, BlockTable, SendOrder, ReceiveOrder, Enum)
BUILT_IN = {str, int, bool, float, bytes, tuple, list, dict, set, type, type(None), deque}
REST = "the rest of a write that failed"
# What tells states apart:
SLOT = attrgetter("state", "generation", "transfer")
INCOMING = attrgetter("state", "ready", "placed", "is_carried", "is_drained")
OUTGOING = attrgetter(
    *("transfer", "state", "lent", "shipped", "progress", "announced", "is_ordered", "is_gathering", "is_lost", "early")
)
OFFER, ENDED = attrgetter("request", "want", "over"), attrgetter("rendezvous", "want")
DISPATCH = attrgetter("transfer", "turn", "next_chunk", "gathering", "writing", "is_broken")
RECEIPT = attrgetter("transfer", "moving")
SCATTER = attrgetter("order.transfer", "notice.chunk", "notice.slot")


@dataclass(slots=True)
class Flight:
    """A chunk on its way: gathering, writing, or written and not yet known to be."""

    leaving: LeavingChunk
    state: str = "gather"
    is_late: bool = False
    has_landed: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        leaving = self.leaving
        what = leaving.order.transfer, leaving.chunk, leaving.lease
        return *what, self.state, self.is_late, self.has_landed


class Copier(pickle.Pickler):
    """Copies a state as pickle does, many times faster than copy.deepcopy. Values are kept aside: nobody edits them."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.values: list[object] = []

    def persistent_id(self, value: object) -> int | None:
        if type(value) in BUILT_IN or (not isinstance(value, VALUES) and value is not NOTHING):
            return None
        self.values.append(value)
        return len(self.values) - 1


class Copied(pickle.Unpickler):
    """The copy, with the very same values."""

    def __init__(self, file: io.BytesIO, values: Sequence[object]) -> None:
        super().__init__(file)
        self._values = values

    def persistent_load(self, number: int) -> object:
        return self._values[number]


class Wrong(AssertionError):
    """A state that must not be."""


@dataclass
class State:
    """Where both machines and everything between them are."""

    receiver_engine: AttachedEngine
    sender_engine: AttachedEngine
    receiving: Receiver
    sending: Sender
    budget: dict[str, int]
    lag: str = ""  # whose exchange and data plane hear each other later: "receiver", "sender"
    incarnations: int = 1
    is_open: bool = False  # the sender has the receiver's session
    is_reaching: bool = False  # the receiver wants one
    to_sender: deque[Any] = field(default_factory=deque)
    to_receiver: deque[Any] = field(default_factory=deque)
    flights: list[Flight] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    send_orders: SendOrders = field(default_factory=lambda: SendOrders(0))
    to_send: deque[SendingOrder] = field(default_factory=deque)
    sent: deque[SendingReport] = field(default_factory=deque)
    receive_orders: ReceiveOrders = field(default_factory=ReceiveOrders)
    orders: deque[ReceivingOrder] = field(default_factory=deque)
    reports: deque[ReceivingReport] = field(default_factory=deque)
    scatters: list[LandedChunk] = field(default_factory=list)
    slots: dict[int, object] = field(default_factory=dict)
    remains: list[int] = field(default_factory=list)  # slots of writes that failed, the rest of which may land yet
    rows: set[tuple[str, int]] = field(default_factory=set)  # chunks that were scattered
    answers: dict[str, str] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)

    def clone(self) -> State:
        """A copy of all that changes; values stay the same objects."""
        said = io.BytesIO()
        copier = Copier(said, pickle.HIGHEST_PROTOCOL)
        copier.dump(self)
        said.seek(0)
        return cast(State, Copied(said, copier.values).load())

    @property
    def key(self) -> object:
        """Equal for states that go on alike."""
        receiving, sending, orders = self.receiving, self.sending, self.send_orders
        outgoing = sending.outgoing_transfers.values()
        incoming = [(t, w.state, w.incoming_transfers[t]) for t, w in receiving._wanted_by.items()]
        return (
            tuple(map(SLOT, receiving.slots._slots)),
            tuple(receiving.slots._free),
            tuple((transfer, state, *INCOMING(each)) for transfer, state, each in incoming),
            tuple((name, wanted.state) for name, wanted in receiving.wants.items()),
            tuple(receiving._undrained._of.items()),
            tuple(receiving._undrained._met.items()),
            bool(receiving._senders.open),
            tuple((*OUTGOING(out), out.offered is not None) for out in outgoing),
            tuple((*OFFER(offer), len(offer.served)) for offer in sending.offers.values()),
            tuple((*ENDED(ended), tuple(sorted(ended.heard))) for ended in sending._rendezvous._by_age),
            tuple(
                (*DISPATCH(each), each.stop is None, tuple(each.ready), tuple(each.leases))
                for each in orders._open.values()
            ),
            tuple((turn, name) for turn, _, name in sorted(orders._awaiting_slots._heap)),
            tuple((type(order), order.transfer, _amount(order)) for order in (*self.to_send, *self.orders)),
            tuple(self.sent),
            tuple(self.reports),
            tuple(
                (*RECEIPT(each), each.stop is None, *each.leases.items(), frozenset(each.missing))
                for each in self.receive_orders._open.values()
            ),
            tuple(map(SCATTER, self.scatters)),
            tuple(flight.key for flight in self.flights),
            (tuple(self.to_sender), tuple(self.to_receiver), tuple(self.notices)),
            (tuple(self.budget.items()), self.incarnations, self.is_open, self.is_reaching, *self.answers.items()),
            (tuple(sorted(self.slots.items())), tuple(self.remains), frozenset(self.rows)),
        )

    # What may happen:

    def moves(self) -> list[Move]:
        found: list[Move] = []
        found += [("to sender",)] if self.to_sender else []
        found += [("to receiver",)] if self.to_receiver else []
        found += [("greet",)] if self.is_reaching else []
        for i, flight in enumerate(self.flights):
            if flight.state == "gather":
                found.append(("gathered", i))
            elif not flight.has_landed:
                found.append(("lands", i))
                found += [("fails", i)] if self.budget.get("fails") else []
                found += [("late", i)] if self.budget.get("late") and not flight.is_late else []
            else:
                found.append(("wrote", i))
        found += [("notice", i) for i in range(len(self.notices))]
        found += [("scattered", i) for i in range(len(self.scatters))]
        found += [("order",)] if self.orders else []
        found += [("report",)] if self.reports else []
        found += [("order to send",)] if self.to_send else []
        found += [("report of send_orders",)] if self.sent else []
        found += [("remain", i) for i in range(len(self.remains))] if self.budget.get("remain") else []
        for kind in ("cut", "restart", "abandon", "withdraw"):
            found += [(kind,)] if self.budget.get(kind) else []
        found += [("repeat",)] if self.budget.get("repeat") and self.notices else []
        if self.budget.get("lie"):
            found += [("lie", i) for i, flight in enumerate(self.flights) if self._unused(flight)]
        return found

    def after(self, move: Move) -> State:
        """The state that follows."""
        state = self.clone()
        state.make(move)
        return state

    def make(self, move: Move) -> None:
        kind = move[0]
        if kind in self.budget:
            self.budget[kind] -= 1
        getattr(self, "_" + kind.replace(" ", "_"))(*move[1:])
        self.settle()

    def settle(self) -> None:
        """Data planes that do not lag do what they were asked, and are heard."""
        while self.lag != "receiver" and (self.orders or self.reports):
            self._order() if self.orders else self._report()
        while self.lag != "sender" and (self.to_send or self.sent):
            self._order_to_send() if self.to_send else self._report_of_send_orders()

    # Engines:

    def offer(self, request: str, tokens: int) -> None:
        said = offer_of(request, tokens, -(-tokens // 4))
        self.sender(self.sending.offer(said, self.sender_engine, 0.0))

    def want(self, request: str, tokens: int) -> None:
        said = want_of(request, tokens, sender=ADDRESS, deadline=100.0)
        self.receiver(self.receiving.want(said, self.receiver_engine, 0.0))

    def _abandon(self) -> None:
        for name in list(self.receiving.wants):
            self.receiver(self.receiving.abandon(name, 0.0))

    def _withdraw(self) -> None:
        for name in list(self.sending.offers):
            self.sender(self.sending.withdraw(name, "test", 0.0))

    # The network:

    def _greet(self) -> None:
        self.is_reaching = False
        session = answer(hello(self.receiver_engine), self.sender_engine)
        assert isinstance(session, Session)
        if self.is_open:
            self.sender(self.sending.lost(self.receiver_engine.agent.incarnation))
        self.is_open = True
        agreed = accept(welcome(session, self.sender_engine), self.receiver_engine)
        assert isinstance(agreed, Session)
        self.receiver(self.receiving.opened(ADDRESS, agreed, 0.0))

    def _cut(self) -> None:
        self.to_sender.clear()
        self.to_receiver.clear()
        if self.is_open:
            self.is_open = False
            self.sender(self.sending.lost(self.receiver_engine.agent.incarnation))
        self.receiver(self.receiving.unreachable(ADDRESS, "peer_lost", "cut", 0.0))

    def _restart(self) -> None:
        """The sender dies; what it had posted has landed before, or never will."""
        self.to_sender.clear()
        self.to_receiver.clear()
        self.flights.clear()
        self.is_open = False
        self.incarnations += 1
        before = {*self.sending._before, self.sender_engine.agent.incarnation}
        self.sender_engine = _restarted(self.sender_engine, self.incarnations)
        self.sending, self.send_orders = Sender(before=before), SendOrders(len(self.send_orders.slots))
        self.to_send.clear()
        self.sent.clear()
        self.receiver(self.receiving.unreachable(ADDRESS, "peer_lost", "dead", 0.0))

    def _to_sender(self) -> None:
        body, incarnation = self.to_sender.popleft(), self.receiver_engine.agent.incarnation
        session = answer(hello(self.receiver_engine), self.sender_engine) if self.is_open else None
        assert not isinstance(session, Refuse)
        if isinstance(body, Cancel) and not self.is_open:
            if self.sending.renounce(incarnation, body):
                self.to_receiver.append(Drained(transfer=body.transfer))
        elif isinstance(body, Claim) or self.is_open:
            self.sender(hear_receiver(self.sending, incarnation, body, session, self.sender_engine, 0.0))

    def _to_receiver(self) -> None:
        body, incarnation = self.to_receiver.popleft(), self.sender_engine.agent.incarnation
        self.receiver(hear_sender(self.receiving, incarnation, body, 0.0))

    # The data plane's side:

    def _order_to_send(self) -> None:
        take_up(self.to_send.popleft(), self.send_orders, self.receive_orders)
        self._after_send_orders()

    def _after_send_orders(self) -> None:
        """What can be gathered is begun, and what there is to say is said."""
        while not self.to_send and (leaving := self.send_orders.begin()) is not None:
            out = self.sending.outgoing_transfers.get(leaving.order.transfer)
            if out is None or out.offered is None or out.offered.request in self.released:
                raise Wrong(f"{leaving.order.transfer} is read though its blocks were given back")
            self.flights.append(Flight(leaving))
        self.sent += self.send_orders.take_reports()

    def _report_of_send_orders(self) -> None:
        self.sender(self.sending.hear([self.sent.popleft()]))

    def _gathered(self, index: int) -> None:
        flight = self.flights[index]
        flight.state = "write"
        self.send_orders.gathered(flight.leaving)
        self._after_send_orders()

    def _lands(self, index: int) -> None:
        flight = self.flights[index]
        flight.has_landed = True
        self._put(flight.leaving)

    def _put(self, leaving: LeavingChunk) -> None:
        transfer, lease = leaving.order.transfer, leaving.lease
        slot = self.receiving.slots._slots[lease.slot]
        is_out = slot.state in (SlotState.LENT, SlotState.QUARANTINED)
        if not is_out or (slot.generation, slot.transfer) != (lease.generation, transfer):
            raise Wrong(f"{transfer} writes {lease}, which is {slot}")
        self.slots[lease.slot] = (transfer, leaving.chunk)

    def _wrote(self, index: int) -> None:
        """The initiator sees the end of its write; now its notice leaves."""
        flight = self.flights.pop(index)
        self.notices.append(notice_of(flight.leaving, self.sender_engine))
        self._written(flight, None)

    def _fails(self, index: int) -> None:
        flight = self.flights.pop(index)
        slot = flight.leaving.lease.slot
        self._put(flight.leaving)
        self.slots[slot] = "half of it"
        if self.budget.get("remain"):
            self.remains.append(slot)
        self._written(flight, ("write_failed", "test"))

    def _written(self, flight: Flight, failure: Failure) -> None:
        self.send_orders.written(flight.leaving, 0.0, failure, flight.is_late)
        self._after_send_orders()

    def _remain(self, index: int) -> None:
        """A kernel delivers the rest of a write that failed, whoever has the slot by now."""
        self.slots[self.remains.pop(index)] = REST

    def _late(self, index: int) -> None:
        flight = self.flights[index]
        flight.is_late = True
        self.send_orders.late(flight.leaving, "test")
        self._after_send_orders()

    def _repeat(self) -> None:
        self.notices.append(self.notices[0])

    def _unused(self, flight: Flight) -> deque[SlotLease]:
        """Leases of its transfer under which nothing has left."""
        return flight.leaving.ordered.leases

    def _lie(self, index: int) -> None:
        """The same chunk again, under another lease; this write is over at once."""
        flight = self.flights[index]
        again = replace(flight.leaving, lease=self._unused(flight).popleft())
        self._put(again)
        self.notices.append(notice_of(again, self.sender_engine))

    def _order(self) -> None:
        take_up(self.orders.popleft(), self.send_orders, self.receive_orders)
        self.reports += self.receive_orders.take_reports()

    def _notice(self, index: int) -> None:
        while self.orders:  # what was asked before it came is done before it is looked at
            self._order()
        landed = self.receive_orders.landed(self.notices.pop(index))
        if landed is not None:
            self.scatters.append(landed)
        self.reports += self.receive_orders.take_reports()

    def _scattered(self, index: int) -> None:
        landed = self.scatters.pop(index)
        order, notice = landed.order, landed.notice
        found = self.slots.get(notice.slot)
        if found not in ((order.transfer, notice.chunk), REST):
            raise Wrong(f"slot {notice.slot} has {found} for {notice.chunk}")
        wanted = self.receiving._wanted_by.get(order.transfer)
        if wanted is None or wanted.want.request in self.answers:
            raise Wrong(f"{order.transfer} is scattered after its want was answered")
        if found == REST:  # what nobody but the digest can see
            self.receive_orders.scattered(landed, ("digest_mismatch", "test"))
        else:
            self.rows.add((order.transfer, notice.chunk))
            self.receive_orders.scattered(landed, None)
        self.reports += self.receive_orders.take_reports()

    def _report(self) -> None:
        chunks = {name: _chunks(wanted) for name, wanted in self.receiving.wants.items()}
        self.receiver(self.receiving.hear([self.reports.popleft()], 0.0))
        for request, needed in chunks.items():
            if self.answers.get(request) == "Done" and not needed <= self.rows:
                raise Wrong(f"{request} is done without {needed - self.rows}")

    # Both shells:

    def receiver(self, actions: Sequence[object]) -> None:
        for action in actions:
            match action:
                case Reach() | Ask():
                    self.is_reaching = True
                case Send(body=Settled()):
                    pass
                case Send(body=body):
                    self.to_sender.append(body)
                case Tell(message=Done(request=name) | Failed(request=name) as message):
                    if name in self.answers:
                        raise Wrong(f"{name} is answered twice")
                    self.answers[name] = type(message).__name__
                case _ if isinstance(action, Notable):
                    pass
                case _:
                    self.orders.append(action)

    def sender(self, actions: Sequence[object]) -> None:
        for action in actions:
            match action:
                case Send(body=body):
                    self.to_receiver.append(body)
                case Tell(message=Released(request=name)):
                    if any(each.state == "gather" and each.leaving.order.request == name for each in self.flights):
                        raise Wrong(f"{name} is released while it is read")
                    self.released.append(name)
                case _ if isinstance(action, Notable):
                    pass
                case _:
                    self.to_send.append(action)

    # Ends:

    def check_rest(self) -> None:
        """Nothing more happens by itself: deadlines pass, senders confirm, and then nothing may be left."""
        calm = self.clone()
        calm.budget = {}
        for now in (200.0, 300.0, 400.0):
            calm.receiver(calm.receiving.tick(now))
            calm.sender(calm.sending.tick(now))
            while moves := calm.moves():
                calm.make(moves[0])
        counts = calm.receiving.slots.counts()
        if counts.free != len(calm.receiving.slots) or calm.send_orders.slots.free != len(calm.send_orders.slots):
            raise Wrong(f"slots are left: {counts}")
        if (
            calm.receiving.wants
            or calm.receiving._wanted_by
            or calm.receiving._undrained._of
            or calm.sending.outgoing_transfers
        ):
            raise Wrong("transfers are left")
        if calm.receive_orders._open or calm.receive_orders.lent or calm.receive_orders.scattering:
            raise Wrong("orders are left")
        if calm.send_orders._open or calm.send_orders.moving:
            raise Wrong("orders to send are left")
        if calm.sending.offers:
            raise Wrong("offers are left")


def _restarted(engine: AttachedEngine, number: int) -> AttachedEngine:
    return replace(engine, agent=changed(engine.agent, incarnation=f"incarnation-{number}"))


def _amount(order: SendingOrder | ReceivingOrder) -> object:
    match order:
        case Credit(leases=leases) | Lend(leases=leases):
            return leases
        case Progress(ready=ready):
            return ready
        case _:
            return None


def _chunks(wanted: OpenWant) -> set[tuple[str, int]]:
    return {
        (name, chunk) for name, incoming in wanted.incoming_transfers.items() for chunk in range(incoming.plan.chunks)
    }


class _Names:
    """Names for transfers and tokens that depend on nothing but their number."""

    def __init__(self) -> None:
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def token(self) -> bytes:
        return self.count.to_bytes(16, "big")


def begin(wants: int, tokens: int, slots: int, local: int, budget: dict[str, int], lag: str = "") -> State:
    """The first state: everything offered and wanted, nothing said yet."""
    world = World(slots=slots, local=local)
    receiver, sender = world.receivers[0], world.senders[0]
    names = _Names()
    receiving = Receiver(ReceiveSlots(slots), names.name, names.token)
    state = State(receiver.engine, sender.engine, receiving, Sender(), budget, lag, send_orders=SendOrders(local))
    for i in range(wants):
        state.offer(f"r{i}", tokens)
        state.want(f"r{i}", tokens)
    return state
