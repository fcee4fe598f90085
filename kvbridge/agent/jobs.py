"""What the mover's thread does with a chunk, each job a story: out of the blocks and over, or into the blocks."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any, Protocol

from kvbridge_proto.codec import encode
from kvbridge_proto.engine import READERS_S
from kvbridge_proto.peer import Notice, Probe, Route

from ..device.porter import Moved
from ..device.staging import Span
from ..errors import FabricError, KVBridgeError, PeerError
from ..exchange.actions import Scatter, Ship
from ..failpoints import failpoint
from ..geometry.plan import Part
from ..transport.fabric import WriteFailed, WriteLate
from .attachment import Attachment
from .equipment import Dock, Equipment
from .routes import MOST_BYTES, Connected, Landing, Target, close, pattern, prove
from .waiting import Event, Job, Wait, WaitFence, WaitMove, WaitWord, WaitWrite

log = logging.getLogger("kvbridge.mover")

UNHEARD_S = READERS_S / 2
Failure = tuple[str, str] | None  # (code, reason)


class Told(Protocol):
    """Who is told how jobs went."""

    def on_gathered(self, ship: Ship, size_bytes: int, seconds: float) -> None: ...
    def on_shipped(self, ship: Ship, size_bytes: int, failure: Failure) -> None: ...
    def on_late(self, ship: Ship, reason: str) -> None: ...
    def on_scattered(self, scatter: Scatter, size_bytes: int, failure: Failure) -> None: ...


class Jobs:
    """Makes jobs; runs none. `tell` calls one of `told`'s methods where they want to be called."""

    def __init__(
        self,
        equipment: Equipment,
        boot: str,
        told: Told,
        tell: Callable[..., None],
        write_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._equipment = equipment
        self._boot = boot
        self._told = told
        self._tell = tell
        self._write_timeout_s = write_timeout_s
        self._clock = clock
        self._targets: dict[str, Target] = {}
        self._users: Counter[Target] = Counter()
        self._leaving: set[Target] = set()
        self._serial = 0

    # Sinks:

    def connect(self, landing: Landing, settle: Callable[[Any, Exception | None], None]) -> Job:
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

    def ship(self, ship: Ship, attachment: Attachment, asked_at: float) -> Job:
        """Gather a chunk once the engine has computed it, and write it into the leased slot. Asked for at that time."""
        size = ship.plan.chunk(ship.chunk).size_bytes
        try:
            target = self._target(ship, size)
        except PeerError as error:
            self._tell(self._told.on_gathered, ship, size, 0.0)
            self._tell(self._told.on_shipped, ship, size, (error.code, str(error)))
            return
        self._users[target] += 1
        digest, failure = yield from self._gathered(ship, attachment, target, size, asked_at)
        if failure is None:
            failure = yield from self._pushed(ship, attachment, target, size, digest)
        self._users[target] -= 1
        self._close_unused(target)
        self._tell(self._told.on_shipped, ship, size, failure)

    def _target(self, ship: Ship, size: int) -> Target:
        target = self._targets.get(ship.boot)
        if target is None:
            raise PeerError("peer_lost", f"peer: {ship.boot} is not connected")
        if ship.lease.slot >= target.slots or size > target.slot_bytes:
            reason = f"lease: slot {ship.lease.slot} of {target.slots}, {size} of {target.slot_bytes} bytes"
            raise PeerError("bad_lease", reason)
        return target

    def _gathered(
        self, ship: Ship, attachment: Attachment, target: Target, size: int, asked_at: float
    ) -> Generator[Wait, Event, tuple[int, Failure]]:
        """The digest of the chunk, which is in our slot now, or in the peer's on the direct route."""
        chunk, began = ship.plan.chunk(ship.chunk), self._clock()
        moved, failure = Moved(0), None
        try:
            slot, host = self._equipment.dock.outbound.span(ship.local.index, size), None
            if target.route == "direct":
                slot = target.slot(ship.lease.slot, size)
            elif target.dock is not self._equipment.dock:
                host = target.dock.outbound.span(ship.local.index, size)
            yield self._fence(attachment, ship)
            failpoint("source.gather_begun")
            part, porter = Part(ship.plan, chunk, ship.tables, True), self._equipment.porter
            ended = yield WaitMove(porter.gather(attachment.memory, part, slot, ship.digest_kind, host))
            assert isinstance(ended, Moved)
            moved, failure = ended, ended.failure
            failpoint("source.gathered")
            failure = failure or (yield from self._taken_back(attachment, asked_at))
        except Exception as error:  # it costs this transfer, nobody else
            failure = _failure("gather_failed", error, ship)
        self._tell(self._told.on_gathered, ship, size, self._clock() - began)
        return moved.digest, failure

    def _taken_back(self, attachment: Attachment, asked_at: float) -> Generator[Wait, Event, Failure]:
        """Whether the blocks may have been another request's while they were read: only if some of us stood still.

        An engine uses them again READERS_S after it withdrew them. When it did that we know only to lie between the
        last moment at which there was nothing to hear of it and the one at which it was heard.
        """
        word, now = attachment.word, self._clock()
        if word.has_left:  # nobody will hear of it any more
            return "engine_left", "the engine left while its blocks were read"
        if now - word.heard_at >= UNHEARD_S:
            yield WaitWord(attachment, now, now + self._write_timeout_s)
        if not word.has_withdrawn(asked_at, now - UNHEARD_S):
            return None
        reason = "blocks were withdrawn while this agent stood still over a gather"
        return "blocks_taken_back", reason

    def _pushed(
        self, ship: Ship, attachment: Attachment, target: Target, size: int, digest: int
    ) -> Generator[Wait, Event, Failure]:
        """Write our slot to the peer's, notice with it; on the direct route the notice is all that is left."""
        notice = encode(self._notice(ship, attachment, size, digest))
        fabric = target.dock.fabric
        try:
            failpoint("source.write_begun")
            if target.route == "direct":
                fabric.notify(target.name, notice)
                return None
            local, remote = target.dock.outbound.address(ship.local.index), target.slot(ship.lease.slot, size).address
            deadline = self._clock() + self._write_timeout_s
            wait = WaitWrite(fabric, fabric.write(target.name, local, remote, size, notice, deadline))
            failpoint("source.write_posted")
        except FabricError as error:
            return error.code, str(error)
        while isinstance(ended := (yield wait), WriteLate):
            self._tell(self._told.on_late, ship, f"write_timeout_s: {self._write_timeout_s} passed")
        failpoint("source.write_ended")
        return ("write_failed", ended.reason) if isinstance(ended, WriteFailed) else None

    def _notice(self, ship: Ship, attachment: Attachment, size: int, digest: int) -> Notice:
        return Notice(
            transfer=ship.transfer,
            token=ship.token,
            source_boot=self._boot,
            sink_boot=ship.boot,
            source_epoch=attachment.epoch,
            sink_epoch=ship.sink_epoch,
            slot=ship.lease.slot,
            generation=ship.lease.generation,
            chunk=ship.chunk,
            chunk_bytes=size,
            digest=digest,
        )

    def _fence(self, attachment: Attachment, chunk: Ship | Scatter) -> WaitFence:
        return WaitFence(attachment, chunk.fence, self._clock() + self._write_timeout_s, chunk)

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

    def scatter(self, scatter: Scatter, attachment: Attachment) -> Job:
        """Put a chunk that landed into the engine's blocks, once the engine is through with them."""
        chunk = scatter.plan.chunk(scatter.chunk)
        dock, porter = self._landing_dock(scatter.route), self._equipment.porter
        slot, host = self._equipment.dock.inbound.span(scatter.slot, chunk.size_bytes), None
        if dock is not self._equipment.dock:
            host = dock.inbound.span(scatter.slot, chunk.size_bytes)
        failure: Failure
        try:
            yield self._fence(attachment, scatter)
            failpoint("sink.scatter_begun")
            part = Part(scatter.plan, chunk, scatter.tables, False)
            ticket = porter.scatter(attachment.memory, part, slot, scatter.digest_kind, scatter.digest, host)
            ended = yield WaitMove(ticket)
            assert isinstance(ended, Moved)
            failure = ended.failure
        except Exception as error:  # it costs this transfer, nobody else
            failure = _failure("scatter_failed", error, scatter)
        self._tell(self._told.on_scattered, scatter, chunk.size_bytes, failure)


def _failure(code: str, error: Exception, what: Ship | Scatter) -> tuple[str, str]:
    """What a transfer's failure says: an error of ours in its own words, any other with its cause in the log."""
    if isinstance(error, KVBridgeError):
        return error.code, str(error)
    log.error("%s: transfer=%s chunk=%d", code, what.transfer, what.chunk, exc_info=error)
    return code, f"{type(error).__name__}: {error}"
