"""The sender's story: our engine offers tokens, other agents claim them, we send them or let them be read.

An offer comes in (`offer`) as the prompt is computed; a claim comes in (`from_receiver`), before or after it; the data
plane gets an order, and reports (`hear`); the engine gets its blocks back. exchange/sender.py decides what to do; this
file does it. "A pull, function by function" in docs/architecture.md names the functions in order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvbridge_proto.engine import NoOffer, Offer, Released
from kvbridge_proto.peer import (
    BlockTables,
    Body,
    Cancel,
    Claim,
    Drained,
    Hold,
    Refuse,
    Renew,
    RouteToSender,
    Settled,
)

from ..dataplane.data_plane import DataPlane
from ..exchange.actions import Action, Carried, Met, Send, Tell, Unconfirmed
from ..exchange.orders import (
    Broken,
    Digested,
    FenceReached,
    Order,
    SendingReport,
    Sent,
    Shipped,
    StageReached,
    Warm,
    Watch,
)
from ..exchange.sender import Sender
from ..exchange.session import AttachedEngine, Session
from ..failpoints import failpoint
from .current_engine import CurrentEngine
from .incoming_peers import IncomingPeers
from .metrics import Metrics
from .peer_records import SenderEvents
from .request_log import RequestLog
from .request_records import CarryTimes, RequestRecords

CHECK_UNREAD_S = 0.01
Performed = tuple[float, list[Action]]  # when it was decided, and what


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
        self._log = RequestLog(logging.getLogger("kvbridge.sender"), records.names)
        self._current = current
        self._clock = clock
        self._carry_times = CarryTimes()
        self._watched = -1  # the count of our engine's fence that we wait for; -1: none

    # The engine:

    def offer(self, offer: Offer, engine: AttachedEngine) -> None:
        tokens = f"tokens [{offer.first_token}, {offer.tokens}){', all there are' * offer.is_last}"
        self._records.note(
            "offered",
            tokens,
            number=offer.number,
            request=offer.request,
            rendezvous=offer.rendezvous,
            traceparent=offer.traceparent,
        )
        self._log.debug("offer", "rendezvous=%s %s", offer.rendezvous, tokens, number=offer.number)
        failpoint("sender.offer_heard")
        self._do(self._sending.offer(offer, engine, self._clock()))
        if self._sending.is_owing:  # its socket counts as empty only after this message
            asyncio.get_running_loop().call_soon(self._do, [])

    def is_due(self, offer: Offer) -> bool:
        """Whether it continues an offer, or a claim waits for it."""
        return offer.is_more or self._sending.is_awaited(offer.rendezvous)

    def knows(self, number: int) -> bool:
        """Whether this offer is open, or still read."""
        return number in self._sending.offers

    def will_never_be_offered(self, claim: Claim) -> bool:
        """Whether there is no offer for this claim, and none will be accepted while we stop."""
        return not (self._sending.is_awaited(claim.rendezvous) or self._sending.has_offer(claim))

    def withdraw(self, number: int, reason: str, comes_again: bool = False) -> None:
        actions = self._sending.withdraw(number, reason, self._clock(), comes_again)
        self._records.note("withdrawn", reason, number=number)
        if number in self._sending.offers:  # it is still being read
            failpoint("sender.withdraw_heard")
        self._do(actions)

    def no_offer(self, said: NoOffer) -> None:
        """Nothing more is offered for this call: claims that wait for it hear so."""
        self._sending.no_offer(said, self._clock())
        if self._sending.is_owing:  # as in `offer`
            asyncio.get_running_loop().call_soon(self._do, [])

    def reclaim(self, blocks: int) -> None:
        self._do(self._sending.reclaim(blocks, self._clock()))

    def release(self) -> int:
        """Release what nobody has claimed. Returns how many offers that were."""
        count, actions = self._sending.release(self._clock())
        self._do(actions)
        return count

    def reweighed(self, reason: str) -> None:
        self._do(self._sending.reweighed(reason, self._clock()))

    def rescaled(self, reason: str) -> None:
        self._do(self._sending.rescaled(reason, self._clock()))

    def pause(self, is_alone: bool) -> bool:
        """Begin nothing until `rebuilt` or `resume`, if our engine has one rank (`is_alone`).

        Returns whether nothing is under way except late writes.
        """
        return self._sending.pause(is_alone) and not self._data_plane.send_orders.moving

    def resume(self) -> None:
        self._do(self._sending.resume())

    def rebuilt(self, reason: str) -> None:
        self._do(self._sending.rebuilt(reason))

    def engine_left(self) -> None:
        self._do(self._sending.engine_left(self._clock()))

    # Other agents:

    def met(self, session: Session) -> None:
        """A session with a new receiver: compile the kernels for what it will take, or read and compare."""
        parts = session.planner.samples(session.slot_bytes, is_sender=True)
        if parts and self._current.memory is not None:
            self._data_plane.give(Warm(parts), self._current.memory)

    def from_receiver(self, session: Session, body: Claim | Cancel | Hold | RouteToSender) -> None:
        incarnation, engine = session.peer.incarnation, self._current.engine
        match body:
            case Claim() if engine is None:
                refuse = Refuse(code="no_engine", reasons=("no engine is attached to this agent",), about=body.transfer)
                self.peers.send(incarnation, refuse)
            case Claim():
                assert engine is not None
                failpoint("sender.claim_received")
                claimed_at = self._clock()
                actions, done = self._sending.claim(body, session, engine, claimed_at), list[Performed]()
                try:
                    self._carry_out(actions, done)  # first: the receiver waits
                finally:
                    tokens = f"tokens [{body.first_token}, {body.end_token}) by {session.peer.name}"
                    rendezvous, transfer = body.rendezvous, body.transfer
                    self._records.note("claimed", tokens, rendezvous=rendezvous, transfer=transfer, at=claimed_at)
                    self._note(done)
                said = ("want=%s rendezvous=%s", body.want, body.rendezvous)
                self._log.debug("claim", *said, transfer=body.transfer)  # once it is known of which request
            case Cancel():
                failpoint("sender.cancel_received")
                self._do(self._sending.cancel(incarnation, body, self._clock()))
            case Hold(rendezvous_ids=rendezvous_ids):
                self._do(self._sending.hold(incarnation, rendezvous_ids, self._clock()))
            case _:
                self._note_heard(body)
                self._do(self._sending.on_message(incarnation, body))

    def _note_heard(self, body: RouteToSender) -> None:
        match body:
            case Renew():
                failpoint("sender.renewal_heard")
            case Settled(transfer=transfer):
                failpoint("sender.settled_heard")
                self._log.debug("settled", transfer=transfer)
                self._records.note("settled", transfer=transfer)
                self._carried(transfer)
                self._metrics.transfer_settled()

    def renounce(self, incarnation: str, cancel: Cancel) -> bool:
        """Whether nothing is or will be written for this receiver's transfer."""
        return self._sending.renounce(incarnation, cancel)

    def lost(self, incarnation: str) -> None:
        self._do(self._sending.lost(incarnation))

    # The data plane:

    def hear(self, reports: Sequence[SendingReport]) -> None:
        """Take the data plane's reports. They are noted first: nobody waits for what follows from them."""
        for report in reports:
            match report:
                case StageReached(transfer=transfer, stage=stage, at=at):
                    self._records.reach(report)
                    if stage == "computed":
                        self._carry_times.computed(transfer, at)
                case Sent(transfer=transfer):
                    self._carried(transfer)
                case Shipped(transfer=transfer, chunks=chunks, size_bytes=size_bytes, gather_s=gather_s):
                    self._records.note("written", f"{chunks} chunks, {size_bytes} bytes", transfer=transfer)
                    for seconds in gather_s:
                        self._metrics.gathered(seconds)
                case Broken(transfer=transfer, code=code, reason=reason):
                    self._log.warning("chunk not shipped", "code=%s %s", code, reason, transfer=transfer)
                    self._records.note("broken", f"{code}: {reason}", transfer=transfer)
                case Digested():
                    self._on_digested(report)
                case FenceReached():  # our engine's fence was reached, or the wait for it ended
                    self._watched = -1
        self._do(self._sending.hear(reports))

    def _carried(self, transfer: str) -> None:
        if (seconds := self._carry_times.carried(transfer, self._clock())) is not None:
            self._metrics.carried(seconds)

    def _on_digested(self, report: Digested) -> None:
        transfer, found, read = report.transfer, report.found, report.read
        if report.failure is not None:
            return self._log.warning("chunk not compared", "code=%s %s", *report.failure, transfer=transfer)
        self._metrics.compared("sender", 1, int(found != read))
        if found != read:
            words = "chunk %d: we have digest %016x, read was %016x"
            self._log.warning("digest_mismatch", words, found.chunk, found.digest, read.digest, transfer=transfer)

    async def unread(self) -> None:
        """Return once no receiver may read our engine's blocks: at most one lease from now."""
        while self._sending.is_promised:
            await asyncio.sleep(CHECK_UNREAD_S)
            self.tick()

    def tick(self) -> None:
        actions = self._sending.tick(self._clock())
        self._do(actions)
        if over := sum(isinstance(each, Unconfirmed) for each in actions):
            self._log.warning("read leases over", "%d receivers did not confirm that they had finished", over)

    # Doing:

    def _do(self, actions: list[Action]) -> None:
        done: list[Performed] = []
        try:
            self._carry_out(actions, done)
        finally:
            self._note(done)

    def _carry_out(self, actions: list[Action], done: list[Performed]) -> None:
        """Carry out these and the answers that are due then. Adds to `done` what was carried out."""
        self._perform(actions, done)
        if self._sending.is_owing:
            self._perform(self._answers(), done)

    def _answers(self) -> list[Action]:
        """What receivers may read now, if we have lately read everything that our engine sent."""
        if (memory := self._current.memory) is None:
            return []
        self._current.note_if_silent()
        return self._sending.answers(self._clock(), memory.liveness.heard_at, memory.has_reached)

    def _watch(self, fence: int) -> None:
        if (self._watched < 0 or fence < self._watched) and self._current.memory is not None:
            self._watched = fence
            self._data_plane.give(Watch(fence), self._current.memory)

    def _perform(self, actions: list[Action], done: list[Performed]) -> None:
        """Carry out these. Each is added to `done` when it has been carried out, so not the one that fails."""
        decided_at = self._clock()  # what is sent now may be noted by the other agent before we note it
        performed: list[Action] = []
        done.append((decided_at, performed))
        for action in actions:
            match action:
                case Send(peer=incarnation, body=body):
                    self.peers.send(incarnation, body)
                    _pass_sent(body)
                case Tell(message=message):
                    self._current.tell(message)
                    if isinstance(message, Released):
                        failpoint("sender.released_told")
                case Watch(fence=fence):
                    self._watch(fence)
                case Order():
                    self._data_plane.give(action, self._current.memory)
            performed.append(action)

    def _note(self, done: list[Performed]) -> None:
        """Record what was done, in the journal, log and metrics."""
        for at, action in ((at, action) for at, actions in done for action in actions):
            match action:
                case Send(body=BlockTables(transfer=transfer) as body) if body.blocks:
                    self._records.note_message(body, at, self._sending.number_of(transfer))
                    self._carry_times.computed(transfer, at)
                case Send(body=body):
                    self._records.note_message(body, at)
                case Tell(message=Released() as message):
                    why = f"{message.code} {message.reason}".strip()
                    self._records.note("released", why, number=message.number, at=at)
                    said = ("code=%s %s", message.code, message.reason) if message.code else ()
                    self._log.debug("released", *said, number=message.number)
                    self._metrics.offer_released(message.code, message.is_declined)
                case Met(transfer=transfer, number=number, chunks=chunks, size_bytes=size_bytes):
                    size = f"{chunks} chunks, {size_bytes} bytes"
                    self._records.note("met", size, number=number, transfer=transfer, at=at)
                    self._log.debug("met", "chunks=%d bytes=%d", chunks, size_bytes, transfer=transfer)
                case Carried(session=session, chunks=chunks, size_bytes=size_bytes):
                    self._metrics.chunks("sender", chunks, size_bytes, session)
                case Unconfirmed(transfer=transfer):
                    why = "its receiver did not confirm that it had finished; blocks were kept until now"
                    self._log.debug("read lease over", why, transfer=transfer)
                    self._metrics.lease_unconfirmed()


def _pass_sent(body: Body) -> None:
    match body:
        case BlockTables():
            failpoint("sender.tables_sent")
        case Drained():
            failpoint("sender.drained_sent")
