"""What the receiver keeps: its engine's wants, and what it knows of their senders. Pure.

Which sessions are open; which rank holds which rows; whether our engine adopts their scales; which requests wait for
them; which wants of ours failed without their knowing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from kvbridge_proto.common import attachment_name
from kvbridge_proto.engine import Adopt, Expect, Failed, Refused, Scales, Want
from kvbridge_proto.peer import MAX_HOLD_RENDEZVOUS, Claim, Hold, SlotLease, Take
from kvbridge_proto.pool import Pool

from ..errors import EngineError, PeerError
from ..geometry.compat import has_other_scores
from ..geometry.layers import align_all, unfilled
from ..geometry.plan import Plan
from ..geometry.scales import other_scales, sender_scales
from ..geometry.shard import assign
from ..geometry.unfilled import Filling
from ..state_machines import TransferState, WantState
from .actions import Action, Tell
from .containers import Recent
from .orders import Fill
from .session import AttachedEngine, Session, engine_ranks, rank_index
from .transfer import OpenWant

MOST_NAME = 256  # characters, of a want (peer.py of the protocol)
# A session that ends with one of these may have a successor under another epoch. The next Hello shows it.
SUCCEEDED = ("peer_left", "stale_epoch")
Takes = tuple[tuple[Take, ...], ...]
MOST_ANSWERS = 64  # refusals kept; a sender that calibrates at each start brings new scales each time
HOLD_EVERY_S = 5.0
HOLD_SOON_S = 0.05  # most requests have blocks by then; their claim makes a Hold unnecessary
UNHEARD = ("peer_unreachable", "peer_lost", "deadline", "aborted")  # as what a want may fail that its sender knows not
MOST_UNHEARD = 16384
MOST_MET = 4096
UNHEARD_S = 300.0  # no engine holds an offer longer for somebody who says nothing about it


def claim_of(
    wanted: OpenWant,
    session: Session,
    transfer: str,
    token: bytes,
    plan: Plan,
    takes: tuple[Take, ...],
    leases: tuple[SlotLease, ...],
    now: float,
) -> Claim:
    """The claim to send for a transfer."""
    want, engine = wanted.want, wanted.engine
    return Claim(
        transfer=transfer,
        want=want_name(want, engine),
        receiver=engine.rank,
        receivers=engine.rank_count,
        rendezvous=want.rendezvous,
        sender_epoch=session.peer_epoch,
        receiver_epoch=session.our_epoch,  # a want that has failed may be told of under a later one
        first_token=want.first_token,
        end_token=want.end_token,
        takes=takes,
        plan=plan.digest,
        token=token,
        leases=leases,
        deadline_s=max(0.0, wanted.started + want.deadline_s - now),
        is_offered=want.is_offered,
    )


def want_name(want: Want, engine: AttachedEngine) -> str:
    """What senders call a want: the same on all ranks of our engine. Too long a name is replaced by its digest."""
    name = f"{engine.pool.engine.id}/{want.request}/{want.number if engine.rank_count == 1 else want.common}"
    return name if len(name) <= MOST_NAME else blake2b(name.encode(), digest_size=20).hexdigest()


def fill_of(transfer: str, wanted: OpenWant, filling: Filling) -> Fill:
    """The order to write zeros where no sender has rows. Raises KVBridgeError."""
    want = wanted.want
    plan = filling.plan(want.first_token, want.end_token)
    tables = wanted.tables
    return Fill(transfer, want.request, plan, filling.zeros, filling.tables(tables), tables, want.fence)


def can_begin_again(wanted: OpenWant, code: str) -> bool:
    """Whether a want may return to REACHING after its session ended with `code`.

    Otherwise it fails: the sender may be gone or may still hold the claim, rows have come, or another rank's claim is
    still open.
    """
    if wanted.state is WantState.REACHING:
        return code in SUCCEEDED
    if wanted.state is not WantState.FLOWING or code != "peer_left":
        return False
    incoming_transfers = wanted.incoming_transfers.values()
    return not wanted.has_rows and all(incoming.state is TransferState.ENDED for incoming in incoming_transfers)


def why_late(wanted: OpenWant, lacks: str) -> str:
    """How far a want was when its deadline passed; `lacks` says which ranks were not reached."""
    passed = f"deadline_s: {wanted.want.deadline_s} passed"
    if wanted.state is WantState.REACHING:
        return f"{passed} while reaching {lacks}" if lacks else f"{passed} while agreeing with the sender"
    incoming_transfers = wanted.incoming_transfers.values()
    done, total = (
        sum(incoming.placed for incoming in incoming_transfers),
        sum(incoming.plan.chunks for incoming in incoming_transfers),
    )
    silent = ", ".join(incoming.address for incoming in incoming_transfers if incoming.is_silent)
    return f"{passed} with {done} of {total} chunks" + (f"; nothing came from {silent}" if silent else "")


def why_refused(want: Want, session: Session | None, code: str, reason: str) -> tuple[str, str]:
    """Why a sender refused a claim, as it says; or better, if `session`, with the want's `sender`, shows more.

    A sender cannot know what was offered to the one before it. We see that another attachment took the offer.
    """
    if code != "unknown_offer" or session is None or not want.offered_to:
        return code, reason
    if (now := attachment_name(session.peer, session.peer_epoch)) == want.offered_to:
        return code, reason
    reason = f"offered to attachment {want.offered_to}, which is over; now {want.sender} has attachment {now}"
    return "started_after_it_was_offered", reason


def duplicate(want: Want) -> Tell:
    """The answer to another want under an open number. The first goes on, so this is Refused, not Failed."""
    reasons = (f"number: want {want.number} is open already",)
    return Tell(Refused(code="duplicate_request", reasons=reasons, about=f"want {want.number}"))


def failed(want: Want, code: str, reason: str) -> Tell:
    """The answer to a want that ended without its rows."""
    return Tell(Failed(number=want.number, request=want.request, code=code[:64], reason=reason[:1024]))


class SenderSessions:
    """Open sessions, by address."""

    def __init__(self) -> None:
        self.open: dict[str, Session] = {}
        self.changes = 0  # so far
        self._whole: dict[str, Mapping[str, Session]] = {}  # by sender: what `whole` has found

    def enter(self, address: str, session: Session) -> None:
        if self.open.get(address) is not session:
            self.open[address] = session
            self._changed()

    def leave(self, address: str) -> None:
        self.open.pop(address, None)
        self._changed()

    def _changed(self) -> None:
        self.changes += 1
        self._whole.clear()

    def whole(self, sender: str) -> Mapping[str, Session] | None:
        """The sessions with all ranks of the engine at `sender`, by address; None while one is missing or not known.

        It is the same object until any session opens or ends.
        """
        if sender not in self._whole and self.is_whole(sender) and not self.missing(sender):
            self._whole[sender] = self.reached(sender)
        return self._whole.get(sender)

    def needed(self, sender: str) -> list[str]:
        """Addresses of all known ranks of the engine at `sender`."""
        first = self.open.get(sender)
        if first is None:
            return [sender]
        own = rank_index(first.peer_pool)
        size = first.peer_pool.shard.tp_size
        others = [rank.address for rank in first.ranks if rank.pp_rank * size + rank.tp_rank != own]
        return [sender, *others]

    def missing(self, sender: str) -> list[str]:
        """The needed addresses without a session."""
        return [address for address in self.needed(sender) if address not in self.open]

    def lacks(self, sender: str) -> str:
        """Which ranks are missing for a claim, as text; "" if none."""
        if missing := self.missing(sender):
            return ", ".join(missing)
        if self.is_whole(sender):
            return ""
        known, of = len(self.needed(sender)), engine_ranks(self.open[sender].peer_pool)
        return f"{of - known} of {of} ranks, for its engine has told {sender} of {known} only"

    def reached(self, sender: str) -> dict[str, Session]:
        """The open sessions with the needed addresses."""
        return {address: self.open[address] for address in self.needed(sender) if address in self.open}

    def is_whole(self, sender: str) -> bool:
        """Whether the addresses of all ranks of the engine at `sender` are known."""
        first = self.open.get(sender)
        return first is not None and len(self.needed(sender)) >= engine_ranks(first.peer_pool)


class AssignedRows(NamedTuple):
    """What each of a sender's ranks gives, in the order of their sessions, and how layers are filled that none has."""

    takes: Takes
    filling: Filling | None
    has_other_scores: bool  # there they are in the other form


class ShardAssignment:
    """The last assignment of rows to ranks, by the sender address in the wants."""

    def __init__(self) -> None:
        self._assigned: dict[str, tuple[Mapping[str, Session], Pool, AssignedRows]] = {}
        self._fillings: dict[tuple[int, ...], tuple[Pool, Filling]] = {}  # by layers: the last of each, for all senders

    def takes(self, sender: str, sessions: Mapping[str, Session], pool: Pool) -> AssignedRows:
        """What `pool` takes from each of these sessions with the ranks of the engine at `sender`.

        Raises PeerError unless they are all the ranks of one engine and hold every row that a sender must have.
        """
        known = self._assigned.get(sender)
        if known is None or known[0] is not sessions or known[1] is not pool:
            pools = _pools(sessions)
            rows = AssignedRows(assign(pools, pool), self._filling(pools, pool), has_other_scores(pools, pool))
            known = self._assigned[sender] = sessions, pool, rows
        return known[2]

    def _filling(self, senders: Sequence[Pool], pool: Pool) -> Filling | None:
        """How the layers that none of these senders has are filled, None if there are none."""
        if not (missing := unfilled(align_all(senders, pool), pool)):
            return None
        of, filling = self._fillings.get(missing, (None, None))
        if filling is None or of is not pool:
            filling = Filling(pool, missing)
            self._fillings[missing] = pool, filling
        return filling

    def forget(self) -> None:
        """Drop all assignments: a session is over."""
        self._assigned.clear()


def _pools(sessions: Mapping[str, Session]) -> list[Pool]:
    """The senders' pools. Raises PeerError unless these are all the ranks of one engine."""
    pools = [session.peer_pool for session in sessions.values()]
    first = pools[0]
    for pool in pools:
        if pool.engine.id != first.engine.id:
            reason = f"engine.id: {first.engine.id} at the first agent, {pool.engine.id} at another"
            raise PeerError("sender_ranks_mismatch", reason)
    found = sorted(map(rank_index, pools))
    if found != list(range(engine_ranks(first))):
        raise PeerError("sender_ranks_mismatch", f"ranks: expected {engine_ranks(first)}, the agents hold {found}")
    return pools


class Adoption:
    """What our engine was asked about scales, and what it answered. The policy is the engine's (Attach)."""

    def __init__(self) -> None:
        self._asked: dict[tuple[Scales, ...], int] = {}  # -> the revision that answers it
        self._refusals: dict[int, str] = {}
        self._last = 0
        self._agreed: dict[str, tuple[Mapping[str, Session], Pool]] = {}

    def question(self, sender: str, sessions: Mapping[str, Session], engine: AttachedEngine) -> list[Action] | None:
        """What to ask the engine before rows are taken from these sessions. None if the scales agree.

        Empty while an answer is awaited: the want waits for it. Raises EngineError if the engine keeps other scales.
        """
        before, pool = self._agreed.get(sender, (None, None))
        if engine.policy != "adopt" or (before is sessions and pool is engine.pool):
            return None
        scales = sender_scales([session.peer_pool for session in sessions.values()], engine.pool)
        difference = other_scales(scales, engine.pool)
        if difference is None:
            self._agreed[sender] = sessions, engine.pool
            return None
        revision = self._asked.get(scales)
        if revision is None:
            self._last = revision = max(self._last, engine.revision) + 1
            self._forget_old()
            self._asked[scales] = revision
            return [Tell(Adopt(revision=revision, scales=scales))]
        if revision not in self._refusals and revision > engine.revision:
            return []
        raise EngineError("adopt_refused", f"{difference} ({self._refusals.get(revision, 'the engine took others')})")

    def declined(self, revision: int, reason: str) -> bool:
        """The engine keeps its scales. False if it was not asked."""
        if revision not in self._asked.values():
            return False
        self._refusals[revision] = reason
        return True

    def forget(self) -> None:
        """Drop all agreements: a session is over."""
        self._agreed.clear()

    def _forget_old(self) -> None:
        if len(self._refusals) >= MOST_ANSWERS:
            self._asked = {scales: r for scales, r in self._asked.items() if r not in self._refusals}
            self._refusals.clear()


class ExpectedRequests:
    """Requests that have no blocks yet, by number, and when to tell their senders.

    A sender holds an offer only for a short time. A receiver says that it waits soon after it begins to, and then every
    few seconds, naming all its rendezvous ids of a sender at once.
    """

    def __init__(self) -> None:
        self._expected: dict[int, Expect] = {}
        self._of: dict[str, dict[int, Expect]] = {}  # by sender
        self._unannounced: dict[str, dict[int, float]] = {}  # by sender: those not yet told to it, since when
        self._again_at = 0.0

    def __len__(self) -> int:
        return len(self._expected)

    @property
    def senders(self) -> Collection[str]:
        return self._of.keys()

    def add(self, expect: Expect, now: float) -> None:
        self.end(expect.number)
        self._expected[expect.number] = expect
        self._of.setdefault(expect.sender, {})[expect.number] = expect
        self._unannounced.setdefault(expect.sender, {})[expect.number] = now

    def end(self, number: int) -> None:
        """The request has blocks, or is over."""
        expect = self._expected.pop(number, None)
        if expect is None:
            return
        for by_sender in (self._of, self._unannounced):
            its: dict[int, Any] = by_sender.get(expect.sender, {})
            its.pop(number, None)
            if not its:
                by_sender.pop(expect.sender, None)

    def clear(self) -> None:
        self._expected.clear()
        self._of.clear()
        self._unannounced.clear()

    def due(
        self, now: float, wanted: Iterable[tuple[str, str]], can_hear: Callable[[str], bool]
    ) -> dict[str, list[str]]:
        """Rendezvous ids to name now, by sender.

        Every HOLD_EVERY_S these are all ids, of the expected requests and of `wanted`: the wants, as (sender, id). In
        between they are the new ones, of senders that can hear: with every rank of these there is a session.
        """
        rendezvous_ids: dict[str, list[str]] = {}
        if now >= self._again_at:
            self._again_at = now + HOLD_EVERY_S
            for sender, rendezvous in [*wanted, *((each.sender, each.rendezvous) for each in self._expected.values())]:
                rendezvous_ids.setdefault(sender, []).append(rendezvous)
            self._take_new(float("inf"), can_hear)
        else:
            for sender, numbers in self._take_new(now - HOLD_SOON_S, can_hear).items():
                rendezvous_ids[sender] = [self._expected[number].rendezvous for number in numbers]
        return rendezvous_ids

    def _take_new(self, until: float, can_hear: Callable[[str], bool]) -> dict[str, list[int]]:
        """By sender: requests that began to wait before `until` and whose sender can hear of them now. Each once."""
        found: dict[str, list[int]] = {}
        for sender in [each for each in self._unannounced if can_hear(each)]:
            its = self._unannounced[sender]
            if numbers := [number for number, since in its.items() if since <= until]:
                found[sender] = numbers
            for number in numbers:
                del its[number]
            if not its:
                del self._unannounced[sender]
        return found


def holds(rendezvous_ids: list[str]) -> list[Hold]:
    """The ids as Hold messages, each within its limit."""
    return [
        Hold(rendezvous_ids=tuple(rendezvous_ids[at : at + MAX_HOLD_RENDEZVOUS]))
        for at in range(0, len(rendezvous_ids), MAX_HOLD_RENDEZVOUS)
    ]


@dataclass(slots=True)
class UnheardFailure:
    """A want that failed. `heard` are the addresses of those ranks of its sender that need not be told."""

    wanted: OpenWant
    heard: set[str]
    until: float


class UnheardFailures:
    """Wants that failed while their sender could not be reached: it holds its offers for them until it is told.

    They are told once it is reached again, and forgotten after UNHEARD_S. Only those of senders that were met: requests
    may name addresses where nobody is by the thousand, and each would be tried again and again.
    """

    def __init__(self) -> None:
        self._met: Recent[str] = Recent(MOST_MET)  # addresses at which we had a session
        self._of: dict[str, list[UnheardFailure]] = {}  # by sender, oldest first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def meet(self, address: str) -> None:
        """A session is open at this address."""
        self._met.add(address)

    def add(self, wanted: OpenWant, heard: set[str], now: float) -> None:
        if wanted.want.sender in self._met and self._count < MOST_UNHEARD:
            self._of.setdefault(wanted.want.sender, []).append(UnheardFailure(wanted, heard, now + UNHEARD_S))
            self._count += 1

    def senders(self) -> list[str]:
        return list(self._of)

    def at(self, sender: str, now: float) -> list[UnheardFailure]:
        """Those that this sender has not heard of."""
        self.keep(sender, lambda each: each.until > now)
        return self._of.get(sender, [])

    def keep(self, sender: str, is_kept: Callable[[UnheardFailure], bool]) -> None:
        """Forget the others of this sender."""
        its = self._of.pop(sender, [])
        kept = [each for each in its if is_kept(each)]
        self._count -= len(its) - len(kept)
        if kept:
            self._of[sender] = kept

    def clear(self) -> None:
        self._of.clear()
        self._count = 0
