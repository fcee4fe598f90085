"""Where K, V or a latent lie in a layer's tensor, for every shape that vLLM has given its KV cache since 0.26.

Nothing here looks at a version: dimensions and sizes decide. That of attention is (B, H, N, 2D), that of MLA (B, N, W),
and (B, 1, N, W) from 0.29 on.

B counts blocks of the kernel, several of which may make one block of the block table. Strides alone say which dimension
is outermost in memory (NHD, HND, all layers of a block side by side, a page with padding).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from kvbridge_proto.pool import Codec

from ...errors import OperatorError


@dataclass(frozen=True, slots=True)
class Cell:
    """What one (head, token) of a layer holds: its parts in their order, each with the codec of its row.

    Without "v" the row is a latent or an index key. `is_apart`: the scales of a block are behind all its rows instead;
    `is_paged`: that block is the kernel's, of which a block of the table may have several.
    """

    heads: int
    parts: Mapping[str, Codec]
    is_apart: bool = False
    is_paged: bool = False

    @property
    def bytes(self) -> int:
        """Size of one cell of the tensor."""
        return sum(codec.row_bytes for codec in self.parts.values())


def views_of(name: str, tensor: torch.Tensor, cell: Cell, block_tokens: int, blocks: int) -> dict[str, torch.Tensor]:
    """Each part of a layer's rows as [B, H, N, W]. `blocks` and `block_tokens` are the block table's.

    Raises OperatorError for another shape than the two that are known.
    """
    size, tokens = tensor.element_size(), tensor.shape[-2] if tensor.dim() > 1 else 0
    found = f"{name}: KV cache {tuple(tensor.shape)} with strides {tuple(tensor.stride())}"
    if not _fits(tensor, cell, block_tokens, blocks):
        width = cell.bytes // size
        expected = f"[B, {cell.heads}, N, {width}]" if "v" in cell.parts else f"[B, N, {width}] or [B, 1, N, {width}]"
        raise OperatorError(
            "shape_unknown",
            f"{found} of {size}-byte elements, for {blocks} blocks of {block_tokens} tokens: expected {expected}",
        )
    if any(part.endswith("_scale") for part in cell.parts) and tensor.stride(-1) != 1:
        raise OperatorError("shape_unknown", f"{found}: rows with scales must be dense in the last dimension")
    block, *head, token, element = tensor.stride()
    shape = (tensor.shape[0], cell.heads, tokens)
    cells = tensor.as_strided((*shape, tensor.shape[-1]), (block, *(head or [0]), token, element))
    at, views = 0, {}
    for part, codec in cell.parts.items():
        row = codec.row_bytes // size
        if cell.is_apart:
            start = tensor.storage_offset() + at * tokens
            views[part] = tensor.as_strided((*shape, row), (*cells.stride()[:2], row, 1), start)
        else:
            views[part] = cells[..., at : at + row]
        at += row
    return views


def _fits(tensor: torch.Tensor, cell: Cell, block_tokens: int, blocks: int) -> bool:
    if tensor.dim() not in (3, 4) or tensor.shape[-1] * tensor.element_size() != cell.bytes:
        return False
    tokens = tensor.shape[-2]
    if tokens == 0 or block_tokens % tokens or tensor.shape[0] != blocks * (block_tokens // tokens):
        return False
    if cell.is_apart and not cell.is_paged and tokens != block_tokens:
        return False
    return tensor.shape[1] == cell.heads if tensor.dim() == 4 else "v" not in cell.parts
