"""What we say about vLLM's CPU cache, compared with what vLLM's own kernel writes."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

import torch
from vllm import _custom_ops as ops

from kvbridge.adapters.vllm.cpu import halves
from kvbridge.errors import OperatorError
from tests.integration.adapters.small import places

pytestmark = pytest.mark.vllm

BLOCKS, HEADS = 3, 2
CASES = [
    pytest.param(isa, dtype, cache, tokens, width, id=f"{isa}-{dtype}-{cache}-{tokens}x{width}".replace("torch.", ""))
    for isa, dtype, cache in [
        ("vec", torch.bfloat16, "auto"),
        ("vec", torch.float16, "auto"),
        ("vec", torch.float32, "auto"),
        ("vec", torch.bfloat16, "fp8"),
        ("vec", torch.bfloat16, "fp8_e5m2"),
        ("vec16", torch.bfloat16, "auto"),
        ("amx", torch.bfloat16, "auto"),
        ("amx", torch.bfloat16, "fp8"),
        ("amx_fp8", torch.bfloat16, "fp8"),
    ]
    for tokens, width in [(32, 32), (32, 128), (128, 64), (64, 80)]
    if width % 32 == 0 or (isa == "vec16" and width % 16 == 0)
]


@pytest.mark.parametrize(("isa", "dtype", "cache", "tokens", "width"), CASES)
def test_every_number_lies_where_we_say(isa: str, dtype: torch.dtype, cache: str, tokens: int, width: int) -> None:
    is_fp8 = cache != "auto"
    kept = torch.uint8 if is_fp8 else dtype
    memory = torch.zeros(BLOCKS, HEADS, tokens, 2 * width, dtype=kept)
    k_cache, v_cache = memory.view(BLOCKS, HEADS, 2 * tokens, width).chunk(2, dim=2)
    count = BLOCKS * tokens
    # No more bits than fp8 (e5m2, too) holds exactly, different enough to catch any exchange of neighbours.
    generator = torch.Generator().manual_seed(1)
    values = torch.tensor([0.5, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0])
    k, v = (values[torch.randint(len(values), (count, HEADS, width), generator=generator)].to(dtype) for _ in "kv")
    slots = torch.randperm(count, generator=generator)
    try:
        ops.cpu_attn_reshape_and_cache(k, v, k_cache, v_cache, slots, isa, kv_cache_dtype=cache)
    except RuntimeError as error:
        pytest.skip(f"this build of vLLM has no {isa} kernel: {str(error).splitlines()[0]}")

    size = memory.element_size()
    flat = memory.view(torch.uint8).flatten()
    cell = 2 * tokens * width * size
    for half, offset, sender in zip(halves(isa, tokens, width, size), (0, cell // 2), (k, v), strict=True):
        rows = places(half.tokens)[:, None] + places(half.elements)  # [N, D]
        assert rows.numel() == len(set(rows.flatten().tolist())) == tokens * width
        for index, slot in enumerate(slots.tolist()):
            block, token = divmod(slot, tokens)
            for head in range(HEADS):
                start = (block * HEADS + head) * cell + offset
                where = (start + rows[token])[:, None] + torch.arange(size)
                found = flat[where].contiguous().view(kept).flatten()
                if is_fp8:
                    fp8 = torch.float8_e5m2 if cache == "fp8_e5m2" else torch.float8_e4m3fn
                    found = found.view(fp8).to(dtype)
                assert torch.equal(found, sender[index, head]), f"{isa}: token {token} of block {block}, head {head}"


def test_refuses_by_name_what_it_cannot_describe() -> None:
    with pytest.raises(OperatorError, match="'neon' with 2-byte elements"):
        halves("neon", 32, 64, 2)
