"""The route `pull`: the sender says which blocks may be read, the receiver reads them under a lease. Pure.

A claim asks for a lease, and each renewal for another. The sender promises LEASE_S from when it answers. The receiver
counts on a little less, COUNTED_S, from when it asked. So its lease always ends first, and no two clocks are compared.

A sender answers only if, less than LEASE_HEARD_S ago, it had read everything that its engine had sent. An engine waits
READERS_S after a withdrawal before it reuses the blocks. So the lease ends before that reuse, even if nobody reads the
withdrawal.

A receiver may read before it has an answer, from blocks that the sender announced when they were offered. Such a read
counts if the first answer is of that announcement and the lease lasts longer than the read: from the announcement until
the lease ends the blocks were that offer's, and they were computed before the read began, as the fence had shown.
Otherwise the rows are read again.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import READERS_S
from kvbridge_proto.peer import (
    MAX_SUMS,
    Announce,
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
from kvbridge_proto.pool import Pool

from ...cache_kinds import comes_last
from ...errors import KVBridgeError, PeerError
from ...exchange.actions import Action, Carried, Compared, ReadAhead, Send, Uncompared, Unconfirmed
from ...exchange.block_tables import check_begin, check_last, ready_chunks
from ...exchange.orders import AwaitedPull, Digest, Digested, Pull, Pulled, RouteReport, Summed, WarmPull, Watch
from ...exchange.session import Session
from ...exchange.transfer import (
    IncomingTransfer,
    OpenAnswers,
    OpenOffer,
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
MOST_READERS = 8  # receivers that hear what is offered, those that claimed last
READER_S = 60.0  # since its last claim
MOST_ANNOUNCED_BLOCKS = 1024  # of an offer that is announced
MOST_ANNOUNCED = 64  # offers that a receiver remembers of each sender
MOST_AHEAD_BYTES = 256 << 20  # that are read ahead: for more the answer is there soon enough, and none is read in vain

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
        self,
        transfer: str,
        plan: Plan,
        tables: Mapping[int, BlockTable],
        tokens: int,
        is_last: bool,
        ready: int,
        announced: int = 0,
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
            transfer=transfer,
            tokens=tokens,
            is_last=is_last,
            renewal=self.renewal,
            blocks=tuple(pieces),
            announced=announced if is_last else 0,
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
        self._readers: OrderedDict[str, float] = OrderedDict()  # by incarnation that hears Announce: its last claim
        self._numbers = itertools.count(1)

    def begin(self, claim: Claim, session: Session, plan: Plan, now: float) -> OutgoingByPull:
        if claim.leases:
            raise PeerError("bad_lease", f"leases: {len(claim.leases)} of a route without slots")
        if plan.chunks and session.reads_ahead:
            self.lost(session.peer.incarnation)
            self._readers[session.peer.incarnation] = now
            if len(self._readers) > MOST_READERS:
                self._readers.popitem(last=False)
        return OutgoingByPull(claim.transfer, session, plan, claim, now, route=self)

    def announce(self, offered: OpenOffer, now: float) -> list[Action]:
        receivers = [each for each, claimed_at in self._readers.items() if now - claimed_at <= READER_S]
        if not receivers or offered.blocks > MOST_ANNOUNCED_BLOCKS:
            return []
        offered.announced = next(self._numbers)
        announce = Announce(
            number=offered.announced,
            rendezvous=offered.rendezvous,
            first_token=offered.first_token,
            tokens=offered.tokens,
            fence=offered.fence,
            blocks=tuple(
                Blocks(group, table.first_block, tuple(table.ids.tolist())) for group, table in offered.tables.items()
            ),
        )
        return [Send(each, announce) for each in receivers]

    def lost(self, incarnation: str) -> None:
        self._readers.pop(incarnation, None)

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
        what = offered.tables, offered.readable, is_last, ready, offered.announced
        tables = granted.answer(self.transfer, self.plan, *what)
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
        self._announced: dict[tuple[str, str], dict[str, Announce]] = {}  # by (incarnation, key), and rendezvous id

    def begin(
        self, wanted: OpenWant, transfer: str, address: str, session: Session, plan: Plan, token: bytes
    ) -> IncomingByPull:
        return IncomingByPull(transfer, session, plan, wanted, address, token, route=self)

    def announced(self, incarnation: str, key: str, announce: Announce) -> None:
        if sum(len(each.ids) for each in announce.blocks) > MOST_ANNOUNCED_BLOCKS:
            return
        its = self._announced.setdefault((incarnation, key), {})
        its.pop(announce.rendezvous, None)
        its[announce.rendezvous] = announce
        if len(its) > MOST_ANNOUNCED:
            del its[next(iter(its))]

    def take_announced(self, session: Session, rendezvous: str) -> Announce | None:
        """The last that this sender has announced under this id, once."""
        return self._announced.get((session.peer.incarnation, session.key), {}).pop(rendezvous, None)

    def lost(self, session: Session) -> None:
        self._announced.pop((session.peer.incarnation, session.key), None)

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
        session, reading, chunks = self.session, self.reading, self.plan.chunks
        announce = self.route.take_announced(session, self.wanted.want.rendezvous)
        if announce is None or (tables := announced_tables(announce, self.plan, session)) is None:
            return self._prepare()
        reading.ahead, reading.begun, self.is_ordered = Ahead(announce.number), chunks, True
        return [self._pull(0, chunks, tables, self.route.sampling.choose(0, chunks), announce.fence)]

    def _prepare(self) -> list[Action]:
        return [AwaitedPull(self.transfer, self.session.memory_id, self.plan, self.wanted.tables)]

    @property
    def has_rows(self) -> bool:
        return bool(self.placed) or (self.is_ordered and bool(self.ready))

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
        reading = self.reading
        reading.lease.answered(answer.renewal)
        if reading.ahead is not None and reading.ahead.is_void is None:
            reading.ahead.is_void = answer.announced != reading.ahead.number
        try:
            reading.learn(answer, self.plan)
        except KVBridgeError as error:
            self.failure = error.code, str(error)
            return []
        self.ready = max(self.ready, ready_chunks(self.plan, answer.tokens, answer.is_last))
        return self._read(now) if reading.ahead is None else self._on_ahead(reading.ahead, now)

    def _on_ahead(self, ahead: Ahead, now: float) -> list[Action]:
        """A read ahead has ended, or was answered. It counts after both, if its lease does; or all is read again."""
        reading, pulled = self.reading, ahead.pulled
        if pulled is None:
            return [] if ahead.is_void is None else self._renew(now)
        if pulled.failure is not None and ahead.is_void is False:
            self.failure = pulled.failure
            return []
        if pulled.failure is None and not ahead.is_void:
            if ahead.is_void is None:
                return []
            if not reading.lease.counts(pulled.at):
                return self._renew(now)
            reading.ahead = None
            return [ReadAhead(self.transfer, True), *self._on_pulled(pulled, now), *self._moved(pulled)]
        reading.ahead, reading.begun = None, 0
        return [ReadAhead(self.transfer, False), *(self._read(now) if self.ready else self._prepare())]

    def _read(self, now: float) -> list[Action]:
        """Read what is ready, unless a read is under way."""
        reading = self.reading
        if self.is_ordered or reading.begun >= self.ready:
            return []
        first, reading.begun, self.is_ordered = reading.begun, self.ready, True
        compared = self.route.sampling.choose(first, self.ready)
        growing = {each for each in compared if reading.is_growing(self.plan, each)}
        uncompared: list[Action] = [Uncompared(self.transfer, len(growing))] if growing else []
        pull = self._pull(first, self.ready, dict(reading.tables), compared - growing)
        return [*self._renew(now), *uncompared, pull]

    def _pull(
        self,
        first: int,
        end: int,
        tables: Mapping[int, BlockTable],
        compared: frozenset[int],
        peer_fence: int | None = None,
    ) -> Pull:
        want, reading = self.wanted.want, self.reading
        what = self.transfer, want.request, self.session.memory_id, self.plan, tables, self.wanted.tables
        return Pull(*what, first, end, reading.lease, want.fence, compared, peer_fence)

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
            return self._renew(now) if self.is_ordered or unchecked or self.reading.ahead is not None else []
        # The sender has not sent its digests in time: finish without them. A sample is not worth failing a request.
        actions: list[Action] = [Uncompared(self.transfer, len(unchecked))] if unchecked else []
        unchecked.clear()
        return actions

    def on_report(self, report: RouteReport, now: float) -> list[Action]:
        if isinstance(report, Summed):
            ahead = self.reading.ahead
            counts = self.state is TransferState.FLOWING and (ahead is None or ahead.is_void is False)
            return self._check(report.digests, now) if counts else []
        assert isinstance(report, Pulled)
        self.route.deadlines.clear(("lease", self.transfer))
        ahead, is_flowing = self.reading.ahead, self.state is TransferState.FLOWING
        self.is_ordered = self.is_ordered and not is_flowing  # else it was told to stop: Quiet follows
        if ahead is None:
            return [*(self._on_pulled(report, now) if is_flowing else []), *self._moved(report)]
        ahead.pulled = report
        return self._on_ahead(ahead, now) if is_flowing else []

    def _moved(self, pulled: Pulled) -> list[Action]:
        return [Carried(self.session, pulled.chunks, pulled.size_bytes)] if pulled.failure is None else []

    def _on_pulled(self, pulled: Pulled, now: float) -> list[Action]:
        """A read has ended."""
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
class Ahead:
    """A read of what was announced under this number."""

    number: int
    is_void: bool | None = None  # whether the sender's first answer is of something else; None before that
    pulled: Pulled | None = None  # once it has ended


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
    ahead: Ahead | None = None  # all is read ahead, or was and it is not known whether that counts

    def learn(self, answer: BlockTables, plan: Plan) -> None:
        """Add the sender's block tables. Raises KVBridgeError for blocks outside its pool or plan, or for a gap."""
        self.tokens, self.is_last = max(self.tokens, answer.tokens), self.is_last or answer.is_last
        self.tables = extended_by(self.tables, answer.blocks, self.session.peer_pool)
        for piece in answer.blocks:
            table = self.tables[piece.group]
            if (end := table.first_block + len(table.ids)) > (most := _end_entry(plan.end_token, table)):
                raise PeerError("blocks_too_many", f"blocks: up to entry {end} of {most}")

    def is_growing(self, plan: Plan, chunk: int) -> bool:
        """Whether the sender's engine may still write tokens that move with this chunk: its digest would differ."""
        return not self.is_last and self.tokens < plan.whole_at(plan.chunk(chunk))


def extended_by(tables: Mapping[int, BlockTable], blocks: Sequence[Blocks], pool: Pool) -> dict[int, BlockTable]:
    """The sender's tables with these blocks appended. Raises KVBridgeError for blocks outside its pool, or a gap."""
    grown = dict(tables)
    for piece in blocks:
        if piece.group >= len(pool.groups):
            raise PeerError("unknown_group", f"group: got {piece.group}, the pool has {len(pool.groups)}")
        if (table := grown.get(piece.group)) is None:
            table = BlockTable.of(pool.groups[piece.group], token_shard=TokenShard.of(pool.shard))
        grown[piece.group] = table.extended(piece)
    return grown


def announced_tables(announce: Announce, plan: Plan, session: Session) -> dict[int, BlockTable] | None:
    """The sender's tables as announced, or None if this plan cannot be read from there, or takes too long."""
    if plan.end_token > announce.tokens or plan.total_bytes > MOST_AHEAD_BYTES:
        return None
    try:
        tables = extended_by({}, announce.blocks, session.peer_pool)
        check_begin(plan, announce.first_token)
        check_last(plan, tables, announce.tokens)
    except KVBridgeError:
        return None
    return tables
