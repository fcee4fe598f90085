"""Where K, V or a latent lie in a layer's tensor, for every shape that vLLM has given its KV cache since 0.26. Pure.

Nothing here looks at a version: dimensions and sizes decide. That of attention is (B, H, N, 2D), that of MLA (B, N, W),
and (B, 1, N, W) from 0.29 on.

B counts blocks of the kernel, several of which may make one block of the block table. Strides alone say which dimension
is outermost in memory (NHD, HND, all layers of a block side by side, a page with padding).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvbridge_proto.pool import Step

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
    """

    heads: int
    key_bytes: int
    value_bytes: int
    scale_bytes: int = 0
    scale_unit: int = 4
    is_apart: bool = False
    is_paged: bool = False
    part: str = "latent"

    @property
    def bytes(self) -> int:
        """Size of one cell of the tensor."""
        return self.key_bytes + self.value_bytes + self.scale_bytes * (2 if self.value_bytes else 1)


@dataclass(frozen=True, slots=True)
class Spot:
    """One plane of a layer: its part, and where its rows are, in bytes from the tensor's first element.

    `width` counts the elements of a row.
    """

    part: str
    offset: int
    block_stride: int
    token_axis: tuple[Step, ...]
    head_stride: int
    element_axis: tuple[Step, ...]
    width: int


def halves_of(
    shape: Sequence[int], strides: Sequence[int], element_bytes: int, cell: Cell, block_tokens: int, blocks: int
) -> list[Spot]:
    """The planes of a tensor. `strides` count elements; `blocks` and `block_tokens` are the block table's.

    Raises OperatorError for another shape than the two that are known.
    """
    found = f"KV cache {tuple(shape)} with strides {tuple(strides)}"
    if not _fits(shape, element_bytes, cell, block_tokens, blocks):
        width = cell.bytes // element_bytes
        expected = f"[B, {cell.heads}, N, {width}]" if cell.value_bytes else f"[B, N, {width}] or [B, 1, N, {width}]"
        raise OperatorError(
            "shape_unknown",
            f"{found} of {element_bytes}-byte elements, for {blocks} blocks of {block_tokens} tokens: "
            f"expected {expected}",
        )
    if cell.scale_bytes and strides[-1] != 1:
        raise OperatorError("shape_unknown", f"{found}: rows with scales must be dense in the last dimension")
    return list(_spots(shape, [stride * element_bytes for stride in strides], element_bytes, cell, block_tokens))


def _fits(shape: Sequence[int], size: int, cell: Cell, block_tokens: int, blocks: int) -> bool:
    if len(shape) not in (3, 4) or shape[-1] * size != cell.bytes:
        return False
    tokens = shape[-2]
    if tokens == 0 or block_tokens % tokens or shape[0] != blocks * (block_tokens // tokens):
        return False
    if cell.is_apart and not cell.is_paged and tokens != block_tokens:
        return False
    return shape[1] == cell.heads if len(shape) == 4 else not cell.value_bytes


def _spots(shape: Sequence[int], strides: Sequence[int], size: int, cell: Cell, block_tokens: int) -> Iterator[Spot]:
    """Here `strides` are in bytes. V follows K in a cell."""
    tokens, token = shape[-2], strides[-2]
    ratio, kernel_block, step = block_tokens // tokens, strides[0], strides[-1]
    split = (Step(ratio, kernel_block),) if ratio > 1 else ()
    head_stride = strides[1] if len(shape) == 4 else 0
    second = (cell.key_bytes // size) * step + cell.scale_bytes
    rows = [("k", 0, cell.key_bytes), ("v", second, cell.value_bytes)]
    if not cell.value_bytes:
        rows = [(cell.part, 0, cell.key_bytes)]
    for part, offset, row_bytes in rows:
        token_stride = row_bytes if cell.is_apart else token
        token_axis = (*split, Step(tokens, token_stride))
        width = row_bytes // size
        yield Spot(part, offset, kernel_block * ratio, token_axis, head_stride, (Step(width, step),), width)
        if cell.scale_bytes:
            at, stride = offset + row_bytes, token
            if cell.is_apart:
                at, stride = offset + tokens * row_bytes, cell.scale_bytes
            yield Spot(
                f"{part}_scale",
                at,
                kernel_block * ratio,
                (*split, Step(tokens, stride)),
                head_stride,
                (Step(cell.scale_bytes // cell.scale_unit, cell.scale_unit),),
                cell.scale_bytes // cell.scale_unit,
            )
