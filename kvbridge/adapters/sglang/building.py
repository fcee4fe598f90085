"""What the plugin leaves for the manager that SGLang is about to make."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

TESTED = "0.5.23"  # SGLang's version

# The scheduler's queue whose manager is being made: managers are told addresses, and we describe tensors.
building: ContextVar[Any] = ContextVar("building", default=None)
