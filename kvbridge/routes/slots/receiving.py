"""The routes through slots, receiving: lend slots for what is ready, and quarantine those that may be written. Pure.

A slot that is lent when its transfer ends stays in quarantine until its sender, or a successor that knows it to be
dead, confirms that it is not written any more (routes/slots/receive_slots.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbridge_proto.peer import Cancel, Grant, ProcessCard, Ready, RouteToReceiver, SlotLease

from ...exchange.actions import Action, Carried, Reach, Send, WatchProcess
from ...exchange.containers import FairQueue
from ...exchange.incoming import IncomingTransfer, OpenTransfers, OpenWant, ReceivingRoute, Writers
from ...exchange.orders import Landed, Lend, ReceiveOrder, RouteReport, Warm
from ...exchange.session import Session
from ...geometry.plan import Plan
from ...states import TransferState
from .receive_slots import ReceiveSlots
from .unconfirmed import UnconfirmedTransfers

CONFIRM_AGAIN_S = 5.0  # between attempts to reach a sender that must confirm quarantined slots


class SlotReceiving(ReceivingRoute):
    """Lends our slots to the transfers of all routes through slots."""

    def __init__(self, opened: OpenTransfers, slots: ReceiveSlots) -> None:
        self.opened = opened
        self.slots = slots
        self.unconfirmed = UnconfirmedTransfers()
        self.awaiting: FairQueue[IncomingBySlots] = FairQueue()  # transfers with ready chunks that have no slot

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
        """Lend free slots to transfers with ready chunks, one each in turn."""
        lent: dict[str, tuple[SlotLease, ...]] = {}
        while self.slots.free and (incoming := self.awaiting.take()) is not None:
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
        sessions = (each for each in self.opened.sessions.values() if not each.routed.is_pulled)
        return self.unconfirmed.processes.union(each.process for each in sessions if each.process is not None)

    def quarantined(self, writers: Writers) -> frozenset[tuple[int, int]]:
        return self.slots.quarantined(None if writers == "all" else self._written_by(writers))

    def cannot_write(self, writers: Writers) -> None:
        if writers == "all":  # the slots are others
            self.unconfirmed.clear()
            self.slots.rebuilt()
        else:
            for transfer in self._written_by(writers):
                self.drain(transfer)

    def _written_by(self, writers: ProcessCard | Literal["far"]) -> list[str]:
        return list(self.unconfirmed.far) if writers == "far" else self.unconfirmed.of(writers)


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
        if leases := self.route.slots.lend(count, self.transfer):
            self.turn = self.route.slots.turn
        return leases

    def queue(self) -> None:
        """Queue for a slot, if it has ready chunks without one."""
        if self.state is TransferState.FLOWING and self.ready > self.placed + self.route.slots.lent_to(self.transfer):
            self.route.awaiting.add(self.transfer, self.turn, self)

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
        self.route.awaiting.discard(self.transfer)
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
