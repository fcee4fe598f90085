"""The receiver reads the blocks of the sender's engine itself, and puts the rows where they belong in one move.

What it reads counts while the sender's promise lasts (exchange/leases.py).
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Generator
from functools import partial

from ...device.copier import Moved
from ...device.memory import AttachedPool, span_of
from ...device.staging import Span
from ...errors import EngineError, PeerError
from ...exchange.orders import Failure, Pull, Pulled
from ...exchange.route import Rate, Site
from ...exchange.session import Whose
from ...failpoints import failpoint
from ...geometry.plan import Part
from ..attached import AttachedMemory
from ..awaits import Event, Job, Settle, Wait, WaitCopier, WaitLease, WaitMove, begun, failure_of, started
from ..receive_orders import ReceiveOrders
from ..resources import Resources
from .rate import fastest
from .staged import memories

log = logging.getLogger("kvbridge.data_plane")

GIVEN_UP = -1  # no ticket
MOST_AHEAD = 2  # chunks that are begun while one is being read: a stream must not run dry
Opened = tuple[AttachedPool, Callable[[], None]]  # and who hears that it is unmapped again


def against(ours: Site, theirs: Site) -> str:
    """What stands against it, as far as two cards can tell; nothing if it may be."""
    if not ours.machine or ours.machine != theirs.machine:
        return f"machine: ours {ours.machine or 'not shared'}, theirs {theirs.machine or 'not shared'}"
    return "" if ours.fabric.memory == theirs.fabric.memory else memories(ours, theirs)


class PullRoute:
    """The memory of other engines that we read, and the jobs that do. `tell` calls something on the loop."""

    def __init__(
        self,
        equipment: Resources,
        tell: Callable[..., None],
        receive_orders: ReceiveOrders,
        wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._equipment = equipment
        self._tell = tell
        self._receive_orders = receive_orders
        self._wait_s = wait_s
        self._clock = clock
        self._peers: dict[Whose, Opened] = {}  # memory of engines that we read
        self._openings: Counter[Whose] = Counter()
        self._measured: list[AttachedPool] = []  # of them, those that are read to see how fast
        self._parting: list[Opened] = []  # of those that we are through with but for what is under way

    def open(self, whose: Whose, mapped: Callable[[], AttachedPool], closed: Callable[[], None], settle: Settle) -> Job:
        """Map what is read for this epoch of that agent's engine. Close it as often as it was opened.

        `settle` gets the Rate at which it is read, None if nobody knows; or what was wrong with it.
        """
        try:
            memory = mapped()
        except Exception as error:
            return settle(None, error)
        self._openings[whose] += 1
        if (before := self._peers.get(whose)) is not None:
            self._parting.append(before)
            self.close_parting()
        self._peers[whose] = memory, closed
        rate: Rate | None = None
        self._measured.append(memory)
        try:
            rate = yield from read_rate(self._equipment, memory, self._clock)
        except Exception as error:  # such as no memory, or no bundle that is free
            log.info("a peer's memory could not be measured: incarnation=%s %s", whose[0], error)
        finally:
            self._measured.remove(memory)
        settle(rate, None)
        self.close_parting()

    def close(self, whose: Whose) -> None:
        """Begin no read of it any more, the last time; it is unmapped once none is under way."""
        self._openings[whose] -= 1
        if not self._openings[whose]:
            del self._openings[whose]
            self._parting.append(self._peers.pop(whose))
            self.close_parting()

    def close_parting(self) -> None:
        """Unmap what nothing reads any more."""
        copier, left = self._equipment.copier, self._parting
        self._parting = [each for each in left if each[0] in self._measured or copier.is_using(each[0])]
        for memory, closed in left:
            if all(memory is not kept for kept, _ in self._parting):
                copier.forget(memory)
                self._unmap(memory, closed)

    def _unmap(self, memory: AttachedPool, closed: Callable[[], None]) -> None:
        memory.close()
        self._tell(closed)

    def close_all(self) -> None:
        """The copier is closed: nothing is read any more."""
        for memory, _ in (*self._peers.values(), *self._parting):
            memory.close()

    def pull(self, pull: Pull, attachment: AttachedMemory) -> Job:
        """Read chunks once our engine is through with the blocks they go to. They count while the lease lasts."""
        tickets: deque[tuple[int, int]] = deque()  # with the chunk of each
        digests: dict[int, int] = {}
        failure: Failure = None
        receive_orders = self._receive_orders
        receipt = receive_orders.begin_read(pull.transfer)
        try:
            yield from begun(attachment, pull.fence, self._clock() + self._wait_s, receipt)
            for index in range(pull.first_chunk, pull.end_chunk):
                if len(tickets) == MOST_AHEAD:
                    yield from self._read(pull, tickets, digests)
                begin = partial(self._begun, pull, attachment, index)
                ticket = yield from started(begin, attachment, self._wait_s, self._clock)
                if ticket == GIVEN_UP:
                    break
                tickets.append((index, ticket))
        except Exception as error:  # it costs this transfer, nobody else
            failure = failure_of("pull_failed", error, pull.transfer)
        while tickets:
            yield from self._read(pull, tickets, digests)
        failpoint("receiver.read_ended")
        failure = failure or (yield from self._counted(pull, attachment))
        read = pull.end_chunk - pull.first_chunk
        receive_orders.report(Pulled(pull.transfer, pull.end_chunk, read, pull.size_bytes, digests, failure))
        receive_orders.end_read(receipt)

    def _begun(self, pull: Pull, attachment: AttachedMemory, index: int) -> Generator[Wait, Event, int]:
        """Begin to read a chunk as soon as there is room. GIVEN_UP if the transfer has ended by then."""
        copier = self._equipment.copier
        if not copier.has_room:
            yield WaitCopier(attachment, copier, self._clock() + self._wait_s)
        if pull.lease.is_given_up:
            return GIVEN_UP
        if (opened := self._peers.get(pull.whose)) is None:
            raise PeerError("peer_lost", f"peer: the memory of {pull.whose[0]} is not open")
        failpoint("receiver.read_begun")
        chunk = pull.plan.chunk(index)
        theirs = Part(pull.plan, chunk, pull.peer_tables, True)
        ours = Part(pull.plan, chunk, pull.tables, False)
        return copier.pull(opened[0], theirs, attachment.memory, ours, index in pull.compared)

    def _read(
        self, pull: Pull, tickets: deque[tuple[int, int]], digests: dict[int, int]
    ) -> Generator[Wait, Event, None]:
        """Wait for the end of the first of these reads."""
        chunk, ticket = tickets.popleft()
        ended = yield WaitMove(ticket)
        assert isinstance(ended, Moved)
        if chunk in pull.compared:
            digests[chunk] = ended.digest

    def _counted(self, pull: Pull, attachment: AttachedMemory) -> Generator[Wait, Event, Failure]:
        """Whether what was read counts: if a promise says so that ends later than the read did.

        The clock is looked at after the end was seen: who was stopped in between finds it further on. A promise may
        come late: it says that the blocks were never given back, too. So an agent that stood still costs time only.
        """
        now = self._clock()
        if pull.lease.is_given_up:
            return "aborted", "the transfer ended while it was read"
        if pull.lease.counts(now):
            return None
        if attachment.liveness.has_left:  # nobody hears of it later
            return "engine_left", "the engine left while its blocks were written"
        try:
            yield WaitLease(attachment, pull.lease, now, now + self._wait_s)
        except EngineError as error:
            return error.code, str(error)
        return ("aborted", "the transfer ended while it was read") if pull.lease.is_given_up else None

    def warm(self, attachment: AttachedMemory, whose: Whose, theirs: Part, ours: Part, has_digest: bool) -> None:
        """Begin to compile for such a part, if both engines stay. What goes wrong will be said when it matters."""
        opened = self._peers.get(whose)
        if opened is None or attachment.liveness.has_left:
            return
        try:
            self._equipment.copier.warm_pull(opened[0], theirs, attachment.memory, ours, has_digest)
        except Exception:
            log.exception("could not get ready for a peer")


def read_rate(equipment: Resources, memory: AttachedPool, clock: Callable[[], float]) -> Generator[Wait, Event, Rate]:
    """How fast a peer's memory is read. What is read is whatever lies there. Other jobs may make it look slow."""
    with memory.hold() as regions:
        theirs = max((span_of(each) for each in regions.memories), key=lambda span: span.size_bytes)
    ours = equipment.scratch
    size_bytes = min(ours.size_bytes, theirs.size_bytes)

    def begin(deadline: float) -> Wait:
        sender, target = Span(theirs.address, size_bytes), Span(ours.address, size_bytes)
        return WaitMove(equipment.copier.copy(sender, target))

    return (yield from fastest(size_bytes, begin, clock))
