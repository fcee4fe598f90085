"""Splits a list of places into whole blocks and runs of tokens, which copy faster than single tokens. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch

from .field import Axis, Field


@dataclass(frozen=True, slots=True)
class Piece:
    """Places from number `first` on: the `tokens` at each of `start + index * step` bytes from the field's offset."""

    first: int
    start: int
    index: torch.Tensor
    step: int
    tokens: tuple[Axis, ...]
    rows: int  # at each index: the product of the tokens' counts


def split(field: Field, places: torch.Tensor) -> list[Piece]:
    """A run up to the first block border, the whole blocks, and a run after them: the usual places of a request.

    Places in any other order are copied one by one.
    """
    count, block_tokens = places.numel(), field.block_tokens
    if count == 0:
        return []
    if block_tokens == 1:
        return [Piece(0, 0, places, field.blocks.stride, (), 1)]
    first = int(places[0])
    if not _runs_through_blocks(places, first, block_tokens):
        return [_singly(field, places, 0)]
    lead = min(-first % block_tokens, count)
    whole = (count - lead) // block_tokens * block_tokens
    pieces = []
    if lead:
        pieces.append(_run(field, places[:lead], 0))
    if whole:
        blocks = places[lead : lead + whole : block_tokens] // block_tokens
        pieces.append(Piece(lead, 0, blocks, field.blocks.stride, field.tokens, block_tokens))
    if lead + whole < count:
        pieces.append(_run(field, places[lead + whole :], lead + whole))
    return pieces


def _runs_through_blocks(places: torch.Tensor, first: int, block_tokens: int) -> bool:
    """Whether the places are of consecutive tokens in some block table."""
    offsets = torch.arange(first % block_tokens, first % block_tokens + places.numel()) % block_tokens
    steps = (places[1:] - places[:-1] == 1) | (offsets[1:] == 0)
    return bool(steps.all()) and bool((places % block_tokens == offsets).all())


def _run(field: Field, places: torch.Tensor, first: int) -> Piece:
    """The piece for consecutive tokens inside one block."""
    if len(field.tokens) > 1:
        return _singly(field, places, first)
    (axis,) = field.tokens
    block, token = divmod(int(places[0]), axis.count)
    start = block * field.blocks.stride + token * axis.stride
    index = torch.zeros(1, dtype=torch.int64)
    return Piece(first, start, index, 0, (Axis(places.numel(), axis.stride),), places.numel())


def _singly(field: Field, places: torch.Tensor, first: int) -> Piece:
    offsets = places // field.block_tokens * field.blocks.stride
    token = places % field.block_tokens
    for axis in reversed(field.tokens):
        offsets += token % axis.count * axis.stride
        token = token // axis.count
    step = gcd(field.blocks.stride, *(axis.stride for axis in field.tokens)) or 1
    return Piece(first, 0, offsets // step, step, (), 1)
