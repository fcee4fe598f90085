"""The sender's story: our engine offers tokens, other agents claim them, we gather and push.

An offer comes in (`offer`) as the prompt is computed; a claim comes in (`from_receiver`), before or after it; the data
plane gets an order, and reports (`hear`); the engine gets its blocks back. What to do is decided by exchange.sending;
here it is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvbridge_proto.engine import Offer, Released
from kvbridge_proto.peer import (
    BlockTables,
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
)

from ..dataplane.data_plane import DataPlane
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
from ..exchange.sender import Sender
from ..exchange.session import AttachedEngine, Session
from ..failpoints import failpoint
from .current_engine import CurrentEngine
from .incoming_peers import IncomingPeers
from .metrics import Metrics
from .peer_records import SenderEvents
from .request_records import RequestRecords

log = logging.getLogger("kvbridge.sender")

UNREAD_LOOK_S = 0.01


class SenderRunner:
    """Runs on the loop. It opens the sessions it needs: `peers`."""

    def __init__(
        self,
        sending: Sender,
        open_peers: Callable[[SenderEvents], IncomingPeers],
        data_plane: DataPlane,
        metrics: Metrics,
        records: RequestRecords,
        current: CurrentEngine,
        clock: Callable[[], float],
    ) -> None:
        self.peers = open_peers(self)
        self._sending = sending
        self._data_plane = data_plane
        self._metrics = metrics
        self._records = records
        self._current = current
        self._clock = clock
        self._watched = -1  # the count of our engine's fence that is looked out for

    # The engine:

    def offer(self, offer: Offer, engine: AttachedEngine) -> None:
        log.debug(
            "offer: request=%s rendezvous=%s tokens=[%d, %d)%s",
            offer.request,
            offer.rendezvous,
            offer.first_token,
            offer.tokens,
            " (last)" if offer.is_last else "",
        )
        tokens = f"tokens [{offer.first_token}, {offer.tokens}){', all there are' * offer.is_last}"
        self._records.note(
            "offered", tokens, request=offer.request, rendezvous=offer.rendezvous, traceparent=offer.traceparent
        )
        failpoint("sender.offer_heard")
        self._do(self._sending.offer(offer, engine, self._clock()))
        if self._sending.is_owing:  # its socket is not found empty before we have read what we are at
            asyncio.get_running_loop().call_soon(self._do, [])

    def knows(self, request: str) -> bool:
        """Whether this offer is open."""
        return request in self._sending.offers

    def is_due(self, offer: Offer) -> bool:
        """Whether it goes on with what was offered before, or somebody has claimed it already."""
        return self.knows(offer.request) or self._sending.is_awaited(offer.rendezvous)

    def is_hopeless(self, claim: Claim) -> bool:
        """Whether what it takes is not offered, and will not be if nothing new is."""
        return not (self._sending.is_awaited(claim.rendezvous) or self._sending.has_offer(claim))

    def withdraw(self, request: str, reason: str, comes_again: bool = False) -> None:
        actions = self._sending.withdraw(request, reason, self._clock(), comes_again)
        self._records.note("withdrawn", reason, request=request)
        if self.knows(request):  # it is being read
            failpoint("sender.withdraw_heard")
        self._do(actions)

    def reclaim(self, blocks: int) -> None:
        self._do(self._sending.reclaim(blocks, self._clock()))

    def rescaled(self, reason: str) -> None:
        self._do(self._sending.rescaled(reason, self._clock()))

    def pause(self, is_alone: bool) -> bool:
        """Begin nothing until `rebuilt` or `resume`, if we serve all of our engine. Whether nothing is under way but
        what is late."""
        return self._sending.pause(is_alone) and not self._data_plane.send_orders.moving

    def resume(self) -> None:
        self._do(self._sending.resume())

    def rebuilt(self, reason: str) -> None:
        self._do(self._sending.rebuilt(reason))

    def engine_left(self) -> None:
        self._do(self._sending.engine_left(self._clock()))

    # Other agents:

    def met(self, session: Session) -> None:
        """A receiver we did not know: be ready for what it will take, or read itself and compare."""
        if self._current.memory is not None:
            self._data_plane.warm(self._current.memory, session.planner.samples(session.slot_bytes, is_sender=True))

    def from_receiver(self, session: Session, body: Claim | Grant | Renew | Check | Cancel | Hold | Settled) -> None:
        incarnation, engine = session.peer.incarnation, self._current.engine
        match body:
            case Claim() if engine is None:
                refuse = Refuse(code="no_engine", reasons=("no engine is attached to this agent",), about=body.transfer)
                self.peers.send(incarnation, refuse)
            case Claim():
                assert engine is not None
                failpoint("sender.claim_received")
                log.debug("claim: transfer=%s want=%s rendezvous=%s", body.transfer, body.want, body.rendezvous)
                tokens = f"tokens [{body.first_token}, {body.end_token}) by {session.peer.name}"
                self._records.note("claimed", tokens, rendezvous=body.rendezvous, transfer=body.transfer)
                self._do(self._sending.claim(body, session, engine, self._clock()))
            case Grant():
                self._do(self._sending.grant(incarnation, body))
            case Cancel():
                failpoint("sender.cancel_received")
                self._do(self._sending.cancel(incarnation, body))
            case Hold(rendezvous_ids=rendezvous_ids):
                self._do(self._sending.hold(incarnation, rendezvous_ids, self._clock()))
            case Renew():
                failpoint("sender.renewal_heard")
                self._sending.renew(incarnation, body)
                self._do([])
            case Check():
                self._do(self._sending.check(incarnation, body))
            case Settled(transfer=transfer):
                failpoint("sender.settled_heard")
                log.debug("settled: transfer=%s", transfer)
                self._records.note("settled", transfer=transfer)
                self._metrics.transfer_settled()
                if (read := self._sending.read_by(incarnation, transfer)) is not None:
                    self._metrics.chunks("sender", read.chunks, read.total_bytes, session)
                self._do(self._sending.settled(incarnation, transfer))

    def renounce(self, incarnation: str, cancel: Cancel) -> bool:
        """Whether nothing of this transfer of that receiver is or will be written."""
        return self._sending.renounce(incarnation, cancel)

    def lost(self, incarnation: str) -> None:
        self._do(self._sending.lost(incarnation))

    # The data plane:

    def hear(self, reports: Sequence[SendingReport]) -> None:
        """What the data plane reports."""
        for report in reports:
            match report:
                case Shipped(transfer=transfer, chunks=chunks, size_bytes=size_bytes, gather_s=gather_s):
                    took = f"{chunks} chunks, {size_bytes} bytes, gathered in {sum(gather_s) * 1e3:.2f} ms"
                    self._records.note("written", took, transfer=transfer)
                    self._metrics.chunks("sender", chunks, size_bytes, self._sending.session_of(transfer))
                    for seconds in gather_s:
                        self._metrics.gathered(seconds)
                case Broken(transfer=transfer, code=code, reason=reason):
                    log.warning("chunk not shipped: transfer=%s code=%s %s", transfer, code, reason)
                    self._records.note("broken", f"{code}: {reason}", transfer=transfer)
                case Digested():
                    self._on_digested(report)
                case FenceReached():  # our engine's stream is further on, or as far as we wait for it
                    self._watched = -1
        self._do(self._sending.hear(reports))

    def _on_digested(self, report: Digested) -> None:
        transfer, found, read = report.transfer, report.found, report.read
        if report.failure is not None:
            return log.warning("chunk not compared: transfer=%s code=%s %s", transfer, *report.failure)
        self._metrics.compared("sender", 1, int(found != read))
        if found != read:
            words = "chunk %d: we have digest %016x, read was %016x"
            log.warning("digest_mismatch: transfer=%s " + words, transfer, found.chunk, found.digest, read.digest)

    async def unread(self) -> None:
        """Return when no receiver counts on our engine's blocks any more: soon, and at most a lease from now."""
        while self._sending.is_promised:
            await asyncio.sleep(UNREAD_LOOK_S)
            self.tick()

    def tick(self) -> None:
        before = self._sending.leases_over
        self._do(self._sending.tick(self._clock()))
        if over := self._sending.leases_over - before:
            log.warning(
                "blocks were kept until %d read leases were over: receivers did not say that they were through", over
            )
            self._metrics.leases_over(over)

    # Doing:

    def _do(self, actions: list[Action]) -> None:
        self._perform(actions)
        if self._sending.is_owing:
            self._answer()

    def _answer(self) -> None:
        """Tell receivers what they may read, if our engine has said nothing that we have not heard."""
        if (memory := self._current.memory) is not None:
            self._current.listen()
            heard_at = memory.liveness.heard_at
            self._perform(self._sending.answers(self._clock(), heard_at, memory.has_reached))

    def _watch(self, fence: int) -> None:
        if (self._watched < 0 or fence < self._watched) and self._current.memory is not None:
            self._watched = fence
            self._data_plane.give(Watch(fence), self._current.memory)

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(peer=incarnation, body=body):
                    self._note_said(body)
                    self.peers.send(incarnation, body)
                    _pass_sent(body)
                case Tell(message=message):
                    if isinstance(message, Released):
                        why = f"{message.code} {message.reason}".strip()
                        self._records.note("released", why, request=message.request)
                        log.debug("released: request=%s %s %s", message.request, message.code, message.reason)
                        self._metrics.offer_released(message.code, message.is_declined)
                    self._current.tell(message)
                    if isinstance(message, Released):
                        failpoint("sender.released_told")
                case SendOrder(transfer=transfer, plan=plan, request=request):
                    size = f"{plan.chunks} chunks, {plan.total_bytes} bytes"
                    self._records.note("ordered", size, request=request, transfer=transfer)
                    self._data_plane.give(action, self._current.memory)
                case Progress() | Credit() | StopSending() | Digest():
                    self._data_plane.give(action, self._current.memory)
                case Watch(fence=fence):
                    self._watch(fence)

    def _note_said(self, body: Body) -> None:
        match body:
            case BlockTables(transfer=transfer, tokens=tokens, blocks=blocks) if blocks:
                request = self._sending.request_of(transfer)
                self._records.note("readable", f"tokens up to {tokens}", request=request, transfer=transfer)
            case Refuse(about=transfer, code=code, reasons=reasons):
                self._records.note("refused", f"{code}: {'; '.join(reasons)}", transfer=transfer)
            case (
                Failing(transfer=transfer, code=code, reason=reason)
                | Drained(transfer=transfer, code=code, reason=reason)
            ) if code:
                self._records.note("failed", f"{code}: {reason}", transfer=transfer)


def _pass_sent(body: Body) -> None:
    match body:
        case BlockTables():
            failpoint("sender.tables_sent")
        case Drained():
            failpoint("sender.drained_sent")
