"""Records that several messages share. Pure."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from .pool import Count, Name

MAX_BLOCKS = 1 << 20
MAX_RANKS = 1024  # of one engine: an agent that fetches from it has a link to each
BlockId = Annotated[int, Meta(ge=0, lt=1 << 31)]
RendezvousId = Annotated[str, Meta(min_length=1, max_length=256)]
Address = Annotated[str, Meta(min_length=1, max_length=256)]
Incarnation = Annotated[str, Meta(max_length=64)]
AttachmentName = Annotated[str, Meta(max_length=256)]
DAY_S = 86400
Seconds = Annotated[float, Meta(ge=0, le=DAY_S)]
Reasons = Annotated[tuple[Annotated[str, Meta(max_length=1024)], ...], Meta(max_length=64)]
Code = Annotated[str, Meta(max_length=64)]
# One more for every PREFIX_TOKENS tokens: the digest of the first so many of a request, and of all else that decides
# their KV. Each engine computes it from its own request (kvbridge/adapters/engine/prompts.py).
PREFIX_TOKENS = 64
MOST_PREFIXES = 4096
Prefixes = Annotated[tuple[Annotated[bytes, Meta(min_length=20, max_length=20)], ...], Meta(max_length=MOST_PREFIXES)]
# As in W3C's Trace Context, or "". A malformed one counts as "": a trace must not cost a request.
Traceparent = Annotated[str, Meta(max_length=55)]


class VersionRange(Struct, frozen=True, array_like=True):
    """Protocol versions that a side speaks, both ends included."""

    oldest: Annotated[int, Meta(ge=1, lt=1 << 16)]
    newest: Annotated[int, Meta(ge=1, lt=1 << 16)]


OURS = VersionRange(1, 1)


def negotiate(ours: VersionRange, theirs: VersionRange) -> int | None:
    """The newest version both speak, or None."""
    version = min(ours.newest, theirs.newest)
    return version if version >= max(ours.oldest, theirs.oldest) else None


class Blocks(Struct, frozen=True, array_like=True):
    """A piece of one group's block table: `ids` are entries `first`, `first`+1, ... of the request on this rank.

    Entry i holds tokens i * `block_tokens` to (i + 1) * `block_tokens` of those that this rank keeps, counted without
    gaps. Without context parallelism these are the request's tokens. With it they are the rank's own: rank 1 of 2 with
    an interleave of 1 keeps tokens 1, 3, 5, ...; its blocks of 16 hold tokens 1, 3, ..., 31 in entry 0 and
    33, 35, ..., 63 in entry 1. Entries of states always count all tokens: every rank has its heads of a state whole.
    """

    group: Annotated[int, Meta(ge=0, lt=256)]
    first: Count
    ids: Annotated[tuple[BlockId, ...], Meta(max_length=MAX_BLOCKS)]


class AgentCard(Struct, frozen=True, kw_only=True):
    """One start of one agent. `incarnation` is new at every start and part of its fabric name."""

    name: Name
    incarnation: Incarnation
    address: Address
    version: Name


def attachment_name(agent: AgentCard, epoch: int) -> str:
    """Names one attachment of an engine to one start of an agent. An agent counts its attachments by `epoch`."""
    return f"{agent.incarnation}/{epoch}"


class Rank(Struct, frozen=True, kw_only=True):
    """Where one rank of an engine has its agent."""

    tp_rank: Count
    pp_rank: Count
    address: Address


Ranks = Annotated[tuple[Rank, ...], Meta(max_length=MAX_RANKS)]
