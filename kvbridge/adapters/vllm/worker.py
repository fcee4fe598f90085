"""The worker's half of the vLLM connector: hands the step's messages to the agent and reports what ended.

Everything happens in the hooks of the engine's own steps. A step that computes waits for the agent only where it
preempts (`Conversation.wait_for_readers`). We only name blocks, by the engine's ids; only the agent touches memory. A
step ends here before the GPU has computed it. So our messages carry a count of the stream's fence, and the agent waits
for it instead of us.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from kvbridge_proto.common import attachment_name
from kvbridge_proto.engine import (
    Abandon,
    Adopt,
    Attached,
    Computed,
    KeptBy,
    Offer,
    Rescaled,
    Want,
    Weights,
    Withdraw,
)
from msgspec.structs import replace
from vllm.logger import init_logger

from ...device.fence import EngineFence
from ...oneline import OneLine
from ..engine.client import EngineClient, pidfd_of
from ..engine.conversation import Conversation, Ended, nothing_of
from ..engine.memory import Memory
from ..engine.names import model_name
from ..engine.scores import Scores
from .block_tables import GroupTables
from .last_blocks import LastBlocks
from .options import VLLMOptions
from .pages import BlockPages
from .pool import describe
from .scales import LayerScales
from .step import AgentAddress, AgentAddresses, ConnectorStep, RankKey
from .versions import clears_last_blocks, pcp_size, replica_of, shard_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = init_logger("vllm.kvbridge.worker")
log.addFilter(OneLine())

ONE_TENSOR = "needs VLLM_USE_V2_MODEL_RUNNER=0 up to vLLM 0.28, VLLM_KV_CACHE_LAYOUT=BLHNC from 0.29"


@dataclass(frozen=True, slots=True)
class Receive:
    """A request that waits for what it wants: for tokens of its prompt, in its blocks."""

    request_id: str
    want: Want

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(piece.ids for piece in self.want.blocks))

    @property
    def tokens(self) -> int:
        return self.want.end_token - self.want.first_token


@dataclass(slots=True)
class Reports:
    """What to tell the scheduler now. A failed receive is in `received` as well."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)


class WorkerSide:
    """Called by vLLM's model runner, on its thread.

    vLLM asserts on a report that it does not expect, and such an assertion ends the engine. So everything that ends is
    looked up in `_receives` or `_sends`, and what nobody waits for is dropped.
    """

    _conversation: Conversation
    _pages: BlockPages | None
    _scales: LayerScales
    _scores: Scores | None

    def __init__(
        self,
        config: VllmConfig,
        cache: KVCacheConfig,
        options: VLLMOptions,
        clock: Callable[[], float] = time.monotonic,
        fence_of: Callable[[torch.device], EngineFence | None] | None = None,
        pidfd_of: Callable[[socket.socket], int] = pidfd_of,
    ) -> None:
        self._config = config
        self._cache = cache
        self._options = options
        self._clock = clock
        self._fence_of = fence_of
        self._pidfd_of = pidfd_of
        self._receives: dict[int, Receive] = {}  # that the scheduler waits for, by the number of their want
        self._sends: dict[int, str] = {}  # requests whose blocks it keeps, by the number of their offer
        self._reports = Reports()
        self._step: ConnectorStep | None = None  # the step whose part after the forward is still to be done
        self._attached: Attached | None = None  # what the scheduler knows of our agent
        self._is_asked = False  # the scheduler asks where our agent is
        self._joined: dict[int, dict[int, Receive]] = {}  # by the want whose rows they get, by their own number
        self._over: dict[int, tuple[Receive, str]] = {}  # with its code: wants that others may still join
        self._abandoned: set[int] = set()  # open wants of requests that are gone
        self._last_blocks: LastBlocks | None = None
        self._rest_s = 0.0
        self._key: RankKey = (0, 0)
        self._kept: list[KeptBy] = []  # that the scheduler has still to hear of

    # Start-up:

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe and share the memory, and attach. Without an agent the engine starts anyway."""
        transfer = self._config.kv_transfer_config
        assert transfer is not None
        memory = describe(
            kv_caches,
            self._config,
            self._cache,
            shard_of(self._config),
            model_name=self._options.model_name or model_name(self._config.model_config.model),
            engine_id=transfer.engine_id or "",
            weights=self._options.weights,
            draft=self._options.draft_name,
            replica=replica_of(self._config.parallel_config),
        )
        layers = self._config.compilation_config.static_forward_context
        self.attach(self._options.socket_of(_rank_of(self._config)), memory, layers)

    def attach(self, path: str, memory: Memory, layers: Mapping[str, Any] | None = None) -> None:
        """Share the memory with the agent at `path`, now and after every loss.

        `layers` are vLLM's, by name. Their scales may later differ from those in `memory`.
        """
        if self._options.cross_layer and (count := len(memory.pool.regions)) > 1:
            log.warning("kvbridge_cross_layer: %d tensors still hold the layers; %s", count, ONE_TENSOR)
        self._scales, self._scores = LayerScales(memory.pool, layers or {}), memory.scores
        self._pages = None
        if clears_last_blocks(self._cache):
            tables = GroupTables.of(self._cache, self._config.parallel_config)
            self._pages = BlockPages.of(memory)
            self._last_blocks = LastBlocks.of(memory, self._pages, [group.block_tokens for group in tables.groups])
        self._key = (memory.pool.shard.pp_rank, memory.pool.shard.tp_rank)
        client = EngineClient(
            path,
            agent_uids=self._options.agent_uids,
            allow_unwatched=self._options.allow_unwatched,
            pidfd_of=self._pidfd_of,
        )
        transfer = self._config.kv_transfer_config
        # What is kept elsewhere only saves time: a request must not fail because it is gone.
        recomputes = transfer is not None and transfer.kv_load_failure_policy == "recompute"
        conversation = self._conversation = Conversation(
            client,
            memory,
            log,
            policy=self._options.scales,
            takes_kept=recomputes and self._key == (0, 0),
            fence_of=self._fence_of,
            clock=self._clock,
        )
        conversation.start(self._options.connect_s)
        # Of ranks that differ only in prefill context parallelism vLLM asks one; all of them report in the first step.
        is_asked = pcp_size(self._config.parallel_config) == 1
        self._attached = conversation.attached if is_asked else None

    def handshake(self) -> AgentAddress:
        return _agent_of(self._attached)

    def changed_address(self) -> AgentAddresses | None:
        """News of our agent for the scheduler: where it is, if that has changed or is asked for, and what is kept."""
        attached, kept = self._conversation.attached, tuple(self._kept)
        if attached is self._attached and not self._is_asked:
            if not kept:
                return None
            addresses = {}
        else:
            addresses = {self._key: _agent_of(attached)}
        self._kept.clear()
        self._is_asked, self._attached = False, attached
        return AgentAddresses(addresses, kept)

    def close(self) -> None:
        if hasattr(self, "_conversation"):  # vLLM may end before it has memory
            self._conversation.close()

    # A step:

    def before_forward(self, step: ConnectorStep) -> None:
        """Send what need not wait for this step's forward. Withdrawals must leave before it overwrites blocks.

        An earlier forward may still write wanted blocks, for a request that is gone. So wants carry a fence.
        """
        self._step, self._rest_s, self._is_asked = step, step.rest_s, step.is_roll_call
        self._scales.is_used |= step.is_used
        conversation = self._conversation
        for message in step.before:  # before the turn: rows that it brings are of the weights before
            if isinstance(message, Weights):
                conversation.send(message)
        self._turn()
        if step.before:
            self._send(conversation, step)
        for number in step.reported:
            self._over.pop(number, None)

    def _send(self, conversation: Conversation, step: ConnectorStep) -> None:
        preempted = self._withdraw_preempted(conversation, step)
        fetched = step.awaited.keys() - step.joined.keys()
        wants = [each for each in step.before if isinstance(each, Want) and each.number in fetched]
        fence = conversation.upcoming if wants else 0
        if not fence:  # on a CPU
            self._clear(wants)
        for message in step.before:
            if isinstance(message, Withdraw) and message.number in preempted:
                continue
            if isinstance(message, Abandon):
                if self._leaves(message.number):
                    continue
                if conversation.is_open(message.number):
                    self._abandoned.add(message.number)
            if isinstance(message, Want) and message.number in step.joined:
                self._join(Receive(step.awaited[message.number], message), step.joined[message.number])
            elif isinstance(message, Want) and message.number in step.awaited:
                self._want(replace(message, fence=fence), step.awaited[message.number])
            elif not isinstance(message, Weights):
                conversation.send(message)
        if fence:
            self._clear(wants)
            conversation.mark()

    def _withdraw_preempted(self, conversation: Conversation, step: ConnectorStep) -> set[int]:
        """Before anything is written: their blocks may belong to what is wanted in the same step, after a reset."""
        # What is offered here has no blocks (`SchedulerSide._nothing`).
        unread = step.held.keys() | {each.number for each in step.before if isinstance(each, Offer)}
        gone = {each.number: each for each in step.before if isinstance(each, Withdraw) and each.number not in unread}
        for message in gone.values():
            conversation.send(message)
        if gone:
            conversation.wait_for_readers(gone)
        return set(gone)

    def _clear(self, wants: Iterable[Want]) -> None:
        """Enqueue what must be done with their blocks before the agent writes there."""
        if self._last_blocks is not None:
            for want in wants:
                self._last_blocks.clear(want)

    def after_forward(self) -> None:
        """Offer what the forward writes, then settle which blocks the scheduler keeps. Idempotent within a step."""
        step, self._step = self._step, None
        if step is None:
            return
        conversation = self._conversation
        if (changed := self._scales.look()) is not None:
            conversation.send(changed)
        fence = conversation.mark() if step.after else 0
        for message in step.after:
            assert isinstance(message, Offer)
            conversation.offer(replace(message, fence=fence))
        self._sends |= step.held
        for number in step.held:
            if not conversation.is_open(number):
                self._sent(number)  # it has ended already

    def results(self) -> Reports:
        """What was finished since the last step."""
        has_news = self._reports.sent or self._reports.received  # that lets a request go on, or frees its blocks
        if self._rest_s and self._conversation.is_waiting and not has_news:
            self._conversation.rest(self._rest_s)
        self._turn()
        reports, self._reports = self._reports, Reports()
        return reports

    def _want(self, want: Want, request_id: str) -> None:
        receive = Receive(request_id, want)
        if any(each.request_id == request_id for each in self._receives.values()):
            # Of a request that is gone. vLLM would take its report for this one's.
            log.warning("%s: not fetched: the last fetch of this name is not over yet", want.request)
            return self._received(receive, code="duplicate_request")
        if self._scales.is_pending:
            log.warning("%s: not fetched: the scales of its rows are not known yet", want.request)
            self._received(receive, code="scales_pending")
            return self._conversation.want(nothing_of(want))
        self._receives[want.number] = receive
        self._conversation.want(want)

    def _join(self, receive: Receive, number: int) -> None:
        """It gets copies of this want's rows, now if they are there."""
        if number in self._over:
            self._share(receive, *self._over[number])
        else:
            self._joined.setdefault(number, {})[receive.want.number] = receive

    def _leaves(self, number: int) -> bool:
        """Whether this one had joined another: its blocks are not written any more."""
        for joined in self._joined.values():
            if (receive := joined.pop(number, None)) is not None:
                self._reports.received.add(receive.request_id)
                return True
        return False

    def _turn(self) -> None:
        for heard in self._conversation.turn():
            match heard:
                case Ended(kind="want"):
                    self._want_ended(heard)
                case Ended(number=number, request=name, code=code, reason=reason):
                    if code:
                        log.info("%s: released: %s: %s", name, code, reason)
                    self._sent(number)
                case Adopt():
                    answer = self._scales.answer(heard)
                    log.info("asked to take the scales of the prefilling engine: %s", answer)
                    self._conversation.send(answer)
                case Rescaled():
                    self._scales.is_taking = False
                case KeptBy():
                    self._kept.append(heard)

    def _sent(self, number: int) -> None:
        """This offer has ended. The blocks of a request are free once all of its offers have: it may be kept, too."""
        request_id = self._sends.pop(number, None)
        if request_id is not None and request_id not in self._sends.values():
            self._reports.sent.add(request_id)

    def _want_ended(self, ended: Ended) -> None:
        number, name, code = ended.number, ended.request, ended.code
        receive = self._receives.pop(number, None)
        if not ended.is_good:
            log.warning("%s: KV not received: %s: %s", name, ended.code, ended.reason)
        elif self._scales.is_taking:
            log.warning("%s: KV came under the previous scales", name)
            code = "rescaled"
        else:
            self._scales.is_used = True
            if receive is not None and ended.other_scores:
                code = "" if self._finish_scores(receive.want) else "scores_unfinished"
        if receive is not None:
            self._received(receive, code)
        self._abandoned.discard(number)

    def _finish_scores(self, want: Want) -> bool:
        """Whether they are finished, or will be before what the GPU does next."""
        try:
            if self._scores is None:
                raise RuntimeError("the engine's scores are not known here")
            self._scores.finish(want)
        except Exception as error:  # such as no memory for the sums: vLLM computes the prompt
            log.warning("%s: KV came, but not its scores' weights: %s", want.request, error)
            return False
        return True

    def _received(self, receive: Receive, code: str) -> None:
        """Its rows are there, or `code` says why not. Report it, and those that joined it."""
        number = receive.want.number
        self._over[number] = receive, code
        self._report(receive, code)
        for each in self._joined.pop(number, {}).values():
            self._share(each, receive, code)

    def _share(self, receive: Receive, source: Receive, code: str) -> None:
        """Copy what came into another's blocks, in the engine's stream: before any of these requests runs."""
        if not code:
            try:
                self._pages = self._pages or BlockPages.of(self._conversation.memory)
                self._pages.copy(source.want, receive.want)
            except Exception as error:  # such as no memory: vLLM computes the prompt
                log.warning("%s: KV came, but could not be copied for it: %s", receive.want.request, error)
                code = "not_copied"
        self._report(receive, code)

    def _report(self, receive: Receive, code: str) -> None:
        """Count what vLLM now computes if it failed; without `recompute` the request fails instead."""
        self._reports.received.add(receive.request_id)
        if not code:
            return
        self._reports.failed.add(receive.request_id)
        self._reports.failed_blocks.update(receive.blocks)
        transfer = self._config.kv_transfer_config
        assert transfer is not None
        if receive.want.number not in self._abandoned and transfer.kv_load_failure_policy == "recompute":
            self._conversation.send(Computed(tokens=receive.tokens, reason=code))


def _agent_of(attached: Attached | None) -> AgentAddress:
    if attached is None:
        return AgentAddress()
    return AgentAddress(attached.agent.address, attachment_name(attached.agent, attached.epoch))


def _rank_of(config: VllmConfig) -> int:
    """This process's number among the engine's ranks on this host: `{rank}` in the socket's path."""
    from vllm.distributed.parallel_state import get_world_group

    parallel = config.parallel_config
    replica = parallel.data_parallel_rank_local or 0
    return int(replica * parallel.local_world_size + get_world_group().local_rank)
