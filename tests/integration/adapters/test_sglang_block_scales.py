"""Rows with a scale for every few numbers: SGLang's real pools, and real agents that carry between unequal ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kvbridge_proto.pool import Shard

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not in this environment (make test-sglang)", allow_module_level=True)

from kvbridge.adapters.sglang.pool import WINDOW_GROUP, describe
from kvbridge.errors import OperatorError
from kvbridge.geometry.compat import Incompatible, Same, verdict
from testing.refusals import refused
from tests.integration.adapters.block_scales import TOKENS, Part, Parts, Rank, carry, table_of
from tests.integration.adapters.test_sglang_pool import RadixAttention, described, on_a_cpu, plain, queue_of
from tests.integration.adapters.test_sglang_windows import Side

pytestmark = pytest.mark.sglang
__all__ = ["on_a_cpu"]  # a fixture

HEADS, WIDTH, LAYERS, SLOTS = 4, 128, 2, 512
FP4 = ("nvfp4", "fp4_mx_block16")


def four_bits(layers: int, kind: str = "nvfp4", page: int = 16, scale: float = 1.0, **more: Any) -> dict[str, Any]:
    """What a pool gets for `--kv-cache-dtype nvfp4` or fp4_mx_block16 (`_build_fp4_quant_method`)."""
    from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import get_kv_cache_quant_method

    method = get_kv_cache_quant_method(kind, num_layers=layers, device="cpu", page_size=page, **more)
    if kind == "nvfp4":
        method.configure_attention_backends("flashinfer", "trtllm_mha")
        method.k_scales_float, method.v_scales_float = [scale] * layers, [2 * scale] * layers
    return {"dtype": torch.float4_e2m1fn_x2, "quant_method": method}


def pool(kind: str, page: int, heads: int = HEADS, **more: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MHATokenToKVPoolMXFP8

    own: dict[str, Any] = {"size": SLOTS, "page_size": page, "head_num": heads, "head_dim": WIDTH, "layer_num": LAYERS}
    own |= {"device": "cpu", "enable_memory_saver": False}
    if kind == "mxfp8":
        return MHATokenToKVPoolMXFP8(dtype=torch.float8_e4m3fn, **own)
    return MHATokenToKVPool(**own, **four_bits(LAYERS, kind, page, **more))


def parts(of: Any, layers: Sequence[int] = range(LAYERS)) -> Parts:
    """What SGLang keeps of these layers: [slots, heads, bytes], or MXFP8's scales in pages of 128."""
    found = {}
    for place, layer in enumerate(layers):
        for part in "kv":
            rows = getattr(of, f"{part}_buffer")[place].view(torch.uint8)
            scales = getattr(of, f"{part}_scale_buffer")[place].view(torch.uint8)
            scales = scales if scales.dim() > 2 else scales.unflatten(1, (of.head_num, -1))
            found[layer, part] = Part(rows, lambda slots: (slots,), rows.shape[-1])
            found[layer, f"{part}_scale"] = Part(scales, partial(at, scales), scales.shape[-1])
    return found


def at(tensor: torch.Tensor, slots: torch.Tensor) -> tuple[Any, ...]:
    """Where these slots lie. "output[page, h, t % 32, t // 32, s]" (mxfp8_interleave_sf.py): heads come second."""
    if tensor.dim() == 3:
        return (slots,)
    token = slots % 128
    return (slots // 128, slice(None), token % 32, token // 32)


def ranks(kind: str, page: int, size: int) -> Iterator[Rank]:
    for rank in range(size):
        made = pool(kind, page, HEADS // size)
        yield Rank(described(made, Shard(tp_rank=rank, tp_size=size), heads=HEADS, layers=LAYERS), parts(made), page)


@pytest.mark.proves("G1", "G3")
@pytest.mark.parametrize(
    ("kind", "ours", "theirs"),
    [
        ("mxfp8", (128, 1), (128, 2)),
        ("mxfp8", (128, 2), (128, 1)),
        ("mxfp8", (64, 1), (128, 2)),
        ("mxfp8", (128, 2), (16, 1)),
        ("nvfp4", (64, 2), (16, 1)),
        ("fp4_mx_block16", (16, 1), (64, 2)),
    ],
)
def test_rows_and_scales_come_to_pages_of_any_size_and_other_ranks(
    kind: str, ours: tuple[int, int], theirs: tuple[int, int], tmp_path: Path
) -> None:
    """MXFP8's scales have another order in pages of 128 than in others."""
    given, taken = (table_of(page, SLOTS, seed) for seed, (page, _) in enumerate((ours, theirs)))
    carry(tmp_path, list(ranks(kind, *ours)), given, list(ranks(kind, *theirs)), taken, HEADS)


WINDOWED, BEFORE = 1, 150  # the layer whose window has so many tokens before the current one


def windowed(size: int, is_decoder: bool) -> Iterator[Rank]:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPoolMXFP8

    own: dict[str, Any] = {"dtype": torch.float8_e4m3fn, "token_to_kv_pool_class": MHATokenToKVPoolMXFP8}
    own |= {"head_num": HEADS // size, "swa_head_num": HEADS // size, "head_dim": WIDTH, "swa_head_dim": WIDTH}
    own |= {"v_head_dim": WIDTH, "swa_v_head_dim": WIDTH, "size": SLOTS, "size_swa": SLOTS}
    own |= {"swa_attention_layer_ids": [WINDOWED], "full_attention_layer_ids": [0]}
    for number in range(size):
        side = Side(128, is_decoder, BEFORE, **own)
        side.attentions = [RadixAttention(layer, window=BEFORE if layer == WINDOWED else -1) for layer in range(LAYERS)]
        side.config.get_total_num_kv_heads = lambda: HEADS
        side.config.hf_text_config.swa_num_key_value_heads = HEADS
        shard = Shard(tp_rank=number, tp_size=size)
        memory = describe(side.queue, shard, model_name="m", engine_id="e", is_decoder=is_decoder)
        found = parts(side.pool.full_kv_pool, [0]) | parts(side.pool.swa_kv_pool, [WINDOWED])
        yield Rank(memory, found, 128, {WINDOWED: TOKENS - BEFORE})


@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 1)])
def test_scales_of_a_window_come_with_it(ours: int, theirs: int, tmp_path: Path) -> None:
    """SGLang's `BLOCK_SCALE_SWA`: the window's half has scales of its own."""
    senders, receivers = list(windowed(ours, False)), list(windowed(theirs, True))
    carry(tmp_path, senders, table_of(128, SLOTS, 1), receivers, table_of(128, SLOTS, 2), HEADS, WINDOW_GROUP)


def test_scales_lie_where_sglang_reads_them() -> None:
    """Its own readers: `_read_sf_interleaved`, and the numbers that it decodes from rows that it has stored."""
    mine, slots = pool("mxfp8", 128), torch.tensor([128, 129, 160, 255, 256, 400])
    scales = parts(mine)[1, "k_scale"]
    scales.bytes.random_(256)
    read = mine._read_sf_interleaved(mine.k_scale_buffer[1], slots).view(torch.uint8)
    assert torch.equal(scales.bytes[scales.at(slots)], read)

    mine, rows = pool("fp4_mx_block16", 16), torch.randn(6, HEADS, WIDTH, dtype=torch.bfloat16)
    mine.set_kv_buffer(RadixAttention(1), slots, rows, rows * 100)
    stored = {part: each.bytes[slots] for (layer, part), each in parts(mine).items() if layer == 1}
    for part, decoded in (("k", mine.get_key_buffer(1)), ("v", mine.get_value_buffer(1))):
        found = numbers(stored[part], stored[f"{part}_scale"])
        assert torch.equal(found, decoded[slots].float()) and found.any()


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def numbers(rows: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Two numbers of a byte, the lower bits first, times a power of two for each 16."""
    nibbles = torch.stack([rows & 15, rows >> 4], -1).flatten(-2).long()
    signed = E2M1[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    return signed * torch.exp2(exponents.float() - 127).repeat_interleave(16, -1)


def test_the_same_k_scale_or_none() -> None:
    """NVFP4's scales in memory are parts of a scale that the checkpoint has: nothing divides by another."""
    one, other = (described(pool("nvfp4", 16, scale=scale), layers=LAYERS).pool for scale in (0.25, 0.5))
    assert {plane.part: plane.codec.scales for plane in one.planes if plane.codec.scales} == {"k": (0.25,), "v": (0.5,)}
    assert isinstance(verdict(one, one), Same)
    judged = verdict(one, other)
    assert isinstance(judged, Incompatible)
    assert "scales: sender 0.25, receiver 0.5" in str(judged.reasons[0])


@pytest.mark.parametrize("kind", ["mxfp8", *FP4])
def test_rows_of_another_dtype_are_not_these(kind: str) -> None:
    mine = described(pool(kind, 16), layers=LAYERS).pool
    other = described(plain(size=SLOTS, layer_num=LAYERS, head_dim=WIDTH), layers=LAYERS).pool
    for judged in (verdict(mine, other), verdict(other, mine)):
        assert isinstance(judged, Incompatible) and all(each.startswith("codec: ") for each in judged.reasons)


def test_scales_in_the_order_of_another_kernel_are_refused() -> None:
    """SGLang refuses to start such a server, too."""
    with refused(OperatorError, "codec_unknown", "nvfp4 with scales in the order of TRT-LLM"):
        describe(queue_of(pool("nvfp4", 16, native_scale_layout=True)), Shard(), model_name="m", engine_id="e")
