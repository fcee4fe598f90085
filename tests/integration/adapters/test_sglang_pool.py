"""Descriptions of SGLang's real pools: every number lies where its plane says. No server, no model."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from kvbridge_proto.pool import Shard

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not in this environment (make test-sglang)", allow_module_level=True)

from kvbridge.adapters.engine.memory import Memory
from kvbridge.adapters.engine.records import Heads
from kvbridge.adapters.engine.unsupported import UNSUPPORTED
from kvbridge.adapters.sglang.pool import POOLS, check, describe, moved
from kvbridge.device.handles import export_all
from kvbridge.errors import OperatorError
from kvbridge.geometry.check import check_pool
from testing.oracle import take_rows
from testing.refusals import refused
from tests.integration.adapters.small import held

pytestmark = pytest.mark.sglang

TOKENS, LAYERS, HEADS, WIDTH = 64, 3, 4, 8


@pytest.fixture(scope="module", autouse=True)
def on_a_cpu(sglang: None) -> None:
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cpu"))


COMMON = {"size": TOKENS, "layer_num": LAYERS, "device": "cpu", "enable_memory_saver": False}


def plain(page: int = 16, dtype: torch.dtype = torch.bfloat16, heads: int = HEADS, **more: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    own = {"page_size": page, "dtype": dtype, "head_num": heads, "head_dim": WIDTH}
    return MHATokenToKVPool(**COMMON | own | more)


def latent(page: int = 16, **more: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    own = {"page_size": page, "dtype": torch.float32, "kv_lora_rank": 12, "qk_rope_head_dim": 4}
    return MLATokenToKVPool(**COMMON | own | more)


def sparse(dtype: torch.dtype = torch.bfloat16, kv_cache_dim: int = 576, **more: Any) -> Any:
    """Latents and index keys in pages of 64, the only ones that SGLang takes."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    own = {"page_size": 64, "dtype": dtype, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    return DSATokenToKVPool(**COMMON | own | {"kv_cache_dim": kv_cache_dim} | more)


def plain_index(page: int = 16, dtype: torch.dtype = torch.bfloat16, heads: int = HEADS, **more: Any) -> Any:
    """MiniMax M3's: K and V in every layer, index keys in those that are sparse."""
    from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool

    own: dict[str, Any] = {"size": TOKENS, "page_size": page, "dtype": dtype, "head_num": heads, "head_dim": WIDTH}
    own |= {"idx_head_dim": 128, "device": "cpu", "start_layer": 0, "end_layer": LAYERS}
    sparse_layers = list(range(1, own["end_layer"] if "end_layer" not in more else more["end_layer"]))
    own |= {"dense_layer_ids": [0], "sparse_layer_ids": sparse_layers, "disable_value_sparse_layer_ids": sparse_layers}
    return MiniMaxSparseKVPool(**own | more)


class RadixAttention(torch.nn.Module):
    """By its name: what the description looks for among the model's modules."""

    def __init__(self, layer_id: int, k_scale: float | None = None, window: int = -1) -> None:
        super().__init__()
        self.layer_id, self.sliding_window_size = layer_id, window
        self.k_scale, self.v_scale = k_scale, None if k_scale is None else k_scale * 2
        self.k_scale_float, self.v_scale_float = self.k_scale, self.v_scale


class Indexer(torch.nn.Module):
    """By its name, as RadixAttention. On CUDA SGLang's own is fused if the rotary embedding is interleaved."""

    def __init__(self, layer_id: int, is_fused: bool = True) -> None:
        super().__init__()
        self.layer_id, self.use_dsa_indexer_fusion = layer_id, is_fused


def queue_of(pool: Any, heads: int = HEADS, layers: int = LAYERS, **more: Any) -> Any:
    """As much of the scheduler's queue as a description takes."""
    attentions = [RadixAttention(layer, **more) for layer in range(layers)]
    config = SimpleNamespace(
        get_total_num_kv_heads=lambda: heads, hf_text_config=SimpleNamespace(num_hidden_layers=layers)
    )
    runner = SimpleNamespace(model=torch.nn.ModuleList([*attentions, *map(Indexer, range(layers))]))
    return SimpleNamespace(
        token_to_kv_pool=pool,
        draft_token_to_kv_pool=None,
        metadata_buffers=SimpleNamespace(output_ids=torch.zeros(1)),
        scheduler=SimpleNamespace(
            model_config=config, tp_worker=SimpleNamespace(model_runner=runner), req_to_token_pool=None
        ),
    )


def drafting(queue: Any, *pools: Any, heads: int = HEADS, path: str = "/models/eagle", algorithm: str = "EAGLE") -> Any:
    """The queue of a server whose draft model keeps its rows in these pools, one for each of its modules."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    runners = [
        SimpleNamespace(
            token_to_kv_pool=pool,
            model=torch.nn.ModuleList(
                module(pool.start_layer + i)
                for i in range(getattr(pool, "layer_num", 0))
                for module in (RadixAttention, Indexer)
            ),
            model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
        )
        for pool in pools
    ]
    queue.draft_token_to_kv_pool = pools[0]
    queue.scheduler.draft_worker = SimpleNamespace(_draft_model_runners=lambda: tuple(runners))
    queue.scheduler.spec_algorithm = SpeculativeAlgorithm.from_string(algorithm)
    queue.scheduler.server_args = SimpleNamespace(model_path="/models/llama", speculative_draft_model_path=path)
    return queue


def described(pool: Any, shard: Shard | None = None, **more: Any) -> Memory:
    memory = describe(queue_of(pool, **more), shard or Shard(), model_name="m", engine_id="e")
    assert not check_pool(memory.pool)
    return memory


def assert_rows(memory: Memory, pool: Any) -> None:
    """Every number of SGLang's buffers, [slot, head, element], is where its plane says."""
    for plane in memory.pool.planes:
        buffer = (pool.k_buffer if plane.part == "k" else pool.v_buffer)[plane.layer]
        slots = buffer.transpose(1, 2).flatten(0, 1) if pool.use_hnd else buffer
        found = take_rows(held(memory), plane, np.arange(len(slots)))
        assert np.array_equal(found, slots.contiguous().view(torch.uint8).numpy())


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_every_number_lies_where_its_plane_says(page: int, dtype: torch.dtype) -> None:
    """Keys and values are halves of one allocation; SGLang writes by slots."""
    pool = plain(page, dtype)
    memory = described(pool)
    assert [group.block_tokens for group in memory.pool.groups] == [page]
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.view(torch.uint8).random_(256)
    assert_rows(memory, pool)


def test_heads_before_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLANG_USE_HND_KVCACHE; its own backends refuse such a pool, and so its lists of buffers do."""
    from kvbridge.adapters.sglang.building import building
    from kvbridge.adapters.sglang.plugin import _get_contiguous_buf_infos

    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    pool = plain()
    assert pool.k_buffer[0].shape == (TOKENS // 16 + 1, HEADS, 16, WIDTH)
    memory = described(pool)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.view(torch.int16).copy_(torch.arange(buffer.numel(), dtype=torch.int16).reshape(buffer.shape))
    assert_rows(memory, pool)
    listed = type(pool).get_contiguous_buf_infos
    with pytest.raises(AssertionError, match="HND"):
        _get_contiguous_buf_infos(listed, pool)
    token = building.set(object())
    try:
        assert len(_get_contiguous_buf_infos(listed, pool)[0]) == 2 * LAYERS and pool.use_hnd
    finally:
        building.reset(token)


def test_keys_and_values_of_other_widths_have_allocations_of_their_own() -> None:
    memory = described(plain(v_head_dim=4))
    assert len(memory.storages) == 2 * LAYERS
    assert {plane.part: plane.codec.width for plane in memory.pool.planes} == {"k": WIDTH, "v": 4}
    assert {(layer.key_width, layer.value_width) for layer in memory.pool.model.layers if layer} == {(WIDTH, 4)}


def test_a_latent_is_one_plane_on_every_rank() -> None:
    memory = described(latent(), Shard(tp_rank=1, tp_size=2))
    assert {plane.part for plane in memory.pool.planes} == {"latent"}
    assert {(plane.first_head, plane.heads, plane.total_heads) for plane in memory.pool.planes} == {(0, 1, 1)}
    assert memory.pool.model.layers[0] is not None
    assert (memory.pool.model.layers[0].key_width, memory.pool.model.layers[0].rope_width) == (16, 4)


@pytest.mark.parametrize(
    ("total", "size", "held"),
    [
        (4, 2, [(0, 2), (2, 2)]),
        (4, 4, [(0, 1), (1, 1), (2, 1), (3, 1)]),
        (2, 4, [(0, 1), (0, 1), (1, 1), (1, 1)]),
        (1, 2, [(0, 1), (0, 1)]),
    ],
)
def test_each_rank_says_which_heads_it_holds(total: int, size: int, held: list[tuple[int, int]]) -> None:
    assert [(heads.first, heads.count) for rank in range(size) for heads in [Heads.of(total, rank, size)]] == held
    for rank, (first, count) in enumerate(held):
        memory = described(plain(heads=count), Shard(tp_rank=rank, tp_size=size), heads=total)
        assert {(plane.first_head, plane.heads) for plane in memory.pool.planes} == {(first, count)}


def test_a_stage_knows_its_own_layers_only() -> None:
    pool = plain(layer_num=2, start_layer=1, end_layer=3)
    memory = described(pool, Shard(pp_rank=1, pp_size=2), layers=3)
    assert [layer is None for layer in memory.pool.model.layers] == [True, False, False]
    assert {plane.layer for plane in memory.pool.planes} == {1, 2}


def test_scales_are_those_of_the_layers() -> None:
    memory = described(plain(dtype=torch.float8_e4m3fn), k_scale=0.5)
    assert {plane.part: plane.codec.scales for plane in memory.pool.planes} == {"k": (0.5,), "v": (1.0,)}
    assert all(plane.codec.scales == () for plane in described(plain()).pool.planes)


def test_a_window_is_said_as_models_say_it() -> None:
    """A window whose memory is not given up: SGLang counts the tokens before the current one."""
    layer = described(plain(), window=1023).pool.model.layers[0]
    assert layer is not None and (layer.kind, layer.window) == ("sliding", 1024)


def test_what_moved_into_shared_memory_is_found_again() -> None:
    for pool in (plain(), latent()):
        memory = described(pool)
        handles, fds = export_all(memory.storages)
        assert len(handles) == len(memory.storages) and len(fds) == len(handles)
        moved(pool)
        buffers = pool.kv_buffer if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]
        assert pool.data_ptrs.tolist() == [buffer.data_ptr() for buffer in buffers]


def renew(pool: Any) -> None:
    """It becomes one of a class that SGLang may have one day, and that keeps its rows in its own way."""
    pool.__class__ = type(f"{type(pool).__name__}OfItsOwn", (type(pool),), {})


@pytest.mark.parametrize("name", POOLS)
def test_a_class_that_is_made_of_a_known_pool_is_not_known(name: str) -> None:
    renew(pool := object.__new__(pool_class(name)))
    with refused(OperatorError, "cache_unsupported", f"KV pool: {name}OfItsOwn, supported are "):
        check(queue_of(pool))


def test_what_cannot_be_described_is_refused_by_name() -> None:
    renew(other := plain())
    tiled = plain()
    tiled.kv_cache_layout = "vectorized_5d"
    for queue, said in ((queue_of(other), "OfItsOwn"), (queue_of(tiled), "vectorized_5d")):
        with pytest.raises(OperatorError) as caught:
            describe(queue, Shard(), model_name="m", engine_id="e")
        assert caught.value.code == "cache_unsupported" and said in str(caught.value)


HOMES = (
    *("memory_pool", "swa_memory_pool", "qsa_kv_pool", "deepseek_v4_memory_pool", "hisparse_memory_pool"),
    *("minimax_m3_nvfp4_pool", "unified_memory_pool"),
)


def pool_class(name: str) -> type[Any]:
    """SGLang's class of this name."""
    homes = (importlib.import_module(f"sglang.srt.mem_cache.{home}") for home in HOMES)
    (found,) = {getattr(home, name) for home in homes if hasattr(home, name)}
    assert isinstance(found, type)
    return found


@pytest.mark.parametrize("name", [name for name, kind in POOLS.items() if kind in UNSUPPORTED])
def test_a_pool_that_is_refused_is_one_of_sglangs_and_the_reason_says_what_would_help(name: str) -> None:
    pool = object.__new__(pool_class(name))
    with refused(OperatorError, "cache_unsupported") as caught:
        check(queue_of(pool))
    expected = UNSUPPORTED[POOLS[name]]
    assert f"KV pool: {name}: kvbridge cannot carry {expected.missing}" in str(caught.value)
    helps = f"needs {expected.helps['sglang']}" if "sglang" in expected.helps else "no setting of the engine helps"
    assert str(caught.value).endswith(helps)


def test_heads_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(OperatorError, match="heads"):
        describe(queue_of(plain(heads=3)), Shard(tp_size=2), model_name="m", engine_id="e")


@pytest.mark.parametrize("tp_rank", [0, 3])
def test_index_keys_are_where_sglang_looks_for_them(tp_rank: int) -> None:
    """SGLang's own code moves tokens from slot to slot; the planes see just that. Every rank has all of them."""
    pool = sparse(size=320, skip_topk_layers=[False, True, False])
    memory = described(pool, Shard(tp_rank=tp_rank, tp_size=4))
    planes = {(plane.layer, plane.part): plane for plane in memory.pool.planes}
    assert set(planes) == {
        *((layer, "latent") for layer in range(LAYERS)),
        *((layer, part) for layer in (0, 2) for part in ("index_key", "index_key_scale")),
    }
    assert {(plane.first_head, plane.heads, plane.total_heads) for plane in planes.values()} == {(0, 1, 1)}
    assert (memory.pool.groups[0].block_tokens, memory.pool.groups[0].blocks) == (64, 6)
    for layer in (0, 2):
        pool.index_k_with_scale_buffer[layer].copy_(torch.randint(0, 256, (6, 64 * 132)))
    source, target = torch.tensor([5, 100, 64]), torch.tensor([70, 319, 63])
    every = np.arange(6 * 64)
    before = {key: take_rows(held(memory), plane, every).copy() for key, plane in planes.items() if "index" in key[1]}
    pool.index_key_cache.move(target, source)
    for key, rows in before.items():
        expected = rows.copy()
        expected[target] = rows[source]
        assert np.array_equal(take_rows(held(memory), planes[key], every), expected), key
        assert len(np.unique(rows, axis=0)) > 300, "rows that could not be told apart would prove nothing"


def test_index_keys_that_sglang_rotates_are_another_part() -> None:
    """SGLang's own method is asked: it multiplies by a Hadamard matrix where the module is not fused."""
    from sglang.srt.layers.attention.dsa import dsa_indexer

    rotated = []
    with mock.patch.object(dsa_indexer, "rotate_activation", rotated.append):
        for is_fused, part in ((True, "index_key"), (False, "rotated_index_key")):
            queue = queue_of(sparse())
            module = SimpleNamespace(use_dsa_indexer_fusion=is_fused, use_aiter_fused_fp8_writer=False)
            dsa_indexer.Indexer._maybe_rotate(module, part)
            queue.scheduler.tp_worker.model_runner.model = torch.nn.ModuleList(
                each(layer, *more)
                for layer in range(LAYERS)
                for each, more in ((RadixAttention, ()), (Indexer, (is_fused,)))
            )
            pool = describe(queue, Shard(), model_name="m", engine_id="e").pool
            assert {plane.part for plane in pool.planes} == {"latent", part, f"{part}_scale"}
    assert rotated == ["rotated_index_key"]


def test_sglang_rotates_in_sylvesters_order_and_writes_scales_as_we_read_them() -> None:
    """Sums where a bit of the index is 0, differences where it is 1, times 128**-0.5; any fp32 as a scale.

    Its kernel needs a GPU: tests/system/gpu/test_sglang_pools.py compares numbers.
    """
    import sglang

    root = Path(sglang.__file__).parent
    sources = root / "kernels/jit/csrc"
    transform = (sources / "fast-hadamard-transform/fast_hadamard_transform_common.h").read_text()
    for expected in (
        "x[c][idx] = a + b;",
        "x[c][idx + stride] = a - b;",
        "const float sign = (lane_id & lane_mask) ? -1.f : 1.f;",
        "x[c][i] = sign * x[c][i] + x_val_other;",
        "out_vals_store[c][i] = out_vals[c][i] * scale;",
    ):
        assert expected in transform
    indexer = (root / "srt/layers/attention/dsa/dsa_indexer.py").read_text()
    assert "return hadamard_transform(x, scale=hidden_size**-0.5)" in indexer
    writer = (sources / "dsa/fused_store_index_cache.cuh").read_text()
    assert "const auto scale = fmaxf(1e-4f, abs_max) / kFP8E4M3Max;" in writer
    fallback = (root / "kernels/ops/quantization/act_quant_triton.py").read_text()
    for expected in ("amax = tl.maximum(amax, 1e-4)", "log_ceil = tl.ceil(log_val)", "scale = tl.exp2(log_ceil)"):
        assert expected in fallback, "the powers of two that we write"


def test_index_keys_of_a_module_that_does_not_say_whether_it_rotates_them_are_refused() -> None:
    queue = queue_of(sparse())
    queue.scheduler.tp_worker.model_runner.model = torch.nn.ModuleList(map(RadixAttention, range(LAYERS)))
    with refused(OperatorError, "cache_unsupported", "index keys of layer 0, whose module does not say"):
        describe(queue, Shard(), model_name="m", engine_id="e")


def test_packed_latents_beside_index_keys_are_vllms() -> None:
    """SGLang's own reference makes a row: fp8 numbers, the scales of four tiles, the rope."""
    from sglang.test.kernels.dsa_k_cache_reference import _quantize_k_cache_ref

    pool = sparse(dtype=torch.float8_e4m3fn, kv_cache_dim=656)
    (plane, *_) = described(pool).pool.planes
    assert (plane.part, plane.codec.name, plane.codec.width, plane.codec.row_bytes) == (
        "latent",
        "fp8_ds_mla",
        576,
        656,
    )
    latent = torch.randn(1, 2, 1, 576, dtype=torch.bfloat16)
    made = _quantize_k_cache_ref(latent).view(torch.uint8).reshape(2, 656)
    numbers, scales = made[:, :512].view(torch.float8_e4m3fn).float(), made[:, 512:528].view(torch.float32)
    values = numbers.view(2, 4, 128) * scales[:, :, None]
    assert torch.allclose(values.view(2, 512), latent[0, :, 0, :512].float(), atol=0.2)
    assert torch.equal(made[:, 528:].view(torch.bfloat16), latent[0, :, 0, 512:])
    described(sparse(dtype=torch.float8_e4m3fn))  # rows of plain fp8, as the TRT-LLM backends keep them


def test_index_keys_in_another_form_are_refused_by_name() -> None:
    pool = sparse()
    pool.index_kpool = 4
    with refused(OperatorError, "cache_unsupported", "index keys of 4 tokens each"):
        check(queue_of(pool))
    pool.index_kpool, pool.index_page_size = 1, 16
    with refused(OperatorError, "cache_unsupported", "pages of 8448 bytes and 16 of 64 tokens"):
        check(queue_of(pool))
    pool = sparse()
    pool.index_key_cache.buffer[1] = torch.zeros(2, 64 * 68, dtype=torch.uint8)
    with refused(OperatorError, "cache_unsupported", "pages of 4352 or 8448 bytes"):
        check(queue_of(pool))
