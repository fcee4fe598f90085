"""Errors, named by who can fix them; each carries a code shared by logs, metrics and the wire. Pure."""

from __future__ import annotations


class KVBridgeError(Exception):
    """`code` is stable and short, `reasons` are sentences with both values in them."""

    def __init__(self, code: str, *reasons: str) -> None:
        super().__init__("; ".join(reasons) or code)
        self.code = code
        self.reasons = reasons


class OperatorError(KVBridgeError):
    """The operator can fix it: configuration, paths, permissions."""


class EngineError(KVBridgeError):
    """The engine or its adapter said something that cannot be."""


class PeerError(KVBridgeError):
    """Another agent said something that cannot be, or is not there."""


class FabricError(KVBridgeError):
    """The data side failed: a write, a registration, a connection."""
