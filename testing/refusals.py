"""What raises an error of ours is looked at by its code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def refused(kind: type[Exception], code: str, match: str | None = None) -> Iterator[pytest.ExceptionInfo[Any]]:
    """What is inside is refused with this code, and the reason is like this."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert getattr(caught.value, "code", "") == code
