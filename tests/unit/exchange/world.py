"""Real exchange machines wired back to back: messages, writes and moves are events that happen in any order.

The world plays both shells, the movers and the network. It also watches: no slot is written under two leases at once,
no chunk of the wrong lease is scattered, every want and offer ends exactly once.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from kvbridge_proto.engine import Done, Expect, Failed, Offer, Released, Scales, Want
from kvbridge_proto.peer import (
    Cancel,
    Claim,
    Drained,
    FabricCard,
    Failing,
    Grant,
    Hold,
    Notice,
    Ready,
    Refuse,
    Settled,
)
from kvbridge_proto.pool import Codec, Engine, Group, Layer, Model, Plane, Pool, Region, Shard, Step
from kvbridge_proto.words import Agent, Blocks, Rank

from kvbridge.dataplane.receiving import Arrival, Receiving
from kvbridge.dataplane.sending import Departure, Sending
from kvbridge.exchange.actions import Action, Ask, Reach, Send, Tell
from kvbridge.exchange.inbound import Inbound
from kvbridge.exchange.orders import (
    Credit,
    Dropped,
    Failure,
    Lend,
    Progress,
    ReceiveOrder,
    ReceivingOrder,
    SendingOrder,
    SendOrder,
    StopReceiving,
    StopSending,
)
from kvbridge.exchange.outbound import Outbound
from kvbridge.exchange.route import Site
from kvbridge.exchange.session import Home, Session, accept, answer, hello, welcome
from kvbridge.exchange.slots import SlotPool
from kvbridge.geometry.check import rescaled
from kvbridge.geometry.plan import Part
from kvbridge.geometry.strip import Strip

LAYERS, HEADS, WIDTH, BLOCKS = 2, 4, 8, 64
SLOT_BYTES = 1024
IN_ORDER = (("message", "hello"), ("report",))  # of which the oldest comes first
NOTHING: Any = object()  # for an engine's memory


def make_pool(
    engine: str, rank: int, ranks: int, block_tokens: int, scale: float = 0.0, all_heads: int = HEADS
) -> Pool:
    """One rank of a small bf16 engine, or an fp8 one under this scale; heads are split evenly."""
    size = 1 if scale else 2
    heads, row = all_heads // ranks, WIDTH * size
    block = block_tokens * heads * row
    codec = Codec(
        name="fp8_e4m3" if scale else "bf16",
        width=WIDTH,
        element_bytes=size,
        row_bytes=row,
        scales=(scale,) if scale else (),
    )
    planes = tuple(
        Plane(
            layer=layer,
            part=part,
            offset=(2 * layer + i) * BLOCKS * block,
            block_stride=block,
            token_axis=(Step(block_tokens, heads * row),),
            head_stride=row,
            element_axis=(Step(WIDTH, size),),
            first_head=rank * heads,
            heads=heads,
            total_heads=all_heads,
            codec=codec,
        )
        for layer in range(LAYERS)
        for i, part in enumerate(("k", "v"))
    )
    layer = Layer(kind="full", kv_heads=all_heads, key_width=WIDTH, value_width=WIDTH)
    return Pool(
        engine=Engine(kind="test", version="1", id=engine),
        model=Model(name="tiny", layers=(layer,) * LAYERS),
        shard=Shard(tp_rank=rank, tp_size=ranks),
        groups=(Group(kind="full", block_tokens=block_tokens, blocks=BLOCKS),),
        regions=(Region(2 * LAYERS * BLOCKS * block),),
        planes=planes,
    )


def notice_of(departure: Departure, source: Home) -> Notice:
    """What comes with a chunk that this source has written."""
    order, lease = departure.order, departure.lease
    return Notice(
        transfer=order.transfer,
        token=order.token,
        source_boot=source.agent.boot,
        sink_boot=order.boot,
        source_epoch=source.epoch,
        sink_epoch=order.sink_epoch,
        slot=lease.slot,
        generation=lease.generation,
        chunk=departure.chunk,
        chunk_bytes=departure.size_bytes,
        digest=0,
    )


def take_up(order: SendingOrder | ReceivingOrder, sending: Sending, receiving: Receiving) -> None:
    """What a data plane does with an order of a transfer that is not pulled."""
    match order:
        case SendOrder():
            sending.order(order, NOTHING, 0.0)
        case Progress():
            sending.progress(order, 0.0)
        case Credit():
            sending.credit(order, 0.0)
        case StopSending():
            sending.stop(order)
        case ReceiveOrder():
            receiving.order(order, NOTHING)
        case Lend():
            receiving.lend(order)
        case StopReceiving():
            receiving.stop(order)
        case _:
            raise AssertionError(order)


@dataclass
class Node:
    """One agent: both machines and what its shell would hold."""

    name: str
    home: Home
    inbound: Inbound
    outbound: Outbound
    sending: Sending
    receiving: Receiving = field(default_factory=Receiving)
    orders: deque[SendingOrder | ReceivingOrder] = field(default_factory=deque)  # that its data plane has not heard
    dropped: list[Dropped] = field(default_factory=list)
    told: list[object] = field(default_factory=list)
    accepted: dict[str, Session] = field(default_factory=dict)
    is_dead: bool = False


class World:
    """`run` makes everything happen that is under way, in an order the seed decides.

    The engines are `sources` and `sinks` ranks that split the heads, or have the pools given.
    """

    def __init__(
        self,
        sources: int | Sequence[Pool] = 1,
        sinks: int | Sequence[Pool] = 1,
        slots: int = 4,
        local: int = 2,
        seed: int = 0,
    ) -> None:
        self.now = 0.0
        self.key = ""  # what sources prove to have
        self.random = random.Random(seed)
        self.events: list[tuple[str, Callable[[], None]]] = []
        self.numbers = count(1)
        self.writing: dict[tuple[str, int], Departure] = {}  # (sink boot, slot) -> the write under way
        self._goodbyes: set[tuple[str, str]] = set()  # on their way, to whom and of whom
        self.scatters: Counter[tuple[str, int]] = Counter()
        self.notices: list[Notice] = []
        self.holds: list[Hold] = []
        self.refused: list[Refuse] = []
        self.moved: list[tuple[tuple[Strip, ...], bool, Pool]] = []  # begun: by which plan, gathers, under which pool
        self.hold: set[str] = set()  # kinds of events that do not happen now
        self.nodes: dict[str, Node] = {}
        for letter, engine, block_tokens, pools in (("P", "prefill", 4, sources), ("D", "decode", 16, sinks)):
            if isinstance(pools, int):
                pools = [make_pool(engine, rank, pools, block_tokens) for rank in range(pools)]
            ranks = tuple(Rank(tp_rank=r, pp_rank=0, address=f"{letter}{r}") for r in range(len(pools)))
            for r, pool in enumerate(pools):
                self._add(f"{letter}{r}", pool, ranks, slots, local)

    def _add(self, name: str, pool: Pool, ranks: tuple[Rank, ...], slots: int, local: int) -> None:
        agent = Agent(name=name, boot=f"boot-{name}-{next(self.numbers)}", address=name, version="1")
        card = FabricCard(kind="world", name=agent.boot, descriptor=b"", base=0, slot_bytes=SLOT_BYTES, slots=slots)
        inbound = Inbound(
            SlotPool(slots), lambda: f"t{next(self.numbers)}", lambda: next(self.numbers).to_bytes(16, "big")
        )
        home = Home(agent, 1, pool, Site(card), ("sum",), ranks)
        self.nodes[name] = Node(name, home, inbound, Outbound(), Sending(local))

    @property
    def sources(self) -> list[Node]:
        return [node for name, node in self.nodes.items() if name[0] == "P"]

    @property
    def sinks(self) -> list[Node]:
        return [node for name, node in self.nodes.items() if name[0] == "D"]

    # What engines say:

    def offer(
        self,
        request: str,
        tokens: int,
        blocks: int,
        first: int = 0,
        last: bool = True,
        room: str = "",
        first_token: int = 0,
    ) -> None:
        pieces = (Blocks(0, first, tuple(range(first, first + blocks))),) if blocks else ()
        self.offer_pieces(request, tokens, pieces, last, room, first_token)

    def offer_pieces(
        self,
        request: str,
        tokens: int,
        pieces: tuple[Blocks, ...],
        last: bool = True,
        room: str = "",
        first_token: int = 0,
    ) -> None:
        message = Offer(
            room=room or request,
            request=request,
            tokens=tokens,
            blocks=pieces,
            is_last=last,
            hold_s=100.0,
            first_token=first_token,
        )
        for node in self.sources:
            self.do(node, node.outbound.offer(message, node.home, self.now))

    def expect(self, request: str, room: str = "", source: str = "P0") -> None:
        message = Expect(request=request, room=room or request, source=source)
        for node in self.sinks:
            self.do(node, node.inbound.expect(message, self.now))

    def want(
        self,
        request: str,
        end: int,
        first: int = 0,
        room: str = "",
        deadline: float = 50.0,
        source: str = "P0",
    ) -> None:
        begin = first // 16
        pieces = (Blocks(0, begin, tuple(range(begin, -(-end // 16)))),)
        self.want_pieces(request, end, pieces, first, room, deadline, source)

    def want_pieces(
        self,
        request: str,
        end: int,
        pieces: tuple[Blocks, ...],
        first: int = 0,
        room: str = "",
        deadline: float = 50.0,
        source: str = "P0",
    ) -> None:
        message = Want(
            request=request,
            room=room or request,
            source=source,
            first_token=first,
            end_token=end,
            blocks=pieces,
            deadline_s=deadline,
        )
        for node in self.sinks:
            self.do(node, node.inbound.want(message, node.home, self.now))

    def abandon(self, request: str) -> None:
        for node in self.sinks:
            self.do(node, node.inbound.abandon(request, self.now))

    def withdraw(self, request: str, comes_again: bool = False) -> None:
        for node in self.sources:
            self.do(node, node.outbound.withdraw(request, "test", self.now, comes_again))

    # The network and the movers:

    def do(self, node: Node, actions: list[Action]) -> None:
        if node.is_dead:
            return
        for action in actions:
            match action:
                case Reach(address=address) | Ask(address=address):
                    self.later("hello", lambda a=address: self._greet(node, a))
                case Send(peer=peer, body=body) if node.name[0] == "D":
                    self.later("message", lambda p=peer, b=body: self._to_source(node, self.nodes[p], b))
                case Send(peer=boot, body=body):
                    sink = next(n for n in self.nodes.values() if n.home.agent.boot == boot)
                    self.later("message", lambda s=sink, b=body: self._to_sink(node, s, b))
                case Tell(message=message):
                    node.told.append(message)
                case _:
                    node.orders.append(action)
                    self.later("order", partial(self._order, node))

    def later(self, kind: str, event: Callable[[], None]) -> None:
        self.events.append((kind, event))

    def run(self, steps: int = 100_000) -> None:
        """Let events happen until none is left that may."""
        for _ in range(steps):
            if not self.step():
                return
        raise AssertionError("the world does not come to rest")

    def settle(self) -> None:
        """Data planes do what they were asked, and are heard."""
        while mine := [each for each in self.events if each[0] in ("order", "report")]:
            self.events.remove(mine[0])
            mine[0][1]()

    def step(self) -> bool:
        """Let one event happen; False if none may."""
        able = [i for i, (kind, _) in enumerate(self.events) if kind not in self.hold]
        if not able:
            return False
        # messages of one link keep their order, as ZeroMQ does: the oldest message first
        index = self.random.choice(able)
        kind = self.events[index][0]
        if together := next((kinds for kinds in IN_ORDER if kind in kinds), None):
            index = next(i for i in able if self.events[i][0] in together)
        self.events.pop(index)[1]()
        return True

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for node in self.nodes.values():
            self.do(node, node.inbound.tick(self.now))
            self.do(node, node.outbound.tick(self.now))

    def _greet(self, node: Node, address: str) -> None:
        peer = self.nodes[address]
        if peer.is_dead:
            self.do(node, node.inbound.unreachable(address, "peer_unreachable", "dead", self.now))
            return
        self._parted(peer, node)
        self._parted(node, peer)
        session = answer(hello(node.home), peer.home)
        assert isinstance(session, Session)
        peer.accepted[node.home.agent.boot] = session
        agreed = accept(welcome(session, peer.home), node.home, self.key)
        assert isinstance(agreed, Session)
        self.do(node, node.inbound.opened(address, agreed, self.now))

    def _to_source(self, sink: Node, source: Node, body: object) -> None:
        boot, machine = sink.home.agent.boot, source.outbound
        if source.is_dead or sink.is_dead:
            return
        match body:
            case Claim() if boot not in source.accepted:
                refuse = Refuse(code="no_session", reasons=("test",), about=body.transfer)
                self.later("message", lambda: self._to_sink(source, sink, refuse))
            case Claim():
                self.do(source, machine.claim(body, source.accepted[boot], source.home, self.now))
            case Grant():
                self.do(source, machine.grant(boot, body))
            case Cancel():
                self.do(source, machine.cancel(boot, body))
            case Hold(rooms=rooms):
                self.holds.append(body)
                self.do(source, machine.hold(boot, rooms, self.now))
            case Settled():
                pass
            case _:
                raise AssertionError(body)

    def _to_sink(self, source: Node, sink: Node, body: object) -> None:
        if source.is_dead or sink.is_dead:
            return
        boot, machine = source.home.agent.boot, sink.inbound
        match body:
            case Ready(transfer=transfer, chunks=chunks):
                self.do(sink, machine.ready(boot, transfer, chunks, self.key))
            case Failing(transfer=transfer, code=code, reason=reason):
                self.do(sink, machine.failing(boot, transfer, code, reason, self.now, self.key))
            case Drained(transfer=transfer, code=code, reason=reason):
                self.do(sink, machine.drained(boot, transfer, code, reason, self.now, self.key))
            case Refuse(about=transfer, code=code, reasons=reasons):
                self.refused.append(body)
                self.do(sink, machine.drained(boot, transfer, code, "; ".join(reasons), self.now, self.key))
                if code == "no_session" and sink.home.agent.boot not in source.accepted:  # nor greeted again since
                    self.do(sink, machine.unreachable(source.name, code, "test", self.now))
            case _:
                raise AssertionError(body)

    def rescale(self, node: Node, scale: float, revision: int = 0) -> None:
        """All planes of an engine rank come under another scale; its agent does what `Engines` does."""
        pool, revision = node.home.pool, revision or node.home.revision + 1
        scales = tuple(Scales(plane.layer, plane.part, (scale,)) for plane in pool.planes)
        ended = node.outbound.rescaled("test", self.now)
        node.home = replace(node.home, epoch=node.home.epoch + 1, pool=rescaled(pool, scales), revision=revision)
        self.do(node, ended)
        others = self.sinks if node.name[0] == "P" else self.sources
        for other in others:
            if other.home.agent.boot in node.accepted or node.home.agent.boot in other.accepted:
                self._goodbyes.add((other.name, node.name))
                self.later("message", partial(self._parted, other, node))
            if node.accepted.pop(other.home.agent.boot, None) is not None:
                self.do(node, node.outbound.lost(other.home.agent.boot))
        self.do(node, node.inbound.rescaled(node.home, self.now))

    def _parted(self, node: Node, other: Node) -> None:
        """`other` said goodbye, before whatever it says next."""
        if (node.name, other.name) not in self._goodbyes:
            return
        self._goodbyes.discard((node.name, other.name))
        if node.accepted.pop(other.home.agent.boot, None) is not None:
            self.do(node, node.outbound.lost(other.home.agent.boot))
        self.do(node, node.inbound.unreachable(other.name, "peer_left", "test", self.now))

    # Data planes:

    def _order(self, node: Node, is_all: bool = False) -> None:
        while node.orders:
            self._take_up(node, node.orders.popleft())
            if not is_all:
                break
        self._send(node)
        self._report(node)

    def _take_up(self, node: Node, order: SendingOrder | ReceivingOrder) -> None:
        take_up(order, node.sending, node.receiving)

    def _send(self, source: Node) -> None:
        while not source.orders and (departure := source.sending.begin()) is not None:
            self._begin(source, departure)

    def _begin(self, source: Node, departure: Departure) -> None:
        transfer = departure.order.transfer
        offered = source.outbound.outlets[transfer].offered
        assert offered in source.outbound.offers.values(), f"{transfer} reads blocks that were given back"
        self.moved.append((departure.order.plan.strips, True, source.home.pool))
        self.later("gather", lambda: self._gathered(source, departure))

    def _gathered(self, source: Node, departure: Departure) -> None:
        if source.is_dead:
            return
        plan, boot = departure.order.plan, departure.order.boot
        assert Part(plan, plan.chunk(departure.chunk), departure.tables, is_source=True).moves()
        key = (boot, departure.lease.slot)
        assert key not in self.writing, f"slot {key} is written under two leases"
        self.writing[key] = departure
        self.later("write", lambda: self._written(source, departure))
        source.sending.gathered(departure)
        self._report(source)

    def _written(self, source: Node, departure: Departure) -> None:
        """The write has landed: the sink may see the notice before or after the source sees the end."""
        boot = departure.order.boot
        del self.writing[boot, departure.lease.slot]
        sink = next(n for n in self.nodes.values() if n.home.agent.boot == boot)
        notice = notice_of(departure, source.home)
        self.notices.append(notice)
        self.later("notice", lambda: self._landed(sink, notice))
        self.later("end", lambda: self._ended(source, departure, None))

    def _ended(self, source: Node, departure: Departure, failure: Failure) -> None:
        if not source.is_dead:
            source.sending.written(departure, 0.0, failure)
            self._send(source)
            self._report(source)

    # What was asked of a sink's before a notice came is done before that is looked at.

    def _landed(self, sink: Node, notice: Notice) -> None:
        if sink.is_dead:
            return
        self._order(sink, is_all=True)
        if (arrival := sink.receiving.landed(notice)) is not None:
            self.moved.append((arrival.order.plan.strips, False, sink.home.pool))
            self.later("scatter", lambda: None if sink.is_dead else self._scattered(sink, arrival))
        self._report(sink)

    def _scattered(self, sink: Node, arrival: Arrival) -> None:
        order, notice = arrival.order, arrival.notice
        assert Part(order.plan, order.plan.chunk(notice.chunk), order.tables, is_source=False).moves()
        self.scatters[order.transfer, notice.chunk] += 1
        sink.receiving.scattered(arrival, None)
        self._report(sink)

    def _report(self, node: Node) -> None:
        if sent := node.sending.take_reports():
            self.later("report", lambda: None if node.is_dead else self.do(node, node.outbound.hear(sent)))
        if received := node.receiving.take_reports():
            node.dropped += [each for each in received if isinstance(each, Dropped)]
            self.later("report", lambda: self.do(node, node.inbound.hear(received, self.now)))

    def kill(self, name: str) -> None:
        """The agent process is gone, and with it its writes; others see their link end."""
        dead = self.nodes[name]
        dead.is_dead = True
        for node in self.nodes.values():
            if node is not dead:
                self.later("message", lambda n=node: self._lose(n, dead))

    def _lose(self, node: Node, dead: Node) -> None:
        self.do(node, node.outbound.lost(dead.home.agent.boot))
        self.do(node, node.inbound.unreachable(dead.name, "peer_lost", "link ended", self.now))

    # What must be true:

    def answers(self, sink: int = 0) -> dict[str, object]:
        """The last word on each want; asserts that there is one word on each."""
        found: dict[str, object] = {}
        for message in self.sinks[sink].told:
            if isinstance(message, Done | Failed):
                assert message.request not in found, f"two answers: {found[message.request]}, {message}"
                found[message.request] = message
        return found

    def released(self, source: int = 0) -> dict[str, Released]:
        found: dict[str, Released] = {}
        for message in self.sources[source].told:
            if isinstance(message, Released) and message.code != "unknown_offer":
                assert message.request not in found, f"released twice: {message}"
                found[message.request] = message
        return found

    def check_rest(self) -> None:
        """Nothing is left over anywhere: no slot, no transfer, no want, no offer."""
        for node in self.nodes.values():
            if node.is_dead:
                continue
            inbound, outbound = node.inbound, node.outbound
            assert not inbound.wants and not outbound.offers and not outbound.outlets
            assert not outbound._waiting and not outbound._of_sink and not inbound._hungry
            counts = inbound.slots.counts()
            assert counts.free == len(inbound.slots), counts
            assert node.sending.slots.free == len(node.sending.slots)
            assert not node.sending._open and not node.sending._hungry and not node.sending.moving
        assert all(times == 1 for times in self.scatters.values())
