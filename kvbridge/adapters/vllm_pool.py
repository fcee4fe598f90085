"""vLLM's KV tensors as a Pool: which planes they hold, and which allocations those lie in.

In vLLM 0.26 to 0.32 each layer is one [B, H, N, 2D] view with K and V of a head in the same cell; which dimension is
outermost in memory (NHD, HND, all layers of a block together) is a matter of the view's strides. Other shapes are
refused by name until somebody describes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from kvbridge_proto.pool import (
    Codec,
    CodecName,
    Engine,
    Group,
    GroupKind,
    Layer,
    Model,
    Plane,
    Pool,
    Region,
    Shard,
    Step,
)

from ..errors import OperatorError
from .vllm_cpu import Axis, Half, halves
from .vllm_groups import transfer_groups

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

PLAIN_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")
CODECS: dict[torch.dtype, CodecName] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}
KINDS: dict[str, GroupKind] = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "sliding",
    "ChunkedLocalAttentionSpec": "chunked",
}
FP8_NAMES: dict[str, CodecName] = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}


@dataclass(frozen=True, slots=True)
class Memory:
    """A pool and the storages behind its regions, in the regions' order."""

    pool: Pool
    storages: tuple[torch.UntypedStorage, ...]

    @property
    def device(self) -> torch.device:
        """One for all."""
        return self.storages[0].device


@dataclass(frozen=True, slots=True)
class Heads:
    """The KV heads this rank holds; with fewer heads than ranks, neighbouring ranks hold the same one."""

    first: int
    count: int
    total: int

    @classmethod
    def of(cls, total: int, tp_rank: int, tp_size: int) -> Heads:
        """vLLM's rule (QKVParallelLinear)."""
        if total >= tp_size:
            return cls(tp_rank * (total // tp_size), total // tp_size, total)
        return cls(tp_rank // (tp_size // total), 1, total)


@dataclass(frozen=True, slots=True)
class Member:
    """One layer's tensor with what vLLM says about it."""

    name: str
    layer: int
    group: int
    tensor: torch.Tensor
    spec: Any
    attention: Any

    @property
    def kind(self) -> GroupKind:
        return KINDS[type(self.spec).__name__]

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers in a row of K and of V."""
        key = int(self.spec.head_size)
        return key, int(getattr(self.spec, "head_size_v", None) or key)

    @property
    def window(self) -> int:
        return int(getattr(self.spec, "sliding_window", None) or getattr(self.spec, "attention_chunk_size", None) or 0)


def describe(
    kv_caches: Mapping[str, torch.Tensor],
    config: VllmConfig,
    cache: KVCacheConfig,
    shard: Shard,
    *,
    model_name: str,
    engine_id: str,
) -> Memory:
    """The pool of one rank. Raises OperatorError naming what cannot be described."""
    from vllm import __version__

    _check_config(config)
    members = _members(kv_caches, config, cache)
    storages = {storage.data_ptr(): storage for member in members for storage in [member.tensor.untyped_storage()]}
    devices = sorted({str(storage.device) for storage in storages.values()})
    if len(devices) != 1:
        raise OperatorError("devices_mixed", f"KV cache: on {', '.join(devices)}, must be on one device")
    regions = {address: index for index, address in enumerate(storages)}
    heads = Heads.of(config.model_config.get_total_num_kv_heads(), shard.tp_rank, shard.tp_size)
    planes: list[Plane] = []
    for member in members:
        region = regions[member.tensor.untyped_storage().data_ptr()]
        planes.extend(_planes(member, heads, region, config.cache_config.cache_dtype))
    pool = Pool(
        engine=Engine(kind="vllm", version=__version__[:256], id=engine_id[:256]),
        model=Model(name=model_name[:256], layers=_layers(members, config, shard, heads.total)),
        shard=shard,
        groups=_groups(members, cache),
        regions=tuple(Region(storage.nbytes()) for storage in storages.values()),
        planes=tuple(planes),
    )
    return Memory(pool, tuple(storages.values()))


def _check_config(config: VllmConfig) -> None:
    """What is refused whatever the tensors look like."""
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise OperatorError("context_parallel_unsupported", f"{name}: {size}, must be 1 for now")
    if getattr(config.model_config, "enable_sleep_mode", False):
        # Sleep frees the memory and waking maps other memory at the same addresses; no hook tells a connector.
        raise OperatorError(
            "sleep_mode_unsupported",
            "enable_sleep_mode: True, must be off: vLLM does not say when the KV cache goes away",
        )
    if getattr(config.cache_config, "calculate_kv_scales", False) and config.cache_config.cache_dtype in FP8_NAMES:
        raise OperatorError(
            "scales_dynamic",
            "calculate_kv_scales: True, must be off: scales must be known before the first request; "
            "put them into the checkpoint",
        )


def _members(kv_caches: Mapping[str, torch.Tensor], config: VllmConfig, cache: KVCacheConfig) -> list[Member]:
    """Layers that own KV, in the order of the groups that take part in transfers."""
    from vllm.model_executor.models.utils import extract_layer_index

    layers = config.compilation_config.static_forward_context
    members = []
    for index, group in enumerate(transfer_groups(cache)):
        for name in group.layer_names:
            attention = layers[name]
            if getattr(attention, "kv_sharing_target_layer_name", None):
                continue  # reads another layer's KV
            spec = group.kv_cache_spec
            spec = getattr(spec, "kv_cache_specs", {}).get(name, spec)
            if type(spec).__name__ not in KINDS:
                raise OperatorError("layer_unsupported", f"{name}: {type(spec).__name__} is not supported yet")
            tensor = kv_caches[name]
            if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
                shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise OperatorError("shape_unknown", f"{name}: KV cache {shape}, we know [B, H, N, 2D] (vLLM >= 0.26)")
            members.append(Member(name, extract_layer_index(name), index, tensor, spec, attention))
    return members


def _groups(members: list[Member], cache: KVCacheConfig) -> tuple[Group, ...]:
    groups = []
    for index, _ in enumerate(transfer_groups(cache)):
        mine = [member for member in members if member.group == index]
        if not mine:
            raise OperatorError("group_empty", f"group {index}: no layer of it is on this rank")
        first = mine[0]
        blocks = {member.tensor.shape[0] // _kernel_blocks(member) for member in mine}
        if len(blocks) != 1:
            raise OperatorError("blocks_differ", f"group {index}: its layers have {sorted(blocks)} blocks")
        groups.append(
            Group(kind=first.kind, block_tokens=first.spec.block_size, blocks=blocks.pop(), window=first.window)
        )
    return tuple(groups)


def _kernel_blocks(member: Member) -> int:
    """How many of the tensor's blocks make one of the block table's: a kernel may want smaller ones."""
    block_tokens, kernel_tokens = member.spec.block_size, member.tensor.shape[2]
    if block_tokens % kernel_tokens:
        raise OperatorError("block_size", f"{member.name}: tensor has {kernel_tokens} tokens, spec {block_tokens}")
    return int(block_tokens // kernel_tokens)


def _layers(members: list[Member], config: VllmConfig, shard: Shard, kv_heads: int) -> tuple[Layer, ...]:
    """All layers of the model, also those of other pipeline ranks: the identity is the same on every rank."""
    mine = {
        member.layer: Layer(
            kind=member.kind,
            kv_heads=kv_heads,
            key_width=member.widths[0],
            value_width=member.widths[1],
            window=member.window,
        )
        for member in members
    }
    if len(mine) != len(members):
        raise OperatorError("layer_repeated", f"layers: {len(members)} KV caches in {len(mine)} layers")
    if shard.pp_size == 1:
        count = max(mine) + 1
    else:
        count = int(config.model_config.hf_text_config.num_hidden_layers)
    default = next(iter(mine.values()))
    if len(mine) != count and set(mine.values()) != {default}:
        # What other ranks hold is not known here, and layers without KV have no record.
        raise OperatorError("layers_mixed", f"layers: {len(mine)} of {count} are on this rank and they differ in kind")
    return tuple(mine.get(index, default) for index in range(count))


def _planes(member: Member, heads: Heads, region: int, cache_dtype: str) -> Iterator[Plane]:
    """K and V of one layer."""
    tensor, size = member.tensor, member.tensor.element_size()
    _, head_count, tokens, cell = tensor.shape
    key_width, value_width = member.widths
    if (head_count, cell) != (heads.count, key_width + value_width):
        raise OperatorError(
            "shape_unknown",
            f"{member.name}: KV cache {tuple(tensor.shape)}, expected {heads.count} heads of "
            f"{key_width} + {value_width} numbers in dimensions 1 and 3",
        )
    ratio = _kernel_blocks(member)
    block_stride, head_stride = tensor.stride(0) * size, tensor.stride(1) * size
    start = int(tensor.storage_offset()) * size
    for part, half, offset, width in _halves(member, tokens, size):
        tokens_axis = half.tokens if ratio == 1 else (Step(ratio, block_stride), *half.tokens)
        yield Plane(
            layer=member.layer,
            part=part,
            group=member.group,
            region=region,
            offset=start + offset,
            block_stride=block_stride * ratio,
            token_axis=tokens_axis,
            head_stride=head_stride,
            element_axis=half.elements,
            first_head=heads.first,
            heads=heads.count,
            total_heads=heads.total,
            codec=_codec(member, part, width, cache_dtype),
            name=member.name[:256],
        )


def _halves(member: Member, tokens: int, size: int) -> Iterator[tuple[str, Half, int, int]]:
    """(part, where its tokens and elements are, offset in the cell, width) for K and V."""
    tensor, backend = member.tensor, member.attention.attn_backend.get_name()
    key_width, value_width = member.widths
    if backend == "CPU_ATTN":
        if tensor.stride(3) != 1 or tensor.stride(2) != key_width + value_width or key_width != value_width:
            raise OperatorError(
                "layout_unknown",
                f"{member.name}: strides {tensor.stride()}, CPU attention needs dense cells with equal K and V",
            )
        k, v = halves(_isa(member), tokens, key_width, size)
        yield "k", k, 0, key_width
        yield "v", v, tokens * key_width * size, value_width
    elif backend in PLAIN_BACKENDS:
        token_axis: Axis = (Step(tokens, tensor.stride(2) * size),)
        step = tensor.stride(3) * size
        yield "k", Half(token_axis, (Step(key_width, step),)), 0, key_width
        yield "v", Half(token_axis, (Step(value_width, step),)), key_width * step, value_width
    else:
        known = ", ".join(("CPU_ATTN", *PLAIN_BACKENDS))
        raise OperatorError("backend_unsupported", f"{member.name}: attention backend {backend}, supported are {known}")


def _isa(member: Member) -> str:
    """What vLLM chose for this machine; its metadata builders write it on the layers before memory is registered."""
    isa = getattr(member.attention, "isa", None)
    if isa is not None:
        return str(isa)
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    impl, spec = member.attention.impl, member.spec
    dtype = member.attention.dtype if hasattr(member.attention, "dtype") else spec.dtype
    return str(_get_attn_isa(dtype, spec.block_size, spec.head_size, impl.kv_cache_dtype))


def _codec(member: Member, part: str, width: int, cache_dtype: str) -> Codec:
    tensor, said = member.tensor, str(getattr(member.attention, "kv_cache_dtype", cache_dtype))
    mode = getattr(getattr(member.spec, "kv_quant_mode", None), "name", "NONE")
    name = FP8_NAMES.get(said) if tensor.dtype == torch.uint8 else CODECS.get(tensor.dtype)
    if name is None or mode not in ("NONE", "FP8_PER_TENSOR"):
        raise OperatorError(
            "codec_unknown", f"{member.name}: kv_cache_dtype {said} in {tensor.dtype} ({mode}) is not supported yet"
        )
    size = tensor.element_size()
    scales: tuple[float, ...] = ()
    if name in ("fp8_e4m3", "fp8_e5m2"):
        scales = _scales(member, part)
    return Codec(name=name, width=width, element_bytes=size, row_bytes=width * size, scales=scales)


def _scales(member: Member, part: str) -> tuple[float, ...]:
    """One for the layer, or one per head where the checkpoint has them so (then vLLM's own float is no use)."""
    scale = getattr(member.attention, f"_{part}_scale", None)
    if isinstance(scale, torch.Tensor) and scale.numel() > 1:
        scales = tuple(float(value) for value in scale.flatten().tolist())
        if len(scales) != member.tensor.shape[1]:
            raise OperatorError(
                "scales_unknown", f"{member.name}: {len(scales)} scales of {part} for {member.tensor.shape[1]} heads"
            )
        return scales
    return (float(getattr(member.attention, f"_{part}_scale_float")),)
