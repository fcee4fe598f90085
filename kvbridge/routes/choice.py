"""Which routes two agents may take. Proves those through slots: a pattern is written where only probes go, and timed.

Runs on the data plane's thread, as one of its jobs (attached.py). A route that does not work shows here, before a
request depends on it. UCX, for example, silently falls back to a tenth of a percent of NVLink's rate.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Generator, Mapping

from kvbridge_proto.peer import Probe, Route

from ..dataplane.attached import Event, Wait
from ..dataplane.resources import Resources
from ..device.staging import Span, lane_of
from ..errors import FabricError
from ..exchange.route import Routed, Site
from ..values import Value
from .pull import job as pull
from .rate import MOST_PROBE_BYTES, PROBE_S, fastest, growing, is_slow
from .slots.slot_routes import DirectRoute, HostRoute, Landing, NixlRoute, SlotRoute, Target

log = logging.getLogger("kvbridge.routes")

SLOT_ROUTES: Mapping[Route, SlotRoute] = {each.name: each for each in (DirectRoute(), NixlRoute(), HostRoute())}
READ_ROUTES: Mapping[Route, Callable[[Site, Site], str]] = {"pull": pull.why_not}  # the receiver proves them
NOT_CONNECTED = 0  # the serial of a route that nothing is written over


def candidates(sender: Site, receiver: Site) -> list[tuple[Route, str]]:
    """Every route in the sender's order, with the reason against it as far as two cards tell, "" if there is none."""
    return [(route, _why_not(route, sender, receiver)) for route in sender.routes]


def may_be_written(sender: Site, receiver: Site) -> bool:
    """Whether a route to a receiver's slots may work, as far as two cards tell."""
    return any(route in SLOT_ROUTES and not reason for route, reason in candidates(sender, receiver))


def to_be_read(sender: Site, receiver: Site) -> Routed | None:
    """The best route that two cards allow, if it is one that the receiver proves. Otherwise None."""
    best = next((route for route, reason in candidates(sender, receiver) if not reason), None)
    return None if best is None or best not in READ_ROUTES else Routed(best)


def _why_not(route: Route, sender: Site, receiver: Site) -> str:
    if route not in receiver.routes:
        return f"{route}: the receiver allows {', '.join(receiver.routes)} (routes)"
    if route in READ_ROUTES:
        reason = READ_ROUTES[route](sender, receiver)
    else:  # unknown until both sides have slots
        has_slots = sender.has_slots and receiver.has_slots
        reason = SLOT_ROUTES[route].why_not(sender, receiver) if has_slots else ""
    return f"{route}: {reason}" if reason else ""


class Connected(Value):
    """The route that was proved, and the serial under which to give it up."""

    routed: Routed
    serial: int


def pattern(seed: int, size_bytes: int) -> bytes:
    """The bytes of a probe, the same on both sides (PROTOCOL.md)."""
    return hashlib.shake_128(seed.to_bytes(8, "little")).digest(size_bytes)


def prove(
    resources: Resources, landing: Landing, serial: int = 0, clock: Callable[[], float] = time.monotonic
) -> Generator[Wait, Event, tuple[Target, Routed]]:
    """The best route that works. Raises FabricError `no_route` with the reason against each."""
    reasons: list[str] = []
    slow: list[tuple[Target, Probe]] = []
    tried = candidates(resources.site, landing.site)
    first_s = PROBE_S / max(1, sum(route in SLOT_ROUTES and not reason for route, reason in tried))
    for route, reason in tried:
        if reason or route not in SLOT_ROUTES:  # `pull`, which the receiver proves: it ranks lower, or did not work
            reasons.append(reason)
            continue
        target = None
        try:
            target = SLOT_ROUTES[route].open(resources, landing, serial)
            probe = yield from _probe(landing, target, clock, first_s)
        except Exception as error:  # the peer's card can hold anything; other routes may still work
            log.info("route does not work: incarnation=%s route=%s %s", landing.incarnation, route, error)
            reasons.append(f"{route}: {error or type(error).__name__}")
            if target is not None:
                target.close()
            continue
        routed = Routed(route, "; ".join(reasons)[:1024], probe)
        if routed.rate is None or not is_slow(routed.rate):
            _close_all(slow, target)
            return target, routed
        reasons.append(f"{route}: {probe.bytes_per_s / 1e9:.2f} GB/s measured, too slow to be right")
        slow.append((target, probe))
    if not slow:
        raise FabricError("no_route", *reasons)
    best_rate = max(probe.bytes_per_s for _, probe in slow)
    # A busy GPU makes all of them slow: then take the first in our order that is not far behind.
    chosen, probe = next(each for each in slow if each[1].bytes_per_s * 4 >= best_rate)
    _close_all(slow, chosen)
    return chosen, Routed(chosen.route, "; ".join(reasons)[:1024], probe)


def is_proved(resources: Resources, route: Route, lane: int, probe: Probe) -> bool:
    """Whether our lane holds the pattern that the sender says it wrote by this route through slots."""
    endpoint = SLOT_ROUTES[route].endpoint(resources)
    ours = endpoint.receive_slots.lane(lane)
    if not 0 < probe.size_bytes <= min(ours.size_bytes, MOST_PROBE_BYTES):
        return False
    found = endpoint.copier.read(Span(ours.address, probe.size_bytes))
    return found == pattern(probe.seed, probe.size_bytes)


def _close_all(slow: list[tuple[Target, Probe]], kept: Target) -> None:
    for target, _ in slow:
        if target is not kept:
            target.close()


def _probe(
    landing: Landing, target: Target, clock: Callable[[], float], first_s: float
) -> Generator[Wait, Event, Probe]:
    """Write the pattern several times, from a lane that no other proof uses meanwhile. Raises KVBridgeError.

    What finished counts, even if a longer write is late: it brings the same bytes.

    A late write may still read that lane when another proof fills it, and bring either pattern to a receiver whose
    proof is over. The lane unused for longest is taken first, so this is rare.
    """
    endpoint = target.endpoint
    source = endpoint.source
    number = source.lanes.popleft()
    try:
        ours = source.staging.lane(number)
        lane = lane_of(target.base, target.slot_bytes, target.slots, landing.lane)
        size_bytes, seed = min(lane.size_bytes, ours.size_bytes, MOST_PROBE_BYTES), secrets.randbits(32)
        endpoint.copier.fill(Span(ours.address, size_bytes), pattern(seed, size_bytes))
        begin = lambda size, deadline: target.probe(ours, Span(lane.address, size), deadline)  # noqa: E731
        rate = yield from fastest(growing(size_bytes), begin, clock, first_s)
        return Probe(lane=landing.lane, seed=seed, size_bytes=rate.size_bytes, bytes_per_s=rate.bytes_per_s)
    finally:
        source.lanes.append(number)
