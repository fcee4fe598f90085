"""The console that commands print their tables on, and what they answer under --json."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..oneline import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

WIDE = 200  # columns if it is no terminal, so that grep sees whole lines


def stdout() -> Console:
    """Standard output, as wide as the terminal or as COLUMNS says. Prints text as it is: a key may look like markup."""
    from rich.console import Console  # a command line without it can still say what is missing

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE
    return Console(markup=False, emoji=False, highlight=False, width=width)


def text_of(cell: str, style: str = "") -> Text:
    """Plain text: peers choose their names, which may be rich's markup or a terminal's commands."""
    from rich.text import Text

    return Text(plain(cell), style=style)


def add(table: Table, *cells: str, style: str = "") -> None:
    table.add_row(*map(text_of, cells), style=style)


def shown(value: Any) -> str:
    """The value of an option, as a flag takes it."""
    match value:
        case None:
            return "by device"
        case bool():
            return str(value).lower()
        case tuple():
            return ",".join(map(str, value)) or "empty"
    return str(value) or "empty"


def write(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer, indent=2) + "\n")  # ASCII


def write_reasons(code: str, reasons: Sequence[str]) -> None:
    """Say why there is no other answer."""
    write({"code": code, "reasons": reasons})
