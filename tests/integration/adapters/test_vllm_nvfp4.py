"""nvfp4 in vLLM: rows and scales lie where its writers put them, and real agents carry them between unequal engines.

The memory is laid out by vLLM's own allocator, and `_nvfp4_kv_views` is vLLM's own. FlashInfer is not needed for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from kvbridge_proto.engine import Scales
from kvbridge_proto.pool import Shard
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim, nvfp4_split_data_scale
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from kvbridge.adapters.engine.memory import Memory
from kvbridge.errors import OperatorError
from kvbridge.geometry.check import rescaled
from kvbridge.geometry.compat import Incompatible, Same, verdict
from testing.refusals import refused
from tests.integration.adapters.block_scales import Part, Parts, Rank, carry, table_of
from tests.integration.adapters.test_vllm_backends import functions
from tests.integration.adapters.test_vllm_pool import allocated, build

pytestmark = pytest.mark.vllm

HEADS, WIDTH, LAYERS, SLOTS = 4, 128, 2, 512
SCALES = WIDTH // 16
FLASHINFER = "v1/attention/backends/flashinfer.py"


def caches(block: int, kernel: int, layout: str, heads: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Of layers with the spec that `FlashInferBackend.customize_spec` makes, in blocks of the kernel's size."""
    spec = FullAttentionSpec(
        block_size=block,
        num_kv_heads=heads,
        head_size=WIDTH,
        dtype=torch.uint8,
        kv_quant_mode=KVQuantMode.NVFP4,
        num_head_slots=2 * heads,
        state_content_bytes=nvfp4_kv_cache_full_dim(WIDTH),
    )
    made = {f"model.layers.{layer}.self_attn.attn": spec for layer in range(LAYERS)}
    return spec, allocated(made, layout, SLOTS // block, kernel)[1]


def memory_of(
    spec: Any, found: dict[str, torch.Tensor], is_linear: bool | None = True, shard: Shard | None = None, **more: Any
) -> Memory:
    impl = SimpleNamespace() if is_linear is None else SimpleNamespace(nvfp4_fa2=is_linear)
    pool = build(
        found,
        kv_spec=spec,
        backend="FLASHINFER",
        kv_cache_dtype="nvfp4",
        total_heads=HEADS,
        layer={"impl": impl},
        blocks=SLOTS // spec.block_size,
        shard=shard or Shard(),
        **more,
    )
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in found.values()}
    return Memory(pool, tuple(storages.values()))


def views(cache: torch.Tensor, heads: int) -> Any:
    """vLLM's own: (K rows, V rows), (K scales, V scales), "HND" or "NHD"."""
    names: dict[str, Any] = {"torch": torch, "nvfp4_split_data_scale": nvfp4_split_data_scale, "_KVPair": Any}
    exec(functions(FLASHINFER)["_nvfp4_kv_views"], names)
    return names["_nvfp4_kv_views"](cache, heads)


def parts(found: dict[str, torch.Tensor], heads: int, is_linear: bool) -> Parts:
    parts: Parts = {}
    for layer, cache in enumerate(found.values()):
        rows, scales, order = views(cache, heads)
        for side, part in enumerate("kv"):
            for suffix, view in (("", rows[side]), ("_scale", scales[side].view(torch.uint8))):
                view = view if order == "HND" else view.transpose(1, 2)
                is_turned = (part + suffix, is_linear) == ("v_scale", False)
                at = partial(turned if is_turned else straight, view)
                parts[layer, part + suffix] = Part(view, at, view.shape[-1])
    return parts


def straight(view: torch.Tensor, slots: torch.Tensor) -> tuple[Any, ...]:
    """Of [blocks, heads, tokens, bytes]."""
    tokens = view.shape[2]
    return (slots // tokens, slice(None), slots % tokens)


def turned(view: torch.Tensor, slots: torch.Tensor) -> tuple[Any, ...]:
    """As `swizzle_scale_offset` (csrc/libtorch_stable/nvfp4_kv_cache_kernels.cu), in its words."""
    token, s = (slots % view.shape[2])[:, None, None], torch.arange(SCALES)[None, None, :]
    s_group = SCALES // 4
    swizzled_t = token // 4 * 4 + s // s_group
    swizzled_s = s % s_group * 4 + token % 4
    heads = torch.arange(view.shape[1])[None, :, None]
    return ((slots // view.shape[2])[:, None, None], heads, swizzled_t, swizzled_s)


def ranks(block: int, kernel: int, layout: str, is_linear: bool, size: int) -> Iterator[Rank]:
    for rank in range(size):
        heads = HEADS // size
        spec, found = caches(block, kernel, layout, heads)
        sizes = {"prefill_context_parallel_size": 1}
        memory = memory_of(spec, found, is_linear, Shard(tp_rank=rank, tp_size=size), **sizes)
        yield Rank(memory, parts(found, heads, is_linear), block)


NHD, HND, ACROSS = "LBNHC", "LBHNC", "BLHNC"


@pytest.mark.proves("G1", "G3")
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ((64, 16, HND, False, 1), (16, 16, HND, False, 2)),
        ((16, 16, ACROSS, False, 2), (64, 64, HND, False, 1)),
        ((64, 64, HND, False, 1), (32, 32, NHD, True, 2)),
        ((32, 16, NHD, True, 2), (64, 64, HND, False, 1)),
        ((16, 16, HND, True, 2), (64, 32, NHD, True, 1)),
    ],
    ids=["SM100", "SM100 across layers", "SM100 to others", "others to SM100", "others"],
)
def test_rows_and_scales_come_to_blocks_of_any_size_and_other_ranks(
    ours: tuple[int, int, str, bool, int], theirs: tuple[int, int, str, bool, int], tmp_path: Path
) -> None:
    """Blocks of the table, of the kernel, their order, whether V's scales lie as K's, and ranks."""
    given, taken = (table_of(each[0], SLOTS, seed) for seed, each in enumerate((ours, theirs)))
    carry(tmp_path, list(ranks(*ours)), given, list(ranks(*theirs)), taken, HEADS)


def test_the_scale_that_a_checkpoint_has_must_be_the_same() -> None:
    one, same = (memory_of(*caches(16, 16, HND, HEADS)).pool for _ in range(2))
    assert {plane.part: plane.codec.scales for plane in one.planes if plane.codec.scales} == {"k": (0.5,), "v": (0.25,)}
    assert isinstance(verdict(one, same), Same)
    judged = verdict(one, rescaled(same, [Scales(0, "k", (1.0,))]))
    assert isinstance(judged, Incompatible) and judged.reasons[0].startswith(
        "scales: sender 0.5, receiver 1 (layer 0 k)"
    )


def test_what_the_writer_does_not_say_is_refused() -> None:
    """Before 0.32, and where another backend than FlashInfer writes."""
    with refused(OperatorError, "codec_unknown", "by a writer that does not say how it orders scales"):
        memory_of(*caches(16, 16, HND, HEADS), is_linear=None)
    with refused(OperatorError, "shape_unknown", "strides .+ but for the first"):
        memory_of(*caches(16, 16, NHD, HEADS), is_linear=False)


def test_vllm_has_a_writer_for_each_order() -> None:
    """`nvfp4_fa2` chooses between them, and both write what `_nvfp4_kv_views` shows."""
    writes = functions(FLASHINFER)["do_kv_cache_update"]
    linear, other = writes.split("if self.is_kvcache_nvfp4", 1)
    assert "if self.nvfp4_fa2" in linear and "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping" in linear
    assert "reshape_and_cache_flash" in other and "reshape_and_cache_flash" not in linear
