"""KV rows that the servers left in a folder (see plugin.py). The demo keeps and compares them in the same way."""

from __future__ import annotations

from demo.rows import SavedRows, difference, load

__all__ = ["SavedRows", "assert_carried", "load"]


def assert_carried(given: SavedRows, taken: SavedRows) -> None:
    """`taken` is `given` in its own codec, bit for bit."""
    assert not (wrong := difference(given, taken, len(next(iter(given.rows.values()))))), wrong
