"""Writes what a command answers under --json."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any


def write(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer, indent=2) + "\n")  # ASCII


def write_reasons(code: str, reasons: Sequence[str]) -> None:
    """Say why there is no other answer."""
    write({"code": code, "reasons": reasons})
