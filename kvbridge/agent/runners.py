"""The two halves of an agent at work: they hear something, let the exchange decide, do it, and record what happened.

The receiver's: our engine wants tokens, other agents have them, we put them into its blocks. A want comes in (`want`),
sessions open (`opened`), the data plane reports which rows are in the blocks (`on_reports`), and the engine is told.
The sender's: our engine offers tokens (`offer`) as the prompt is computed, other agents claim them (`from_receiver`),
before or after it; the data plane gets an order, and reports (`on_reports`); the engine gets its blocks back.
exchange/receiver.py and exchange/sender.py decide. "A pull, function by function" in docs/architecture.md names the
functions in order."""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvbridge_proto.engine import Abandon, Done, Expect, Failed, NoOffer, Offer, Released, ToEngine, Want, Withdraw
from kvbridge_proto.peer import (
    Announce,
    BlockTables,
    Body,
    Cancel,
    Claim,
    Drained,
    Failing,
    Grant,
    Hold,
    Keeps,
    OfReceiver,
    OfSender,
    Refuse,
    Renew,
    Settled,
)
from msgspec import structs

from ..dataplane.attached import CurrentEngine
from ..dataplane.data_plane import DataPlane
from ..exchange.actions import Action, Ask, Reach, Send, Tell, Uncompared, Unconfirmed, WatchProcess
from ..exchange.orders import (
    Broken,
    Digested,
    Dropped,
    FenceReached,
    Landed,
    Order,
    ReceivingReport,
    SendingReport,
    Warm,
    Watch,
)
from ..exchange.receiver import Receiver
from ..exchange.sender import Sender
from ..exchange.session import AttachedEngine, Session
from ..failpoints import failpoint
from ..routes.pull.halves import COMPARE_S
from ..transport.endpoint import canonical
from ..transport.processes import Processes
from .kept import KeptAnswers
from .outgoing_peers import OutgoingPeers, ReceiverEvents
from .peers import IncomingPeers, SenderEvents
from .record import Event, Record

log = logging.getLogger("kvbridge.receiver")

WARN_LATE_WRITES_S = 60.0
KEEP_S = 1.0  # between looks for processes that need not be watched any more
CHECK_UNREAD_S = 0.01
# Failpoints, passed after a message was sent or told, and before what one that was heard leads to.
SENT: Mapping[type, str] = {
    Claim: "receiver.claim_sent",
    Grant: "receiver.grant_sent",
    Renew: "receiver.renewal_sent",
    Cancel: "receiver.cancel_sent",
    Settled: "receiver.settled_sent",
    Done: "receiver.done_told",
    BlockTables: "sender.tables_sent",
    Drained: "sender.drained_sent",
    Released: "sender.released_told",
}
HEARD: Mapping[type, str] = {
    BlockTables: "receiver.tables_heard",
    Drained: "receiver.drained_heard",
    Claim: "sender.claim_received",
    Cancel: "sender.cancel_received",
    Renew: "sender.renewal_heard",
    Settled: "sender.settled_heard",
}


@dataclass(eq=False, repr=False)
class Runner(abc.ABC):
    """Runs on the loop. `_send_to` are the peers of its half."""

    _send_to: OutgoingPeers | IncomingPeers = field(init=False)

    _data_plane: DataPlane
    _record: Record
    _current: CurrentEngine
    _clock: Callable[[], float]

    def do(
        self, actions: Iterable[Action], events: Iterable[Event] = (), heard_at: float | None = None, peer: str = ""
    ) -> None:
        """Carry these out; then record the `events` that they follow from, and what was done: somebody waits for them.

        `peer` is who sent the events. If an action fails, those before it are recorded, and its error is raised.
        """
        at = self._clock()  # what is sent now may be recorded by the other agent before we record it
        done: list[Action] = []
        unrecorded = iter(events)

        def record_events() -> None:
            for event in unrecorded:
                self._record.note(event, at if heard_at is None else heard_at, peer)

        try:
            for action in actions:
                match action:
                    case Send(peer=receiver, body=body):
                        self._send_to.send(receiver, body)
                        _pass(SENT, body)
                    case Tell(message=message):
                        if isinstance(message, Failed):  # its engine may look for the line at once
                            record_events()
                            failure = "code=%s %s", message.code, message.reason
                            self._record.warn("failed", *failure, number=message.number)
                        self._tell(message)
                    case Reach() | Ask() | WatchProcess() | Watch():
                        record_events()  # what these lead to at once may be recorded in this call
                        self._act(action)
                    case Order():
                        self._data_plane.give(action, self._current.memory)
                done.append(action)
        finally:
            record_events()
            note = self._record.note
            for action in done:
                match action:
                    case Send(peer=receiver, body=body, number=number):
                        note(body, at, receiver, number)
                    case Tell(message=message):
                        note(message, at)
                    case Reach() | Ask() | WatchProcess() | Order():
                        pass
                    case _:
                        note(action, at)

    def _tell(self, message: ToEngine) -> None:
        self._current.tell(message)
        _pass(SENT, message)

    @abc.abstractmethod
    def _act(self, action: Reach | Ask | WatchProcess | Watch) -> None:
        """Do what only this half does."""


def _pass(places: Mapping[type, str], message: Body | ToEngine) -> None:
    """Pass the failpoint of what was sent or heard, if it has one."""
    if (place := places.get(type(message))) is not None:
        failpoint(place)


class ReceiverRunner(Runner):
    """Runs on the loop. It opens the sessions it needs: `peers`."""

    def __init__(
        self,
        receiving: Receiver,
        open_peers: Callable[[ReceiverEvents], OutgoingPeers],
        data_plane: DataPlane,
        record: Record,
        current: CurrentEngine,
        clock: Callable[[], float],
        processes: Processes,
    ) -> None:
        super().__init__(data_plane, record, current, clock)
        self.peers = self._send_to = open_peers(self)
        self._processes = processes
        self.receiving = receiving
        self._warned = self._kept = float("-inf")

    # The engine:

    def expect(self, expect: Expect) -> None:
        expect = structs.replace(expect, sender=canonical(expect.sender))
        self.do(self.receiving.expect(expect, self._clock()))

    def want(self, want: Want, engine: AttachedEngine) -> None:
        want, now = structs.replace(want, sender=canonical(want.sender)), self._clock()
        failpoint("receiver.want_heard")
        self.do(self.receiving.want(want, engine, now), (want,), now)

    def knows(self, number: int) -> bool:
        """Whether this want is open."""
        return number in self.receiving.wants

    def abandon(self, abandon: Abandon) -> None:
        self._record.note(abandon)
        self.do(self.receiving.abandon(abandon.number, self._clock()))

    # Other agents:

    def met(self, session: Session) -> None:
        """A session with a new sender: compile the kernels for what it will send, and watch its process."""
        self.do(self.receiving.prepare(session))

    def opened(self, address: str, session: Session) -> None:
        self.do(self.receiving.opened(address, session, self._clock()))

    def meet(self, address: str) -> None:
        """Open what sessions are missing with the engine of the agent at `address`, which is canonical."""
        self.do(self.receiving.meet(address))

    def is_met(self, address: str) -> bool:
        """Whether a want would find all its sessions with the engine of the agent at `address`, canonical, open."""
        return not self.receiving.meet(address)

    def is_wanted(self, address: str) -> bool:
        """Whether a want names this address or takes from there."""
        return any(
            address in (wanted.want.sender, *(incoming.address for incoming in wanted.incoming_transfers.values()))
            for wanted in self.receiving.wants.values()
        )

    def refused(self, address: str, incarnation: str, key: str) -> None:
        self.do(self.receiving.refused(address, incarnation, key))

    def unreachable(self, address: str, code: str, reason: str) -> None:
        self.do(self.receiving.unreachable(address, code, reason, self._clock()))

    def absent(self, address: str, since: float) -> None:
        self.do(self.receiving.absent(address, since, self._clock()))

    def from_sender(self, incarnation: str, key: str, body: OfSender) -> None:
        _pass(HEARD, body)
        now, receiving = self._clock(), self.receiving
        match body:
            case Failing(transfer=transfer, code=code, reason=reason):
                actions = receiving.failing(incarnation, transfer, code, reason, now, key)
            case Drained(transfer=transfer, code=code, reason=reason):
                actions = receiving.drained(incarnation, transfer, code, reason, now, key)
            case Refuse(about=transfer, code=code, reasons=reasons):  # nothing is ever written for a refused claim
                actions = receiving.drained(incarnation, transfer, code, "; ".join(reasons), now, key)
            case Announce():
                return receiving.announced(incarnation, key, body)
            case _:
                actions = receiving.on_message(incarnation, body, now, key)
        self.do(actions, (body,), now)

    # The data plane:

    def on_reports(self, reports: Sequence[ReceivingReport]) -> None:
        """Take the data plane's reports. What follows from them is done first: our engine waits."""
        for report in reports:
            match report:
                case Landed():
                    failpoint("receiver.scattered")
                case Dropped():
                    self._on_dropped(report)
        self.do(self.receiving.on_reports(reports, self._clock()), reports)

    def _on_dropped(self, dropped: Dropped) -> None:
        now = self._clock()
        if (
            now - self._warned >= WARN_LATE_WRITES_S
        ):  # counted every time, logged once a minute: a peer can go on writing
            self._warned = now
            self._record.warn("late or foreign write dropped", "slot=%d", dropped.slot, transfer=dropped.transfer)

    def _notice_ends(self) -> None:
        """Free the slots that were lent to processes that have ended."""
        for process in self._processes.ended():
            self.peers.lose_process(process)
            if slots := len(self.receiving.quarantined(process)):
                log.info("a sender's process has ended: pid=%d, %d receive slots leave quarantine", process.pid, slots)
            self.do(self.receiving.cannot_write(process))
        if (now := self._clock()) - self._kept >= KEEP_S:
            self._kept = now
            self._processes.keep(self.receiving.writing_processes())

    def tick(self) -> None:
        self._notice_ends()
        actions = self.receiving.tick(self._clock())
        self.do(actions)
        if late := sum(each.chunks for each in actions if isinstance(each, Uncompared)):
            self._record.warn("chunks not compared", "%d, their senders sent no digests in %g s", late, COMPARE_S)

    # Doing:

    def _act(self, action: Reach | Ask | WatchProcess | Watch) -> None:
        match action:
            case Reach(address=address):
                self.peers.reach(address)
            case Ask(address=address):
                self.peers.ask(address)
            case WatchProcess(process=process, incarnation=incarnation):
                if not self._processes.watch(process):
                    log.info("no pidfd of a sender: pid=%d incarnation=%s", process.pid, incarnation)


class SenderRunner(Runner):
    """Runs on the loop. It opens the sessions it needs: `peers`."""

    def __init__(
        self,
        sending: Sender,
        open_peers: Callable[[SenderEvents], IncomingPeers],
        data_plane: DataPlane,
        record: Record,
        current: CurrentEngine,
        clock: Callable[[], float],
        kept: KeptAnswers,
    ) -> None:
        super().__init__(data_plane, record, current, clock)
        self.peers = self._send_to = open_peers(self)
        self.sending = sending
        self.kept = kept
        self._watched = -1  # the count of our engine's fence that we wait for; -1: none

    # The engine:

    def offer(self, offer: Offer, engine: AttachedEngine) -> None:
        self._record.note(offer)
        failpoint("sender.offer_heard")
        self.do(self.sending.offer(offer, engine, self._clock()))
        if offer.prefixes and self.knows(offer.number):
            self.kept.offered(offer)
        if self.sending.has_pending:  # its socket counts as empty only after this message
            asyncio.get_running_loop().call_soon(self.do, [])

    def is_due(self, offer: Offer) -> bool:
        """Whether it continues an offer, or a claim waits for it."""
        return offer.is_more or self.sending.is_awaited(offer.rendezvous)

    def knows(self, number: int) -> bool:
        """Whether this offer is open, or still read."""
        return number in self.sending.offers

    def will_never_be_offered(self, claim: Claim) -> bool:
        """Whether there is no offer for this claim, and none will be accepted while we stop."""
        return not (self.sending.is_awaited(claim.rendezvous) or self.sending.has_offer(claim))

    def withdraw(self, withdraw: Withdraw) -> None:
        number = withdraw.number
        actions = self.sending.withdraw(number, withdraw.reason, self._clock(), withdraw.comes_again)
        self._record.note(withdraw)
        if number in self.sending.offers:  # it is still being read
            failpoint("sender.withdraw_heard")
        self.do(actions)

    def no_offer(self, message: NoOffer) -> None:
        """Nothing more is offered for this call: claims that wait for it hear so."""
        self.sending.no_offer(message, self._clock())
        if self.sending.has_pending:  # as in `offer`
            asyncio.get_running_loop().call_soon(self.do, [])

    def release(self) -> int:
        """Release what nobody has claimed. Returns how many offers that were."""
        count, actions = self.sending.release(self._clock())
        self.do(actions)
        return count

    def pause(self, is_alone: bool) -> bool:
        """Begin nothing until `rebuilt` or `resume`, if our engine has one rank (`is_alone`).

        Returns whether nothing is under way except late writes.
        """
        return self.sending.pause(is_alone) and not self._data_plane.send_orders.moving

    # Other agents:

    def met(self, session: Session) -> None:
        """A session with a new receiver: compile the kernels for what it will take, or read and compare."""
        parts = session.planner.samples(session.slot_bytes, is_sender=True)
        if parts and self._current.memory is not None:
            self._data_plane.give(Warm(parts), self._current.memory)

    def from_receiver(self, session: Session, body: OfReceiver) -> None:
        _pass(HEARD, body)
        incarnation, engine = session.peer.incarnation, self._current.engine
        match body:
            case Claim() if engine is None:
                refuse = Refuse(code="no_engine", reasons=("no engine is attached to this agent",), about=body.transfer)
                self.peers.send(incarnation, refuse)
            case Claim():
                assert engine is not None
                now = self._clock()
                self.do(self.sending.claim(body, session, engine, now), (body,), now, session.peer.name)
            case Cancel():
                self.do(self.sending.cancel(incarnation, body, self._clock()))
            case Hold(rendezvous_ids=rendezvous_ids):
                self.do(self.sending.hold(incarnation, rendezvous_ids, self._clock()))
            case Keeps():
                self.kept.heard(session, body)
            case _:
                now = self._clock()
                self.do(self.sending.on_message(incarnation, body), (body,), now)

    def renounce(self, incarnation: str, cancel: Cancel) -> bool:
        """Whether nothing is or will be written for this receiver's transfer."""
        return self.sending.renounce(incarnation, cancel)

    def lost(self, incarnation: str) -> None:
        self.do(self.sending.lost(incarnation))
        self.kept.lost(incarnation)

    # The data plane:

    def on_reports(self, reports: Sequence[SendingReport]) -> None:
        """Take the data plane's reports. They are recorded first: nobody waits for what follows from them."""
        for report in reports:
            self._record.note(report)
            match report:
                case Broken(transfer=transfer, code=code, reason=reason):
                    self._record.warn("chunk not shipped", "code=%s %s", code, reason, transfer=transfer)
                case Digested():
                    self._compare(report)
                case FenceReached():  # our engine's fence was reached, or the wait for it ended
                    self._watched = -1
        self.do(self.sending.on_reports(reports))

    def _compare(self, report: Digested) -> None:
        transfer, found, read = report.transfer, report.found, report.read
        if report.failure is not None:
            self._record.warn("chunk not compared", "code=%s %s", *report.failure, transfer=transfer)
        elif found != read:
            words = "chunk %d: we have digest %016x, read was %016x"
            self._record.warn("digest_mismatch", words, found.chunk, found.digest, read.digest, transfer=transfer)

    async def unread(self) -> None:
        """Return once no receiver may read our engine's blocks: at most one lease from now."""
        while self.sending.is_promised:
            await asyncio.sleep(CHECK_UNREAD_S)
            self.tick()

    def tick(self) -> None:
        actions = self.sending.tick(self._clock())
        self.do(actions)
        if over := sum(isinstance(each, Unconfirmed) for each in actions):
            self._record.warn("read leases over", "%d receivers did not confirm that they had finished", over)

    # Doing:

    def do(
        self, actions: Iterable[Action], events: Iterable[Event] = (), heard_at: float | None = None, peer: str = ""
    ) -> None:
        """Also send the answers that are due then. If an action fails, they stay due."""
        super().do(self._with_answers(actions) if self.sending.has_pending else actions, events, heard_at, peer)

    def _tell(self, message: ToEngine) -> None:
        super()._tell(message)
        if isinstance(message, Released) and message.number in self.kept.ours:
            self.kept.released(message.number)

    def _with_answers(self, actions: Iterable[Action]) -> Iterator[Action]:
        yield from actions
        yield from self._answers()

    def _answers(self) -> list[Action]:
        """What receivers may read now, if we have lately read everything that our engine sent."""
        if (memory := self._current.memory) is None:
            return []
        self._current.note_if_silent()
        return self.sending.answers(self._clock(), memory.liveness.heard_at, memory.has_reached)

    def _act(self, action: Reach | Ask | WatchProcess | Watch) -> None:
        """Wait for our engine's fence, unless we wait for an earlier count."""
        assert isinstance(action, Watch)
        if (self._watched < 0 or action.fence < self._watched) and self._current.memory is not None:
            self._watched = action.fence
            self._data_plane.give(action, self._current.memory)
