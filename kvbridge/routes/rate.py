"""Measures how fast a route is, before a request depends on it: a few megabytes, as often as there is time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from ..dataplane.attached import Event, Wait
from ..errors import FabricError
from ..exchange.route import Rate
from ..transport.fabric import WriteFailed, WriteLate

# A slower route has something wrong with it: others are tried first. PCIe and 100 Gb/s are ten times as fast.
SLOW_BYTES_PER_S = 1e9
SLOW_S = 0.001  # a shorter transfer is too small to tell
MOST_PROBE_BYTES = 4 << 20
FIRST_PROBE_BYTES = 64 << 10  # a long or lossy path carries so much in time, and perhaps no more
GROWTH = 4
ROUNDS = 4
MOST_ROUNDS = 12  # beside a busy engine most kernels wait for a time slice
# The first write of all routes together, on connections that it also sets up, and then all other rounds of a route. The
# receiver waits `connect_s`, 5 s, for both and for the link, which takes 0.8 s on a path of 160 ms.
PROBE_S, ROUNDS_S = 3.0, 0.25


def is_slow(rate: Rate) -> bool:
    """Whether a transfer of this size at this rate means that something is wrong."""
    return rate.bytes_per_s < SLOW_BYTES_PER_S and rate.size_bytes > rate.bytes_per_s * SLOW_S


def is_too_small(rate: Rate) -> bool:
    """Whether so few bytes say little of how fast the route is."""
    return rate.size_bytes <= SLOW_BYTES_PER_S * SLOW_S


def growing(size_bytes: int) -> list[int]:
    """The sizes of a proof's writes. The first two are small: the second is not slowed down by a new connection."""
    sizes = [size_bytes]
    while sizes[0] > FIRST_PROBE_BYTES:
        sizes.insert(0, max(FIRST_PROBE_BYTES, sizes[0] // GROWTH))
    return sizes if len(sizes) == 1 else [sizes[0], *sizes]


def fastest(
    sizes: Sequence[int], begin: Callable[[int, float], Wait], clock: Callable[[], float], first_s: float = PROBE_S
) -> Generator[Wait, Event, Rate]:
    """The best rate at the largest of `sizes` that finished; the last of them gets several rounds.

    None is begun that would not fit into ROUNDS_S after the first. `begin` gets a size and a deadline. Raises
    FabricError if a round fails, or the first takes longer than `first_s`.
    """
    ends = deadline = clock() + first_s
    rate, took_s = Rate(sizes[0], 0.0), 0.0
    for i, size_bytes in enumerate([*sizes[:-1], *[sizes[-1]] * MOST_ROUNDS]):
        needed_s = took_s * size_bytes / rate.size_bytes if i > 1 else 0.0  # the first may have set up a connection
        if (i >= len(sizes) - 1 + ROUNDS and not is_slow(rate)) or clock() + needed_s > ends:
            break
        began = clock()
        ended = yield begin(size_bytes, deadline)
        if isinstance(ended, WriteFailed):
            raise FabricError("probe_failed", ended.reason)
        if isinstance(ended, WriteLate) and not i:
            raise FabricError("probe_failed", f"a write of {size_bytes} bytes took more than {first_s:g} s")
        if isinstance(ended, WriteLate):
            break
        took_s = max(clock() - began, 1e-9)
        best = rate.bytes_per_s if size_bytes == rate.size_bytes else 0.0
        rate = Rate(size_bytes, max(best, size_bytes / took_s))
        if not i:
            ends, deadline = clock() + ROUNDS_S, deadline + ROUNDS_S  # one that takes longer is not yet late
    return rate
