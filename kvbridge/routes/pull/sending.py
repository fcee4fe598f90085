"""The route `pull`, sending: tell receivers which blocks they may read, and for how long. Pure.

A lease is answered for only if we have just read everything that our engine had sent (routes/pull/leases.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvbridge_proto.peer import MAX_SUMS, Check, Checked, Claim, Grant, Renew, RouteToSender, Settled, Sum

from ...errors import PeerError
from ...exchange.actions import Action, Carried, Send, Unconfirmed
from ...exchange.block_tables import ready_chunks
from ...exchange.orders import Digest, Digested, RouteReport, Watch
from ...exchange.outgoing import OpenAnswers, OutgoingTransfer, SendingRoute
from ...exchange.session import Session
from ...geometry.plan import Plan
from ...states import OfferState, TransferState
from .leases import LEASE_HEARD_S, LEASE_S, GrantedLease

MOST_DIGESTS = 4  # at once, of all transfers, so that other moves get their turn


class PullSending(SendingRoute):
    """All transfers by `pull`: which receivers wait for an answer, and which chunks are compared."""

    def __init__(self, opened: OpenAnswers) -> None:
        self.deadlines, self.pending = opened.deadlines, opened.pending
        self.comparing: dict[str, OutgoingByPull] = {}  # with chunks to be digested, in the order of their turns
        self.digesting = 0

    def begin(self, claim: Claim, session: Session, plan: Plan, now: float) -> OutgoingByPull:
        if claim.leases:
            raise PeerError("bad_lease", f"leases: {len(claim.leases)} of a route without slots")
        return OutgoingByPull(claim.transfer, session, plan, claim, now, route=self)

    def next(self) -> list[Action]:
        """Digest chunks that receivers have read, in turns."""
        actions: list[Action] = []
        while self.comparing and self.digesting < MOST_DIGESTS:
            out = self.comparing.pop(next(iter(self.comparing)))
            if not out.can_digest:  # it may have ended since
                continue
            offered = out.offered
            assert offered is not None
            self.digesting += 1
            out.digesting += 1
            order = (out.transfer, offered.number, offered.request, out.plan, offered.tables, out.checks.popleft())
            actions.append(Digest(*order))
            if out.can_digest:
                self.comparing[out.transfer] = out
        return actions


@dataclass(slots=True, eq=False, kw_only=True)
class OutgoingByPull(OutgoingTransfer):
    route: PullSending
    granted: GrantedLease = field(default_factory=GrantedLease)  # what its receiver may count on
    asked: set[int] = field(default_factory=set)  # chunks its receiver has read and wants to compare
    checks: deque[Sum] = field(default_factory=deque)  # the receiver's digests of chunks we have not digested yet
    is_settled: bool = False  # its receiver has finished
    digesting: int = 0  # chunks being digested
    checked: list[Sum] = field(default_factory=list)  # our digests, not sent to the receiver yet

    @property
    def chunks_done(self) -> int | None:
        return None if self.granted.ready else 0

    @property
    def is_promised(self) -> bool:
        return self.granted.ends is not None

    @property
    def is_reading(self) -> bool:
        return self.is_promised or self.digesting > 0

    @property
    def read_until(self) -> float | None:
        return None if self.digesting else self.granted.ends

    @property
    def can_digest(self) -> bool:
        """Whether there is a chunk to compare."""
        return self.state is TransferState.FLOWING and bool(self.checks)

    def flow(self) -> list[Action]:
        return self.grow()

    def grow(self) -> list[Action]:
        """Remember that its receiver waits for an answer."""
        offered = self.offered
        if self.will_read and not self.is_settled and offered is not None and offered.state is OfferState.OPEN:
            self.route.pending[self.transfer] = self
        return []

    def answer(self, now: float, heard_at: float, has_reached: Callable[[int], bool]) -> list[Action]:
        """The block tables that its receiver waits for; the lease begins now.

        None if we heard our engine too long ago to rule out a withdrawal.
        """
        offered, granted = self.offered, self.granted
        if now - heard_at >= LEASE_HEARD_S or offered is None:
            return []
        following = offered.update_readable(has_reached)
        watch: list[Action] = [Watch(following)] if following is not None else []
        if following is None:
            del self.route.pending[self.transfer]
        is_last = offered.is_last and following is None
        ready = ready_chunks(self.plan, offered.readable, is_last)
        if not granted.is_asked and ready == granted.ready:
            return watch
        said = granted.answer(self.transfer, self.plan, offered.tables, offered.readable, is_last, ready)
        granted.ends = now + LEASE_S
        self.route.deadlines.set(("lease", self.transfer), granted.ends)
        return [*watch, Send(self.incarnation, said)]

    def on_message(self, body: RouteToSender) -> list[Action]:
        match body:
            case Renew(number=number):  # it is still reading: `answers` renews the lease, if it may
                self.granted.renewal, self.granted.is_asked = max(self.granted.renewal, number), True
                return self.grow()
            case Check():
                return self._on_check(body)
            case Settled():
                return self._on_settled()
            case Grant(leases=leases) if self.is_open:
                self.failure = "bad_lease", f"leases: {len(leases)} of a route without slots"
        return []

    def _on_check(self, check: Check) -> list[Action]:
        """The receiver has read these chunks, and wants to compare digests. No answer if the transfer has ended."""
        if self.state is not TransferState.FLOWING or self.is_settled:
            return []
        for each in check.digests:
            if each.chunk >= self.granted.ready or each.chunk in self.asked:
                reason = f"chunk: got {each.chunk}, of {self.granted.ready} that may be read, each once"
                self.failure = "bad_check", reason
                return []
            self.asked.add(each.chunk)
            self.checks.append(each)
        self.route.comparing.setdefault(self.transfer, self)
        return self.route.next()

    def _on_settled(self) -> list[Action]:
        """The receiver has read all that it claimed. So have we, once none of its chunks is being digested."""
        if self.offered is None:  # nothing was promised
            return []
        self.on_cancel()
        if self.state is not TransferState.FLOWING or self.is_settled:
            return []
        self.is_settled = True
        self.checks.clear()  # it no longer waits for them
        self.is_over = self.has_read = not self.digesting
        return [Carried(self.session, self.plan.chunks, self.plan.total_bytes)]

    def on_report(self, report: RouteReport) -> list[Action]:
        assert isinstance(report, Digested)
        self.route.digesting -= 1
        self.digesting -= 1
        if self.is_settled:
            self.is_over = self.has_read = not self.digesting
            return []
        if self.state is not TransferState.FLOWING:
            return []
        if report.failure is not None:
            self.failure = report.failure
            return []
        self.checked.append(report.found)
        if (self.checks or self.digesting) and len(self.checked) < MAX_SUMS:
            return []  # sent once none is under way, or a message is full
        digests, self.checked = tuple(self.checked), []
        return [Send(self.incarnation, Checked(transfer=self.transfer, digests=digests))]

    def on_time(self, kind: str) -> list[Action]:
        """Its lease has ended. While it flows, a receiver that has read all that is computed so far does not renew."""
        self.granted.ends = None
        return [Unconfirmed(self.transfer)] if self.state is TransferState.STOPPING else []

    def on_cancel(self) -> None:
        self.granted.ends = None
        self.route.deadlines.clear(("lease", self.transfer))

    def forget(self) -> None:
        self.route.comparing.pop(self.transfer, None)
