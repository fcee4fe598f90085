"""What the mover's thread does with a chunk, each job a story: out of the blocks and over, or into the blocks."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Generator
from typing import Any

from kvbridge_proto.codec import encode
from kvbridge_proto.engine import READERS_S
from kvbridge_proto.peer import Notice, Probe, Route, Sum

from ..device.memory import AttachedPool
from ..device.porter import Moved, Porter
from ..device.staging import Span
from ..errors import EngineError, FabricError, KVBridgeError, PeerError
from ..exchange.orders import Digest, Digested, Failure, FenceReached, Pull, Pulled, ReceiveOrder, SendOrder
from ..exchange.reading import LEASE_S
from ..exchange.route import Rate
from ..exchange.session import Whose
from ..failpoints import failpoint
from ..geometry.plan import Part
from ..transport.fabric import WriteFailed, WriteLate
from .attachment import Attachment
from .equipment import Dock, Equipment
from .receiving import Arrival, Receipt, Receiving
from .routes import MOST_BYTES, Connected, Landing, Target, close, pattern, prove, read_rate
from .sending import Departure, Dispatch, Sending
from .waiting import Event, Job, Wait, WaitFence, WaitLease, WaitMove, WaitRoom, WaitWord, WaitWrite

log = logging.getLogger("kvbridge.mover")

UNHEARD_S = READERS_S / 2
MOST_AHEAD = 2  # chunks that are begun while one is being read: a stream must not run dry
Settle = Callable[[Any, Exception | None], None]  # what a job found, or what went wrong
Opened = tuple[AttachedPool, Callable[[], None]]  # and who hears that it is unmapped again


class Jobs:
    """Makes jobs; runs none. `tell` calls something on the loop."""

    def __init__(
        self,
        equipment: Equipment,
        boot: str,
        tell: Callable[..., None],
        sending: Sending,
        receiving: Receiving,
        write_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._equipment = equipment
        self._boot = boot
        self._tell = tell
        self._sending = sending
        self._receiving = receiving
        self._write_timeout_s = write_timeout_s
        self._clock = clock
        self._targets: dict[str, Target] = {}
        self._users: Counter[Target] = Counter()
        self._leaving: set[Target] = set()
        self._peers: dict[Whose, Opened] = {}  # memory of engines that we read
        self._openings: Counter[Whose] = Counter()
        self._measured: list[AttachedPool] = []  # of them, those that are read to see how fast
        self._parting: list[Opened] = []  # of those that we are through with but for what is under way
        self._serial = 0

    @property
    def _porter(self) -> Porter:
        return self._equipment.porter

    # Sinks:

    def connect(self, landing: Landing, settle: Settle) -> Job:
        """Prove a route to a sink; `settle` gets it, or what went wrong."""
        self._serial += 1
        serial = self._serial
        try:
            target, routed = yield from prove(self._equipment, landing, serial, self._clock)
        except FabricError as error:
            settle(None, error)
        else:
            failpoint("source.probed")
            if (before := self._targets.get(landing.boot)) is not None:
                self.disconnect(landing.boot, before.serial)
            self._targets[landing.boot] = target
            settle(Connected(routed, serial), None)

    def disconnect(self, boot: str, serial: int) -> None:
        """No new writes to this target. It is let go once those under way have ended."""
        target = self._targets.get(boot)
        if target is not None and target.serial == serial:
            del self._targets[boot]
            self._leaving.add(target)
            self._close_unused(target)

    def _close_unused(self, target: Target) -> None:
        if target in self._leaving and not self._users[target]:
            self._leaving.discard(target)
            del self._users[target]
            close(self._equipment, target)

    def is_proved(self, route: Route, lane: int, probe: Probe) -> bool:
        """Whether our lane holds what the source says it wrote."""
        dock = self._landing_dock(route)
        ours = dock.inbound.lane(lane)
        if not 0 < probe.size_bytes <= min(ours.size_bytes, MOST_BYTES):
            return False
        found = dock.porter.read(Span(ours.address, probe.size_bytes))
        return found == pattern(probe.seed, probe.size_bytes)

    def _landing_dock(self, route: Route) -> Dock:
        return (self._equipment.host if route == "host" else None) or self._equipment.dock

    # Out:

    def send(self, departure: Departure) -> Job:
        """Gather a chunk once the engine has computed it, and write it into the leased slot."""
        sending, began, is_late = self._sending, self._clock(), False
        try:
            target = self._target(departure)
        except PeerError as error:
            sending.gathered(departure)
            return sending.written(departure, 0.0, (error.code, str(error)))
        self._users[target] += 1
        digest, failure = yield from self._gathered(departure, target)
        sending.gathered(departure)
        gather_s = self._clock() - began
        if failure is None:
            is_late, failure = yield from self._pushed(departure, target, digest)
        self._users[target] -= 1
        self._close_unused(target)
        sending.written(departure, gather_s, failure, is_late)

    def _target(self, departure: Departure) -> Target:
        target, lease, size = self._targets.get(departure.order.boot), departure.lease, departure.size_bytes
        if target is None:
            raise PeerError("peer_lost", f"peer: {departure.order.boot} is not connected")
        if lease.slot >= target.slots or size > target.slot_bytes:
            reason = f"lease: slot {lease.slot} of {target.slots}, {size} of {target.slot_bytes} bytes"
            raise PeerError("bad_lease", reason)
        return target

    def _gathered(self, departure: Departure, target: Target) -> Generator[Wait, Event, tuple[int, Failure]]:
        """The digest of the chunk, which is in our slot now, or in the peer's on the direct route."""
        order, attachment, size = departure.order, departure.attachment, departure.size_bytes
        try:
            slot, host = self._equipment.dock.outbound.span(departure.local.index, size), None
            if target.route == "direct":
                slot = target.slot(departure.lease.slot, size)
            elif target.dock is not self._equipment.dock:
                host = target.dock.outbound.span(departure.local.index, size)
            yield from self._begun(attachment, departure.fence, departure.dispatch)
            failpoint("source.gather_begun")
            part, porter = Part(order.plan, order.plan.chunk(departure.chunk), departure.tables, True), self._porter
            moved = yield WaitMove(porter.gather(attachment.memory, part, slot, order.digest_kind, host))
            assert isinstance(moved, Moved)
            failpoint("source.gathered")
            is_theirs = self._taken_back(attachment, order.request, departure.asked_at)
            return moved.digest, moved.failure or (yield from is_theirs)
        except Exception as error:  # it costs this transfer, nobody else
            return 0, _failure("gather_failed", error, order)

    def digest(self, digest: Digest, attachment: Attachment, asked_at: float) -> Job:
        """Digest a chunk that its receiver has read, as it is in the engine's blocks now. Asked for at that time."""
        part, found = Part(digest.plan, digest.plan.chunk(digest.read.chunk), digest.tables, True), 0
        porter = self._porter
        failure: Failure
        try:
            if not porter.has_room:
                yield WaitRoom(attachment, porter, self._clock() + self._write_timeout_s)
            ended = yield WaitMove(porter.digest(attachment.memory, part))
            assert isinstance(ended, Moved)
            found = ended.digest
            failure = ended.failure or (yield from self._taken_back(attachment, digest.request, asked_at))
        except Exception as error:  # it costs this transfer, nobody else
            failure = _failure("gather_failed", error, digest)
        self._sending.report(Digested(digest.transfer, Sum(digest.read.chunk, found), digest.read, failure))

    def _taken_back(self, attachment: Attachment, request: str, asked_at: float) -> Generator[Wait, Event, Failure]:
        """Whether the blocks may have been another request's while they were read: only if some of us stood still.

        An engine uses them again READERS_S after it withdrew them or gave us up. It was sent after we last found the
        socket empty and before we read it; once the engine is gone it is not found empty again.
        """
        word, now = attachment.word, self._clock()
        if word.has_left:  # nobody will hear of it any more
            return "engine_left", "the engine left while its blocks were read"
        if now - word.heard_at >= UNHEARD_S:
            yield WaitWord(attachment, now, now + self._write_timeout_s)
        if not word.has_withdrawn(request, asked_at, now - UNHEARD_S):
            return None
        reason = "blocks were withdrawn while this agent stood still over a gather"
        return "blocks_taken_back", reason

    def _pushed(
        self, departure: Departure, target: Target, digest: int
    ) -> Generator[Wait, Event, tuple[bool, Failure]]:
        """Write our slot to the peer's, notice with it; on the direct route the notice is all that is left.

        Whether that was late, and what went wrong.
        """
        size, notice = departure.size_bytes, encode(self._notice(departure, digest))
        fabric, is_late = target.dock.fabric, False
        try:
            failpoint("source.write_begun")
            if target.route == "direct":
                fabric.notify(target.name, notice)
                return False, None
            local = target.dock.outbound.address(departure.local.index)
            remote = target.slot(departure.lease.slot, size).address
            deadline = self._clock() + self._write_timeout_s
            wait = WaitWrite(fabric, fabric.write(target.name, local, remote, size, notice, deadline))
            failpoint("source.write_posted")
        except FabricError as error:
            return False, (error.code, str(error))
        while isinstance(ended := (yield wait), WriteLate):
            is_late = True
            self._sending.late(departure, f"write_timeout_s: {self._write_timeout_s} passed")
        failpoint("source.write_ended")
        return is_late, ("write_failed", ended.reason) if isinstance(ended, WriteFailed) else None

    def _notice(self, departure: Departure, digest: int) -> Notice:
        order, lease = departure.order, departure.lease
        return Notice(
            transfer=order.transfer,
            token=order.token,
            source_boot=self._boot,
            sink_boot=order.boot,
            source_epoch=departure.attachment.epoch,
            sink_epoch=order.sink_epoch,
            slot=lease.slot,
            generation=lease.generation,
            chunk=departure.chunk,
            chunk_bytes=departure.size_bytes,
            digest=digest,
        )

    def _fence(self, attachment: Attachment, count: int, what: Dispatch | Receipt | None) -> WaitFence:
        return WaitFence(attachment, count, self._clock() + self._write_timeout_s, what)

    def _begun(self, attachment: Attachment, count: int, what: Dispatch | Receipt) -> Generator[Wait, Event, None]:
        """Wait until our engine is through with the blocks. Raises EngineError if the transfer is over by then."""
        yield self._fence(attachment, count, what)
        if (stop := what.stop) is not None:
            raise EngineError(stop.code, stop.reason)

    def warm(self, attachment: Attachment, part: Part) -> None:
        """Get ready for parts like this one, if the engine stays. What goes wrong now will be said when it matters."""
        if attachment.word.has_left:
            return
        dock, porter = self._equipment.dock, self._equipment.porter
        staging = dock.outbound if part.is_source else dock.inbound
        try:
            porter.warm(attachment.memory, part, staging.span(0, part.chunk.size_bytes))
        except Exception:
            log.exception("could not get ready for a peer")

    # In:

    def scatter(self, arrival: Arrival) -> Job:
        """Put a chunk that landed into the engine's blocks, once the engine is through with them."""
        order, notice, attachment = arrival.order, arrival.notice, arrival.attachment
        chunk = order.plan.chunk(notice.chunk)
        dock, porter = self._landing_dock(order.route), self._equipment.porter
        slot, host = self._equipment.dock.inbound.span(notice.slot, chunk.size_bytes), None
        if dock is not self._equipment.dock:
            host = dock.inbound.span(notice.slot, chunk.size_bytes)
        failure: Failure
        try:
            yield from self._begun(attachment, order.fence, arrival.receipt)
            failpoint("sink.scatter_begun")
            part = Part(order.plan, chunk, order.tables, False)
            ticket = porter.scatter(attachment.memory, part, slot, order.digest_kind, notice.digest, host)
            ended = yield WaitMove(ticket)
            assert isinstance(ended, Moved)
            failure = ended.failure
        except Exception as error:  # it costs this transfer, nobody else
            failure = _failure("scatter_failed", error, order)
        self._receiving.scattered(arrival, failure)

    # Out of the blocks of a peer's engine into ours:

    def open_peer(
        self, whose: Whose, mapped: Callable[[], AttachedPool], closed: Callable[[], None], settle: Settle
    ) -> Job:
        """Map what `pull` reads for this epoch of that agent's engine. Close it as often as it was opened.

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
        except Exception as error:  # such as no lane or no bundle that is free
            log.info("a peer's memory could not be measured: boot=%s %s", whose[0], error)
        finally:
            self._measured.remove(memory)
        settle(rate, None)
        self.close_parting()

    def close_peer(self, whose: Whose) -> None:
        """Begin no read of it any more, the last time; it is unmapped once none is under way."""
        self._openings[whose] -= 1
        if not self._openings[whose]:
            del self._openings[whose]
            self._parting.append(self._peers.pop(whose))
            self.close_parting()

    def close_parting(self) -> None:
        """Unmap what nothing reads any more."""
        porter, left = self._equipment.porter, self._parting
        self._parting = [each for each in left if each[0] in self._measured or porter.is_using(each[0])]
        for memory, closed in left:
            if all(memory is not kept for kept, _ in self._parting):
                porter.forget(memory)
                self._unmap(memory, closed)

    def _unmap(self, memory: AttachedPool, closed: Callable[[], None]) -> None:
        memory.close()
        self._tell(closed)

    def close(self) -> None:
        """The porter is closed: nothing is read any more."""
        for memory, _ in (*self._peers.values(), *self._parting):
            memory.close()

    def pull(self, pull: Pull, attachment: Attachment) -> Job:
        """Read chunks once our engine is through with the blocks they go to. They count while the lease lasts."""
        tickets: deque[tuple[int, int]] = deque()  # with the chunk of each
        digests: dict[int, int] = {}
        failure: Failure = None
        receiving = self._receiving
        receipt = receiving.begin_read(pull.transfer)
        try:
            yield from self._begun(attachment, pull.fence, receipt)
            for index in range(pull.first_chunk, pull.end_chunk):
                if len(tickets) == MOST_AHEAD:
                    yield from self._read(pull, tickets, digests)
                if not self._equipment.porter.has_room:
                    yield WaitRoom(attachment, self._equipment.porter, self._clock() + self._write_timeout_s)
                if pull.lease.is_given_up:
                    break
                if (opened := self._peers.get(pull.whose)) is None:
                    raise PeerError("peer_lost", f"peer: the memory of {pull.whose[0]} is not open")
                failpoint("sink.read_begun")
                chunk = pull.plan.chunk(index)
                theirs = Part(pull.plan, chunk, pull.peer_tables, True)
                ours = Part(pull.plan, chunk, pull.tables, False)
                has_digest = index in pull.compared
                ticket = self._equipment.porter.pull(opened[0], theirs, attachment.memory, ours, has_digest)
                tickets.append((index, ticket))
        except Exception as error:  # it costs this transfer, nobody else
            failure = _failure("pull_failed", error, pull)
        while tickets:
            yield from self._read(pull, tickets, digests)
        failpoint("sink.read_ended")
        failure = failure or (yield from self._counted(pull, attachment))
        read = pull.end_chunk - pull.first_chunk
        receiving.report(Pulled(pull.transfer, pull.end_chunk, read, pull.size_bytes, digests, failure))
        receiving.end_read(receipt)

    def _read(
        self, pull: Pull, tickets: deque[tuple[int, int]], digests: dict[int, int]
    ) -> Generator[Wait, Event, None]:
        """Wait for the end of the first of these reads."""
        chunk, ticket = tickets.popleft()
        ended = yield WaitMove(ticket)
        assert isinstance(ended, Moved)
        if chunk in pull.compared:
            digests[chunk] = ended.digest

    def warm_pull(self, attachment: Attachment, whose: Whose, theirs: Part, ours: Part, has_digest: bool) -> None:
        """Get ready for such a part, as `warm` does."""
        opened = self._peers.get(whose)
        if opened is None or attachment.word.has_left:
            return
        try:
            self._equipment.porter.warm_pull(opened[0], theirs, attachment.memory, ours, has_digest)
        except Exception:
            log.exception("could not get ready for a peer")

    def _counted(self, pull: Pull, attachment: Attachment) -> Generator[Wait, Event, Failure]:
        """Whether what was read counts: if it ended before a lease does that was asked for by then, and is answered.

        The clock is looked at after the end was seen: who was stopped in between finds it further on.
        """
        now = self._clock()
        if pull.lease.is_given_up:
            return "aborted", "the transfer ended while it was read"
        if pull.lease.counts(now):
            return None
        if attachment.word.has_left:  # nobody hears of it later
            return "engine_left", "the engine left while its blocks were written"
        try:
            yield WaitLease(attachment, pull.lease, now, now + LEASE_S)
        except EngineError as error:
            return error.code, str(error)
        return ("aborted", "the transfer ended while it was read") if pull.lease.is_given_up else None

    def watch(self, attachment: Attachment, fence: int) -> Job:
        """Say when our engine's fence has reached this count, or that nobody can wait for it any more."""
        with contextlib.suppress(EngineError):
            yield self._fence(attachment, fence, None)
        self._sending.report(FenceReached())


def _failure(code: str, error: Exception, what: SendOrder | ReceiveOrder | Pull | Digest) -> tuple[str, str]:
    """What a transfer's failure says: an error of ours in its own words, any other with its cause in the log."""
    if isinstance(error, KVBridgeError):
        return error.code, str(error)
    log.error("%s: transfer=%s", code, what.transfer, exc_info=error)
    return code, f"{type(error).__name__}: {error}"
