"""Chooses the route to a sink's slots and proves it: a pattern is written where only probes go, and timed.

Runs on the mover's thread as a generator that waits as the mover's other jobs do (see mover.py). What a route cannot
do shows here, before a request depends on it: UCX, for one, falls back to a tenth of a percent of NVLink in silence.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

from kvbridge_proto.peer import Probe, Route

from ..device import driver
from ..device.mapping import open_ipc
from ..device.memory import AttachedPool, span_of
from ..device.staging import Span, lane_of
from ..errors import FabricError, PeerError
from ..exchange.route import Rate, Routed, Site, options
from ..transport.fabric import WriteFailed, WriteLate
from .equipment import Dock, Equipment
from .waiting import Event, Wait, WaitMove, WaitWrite

log = logging.getLogger("kvbridge.routes")

# Slower than this something is wrong with a route: another one is tried first. PCIe and 100 Gb/s are ten times that.
SLOW_BYTES_PER_S = 1e9
SLOW_S = 0.001  # what took less was too small to tell
MOST_BYTES = 4 << 20
ROUNDS = 4
MOST_ROUNDS = 12  # beside a busy engine a kernel waits a time slice, most times
NOT_CONNECTED = 0  # the serial of a route that nothing is written by
PROBE_S = 1.5  # for all rounds of a route: three routes take less than a handshake may


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a sink may be written to, as its Hello said."""

    boot: str
    site: Site
    lane: int


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A sink's slots by one route. `name` is what `dock`'s fabric calls the peer, `serial` which connect it is of."""

    serial: int
    route: Route
    name: str
    base: int
    slot_bytes: int
    slots: int
    dock: Dock
    mapped: int = 0  # direct: where the peer's allocation is mapped here

    def slot(self, index: int, size_bytes: int) -> Span:
        return Span(self.base + index * self.slot_bytes, size_bytes)


@dataclass(frozen=True, slots=True)
class Connected:
    """The route that was proved, under a serial by which it is given up."""

    routed: Routed
    serial: int


def pattern(seed: int, size_bytes: int) -> bytes:
    """What a probe consists of, the same on both sides (PROTOCOL.md)."""
    return hashlib.shake_128(seed.to_bytes(8, "little")).digest(size_bytes)


def is_slow(rate: Rate) -> bool:
    """Whether so much at such a rate means that something is wrong."""
    return rate.bytes_per_s < SLOW_BYTES_PER_S and rate.size_bytes > rate.bytes_per_s * SLOW_S


def prove(
    equipment: Equipment, landing: Landing, serial: int = 0, clock: Callable[[], float] = time.monotonic
) -> Generator[Wait, Event, tuple[Target, Routed]]:
    """The best route that works. Raises FabricError `no_route` with what stood against each."""
    against: list[str] = []
    slow: list[tuple[Target, Probe]] = []
    for route, reason in options(equipment.site, landing.site):
        if reason or route == "pull":  # the receiver's to prove; here it stood behind others, or did not work
            against.append(reason)
            continue
        target = None
        try:
            target = _open(equipment, landing, route, serial)
            probe = yield from _probe(equipment, landing, target, clock)
        except Exception as error:  # the peer's card can be anything; the other routes may still do
            log.info("route does not work: boot=%s route=%s %s", landing.boot, route, error)
            against.append(f"{route}: {error or type(error).__name__}")
            if target is not None:
                close(equipment, target)
            continue
        routed = Routed(route, "; ".join(against)[:1024], probe)
        if routed.rate is None or not is_slow(routed.rate):
            _close_all(equipment, slow, target)
            return target, routed
        against.append(f"{route}: {probe.bytes_per_s / 1e9:.2f} GB/s measured, too slow to be right")
        slow.append((target, probe))
    if not slow:
        raise FabricError("no_route", *against)
    fastest = max(probe.bytes_per_s for _, probe in slow)
    # A busy GPU makes all of them slow: then the order counts, unless one is far behind.
    chosen, probe = next(each for each in slow if each[1].bytes_per_s * 4 >= fastest)
    _close_all(equipment, slow, chosen)
    return chosen, Routed(chosen.route, "; ".join(against)[:1024], probe)


def close(equipment: Equipment, target: Target) -> None:
    """Nothing is written to these slots by this route any more."""
    equipment.leave(target.dock, target.name)
    if target.mapped:
        try:
            driver.ipc_close(target.mapped)
        except driver.CudaError as error:
            log.warning("a peer's memory stays mapped: peer=%s %s", target.name, error)


def _close_all(equipment: Equipment, slow: list[tuple[Target, Probe]], kept: Target) -> None:
    for target, _ in slow:
        if target is not kept:
            close(equipment, target)


def _open(equipment: Equipment, landing: Landing, route: Route, serial: int) -> Target:
    """Connect by this route. Raises KVBridgeError."""
    site, boot = landing.site, landing.boot
    dock, card = equipment.dock, site.fabric
    if route == "host":
        assert site.dram is not None
        dock, card = equipment.host or equipment.dock, site.dram
    name = card.name
    if name != boot and not name.startswith(f"{boot}."):  # the staging of another agent is not this one's to give
        raise PeerError("bad_card", f"name: {name}, of {boot}")
    equipment.join(dock, name, card.descriptor)
    base, mapped = card.base, 0
    if route == "direct":
        try:
            base = mapped = _map(equipment, site)
        except BaseException:
            equipment.leave(dock, name)
            raise
    return Target(serial, route, name, base, card.slot_bytes, card.slots, dock, mapped)


def _map(equipment: Equipment, site: Site) -> int:
    """The peer's slots in our address space. Raises KVBridgeError if they are out of reach, or not all there."""
    ours, theirs = equipment.site.device, site.device
    assert ours is not None and theirs is not None
    mapped = open_ipc(driver.Gpu.open(ours.uuid), theirs.payload, "the peer's slots", theirs.uuid)
    base, size_bytes = driver.range_of(mapped)
    needed = site.fabric.slot_bytes * (site.fabric.slots + 1)
    if base != mapped or size_bytes < needed:
        driver.ipc_close(mapped)
        raise PeerError("bad_card", f"slots: the card says {needed} bytes, the peer's allocation has {size_bytes}")
    return mapped


def _probe(
    equipment: Equipment, landing: Landing, target: Target, clock: Callable[[], float]
) -> Generator[Wait, Event, Probe]:
    """Write the pattern some times, out of a lane that no other proof has meanwhile. Raises KVBridgeError.

    A write that is late may read that lane when another proof fills it. It brings one pattern or the other to a sink
    that was refused; the longest unused is taken first, so that it seldom does.
    """
    number = target.dock.lanes.popleft()
    try:
        return (yield from _timed(equipment, landing, target, target.dock.outbound.lane(number), clock))
    finally:
        target.dock.lanes.append(number)


def _timed(
    equipment: Equipment, landing: Landing, target: Target, ours: Span, clock: Callable[[], float]
) -> Generator[Wait, Event, Probe]:
    lane = lane_of(target.base, target.slot_bytes, target.slots, landing.lane)
    size_bytes, seed = min(lane.size_bytes, ours.size_bytes, MOST_BYTES), secrets.randbits(32)
    target.dock.porter.fill(Span(ours.address, size_bytes), pattern(seed, size_bytes))

    def begin(deadline: float) -> Wait:
        if target.mapped:
            return WaitMove(equipment.porter.copy(Span(ours.address, size_bytes), lane))
        fabric = target.dock.fabric
        return WaitWrite(fabric, fabric.write(target.name, ours.address, lane.address, size_bytes, b"", deadline))

    rate = yield from _fastest(size_bytes, begin, clock)
    return Probe(lane=landing.lane, seed=seed, size_bytes=size_bytes, bytes_per_s=rate.bytes_per_s)


def read_rate(
    equipment: Equipment, memory: AttachedPool, clock: Callable[[], float] = time.monotonic
) -> Generator[Wait, Event, Rate]:
    """How fast a peer's memory is read, into a lane that no proof has meanwhile.

    What is read is whatever lies there; nothing else is written by it. Other jobs may make it look slow.
    """
    dock = equipment.dock
    number = dock.lanes.popleft()
    try:
        ours = dock.outbound.lane(number)
        with memory.hold() as regions:
            theirs = max((span_of(each) for each in regions.memories), key=lambda span: span.size_bytes)
        size_bytes = min(ours.size_bytes, theirs.size_bytes, MOST_BYTES)

        def begin(deadline: float) -> Wait:
            source, target = Span(theirs.address, size_bytes), Span(ours.address, size_bytes)
            return WaitMove(equipment.porter.copy(source, target))

        return (yield from _fastest(size_bytes, begin, clock))
    finally:
        dock.lanes.append(number)


def _fastest(
    size_bytes: int, begin: Callable[[float], Wait], clock: Callable[[], float]
) -> Generator[Wait, Event, Rate]:
    """The best of some rounds. `begin` is told by when all must be over. Raises FabricError."""
    deadline, rate = clock() + PROBE_S, Rate(size_bytes, 0.0)
    for i in range(MOST_ROUNDS):
        if (i >= ROUNDS and not is_slow(rate)) or (i and clock() > deadline):
            break
        began = clock()
        ended = yield begin(deadline)
        if isinstance(ended, WriteLate):
            raise FabricError("probe_failed", f"a write of {size_bytes} bytes took more than {PROBE_S} s")
        if isinstance(ended, WriteFailed):
            raise FabricError("probe_failed", ended.reason)
        took_s = max(clock() - began, 1e-9)
        rate = Rate(size_bytes, max(rate.bytes_per_s, size_bytes / took_s))
    return rate
