"""The receiver's half: wants of our engine, satisfied by chunks that land in our slots. Pure.

A want needs every rank of the prefill engine. The receiver opens sessions with them and claims rows from each rank;
the route of each session says how they come (transfer.py). A want ends once: Done when all rows are in the blocks,
otherwise Failed, and never before the data plane is quiet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kvbridge_proto.engine import Done, Expect, Refused, Want
from kvbridge_proto.peer import Announce, Cancel, ProcessCard, Route, RouteToReceiver, Settled, SlotLease, Take
from msgspec import structs

from ..errors import KVBridgeError
from ..geometry.plan import Plan
from ..geometry.unfilled import Filling
from ..state_machines import WANT_TABLE, TransferState, WantEvent, WantState
from .actions import Action, Ask, Reach, Send, Tell
from .block_tables import tables_of
from .containers import Deadlines
from .orders import Broken, Filled, Quiet, ReceivingReport, RouteReport, StopReceiving
from .session import AttachedEngine, Session
from .transfer import IncomingTransfer, OpenTransfers, OpenWant, ReceivingRoute, Writers
from .wants import (
    SUCCEEDED,
    UNHEARD,
    Adoption,
    ExpectedRequests,
    SenderSessions,
    ShardAssignment,
    UnheardFailures,
    can_begin_again,
    claim_of,
    duplicate,
    failed,
    fill_of,
    holds,
    why_late,
    why_refused,
)

ASK_AGAIN_S = 0.1  # between questions for ranks that the sender's engine has not named yet
MOST_WANTS = 16384
UNHEARD_AGAIN_S = 5.0  # between attempts to reach a sender that must hear of failed wants


class Receiver:
    """All wants of this agent's engine. `make_routes` gets what the receiver shares with its routes."""

    def __init__(
        self,
        make_routes: Callable[[OpenTransfers], Mapping[Route, ReceivingRoute]],
        new_id: Callable[[], str],
        new_token: Callable[[], bytes],
    ) -> None:
        self.wants: dict[int, OpenWant] = {}
        self.incoming_transfers: dict[str, IncomingTransfer] = {}
        self.expected = ExpectedRequests()
        self._is_paused = False
        self._new_id = new_id
        self._new_token = new_token
        self._assignment = ShardAssignment()
        self._senders = SenderSessions()
        self._adoption = Adoption()
        self._filled_by: dict[str, OpenWant] = {}  # order to write zeros -> its want
        self._unheard = UnheardFailures()
        # Transfers that were cancelled before the sender had said anything to the claim, until it confirms that.
        self._cancelled: dict[str, tuple[OpenWant, str]] = {}
        self._deadlines: Deadlines[tuple[str, str]] = Deadlines()
        self._want_deadlines: Deadlines[int] = Deadlines()
        opened = OpenTransfers(self.incoming_transfers, self._senders.open, self._deadlines)
        self._route_of = dict(make_routes(opened))
        self._routes = tuple(dict.fromkeys(self._route_of.values()))  # several share one half

    # A want, until its rows are in the blocks:

    def want(self, want: Want, engine: AttachedEngine, now: float) -> list[Action]:
        """Our engine wants these tokens."""
        self.expected.end(want.number)
        if want.number in self.wants:
            return [duplicate(want)]
        if len(self.wants) >= MOST_WANTS:
            return [failed(want, "too_many_wants", f"wants: {MOST_WANTS} are open")]
        try:
            if want.end_token < want.first_token:
                reason = f"end_token: got {want.end_token}, first_token {want.first_token}"
                return [failed(want, "bad_range", reason)]
            tables = tables_of(engine, want.blocks, want.first_token, want.end_token)
        except KVBridgeError as error:
            return [failed(want, error.code, str(error))]
        wanted = OpenWant(want, engine, tables, now)
        self.wants[want.number] = wanted
        self._want_deadlines.set(want.number, now + want.deadline_s)
        return self._advance(wanted, now)

    def _advance(self, wanted: OpenWant, now: float) -> list[Action]:
        sender = wanted.want.sender
        if (sessions := self._senders.whole(sender)) is None:
            if missing := self._senders.missing(sender):
                return [Reach(address) for address in missing]
            self._deadlines.set(("ask", sender), now + ASK_AGAIN_S)
            return []
        if self._is_paused:
            return []
        try:
            if wanted.want.first_token < wanted.want.end_token:
                question = self._adoption.question(sender, sessions, wanted.engine)
                if question is not None:
                    return question
            return self._claim(wanted, sessions, now)
        except KVBridgeError as error:
            return self._fail(wanted, error.code, str(error), now)

    def _claim(self, wanted: OpenWant, sessions: Mapping[str, Session], now: float) -> list[Action]:
        """All ranks have sessions: claim each one's rows. Raises KVBridgeError before anything has changed."""
        want, engine = wanted.want, wanted.engine
        takes, filling, other_scores = self._assignment.takes(want.sender, sessions, engine.pool)
        if want.first_token == want.end_token:
            takes, filling = tuple(() for _ in takes), None
        plans = [
            session.planner.plan(taken, want.first_token, want.end_token, session.slot_bytes)
            for session, taken in zip(sessions.values(), takes, strict=True)
        ]
        wanted.unfilled_layers = len(filling.layers) if filling else 0
        wanted.other_scores = other_scores
        actions: list[Action] = self._fill(wanted, filling) if filling else []
        wanted.state = WANT_TABLE[wanted.state, WantEvent.CLAIM]
        for (address, session), taken, planned in zip(sessions.items(), takes, plans, strict=True):
            actions += self._claim_from(wanted, address, session, taken, planned, now)
        actions += [order for incoming in wanted.incoming_transfers.values() for order in incoming.awaits()]
        return actions + self._finish_if_complete(wanted, now)

    def _fill(self, wanted: OpenWant, filling: Filling) -> list[Action]:
        """Write zeros where no sender has rows. Raises KVBridgeError before anything has changed."""
        order = fill_of(self._new_id(), wanted, filling)
        if not order.plan.chunks:
            return []
        wanted.filling = order.transfer
        self._filled_by[order.transfer] = wanted
        return [order]

    def _claim_from(
        self, wanted: OpenWant, address: str, session: Session, takes: tuple[Take, ...], planned: Plan, now: float
    ) -> list[Action]:
        transfer, token = self._new_id(), self._new_token()
        actions: list[Action] = []
        leases: tuple[SlotLease, ...] = ()
        if planned.chunks:
            route = self._route_of[session.routed.route]
            incoming = route.begin(wanted, transfer, address, session, planned, token)
            wanted.incoming_transfers[transfer] = self.incoming_transfers[transfer] = incoming
            incoming.bind()
            actions, leases = incoming.claim(now)
        else:
            wanted.unneeded[address] = transfer
        claim = claim_of(wanted, session, transfer, token, planned, takes, leases, now)
        return [*actions, Send(address, claim, wanted.want.number if planned.chunks else 0)]

    def on_message(self, incarnation: str, body: RouteToReceiver, now: float, key: str = "") -> list[Action]:
        """What only the transfer's route understands."""
        incoming = self._of(incarnation, body.transfer, key)
        if incoming is None or incoming.state is not TransferState.FLOWING:
            return []
        return self._go_on(incoming, incoming.on_message(body, now), now)

    def announced(self, incarnation: str, key: str, announce: Announce) -> None:
        """This sender says, unasked, where its offer lies."""
        for route in self._routes:
            route.announced(incarnation, key, announce)

    def on_reports(self, reports: Iterable[ReceivingReport], now: float) -> list[Action]:
        """Take the data plane's reports."""
        actions: list[Action] = []
        may_lend = False
        for report in reports:
            match report:
                case RouteReport(transfer=transfer):
                    incoming = self.incoming_transfers[transfer]
                    actions += self._go_on(incoming, incoming.on_report(report, now), now)
                    may_lend = may_lend or not incoming.reads_peer  # what was pulled had no slot, to be free now
                case Broken(transfer=transfer, code=code, reason=reason):
                    actions += self._fail(self.incoming_transfers[transfer].wanted, code, reason, now)
                    may_lend = True
                case Filled():
                    actions += self._filled(report, now)
                    may_lend = True
                case Quiet(transfer=transfer):
                    actions += self._quiet(transfer, now)
                    may_lend = True
        return actions + self._lend() if may_lend else actions

    def _go_on(self, incoming: IncomingTransfer, actions: list[Action], now: float) -> list[Action]:
        """Its route has gone on, and wants this to be done: the transfer may have failed, or be complete."""
        if incoming.state is not TransferState.FLOWING:
            return actions
        if incoming.failure is not None:
            return actions + self._fail(incoming.wanted, *incoming.failure, now)
        if not incoming.is_complete:
            return actions
        incoming.finish()
        incoming.is_ordered = False
        incoming.on_end(is_finished=True)
        settled = Send(incoming.address, Settled(transfer=incoming.transfer))
        return [*actions, *self._finish_if_complete(incoming.wanted, now), settled]  # our engine hears first: it waits

    def _filled(self, filled: Filled, now: float) -> list[Action]:
        """The zeros are written."""
        wanted = self._filled_by[filled.transfer]
        if wanted.state is not WantState.FLOWING:  # it was told to stop: Quiet follows
            return []
        self._forget_filling(wanted)
        if filled.failure is not None:
            return self._fail(wanted, *filled.failure, now)
        return self._finish_if_complete(wanted, now)

    def _forget_filling(self, wanted: OpenWant) -> None:
        self._filled_by.pop(wanted.filling, None)
        wanted.filling = ""

    def _finish_if_complete(self, wanted: OpenWant, now: float) -> list[Action]:
        if wanted.state is not WantState.FLOWING or wanted.filling:
            return []
        moved = 0
        for incoming in wanted.incoming_transfers.values():
            if incoming.state is not TransferState.ENDED:
                return []
            moved += incoming.plan.total_bytes
        wanted.state = WANT_TABLE[wanted.state, WantEvent.FINISH]
        self._forget(wanted)
        want, seconds = wanted.want, max(0.0, now - wanted.started)
        tokens = want.end_token - want.first_token
        done = Done(
            number=want.number,
            request=want.request,
            moved_bytes=moved,
            seconds=seconds,
            tokens=tokens,
            unfilled_layers=wanted.unfilled_layers,
            other_scores=wanted.other_scores,
        )
        return [Tell(done)]

    def _forget(self, wanted: OpenWant) -> None:
        del self.wants[wanted.want.number]
        self._want_deadlines.clear(wanted.want.number)
        for incoming in wanted.incoming_transfers.values():
            self._forget_if_over(incoming)

    def _forget_if_over(self, incoming: IncomingTransfer) -> None:
        if incoming.wanted.state is WantState.ENDED and incoming.state is TransferState.ENDED:
            self.incoming_transfers.pop(incoming.transfer, None)

    def _lend(self) -> list[Action]:
        return [action for route in self._routes for action in route.lend()]

    def _of(self, incarnation: str, transfer: str, key: str) -> IncomingTransfer | None:
        """The transfer, if this sender brings it. It may answer at one of its addresses what was asked at another."""
        incoming = self.incoming_transfers.get(transfer)
        is_its = incoming and (incoming.session.peer.incarnation, incoming.session.key) == (incarnation, key)
        return incoming if is_its else None

    # A want that fails, and a transfer that ends early:

    def abandon(self, number: int, now: float) -> list[Action]:
        """Our engine no longer wants it."""
        self.expected.end(number)
        wanted = self.wants.get(number)
        return [] if wanted is None else self._fail(wanted, "aborted", "abandoned by the engine", now)

    def failing(
        self, incarnation: str, transfer: str, code: str, reason: str, now: float, key: str = ""
    ) -> list[Action]:
        """The sender gives up; writes may still be under way."""
        incoming = self._of(incarnation, transfer, key)
        if incoming is None or incoming.state is not TransferState.FLOWING:
            return []
        return self._fail(incoming.wanted, code or "sender_failed", reason, now)

    def drained(
        self, incarnation: str, transfer: str, code: str, reason: str, now: float, key: str = ""
    ) -> list[Action]:
        """The sender will not write for this transfer again, and gives nothing more for it."""
        self._cancelled.pop(transfer, None)
        incoming = self._of(incarnation, transfer, key)
        if incoming is None:
            for route in self._routes:
                route.on_drained(transfer, incarnation, key)
            return self._lend()
        incoming.on_drained()
        actions: list[Action] = []
        if incoming.state is not TransferState.ENDED:
            was_flowing = incoming.state is TransferState.FLOWING
            incoming.on_end()
            incoming.end()
            if was_flowing:
                want = incoming.wanted.want
                why = why_refused(want, self._senders.open.get(want.sender), code or "sender_failed", reason)
                actions = self._fail(incoming.wanted, *why, now)
        self._forget_if_over(incoming)
        return actions + self._lend()

    def _fail(self, wanted: OpenWant, code: str, reason: str, now: float) -> list[Action]:
        """End the want without its rows: cancel its transfers, quarantine the slots lent to them."""
        if wanted.state in (WantState.ENDING, WantState.ENDED):
            return []
        wanted.failure = (code, reason)
        if code in UNHEARD:
            self._note_unheard(wanted, now)
        actions: list[Action] = [
            Send(address, Cancel(transfer=transfer, code=code, reason=reason[:1024]))
            for address, transfer in wanted.unneeded.items()
            if transfer
        ]
        if wanted.state is WantState.REACHING:
            actions += self._waive(wanted)
        if wanted.state is WantState.FLOWING:
            actions += self._stops(wanted)
        for incoming in wanted.incoming_transfers.values():
            if incoming.state is TransferState.FLOWING:
                self._stop(incoming, now)
                cancel = Send(incoming.address, Cancel(transfer=incoming.transfer, code=code, reason=reason[:1024]))
                (wanted.late_cancels if incoming.reads_peer else actions).append(cancel)
        if wanted.is_carried:
            wanted.state = WANT_TABLE[wanted.state, WantEvent.FAIL_BUSY]
            return actions
        return actions + self._end_failed(wanted, WantEvent.FAIL)

    def _stops(self, wanted: OpenWant) -> list[Action]:
        """Stop putting rows into its blocks. Waits for our engine's fence end too, so they do not delay the failure."""
        carried = [each.transfer for each in wanted.incoming_transfers.values() if each.is_ordered]
        orders = [*carried, wanted.filling] if wanted.filling else carried
        return [StopReceiving(transfer, *wanted.failure) for transfer in orders]

    def _waive(self, wanted: OpenWant) -> list[Action]:
        """Tell the ranks we reached that nothing will be taken. Otherwise they keep their blocks until the hold ends.

        Each gets a claim without rows.
        """
        want = wanted.want
        actions: list[Action] = []
        for address, session in self._senders.reached(want.sender).items():
            nothing = session.planner.plan((), want.first_token, want.end_token, session.slot_bytes)
            actions += self._claim_from(wanted, address, session, (), nothing, wanted.started)
        return actions

    def _quiet(self, transfer: str, now: float) -> list[Action]:
        if (wanted := self._filled_by.get(transfer)) is not None:
            self._forget_filling(wanted)
        else:
            incoming = self.incoming_transfers[transfer]
            wanted, incoming.is_ordered = incoming.wanted, False
            if not incoming.on_quiet() and incoming.state is TransferState.STOPPING:
                incoming.end()
        if wanted.is_carried:
            return []
        if wanted.state is WantState.ENDING:
            return self._end_failed(wanted, WantEvent.QUIET)
        if wanted.has_rows:
            return self._fail(wanted, *wanted.failure, now)
        return self._reach_again(wanted, WantEvent.QUIET, now)

    def _end_failed(self, wanted: OpenWant, event: WantEvent) -> list[Action]:
        wanted.state = WANT_TABLE[wanted.state, event]
        self._forget(wanted)
        return [failed(wanted.want, *wanted.failure), *wanted.late_cancels]

    def _stop(self, incoming: IncomingTransfer, now: float) -> None:
        """It is over early. Until its sender confirms that it writes nothing for it, it is not quiet."""
        incoming.on_end()
        if incoming.quarantine(now) and not incoming.is_lost:
            incoming.stop()
        else:
            incoming.end()

    # Sessions, from the first want of a sender on:

    def prepare(self, session: Session) -> list[Action]:
        """A session with a new sender will open: prepare for what it will send."""
        return self._route_of[session.routed.route].prepare(session)

    def opened(self, address: str, session: Session, now: float) -> list[Action]:
        """A session with the agent at `address` is open (or open again, knowing more ranks)."""
        actions = self._met(address, session.peer.incarnation, session.key)
        self._senders.enter(address, session)
        self._unheard.meet(address)
        if address in self.expected.senders:
            actions += [Reach(other) for other in self._senders.missing(address)]
        actions += self._advance_all(now)  # before the others are told: an open want may need the only offer of its id
        for sender in self._unheard.senders():
            if address in self._senders.needed(sender) and not self._senders.missing(sender):
                actions += self._tell_unheard(sender, now)
        return actions + self._lend()

    def meet(self, sender: str) -> list[Action]:
        """Open the sessions that a want of this sender would need. Empty if they are open."""
        if missing := self._senders.missing(sender):
            return [Reach(address) for address in missing]
        return [] if self._senders.is_whole(sender) else [Ask(sender)]

    @property
    def session_changes(self) -> int:
        """How often a session has opened or ended. What `meet` says changes with it only."""
        return self._senders.changes

    def _advance_all(self, now: float) -> list[Action]:
        return [action for wanted in self._in(WantState.REACHING) for action in self._advance(wanted, now)]

    def refused(self, address: str, incarnation: str, key: str = "") -> list[Action]:
        """The agent at `address` answers but refuses a session. It can still confirm what it will not write."""
        return self._met(address, incarnation, key) + self._lend()

    def _met(self, address: str, incarnation: str, key: str) -> list[Action]:
        """An incarnation answers at the address."""
        return [action for route in self._routes for action in route.met(address, incarnation, key)]

    def unreachable(self, address: str, code: str, reason: str, now: float) -> list[Action]:
        """The session with `address` could not be opened, or has ended. It is not retried without being asked for."""
        # With another code it answers and refuses: it has no offers, or will not be told.
        if code not in (*UNHEARD, *SUCCEEDED, "busy"):
            self._unheard.keep(address, lambda each: False)
        reaching = self._in(WantState.REACHING)
        waiting = [each for each in reaching if address in self._senders.needed(each.want.sender)]
        if code in UNHEARD:
            self._note_empty_claims(address, now)
        affected = {wanted.want.number: wanted for wanted in [*waiting, *self._lose(address, now)]}
        actions = self._ask_others(address)
        for wanted in affected.values():
            if not can_begin_again(wanted, code):
                actions += self._fail(wanted, code, reason, now)
            elif wanted.state is WantState.REACHING:
                actions += self._advance(wanted, now)
            else:
                actions += self._begin_again(wanted, code, reason, now)
        return actions

    def absent(self, address: str, since: float, now: float) -> list[Action]:
        """The host of `address` refuses connections, as it was asked at `since`. An agent may be starting there.

        But what was offered before is gone with the agent that had it: wants of that end. The others wait on.
        """
        reason = f"{address}: its host refuses the connection, so the agent to which this was offered is taken for gone"
        actions: list[Action] = []
        for wanted in self._in(WantState.REACHING):
            is_over = wanted.want.is_offered and wanted.started <= since
            if is_over and address in self._senders.needed(wanted.want.sender):
                actions += self._fail(wanted, "peer_unreachable", reason, now)
        return actions + self._ask_others(address) if actions else []

    def _ask_others(self, address: str) -> list[Action]:
        """Ask the other ranks of its engine: the rank there may have moved."""
        return [Ask(at) for at, s in self._senders.open.items() if any(rank.address == address for rank in s.ranks)]

    def _begin_again(self, wanted: OpenWant, code: str, reason: str, now: float) -> list[Action]:
        """Start the want again by another session, once nothing of this one is put into its blocks."""
        wanted.failure = (code, reason)  # used if rows turn out to have come
        if not wanted.is_carried:
            return self._reach_again(wanted, WantEvent.AGAIN, now)
        wanted.state = WANT_TABLE[wanted.state, WantEvent.AGAIN_BUSY]
        return self._stops(wanted)

    def _reach_again(self, wanted: OpenWant, event: WantEvent, now: float) -> list[Action]:
        wanted.state = WANT_TABLE[wanted.state, event]
        for transfer in wanted.incoming_transfers:
            self.incoming_transfers.pop(transfer, None)
        wanted.incoming_transfers.clear()
        wanted.unneeded.clear()
        return self._advance(wanted, now)

    def _lose(self, address: str, now: float) -> list[OpenWant]:
        """The session with `address` is over, and so are its transfers. Returns the wants they belonged to."""
        if (session := self._senders.open.get(address)) is not None:
            for route in self._routes:
                route.lost(session)
        self._senders.leave(address)
        self._assignment.forget()
        self._adoption.forget()
        for transfer, (wanted, of) in list(self._cancelled.items()):
            if of == address:
                del self._cancelled[transfer]
                others = {each.address for each in wanted.incoming_transfers.values()} - {address}
                self._add_unheard(wanted, others, now)
        affected = []
        for incoming in list(self.incoming_transfers.values()):
            if incoming.address == address and incoming.state is not TransferState.ENDED:
                incoming.is_lost = True  # what its sender may still write stays quarantined
                self._stop(incoming, now)
                affected.append(incoming.wanted)
                self._forget_if_over(incoming)
        return affected

    # Senders that do not hear that a want has failed:

    def _note_unheard(self, wanted: OpenWant, now: float) -> None:
        """The want fails. Tell those ranks of its sender that do not hear so now, once they are reached."""
        sender, incoming_transfers = wanted.want.sender, list(wanted.incoming_transfers.values())
        if wanted.state is WantState.REACHING:
            heard = set(self._senders.reached(sender))
            if self._senders.whole(sender) is not None:
                return
        else:
            heard = {each.address for each in incoming_transfers if not each.is_lost_unanswered}
            if len(self._cancelled) < MOST_WANTS:
                self._cancelled |= {
                    each.transfer: (wanted, each.address) for each in incoming_transfers if each.is_silent
                }
            if len(heard) == len(incoming_transfers):
                return
            heard |= {address for address, transfer in wanted.unneeded.items() if not transfer}
        self._add_unheard(wanted, heard, now)

    def _note_empty_claims(self, address: str, now: float) -> None:
        """The session with this rank is lost: it may not have heard which open wants need nothing of it."""
        for wanted in self.wants.values():
            if wanted.is_open and wanted.unneeded.get(address):
                claimed = {each.address for each in wanted.incoming_transfers.values()} | wanted.unneeded.keys()
                wanted.unneeded[address] = ""
                self._add_unheard(wanted, claimed - {address}, now)

    def _add_unheard(self, wanted: OpenWant, heard: set[str], now: float) -> None:
        want = wanted.want
        nothing = structs.replace(want, blocks=(), end_token=want.first_token, is_offered=True)
        self._unheard.add(OpenWant(nothing, wanted.engine, {}, wanted.started), heard, now)
        self._deadlines.set(("unheard", want.sender), now + UNHEARD_AGAIN_S)

    def _tell_unheard(self, sender: str, now: float) -> list[Action]:
        """Tell the ranks that we reach now which wants have failed meanwhile: nothing will be taken.

        Each gets an empty claim of what was offered by now. If nothing was, the claim does not wait for it.
        """
        actions: list[Action] = []
        reached = self._senders.reached(sender)
        for each in self._unheard.at(sender, now):
            at = each.wanted.want.first_token
            for address, session in reached.items():
                if address not in each.heard:
                    nothing = session.planner.plan((), at, at, session.slot_bytes)
                    actions += self._claim_from(each.wanted, address, session, (), nothing, now)
            each.heard |= reached.keys()
        if self._senders.whole(sender) is not None:
            self._unheard.keep(sender, lambda each: False)
        return actions

    # Time, and requests that wait in our engine:

    def expect(self, expect: Expect, now: float) -> list[Action]:
        """A request queues in our engine: reach its sender, and ask it to hold the offer."""
        if expect.number in self.wants or len(self.expected) >= MOST_WANTS:
            return []
        self.expected.add(expect, now)
        return [Reach(address) for address in self._senders.missing(expect.sender)]

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        actions: list[Action] = []
        for wanted in [self.wants[number] for number in self._want_deadlines.due(now) if number in self.wants]:
            reason = why_late(wanted, self._senders.lacks(wanted.want.sender))
            actions += self._fail(wanted, "deadline", reason, now)
        for kind, key in self._deadlines.due(now):
            if kind == "ask" and key in self._senders.open:
                actions.append(Ask(key))
            elif kind == "unheard" and self._unheard.at(key, now):
                self._deadlines.set(("unheard", key), now + UNHEARD_AGAIN_S)
                # Here only, not whenever a rank is reached: another one that refuses would be asked again at once.
                actions += [Reach(address) for address in self._senders.missing(key)] + self._tell_unheard(key, now)
                if key in self._senders.open and not self._senders.is_whole(key):
                    actions.append(Ask(key))  # it had not heard of its engine's other ranks
            elif (incoming := self.incoming_transfers.get(key)) is None:
                actions += [action for route in self._routes for action in route.on_time(kind, key, now)]
            elif incoming.state is TransferState.FLOWING:
                actions += self._go_on(incoming, incoming.on_time(kind, now), now)
        return actions + self._hold(now)

    def _hold(self, now: float) -> list[Action]:
        """Tell senders which offers we wait for; reach the senders that queued requests will need."""
        wanted = ((each.want.sender, each.want.rendezvous) for each in self.wants.values() if each.is_open)
        actions: list[Action] = []
        can_hear = lambda sender: not self._senders.missing(sender)  # noqa: E731
        for sender, rendezvous_ids in self.expected.due(now, wanted, can_hear).items():
            for address in self._senders.needed(sender):
                if address in self._senders.open:
                    actions += [Send(address, hold) for hold in holds(rendezvous_ids)]
                elif sender in self.expected.senders:
                    actions.append(Reach(address))
        return actions

    # What changes beside us:

    def engine_left(self, now: float) -> list[Action]:
        """Our engine is gone, and so is everything it wanted."""
        actions: list[Action] = []
        for wanted in list(self.wants.values()):
            actions += self._fail(wanted, "engine_left", "the engine left", now)
        self._adoption = Adoption()
        self.expected.clear()
        self._unheard.clear()
        self._cancelled.clear()
        return [action for action in actions if not isinstance(action, Tell)]

    def declined(self, revision: int, reason: str, now: float) -> list[Action]:
        """Our engine refuses the scales it was asked to adopt: wants that wait for them fail."""
        if not self._adoption.declined(revision, reason):
            reasons = (f"revision: {revision}, you were not asked",)
            return [Tell(Refused(code="stale_revision", reasons=reasons, about=f"decline {revision}"))]
        return self._advance_all(now)

    def rescaled(self, engine: AttachedEngine, now: float) -> list[Action]:
        """Our engine's scales changed. All sessions end: they were planned with the old ones."""
        return self._end_sessions(engine, "rescaled", "scales of our engine changed", now)

    def reweighed(self, engine: AttachedEngine, reason: str, now: float) -> list[Action]:
        """Our engine has other weights: no request that waits may get rows of the old ones. All sessions end."""
        wanted = [each for each in self.wants.values() if each.want.end_token > each.want.first_token]
        actions = [action for each in wanted for action in self._fail(each, "other_weights", reason, now)]
        return actions + self._end_sessions(engine, "other_weights", reason, now)

    def _end_sessions(self, engine: AttachedEngine, code: str, reason: str, now: float) -> list[Action]:
        """End all sessions. Wants that have claimed nothing yet go on, by new sessions."""
        actions: list[Action] = []
        for wanted in list(self.wants.values()):
            if wanted.state in (WantState.REACHING, WantState.RETURNING):
                wanted.engine = engine
            else:
                actions += self._fail(wanted, code, reason, now)
        for address in list(self._senders.open):
            self._lose(address, now)
        return actions + self._advance_all(now)

    def pause(self) -> bool:
        """Claim nothing until `rebuilt` or `resume`. Returns whether nothing is under way: then a rebuild may begin."""
        self._is_paused = True
        return not (any(route.lent for route in self._routes) or len(self._in(WantState.REACHING)) < len(self.wants))

    def resume(self, now: float) -> list[Action]:
        """The rebuild is cancelled."""
        self._is_paused = False
        return self._advance_all(now)

    def rebuilt(self, engine: AttachedEngine | None, now: float) -> list[Action]:
        """Our slots were replaced: all sessions end, because they named the old ones. No slot is quarantined now."""
        return self._renewed(engine, "the agent made its slots anew", now, "all")

    def unreachable_from_far(self, engine: AttachedEngine | None, now: float) -> list[Action]:
        """Our fabric is another: who has only the one before reaches none of our slots.

        All sessions end, because they named that one.
        """
        return self._renewed(engine, "the agent's fabric was replaced", now, "far")

    def _renewed(self, engine: AttachedEngine | None, reason: str, now: float, writers: Writers) -> list[Action]:
        self._is_paused = False
        actions = [] if engine is None else self._end_sessions(engine, "rebuilt", reason, now)
        return actions + self.cannot_write(writers)

    def cannot_write(self, writers: Writers) -> list[Action]:
        """These write nothing any more under leases of transfers that have ended."""
        for route in self._routes:
            route.cannot_write(writers)
        return self._lend()

    def quarantined(self, writers: Writers) -> frozenset[tuple[int, int]]:
        """The leases of quarantined slots under which only these may still write."""
        return frozenset[tuple[int, int]]().union(*(route.quarantined(writers) for route in self._routes))

    def writing_processes(self) -> set[ProcessCard]:
        """The processes whose end would free slots, now or once their sessions are lost."""
        return set[ProcessCard]().union(*(route.writing_processes() for route in self._routes))

    # For others to look at:

    @property
    def moving(self) -> int:
        """How many transfers are under way. Callable from any thread."""
        return len(self.incoming_transfers)

    @property
    def without_session(self) -> int:
        """How many wants have claimed nothing yet. Callable from any thread: `list` copies atomically."""
        return sum(wanted.state is WantState.REACHING for wanted in list(self.wants.values()))

    @property
    def without_slot(self) -> int:
        """How many transfers have ready chunks without a slot. Callable from any thread."""
        return sum(route.waiting for route in self._routes)

    def _in(self, state: WantState) -> list[OpenWant]:
        return [wanted for wanted in self.wants.values() if wanted.state is state]
