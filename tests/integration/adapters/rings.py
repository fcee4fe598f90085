"""DeepSeek V4.1's caches in vLLM without its model, made as its layers make them: see compressed.py.

Where vLLM's kernels read and write: models/deepseek_v41/common/ops (`fused_save_compress_norm`, `rope_quant_insert`,
`indexer_k_norm_rope_store`).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.models.deepseek_v41.attention import DeepseekV4Attention, DeepseekV4IndexerCache
from vllm.models.deepseek_v41.compressor import CompressorStateCache
from vllm.models.deepseek_v41.sparse_mla import DeepseekV4FlashMLABackend
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

from tests.integration.adapters.compressed import FP8_KEY, HEAD, WINDOW, Cache

RATIOS = (0, 2, 2, 1)  # how many tokens a row of each layer stands for; layer 2 reads the rows of layer 1
SOURCES = (1, 3)
BLOCK = 64
PACKED = {584: ((576, 8), 576), 528: ((512, 16), 512), 288: ((256, 32), 512)}  # the pieces of a row, and what pages fit


def v41(
    config: VllmConfig,
    index: tuple[int, int] = FP8_KEY,
    window_row: int = 584,
    row: int = 584,
    replays: bool = True,
    together: bool = False,
    ring: int = 8,
) -> Iterator[tuple[Cache, Any]]:
    """As `DeepseekV4Attention` of models/deepseek_v41 makes them. Rows of 0 bytes are plain numbers.

    A ring is longer than 8 rows if more than 6 tokens are drafted.
    """
    number, dtype = (torch.uint8 if row else torch.bfloat16), config.cache_config.cache_dtype
    (of_window, page), (widths, _) = (PACKED.get(size, ((2 * HEAD,), 512)) for size in (window_row, row))
    for layer, ratio in enumerate(RATIOS):
        name = f"model.layers.{layer}.attn"
        window = DeepseekV4SWACache(
            *(HEAD, WINDOW, number, f"{name}.swa_cache", config.cache_config),
            block_size=32,
            packed_bytes_per_token=window_row,
            packed_page_alignment=page,
            bounded_replay=replays,
        )
        together &= window_row != 584
        yield Cache(window.prefix, "window", of_window, 1, WINDOW, together, is_replayed=replays), window
        if layer not in SOURCES:
            continue
        said = {"is_kv_source": True, "compress_ratio": ratio, "head_dim": HEAD, "kv_cache_dtype": dtype}
        said |= {"kv_cache_torch_dtype": number, "kv_page_alignment": page, "compressed_bytes_per_token": row}
        attention: Any = SimpleNamespace(**said, attn_backend=DeepseekV4FlashMLABackend)
        attention.get_kv_cache_spec = lambda config, own=attention: DeepseekV4Attention.get_kv_cache_spec(own, config)
        config.compilation_config.static_forward_context[name] = attention
        yield Cache(name, f"compressed {ratio}", widths, ratio, together=together), attention
        key = f"{name}.indexer.k_cache"
        keys = DeepseekV4IndexerCache(sum(index), torch.uint8, key, config.cache_config, compress_ratio=ratio)
        yield Cache(key, "index_key", index, ratio), keys
        if ratio > 1:
            state = CompressorStateCache(2 * HEAD, torch.float32, f"{name}.compressor.state_cache")
            assert state.block_size == 8
            state.block_size = ring
            yield Cache(state.prefix, "ring", (8 * HEAD,), keeps=ratio, is_ring=True), state
