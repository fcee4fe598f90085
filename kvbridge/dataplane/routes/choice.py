"""Chooses the route to a receiver's slots and proves it: a pattern is written where only probes go, and timed.

Runs on the data plane's thread as a generator that waits as the data plane's other jobs do (see data_plane.py). What a
route cannot do shows here, before a request depends on it: UCX, for one, falls back to a tenth of a percent of NVLink
in silence.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

from kvbridge_proto.peer import Probe, Route

from ...device.staging import Span, lane_of
from ...errors import FabricError
from ...exchange.route import Routed, Site
from ..awaits import Event, Wait
from ..resources import PULL, Resources
from . import pull
from .direct import DirectRoute
from .host import HostRoute
from .nixl import NixlRoute
from .rate import MOST_BYTES, fastest, is_slow
from .staged import Landing, SlotRoute, Target

log = logging.getLogger("kvbridge.routes")

STAGED: Mapping[Route, SlotRoute] = {"direct": DirectRoute(), "nixl": NixlRoute(), "host": HostRoute()}
NOT_CONNECTED = 0  # the serial of a route that nothing is written by


def options(ours: Site, theirs: Site) -> list[tuple[Route, str]]:
    """Every route in our order, with what stands against it as far as two cards can tell; nothing if it may be."""
    return [(route, _against(route, ours, theirs)) for route in ours.routes]


def may_be_written(ours: Site, theirs: Site) -> bool:
    """Whether a route to a receiver's slots may do, as far as two cards can tell."""
    return any(route in STAGED and not reason for route, reason in options(ours, theirs))


def to_be_read(ours: Site, theirs: Site) -> Routed | None:
    """The way that is not the sender's to prove, if it is the best that two cards allow: its receiver reads."""
    best = next((route for route, reason in options(ours, theirs) if not reason), None)
    return Routed(PULL) if best == PULL else None


def _against(route: Route, ours: Site, theirs: Site) -> str:
    if route not in theirs.routes:
        return f"{route}: the peer allows {', '.join(theirs.routes)}"
    if route == PULL:
        reason = pull.against(ours, theirs)
    else:  # before there are slots on both sides nobody can tell
        reason = STAGED[route].against(ours, theirs) if ours.has_slots and theirs.has_slots else ""
    return f"{route}: {reason}" if reason else ""


@dataclass(frozen=True, slots=True)
class Connected:
    """The route that was proved, under a serial by which it is given up."""

    routed: Routed
    serial: int


def pattern(seed: int, size_bytes: int) -> bytes:
    """What a probe consists of, the same on both sides (PROTOCOL.md)."""
    return hashlib.shake_128(seed.to_bytes(8, "little")).digest(size_bytes)


def prove(
    equipment: Resources, landing: Landing, serial: int = 0, clock: Callable[[], float] = time.monotonic
) -> Generator[Wait, Event, tuple[Target, Routed]]:
    """The best route that works. Raises FabricError `no_route` with what stood against each."""
    against: list[str] = []
    slow: list[tuple[Target, Probe]] = []
    for route, reason in options(equipment.site, landing.site):
        if reason or route not in STAGED:  # the receiver's to prove; here it stood behind others, or did not work
            against.append(reason)
            continue
        target = None
        try:
            target = STAGED[route].open(equipment, landing, serial)
            probe = yield from _probe(landing, target, clock)
        except Exception as error:  # the peer's card can be anything; the other routes may still do
            log.info("route does not work: incarnation=%s route=%s %s", landing.incarnation, route, error)
            against.append(f"{route}: {error or type(error).__name__}")
            if target is not None:
                target.close()
            continue
        routed = Routed(route, "; ".join(against)[:1024], probe)
        if routed.rate is None or not is_slow(routed.rate):
            _close_all(slow, target)
            return target, routed
        against.append(f"{route}: {probe.bytes_per_s / 1e9:.2f} GB/s measured, too slow to be right")
        slow.append((target, probe))
    if not slow:
        raise FabricError("no_route", *against)
    fastest = max(probe.bytes_per_s for _, probe in slow)
    # A busy GPU makes all of them slow: then the order counts, unless one is far behind.
    chosen, probe = next(each for each in slow if each[1].bytes_per_s * 4 >= fastest)
    _close_all(slow, chosen)
    return chosen, Routed(chosen.route, "; ".join(against)[:1024], probe)


def _close_all(slow: list[tuple[Target, Probe]], kept: Target) -> None:
    for target, _ in slow:
        if target is not kept:
            target.close()


def _probe(landing: Landing, target: Target, clock: Callable[[], float]) -> Generator[Wait, Event, Probe]:
    """Write the pattern some times, out of a lane that no other proof has meanwhile. Raises KVBridgeError.

    A write that is late may read that lane when another proof fills it. It brings one pattern or the other to a
    receiver that was refused; the longest unused is taken first, so that it seldom does.
    """
    endpoint = target.endpoint
    number = endpoint.lanes.popleft()
    try:
        ours = endpoint.send_slots.lane(number)
        lane = lane_of(target.base, target.slot_bytes, target.slots, landing.lane)
        size_bytes, seed = min(lane.size_bytes, ours.size_bytes, MOST_BYTES), secrets.randbits(32)
        endpoint.copier.fill(Span(ours.address, size_bytes), pattern(seed, size_bytes))
        written = Span(lane.address, size_bytes)
        rate = yield from fastest(size_bytes, lambda deadline: target.probe(ours, written, deadline), clock)
        return Probe(lane=landing.lane, seed=seed, size_bytes=size_bytes, bytes_per_s=rate.bytes_per_s)
    finally:
        endpoint.lanes.append(number)
