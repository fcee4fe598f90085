"""What a synthetic engine tells its agent. Pure. `changes` replaces any field."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from kvbridge_proto.common import Blocks, Rank
from kvbridge_proto.engine import Directory, Offer, Want

PATIENCE_S = 60.0


def directory_of(addresses: Sequence[str], tp_size: int) -> Directory:
    """The agents of all ranks, one pipeline stage after another."""
    ranks = (Rank(tp_rank=i % tp_size, pp_rank=i // tp_size, address=each) for i, each in enumerate(addresses))
    return Directory(ranks=tuple(ranks))


def number_of(request: str) -> int:
    """The number of its offer or want. A synthetic engine gives no two requests one name."""
    return int.from_bytes(blake2b(request.encode(), digest_size=7).digest(), "big") + 1


def offer_of(request: str, tokens: int, ids: Sequence[int], *, first: int = 0, **changes: Any) -> Offer:
    """The first `tokens` tokens; `ids` are the request's blocks from block `first` on."""
    blocks = (Blocks(0, first, tuple(ids)),) if ids else ()
    fields: dict[str, Any] = {"number": number_of(request), "rendezvous": request, "request": request}
    fields |= {"tokens": tokens, "blocks": blocks, "is_last": True, "hold_s": PATIENCE_S}
    return Offer(**fields | changes)


def want_of(request: str, sender: str, tokens: range, table: Sequence[int], block_tokens: int, **changes: Any) -> Want:
    """`table` has the request's blocks from the first on. Those that hold `tokens` are wanted."""
    first, end = tokens.start // block_tokens, -(-tokens.stop // block_tokens)
    fields: dict[str, Any] = {
        "number": number_of(request),
        "request": request,
        "rendezvous": request,
        "sender": sender,
        "first_token": tokens.start,
        "end_token": tokens.stop,
        "blocks": (Blocks(0, first, tuple(table[first:end])),),
        "deadline_s": PATIENCE_S,
    }
    return Want(**fields | changes)
