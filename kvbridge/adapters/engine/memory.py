"""An engine rank's KV memory as it is attached: the pool that describes it and the storages that hold it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from kvbridge_proto.pool import Codec, CodecName, Engine, Group, Model, Plane, Pool, Region, Shard, Step
from msgspec.structs import replace

from ...errors import OperatorError
from ...values import Value
from .codecs import plain_rows
from .records import Heads, State
from .scores import Scores

# Dtypes whose numbers are stored as they are; fp8 is under scales that the engine knows.
CODEC_OF: dict[torch.dtype, CodecName] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}


class Memory(Value):
    """`storages[i]` holds region i of the pool. They stay allocated until the agent has let go of them.

    `scores` finishes those that come from another kind of engine, where that is possible.
    """

    pool: Pool
    storages: tuple[torch.UntypedStorage, ...]
    scores: Scores | None = None

    @classmethod
    def of(
        cls,
        engine: Engine,
        model: Model,
        shard: Shard,
        groups: tuple[Group, ...],
        planes: Sequence[tuple[torch.Tensor, Plane]],
        scores: Scores | None = None,
    ) -> Memory:
        """Each plane with its tensor, whose allocation becomes its region. Raises OperatorError for several devices."""
        storages = {each.data_ptr(): each for tensor, _ in planes for each in [tensor.untyped_storage()]}
        if len(devices := sorted({str(storage.device) for storage in storages.values()})) != 1:
            raise OperatorError("devices_mixed", f"KV cache: on {', '.join(devices)}, must be on one device")
        regions = {address: index for index, address in enumerate(storages)}
        pool = Pool(
            engine=engine,
            model=model,
            shard=shard,
            groups=groups,
            regions=tuple(Region(storage.nbytes()) for storage in storages.values()),
            planes=tuple(
                replace(plane, region=regions[tensor.untyped_storage().data_ptr()]) for tensor, plane in planes
            ),
            finishes_scores=scores is not None,
        )
        return cls(pool, tuple(storages.values()), scores)

    @property
    def device(self) -> torch.device:
        """The device of all storages."""
        return self.storages[0].device


def plane_of(
    view: torch.Tensor,
    codec: Codec,
    heads: Heads,
    layer: int,
    group: int,
    *,
    part: str,
    block_tokens: int,
    name: str = "",
    row_tokens: int = 1,
    token_axes: int = 1,
) -> Plane:
    """The plane of [B, H, N, W]. Several such blocks of N rows may make one of the block table; its region is 0.

    `name` is the engine's for the layer. N may be `token_axes` axes of the view, and W those behind them. Without any
    a block is one row.
    """
    size = view.element_size()
    block, head, *inner = (stride * size for stride in view.stride())
    steps = [Step(count, stride) for count, stride in zip(view.shape[2:], inner, strict=True)]
    *elements, last = steps[token_axes:]
    split = block_tokens // row_tokens // prod(view.shape[2 : 2 + token_axes])
    runs = codec.row_bytes // codec.element_bytes // prod(step.count for step in elements)
    return Plane(
        layer=layer,
        part=part,
        group=group,
        offset=int(view.storage_offset()) * size,
        block_stride=block * split,
        token_axis=(*([Step(split, block)] if split > 1 else []), *steps[:token_axes]) or (Step(1, 0),),
        head_stride=head,
        element_axis=(*elements, Step(runs, last.stride * codec.element_bytes // size)),
        first_head=heads.first,
        heads=heads.count,
        total_heads=heads.total,
        codec=codec,
        name=name[:256] or f"layer {layer} {part}",
        row_tokens=row_tokens,
    )


def state_planes(
    conv: torch.Tensor, own: torch.Tensor, state: State, rank: tuple[int, int], layer: int, group: int, name: str = ""
) -> Iterator[tuple[torch.Tensor, Plane]]:
    """The planes of a layer's state on `rank` (its number, of how many), each with its view.

    `conv` is [B, rows, channels], of which the state's rows come first, and `own` the state proper, [B, H, ...]. If the
    state lacks one of them, that is not looked at.
    """
    at = 0
    for part, heads, numbers in state.parts(*rank):
        view = own
        if part != "state":
            channels = numbers // state.rows
            piece = conv[:, : state.rows, at : at + heads.count * channels]
            view = piece.unflatten(2, (heads.count, channels)).transpose(1, 2)
            at += heads.count * channels
        codec = plain_rows(CODEC_OF[view.dtype], numbers, view.element_size())
        yield view, plane_of(view, codec, heads, layer, group, part=part, block_tokens=1, name=name, token_axes=0)
