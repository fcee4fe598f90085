"""What `kvbridge status`, `plan` and `trace` ask over the unix socket, the answers, and the page /status. Pure."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from .common import PREFIX_TOKENS, AgentCard, Seconds
from .pool import Count, Name, Pool

MAX_ENTRIES = 2048  # of a trace in one answer
MAX_ERRORS = 16
MAX_ERROR_TEXT = 512
PAGE_SCHEMA = 1
STILL_S = 5.0  # after so long without a round a data thread is taken for hung


class StatusQuery(Struct, frozen=True, kw_only=True, tag="status?"):
    """Answered by Status on the same connection; needs no Attach."""


class Traits(Struct, frozen=True, kw_only=True):
    """What may differ between two engines of one model and is then converted. Several values are joined by "_"."""

    engine: Name
    tp_size: Count
    pp_size: Count
    cp_size: Count
    block_tokens: Name
    dtype: Name


class PromptSize(Struct, frozen=True, kw_only=True):
    """What prompts take of this rank's memory: bytes for each token, and beside them for each long prompt, at most.

    The latter are of windows and states. `tokens` is how many the pool has room for; 0 if no layer keeps all of them.
    """

    token_bytes: Annotated[float, Meta(ge=0)]
    prompt_bytes: Annotated[float, Meta(ge=0)]
    tokens: Count


class EngineStatus(Struct, frozen=True, kw_only=True):
    """The attached engine. Engines with the same `model_key` have the same model.

    `protocol` is the version that was agreed on with its adapter.
    """

    engine: Name
    epoch: Count
    pid: Count
    model: Name
    shard: Name
    pool_bytes: Count
    planes: Count
    model_key: Annotated[str, Meta(max_length=64)] = ""
    traits: Traits | None = None
    protocol: Count = 0
    size: PromptSize | None = None


class PeerStatus(Struct, frozen=True, kw_only=True):
    """`key` is the name that our list gives to the key that the peer proved.

    `route` is for people: the name, the rate and why no better route was taken. `bytes_per_s` is the rate measured when
    the route was proved, None if it was not. `has_pipe` says that messages go by a unix socket between the two, not by
    ZeroMQ. `protocol` is the version that was agreed on, 0 before the session is open. `carried` transfers of ours to
    this receiver had `carried_bytes`, and took `carried_s` together, each from when its last rows were computed.
    """

    name: Name
    address: Name
    incarnation: Name
    state: Name
    verdict: Annotated[str, Meta(max_length=4096)]
    route: Annotated[str, Meta(max_length=2048)] = ""
    route_name: Name = ""
    bytes_per_s: Annotated[float, Meta(ge=0)] | None = None
    key: Annotated[str, Meta(max_length=256)] = ""
    has_pipe: bool = False
    protocol: Count = 0
    carried: Count = 0
    carried_bytes: Count = 0
    carried_s: Annotated[float, Meta(ge=0)] = 0.0


class RefusalStatus(Struct, frozen=True, kw_only=True):
    """An agent that we dialled in the last ten minutes and have no session with: which side refused, and why.

    `age_s` is since the last attempt. `to_meet` says that our option `meet` names it, not a request alone.
    """

    address: Name
    code: Name
    reason: Annotated[str, Meta(max_length=2048)]
    age_s: Seconds
    to_meet: bool = False


class TransferStatus(Struct, frozen=True, kw_only=True):
    """One transfer under way. `role` is sender or receiver.

    `chunks_done` is None if the receiver reads the chunks itself: it says only at the end that it has read them.
    """

    role: Name
    request: Name
    rendezvous: Name
    peer: Name
    state: Name
    chunks_done: Count | None
    chunks: Count
    age_s: Seconds


class OfferStatus(Struct, frozen=True, kw_only=True):
    """One prompt that is held for others.

    `state` is computing, unclaimed, awaited, claimed or ending. `peer` is the one that asked for it last. `left_s` is
    how long it is held at most, rounded down to milliseconds: until it expires, or if it is ending, until the last read
    lease on its blocks does. None if it is ending and our own reads keep its blocks: they have no time limit.
    """

    request: Name
    rendezvous: Name
    state: Name
    peer: Name
    tokens: Count
    blocks: Count
    age_s: Seconds
    left_s: Seconds | None = None


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
    """One line that the agent logged: `level` is warning, error or critical, `logger` the part that logged it."""

    level: Name
    logger: Name
    text: Annotated[str, Meta(max_length=MAX_ERROR_TEXT)]
    age_s: Seconds


class PromptCounts(Struct, frozen=True, kw_only=True):
    """What became of the prompts that our engine wanted and offered, since the agent started.

    `computed` counts by their reason prompts that could have come and that our engine computed, `computed_tokens` all
    their tokens. `released` counts offers that ended: `served` if they were fetched, `declined`, or an error's code.
    """

    fetched_tokens: Count = 0
    computed_tokens: Count = 0
    computed: dict[Name, Count] = {}
    released: dict[Name, Count] = {}


class HeldCounts(Struct, frozen=True, kw_only=True):
    """Prompts that our engine holds for others, those of them that nobody has asked for, and the tokens of all."""

    offers: Count = 0
    unclaimed: Count = 0
    tokens: Count = 0


class SlotCounts(Struct, frozen=True, kw_only=True):
    free: Count
    lent: Count
    landed: Count
    quarantined: Count


class Status(Struct, frozen=True, kw_only=True, tag="status"):
    """The state of an agent. `rebuild_refused` is why its slots cannot be rebuilt although they should be.

    `errors` are the last ones that it logged, the latest last. `still_s` is how long its data plane thread has not
    completed a round; a healthy thread with no long work in hand needs a second at most. `metrics` is HOST:PORT, where
    Prometheus finds it, or empty. `counters` are all that it counts there. `failpoints` are armed, for a test.
    """

    agent: AgentCard
    state: Name
    uptime_s: Annotated[float, Meta(ge=0)]
    fabric: Name
    device: Name = ""
    security: Annotated[str, Meta(max_length=512)] = ""
    slot_bytes: Count
    receive_slots: SlotCounts
    send_slots: SlotCounts
    engine: EngineStatus | None
    peers: tuple[PeerStatus, ...]
    transfers: tuple[TransferStatus, ...]
    counters: dict[Name, float]
    rebuild_refused: Name = ""
    offers: tuple[OfferStatus, ...] = ()
    readers: tuple[ReaderStatus, ...] = ()
    errors: Annotated[tuple[ErrorStatus, ...], Meta(max_length=MAX_ERRORS)] = ()
    still_s: Seconds = 0.0
    metrics: Name = ""
    prompts: PromptCounts = PromptCounts()
    failpoints: tuple[Name, ...] = ()
    refusals: tuple[RefusalStatus, ...] = ()
    held: HeldCounts = HeldCounts()


def problems(status: Status) -> tuple[str, ...]:
    """What an operator has to look at, in a few words each."""
    slots = status.receive_slots
    looked = {
        "fails on purpose (failpoints)": bool(status.failpoints),
        status.state: status.state != "serving",
        f"its data thread hangs for {status.still_s:.0f} s": status.still_s > STILL_S,
        "no engine is attached": status.engine is None,
        f"all {slots.quarantined} free slots are quarantined": slots.quarantined > 0 and not slots.free,
        "slots cannot be made anew": bool(status.rebuild_refused),
        "others still have its engine's memory mapped": any(each.over_s is not None for each in status.readers),
    }
    return tuple(words for words, is_so in looked.items() if is_so)


class PageEngine(Struct, frozen=True, kw_only=True):
    """The attached engine, as the page /status shows it."""

    engine: Name
    model: Name
    model_key: Name
    shard: Name
    traits: Traits | None
    size: PromptSize | None


class PagePeer(Struct, frozen=True, kw_only=True):
    """A session: `role` is the peer's, sender or receiver; `state` is open, handshake or new. Else as PeerStatus."""

    name: Name
    address: Name
    role: Name
    state: Name
    route: Name
    bytes_per_s: Annotated[float, Meta(ge=0)] | None
    carried: Count
    carried_bytes: Count
    carried_s: Annotated[float, Meta(ge=0)]
    verdict: Annotated[str, Meta(max_length=4096)]


class StatusPage(Struct, frozen=True, kw_only=True):
    """The page /status beside the metrics, for who looks after many agents: JSON. Addresses are without keys.

    It names no request, prompt, rendezvous id, key or process. A reader ignores fields that it does not know; `schema`
    grows when a field changes its meaning or is gone.
    """

    schema: Count = PAGE_SCHEMA
    name: Name
    address: Name
    version: Name
    state: Name
    uptime_s: Annotated[float, Meta(ge=0)]
    device: Name
    problems: tuple[Annotated[str, Meta(max_length=256)], ...]
    engine: PageEngine | None
    receive_slots: SlotCounts
    send_slots: SlotCounts
    peers: tuple[PagePeer, ...]
    refusals: tuple[RefusalStatus, ...]
    transfers: Count
    held: HeldCounts
    fetched_tokens: Count
    computed_tokens: Count


class KeptOfPrompt(Struct, frozen=True, kw_only=True):
    """The page /kept beside the metrics, for who chooses an engine for a prompt: JSON.

    Of a prompt that begins with the prefixes that were asked for, the engine keeps `tokens` for others.
    """

    schema: Count = PAGE_SCHEMA
    prefix_tokens: Count = PREFIX_TOKENS
    tokens: Count


class PoolQuery(Struct, frozen=True, kw_only=True, tag="pool?"):
    """Answered by PoolStatus on the same connection, or by Refused (`no_engine`); needs no Attach."""


class PoolStatus(Struct, frozen=True, kw_only=True, tag="pool"):
    """The pool of the engine that is attached, and the size of the agent's slots."""

    pool: Pool
    slot_bytes: Count


class TraceQuery(Struct, frozen=True, kw_only=True, tag="trace?"):
    """Answered by Trace on the same connection; needs no Attach.

    `names` are requests, rendezvous ids or transfers; without any, the agent chooses the want that took longest. A
    single name that the agent does not know stands for all names that contain it as a word: the client's id may.
    """

    names: Annotated[tuple[Name, ...], Meta(max_length=MAX_ENTRIES)] = ()


class TraceEntry(Struct, frozen=True, kw_only=True):
    """One thing that happened to a request, at this time of day on its agent's host. `seconds` is how long a want took.

    An entry has a request, a transfer of it, or both. It has the rendezvous id if the agent was told it.
    """

    at_s: Annotated[float, Meta(ge=0, le=1 << 40)]
    what: Name
    request: Annotated[str, Meta(max_length=256)] = ""
    rendezvous: Annotated[str, Meta(max_length=256)] = ""
    transfer: Annotated[str, Meta(max_length=256)] = ""
    text: Annotated[str, Meta(max_length=1024)] = ""
    seconds: Seconds | None = None


class Trace(Struct, frozen=True, kw_only=True, tag="trace"):
    """What an agent remembers of some requests, in order."""

    agent: AgentCard
    entries: Annotated[tuple[TraceEntry, ...], Meta(max_length=MAX_ENTRIES)]
