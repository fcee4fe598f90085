"""What two agents agree on before anything moves: version, identity, verdict, digest. Pure.

The receiver's agent sends Hello and gets Welcome or Refuse. A session binds one incarnation of each agent to one epoch
of each engine. When any of the four changes, the session is over and a new one is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvbridge_proto.common import OURS, AgentCard, Rank, negotiate
from kvbridge_proto.door import Ticket
from kvbridge_proto.peer import Hello, ProcessCard, Refuse, Welcome
from kvbridge_proto.pool import Pool

from ..geometry.compat import Convertible, Incompatible, Same, other_weights, verdict
from ..geometry.plan import Planner
from ..geometry.tokens import TokenShard
from .route import UNPROVED, Routed, Site


@dataclass(frozen=True, slots=True)
class AttachedEngine:
    """Our side of every session: this incarnation of the agent and what its engine attached.

    `policy` says what to do if the sender has other scales; `revision` is that of our engine's scales.
    """

    agent: AgentCard
    epoch: int
    pool: Pool
    site: Site
    digests: tuple[str, ...]
    ranks: tuple[Rank, ...] = ()
    policy: Literal["requantize", "adopt"] = "requantize"
    revision: int = 0
    takes_kept: bool = False  # it wants to hear what others keep for it
    token_shard: TokenShard = field(init=False, repr=False, compare=False)  # the tokens our pool holds
    rank: int = field(init=False, repr=False, compare=False)  # ours
    rank_count: int = field(init=False, repr=False, compare=False)  # of our engine

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_shard", TokenShard.of(self.pool.shard))
        object.__setattr__(self, "rank", rank_index(self.pool))
        object.__setattr__(self, "rank_count", engine_ranks(self.pool))


# An engine's memory: the incarnation of its agent, the epoch, and the key that this agent proved.
EngineMemoryId = tuple[str, int, str]


@dataclass(frozen=True, slots=True)
class Session:
    """What was agreed with one peer. `peer` identifies it; `verdict` says what has to be converted.

    `key` is the key the sender proved on the link where this was agreed, "" if links prove no keys. `is_far`: the
    sender can write our memory through our fabric only, as far as a receiver knows. `process` is the sender's, if we
    share its PID namespace. `takes_kept`: the sender's engine wants to hear what ours keeps. `reads_ahead`: the
    receiver wants to hear what we announce.
    """

    peer: AgentCard
    version: int
    peer_epoch: int
    peer_pool: Pool
    our_epoch: int
    digest: str
    slot_bytes: int
    verdict: Same | Convertible
    ranks: tuple[Rank, ...] = ()
    routed: Routed = UNPROVED
    key: str = ""
    is_far: bool = False
    process: ProcessCard | None = None
    takes_kept: bool = False
    reads_ahead: bool = False
    planner: Planner = field(kw_only=True, repr=False, compare=False)
    memory_id: EngineMemoryId = field(init=False, repr=False, compare=False)  # identifies the peer engine's memory

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory_id", (self.peer.incarnation, self.peer_epoch, self.key))


def engine_ranks(pool: Pool) -> int:
    """How many ranks, each with its own agent, the engine of this pool has."""
    return pool.shard.tp_size * pool.shard.pp_size


def rank_index(pool: Pool) -> int:
    return pool.shard.pp_rank * pool.shard.tp_size + pool.shard.tp_rank


def hello(
    engine: AttachedEngine,
    probe_lane: int = 0,
    address: str = "",
    serial: int = 0,
    oldest: int = 0,
    can_pull: bool = True,
) -> Hello:
    site = engine.site
    return Hello(
        versions=OURS,
        agent=engine.agent,
        epoch=engine.epoch,
        pool=engine.pool,
        fabric=site.fabric,
        digests=engine.digests,
        host=site.host,
        device=site.device,
        routes=site.routes_to(can_pull),
        machine=site.machine,
        shares_memory=site.shares_memory,
        probe_lane=probe_lane,
        address=address,
        serial=serial,
        oldest=oldest,
        moves_units=True,
        reads_ahead=True,
    )


def answer(hello: Hello, engine: AttachedEngine | None) -> Session | Refuse:
    """The sender's answer to a Hello: a Session, told to the peer with `welcome`, or why there is none."""
    if engine is None:
        return Refuse(code="no_engine", reasons=("no engine is attached to this agent",))
    if hello.agent.incarnation == engine.agent.incarnation:
        return Refuse(code="same_agent", reasons=(f"agent: {engine.agent.name} is both sender and receiver",))
    version = negotiate(OURS, hello.versions)
    if version is None:
        return Refuse(code="version_mismatch", reasons=(version_reason(hello),))
    digest = next((name for name in engine.digests if name in hello.digests), None)
    if digest is None:
        return Refuse(code="no_common_digest", reasons=(f"digests: sender {engine.digests}, receiver {hello.digests}",))
    ours, theirs = engine.site.fabric, hello.fabric
    for card in (theirs, hello.host):
        if card is not None and card.base + (card.slots + 1) * card.slot_bytes >= 1 << 63:
            reason = f"slots: {card.slots} of {card.slot_bytes} bytes end beyond any memory"
            return Refuse(code="bad_card", reasons=(reason,))
    if theirs.kind != ours.kind:
        reason = f"fabric.kind: sender {ours.kind}, receiver {theirs.kind}"
        return Refuse(code="fabric_mismatch", reasons=(reason,))
    found = _agreed(engine.pool, hello.pool)
    if isinstance(found, Refuse):
        return found
    return Session(
        peer=hello.agent,
        version=version,
        peer_epoch=hello.epoch,
        peer_pool=hello.pool,
        our_epoch=engine.epoch,
        digest=digest,
        slot_bytes=min(ours.slot_bytes, theirs.slot_bytes),
        verdict=found,
        reads_ahead=hello.reads_ahead,
        planner=Planner(engine.pool, hello.pool, hello.moves_units),
    )


def _agreed(sender: Pool, receiver: Pool) -> Same | Convertible | Refuse:
    """What both sides' pools have in common. Other weights have a code of their own: they may soon be the same."""
    if (difference := other_weights(sender, receiver)) is not None:
        return Refuse(code="other_weights", reasons=(str(difference),))
    found = verdict(sender, receiver)
    return Refuse(code="incompatible", reasons=found.reasons) if isinstance(found, Incompatible) else found


def version_reason(hello: Hello) -> str:
    ours, theirs = OURS, hello.versions
    return f"versions: sender {ours.oldest}-{ours.newest}, receiver {theirs.oldest}-{theirs.newest}"


def welcome(session: Session, engine: AttachedEngine, door: Ticket | None = None) -> Welcome:
    return Welcome(
        version=session.version,
        agent=engine.agent,
        epoch=engine.epoch,
        pool=engine.pool,
        digest=session.digest,
        slot_bytes=session.slot_bytes,
        ranks=engine.ranks,
        route=session.routed.route,
        why=session.routed.why,
        probe=session.routed.probe,
        door=door,
        machine=engine.site.machine,
        namespaces=engine.site.namespaces,
        process=engine.site.process,
        moves_units=True,
        takes_kept=engine.takes_kept,
    )


def accept(welcome: Welcome, engine: AttachedEngine, key: str = "") -> Session | Refuse:
    """The receiver's view of a Welcome: a Session, or a Refuse that says why it cannot go on."""
    if not OURS.oldest <= welcome.version <= OURS.newest:
        reason = f"version: receiver {OURS.oldest}-{OURS.newest}, sender {welcome.version}"
        return Refuse(code="version_mismatch", reasons=(reason,))
    if welcome.digest not in engine.digests:
        return Refuse(code="no_common_digest", reasons=(f"digest: receiver {engine.digests}, sender {welcome.digest}",))
    if welcome.slot_bytes > engine.site.fabric.slot_bytes:
        reason = f"slot_bytes: receiver {engine.site.fabric.slot_bytes}, sender {welcome.slot_bytes}"
        return Refuse(code="slot_mismatch", reasons=(reason,))
    routed, site = Routed(welcome.route, welcome.why, welcome.probe), engine.site
    if welcome.route not in site.routes or (welcome.route == "host" and site.dram is None):
        reason = f"route: receiver {', '.join(site.routes)}, sender {welcome.route}"
        return Refuse(code="route_mismatch", reasons=(reason,))
    if not routed.is_read and not site.has_slots:
        return Refuse(
            code="route_mismatch", reasons=(f"route: {welcome.route}, and the receiver's Hello named no slots",)
        )
    found = _agreed(welcome.pool, engine.pool)
    if isinstance(found, Refuse):
        return found
    return Session(
        peer=welcome.agent,
        version=welcome.version,
        peer_epoch=welcome.epoch,
        peer_pool=welcome.pool,
        our_epoch=engine.epoch,
        digest=welcome.digest,
        slot_bytes=welcome.slot_bytes,
        verdict=found,
        ranks=welcome.ranks,
        routed=routed,
        key=key,
        is_far=_is_far(welcome, site),
        process=welcome.process if _shares_pids(welcome, site) else None,
        takes_kept=welcome.takes_kept,
        planner=Planner(welcome.pool, engine.pool, welcome.moves_units),
    )


def _shares_pids(sender: Welcome, ours: Site) -> bool:
    is_here = "" not in (sender.machine, ours.machine) and sender.machine == ours.machine
    return (
        is_here and len(sender.namespaces) == len(ours.namespaces) == 2 and sender.namespaces[0] == ours.namespaces[0]
    )


def _is_far(sender: Welcome, ours: Site) -> bool:
    """Whether the sender writes our memory through our fabric only.

    On another machine, nothing else reaches it. On this one, a process can write the memory of another by the other's
    PID (process_vm_writev), by a handle of the driver that is told apart by PIDs (CUDA IPC of what cuMemAlloc gave), or
    by XPMEM segments, which are of host memory. UCX tries the first two within a PID namespace, and XPMEM within an IPC
    namespace. A proved `direct` is near, whatever the sender says.

    This holds as long as staging on a GPU comes from cuMemAlloc (device/staging.py), and UCX has openucx/ucx#11514, as
    that of NIXL 1.5.1 has: without it CUDA IPC was tried across PID namespaces.
    """
    if sender.route == "direct" or "" in (sender.machine, ours.machine):
        return False
    if sender.machine != ours.machine:
        return True
    if not len(sender.namespaces) == len(ours.namespaces) == 2:
        return False
    (pids, ipc), (our_pids, our_ipc) = sender.namespaces, ours.namespaces
    is_on_gpu = sender.route == "nixl" and ours.fabric.memory != "dram"
    return pids != our_pids and (ipc != our_ipc or is_on_gpu)
