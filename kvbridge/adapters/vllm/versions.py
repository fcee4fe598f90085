"""What differs between the versions of vLLM that we know, 0.26 to 0.33: the one place that asks which one this is.

It never compares version numbers: it looks whether a name exists. Up to 0.28 a cache may hold all layers in one tensor,
and a connector is handed just that tensor. Before 0.30 a failed receive can be reported in blocks only. From
0.32 on groups may stay out of transfers, and some caches whole on every rank of decode context parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from kvbridge_proto.pool import Shard

from ...errors import OperatorError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def transfer_ids(cache: KVCacheConfig) -> tuple[int, ...]:
    """Indices of the groups that travel, in vLLM's own numbering."""
    return tuple(getattr(cache, "transfer_group_ids", range(len(cache.kv_cache_groups))))


def transfer_groups(cache: KVCacheConfig) -> tuple[Any, ...]:
    """The groups that travel; a pool numbers them from 0."""
    return tuple(cache.kv_cache_groups[index] for index in transfer_ids(cache))


def transfer_tables(cache: KVCacheConfig, tables: Sequence[Sequence[int]]) -> list[list[int]]:
    """The block tables of the groups that travel, out of a request's tables of all groups."""
    return [list(tables[index]) for index in transfer_ids(cache)]


def clears_last_blocks(cache: KVCacheConfig) -> bool:
    """Whether vLLM clears the blocks that requests get, and later those of a failed receive that it had left to us."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    return bool(getattr(cache, "needs_kv_cache_zeroing", False)) and hasattr(
        KVCacheManager, "record_blocks_for_zeroing"
    )


def check_groups(cache: KVCacheConfig) -> None:
    """Raises OperatorError if this version cannot report a failed receive for so many groups.

    With states even for one: no engine of such a version was tried with any.
    """
    from vllm import __version__
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    groups = transfer_groups(cache)
    if hasattr(base, "KVConnectorTransferResults"):
        return
    if any(type(group.kv_cache_spec).__name__ == "MambaSpec" for group in groups):
        raise OperatorError("groups_unsupported", f"recurrent states, vLLM {__version__}; needs vLLM 0.30")
    if len(groups) > 1:
        raise OperatorError(
            "groups_unsupported",
            f"kv_cache_groups: {len(groups)}, vLLM {__version__} cannot be told of a failed receive in more than one; "
            "needs --disable-hybrid-kv-cache-manager",
        )


def takes_first_token_for_decode(spec: Any) -> bool:
    """Whether a state goes on from what its block held, of whatever request, after a first step of one token.

    vLLM takes that step for a decode: beside lightning always (0.30 to 0.33), beside Gated DeltaNet and KDA in 0.30.
    """
    match getattr(getattr(spec, "mamba_type", None), "name", ""):
        case "LINEAR":
            return True
        case "GDN_ATTN":
            from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

            return "uniform_spec_sequence_length" not in GDNAttentionMetadata.__dataclass_fields__
    return False


def has_interleaved_rows() -> bool:
    """Whether a row of DeepSeek V4.1 has its scales behind it (0.33). In 0.32 they are behind all rows of the page."""
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

    return "packed_block_stride_alignment" in signature(DeepseekV4SWACache.__init__).parameters


def block_tokens(spec: Any, parallel: Any) -> int:
    """Tokens of the request between one entry of a block table and the next.

    Under decode context parallelism an entry spans the tokens of all ranks' blocks; a block holds its rank's share.
    """
    return int(spec.block_size) * (getattr(parallel, "decode_context_parallel_size", 1) if is_split(spec) else 1)


def is_split(spec: Any) -> bool:
    """Whether ranks of decode context parallelism each keep some tokens only. Before 0.32 they do of every spec."""
    return bool(getattr(spec, "dcp_sharded", True))


def pcp_size(parallel: Any) -> int:
    """How many ranks of prefill context parallelism there are for each tensor-parallel one."""
    return int(getattr(parallel, "prefill_context_parallel_size", 1))


def interleave_of(parallel: Any) -> int:
    """How many consecutive tokens belong to one rank of decode context parallelism."""
    for name in ("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size"):
        if getattr(parallel, name, None):
            return int(getattr(parallel, name))
    return 1


def replica_of(parallel: Any) -> int:
    """The number of this replica of data parallelism. From 0.32 on it is there for models without experts too."""
    return int(getattr(parallel, "data_parallel_index", None) or parallel.data_parallel_rank)


def shard_of(config: VllmConfig) -> Shard:
    """Which rank of its engine this process is. Raises OperatorError for both kinds of context parallelism at once.

    Ranks of prefill context parallelism alone all hold every token (0.26 to 0.33 gather K and V before they write
    them). Ranks of decode context parallelism alone are neighbours among the tensor-parallel ones. With both, vLLM
    splits the tokens among prefill ranks too, in another order.
    """
    parallel = config.parallel_config
    pcp_rank, sharing = 0, pcp_size(parallel)
    cp_rank, cp_size = 0, getattr(parallel, "decode_context_parallel_size", 1)
    if sharing > 1 and cp_size > 1:
        raise OperatorError(
            "context_parallel_unsupported",
            f"prefill_context_parallel_size {sharing}, decode_context_parallel_size {cp_size}; needs one of them 1",
        )
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tp, pp = get_tp_group(), get_pp_group()
    if sharing > 1:
        from vllm.distributed.parallel_state import get_pcp_group

        pcp_rank = get_pcp_group().rank_in_group
    if cp_size > 1:
        from vllm.distributed.parallel_state import get_dcp_group

        cp_rank = get_dcp_group().rank_in_group
    return Shard(
        tp_rank=pcp_rank * tp.world_size + tp.rank_in_group,
        tp_size=sharing * tp.world_size,
        pp_rank=pp.rank_in_group,
        pp_size=pp.world_size,
        cp_rank=cp_rank,
        cp_size=cp_size,
        cp_interleave=interleave_of(parallel) if cp_size > 1 else 1,
    )


def layers_of(tensor: torch.Tensor, backend: Any, cache: KVCacheConfig) -> dict[str, torch.Tensor]:
    """Each layer's view of the one tensor that held all layers up to 0.28, as vLLM itself makes these views.

    The tensor's dimensions are in memory order; the backend knows which one is the layers' and what the others are.
    """
    try:
        order = backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    except (AttributeError, NotImplementedError):
        order = tuple(range(tensor.dim()))
    layers = tensor.permute(*(order.index(dimension) for dimension in range(len(order)))).unbind(0)
    return {
        name: view for placed, view in zip(cache.kv_cache_tensors, layers, strict=True) for name in placed.shared_by
    }
