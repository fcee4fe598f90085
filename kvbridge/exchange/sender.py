"""The sender's half: our engine's offers, and the transfers that read them. Pure.

An offer and the claims on it may come in either order. They meet under a rendezvous id, and the data plane gets one
order for each transfer (orders.py). It ships a chunk once its tokens are computed and the receiver has lent a slot.
Windows and states are shipped once the offer is complete, because an engine that goes on computing reuses their blocks.
The engine gets its blocks back when nobody reads them or will read them; this does not wait for the network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from kvbridge_proto.common import MAX_RANKS
from kvbridge_proto.engine import MAX_HELD, Held, NoOffer, Offer, Refused, Released
from kvbridge_proto.peer import (
    MAX_SUMS,
    Cancel,
    Check,
    Checked,
    Claim,
    Drained,
    Failing,
    Grant,
    Ready,
    Refuse,
    Renew,
    SlotLease,
)

from ..errors import EngineError, KVBridgeError, PeerError
from ..geometry.plan import Plan
from ..states import OFFER_TABLE, OUTGOING_TABLE, OfferEvent, OfferState, OutgoingEvent, OutgoingState
from .actions import Action, Met, Send, Tell, Unconfirmed
from .block_tables import check_begin, check_late, extended, ready_chunks
from .containers import Deadlines, Recent
from .leases import LEASE_HEARD_S, LEASE_S, GrantedLease
from .orders import (
    Broken,
    Credit,
    Digest,
    Digested,
    Gathered,
    Progress,
    Quiet,
    SendingReport,
    SendOrder,
    Sent,
    Shipped,
    StopSending,
    Watch,
)
from .outgoing import (
    AWAITED_S,
    ENDED_S,
    EndedOffer,
    OpenOffer,
    OutgoingTransfer,
    ReceiverClaims,
    Rendezvous,
    call_of,
)
from .session import AttachedEngine, Session

MOST_OFFERS = 16384
MOST_CLAIMS = 2048  # open at once, of one receiver
MOST_CLAIMS_OF_ALL = 32768  # of all receivers together: 16 at their limit
# A younger offer is not reclaimed: the router has only just heard that the prefill is done, and a claim may follow.
FRESH_S = 0.25
MOST_LEASES = 4096  # unused, of one receiver: as many slots as an agent can have
MOST_DIGESTS = 4  # at once, of all transfers, so that other moves get their turn
LOST_S = AWAITED_S  # in which a receiver that was only cut off comes again
LATE_S = 1.0  # by which one rank may offer a prompt later than another
MOST_RENOUNCED = 16384  # of all receivers together; the link that could still bring such a claim is lost in silence_s


class Sender:
    """All offers of this agent's engine and all transfers that read them.

    `before` are earlier incarnations of our agent, known to be dead.
    """

    def __init__(self, most_claims: int = MOST_CLAIMS, before: Collection[str] = ()) -> None:
        self._before = before
        self._renounced: Recent[tuple[str, str]] = Recent(MOST_RENOUNCED)  # (incarnation, transfer)
        self._most_claims = most_claims
        self.offers: dict[int, OpenOffer] = {}
        self.outgoing_transfers: dict[str, OutgoingTransfer] = {}
        self._of_receiver: dict[str, ReceiverClaims] = {}  # by incarnation
        self._waiting: dict[str, dict[str, OutgoingTransfer]] = {}  # by rendezvous
        # Of those that wait, by transfer: claims of what was offered before, until it is known whether it is there.
        self._undecided: dict[str, OutgoingTransfer] = {}
        self._comparing: dict[str, OutgoingTransfer] = {}  # with chunks to be digested, in the order of their turns
        self._digesting = 0
        self._lost_claims: list[int] = []  # open offers of which a claim was lost since the last tick
        self._rendezvous = Rendezvous()
        self._is_paused = False
        self._owed: dict[str, OutgoingTransfer] = {}  # by transfer: receivers that wait for an answer or for the fence
        self._deadlines: Deadlines[tuple[str, str]] = Deadlines()
        self._holds: Deadlines[int] = Deadlines()  # of the offers

    # From our engine:

    def offer(self, offer: Offer, engine: AttachedEngine, now: float) -> list[Action]:
        """Our engine offers tokens, for the first time or more of them."""
        offered = self.offers.get(offer.number)
        if offer.is_more and (offered is None or offered.state is not OfferState.OPEN):
            return []  # our engine had not heard yet that it has ended
        if offered is not None and not offer.is_more:
            reasons = (f"number: offer {offer.number} is open already",)
            return [Tell(Refused(code="duplicate_request", reasons=reasons, about=f"offer {offer.number}"))]
        if offered is None:
            if len(self.offers) >= MOST_OFFERS:
                code, reason = "too_many_offers", f"offers: {MOST_OFFERS} are open"
                said = self._refuse_later(EndedOffer(offer.rendezvous, (code, reason), now + ENDED_S), now)
                return [Tell(released(offer, code, reason)), *said]
            offered = OpenOffer(offer.number, offer.request, offer.rendezvous, {}, offer.first_token, began=now)
            self.offers[offer.number] = offered
            self._rendezvous.enter(offered)
        try:
            self._grow(offered, offer, engine)
        except KVBridgeError as error:
            return self._end_offer(offered, error.code, str(error), now)
        offered.grown_at, offered.hold_s = now, offer.hold_s
        self._holds.set(offer.number, now + offer.hold_s)
        actions = self._bind_waiting(offer.rendezvous)
        actions += self._short_of(offered)
        for out in list(offered.outgoing_transfers.values()):
            self._owe(out)
            actions += self._progress(out)
        return actions

    def withdraw(self, number: int, reason: str, now: float, comes_again: bool = False) -> list[Action]:
        """Our engine takes an offer back. Released follows once nobody reads its blocks, or was told already.

        With `comes_again` the request will be offered again: later claims wait for that.
        """
        offered = self.offers.get(number)
        return [] if offered is None else self._end_offer(offered, "withdrawn", reason, now, comes_again)

    def no_offer(self, said: NoOffer, now: float) -> None:
        """Our engine offers nothing more for a call. `answers` refuses the claims that wait for it."""
        self._rendezvous.end_call(said.call, (said.code, said.reason), now)
        for rendezvous, transfers in self._waiting.items():  # once per refused call, so no index
            if call_of(rendezvous) == said.call:
                self._undecided |= transfers

    def reclaim(self, blocks: int, now: float) -> list[Action]:
        """Our engine is short of `blocks` blocks: end offers that nobody has asked for, oldest first."""
        actions: list[Action] = []
        for offered in self.unclaimed(now):
            if blocks <= 0:
                break
            if now - offered.grown_at >= FRESH_S and offered.rendezvous not in self._waiting:
                blocks -= offered.blocks
                reason = f"its engine needs the blocks, and nobody asked for them in {now - offered.began:.1f} s"
                actions += self._end_offer(offered, "reclaimed", reason, now)
        return actions

    def release(self, now: float) -> tuple[int, list[Action]]:
        """End all offers that nobody has claimed. Returns how many."""
        found = [each for each in self.offers.values() if each.state is OfferState.OPEN and each.want is None]
        found = [each for each in found if each.is_last and each.rendezvous not in self._waiting]
        reason = "all that nobody had claimed were released"
        return len(found), [action for each in found for action in self._end_offer(each, "reclaimed", reason, now)]

    def unclaimed(self, now: float) -> list[OpenOffer]:
        """Complete offers that nobody has claimed and nobody has lately said to wait for, oldest first.

        Callable from any thread: `list` copies atomically.
        """
        found: list[OpenOffer] = []
        awaited: dict[str, int] = {}  # by rendezvous: how many of the offers that follow are awaited
        for offered in list(self.offers.values()):
            if offered.state is not OfferState.OPEN:
                continue
            if offered.rendezvous not in awaited:
                awaited[offered.rendezvous] = self._rendezvous.awaited_in(offered.rendezvous, now)
            awaited[offered.rendezvous] -= 1
            if awaited[offered.rendezvous] < 0 and offered.is_last and offered.want is None:
                found.append(offered)
        return found

    def awaited_by(self, offered: OpenOffer) -> str:
        """The incarnation of the last receiver that said a request waits under this offer's id."""
        return self._rendezvous.awaiting(offered.rendezvous)

    def held_until(self, offered: OpenOffer) -> float | None:
        """When an open offer expires; when the last read lease on an ended one does.

        None if an ended one is gathered or digested: its blocks are kept until that is over.
        """
        if offered.state is OfferState.OPEN:
            return self._holds.at(offered.number)
        reading = [out for out in offered.outgoing_transfers.values() if out.is_reading]
        if any(out.is_gathering or out.digesting for out in reading):
            return None
        return max((out.granted.ends for out in reading if out.granted and out.granted.ends is not None), default=None)

    def rescaled(self, reason: str, now: float) -> list[Action]:
        """Our engine's scales changed: end everything that was planned with the old ones."""
        return self._end_all("rescaled", reason, now)

    def reweighed(self, reason: str, now: float) -> list[Action]:
        """Our engine has other weights: end everything that was computed with the old ones."""
        return self._end_all("other_weights", reason, now)

    def pause(self, is_alone: bool) -> bool:
        """Returns whether no transfer flows and no block is read; writes of stopped transfers may be under way.

        If `is_alone` (our engine has one rank), begin no transfer until `rebuilt` or `resume`. With several ranks
        transfers do begin: a receiver could not claim again what the other ranks have begun.
        """
        self._is_paused = is_alone
        return not any(out.state is OutgoingState.FLOWING or out.is_reading for out in self.outgoing_transfers.values())

    def resume(self) -> list[Action]:
        """The rebuild is cancelled."""
        self._is_paused = False
        return [action for rendezvous in list(self._waiting) for action in self._bind_waiting(rendezvous)]

    def rebuilt(self, reason: str) -> list[Action]:
        """Our agent replaces its slots and ends all sessions: stop the transfers, so that receivers need not wait.

        Claims on what is not offered yet end with their sessions, and come again by new ones.
        """
        self._is_paused = False
        moving = [out for out in self.outgoing_transfers.values() if out.state is not OutgoingState.WAITING]
        return [action for out in moving for action in self._stop(out, "rebuilt", reason)]

    def engine_left(self, now: float) -> list[Action]:
        """Our engine is gone: its memory must no longer be read."""
        actions = self._end_all("engine_left", "the engine left", now)
        self._rendezvous.forget_ended()
        return [action for action in actions if not isinstance(action, Tell)]

    def _end_all(self, code: str, reason: str, now: float) -> list[Action]:
        actions: list[Action] = []
        for offered in list(self.offers.values()):
            actions += self._end_offer(offered, code, reason, now)
        for out in list(self.outgoing_transfers.values()):
            actions += self._stop(out, code, reason)
        return actions

    # From a receiver:

    def claim(self, claim: Claim, session: Session, engine: AttachedEngine, now: float) -> list[Action]:
        """A receiver claims rows that are or will be offered under a rendezvous id."""
        incarnation = session.peer.incarnation
        if (incarnation, claim.transfer) in self._renounced:
            return [
                refused(incarnation, claim, "cancelled", f"transfer: {claim.transfer} was cancelled before it came")
            ]
        if claim.transfer in self.outgoing_transfers:
            return [refused(incarnation, claim, "duplicate_transfer", f"transfer: {claim.transfer} is already claimed")]
        its = self._of_receiver.get(incarnation) or ReceiverClaims()
        if len(its.outgoing_transfers) >= self._most_claims:
            reason = f"claims: {self._most_claims} of this receiver are open"
            return [refused(incarnation, claim, "too_many_claims", reason)]
        if len(self.outgoing_transfers) >= MOST_CLAIMS_OF_ALL:
            reason = f"claims: {MOST_CLAIMS_OF_ALL} of all receivers are open"
            return [refused(incarnation, claim, "too_many_transfers", reason)]
        try:
            plan = planned(claim, session, engine)
        except KVBridgeError as error:
            return [refused(incarnation, claim, error.code, str(error))]
        if not plan.chunks and self._rendezvous.is_served(claim):
            reason = f"want: {claim.want} had its offer before, and this claim takes no rows"
            return [refused(incarnation, claim, "already_fetched", reason)]
        out = OutgoingTransfer(claim, session, plan, now)
        if session.routed.is_pulled:
            out.granted = GrantedLease()
            if claim.leases:
                return [
                    refused(incarnation, claim, "bad_lease", f"leases: {len(claim.leases)} of a route without slots")
                ]
        if too_many := lease_excess(out, claim.leases, its.unused):
            return [refused(incarnation, claim, "bad_lease", too_many)]
        self._of_receiver[incarnation] = its
        self.outgoing_transfers[claim.transfer] = its.outgoing_transfers[claim.transfer] = out
        self._waiting.setdefault(claim.rendezvous, {})[claim.transfer] = out
        self._lend(out, claim.leases)
        self._rendezvous.forget_old(now)
        self._deadlines.set(("claim", claim.transfer), now + claim.deadline_s)
        return self._bind_waiting(claim.rendezvous)

    def is_awaited(self, rendezvous: str) -> bool:
        """Whether claims wait for an offer under this id."""
        return rendezvous in self._waiting

    def has_offer(self, claim: Claim) -> bool:
        """Whether there is an open offer for this claim, or an ended one to refuse it with."""
        return self._rendezvous.offer_for(claim) is not None

    def hold(self, incarnation: str, rendezvous_ids: Sequence[str], now: float) -> list[Action]:
        """Requests of a receiver wait for offers under these ids, one for each time an id is named."""
        held: list[int] = []
        for rendezvous, count in Counter(rendezvous_ids).items():
            for offered in self._rendezvous.await_in(rendezvous, incarnation, count, now):
                self._holds.set(offered.number, now + offered.hold_s)
                held.append(offered.number)
        pieces = [held[at : at + MAX_HELD] for at in range(0, len(held), MAX_HELD)]
        return [Tell(Held(numbers=tuple(piece))) for piece in pieces]

    def grant(self, incarnation: str, grant: Grant) -> list[Action]:
        """The receiver lends more slots."""
        out = self.outgoing_transfers.get(grant.transfer)
        if (
            out is None
            or out.incarnation != incarnation
            or out.state not in (OutgoingState.WAITING, OutgoingState.FLOWING)
        ):
            return []
        if out.granted is not None:
            return self._stop(out, "bad_lease", f"leases: {len(grant.leases)} of a route without slots")
        if too_many := lease_excess(out, grant.leases, self._of_receiver[incarnation].unused):
            return self._stop(out, "bad_lease", too_many)
        return self._lend(out, grant.leases)

    def _lend(self, out: OutgoingTransfer, leases: tuple[SlotLease, ...]) -> list[Action]:
        out.lent += len(leases)
        self._of_receiver[out.incarnation].unused += len(leases)
        if out.is_ordered:
            return [Credit(out.transfer, leases)]
        out.early += leases
        return []

    def cancel(self, incarnation: str, cancel: Cancel, now: float) -> list[Action]:
        """The receiver gives up. Drained follows once nothing is being written; at once for an unknown transfer.

        A claim without rows that has no offer yet waits a moment longer: this rank's offer may just be late, and would
        be held for nobody. After that, it would take the offer of another prompt under the same id.
        """
        if self.renounce(incarnation, cancel):
            return [Send(incarnation, Drained(transfer=cancel.transfer))]
        out = self.outgoing_transfers.get(cancel.transfer)
        if cancel.incarnation or out is None or out.incarnation != incarnation:
            return []
        if out.offered is None and not out.plan.chunks:
            due = self._deadlines.at(key := ("claim", out.transfer))
            self._deadlines.set(key, now + LATE_S if due is None else min(due, now + LATE_S))
            return []
        out.is_lost = False  # it came back, and asks about a transfer whose end it did not hear
        self._take_back(out)  # on `pull` a receiver sends this once it reads no more
        if out.state is OutgoingState.STOPPING and out.granted is not None:
            return self._end_if_quiet(out)
        return self._stop(out, cancel.code or "cancelled", cancel.reason)

    def renounce(self, incarnation: str, cancel: Cancel) -> bool:
        """Whether nothing is or will be written for this transfer: it is unknown here, or its incarnation is dead.

        An unknown transfer is remembered, so that a claim that still comes, by a link its receiver gave up, is refused.
        """
        if cancel.incarnation:
            return cancel.incarnation in self._before
        if cancel.transfer in self.outgoing_transfers:
            return False
        self._renounced.add((incarnation, cancel.transfer))
        return True

    def lost(self, incarnation: str) -> list[Action]:
        """The session with this receiver is over."""
        actions: list[Action] = []
        its = self._of_receiver.get(incarnation)
        for out in list(its.outgoing_transfers.values()) if its is not None else []:
            out.is_lost = True
            actions += self._stop(out, "peer_lost", "the receiver's agent is gone")
            if out.offered is not None and out.offered.state is OfferState.OPEN:
                out.offered.lost.add(out.claim.receiver)
                self._lost_claims.append(out.offered.number)
        return actions

    def _clear_lost(self, offered: OpenOffer, receiver: int) -> None:
        """This rank has claimed it. Ranks that were lost are awaited until each has."""
        offered.lost.discard(receiver)
        if not offered.lost:
            self._deadlines.clear(("lost", str(offered.number)))

    def _end_deserted(self, offered: OpenOffer, now: float) -> list[Action]:
        """A rank that had claimed it was lost and did not come again, so its want has failed: end it.

        The want's other ranks may have died too, before they claimed it. Then nobody tells of them.
        """
        if offered.outgoing_transfers:
            self._deadlines.set(("lost", str(offered.number)), now + LOST_S)
            return []
        missing = f"{offered.receivers - len(offered.served)} of {offered.receivers} ranks"
        reason = f"a rank that claimed it was lost {LOST_S:g} s ago, and {missing} of the same want never came"
        return self._end_offer(offered, "peer_lost", reason, now)

    def number_of(self, transfer: str) -> int:
        """The offer whose rows it takes; 0 while it has none."""
        out = self.outgoing_transfers.get(transfer)
        return out.offered.number if out is not None and out.offered is not None else 0

    def session_of(self, transfer: str) -> Session:
        """The session of a transfer, for as long as the data plane may report on it."""
        return self.outgoing_transfers[transfer].session

    @property
    def without_offer(self) -> int:
        """How many claimed transfers have no offer yet. Callable from any thread."""
        return sum(map(len, list(self._waiting.values())))

    # Receivers that read our engine's blocks themselves:

    def renew(self, incarnation: str, renew: Renew) -> None:
        """The receiver is still reading. `answers` renews the lease, if it may still read the blocks."""
        out = self.outgoing_transfers.get(renew.transfer)
        if out is not None and out.incarnation == incarnation and out.granted is not None:
            out.granted.renewal, out.granted.is_asked = max(out.granted.renewal, renew.number), True
            self._owe(out)

    def read_by(self, incarnation: str, transfer: str) -> Plan | None:
        """The plan of what this receiver reads itself, or None."""
        out = self.outgoing_transfers.get(transfer)
        if out is None or out.incarnation != incarnation or out.granted is None or out.is_settled:
            return None
        return out.plan if out.state is OutgoingState.FLOWING else None

    def settled(self, incarnation: str, transfer: str) -> list[Action]:
        """The receiver has read all that it claimed."""
        out = self.outgoing_transfers.get(transfer)
        if out is None or out.incarnation != incarnation or out.granted is None:
            return []
        offered = out.offered
        if offered is None:  # nothing was promised
            return []
        self._take_back(out)
        if out.state is OutgoingState.STOPPING:
            return self._end_if_quiet(out)
        out.is_settled = True
        out.checks.clear()  # it no longer waits for them
        return self._end_settled(out)

    def _end_settled(self, out: OutgoingTransfer) -> list[Action]:
        """Its receiver has finished. So have we, once none of its chunks is being digested."""
        if out.digesting:
            return []
        offered = out.offered
        assert offered is not None
        out.state = OUTGOING_TABLE.after(out.state, OutgoingEvent.FINISH)
        offered.served.add(out.claim.receiver)
        self._forget(out)
        return self._release_if_over(offered)

    def check(self, incarnation: str, check: Check) -> list[Action]:
        """The receiver has read these chunks, and wants to compare digests. No answer if the transfer has ended."""
        out = self.outgoing_transfers.get(check.transfer)
        if out is None or out.incarnation != incarnation or out.granted is None:
            return []
        if out.state is not OutgoingState.FLOWING or out.is_settled:
            return []
        for each in check.digests:
            if each.chunk >= out.granted.ready or each.chunk in out.asked:
                reason = f"chunk: got {each.chunk}, of {out.granted.ready} that may be read, each once"
                return self._stop(out, "bad_check", reason) + self._compare()
            out.asked.add(each.chunk)
            out.checks.append(each)
        self._comparing.setdefault(out.transfer, out)
        return self._compare()

    def _compare(self) -> list[Action]:
        """Digest chunks that receivers have read, in turns."""
        actions: list[Action] = []
        while self._comparing and self._digesting < MOST_DIGESTS:
            out = self._comparing.pop(next(iter(self._comparing)))
            if not out.can_digest:  # it may have ended since
                continue
            offered = out.offered
            assert offered is not None
            self._digesting += 1
            out.digesting += 1
            order = (out.transfer, offered.number, offered.request, out.plan, offered.tables, out.checks.popleft())
            actions.append(Digest(*order))
            if out.can_digest:
                self._comparing[out.transfer] = out
        return actions

    def _digested(self, report: Digested) -> list[Action]:
        self._digesting -= 1
        out = self.outgoing_transfers[report.transfer]
        out.digesting -= 1
        if out.state is OutgoingState.STOPPING:
            return self._end_if_quiet(out)
        if out.is_settled:
            return self._end_settled(out)
        if report.failure is not None:
            return self._stop(out, *report.failure)
        out.checked.append(report.found)
        return self._answer_check(out)

    def _answer_check(self, out: OutgoingTransfer) -> list[Action]:
        """Send the digests once none is under way, or a message is full."""
        if (out.checks or out.digesting) and len(out.checked) < MAX_SUMS:
            return []
        digests, out.checked = tuple(out.checked), []
        return [Send(out.incarnation, Checked(transfer=out.transfer, digests=digests))]

    @property
    def is_promised(self) -> bool:
        """Whether a receiver counts on blocks of our engine."""
        return any(out.is_promised for out in self.outgoing_transfers.values())

    @property
    def is_owing(self) -> bool:
        """Whether a receiver waits for an answer."""
        return bool(self._owed or self._undecided)

    def answers(self, now: float, heard_at: float, has_reached: Callable[[int], bool]) -> list[Action]:
        """Answers that receivers wait for; none if we heard our engine too long ago to rule out a withdrawal.

        `SenderRunner._answers` calls this, after everything that made an answer due and after `note_if_silent`.
        `heard_at` is when we last had read everything the engine sent. `has_reached` says whether its fence has reached
        a count. Every answer begins a lease now, except refusals of what is not offered here (any more).
        """
        actions = self._refuse_unoffered(heard_at)
        if now - heard_at >= LEASE_HEARD_S:
            return actions
        for out in list(self._owed.values()):
            offered, granted = out.offered, out.granted
            assert offered is not None and granted is not None
            following = offered.update_readable(has_reached)
            if following is not None:
                actions.append(Watch(following))
            is_last = offered.is_last and following is None
            if following is None:
                del self._owed[out.transfer]
            if not granted.is_asked and ready_chunks(out.plan, offered.readable, is_last) == granted.ready:
                continue
            said = granted.answer(out.transfer, out.plan, offered.tables, offered.readable, is_last)
            granted.ends = now + LEASE_S
            self._deadlines.set(("lease", out.transfer), granted.ends)
            actions.append(Send(out.incarnation, said))
        return actions

    def _refuse_unoffered(self, heard_at: float) -> list[Action]:
        """Refuse claims of what was offered before they came, if no such offer is there.

        Each is looked at once, when all is read that our engine had sent by then, and again if `_bind_waiting` left it.
        """
        actions: list[Action] = []
        while self._undecided:
            out = next(iter(self._undecided.values()))
            if out.started > heard_at:
                break
            del self._undecided[out.transfer]
            if why := self._rendezvous.why_none(out.claim):
                actions += self._stop(out, *why)
        return actions

    def _owe(self, out: OutgoingTransfer) -> None:
        """Remember that its receiver waits for an answer."""
        if out.granted is None or out.is_settled:
            return
        if out.will_read and out.offered is not None and out.offered.state is OfferState.OPEN:
            self._owed[out.transfer] = out

    def _take_back(self, out: OutgoingTransfer) -> None:
        """End its lease: its receiver has finished, or what it reads from now on does not count."""
        if out.granted is not None:
            out.granted.ends = None
            self._deadlines.clear(("lease", out.transfer))

    def _end_unconfirmed(self, out: OutgoingTransfer) -> list[Action]:
        # While it flows, a receiver that has read all that is computed so far does not renew.
        is_late = out.state is OutgoingState.STOPPING
        said: list[Action] = [Unconfirmed(out.transfer)] if is_late else []
        self._take_back(out)
        assert out.offered is not None
        return said + self._end_if_quiet(out) + self._release_if_over(out.offered)

    def _end_if_quiet(self, out: OutgoingTransfer) -> list[Action]:
        """End a stopping transfer, if nothing of it is under way."""
        assert out.offered is not None
        if out.state is not OutgoingState.STOPPING or out.is_busy:
            return []
        return self._end(out, OutgoingEvent.QUIET) + self._release_if_over(out.offered)

    # From the data plane:

    def hear(self, reports: Iterable[SendingReport]) -> list[Action]:
        """Take the data plane's reports."""
        actions: list[Action] = []
        for report in reports:
            match report:
                case Shipped(transfer=transfer, chunks=chunks):
                    out = self.outgoing_transfers[transfer]
                    out.shipped += chunks
                    self._of_receiver[out.incarnation].unused -= chunks
                case Gathered(transfer=transfer):
                    actions += self._gathered(self.outgoing_transfers[transfer])
                case Sent(transfer=transfer):
                    self._sent(self.outgoing_transfers[transfer])
                case Broken(transfer=transfer, code=code, reason=reason):
                    actions += self._stop(self.outgoing_transfers[transfer], code, reason)
                case Quiet(transfer=transfer):
                    out = self.outgoing_transfers[transfer]
                    out.is_ordered = out.is_gathering = False
                    actions += self._end_if_quiet(out)
                case Digested():
                    actions += self._digested(report)
        return actions + self._compare()

    def _gathered(self, out: OutgoingTransfer) -> list[Action]:
        out.is_gathering = False
        offered = out.offered
        assert offered is not None
        if out.state is OutgoingState.FLOWING:
            offered.served.add(out.claim.receiver)
        return self._release_if_over(offered)

    def _sent(self, out: OutgoingTransfer) -> None:
        if out.state is OutgoingState.FLOWING:  # else it was told to stop: Quiet follows
            out.is_ordered = False
            out.state = OUTGOING_TABLE.after(out.state, OutgoingEvent.FINISH)
            self._forget(out)

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        actions: list[Action] = []
        for offered in [self.offers[number] for number in self._holds.due(now) if number in self.offers]:
            actions += self._end_offer(offered, "offer_expired", _why_expired(offered, now), now)
        while self._lost_claims:
            if (number := self._lost_claims.pop()) in self.offers and self.offers[number].lost:
                self._deadlines.set(("lost", str(number)), now + LOST_S)
        for kind, key in self._deadlines.due(now):
            if kind == "lost" and int(key) in self.offers:
                actions += self._end_deserted(self.offers[int(key)], now)
            elif kind == "claim" and key in self.outgoing_transfers:
                out = self.outgoing_transfers[key]
                what = (
                    f"nothing was offered in rendezvous {out.claim.rendezvous}"
                    if out.offered is None
                    else "not all was offered"
                )
                actions += self._stop(out, "deadline", f"deadline_s: {out.claim.deadline_s} passed; {what}")
            elif kind == "lease" and key in self.outgoing_transfers:
                actions += self._end_unconfirmed(self.outgoing_transfers[key])
        return actions

    # Rendezvous:

    def _grow(self, offered: OpenOffer, offer: Offer, engine: AttachedEngine) -> None:
        if offer.rendezvous != offered.rendezvous:
            raise EngineError("rendezvous_changed", f"rendezvous: first {offered.rendezvous}, now {offer.rendezvous}")
        if offer.first_token != offered.first_token:
            raise EngineError(
                "first_token_changed", f"first_token: first {offered.first_token}, now {offer.first_token}"
            )
        if offer.tokens < offer.first_token:
            raise EngineError("bad_range", f"tokens: got {offer.tokens}, first_token {offer.first_token}")
        if offer.tokens < offered.tokens:
            raise EngineError("tokens_shrank", f"tokens: first {offered.tokens}, now {offer.tokens}")
        offered.tables = extended(offered.tables, engine, offer.blocks, offer.first_token, offer.tokens, offer.is_last)
        offered.is_last = offer.is_last
        offered.grew(offer.fence, offer.tokens)

    def _bind_waiting(self, rendezvous: str) -> list[Action]:
        """Match claims and offers under one id, oldest first. All claims of one want get the same offer."""
        actions: list[Action] = []
        for out in list(self._waiting.get(rendezvous, {}).values()):
            offered = self._rendezvous.offer_for(out.claim)
            if isinstance(offered, EndedOffer):
                self._rendezvous.meet(out.claim)
                actions += self._stop(out, *self._rendezvous.hear(offered, out.claim))
                continue
            if offered is None or (self._is_paused and out.plan.chunks):
                if self._rendezvous.is_all_offered(out.claim):
                    self._undecided[out.transfer] = out
                continue
            if offered.want is None:
                offered.want, offered.receivers = out.claim.want, out.claim.receivers
                offered.is_declined = out.claim.first_token == out.claim.end_token
            elif offered.receivers != out.claim.receivers:
                actions += self._stop(
                    out, "bad_receiver", f"receivers: first {offered.receivers}, now {out.claim.receivers}"
                )
                continue
            self._rendezvous.meet(out.claim)
            out.offered = offered
            offered.outgoing_transfers[out.transfer] = out
            self._clear_lost(offered, out.claim.receiver)
            self._stop_waiting(out)
            out.state = OUTGOING_TABLE.after(out.state, OutgoingEvent.BIND)
            actions.append(Met(out.transfer, offered.number, out.plan.chunks, out.plan.total_bytes))
            if out.plan.chunks == 0:
                offered.served.add(out.claim.receiver)
                out.state = OUTGOING_TABLE.after(out.state, OutgoingEvent.FINISH)
                self._forget(out)
                actions += self._release_if_over(offered)
            else:
                actions += self._short_of(offered) + self._order(out)
        return actions

    def _order(self, out: OutgoingTransfer) -> list[Action]:
        """Order the data plane to send it, or let its receiver read it."""
        offered, claim = out.offered, out.claim
        assert offered is not None
        if out.state is not OutgoingState.FLOWING:
            return []
        if out.granted is not None:
            self._owe(out)
            return []
        out.is_ordered = out.is_gathering = True
        order = SendOrder(
            out.transfer,
            offered.number,
            offered.request,
            out.incarnation,
            out.plan,
            claim.token,
            claim.receiver_epoch,
            out.session.digest,
        )
        early = [Credit(out.transfer, out.early)] if out.early else []
        out.early = ()
        return [order, *early, *self._progress(out)]

    def _stop_waiting(self, out: OutgoingTransfer) -> None:
        self._undecided.pop(out.transfer, None)
        transfers = self._waiting[out.claim.rendezvous]
        del transfers[out.transfer]
        if not transfers:
            del self._waiting[out.claim.rendezvous]

    def _short_of(self, offered: OpenOffer) -> list[Action]:
        """Fail transfers that the offer cannot satisfy. Its begin is checked at once, the rest once it is complete."""
        actions: list[Action] = []
        for out in list(offered.outgoing_transfers.values()):
            try:
                check_begin(out.plan, offered.first_token)
                if offered.is_last:
                    if out.claim.end_token > offered.tokens:
                        reason = f"end_token: wanted {out.claim.end_token}, offered {offered.tokens}"
                        raise EngineError("tokens_missing", reason)
                    check_late(out.plan, offered.tables, offered.tokens)
            except KVBridgeError as error:
                actions += self._stop(out, error.code, str(error))
        return actions

    def _end_offer(
        self, offered: OpenOffer, code: str, reason: str, now: float, comes_again: bool = False
    ) -> list[Action]:
        if offered.state is not OfferState.OPEN:
            return []
        offered.state, offered.over = OFFER_TABLE.after(offered.state, OfferEvent.END), (code, reason)
        actions: list[Action] = []
        heard = offered.served | {out.claim.receiver for out in offered.outgoing_transfers.values()}
        if len(heard) < offered.receivers or (offered.want is None and not comes_again):
            ended = EndedOffer(offered.rendezvous, offered.over, now + ENDED_S, offered.want, offered.receivers, heard)
            actions += self._refuse_later(ended, now)
        for out in list(offered.outgoing_transfers.values()):
            if out.will_read:  # what has been read already may arrive
                actions += self._stop(out, code, reason)
        return actions + self._release_if_over(offered)

    def _refuse_later(self, ended: EndedOffer, now: float) -> list[Action]:
        """Remember an ended offer, and refuse claims on it: later ones, and those that wait because of a pause."""
        self._rendezvous.remember(ended, now)
        return self._bind_waiting(ended.rendezvous)

    def _readers(self, offered: OpenOffer) -> list[OutgoingTransfer]:
        """Transfers that have not read all they claimed, those of a receiver that claimed again included."""
        return [out for out in offered.outgoing_transfers.values() if out.will_read]

    def _release_if_over(self, offered: OpenOffer) -> list[Action]:
        """Release the blocks once nobody reads or will read them."""
        all_served = offered.want is not None and len(offered.served) == offered.receivers
        if offered.state is OfferState.RELEASED or (offered.state is OfferState.OPEN and not all_served):
            return []
        if any(out.is_reading for out in offered.outgoing_transfers.values()):
            return []
        if offered.state is OfferState.OPEN and self._readers(offered):
            return []
        offered.state = OFFER_TABLE.after(offered.state, OfferEvent.RELEASE)
        del self.offers[offered.number]
        self._holds.clear(offered.number)
        self._deadlines.clear(("lost", str(offered.number)))
        self._rendezvous.leave(offered)
        code, reason = offered.over or offered.short or ("", "")
        return [Tell(released(offered, code, reason, is_declined=offered.is_declined and not code))]

    # How a transfer goes on:

    def _progress(self, out: OutgoingTransfer) -> list[Action]:
        """Tell the data plane that more chunks are computed, and the receiver, if it has not lent slots for them."""
        offered = out.offered
        if out.state is not OutgoingState.FLOWING or offered is None or out.granted is not None:
            return []
        ready = ready_chunks(out.plan, offered.tokens, offered.is_last)
        if ready <= out.progress:
            return []
        out.progress = ready
        actions: list[Action] = [Progress(out.transfer, offered.tables, ready, offered.fence)]
        if ready > max(out.announced, out.lent):
            out.announced = ready
            actions.append(Send(out.incarnation, Ready(transfer=out.transfer, chunks=ready)))
        return actions

    def _stop(self, out: OutgoingTransfer, code: str, reason: str) -> list[Action]:
        """End a transfer early. The receiver gets Drained only when nothing of it is under way."""
        if out.state in (OutgoingState.STOPPING, OutgoingState.ENDED):
            return []
        out.stopped_by = (code[:64], reason[:1024])
        self._owed.pop(out.transfer, None)
        offered = out.offered
        if offered is not None:
            offered.served.add(out.claim.receiver)
            offered.short = offered.short or out.stopped_by
        if out.is_busy:
            out.state = OUTGOING_TABLE.after(out.state, OutgoingEvent.STOP_BUSY)
            said: list[Action] = [StopSending(out.transfer, *out.stopped_by)] if out.is_ordered else []
            said += self._send(out, Failing(transfer=out.transfer, code=out.stopped_by[0], reason=out.stopped_by[1]))
        else:
            said = self._end(out, OutgoingEvent.STOP)
        return said + (self._release_if_over(offered) if offered is not None else [])

    def _end(self, out: OutgoingTransfer, event: OutgoingEvent) -> list[Action]:
        out.state = OUTGOING_TABLE.after(out.state, event)
        self._forget(out)
        return self._send(out, Drained(transfer=out.transfer, code=out.stopped_by[0], reason=out.stopped_by[1]))

    def _send(self, out: OutgoingTransfer, body: Failing | Drained) -> list[Action]:
        return [] if out.is_lost else [Send(out.incarnation, body)]

    def _forget(self, out: OutgoingTransfer) -> None:
        del self.outgoing_transfers[out.transfer]
        self._deadlines.clear(("claim", out.transfer))
        self._comparing.pop(out.transfer, None)
        self._owed.pop(out.transfer, None)
        if out.offered is None:
            self._stop_waiting(out)
        else:
            del out.offered.outgoing_transfers[out.transfer]
        its = self._of_receiver[out.incarnation]
        del its.outgoing_transfers[out.transfer]
        its.unused -= out.lent - out.shipped
        if not its.outgoing_transfers:
            del self._of_receiver[out.incarnation]


def released(offer: Offer | OpenOffer, code: str, reason: str = "", is_declined: bool = False) -> Released:
    """What its engine is told when an offer is over."""
    return Released(
        number=offer.number, request=offer.request, code=code[:64], reason=reason[:1024], is_declined=is_declined
    )


def _why_expired(offered: OpenOffer, now: float) -> str:
    if offered.want:
        return f"hold_s: {offered.hold_s:g} passed; not all ranks of {offered.want} came"
    tokens, age_s = offered.tokens - offered.first_token, now - offered.began
    return f"hold_s: {offered.hold_s:g} passed; nobody asked for its {tokens} tokens in {age_s:.1f} s"


def planned(claim: Claim, session: Session, engine: AttachedEngine) -> Plan:
    """The plan of a claim. Raises KVBridgeError if it differs from what the receiver planned."""
    epochs = (
        ("sender_epoch", engine.epoch, claim.sender_epoch),
        ("receiver_epoch", session.peer_epoch, claim.receiver_epoch),
    )
    for name, ours, theirs in epochs:
        if ours != theirs:
            raise PeerError("stale_epoch", f"{name}: sender {ours}, receiver {theirs}")
    if claim.receiver >= claim.receivers or claim.receivers > MAX_RANKS:
        raise PeerError("bad_receiver", f"receiver: {claim.receiver} of {claim.receivers} ranks, at most {MAX_RANKS}")
    plan = session.planner.plan(claim.takes, claim.first_token, claim.end_token, session.slot_bytes)
    if plan.digest != claim.plan:
        raise PeerError("plan_mismatch", f"plan: sender {plan.digest}, receiver {claim.plan}")
    return plan


def lease_excess(out: OutgoingTransfer, leases: Sequence[SlotLease], unused: int) -> str:
    """Why these leases are more than the transfer needs or a receiver can have; "" if they are not.

    The receiver has lent `unused` others, under which nothing was shipped yet.
    """
    if not leases:
        return ""
    if (lent := out.lent + len(leases)) > out.plan.chunks:
        return f"leases: {lent} for {out.plan.chunks} chunks"
    unused += len(leases)
    return f"leases: {unused} unused, at most {MOST_LEASES}" if unused > MOST_LEASES else ""


def refused(incarnation: str, claim: Claim, code: str, reason: str) -> Send:
    """The refusal of a claim."""
    return Send(incarnation, Refuse(code=code, reasons=(reason[:1024],), about=claim.transfer))
