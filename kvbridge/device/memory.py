"""An engine's memory in this process: mapped regions, and what a part of a plan is in them, for the kernels.

Every plane is checked against its region when the memory is mapped, and all of a part before its first byte is written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import torch
from kvbridge_kernels.codecs_ref import DTYPES, Cast, Number, RowScale
from kvbridge_kernels.field import Axis, Field, Mapped
from kvbridge_kernels.prepared import Placed, Prepared
from kvbridge_kernels.segment import Places, Segment, Span
from kvbridge_proto.pool import Codec, Handle, Plane, Pool

from ..errors import EngineError
from ..geometry.check import places_of
from ..geometry.compat import check_pool, extent
from ..geometry.overlap import overlaps
from ..geometry.plan import Move, Part
from ..geometry.wire import ROW_SCALED, ROW_SCALES, base_name, scales_of
from ..values import Value
from .mapping import HostMappings, Mappings, mappings_for, peer_mappings_for


def span_of(region: torch.Tensor | Mapped) -> Span:
    """The region's address in this process, or on our GPU, and its size."""
    if isinstance(region, Mapped):
        return Span(region.address, region.size_bytes)
    return Span(region.data_ptr(), region.nbytes)


class AttachedPool:
    """The pool of one engine rank, mapped. Used by one thread at a time; `close` may come from another."""

    def __init__(self, pool: Pool, mappings: Mappings, memories: Sequence[torch.Tensor | Mapped]) -> None:
        self.pool = pool
        self._mappings = mappings
        self._memories: Sequence[torch.Tensor | Mapped] | None = memories
        self._in_use = threading.Lock()

    @classmethod
    def open(
        cls, pool: Pool, handles: Sequence[Handle], fds: Sequence[int], device: str = "cpu", is_peers: bool = False
    ) -> Self:
        """Map every region of `pool`, on the agent's `device`. The fds stay the caller's, to close in any case.

        A peer's pool is only read, and any GPU may hold it. EngineError for an invalid pool, handle or fd,
        OperatorError for memory not served on this device, `no_peer_access` if our GPU cannot reach the peer's.
        """
        _check_planes(pool)
        by_region = _by_region(pool, handles)
        mappings = peer_mappings_for(device) if is_peers else mappings_for(device)
        try:
            sizes = [region.size_bytes for region in pool.regions]
            memories = [mappings.map(handle, size, fds) for handle, size in zip(by_region, sizes, strict=True)]
        except BaseException:
            mappings.close()
            raise
        return cls(pool, mappings, memories)

    @classmethod
    def of_zeros(cls, pool: Pool, device: str) -> Self:
        """Memory of our own for this pool, all zeros. Its planes may overlap: nobody writes them."""
        for plane in pool.planes:
            check_plane(pool, plane)
        zeros = [torch.zeros(region.size_bytes, dtype=torch.uint8) for region in pool.regions]
        # Not zeros on the GPU: torch's own kernels would take 92 MiB of it.
        return cls(pool, HostMappings(), [each.to(device) for each in zeros])

    @property
    def is_open(self) -> bool:
        return self._memories is not None

    def hold(self) -> HeldMemory:
        """The regions as uint8 tensors, mapped until the block ends. Keep nothing of them after it.

        torch does not keep the memory alive: once the pool is closed, no tensor may be used and no kernel may run on
        it. A region of a peer's pool on a GPU has only an address, for kernels.
        """
        return HeldMemory(self)

    def close(self) -> None:
        """Unmap at once. Waits for a `hold` to end, which lasts one chunk at most. Every later use is an EngineError.

        Waits for nothing else: on a GPU, the caller has seen the end of every kernel and copy it enqueued.
        """
        with self._in_use:
            self._memories = None
            self._mappings.close()

    def __repr__(self) -> str:
        size_bytes = sum(region.size_bytes for region in self.pool.regions)
        state = "open" if self.is_open else "closed"
        return f"<AttachedPool {self.pool.engine.id} {len(self.pool.planes)} planes {size_bytes} bytes {state}>"


class HeldMemory(Value, eq=False):
    """See `AttachedPool.hold`. Not a generator: of a small read's Python those took a tenth."""

    pool: AttachedPool

    def __enter__(self) -> Sequence[torch.Tensor | Mapped]:
        self.pool._in_use.acquire()
        if (memories := self.pool._memories) is None:
            self.pool._in_use.release()
            raise EngineError("detached", f"engine {self.pool.pool.engine.id}: its memory is unmapped")
        return memories

    def __exit__(self, *_: object) -> None:
        self.pool._in_use.release()


def check_plane(pool: Pool, plane: Plane) -> None:
    """EngineError unless all of `plane`, one of the pool's or coalesced from them, lies inside its region."""
    if plane.region >= len(pool.regions) or plane.group >= len(pool.groups):
        raise EngineError(
            "bad_plane",
            f"{_spell(plane)}: region {plane.region} of {len(pool.regions)}, group {plane.group} of {len(pool.groups)}",
        )
    end, size_bytes = extent(plane, pool.groups[plane.group]), pool.regions[plane.region].size_bytes
    if end > size_bytes:
        raise EngineError(
            "plane_outside_region",
            f"{_spell(plane)}: ends at byte {end}, region {plane.region} has {size_bytes} bytes",
        )


def _spell(plane: Plane) -> str:
    return plane.name or f"layer {plane.layer} {plane.part}"


def _check_planes(pool: Pool) -> None:
    for plane in pool.planes:
        check_plane(pool, plane)
    if reasons := check_pool(pool):
        raise EngineError("bad_pool", *reasons)
    if reasons := overlaps(pool):
        raise EngineError("planes_overlap", *reasons)


def _by_region(pool: Pool, handles: Sequence[Handle]) -> list[Handle]:
    found: dict[int, Handle] = {}
    for handle in handles:
        if handle.region in found:
            raise EngineError("handle_repeated", f"region {handle.region}: 2 handles, must be 1")
        found[handle.region] = handle
    if sorted(found) != list(range(len(pool.regions))):
        raise EngineError(
            "handle_missing", f"handles: for regions {sorted(found)}, the pool has {len(pool.regions)} regions"
        )
    return [found[region] for region in range(len(pool.regions))]


class PartSide(NamedTuple):
    """A part of a chunk in the memory of one pool."""

    attached: AttachedPool
    regions: Sequence[torch.Tensor | Mapped]
    part: Part


class _Template(Value):
    """A prepared move. `lists`: for each memory, group and unit of each of its lists of places."""

    attached: Sequence[AttachedPool]
    pairs: object
    prepared: Prepared
    lists: Sequence[Sequence[tuple[int, int]]]


class _Awaited(Value, eq=False):
    """A move of which only the source's places are not known yet."""

    target: Part
    template: _Template
    places: Sequence[Places]  # the target's


class Templates:
    """The prepared moves of one copier, kept since most chunks differ from an earlier one in their places only."""

    KEPT_MOVES = 256
    KEPT_AWAITED = 64

    def __init__(self) -> None:
        self._kept: dict[object, _Template] = {}
        self._awaited: dict[tuple[int, int, int], _Awaited] = {}  # by plan, chunk and slot

    def of(self, source: PartSide | None, target: PartSide | None, slot_bytes: int) -> Placed:
        """The move of a chunk from its source into its target. None: a slot of `slot_bytes`.

        EngineError if something in a part is invalid, ValueError if the two do not match.
        """
        sides = [side for side in (source, target) if side is not None]
        attached = [side.attached for side in sides]
        if source is not None and target is not None and self._awaited:
            plan, tables = target.part.plan, target.part.tables
            awaited = self._awaited.pop((id(plan), target.part.chunk.index, slot_bytes), None)
            if awaited is not None and awaited.target.tables is tables and awaited.template.attached == attached:
                return awaited.template.prepared.at(_placed(source, awaited.template, 0), awaited.places)
        template = self._template(source, target, slot_bytes, attached)
        return template.prepared.at(*(_placed(side, template, end) for end, side in enumerate(sides)))

    def await_source(self, source: PartSide, target: PartSide, slot_bytes: int) -> Placed:
        """The same before the source's block table is known: any may stand for it, and so do the places returned.

        Once it is known, `of` need not do again what this has done.
        """
        template = self._template(source, target, slot_bytes, [source.attached, target.attached])
        places = _placed(target, template, 1)
        if len(self._awaited) == self.KEPT_AWAITED:
            del self._awaited[next(iter(self._awaited))]
        key = id(target.part.plan), target.part.chunk.index, slot_bytes
        self._awaited[key] = _Awaited(target.part, template, places)
        return template.prepared.at(template.prepared.memories[0].places, places)

    def _template(
        self, source: PartSide | None, target: PartSide | None, slot_bytes: int, attached: Sequence[AttachedPool]
    ) -> _Template:
        pairs = next(side for side in (source, target) if side is not None).part.plan.pairs
        key = (*(None if side is None else side.part.template_key for side in (source, target)), slot_bytes)
        template = self._kept.pop(key, None)
        if template is None or template.attached != attached or template.pairs is not pairs:
            template = _template(source, target, slot_bytes)
            if len(self._kept) == self.KEPT_MOVES:
                del self._kept[next(iter(self._kept))]
        self._kept[key] = template  # the newest last
        return template

    def forget(self, attached: AttachedPool) -> None:
        """Keep nothing of this pool."""
        self._kept = {key: template for key, template in self._kept.items() if attached not in template.attached}
        self._awaited = {key: each for key, each in self._awaited.items() if attached not in each.template.attached}


def _placed(side: PartSide, template: _Template, end: int) -> list[Places]:
    """The places of a part, for the lists that its memory, the first or the second of the move, has."""
    found, memory = [], template.prepared.memories[end]
    for (group, unit_tokens), limit in zip(template.lists[end], memory.limits, strict=True):
        found.append(places := Places(side.part.places(group, unit_tokens)))
        _check_places(places, group, limit)
    return found


def _template(source: PartSide | None, target: PartSide | None, slot_bytes: int) -> _Template:
    known: dict[int, tuple[int, int]] = {}  # group and unit of each list of places
    sources, targets = (None if side is None else _segments(side, slot_bytes, known) for side in (source, target))
    prepared = Prepared(sources, targets, slot_bytes)
    sides = [side for side in (source, target) if side is not None]
    lists = [[known[id(places)] for places in memory.places] for memory in prepared.memories]
    return _Template([side.attached for side in sides], sides[0].part.plan.pairs, prepared, lists)


def _segments(side: PartSide, slot_bytes: int, known: dict[int, tuple[int, int]]) -> list[Segment]:
    """The segments of a part. Adds to `known` which lists of places they use."""
    pool, moves = side.attached.pool, side.part.moves()
    for move in moves:
        _check(pool, move, slot_bytes)
    lists: dict[tuple[int, int], Places] = {}
    found = []
    for alike in runs(moves):
        move = alike[0]
        key = move.plane.group, move.unit_tokens
        if key not in lists:
            lists[key] = Places(move.places)
            known[id(lists[key])] = key
        found.append(_segment(side, alike, lists[key]))
    return found


def runs(moves: Sequence[Move]) -> Iterator[Sequence[Move]]:
    """The moves in groups that differ only in where they begin, cut where the distance between moves changes.

    Most of a model's layers do. As one segment they cost one call.
    """
    by_form: dict[object, list[Move]] = {}
    for move in moves:
        if len(move.places):
            by_form.setdefault(_form(move), []).append(move)
    for alike in by_form.values():
        start = 0
        while start < len(alike):
            end = start + 1
            step = _distance(alike[start : start + 2])
            while end < len(alike) and min(step) > 0 and _distance(alike[end - 1 : end + 1]) == step:
                end += 1
            yield alike[start:end]
            start = end


def _form(move: Move) -> object:
    """What the moves of a segment have in common."""
    plane = move.plane
    strides = (plane.block_stride, plane.token_axis, plane.head_stride, plane.element_axis)
    codecs = [
        (codec.name, codec.element_bytes, codec.row_bytes, len(codec.scales)) for codec in (plane.codec, move.wire)
    ]
    scale = None
    if (own := move.scale) is not None:
        scale = own.offset - plane.offset, own.head_stride, own.block_stride, own.token_axis, own.codec.name
    where = (plane.region, plane.group, move.first_head, move.heads, move.unit_tokens)
    return (*where, *strides, *codecs, scale, move.rotates, move.is_bitwise)


def _distance(alike: Sequence[Move]) -> tuple[int, int]:
    """Bytes from the first move to the second, in memory and in the slot. Zeros if there is no second."""
    if len(alike) < 2:
        return 0, 0
    one, other = alike[:2]
    return other.plane.offset - one.plane.offset, other.slot_offset - one.slot_offset


def _check_places(places: Places, group: int, limit: int) -> None:
    if places.highest >= limit:
        raise EngineError("place_outside_plane", f"places: {places.reach}, a plane of group {group} has {limit}")


def _check(pool: Pool, move: Move, slot_bytes: int) -> None:
    plane = move.plane
    check_plane(pool, plane)
    if not 0 <= move.first_head < move.first_head + move.heads <= plane.heads:
        raise EngineError(
            "heads_outside_plane",
            f"heads: {move.heads} from {move.first_head} on, layer {plane.layer} {plane.part} has {plane.heads}",
        )
    end = move.slot_offset + move.size_bytes
    if move.slot_offset < 0 or end > slot_bytes:
        raise EngineError("move_outside_slot", f"move: ends at byte {end}, the slot has {slot_bytes}")
    if move.scale is not None:
        _check_scale(pool, plane, move.scale)
    elif move.is_bitwise:
        return
    name = plane.codec.name if move.scale is None else base_name(plane.codec)
    if not {name, move.wire.name} <= DTYPES.keys():
        raise EngineError("codec_not_convertible", f"codec: {plane.codec.name}, on the wire {move.wire.name}")


def _check_scale(pool: Pool, plane: Plane, scale: Plane) -> None:
    """A row and its scale must lie in one region and group, and the row's codec must have row scales."""
    check_plane(pool, scale)
    ours, theirs = ((each.region, each.group, places_of(each.token_axis)) for each in (plane, scale))
    is_one = scale.codec.name == plane.codec.scale_codec and scale.codec.width == 1 and ours == theirs
    if plane.codec.name not in ROW_SCALED or scale.codec.name not in ROW_SCALES or not is_one:
        raise EngineError(
            "bad_plane",
            f"layer {plane.layer} {plane.part}: {plane.codec.name} at {ours}, "
            f"its scales {scale.codec.name} of width {scale.codec.width} at {theirs}",
        )
    if scale.heads != plane.heads:
        raise EngineError("bad_plane", f"heads: {plane.heads} of {plane.part}, {scale.heads} of {scale.part}")


def _segment(side: PartSide, alike: Sequence[Move], places: Places) -> Segment:
    move, (pitch, slot_pitch) = alike[0], _distance(alike)
    plane = move.plane
    field = Field(
        memory=side.regions[plane.region],
        offset=plane.offset + move.first_head * plane.head_stride,
        planes=Axis(len(alike), pitch),
        blocks=Axis(side.attached.pool.groups[plane.group].blocks, plane.block_stride),
        tokens=tuple(Axis(step.count, step.stride) for step in plane.token_axis),
        heads=Axis(move.heads, plane.head_stride),
        elements=tuple(Axis(step.count, step.stride) for step in plane.element_axis),
        element_bytes=plane.codec.element_bytes,
    )
    _check_places(places, plane.group, field.places)
    return Segment(field, places, move.slot_offset, slot_pitch, _conversion(alike))


def _conversion(alike: Sequence[Move]) -> Cast | None:
    first = alike[0]
    if first.is_bitwise:
        return None
    wire = _number(first.wire, [move.wire.scales for move in alike])
    if first.scale is not None:
        at, stride = first.scale.offset - first.plane.offset, first.scale.head_stride
        at += first.first_head * (stride - first.plane.head_stride)
        tokens = tuple(Axis(step.count, step.stride) for step in first.scale.token_axis)
        scale = RowScale(at, stride, first.scale.block_stride, tokens, first.scale.codec.name)
        return Cast(Number(base_name(first.plane.codec), scale), wire, first.rotates)
    memory = [scales_of(move.plane.codec, move.first_head, move.heads) for move in alike]
    return Cast(_number(first.plane.codec, memory), wire, first.rotates)


def _number(codec: Codec, scales: Sequence[tuple[float, ...]]) -> Number:
    """The codec with the scales of all planes: none if all are 1, a single one if all are equal."""
    distinct = {scale for each in scales for scale in each}
    if distinct <= {1.0}:
        return Number(codec.name)
    if len(distinct) == 1:
        scales = [(distinct.pop(),)]
    return Number(codec.name, torch.tensor(scales, dtype=torch.float32))
