"""The routes through slots: the receiver lends slots for what is ready, the sender orders that they are written. Pure.

A slot that is lent when its transfer ends stays in quarantine until its sender, or a successor that knows it to be
dead, confirms that it is not written any more (routes/slots/receive_slots.py).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvbridge_proto.peer import Cancel, Claim, Grant, ProcessCard, Ready, RouteToReceiver, RouteToSender, SlotLease

from ...errors import PeerError
from ...exchange.actions import Action, Carried, Reach, Send, WatchProcess
from ...exchange.block_tables import ready_chunks
from ...exchange.containers import PeerQueue
from ...exchange.orders import (
    Credit,
    Gathered,
    Landed,
    Lend,
    Progress,
    ReceiveOrder,
    RouteReport,
    SendOrder,
    Sent,
    Shipped,
    Warm,
)
from ...exchange.session import Session
from ...exchange.transfer import (
    IncomingTransfer,
    OpenTransfers,
    OpenWant,
    OutgoingTransfer,
    ReceivingRoute,
    SendingRoute,
    Writers,
)
from ...geometry.plan import Plan
from ...state_machines import TransferState
from ...values import Value
from .receive_slots import ReceiveSlots

MOST_LEASES = 4096  # unused, of one receiver: as many slots as an agent can have
MOST_ASKED = 4096  # agents that were asked; four times as many as can be dialled at once
CONFIRM_AGAIN_S = 5.0  # between attempts to reach a sender that must confirm quarantined slots


class SlotSending(SendingRoute):
    """All transfers by routes through slots. `unused`: leases of each receiver under which nothing was shipped yet."""

    def __init__(self) -> None:
        self.unused: Counter[str] = Counter()

    def begin(self, claim: Claim, session: Session, plan: Plan, now: float) -> OutgoingBySlots:
        out = OutgoingBySlots(claim.transfer, session, plan, claim, now, route=self)
        if too_many := out.excess(claim.leases):
            raise PeerError("bad_lease", too_many)
        out.lend(claim.leases)
        return out


@dataclass(slots=True, eq=False, kw_only=True)
class OutgoingBySlots(OutgoingTransfer):
    route: SlotSending
    early: tuple[SlotLease, ...] = ()  # lent before the data plane had an order
    lent: int = 0
    shipped: int = 0
    progress: int = 0  # chunks the data plane was told are ready
    announced: int = 0  # chunks the receiver was told are ready

    @property
    def chunks_done(self) -> int:
        return self.shipped

    @property
    def is_reading(self) -> bool:
        return self.is_ordered and not self.has_read

    def flow(self) -> list[Action]:
        """Order the data plane to send it."""
        offered, claim = self.offered, self.claim
        assert offered is not None
        self.is_ordered = True
        what = self.transfer, offered.engines_number, offered.request, self.incarnation, self.plan
        order = SendOrder(*what, claim.token, claim.receiver_epoch, self.session.digest)
        early = [Credit(self.transfer, self.early)] if self.early else []
        self.early = ()
        return [order, *early, *self.grow()]

    def grow(self) -> list[Action]:
        """Tell the data plane that more chunks are computed, and the receiver, if it has not lent slots for them."""
        offered = self.offered
        if self.state is not TransferState.FLOWING or offered is None:
            return []
        ready = ready_chunks(self.plan, offered.tokens, offered.is_last)
        if ready <= self.progress:
            return []
        self.progress = ready
        actions: list[Action] = [Progress(self.transfer, offered.tables, ready, offered.fence)]
        if ready > max(self.announced, self.lent):
            self.announced = ready
            actions.append(Send(self.incarnation, Ready(transfer=self.transfer, chunks=ready)))
        return actions

    def on_message(self, body: RouteToSender) -> list[Action]:
        if not isinstance(body, Grant) or not self.is_open:
            return []
        if too_many := self.excess(body.leases):
            self.failure = "bad_lease", too_many
            return []
        return self.lend(body.leases)

    def excess(self, leases: Sequence[SlotLease]) -> str:
        """Why these leases are more than it needs or its receiver can have; "" if they are not."""
        if not leases:
            return ""
        if (lent := self.lent + len(leases)) > self.plan.chunks:
            return f"leases: {lent} for {self.plan.chunks} chunks"
        unused = self.route.unused[self.incarnation] + len(leases)
        return f"leases: {unused} unused, at most {MOST_LEASES}" if unused > MOST_LEASES else ""

    def lend(self, leases: tuple[SlotLease, ...]) -> list[Action]:
        """The receiver lends more slots."""
        self.lent += len(leases)
        self.route.unused[self.incarnation] += len(leases)
        if self.is_ordered:
            return [Credit(self.transfer, leases)]
        self.early += leases
        return []

    def on_report(self, report: RouteReport) -> list[Action]:
        match report:
            case Shipped(chunks=chunks, size_bytes=size_bytes):
                self.shipped += chunks
                self.route.unused[self.incarnation] -= chunks
                return [Carried(self.session, chunks, size_bytes)]
            case Gathered():
                self.has_read = True
            case Sent() if self.state is TransferState.FLOWING:  # else it was told to stop: Quiet follows
                self.is_ordered, self.is_over = False, True
        return []

    def forget(self) -> None:
        self.route.unused[self.incarnation] -= self.lent - self.shipped
        if not self.route.unused[self.incarnation]:
            del self.route.unused[self.incarnation]


class SlotReceiving(ReceivingRoute):
    """Lends our slots to the transfers of all routes through slots."""

    def __init__(self, opened: OpenTransfers, slots: ReceiveSlots) -> None:
        self.opened = opened
        self.slots = slots
        self.unconfirmed = UnconfirmedTransfers()
        self.awaiting: PeerQueue[IncomingBySlots] = PeerQueue()  # transfers with ready chunks that have no slot

    @property
    def waiting(self) -> int:
        return len(self.awaiting)

    @property
    def lent(self) -> int:
        return self.slots.lent

    def begin(
        self, wanted: OpenWant, transfer: str, address: str, session: Session, plan: Plan, token: bytes
    ) -> IncomingBySlots:
        return IncomingBySlots(transfer, session, plan, wanted, address, token, route=self, turn=self.slots.turn)

    def prepare(self, session: Session) -> list[Action]:
        actions: list[Action] = []
        if session.process is not None:
            actions.append(WatchProcess(session.process, session.peer.incarnation))
        if parts := session.planner.samples(session.slot_bytes, is_sender=False):
            actions.append(Warm(parts))
        return actions

    def lend(self) -> list[Action]:
        """Lend free slots to transfers with ready chunks, one each in turn, and to no sender more than its share."""
        lent: dict[str, tuple[SlotLease, ...]] = {}
        while self.slots.free and (incoming := self.awaiting.take(self.slots.may_lend)) is not None:
            lent[incoming.transfer] = lent.get(incoming.transfer, ()) + incoming.lend(1)
            incoming.queue()
        actions: list[Action] = []
        for transfer, leases in lent.items():
            address = self.opened.transfers[transfer].address
            actions += [Lend(transfer, leases), Send(address, Grant(transfer=transfer, leases=leases))]
        return actions

    def on_time(self, kind: str, name: str, now: float) -> list[Action]:
        """Transfers from this address are unconfirmed: reach it, and ask whoever was met elsewhere before they were."""
        if kind != "quarantine" or not self.unconfirmed.is_any(name):
            return []
        self.opened.deadlines.set((kind, name), now + CONFIRM_AGAIN_S)
        actions: list[Action] = [Reach(name)]
        for address, session in self.opened.sessions.items():
            incarnation = session.peer.incarnation
            actions += self._questions(
                address, incarnation, self.unconfirmed.meet_again(address, incarnation, session.key)
            )
        return actions

    def met(self, address: str, incarnation: str, key: str) -> list[Action]:
        return self._questions(address, incarnation, self.unconfirmed.meet(address, incarnation, key))

    def _questions(self, address: str, incarnation: str, unconfirmed: list[tuple[str, str]]) -> list[Action]:
        """Ask it. It can speak for another incarnation only if it knows that one to be dead."""
        return [
            Send(address, Cancel(transfer=transfer, code="forgotten", incarnation="" if of == incarnation else of))
            for transfer, of in unconfirmed
            if of != incarnation
            or (own := self.opened.transfers.get(transfer)) is None
            or own.state is TransferState.ENDED
        ]

    def on_drained(self, transfer: str, incarnation: str, key: str) -> None:
        if self.unconfirmed.can_settle(transfer, incarnation, key):
            self.drain(transfer)

    def drain(self, transfer: str) -> None:
        """Nothing writes to its slots any more. They are free, once the data plane has finished with them too."""
        self.unconfirmed.settle(transfer)
        incoming = self.opened.transfers.get(transfer)
        if isinstance(incoming, IncomingBySlots) and incoming.is_ordered:
            incoming.is_drained = True
        else:
            self.slots.drain(transfer)

    def writing_processes(self) -> set[ProcessCard]:
        sessions = (each for each in self.opened.sessions.values() if not each.routed.is_read)
        return self.unconfirmed.processes.union(each.process for each in sessions if each.process is not None)

    def quarantined(self, writers: Writers) -> frozenset[tuple[int, int]]:
        return self.slots.quarantined(None if writers == "all" else self.unconfirmed.of(writers))

    def cannot_write(self, writers: Writers) -> None:
        if writers == "all":  # the slots are others
            self.unconfirmed.clear()
            self.slots.rebuilt()
        else:
            for transfer in self.unconfirmed.of(writers):
                self.drain(transfer)


@dataclass(slots=True, eq=False, kw_only=True)
class IncomingBySlots(IncomingTransfer):
    route: SlotReceiving
    turn: int  # when it came, or was last lent a slot
    is_drained: bool = False  # the sender has stopped writing, but the data plane may still read what it wrote

    def claim(self, now: float) -> tuple[list[Action], tuple[SlotLease, ...]]:
        """Slots are lent at once, which saves a round trip, but half is kept for transfers with ready chunks."""
        self.is_ordered = True
        plenty = self.route.slots.free - len(self.route.slots) // 2
        leases = self.lend(min(max(plenty, 0), self.plan.chunks))
        wanted, session = self.wanted, self.session
        engine, want = wanted.engine, wanted.want
        what = self.transfer, want.request, self.plan, wanted.tables, self.token
        between = session.peer.incarnation, engine.agent.incarnation, session.peer_epoch, engine.epoch
        order = ReceiveOrder(*what, *between, session.digest, session.routed.route, want.fence)
        return [order, *([Lend(self.transfer, leases)] if leases else [])], leases

    def lend(self, count: int) -> tuple[SlotLease, ...]:
        """Up to so many slots."""
        if leases := self.route.slots.lend(count, self.transfer, self.session.memory_id):
            self.turn = self.route.slots.turn
        return leases

    def queue(self) -> None:
        """Queue for a slot, if it has ready chunks without one."""
        if self.state is TransferState.FLOWING and self.ready > self.placed + self.route.slots.lent_to(self.transfer):
            self.route.awaiting.add(self.session.memory_id, self.transfer, self.turn, self)

    def on_message(self, body: RouteToReceiver, now: float) -> list[Action]:
        if not isinstance(body, Ready):
            return []
        self.ready = max(self.ready, min(body.chunks, self.plan.chunks))
        self.queue()
        return self.route.lend()

    def on_report(self, report: RouteReport, now: float) -> list[Action]:
        assert isinstance(report, Landed)
        self.route.slots.land(report.leases, self.transfer)
        self.placed += report.chunks
        if self.state is not TransferState.FLOWING and not self.route.slots.has_out(self.transfer):
            self.route.unconfirmed.settle(self.transfer)
        return [Carried(self.session, report.chunks, report.size_bytes)] if report.chunks else []

    def on_end(self, is_finished: bool = False) -> None:
        self.route.awaiting.discard(self.session.memory_id, self.transfer)
        if is_finished:
            self.route.slots.drain(self.transfer)  # unused leases: the sender has written every chunk it will

    def quarantine(self, now: float) -> bool:
        """Quarantine the slots still lent to it."""
        route, session = self.route, self.session
        if not route.slots.quarantine(self.transfer):
            return False
        peer, key = session.peer.incarnation, session.key
        route.unconfirmed.add(self.transfer, self.address, peer, key, session.is_far, session.process)
        route.opened.deadlines.set(("quarantine", self.address), now + CONFIRM_AGAIN_S)
        return True

    def on_drained(self) -> None:
        self.route.drain(self.transfer)

    def on_quiet(self) -> bool:
        if self.is_drained:
            self.route.slots.drain(self.transfer)
        return self.route.slots.has_out(self.transfer)  # else everything written under its leases has landed


class UnconfirmedTransfer(Value):
    """One ended transfer, and who may still write for it. `number` counts them as they come.

    `is_far`: by our fabric only. `process` is the sender's, where we can see it.
    """

    address: str
    incarnation: str
    key: str
    is_far: bool
    process: ProcessCard | None
    number: int


class UnconfirmedTransfers:
    """Ended transfers whose sender has not confirmed yet that it stopped writing: their slots are quarantined.

    Each is kept with its sender's address, incarnation and key. Other incarnations are asked about it too: one may know
    that the sender is dead. Anybody can name any incarnation, so one counts only together with the key of the agent
    from which the transfer was claimed. A successor is asked wherever it is met, as an agent that moves gets another
    address. Without keys anybody could be the successor: only who answers at the address is asked.
    """

    def __init__(self) -> None:
        self._of: dict[str, UnconfirmedTransfer] = {}  # by transfer
        self._last = 0
        # By agent: the number of the last transfer when it was asked. It is asked about all there are.
        self._asked: OrderedDict[tuple[str, str, str], int] = OrderedDict()

    def add(
        self,
        transfer: str,
        address: str,
        incarnation: str,
        key: str,
        is_far: bool = False,
        process: ProcessCard | None = None,
    ) -> None:
        self._last += 1
        self._of.pop(transfer, None)  # the newest last
        self._of[transfer] = UnconfirmedTransfer(address, incarnation, key, is_far, process, self._last)

    def settle(self, transfer: str) -> None:
        if self._of.pop(transfer, None) is not None and not self._of:
            self.clear()

    def clear(self) -> None:
        """Forget all: the slots they could write no longer exist."""
        self._of.clear()
        self._asked.clear()
        self._last = 0

    @property
    def processes(self) -> set[ProcessCard]:
        """Whose end would prove something."""
        return {each.process for each in self._of.values() if each.process is not None}

    def of(self, writers: ProcessCard | Literal["far"]) -> list[str]:
        """The transfers that this process may still write, or who does so by our fabric only."""
        is_far = writers == "far"
        return [name for name, each in self._of.items() if (each.is_far if is_far else each.process == writers)]

    def is_any(self, address: str) -> bool:
        return any(each.address == address for each in self._of.values())

    def meet(self, address: str, incarnation: str, key: str) -> list[tuple[str, str]]:
        """This incarnation answers at the address: ask it about these, as (transfer, the sender's incarnation).

        These are its own transfers, and those of others that it may know to be dead.
        """
        found = [
            (transfer, each.incarnation)
            for transfer, each in self._of.items()
            if each.key == key and (each.incarnation == incarnation or each.address == address or key)
        ]
        if any(of != incarnation for _, of in found):
            self._asked[_asked_as(address, incarnation, key)] = self._last
            self._asked.move_to_end(_asked_as(address, incarnation, key))
            if len(self._asked) > MOST_ASKED:
                self._asked.popitem(last=False)
        return found

    def meet_again(self, address: str, incarnation: str, key: str) -> list[tuple[str, str]]:
        """The same for one with an open session: only what it has not been asked about, as it ended later."""
        asked = self._asked.get(_asked_as(address, incarnation, key), 0)
        met = self.meet(address, incarnation, key)
        return [(transfer, of) for transfer, of in met if self._of[transfer].number > asked and of != incarnation]

    def can_settle(self, transfer: str, incarnation: str, key: str) -> bool:
        """Whether this incarnation, by any link, may settle the transfer: it is the sender, or was asked."""
        if (its := self._of.get(transfer)) is None:
            return False
        asked = self._asked.get(_asked_as(its.address, incarnation, key), 0)
        return key == its.key and (incarnation == its.incarnation or its.number <= asked)


def _asked_as(address: str, incarnation: str, key: str) -> tuple[str, str, str]:
    """Who was asked. One with a key is asked wherever it is met, so its address does not matter."""
    return "" if key else address, incarnation, key
