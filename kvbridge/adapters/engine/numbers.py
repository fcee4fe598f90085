"""Numbers for offers and wants. None comes again: not in this process, nor in one started after it.

The second relies on a clock that is not set back between two starts. A new connection begins with no offers and wants.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count


def numbers() -> Iterator[int]:
    """Begins with the microseconds since 1970, which no engine can count up to from an earlier start."""
    return count(time.time_ns() // 1000)
