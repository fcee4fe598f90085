"""The routes through slots, sending: order what is computed to be written into the slots that are lent. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvbridge_proto.peer import Claim, Grant, Ready, RouteToSender, SlotLease

from ...errors import PeerError
from ...exchange.actions import Action, Carried, Send
from ...exchange.block_tables import ready_chunks
from ...exchange.orders import Credit, Gathered, Progress, RouteReport, SendOrder, Sent, Shipped
from ...exchange.outgoing import OutgoingTransfer, SendingRoute
from ...exchange.session import Session
from ...geometry.plan import Plan
from ...states import TransferState

MOST_LEASES = 4096  # unused, of one receiver: as many slots as an agent can have


class SlotSending(SendingRoute):
    """All transfers by routes through slots. `unused`: leases of each receiver under which nothing was shipped yet."""

    def __init__(self) -> None:
        self.unused: Counter[str] = Counter()

    def begin(self, claim: Claim, session: Session, plan: Plan, now: float) -> OutgoingBySlots:
        out = OutgoingBySlots(claim.transfer, session, plan, claim, now, route=self)
        if too_many := out.excess(claim.leases):
            raise PeerError("bad_lease", too_many)
        out.lend(claim.leases)
        return out


@dataclass(slots=True, eq=False, kw_only=True)
class OutgoingBySlots(OutgoingTransfer):
    route: SlotSending
    early: tuple[SlotLease, ...] = ()  # lent before the data plane had an order
    lent: int = 0
    shipped: int = 0
    progress: int = 0  # chunks the data plane was told are ready
    announced: int = 0  # chunks the receiver was told are ready

    @property
    def chunks_done(self) -> int:
        return self.shipped

    @property
    def is_reading(self) -> bool:
        return self.is_ordered and not self.has_read

    def flow(self) -> list[Action]:
        """Order the data plane to send it."""
        offered, claim = self.offered, self.claim
        assert offered is not None
        self.is_ordered = True
        what = self.transfer, offered.number, offered.request, self.incarnation, self.plan
        order = SendOrder(*what, claim.token, claim.receiver_epoch, self.session.digest)
        early = [Credit(self.transfer, self.early)] if self.early else []
        self.early = ()
        return [order, *early, *self.grow()]

    def grow(self) -> list[Action]:
        """Tell the data plane that more chunks are computed, and the receiver, if it has not lent slots for them."""
        offered = self.offered
        if self.state is not TransferState.FLOWING or offered is None:
            return []
        ready = ready_chunks(self.plan, offered.tokens, offered.is_last)
        if ready <= self.progress:
            return []
        self.progress = ready
        actions: list[Action] = [Progress(self.transfer, offered.tables, ready, offered.fence)]
        if ready > max(self.announced, self.lent):
            self.announced = ready
            actions.append(Send(self.incarnation, Ready(transfer=self.transfer, chunks=ready)))
        return actions

    def on_message(self, body: RouteToSender) -> list[Action]:
        if not isinstance(body, Grant) or not self.is_open:
            return []
        if too_many := self.excess(body.leases):
            self.failure = "bad_lease", too_many
            return []
        return self.lend(body.leases)

    def excess(self, leases: Sequence[SlotLease]) -> str:
        """Why these leases are more than it needs or its receiver can have; "" if they are not."""
        if not leases:
            return ""
        if (lent := self.lent + len(leases)) > self.plan.chunks:
            return f"leases: {lent} for {self.plan.chunks} chunks"
        unused = self.route.unused[self.incarnation] + len(leases)
        return f"leases: {unused} unused, at most {MOST_LEASES}" if unused > MOST_LEASES else ""

    def lend(self, leases: tuple[SlotLease, ...]) -> list[Action]:
        """The receiver lends more slots."""
        self.lent += len(leases)
        self.route.unused[self.incarnation] += len(leases)
        if self.is_ordered:
            return [Credit(self.transfer, leases)]
        self.early += leases
        return []

    def on_report(self, report: RouteReport) -> list[Action]:
        match report:
            case Shipped(chunks=chunks, size_bytes=size_bytes):
                self.shipped += chunks
                self.route.unused[self.incarnation] -= chunks
                return [Carried(self.session, chunks, size_bytes)]
            case Gathered():
                self.has_read = True
            case Sent() if self.state is TransferState.FLOWING:  # else it was told to stop: Quiet follows
                self.is_ordered, self.is_over = False, True
        return []

    def forget(self) -> None:
        self.route.unused[self.incarnation] -= self.lent - self.shipped
        if not self.route.unused[self.incarnation]:
            del self.route.unused[self.incarnation]
