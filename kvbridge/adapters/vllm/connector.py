"""KVBridgeConnector: what vLLM loads. Passes each hook to the scheduler's or the worker's half; holds no logic.

Load it by its short name (the `vllm.general_plugins` entry point registers it) or by module path: `"kv_connector":
"KVBridgeConnector", "kv_connector_module_path": "kvbridge.adapters.vllm.connector", "kv_role": "kv_producer"`.
Runs with vLLM 0.26 to 0.33 (`versions.py`); options are in `options.VLLMOptions`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from .hooks import install
from .last_blocks import loaded_ids
from .layers import has_unequal_rows
from .options import VLLMOptions
from .scheduler import SchedulerSide
from .step import AgentAddress, AgentAddresses, ConnectorStep, RankKey
from .versions import layers_of
from .worker import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

Finished = tuple[bool, dict[str, Any] | None]


class KVBridgeConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One in the scheduler's process and one in each worker; `role` says which half it is."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = options = VLLMOptions.read(self._kv_transfer_config.kv_connector_extra_config)
        self._load_errors: set[int] = set()
        if role is KVConnectorRole.SCHEDULER:
            install(KVBridgeConnector)
            self.scheduler = SchedulerSide(vllm_config, kv_cache_config, options)
        else:
            self.worker = WorkerSide(vllm_config, kv_cache_config, options)

    # Scheduler:

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[RankKey, KVConnectorHandshakeMetadata]) -> None:
        addresses = {rank: said for rank, said in metadata.items() if isinstance(said, AgentAddress)}
        self.scheduler.agents_are(addresses)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self.scheduler.bind_pool(gpu_block_pool)

    def has_pending_block_frees(self) -> bool:
        """vLLM since 0.30 asks this before it preempts a running request."""
        return self.scheduler.may_free_blocks()

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether `num_computed_tokens` may count rows that outlived the state after them: a state comes anyway.

        Of a window vLLM would count rows too that are not there any more, and those before `num_computed_tokens` do
        not come, unless its prefix cache has none of them. Of several groups of all tokens it asks the first only, and
        another may have lost rows that this one has; it looks for those of groups that do not travel, too.
        """
        specs = (each.kv_cache_spec for each in self._kv_cache_config.kv_cache_groups)
        return not (self.scheduler.has_cached_windows or has_unequal_rows(specs))

    def on_new_request(self, request: Request) -> None:
        self.scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """What need not be computed again, and of whose blocks vLLM need not clear the rest.

        Windows that vLLM computes again after a prefix hit come whole, and their kernels read listed rows only. Of
        groups of all tokens our worker clears what must be cleared (`last_blocks.py`). Of others vLLM's workers clear
        blocks that a request gets before we hear of the step: so before the agent writes there.
        """
        return loaded_ids(self._kv_cache_config)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler.next_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler.heard(connector_output)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """The last hook that vLLM calls in each step."""
        self.scheduler.step_over()
        return ()

    def request_finished(self, request: Request, block_ids: list[int]) -> Finished:
        return self.scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> Finished:
        return self.scheduler.finished(request, block_ids)

    def reset_cache(self) -> bool:
        """Of vLLM's own reset we know already (`hooks.py`); this one may be asked for alone."""
        self.scheduler.cache_is_reset()
        return True

    def has_pending_push_work(self) -> bool:
        return self.scheduler.has_messages

    # Worker:

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register(kv_caches)

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Up to 0.28: whether all layers should be in one tensor. Later versions have layouts for that."""
        return self._options.cross_layer

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: type[Any]) -> None:
        self.worker.register(layers_of(kv_cache, attn_backend, self._kv_cache_config))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker.handshake()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, ConnectorStep)
        self.worker.before_forward(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: the agent writes between steps."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs only once all its layers are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing: the agent reads the cache itself."""

    def wait_for_save(self) -> None:
        """Called when the forward is enqueued, drafts included. Waits for nothing."""
        self.worker.after_forward()

    def clear_connector_metadata(self) -> None:
        """The end of a step. 0.26 skips `wait_for_save` when nothing was computed."""
        self.worker.after_forward()
        super().clear_connector_metadata()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Used since 0.30."""
        reports = self.worker.results()
        return base.KVConnectorTransferResults(reports.sent, reports.received, reports.failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Used before 0.30. That has no failed receives: they show as blocks with load errors instead."""
        reports = self.worker.results()
        self._load_errors |= reports.failed_blocks
        return reports.sent or None, reports.received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        errors, self._load_errors = self._load_errors, set()
        return errors

    def build_connector_worker_meta(self) -> AgentAddresses | None:
        return self.worker.changed_address()

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self.worker.close()
