"""Hands the scheduler's queue from the plugin to the manager that SGLang is about to make."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

TESTED = "0.5.23"  # the SGLang version that this adapter was tested with

# The queue whose manager is being made. SGLang passes its managers only addresses, and we need the tensors.
building: ContextVar[Any] = ContextVar("building", default=None)
