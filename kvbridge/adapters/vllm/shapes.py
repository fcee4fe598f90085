"""Where K, V or a latent lie in a layer's tensor, for every shape that vLLM has given its KV cache. Pure.

Nothing here looks at a version: dimensions and sizes decide. If they allow no reading, or two, that is an error.

| vLLM | attention | MLA |
|---|---|---|
| up to 0.22 | (2, B, N, H, D), FlashInfer and Triton (B, 2, N, H, D) | (B, N, W) |
| 0.23 to 0.25 | (B, 2, N, H, D) | (B, N, W) |
| 0.26 to 0.28 | (B, H, N, 2D) | (B, N, W) |
| 0.29 and later | (B, H, N, 2D) | (B, 1, N, W) |

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


@dataclass(frozen=True, slots=True)
class Grid:
    """One way to read a tensor: which dimension is what. `half` is the one that separates K and V, if there is one."""

    block: int
    token: int
    head: int | None
    half: int | None = None


GRIDS: dict[int, tuple[Grid, ...]] = {
    3: (Grid(block=0, token=1, head=None),),
    4: (Grid(block=0, head=1, token=2),),
    5: (Grid(block=0, half=1, token=2, head=3), Grid(half=0, block=1, token=2, head=3)),
}


def halves_of(
    shape: Sequence[int], strides: Sequence[int], element_bytes: int, cell: Cell, block_tokens: int, blocks: int
) -> list[Spot]:
    """The planes of a tensor. `strides` count elements; `blocks` and `block_tokens` are the block table's.

    Raises OperatorError for a shape that can be read in no way, or in two.
    """
    found = [
        grid for grid in GRIDS.get(len(shape), ()) if _fits(shape, element_bytes, cell, block_tokens, blocks, grid)
    ]
    if len(found) != 1:
        ways = "it can be read in two ways" if found else f"expected {_expected(element_bytes, cell)}"
        raise OperatorError(
            "shape_unknown",
            f"KV cache {tuple(shape)} with strides {tuple(strides)} of {element_bytes}-byte elements, "
            f"for {blocks} blocks of {block_tokens} tokens: {ways}",
        )
    (grid,) = found
    if cell.scale_bytes and strides[-1] != 1:
        raise OperatorError(
            "shape_unknown",
            f"KV cache {tuple(shape)} with strides {tuple(strides)}: "
            "rows with scales must be dense in the last dimension",
        )
    return list(_spots(shape, [stride * element_bytes for stride in strides], element_bytes, cell, block_tokens, grid))


def _fits(shape: Sequence[int], size: int, cell: Cell, block_tokens: int, blocks: int, grid: Grid) -> bool:
    tokens, row = shape[grid.token], shape[-1] * size
    if tokens == 0 or block_tokens % tokens or shape[grid.block] != blocks * (block_tokens // tokens):
        return False
    if cell.is_apart and not cell.is_paged and tokens != block_tokens:
        return False
    if grid.head is None:
        return not cell.value_bytes and row == cell.bytes
    if shape[grid.head] != cell.heads:
        return False
    if grid.half is None:
        return row == cell.bytes
    return shape[grid.half] == 2 and not cell.scale_bytes and row == cell.key_bytes == cell.value_bytes


def _expected(size: int, cell: Cell) -> str:
    width = cell.bytes // size
    if not cell.value_bytes:
        return f"[B, N, {width}] or [B, 1, N, {width}]"
    halved = (
        "" if cell.scale_bytes else f", [2, B, N, {cell.heads}, {width // 2}] or [B, 2, N, {cell.heads}, {width // 2}]"
    )
    return f"[B, {cell.heads}, N, {width}]{halved}"


def _spots(
    shape: Sequence[int], strides: Sequence[int], size: int, cell: Cell, block_tokens: int, grid: Grid
) -> Iterator[Spot]:
    """Here `strides` are in bytes."""
    tokens = shape[grid.token]
    ratio = block_tokens // tokens
    kernel_block = strides[grid.block]
    split = (Step(ratio, kernel_block),) if ratio > 1 else ()
    head_stride = strides[grid.head] if grid.head is not None else 0
    # V follows K in a cell, or they are two halves of the whole tensor.
    step = strides[-1]
    second = strides[grid.half] if grid.half is not None else (cell.key_bytes // size) * step + cell.scale_bytes
    rows = [("k", 0, cell.key_bytes), ("v", second, cell.value_bytes)]
    if not cell.value_bytes:
        rows = [(cell.part, 0, cell.key_bytes)]
    for part, offset, row_bytes in rows:
        token_stride = row_bytes if cell.is_apart else strides[grid.token]
        token_axis = (*split, Step(tokens, token_stride))
        width = row_bytes // size
        yield Spot(part, offset, kernel_block * ratio, token_axis, head_stride, (Step(width, step),), width)
        if cell.scale_bytes:
            at, stride = offset + row_bytes, strides[grid.token]
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
