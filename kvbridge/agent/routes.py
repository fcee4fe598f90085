"""Chooses the route to a sink's slots and proves it: a pattern is written where only probes go, and timed.

Runs on the mover's thread as a generator that waits as the mover's other jobs do (see mover.py). What a route cannot
do shows here, before a request depends on it: UCX, for one, falls back to a tenth of a percent of NVLink in silence.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from kvbridge_proto.peer import Probe, Route

from ..device import driver
from ..device.mapping import open_ipc
from ..device.staging import Span, lane_of
from ..errors import FabricError, KVBridgeError
from ..exchange.route import Routed, Site, options
from ..transport.fabric import WriteFailed, WriteLate
from .equipment import Dock, Equipment, host_name
from .waiting import Event, Wait, WaitMove, WaitWrite

# Slower than this something is wrong with a route: another one is tried first. PCIe and 100 Gb/s are ten times that.
SLOW_BYTES_PER_S = 1e9
MOST_BYTES = 4 << 20
ROUNDS = 4
MOST_ROUNDS = 12  # beside a busy engine a kernel waits a time slice, most times
PROBE_S = 3.0


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a sink may be written to, as its Hello said."""

    boot: str
    site: Site
    lane: int


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A sink's slots by the route that was proved. `name` is what `dock`'s fabric calls the peer."""

    route: Route
    name: str
    base: int
    slot_bytes: int
    slots: int
    dock: Dock
    mapped: int = 0  # direct: where the peer's allocation is mapped here

    def slot(self, index: int, size_bytes: int) -> Span:
        return Span(self.base + index * self.slot_bytes, size_bytes)


def pattern(seed: int, size_bytes: int) -> bytes:
    """What a probe consists of, the same on both sides."""
    return random.Random(seed).randbytes(size_bytes)


def prove(equipment: Equipment, landing: Landing) -> Generator[Wait, Event, tuple[Target, Routed]]:
    """The best route that works. Raises FabricError `no_route` with what stood against each."""
    against: list[str] = []
    slow: list[tuple[float, Target, Probe]] = []
    for route, reason in options(equipment.site, landing.site):
        if reason:
            against.append(reason)
            continue
        try:
            target = _open(equipment, landing, route)
        except KVBridgeError as error:
            against.append(f"{route}: {error}")
            continue
        try:
            probe = yield from _probe(equipment, landing, target)
        except KVBridgeError as error:
            close(target, [kept for _, kept, _ in slow])
            against.append(f"{route}: {error}")
            continue
        if probe.bytes_per_s >= SLOW_BYTES_PER_S:
            for _, other, _ in slow:
                close(other, [target])
            return target, Routed(route, "; ".join(against)[:1024], probe)
        against.append(f"{route}: {probe.bytes_per_s / 1e9:.2f} GB/s measured, too slow to be right")
        slow.append((probe.bytes_per_s, target, probe))
    if not slow:
        raise FabricError("no_route", *against)
    fastest = max(rate for rate, _, _ in slow)
    _, chosen, probe = next(each for each in slow if each[0] * 4 >= fastest)  # a busy GPU makes all of them slow
    for _, other, _ in slow:
        if other is not chosen:
            close(other, [chosen])
    return chosen, Routed(chosen.route, "; ".join(against)[:1024], probe)


def close(target: Target, kept: Sequence[Target] = ()) -> None:
    """Nothing is written to these slots by this route any more; `kept` are the peer's others."""
    if not any(other.dock is target.dock and other.name == target.name for other in kept):
        target.dock.fabric.disconnect(target.name)
    if target.mapped:
        driver.ipc_close(target.mapped)


def _open(equipment: Equipment, landing: Landing, route: Route) -> Target:
    """Connect by this route. Raises KVBridgeError."""
    site, boot = landing.site, landing.boot
    dock, card, name = equipment.dock, site.fabric, boot
    if route == "host":
        assert site.dram is not None
        dock, card = equipment.host or equipment.dock, site.dram
        name = host_name(boot) if site.host is not None else boot
    dock.fabric.connect(name, card.descriptor)
    base, mapped = card.base, 0
    if route == "direct":
        try:
            base = mapped = _map(equipment, site)
        except KVBridgeError:
            dock.fabric.disconnect(name)
            raise
    return Target(route, name, base, card.slot_bytes, card.slots, dock, mapped)


def _map(equipment: Equipment, site: Site) -> int:
    """The peer's slots in our address space. Raises KVBridgeError if our GPU cannot reach theirs."""
    ours, theirs = equipment.site.device, site.device
    assert ours is not None and theirs is not None
    return open_ipc(driver.Gpu.open(ours.uuid), theirs.payload, "the peer's slots", theirs.uuid)


def _probe(equipment: Equipment, landing: Landing, target: Target) -> Generator[Wait, Event, Probe]:
    """Write the pattern some times. Raises KVBridgeError."""
    lane = lane_of(target.base, target.slot_bytes, target.slots, landing.lane)
    ours = target.dock.outbound.lane(0)
    size_bytes, seed = min(lane.size_bytes, ours.size_bytes, MOST_BYTES), secrets.randbits(32)
    equipment.fill(target.dock, Span(ours.address, size_bytes), pattern(seed, size_bytes))
    best_s = float("inf")
    for i in range(MOST_ROUNDS):
        if i >= ROUNDS and size_bytes >= best_s * SLOW_BYTES_PER_S:
            break
        began = time.perf_counter()
        if target.mapped:
            ended = yield WaitMove(equipment.porter.copy(Span(ours.address, size_bytes), lane))
        else:
            deadline = time.monotonic() + PROBE_S
            fabric = target.dock.fabric
            ended = yield WaitWrite(
                fabric, fabric.write(target.name, ours.address, lane.address, size_bytes, b"", deadline)
            )
        best_s = min(best_s, time.perf_counter() - began)
        if isinstance(ended, WriteLate):
            raise FabricError("probe_failed", f"a write of {size_bytes} bytes took more than {PROBE_S} s")
        if isinstance(ended, WriteFailed):
            raise FabricError("probe_failed", ended.reason)
    return Probe(seed=seed, size_bytes=size_bytes, bytes_per_s=size_bytes / best_s)
