"""`kvbridge config show`: every option of an agent, its value, and where that came from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from ..config import FILES_OF_KEYS, Given, resolve
from ..errors import KVBridgeError
from ..options import AgentConfig, defaults
from .console import add, shown, stdout, write

NOT_SHOWN = "(not shown: no such file, so it may be a key itself)"


def show(path: str | None, flags: Mapping[str, str | None], as_json: bool) -> None:
    """Print the options that an agent would have with this file, these flags and this environment.

    Raises OperatorError if it would not start with them. With `as_json` stdout has the code and reasons too.
    """
    try:
        config, given = resolve(path, flags)
    except KVBridgeError as error:
        if as_json:
            write({"code": error.code, "reasons": error.reasons, "options": {}})
        raise
    if as_json:
        write({"code": "", "reasons": [], "options": described(config, given)})
    else:
        stdout().print(_table(config, given))


def described(config: AgentConfig, given: Mapping[str, Given]) -> dict[str, dict[str, Any]]:
    """By option: its value, its default, the value's origin, and the file, variable or flag that set it."""
    return {
        name: {
            "value": _value(config, name),
            "default": default,
            "origin": given[name].origin,
            "place": given[name].place,
        }
        for name, default in defaults().items()
    }


def _value(config: AgentConfig, name: str) -> Any:
    """What may be shown of it: a `key` that was set to the key itself must not appear on a screen."""
    value = getattr(config, name)
    return NOT_SHOWN if name in FILES_OF_KEYS and value and not os.path.exists(value) else value


def _table(config: AgentConfig, given: Mapping[str, Given]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("option", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", overflow="fold")
    for name, each in described(config, given).items():
        is_default = each["origin"] == "default"
        row = (name, shown(each["value"]), "default" if is_default else each["place"])
        add(table, *row, style="dim" if is_default else "")
    return table
