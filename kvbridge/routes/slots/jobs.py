"""The jobs of the data plane's thread: a chunk out of the blocks and to the peer, or from a slot into the blocks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from kvbridge_proto.framing import encode
from kvbridge_proto.peer import Notice, Probe, Route

from ...dataplane.attached import (
    AttachedMemory,
    Event,
    Job,
    Settle,
    Wait,
    WaitMove,
    begun,
    failure_of,
    started,
    taken_back,
)
from ...dataplane.orders import LandedChunk, LeavingChunk, ReceiveOrders, SendOrders
from ...dataplane.resources import Resources
from ...device.copier import BlockCopier, Moved
from ...device.staging import Span
from ...errors import FabricError, PeerError
from ...exchange.orders import Failure
from ...failpoints import failpoint
from ...geometry.plan import Part
from ...transport.fabric import WriteFailed, WriteLate
from ..choice import SLOT_ROUTES, Connected, is_proved, prove
from .slot_routes import Landing, Target


@dataclass(eq=False, repr=False)
class Jobs:
    """Makes jobs; runs none."""

    _resources: Resources
    _incarnation: str
    _send_orders: SendOrders
    _receive_orders: ReceiveOrders
    _write_timeout_s: float
    _clock: Callable[[], float] = time.monotonic
    _targets: dict[str, Target] = field(default_factory=dict, init=False)
    _users: Counter[Target] = field(default_factory=Counter, init=False)
    _leaving: set[Target] = field(default_factory=set, init=False)
    _serial: int = field(default=0, init=False)

    @property
    def _ends(self) -> float:
        """The deadline of a wait that begins now."""
        return self._clock() + self._write_timeout_s

    @property
    def _copier(self) -> BlockCopier:
        return self._resources.copier

    # Receivers:

    def connect(self, landing: Landing, settle: Settle) -> Job:
        """Prove a route to a receiver; `settle` gets it, or the error."""
        self._serial += 1
        serial = self._serial
        try:
            target, routed = yield from prove(self._resources, landing, serial, self._clock)
        except FabricError as error:
            settle(None, error)
        else:
            failpoint("sender.probed")
            if (before := self._targets.get(landing.incarnation)) is not None:
                self.disconnect(landing.incarnation, before.serial)
            self._targets[landing.incarnation] = target
            settle(Connected(routed, serial), None)

    def disconnect(self, incarnation: str, serial: int, is_lost: bool = False) -> None:
        """Begin no more writes to this target. It is closed once those under way have ended."""
        target = self._targets.get(incarnation)
        if target is not None and target.serial == serial:
            if is_lost:
                target.endpoint.fabric.distrust(target.name)
            del self._targets[incarnation]
            self._leaving.add(target)
            self._close_unused(target)

    def _close_unused(self, target: Target) -> None:
        if target in self._leaving and not self._users[target]:
            self._leaving.discard(target)
            del self._users[target]
            target.close()

    def is_proved(self, route: Route, lane: int, probe: Probe) -> bool:
        """Whether our lane holds the pattern that the sender says it wrote."""
        return is_proved(self._resources, route, lane, probe)

    # Out:

    def send(self, leaving: LeavingChunk) -> Job:
        """Gather a chunk once the engine has computed it, and write it into the leased slot."""
        send_orders, is_late = self._send_orders, False
        try:
            target = self._target(leaving)
        except PeerError as error:
            send_orders.gathered(leaving)
            return send_orders.written(leaving, 0.0, (error.code, str(error)))
        self._users[target] += 1
        gather_s, digest, failure = yield from self._gathered(leaving, target)
        send_orders.gathered(leaving)
        if failure is None:
            send_orders.note_gathered(leaving, self._clock())
            is_late, failure = yield from self._pushed(leaving, target, digest)
        self._users[target] -= 1
        self._close_unused(target)
        send_orders.written(leaving, gather_s, failure, is_late)

    def _target(self, leaving: LeavingChunk) -> Target:
        target, lease, size = self._targets.get(leaving.order.incarnation), leaving.lease, leaving.size_bytes
        if target is None:
            raise PeerError("peer_lost", f"peer: {leaving.order.incarnation} is not connected")
        if lease.slot >= target.slots or size > target.slot_bytes:
            reason = f"lease: slot {lease.slot} of {target.slots}, {size} of {target.slot_bytes} bytes"
            raise PeerError("bad_lease", reason)
        return target

    def _gathered(self, leaving: LeavingChunk, target: Target) -> Generator[Wait, Event, tuple[float, int, Failure]]:
        """Gather the chunk into our slot, or the peer's on the route `direct`.

        Returns the seconds that it took, without the waits before it, its digest, and the failure.
        """
        order, attached, size = leaving.order, leaving.attached, leaving.size_bytes
        began = 0.0
        try:
            slot, host = target.places(leaving.local, leaving.lease, size)
            part = Part(order.plan, order.plan.chunk(leaving.chunk), leaving.tables, True)

            def begin() -> Generator[Wait, Event, int]:
                yield from begun(attached, leaving.fence, self._ends, leaving.ordered)
                failpoint("sender.gather_begun")
                nonlocal began
                began = self._clock()
                ticket = self._copier.gather(attached.memory, part, slot, order.digest_kind, host)
                self._send_orders.note_gathering(leaving, began)
                return ticket

            moved = yield WaitMove((yield from self._started(begin, attached)))
            assert isinstance(moved, Moved)
            gather_s = self._clock() - began
            failpoint("sender.gathered")
            theirs = taken_back(attached, order.number, leaving.asked_at, self._write_timeout_s, self._clock)
            return gather_s, moved.digest, moved.failure or (yield from theirs)
        except Exception as error:  # only this transfer fails
            return 0.0, 0, failure_of("gather_failed", error, order)

    def _started(
        self, begin: Callable[[], Generator[Wait, Event, int]], attached: AttachedMemory
    ) -> Generator[Wait, Event, int]:
        return started(begin, attached, self._write_timeout_s, self._clock)

    def _pushed(
        self, leaving: LeavingChunk, target: Target, digest: int
    ) -> Generator[Wait, Event, tuple[bool, Failure]]:
        """Write our slot and the notice to the peer; on the route `direct` only the notice is left to send.

        Returns whether the write was late, and the failure.
        """
        size, notice = leaving.size_bytes, encode(self._notice(leaving, digest))
        deadline, is_late = self._ends, False
        try:
            failpoint("sender.write_begun")
            wait = target.push(leaving.local, leaving.lease, size, notice, deadline)
            if wait is None:
                return False, None
            failpoint("sender.write_posted")
        except FabricError as error:
            return False, (error.code, str(error))
        while isinstance(ended := (yield wait), WriteLate):
            is_late = True
            self._send_orders.late(leaving, *self._why_late(leaving, deadline))
        failpoint("sender.write_ended")
        return is_late, ("write_failed", ended.reason) if isinstance(ended, WriteFailed) else None

    def _why_late(self, leaving: LeavingChunk, deadline: float) -> tuple[str, str]:
        if self._clock() < deadline:
            return "peer_lost", f"peer: the link to {leaving.order.incarnation} was lost while it was written to"
        return "write_timeout", f"write_timeout_s: {self._write_timeout_s} passed"

    def _notice(self, leaving: LeavingChunk, digest: int) -> Notice:
        order, lease = leaving.order, leaving.lease
        return Notice(
            transfer=order.transfer,
            token=order.token,
            sender_incarnation=self._incarnation,
            receiver_incarnation=order.incarnation,
            sender_epoch=leaving.attached.epoch,
            receiver_epoch=order.receiver_epoch,
            slot=lease.slot,
            generation=lease.generation,
            chunk=leaving.chunk,
            chunk_bytes=leaving.size_bytes,
            digest=digest,
        )

    def warm(self, attached: AttachedMemory, part: Part) -> None:
        """Begin to compile for parts like this one."""
        self._copier.warm(attached.memory, part, self._any_slot(part))

    def _any_slot(self, part: Part) -> Span | None:
        """A slot for such a part, None before there are slots. A session that needs slots warms their kernels."""
        endpoints = self._resources.current
        if endpoints is None:
            return None
        staging = endpoints.endpoint.send_slots if part.is_sender else endpoints.endpoint.receive_slots
        return staging.span(0, part.chunk.size_bytes)

    # In:

    def scatter(self, landed: LandedChunk) -> Job:
        """Put a chunk that landed into the engine's blocks, once the engine has finished with them."""
        order, notice, attached = landed.order, landed.notice, landed.attached
        chunk = order.plan.chunk(notice.chunk)
        endpoint, copier = SLOT_ROUTES[order.route].endpoint(self._resources), self._copier
        slot, host = self._resources.endpoint.receive_slots.span(notice.slot, chunk.size_bytes), None
        if endpoint is not self._resources.endpoint:
            host = endpoint.receive_slots.span(notice.slot, chunk.size_bytes)
        failure: Failure

        def begin() -> Generator[Wait, Event, int]:
            yield from begun(attached, order.fence, self._ends, landed.ordered)
            failpoint("receiver.scatter_begun")
            part = Part(order.plan, chunk, order.tables, False)
            return copier.scatter(attached.memory, part, slot, order.digest_kind, notice.digest, host)

        try:
            ended = yield WaitMove((yield from self._started(begin, attached)))
            assert isinstance(ended, Moved)
            failure = ended.failure
        except Exception as error:  # only this transfer fails
            failure = failure_of("scatter_failed", error, order)
        self._receive_orders.scattered(landed, failure)
