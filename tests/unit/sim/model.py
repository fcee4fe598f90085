"""One or two wants between one sender and one receiver, with the real machines of both, as states for a search.

Everything that may happen next is a move. The adversary's moves (cuts, restarts, writes that fail or are late) may be
made a limited number of times. One of them is a lie: a chunk under way is written again under a lease that was meant
for another. A state knows everything under way, and what the exchange and the data plane of each side have told each
other.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from operator import attrgetter
from typing import Any, ClassVar, cast

from kvbridge_proto.peer import SlotLease
from msgspec import Struct
from msgspec.structs import replace as changed

from kvbridge.dataplane.orders import LeavingChunk, SendOrders
from kvbridge.exchange.orders import Fill, ReceiveOrder, SendOrder
from kvbridge.exchange.sender import Sender
from kvbridge.exchange.session import AttachedEngine, Session
from kvbridge.geometry.plan import Plan
from kvbridge.geometry.tokens import BlockTable
from kvbridge.geometry.unfilled import Filling
from kvbridge.routes.registry import sending_routes
from kvbridge.values import Value
from testing.halves import by_slots
from tests.unit.exchange.network import NOTHING, REST, Event, Network, Node
from tests.unit.exchange.world import make_pool

Move = tuple[Any, ...]
VALUES = (AttachedEngine, Session, Plan, BlockTable, SendOrder, ReceiveOrder, Fill, Filling, Enum)
# What tells states apart:
SLOT = attrgetter("state", "generation", "transfer")
INCOMING = attrgetter("state", "ready", "placed", "is_ordered", "is_drained")
OUTGOING = attrgetter(
    *("transfer", "state", "lent", "shipped", "progress", "announced", "is_ordered", "has_read", "is_lost", "early")
)
OFFER, ENDED = attrgetter("request", "want", "over"), attrgetter("rendezvous", "want")
DISPATCH = attrgetter("transfer", "turn", "next_chunk", "gathering", "writing", "is_broken")
RECEIPT = attrgetter("transfer", "moving")
LEAVING = attrgetter("order.transfer", "chunk", "lease.slot", "lease.generation")
WRITTEN = attrgetter("transfer", "chunk", "slot", "generation")
SCATTER = attrgetter("order.transfer", "notice.chunk", "notice.slot")
ABOUT: dict[str, Callable[[Any], object]] = {
    "order": lambda order: (type(order), *(getattr(order, name, None) for name in ("transfer", "leases", "ready"))),
    "gather": LEAVING,
    "write": LEAVING,
    "end": LEAVING,
    "scatter": SCATTER,
    "fill": attrgetter("transfer"),
}


class Copier(pickle.Pickler):
    """Copies a state as pickle does, many times faster than copy.deepcopy. Values are kept aside: nobody edits them.

    So are classes, which pickle would look up by name for each copy.
    """

    kept: ClassVar[dict[type, bool]] = {}

    def __init__(self, file: io.BytesIO, idle: Sequence[object]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.idle, self.values = set(map(id, idle)), list[object]()

    def reducer_override(self, value: object) -> Any:
        kind = type(value)
        if (is_kept := self.kept.get(kind)) is None:
            is_message = issubclass(kind, Struct) and not issubclass(kind, Value)  # a Value may hold what is edited
            is_kept = self.kept[kind] = is_message or issubclass(kind, (*VALUES, type))
        if not (is_kept or id(value) in self.idle) or value is value_of:
            return NotImplemented
        self.values.append(value)
        return value_of, (len(self.values) - 1,)


class Copied(pickle.Unpickler):
    """The copy, with the very same values."""

    def __init__(self, file: io.BytesIO, values: Sequence[object]) -> None:
        super().__init__(file)
        self._values = values

    def find_class(self, module: str, name: str) -> Any:
        return self._values.__getitem__ if name == value_of.__name__ else super().find_class(module, name)


def value_of(number: int) -> object:
    """Stands in a written state for a value that was kept aside."""
    raise NotImplementedError


class State(Network):
    """Where both machines and everything between them are: first, all is offered and wanted and nothing said yet.

    The exchange and the data plane of `lag` ("receiver", "sender") hear each other later. The receiver has so many
    draft layers, and the sender none.
    """

    def __init__(
        self, wants: int, tokens: int, slots: int, local: int, budget: dict[str, int], lag: str = "", drafts: int = 0
    ) -> None:
        receiver = make_pool("decode", 0, 1, 16, layers=2 + drafts, drafts=drafts)
        super().__init__([make_pool("prefill", 0, 1, 4)], [receiver], slots, local)
        self.budget = budget
        self.lagging = {"receiver": "D0", "sender": "P0"}.get(lag, "")
        self.incarnations = 1
        self.remains: list[int] = []  # slots of writes that failed, the rest of which may land yet
        for i in range(wants):
            self.offer(f"r{i}", tokens, -(-tokens // 4))
            self.want(f"r{i}", tokens, deadline=100.0)

    def copies(self) -> Iterator[State]:
        """Copies of all that changes, made as they are asked for; values stay the same objects."""
        receiver, sender = self.receiver, self.sender
        idle = receiver.sending, receiver.send_orders, sender.receiving, sender.receive_orders
        written = io.BytesIO()
        copier = Copier(written, (NOTHING, *idle))
        copier.dump(self)
        while True:
            written.seek(0)
            yield cast(State, Copied(written, copier.values).load())

    @property
    def key(self) -> object:
        """Equal for states that go on alike."""
        receiver, sender = self.receiver, self.sender
        receiving, sending, orders = receiver.receiving, sender.sending, sender.send_orders
        outgoing = sending.outgoing_transfers.values()
        incoming = [(t, each.wanted.state, each) for t, each in receiving.incoming_transfers.items()]
        return (
            tuple(map(SLOT, by_slots(receiving).slots._slots)),
            tuple(by_slots(receiving).slots._free),
            tuple((transfer, state, *INCOMING(each)) for transfer, state, each in incoming),
            tuple((name, wanted.state, wanted.filling) for name, wanted in receiving.wants.items()),
            (tuple(receiving._filled_by), frozenset(self.filled)),
            tuple(by_slots(receiving).unconfirmed._of.items()),
            tuple(by_slots(receiving).unconfirmed._asked.items()),
            bool(receiving._senders.open),
            tuple((*OUTGOING(out), out.offered is not None) for out in outgoing),
            tuple((*OFFER(offer), len(offer.served)) for offer in sending.offers.values()),
            tuple((*ENDED(ended), tuple(sorted(ended.heard))) for ended in sending._rendezvous._by_age),
            tuple(
                (*DISPATCH(each), each.stop is None, tuple(each.ready), tuple(each.leases))
                for each in orders.open.values()
            ),
            tuple((turn, name) for each in orders._awaiting._of.values() for turn, _, name in sorted(each._heap)),
            tuple(
                (*RECEIPT(each), each.stop is None, *each.leases.items(), frozenset(each.missing))
                for each in receiver.receive_orders._open.values()
            ),
            # what happens at different places has no order
            tuple(_about(event) for event in sorted(self.events, key=lambda event: event[:2])),
            (tuple(self.budget.items()), self.incarnations, len(sender.accepted)),
            tuple((name, type(answer)) for name, answer in receiver.answers.items()),
            (tuple(sorted(receiver.contents.items())), tuple(self.remains), frozenset(self.scatters)),
        )

    # What may happen:

    def moves(self) -> list[Move]:
        budget = {kind for kind, left in self.budget.items() if left}
        found: list[Move] = [(event[0], i) for i, event in enumerate(self.events) if self._may_happen(i, event)]
        for i, (kind, _, what, *rest) in enumerate(self.events):
            if kind == "write":
                found += [("fails", i)] if "fails" in budget else []
                found += [("late", i)] if "late" in budget and rest == [False] else []
            if kind in ("gather", "write", "end") and "lie" in budget and _unused(what):
                found.append(("lie", i))
            if kind == "notice" and "repeat" in budget:
                found.append(("repeat", i))
                budget.discard("repeat")
        found += [("remain", i) for i in range(len(self.remains))] if "remain" in budget else []
        return found + [(kind,) for kind in ("cut", "restart", "abandon", "withdraw") if kind in budget]

    def _may_happen(self, index: int, event: Event) -> bool:
        """Here a notice leaves when the sender sees the end of its write: there would be too many states otherwise."""
        if event[0] == "notice":
            return WRITTEN(event[2]) not in map(LEAVING, self.under_way("end"))
        return self.next_of(event) == index

    def following(self, moves: Sequence[Move]) -> Iterator[State]:
        """The state that follows from each. This one becomes the last of them."""
        for move, state in zip(moves[:-1], self.copies(), strict=False):
            state.make(move)
            yield state
        for move in moves[-1:]:
            self.make(move)
            yield self

    def make(self, move: Move) -> None:
        kind, *what = move
        if kind in self.budget:
            self.budget[kind] -= 1
            getattr(self, "_" + kind)(*what)
        else:
            self.happen(*what)
        self.settle(self.lagging)

    def greet(self, node: Node, address: str) -> None:
        """Once, however many wants ask for it: there would be too many states otherwise."""
        if not self.under_way("hello"):
            super().greet(node, address)

    def queue_reports(self, node: Node, reports: Sequence[Any]) -> None:
        """Each is heard by itself, so that other things may happen in between."""
        for each in reports:
            super().queue_reports(node, [each])

    # The adversary:

    def _abandon(self) -> None:
        for wanted in list(self.receiver.receiving.wants.values()):
            self.abandon(wanted.want.request)

    def _withdraw(self) -> None:
        for offered in list(self.sender.sending.offers.values()):
            self.withdraw(offered.request)

    def _cut(self) -> None:
        self.events = [event for event in self.events if event[0] != "message"]
        self.part(self.sender, self.receiver, "peer_lost")
        self.part(self.receiver, self.sender, "peer_lost")

    def _restart(self) -> None:
        """The sender dies; what it had posted has landed before, or never will."""
        node = self.sender
        self.events = [event for event in self.events if event[0] != "message" and event[1] != node.name]
        self.incarnations += 1
        before = {*node.sending._before, node.incarnation}
        agent = changed(node.engine.agent, incarnation=f"incarnation-{self.incarnations}")
        node.engine = replace(node.engine, agent=agent)
        node.accepted.clear()
        node.sending, node.send_orders = Sender(sending_routes, before=before), SendOrders(len(node.send_orders.slots))
        self.part(self.receiver, node, "peer_lost")

    def _fails(self, index: int) -> None:
        _, _, leaving, is_late = self.events.pop(index)
        self.put(self.sender, leaving, is_whole=False)
        if self.budget.get("remain"):
            self.remains.append(leaving.lease.slot)
        self._end(self.sender, leaving, is_late, ("write_failed", "test"))

    def _remain(self, index: int) -> None:
        """A kernel delivers the rest of a write that failed, whoever has the slot by now."""
        self.receiver.contents[self.remains.pop(index)] = REST

    def _late(self, index: int) -> None:
        kind, name, leaving, _ = self.events[index]
        self.events[index] = (kind, name, leaving, True)
        self.sender.send_orders.late(leaving, "write_timeout", "test")
        self.advance(self.sender)

    def _repeat(self, index: int) -> None:
        self.events.append(self.events[index])

    def _lie(self, index: int) -> None:
        """The same chunk again, under another lease; this write is over at once."""
        leaving = self.events[index][2]
        self.put(self.sender, changed(leaving, lease=_unused(leaving).popleft()))

    # Ends:

    def check_rest(self) -> None:
        """Nothing more happens by itself: deadlines pass, senders confirm, and then nothing may be left."""
        calm = next(self.copies())
        calm.budget = {}
        for _ in range(3):
            calm.pass_time(200.0)
            while moves := calm.moves():
                calm.make(moves[0])
        super(State, calm).check_rest()


def _unused(leaving: LeavingChunk) -> deque[SlotLease]:
    """Leases of its transfer under which nothing has left."""
    return leaving.ordered.leases


def _about(event: Event) -> Event:
    kind, name, what, *rest = event
    return (kind, name, ABOUT[kind](what) if kind in ABOUT else what, *rest)
