"""Real exchange machines wired back to back: messages, writes and moves are events that happen in any order.

The world plays the agents around the machines, the data planes and the network. It checks that no slot is written under
two leases at once, that no chunk of the wrong lease is scattered, and that every want and offer ends exactly once.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from typing import Any

from kvbridge_proto.common import AgentCard, Blocks, Rank
from kvbridge_proto.engine import Done, Expect, Failed, Offer, Released, Scales, Want
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
    Hold,
    Notice,
    Ready,
    Refuse,
    Renew,
    Settled,
)
from kvbridge_proto.pool import CodecName, Engine, Pool
from msgspec import structs

from kvbridge.dataplane.receive_orders import LandedChunk, ReceiveOrders
from kvbridge.dataplane.send_orders import LeavingChunk, SendOrders
from kvbridge.exchange.actions import Action, Ask, Notable, Reach, Send, Tell
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
from kvbridge.exchange.receiver import Receiver
from kvbridge.exchange.route import Site
from kvbridge.exchange.sender import Sender
from kvbridge.exchange.session import AttachedEngine, Session, accept, answer, hello, welcome
from kvbridge.exchange.slots import ReceiveSlots
from kvbridge.geometry.check import rescaled
from kvbridge.geometry.plan import Part
from kvbridge.geometry.plane_pair import PlanePair
from tests.support.pools import Shape, describe

LAYERS, HEADS, BLOCKS = 2, 4, 64
SLOT_BYTES = 1024
IN_ORDER = (("message", "hello"), ("report",))  # of which the oldest comes first
NOTHING: Any = object()  # for an engine's memory


@cache
def make_pool(
    engine: str,
    rank: int,
    ranks: int,
    block_tokens: int,
    scale: float = 0.0,
    cp_rank: int = 0,
    late_tokens: int = 0,
    **shape: Any,
) -> Pool:
    """One rank of a small bf16 engine, or an fp8 one under this scale; heads are split evenly.

    Blocks of layers that do not keep all tokens are of `late_tokens`.
    """
    codec: CodecName = "fp8_e4m3" if scale else "bf16"
    scales = {"k": (scale,), "v": (scale,)} if scale else None
    whole = Shape(block_tokens=block_tokens, blocks=BLOCKS, tp_size=ranks, codec=codec, scales=scales)
    late = {kind: late_tokens for kind in ("sliding", "chunked", "state") if late_tokens}
    pool = describe(replace(whole, group_tokens=late, **shape), rank, cp_rank=cp_rank)
    return structs.replace(pool, engine=Engine(kind="test", version="1", id=engine))


def notice_of(leaving: LeavingChunk, sender: AttachedEngine) -> Notice:
    """What comes with a chunk that this sender has written."""
    order, lease = leaving.order, leaving.lease
    return Notice(
        transfer=order.transfer,
        token=order.token,
        sender_incarnation=sender.agent.incarnation,
        receiver_incarnation=order.incarnation,
        sender_epoch=sender.epoch,
        receiver_epoch=order.receiver_epoch,
        slot=lease.slot,
        generation=lease.generation,
        chunk=leaving.chunk,
        chunk_bytes=leaving.size_bytes,
        digest=0,
    )


def offer_of(
    request: str,
    tokens: int,
    blocks: int | tuple[Blocks, ...],
    first: int = 0,
    last: bool = True,
    rendezvous: str = "",
    first_token: int = 0,
) -> Offer:
    """So many blocks of the first group from entry `first` on, or these."""
    if isinstance(blocks, int):
        blocks = (Blocks(0, first, tuple(range(first, first + blocks))),) if blocks else ()
    rest: dict[str, Any] = {"is_last": last, "hold_s": 100.0, "first_token": first_token}
    return Offer(rendezvous=rendezvous or request, request=request, tokens=tokens, blocks=blocks, **rest)


def want_of(
    request: str,
    end: int,
    blocks: tuple[Blocks, ...] | None = None,
    first: int = 0,
    rendezvous: str = "",
    deadline: float = 50.0,
    sender: str = "P0",
) -> Want:
    """In these blocks, or in those of the first group that are numbered like the entries."""
    entries = range(first // 16, -(-end // 16))
    blocks = (Blocks(0, entries.start, tuple(entries)),) if blocks is None else blocks
    rest: dict[str, Any] = {"sender": sender, "first_token": first, "end_token": end, "deadline_s": deadline}
    return Want(request=request, rendezvous=rendezvous or request, blocks=blocks, **rest)


def hear_receiver(
    machine: Sender, incarnation: str, body: object, session: Session | None, engine: AttachedEngine, now: float
) -> list[Action]:
    """What a sender's agent does with a message of a receiver, of which it has this session."""
    match body:
        case Claim() if session is None:
            return [Send(incarnation, Refuse(code="no_session", reasons=("test",), about=body.transfer))]
        case Claim():
            return machine.claim(body, session, engine, now)
        case Grant():
            return machine.grant(incarnation, body)
        case Cancel():
            return machine.cancel(incarnation, body)
        case Hold(rendezvous_ids=rendezvous_ids):
            return machine.hold(incarnation, rendezvous_ids, now)
        case Settled(transfer=transfer):
            return machine.settled(incarnation, transfer)
        case Renew():
            machine.renew(incarnation, body)
            return []
        case Check():
            return machine.check(incarnation, body)
    raise AssertionError(body)


def hear_sender(machine: Receiver, incarnation: str, body: object, now: float, key: str = "") -> list[Action]:
    """What a receiver's agent does with a message of a sender that has this key."""
    match body:
        case Ready(transfer=transfer, chunks=chunks):
            return machine.ready(incarnation, transfer, chunks, key)
        case Failing(transfer=transfer, code=code, reason=reason):
            return machine.failing(incarnation, transfer, code, reason, now, key)
        case Drained(transfer=transfer, code=code, reason=reason):
            return machine.drained(incarnation, transfer, code, reason, now, key)
        case Refuse(about=transfer, code=code, reasons=reasons):
            return machine.drained(incarnation, transfer, code, "; ".join(reasons), now, key)
        case BlockTables():
            return machine.tables(incarnation, body, now, key)
        case Checked():
            return machine.checked(incarnation, body, now, key)
    raise AssertionError(body)


def take_up(order: SendingOrder | ReceivingOrder, send_orders: SendOrders, receive_orders: ReceiveOrders) -> None:
    """What a data plane does with an order of a transfer that is not pulled."""
    match order:
        case SendOrder():
            send_orders.order(order, NOTHING, 0.0)
        case Progress():
            send_orders.progress(order, 0.0)
        case Credit():
            send_orders.credit(order, 0.0)
        case StopSending():
            send_orders.stop(order)
        case ReceiveOrder():
            receive_orders.order(order, NOTHING)
        case Lend():
            receive_orders.lend(order)
        case StopReceiving():
            receive_orders.stop(order)
        case _:
            raise AssertionError(order)


@dataclass
class Node:
    """One agent: both machines and what its shell would hold."""

    name: str
    engine: AttachedEngine
    receiving: Receiver
    sending: Sender
    send_orders: SendOrders
    receive_orders: ReceiveOrders = field(default_factory=ReceiveOrders)
    orders: deque[SendingOrder | ReceivingOrder] = field(default_factory=deque)  # that its data plane has not heard
    dropped: list[Dropped] = field(default_factory=list)
    told: list[object] = field(default_factory=list)
    accepted: dict[str, Session] = field(default_factory=dict)
    is_dead: bool = False


class World:
    """`run` makes everything happen that is under way, in an order the seed decides.

    The engines are `senders` and `receivers` ranks that split the heads, or have the pools given.
    """

    def __init__(
        self,
        senders: int | Sequence[Pool] = 1,
        receivers: int | Sequence[Pool] = 1,
        slots: int = 4,
        local: int = 2,
        seed: int = 0,
    ) -> None:
        self.now = 0.0
        self.key = ""  # what senders prove to have
        self.random = random.Random(seed)
        self.events: list[tuple[str, Callable[[], None]]] = []
        self.numbers = count(1)
        self.writing: dict[tuple[str, int], LeavingChunk] = {}  # (receiver incarnation, slot) -> the write under way
        self._goodbyes: set[tuple[str, str]] = set()  # on their way, to whom and of whom
        self.scatters: Counter[tuple[str, int]] = Counter()
        self.notices: list[Notice] = []
        self.holds: list[Hold] = []
        self.refused: list[Refuse] = []
        self.moved: list[
            tuple[tuple[PlanePair, ...], bool, Pool]
        ] = []  # begun: by which plan, gathers, under which pool
        self.hold: set[str] = set()  # kinds of events that do not happen now
        self.nodes: dict[str, Node] = {}
        for letter, engine, block_tokens, pools in (("P", "prefill", 4, senders), ("D", "decode", 16, receivers)):
            if isinstance(pools, int):
                pools = [make_pool(engine, rank, pools, block_tokens) for rank in range(pools)]
            ranks = tuple(Rank(tp_rank=r, pp_rank=0, address=f"{letter}{r}") for r in range(len(pools)))
            for r, pool in enumerate(pools):
                self._add(f"{letter}{r}", pool, ranks, slots, local)

    def _add(self, name: str, pool: Pool, ranks: tuple[Rank, ...], slots: int, local: int) -> None:
        agent = AgentCard(name=name, incarnation=f"incarnation-{name}-{next(self.numbers)}", address=name, version="1")
        card = FabricCard(
            kind="world", name=agent.incarnation, descriptor=b"", base=0, slot_bytes=SLOT_BYTES, slots=slots
        )
        receiving = Receiver(
            ReceiveSlots(slots), lambda: f"t{next(self.numbers)}", lambda: next(self.numbers).to_bytes(16, "big")
        )
        engine = AttachedEngine(agent, 1, pool, Site(card), ("sum",), ranks)
        self.nodes[name] = Node(name, engine, receiving, Sender(), SendOrders(local))

    @property
    def senders(self) -> list[Node]:
        return [node for name, node in self.nodes.items() if name[0] == "P"]

    @property
    def receivers(self) -> list[Node]:
        return [node for name, node in self.nodes.items() if name[0] == "D"]

    @property
    def sender(self) -> Node:
        """The first of them."""
        return self.senders[0]

    @property
    def receiver(self) -> Node:
        return self.receivers[0]

    # What engines say:

    def offer(self, *said: Any, at: Node | None = None, **more: Any) -> None:
        """All senders' engines do, or this one's alone. The rest is as for `offer_of`."""
        message = offer_of(*said, **more)
        for node in self.senders if at is None else [at]:
            self.do(node, node.sending.offer(message, node.engine, self.now))

    def expect(self, request: str, rendezvous: str = "", sender: str = "P0") -> None:
        message = Expect(request=request, rendezvous=rendezvous or request, sender=sender)
        for node in self.receivers:
            self.do(node, node.receiving.expect(message, self.now))

    def want(self, *said: Any, at: Node | None = None, **more: Any) -> None:
        """All receivers' engines do, or this one's alone. The rest is as for `want_of`."""
        message = want_of(*said, **more)
        for node in self.receivers if at is None else [at]:
            self.do(node, node.receiving.want(message, node.engine, self.now))

    def serve(self, *said: Any, **more: Any) -> None:
        """An offer, and everything happens that is not held back."""
        self.offer(*said, **more)
        self.run()

    def fetch(self, *said: Any, **more: Any) -> None:
        """The same after a want."""
        self.want(*said, **more)
        self.run()

    def begin(self, request: str = "r", tokens: int = 64) -> None:
        """The same after both; it is offered whole."""
        self.offer(request, tokens, -(-tokens // 4))
        self.fetch(request, tokens)

    def abandon(self, request: str) -> None:
        for node in self.receivers:
            self.do(node, node.receiving.abandon(request, self.now))

    def withdraw(self, request: str, comes_again: bool = False) -> None:
        for node in self.senders:
            self.do(node, node.sending.withdraw(request, "test", self.now, comes_again))

    # The network and the data planes:

    def do(self, node: Node, actions: list[Action]) -> None:
        if node.is_dead:
            return
        for action in actions:
            match action:
                case Reach(address=address) | Ask(address=address):
                    self.later("hello", lambda a=address: self._greet(node, a))
                case Send(peer=peer, body=body) if node.name[0] == "D":
                    self.later("message", lambda p=peer, b=body: self._to_sender(node, self.nodes[p], b))
                case Send(peer=incarnation, body=body):
                    receiver = next(n for n in self.nodes.values() if n.engine.agent.incarnation == incarnation)
                    self.later("message", lambda s=receiver, b=body: self._to_receiver(node, s, b))
                case Tell(message=message):
                    node.told.append(message)
                case _ if isinstance(action, Notable):
                    pass
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

    def go_on(self) -> None:
        """Nothing is held back any more."""
        self.hold.clear()
        self.run()

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
            self.do(node, node.receiving.tick(self.now))
            self.do(node, node.sending.tick(self.now))

    def _greet(self, node: Node, address: str) -> None:
        peer = self.nodes[address]
        if peer.is_dead:
            self.do(node, node.receiving.unreachable(address, "peer_unreachable", "dead", self.now))
            return
        self._parted(peer, node)
        self._parted(node, peer)
        session = answer(hello(node.engine), peer.engine)
        assert isinstance(session, Session)
        peer.accepted[node.engine.agent.incarnation] = session
        agreed = accept(welcome(session, peer.engine), node.engine, self.key)
        assert isinstance(agreed, Session)
        self.do(node, node.receiving.opened(address, agreed, self.now))

    def _to_sender(self, receiver: Node, sender: Node, body: object) -> None:
        if sender.is_dead or receiver.is_dead:
            return
        if isinstance(body, Hold):
            self.holds.append(body)
        incarnation = receiver.engine.agent.incarnation
        session = sender.accepted.get(incarnation)
        self.do(sender, hear_receiver(sender.sending, incarnation, body, session, sender.engine, self.now))

    def _to_receiver(self, sender: Node, receiver: Node, body: object) -> None:
        if sender.is_dead or receiver.is_dead:
            return
        machine = receiver.receiving
        self.do(receiver, hear_sender(machine, sender.engine.agent.incarnation, body, self.now, self.key))
        if isinstance(body, Refuse):
            self.refused.append(body)
            has_session = receiver.engine.agent.incarnation in sender.accepted  # has it greeted again since?
            if body.code == "no_session" and not has_session:
                self.do(receiver, machine.unreachable(sender.name, body.code, "test", self.now))

    def rescale(self, node: Node, scale: float, revision: int = 0) -> None:
        """All planes of an engine rank come under another scale; its agent does what `Engines` does."""
        pool, revision = node.engine.pool, revision or node.engine.revision + 1
        scales = tuple(Scales(plane.layer, plane.part, (scale,)) for plane in pool.planes)
        ended = node.sending.rescaled("test", self.now)
        node.engine = replace(node.engine, epoch=node.engine.epoch + 1, pool=rescaled(pool, scales), revision=revision)
        self.do(node, ended)
        others = self.receivers if node.name[0] == "P" else self.senders
        for other in others:
            if other.engine.agent.incarnation in node.accepted or node.engine.agent.incarnation in other.accepted:
                self._goodbyes.add((other.name, node.name))
                self.later("message", partial(self._parted, other, node))
            if node.accepted.pop(other.engine.agent.incarnation, None) is not None:
                self.do(node, node.sending.lost(other.engine.agent.incarnation))
        self.do(node, node.receiving.rescaled(node.engine, self.now))

    def _parted(self, node: Node, other: Node) -> None:
        """`other` said goodbye, before whatever it says next."""
        if (node.name, other.name) not in self._goodbyes:
            return
        self._goodbyes.discard((node.name, other.name))
        if node.accepted.pop(other.engine.agent.incarnation, None) is not None:
            self.do(node, node.sending.lost(other.engine.agent.incarnation))
        self.do(node, node.receiving.unreachable(other.name, "peer_left", "test", self.now))

    # Data planes:

    def _order(self, node: Node, is_all: bool = False) -> None:
        while node.orders:
            self._take_up(node, node.orders.popleft())
            if not is_all:
                break
        self._send(node)
        self._report(node)

    def _take_up(self, node: Node, order: SendingOrder | ReceivingOrder) -> None:
        take_up(order, node.send_orders, node.receive_orders)

    def _send(self, sender: Node) -> None:
        while not sender.orders and (leaving := sender.send_orders.begin()) is not None:
            self._begin(sender, leaving)

    def _begin(self, sender: Node, leaving: LeavingChunk) -> None:
        transfer = leaving.order.transfer
        offered = sender.sending.outgoing_transfers[transfer].offered
        assert offered in sender.sending.offers.values(), f"{transfer} reads blocks that were given back"
        self.moved.append((leaving.order.plan.pairs, True, sender.engine.pool))
        self.later("gather", lambda: self._gathered(sender, leaving))

    def _gathered(self, sender: Node, leaving: LeavingChunk) -> None:
        if sender.is_dead:
            return
        plan, incarnation = leaving.order.plan, leaving.order.incarnation
        assert Part(plan, plan.chunk(leaving.chunk), leaving.tables, is_sender=True).moves()
        key = (incarnation, leaving.lease.slot)
        assert key not in self.writing, f"slot {key} is written under two leases"
        self.writing[key] = leaving
        self.later("write", lambda: self._written(sender, leaving))
        sender.send_orders.gathered(leaving)
        self._report(sender)

    def _written(self, sender: Node, leaving: LeavingChunk) -> None:
        """The write has landed: the receiver may see the notice before or after the sender sees the end."""
        incarnation = leaving.order.incarnation
        del self.writing[incarnation, leaving.lease.slot]
        receiver = next(n for n in self.nodes.values() if n.engine.agent.incarnation == incarnation)
        notice = notice_of(leaving, sender.engine)
        self.notices.append(notice)
        self.later("notice", lambda: self._landed(receiver, notice))
        self.later("end", lambda: self._ended(sender, leaving, None))

    def _ended(self, sender: Node, leaving: LeavingChunk, failure: Failure) -> None:
        if not sender.is_dead:
            sender.send_orders.written(leaving, 0.0, failure)
            self._send(sender)
            self._report(sender)

    # What was asked of a receiver's before a notice came is done before that is looked at.

    def _landed(self, receiver: Node, notice: Notice) -> None:
        if receiver.is_dead:
            return
        self._order(receiver, is_all=True)
        if (landed := receiver.receive_orders.landed(notice)) is not None:
            self.moved.append((landed.order.plan.pairs, False, receiver.engine.pool))
            self.later("scatter", lambda: None if receiver.is_dead else self._scattered(receiver, landed))
        self._report(receiver)

    def _scattered(self, receiver: Node, landed: LandedChunk) -> None:
        order, notice = landed.order, landed.notice
        assert Part(order.plan, order.plan.chunk(notice.chunk), order.tables, is_sender=False).moves()
        self.scatters[order.transfer, notice.chunk] += 1
        receiver.receive_orders.scattered(landed, None)
        self._report(receiver)

    def _report(self, node: Node) -> None:
        if sent := node.send_orders.take_reports():
            self.later("report", lambda: None if node.is_dead else self.do(node, node.sending.hear(sent)))
        if received := node.receive_orders.take_reports():
            node.dropped += [each for each in received if isinstance(each, Dropped)]
            self.later("report", lambda: self.do(node, node.receiving.hear(received, self.now)))

    # What must be true:

    def answers(self, receiver: int = 0) -> dict[str, Done | Failed]:
        """The last word on each want; asserts that there is one word on each."""
        found: dict[str, Done | Failed] = {}
        for message in self.receivers[receiver].told:
            if isinstance(message, Done | Failed):
                assert message.request not in found, f"two answers: {found[message.request]}, {message}"
                found[message.request] = message
        return found

    def failure(self, request: str = "r", receiver: int = 0) -> Failed:
        answer = self.answers(receiver)[request]
        assert isinstance(answer, Failed), answer
        return answer

    def check_done(self, *requests: str) -> None:
        """Every receiver has what these asked for, and nothing is left over."""
        for receiver in range(len(self.receivers)):
            answers = self.answers(receiver)
            assert all(isinstance(answers[request], Done) for request in requests), answers
        self.check_rest()

    def released(self, sender: int = 0) -> dict[str, Released]:
        found: dict[str, Released] = {}
        for message in self.senders[sender].told:
            if isinstance(message, Released) and message.code != "unknown_offer":
                assert message.request not in found, f"released twice: {message}"
                found[message.request] = message
        return found

    def check_rest(self) -> None:
        """Nothing is left over anywhere: no slot, no transfer, no want, no offer."""
        for node in self.nodes.values():
            if node.is_dead:
                continue
            receiving, sending = node.receiving, node.sending
            assert not receiving.wants and not sending.offers and not sending.outgoing_transfers
            assert not sending._waiting and not sending._of_receiver and not receiving._awaiting_slots
            counts = receiving.slots.counts()
            assert counts.free == len(receiving.slots), counts
            assert node.send_orders.slots.free == len(node.send_orders.slots)
            assert not node.send_orders._open and not node.send_orders._awaiting_slots and not node.send_orders.moving
        assert all(times == 1 for times in self.scatters.values())
