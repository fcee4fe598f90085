"""The sender's story: our engine offers tokens, other agents claim them, we send them or let them be read.

An offer comes in (`offer`) as the prompt is computed; a claim comes in (`from_receiver`), before or after it; the data
plane gets an order, and reports (`hear`); the engine gets its blocks back. exchange/sender.py decides what to do; this
file and runner.py do it. "A pull, function by function" in docs/architecture.md names the functions in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvbridge_proto.engine import NoOffer, Offer, Released, ToEngine, Withdraw
from kvbridge_proto.peer import (
    BlockTables,
    Body,
    Cancel,
    Claim,
    Drained,
    Hold,
    OfReceiver,
    Refuse,
    Renew,
    Settled,
)

from ..dataplane.data_plane import DataPlane
from ..exchange.actions import Action, Ask, Reach, Unconfirmed, WatchProcess
from ..exchange.orders import Broken, Digested, FenceReached, SendingReport, Warm, Watch
from ..exchange.sender import Sender
from ..exchange.session import AttachedEngine, Session
from ..failpoints import failpoint
from .current_engine import CurrentEngine
from .incoming_peers import IncomingPeers, SenderEvents
from .record import Event, Record
from .runner import Runner

CHECK_UNREAD_S = 0.01


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
    ) -> None:
        super().__init__(data_plane, record, current, clock)
        self.peers = self._send_to = open_peers(self)
        self.sending = sending
        self._watched = -1  # the count of our engine's fence that we wait for; -1: none

    # The engine:

    def offer(self, offer: Offer, engine: AttachedEngine) -> None:
        self._record.note(offer)
        failpoint("sender.offer_heard")
        self.do(self.sending.offer(offer, engine, self._clock()))
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

    def no_offer(self, said: NoOffer) -> None:
        """Nothing more is offered for this call: claims that wait for it hear so."""
        self.sending.no_offer(said, self._clock())
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
        incarnation, engine = session.peer.incarnation, self._current.engine
        match body:
            case Claim() if engine is None:
                refuse = Refuse(code="no_engine", reasons=("no engine is attached to this agent",), about=body.transfer)
                self.peers.send(incarnation, refuse)
            case Claim():
                assert engine is not None
                failpoint("sender.claim_received")
                now = self._clock()
                self.do(self.sending.claim(body, session, engine, now), (body,), now, session.peer.name)
            case Cancel():
                failpoint("sender.cancel_received")
                self.do(self.sending.cancel(incarnation, body, self._clock()))
            case Hold(rendezvous_ids=rendezvous_ids):
                self.do(self.sending.hold(incarnation, rendezvous_ids, self._clock()))
            case _:
                match body:
                    case Renew():
                        failpoint("sender.renewal_heard")
                    case Settled():
                        failpoint("sender.settled_heard")
                now = self._clock()
                self.do(self.sending.on_message(incarnation, body), (body,), now)

    def renounce(self, incarnation: str, cancel: Cancel) -> bool:
        """Whether nothing is or will be written for this receiver's transfer."""
        return self.sending.renounce(incarnation, cancel)

    def lost(self, incarnation: str) -> None:
        self.do(self.sending.lost(incarnation))

    # The data plane:

    def hear(self, reports: Sequence[SendingReport]) -> None:
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
        self.do(self.sending.hear(reports))

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

    # Doing (runner.py):

    def do(
        self, actions: Iterable[Action], events: Iterable[Event] = (), heard_at: float | None = None, peer: str = ""
    ) -> None:
        """Also send the answers that are due then. If an action fails, they stay due."""
        super().do(self._with_answers(actions) if self.sending.has_pending else actions, events, heard_at, peer)

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

    def _sent(self, said: Body | ToEngine) -> None:
        match said:
            case BlockTables():
                failpoint("sender.tables_sent")
            case Drained():
                failpoint("sender.drained_sent")
            case Released():
                failpoint("sender.released_told")
