"""MiniMax M3 in SGLang: K, V and plain index keys of a real pool lie where the planes say, by SGLang's own writers."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvbridge_proto.pool import Shard

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not in this environment (make test-sglang)", allow_module_level=True)

from kvbridge.adapters.sglang.pool import check, describe, moved
from kvbridge.device.handles import export_all
from kvbridge.errors import OperatorError
from kvbridge.geometry.compat import Convertible, verdict
from testing.oracle import take_rows
from testing.refusals import refused
from tests.integration.adapters.small import held
from tests.integration.adapters.test_sglang_pool import (
    HEADS,
    LAYERS,
    TOKENS,
    WIDTH,
    described,
    on_a_cpu,
    plain,
    plain_index,
    queue_of,
)

pytestmark = pytest.mark.sglang
__all__ = ["on_a_cpu"]  # a fixture


def store(pool: Any, layer: int, slots: torch.Tensor, scale: float | None = None) -> dict[str, torch.Tensor]:
    """Rows that SGLang itself writes for a layer with index keys, as its backend does on a CPU."""
    rows = {"k": torch.randn(len(slots), HEADS, WIDTH), "v": torch.randn(len(slots), HEADS, WIDTH)}
    rows |= {"index_key": torch.randn(len(slots), 1, 128)}
    rows = {part: each.to(torch.bfloat16) for part, each in rows.items()}
    attention = SimpleNamespace(layer_id=layer)
    scales = [None, None, scale, None]
    pool.set_fused_kv_index_buffer(
        attention, slots, *(rows[part].clone() for part in ("k", "v", "index_key")), None, *scales
    )
    return rows


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize(
    ("dtype", "index"), [("bfloat16", "bfloat16"), ("float8_e4m3fn", "bfloat16"), ("bfloat16", "float8_e4m3fn")]
)
def test_every_row_is_where_sglang_writes_it(page: int, dtype: str, index: str) -> None:
    """In fp8 the main rows have the layer's scales, and index keys a scale of their own, if the checkpoint has one."""
    types = getattr(torch, dtype), getattr(torch, index)
    pool = plain_index(page, types[0], index_dtype=types[1])
    memory = described(pool)
    planes = {(plane.layer, plane.part): plane for plane in memory.pool.planes}
    assert set(planes) == {
        *((layer, part) for layer in range(LAYERS) for part in "kv"),
        *((layer, "index_key") for layer in range(1, LAYERS)),
    }
    assert [group.block_tokens for group in memory.pool.groups] == [page]
    slots = torch.randperm(TOKENS)[:20] + page
    for layer in range(1, LAYERS):
        for part, rows in store(pool, layer, slots).items():
            expected = rows.to(types[part == "index_key"]).contiguous().view(torch.uint8).numpy()
            assert np.array_equal(take_rows(held(memory), planes[layer, part], slots.numpy()), expected), part


@pytest.mark.parametrize(("total", "size"), [(4, 1), (4, 2), (4, 4), (2, 4)])
def test_heads_are_cut_or_shared_and_index_keys_are_whole_on_every_rank(total: int, size: int) -> None:
    count = max(1, total // size)
    for rank in range(size):
        memory = described(plain_index(heads=count), Shard(tp_rank=rank, tp_size=size), heads=total)
        cut = (rank * total // size, count, total)
        heads = {plane.part: (plane.first_head, plane.heads, plane.total_heads) for plane in memory.pool.planes}
        assert heads == {"k": cut, "v": cut, "index_key": (0, 1, 1)}


def test_a_stage_numbers_its_layers_as_the_model_does() -> None:
    pool = plain_index(start_layer=2, end_layer=4, sparse_layer_ids=[1, 2, 3], disable_value_sparse_layer_ids=[1, 2, 3])
    memory = described(pool, Shard(pp_rank=1, pp_size=2), layers=4)
    assert [layer is None for layer in memory.pool.model.layers] == [True, True, False, False]
    assert {(plane.layer, plane.part) for plane in memory.pool.planes} == {
        (layer, part) for layer in (2, 3) for part in ("k", "v", "index_key")
    }
    planes, slots = {plane.part: plane for plane in memory.pool.planes if plane.layer == 3}, torch.arange(16, 30)
    for part, rows in store(pool, 3, slots).items():
        assert np.array_equal(take_rows(held(memory), planes[part], slots.numpy()), rows.view(torch.uint8).numpy())


def test_a_scale_of_index_keys_is_theirs() -> None:
    """`RadixAttention.idx_k_scale_float`, by which SGLang divides what it stores in fp8."""
    pool = plain_index(index_dtype=torch.float8_e4m3fn)
    queue = queue_of(pool)
    for attention in queue.scheduler.tp_worker.model_runner.model:
        attention.idx_k_scale_float = 0.5
    memory = describe(queue, Shard(), model_name="m", engine_id="e")
    (plane,) = (each for each in memory.pool.planes if (each.layer, each.part) == (1, "index_key"))
    assert (plane.codec.name, plane.codec.scales) == ("fp8_e4m3", (0.5,))
    slots = torch.arange(16, 20)
    rows = store(pool, 1, slots, 0.5)["index_key"]
    stored = torch.from_numpy(take_rows(held(memory), plane, slots.numpy())).view(torch.float8_e4m3fn).float()
    assert torch.allclose(stored * 0.5, rows.float(), rtol=0.07, atol=1e-3)
    assert isinstance(verdict(memory.pool, described(plain_index()).pool), Convertible)


def test_what_moved_into_shared_memory_is_found_again() -> None:
    pool = plain_index()
    memory = described(pool)
    handles, _ = export_all(memory.storages)
    assert len(handles) == len(memory.storages)
    moved(pool)
    main = pool.main_pool
    assert main.data_ptrs.tolist() == [buffer.data_ptr() for buffer in (*main.k_buffer, *main.v_buffer)]
    slots = torch.arange(16, 30)
    planes = {plane.part: plane for plane in memory.pool.planes if plane.layer == 2}
    for part, rows in store(pool, 2, slots).items():
        assert np.array_equal(take_rows(held(memory), planes[part], slots.numpy()), rows.view(torch.uint8).numpy())


def test_forms_that_are_not_carried_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.utils import setup_state_kv_args

    valued = plain_index(disable_value_sparse_layer_ids=[1])
    with refused(OperatorError, "cache_unsupported", "index values beside index keys, nor do"):
        check(queue_of(valued))
    with pytest.raises(NotImplementedError, match="index value"):
        setup_state_kv_args(KVArgs(), valued)
    other = plain_index()
    other.main_pool = plain()
    other.main_pool.__class__ = type("MHATokenToKVPoolMXFP8", (type(other.main_pool),), {})
    with refused(OperatorError, "cache_unsupported", "of MHATokenToKVPoolMXFP8 and MHATokenToKOnlyPool, layout nhd"):
        check(queue_of(other))
    other = plain_index()
    other.dense_pool = plain()
    with refused(OperatorError, "cache_unsupported", "MHATokenToKOnlyPool and MHATokenToKVPool, layout nhd, must be"):
        check(queue_of(other))
    other = plain_index()
    other.index_k_pool.dtype = torch.uint8
    with refused(OperatorError, "codec_unknown", "index keys in torch.uint8"):
        check(queue_of(other))
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    with refused(OperatorError, "cache_unsupported", "layout hnd, must be .+ layout nhd"):
        check(queue_of(plain_index()))


def test_a_row_is_the_same_numbers_as_in_vllm() -> None:
    """SGLang's own module beside the formula of vLLM's kernel (`normAndRope`): a Gemma norm, then half of it turned.

    Nothing else is done to a key, such as the rotation of DeepSeek V3.2's.
    """
    from sglang.srt.layers.layernorm import GemmaRMSNorm
    from sglang.srt.layers.rotary_embedding import get_rope
    from sglang.srt.models.minimax_m3 import MiniMaxM3Attention

    rotary, tokens, eps = 64, 7, 1e-6
    norms = [GemmaRMSNorm(128, eps=eps) for _ in "qk"]
    for norm in norms:
        norm.weight.data = torch.randn(128)
    module = SimpleNamespace(
        _can_use_rocm_index_qk_norm_rope_static=False,
        idx_head_dim=128,
        index_q_norm=norms[0].forward_native,
        index_k_norm=norms[1].forward_native,
        index_rotary_emb=get_rope(128, rotary, 256, 10000, True, None).forward_native,
    )
    module._index_qk_norm = lambda q, k: MiniMaxM3Attention._index_qk_norm(module, q, k)
    keys, positions = torch.randn(tokens, 128), torch.arange(100, 100 + tokens)
    _, made = MiniMaxM3Attention._index_qk_norm_rope(module, positions, torch.randn(tokens, 256), keys.clone())
    normed = keys * torch.rsqrt(keys.pow(2).mean(-1, keepdim=True) + eps) * (1 + norms[1].weight)
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
    first, second = normed[:, : rotary // 2], normed[:, rotary // 2 : rotary]
    turned = [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()]
    expected = torch.cat([*turned, normed[:, rotary:]], -1)
    assert torch.allclose(made.view(tokens, 128), expected, atol=1e-4)
