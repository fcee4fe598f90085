"""Measures how fast a route is, before a request depends on it: a few megabytes, several times."""

from __future__ import annotations

from collections.abc import Callable, Generator

from ...errors import FabricError
from ...exchange.route import Rate
from ...transport.fabric import WriteFailed, WriteLate
from ..awaits import Event, Wait

# A slower route has something wrong with it: others are tried first. PCIe and 100 Gb/s are ten times as fast.
SLOW_BYTES_PER_S = 1e9
SLOW_S = 0.001  # a shorter transfer is too small to tell
MOST_BYTES = 4 << 20
ROUNDS = 4
MOST_ROUNDS = 12  # beside a busy engine most kernels wait for a time slice
PROBE_S = 1.5  # for all rounds of a route: three routes must fit into a handshake's time limit


def is_slow(rate: Rate) -> bool:
    """Whether a transfer of this size at this rate means that something is wrong."""
    return rate.bytes_per_s < SLOW_BYTES_PER_S and rate.size_bytes > rate.bytes_per_s * SLOW_S


def is_too_small(rate: Rate) -> bool:
    """Whether so few bytes say little of how fast the route is."""
    return rate.size_bytes <= SLOW_BYTES_PER_S * SLOW_S


def fastest(
    size_bytes: int, begin: Callable[[float], Wait], clock: Callable[[], float]
) -> Generator[Wait, Event, Rate]:
    """The best rate of several rounds. `begin` gets the deadline of all rounds. Raises FabricError."""
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
