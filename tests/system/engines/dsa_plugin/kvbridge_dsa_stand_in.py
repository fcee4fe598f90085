"""A plugin of vLLM that lets its CPU backend run sparse attention with index keys (DeepSeek V3.2, GLM-5).

The model chooses at least as many tokens as a request may have, so that sparse attention is attention to all of them,
and the choice is left out. Index keys are computed by the model's own weights and written as vLLM's CUDA kernel writes
them: `indexer_k_quant_and_cache_kernel` in csrc/libtorch_stable/cache_kernels.cu, `_fp8_quant_and_cache_write` in
vllm/models/deepseek_v32/common/kernels.py. A page has PAGE tokens here, because CPU attention wants that, and 64 there.
"""

from __future__ import annotations

from typing import Any

import torch

PAGE = 16


def install() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
    from vllm.model_executor.models import deepseek_v2
    from vllm.v1.attention.backend import AttentionMetadataBuilder
    from vllm.v1.attention.backends.mla import cpu_mla, indexer

    init = mla_attention.MLAAttention.__init__

    def dense(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs | {"use_sparse": False, "indexer": None})

    class Builder(AttentionMetadataBuilder[Any]):  # type: ignore[misc]
        def __init__(self, kv_cache_spec: Any, names: Any, config: Any, device: Any, **_: Any) -> None:
            super().__init__(kv_cache_spec, names, config, device)

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            return common_attn_metadata

    backend = indexer.DeepseekV32IndexerBackend
    mla_attention.MLAAttention.__init__ = dense
    backend.get_supported_kernel_block_sizes = staticmethod(lambda kv_cache_spec=None: [PAGE])
    backend.get_builder_cls = staticmethod(lambda: Builder)
    deepseek_v2.Indexer.forward = _forward
    cpu_mla.CPUMLAImpl.record_logical_topk_ready = lambda self, *args, **kwargs: None
    SparseAttnIndexer.__init__ = lambda self, *args, **kwargs: torch.nn.Module.__init__(self)


def _forward(self: Any, hidden_states: torch.Tensor, qr: torch.Tensor, positions: torch.Tensor, rotary: Any) -> Any:
    from vllm.forward_context import get_forward_context

    projected, _ = self.wk_weights_proj(hidden_states)
    keys = self.k_norm(projected[:, : self.head_dim])
    rope, plain = torch.split(keys, [self.rope_dim, self.head_dim - self.rope_dim], dim=-1)
    rope = rope.unsqueeze(1).contiguous()
    _, rope = rotary(positions, rope.clone(), rope)
    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, dict) and self.k_cache.kv_cache.numel():
        whole = torch.cat([rope.reshape(-1, self.rope_dim), plain], -1).float()
        _write(self.k_cache.kv_cache, metadata[self.k_cache.prefix].slot_mapping, whole)
    return self.topk_indices_buffer


def _write(cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
    """Into [pages, PAGE, 132] bytes: in each page all keys, then their scales."""
    page, width = cache.shape[1], keys.shape[1]
    scales = torch.exp2(torch.ceil(torch.log2(keys.abs().amax(-1).clamp(min=1e-4) / 448.0)))
    stored = (keys / scales[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    four = scales.float().contiguous().view(torch.uint8).view(-1, 4)
    for token, slot in enumerate(slots.tolist()[: len(keys)]):
        if slot >= 0:
            at, place = cache[slot // page].view(-1), slot % page
            at[place * width : (place + 1) * width] = stored[token]
            at[page * width + place * 4 : page * width + place * 4 + 4] = four[token]
