"""A hostile agent and a careless engine against the real exchange machines, while an honest transfer goes on.

A frame is a script: messages that the wire allows, in any order. Names in it that mean nothing stand for things that
the hostile agent has been told, so that it is a peer with a session, and not a stranger. It is written to and writes,
or is read and reads, as its sessions say.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from random import Random
from typing import Annotated, Any

import msgspec
from kvbridge_proto.codec import BadFrame, decode, encode
from kvbridge_proto.engine import Abandon, Done, Failed, Offer, Want, Withdraw
from kvbridge_proto.peer import (
    Cancel,
    Check,
    Checked,
    Claim,
    Drained,
    FabricCard,
    Failing,
    Grant,
    Lease,
    Notice,
    Ready,
    Refuse,
    Renew,
    Settled,
    Sum,
    Tables,
    Take,
)
from kvbridge_proto.words import Agent, Blocks
from msgspec import Meta, Struct

from kvbridge.dataplane.receiving import Arrival, Receipt
from kvbridge.dataplane.sending import Departure
from kvbridge.exchange.actions import Action, Ask, Reach, Send
from kvbridge.exchange.orders import Digest, Digested, FenceReached, Pull, Pulled, ReceivingOrder, SendingOrder, Watch
from kvbridge.exchange.outlet import Offered
from kvbridge.exchange.reading import LEASE_S
from kvbridge.exchange.route import Routed, Site
from kvbridge.exchange.session import Home, Session, accept, answer, hello, welcome
from tests.integration.fuzz.typed import TEXTS, drawer
from tests.unit.exchange.world import Node, World, make_pool

POOLS = {name: make_pool(name, 0, 1, tokens) for name, tokens in (("prefill", 4), ("decode", 16), ("evil", 16))}
EVIL = "tcp://127.0.0.1:1"  # a name that scripts use
ALL_ROWS = (Take(0, 2, 0, 4),)
MOST_S = 40.0  # less than the honest want's deadline
SLOTS = 4
CLAIMED, OFFERED = "t1", "o"  # what it claims first, and of which request


class Landed(Struct, frozen=True, tag="landed"):
    """The hostile agent writes a notice."""

    notice: Notice


class Do(Struct, frozen=True, tag="do"):
    """Something happens of itself: see `Siege.happen`."""

    what: Annotated[int, Meta(ge=0, lt=10)]


class Flood(Struct, frozen=True, tag="flood"):
    """The same again and again, under other names and numbers where `is_new`."""

    steps: Annotated[tuple[Claim | Grant | Cancel | Want | Abandon | Offer | Withdraw | Do, ...], Meta(max_length=4)]
    times: Annotated[int, Meta(ge=1, le=300)]
    is_new: bool


ToP = Claim | Grant | Cancel | Settled | Renew | Check
ToD = Ready | Failing | Drained | Refuse | Landed | Tables | Checked
Engine = Offer | Want | Withdraw | Abandon
Step = Do | Flood | ToP | ToD | Engine
Script = tuple[Step, ...]


class Siege(World):
    """P0 and D0 are ours. The hostile agent fetches from the one, and the other is made to fetch from it."""

    def __init__(self) -> None:
        super().__init__([POOLS["prefill"]], [POOLS["decode"]], slots=SLOTS)
        self.source, self.sink = self.nodes["P0"], self.nodes["D0"]
        self.promised: dict[str, tuple[Offered, float]] = {}  # what it may read, and until when
        self.fence = 0  # that the stream of our source's engine has reached
        self.heard: deque[Any] = deque(maxlen=64)  # by the hostile agent
        self.claims: list[Claim] = []
        self.leases: list[tuple[str, Lease]] = []
        self.boots = 0
        self.routed = Routed("nixl")  # its sessions, from the next on
        self.taken: Session
        self.given: Session
        self.greet()

    def greet(self) -> None:
        """A new start of the hostile agent."""
        self.boots += 1
        agent = Agent(name="[/x]", boot=f"evil-{self.boots}", address=EVIL, version="1")
        card = FabricCard(kind="world", name="boot", descriptor=b"", base=0, slot_bytes=1024, slots=SLOTS)
        home = Home(agent, 1, POOLS["evil"], Site(card), ("sum",))
        fetching, fetched = answer(hello(home), self.source.home), answer(hello(self.sink.home), home)
        assert isinstance(fetching, Session) and isinstance(fetched, Session)
        self.taken = replace(fetching, routed=self.routed)
        given = accept(welcome(fetched, home), self.sink.home)
        assert isinstance(given, Session)
        self.given = replace(given, routed=self.routed)

    def do(self, node: Node, actions: list[Action]) -> None:
        self._perform(node, actions)
        if node.outbound.is_owing:
            self._perform(node, node.outbound.answers(self.now, self.now, lambda fence: fence <= self.fence))

    def _perform(self, node: Node, actions: list[Action]) -> None:
        """What concerns the hostile agent is told to it; all else is the honest world's."""
        honest: list[Action] = []
        for action in actions:
            match action:
                case Reach(address=address) | Ask(address=address) if address == EVIL:
                    pass
                case Reach(address=address) if address not in self.nodes:
                    self.later("lost", lambda a=address: self.do(node, self._away(node, a)))
                case Send(peer=peer, body=body) if peer == EVIL:
                    self._overhear(body)
                case Send(peer=peer, body=body) if peer.startswith("evil"):
                    self.heard.append(body)
                    if isinstance(body, Tables):
                        offered = self.source.outbound.outlets[body.transfer].offered
                        assert offered is not None
                        self.promised[body.transfer] = offered, self.now + LEASE_S
                case _:
                    honest.append(action)
        super().do(node, honest)

    def _away(self, node: Node, address: str) -> list[Action]:
        return node.inbound.unreachable(address, "peer_unreachable", "test", self.now)

    def _overhear(self, body: Any) -> None:
        self.heard.append(body)
        if isinstance(body, Claim):
            self.claims = [*self.claims[-15:], body]
        if isinstance(body, Claim | Grant):
            self.leases = [*self.leases[-63:], *((body.transfer, lease) for lease in body.leases)]

    def _take_up(self, node: Node, order: SendingOrder | ReceivingOrder) -> None:
        match order:
            case Pull():
                receipt = node.receiving.begin_read(order.transfer)
                self.later("read", lambda: self._was_read(node, order, receipt))
            case Digest(transfer=transfer, read=read):
                assert order.request in node.outbound.offers, "blocks that were given back are digested"
                found = read if read.digest % 3 else Sum(read.chunk, read.digest + 1)
                failure = ("gather_failed", "test") if read.digest % 7 == 6 else None
                node.sending.report(Digested(transfer, found, read, failure))
            case Watch(fence=fence):
                self.later("fence", lambda: self._reached(node, fence))
            case _:
                super()._take_up(node, order)

    def _was_read(self, node: Node, pull: Pull, receipt: Receipt) -> None:
        """What a data plane says of a read that has ended now."""
        failure: tuple[str, str] | None = None
        if pull.lease.is_given_up or not pull.lease.counts(self.now):
            failure = ("aborted", "test") if pull.lease.is_given_up else ("lease_over", "test")
        read, digests = pull.end_chunk - pull.first_chunk, dict.fromkeys(pull.compared, 1)
        node.receiving.report(Pulled(pull.transfer, pull.end_chunk, read, pull.size_bytes, digests, failure))
        node.receiving.end_read(receipt)
        self._report(node)

    def _reached(self, node: Node, fence: int) -> None:
        self.fence = max(self.fence, fence)
        node.sending.report(FenceReached())
        self._report(node)

    def _begin(self, source: Node, departure: Departure) -> None:
        if not departure.order.boot.startswith("evil"):
            return super()._begin(source, departure)
        offered = source.outbound.offers[departure.order.request]
        first = departure.order.plan.chunk(departure.chunk).first_mark  # every rank has all tokens here
        assert first >= offered.first_token, "a token before the offer is read"
        self.later("gather", lambda: self._read(source, departure))

    def _read(self, source: Node, departure: Departure) -> None:
        """The hostile agent gets it, or its slot cannot be written."""
        source.sending.gathered(departure)
        self._report(source)
        failure = ("write_failed", "test") if departure.lease.generation % 3 == 0 else None
        self.later("end", lambda: self._ended(source, departure, failure))

    # The script:

    def play(self, step: Step) -> None:
        match step:
            case Do(what=what):
                self.happen(what)
            case Flood(steps=steps, times=times, is_new=is_new):
                for number in range(times):
                    for each in steps:
                        self.play(_renamed(each, number) if is_new else each)
            case Offer():
                self.do(self.source, self.source.outbound.offer(_named(step), self.source.home, self.now))
            case Withdraw():
                self.do(self.source, self.source.outbound.withdraw(_named(step).request, step.reason, self.now))
            case Want():
                self.do(self.sink, self.sink.inbound.want(_named(step), self.sink.home, self.now))
            case Abandon():
                self.do(self.sink, self.sink.inbound.abandon(_named(step).request, self.now))
            case Landed(notice=notice):
                self._write(notice)
            case Claim() | Grant() | Cancel() | Settled() | Renew() | Check():
                self._to_source_of_ours(step)
            case _:
                self._to_sink_of_ours(step)

    def happen(self, what: int) -> None:
        match what:
            case 0 | 1:
                for _ in range(4):
                    self.step()
            case 2 | 3:
                self.now = min(MOST_S, self.now + 2.0)
                self.tick()
            case 4:
                self.do(self.source, self.source.outbound.lost(self.taken.peer.boot))
            case 5:
                self.leave()
                self.greet()
            case 6:
                self.do(self.sink, self.sink.inbound.opened(EVIL, self.given, self.now))
            case 7:
                self.leave()
            case _:
                self.leave()
                self.routed = Routed("pull" if what == 8 else "nixl")
                self.greet()

    def leave(self) -> None:
        """The connections of the hostile agent end."""
        self.do(self.source, self.source.outbound.lost(self.taken.peer.boot))
        self.do(self.sink, self.sink.inbound.unreachable(EVIL, "peer_lost", "test", self.now))

    def tick(self) -> None:
        for node in (self.source, self.sink):
            self.do(node, node.inbound.tick(self.now))
            self.do(node, node.outbound.tick(self.now))

    def _to_source_of_ours(self, body: ToP) -> None:
        boot, machine = self.taken.peer.boot, self.source.outbound
        match body:
            case Claim():
                self.do(self.source, machine.claim(self._claim(body), self.taken, self.source.home, self.now))
            case Grant():
                self.do(self.source, machine.grant(boot, body))
            case Cancel():
                self.do(self.source, machine.cancel(boot, body))
            case Settled():
                self.promised.pop(body.transfer, None)
                self.do(self.source, machine.settled(boot, body.transfer))
            case Renew():
                machine.renew(boot, body)
                self.do(self.source, [])
            case Check():
                self.do(self.source, machine.check(boot, body))

    def _claim(self, claim: Claim) -> Claim:
        """Right in most of what must be right."""
        takes = claim.takes if len(claim.takes) == 3 else ALL_ROWS if len(claim.takes) else ()
        end = max(claim.first_token, claim.end_token)
        changes: dict[str, Any] = {"source_epoch": 1, "sink_epoch": 1, "takes": takes, "end_token": end}
        if self.taken.routed.is_pulled and claim.token[0] % 4:
            changes["leases"] = ()
        try:
            plan = self.taken.planner.plan(takes, claim.first_token, end, self.taken.slot_bytes)
            changes["plan"] = plan.digest
        except Exception:  # then the source says so as well
            pass
        return msgspec.structs.replace(claim, **changes)

    def _to_sink_of_ours(self, body: Ready | Failing | Drained | Refuse | Tables | Checked) -> None:
        machine, boot, now = self.sink.inbound, self.given.peer.boot, self.now
        transfer = self._transfer(body.about if isinstance(body, Refuse) else body.transfer)
        match body:
            case Ready(chunks=chunks):
                self.do(self.sink, machine.ready(boot, transfer, chunks))
            case Failing(code=code, reason=reason):
                self.do(self.sink, machine.failing(boot, transfer, code, reason, now))
            case Drained(code=code, reason=reason):
                self.do(self.sink, machine.drained(boot, transfer, code, reason, now))
            case Refuse(code=code, reasons=reasons):
                self.do(self.sink, machine.drained(boot, transfer, code, "; ".join(reasons), now))
            case Tables():
                self.do(self.sink, machine.tables(boot, msgspec.structs.replace(body, transfer=transfer), now))
            case Checked():
                self.do(self.sink, machine.checked(boot, msgspec.structs.replace(body, transfer=transfer), now))

    def _transfer(self, name: str) -> str:
        """One that the hostile agent was told of, or an honest one's, which it may have guessed."""
        honest = list(self.sink.inbound._wanted_by)
        known = [claim.transfer for claim in self.claims] + honest
        return known[-1 - TEXTS.index(name) % len(known)] if known and name in TEXTS else name

    def _write(self, notice: Notice) -> None:
        """The hostile agent writes one of its slots, or another's, and says so."""
        known = {claim.transfer: claim for claim in self.claims}
        transfer = self._transfer(notice.transfer)
        claim = known.get(transfer)
        changes: dict[str, Any] = {"transfer": transfer, "source_epoch": 1, "sink_epoch": 1}
        changes["sink_boot"] = self.sink.home.agent.boot
        if claim is not None and notice.token[0] % 4:
            plan = self.sink.inbound._wanted_by.get(transfer)
            intake = plan.intakes.get(transfer) if plan is not None else None
            changes["token"], changes["source_boot"] = claim.token, self.given.peer.boot
            if intake is not None:
                chunk = notice.chunk % intake.plan.chunks
                changes |= {"chunk": chunk, "chunk_bytes": intake.plan.chunk(chunk).size_bytes}
            leases = [lease for name, lease in self.leases if name == transfer]
            if leases and notice.slot % 5:
                lease = leases[notice.slot % len(leases)]
                changes |= {"slot": lease.slot, "generation": lease.generation}
        written = msgspec.structs.replace(notice, **changes)
        self._order(self.sink, is_all=True)
        arrival = self.sink.receiving.landed(written)
        if arrival is not None:
            assert claim is not None and written.token == claim.token, "rows of a transfer that it was not told of"
            failure = ("digest_mismatch", "test") if notice.digest % 3 else None
            self.later("scatter", lambda: self._moved(arrival, failure))
        self._report(self.sink)

    def _moved(self, arrival: Arrival, failure: tuple[str, str] | None) -> None:
        self.sink.receiving.scattered(arrival, failure)
        self._report(self.sink)

    # What must be true after every message:

    def check(self) -> None:
        inbound, outbound = self.sink.inbound, self.source.outbound
        counts = inbound.slots.counts()
        assert counts.free + counts.lent + counts.landed + counts.quarantined == SLOTS, counts
        assert counts.free == inbound.slots.free == len(set(inbound.slots._free)), counts
        ours = sum(1 for kind, _ in self.events if kind in ("gather", "write", "end"))
        slots, open_orders = self.source.sending.slots, self.source.sending._open.values()
        assert slots.free + ours == len(slots)
        open_transfers = sum(len(wanted.intakes) for wanted in inbound.wants.values())
        assert len(inbound._wanted_by) <= open_transfers + 2 * SLOTS, "transfers are kept that nothing waits for"
        leases = sum(len(out.early) for out in outbound.outlets.values())
        leases += sum(len(each.leases) for each in open_orders)
        assert leases <= 8192, f"{leases} leases are kept for a peer"
        for offered, ends in self.promised.values():
            assert ends <= self.now or offered in outbound.offers.values(), "blocks that may be read were given back"
        for out in outbound.outlets.values():
            assert len(out.asked) <= out.plan.chunks and len(out.checked) <= out.plan.chunks
        assert sum(len(offered.served) for offered in outbound.offers.values()) <= 1024 * len(outbound.offers)
        for deadlines in (inbound._deadlines, outbound._deadlines):
            assert len(deadlines._heap) <= 2 * len(deadlines._at) + 64, "deadlines that are over are kept"

    def end(self) -> None:
        """The hostile agent is gone, time passes: nothing of it is left, and the honest have what they wanted."""
        self.leave()
        inbound = self.sink.inbound
        for _ in range(2):  # starts of the same agent, each of which knows those before it to be dead
            self.greet()
            opened = inbound.opened(EVIL, self.given, self.now)
            self.do(self.sink, opened)
            for action in opened:
                if isinstance(action, Send) and isinstance(action.body, Cancel):
                    self.do(self.sink, inbound.drained(self.given.peer.boot, action.body.transfer, "", "", self.now))
            self.do(self.sink, self._away(self.sink, EVIL))
            self.run()
        self.check()
        honest = [m for m in self.sink.told if isinstance(m, Done | Failed) and m.request == "honest"]
        assert len(honest) == 1 and isinstance(honest[0], Done), honest
        self.now += 1e6
        for _ in range(3):
            self.tick()
            self.run()
        self.check_rest()


def _renamed(step: Any, number: int) -> Any:
    changes: dict[str, Any] = {name: f"f{number}" for name in ("transfer", "request") if hasattr(step, name)}
    if isinstance(step, Claim):
        changes["sink"] = number
    return msgspec.structs.replace(step, **changes)


def _named(message: Any) -> Any:
    """The careless engine's requests are not the honest one's."""
    return msgspec.structs.replace(message, request=f"e-{message.request}"[:256])


class Machines:
    """No exception, slots conserved, nothing kept without bound, the honest unharmed."""

    name = "machines"

    def __init__(self) -> None:
        self._draws = [drawer(kind) for kind in (Do, Do, Do, ToP, ToP, ToD, ToD, Engine, Engine)]
        self._flood = drawer(Flood)

    def frame(self, random: Random) -> bytes:
        steps = [random.choice(self._draws)(random) for _ in range(random.choice((4, 12, 30)))]
        if random.random() < 0.1:
            steps.insert(random.randrange(len(steps)), self._flood(random))
        if random.random() < 0.5:  # its slots are lent to it from the start
            steps[:0] = [_want(random), Do(6)]
        if random.random() < 0.5:  # it reads, and is read
            steps[:0] = [Do(8), _want(random), Do(6), _tables(random), Do(0), _offer(random), _claim(random)]
        return encode(tuple(_plain(random, step) for step in steps))

    def run(self, frame: bytes) -> int:
        try:
            steps = decode(frame, Script)
        except BadFrame:
            return 1
        siege = Siege()
        siege.offer("honest", tokens=40, blocks=10, last=False)
        siege.want("honest", end=80)
        for step in steps:
            siege.play(step)
            siege.check()
        siege.offer("honest", tokens=80, blocks=10, first=10)
        siege.end()
        return len(steps)

    def close(self) -> None: ...


def _want(random: Random) -> Want:
    return Want(
        request="w",
        room="r1",
        source=EVIL,
        first_token=0,
        end_token=64,
        blocks=(Blocks(0, 0, (0, 1, 2, 3)),),
        deadline_s=random.choice((1.0, 60.0)),
    )


def _offer(random: Random) -> Offer:
    blocks = (Blocks(0, 0, tuple(range(5))),)
    tokens, fence = random.choice((8, 16, 16)), random.choice((0, 0, 1))
    return Offer(
        room="r1", request=OFFERED, tokens=tokens, blocks=blocks, is_last=tokens == 16, hold_s=30.0, fence=fence
    )


def _claim(random: Random) -> Claim:
    return Claim(
        transfer=CLAIMED,
        want="w",
        sink=0,
        sinks=1,
        room="r1",
        source_epoch=1,
        sink_epoch=1,
        first_token=0,
        end_token=16,
        takes=ALL_ROWS,
        plan="",
        token=b"t" * 16,
        leases=(),
        deadline_s=30.0,
    )


def _tables(random: Random) -> Tables:
    end, renewal = random.choice((2, 4, 4)), random.choice((0, 0, 1))
    blocks = (Blocks(0, 0, tuple(range(end))),)
    return Tables(transfer="a", tokens=16 * end, is_last=end == 4, renewal=renewal, blocks=blocks)


def _plain(random: Random, step: Step) -> Step:
    """Tables that fit, most times, so that a request gets as far as its claim, and a claim as far as being read."""
    if isinstance(step, Tables) and random.random() < 0.7:
        return _tables(random)
    if isinstance(step, Check | Checked) and random.random() < 0.7:
        chunk, digest = random.randrange(4), random.choice((1, 1, 1, 2, 6))
        step = msgspec.structs.replace(step, digests=(Sum(chunk, digest),))
    if isinstance(step, Withdraw) and random.random() < 0.5:
        return msgspec.structs.replace(step, request=OFFERED)
    if isinstance(step, Check | Renew | Settled) and random.random() < 0.7:
        return msgspec.structs.replace(step, transfer=CLAIMED)
    if isinstance(step, Offer | Want) and random.random() < 0.7:
        first = random.choice((0, 16))
        blocks = (Blocks(0, first // 16, tuple(range(5))),)
        if isinstance(step, Offer):
            return msgspec.structs.replace(
                step, blocks=blocks, first_token=first // 4 + random.choice((0, 2)), tokens=16
            )
        return msgspec.structs.replace(step, blocks=blocks, first_token=first, end_token=first + 40)
    return step
