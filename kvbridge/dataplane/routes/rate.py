"""How fast a route is: measured before a request depends on it, a few megabytes some times over."""

from __future__ import annotations

from collections.abc import Callable, Generator

from ...errors import FabricError
from ...exchange.route import Rate
from ...transport.fabric import WriteFailed, WriteLate
from ..awaits import Event, Wait

# Slower than this something is wrong with a route: another one is tried first. PCIe and 100 Gb/s are ten times that.
SLOW_BYTES_PER_S = 1e9
SLOW_S = 0.001  # what took less was too small to tell
MOST_BYTES = 4 << 20
ROUNDS = 4
MOST_ROUNDS = 12  # beside a busy engine a kernel waits a time slice, most times
PROBE_S = 1.5  # for all rounds of a route: three routes take less than a handshake may


def is_slow(rate: Rate) -> bool:
    """Whether so much at such a rate means that something is wrong."""
    return rate.bytes_per_s < SLOW_BYTES_PER_S and rate.size_bytes > rate.bytes_per_s * SLOW_S


def fastest(
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
