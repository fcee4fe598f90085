"""Differences between versions of vLLM, each detected by name; and the block tables of context-parallel ranks."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvbridge_proto.common import Blocks

from kvbridge.adapters.vllm.block_tables import GroupTables, TableGroup
from kvbridge.adapters.vllm.versions import block_tokens, interleave_of, layers_of, shard_of, transfer_ids
from kvbridge.errors import OperatorError


def uniform(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """vLLM 0.26's `allocate_uniform_kv_caches`: the tensor that a connector gets, and the views that layers get."""
    physical = tuple(shape[dimension] for dimension in order)
    whole = torch.arange(prod(shape)).view(physical)
    return whole, list(whole.permute(*(order.index(dimension) for dimension in range(len(order)))).unbind(0))


@pytest.mark.parametrize("order", [(1, 0, 3, 2, 4), (1, 2, 0, 3, 4), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("says_so", [True, False])
def test_layers_of_one_tensor_are_what_the_layers_themselves_see(order: tuple[int, ...], says_so: bool) -> None:
    """A backend that reorders nothing need not say so."""
    order = order if says_so else tuple(range(5))
    whole, views = uniform((3, 6, 2, 16, 8), order)
    said = {"get_kv_cache_stride_order": lambda include_num_layers_dimension: order}
    backend = SimpleNamespace(**said if says_so else {})
    cache: Any = SimpleNamespace(kv_cache_tensors=[SimpleNamespace(shared_by=[f"layer.{i}"]) for i in range(3)])
    found = layers_of(whole, backend, cache)
    assert list(found) == ["layer.0", "layer.1", "layer.2"]
    for mine, theirs in zip(found.values(), views, strict=True):
        assert torch.equal(mine, theirs) and mine.stride() == theirs.stride()
        assert mine.data_ptr() == theirs.data_ptr()


def test_all_groups_travel_unless_a_version_says_otherwise() -> None:
    cache: Any = SimpleNamespace(kv_cache_groups=[1, 2, 3])
    assert transfer_ids(cache) == (0, 1, 2)
    cache.transfer_group_ids = (0, 2)
    assert transfer_ids(cache) == (0, 2)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, 1),
        ({"dcp_kv_cache_interleave_size": 4}, 4),
        ({"cp_kv_cache_interleave_size": 16, "dcp_kv_cache_interleave_size": 1}, 16),
        ({"cp_kv_cache_interleave_size": None, "dcp_kv_cache_interleave_size": 8}, 8),
    ],
)
def test_the_interleave_has_two_names(said: dict[str, Any], expected: int) -> None:
    assert interleave_of(SimpleNamespace(**said)) == expected


def test_an_entry_of_a_shared_table_holds_all_ranks_tokens() -> None:
    parallel = SimpleNamespace(decode_context_parallel_size=4)
    assert block_tokens(SimpleNamespace(block_size=16), parallel) == 64
    assert block_tokens(SimpleNamespace(block_size=16, dcp_sharded=False), parallel) == 16
    assert block_tokens(SimpleNamespace(block_size=16), SimpleNamespace()) == 16
    tables = GroupTables((TableGroup(64, "full", 0),))
    assert tables.wanted([[7, 8, 9]], 70, 130) == (Blocks(0, 1, (8, 9)),)
    assert tables.offered([[7, 8, 9]], [1], 128, None) == (Blocks(0, 1, (8,)),)
    assert tables.offered([[7, 8, 9]], [2], 128, None) == ()


def test_both_kinds_of_context_parallelism_at_once_are_refused() -> None:
    parallel = SimpleNamespace(prefill_context_parallel_size=2, decode_context_parallel_size=4)
    config: Any = SimpleNamespace(parallel_config=parallel)
    with pytest.raises(OperatorError, match=r"prefill_context_parallel_size 2, decode_context_parallel_size 4; needs"):
        shard_of(config)
