"""A hostile agent and a careless engine against the real exchange machines, while an honest transfer goes on.

A frame is a script: valid messages in any order. Names in it that mean nothing are replaced by names that the hostile
agent was told, so that it acts as a peer with a session, not as a stranger. Its sessions decide whether it writes and
is written to, or reads and is read.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from random import Random
from typing import Annotated, Any

import msgspec
from kvbridge_proto.codec import encode
from kvbridge_proto.common import AgentCard, Blocks
from kvbridge_proto.engine import Abandon, Done, Failed, Offer, Want, Withdraw
from kvbridge_proto.peer import (
    BlockTables,
    Cancel,
    Check,
    Checked,
    Claim,
    Drained,
    FabricCard,
    Failing,
    Grant,
    Notice,
    Ready,
    Refuse,
    Renew,
    Settled,
    SlotLease,
    Sum,
    Take,
)
from msgspec import Meta, Struct

from kvbridge.dataplane.receive_orders import LandedChunk, OrderedReceive
from kvbridge.dataplane.send_orders import LeavingChunk
from kvbridge.exchange.actions import Action, Ask, Reach, Send
from kvbridge.exchange.leases import LEASE_S
from kvbridge.exchange.orders import Digest, Digested, FenceReached, Pull, Pulled, ReceivingOrder, SendingOrder, Watch
from kvbridge.exchange.outgoing import OpenOffer
from kvbridge.exchange.route import Routed, Site
from kvbridge.exchange.session import AttachedEngine, Session, accept, answer, hello, welcome
from tests.integration.fuzz.target import Target
from tests.integration.fuzz.typed import TEXTS, drawer
from tests.unit.exchange.world import Node, World, hear_receiver, hear_sender, make_pool, offer_of, want_of

POOLS = {name: make_pool(name, 0, 1, tokens) for name, tokens in (("prefill", 4), ("decode", 16), ("evil", 16))}
EVIL = "tcp://127.0.0.1:1"  # a name that scripts use
ALL_ROWS = (Take(0, 2, 0, 4),)
MOST_S = 40.0  # less than the honest want's deadline
SLOTS = 4
CLAIMED, OFFERED = "t1", "o"  # what it claims first, and of which request
CLAIM = Claim(
    transfer=CLAIMED,
    want="w",
    receiver=0,
    receivers=1,
    rendezvous="r1",
    sender_epoch=1,
    receiver_epoch=1,
    first_token=0,
    end_token=16,
    takes=ALL_ROWS,
    plan="",
    token=b"t" * 16,
    leases=(),
    deadline_s=30.0,
)


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
ToD = Ready | Failing | Drained | Refuse | Landed | BlockTables | Checked
Engine = Offer | Want | Withdraw | Abandon
Step = Do | Flood | ToP | ToD | Engine
Script = tuple[Step, ...]


class Siege(World):
    """P0 and D0 are ours. The hostile agent fetches from the one, and the other is made to fetch from it."""

    def __init__(self) -> None:
        super().__init__([POOLS["prefill"]], [POOLS["decode"]], slots=SLOTS)
        self.sender, self.receiver = self.nodes["P0"], self.nodes["D0"]
        self.promised: dict[str, tuple[OpenOffer, float]] = {}  # what it may read, and until when
        self.fence = 0  # that the stream of our sender's engine has reached
        self.heard: deque[Any] = deque(maxlen=64)  # by the hostile agent
        self.claims: list[Claim] = []
        self.leases: list[tuple[str, SlotLease]] = []
        self.incarnations = 0
        self.routed = Routed("nixl")  # its sessions, from the next on
        self.taken: Session
        self.given: Session
        self.greet()

    def greet(self) -> None:
        """A new start of the hostile agent."""
        self.incarnations += 1
        agent = AgentCard(name="[/x]", incarnation=f"evil-{self.incarnations}", address=EVIL, version="1")
        card = FabricCard(kind="world", name="incarnation", descriptor=b"", base=0, slot_bytes=1024, slots=SLOTS)
        engine = AttachedEngine(agent, 1, POOLS["evil"], Site(card), ("sum",))
        fetching, fetched = answer(hello(engine), self.sender.engine), answer(hello(self.receiver.engine), engine)
        assert isinstance(fetching, Session) and isinstance(fetched, Session)
        self.taken = replace(fetching, routed=self.routed)
        given = accept(welcome(fetched, engine), self.receiver.engine)
        assert isinstance(given, Session)
        self.given = replace(given, routed=self.routed)

    def do(self, node: Node, actions: list[Action]) -> None:
        self._perform(node, actions)
        if node.sending.is_owing:
            self._perform(node, node.sending.answers(self.now, self.now, lambda fence: fence <= self.fence))

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
                    if isinstance(body, BlockTables):
                        offered = self.sender.sending.outgoing_transfers[body.transfer].offered
                        assert offered is not None
                        self.promised[body.transfer] = offered, self.now + LEASE_S
                case _:
                    honest.append(action)
        super().do(node, honest)

    def _away(self, node: Node, address: str) -> list[Action]:
        return node.receiving.unreachable(address, "peer_unreachable", "test", self.now)

    def _overhear(self, body: Any) -> None:
        self.heard.append(body)
        if isinstance(body, Claim):
            self.claims = [*self.claims[-15:], body]
        if isinstance(body, Claim | Grant):
            self.leases = [*self.leases[-63:], *((body.transfer, lease) for lease in body.leases)]

    def _take_up(self, node: Node, order: SendingOrder | ReceivingOrder) -> None:
        match order:
            case Pull():
                receipt = node.receive_orders.begin_read(order.transfer)
                self.later("read", lambda: self._was_read(node, order, receipt))
            case Digest(transfer=transfer, read=read):
                assert order.request in node.sending.offers, "blocks that were given back are digested"
                found = read if read.digest % 3 else Sum(read.chunk, read.digest + 1)
                failure = ("gather_failed", "test") if read.digest % 7 == 6 else None
                node.send_orders.report(Digested(transfer, found, read, failure))
            case Watch(fence=fence):
                self.later("fence", lambda: self._reached(node, fence))
            case _:
                super()._take_up(node, order)

    def _was_read(self, node: Node, pull: Pull, receipt: OrderedReceive) -> None:
        """What a data plane says of a read that has ended now."""
        failure: tuple[str, str] | None = None
        if pull.lease.is_given_up or not pull.lease.counts(self.now):
            failure = ("aborted", "test") if pull.lease.is_given_up else ("lease_over", "test")
        read, digests = pull.end_chunk - pull.first_chunk, dict.fromkeys(pull.compared, 1)
        node.receive_orders.report(Pulled(pull.transfer, pull.end_chunk, read, pull.size_bytes, digests, failure))
        node.receive_orders.end_read(receipt)
        self._report(node)

    def _reached(self, node: Node, fence: int) -> None:
        self.fence = max(self.fence, fence)
        node.send_orders.report(FenceReached())
        self._report(node)

    def _begin(self, sender: Node, departure: LeavingChunk) -> None:
        if not departure.order.incarnation.startswith("evil"):
            return super()._begin(sender, departure)
        offered = sender.sending.offers[departure.order.request]
        first = departure.order.plan.chunk(departure.chunk).first_local  # every rank has all tokens here
        assert first >= offered.first_token, "a token before the offer is read"
        self.later("gather", lambda: self._read(sender, departure))

    def _read(self, sender: Node, departure: LeavingChunk) -> None:
        """The hostile agent gets it, or its slot cannot be written."""
        sender.send_orders.gathered(departure)
        self._report(sender)
        failure = ("write_failed", "test") if departure.lease.generation % 3 == 0 else None
        self.later("end", lambda: self._ended(sender, departure, failure))

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
                self.do(self.sender, self.sender.sending.offer(_named(step), self.sender.engine, self.now))
            case Withdraw():
                self.do(self.sender, self.sender.sending.withdraw(_named(step).request, step.reason, self.now))
            case Want():
                self.do(self.receiver, self.receiver.receiving.want(_named(step), self.receiver.engine, self.now))
            case Abandon():
                self.do(self.receiver, self.receiver.receiving.abandon(_named(step).request, self.now))
            case Landed(notice=notice):
                self._write(notice)
            case Claim() | Grant() | Cancel() | Settled() | Renew() | Check():
                self._to_sender_of_ours(step)
            case _:
                self._to_receiver_of_ours(step)

    def happen(self, what: int) -> None:
        match what:
            case 0 | 1:
                for _ in range(4):
                    self.step()
            case 2 | 3:
                self.now = min(MOST_S, self.now + 2.0)
                self.tick()
            case 4:
                self.do(self.sender, self.sender.sending.lost(self.taken.peer.incarnation))
            case 5:
                self.leave()
                self.greet()
            case 6:
                self.do(self.receiver, self.receiver.receiving.opened(EVIL, self.given, self.now))
            case 7:
                self.leave()
            case _:
                self.leave()
                self.routed = Routed("pull" if what == 8 else "nixl")
                self.greet()

    def leave(self) -> None:
        """The connections of the hostile agent end."""
        self.do(self.sender, self.sender.sending.lost(self.taken.peer.incarnation))
        self.do(self.receiver, self.receiver.receiving.unreachable(EVIL, "peer_lost", "test", self.now))

    def tick(self) -> None:
        for node in (self.sender, self.receiver):
            self.do(node, node.receiving.tick(self.now))
            self.do(node, node.sending.tick(self.now))

    def _to_sender_of_ours(self, body: ToP) -> None:
        if isinstance(body, Claim):
            body = self._claim(body)
        elif isinstance(body, Settled):
            self.promised.pop(body.transfer, None)
        incarnation, ours = self.taken.peer.incarnation, self.sender
        self.do(ours, hear_receiver(ours.sending, incarnation, body, self.taken, ours.engine, self.now))

    def _claim(self, claim: Claim) -> Claim:
        """Right in most of what must be right."""
        takes = claim.takes if len(claim.takes) == 3 else ALL_ROWS if len(claim.takes) else ()
        end = max(claim.first_token, claim.end_token)
        changes: dict[str, Any] = {"sender_epoch": 1, "receiver_epoch": 1, "takes": takes, "end_token": end}
        if self.taken.routed.is_pulled and claim.token[0] % 4:
            changes["leases"] = ()
        try:
            plan = self.taken.planner.plan(takes, claim.first_token, end, self.taken.slot_bytes)
            changes["plan"] = plan.digest
        except Exception:  # then the sender says so as well
            pass
        return msgspec.structs.replace(claim, **changes)

    def _to_receiver_of_ours(self, body: Ready | Failing | Drained | Refuse | BlockTables | Checked) -> None:
        name = "about" if isinstance(body, Refuse) else "transfer"
        body = msgspec.structs.replace(body, **{name: self._transfer(getattr(body, name))})
        self.do(self.receiver, hear_sender(self.receiver.receiving, self.given.peer.incarnation, body, self.now))

    def _transfer(self, name: str) -> str:
        """One that the hostile agent was told of, or an honest one's, which it may have guessed."""
        honest = list(self.receiver.receiving._wanted_by)
        known = [claim.transfer for claim in self.claims] + honest
        return known[-1 - TEXTS.index(name) % len(known)] if known and name in TEXTS else name

    def _write(self, notice: Notice) -> None:
        """The hostile agent writes one of its slots, or another's, and says so."""
        known = {claim.transfer: claim for claim in self.claims}
        transfer = self._transfer(notice.transfer)
        claim = known.get(transfer)
        changes: dict[str, Any] = {"transfer": transfer, "sender_epoch": 1, "receiver_epoch": 1}
        changes["receiver_incarnation"] = self.receiver.engine.agent.incarnation
        if claim is not None and notice.token[0] % 4:
            plan = self.receiver.receiving._wanted_by.get(transfer)
            incoming = plan.incoming_transfers.get(transfer) if plan is not None else None
            changes["token"], changes["sender_incarnation"] = claim.token, self.given.peer.incarnation
            if incoming is not None:
                chunk = notice.chunk % incoming.plan.chunks
                changes |= {"chunk": chunk, "chunk_bytes": incoming.plan.chunk(chunk).size_bytes}
            leases = [lease for name, lease in self.leases if name == transfer]
            if leases and notice.slot % 5:
                lease = leases[notice.slot % len(leases)]
                changes |= {"slot": lease.slot, "generation": lease.generation}
        written = msgspec.structs.replace(notice, **changes)
        self._order(self.receiver, is_all=True)
        arrival = self.receiver.receive_orders.landed(written)
        if arrival is not None:
            assert claim is not None and written.token == claim.token, "rows of a transfer that it was not told of"
            failure = ("digest_mismatch", "test") if notice.digest % 3 else None
            self.later("scatter", lambda: self._moved(arrival, failure))
        self._report(self.receiver)

    def _moved(self, arrival: LandedChunk, failure: tuple[str, str] | None) -> None:
        self.receiver.receive_orders.scattered(arrival, failure)
        self._report(self.receiver)

    # What must be true after every message:

    def check(self) -> None:
        receiving, sending = self.receiver.receiving, self.sender.sending
        counts = receiving.slots.counts()
        assert counts.free + counts.lent + counts.landed + counts.quarantined == SLOTS, counts
        assert counts.free == receiving.slots.free == len(set(receiving.slots._free)), counts
        ours = sum(1 for kind, _ in self.events if kind in ("gather", "write", "end"))
        slots, open_orders = self.sender.send_orders.slots, self.sender.send_orders._open.values()
        assert slots.free + ours == len(slots)
        open_transfers = sum(len(wanted.incoming_transfers) for wanted in receiving.wants.values())
        assert len(receiving._wanted_by) <= open_transfers + 2 * SLOTS, "transfers are kept that nothing waits for"
        leases = sum(len(out.early) for out in sending.outgoing_transfers.values())
        leases += sum(len(each.leases) for each in open_orders)
        assert leases <= 8192, f"{leases} leases are kept for a peer"
        for offered, ends in self.promised.values():
            assert ends <= self.now or offered in sending.offers.values(), "blocks that may be read were given back"
        for out in sending.outgoing_transfers.values():
            assert len(out.asked) <= out.plan.chunks and len(out.checked) <= out.plan.chunks
        assert sum(len(offered.served) for offered in sending.offers.values()) <= 1024 * len(sending.offers)
        for deadlines in (receiving._deadlines, sending._deadlines):
            assert len(deadlines._heap) <= 2 * len(deadlines._at) + 64, "deadlines that are over are kept"

    def end(self) -> None:
        """The hostile agent is gone, time passes: nothing of it is left, and the honest have what they wanted."""
        self.leave()
        receiving = self.receiver.receiving
        for _ in range(2):  # starts of the same agent, each of which knows those before it to be dead
            self.greet()
            opened = receiving.opened(EVIL, self.given, self.now)
            self.do(self.receiver, opened)
            for action in opened:
                if isinstance(action, Send) and isinstance(action.body, Cancel):
                    self.do(
                        self.receiver,
                        receiving.drained(self.given.peer.incarnation, action.body.transfer, "", "", self.now),
                    )
            self.do(self.receiver, self._away(self.receiver, EVIL))
            self.run()
        self.check()
        honest = [m for m in self.receiver.told if isinstance(m, Done | Failed) and m.request == "honest"]
        assert len(honest) == 1 and isinstance(honest[0], Done), honest
        self.now += 1e6
        for _ in range(3):
            self.tick()
            self.run()
        self.check_rest()


def _renamed(step: Any, number: int) -> Any:
    changes: dict[str, Any] = {name: f"f{number}" for name in ("transfer", "request") if hasattr(step, name)}
    if isinstance(step, Claim):
        changes["receiver"] = number
    return msgspec.structs.replace(step, **changes)


def _named(message: Any) -> Any:
    """The careless engine's requests are not the honest one's."""
    return msgspec.structs.replace(message, request=f"e-{message.request}"[:256])


class Machines(Target):
    """No exception, slots conserved, nothing kept without bound, the honest unharmed."""

    name, kind = "machines", Script

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
            steps[:0] = [Do(8), _want(random), Do(6), _tables(random), Do(0), _offer(random), CLAIM]
        return encode(tuple(_plain(random, step) for step in steps))

    def judge(self, steps: Script) -> int:
        siege = Siege()
        siege.offer("honest", tokens=40, blocks=10, last=False)
        siege.want("honest", end=80)
        for step in steps:
            siege.play(step)
            siege.check()
        siege.offer("honest", tokens=80, blocks=10, first=10)
        siege.end()
        return len(steps)


def _want(random: Random) -> Want:
    return want_of("w", 64, rendezvous="r1", sender=EVIL, deadline=random.choice((1.0, 60.0)))


def _offer(random: Random) -> Offer:
    tokens, fence = random.choice((8, 16, 16)), random.choice((0, 0, 1))
    offer = offer_of(OFFERED, tokens, 5, last=tokens == 16, rendezvous="r1")
    return msgspec.structs.replace(offer, hold_s=30.0, fence=fence)


def _tables(random: Random) -> BlockTables:
    end, renewal = random.choice((2, 4, 4)), random.choice((0, 0, 1))
    blocks = (Blocks(0, 0, tuple(range(end))),)
    return BlockTables(transfer="a", tokens=16 * end, is_last=end == 4, renewal=renewal, blocks=blocks)


def _plain(random: Random, step: Step) -> Step:
    """Tables that fit, most times, so that a request gets as far as its claim, and a claim as far as being read."""
    if isinstance(step, BlockTables) and random.random() < 0.7:
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
