"""The real parts of an agent behind its sockets, with hostile agents on three links and honest ones beside them.

The control, the data plane and the engine are played here. A frame is a script, as in machines.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from random import Random
from typing import Annotated, Any

import msgspec
from kvbridge_proto.codec import decode, encode
from kvbridge_proto.common import OURS, AgentCard, Blocks, Rank
from kvbridge_proto.engine import Done, Failed, ToEngine
from kvbridge_proto.peer import (
    Body,
    Claim,
    Envelope,
    FabricCard,
    Hello,
    Notice,
    Probe,
    Ready,
    Refuse,
    Welcome,
)
from kvbridge_proto.status import PeerStatus, TransferStatus
from msgspec import Meta, Struct

from kvbridge.agent.peers import Peers
from kvbridge.agent.status import transfers
from kvbridge.dataplane.receive_orders import LandedChunk
from kvbridge.dataplane.send_orders import LeavingChunk
from kvbridge.errors import PeerError
from kvbridge.exchange.route import Site
from kvbridge.exchange.session import AttachedEngine
from tests.integration.agent.player import Whole, Wire
from tests.integration.fuzz.machines import ALL_ROWS, CLAIM, POOLS
from tests.integration.fuzz.target import Target
from tests.integration.fuzz.typed import TEXTS, drawer
from tests.integration.fuzz.vary import varied
from tests.unit.exchange.world import make_pool, offer_of, want_of
from tests.unit.proto.samples import NOTICE

EVIL, GOOD = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"
OUR_POOL, GOOD_POOL = make_pool("ours", 0, 1, 4), POOLS["evil"]
CARD = FabricCard(kind="world", name="incarnation", descriptor=b"", base=0, slot_bytes=1024, slots=8)
DONE, BLOCKS = 80, (Blocks(0, 0, tuple(range(20))),)  # tokens of the honest transfers


class Say(Struct, frozen=True, tag="say"):
    """On link 0 an agent of its own says it, on link 1 as if it were the honest one, on link 2 where it was dialled."""

    link: Annotated[int, Meta(ge=0, lt=3)]
    body: Body


class Write(Struct, frozen=True, tag="write"):
    notice: Notice


class Do(Struct, frozen=True, tag="do"):
    """0: time passes, 1: hostile links end, 2: our engine wants of the hostile agent, 3: its offer ends, 4: moves."""

    what: Annotated[int, Meta(ge=0, lt=5)]


Script = tuple[Say | Write | Do, ...]


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


class Besieged(Whole):
    """Our agent. It plays its own control and data plane."""

    def __init__(self) -> None:
        engine = AttachedEngine(self.agent("us"), 1, OUR_POOL, Site(CARD), ("sum",), (self.rank("us"),))
        super().__init__(engine, 8, Watched)
        self.moves: deque[LeavingChunk | LandedChunk] = deque()
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

    # As control:

    def dial(self, address: str) -> Said:
        if not address.startswith("tcp://"):
            raise PeerError("bad_address", address)
        incarnation = "evil" if address == EVIL else "good"
        return self.wires.setdefault(address, Said(address, "", incarnation, is_dialled=True))

    def create_task(self, coroutine: Any) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(coroutine))

    async def settle(self) -> None:
        """Let greetings end, and raise what they raise."""
        while self.tasks:
            tasks, self.tasks = self.tasks, []
            await asyncio.gather(*tasks)

    # As data plane:

    def land(self, notice: Notice) -> bool:
        arrival = self.receive_orders.landed(notice)
        if arrival is not None:
            self.moves.append(arrival)
        self.report()
        return arrival is not None

    def move(self) -> None:
        """Everything that was begun ends."""
        self.begin()
        while self.moves:
            move = self.moves.popleft()
            if isinstance(move, LeavingChunk):
                self.send_orders.gathered(move)
                self.send_orders.written(move, 0.0, None)
            else:
                self.receive_orders.scattered(move, None)
            self.begin()
        self.report()

    def begin(self) -> None:
        while (departure := self.send_orders.begin()) is not None:
            self.moves.append(departure)

    # What must be true after every message:

    def check(self) -> None:
        counts = self.receiving.slots.counts()
        assert counts.free + counts.lent + counts.landed + counts.quarantined == 8
        departures = sum(isinstance(move, LeavingChunk) for move in self.moves)
        assert self.send_orders.slots.free + departures == 2
        assert len(self.peers.incoming.sessions) <= 3
        statuses = tuple(self.peers.statuses())
        assert decode(encode(statuses), tuple[PeerStatus, ...]) == statuses
        under_way = transfers(self.receiving, self.sending, self.now)
        assert decode(encode(under_way), tuple[TransferStatus, ...]) == under_way
        assert len(self.metrics._codes) <= 200


class Siege:
    """A script is played against one agent; then its honest peers go on as if nothing had been."""

    def __init__(self) -> None:
        self.ours = Besieged()
        self.honest = Said("tcp://127.0.0.1:9", "", "good")
        self.links = [Said("tcp://127.0.0.1:8", "", "evil"), Said("tcp://127.0.0.1:7", "", "good")]

    async def run(self, script: Script) -> int:
        await self.begin()
        self.ours.check()
        for step in script:
            await self.play(step)
            self.ours.check()
        await self.end()
        return max(1, len(script))

    async def hear(self, link: Said, sender: str, body: Any) -> None:
        self.ours.peers._take(self.ours, link, sender, body)
        await self.ours.settle()

    def hello(self, incarnation: str, lane: int = 1) -> Hello:
        agent = Besieged.agent(incarnation)
        return Hello(
            versions=OURS, agent=agent, epoch=1, pool=GOOD_POOL, fabric=CARD, digests=("sum",), probe_lane=lane
        )

    def welcome(self, asked: Hello, incarnation: str) -> Welcome:
        return Welcome(
            version=1,
            agent=Besieged.agent(incarnation),
            epoch=1,
            pool=GOOD_POOL,
            digest="sum",
            slot_bytes=1024,
            ranks=(Besieged.rank(GOOD),),
            probe=Probe(lane=asked.probe_lane, seed=1, size_bytes=64, bytes_per_s=1e9),
        )

    async def begin(self) -> None:
        ours = self.ours
        want = partial(want_of, end=DONE, blocks=BLOCKS, deadline=1000)
        ours.receiver.want(want("honest", rendezvous="h", sender=GOOD), ours.engine)
        good = ours.wires[GOOD]
        await self.hear(good, "good", self.welcome(good.last(Hello), "good"))
        offer = offer_of("offered", DONE, BLOCKS, rendezvous="o")
        ours.sender.offer(msgspec.structs.replace(offer, hold_s=10_000), ours.engine)
        await self.hear(self.honest, "good", self.hello("good"))
        assert isinstance(self.honest.last(Welcome), Welcome) and isinstance(good.last(Claim), Claim)
        ours.receiver.want(want("evil", rendezvous="h", sender=EVIL), ours.engine)

    async def end(self) -> None:
        """The honest sender writes its chunks; the honest receiver has its rows."""
        ours = self.ours
        ours.move()
        good = ours.wires[GOOD]
        claim, chunk = good.last(Claim), 0
        incoming = ours.receiving.wants["honest"].incoming_transfers[claim.transfer]
        await self.hear(good, "good", Ready(transfer=claim.transfer, chunks=incoming.plan.chunks))
        while chunk < incoming.plan.chunks:
            leases = [lease for body in good.sent if hasattr(body, "leases") for lease in body.leases]
            for lease in leases[chunk : incoming.plan.chunks]:
                assert ours.land(self.notice(claim, incoming.plan.chunk(chunk).size_bytes, chunk, lease))
                chunk += 1
            ours.move()
            if len([lease for body in good.sent if hasattr(body, "leases") for lease in body.leases]) == len(leases):
                break
        answer = [
            message for message in ours.told if isinstance(message, Done | Failed) and message.request == "honest"
        ]
        has_slots = ours.receiving.slots.counts().quarantined + ours.receiving.slots.lent < 8
        assert len(answer) == 1 and isinstance(answer[0], Done) if has_slots else not answer, answer
        plan = ours.peers.incoming.sessions["good"].session.planner.plan(ALL_ROWS, 0, DONE, 1024)
        await self.hear(self.honest, "good", self.claim(plan.digest))
        assert "honest" in ours.sending.outgoing_transfers, self.honest.last(Refuse)

    @staticmethod
    def claim(digest: str) -> Claim:
        names = {"transfer": "honest", "want": "good/w", "rendezvous": "honest rendezvous"}
        return msgspec.structs.replace(CLAIM, **names, end_token=DONE, plan=digest, deadline_s=100.0)

    @staticmethod
    def notice(claim: Claim, size_bytes: int, chunk: int, lease: Any) -> Notice:
        who = {"sender_incarnation": "good", "receiver_incarnation": "us", "sender_epoch": 1, "receiver_epoch": 1}
        where = {"slot": lease.slot, "generation": lease.generation, "chunk": chunk, "chunk_bytes": size_bytes}
        return msgspec.structs.replace(NOTICE, transfer=claim.transfer, token=claim.token, **who, **where)

    # The script:

    async def play(self, step: Say | Write | Do) -> None:
        match step:
            case Say(link=2, body=body):
                wire = self.ours.dial(EVIL)
                await self.hear(wire, "evil", self._fitting(wire, body, "evil"))
            case Say(link=link, body=body):
                wire = self.links[link]
                # Who the honest one is, is for keys to prove: without them a Hello in its name is its own.
                sender = "evil" if link == 0 or isinstance(body, Hello) else "good"
                await self.hear(wire, sender, self._fitting(wire, body, sender))
            case Write(notice=notice):
                claim = self.ours.dial(EVIL).last(Claim)
                is_own = claim is not None and notice.slot % 2
                changes = {"transfer": claim.transfer, "token": claim.token} if is_own else {"transfer": "id1"}
                changed = msgspec.structs.replace(
                    notice, sender_incarnation="evil", receiver_incarnation="us", sender_epoch=1, **changes
                )
                self.ours.land(msgspec.structs.replace(changed, receiver_epoch=1, chunk_bytes=1024))
            case Do(what=what):
                await self._happen(what)

    async def _happen(self, what: int) -> None:
        ours = self.ours
        match what:
            case 0:
                ours.now += 1.0
                ours.receiver.tick()
                ours.sender.tick()
            case 1:
                for wire in (*self.links, ours.dial(EVIL)):
                    ours.peers._lose(wire, "test")
                ours.wires.pop(EVIL)
            case 2:
                request = f"evil {len(ours.receiving.wants)}-{len(ours.told)}"
                want = want_of(request, DONE, BLOCKS, rendezvous="e", sender=EVIL, deadline=5)
                ours.receiver.want(want, ours.engine)
            case 3:
                ours.sender.withdraw("offered", "test")
            case _:
                ours.move()

    def _fitting(self, wire: Said, body: Any, incarnation: str) -> Any:
        """Right where it must be right to get further, most times."""
        if isinstance(body, Hello) and body.probe_lane % 2:
            pool = varied(Random(body.epoch), GOOD_POOL, body.epoch % 3)
            return msgspec.structs.replace(self.hello(incarnation, body.probe_lane), pool=pool, routes=body.routes)
        asked = wire.last(Hello)
        if isinstance(body, Welcome) and asked is not None and body.epoch % 2:
            changes = {"ranks": body.ranks, "why": body.why, "slot_bytes": min(1024, body.slot_bytes)}
            return msgspec.structs.replace(self.welcome(asked, incarnation), **changes)
        claim = wire.last(Claim)
        if claim is not None and hasattr(body, "transfer") and body.transfer in TEXTS:
            return msgspec.structs.replace(body, transfer=claim.transfer)
        return body


class Agents(Target):
    """No exception; what our agent says can be read; the honest get theirs."""

    name, kind = "agents", Script

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._draws = [drawer(Say)] * 6 + [drawer(Write), drawer(Do), drawer(Do)]

    def frame(self, random: Random) -> bytes:
        return encode(tuple(random.choice(self._draws)(random) for _ in range(random.choice((3, 10, 30)))))

    def judge(self, script: Script) -> int:
        return self._loop.run_until_complete(Siege().run(script))

    def close(self) -> None:
        self._loop.close()
