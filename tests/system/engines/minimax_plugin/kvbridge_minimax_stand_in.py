"""A plugin of vLLM that lets its CPU backend run MiniMax M3: its kernels in plain torch.

On a GPU all kernels are vLLM's own but for its norms, which are FlashInfer's, and that need not be there.

On a CPU the model chooses at least as many blocks as a request may have, so that sparse attention is attention to all
of them, and the choice is left out. K, V and index keys are computed by the model's own weights and written as vLLM's
CUDA kernel writes them (csrc/libtorch_stable/fused_minimax_m3_qknorm_rope_kv_insert_kernel.cu): K and V by the strides
of the cache, index keys at slot * 128.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

WIDTH = 128


class Images(types.ModuleType):
    """In place of the module that reads the model's images: it needs torchvision, which is not there."""

    NAME = "vllm.transformers_utils.processors.minimax_m3"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def install() -> None:
    """Called by vLLM in each of its processes."""
    sys.modules.setdefault(Images.NAME, Images(Images.NAME))
    from vllm.models.minimax_m3.nvidia import model
    from vllm.platforms import current_platform

    model.MiniMAXGemmaRMSNorm.forward = _norm
    model.fused_allreduce_gemma_rms_norm = _reduce_and_norm
    if current_platform.is_cpu():
        _install_kernels(model)


def _install_kernels(model: Any) -> None:
    from vllm import _custom_ops
    from vllm.models.minimax_m3.common import indexer, sparse_attention
    from vllm.v1.attention.backend import AttentionMetadataBuilder

    class Builder(AttentionMetadataBuilder[Any]):  # type: ignore[misc]
        def __init__(self, kv_cache_spec: Any, names: Any, config: Any, device: Any, **_: Any) -> None:
            super().__init__(kv_cache_spec, names, config, device)

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            return common_attn_metadata

    for backend in (indexer.MiniMaxM3IndexerBackend, sparse_attention.MiniMaxM3SparseBackend):
        backend.get_builder_cls = staticmethod(lambda: Builder)
    _custom_ops.fused_minimax_m3_qknorm_rope_kv_insert = _prepare
    model.MiniMaxM3SparseAttention._run_attention = _attend


def _normed(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    values = rows.float()
    return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight.float())


def _norm(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    if residual is None:
        return _normed(x, self.weight, self.variance_epsilon).to(x.dtype)
    whole = x + residual
    return _normed(whole, self.weight, self.variance_epsilon).to(x.dtype), whole


def _reduce_and_norm(x: torch.Tensor, residual: torch.Tensor, norm: Any) -> Any:
    from vllm.distributed import tensor_model_parallel_all_reduce

    return norm(tensor_model_parallel_all_reduce(x), residual)


def _rotated(rows: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, rotary: int) -> torch.Tensor:
    """[tokens, heads, WIDTH] with the first `rotary` numbers turned, halves together."""
    cos, sin = table[positions].float()[:, None].chunk(2, -1)
    first, second = rows[..., : rotary // 2], rows[..., rotary // 2 : rotary]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rows[..., rotary:]], -1)


def _prepare(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    heads: int,
    kv_heads: int,
    rotary: int,
    eps: float,
    index_q_norm: torch.Tensor | None = None,
    index_k_norm: torch.Tensor | None = None,
    index_heads: int = 0,
    slots: torch.Tensor | None = None,
    index_slots: torch.Tensor | None = None,
    cache: torch.Tensor | None = None,
    index_cache: torch.Tensor | None = None,
    block_tokens: int = 0,
    q_out: torch.Tensor | None = None,
    index_q_out: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> None:
    """`fused_minimax_m3_qknorm_rope_kv_insert`: a row is q, k, v and, in sparse layers, index q and index k."""
    rows = qkv.view(len(qkv), -1, WIDTH)
    spans = {"q": (0, heads, q_norm), "k": (heads, kv_heads, k_norm)}
    if index_q_norm is not None and index_k_norm is not None:
        at = heads + 2 * kv_heads
        spans |= {"index_q": (at, index_heads, index_q_norm), "index_k": (at + index_heads, 1, index_k_norm)}
    for first, count, weight in spans.values():
        made = _rotated(_normed(rows[:, first : first + count], weight, eps), table, positions, rotary)
        rows[:, first : first + count] = made.to(qkv.dtype)
    if q_out is not None:
        q_out.copy_(rows[:, :heads].reshape(q_out.shape))
    if cache is None or slots is None or index_slots is None or index_cache is None:
        return
    k, v = rows[:, heads : heads + kv_heads], rows[:, heads + kv_heads : heads + 2 * kv_heads]
    flat = torch.as_strided(
        index_cache, (index_cache.shape[0] * block_tokens, WIDTH), (WIDTH, 1), index_cache.storage_offset()
    )
    for token, (slot, own) in enumerate(zip(slots.tolist(), index_slots.tolist(), strict=True)):
        if slot >= 0:
            cell = cache[slot // block_tokens, :, slot % block_tokens]
            cell[:, :WIDTH], cell[:, WIDTH:] = k[token], v[token]
            flat[own] = rows[token, -1]


def _attend(self: Any, query: torch.Tensor, _: Any, index_query: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """To all tokens, request by request."""
    from vllm.forward_context import get_forward_context

    known = get_forward_context().attn_metadata
    if not isinstance(known, dict):
        return output.zero_()
    metadata = known[self.layer_name]
    starts, tokens = metadata.query_start_loc.tolist(), self.kv_cache.shape[2]
    for request, length in enumerate(metadata.seq_lens.tolist()):
        first, end = starts[request], starts[request + 1]
        if first == end:
            continue
        blocks = metadata.block_table_tensor[request, : -(-length // tokens)].long()
        cells = self.kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length].float()  # [heads, tokens, K|V]
        group = self.num_heads // len(cells)
        keys, values = (each.repeat_interleave(group, 0) for each in cells.split(WIDTH, -1))
        asked = query[first:end].view(end - first, self.num_heads, WIDTH).transpose(0, 1).float()
        mask = torch.ones(end - first, length, dtype=torch.bool).tril(length - (end - first))
        found = torch.nn.functional.scaled_dot_product_attention(asked, keys, values, mask, scale=self.scaling)
        output[first:end] = found.transpose(0, 1).reshape(end - first, -1).to(output.dtype)
    return output
