"""Describes SGLang's KV pool as a Pool: its planes, and the allocations that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from kvbridge_proto.pool import Codec, Engine, Group, Layer, Model, Plane, Pool, Region, Shard, Step

from ...errors import OperatorError
from ..engine.codecs import CODEC_OF
from ..engine.heads import Heads
from ..engine.memory import Memory
from ..engine.unsupported import UNSUPPORTED, refusal

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LAYOUTS = ("nhd", "hnd")
# By the class itself: each subclass stores its rows differently.
POOLS = {
    "MHATokenToKVPool": "kv",
    "MLATokenToKVPool": "latent",
    "SWAKVPool": "window pool",
    "DSATokenToKVPool": "index",
    "MiniMaxSparseKVPool": "index",
    "HybridLinearKVPool": "state",
    "QSATokenToKVPool": "state",
    "DeepSeekV4TokenToKVPool": "compressed",
    "MHATokenToKVPoolFP4": "packed",
    "MLATokenToKVPoolFP4": "packed",
    "MHATokenToKVPoolMXFP8": "packed",
    "HiSparseDSATokenToKVPool": "host rows",
}


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """One tensor of a layer: [slots, heads, width], or in the layout `hnd` [pages, heads, tokens, width]."""

    layer: int
    name: str
    tensor: torch.Tensor
    scale: float


def describe(queue: Any, shard: Shard, *, model_name: str, engine_id: str, weights: str = "default") -> Memory:
    """The memory of one rank; `queue` is the scheduler's queue. Raises OperatorError for a pool we cannot describe."""
    from sglang.version import __version__

    pool, config = queue.token_to_kv_pool, queue.scheduler.model_config
    check(queue)
    attentions = _attentions(queue.scheduler.tp_worker.model_runner.model)
    parts = list(_parts(pool, attentions))
    storages = {storage.data_ptr(): storage for part in parts for storage in [part.tensor.untyped_storage()]}
    regions = {address: index for index, address in enumerate(storages)}
    is_latent = _is_latent(pool)
    heads = (
        Heads(0, 1, 1) if is_latent else Heads.of(int(config.get_total_num_kv_heads()), shard.tp_rank, shard.tp_size)
    )
    if not is_latent and int(pool.head_num) != heads.count:
        reason = f"KV pool: {pool.head_num} heads on rank {shard.tp_rank} of {shard.tp_size}, expected {heads.count}"
        raise OperatorError("heads_unknown", reason)
    slots = [part.tensor.shape[0] for part in parts]
    blocks = min(slots) if _is_hnd(pool) else min(slots) // int(pool.page_size)
    described = Pool(
        engine=Engine(kind="sglang", version=__version__[:256], id=engine_id[:256]),
        model=Model(
            name=model_name[:256],
            layers=_layers(parts, pool, heads, attentions, config, shard),
            depth=int(config.hf_text_config.num_hidden_layers),
            weights=weights,
        ),
        shard=shard,
        groups=(Group(kind="full", block_tokens=int(pool.page_size), blocks=blocks),),
        regions=tuple(Region(storage.nbytes()) for storage in storages.values()),
        planes=tuple(_plane(part, regions[part.tensor.untyped_storage().data_ptr()], pool, heads) for part in parts),
    )
    return Memory(described, tuple(storages.values()))


def check(queue: Any) -> None:
    """Raise OperatorError if this cache is not supported yet, with SGLang's name for it."""
    pool = queue.token_to_kv_pool
    kind = type(pool).__name__
    if POOLS.get(kind) in UNSUPPORTED:
        raise refusal("cache_unsupported", "sglang", POOLS[kind], f"KV pool: {kind}")
    if kind not in POOLS:
        known = ", ".join(name for name, rows in POOLS.items() if rows not in UNSUPPORTED)
        raise OperatorError(
            "cache_unsupported", f"KV pool: {kind}, whose order of rows kvbridge does not know; known are {known}"
        )
    if (layout := getattr(pool, "kv_cache_layout", "nhd")) not in LAYOUTS:
        raise OperatorError("cache_unsupported", f"KV pool: layout {layout}, supported are {', '.join(LAYOUTS)}")
    if queue.draft_token_to_kv_pool is not None:
        raise refusal("cache_unsupported", "sglang", "draft pool", "speculative decoding")
    if getattr(queue.scheduler, "enable_hisparse", False):
        raise refusal("cache_unsupported", "sglang", "host rows", "hisparse")
    if pool.dtype not in CODEC_OF:
        raise OperatorError("codec_unknown", f"KV pool: {pool.dtype}, supported are {', '.join(map(str, CODEC_OF))}")
    method = getattr(pool, "quant_method", None)
    if (name := getattr(method, "name", "unquantized")) != "unquantized":
        raise OperatorError("codec_unknown", f"KV pool: quantized by {name}, must hold plain numbers")
    if (device := queue.metadata_buffers.output_ids.device.type) != "cpu":
        raise OperatorError("cache_unsupported", f"metadata buffers: on {device}, must be on the CPU")


def moved(pool: Any) -> None:
    """Update the addresses that SGLang keeps, after a CPU pool's tensors have moved into shared memory."""
    if hasattr(pool, "_init_data_ptrs_and_strides"):
        pool._init_data_ptrs_and_strides()
    elif getattr(pool, "data_ptrs", None) is not None:
        addresses = [tensor.data_ptr() for tensor in pool.kv_buffer]
        pool.data_ptrs = torch.tensor(addresses, dtype=torch.uint64, device=pool.device)


def _is_latent(pool: Any) -> bool:
    return hasattr(pool, "kv_lora_rank")


def _is_hnd(pool: Any) -> bool:
    return getattr(pool, "kv_cache_layout", "nhd") == "hnd"


def _attentions(model: Any) -> dict[int, Any]:
    """This rank's attention layers by number. They have the scales and windows."""
    return {module.layer_id: module for module in model.modules() if type(module).__name__ == "RadixAttention"}


def _parts(pool: Any, attentions: dict[int, Any]) -> Iterator[LayerTensor]:
    for index in range(pool.layer_num):
        layer = pool.start_layer + index
        k_scale, v_scale = (_scale(attentions.get(layer), part) for part in "kv")
        if _is_latent(pool):
            yield LayerTensor(layer, "latent", pool.kv_buffer[index], k_scale)
        else:
            yield LayerTensor(layer, "k", pool.k_buffer[index], k_scale)
            yield LayerTensor(layer, "v", pool.v_buffer[index], v_scale)


def _scale(attention: Any, part: str) -> float:
    """The factor from a stored number to its value; 1 if the checkpoint has none."""
    said = getattr(attention, f"{part}_scale_float", None)
    if said is None and (tensor := getattr(attention, f"{part}_scale", None)) is not None:
        said = float(tensor)
    return 1.0 if said is None else float(said)


def _plane(part: LayerTensor, region: int, pool: Any, heads: Heads) -> Plane:
    tensor, size, page = part.tensor, part.tensor.element_size(), int(pool.page_size)
    strides = [stride * size for stride in tensor.stride()]
    if _is_hnd(pool):
        block, head, slot, element = strides
    else:
        slot, head, element = strides
        block = page * slot
    width = tensor.shape[-1]
    scales = (part.scale,) if pool.dtype in FP8 else ()
    return Plane(
        layer=part.layer,
        part=part.name,
        region=region,
        offset=int(tensor.storage_offset()) * size,
        block_stride=block,
        token_axis=(Step(page, slot),),
        head_stride=head,
        element_axis=(Step(width, element),),
        first_head=heads.first,
        heads=heads.count,
        total_heads=heads.total,
        codec=Codec(name=CODEC_OF[pool.dtype], width=width, element_bytes=size, row_bytes=width * size, scales=scales),
        name=f"layer {part.layer} {part.name}",
    )


def _layers(
    parts: list[LayerTensor], pool: Any, heads: Heads, attentions: dict[int, Any], config: Any, shard: Shard
) -> tuple[Layer | None, ...]:
    """One record per layer of this rank; None for layers of other pipeline ranks."""
    mine: dict[int, Layer] = {}
    for part in parts:
        widths = {other.name: other.tensor.shape[-1] for other in parts if other.layer == part.layer}
        if _is_latent(pool):
            rope = int(pool.qk_rope_head_dim)
            mine[part.layer] = Layer(kind="mla", kv_heads=1, key_width=widths["latent"], value_width=0, rope_width=rope)
            continue
        # SGLang's window excludes the current token. A model's window includes it.
        before = getattr(attentions.get(part.layer), "sliding_window_size", -1)
        window = before + 1 if before > 0 else 0
        mine[part.layer] = Layer(
            kind="sliding" if window else "full",
            kv_heads=heads.total,
            key_width=widths["k"],
            value_width=widths["v"],
            window=window,
        )
    count = max(mine) + 1
    if shard.pp_size > 1:
        count = max(count, int(config.hf_text_config.num_hidden_layers))
    return tuple(mine.get(index) for index in range(count))
