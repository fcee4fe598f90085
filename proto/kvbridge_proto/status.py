"""What `kvbridge status`, `plan` and `trace` ask over the unix socket, and what they are told. Pure."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from .pool import Count, Name, Pool
from .words import Agent, Seconds

MAX_ENTRIES = 2048  # of a trace, in one answer
MAX_ERRORS = 16
MAX_ERROR_TEXT = 512


class StatusQuery(Struct, frozen=True, kw_only=True, tag="status?"):
    """Answered by Status on the same connection; needs no Attach."""


class Traits(Struct, frozen=True, kw_only=True):
    """What may differ between two engines of one model, and is converted then. Several values are joined by "_"."""

    engine: Name
    tp_size: Count
    pp_size: Count
    cp_size: Count
    block_tokens: Name
    dtype: Name


class EngineStatus(Struct, frozen=True, kw_only=True):
    """Engines of one `model_key` are of one model."""

    engine: Name
    epoch: Count
    pid: Count
    model: Name
    shard: Name
    pool_bytes: Count
    planes: Count
    model_key: Annotated[str, Meta(max_length=64)] = ""
    traits: Traits | None = None


class PeerStatus(Struct, frozen=True, kw_only=True):
    """`key` is the name that our list gives to the key that the peer proved.

    `has_pipe` says that messages go by a unix socket between the two, and not by ZeroMQ.
    """

    name: Name
    address: Name
    boot: Name
    state: Name
    verdict: Annotated[str, Meta(max_length=4096)]
    route: Annotated[str, Meta(max_length=2048)] = ""
    key: Annotated[str, Meta(max_length=256)] = ""
    has_pipe: bool = False


class TransferStatus(Struct, frozen=True, kw_only=True):
    """One transfer under way. `role` is source or sink."""

    role: Name
    request: Name
    room: Name
    peer: Name
    state: Name
    chunks_done: Count
    chunks: Count
    age_s: Seconds


class OfferStatus(Struct, frozen=True, kw_only=True):
    """One prompt that is held for others. `state` is computing, unclaimed, awaited, claimed or ending;
    `peer` is who asked for it last."""

    request: Name
    room: Name
    state: Name
    peer: Name
    tokens: Count
    blocks: Count
    age_s: Seconds


class ReaderStatus(Struct, frozen=True, kw_only=True):
    """One agent of this host that has our engine's memory mapped, on the route `pull`.

    `over_s` is how long ago its session or that `epoch` of our engine ended; None while it may read.
    """

    agent: Name
    pid: Count
    uid: Count
    epoch: Count
    age_s: Seconds
    over_s: Seconds | None


class ErrorStatus(Struct, frozen=True, kw_only=True):
    """One line that the agent logged: `level` is warning, error or critical, `logger` the part that said it."""

    level: Name
    logger: Name
    text: Annotated[str, Meta(max_length=MAX_ERROR_TEXT)]
    age_s: Seconds


class SlotCounts(Struct, frozen=True, kw_only=True):
    free: Count
    lent: Count
    landed: Count
    quarantined: Count


class Status(Struct, frozen=True, kw_only=True, tag="status"):
    """What an agent says of itself. `rebuild_refused` is why its slots cannot be made anew though they should.

    `errors` are the last ones that it logged, the latest one last. `still_s` is how long its data thread has not come
    round, which takes it a second at most while it is well and has nothing long in hand.
    """

    agent: Agent
    state: Name
    uptime_s: Annotated[float, Meta(ge=0)]
    fabric: Name
    device: Name = ""
    security: Annotated[str, Meta(max_length=512)] = ""
    slot_bytes: Count
    inbound: SlotCounts
    outbound: SlotCounts
    engine: EngineStatus | None
    peers: tuple[PeerStatus, ...]
    transfers: tuple[TransferStatus, ...]
    counters: dict[Name, float]
    rebuild_refused: Name = ""
    offers: tuple[OfferStatus, ...] = ()
    readers: tuple[ReaderStatus, ...] = ()
    errors: Annotated[tuple[ErrorStatus, ...], Meta(max_length=MAX_ERRORS)] = ()
    still_s: Seconds = 0.0


class PoolQuery(Struct, frozen=True, kw_only=True, tag="pool?"):
    """Answered by PoolStatus on the same connection, or by Refused (`no_engine`); needs no Attach."""


class PoolStatus(Struct, frozen=True, kw_only=True, tag="pool"):
    """The pool of the engine that is attached, and the size of the agent's slots."""

    pool: Pool
    slot_bytes: Count


class TraceQuery(Struct, frozen=True, kw_only=True, tag="trace?"):
    """Answered by Trace on the same connection; needs no Attach.

    `names` are requests, rooms or transfers; without any the agent chooses the want that took longest.
    """

    names: Annotated[tuple[Name, ...], Meta(max_length=MAX_ENTRIES)] = ()


class TraceEntry(Struct, frozen=True, kw_only=True):
    """One thing that happened to a request, at this time of day on its agent's host. `seconds` is how long a want took.

    An entry has a request, a transfer of it, or both; the room where the agent was told it.
    """

    at_s: Annotated[float, Meta(ge=0, le=1 << 40)]
    what: Name
    request: Annotated[str, Meta(max_length=256)] = ""
    room: Annotated[str, Meta(max_length=256)] = ""
    transfer: Annotated[str, Meta(max_length=256)] = ""
    text: Annotated[str, Meta(max_length=1024)] = ""
    seconds: Seconds | None = None


class Trace(Struct, frozen=True, kw_only=True, tag="trace"):
    """What an agent remembers of some requests, in the order in which it happened."""

    agent: Agent
    entries: Annotated[tuple[TraceEntry, ...], Meta(max_length=MAX_ENTRIES)]
