"""The real parts of an agent behind its sockets: hostile agents on three links, a careless engine, honest peers beside.

The control, the data plane and the engine are played here. A frame is a script: valid messages in any order. Names in
it that mean nothing are replaced by names that the hostile agent was told, so that it acts as a peer with a session,
not as a stranger. Its sessions decide whether it writes and is written to, or reads and is read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Annotated, Any

from kvbridge_proto.common import OURS, AgentCard, Blocks, Rank
from kvbridge_proto.door import Ticket
from kvbridge_proto.engine import Abandon, Done, Failed, Offer, ToEngine, Want, Withdraw
from kvbridge_proto.framing import decode, encode
from kvbridge_proto.peer import (
    BlockTables,
    Body,
    Cancel,
    Check,
    Checked,
    Claim,
    Drained,
    Envelope,
    FabricCard,
    Failing,
    Grant,
    Hello,
    Notice,
    Probe,
    Ready,
    Refuse,
    Renew,
    Settled,
    SlotLease,
    Sum,
    Take,
    Welcome,
)
from kvbridge_proto.status import PeerStatus, TransferStatus
from msgspec import Meta, Struct
from msgspec.structs import replace as changed

from kvbridge.agent.doors import Doors
from kvbridge.agent.peers import Peers
from kvbridge.agent.status import transfers
from kvbridge.dataplane.orders import LeavingChunk, OrderedReceive
from kvbridge.errors import PeerError
from kvbridge.exchange.actions import Send
from kvbridge.exchange.orders import Digest, Digested, FenceReached, Pull, Pulled, ReceivingOrder, SendingOrder, Watch
from kvbridge.exchange.route import Site
from kvbridge.exchange.session import AttachedEngine
from kvbridge.exchange.transfer import OpenOffer
from kvbridge.loopback.messages import number_of
from kvbridge.routes.pull.halves import LEASE_S, OutgoingByPull
from kvbridge.routes.slots.halves import OutgoingBySlots
from testing.halves import by_slots
from tests.integration.agent.player import Whole, Wire
from tests.integration.fuzz.target import Target
from tests.integration.fuzz.typed import TEXTS, drawer, varied
from tests.unit.exchange.network import offer_of, want_of
from tests.unit.exchange.world import make_pool
from tests.unit.proto.samples import BODIES, NOTICE

EVIL, GOOD = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"
OUR_POOL, GOOD_POOL = make_pool("ours", 0, 1, 4), make_pool("evil", 0, 1, 16)
CARD = FabricCard(kind="world", name="incarnation", descriptor=b"", base=0, slot_bytes=1024, slots=8)
ALL_ROWS = (Take(0, 2, 0, 4),)
DONE, BLOCKS = 80, (Blocks(0, 0, tuple(range(20))),)  # tokens of the honest transfers
SLOTS, SEND_SLOTS = 8, 2
MOST_S = 40.0  # for a script; the honest wait longer
CARELESS = 16  # numbers of the careless engine's offers and wants
CLAIMED, OFFERED = "t1", "o"  # what it claims first, and of which request
CLAIM = changed(
    next(body for body in BODIES if isinstance(body, Claim)),
    **{"transfer": CLAIMED, "want": "w", "rendezvous": "r1", "sender_epoch": 1, "receiver_epoch": 1},
    **{"first_token": 0, "end_token": 16, "takes": ALL_ROWS, "plan": "", "leases": (), "is_offered": False},
)


class Say(Struct, frozen=True, tag="say"):
    """On link 0 an agent of its own says it, on link 1 as if it were the honest one, on link 2 where it was dialled."""

    link: Annotated[int, Meta(ge=0, lt=3)]
    body: Body


class Write(Struct, frozen=True, tag="write"):
    """The hostile agent writes one of its slots, or another's, and says so."""

    notice: Notice


class Do(Struct, frozen=True, tag="do"):
    """Something happens of itself: see `Siege.happen`."""

    what: Annotated[int, Meta(ge=0, lt=10)]


ToSender = Claim | Grant | Cancel | Settled | Renew | Check
ToReceiver = Ready | Failing | Drained | Refuse | BlockTables | Checked
Engine = Offer | Want | Withdraw | Abandon


class Flood(Struct, frozen=True, tag="flood"):
    """The same again and again, under other names and numbers where `is_new`."""

    steps: Annotated[tuple[Say | Engine | Do, ...], Meta(max_length=4)]
    times: Annotated[int, Meta(ge=1, le=300)]
    is_new: bool


Step = Say | Write | Do | Flood | Engine
Script = tuple[Step, ...]


class Said(Wire):
    """A link; what is said on it must be what a peer would take."""

    def send(self, body: Any) -> bool:
        envelope = Envelope(version=self.version, sender="us", receiver=self.peer_incarnation, number=0, body=body)
        assert decode(encode(envelope), Envelope).body == body
        super().send(body)
        return not self.is_lost


class Watched(Peers):
    """Our own faults are what is looked for."""

    def _fault(self, link: Any, what: str) -> None:
        raise  # noqa: PLE0704 - called where the exception is handled


class OpenDoors(Doors):
    """Of every agent."""

    async def enter(self, *args: Any) -> None: ...


class Besieged(Whole):
    """Our agent. It plays its own control, and its data plane, which does one thing at a time and in any order."""

    doors = OpenDoors()

    def __init__(self) -> None:
        site = Site(CARD, routes=("pull", "nixl"), machine="m", shares_memory=True)
        engine = AttachedEngine(self.agent("us"), 1, OUR_POOL, site, ("sum",), (self.rank("us"),))
        super().__init__(engine, SLOTS, Watched)
        self.memory = self.liveness = self
        self.fence = 0  # that the stream of our engine has reached
        self.random = Random(0)
        self.events: list[tuple[str, Callable[[], None]]] = []
        self.evil: list[Any] = []  # what the hostile agent was told where it was dialled
        self.tasks: list[asyncio.Task[None]] = []

    @staticmethod
    def agent(incarnation: str) -> AgentCard:
        return AgentCard(name=incarnation, incarnation=incarnation, address="tcp://127.0.0.1:3", version="1")

    @staticmethod
    def rank(address: str) -> Rank:
        return Rank(tp_rank=0, pp_rank=0, address=address)

    def tell(self, message: Any) -> None:
        assert decode(encode(message), ToEngine) == message
        super().tell(message)

    # As its engine's memory:

    @property
    def heard_at(self) -> float:
        return self.now

    def has_reached(self, count: int) -> bool:
        return count <= self.fence

    # As control:

    def dial(self, address: str) -> Said:
        if not address.startswith("tcp://"):
            raise PeerError("bad_address", address)
        if address not in self.wires:
            self.wires[address] = Said(address, "", "evil" if address == EVIL else "good", is_dialled=True)
            if address == EVIL:
                self.wires[address].sent = self.evil
        return self.wires[address]

    def create_task(self, coroutine: Any) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(coroutine))

    async def settle(self) -> None:
        """Let greetings end, and raise what they raise."""
        while self.tasks:
            tasks, self.tasks = self.tasks, []
            await asyncio.gather(*tasks)
        self.pump()

    # As data plane:

    def close_peer(self, memory_id: Any) -> None: ...

    def give(self, order: SendingOrder | ReceivingOrder, attached: Any) -> None:
        match order:
            case Pull():
                self.later("read", partial(self._is_read, order, self.receive_orders.begin_read(order.transfer)))
            case Digest(transfer=transfer, read=read):
                assert order.number in self.sending.offers, "blocks that were given back are digested"
                found = read if read.digest % 3 else Sum(read.chunk, read.digest + 1)
                failure = ("gather_failed", "test") if read.digest % 7 == 6 else None
                self.send_orders.report(Digested(transfer, found, read, failure))
            case Watch(fence=fence):
                self.later("fence", partial(self._reached, fence))
            case _:
                super().give(order, attached)

    def later(self, kind: str, event: Callable[[], None]) -> None:
        self.events.append((kind, event))

    def step(self) -> None:
        """One of what was begun ends."""
        if self.events:
            self.events.pop(self.random.randrange(len(self.events)))[1]()
            self.pump()

    def run(self) -> None:
        while self.events:
            self.step()

    def pump(self) -> None:
        """What can be begun is, and the exchange hears of all."""
        self.report()
        while (leaving := self.send_orders.begin()) is not None:
            offered = self.sending.offers.get(leaving.order.number)
            assert offered is not None, "blocks that were given back are read"
            first = leaving.order.plan.chunk(leaving.chunk).first_local  # every rank has all tokens here
            assert first >= offered.first_token, "a token before the offer is read"
            self.later("gather", partial(self._gathered, leaving))
            self.report()

    def _gathered(self, leaving: LeavingChunk) -> None:
        """The hostile agent gets it, or its slot cannot be written."""
        self.send_orders.gathered(leaving)
        failure = ("write_failed", "test") if leaving.lease.generation % 3 == 0 else None
        self.later("end", lambda: self.send_orders.written(leaving, 0.0, failure))

    def _is_read(self, pull: Pull, ordered: OrderedReceive) -> None:
        """What a data plane says of the first chunks of a read, if their lease lasts. The last one is read later."""
        told = sorted(pull.compared)[:-1] if pull.lease.counts(self.now) else []
        for chunk in told:
            self.receive_orders.summed(pull.transfer, chunk, 1)
        self.later("read", partial(self._was_read, pull, ordered, pull.compared - {*told}))

    def _was_read(self, pull: Pull, ordered: OrderedReceive, compared: frozenset[int]) -> None:
        """What a data plane says of a read that has ended now."""
        failure: tuple[str, str] | None = None
        if pull.lease.is_given_up or not pull.lease.counts(self.now):
            failure = ("aborted", "test") if pull.lease.is_given_up else ("lease_over", "test")
        first, end, digests = pull.first_chunk, pull.end_chunk, dict.fromkeys(compared, 1)
        size_bytes = pull.plan.bytes_of(first, end)
        self.receive_orders.report(Pulled(pull.transfer, end, end - first, size_bytes, digests, failure))
        self.receive_orders.end_move(ordered)

    def _reached(self, fence: int) -> None:
        self.fence = max(self.fence, fence)
        self.send_orders.report(FenceReached())

    def land(self, notice: Notice) -> bool:
        landed = self.receive_orders.landed(notice)
        if landed is not None:
            failure = ("digest_mismatch", "test") if notice.digest % 3 else None
            self.later("scatter", lambda: self.receive_orders.scattered(landed, failure))
        self.pump()
        return landed is not None

    # What must be true after every message:

    def check(self) -> None:
        receiving, sending = self.receiving, self.sending
        slots = by_slots(receiving).slots
        counts = slots.counts()
        assert counts.free + counts.lent + counts.landed + counts.quarantined == SLOTS, counts
        assert counts.free == slots.free == len(set(slots._free)), counts
        leaving = sum(kind in ("gather", "end") for kind, _ in self.events)
        assert self.send_orders.slots.free + leaving == len(self.send_orders.slots) == SEND_SLOTS
        open_transfers = sum(len(wanted.incoming_transfers) for wanted in receiving.wants.values())
        kept, of_all = len(receiving.incoming_transfers), sending.outgoing_transfers.values()
        assert kept <= open_transfers + 2 * SLOTS, "transfers are kept that nothing waits for"
        leases = sum(len(out.early) for out in of_all if isinstance(out, OutgoingBySlots))
        leases += sum(len(each.leases) for each in self.send_orders.open.values())
        assert leases <= 8192, f"{leases} leases are kept for a peer"
        for out in (each for each in of_all if isinstance(each, OutgoingByPull)):
            assert len(out.asked) <= out.plan.chunks and len(out.checked) <= out.plan.chunks
        assert sum(len(offered.served) for offered in sending.offers.values()) <= 1024 * len(sending.offers)
        for deadlines in (receiving._deadlines, sending._deadlines):
            assert len(deadlines._heap) <= 2 * len(deadlines._at) + 64, "deadlines that are over are kept"
        assert len(self.peers.incoming.sessions) <= 3 and len(self.metrics._codes) <= 200

    def check_shown(self) -> None:
        """What `kvbridge status` gets can be read."""
        statuses = tuple(self.peers.statuses())
        assert decode(encode(statuses), tuple[PeerStatus, ...]) == statuses
        under_way = transfers(self.receiving, self.sending, self.now)
        assert decode(encode(under_way), tuple[TransferStatus, ...]) == under_way

    def check_rest(self) -> None:
        receiving, sending = self.receiving, self.sending
        assert by_slots(receiving).slots.free == SLOTS and self.send_orders.slots.free == SEND_SLOTS
        assert not receiving.wants and not by_slots(receiving).awaiting and not receiving.incoming_transfers
        assert not sending.offers and not sending.outgoing_transfers and not sending._waiting
        assert not sending._of_receiver and not self.send_orders.open and not self.receive_orders._open


class Siege:
    """A script is played against one agent; then its honest peers go on as if nothing had been."""

    def __init__(self) -> None:
        self.ours = Besieged()
        self.honest = Said("tcp://127.0.0.1:9", "", "good")
        self.links = [Said("tcp://127.0.0.1:8", "", "evil"), Said("tcp://127.0.0.1:7", "", "good")]
        self.route = "nixl"  # of the hostile agent's sessions, from the next on
        self.promised: dict[str, tuple[OpenOffer, float]] = {}  # what it may read, and until when
        self.seen = 0  # of what it was told

    async def run(self, script: Script) -> int:
        await self.begin()
        self.check()
        for step in script:
            await self.play(step)
            self.check()
        await self.end()
        return max(1, len(script))

    async def hear(self, link: Said, sender: str, body: Any) -> None:
        self.ours.peers._take(self.ours, link, sender, body)
        await self.ours.settle()

    def hello(self, incarnation: str, lane: int = 1, route: str = "nixl") -> Hello:
        return Hello(
            versions=OURS,
            agent=Besieged.agent(incarnation),
            epoch=1,
            pool=GOOD_POOL,
            fabric=CARD,
            digests=("sum",),
            probe_lane=lane,
            routes=(route,),
            machine="m",
        )

    def welcome(self, asked: Hello, incarnation: str, route: str = "nixl") -> Welcome:
        door = Ticket(machine="m", path="x.door", session="s", epoch=1, token=b"t" * 32)
        return Welcome(
            version=1,
            agent=Besieged.agent(incarnation),
            epoch=1,
            pool=GOOD_POOL,
            digest="sum",
            slot_bytes=1024,
            ranks=(Besieged.rank(GOOD),),
            route=route,
            probe=Probe(lane=asked.probe_lane, seed=1, size_bytes=64, bytes_per_s=1e9) if route == "nixl" else None,
            door=None if route == "nixl" else door,
        )

    async def begin(self) -> None:
        ours = self.ours
        want = partial(want_of, end=DONE, blocks=BLOCKS, deadline=1000)
        ours.receiver.want(want("honest", rendezvous="h", sender=GOOD), ours.engine)
        good = ours.wires[GOOD]
        await self.hear(good, "good", self.welcome(good.last(Hello), "good"))
        offer = offer_of("offered", DONE, BLOCKS, rendezvous="o")
        ours.sender.offer(changed(offer, hold_s=10_000), ours.engine)
        await self.hear(self.honest, "good", self.hello("good"))
        assert isinstance(self.honest.last(Welcome), Welcome) and isinstance(good.last(Claim), Claim)
        ours.receiver.want(want("evil", rendezvous="h", sender=EVIL), ours.engine)

    def check(self) -> None:
        self.ours.check()
        self.ours.check_shown()
        told, sending = self.links[0].sent, self.ours.sending
        for body in told[self.seen :]:
            out = sending.outgoing_transfers.get(body.transfer) if isinstance(body, BlockTables) else None
            if out is not None and out.offered is not None:
                self.promised[body.transfer] = out.offered, self.ours.now + LEASE_S
        self.seen = len(told)
        for offered, ends in self.promised.values():
            assert ends <= self.ours.now or offered in sending.offers.values(), "blocks that may be read are given back"

    async def end(self) -> None:
        """The hostile agent is gone, and what it may have written is over. The honest sender writes its chunks, the
        honest receiver has its rows, and once all time has passed nothing is left."""
        ours = self.ours
        self.leave()
        ours.run()
        for action in ours.receiving.refused(EVIL, "evil"):
            if isinstance(action, Send) and isinstance(action.body, Cancel):
                ours.receiver.from_sender("evil", "", Drained(transfer=action.body.transfer))
        ours.run()
        good = ours.wires[GOOD]
        claim, chunk = good.last(Claim), 0
        incoming = ours.receiving.wants[number_of("honest")].incoming_transfers[claim.transfer]
        await self.hear(good, "good", Ready(transfer=claim.transfer, chunks=incoming.plan.chunks))
        while chunk < incoming.plan.chunks:
            leases = [lease for body in good.sent if hasattr(body, "leases") for lease in body.leases][chunk:]
            assert leases, "no slot is lent to the honest sender"
            for lease in leases:
                assert ours.land(self.notice(claim, incoming.plan.chunk(chunk).size_bytes, chunk, lease))
                chunk += 1
            ours.run()
        answers = [each for each in ours.told if isinstance(each, Done | Failed) and each.request == "honest"]
        assert len(answers) == 1 and isinstance(answers[0], Done), answers
        plan = ours.peers.incoming.sessions["good"].session.planner.plan(ALL_ROWS, 0, DONE, 1024)
        await self.hear(self.honest, "good", self.claim(plan.digest))
        assert "honest" in ours.sending.outgoing_transfers, self.honest.last(Refuse)
        ours.now += 1e6
        for _ in range(3):
            self.tick()
            ours.run()
        ours.check_rest()

    def tick(self) -> None:
        self.ours.receiver.tick()
        self.ours.sender.tick()
        self.ours.pump()

    @staticmethod
    def claim(digest: str) -> Claim:
        names = {"transfer": "honest", "want": "good/w", "rendezvous": "honest rendezvous"}
        return changed(CLAIM, **names, end_token=DONE, plan=digest, deadline_s=100.0)

    @staticmethod
    def notice(claim: Claim, size_bytes: int, chunk: int, lease: SlotLease) -> Notice:
        who = {"sender_incarnation": "good", "receiver_incarnation": "us", "sender_epoch": 1, "receiver_epoch": 1}
        where = {"slot": lease.slot, "generation": lease.generation, "chunk": chunk, "chunk_bytes": size_bytes}
        return changed(NOTICE, transfer=claim.transfer, token=claim.token, digest=0, **who, **where)

    # The script:

    async def play(self, step: Step) -> None:
        ours = self.ours
        match step:
            case Flood(steps=steps, times=times, is_new=is_new):
                for number in range(times):
                    for each in steps:
                        await self.play(_renamed(each, number) if is_new else each)
            case Say(link=2, body=body):
                wire = ours.dial(EVIL)
                await self.hear(wire, "evil", self._fitting(wire, body, "evil"))
            case Say(link=link, body=body):
                # Who the honest one is, is for keys to prove: without them a Hello in its name is its own.
                sender = "evil" if link == 0 or isinstance(body, Hello) else "good"
                if link == 0 and isinstance(body, Settled | Cancel):
                    self.promised.pop(body.transfer, None)
                await self.hear(self.links[link], sender, self._fitting(self.links[link], body, sender))
            case Write(notice=notice):
                self._write(notice)
            case Offer():
                offer = _named(step)
                is_more = offer.is_more or offer.number in ours.sending.offers
                ours.sender.offer(changed(offer, is_more=is_more), ours.engine)
            case Withdraw():
                ours.sender.withdraw(_named(step))
            case Want():
                ours.receiver.want(_named(step), ours.engine)
            case Abandon():
                ours.receiver.abandon(_named(step))
            case Do(what=what):
                await self.happen(what)
        await ours.settle()

    async def happen(self, what: int) -> None:
        ours = self.ours
        match what:
            case 0 | 1:
                for _ in range(4):
                    ours.step()
            case 2 | 3:
                ours.now = min(MOST_S, ours.now + (2.0 if what == 2 else 0.6 * LEASE_S))
                self.tick()
            case 4:
                self.leave()
            case 5:
                await self.greet()
            case 6:
                request = f"evil {len(ours.receiving.wants)}-{len(ours.told)}"
                ours.receiver.want(want_of(request, DONE, BLOCKS, rendezvous="e", sender=EVIL, deadline=5), ours.engine)
            case 7:
                ours.sender.withdraw(Withdraw(number=number_of("offered"), reason="test"))
            case _:
                self.leave()
                self.route = "pull" if what == 8 else "nixl"
                await self.greet()

    def leave(self) -> None:
        """The hostile links end."""
        for wire in (*self.links, self.ours.wires.pop(EVIL, self.links[0])):  # it may be dialled again at once
            self.ours.peers._lose(wire, "test")
        self.ours.pump()

    async def greet(self) -> None:
        """The hostile agent fetches from us, and we from it."""
        await self.hear(self.links[0], "evil", self.hello("evil", route=self.route))
        wire = self.ours.dial(EVIL)
        if (asked := wire.last(Hello)) is not None:
            await self.hear(wire, "evil", self.welcome(asked, "evil", self.route))

    def _fitting(self, wire: Said, body: Any, incarnation: str) -> Any:
        """Right where it must be right to get further, most times."""
        asked = wire.last(Hello)
        if isinstance(body, Hello) and body.probe_lane % 2:
            pool = varied(Random(body.epoch), GOOD_POOL, body.epoch % 3)
            return changed(self.hello(incarnation, body.probe_lane), pool=pool, routes=body.routes)
        if isinstance(body, Welcome) and asked is not None and body.epoch % 2:
            changes = {"ranks": body.ranks, "why": body.why, "slot_bytes": min(1024, body.slot_bytes)}
            return changed(self.welcome(asked, incarnation, self.route), **changes)
        if isinstance(body, Claim):
            return self._claim(body, incarnation)
        name = "about" if isinstance(body, Refuse) else "transfer"
        if wire.is_dialled and (said := getattr(body, name, "")):
            return changed(body, **{name: self._transfer(said)})
        return body

    def _claim(self, claim: Claim, incarnation: str) -> Claim:
        """Right in most of what must be right."""
        accepted = self.ours.peers.incoming.sessions.get(incarnation)
        if accepted is None:
            return claim
        session = accepted.session
        takes = claim.takes if len(claim.takes) == 3 else ALL_ROWS if len(claim.takes) else ()
        end = max(claim.first_token, claim.end_token)
        changes: dict[str, Any] = {"sender_epoch": 1, "receiver_epoch": 1, "takes": takes, "end_token": end}
        if session.routed.is_read and claim.token[0] % 4:
            changes["leases"] = ()
        with contextlib.suppress(Exception):  # then the sender says so as well
            changes["plan"] = session.planner.plan(takes, claim.first_token, end, session.slot_bytes).digest
        return changed(claim, **changes)

    def _transfer(self, name: str) -> str:
        """One that the hostile agent was told of, or an honest one's, which it may have guessed."""
        claims = [body.transfer for body in self.ours.evil[-64:] if isinstance(body, Claim)]
        known = claims[::-1] + list(self.ours.receiving.incoming_transfers)
        return known[TEXTS.index(name) // 4 % len(known)] if known and name in TEXTS else name

    def _write(self, notice: Notice) -> None:
        ours, transfer = self.ours, self._transfer(notice.transfer)
        claim = next((body for body in ours.evil if isinstance(body, Claim) and body.transfer == transfer), None)
        changes: dict[str, Any] = {"transfer": transfer, "sender_epoch": 1, "receiver_epoch": 1}
        changes["receiver_incarnation"] = "us"
        if claim is not None and notice.token[0] % 4:
            incoming = ours.receiving.incoming_transfers.get(transfer)
            changes["token"], changes["sender_incarnation"] = claim.token, "evil"
            if incoming is not None and notice.digest % 5:
                chunk = notice.chunk % incoming.plan.chunks
                changes |= {"chunk": chunk, "chunk_bytes": incoming.plan.chunk(chunk).size_bytes}
            told = [body for body in ours.evil if isinstance(body, Claim | Grant) and body.transfer == transfer]
            leases = [lease for body in told for lease in body.leases]
            if leases and notice.slot % 5:
                lease = leases[notice.slot % len(leases)]
                changes |= {"slot": lease.slot, "generation": lease.generation}
        written = changed(notice, **changes)
        has_landed = ours.land(written)
        is_its_own = claim is not None and written.token == claim.token
        assert is_its_own or not has_landed, "rows of a transfer that it was not told of"


def _renamed(step: Any, number: int) -> Any:
    if isinstance(step, Say):
        return changed(step, body=_renamed(step.body, number))
    changes: dict[str, Any] = {name: f"f{number}" for name in ("transfer", "request") if hasattr(step, name)}
    if isinstance(step, Claim):
        changes["receiver"] = number
    return changed(step, **changes)


def _named(message: Any) -> Any:
    """The careless engine's offers and wants are not the honest one's."""
    return changed(message, number=message.number % CARELESS + 1)


class Agents(Target):
    """No exception; what our agent says can be read; slots conserved, nothing kept without bound; the honest get
    theirs."""

    name, kind = "agents", Script

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._draws = [drawer(kind) for kind in (Say, Say, Write, Do, Do, Do, Engine, Engine)]
        fetched, fetching = drawer(ToSender), drawer(ToReceiver)
        self._draws += [lambda random: Say(0, fetched(random)), lambda random: Say(2, fetching(random))] * 2
        self._write, self._flood = drawer(Write), drawer(Flood)

    def frame(self, random: Random) -> bytes:
        steps = [random.choice(self._draws)(random) for _ in range(random.choice((3, 10, 30)))]
        if random.random() < 0.1:
            steps.insert(random.randrange(len(steps)), self._flood(random))
        match random.randrange(4):
            case 0:  # slots are lent to it from the start, and it lends some
                lent = tuple(SlotLease(slot, 1) for slot in range(random.choice((2, 4))))
                steps[:0] = [Do(5), _offer(random), Say(0, changed(CLAIM, leases=lent))]
            case 1:  # and it writes some
                steps[:0] = [Do(5), *(self._write(random) for _ in range(random.choice((2, 6))))]
            case 2:  # it reads, and is read
                steps[:0] = [Do(8), Do(6), Do(5), Say(2, _tables(random)), Do(0), _offer(random), Say(0, CLAIM)]
        return encode(tuple(_plain(random, step) for step in steps))

    def judge(self, script: Script) -> int:
        return self._loop.run_until_complete(Siege().run(script))

    def close(self) -> None:
        self._loop.close()


def _offer(random: Random) -> Offer:
    tokens, fence = random.choice((8, 16, 16)), random.choice((0, 0, 1))
    offer = offer_of(OFFERED, tokens, 5, last=tokens == 16, rendezvous="r1")
    return changed(offer, hold_s=30.0, fence=fence)


def _tables(random: Random) -> BlockTables:
    end, renewal = random.choice((2, 5, 5)), random.choice((0, 0, 1))
    blocks = (Blocks(0, 0, tuple(range(end))),)
    return BlockTables(transfer="a", tokens=16 * end, is_last=end == 5, renewal=renewal, blocks=blocks)


def _plain(random: Random, step: Step) -> Step:
    """Tables that fit, most times, so that a request gets as far as its claim, and a claim as far as being read."""
    if isinstance(step, Say):
        return changed(step, body=_plain(random, step.body))
    if isinstance(step, Write) and random.random() < 0.7:  # of its own transfer, few chunks again and again
        where = {"slot": random.randrange(1, 5), "chunk": random.choice((0, 0, 1, 20))}
        return Write(changed(step.notice, transfer="a", token=b"\1" * 16, **where))
    if isinstance(step, BlockTables) and random.random() < 0.7:
        return _tables(random)
    if isinstance(step, Check | Checked) and random.random() < 0.7:
        chunk, digest = random.randrange(4), random.choice((1, 1, 1, 2, 6))
        step = changed(step, digests=(Sum(chunk, digest),))
    if isinstance(step, Withdraw) and random.random() < 0.5:
        return changed(step, number=number_of(OFFERED))
    if isinstance(step, Check | Grant | Renew | Settled) and random.random() < 0.7:
        return changed(step, transfer=CLAIMED)
    if isinstance(step, Offer | Want) and random.random() < 0.7:
        first = random.choice((0, 16))
        blocks = (Blocks(0, first // 16, tuple(range(5))),)
        if isinstance(step, Offer):
            return changed(step, blocks=blocks, first_token=first // 4 + random.choice((0, 2)), tokens=16)
        return changed(step, blocks=blocks, first_token=first, end_token=first + 40)
    return step
