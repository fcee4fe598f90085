"""The receiver's story: our engine wants tokens, other agents have them, we put them into its blocks.

A want comes in (`want`), sessions open (`opened`), the data plane reports which rows are in the blocks (`hear`), and
the engine is told. exchange/receiver.py decides what to do; this file does it.
"A pull, function by function" in docs/architecture.md names the functions in order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvbridge_proto.engine import Done, Expect, Failed, ToEngine, Want
from kvbridge_proto.peer import (
    BlockTables,
    Body,
    Cancel,
    Claim,
    Drained,
    Failing,
    Grant,
    Ready,
    Refuse,
    Renew,
    RouteToReceiver,
    Settled,
)
from msgspec import structs

from ..dataplane.data_plane import DataPlane
from ..exchange.actions import Action, Ask, Carried, Compared, Reach, Send, Tell, Uncompared, WatchProcess
from ..exchange.orders import Broken, Dropped, Landed, Malformed, Order, Pulled, ReceivingReport, StageReached
from ..exchange.receiver import Receiver
from ..exchange.session import AttachedEngine, Session
from ..failpoints import failpoint
from ..routes.pull.receiving import COMPARE_S
from ..transport.endpoint import canonical
from ..transport.processes import Processes
from .current_engine import CurrentEngine
from .metrics import Metrics
from .outgoing_peers import OutgoingPeers
from .peer_records import ReceiverEvents
from .request_log import RequestLog
from .request_records import RequestRecords

log = logging.getLogger("kvbridge.receiver")

WARN_S = 60.0
KEEP_S = 1.0  # between looks for processes that need not be watched any more


class ReceiverRunner:
    """Runs on the loop. It opens the sessions it needs: `peers`."""

    def __init__(
        self,
        receiving: Receiver,
        open_peers: Callable[[ReceiverEvents], OutgoingPeers],
        data_plane: DataPlane,
        metrics: Metrics,
        records: RequestRecords,
        current: CurrentEngine,
        clock: Callable[[], float],
        processes: Processes,
    ) -> None:
        self.peers = open_peers(self)
        self._processes = processes
        self._receiving = receiving
        self._data_plane = data_plane
        self._metrics = metrics
        self._records = records
        self._log = RequestLog(log, records.names)
        self._current = current
        self._clock = clock
        self._warned = self._kept = float("-inf")

    # The engine:

    def expect(self, expect: Expect) -> None:
        expect = structs.replace(expect, sender=canonical(expect.sender))
        self._do(self._receiving.expect(expect, self._clock()))

    def want(self, want: Want, engine: AttachedEngine) -> None:
        want = structs.replace(want, sender=canonical(want.sender))
        tokens = f"tokens [{want.first_token}, {want.end_token}) of {want.sender}"
        self._records.note(
            "wanted",
            tokens,
            number=want.number,
            request=want.request,
            rendezvous=want.rendezvous,
            traceparent=want.traceparent,
        )
        self._log.debug("want", "rendezvous=%s %s", want.rendezvous, tokens, number=want.number)
        failpoint("receiver.want_heard")
        self._data_plane.wake()
        self._do(self._receiving.want(want, engine, self._clock()))

    def knows(self, number: int) -> bool:
        """Whether this want is open."""
        return number in self._receiving.wants

    def abandon(self, number: int) -> None:
        self._records.note("abandoned", number=number)
        self._do(self._receiving.abandon(number, self._clock()))

    def rescaled(self, engine: AttachedEngine) -> None:
        self._do(self._receiving.rescaled(engine, self._clock()))

    def reweighed(self, engine: AttachedEngine, reason: str) -> None:
        self._do(self._receiving.reweighed(engine, reason, self._clock()))

    def rebuilt(self, engine: AttachedEngine | None) -> None:
        self._do(self._receiving.rebuilt(engine, self._clock()))

    def unreachable_from_far(self, engine: AttachedEngine | None) -> None:
        self._do(self._receiving.unreachable_from_far(engine, self._clock()))

    def pause(self) -> bool:
        """Claim nothing until `rebuilt` or `resume`. Returns whether nothing is under way."""
        return self._receiving.pause()

    def resume(self) -> None:
        self._do(self._receiving.resume(self._clock()))

    def declined(self, revision: int, reason: str) -> None:
        self._do(self._receiving.declined(revision, reason, self._clock()))

    def engine_left(self) -> None:
        self._do(self._receiving.engine_left(self._clock()))

    # Other agents:

    def met(self, session: Session) -> None:
        """A session with a new sender: compile the kernels for what it will send, and watch its process."""
        self._do(self._receiving.prepare(session))

    def opened(self, address: str, session: Session) -> None:
        self._do(self._receiving.opened(address, session, self._clock()))

    def is_wanted(self, address: str) -> bool:
        """Whether a want names this address or takes from there."""
        return any(
            address in (wanted.want.sender, *(incoming.address for incoming in wanted.incoming_transfers.values()))
            for wanted in self._receiving.wants.values()
        )

    def refused(self, address: str, incarnation: str, key: str) -> None:
        self._do(self._receiving.refused(address, incarnation, key))

    def unreachable(self, address: str, code: str, reason: str) -> None:
        self._do(self._receiving.unreachable(address, code, reason, self._clock()))

    def from_sender(self, incarnation: str, key: str, body: RouteToReceiver | Failing | Drained | Refuse) -> None:
        now, receiving = self._clock(), self._receiving
        self._records.note_message(body, now)
        match body:
            case Failing(transfer=transfer, code=code, reason=reason):
                self._do(receiving.failing(incarnation, transfer, code, reason, now, key))
            case Drained(transfer=transfer, code=code, reason=reason):
                failpoint("receiver.drained_heard")
                self._do(receiving.drained(incarnation, transfer, code, reason, now, key))
            case Refuse(about=transfer, code=code, reasons=reasons):  # nothing is ever written for a refused claim
                self._do(receiving.drained(incarnation, transfer, code, "; ".join(reasons), now, key))
            case _:
                if isinstance(body, Ready):
                    self._records.note("ready", f"{body.chunks} chunks can be written", transfer=body.transfer)
                elif isinstance(body, BlockTables):
                    failpoint("receiver.tables_heard")
                self._do(receiving.on_message(incarnation, body, now, key))

    # The data plane:

    def hear(self, reports: Sequence[ReceivingReport]) -> None:
        """Take the data plane's reports. What follows from them is done first: our engine waits."""
        for report in reports:
            match report:
                case Landed():
                    failpoint("receiver.scattered")
                case Dropped():
                    self._on_dropped(report)
        actions, at = self._receiving.hear(reports, self._clock()), self._clock()
        done: list[Action] = []
        try:
            self._perform(actions, done)
        finally:
            for report in reports:
                self._note_report(report, at)
            self._note(done, at)

    def _note_report(self, report: ReceivingReport, at: float) -> None:
        match report:
            case StageReached():
                self._records.reach(report)
            case Landed(transfer=transfer, chunks=chunks, size_bytes=size_bytes) if chunks:
                self._records.note("scattered", f"{chunks} chunks, {size_bytes} bytes", transfer=transfer, at=at)
            case Malformed(code=code):
                self._metrics.rejected(code)
            case (
                Pulled(transfer=transfer, failure=(code, reason)) | Broken(transfer=transfer, code=code, reason=reason)
            ):
                self._records.note("broken", f"{code}: {reason}", transfer=transfer, at=at)

    def _on_dropped(self, dropped: Dropped) -> None:
        self._metrics.late_write()
        now = self._clock()
        if now - self._warned >= WARN_S:  # counted every time, logged once a minute: a peer can go on writing
            self._warned = now
            self._log.warning("late or foreign write dropped", "slot=%d", dropped.slot, transfer=dropped.transfer)

    def _notice_ends(self) -> None:
        """Free the slots that were lent to processes that have ended."""
        for process in self._processes.ended():
            self.peers.lose_process(process)
            if slots := len(self._receiving.quarantined(process)):
                log.info("a sender's process has ended: pid=%d, %d receive slots leave quarantine", process.pid, slots)
            self._do(self._receiving.cannot_write(process))
        if (now := self._clock()) - self._kept >= KEEP_S:
            self._kept = now
            self._processes.keep(self._receiving.writing_processes())

    def tick(self) -> None:
        self._notice_ends()
        actions = self._receiving.tick(self._clock())
        self._do(actions)
        if late := sum(each.chunks for each in actions if isinstance(each, Uncompared)):
            self._log.warning("chunks not compared", "%d, their senders sent no digests in %g s", late, COMPARE_S)

    # Doing:

    def _do(self, actions: list[Action]) -> None:
        decided_at = self._clock()  # what is sent now may be noted by the other agent before we note it
        done: list[Action] = []
        try:
            self._perform(actions, done)
        finally:
            self._note(done, decided_at)

    def _perform(self, actions: list[Action], done: list[Action]) -> None:
        """Carry out these. Each is added to `done` when it has been carried out, so not the one that fails."""
        for action in actions:
            match action:
                case Reach(address=address):
                    self.peers.reach(address)
                case Ask(address=address):
                    self.peers.ask(address)
                case Send(peer=address, body=body):
                    self.peers.send(address, body)
                    _pass_sent(body)
                case WatchProcess(process=process, incarnation=incarnation):
                    if not self._processes.watch(process):
                        log.info("no pidfd of a sender: pid=%d incarnation=%s", process.pid, incarnation)
                case Tell(message=message):
                    if isinstance(message, Failed):  # its engine may look for the line at once
                        self._log.warning("failed", "code=%s %s", message.code, message.reason, number=message.number)
                    self._current.tell(message)
                    if isinstance(message, Done):
                        failpoint("receiver.done_told")
                case Order():
                    self._data_plane.give(action, self._current.memory)
            done.append(action)

    def _note(self, actions: list[Action], at: float) -> None:
        """Record what was done, in the journal, log and metrics."""
        for action in actions:
            match action:
                case Send(peer=address, body=Claim(transfer=transfer, rendezvous=rendezvous)):
                    number = self._receiving.number_of(transfer)
                    self._records.note(
                        "claimed", f"of {address}", number=number, rendezvous=rendezvous, transfer=transfer, at=at
                    )
                case Tell(message=message):
                    self._record(message, at)
                case Carried(session=session, chunks=chunks, size_bytes=size_bytes):
                    self._metrics.chunks("receiver", chunks, size_bytes, session)
                case Compared(chunks=chunks, differing=differing):
                    self._metrics.compared("receiver", chunks, differing)
                case Uncompared(transfer=transfer, chunks=chunks):
                    self._log.debug("chunks not compared", "chunks=%d", chunks, transfer=transfer)
                    self._metrics.uncompared(chunks)

    def _record(self, message: ToEngine, at: float) -> None:
        match message:
            case Done(number=number, moved_bytes=moved, seconds=seconds, unfilled_layers=layers):
                self._log.debug("done", "bytes=%d ms=%.2f", moved, seconds * 1e3, number=number)
                zeros = f", zeros in {layers} draft layers" if layers else ""
                self._records.note("done", f"{moved} bytes{zeros}", number=number, seconds=seconds, at=at)
                self._metrics.want_done(seconds)
            case Failed(number=number, code=code, reason=reason):
                self._records.note("failed", f"{code}: {reason}", number=number, at=at)
                self._metrics.want_failed(code)


def _pass_sent(body: Body) -> None:
    match body:
        case Claim():
            failpoint("receiver.claim_sent")
        case Grant():
            failpoint("receiver.grant_sent")
        case Renew():
            failpoint("receiver.renewal_sent")
        case Cancel():
            failpoint("receiver.cancel_sent")
        case Settled():
            failpoint("receiver.settled_sent")
