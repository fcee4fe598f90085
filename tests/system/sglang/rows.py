"""KV rows that the servers left in a folder (see plugin.py); the demo keeps and compares them in the same way."""

from __future__ import annotations

from kvbridge.demo.rows import Rows, difference, load

__all__ = ["Rows", "assert_carried", "load"]


def assert_carried(given: Rows, taken: Rows) -> None:
    """`taken` is `given` in its own codec, bit for bit."""
    assert not (wrong := difference(given, taken, len(next(iter(given.rows.values()))))), wrong
