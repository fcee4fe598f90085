"""Errors, named by who can fix them; each carries a code shared by logs, metrics and the wire. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KVBridgeError(Exception):
    """`code` is stable and short, `reasons` are sentences with both values in them."""

    def __init__(self, code: str, *reasons: str) -> None:
        super().__init__("; ".join(reasons) or code)
        self.code = code
        self.reasons = reasons


class OperatorError(KVBridgeError):
    """The operator can fix it: configuration, paths, permissions."""


class EngineError(KVBridgeError):
    """The engine or its adapter sent something invalid."""


class PeerError(KVBridgeError):
    """Another agent sent something invalid, or cannot be reached."""


class FabricError(KVBridgeError):
    """The data side failed: a write, a registration, a connection."""


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A hint for an unknown name: the nearest known one, or all of them. `prefix` is common to all."""
    bare = {each.removeprefix(prefix).lower(): each for each in known}
    nearest = difflib.get_close_matches(name.removeprefix(prefix).lower(), bare, n=1)
    return f"did you mean {bare[nearest[0]]}?" if nearest else f"there are {', '.join(bare.values())}"
