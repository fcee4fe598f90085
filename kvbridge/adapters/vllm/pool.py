"""vLLM's KV tensors as a Pool: which planes they hold, and in which allocations the planes lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from kvbridge_proto.pool import Engine, Group, Plane, Shard
from msgspec.structs import replace

from ...errors import OperatorError
from ..engine.memory import Memory, plane_of
from ..engine.scores import Compressor, Scores
from ..engine.unsupported import refusal
from . import nvfp4
from .backends import rows_of
from .cpu import halves
from .dtypes import cell_of
from .layers import KVLayer, is_never_cached, kind_of, members_of, model_of, open_rows, tp_rank_of, window_of
from .plugin import CONNECTOR_NAME
from .shapes import views_of
from .states import planes_of
from .versions import check_groups, transfer_groups

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def describe(
    kv_caches: Mapping[str, torch.Tensor],
    config: VllmConfig,
    cache: KVCacheConfig,
    shard: Shard,
    *,
    model_name: str,
    engine_id: str,
    weights: str = "default",
    draft: str = "",
    replica: int = 0,
) -> Memory:
    """The pool of one rank. Raises OperatorError naming what cannot be described.

    `draft` is what the operator calls the draft model, "" for the last part of its path.
    """
    from vllm import __version__

    if getattr(config.model_config, "enable_sleep_mode", False):
        # Sleep frees the memory and waking maps other memory at the same addresses. Before 0.33 no connector is told.
        raise OperatorError(
            "sleep_mode_unsupported",
            "enable_sleep_mode: True, must be off: kvbridge does not follow a KV cache that goes away",
        )
    if any(getattr(group, "host_resident", False) for group in cache.kv_cache_groups):
        raise refusal("layer_unsupported", "vllm", "host rows", "hisparse")
    check_groups(cache)
    members = members_of(kv_caches, config, cache, shard)
    if not members:
        raise OperatorError("cache_empty", "KV cache: no layer of this rank owns any")
    rank = tp_rank_of(config.parallel_config, shard)
    return Memory.of(
        Engine(kind="vllm", version=__version__[:256], id=engine_id[:256], replica=replica),
        model_of(members, config, shard, model_name, weights, draft),
        shard,
        _groups(cache, config, {member.group: member.open_tokens for member in members}),
        [(member.tensor, plane) for member in members for plane in _planes(member, cache.num_blocks, rank)],
        _scores(members, config, cache.num_blocks),
    )


def _scores(members: list[KVLayer], config: VllmConfig, blocks: int) -> Scores | None:
    """What finishes the scores of compressors: vLLM keeps them with their weight."""
    layers = config.compilation_config.static_forward_context
    found = [member for member in members if rows_of(member.attention) == "compressor"]
    return Scores.of([_compressor(member, layers, blocks) for member in found], 1)


def _compressor(member: KVLayer, layers: Mapping[str, Any], blocks: int) -> Compressor | None:
    """Its module is in that of an attention layer P: "P.compressor", "P.indexer.compressor". None if it is not."""
    owner = next((name for name in layers if member.name.startswith(f"{name}.")), "")
    try:
        module = attrgetter(member.name.removeprefix(f"{owner}.").removesuffix(".state_cache"))(layers[owner])
    except (KeyError, AttributeError):
        return None
    tokens = int(member.spec.block_size)
    (view,) = views_of(member.name, member.tensor, cell_of(member), tokens, blocks).values()
    return Compressor(view.squeeze(1), member.group, partial(getattr, module, "ape"))


def _has_private_blocks(config: VllmConfig) -> bool:
    """Whether no block is ever another request's too. A connector beside ours may keep blocks for others.

    Ours gets a config of its own, which does not name the others (MultiConnector).
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    is_alone = not has_kv_transfer_group() or type(get_kv_transfer_group()).__name__ == CONNECTOR_NAME
    return is_alone and not config.cache_config.enable_prefix_caching


def _groups(cache: KVCacheConfig, config: VllmConfig, open_tokens: Mapping[int, int]) -> tuple[Group, ...]:
    """All groups that travel, even one without a layer on this pipeline rank: block tables include them all.

    `open_tokens` are those of rings, by group.
    """
    specs = [group.kv_cache_spec for group in transfer_groups(cache)]
    return tuple(
        Group(
            kind=kind_of(spec),
            block_tokens=int(spec.block_size),
            blocks=cache.num_blocks,
            window=open_tokens.get(number) or window_of(spec),
            begins_inside=bool(window_of(spec)) and open_rows(spec) != 4 and _has_private_blocks(config),
            never_cached=is_never_cached(spec),
        )
        for number, spec in enumerate(specs)
    )


def _planes(member: KVLayer, blocks: int, rank: tuple[int, int]) -> Iterable[Plane]:
    """The planes of one layer on `rank` (its number, of how many)."""
    if member.state is not None:
        at = member.layer, member.group
        return planes_of(member.name, member.tensor, member.spec, member.state, at, blocks, rank)
    if member.quant_mode == "NVFP4":
        return nvfp4.planes(member, blocks)
    cell, tokens, row_tokens = cell_of(member), int(member.spec.block_size), member.row_tokens
    if (slots := getattr(member.spec, "num_head_slots", None)) is not None:
        reason = f"num_head_slots {slots} for {member.heads} heads, whose order kvbridge does not know"
        raise OperatorError("layout_unknown", f"{member.name}: {reason}")
    planes, name = [], member.owner or member.name
    for part, view in views_of(member.name, member.tensor, cell, tokens // row_tokens, blocks).items():
        where = cell.parts[part], member.held, member.layer, member.group
        planes.append(plane_of(view, *where, part=part, block_tokens=tokens, name=name, row_tokens=row_tokens))
    return _cpu(member, planes) if rows_of(member.attention) == "cpu" else planes


def _cpu(member: KVLayer, planes: list[Plane]) -> Iterator[Plane]:
    """CPU attention treats each (block, head) as one run of memory: the K half, then the V half."""
    tensor, size, (key, value) = member.tensor, member.tensor.element_size(), member.widths
    is_dense = tensor.dim() == 4 and tensor.stride(3) == 1 and tensor.stride(2) == key + value
    if not is_dense or key != value or [plane.part for plane in planes] != ["k", "v"]:
        raise OperatorError(
            "layout_unknown",
            f"{member.name}: KV cache {tuple(tensor.shape)} with strides {tensor.stride()}, "
            "CPU attention needs dense cells with equal K and V",
        )
    tokens = tensor.shape[2]
    for place, (plane, half) in enumerate(zip(planes, halves(_isa(member), tokens, key, size), strict=True)):
        offset = plane.offset + place * (tokens - 1) * key * size
        token_axis = (*plane.token_axis[:-1], *half.tokens)
        yield replace(plane, offset=offset, token_axis=token_axis, element_axis=half.elements)


def _isa(member: KVLayer) -> str:
    """The instruction set that vLLM chose. Its metadata builders set it on the layers before memory is registered."""
    isa = getattr(member.attention, "isa", None)
    if isa is not None:
        return str(isa)
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    impl, spec = member.attention.impl, member.spec
    dtype = member.attention.dtype if hasattr(member.attention, "dtype") else spec.dtype
    return str(_get_attn_isa(dtype, spec.block_size, spec.head_size, impl.kv_cache_dtype))
