"""One want or two between one source and one sink, real machines of both, as states that a search can go through.

Everything that may happen next is a move; moves of the adversary (cuts, restarts, writes that fail or are late) may be
made so many times. One of them is a lie: a chunk that is under way is written once more, under a lease that was meant
for another. A state knows all that is under way: messages, gathers, writes, notices, scatters, and what exchange and
data plane of either side have said to each other.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvbridge_proto.engine import Abandon, Done, Failed, Offer, Released, Want, Withdraw
from kvbridge_proto.peer import Cancel, Claim, Drained, Failing, Grant, Lease, Notice, Ready, Refuse, Settled
from kvbridge_proto.words import Blocks
from msgspec.structs import replace as changed

from kvbridge.dataplane.receiving import Arrival, Receiving
from kvbridge.dataplane.sending import Departure, Dispatch, Sending
from kvbridge.exchange.actions import Ask, Reach, Send, Tell
from kvbridge.exchange.inbound import Inbound
from kvbridge.exchange.intake import Wanted
from kvbridge.exchange.orders import (
    Credit,
    Failure,
    Lend,
    Progress,
    ReceivingOrder,
    ReceivingReport,
    SendingOrder,
    SendingReport,
)
from kvbridge.exchange.outbound import Outbound
from kvbridge.exchange.session import Home, Session, accept, answer, hello, welcome
from kvbridge.exchange.slots import SlotPool, SlotState
from tests.unit.exchange.world import NOTHING, World, notice_of, take_up

Move = tuple[Any, ...]
ADDRESS = "P0"
REST = "the rest of a write that failed"


@dataclass(slots=True)
class Flight:
    """A chunk on its way: gathering, writing, or written and not yet known to be."""

    departure: Departure
    state: str = "gather"
    is_late: bool = False
    has_landed: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        departure = self.departure
        what = departure.order.transfer, departure.chunk, departure.lease
        return *what, self.state, self.is_late, self.has_landed


class Wrong(AssertionError):
    """A state that must not be."""


@dataclass
class State:
    """Where both machines and everything between them are."""

    sink_home: Home
    source_home: Home
    inbound: Inbound
    outbound: Outbound
    budget: dict[str, int]
    lag: str = ""  # whose exchange and data plane hear each other later: "sink", "source"
    boots: int = 1
    is_open: bool = False  # the source has the sink's session
    is_reaching: bool = False  # the sink wants one
    to_source: deque[Any] = field(default_factory=deque)
    to_sink: deque[Any] = field(default_factory=deque)
    flights: list[Flight] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    sending: Sending = field(default_factory=lambda: Sending(0))
    to_send: deque[SendingOrder] = field(default_factory=deque)
    sent: deque[SendingReport] = field(default_factory=deque)
    receiving: Receiving = field(default_factory=Receiving)
    orders: deque[ReceivingOrder] = field(default_factory=deque)
    reports: deque[ReceivingReport] = field(default_factory=deque)
    scatters: list[Arrival] = field(default_factory=list)
    slots: dict[int, object] = field(default_factory=dict)
    remains: list[int] = field(default_factory=list)  # slots of writes that failed, the rest of which may land yet
    rows: set[tuple[str, int]] = field(default_factory=set)  # chunks that were scattered
    answers: dict[str, str] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)

    def clone(self) -> State:
        """A copy of all that changes; values stay the same objects."""
        memo = {id(each): each for each in (self.sink_home, self.source_home, *self._values())}
        return copy.deepcopy(self, memo)

    def _values(self) -> Iterator[object]:
        for wanted in self.inbound._wanted_by.values():
            yield from (wanted.want, wanted.home, wanted.tables)
            for intake in wanted.intakes.values():
                yield from (intake.session, intake.plan)
        for wanted in self.inbound.wants.values():
            yield from (wanted.want, wanted.home, wanted.tables)
        for out in self.outbound.outlets.values():
            yield from (out.claim, out.plan)
        for offered in self.outbound.offers.values():
            yield offered.tables
        yield from self.inbound._sources.open.values()
        yield from self.to_source
        yield from self.to_sink
        yield from self.notices
        yield from (*self.orders, *self.reports, *self.to_send, *self.sent)
        yield NOTHING
        for dispatch in [*self.sending._open.values(), *(flight.departure.dispatch for flight in self.flights)]:
            yield from (dispatch.order, dispatch.tables, dispatch.stop)
        for receipt in [*self.receiving._open.values(), *(scatter.receipt for scatter in self.scatters)]:
            yield from (receipt.order, receipt.stop)
        for _, _, takes in self.inbound._givers._assigned.values():
            yield takes
        for sessions, pool, _ in self.inbound._givers._assigned.values():
            yield from (*sessions, pool)

    @property
    def key(self) -> object:
        """Equal for states that go on alike."""
        inbound, outbound = self.inbound, self.outbound
        slots = tuple((s.state, s.generation, s.transfer) for s in inbound.slots._slots)
        intakes = tuple(
            (t, w.state, i.state, i.ready, i.scattered, i.is_carried, i.is_drained)
            for t, w in inbound._wanted_by.items()
            for i in (w.intakes[t],)
        )
        outlets = tuple(
            (o.transfer, o.state, o.lent, o.shipped, o.progress, o.told_ready, o.is_ordered, o.is_gathering, o.is_lost)
            for o in outbound.outlets.values()
        )
        bound = tuple((o.early, o.offered is not None) for o in outbound.outlets.values())
        offers = tuple((o.request, o.want, o.over, len(o.served)) for o in outbound.offers.values())
        dispatches = tuple(_key_of(each) for each in self.sending._open.values())
        hungry = tuple((turn, name) for turn, _, name in sorted(self.sending._hungry._heap))
        to_send = tuple((type(o), o.transfer, _amount(o)) for o in self.to_send), tuple(self.sent)
        ended = tuple((e.room, e.want, tuple(sorted(e.heard))) for e in outbound._rooms._by_age)
        wants = tuple((name, w.state) for name, w in inbound.wants.items())
        network = tuple(self.to_source), tuple(self.to_sink), tuple(self.notices)
        flights = tuple(flight.key for flight in self.flights)
        scatters = tuple((s.order.transfer, s.notice.chunk, s.notice.slot) for s in self.scatters)
        receipts = tuple(
            (r.transfer, tuple(r.leases.items()), frozenset(r.missing), r.moving, r.stop is None)
            for r in self.receiving._open.values()
        )
        orders = tuple((type(o), o.transfer, o.leases if isinstance(o, Lend) else ()) for o in self.orders)
        rest = tuple(self.budget.items()), self.boots, self.is_open, self.is_reaching, tuple(self.answers.items())
        doubts = tuple(inbound._doubts._of.items()), tuple(inbound._doubts._met.items())
        free = tuple(inbound.slots._free)
        held, rows = (tuple(sorted(self.slots.items())), tuple(self.remains)), frozenset(self.rows)
        has_session = bool(inbound._sources.open)
        return (
            slots,
            intakes,
            outlets,
            bound,
            offers,
            ended,
            wants,
            network,
            flights,
            scatters,
            receipts,
            orders,
            dispatches,
            hungry,
            to_send,
            tuple(self.reports),
            rest,
            doubts,
            free,
            held,
            rows,
            has_session,
        )

    # What may happen:

    def moves(self) -> list[Move]:
        found: list[Move] = []
        found += [("to source",)] if self.to_source else []
        found += [("to sink",)] if self.to_sink else []
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
        found += [("report of sending",)] if self.sent else []
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
        while self.lag != "sink" and (self.orders or self.reports):
            self._order() if self.orders else self._report()
        while self.lag != "source" and (self.to_send or self.sent):
            self._order_to_send() if self.to_send else self._report_of_sending()

    # Engines:

    def offer(self, request: str, tokens: int) -> None:
        blocks = (Blocks(0, 0, tuple(range(-(-tokens // 4)))),)
        said = Offer(room=request, request=request, tokens=tokens, blocks=blocks, is_last=True, hold_s=100.0)
        self.source(self.outbound.offer(said, self.source_home, 0.0))

    def want(self, request: str, tokens: int) -> None:
        blocks = (Blocks(0, 0, tuple(range(-(-tokens // 16)))),)
        said = Want(
            request=request,
            room=request,
            source=ADDRESS,
            first_token=0,
            end_token=tokens,
            blocks=blocks,
            deadline_s=100.0,
        )
        self.sink(self.inbound.want(said, self.sink_home, 0.0))

    def _abandon(self) -> None:
        for name in list(self.inbound.wants):
            self.sink(self.inbound.abandon(Abandon(request=name).request, 0.0))

    def _withdraw(self) -> None:
        for name in list(self.outbound.offers):
            self.source(self.outbound.withdraw(Withdraw(request=name).request, "test", 0.0))

    # The network:

    def _greet(self) -> None:
        self.is_reaching = False
        session = answer(hello(self.sink_home), self.source_home)
        assert isinstance(session, Session)
        if self.is_open:
            self.source(self.outbound.lost(self.sink_home.agent.boot))
        self.is_open = True
        agreed = accept(welcome(session, self.source_home), self.sink_home)
        assert isinstance(agreed, Session)
        self.sink(self.inbound.opened(ADDRESS, agreed, 0.0))

    def _cut(self) -> None:
        self.to_source.clear()
        self.to_sink.clear()
        if self.is_open:
            self.is_open = False
            self.source(self.outbound.lost(self.sink_home.agent.boot))
        self.sink(self.inbound.unreachable(ADDRESS, "peer_lost", "cut", 0.0))

    def _restart(self) -> None:
        """The source dies; what it had posted has landed before, or never will."""
        self.to_source.clear()
        self.to_sink.clear()
        self.flights.clear()
        self.is_open = False
        self.boots += 1
        before = {*self.outbound._before, self.source_home.agent.boot}
        self.source_home = _restarted(self.source_home, self.boots)
        self.outbound, self.sending = Outbound(before=before), Sending(len(self.sending.slots))
        self.to_send.clear()
        self.sent.clear()
        self.sink(self.inbound.unreachable(ADDRESS, "peer_lost", "dead", 0.0))

    def _to_source(self) -> None:
        body, boot, machine = self.to_source.popleft(), self.sink_home.agent.boot, self.outbound
        session = answer(hello(self.sink_home), self.source_home)
        assert isinstance(session, Session)
        match body:
            case Claim() if not self.is_open:
                self.to_sink.append(Refuse(code="no_session", reasons=(), about=body.transfer))
            case Claim():
                self.source(machine.claim(body, session, self.source_home, 0.0))
            case Grant() if self.is_open:
                self.source(machine.grant(boot, body))
            case Cancel() if self.is_open:
                self.source(machine.cancel(boot, body))
            case Cancel(transfer=transfer) if machine.renounce(boot, body):
                self.to_sink.append(Drained(transfer=transfer))

    def _to_sink(self) -> None:
        body, boot, machine = self.to_sink.popleft(), self.source_home.agent.boot, self.inbound
        match body:
            case Ready(transfer=transfer, chunks=chunks):
                self.sink(machine.ready(boot, transfer, chunks))
            case Failing(transfer=transfer, code=code, reason=reason):
                self.sink(machine.failing(boot, transfer, code, reason, 0.0))
            case Drained(transfer=transfer, code=code, reason=reason):
                self.sink(machine.drained(boot, transfer, code, reason, 0.0))
            case Refuse(about=transfer, code=code):
                self.sink(machine.drained(boot, transfer, code, "", 0.0))

    # The mover's side:

    def _order_to_send(self) -> None:
        take_up(self.to_send.popleft(), self.sending, self.receiving)
        self._after_sending()

    def _after_sending(self) -> None:
        """What can be gathered is begun, and what there is to say is said."""
        while not self.to_send and (departure := self.sending.begin()) is not None:
            out = self.outbound.outlets.get(departure.order.transfer)
            if out is None or out.offered is None or out.offered.request in self.released:
                raise Wrong(f"{departure.order.transfer} is read though its blocks were given back")
            self.flights.append(Flight(departure))
        self.sent += self.sending.take_reports()

    def _report_of_sending(self) -> None:
        self.source(self.outbound.hear([self.sent.popleft()]))

    def _gathered(self, index: int) -> None:
        flight = self.flights[index]
        flight.state = "write"
        self.sending.gathered(flight.departure)
        self._after_sending()

    def _lands(self, index: int) -> None:
        flight = self.flights[index]
        flight.has_landed = True
        self._put(flight.departure)

    def _put(self, departure: Departure) -> None:
        transfer, lease = departure.order.transfer, departure.lease
        slot = self.inbound.slots._slots[lease.slot]
        is_out = slot.state in (SlotState.LENT, SlotState.QUARANTINED)
        if not is_out or (slot.generation, slot.transfer) != (lease.generation, transfer):
            raise Wrong(f"{transfer} writes {lease}, which is {slot}")
        self.slots[lease.slot] = (transfer, departure.chunk)

    def _wrote(self, index: int) -> None:
        """The initiator sees the end of its write; now its notice leaves."""
        flight = self.flights.pop(index)
        self.notices.append(notice_of(flight.departure, self.source_home))
        self._written(flight, None)

    def _fails(self, index: int) -> None:
        flight = self.flights.pop(index)
        slot = flight.departure.lease.slot
        self._put(flight.departure)
        self.slots[slot] = "half of it"
        if self.budget.get("remain"):
            self.remains.append(slot)
        self._written(flight, ("write_failed", "test"))

    def _written(self, flight: Flight, failure: Failure) -> None:
        self.sending.written(flight.departure, 0.0, failure, flight.is_late)
        self._after_sending()

    def _remain(self, index: int) -> None:
        """A kernel delivers the rest of a write that failed, whoever has the slot by now."""
        self.slots[self.remains.pop(index)] = REST

    def _late(self, index: int) -> None:
        flight = self.flights[index]
        flight.is_late = True
        self.sending.late(flight.departure, "test")
        self._after_sending()

    def _repeat(self) -> None:
        self.notices.append(self.notices[0])

    def _unused(self, flight: Flight) -> deque[Lease]:
        """Leases of its transfer under which nothing has left."""
        return flight.departure.dispatch.leases

    def _lie(self, index: int) -> None:
        """The same chunk again, under another lease; this write is over at once."""
        flight = self.flights[index]
        again = replace(flight.departure, lease=self._unused(flight).popleft())
        self._put(again)
        self.notices.append(notice_of(again, self.source_home))

    def _order(self) -> None:
        take_up(self.orders.popleft(), self.sending, self.receiving)
        self.reports += self.receiving.take_reports()

    def _notice(self, index: int) -> None:
        while self.orders:  # what was asked before it came is done before it is looked at
            self._order()
        arrival = self.receiving.landed(self.notices.pop(index))
        if arrival is not None:
            self.scatters.append(arrival)
        self.reports += self.receiving.take_reports()

    def _scattered(self, index: int) -> None:
        arrival = self.scatters.pop(index)
        order, notice = arrival.order, arrival.notice
        found = self.slots.get(notice.slot)
        if found not in ((order.transfer, notice.chunk), REST):
            raise Wrong(f"slot {notice.slot} has {found} for {notice.chunk}")
        wanted = self.inbound._wanted_by.get(order.transfer)
        if wanted is None or wanted.want.request in self.answers:
            raise Wrong(f"{order.transfer} is scattered after its want was answered")
        if found == REST:  # what nobody but the digest can see
            self.receiving.scattered(arrival, ("digest_mismatch", "test"))
        else:
            self.rows.add((order.transfer, notice.chunk))
            self.receiving.scattered(arrival, None)
        self.reports += self.receiving.take_reports()

    def _report(self) -> None:
        chunks = {name: _chunks(wanted) for name, wanted in self.inbound.wants.items()}
        self.sink(self.inbound.hear([self.reports.popleft()], 0.0))
        for request, needed in chunks.items():
            if self.answers.get(request) == "Done" and not needed <= self.rows:
                raise Wrong(f"{request} is done without {needed - self.rows}")

    # Both shells:

    def sink(self, actions: Sequence[object]) -> None:
        for action in actions:
            match action:
                case Reach() | Ask():
                    self.is_reaching = True
                case Send(body=Settled()):
                    pass
                case Send(body=body):
                    self.to_source.append(body)
                case Tell(message=Done(request=name) | Failed(request=name) as message):
                    if name in self.answers:
                        raise Wrong(f"{name} is answered twice")
                    self.answers[name] = type(message).__name__
                case _:
                    self.orders.append(action)

    def source(self, actions: Sequence[object]) -> None:
        for action in actions:
            match action:
                case Send(body=body):
                    self.to_sink.append(body)
                case Tell(message=Released(request=name)):
                    if any(each.state == "gather" and each.departure.order.request == name for each in self.flights):
                        raise Wrong(f"{name} is released while it is read")
                    self.released.append(name)
                case _:
                    self.to_send.append(action)

    # Ends:

    def check_rest(self) -> None:
        """Nothing more happens by itself: deadlines pass, doubts are asked about, and then nothing may be left."""
        calm = self.clone()
        calm.budget = {}
        for now in (200.0, 300.0, 400.0):
            calm.sink(calm.inbound.tick(now))
            calm.source(calm.outbound.tick(now))
            while moves := calm.moves():
                calm.make(moves[0])
        counts = calm.inbound.slots.counts()
        if counts.free != len(calm.inbound.slots) or calm.sending.slots.free != len(calm.sending.slots):
            raise Wrong(f"slots are left: {counts}")
        if calm.inbound.wants or calm.inbound._wanted_by or calm.inbound._doubts._of or calm.outbound.outlets:
            raise Wrong("transfers are left")
        if calm.receiving._open or calm.receiving.lent or calm.receiving.scattering:
            raise Wrong("orders are left")
        if calm.sending._open or calm.sending.moving:
            raise Wrong("orders to send are left")
        if calm.outbound.offers:
            raise Wrong("offers are left")


def _restarted(home: Home, number: int) -> Home:
    return replace(home, agent=changed(home.agent, boot=f"boot-{number}"))


def _key_of(dispatch: Dispatch) -> object:
    ready, leases = tuple(dispatch.ready), tuple(dispatch.leases)
    doing = dispatch.next_chunk, dispatch.gathering, dispatch.writing, dispatch.is_broken, dispatch.stop is None
    return dispatch.transfer, ready, leases, dispatch.turn, doing


def _amount(order: SendingOrder) -> object:
    match order:
        case Credit(leases=leases):
            return leases
        case Progress(ready=ready):
            return ready
        case _:
            return None


def _chunks(wanted: Wanted) -> set[tuple[str, int]]:
    return {(name, chunk) for name, intake in wanted.intakes.items() for chunk in range(intake.plan.chunks)}


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
    sink, source = world.sinks[0], world.sources[0]
    names = _Names()
    inbound = Inbound(SlotPool(slots), names.name, names.token)
    state = State(sink.home, source.home, inbound, Outbound(), budget, lag, sending=Sending(local))
    for i in range(wants):
        state.offer(f"r{i}", tokens)
        state.want(f"r{i}", tokens)
    return state
