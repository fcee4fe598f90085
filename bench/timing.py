"""Times of repeated calls, and what is said of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any


def seconds_of(act: Callable[[int], object], rounds: int, warm: int = 0) -> list[float]:
    """The seconds of each call. The first `warm` do not count."""
    found = []
    for i in range(warm + rounds):
        began = time.perf_counter()
        act(i)
        found.append(time.perf_counter() - began)
    return found[warm:]


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value such that at least `share` of all values are no larger."""
    return sorted(values)[max(0, math.ceil(round(1000 * share) * len(values) / 1000) - 1)]


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Count, quantiles and extremes of seconds."""
    return {
        "n": len(seconds),
        "min_s": min(seconds),
        "p50_s": quantile(seconds, 0.5),
        "p90_s": quantile(seconds, 0.9),
        "p99_s": quantile(seconds, 0.99),
        "max_s": max(seconds),
    }


def first_and_rest(ms: Sequence[float]) -> dict[str, float]:
    """The first apart, which meets the peer; the median and the least of the others."""
    first, *rest = ms
    return {"first_ms": round(first, 2), "median_ms": round(statistics.median(rest), 2), "min_ms": round(min(rest), 2)}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Of the medians, and of the least."""
    return {
        "median": round(statistics.median(ours) / statistics.median(theirs), 3),
        "min": round(min(ours) / min(theirs), 3),
    }
