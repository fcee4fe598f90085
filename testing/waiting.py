"""Waits that end by a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_for(
    claim: Callable[..., Any], seconds: float = 120.0, why: Callable[[], str] = lambda: "not so", every_s: float = 0.05
) -> None:
    """Until it is so. `why` says what is wrong if that is not soon enough."""
    end = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < end, f"within {seconds} s: {why()}"
        time.sleep(every_s)
