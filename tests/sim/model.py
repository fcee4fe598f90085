"""One want or two between one source and one sink, real machines of both, as states that a search can go through.

Everything that may happen next is a move; moves of the adversary (cuts, restarts, writes that fail or are late) may be
made so many times. One of them is a lie: a chunk that is under way is written once more, under a lease that was meant
for another. A state knows all that is under way: messages, gathers, writes, notices, scatters, and what the sink's
exchange and data plane have said to each other.
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

from kvbridge.agent.receiving import Arrival, Receiving
from kvbridge.exchange.actions import Ask, Reach, Send, Ship, Tell
from kvbridge.exchange.inbound import Inbound
from kvbridge.exchange.intake import Wanted
from kvbridge.exchange.orders import Lend, ReceiveOrder, Report, Stop
from kvbridge.exchange.outbound import Outbound
from kvbridge.exchange.session import Home, Session, accept, answer, hello, welcome
from kvbridge.exchange.slots import LocalSlots, SlotPool, SlotState
from tests.exchange.world import NOTHING, World, notice_of

Move = tuple[Any, ...]
ADDRESS = "P0"
REST = "the rest of a write that failed"


@dataclass(slots=True)
class Flight:
    """A chunk on its way: gathering, writing, or written and not yet known to be."""

    ship: Ship
    state: str = "gather"
    is_late: bool = False
    has_landed: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        return self.ship.transfer, self.ship.chunk, self.ship.lease, self.state, self.is_late, self.has_landed


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
    has_lag: bool = False  # between the sink's exchange and its data plane: what either says is heard later
    boots: int = 1
    is_open: bool = False  # the source has the sink's session
    is_reaching: bool = False  # the sink wants one
    to_source: deque[Any] = field(default_factory=deque)
    to_sink: deque[Any] = field(default_factory=deque)
    flights: list[Flight] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    receiving: Receiving = field(default_factory=Receiving)
    orders: deque[ReceiveOrder | Lend | Stop] = field(default_factory=deque)
    reports: deque[Report] = field(default_factory=deque)
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
        yield from (flight.ship for flight in self.flights)
        yield from self.notices
        yield from self.orders
        yield from self.reports
        yield NOTHING
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
            (o.transfer, o.state, o.next_chunk, o.lent, o.gathering, o.writing, o.shipped, o.told_ready, o.is_lost)
            for o in outbound.outlets.values()
        )
        bound = tuple((tuple(o.leases), o.offered is not None) for o in outbound.outlets.values())
        offers = tuple((o.request, o.want, o.over, o.gathering, len(o.served)) for o in outbound.offers.values())
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
        found += [("remain", i) for i in range(len(self.remains))] if self.budget.get("remain") else []
        for kind in ("cut", "restart", "abandon", "withdraw"):
            found += [(kind,)] if self.budget.get(kind) else []
        found += [("repeat",)] if self.budget.get("repeat") and self.notices else []
        if self.budget.get("lie"):
            found += [("lie", i) for i, flight in enumerate(self.flights) if self._unused(flight.ship)]
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
        if not self.has_lag:
            self.settle()

    def settle(self) -> None:
        """The sink's data plane does what it was asked, and is heard."""
        while self.orders or self.reports:
            if self.orders:
                self._order()
            else:
                self._report()

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
        self.outbound = Outbound(LocalSlots(len(self.outbound.local)), before=before)
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

    def _gathered(self, index: int) -> None:
        flight = self.flights[index]
        flight.state = "write"
        self.source(self.outbound.gathered(flight.ship.transfer))

    def _lands(self, index: int) -> None:
        flight = self.flights[index]
        flight.has_landed = True
        self._put(flight.ship)

    def _put(self, ship: Ship) -> None:
        slot = self.inbound.slots._slots[ship.lease.slot]
        is_out = slot.state in (SlotState.LENT, SlotState.QUARANTINED)
        if not is_out or (slot.generation, slot.transfer) != (ship.lease.generation, ship.transfer):
            raise Wrong(f"{ship.transfer} writes {ship.lease}, which is {slot}")
        self.slots[ship.lease.slot] = (ship.transfer, ship.chunk)

    def _wrote(self, index: int) -> None:
        """The initiator sees the end of its write; now its notice leaves."""
        ship = self.flights.pop(index).ship
        self.notices.append(notice_of(ship, self.source_home))
        self.source(self.outbound.shipped(ship.transfer, ship.local, None))

    def _fails(self, index: int) -> None:
        ship = self.flights.pop(index).ship
        self._put(ship)
        self.slots[ship.lease.slot] = "half of it"
        if self.budget.get("remain"):
            self.remains.append(ship.lease.slot)
        self.source(self.outbound.shipped(ship.transfer, ship.local, ("write_failed", "test")))

    def _remain(self, index: int) -> None:
        """A kernel delivers the rest of a write that failed, whoever has the slot by now."""
        self.slots[self.remains.pop(index)] = REST

    def _late(self, index: int) -> None:
        flight = self.flights[index]
        flight.is_late = True
        self.source(self.outbound.late(flight.ship.transfer, flight.ship.local, "test"))

    def _repeat(self) -> None:
        self.notices.append(self.notices[0])

    def _unused(self, ship: Ship) -> deque[Lease]:
        """Leases of its transfer under which nothing has left."""
        out = self.outbound.outlets.get(ship.transfer)
        return deque() if out is None else out.leases

    def _lie(self, index: int) -> None:
        """The same chunk again, under another lease; this write is over at once."""
        ship = self.flights[index].ship
        again = replace(ship, lease=self._unused(ship).popleft())
        self._put(again)
        self.notices.append(notice_of(again, self.source_home))

    def _order(self) -> None:
        match order := self.orders.popleft():
            case ReceiveOrder():
                self.receiving.order(order, NOTHING)
            case Lend():
                self.receiving.lend(order)
            case Stop():
                self.receiving.stop(order)
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
                case ReceiveOrder() | Lend() | Stop():
                    self.orders.append(action)
                case Send(body=Settled()):
                    pass
                case Send(body=body):
                    self.to_source.append(body)
                case Tell(message=Done(request=name) | Failed(request=name) as message):
                    if name in self.answers:
                        raise Wrong(f"{name} is answered twice")
                    self.answers[name] = type(message).__name__

    def source(self, actions: Sequence[object]) -> None:
        for action in actions:
            match action:
                case Send(body=body):
                    self.to_sink.append(body)
                case Ship():
                    self.flights.append(Flight(action))
                case Tell(message=Released(request=name)):
                    if any(f.state == "gather" for f in self.flights if self._room_of(f.ship) == name):
                        raise Wrong(f"{name} is released while it is read")
                    self.released.append(name)

    def _room_of(self, ship: Ship) -> str:
        out = self.outbound.outlets.get(ship.transfer)
        return "" if out is None else out.claim.room

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
        if counts.free != len(calm.inbound.slots) or calm.outbound.local.free != len(calm.outbound.local):
            raise Wrong(f"slots are left: {counts}")
        if calm.inbound.wants or calm.inbound._wanted_by or calm.inbound._doubts._of or calm.outbound.outlets:
            raise Wrong("transfers are left")
        if calm.receiving._open or calm.receiving.lent or calm.receiving.scattering:
            raise Wrong("orders are left")
        if calm.outbound.offers:
            raise Wrong("offers are left")


def _restarted(home: Home, number: int) -> Home:
    return replace(home, agent=changed(home.agent, boot=f"boot-{number}"))


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


def begin(wants: int, tokens: int, slots: int, local: int, budget: dict[str, int], has_lag: bool = False) -> State:
    """The first state: everything offered and wanted, nothing said yet."""
    world = World(slots=slots, local=local)
    sink, source = world.sinks[0], world.sources[0]
    names = _Names()
    inbound = Inbound(SlotPool(slots), names.name, names.token)
    state = State(sink.home, source.home, inbound, Outbound(LocalSlots(local)), budget, has_lag)
    for i in range(wants):
        state.offer(f"r{i}", tokens)
        state.want(f"r{i}", tokens)
    return state
