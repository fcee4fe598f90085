"""The rows that a synthetic engine computes, and where a memory differs from what it should hold.

A value is made from its (layer, part, head, token, element), so a value in the wrong place shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from kvbridge_proto.pool import CodecName

from kvbridge.loopback.pools import BITS, DTYPES, PARTS, Shape, planes_in
from kvbridge.values import Value

POISON = 0xA5


class DemoRows(Value):
    """What `put` writes into one plane: values [T, H, E] at blocks [T] and offsets [T]."""

    plane: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    values: torch.Tensor

    def put(self) -> None:
        """Write the values. On a GPU this only enqueues."""
        bits = BITS[self.values.itemsize]  # not every torch has an index_put for fp8
        self.plane.view(bits)[self.blocks, self.offsets] = self.values.view(bits)


def prepare(
    memory: torch.Tensor,
    shape: Shape,
    rank: int,
    table: Sequence[int] | torch.Tensor,
    tokens: torch.Tensor,
    codec: CodecName,
    layer: int | None = None,
    seed: int = 0,
    has_zeros: bool = False,
) -> Iterator[DemoRows]:
    """The rows of these tokens of a prompt, plane by plane, as they must be after a transfer from an engine of `codec`.

    `memory` holds that `layer`, or all of them. `table` has the blocks of the whole prompt. With `has_zeros`, the draft
    model's rows are zeros, as if that engine had none.
    """
    device = memory.device
    blocks = torch.as_tensor(table, device=device)[tokens // shape.block_tokens]
    offsets = tokens % shape.block_tokens
    heads = torch.arange(rank * shape.local_heads, (rank + 1) * shape.local_heads, device=device)
    for of_layer, index, plane in planes_in(memory, shape, layer):
        values = _values(of_layer, index, heads, tokens, shape.width, seed).to(DTYPES[codec])
        if has_zeros and of_layer >= shape.layers - shape.drafts:
            values = torch.zeros_like(values)
        yield DemoRows(plane, blocks, offsets, values if codec == shape.codec else _quantized(values, shape))


def first_difference(
    found: torch.Tensor, expected: torch.Tensor, shape: Shape, rank: int, layer: int | None = None
) -> str:
    """Describes where two memories of this shape first differ; empty if nowhere."""
    if torch.equal(found, expected):
        return ""
    bits = BITS[DTYPES[shape.codec].itemsize]
    pairs = zip(planes_in(found, shape, layer), planes_in(expected, shape, layer), strict=True)
    for (of_layer, index, ours), (_, _, wanted) in pairs:
        wrong = (ours.view(bits) != wanted.view(bits)).nonzero()
        if len(wrong):
            block, token, head, element = wrong[0].tolist()
            place = (
                f"layer {of_layer} {PARTS[index]} head {head + rank * shape.local_heads} block {block} token {token}"
            )
            values = f"{ours[block, token, head, element]}, expected {wanted[block, token, head, element]}"
            return f"{len(wrong)} elements differ, first at {place} element {element}: {values}"
    return "memory outside of the planes differs"


def _values(layer: int, part: int, heads: torch.Tensor, tokens: torch.Tensor, width: int, seed: int) -> torch.Tensor:
    """Values in [-8, 8), fp32 [T, H, E], each made from its coordinates."""
    rows = (tokens[:, None] * 1009 + heads[None, :] * 9176 + layer * 40503 + part * 30011 + seed * 7919) & 0xFFFF
    mixed = rows[:, :, None].int() * 25173 + torch.arange(width, dtype=torch.int32, device=rows.device) * 13849
    mixed = (mixed ^ (mixed >> 7)) & 0xFFFF
    return mixed.float() / 4096 - 8


def _quantized(values: torch.Tensor, shape: Shape) -> torch.Tensor:
    """The reference conversion: fp32, round to nearest even; 8 bits saturate."""
    numbers, dtype = values.float() / (shape.scale or 1.0), DTYPES[shape.codec]
    if dtype.itemsize > 1:
        return numbers.to(dtype)
    largest = torch.finfo(dtype).max
    return numbers.clamp(-largest, largest).to(dtype)
