"""Where K, V or a latent lie in a layer's tensor, for every shape that vLLM has given its KV cache since 0.26.

Nothing here looks at a version: dimensions and sizes decide. That of attention is (B, H, N, 2D), that of MLA (B, N, W),
and (B, 1, N, W) from 0.29 on.

B counts blocks of the kernel, several of which may make one block of the block table. Strides alone say which dimension
is outermost in memory (NHD, HND, all layers of a block side by side, a page with padding).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kvbridge_proto.pool import CodecName

from ...errors import OperatorError


@dataclass(frozen=True, slots=True)
class Cell:
    """What one (head, token) of a layer holds, by vLLM's spec; all sizes in bytes.

    value_bytes   0: there is no V, the row of K is a latent
    scale_bytes   the scales of one row, stored behind it
    scale_unit    bytes of one scale; 1 where nobody reads them as numbers
    is_apart      the scales of a block are stored behind all its rows instead
    is_paged      that block is the kernel's, of which a block of the table may have several
    part          what the row is, if there is no V
    codec         of the rows, and `scale_codec` of scales beside them
    """

    heads: int
    key_bytes: int
    value_bytes: int
    scale_bytes: int = 0
    scale_unit: int = 4
    is_apart: bool = False
    is_paged: bool = False
    part: str = "latent"
    codec: CodecName = "opaque"
    scale_codec: CodecName = "fp32"

    @property
    def bytes(self) -> int:
        """Size of one cell of the tensor."""
        return self.key_bytes + self.value_bytes + self.scale_bytes * (2 if self.value_bytes else 1)


def views_of(name: str, tensor: torch.Tensor, cell: Cell, block_tokens: int, blocks: int) -> dict[str, torch.Tensor]:
    """Each part of a layer's rows as [B, H, N, W]. `blocks` and `block_tokens` are the block table's.

    Raises OperatorError for another shape than the two that are known.
    """
    size, tokens = tensor.element_size(), tensor.shape[-2] if tensor.dim() > 1 else 0
    found = f"{name}: KV cache {tuple(tensor.shape)} with strides {tuple(tensor.stride())}"
    if not _fits(tensor, cell, block_tokens, blocks):
        width = cell.bytes // size
        expected = f"[B, {cell.heads}, N, {width}]" if cell.value_bytes else f"[B, N, {width}] or [B, 1, N, {width}]"
        raise OperatorError(
            "shape_unknown",
            f"{found} of {size}-byte elements, for {blocks} blocks of {block_tokens} tokens: expected {expected}",
        )
    if cell.scale_bytes and tensor.stride(-1) != 1:
        raise OperatorError("shape_unknown", f"{found}: rows with scales must be dense in the last dimension")
    block, *head, token, element = tensor.stride()
    shape = (tensor.shape[0], cell.heads, tokens)
    outer, start = (block, *(head or [0])), tensor.storage_offset()
    if cell.is_apart:
        row, scale = cell.key_bytes, cell.scale_bytes
        return {
            cell.part: tensor.as_strided((*shape, row), (*outer, row, 1)),
            f"{cell.part}_scale": tensor.as_strided((*shape, scale), (*outer, scale, 1), start + tokens * row),
        }
    cells, at, views = tensor.as_strided((*shape, tensor.shape[-1]), (*outer, token, element)), 0, {}
    for part, row_bytes in (("k", cell.key_bytes), ("v", cell.value_bytes)):
        if row_bytes:
            part = part if cell.value_bytes else cell.part
            end = at + row_bytes // size
            views[part] = cells[..., at:end]
            if cell.scale_bytes:
                views[f"{part}_scale"] = cells[..., end : end + cell.scale_bytes]
            at = end + cell.scale_bytes
    return views


def _fits(tensor: torch.Tensor, cell: Cell, block_tokens: int, blocks: int) -> bool:
    if tensor.dim() not in (3, 4) or tensor.shape[-1] * tensor.element_size() != cell.bytes:
        return False
    tokens = tensor.shape[-2]
    if tokens == 0 or block_tokens % tokens or tensor.shape[0] != blocks * (block_tokens // tokens):
        return False
    if cell.is_apart and not cell.is_paged and tokens != block_tokens:
        return False
    return tensor.shape[1] == cell.heads if tensor.dim() == 4 else not cell.value_bytes
