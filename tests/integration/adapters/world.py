"""vLLM's real scheduler with our connector and its workers, a fake agent beside each rank, and no model.

Follows vLLM 0.32.0's tests/v1/kv_connector/unit/utils.py (Apache-2.0), which drives the scheduler in the same way.
`assert_empty` follows its `assert_scheduler_empty`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from math import lcm
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from demo.model import write_config
from kvbridge.adapters.vllm.connector import KVBridgeConnector
from kvbridge.adapters.vllm.options import VLLMOptions
from kvbridge.adapters.vllm.scheduler import SchedulerSide
from kvbridge.adapters.vllm.worker import WorkerSide
from testing.waiting import wait_for
from tests.integration.adapters.fake_agent import FakeAgent, fake_pidfd
from tests.integration.adapters.small import Clock, memory_of

BLOCK = 16
# Whose hooks can be called: the installed vLLM's, and the older ones, which it still knows.
HOOKS = ("0.32", "0.26") if hasattr(base, "KVConnectorTransferResults") else ("0.26",)


class World:
    """One engine of `tp` ranks. `step` is one engine step; sampled tokens are all 7.

    `hooks` says whose hooks the workers' model runner calls: those of vLLM 0.32, or those of 0.26. `fence_of` gives
    the workers a fence, `on_forward` is called where the forward would be enqueued. `specs` make several groups, or
    `cache` makes the whole record of the cache. Prefixes may end after any `hashed` tokens.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tp: int = 1,
        blocks: int = 100,
        budget: int = 64,
        hooks: str = HOOKS[0],
        fence_of: Callable[[torch.device], Any] | None = None,
        on_forward: Callable[[], None] = lambda: None,
        specs: Sequence[Any] = (),
        hashed: int = BLOCK,
        cache: Callable[[VllmConfig], KVCacheConfig] | None = None,
        **more: Any,
    ) -> None:
        self.folder, self.hashed = folder, hashed
        self.hooks = hooks
        self.fence_of = fence_of
        self.on_forward = on_forward
        self.memory_of = memory_of
        self.layers: dict[str, Any] | None = None
        self.clock = Clock()
        self.config = _config(folder, tp, budget, more)
        self.of_workers = cache(self.config) if cache else _cache(specs, blocks)
        self.cache = generate_scheduler_kv_cache_config([self.of_workers])
        self.config.cache_config.num_gpu_blocks = self.cache.num_blocks
        sizes = [group.kv_cache_spec.block_size for group in self.cache.kv_cache_groups]
        modes = {spec.mamba_cache_mode for spec in specs if isinstance(spec, MambaSpec)}
        self.config.cache_config.mamba_cache_mode = modes.pop() if modes else "none"
        kind = AsyncScheduler if self.config.scheduler_config.async_scheduling else Scheduler
        self.scheduler = kind(
            vllm_config=self.config,
            kv_cache_config=self.cache,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=lcm(BLOCK, *sizes),
            hash_block_size=hashed,
        )
        self.connector = self.scheduler.connector
        options = VLLMOptions.read(self.config.kv_transfer_config.kv_connector_extra_config)
        self.connector.scheduler = SchedulerSide(self.config, self.cache, options, self.clock)
        self.connector.bind_gpu_block_pool(self.scheduler.kv_cache_manager.block_pool)
        self.aggregator = KVOutputAggregator(tp)
        self.workers = [self._worker(rank, tp) for rank in range(tp)]
        self.agents: list[FakeAgent] = []
        self.numbers = count(1)
        self.scheduled: Any = None  # the last step's
        init_none_hash(sha256)

    def _worker(self, rank: int, tp: int) -> KVBridgeConnector:
        worker = KVBridgeConnector(self.config, KVConnectorRole.WORKER, self.of_workers)
        options = VLLMOptions.read(self.config.kv_transfer_config.kv_connector_extra_config)
        worker.worker = WorkerSide(self.config, self.of_workers, options, self.clock, self.fence_of, fake_pidfd)
        return worker

    @property
    def agent(self) -> FakeAgent:
        """The one beside its only rank."""
        (agent,) = self.agents
        return agent

    def path(self, rank: int) -> Path:
        return self.folder / f"agent-{rank}.sock"

    def start_agents(self, key: str = "") -> None:
        """An agent beside each rank, before the engine looks for it."""
        self.agents = [
            FakeAgent(self.path(rank), f"tcp://127.0.0.1:{7700 + rank}" + key) for rank in range(len(self.workers))
        ]

    def attach(self) -> None:
        """What an engine's start-up does; an agent that is there answers by the next step."""
        tp = len(self.workers)
        for rank, worker in enumerate(self.workers):
            worker.worker.attach(str(self.path(rank)), self.memory_of(rank, tp), self.layers)
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        )

    def ready(self, key: str = "") -> World:
        """Agents and engine up and acquainted."""
        self.start_agents(key)
        self.attach()
        self.clock.now += 1
        self.meet_agents()
        return self

    def meet_agents(self) -> None:
        self.steps(3)
        wait_for(self._knows_agents)  # the link's thread may be late on a busy machine

    def _knows_agents(self) -> bool:
        self.step()
        return bool(self.connector.scheduler._agents.is_all)

    def request(
        self,
        tokens: int = 40,
        *,
        prompt: list[int] | None = None,
        max_tokens: int = 4,
        name: str = "",
        prompt_logprobs: int | None = None,
        kv: Mapping[str, Any] | None = None,
        **params: Any,
    ) -> Request:
        """Add a request; `params` are its kv_transfer_params, `kv` is what else decides its KV."""
        number = next(self.numbers)
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=prompt_logprobs)
        request = Request(
            request_id=name or f"cmpl-name{number}-0-{number:08x}",
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=get_request_block_hasher(self.hashed, sha256),
            **{"prompt_token_ids": prompt or [number * 1000 + i for i in range(tokens)]} | dict(kv or {}),
        )
        request.kv_transfer_params = dict(params) or None
        self.scheduler.add_request(request)
        return request

    def prefill(self, tokens: int = 40, **more: Any) -> Request:
        """As the prefill side gets one from a proxy."""
        return self.request(tokens, max_tokens=1, do_remote_decode=True, do_remote_prefill=False, **more)

    def decode(self, tokens: int = 40, **more: Any) -> Request:
        """As the decode side gets one from a proxy."""
        told = {"remote_request_id": "theirs", "remote_host": "10.0.0.1", "remote_port": 7700}
        return self.request(tokens, **{"do_remote_prefill": True, "do_remote_decode": False} | told | more)

    def abort(self, request: Request) -> None:
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> Any:
        """One step of the engine; its outputs for the first client."""
        return self.end_step(*self.begin_step())

    def begin_step(self) -> tuple[Any, Any]:
        """What was scheduled, and what the workers say of it. vLLM may begin another before it has heard that."""
        for agent in self.agents:
            agent.pump()
        self.scheduled = scheduled = self.scheduler.schedule()
        return scheduled, self.aggregator.aggregate([self._work(worker, scheduled) for worker in self.workers])

    def end_step(self, scheduled: Any, said: Any) -> Any:
        result = self.scheduler.update_from_output(scheduled, said)
        for agent in self.agents:
            agent.pump()
        return result.get(0)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def run(self, limit: int = 50) -> list[Any]:
        """Step until nothing is left to do; every output."""
        outputs: list[Any] = []
        for _ in range(limit):
            if not self.scheduler.has_requests():
                return outputs
            step = self.step()
            outputs += step.outputs if step else []
        raise AssertionError(f"still busy after {limit} steps: {list(self.scheduler.requests)}")

    def finish(self) -> list[Any]:
        """The same, and then nothing is left anywhere."""
        outputs = self.run(100)
        self.assert_empty()
        return outputs

    def _work(self, worker: KVBridgeConnector, scheduled: Any) -> ModelRunnerOutput:
        """What vLLM's model runner does around a forward pass."""
        worker.handle_preemptions(scheduled.kv_connector_metadata)
        worker.bind_connector_metadata(scheduled.kv_connector_metadata)
        worker.start_load_kv(None)
        ids = list(scheduled.num_scheduled_tokens)
        requests = self.scheduler.requests
        sampled = [[7] if requests[i].num_computed_tokens >= requests[i].num_tokens else [] for i in ids]
        if ids:
            self.on_forward()
        said = self.said(worker, scheduled)
        said.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request: index for index, request in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=said,
        )

    def said(self, worker: KVBridgeConnector, scheduled: Any) -> KVConnectorOutput:
        """What both versions ask once the forward is enqueued; 0.26 saves nothing in a step without one."""
        if self.hooks == "0.26":
            if scheduled.num_scheduled_tokens:
                worker.wait_for_save()
            sent, received = worker.get_finished(scheduled.finished_req_ids)
            return KVConnectorOutput(
                finished_sending=sent,
                finished_recving=received,
                invalid_block_ids=worker.get_block_ids_with_load_errors(),
            )
        worker.wait_for_save()
        results = worker.get_transfer_results(scheduled.finished_req_ids)
        return KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
        )

    def block_ids(self, request: Request) -> list[int]:
        return self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def assert_empty(self) -> None:
        """No request, no block, nothing waited for is left anywhere."""
        scheduler = self.scheduler
        assert not scheduler.requests and not scheduler.running
        assert len(scheduler.waiting) == 0
        assert not scheduler.finished_recving_kv_req_ids and not scheduler.failed_recving_kv_req_ids
        assert not scheduler._inflight_prefills
        if HOOKS[0] == "0.32":
            assert len(scheduler.kv_holding_waiting) == 0 and not any(scheduler._kv_fetch_counts.values())
        else:
            assert len(scheduler.skipped_waiting) == 0 and not scheduler.deferred_frees
        assert self.free_blocks == self.cache.num_blocks - 1
        assert all(block.ref_cnt == 0 for block in scheduler.kv_cache_manager.block_pool.blocks if not block.is_null)
        ours = self.connector.scheduler
        assert not ours._sending and not ours._receiving and not ours._unfetched
        assert not ours._fetches and not any(each.waiting for each in ours._fetches._of_prompt.values())
        assert not ours._pressure._tokens and not ours._pressure._queue and not ours.held
        assert not ours.held._pinned and not ours.held.is_unpinning
        for worker in self.workers:
            assert not worker.worker._receives and not worker.worker._sends and not any(worker.worker._joined.values())
            conversation = worker.worker._conversation
            assert not conversation._open and not any(isinstance(key, int) for key in conversation._standing)


def _cache(specs: Sequence[Any], blocks: int) -> KVCacheConfig:
    one = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec([f"layer{index or ''}"], spec) for index, spec in enumerate(specs or [one])]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def _config(folder: Path, tp: int, budget: int, more: dict[str, Any]) -> VllmConfig:
    model = write_config(folder / "model")
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=more.pop("caching", True))
    cache.kv_cache_layout = "LBNHC"
    transfer = KVTransferConfig(
        kv_connector="KVBridgeConnector",
        kv_connector_module_path="kvbridge.adapters.vllm.connector",
        kv_role=more.pop("role", "kv_both"),
        kv_load_failure_policy=more.pop("on_failure", "recompute"),
        kv_connector_extra_config={"kvbridge_connect_s": 0.001, **more.pop("extra", {})},
        engine_id="engine-under-test",
    )
    described = ModelConfig(model=str(model), skip_tokenizer_init=True, dtype="bfloat16")
    ranks = {"tensor_parallel_size": tp, "decode_context_parallel_size": more.pop("cp", 1)}
    parallel = ParallelConfig(**ranks, distributed_executor_backend="mp")
    if drafts := more.pop("drafts", 0):
        ngrams = {"prompt_lookup_max": 4, "prompt_lookup_min": 1, "num_speculative_tokens": drafts}
        of = {"target_model_config": described, "target_parallel_config": parallel}
        more["speculative"] = SpeculativeConfig(method="ngram_gpu", **ngrams, **of)
    is_async = more.pop("async_scheduling", False)
    config = VllmConfig(
        model_config=described,
        speculative_config=more.pop("speculative", None),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=budget,
            max_model_len=2048,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            **more,
        ),
        cache_config=cache,
        kv_transfer_config=transfer,
        device_config=DeviceConfig("cpu"),
        parallel_config=parallel,
    )
    config.scheduler_config.async_scheduling = is_async  # vLLM's platform for CPUs takes it back
    return config
