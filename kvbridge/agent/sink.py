"""The sink's story: our engine wants tokens, other agents bring them, we put them into its blocks.

A want comes in (`want`), sessions open (`opened`), the data plane reports what has come into the blocks (`hear`), and
the engine is told. What to do is decided by exchange.inbound; here it is done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvbridge_proto.engine import Done, Expect, Failed, ToEngine, Want
from kvbridge_proto.peer import (
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
    Tables,
)
from msgspec import structs

from ..dataplane.attachment import Attachment
from ..dataplane.mover import Mover
from ..exchange.actions import Action, Ask, Reach, Send, Tell
from ..exchange.inbound import CHECK_S, Inbound
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
from ..exchange.session import Home, Session
from ..failpoints import failpoint
from ..transport.endpoint import canonical
from .dialling import Dialling
from .lives import Lives
from .metrics import Metrics

log = logging.getLogger("kvbridge.sink")

WARN_S = 60.0


class Sink:
    """Runs on the loop. `attached` is what the engine attached, or None."""

    def __init__(
        self,
        inbound: Inbound,
        peers: Dialling,
        mover: Mover,
        metrics: Metrics,
        lives: Lives,
        tell: Callable[[ToEngine], None],
        clock: Callable[[], float],
    ) -> None:
        self.attached: Attachment | None = None
        self._inbound = inbound
        self._peers = peers
        self._mover = mover
        self._metrics = metrics
        self._lives = lives
        self._tell = tell
        self._clock = clock
        self._warned = float("-inf")

    # The engine:

    def expect(self, expect: Expect) -> None:
        expect = structs.replace(expect, source=canonical(expect.source))
        self._do(self._inbound.expect(expect, self._clock()))

    def want(self, want: Want, home: Home) -> None:
        want = structs.replace(want, source=canonical(want.source))
        log.debug(
            "want: request=%s room=%s tokens=[%d,%d) source=%s",
            want.request,
            want.room,
            want.first_token,
            want.end_token,
            want.source,
        )
        tokens = f"tokens [{want.first_token}, {want.end_token}) of {want.source}"
        self._lives.note("wanted", tokens, request=want.request, room=want.room, traceparent=want.traceparent)
        failpoint("sink.want_heard")
        self._mover.get_up()
        self._do(self._inbound.want(want, home, self._clock()))

    def knows(self, request: str) -> bool:
        """Whether this want is open."""
        return request in self._inbound.wants

    def abandon(self, request: str) -> None:
        self._lives.note("abandoned", request=request)
        self._do(self._inbound.abandon(request, self._clock()))

    def rescaled(self, home: Home) -> None:
        self._do(self._inbound.rescaled(home, self._clock()))

    def rebuilt(self, home: Home | None) -> None:
        self._do(self._inbound.rebuilt(home, self._clock()))

    def pause(self) -> bool:
        """Begin nothing until `rebuilt` or `resume`. Whether nothing is under way any more."""
        return self._inbound.pause()

    def resume(self) -> None:
        self._do(self._inbound.resume(self._clock()))

    def declined(self, revision: int, reason: str) -> None:
        self._do(self._inbound.declined(revision, reason, self._clock()))

    def engine_left(self) -> None:
        self._do(self._inbound.engine_left(self._clock()))

    # Other agents:

    def met(self, session: Session) -> None:
        """A source we did not know: be ready for what it will bring."""
        if self.attached is None:
            return
        ours = session.planner.samples(session.slot_bytes, is_source=False)
        if session.routed.is_pulled:
            theirs = session.planner.samples(session.slot_bytes, is_source=True)
            pairs = list(zip(theirs, ours, strict=False))  # where one side cannot have such samples there are none
            self._mover.warm_pull(self.attached, session.whose, pairs, self._inbound.sampling.kinds)
        else:
            self._mover.warm(self.attached, ours)

    def opened(self, address: str, session: Session) -> None:
        self._do(self._inbound.opened(address, session, self._clock()))

    def is_wanted(self, address: str) -> bool:
        """Whether a want names this address or takes from there."""
        return any(
            address in (wanted.want.source, *(intake.address for intake in wanted.intakes.values()))
            for wanted in self._inbound.wants.values()
        )

    def refused(self, address: str, boot: str, key: str) -> None:
        self._do(self._inbound.refused(address, boot, key))

    def unreachable(self, address: str, code: str, reason: str) -> None:
        self._do(self._inbound.unreachable(address, code, reason, self._clock()))

    def from_source(self, boot: str, key: str, body: Tables | Checked | Ready | Failing | Drained | Refuse) -> None:
        now, inbound = self._clock(), self._inbound
        self._note_heard(body)
        match body:
            case Ready(transfer=transfer, chunks=chunks):
                self._do(inbound.ready(boot, transfer, chunks, key))
            case Tables():
                failpoint("sink.tables_heard")
                self._do(inbound.tables(boot, body, now, key))
            case Checked():
                compared, differing = inbound.compared, inbound.differing
                self._do(inbound.checked(boot, body, now, key))
                self._metrics.compared("sink", inbound.compared - compared, inbound.differing - differing)
            case Failing(transfer=transfer, code=code, reason=reason):
                self._do(inbound.failing(boot, transfer, code, reason, now, key))
            case Drained(transfer=transfer, code=code, reason=reason):
                failpoint("sink.drained_heard")
                self._do(inbound.drained(boot, transfer, code, reason, now, key))
            case Refuse(about=transfer, code=code, reasons=reasons):  # a refused claim is never written for
                self._do(inbound.drained(boot, transfer, code, "; ".join(reasons), now, key))

    def _note_heard(self, body: Tables | Checked | Ready | Failing | Drained | Refuse) -> None:
        note = self._lives.note
        match body:
            case Tables(transfer=transfer, tokens=tokens, blocks=blocks) if blocks:
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
                    failpoint("sink.scattered")
                    if chunks:
                        self._lives.note("landed", f"{chunks} chunks, {size_bytes} bytes", transfer=transfer)
                        self._metrics.chunks("sink", chunks, size_bytes, self._inbound.session_of(transfer))
                case Dropped():
                    self._on_dropped(report)
                case Malformed(code=code):
                    self._metrics.rejected(code)
                case Pulled(transfer=transfer, chunks=chunks, size_bytes=size_bytes, failure=None):
                    self._lives.note("read", f"{chunks} chunks, {size_bytes} bytes", transfer=transfer)
                    self._metrics.chunks("sink", chunks, size_bytes, self._inbound.session_of(transfer))
                case (
                    Pulled(transfer=transfer, failure=(code, reason))
                    | Broken(transfer=transfer, code=code, reason=reason)
                ):
                    self._lives.note("broken", f"{code}: {reason}", transfer=transfer)
        self._do(self._inbound.hear(reports, self._clock()))

    def _on_dropped(self, dropped: Dropped) -> None:
        self._metrics.late_write()
        now = self._clock()
        if now - self._warned >= WARN_S:  # counted each time, said once a minute: whoever may write may write on
            self._warned = now
            log.warning("late or foreign write dropped: transfer=%r slot=%d", dropped.transfer, dropped.slot)

    def tick(self) -> None:
        before = self._inbound.uncompared
        self._do(self._inbound.tick(self._clock()))
        if late := self._inbound.uncompared - before:
            log.warning("%d pulled chunks were not compared: their sender said no digests in %g s", late, CHECK_S)
            self._metrics.uncompared(late)

    # Doing:

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Reach(address=address):
                    self._peers.reach(address)
                case Ask(address=address):
                    self._peers.ask(address)
                case Send(peer=address, body=body):
                    if isinstance(body, Claim):
                        request = self._inbound.request_of(body.transfer)
                        self._lives.note(
                            "claimed", f"of {address}", request=request, room=body.room, transfer=body.transfer
                        )
                    self._peers.send(address, body)
                    _pass_sent(body)
                case Tell(message=message):
                    self._tell(message)
                    self._told(message)
                case ReceiveOrder() | Lend() | StopReceiving() | Pull():
                    if isinstance(action, Pull):
                        chunks = f"chunks [{action.first_chunk}, {action.end_chunk}) of {action.plan.chunks}"
                        self._lives.note("reading", chunks, transfer=action.transfer)
                    self._mover.give(action, self.attached)

    def _told(self, message: ToEngine) -> None:
        match message:
            case Done(request=request, moved_bytes=moved, seconds=seconds):
                log.debug("done: request=%s bytes=%d ms=%.2f", request, moved, seconds * 1e3)
                self._lives.note("done", f"{moved} bytes", request=request, seconds=seconds)
                self._metrics.want_done(seconds)
                failpoint("sink.done_told")
            case Failed(request=request, code=code, reason=reason):
                log.warning("failed: request=%s code=%s %s", request, code, reason)
                self._lives.note("failed", f"{code}: {reason}", request=request)
                self._metrics.want_failed(code)


def _pass_sent(body: Body) -> None:
    match body:
        case Claim():
            failpoint("sink.claim_sent")
        case Grant():
            failpoint("sink.grant_sent")
        case Renew():
            failpoint("sink.renewal_sent")
        case Cancel():
            failpoint("sink.cancel_sent")
        case Settled():
            failpoint("sink.settled_sent")
