"""The receiver reads the blocks of the sender's engine itself, and puts the rows where they belong in one move.

The rows count only if the sender's read lease still holds after the read (routes/pull/halves.py). Of some chunks the
sender takes the digest too, to be compared.

And the same for rows that no sender has (geometry/unfilled.py): a fill is a read from memory of our own that holds
nothing but zeros. So every form of rows that can be read can be filled.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial

from kvbridge_proto.peer import Sum
from kvbridge_proto.pool import Pool

from ...dataplane.attached import (
    AttachedMemory,
    Event,
    Job,
    Settle,
    Wait,
    WaitCopier,
    WaitFence,
    WaitLease,
    WaitMove,
    begun,
    failure_of,
    started,
    taken_back,
)
from ...dataplane.orders import OrderedReceive, ReceiveOrders, SendOrders
from ...dataplane.resources import Resources
from ...device.copier import Moved
from ...device.fence import FencePage
from ...device.memory import AttachedPool, span_of
from ...device.staging import Span
from ...errors import EngineError, PeerError
from ...exchange.orders import AwaitedPull, Digest, Digested, Failure, FenceReached, Fill, Filled, Pull, Pulled
from ...exchange.route import Rate, Site
from ...exchange.session import EngineMemoryId
from ...failpoints import failpoint
from ...geometry.plan import Part
from ...values import Value
from ..rate import fastest
from ..slots.slot_routes import machines, memories

log = logging.getLogger("kvbridge.data_plane")

GIVEN_UP = -1  # no ticket
# Reads of a transfer under way at once. A chunk of 128 MiB is read in 0.38 ms, and a slow core needs as long to launch
# the next: with two the stream ran dry (two H100s, f7f42e7: 0.47 ms a chunk). That was with one stream; now pulls take
# turns on two (copier_gpu.py). Fewer than the copier allows (READS), so that one transfer does not keep the others
# waiting.
MOST_AHEAD = 3
ENDED_WHILE_READ: Failure = ("aborted", "the transfer ended while it was read")


class Opened(Value):
    """A peer engine's memory, and its fence if it was given. `closed` is called on the loop once that is unmapped."""

    memory: AttachedPool
    fence: FencePage | None
    closed: Callable[[], None]

    def unmap(self) -> None:
        self.memory.close()
        if self.fence is not None:
            self.fence.close()


def why_not(sender: Site, receiver: Site) -> str:
    """The reason against `pull`, as far as two cards tell, "" if there is none."""
    if unshared := [name for name, site in (("sender", sender), ("receiver", receiver)) if not site.shares_memory]:
        return f"share_memory: off at the {' and the '.join(unshared)}"
    if sender.machine != receiver.machine:
        return machines(sender.machine, receiver.machine)
    return "" if sender.fabric.memory == receiver.fabric.memory else memories(sender, receiver)


@dataclass(eq=False, repr=False)
class PullRoute:
    """The memory of peers' engines, that of zeros, and the jobs that read them. `tell` calls a function on the loop.

    `others_follow`: whether there are more orders, perhaps to read, before the copier is polled.
    """

    _resources: Resources
    _tell: Callable[..., None]
    _send_orders: SendOrders
    _receive_orders: ReceiveOrders
    _wait_s: float
    _clock: Callable[[], float]
    _others_follow: Callable[[], bool] = lambda: False
    _peers: dict[EngineMemoryId, Opened] = field(default_factory=dict, init=False)  # memory that new reads use
    _openings: Counter[EngineMemoryId] = field(default_factory=Counter, init=False)
    _measured: list[AttachedPool] = field(default_factory=list, init=False)  # those whose read rate is being measured
    closing: list[Opened] = field(default_factory=list, init=False)  # given up; unmapped once nothing reads them
    _zeros: list[AttachedPool] = field(default_factory=list, init=False)

    def open(
        self,
        memory_id: EngineMemoryId,
        mapped: Callable[[], tuple[AttachedPool, FencePage | None]],
        closed: Callable[[], None],
        settle: Settle,
    ) -> Job:
        """Map the memory of a peer's engine. Each open needs one `close`.

        `settle` gets its read Rate, None if that could not be measured; or the error.
        """
        try:
            memory, fence = mapped()
        except Exception as error:
            return settle(None, error)
        self._openings[memory_id] += 1
        if (before := self._peers.get(memory_id)) is not None:
            self.closing.append(before)
            self.close_unread()
        self._peers[memory_id] = Opened(memory, fence, closed)
        rate: Rate | None = None
        self._measured.append(memory)
        try:
            rate = yield from read_rate(self._resources, memory, self._clock)
        except Exception as error:  # such as no memory, or no free bundle
            log.info("a peer's memory could not be measured: incarnation=%s %s", memory_id[0], error)
        finally:
            self._measured.remove(memory)
        settle(rate, None)
        self.close_unread()

    def close(self, memory_id: EngineMemoryId) -> None:
        """Undo one `open`. After the last, no read begins, and the memory is unmapped once none is under way."""
        self._openings[memory_id] -= 1
        if not self._openings[memory_id]:
            del self._openings[memory_id]
            self.closing.append(self._peers.pop(memory_id))
            self.close_unread()

    def close_unread(self) -> None:
        """Unmap memory that was given up and is no longer read."""
        copier, left = self._resources.copier, self.closing
        self.closing = [each for each in left if each.memory in self._measured or copier.is_using(each.memory)]
        for opened in left:
            if all(opened.memory is not kept.memory for kept in self.closing):
                copier.forget(opened.memory)
                opened.unmap()
                self._tell(opened.closed)

    def close_all(self) -> None:
        """Unmap everything. The copier must be closed, so that nothing is read."""
        for memory in self._zeros:
            memory.close()
        for opened in (*self._peers.values(), *self.closing):
            opened.unmap()

    def pull(self, pull: Pull, attached: AttachedMemory) -> Job:
        """Read chunks, once our engine has finished with the blocks they go to. They count only under the lease."""
        tickets: deque[tuple[int, int]] = deque()  # (chunk, ticket), the oldest first
        digests: dict[int, int] = {}
        failure: Failure = None
        receive_orders = self._receive_orders
        ordered = receive_orders.begin_read(pull.transfer)
        try:
            yield from begun(attached, pull.fence, self._clock() + self._wait_s, ordered)
            self._check_computed(pull)
            receive_orders.reach(pull.transfer, "reading", self._clock(), pull.first_chunk)
            for index in range(pull.first_chunk, pull.end_chunk):
                if len(tickets) == MOST_AHEAD and (failure := (yield from self._ended(pull, tickets, digests))):
                    break
                begin = partial(self._begun, pull, attached, index)
                ticket = yield from started(begin, attached, self._wait_s, self._clock)
                if ticket == GIVEN_UP:
                    failure = ENDED_WHILE_READ
                    break
                tickets.append((index, ticket))
        except Exception as error:  # only this transfer fails
            failure = failure_of("pull_failed", error, pull)
        while tickets:
            ended = yield from self._ended(pull, tickets, digests)
            failure = failure or ended
        if failure is None:
            receive_orders.reach(pull.transfer, "read", self._clock(), pull.end_chunk)
        failpoint("receiver.read_ended")
        ended_at = self._clock()
        if pull.peer_fence is None:
            failure = failure or (yield from self._counted(pull, attached))
        first, end = pull.first_chunk, pull.end_chunk
        size_bytes = pull.plan.bytes_of(first, end)
        receive_orders.report(Pulled(pull.transfer, end, end - first, size_bytes, digests, failure, ended_at))
        receive_orders.end_move(ordered)

    def await_tables(self, awaited: AwaitedPull, attached: AttachedMemory) -> None:
        """Prepare the reads of a transfer while its sender's block tables are awaited. Raises as the copier's pull."""
        if (opened := self._peers.get(awaited.memory_id)) is not None:
            self._resources.copier.await_pull(opened.memory, awaited.plan, attached.memory, awaited.tables)

    def _opened(self, pull: Pull) -> Opened:
        if (opened := self._peers.get(pull.memory_id)) is None:
            raise PeerError("peer_lost", f"peer: the memory of {pull.memory_id[0]} is not open")
        return opened

    def _check_computed(self, pull: Pull) -> None:
        """Raises EngineError unless the sender's engine is seen to have computed what is read ahead."""
        if pull.peer_fence:  # 0 is reached
            fence = self._opened(pull).fence
            if fence is None or not fence.reached(pull.peer_fence):
                raise EngineError("fence_late", f"peer_fence: {pull.peer_fence} is not seen to be reached")

    def _begun(self, pull: Pull, attached: AttachedMemory, index: int) -> Generator[Wait, Event, int]:
        """Begin to read a chunk as soon as there is room. Returns its ticket, or GIVEN_UP if the transfer has ended."""
        copier = self._resources.copier
        if not copier.has_room:
            yield WaitCopier(attached, self._clock() + self._wait_s, copier)
        if pull.lease.is_given_up:
            return GIVEN_UP
        opened = self._opened(pull)
        failpoint("receiver.read_begun")
        chunk = pull.plan.chunk(index)
        theirs = Part(pull.plan, chunk, pull.peer_tables, True)
        ours = Part(pull.plan, chunk, pull.tables, False)
        return copier.pull(opened.memory, theirs, attached.memory, ours, index in pull.compared, self._others_follow())

    def _ended(
        self, pull: Pull, tickets: deque[tuple[int, int]], digests: dict[int, int]
    ) -> Generator[Wait, Event, Failure]:
        """Wait for the oldest of these reads to end. A digest is told at once if it counts and is not the last's."""
        chunk, ticket = tickets.popleft()
        ended = yield WaitMove(ticket)
        assert isinstance(ended, Moved)
        if ended.failure is not None or chunk not in pull.compared:
            return ended.failure
        if chunk + 1 < pull.end_chunk and pull.lease.counts(self._clock()):
            self._receive_orders.summed(pull.transfer, chunk, ended.digest)
        else:
            digests[chunk] = ended.digest
        return None

    def _counted(self, pull: Pull, attached: AttachedMemory) -> Generator[Wait, Event, Failure]:
        """The failure if the rows do not count. They count if the read lease lasts longer than the read.

        The clock is read after the end of the read was seen, so a stall in between makes the read look later, never
        earlier. A late renewal still counts: just before the sender answered it, it had read all that its engine had
        sent, and no withdrawal was among it. So a stalled agent only costs time.
        """
        now = self._clock()
        if pull.lease.is_given_up:
            return ENDED_WHILE_READ
        if pull.lease.counts(now):
            return None
        if attached.liveness.has_left:  # no renewal will be read later
            return "engine_left", "the engine left while its blocks were written"
        try:
            yield WaitLease(attached, now + self._wait_s, pull.lease, now)
        except EngineError as error:
            return error.code, str(error)
        return ENDED_WHILE_READ if pull.lease.is_given_up else None

    def fill(self, fill: Fill, attached: AttachedMemory) -> Job:
        """Write the zeros, once our engine has finished with the blocks."""
        failure: Failure = None
        ordered = self._receive_orders.begin_read(fill.transfer)
        try:
            for index in range(fill.plan.chunks):
                begin = lambda index=index: self._fill_begun(fill, attached, ordered, index)  # noqa: E731
                ended = yield WaitMove((yield from started(begin, attached, self._wait_s, self._clock)))
                assert isinstance(ended, Moved)
                if failure := ended.failure:
                    break
        except Exception as error:  # only this want fails
            failure = failure_of("scatter_failed", error, fill)
        self._receive_orders.report(Filled(fill.transfer, failure))
        self._receive_orders.end_move(ordered)

    def _fill_begun(
        self, fill: Fill, attached: AttachedMemory, ordered: OrderedReceive, index: int
    ) -> Generator[Wait, Event, int]:
        """Begin to write a chunk as soon as there is room. Returns its ticket. EngineError if the want was stopped."""
        copier, ends = self._resources.copier, self._clock() + self._wait_s
        yield from begun(attached, fill.fence, ends, ordered)
        if not copier.has_room:
            yield WaitCopier(attached, ends, copier)
        chunk = fill.plan.chunk(index)
        zeros, ours = Part(fill.plan, chunk, fill.zero_tables, True), Part(fill.plan, chunk, fill.tables, False)
        return copier.pull(self._zeros_of(fill.zeros), zeros, attached.memory, ours)

    def _zeros_of(self, pool: Pool) -> AttachedPool:
        """Memory of this pool, all zeros. Older memory is given up once nothing reads it."""
        for each in self._zeros:
            if each.pool is pool:
                return each
        copier = self._resources.copier
        for old in [each for each in self._zeros if not copier.is_using(each)]:
            copier.forget(old)
            old.close()
            self._zeros.remove(old)
        made = copier.zeros(pool)
        self._zeros.append(made)
        return made

    def digest(self, digest: Digest, attached: AttachedMemory, asked_at: float) -> Job:
        """Digest a chunk that its receiver has read, as it is in the engine's blocks now. Ordered at `asked_at`."""
        part, found = Part(digest.plan, digest.plan.chunk(digest.read.chunk), digest.tables, True), 0
        copier, waits = self._resources.copier, (self._wait_s, self._clock)
        failure: Failure

        def begin() -> Generator[Wait, Event, int]:
            if not copier.has_room:
                yield WaitCopier(attached, self._clock() + self._wait_s, copier)
            return copier.digest(attached.memory, part)

        try:
            ended = yield WaitMove((yield from started(begin, attached, *waits)))
            assert isinstance(ended, Moved)
            found = ended.digest
            failure = ended.failure or (yield from taken_back(attached, digest.number, asked_at, *waits))
        except Exception as error:  # only this transfer fails
            failure = failure_of("gather_failed", error, digest)
        self._send_orders.report(Digested(digest.transfer, Sum(digest.read.chunk, found), digest.read, failure))

    def watch(self, attached: AttachedMemory, fence: int) -> Job:
        """Report when our engine's fence has reached this count, or when the wait for it has ended."""
        with contextlib.suppress(EngineError):
            yield WaitFence(attached, self._clock() + self._wait_s, fence, None)
        self._send_orders.report(FenceReached())

    def warm(
        self, attached: AttachedMemory, memory_id: EngineMemoryId | None, theirs: Part, ours: Part, has_digest: bool
    ) -> None:
        """Begin to compile for parts like these, unless the peer's memory is closed already."""
        if memory_id is None:
            sender = attached.memory
        elif (opened := self._peers.get(memory_id)) is not None:
            sender = opened.memory
        else:
            return
        self._resources.copier.warm_pull(sender, theirs, attached.memory, ours, has_digest)


def read_rate(resources: Resources, memory: AttachedPool, clock: Callable[[], float]) -> Generator[Wait, Event, Rate]:
    """How fast a peer's memory is read, whatever it contains. Other jobs may make it look slow."""
    with memory.hold() as regions:
        theirs = max((span_of(each) for each in regions), key=lambda span: span.size_bytes)
    ours = resources.scratch
    size_bytes = min(ours.size_bytes, theirs.size_bytes)

    def begin(size_bytes: int, deadline: float) -> Wait:
        sender, target = Span(theirs.address, size_bytes), Span(ours.address, size_bytes)
        return WaitMove(resources.copier.copy(sender, target))

    return (yield from fastest([size_bytes], begin, clock))
