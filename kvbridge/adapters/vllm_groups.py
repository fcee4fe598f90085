"""Which of vLLM's KV cache groups travel, in any version we know. Pure.

vLLM 0.32 lets a group stay out of transfers (`enable_kv_transfer`); in 0.26 all of them take part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def transfer_ids(cache: KVCacheConfig) -> tuple[int, ...]:
    """Indices of the groups that travel, in vLLM's own numbering."""
    return tuple(getattr(cache, "transfer_group_ids", range(len(cache.kv_cache_groups))))


def transfer_groups(cache: KVCacheConfig) -> tuple[Any, ...]:
    """Those groups; a pool numbers them from 0."""
    return tuple(cache.kv_cache_groups[index] for index in transfer_ids(cache))


def transfer_tables(cache: KVCacheConfig, tables: Sequence[Sequence[int]]) -> list[list[int]]:
    """Their block tables out of a request's tables of all groups."""
    return [list(tables[index]) for index in transfer_ids(cache)]
