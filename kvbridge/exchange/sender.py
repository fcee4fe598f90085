"""The sender's half: our engine's offers, and the transfers that read them. Pure.

An offer and the claims on it may come in either order. They meet under a rendezvous id, and flow as the route of their
session says (transfer.py): rows once their tokens are computed, windows and states once the offer is complete, because
an engine that goes on computing reuses their blocks. The engine gets its blocks back when nobody reads them or will
read them; this does not wait for the network.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from kvbridge_proto.common import MAX_RANKS
from kvbridge_proto.engine import MAX_HELD, Held, NoOffer, Offer, Refused, Released
from kvbridge_proto.peer import Cancel, Claim, Drained, Failing, Refuse, Route, RouteToSender

from ..errors import EngineError, KVBridgeError, PeerError
from ..geometry.plan import Plan
from ..state_machines import OFFER_TABLE, OfferEvent, OfferState, TransferState
from .actions import Action, Met, Send, Tell
from .block_tables import check_begin, check_last, extended
from .containers import Deadlines, Recent
from .offers import AWAITED_S, ENDED_S, EndedOffer, Rendezvous, call_of
from .orders import Broken, Quiet, RouteReport, SendingReport, StopSending
from .session import AttachedEngine, Session
from .transfer import OpenAnswers, OpenOffer, OutgoingTransfer, SendingRoute

MOST_OFFERS = 16384
MOST_CLAIMS = 2048  # open at once, of one receiver
MOST_CLAIMS_OF_ALL = 32768  # of all receivers together: 16 at their limit
# What was computed since is not reclaimed: the router has only just heard that the prefill is done, a claim may follow.
FRESH_S = 0.25
LOST_S = AWAITED_S  # in which a receiver that was only cut off comes again
LATE_S = 1.0  # by which one rank may offer a prompt later than another
MOST_RENOUNCED = 16384  # of all receivers together; the link that could still bring such a claim is lost in silence_s


class Sender:
    """All offers of this agent's engine and all transfers that read them.

    `make_routes` gets what the sender shares with its routes. `before` are earlier incarnations of our agent, known to
    be dead.
    """

    def __init__(
        self,
        make_routes: Callable[[OpenAnswers], Mapping[Route, SendingRoute]],
        most_claims: int = MOST_CLAIMS,
        before: Collection[str] = (),
    ) -> None:
        self._before = before
        self._renounced: Recent[tuple[str, str]] = Recent(MOST_RENOUNCED)  # (incarnation, transfer)
        self._most_claims = most_claims
        self.offers: dict[int, OpenOffer] = {}
        self.outgoing_transfers: dict[str, OutgoingTransfer] = {}
        self._of_receiver: dict[str, dict[str, OutgoingTransfer]] = {}  # by incarnation, and by transfer
        self._waiting: dict[str, dict[str, OutgoingTransfer]] = {}  # by rendezvous
        # Of those that wait, by transfer: claims of what was offered before, until it is known whether it is there.
        self._undecided: dict[str, OutgoingTransfer] = {}
        self._lost_claims: list[int] = []  # open offers of which a claim was lost since the last tick
        self._rendezvous = Rendezvous()
        self._share_numbers = itertools.count(-1, -1)  # engines give others
        self._is_paused = False
        opened = OpenAnswers()
        self._deadlines, self._pending = opened.deadlines, opened.pending
        self._holds: Deadlines[int] = Deadlines()  # of the offers
        self._route_of = dict(make_routes(opened))
        self._routes = tuple(dict.fromkeys(self._route_of.values()))  # several share one half

    # An offer and its claims, until the blocks are free:

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
                refusals = self._refuse_later(EndedOffer(offer.rendezvous, (code, reason), now + ENDED_S), now)
                return [Tell(released(offer, code, reason)), *refusals]
            offered = OpenOffer(offer.number, offer.request, offer.rendezvous, {}, offer.first_token, began=now)
            self.offers[offer.number] = offered
            self._rendezvous.enter(offered)
        try:
            self._grow(offered, offer, engine)
        except KVBridgeError as error:
            return self._end_offer(offered, error.code, str(error), now)
        offered.hold_s, offered.is_kept, offered.prefixes = offer.hold_s, bool(offer.prefixes), offer.prefixes
        self._holds.set(offer.number, now + offer.hold_s)
        actions = self._bind_waiting(offer.rendezvous)
        actions += self._short_of(offered)
        for out in list(offered.outgoing_transfers.values()):
            actions += out.grow()
        offered.announced = 0
        if offered.is_last and not offered.is_kept and offered.want is None and offered.first_token < offered.tokens:
            actions += [action for route in self._routes for action in route.announce(offered, now)]
        return actions if offer.most_kept is None else actions + self._make_room(offered, offer.most_kept, now)

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

    def claim(self, claim: Claim, session: Session, engine: AttachedEngine, now: float) -> list[Action]:
        """A receiver claims rows that are or will be offered under a rendezvous id."""
        incarnation = session.peer.incarnation
        if (incarnation, claim.transfer) in self._renounced:
            return [
                refused(incarnation, claim, "cancelled", f"transfer: {claim.transfer} was cancelled before it came")
            ]
        if claim.transfer in self.outgoing_transfers:
            return [refused(incarnation, claim, "duplicate_transfer", f"transfer: {claim.transfer} is already claimed")]
        if len(self._of_receiver.get(incarnation, ())) >= self._most_claims:
            reason = f"claims: {self._most_claims} of this receiver are open"
            return [refused(incarnation, claim, "too_many_claims", reason)]
        if len(self.outgoing_transfers) >= MOST_CLAIMS_OF_ALL:
            reason = f"claims: {MOST_CLAIMS_OF_ALL} of all receivers are open"
            return [refused(incarnation, claim, "too_many_transfers", reason)]
        try:
            plan = planned(claim, session, engine)
            if not plan.chunks and self._rendezvous.is_served(claim):
                reason = f"want: {claim.want} had its offer before, and this claim takes no rows"
                raise PeerError("already_fetched", reason)
            out = self._route_of[session.routed.route].begin(claim, session, plan, now)
        except KVBridgeError as error:
            return [refused(incarnation, claim, error.code, str(error))]
        self.outgoing_transfers[claim.transfer] = out
        self._of_receiver.setdefault(incarnation, {})[claim.transfer] = out
        self._waiting.setdefault(claim.rendezvous, {})[claim.transfer] = out
        self._rendezvous.forget_old(now)
        self._deadlines.set(("claim", claim.transfer), now + claim.deadline_s)
        return self._bind_waiting(claim.rendezvous)

    def _bind_waiting(self, rendezvous: str) -> list[Action]:
        """Match claims and offers under one id, oldest first. All claims of one want get the same offer."""
        actions: list[Action] = []
        for out in list(self._waiting.get(rendezvous, {}).values()):
            offered = self._rendezvous.offer_for(out.claim)
            if isinstance(offered, EndedOffer):
                self._rendezvous.meet(out.claim)
                actions += self._stop(out, *self._rendezvous.refuse(offered, out.claim))
                continue
            if offered is None or (self._is_paused and out.plan.chunks):
                if self._rendezvous.is_all_offered(out.claim):
                    self._undecided[out.transfer] = out
                continue
            if offered.want is None:
                offered = self._share(offered, out.started) if offered.is_kept else offered
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
            out.bind()
            size = out.plan.chunks, out.plan.total_bytes
            actions.append(Met(out.transfer, out.incarnation, offered.engines_number, *size))
            if out.plan.chunks == 0:
                offered.served.add(out.claim.receiver)
                out.finish()
                self._forget(out)
                actions += self._release_if_over(offered)
            else:
                actions += self._short_of(offered)
                if out.state is TransferState.FLOWING:
                    actions += out.flow()
        return actions

    def _share(self, kept: OpenOffer, now: float) -> OpenOffer:
        """What one want may read of what is kept, which is kept for longer because it is used."""
        share = kept.share(next(self._share_numbers), now)
        self.offers[share.number] = share
        self._rendezvous.enter(share)
        self._holds.set(share.number, now + kept.hold_s)
        self._use(kept, now)
        return share

    def _use(self, kept: OpenOffer, now: float) -> None:
        """Others are released before it."""
        self.offers[kept.number] = self.offers.pop(kept.number)
        self._holds.set(kept.number, now + kept.hold_s)

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
                    check_last(out.plan, offered.tables, offered.tokens)
            except KVBridgeError as error:
                actions += self._stop(out, error.code, str(error))
        return actions

    def answers(self, now: float, heard_at: float, has_reached: Callable[[int], bool]) -> list[Action]:
        """Answers that receivers wait for: what they may read, and refusals of what is not offered here (any more).

        `SenderRunner._answers` calls this, after everything that made an answer due and after `note_if_silent`.
        `heard_at` is when we last had read everything the engine sent. `has_reached` says whether its fence has reached
        a count.
        """
        actions = self._refuse_unoffered(heard_at)
        for out in list(self._pending.values()):
            actions += out.answer(now, heard_at, has_reached)
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

    def on_message(self, incarnation: str, body: RouteToSender) -> list[Action]:
        """What only the transfer's route understands, from its receiver."""
        out = self.outgoing_transfers.get(body.transfer)
        if out is None or out.incarnation != incarnation:
            return []
        return out.on_message(body) + self._go_on(out)

    def on_reports(self, reports: Iterable[SendingReport]) -> list[Action]:
        """Take the data plane's reports."""
        actions: list[Action] = []
        for report in reports:
            match report:
                case RouteReport(transfer=transfer):
                    out = self.outgoing_transfers[transfer]
                    actions += out.on_report(report) + self._go_on(out)
                case Broken(transfer=transfer, code=code, reason=reason):
                    actions += self._stop(self.outgoing_transfers[transfer], code, reason)
                case Quiet(transfer=transfer):
                    out = self.outgoing_transfers[transfer]
                    out.is_ordered = False
                    actions += self._go_on(out)
        return actions + [action for route in self._routes for action in route.next()]

    def _go_on(self, out: OutgoingTransfer) -> list[Action]:
        """Something has happened to it: it may have failed, be read, be over, or be quiet after a stop."""
        if out.failure is not None and out.is_open:
            return self._stop(out, *out.failure)
        offered, actions = out.offered, list[Action]()
        if offered is None:
            return []
        if out.state is TransferState.FLOWING and out.has_read:
            offered.served.add(out.claim.receiver)
            if out.is_over:
                out.finish()
                self._forget(out)
        elif out.state is TransferState.STOPPING and not out.is_busy:
            actions = self._end(out)
        return actions + self._release_if_over(offered)

    def _release_if_over(self, offered: OpenOffer) -> list[Action]:
        """Release the blocks once nobody reads or will read them."""
        all_served = offered.want is not None and len(offered.served) == offered.receivers
        if offered.state is OfferState.RELEASED or (offered.state is OfferState.OPEN and not all_served):
            return []
        if offered.shares or any(out.is_reading for out in offered.outgoing_transfers.values()):
            return []
        if offered.state is OfferState.OPEN and any(out.will_read for out in offered.outgoing_transfers.values()):
            return []  # those of a receiver that claimed again included
        offered.state = OFFER_TABLE[offered.state, OfferEvent.RELEASE]
        del self.offers[offered.number]
        self._holds.clear(offered.number)
        self._deadlines.clear(("lost", str(offered.number)))
        self._rendezvous.leave(offered)
        if offered.of is not None:
            del offered.of.shares[offered.number]
            return self._release_if_over(offered.of)
        code, reason = offered.over or offered.short or ("", "")
        return [Tell(released(offered, code, reason, is_declined=offered.is_declined and not code))]

    def _forget(self, out: OutgoingTransfer) -> None:
        del self.outgoing_transfers[out.transfer]
        self._deadlines.clear(("claim", out.transfer))
        self._pending.pop(out.transfer, None)
        out.forget()
        if out.offered is None:
            self._stop_waiting(out)
        else:
            del out.offered.outgoing_transfers[out.transfer]
        its = self._of_receiver[out.incarnation]
        del its[out.transfer]
        if not its:
            del self._of_receiver[out.incarnation]

    # An offer that ends early:

    def withdraw(self, number: int, reason: str, now: float, comes_again: bool = False) -> list[Action]:
        """Our engine takes an offer back. Released follows once nobody reads its blocks, or was told already.

        With `comes_again` the request will be offered again: later claims wait for that.
        """
        if (offered := self.offers.get(number)) is None:
            return []
        actions = self._end_offer(offered, "withdrawn", reason, now, comes_again)
        for share in list(offered.shares.values()):
            actions += self._end_offer(share, "withdrawn", reason, now)
        return actions

    def no_offer(self, message: NoOffer, now: float) -> None:
        """Our engine offers nothing more for a call. `answers` refuses the claims that wait for it."""
        self._rendezvous.end_call(message.call, (message.code, message.reason), now)
        for rendezvous, transfers in self._waiting.items():  # once per refused call, so no index
            if call_of(rendezvous) == message.call:
                self._undecided |= transfers

    def reclaim(self, blocks: int, now: float, has_reached: Callable[[int], bool]) -> list[Action]:
        """Our engine is short of `blocks` blocks: end offers that nobody has asked for, oldest first.

        It offers a prompt when it schedules its last tokens, and goes on asking while it is short. So an offer goes
        once it has been seen computed for FRESH_S: `has_reached` says whether the engine's fence has reached a count.
        Kept answers go before prompts, for which somebody is sure to come.
        """
        actions: list[Action] = []
        for offered in sorted(self.unclaimed(now), key=lambda each: not each.is_kept):
            if blocks <= 0:
                break
            if offered.rendezvous in self._waiting or not has_reached(offered.fence):
                continue
            if offered.computed_by is None:
                offered.computed_by = now
            if now - offered.computed_by >= FRESH_S:
                blocks -= offered.blocks
                reason = f"its engine needs the blocks, and nobody asked for them in {now - offered.began:.1f} s"
                actions += self._end_offer(offered, "reclaimed", reason, now)
        return actions

    def _make_room(self, latest: OpenOffer, most_blocks: int, now: float) -> list[Action]:
        """End what need not be kept, and what nobody has asked for, least recently used first.

        What is kept has at most so many blocks afterwards, unless more of them are read.
        """
        kept = [each for each in self.offers.values() if each.is_kept and each.state is OfferState.OPEN]
        actions = list[Action]()
        for each in kept:
            if each is not latest and begins_with(each, latest):
                self._use(each, now)
                return actions + self._end_offer(latest, "reclaimed", f"all of it is kept: offer {each.number}", now)
            if each is not latest and begins_with(latest, each) and not each.shares:
                actions += self._end_offer(each, "reclaimed", f"all of it is kept: offer {latest.number}", now)
        excess = sum(each.blocks for each in kept if each.state is OfferState.OPEN) - most_blocks
        for offered in self.unclaimed(now):
            if excess > 0 and offered.is_kept and offered is not latest and offered.rendezvous not in self._waiting:
                excess -= offered.blocks
                reason = f"others are kept instead: {most_blocks} blocks at most"
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
            is_claimed = offered.want is not None or offered.shares
            if awaited[offered.rendezvous] < 0 and offered.is_last and not is_claimed:
                found.append(offered)
        return found

    def _end_offer(
        self, offered: OpenOffer, code: str, reason: str, now: float, comes_again: bool = False
    ) -> list[Action]:
        if offered.state is not OfferState.OPEN:
            return []
        if offered.is_kept and code in ("offer_expired", "reclaimed"):
            code = "kept_no_longer"  # nobody was sure to come
        offered.state, offered.over = OFFER_TABLE[offered.state, OfferEvent.END], (code, reason)
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

    # A transfer that ends early:

    def cancel(self, incarnation: str, cancel: Cancel, now: float) -> list[Action]:
        """The receiver gives up. Drained follows once nothing is being written; at once for an unknown transfer.

        A claim without rows that has no offer yet waits a moment longer: this rank's offer may just be late, and would
        be held for nobody. After that, it would take the offer of another prompt under the same id.
        """
        is_asked = cancel.code == "forgotten" or bool(cancel.incarnation)
        if not is_asked and cancel.transfer not in self.outgoing_transfers:
            # Its claim came before, by the same link, and is over: one without rows is once it has met its offer.
            return [Send(incarnation, Drained(transfer=cancel.transfer))]
        if self.renounce(incarnation, cancel):
            return [Send(incarnation, Drained(transfer=cancel.transfer))]
        out = self.outgoing_transfers.get(cancel.transfer)
        if cancel.incarnation or out is None or out.incarnation != incarnation:
            return []
        if out.offered is None and not out.plan.chunks:
            out.cancelled = cancel.code or "cancelled", cancel.reason
            due = self._deadlines.at(key := ("claim", out.transfer))
            self._deadlines.set(key, now + LATE_S if due is None else min(due, now + LATE_S))
            return []
        out.is_lost = False  # it came back, and asks about a transfer whose end it did not hear
        out.on_cancel()
        return self._stop(out, cancel.code or "cancelled", cancel.reason) + self._go_on(out)

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
        for route in self._routes:
            route.lost(incarnation)
        for out in list(self._of_receiver.get(incarnation, {}).values()):
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

    def _stop(self, out: OutgoingTransfer, code: str, reason: str) -> list[Action]:
        """End a transfer early. The receiver gets Drained only when nothing of it is under way."""
        if not out.is_open:
            return []
        out.stopped_by = (code[:64], reason[:1024])
        self._pending.pop(out.transfer, None)
        offered = out.offered
        if offered is not None:
            offered.served.add(out.claim.receiver)
            offered.short = offered.short or out.stopped_by
        if out.is_busy:
            out.stop()
            actions: list[Action] = [StopSending(out.transfer, *out.stopped_by)] if out.is_ordered else []
            actions += self._send(out, Failing(transfer=out.transfer, code=out.stopped_by[0], reason=out.stopped_by[1]))
        else:
            actions = self._end(out)
        return actions + (self._release_if_over(offered) if offered is not None else [])

    def _end(self, out: OutgoingTransfer) -> list[Action]:
        out.end()
        self._forget(out)
        return self._send(out, Drained(transfer=out.transfer, code=out.stopped_by[0], reason=out.stopped_by[1]))

    def _send(self, out: OutgoingTransfer, body: Failing | Drained) -> list[Action]:
        return [] if out.is_lost else [Send(out.incarnation, body)]

    # Time, and requests that wait at a receiver:

    def hold(self, incarnation: str, rendezvous_ids: Sequence[str], now: float) -> list[Action]:
        """Requests of a receiver wait for offers under these ids, one for each time an id is named."""
        held: list[int] = []
        for rendezvous, count in Counter(rendezvous_ids).items():
            for offered in self._rendezvous.await_in(rendezvous, incarnation, count, now):
                self._holds.set(offered.number, now + offered.hold_s)
                if offered.of is None:
                    held.append(offered.number)
        pieces = [held[at : at + MAX_HELD] for at in range(0, len(held), MAX_HELD)]
        return [Tell(Held(numbers=tuple(piece))) for piece in pieces]

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
                late = "deadline", f"deadline_s: {out.claim.deadline_s} passed; {what}"
                actions += self._stop(out, *(out.cancelled or late))
            elif (its := self.outgoing_transfers.get(key)) is not None:
                actions += its.on_time(kind) + self._go_on(its)
        return actions

    # What changes beside us:

    def engine_left(self, now: float) -> list[Action]:
        """Our engine is gone: its memory must no longer be read."""
        actions = self._end_all("engine_left", "the engine left", now)
        self._rendezvous.forget_ended()
        return [action for action in actions if not isinstance(action, Tell)]

    def rescaled(self, reason: str, now: float) -> list[Action]:
        """Our engine's scales changed: end everything that was planned with the old ones."""
        return self._end_all("rescaled", reason, now)

    def reweighed(self, reason: str, now: float) -> list[Action]:
        """Our engine has other weights: end everything that was computed with the old ones."""
        return self._end_all("other_weights", reason, now)

    def _end_all(self, code: str, reason: str, now: float) -> list[Action]:
        actions: list[Action] = []
        for offered in list(self.offers.values()):
            actions += self._end_offer(offered, code, reason, now)
        for out in list(self.outgoing_transfers.values()):
            actions += self._stop(out, code, reason)
        return actions

    def pause(self, is_alone: bool) -> bool:
        """Returns whether no transfer flows and no block is read; writes of stopped transfers may be under way.

        If `is_alone` (our engine has one rank), begin no transfer until `rebuilt` or `resume`. With several ranks
        transfers do begin: a receiver could not claim again what the other ranks have begun.
        """
        self._is_paused = is_alone
        return not any(out.state is TransferState.FLOWING or out.is_reading for out in self.outgoing_transfers.values())

    def resume(self) -> list[Action]:
        """The rebuild is cancelled."""
        self._is_paused = False
        return [action for rendezvous in list(self._waiting) for action in self._bind_waiting(rendezvous)]

    def rebuilt(self, reason: str) -> list[Action]:
        """Our agent replaces its slots and ends all sessions: stop the transfers, so that receivers need not wait.

        Claims on what is not offered yet end with their sessions, and come again by new ones.
        """
        self._is_paused = False
        moving = [out for out in self.outgoing_transfers.values() if out.state is not TransferState.WAITING]
        return [action for out in moving for action in self._stop(out, "rebuilt", reason)]

    # For others to look at:

    @property
    def engines_offers(self) -> list[OpenOffer]:
        """Without shares of what is kept. Callable from any thread: `list` copies atomically."""
        return [each for each in list(self.offers.values()) if each.of is None]

    def is_awaited(self, rendezvous: str) -> bool:
        """Whether claims wait for an offer under this id."""
        return rendezvous in self._waiting

    def has_offer(self, claim: Claim) -> bool:
        """Whether there is an open offer for this claim, or an ended one to refuse it with."""
        return self._rendezvous.offer_for(claim) is not None

    def awaited_by(self, offered: OpenOffer) -> str:
        """The incarnation of the last receiver that said a request waits under this offer's id."""
        return self._rendezvous.awaiting(offered.rendezvous)

    def held_until(self, offered: OpenOffer) -> float | None:
        """When an open offer expires; when the last read lease on an ended one does.

        None if an ended one is gathered or digested: its blocks are kept until that is over.
        """
        if offered.state is OfferState.OPEN:
            return self._holds.at(offered.number)
        ends = [out.read_until for out in offered.outgoing_transfers.values() if out.is_reading]
        return max((at for at in ends if at is not None), default=None) if None not in ends else None

    @property
    def is_promised(self) -> bool:
        """Whether a receiver counts on blocks of our engine."""
        return any(out.is_promised for out in self.outgoing_transfers.values())

    @property
    def has_pending(self) -> bool:
        """Whether a receiver waits for an answer."""
        return bool(self._undecided or self._pending)

    @property
    def without_offer(self) -> int:
        """How many claimed transfers have no offer yet. Callable from any thread."""
        return sum(map(len, list(self._waiting.values())))


def released(offer: Offer | OpenOffer, code: str, reason: str = "", is_declined: bool = False) -> Released:
    """What its engine is told when an offer is over."""
    return Released(
        number=offer.number, request=offer.request, code=code[:64], reason=reason[:1024], is_declined=is_declined
    )


def begins_with(kept: OpenOffer, other: OpenOffer) -> bool:
    """Whether `kept` begins with all that `other` is known to have."""
    count = len(other.prefixes)
    return 0 < count <= len(kept.prefixes) and kept.prefixes[count - 1] == other.prefixes[-1]


def _why_expired(offered: OpenOffer, now: float) -> str:
    if offered.is_kept:
        return f"hold_s: {offered.hold_s:g} passed since it was kept or last used"
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


def refused(incarnation: str, claim: Claim, code: str, reason: str) -> Send:
    """The refusal of a claim."""
    return Send(incarnation, Refuse(code=code, reasons=(reason[:1024],), about=claim.transfer))
