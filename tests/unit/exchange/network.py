"""Real exchange machines wired back to back, with data planes and a network: all that is under way is a list of events.

Whoever drives the network decides which event happens next: tests/unit/exchange/world.py at random, or all orders in
turn, as tests/unit/sim/model.py does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbridge_proto.common import AgentCard, Blocks, Rank
from kvbridge_proto.engine import Done, Expect, Failed, Offer, Released, Want
from kvbridge_proto.peer import (
    BlockTables,
    Cancel,
    Check,
    Checked,
    Claim,
    Drained,
    FabricCard,
    Failing,
    Goodbye,
    Grant,
    Hold,
    Notice,
    Ready,
    Refuse,
    Renew,
    Settled,
)
from kvbridge_proto.pool import Pool
from msgspec.structs import replace

from kvbridge.dataplane.orders import LandedChunk, LeavingChunk, OrderedReceive, ReceiveOrders, SendOrders
from kvbridge.exchange.actions import Action, Ask, Notable, Reach, Send, Tell
from kvbridge.exchange.orders import (
    AwaitedPull,
    Credit,
    Failure,
    Fill,
    Filled,
    Lend,
    Progress,
    ReceiveOrder,
    ReceivingOrder,
    ReceivingReport,
    SendingOrder,
    SendingReport,
    SendOrder,
    StopReceiving,
    StopSending,
    Warm,
    WarmPull,
)
from kvbridge.exchange.receiver import Receiver
from kvbridge.exchange.route import Site
from kvbridge.exchange.sender import Sender
from kvbridge.exchange.session import AttachedEngine, Session, accept, answer, hello, welcome
from kvbridge.exchange.transfer import OpenWant
from kvbridge.loopback.messages import number_of
from kvbridge.routes.registry import sending_routes
from kvbridge.routes.slots.receive_slots import ReceiveSlots
from kvbridge.state_machines import SlotState
from testing.halves import by_slots, make_receiver

SLOT_BYTES = 1024
NOTHING: Any = object()  # for an engine's memory
REST = "the rest of a write that failed"  # in a slot: only its chunk's digest tells
IN_ORDER = {"message": 3, "order": 2, "report": 2}  # those happen oldest first whose first so many fields are equal

Event = tuple[Any, ...]  # its kind, the node where it happens, and what it is about


class Wrong(AssertionError):
    """Something that must not be."""


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
    more: bool = False,
) -> Offer:
    """So many blocks of the first group from entry `first` on, or these."""
    if isinstance(blocks, int):
        blocks = (Blocks(0, first, tuple(range(first, first + blocks))),) if blocks else ()
    rest: dict[str, Any] = {"is_last": last, "hold_s": 100.0, "first_token": first_token}
    rest |= {"number": number_of(request), "is_more": more}
    return Offer(rendezvous=rendezvous or request, request=request, tokens=tokens, blocks=blocks, **rest)


def want_of(
    request: str,
    end: int,
    blocks: tuple[Blocks, ...] | None = None,
    first: int = 0,
    rendezvous: str = "",
    deadline: float = 50.0,
    sender: str = "P0",
    **more: Any,
) -> Want:
    """In these blocks, or in those of the first group that are numbered like the entries."""
    entries = range(first // 16, -(-end // 16))
    blocks = (Blocks(0, entries.start, tuple(entries)),) if blocks is None else blocks
    rest: dict[str, Any] = {"sender": sender, "first_token": first, "end_token": end, "deadline_s": deadline}
    rest |= {"number": number_of(request), "request": request, "rendezvous": rendezvous or request}
    return Want(blocks=blocks, **rest, **more)


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
        case Warm() | WarmPull() | AwaitedPull():
            pass
        case _:
            raise AssertionError(order)


class Numbers:
    """Names that depend on nothing but how many there were before: a copy goes on alike."""

    def __init__(self) -> None:
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def token(self) -> bytes:
        return self.count.to_bytes(16, "big")


@dataclass
class Node:
    """One agent: both machines, and what its shell and its data plane hold. P sends, D receives."""

    name: str
    engine: AttachedEngine
    receiving: Receiver
    sending: Sender
    send_orders: SendOrders
    receive_orders: ReceiveOrders = field(default_factory=ReceiveOrders)
    accepted: dict[str, Session] = field(default_factory=dict)  # by incarnation of the receiver
    told: list[object] = field(default_factory=list)
    answers: dict[str, Done | Failed] = field(default_factory=dict)  # the word on each want, until it comes again
    contents: dict[int, object] = field(default_factory=dict)  # by slot: the (transfer, chunk) that landed last
    is_dead: bool = False
    begun: set[int] = field(default_factory=set)  # offers of its engine that will grow

    @property
    def slots(self) -> ReceiveSlots:
        return by_slots(self.receiving).slots

    @property
    def is_sender(self) -> bool:
        return self.name[0] == "P"

    @property
    def incarnation(self) -> str:
        return self.engine.agent.incarnation


class Network:
    """Agents P0, P1, … in front of engines of these pools, which send, and D0, D1, …, which receive.

    It checks that no slot is written under two leases at once, or under one that is over; that a scatter finds its
    chunk in its slot, and its want open, as zeros do; that no blocks are read once they are given back; and that every
    want is answered once, with Done only when all its chunks have been scattered and its zeros are written.
    """

    def __init__(self, senders: Sequence[Pool], receivers: Sequence[Pool], slots: int, local: int) -> None:
        self.now = 0.0
        self.senders_key = ""  # what senders prove to have
        self.numbers = Numbers()
        self.events: list[Event] = []
        self.scatters: Counter[tuple[str, int]] = Counter()  # by transfer and chunk
        self.filled: set[str] = set()  # requests that have their zeros
        self.nodes: dict[str, Node] = {}
        for letter, pools in (("P", senders), ("D", receivers)):
            ranks = tuple(Rank(tp_rank=r, pp_rank=0, address=f"{letter}{r}") for r in range(len(pools)))
            for r, pool in enumerate(pools):
                self._add(f"{letter}{r}", pool, ranks, slots, local)

    def _add(self, name: str, pool: Pool, ranks: tuple[Rank, ...], slots: int, local: int) -> None:
        agent = AgentCard(name=name, incarnation=f"incarnation-{name}", address=name, version="1")
        card = FabricCard(
            kind="world", name=agent.incarnation, descriptor=b"", base=0, slot_bytes=SLOT_BYTES, slots=slots
        )
        receiving = make_receiver(slots, self.numbers.name, self.numbers.token)
        engine = AttachedEngine(agent, 1, pool, Site(card), ("sum",), ranks)
        self.nodes[name] = Node(name, engine, receiving, Sender(sending_routes), SendOrders(local))

    @property
    def senders(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.is_sender]

    @property
    def receivers(self) -> list[Node]:
        return [node for node in self.nodes.values() if not node.is_sender]

    @property
    def sender(self) -> Node:
        """The first of them."""
        return self.nodes["P0"]

    @property
    def receiver(self) -> Node:
        return self.nodes["D0"]

    # What engines say:

    def offer(self, *said: Any, at: Node | None = None, **more: Any) -> None:
        """All senders' engines do, or this one's alone. The rest is as for `offer_of`.

        It is more of an offer if the engine has begun one of that name and has not said its last word on it.
        """
        message = offer_of(*said, **more)
        for node in self.senders if at is None else [at]:
            is_more = message.is_more or message.number in node.begun
            (node.begun.discard if message.is_last else node.begun.add)(message.number)
            self.do(node, node.sending.offer(replace(message, is_more=is_more), node.engine, self.now))

    def expect(self, request: str, rendezvous: str = "", sender: str = "P0") -> None:
        message = Expect(number=number_of(request), rendezvous=rendezvous or request, sender=sender)
        for node in self.receivers:
            self.do(node, node.receiving.expect(message, self.now))

    def want(self, *said: Any, at: Node | None = None, **more: Any) -> None:
        """All receivers' engines do, or this one's alone. The rest is as for `want_of`."""
        message = want_of(*said, **more)
        for node in self.receivers if at is None else [at]:
            node.answers.pop(message.request, None)
            self.filled.discard(message.request)
            self.do(node, node.receiving.want(message, node.engine, self.now))

    def abandon(self, request: str) -> None:
        for node in self.receivers:
            self.do(node, node.receiving.abandon(number_of(request), self.now))

    def withdraw(self, request: str, comes_again: bool = False) -> None:
        for node in self.senders:
            node.begun.discard(number_of(request))
            self.do(node, node.sending.withdraw(number_of(request), "test", self.now, comes_again))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for node in self.nodes.values():
            self.do(node, (node.sending if node.is_sender else node.receiving).tick(self.now))

    # What happens next:

    def next_of(self, event: Event) -> int:
        """The index of what must happen before this event, or of itself: links and queues keep their order."""
        if (fields := IN_ORDER.get(event[0])) is None:
            return self.events.index(event)
        return next(i for i, each in enumerate(self.events) if each[:fields] == event[:fields])

    def happen(self, index: int) -> None:
        kind, name, *what = self.events.pop(index)
        node = self.nodes[name]
        if kind == "write" or not node.is_dead:  # what an agent had posted before it died may land
            getattr(self, f"_{kind}")(node, *what)

    def settle(self, lagging: str = "") -> None:
        """Data planes do what they were asked, and are heard; except this node's."""
        while due := [each for each in self.events if each[0] in ("order", "report") and each[1] != lagging]:
            self.happen(self.next_of(due[0]))

    def under_way(self, kind: str, at: Node | None = None) -> list[Any]:
        """What events of this kind are about."""
        return [event[2] for event in self.events if event[0] == kind and (at is None or event[1] == at.name)]

    # Agents:

    def do(self, node: Node, actions: Sequence[Action]) -> None:
        """Carry out what its machines ask for."""
        if node.is_dead:
            return
        for action in actions:
            match action:
                case Reach(address=address) | Ask(address=address):
                    self.greet(node, address)
                case Send(peer=peer, body=body):
                    to = self._of(peer).name if node.is_sender else peer
                    self.events.append(("message", node.name, to, body))
                case Tell(message=message):
                    self._tell(node, message)
                case _ if isinstance(action, Notable):
                    pass
                case _:
                    self.events.append(("order", node.name, action))

    def greet(self, node: Node, address: str) -> None:
        self.events.append(("hello", node.name, address))

    def _of(self, incarnation: str) -> Node:
        return next(node for node in self.nodes.values() if node.incarnation == incarnation)

    def _tell(self, node: Node, message: object) -> None:
        match message:
            case Done(request=request) | Failed(request=request):
                if request in node.answers:
                    raise Wrong(f"two answers: {node.answers[request]}, {message}")
                if getattr(message, "unfilled_layers", 0) and request not in self.filled:
                    raise Wrong(f"{request} is done without its zeros")
                node.answers[request] = message
            case Released(number=number, request=request):
                if any(leaving.order.number == number for leaving in self.under_way("gather", node)):
                    raise Wrong(f"{request} is released while it is read")
        node.told.append(message)

    def part(self, node: Node, other: Node, code: str) -> None:
        """`node` learns that its session with `other` is over."""
        if not node.is_sender:
            self.do(node, node.receiving.unreachable(other.name, code, "test", self.now))
        elif node.accepted.pop(other.incarnation, None) is not None:
            self.do(node, node.sending.lost(other.incarnation))

    def lose_link(self, receiver: Node, sender: Node) -> None:
        """Both learn of it."""
        self.part(sender, receiver, "peer_lost")
        self.part(receiver, sender, "peer_lost")

    def _hello(self, node: Node, address: str) -> None:
        peer = self.nodes[address]
        if peer.is_dead:
            self.do(node, node.receiving.unreachable(address, "peer_unreachable", "dead", self.now))
            return
        self._part_first(peer, node)
        self._part_first(node, peer)
        session = answer(hello(node.engine), peer.engine)
        assert isinstance(session, Session)
        peer.accepted[node.incarnation] = session
        agreed = accept(welcome(session, peer.engine), node.engine, self.senders_key)
        assert isinstance(agreed, Session)
        self.do(node, node.receiving.opened(address, agreed, self.now))

    def _part_first(self, node: Node, other: Node) -> None:
        """A goodbye of `other` comes before whatever it says next."""
        while (goodbye := ("message", other.name, node.name, Goodbye())) in self.events:
            self.events.remove(goodbye)
            self.part(node, other, "peer_left")

    def _message(self, node: Node, address: str, body: object) -> None:
        peer = self.nodes[address]
        if peer.is_dead:
            return
        if isinstance(body, Goodbye):
            self.part(peer, node, "peer_left")
        elif node.is_sender:
            self.do(peer, self._from_sender(node, peer, body))
            if isinstance(body, Refuse) and body.code == "no_session" and peer.incarnation not in node.accepted:
                self.do(peer, peer.receiving.unreachable(node.name, body.code, "test", self.now))
        else:
            self.do(peer, self._from_receiver(node, peer, body))

    def _from_receiver(self, receiver: Node, sender: Node, body: object) -> list[Action]:
        machine, incarnation, session = sender.sending, receiver.incarnation, sender.accepted.get(receiver.incarnation)
        match body:
            case Claim() if session is None:
                return [Send(incarnation, Refuse(code="no_session", reasons=("test",), about=body.transfer))]
            case Cancel() if session is None:
                is_over = machine.renounce(incarnation, body)
                return [Send(incarnation, Drained(transfer=body.transfer))] if is_over else []
            case _ if session is None:
                return []
            case Claim():
                return machine.claim(body, session, sender.engine, self.now)
            case Cancel():
                return machine.cancel(incarnation, body, self.now)
            case Hold(rendezvous_ids=rendezvous_ids):
                return machine.hold(incarnation, rendezvous_ids, self.now)
            case Grant() | Settled() | Renew() | Check():
                return machine.on_message(incarnation, body)
        raise AssertionError(body)

    def _from_sender(self, sender: Node, receiver: Node, body: object) -> list[Action]:
        machine, incarnation, now, key = receiver.receiving, sender.incarnation, self.now, self.senders_key
        match body:
            case Failing(transfer=transfer, code=code, reason=reason):
                return machine.failing(incarnation, transfer, code, reason, now, key)
            case Drained(transfer=transfer, code=code, reason=reason):
                return machine.drained(incarnation, transfer, code, reason, now, key)
            case Refuse(about=transfer, code=code, reasons=reasons):
                return machine.drained(incarnation, transfer, code, "; ".join(reasons), now, key)
            case BlockTables() | Checked() | Ready():
                return machine.on_message(incarnation, body, now, key)
        raise AssertionError(body)

    # Data planes:

    def _order(self, node: Node, order: SendingOrder | ReceivingOrder) -> None:
        if isinstance(order, Fill):
            self.events.append(("fill", node.name, order, node.receive_orders.begin_read(order.transfer)))
        else:
            take_up(order, node.send_orders, node.receive_orders)
        self.advance(node)

    def _fill(self, node: Node, fill: Fill, ordered: OrderedReceive) -> None:
        wanted = node.receiving._filled_by.get(fill.transfer)
        if wanted is None or wanted.want.request in node.answers:
            raise Wrong(f"{fill.request} gets zeros after it was answered")
        self.filled |= {fill.request} if ordered.stop is None else set()
        node.receive_orders.report(Filled(fill.transfer, None))
        node.receive_orders.end_move(ordered)
        self.advance(node)

    def advance(self, node: Node) -> None:
        """Its data plane begins what it can, and reports."""
        while not self.under_way("order", node) and (leaving := node.send_orders.begin()) is not None:
            self._begin_gather(node, leaving)
        if reports := (node.send_orders if node.is_sender else node.receive_orders).take_reports():
            self.queue_reports(node, reports)

    def queue_reports(self, node: Node, reports: Sequence[SendingReport] | Sequence[ReceivingReport]) -> None:
        self.events.append(("report", node.name, tuple(reports)))

    def _begin_gather(self, sender: Node, leaving: LeavingChunk) -> None:
        out = sender.sending.outgoing_transfers.get(leaving.order.transfer)
        offered = None if out is None else out.offered
        if offered is None or sender.sending.offers.get(offered.number) is not offered:
            raise Wrong(f"{leaving.order.transfer} is read though its blocks were given back")
        self.events.append(("gather", sender.name, leaving))

    def _gather(self, sender: Node, leaving: LeavingChunk) -> None:
        into = leaving.order.incarnation, leaving.lease.slot
        if any((write.order.incarnation, write.lease.slot) == into for write in self.under_way("write")):
            raise Wrong(f"slot {into} is written under two leases")
        self.events.append(("write", sender.name, leaving, False))
        sender.send_orders.gathered(leaving)
        self.advance(sender)

    def _write(self, sender: Node, leaving: LeavingChunk, is_late: bool) -> None:
        """The write has landed: the receiver may see the notice before or after the sender sees the end."""
        self.put(sender, leaving)
        self.events.append(("end", sender.name, leaving, is_late))

    def put(self, sender: Node, leaving: LeavingChunk, is_whole: bool = True) -> None:
        """A chunk is in its slot, and its notice on its way; or only a part is there."""
        receiver, transfer, lease = self._of(leaving.order.incarnation), leaving.order.transfer, leaving.lease
        slot = receiver.slots._slots[lease.slot]
        is_out = slot.state in (SlotState.LENT, SlotState.QUARANTINED)
        if not is_out or (slot.generation, slot.transfer) != (lease.generation, transfer):
            raise Wrong(f"{transfer} writes {lease}, which is {slot}")
        receiver.contents[lease.slot] = (transfer, leaving.chunk) if is_whole else "half of it"
        if is_whole:
            self.events.append(("notice", receiver.name, notice_of(leaving, sender.engine)))

    def _end(self, sender: Node, leaving: LeavingChunk, is_late: bool, failure: Failure = None) -> None:
        sender.send_orders.written(leaving, 0.0, failure, is_late)
        self.advance(sender)

    def _notice(self, receiver: Node, notice: Notice) -> None:
        """What was asked before it came is done before it is looked at."""
        while self.under_way("order", receiver):
            self.happen(self.next_of(("order", receiver.name)))
        if (landed := receiver.receive_orders.landed(notice)) is not None:
            self._begin_scatter(receiver, landed)
        self.advance(receiver)

    def _begin_scatter(self, receiver: Node, landed: LandedChunk) -> None:
        self.events.append(("scatter", receiver.name, landed))

    def _scatter(self, receiver: Node, landed: LandedChunk) -> None:
        transfer, notice = landed.order.transfer, landed.notice
        found = receiver.contents.get(notice.slot)
        if found not in ((transfer, notice.chunk), REST):
            raise Wrong(f"slot {notice.slot} has {found} for {notice.chunk}")
        incoming = receiver.receiving.incoming_transfers.get(transfer)
        if incoming is None or incoming.wanted.want.request in receiver.answers:
            raise Wrong(f"{transfer} is scattered after its want was answered")
        if found == REST:  # what nobody but the digest can see
            receiver.receive_orders.scattered(landed, ("digest_mismatch", "test"))
        else:
            self.scatters[transfer, notice.chunk] += 1
            receiver.receive_orders.scattered(landed, None)
        self.advance(receiver)

    def _report(self, node: Node, reports: Sequence[SendingReport] | Sequence[ReceivingReport]) -> None:
        if node.is_sender:
            return self.do(node, node.sending.on_reports(reports))
        by = {name: each.wanted for name, each in node.receiving.incoming_transfers.items()} | node.receiving._filled_by
        wants = [by.get(report.transfer) for report in reports]
        needed = {each.want.request: _chunks(each) for each in wants if each is not None}
        self.do(node, node.receiving.on_reports(reports, self.now))
        for request, chunks in needed.items():
            if isinstance(node.answers.get(request), Done) and not chunks <= self.scatters.keys():
                raise Wrong(f"{request} is done without {chunks - self.scatters.keys()}")

    # Ends:

    def check_rest(self) -> None:
        """Nothing is left over anywhere: no slot, no transfer, no want, no offer, no order."""
        for node in self.nodes.values():
            if node.is_dead:
                continue
            receiving, sending, send, receive = node.receiving, node.sending, node.send_orders, node.receive_orders
            half = by_slots(receiving)
            left = {
                "wants": [*receiving.wants, *receiving.incoming_transfers, *receiving._filled_by],
                "unconfirmed": half.unconfirmed._of,
                "slots": len(half.slots) - half.slots.counts().free + len(send.slots) - send.slots.free,
                "offers": [*sending.offers, *sending.outgoing_transfers, *sending._waiting, *sending._of_receiver],
                "orders": [*send.open, *receive._open],
                "queues": len(half.awaiting) + len(send._awaiting),
                "moving": send.moving + receive.lent + receive.scattering,
            }
            if any(left.values()):
                raise Wrong(f"{node.name} is left with {left}")
        if any(times > 1 for times in self.scatters.values()):
            raise Wrong(f"scattered more than once: {self.scatters}")


def _chunks(wanted: OpenWant) -> set[tuple[str, int]]:
    """All that its rows come in."""
    transfers = wanted.incoming_transfers.items()
    return {(name, chunk) for name, incoming in transfers for chunk in range(incoming.plan.chunks)}
