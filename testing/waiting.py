"""Waits that end by a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from testing.proc import Stopwatch


def wait_for(
    claim: Callable[..., Any], seconds: float = 120.0, why: Callable[[], str] = lambda: "not so", every_s: float = 0.05
) -> None:
    """Until it is so. `why` says what is wrong if that is not soon enough."""
    end = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < end, f"within {seconds} s: {why()}"
        time.sleep(every_s)


def soon(claim: Callable[..., Any], seconds: float, why: Callable[[], str] = lambda: "not so") -> None:
    """Like `wait_for`, where the time counts: a busy machine does not use it up."""
    watch, is_over = Stopwatch(), False
    while not claim():
        assert not is_over, f"within {seconds} s: {why()}"
        time.sleep(0.02)
        is_over = watch.seconds() > seconds  # then it is looked at once more
