"""The console that commands print their tables on."""

from __future__ import annotations

import os
import sys

from rich.console import Console

WIDE = 200  # columns if it is no terminal, so that grep sees whole lines


def stdout() -> Console:
    """Standard output, as wide as the terminal or as COLUMNS says. Prints text as it is: a key may look like markup."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE
    return Console(markup=False, emoji=False, highlight=False, width=width)
