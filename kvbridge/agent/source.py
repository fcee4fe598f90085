"""The source's story: our engine offers tokens, other agents claim them, we gather and push.

An offer comes in (`offer`) as the prompt is computed; a claim comes in (`from_sink`), before or after it; the data
plane gets an order, and reports (`hear`); the engine gets its blocks back. What to do is decided by exchange.outbound;
here it is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvbridge_proto.engine import Offer, Released, ToEngine
from kvbridge_proto.peer import (
    Body,
    Cancel,
    Check,
    Claim,
    Drained,
    Failing,
    Grant,
    Hold,
    Refuse,
    Renew,
    Settled,
    Tables,
)

from ..dataplane.attachment import Attachment
from ..dataplane.mover import Mover
from ..exchange.actions import Action, Send, Tell
from ..exchange.orders import (
    Broken,
    Credit,
    Digest,
    Digested,
    FenceReached,
    Progress,
    SendingReport,
    SendOrder,
    Shipped,
    StopSending,
    Watch,
)
from ..exchange.outbound import Outbound
from ..exchange.session import Home, Session
from ..failpoints import failpoint
from .accepting import Accepting
from .lives import Lives
from .metrics import Metrics

log = logging.getLogger("kvbridge.source")

UNREAD_LOOK_S = 0.01


class Source:
    """Runs on the loop. `attached` is what the engine attached, or None."""

    def __init__(
        self,
        outbound: Outbound,
        peers: Accepting,
        mover: Mover,
        metrics: Metrics,
        lives: Lives,
        tell: Callable[[ToEngine], None],
        home: Callable[[], Home | None],
        listen: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.attached: Attachment | None = None
        self._outbound = outbound
        self._peers = peers
        self._mover = mover
        self._metrics = metrics
        self._lives = lives
        self._tell = tell
        self._home = home
        self._listen = listen
        self._clock = clock
        self._watched = -1  # the count of our engine's fence that is looked out for

    # The engine:

    def offer(self, offer: Offer, home: Home) -> None:
        log.debug(
            "offer: request=%s room=%s tokens=[%d, %d)%s",
            offer.request,
            offer.room,
            offer.first_token,
            offer.tokens,
            " (last)" if offer.is_last else "",
        )
        tokens = f"tokens [{offer.first_token}, {offer.tokens}){', all there are' * offer.is_last}"
        self._lives.note("offered", tokens, request=offer.request, room=offer.room, traceparent=offer.traceparent)
        failpoint("source.offer_heard")
        self._do(self._outbound.offer(offer, home, self._clock()))
        if self._outbound.is_owing:  # its socket is not found empty before we have read what we are at
            asyncio.get_running_loop().call_soon(self._do, [])

    def knows(self, request: str) -> bool:
        """Whether this offer is open."""
        return request in self._outbound.offers

    def is_due(self, offer: Offer) -> bool:
        """Whether it goes on with what was offered before, or somebody has claimed it already."""
        return self.knows(offer.request) or self._outbound.is_awaited(offer.room)

    def is_hopeless(self, claim: Claim) -> bool:
        """Whether what it takes is not offered, and will not be if nothing new is."""
        return not (self._outbound.is_awaited(claim.room) or self._outbound.has_offer(claim))

    def withdraw(self, request: str, reason: str, comes_again: bool = False) -> None:
        actions = self._outbound.withdraw(request, reason, self._clock(), comes_again)
        self._lives.note("withdrawn", reason, request=request)
        if self.knows(request):  # it is being read
            failpoint("source.withdraw_heard")
        self._do(actions)

    def reclaim(self, blocks: int) -> None:
        self._do(self._outbound.reclaim(blocks, self._clock()))

    def rescaled(self, reason: str) -> None:
        self._do(self._outbound.rescaled(reason, self._clock()))

    def pause(self, is_alone: bool) -> bool:
        """Begin nothing until `rebuilt` or `resume`, if we serve all of our engine. Whether nothing is under way but
        what is late."""
        return self._outbound.pause(is_alone) and not self._mover.sending.moving

    def resume(self) -> None:
        self._do(self._outbound.resume())

    def rebuilt(self, reason: str) -> None:
        self._do(self._outbound.rebuilt(reason))

    def engine_left(self) -> None:
        self._do(self._outbound.engine_left(self._clock()))

    # Other agents:

    def met(self, session: Session) -> None:
        """A sink we did not know: be ready for what it will take, or read itself and compare."""
        if self.attached is not None:
            self._mover.warm(self.attached, session.planner.samples(session.slot_bytes, is_source=True))

    def from_sink(self, session: Session, body: Claim | Grant | Renew | Check | Cancel | Hold | Settled) -> None:
        boot, home = session.peer.boot, self._home()
        match body:
            case Claim() if home is None:
                refuse = Refuse(code="no_engine", reasons=("no engine is attached to this agent",), about=body.transfer)
                self._peers.send(boot, refuse)
            case Claim():
                assert home is not None
                failpoint("source.claim_received")
                log.debug("claim: transfer=%s want=%s room=%s", body.transfer, body.want, body.room)
                tokens = f"tokens [{body.first_token}, {body.end_token}) by {session.peer.name}"
                self._lives.note("claimed", tokens, room=body.room, transfer=body.transfer)
                self._do(self._outbound.claim(body, session, home, self._clock()))
            case Grant():
                self._do(self._outbound.grant(boot, body))
            case Cancel():
                failpoint("source.cancel_received")
                self._do(self._outbound.cancel(boot, body))
            case Hold(rooms=rooms):
                self._do(self._outbound.hold(boot, rooms, self._clock()))
            case Renew():
                failpoint("source.renewal_heard")
                self._outbound.renew(boot, body)
                self._do([])
            case Check():
                self._do(self._outbound.check(boot, body))
            case Settled(transfer=transfer):
                failpoint("source.settled_heard")
                log.debug("settled: transfer=%s", transfer)
                self._lives.note("settled", transfer=transfer)
                self._metrics.transfer_settled()
                if (read := self._outbound.read_by(boot, transfer)) is not None:
                    self._metrics.chunks("source", read.chunks, read.total_bytes, session)
                self._do(self._outbound.settled(boot, transfer))

    def renounce(self, boot: str, cancel: Cancel) -> bool:
        """Whether nothing of this transfer of that sink is or will be written."""
        return self._outbound.renounce(boot, cancel)

    def lost(self, boot: str) -> None:
        self._do(self._outbound.lost(boot))

    # The data plane:

    def hear(self, reports: Sequence[SendingReport]) -> None:
        """What the data plane reports."""
        for report in reports:
            match report:
                case Shipped(transfer=transfer, chunks=chunks, size_bytes=size_bytes, gather_s=gather_s):
                    took = f"{chunks} chunks, {size_bytes} bytes, gathered in {sum(gather_s) * 1e3:.2f} ms"
                    self._lives.note("written", took, transfer=transfer)
                    self._metrics.chunks("source", chunks, size_bytes, self._outbound.session_of(transfer))
                    for seconds in gather_s:
                        self._metrics.gathered(seconds)
                case Broken(transfer=transfer, code=code, reason=reason):
                    log.warning("chunk not shipped: transfer=%s code=%s %s", transfer, code, reason)
                    self._lives.note("broken", f"{code}: {reason}", transfer=transfer)
                case Digested():
                    self._on_digested(report)
                case FenceReached():  # our engine's stream is further on, or as far as we wait for it
                    self._watched = -1
        self._do(self._outbound.hear(reports))

    def _on_digested(self, report: Digested) -> None:
        transfer, found, read = report.transfer, report.found, report.read
        if report.failure is not None:
            return log.warning("chunk not compared: transfer=%s code=%s %s", transfer, *report.failure)
        self._metrics.compared("source", 1, int(found != read))
        if found != read:
            words = "chunk %d: we have digest %016x, read was %016x"
            log.warning("digest_mismatch: transfer=%s " + words, transfer, found.chunk, found.digest, read.digest)

    async def unread(self) -> None:
        """Return when no receiver counts on our engine's blocks any more: soon, and at most a lease from now."""
        while self._outbound.is_promised:
            await asyncio.sleep(UNREAD_LOOK_S)
            self.tick()

    def tick(self) -> None:
        before = self._outbound.leases_over
        self._do(self._outbound.tick(self._clock()))
        if over := self._outbound.leases_over - before:
            log.warning(
                "blocks were kept until %d read leases were over: receivers did not say that they were through", over
            )
            self._metrics.leases_over(over)

    # Doing:

    def _do(self, actions: list[Action]) -> None:
        self._perform(actions)
        if self._outbound.is_owing:
            self._answer()

    def _answer(self) -> None:
        """Tell receivers what they may read, if our engine has said nothing that we have not heard."""
        if (attached := self.attached) is not None:
            self._listen()
            heard_at = attached.word.heard_at
            self._perform(self._outbound.answers(self._clock(), heard_at, attached.has_reached))

    def _watch(self, fence: int) -> None:
        if (self._watched < 0 or fence < self._watched) and self.attached is not None:
            self._watched = fence
            self._mover.give(Watch(fence), self.attached)

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(peer=boot, body=body):
                    self._note_said(body)
                    self._peers.send(boot, body)
                    _pass_sent(body)
                case Tell(message=message):
                    if isinstance(message, Released):
                        why = f"{message.code} {message.reason}".strip()
                        self._lives.note("released", why, request=message.request)
                        log.debug("released: request=%s %s %s", message.request, message.code, message.reason)
                        self._metrics.offer_released(message.code, message.is_declined)
                    self._tell(message)
                    if isinstance(message, Released):
                        failpoint("source.released_told")
                case SendOrder(transfer=transfer, plan=plan, request=request):
                    size = f"{plan.chunks} chunks, {plan.total_bytes} bytes"
                    self._lives.note("ordered", size, request=request, transfer=transfer)
                    self._mover.give(action, self.attached)
                case Progress() | Credit() | StopSending() | Digest():
                    self._mover.give(action, self.attached)
                case Watch(fence=fence):
                    self._watch(fence)

    def _note_said(self, body: Body) -> None:
        match body:
            case Tables(transfer=transfer, tokens=tokens, blocks=blocks) if blocks:
                request = self._outbound.request_of(transfer)
                self._lives.note("readable", f"tokens up to {tokens}", request=request, transfer=transfer)
            case Refuse(about=transfer, code=code, reasons=reasons):
                self._lives.note("refused", f"{code}: {'; '.join(reasons)}", transfer=transfer)
            case (
                Failing(transfer=transfer, code=code, reason=reason)
                | Drained(transfer=transfer, code=code, reason=reason)
            ) if code:
                self._lives.note("failed", f"{code}: {reason}", transfer=transfer)


def _pass_sent(body: Body) -> None:
    match body:
        case Tables():
            failpoint("source.tables_sent")
        case Drained():
            failpoint("source.drained_sent")
