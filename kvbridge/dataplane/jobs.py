"""What the data plane's thread does with a chunk, each job a story: out of the blocks and over, or into the blocks."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Generator

from kvbridge_proto.codec import encode
from kvbridge_proto.engine import READERS_S
from kvbridge_proto.peer import Notice, Probe, Route, Sum

from ..device.copier import BlockCopier, Moved
from ..device.staging import Span
from ..errors import EngineError, FabricError, PeerError
from ..exchange.orders import Digest, Digested, Failure, FenceReached
from ..failpoints import failpoint
from ..geometry.plan import Part
from ..transport.fabric import WriteFailed, WriteLate
from .attached import AttachedMemory
from .awaits import (
    Event,
    Job,
    Settle,
    Wait,
    WaitCopier,
    WaitEngineHeard,
    WaitFence,
    WaitMove,
    begun,
    failure_of,
    started,
)
from .receive_orders import LandedChunk, ReceiveOrders
from .resources import Resources
from .routes.choice import STAGED, Connected, pattern, prove
from .routes.rate import MOST_BYTES
from .routes.staged import Landing, Target
from .send_orders import LeavingChunk, SendOrders

log = logging.getLogger("kvbridge.data_plane")

UNHEARD_S = READERS_S / 2


class Jobs:
    """Makes jobs; runs none."""

    def __init__(
        self,
        equipment: Resources,
        incarnation: str,
        send_orders: SendOrders,
        receive_orders: ReceiveOrders,
        write_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._equipment = equipment
        self._incarnation = incarnation
        self._send_orders = send_orders
        self._receive_orders = receive_orders
        self._write_timeout_s = write_timeout_s
        self._clock = clock
        self._targets: dict[str, Target] = {}
        self._users: Counter[Target] = Counter()
        self._leaving: set[Target] = set()
        self._serial = 0

    @property
    def _ends(self) -> float:
        """When what begins to wait now has waited long enough."""
        return self._clock() + self._write_timeout_s

    @property
    def _copier(self) -> BlockCopier:
        return self._equipment.copier

    # Receivers:

    def connect(self, landing: Landing, settle: Settle) -> Job:
        """Prove a route to a receiver; `settle` gets it, or what went wrong."""
        self._serial += 1
        serial = self._serial
        try:
            target, routed = yield from prove(self._equipment, landing, serial, self._clock)
        except FabricError as error:
            settle(None, error)
        else:
            failpoint("sender.probed")
            if (before := self._targets.get(landing.incarnation)) is not None:
                self.disconnect(landing.incarnation, before.serial)
            self._targets[landing.incarnation] = target
            settle(Connected(routed, serial), None)

    def disconnect(self, incarnation: str, serial: int) -> None:
        """No new writes to this target. It is let go once those under way have ended."""
        target = self._targets.get(incarnation)
        if target is not None and target.serial == serial:
            del self._targets[incarnation]
            self._leaving.add(target)
            self._close_unused(target)

    def _close_unused(self, target: Target) -> None:
        if target in self._leaving and not self._users[target]:
            self._leaving.discard(target)
            del self._users[target]
            target.close()

    def is_proved(self, route: Route, lane: int, probe: Probe) -> bool:
        """Whether our lane holds what the sender says it wrote."""
        endpoint = STAGED[route].endpoint(self._equipment)
        ours = endpoint.receive_slots.lane(lane)
        if not 0 < probe.size_bytes <= min(ours.size_bytes, MOST_BYTES):
            return False
        found = endpoint.copier.read(Span(ours.address, probe.size_bytes))
        return found == pattern(probe.seed, probe.size_bytes)

    # Out:

    def send(self, departure: LeavingChunk) -> Job:
        """Gather a chunk once the engine has computed it, and write it into the leased slot."""
        send_orders, began, is_late = self._send_orders, self._clock(), False
        try:
            target = self._target(departure)
        except PeerError as error:
            send_orders.gathered(departure)
            return send_orders.written(departure, 0.0, (error.code, str(error)))
        self._users[target] += 1
        digest, failure = yield from self._gathered(departure, target)
        send_orders.gathered(departure)
        gather_s = self._clock() - began
        if failure is None:
            is_late, failure = yield from self._pushed(departure, target, digest)
        self._users[target] -= 1
        self._close_unused(target)
        send_orders.written(departure, gather_s, failure, is_late)

    def _target(self, departure: LeavingChunk) -> Target:
        target, lease, size = self._targets.get(departure.order.incarnation), departure.lease, departure.size_bytes
        if target is None:
            raise PeerError("peer_lost", f"peer: {departure.order.incarnation} is not connected")
        if lease.slot >= target.slots or size > target.slot_bytes:
            reason = f"lease: slot {lease.slot} of {target.slots}, {size} of {target.slot_bytes} bytes"
            raise PeerError("bad_lease", reason)
        return target

    def _gathered(self, departure: LeavingChunk, target: Target) -> Generator[Wait, Event, tuple[int, Failure]]:
        """The digest of the chunk, which is in our slot now, or in the peer's on the direct route."""
        order, attachment, size = departure.order, departure.attachment, departure.size_bytes
        try:
            slot, host = target.places(departure.local, departure.lease, size)
            part = Part(order.plan, order.plan.chunk(departure.chunk), departure.tables, True)

            def begin() -> Generator[Wait, Event, int]:
                yield from begun(attachment, departure.fence, self._ends, departure.dispatch)
                failpoint("sender.gather_begun")
                return self._copier.gather(attachment.memory, part, slot, order.digest_kind, host)

            moved = yield WaitMove((yield from self._started(begin, attachment)))
            assert isinstance(moved, Moved)
            failpoint("sender.gathered")
            is_theirs = self._taken_back(attachment, order.request, departure.asked_at)
            return moved.digest, moved.failure or (yield from is_theirs)
        except Exception as error:  # it costs this transfer, nobody else
            return 0, failure_of("gather_failed", error, order.transfer)

    def digest(self, digest: Digest, attachment: AttachedMemory, asked_at: float) -> Job:
        """Digest a chunk that its receiver has read, as it is in the engine's blocks now. Asked for at that time."""
        part, found = Part(digest.plan, digest.plan.chunk(digest.read.chunk), digest.tables, True), 0
        copier = self._copier
        failure: Failure

        def begin() -> Generator[Wait, Event, int]:
            if not copier.has_room:
                yield WaitCopier(attachment, copier, self._ends)
            return copier.digest(attachment.memory, part)

        try:
            ended = yield WaitMove((yield from self._started(begin, attachment)))
            assert isinstance(ended, Moved)
            found = ended.digest
            failure = ended.failure or (yield from self._taken_back(attachment, digest.request, asked_at))
        except Exception as error:  # it costs this transfer, nobody else
            failure = failure_of("gather_failed", error, digest.transfer)
        self._send_orders.report(Digested(digest.transfer, Sum(digest.read.chunk, found), digest.read, failure))

    def _started(
        self, begin: Callable[[], Generator[Wait, Event, int]], attachment: AttachedMemory
    ) -> Generator[Wait, Event, int]:
        return started(begin, attachment, self._write_timeout_s, self._clock)

    def _taken_back(self, attachment: AttachedMemory, request: str, asked_at: float) -> Generator[Wait, Event, Failure]:
        """Whether the blocks may have been another request's while they were read: only if some of us stood still.

        An engine uses them again READERS_S after it withdrew them or gave us up. It was sent after we last found the
        socket empty and before we read it; once the engine is gone it is not found empty again.
        """
        word, now = attachment.liveness, self._clock()
        if word.has_left:  # nobody will hear of it any more
            return "engine_left", "the engine left while its blocks were read"
        if now - word.heard_at >= UNHEARD_S:
            yield WaitEngineHeard(attachment, now, now + self._write_timeout_s)
        if not word.has_withdrawn(request, asked_at, now - UNHEARD_S):
            return None
        reason = "blocks were withdrawn while this agent stood still over a gather"
        return "blocks_taken_back", reason

    def _pushed(
        self, departure: LeavingChunk, target: Target, digest: int
    ) -> Generator[Wait, Event, tuple[bool, Failure]]:
        """Write our slot to the peer's, notice with it; on the direct route the notice is all that is left.

        Whether that was late, and what went wrong.
        """
        size, notice = departure.size_bytes, encode(self._notice(departure, digest))
        deadline, is_late = self._ends, False
        try:
            failpoint("sender.write_begun")
            wait = target.push(departure.local, departure.lease, size, notice, deadline)
            if wait is None:
                return False, None
            failpoint("sender.write_posted")
        except FabricError as error:
            return False, (error.code, str(error))
        while isinstance(ended := (yield wait), WriteLate):
            is_late = True
            self._send_orders.late(departure, f"write_timeout_s: {self._write_timeout_s} passed")
        failpoint("sender.write_ended")
        return is_late, ("write_failed", ended.reason) if isinstance(ended, WriteFailed) else None

    def _notice(self, departure: LeavingChunk, digest: int) -> Notice:
        order, lease = departure.order, departure.lease
        return Notice(
            transfer=order.transfer,
            token=order.token,
            sender_incarnation=self._incarnation,
            receiver_incarnation=order.incarnation,
            sender_epoch=departure.attachment.epoch,
            receiver_epoch=order.receiver_epoch,
            slot=lease.slot,
            generation=lease.generation,
            chunk=departure.chunk,
            chunk_bytes=departure.size_bytes,
            digest=digest,
        )

    def warm(self, attachment: AttachedMemory, part: Part) -> None:
        """Begin to compile for parts like this one, if the engine stays. What goes wrong is said when it matters."""
        if attachment.liveness.has_left:
            return
        try:
            self._copier.warm(attachment.memory, part, self._any_slot(part))
        except Exception:
            log.exception("could not get ready for a peer")

    def _any_slot(self, part: Part) -> Span | None:
        """That such a part may be moved to or from, if there are slots: else what a session needs is warmed with it."""
        endpoints = self._equipment.current
        if endpoints is None:
            return None
        staging = endpoints.endpoint.send_slots if part.is_sender else endpoints.endpoint.receive_slots
        return staging.span(0, part.chunk.size_bytes)

    # In:

    def scatter(self, arrival: LandedChunk) -> Job:
        """Put a chunk that landed into the engine's blocks, once the engine is through with them."""
        order, notice, attachment = arrival.order, arrival.notice, arrival.attachment
        chunk = order.plan.chunk(notice.chunk)
        endpoint, copier = STAGED[order.route].endpoint(self._equipment), self._copier
        slot, host = self._equipment.endpoint.receive_slots.span(notice.slot, chunk.size_bytes), None
        if endpoint is not self._equipment.endpoint:
            host = endpoint.receive_slots.span(notice.slot, chunk.size_bytes)
        failure: Failure

        def begin() -> Generator[Wait, Event, int]:
            yield from begun(attachment, order.fence, self._ends, arrival.receipt)
            failpoint("receiver.scatter_begun")
            part = Part(order.plan, chunk, order.tables, False)
            return copier.scatter(attachment.memory, part, slot, order.digest_kind, notice.digest, host)

        try:
            ended = yield WaitMove((yield from self._started(begin, attachment)))
            assert isinstance(ended, Moved)
            failure = ended.failure
        except Exception as error:  # it costs this transfer, nobody else
            failure = failure_of("scatter_failed", error, order.transfer)
        self._receive_orders.scattered(arrival, failure)

    def watch(self, attachment: AttachedMemory, fence: int) -> Job:
        """Say when our engine's fence has reached this count, or that nobody can wait for it any more."""
        with contextlib.suppress(EngineError):
            yield WaitFence(attachment, fence, self._ends, None)
        self._send_orders.report(FenceReached())
