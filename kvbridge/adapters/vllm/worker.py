"""The worker's half of the vLLM connector: hands the step's messages to the agent and reports what the agent answered.

Everything happens in the hooks of the engine's own steps, but for one thing: the link has a thread, which attaches
again while there are no steps. A step that computes waits for the agent in `_wait_for_readers` only. Block ids are the
engine's; the agent alone touches memory. On a GPU a step is over here before it is computed there, so what we say
carries a count of the stream's fence, and the agent waits, not we.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from kvbridge_proto.engine import (
    READERS_S,
    Abandon,
    Adopt,
    Attach,
    Directory,
    Done,
    Expect,
    Failed,
    Held,
    Offer,
    Refused,
    Released,
    Rescaled,
    ToAgent,
    Want,
    Withdraw,
)
from kvbridge_proto.pool import Handle
from kvbridge_proto.words import OURS
from msgspec.structs import replace
from vllm.logger import init_logger

from ...device.fence import EngineFence
from ...device.handles import export_all
from ...oneline import OneLine
from ..engine.client import EngineClient, pidfd_of
from ..engine.link import AgentLink, Over, ReadsOver
from ..engine.pending import Ledger, Receive, Reports
from .options import Options
from .pool import Memory, describe
from .scales import LayerScales
from .step import AgentAddress, AgentAddresses, RankKey, Step
from .versions import shard_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = init_logger("vllm.kvbridge.worker")
log.addFilter(OneLine())

GRACE_S = 10.0  # what an agent gets beyond its own deadline, and again after being asked to stop
ONE_TENSOR = "needs VLLM_USE_V2_MODEL_RUNNER=0 up to vLLM 0.28, VLLM_KV_CACHE_LAYOUT=BLHNC from 0.29"
LOOK_S = 0.5  # how often deadlines are looked at


class WorkerSide:
    """Called by vLLM's model runner, on its thread."""

    def __init__(
        self,
        config: VllmConfig,
        cache: KVCacheConfig,
        options: Options,
        clock: Callable[[], float] = time.monotonic,
        fence_of: Callable[[torch.device], EngineFence | None] | None = None,
        pidfd_of: Callable[[socket.socket], int] = pidfd_of,
    ) -> None:
        self._config = config
        self._cache = cache
        self._options = options
        self._clock = clock
        self._fence_of = fence_of or _fence_of
        self._pidfd_of = pidfd_of
        self._ledger = Ledger()
        self._link: AgentLink | None = None
        self._directory: Directory | None = None
        self._expected: dict[str, Expect] = {}  # an agent that comes later is to know, too
        self._fence: EngineFence | None = None
        self._step = Step()  # of which the part after the forward is still to be done
        self._fds: list[int] = []
        self._told = ""  # the agent address that the scheduler knows
        self._is_asked = False  # where our agent is
        self._look_at = 0.0
        self._rest_s = 0.0
        self._key: RankKey = (0, 0)
        self._scales: LayerScales

    # Start-up:

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe and share the memory, and attach. Without an agent the engine starts all the same."""
        transfer = self._config.kv_transfer_config
        assert transfer is not None
        memory = describe(
            kv_caches,
            self._config,
            self._cache,
            shard_of(self._config),
            model_name=self._options.model_name or self._config.model_config.model.rstrip("/").rpartition("/")[2],
            engine_id=transfer.engine_id or "",
        )
        layers = self._config.compilation_config.static_forward_context
        self.attach(self._options.socket_of(_rank_of(self._config)), memory, layers)

    def attach(self, path: str, memory: Memory, layers: Mapping[str, Any] | None = None) -> None:
        """Share the memory, and tell the agent at `path`, now and after every loss.

        `layers` are vLLM's, by name: their scales may become others than `memory` says.
        """
        if self._options.cross_layer and (count := len(memory.pool.regions)) > 1:
            log.warning("kvbridge_cross_layer: %d tensors hold the layers all the same; %s", count, ONE_TENSOR)
        self._scales = LayerScales(memory.pool, layers or {})
        self._fence = self._fence_of(memory.device)
        handles, fds = self._export(memory)  # moves memory that is no GPU's; now, not in the middle of serving
        self._fds = fds
        self._key = (memory.pool.shard.pp_rank, memory.pool.shard.tp_rank)
        fence_fd = None if self._fence is None else len(fds) - 1
        policy = self._options.scales
        attach = Attach(versions=OURS, pool=memory.pool, handles=handles, fence_fd=fence_fd, policy=policy)
        client = EngineClient(path, agent_uids=self._options.agent_uids, pidfd_of=self._pidfd_of)
        self._link = AgentLink(client, attach, fds, log, self._clock, self._first)
        self._link.start(self._options.connect_s)
        # vLLM asks one rank of those that differ in prefill context parallelism only; they all tell in the first step.
        is_asked = getattr(self._config.parallel_config, "prefill_context_parallel_size", 1) == 1
        self._told = self._link.address if is_asked else ""

    def _first(self) -> list[ToAgent]:
        """What every agent is told before anything else.

        Called on the link's thread as well: it reads `_scales.told`, `_directory` and `_expected`, which steps change
        meanwhile without a lock. Each read is one operation of the interpreter, so it sees what was or what is.
        """
        again = (self._scales.told, self._directory, *list(self._expected.values()))
        return [first for first in again if first is not None]

    def _export(self, memory: Memory) -> tuple[tuple[Handle, ...], list[int]]:
        """Handles and their descriptors, the fence's last; the caller closes them."""
        handles, fds = export_all(memory.storages)
        if self._fence is not None:
            fds.append(os.dup(self._fence.fd))
        return handles, fds

    def handshake(self) -> AgentAddress:
        return AgentAddress(self._told)

    def changed_address(self) -> AgentAddresses | None:
        """For the scheduler, when our agent came or went, or it asks."""
        address = self._link.address if self._link is not None else ""
        if address == self._told and not self._is_asked:
            return None
        self._is_asked = False
        self._told = address
        return AgentAddresses({self._key: address})

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._fence is not None:
            self._fence.close()
        _close(self._fds)
        self._fds = []

    # A step:

    def before_forward(self, step: Step) -> None:
        """Say what need not wait for this step's forward. Withdrawals must leave before it overwrites blocks.

        Wanted blocks may still be written by an earlier forward, for a request that is gone: hence their fence.
        """
        self._step, self._rest_s, self._is_asked = step, step.rest_s, step.is_roll_call
        self._scales.is_used |= step.is_used
        self._turn()
        fence = self._mark(any(isinstance(message, Want) and message.blocks for message in step.before))
        for message in step.before:
            match message:
                case Directory():
                    self._directory = message
                    self._say(message)
                case Expect(request=name):
                    self._expected[name] = message
                    self._say(message)
                case Want() if message.request in step.awaited:
                    self._expected.pop(message.request, None)
                    self._want(replace(message, fence=fence), step.awaited[message.request])
                case Want(request=name) | Abandon(request=name):
                    self._expected.pop(name, None)
                    self._say(message)
                case _:
                    self._say(message)
        preempted = [m.request for m in step.before if isinstance(m, Withdraw) and m.request not in step.held]
        if preempted:
            self._wait_for_readers(preempted)

    def _wait_for_readers(self, preempted: list[str]) -> None:
        """The one wait in a step that computes: its forward overwrites blocks that the agent may be gathering from.

        A chunk gathered now would hold another request's KV and nothing would tell. The agent answers when its reads
        have ended: a chunk's time. One that stays silent for READERS_S after it could hear us is given up, and what it
        reads from then on does not count (agent/jobs.py: UNHEARD_S). One that is lost, for whatever reason, is waited
        for as long from the loss (link.py: ReadsOver).
        """
        link, ends, asked_at = self._link, None, self._clock()
        while link is not None and any(self._ledger.is_read(name) for name in preempted):
            now = self._clock()
            if ends is None and link.is_all_sent:
                ends = now + READERS_S
            if link.is_attached and now >= (asked_at + READERS_S if ends is None else ends):
                link.give_up(f"no answer within {READERS_S} s to a withdrawal for preemption")
                if ends is not None:
                    break
            link.rest(READERS_S if not link.is_attached else max((ends or asked_at + READERS_S) - now, 0.0))
            self._turn()
        for name in preempted:
            self._ledger.forgotten(name)

    def after_forward(self) -> None:
        """Offer what the forward writes; then what the scheduler keeps can be settled. Once a step, however called."""
        step, self._step = self._step, Step()
        if (changed := self._scales.look()) is not None:
            self._say(changed)
        fence = self._mark(bool(step.after))
        for message in step.after:
            if isinstance(message, Offer) and self._say(replace(message, fence=fence)):
                self._ledger.offered(message.request, self._clock() + message.hold_s + GRACE_S)
        for name, request_id in step.held.items():
            self._ledger.held(name, request_id, self._clock() + self._options.hold_s + GRACE_S)

    def _mark(self, is_needed: bool) -> int:
        """A count that the fence reaches when the GPU has done all that is enqueued now; 0: it has, on a CPU."""
        return self._fence.mark() if self._fence is not None and is_needed else 0

    def results(self) -> Reports:
        """What was finished since the last step."""
        if self._rest_s and self._link is not None and self._ledger.is_waiting:
            self._link.rest(self._rest_s)
        self._turn()
        if self._clock() >= self._look_at:
            self._look_at = self._clock() + LOOK_S
            self._look_for_late()
        return self._ledger.take()

    def _want(self, want: Want, request_id: str) -> None:
        blocks = tuple(block for piece in want.blocks for block in piece.ids)
        self._ledger.wanted(want.request, Receive(request_id, self._clock() + want.deadline_s + GRACE_S, blocks))
        if self._scales.is_pending:
            log.warning("%s: not fetched: what scales its rows would have is not known yet", want.request)
            self._give_away(want)
        elif not self._say(want):  # nobody was told of its blocks
            self._give_away(want)

    def _give_away(self, want: Want) -> None:
        """It is computed here: its agent expects it no more, and the other side need not hold it."""
        self._ledger.failed(want.request)
        self._say(replace(want, first_token=0, end_token=0, blocks=(), fence=0))

    def _say(self, message: ToAgent) -> bool:
        return self._link is not None and self._link.send(message)

    def _turn(self) -> None:
        if self._link is None:
            return
        for message in self._link.turn():
            match message:
                case Done(request=name):
                    self._received(name)
                case Failed(request=name, code=code, reason=reason):
                    if name in self._ledger.receives:
                        log.warning("%s: KV not received: %s: %s", name, code, reason)
                    self._ledger.failed(name)
                case Released(request=name, code=code, reason=reason):
                    if code:
                        log.info("%s: released: %s: %s", name, code, reason)
                    self._ledger.released(name)
                case Held(requests=names):
                    late_at = self._clock() + self._options.hold_s + GRACE_S
                    for name in names:
                        self._ledger.awaited(name, late_at)
                case Adopt():
                    answer = self._scales.answer(message)
                    log.info("asked to take the scales of the prefilling engine: %s", answer)
                    self._say(answer)
                case Rescaled():
                    self._scales.is_taking = False
                case Refused(about=about, code=code, reasons=reasons) if about.startswith("rescale"):
                    # Nothing may be planned under the scales that the agent still believes in.
                    self._link.give_up(f"{about} refused: {code}: {'; '.join(reasons)}")
                case Refused(about=about, code="duplicate_request", reasons=reasons):
                    log.warning("%s: refused by the agent: %s", about, "; ".join(reasons))  # the first want goes on
                case Refused(about=name, code=code, reasons=reasons):
                    log.warning("%s: refused by the agent: %s: %s", name, code, "; ".join(reasons))
                    self._ledger.failed(name)
                    self._ledger.released(name)
                case ReadsOver():
                    self._ledger.unread()
                case Over():
                    self._scales.is_taking = False
                    self._ledger.over()

    def _received(self, name: str) -> None:
        if self._scales.is_taking and name in self._ledger.receives:
            log.warning("%s: KV came under the scales from before", name)
            self._ledger.failed(name)
            return
        self._scales.is_used |= name in self._ledger.receives
        self._ledger.received(name)

    def _look_for_late(self) -> None:
        """An agent that is alive but silent is asked to stop, then given up.

        Blocks that it may write stay wanted until it has let go.
        """
        now = self._clock()
        for name, late in self._ledger.next_late(now):
            if late.is_nudged:
                if self._link is not None:
                    self._link.give_up(f"{name}: no answer within {GRACE_S} s of asking it to stop")
                return
            reason = "no answer in time"
            is_receive = isinstance(late, Receive)
            self._say(Abandon(request=name, reason=reason) if is_receive else Withdraw(request=name, reason=reason))
            late.is_nudged, late.late_at = True, now + GRACE_S


def _rank_of(config: VllmConfig) -> int:
    """Its number among this engine's ranks on this host: what `{rank}` in the path means."""
    from vllm.distributed.parallel_state import get_world_group

    parallel = config.parallel_config
    replica = parallel.data_parallel_rank_local or 0
    return int(replica * parallel.local_world_size + get_world_group().local_rank)


def _fence_of(device: torch.device) -> EngineFence | None:
    """A CPU's forward is finished when it returns."""
    return EngineFence(device) if device.type == "cuda" else None


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
