"""A layer's recurrent state in vLLM: where each part of it lies in the layer's page.

A block holds one state: the last rows of the short convolution's input, then the state proper, one after the other.
With drafts the engine keeps more rows of the convolution: what the prompt leaves is in the first ones.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from kvbridge_proto.pool import Codec, Plane, Step

from ...errors import OperatorError
from ..engine.memory import CODEC_OF
from ..engine.records import Heads, State
from ..engine.unsupported import refusal
from .backends import backend_of, rows_of


def state_of(name: str, spec: Any, layer: Any, shard_cp_size: int) -> State:
    """Raises OperatorError for a state that is not carried, or is not where we look for it."""
    read = {"gated_delta": _gated_delta, "mamba2": _mamba2}.get(rows_of(layer))
    state = read(layer) if read else None
    if state is None or getattr(spec, "tp_replicated", False):
        raise refusal("layer_unsupported", "vllm", "state", f"{name}: {type(spec).__name__} of {backend_of(layer)}")
    if spec.mamba_cache_mode not in ("none", "align"):  # "all", up to 0.31
        raise refusal("layer_unsupported", "vllm", "cached state", f"{name}: mamba_cache_mode {spec.mamba_cache_mode}")
    if drafts := int(getattr(spec, "num_speculative_blocks", 0)):
        raise refusal("layer_unsupported", "vllm", "drafted state", f"{name}: num_speculative_tokens {drafts}")
    if shard_cp_size > 1:
        reason = f"{name}: a state, decode_context_parallel_size {shard_cp_size}; needs 1"
        raise OperatorError("context_parallel_unsupported", reason)
    return state


def _gated_delta(layer: Any) -> State | None:
    """Of Qwen3-Next, Qwen3.5 and Olmo. KDA has the same backend, and other fields."""
    named = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size")
    found = [getattr(layer, name, None) for name in named]
    return None if None in found else State.gated_delta(*map(int, found))  # type: ignore[arg-type]


def _mamba2(layer: Any) -> State:
    """If B and C have one group, vLLM counts one for each rank; only the norm keeps the model's own number."""
    of = layer.num_heads, layer.head_dim, layer.ssm_state_size, layer.norm.n_groups, layer.conv_kernel_size
    return State.mamba2(*map(int, of))


def state_planes(
    name: str, page: torch.Tensor, spec: Any, state: State, at: tuple[int, int], blocks: int, rank: tuple[int, int]
) -> list[Plane]:
    """The planes of a layer `at` (its number, its group) on `rank` (its number, of how many).

    `page` is [B, 1, 1, C] bytes. Raises OperatorError for another shape.
    """
    *pieces, (_, heads, width) = state.parts(*rank)
    channels = sum(held.count * each // state.rows for _, held, each in pieces)
    _check_page(name, page, spec, state, blocks, channels, (heads.count, state.values, state.keys))
    conv, dtypes = spec.shapes[0], spec.dtypes
    size, start = dtypes[0].itemsize, int(page.storage_offset())
    # VLLM_SSM_CONV_STATE_LAYOUT: rows of all channels (SD), or channels of all rows (DS)
    row, channel = (channels * size, size) if conv[1] == channels else (size, conv[1] * size)
    planes, offset = [], start
    for part, held, each in pieces:
        stride, axis = each // state.rows * channel, (Step(state.rows, row), Step(each // state.rows, channel))
        planes.append(_plane(name, page, part, at, held, dtypes[0], axis, offset, stride))
        offset += held.count * stride
    offset, element = start + prod(conv) * size, dtypes[1].itemsize
    return [
        *planes,
        _plane(name, page, "state", at, heads, dtypes[1], (Step(width, element),), offset, width * element),
    ]


def _check_page(
    name: str, page: torch.Tensor, spec: Any, state: State, blocks: int, channels: int, own: tuple[int, int, int]
) -> None:
    """`channels` of the convolution, and the state proper, `own`, are this rank's."""
    shapes, dtypes = [tuple(shape) for shape in spec.shapes], list(spec.dtypes)
    is_fitting = len(shapes) == 2 and shapes[1] == own and len(shapes[0]) == 2 and channels in shapes[0]
    is_fitting &= all(dtype in CODEC_OF and dtype.itemsize > 1 for dtype in dtypes)
    is_fitting = is_fitting and sum(shapes[0]) - channels >= state.rows
    whole = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    found = tuple(page.shape), page.element_size(), page.stride(-1)
    if not is_fitting or found != ((blocks, 1, 1, whole), 1, 1):
        raise OperatorError(
            "shape_unknown",
            f"{name}: state {tuple(page.shape)} with strides {tuple(page.stride())} of {page.element_size()}-byte "
            f"elements for {shapes} of {dtypes}, expected [{blocks}, 1, 1, {whole}] bytes: {state.rows} rows or more "
            f"of {channels} channels, then {own}",
        )


def _plane(
    name: str,
    page: torch.Tensor,
    part: str,
    at: tuple[int, int],
    heads: Heads,
    dtype: torch.dtype,
    axis: tuple[Step, ...],
    offset: int,
    head_stride: int,
) -> Plane:
    width, size = prod(step.count for step in axis), dtype.itemsize
    return Plane(
        layer=at[0],
        part=part,
        group=at[1],
        offset=offset,
        block_stride=page.stride(0),
        token_axis=(Step(1, 0),),
        head_stride=head_stride,
        element_axis=axis,
        first_head=heads.first,
        heads=heads.count,
        total_heads=heads.total,
        codec=Codec(name=CODEC_OF[dtype], width=width, element_bytes=size, row_bytes=width * size),
        name=name[:256],
    )
