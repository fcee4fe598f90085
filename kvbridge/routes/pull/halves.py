"""The route `pull`: the sender says which blocks may be read, the receiver reads them under a lease. Pure.

A claim asks for a lease, and each renewal for another. The sender promises LEASE_S from when it answers. The receiver
counts on a little less, COUNTED_S, from when it asked. So its lease always ends first, and no two clocks are compared.

A sender answers only if, less than LEASE_HEARD_S ago, it had read everything that its engine had sent. An engine waits
READERS_S after a withdrawal before it reuses the blocks. So the lease ends before that reuse, even if nobody reads the
withdrawal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import READERS_S
from kvbridge_proto.peer import (
    MAX_SUMS,
    BlockTables,
    Check,
    Checked,
    Claim,
    Grant,
    Renew,
    RouteToReceiver,
    RouteToSender,
    Settled,
    SlotLease,
    Sum,
)

from ...cache_kinds import comes_last
from ...errors import KVBridgeError, PeerError
from ...exchange.actions import Action, Carried, Compared, Send, Uncompared, Unconfirmed
from ...exchange.block_tables import ready_chunks
from ...exchange.orders import AwaitedPull, Digest, Digested, Pull, Pulled, RouteReport, Summed, WarmPull, Watch
from ...exchange.session import Session
from ...exchange.transfer import (
    IncomingTransfer,
    OpenAnswers,
    OpenTransfers,
    OpenWant,
    OutgoingTransfer,
    ReceivingRoute,
    SendingRoute,
)
from ...geometry.plan import Plan
from ...geometry.tokens import BlockTable, TokenShard
from ...state_machines import OfferState, TransferState

DRIFT = 1e-3  # the most by which a clock's rate differs from true time
LEASE_S = 0.4  # how long a promise lasts, on the sender's clock
COUNTED_S = LEASE_S * (1 - 2 * DRIFT)  # the same on the receiver's clock, which may be slower
LEASE_HEARD_S = 0.1  # a sender may promise only if it had read all its engine's messages within this time
CHECK_EVERY = {"always": 1, "sampled": 64, "never": 0}  # one chunk in so many is compared; by the option `verify`
MOST_DIGESTS = 4  # at once, of all transfers, so that other moves get their turn
COMPARE_S = 2.0  # how long a request that has its rows waits for the digests of a sample

assert READERS_S * (1 - DRIFT) > (LEASE_S + LEASE_HEARD_S) * (1 + DRIFT)


@dataclass(slots=True)
class GrantedLease:
    """What the sender of a transfer has promised its receiver."""

    renewal: int = 0  # the number of the last renewal received; 0 is the claim
    is_asked: bool = False  # whether that renewal still needs an answer
    ready: int = 0  # chunks the receiver was told it can read
    ends: float | None = None  # on the sender's clock; None if nothing is promised
    _entries: dict[int, int] = field(default_factory=dict)  # by group: where the entries already sent end

    def answer(
        self, transfer: str, plan: Plan, tables: Mapping[int, BlockTable], tokens: int, is_last: bool, ready: int
    ) -> BlockTables:
        """The block tables to send when `tokens`, or `ready` chunks, are computed.

        Windows and states are sent once they are complete.
        """
        pieces = []
        for group in _groups(plan, is_last):
            table = tables[group]
            first_local = 0 if comes_last(table.group.kind) else table.token_shard.count(plan.first_token)
            begin = max(self._entries.get(group, first_local // table.group.block_tokens), table.first_block)
            end = min(_end_entry(min(tokens, plan.end_token), table), table.first_block + len(table.ids))
            if begin < end:
                ids = table.ids[begin - table.first_block : end - table.first_block]
                pieces.append(Blocks(group, begin, tuple(ids.tolist())))
                self._entries[group] = end
        self.is_asked, self.ready = False, ready
        return BlockTables(
            transfer=transfer, tokens=tokens, is_last=is_last, renewal=self.renewal, blocks=tuple(pieces)
        )


def _groups(plan: Plan, is_last: bool) -> list[int]:
    """Groups of the sender's pool that the plan reads and that are readable now."""
    groups: set[int] = set()
    for group_plan in plan.group_plans:
        if is_last or not group_plan.comes_last:
            groups |= group_plan.sender_groups
    return sorted(groups)


def _end_entry(tokens: int, table: BlockTable) -> int:
    return -(-table.token_shard.count(tokens) // table.group.block_tokens)


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
            number, request = offered.engines_number, offered.request
            actions.append(Digest(out.transfer, number, request, out.plan, offered.tables, out.checks.popleft()))
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
        tables = granted.answer(self.transfer, self.plan, offered.tables, offered.readable, is_last, ready)
        granted.ends = now + LEASE_S
        self.route.deadlines.set(("lease", self.transfer), granted.ends)
        return [*watch, Send(self.incarnation, tables)]

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

    def awaits(self) -> list[Action]:
        return [AwaitedPull(self.transfer, self.session.memory_id, self.plan, self.wanted.tables)]

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
        growing = {each for each in compared if reading.is_growing(self.plan, each)}
        what = self.transfer, wanted.want.request, self.session.memory_id, self.plan
        tables = dict(reading.tables), wanted.tables
        pull = Pull(*what, *tables, first, self.ready, reading.lease, wanted.want.fence, compared - growing)
        uncompared: list[Action] = [Uncompared(self.transfer, len(growing))] if growing else []
        return [*self._renew(now), *uncompared, pull]

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
        actions: list[Action] = [Uncompared(self.transfer, len(unchecked))] if unchecked else []
        unchecked.clear()
        return actions

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


class ReadLease:
    """How long a receiver's reads count, on its own clock. The loop renews it; the data thread checks it."""

    def __init__(self, now: float) -> None:
        self.ends = float("-inf")
        self.asked_at = now
        self.number = 0  # of the last renewal requested; 0 is the claim
        self.is_given_up = False  # the transfer has ended: read no more
        self._asked: dict[int, float] = {0: now}

    def renew(self, now: float) -> int:
        """Record that a renewal is requested. Returns its number."""
        self.number += 1
        self.asked_at = self._asked[self.number] = now
        return self.number

    def answered(self, number: int) -> None:
        """The sender answered this renewal. Earlier ones are answered by it too, or never will be."""
        if (asked_at := self._asked.get(number)) is None:
            return
        self.ends = max(self.ends, asked_at + COUNTED_S)
        while self._asked and (oldest := next(iter(self._asked))) <= number:
            del self._asked[oldest]

    def counts(self, now: float) -> bool:
        """Whether a read counts. `now` must be taken after the read was seen to end."""
        return now < self.ends


class Sampling:
    """Chooses the chunks to compare with the sender's: one in `every`, starting with the first."""

    def __init__(self, every: int) -> None:
        self._every = every  # 0: none
        self._count = 0  # chunks read so far

    def choose(self, first_chunk: int, end_chunk: int) -> frozenset[int]:
        """The chunks to compare among [first_chunk, end_chunk), which are read next."""
        if not self._every:
            return frozenset()
        skipped = -self._count % self._every
        self._count += end_chunk - first_chunk
        return frozenset(range(first_chunk + skipped, end_chunk, self._every))

    @property
    def is_all(self) -> bool:
        return self._every == 1

    @property
    def kinds(self) -> tuple[bool, ...]:
        """The values of "read with a digest" that occur; the one that occurs first comes first."""
        return {0: (False,), 1: (True,)}.get(self._every, (True, False))


@dataclass(slots=True)
class Reading:
    """What the receiver of a transfer knows of the sender's blocks."""

    lease: ReadLease
    session: Session
    tables: dict[int, BlockTable] = field(default_factory=dict)
    begun: int = 0  # chunks that have been read or are being read
    tokens: int = 0  # that are computed
    is_last: bool = False  # the sender computes no more
    unchecked: dict[int, int] = field(default_factory=dict)  # by chunk: digests the sender has not confirmed

    def learn(self, answer: BlockTables, plan: Plan) -> None:
        """Add the sender's block tables. Raises KVBridgeError for blocks outside its pool or plan, or for a gap."""
        pool = self.session.peer_pool
        self.tokens, self.is_last = max(self.tokens, answer.tokens), self.is_last or answer.is_last
        for piece in answer.blocks:
            if piece.group >= len(pool.groups):
                raise PeerError("unknown_group", f"group: got {piece.group}, the pool has {len(pool.groups)}")
            if (table := self.tables.get(piece.group)) is None:
                table = BlockTable.of(pool.groups[piece.group], token_shard=TokenShard.of(pool.shard))
            if piece.first + len(piece.ids) > (most := _end_entry(plan.end_token, table)):
                raise PeerError("blocks_too_many", f"blocks: up to entry {piece.first + len(piece.ids)} of {most}")
            self.tables[piece.group] = table.extended(piece)

    def is_growing(self, plan: Plan, chunk: int) -> bool:
        """Whether the sender's engine may still write tokens that move with this chunk: its digest would differ."""
        return not self.is_last and self.tokens < plan.whole_at(plan.chunk(chunk))
