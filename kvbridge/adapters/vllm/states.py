"""A layer's recurrent state in vLLM: where each part of it lies in the layer's page.

A block holds one state: the last rows of the short convolution's input, then the state proper, one after the other, or
one of these alone.
With drafts the engine keeps more rows of the convolution, and more blocks: what the prompt leaves is in the first ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from operator import attrgetter
from typing import Any

import torch
from kvbridge_proto.pool import Plane

from ...errors import OperatorError
from ..engine.memory import CODEC_OF, state_planes
from ..engine.records import State
from ..engine.unsupported import refusal
from .backends import backend_of, rows_of

# By the rows that a backend writes: what makes their state of which fields of its layer.
FIELDS: dict[str, tuple[Callable[..., State], tuple[str, ...]]] = {
    # Of Qwen3-Next, Qwen3.5 and Olmo; and KDA of Kimi-Linear, K3 and Bailing 3
    "gated_delta": (State.gated_delta, ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size")),
    "kda": (State.gated_delta, ("num_heads", "num_heads", "head_dim", "head_dim", "conv_size")),
    # If B and C have one group, vLLM counts one for each rank; the norm keeps the model's number
    "mamba2": (State.mamba2, ("num_heads", "head_dim", "ssm_state_size", "norm.n_groups", "conv_kernel_size")),
    "mamba1": (State.mamba1, ("intermediate_size", "ssm_state_size", "conv_kernel_size")),
    "short_conv": (State.short_conv, ("conv_dim", "L_cache")),
    "lightning": (State.lightning, ("num_heads", "head_dim")),
}


def state_of(name: str, spec: Any, layer: Any) -> State:
    """Raises OperatorError for a state that is not carried, or is not where we look for it."""
    state = _state(layer)
    if state is None or getattr(spec, "tp_replicated", False):
        raise refusal("layer_unsupported", "vllm", "state", f"{name}: {type(spec).__name__} of {backend_of(layer)}")
    if spec.mamba_cache_mode not in ("none", "align"):  # "all", up to 0.31
        raise refusal("layer_unsupported", "vllm", "cached state", f"{name}: mamba_cache_mode {spec.mamba_cache_mode}")
    if getattr(layer, "use_replayssm", False):
        raise refusal("layer_unsupported", "vllm", "replayed state", f"{name}: {backend_of(layer)}")
    if (drafts := drafted_blocks(spec)) and not state.takes_drafts_back:
        found = f"{name}: {backend_of(layer)}, num_speculative_tokens {drafts}"
        raise refusal("layer_unsupported", "vllm", "drafted state", found)
    return state


def drafted_blocks(spec: Any) -> int:
    """How many blocks a request has behind that of its state, for the states after each token that is drafted."""
    return int(getattr(spec, "num_speculative_blocks", 0))


def _state(layer: Any) -> State | None:
    """None for a state of another kind, and if a field is not there."""
    rows = rows_of(layer)
    if rows == "gated_delta" and not hasattr(layer, "num_k_heads"):
        rows = "kda"
    make, names = FIELDS.get(rows, (None, ()))
    try:
        state = make and make(*[int(attrgetter(name)(layer)) for name in names])
    except AttributeError:
        return None
    return replace(state, is_turned=_is_on_cpu()) if state and rows == "gated_delta" else state


def _is_on_cpu() -> bool:
    """There vLLM's kernels of Gated DeltaNet take [heads, V, K] as [heads, K, V] (mamba/ops/cpu/gdn_attention.py)."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def planes_of(
    name: str, page: torch.Tensor, spec: Any, state: State, at: tuple[int, int], blocks: int, rank: tuple[int, int]
) -> list[Plane]:
    """The planes of a layer `at` (its number, its group) on `rank` (its number, of how many).

    `page` is [B, 1, 1, C] bytes. Raises OperatorError for another shape.
    """
    _check_page(name, page, spec, state, blocks, rank)
    held, end = [], 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        begin, end = end, end + prod(shape) * dtype.itemsize
        held.append(page[:, 0, 0, begin:end].view(dtype).unflatten(1, tuple(shape)))
    conv, own = held[0], held[-1]
    if conv.shape[2] != state.channels(*rank):  # VLLM_SSM_CONV_STATE_LAYOUT DS: channels of all rows
        conv = conv.transpose(1, 2)
    if state.heads:
        own = own.flatten(1).unflatten(1, (state.parts(*rank)[-1][1].count, -1))
        own = own.unflatten(2, (state.keys, state.values)).transpose(2, 3) if state.is_turned else own
    return [plane for _, plane in state_planes(conv, own, state, rank, *at, name)]


def _check_page(name: str, page: torch.Tensor, spec: Any, state: State, blocks: int, rank: tuple[int, int]) -> None:
    shapes, dtypes = [tuple(shape) for shape in spec.shapes], list(spec.dtypes)
    expected, is_fitting = [], len(shapes) == bool(state.conv) + bool(state.heads)
    if state.conv:
        channels = state.channels(*rank)
        expected.append(f"{state.rows} rows or more of {channels} channels")
        is_fitting = is_fitting and len(shapes[0]) == 2 and channels in shapes[0]
        is_fitting = is_fitting and sum(shapes[0]) - channels >= state.rows
    if state.heads:
        own = state.parts(*rank)[-1][1].count, state.values, state.keys
        expected.append(f"{own}")
        is_fitting = is_fitting and shapes[-1] in (own, (own[0] * own[1], own[2]))  # Mamba 1 has no heads
    is_fitting &= all(dtype in CODEC_OF and dtype.itemsize > 1 for dtype in dtypes)
    whole = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    found = tuple(page.shape), page.element_size(), page.stride(-1)
    if not is_fitting or found != ((blocks, 1, 1, whole), 1, 1):
        raise OperatorError(
            "shape_unknown",
            f"{name}: state {tuple(page.shape)} with strides {tuple(page.stride())} of {page.element_size()}-byte "
            f"elements for {shapes} of {dtypes}, expected [{blocks}, 1, 1, {whole}] bytes: {', then '.join(expected)}",
        )
