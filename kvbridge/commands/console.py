"""The console that commands print their tables on, and what they answer under --json."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 200  # columns if it is no terminal, so that grep sees whole lines


def stdout() -> Console:
    """Standard output, as wide as the terminal or as COLUMNS says. Prints text as it is: a key may look like markup."""
    from rich.console import Console  # a command line without it can still say what is missing

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE
    return Console(markup=False, emoji=False, highlight=False, width=width)


def write(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer, indent=2) + "\n")  # ASCII


def write_reasons(code: str, reasons: Sequence[str]) -> None:
    """Say why there is no other answer."""
    write({"code": code, "reasons": reasons})
