"""The receiver's story: our engine wants tokens, other agents bring them, we put them into its blocks.

A want comes in (`want`), sessions open (`opened`), the data plane reports what has come into the blocks (`hear`), and
the engine is told. What to do is decided by exchange.receiving; here it is done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvbridge_proto.engine import Done, Expect, Failed, ToEngine, Want
from kvbridge_proto.peer import (
    BlockTables,
    Body,
    Cancel,
    Checked,
    Claim,
    Drained,
    Failing,
    Grant,
    Ready,
    Refuse,
    Renew,
    Settled,
)
from msgspec import structs

from ..dataplane.data_plane import DataPlane
from ..exchange.actions import Action, Ask, Reach, Send, Tell
from ..exchange.orders import (
    Broken,
    Dropped,
    Landed,
    Lend,
    Malformed,
    Pull,
    Pulled,
    ReceiveOrder,
    ReceivingReport,
    StopReceiving,
)
from ..exchange.receiver import CHECK_S, Receiver
from ..exchange.session import AttachedEngine, Session
from ..failpoints import failpoint
from ..transport.endpoint import canonical
from .current_engine import CurrentEngine
from .metrics import Metrics
from .outgoing_peers import OutgoingPeers
from .peer_records import ReceiverEvents
from .request_records import RequestRecords

log = logging.getLogger("kvbridge.receiver")

WARN_S = 60.0


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
    ) -> None:
        self.peers = open_peers(self)
        self._receiving = receiving
        self._data_plane = data_plane
        self._metrics = metrics
        self._records = records
        self._current = current
        self._clock = clock
        self._warned = float("-inf")

    # The engine:

    def expect(self, expect: Expect) -> None:
        expect = structs.replace(expect, sender=canonical(expect.sender))
        self._do(self._receiving.expect(expect, self._clock()))

    def want(self, want: Want, engine: AttachedEngine) -> None:
        want = structs.replace(want, sender=canonical(want.sender))
        log.debug(
            "want: request=%s rendezvous=%s tokens=[%d,%d) sender=%s",
            want.request,
            want.rendezvous,
            want.first_token,
            want.end_token,
            want.sender,
        )
        tokens = f"tokens [{want.first_token}, {want.end_token}) of {want.sender}"
        self._records.note(
            "wanted", tokens, request=want.request, rendezvous=want.rendezvous, traceparent=want.traceparent
        )
        failpoint("receiver.want_heard")
        self._data_plane.get_up()
        self._do(self._receiving.want(want, engine, self._clock()))

    def knows(self, request: str) -> bool:
        """Whether this want is open."""
        return request in self._receiving.wants

    def abandon(self, request: str) -> None:
        self._records.note("abandoned", request=request)
        self._do(self._receiving.abandon(request, self._clock()))

    def rescaled(self, engine: AttachedEngine) -> None:
        self._do(self._receiving.rescaled(engine, self._clock()))

    def rebuilt(self, engine: AttachedEngine | None) -> None:
        self._do(self._receiving.rebuilt(engine, self._clock()))

    def pause(self) -> bool:
        """Begin nothing until `rebuilt` or `resume`. Whether nothing is under way any more."""
        return self._receiving.pause()

    def resume(self) -> None:
        self._do(self._receiving.resume(self._clock()))

    def declined(self, revision: int, reason: str) -> None:
        self._do(self._receiving.declined(revision, reason, self._clock()))

    def engine_left(self) -> None:
        self._do(self._receiving.engine_left(self._clock()))

    # Other agents:

    def met(self, session: Session) -> None:
        """A sender we did not know: be ready for what it will bring."""
        if self._current.memory is None:
            return
        ours = session.planner.samples(session.slot_bytes, is_sender=False)
        if session.routed.is_pulled:
            theirs = session.planner.samples(session.slot_bytes, is_sender=True)
            pairs = list(zip(theirs, ours, strict=False))  # where one side cannot have such samples there are none
            self._data_plane.warm_pull(self._current.memory, session.whose, pairs, self._receiving.sampling.kinds)
        else:
            self._data_plane.warm(self._current.memory, ours)

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

    def from_sender(
        self, incarnation: str, key: str, body: BlockTables | Checked | Ready | Failing | Drained | Refuse
    ) -> None:
        now, receiving = self._clock(), self._receiving
        self._note_heard(body)
        match body:
            case Ready(transfer=transfer, chunks=chunks):
                self._do(receiving.ready(incarnation, transfer, chunks, key))
            case BlockTables():
                failpoint("receiver.tables_heard")
                self._do(receiving.tables(incarnation, body, now, key))
            case Checked():
                compared, differing = receiving.compared, receiving.differing
                self._do(receiving.checked(incarnation, body, now, key))
                self._metrics.compared("receiver", receiving.compared - compared, receiving.differing - differing)
            case Failing(transfer=transfer, code=code, reason=reason):
                self._do(receiving.failing(incarnation, transfer, code, reason, now, key))
            case Drained(transfer=transfer, code=code, reason=reason):
                failpoint("receiver.drained_heard")
                self._do(receiving.drained(incarnation, transfer, code, reason, now, key))
            case Refuse(about=transfer, code=code, reasons=reasons):  # a refused claim is never written for
                self._do(receiving.drained(incarnation, transfer, code, "; ".join(reasons), now, key))

    def _note_heard(self, body: BlockTables | Checked | Ready | Failing | Drained | Refuse) -> None:
        note = self._records.note
        match body:
            case BlockTables(transfer=transfer, tokens=tokens, blocks=blocks) if blocks:
                note("readable", f"tokens up to {tokens}", transfer=transfer)
            case Ready(transfer=transfer, chunks=chunks):
                note("ready", f"{chunks} chunks can be written", transfer=transfer)
            case Refuse(about=transfer, code=code, reasons=reasons):
                note("refused", f"{code}: {'; '.join(reasons)}", transfer=transfer)
            case (
                Failing(transfer=transfer, code=code, reason=reason)
                | Drained(transfer=transfer, code=code, reason=reason)
            ) if code:
                note("broken", f"{code}: {reason}", transfer=transfer)

    # The data plane:

    def hear(self, reports: Sequence[ReceivingReport]) -> None:
        """What the data plane reports."""
        for report in reports:
            match report:
                case Landed(transfer=transfer, chunks=chunks, size_bytes=size_bytes):
                    failpoint("receiver.scattered")
                    if chunks:
                        self._records.note("landed", f"{chunks} chunks, {size_bytes} bytes", transfer=transfer)
                        self._metrics.chunks("receiver", chunks, size_bytes, self._receiving.session_of(transfer))
                case Dropped():
                    self._on_dropped(report)
                case Malformed(code=code):
                    self._metrics.rejected(code)
                case Pulled(transfer=transfer, chunks=chunks, size_bytes=size_bytes, failure=None):
                    self._records.note("read", f"{chunks} chunks, {size_bytes} bytes", transfer=transfer)
                    self._metrics.chunks("receiver", chunks, size_bytes, self._receiving.session_of(transfer))
                case (
                    Pulled(transfer=transfer, failure=(code, reason))
                    | Broken(transfer=transfer, code=code, reason=reason)
                ):
                    self._records.note("broken", f"{code}: {reason}", transfer=transfer)
        self._do(self._receiving.hear(reports, self._clock()))

    def _on_dropped(self, dropped: Dropped) -> None:
        self._metrics.late_write()
        now = self._clock()
        if now - self._warned >= WARN_S:  # counted each time, said once a minute: whoever may write may write on
            self._warned = now
            log.warning("late or foreign write dropped: transfer=%r slot=%d", dropped.transfer, dropped.slot)

    def tick(self) -> None:
        before = self._receiving.uncompared
        self._do(self._receiving.tick(self._clock()))
        if late := self._receiving.uncompared - before:
            log.warning("%d pulled chunks were not compared: their sender said no digests in %g s", late, CHECK_S)
            self._metrics.uncompared(late)

    # Doing:

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Reach(address=address):
                    self.peers.reach(address)
                case Ask(address=address):
                    self.peers.ask(address)
                case Send(peer=address, body=body):
                    if isinstance(body, Claim):
                        request = self._receiving.request_of(body.transfer)
                        self._records.note(
                            "claimed",
                            f"of {address}",
                            request=request,
                            rendezvous=body.rendezvous,
                            transfer=body.transfer,
                        )
                    self.peers.send(address, body)
                    _pass_sent(body)
                case Tell(message=message):
                    self._current.tell(message)
                    self._told(message)
                case ReceiveOrder() | Lend() | StopReceiving() | Pull():
                    if isinstance(action, Pull):
                        chunks = f"chunks [{action.first_chunk}, {action.end_chunk}) of {action.plan.chunks}"
                        self._records.note("reading", chunks, transfer=action.transfer)
                    self._data_plane.give(action, self._current.memory)

    def _told(self, message: ToEngine) -> None:
        match message:
            case Done(request=request, moved_bytes=moved, seconds=seconds):
                log.debug("done: request=%s bytes=%d ms=%.2f", request, moved, seconds * 1e3)
                self._records.note("done", f"{moved} bytes", request=request, seconds=seconds)
                self._metrics.want_done(seconds)
                failpoint("receiver.done_told")
            case Failed(request=request, code=code, reason=reason):
                log.warning("failed: request=%s code=%s %s", request, code, reason)
                self._records.note("failed", f"{code}: {reason}", request=request)
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
