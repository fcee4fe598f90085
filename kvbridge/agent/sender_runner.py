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
    Refuse,
    Renew,
    RouteToSender,
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
        self._sending = sending
        self._watched = -1  # the count of our engine's fence that we wait for; -1: none

    # The engine:

    def offer(self, offer: Offer, engine: AttachedEngine) -> None:
        self._record.note(offer)
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

    def withdraw(self, withdraw: Withdraw) -> None:
        number = withdraw.number
        actions = self._sending.withdraw(number, withdraw.reason, self._clock(), withdraw.comes_again)
        self._record.note(withdraw)
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
                now = self._clock()
                self._do(self._sending.claim(body, session, engine, now), (body,), now, session.peer.name)
            case Cancel():
                failpoint("sender.cancel_received")
                self._do(self._sending.cancel(incarnation, body, self._clock()))
            case Hold(rendezvous_ids=rendezvous_ids):
                self._do(self._sending.hold(incarnation, rendezvous_ids, self._clock()))
            case _:
                match body:
                    case Renew():
                        failpoint("sender.renewal_heard")
                    case Settled():
                        failpoint("sender.settled_heard")
                now = self._clock()
                self._do(self._sending.on_message(incarnation, body), (body,), now)

    def renounce(self, incarnation: str, cancel: Cancel) -> bool:
        """Whether nothing is or will be written for this receiver's transfer."""
        return self._sending.renounce(incarnation, cancel)

    def lost(self, incarnation: str) -> None:
        self._do(self._sending.lost(incarnation))

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
        self._do(self._sending.hear(reports))

    def _compare(self, report: Digested) -> None:
        transfer, found, read = report.transfer, report.found, report.read
        if report.failure is not None:
            self._record.warn("chunk not compared", "code=%s %s", *report.failure, transfer=transfer)
        elif found != read:
            words = "chunk %d: we have digest %016x, read was %016x"
            self._record.warn("digest_mismatch", words, found.chunk, found.digest, read.digest, transfer=transfer)

    async def unread(self) -> None:
        """Return once no receiver may read our engine's blocks: at most one lease from now."""
        while self._sending.is_promised:
            await asyncio.sleep(CHECK_UNREAD_S)
            self.tick()

    def tick(self) -> None:
        actions = self._sending.tick(self._clock())
        self._do(actions)
        if over := sum(isinstance(each, Unconfirmed) for each in actions):
            self._record.warn("read leases over", "%d receivers did not confirm that they had finished", over)

    # Doing (runner.py):

    def _do(
        self, actions: Iterable[Action], events: Iterable[Event] = (), heard_at: float | None = None, peer: str = ""
    ) -> None:
        """Also send the answers that are due then. If an action fails, they stay due."""
        super()._do(self._with_answers(actions) if self._sending.is_owing else actions, events, heard_at, peer)

    def _with_answers(self, actions: Iterable[Action]) -> Iterator[Action]:
        yield from actions
        yield from self._answers()

    def _answers(self) -> list[Action]:
        """What receivers may read now, if we have lately read everything that our engine sent."""
        if (memory := self._current.memory) is None:
            return []
        self._current.note_if_silent()
        return self._sending.answers(self._clock(), memory.liveness.heard_at, memory.has_reached)

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
