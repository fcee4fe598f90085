"""Hands the scheduler's queue from the plugin to what SGLang calls without it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

NAME = "kvbridge"  # of the backend
TESTED = "0.5.23"  # the SGLang version that this adapter was tested with

# The queue whose manager is being made. SGLang passes its managers only addresses, and we need the tensors.
building: ContextVar[Any] = ContextVar("building", default=None)

# The decode queue whose requests get their replicas. SGLang asks by a static method.
resolving: ContextVar[Any] = ContextVar("resolving", default=None)
