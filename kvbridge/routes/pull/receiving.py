"""The route `pull`, receiving: read the sender's blocks under its lease, and compare some with it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbridge_proto.peer import MAX_SUMS, BlockTables, Check, Checked, Renew, RouteToReceiver, SlotLease, Sum

from ...errors import KVBridgeError
from ...exchange.actions import Action, Carried, Compared, Send, Uncompared
from ...exchange.block_tables import ready_chunks
from ...exchange.incoming import IncomingTransfer, OpenTransfers, OpenWant, ReceivingRoute
from ...exchange.orders import Pull, Pulled, RouteReport, Summed, WarmPull
from ...exchange.session import Session
from ...geometry.plan import Plan
from ...states import TransferState
from .leases import LEASE_S, Reading, ReadLease, Sampling

COMPARE_S = 2.0  # how long a request that has its rows waits for the digests of a sample


class PullReceiving(ReceivingRoute):
    """One in `check_every` chunks is compared with the sender's; 0 compares none."""

    def __init__(self, opened: OpenTransfers, check_every: int) -> None:
        self.deadlines = opened.deadlines
        self.sampling = Sampling(check_every)

    def begin(
        self, wanted: OpenWant, transfer: str, address: str, session: Session, plan: Plan, token: bytes
    ) -> IncomingByPull:
        return IncomingByPull(transfer, session, plan, wanted, address, token, route=self)

    def prepare(self, session: Session) -> list[Action]:
        theirs, ours = (session.planner.samples(session.slot_bytes, is_sender=each) for each in (True, False))
        pairs = tuple(zip(theirs, ours, strict=False))  # none if either side has no samples
        return [WarmPull(session.memory_id, pairs, self.sampling.kinds)] if pairs else []


@dataclass(slots=True, eq=False, kw_only=True)
class IncomingByPull(IncomingTransfer):
    route: PullReceiving
    reading: Reading = field(init=False)

    reads_peer = True

    def claim(self, now: float) -> tuple[list[Action], tuple[SlotLease, ...]]:
        self.reading = Reading(ReadLease(now), self.session)
        return [], ()

    @property
    def has_rows(self) -> bool:
        return bool(self.placed) or self.is_ordered

    @property
    def is_complete(self) -> bool:
        return self.placed >= self.plan.chunks and not self.reading.unchecked

    def on_message(self, body: RouteToReceiver, now: float) -> list[Action]:
        match body:
            case BlockTables():
                return self._on_tables(body, now)
            case Checked():
                return self._on_checked(body, now)
        return []

    def _on_tables(self, answer: BlockTables, now: float) -> list[Action]:
        """The sender's block tables, as far as they are computed: read those rows."""
        self.reading.lease.answered(answer.renewal)
        try:
            self.reading.learn(answer, self.plan)
        except KVBridgeError as error:
            self.failure = error.code, str(error)
            return []
        self.ready = max(self.ready, ready_chunks(self.plan, answer.tokens, answer.is_last))
        return self._read(now)

    def _read(self, now: float) -> list[Action]:
        """Read what is ready, unless a read is under way."""
        reading, wanted = self.reading, self.wanted
        if self.is_ordered or reading.begun >= self.ready:
            return []
        first, reading.begun, self.is_ordered = reading.begun, self.ready, True
        compared = self.route.sampling.choose(first, self.ready)
        what = self.transfer, wanted.want.request, self.session.memory_id, self.plan
        tables = dict(reading.tables), wanted.tables
        pull = Pull(*what, *tables, first, self.ready, reading.lease, wanted.want.fence, compared)
        return [*self._renew(now), pull]

    def _renew(self, now: float) -> list[Action]:
        """Renew the lease if half of it has passed; otherwise do so when it has."""
        lease, deadlines = self.reading.lease, self.route.deadlines
        due = lease.asked_at + LEASE_S / 2
        if now < due:
            deadlines.set(("lease", self.transfer), due)
            return []
        deadlines.set(("lease", self.transfer), now + LEASE_S / 2)
        return [Send(self.address, Renew(transfer=self.transfer, number=lease.renew(now)))]

    def on_time(self, kind: str, now: float) -> list[Action]:
        unchecked = self.reading.unchecked
        if kind == "lease":
            return self._renew(now) if self.is_ordered or unchecked else []
        # The sender has not sent its digests in time: finish without them. A sample is not worth failing a request.
        said: list[Action] = [Uncompared(self.transfer, len(unchecked))] if unchecked else []
        unchecked.clear()
        return said

    def on_report(self, report: RouteReport, now: float) -> list[Action]:
        if isinstance(report, Summed):
            return self._check(report.digests, now) if self.state is TransferState.FLOWING else []
        assert isinstance(report, Pulled)
        self.route.deadlines.clear(("lease", self.transfer))
        moved: list[Action] = []
        if report.failure is None:
            moved.append(Carried(self.session, report.chunks, report.size_bytes))
        if self.state is not TransferState.FLOWING:  # it was told to stop: Quiet follows
            return moved
        return self._on_pulled(report, now) + moved

    def _on_pulled(self, pulled: Pulled, now: float) -> list[Action]:
        """A read has ended."""
        self.is_ordered = False
        if pulled.failure is not None:
            self.failure = pulled.failure
            return []
        self.placed = pulled.end_chunk
        actions = self._check(pulled.digests, now)
        if self.placed < self.plan.chunks:
            return actions + self._read(now)
        self._limit_comparing(now)
        return actions

    def _check(self, digests: Mapping[int, int], now: float) -> list[Action]:
        """Ask the sender to compare its digests of these chunks. It keeps their blocks meanwhile."""
        unchecked = self.reading.unchecked
        if not digests and not unchecked:
            return []
        unchecked.update(digests)
        sums = [Sum(chunk, digest) for chunk, digest in sorted(digests.items())]
        pieces = [tuple(sums[at : at + MAX_SUMS]) for at in range(0, len(sums), MAX_SUMS)]
        asked = [Send(self.address, Check(transfer=self.transfer, digests=piece)) for piece in pieces]
        return [*self._renew(now), *asked]

    def _on_checked(self, answer: Checked, now: float) -> list[Action]:
        """The sender's digests of its chunks. Chunks it was not asked about are ignored."""
        compared = 0
        for each in answer.digests:
            if (read := self.reading.unchecked.pop(each.chunk, None)) is None:
                continue
            compared += 1
            if each.digest != read:
                reason = f"chunk {each.chunk}: the sender has digest {each.digest:016x}, read was {read:016x}"
                self.failure = "digest_mismatch", reason
                return [Compared(compared, 1)]
        if self.placed == self.plan.chunks:
            self._limit_comparing(now)
        return [Compared(compared, 0)] if compared else []

    def _limit_comparing(self, now: float) -> None:
        """All is read. If some of it is compared, wait for that only so long, unless all must be."""
        if self.reading.unchecked and not self.route.sampling.is_all:
            self.route.deadlines.set(("check", self.transfer), now + COMPARE_S)

    def on_end(self, is_finished: bool = False) -> None:
        self.reading.lease.is_given_up = True
        if is_finished:
            self.route.deadlines.clear(("lease", self.transfer))
