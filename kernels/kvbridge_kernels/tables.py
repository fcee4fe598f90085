"""The tables of a chunk: a record per plane, place offsets, scales; packed on the host, read by the kernels.

int64 words in one buffer, one upload a chunk. Packing is on the path of every chunk: what depends on shape only is
kept in `Work.forms`, loops over planes do integer arithmetic and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .codecs_ref import Cast
from .form import CAST, MOVE, Form, Offsets, Tiling, form_of, place_offsets
from .places import Places
from .scratch import Scratch
from .segment import Segment, Span, check, check_cast

TABLE_BYTES = 1 << 20
RECORD_WORDS = 4


class Work:
    """Buffers allocated once. One per chunk in flight: a launch reads them until its event has passed.

    On a GPU `table_bytes` of pinned and as much device memory hold the tables of one chunk: 8 bytes a place, 32 a
    plane, 12 a plane and head where it converts. On the CPU it is scratch for the plain-torch twins. Not thread-safe.
    """

    def __init__(
        self,
        device: torch.device | str,
        table_bytes: int = TABLE_BYTES,
        move: Tiling = MOVE,
        cast: Tiling = CAST,
    ) -> None:
        device = torch.device(device)
        is_gpu = device.type == "cuda"
        if is_gpu and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.move, self.cast = move, cast
        self.scratch = Scratch()
        self.forms: dict[object, Form] = {}
        self.kernels: dict[object, Any] = {}
        words = table_bytes // 8
        self.host = torch.zeros(words, dtype=torch.int64, pin_memory=is_gpu)
        self.table = torch.zeros(words, dtype=torch.int64, device=device) if is_gpu else self.host
        self.words = self.host.numpy()
        self.floats = self.words.view(np.float32)
        self.address = self.table.data_ptr()
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1


@dataclass(slots=True)
class Group:
    """Planes that one launch moves: of one form, with as many places each."""

    form: Form
    places: int
    near_bits: int = 0
    far_bits: int = 0
    records: list[int] = field(default_factory=list)
    casts: list[tuple[Cast, int]] = field(default_factory=list)  # with how many planes

    @property
    def planes(self) -> int:
        return len(self.records) // RECORD_WORDS


class Tables:
    """Fills a `Work` from its start."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.used = 0
        self._lists: dict[object, int] = {}

    def take(self, words: int) -> int:
        """Where the next `words` begin. ValueError if they are too many."""
        start, self.used = self.used, self.used + words
        if self.used > len(self._work.words):
            raise ValueError(f"tables take {8 * self.used} bytes and more, work has {8 * len(self._work.words)}")
        return start

    def put(self, numbers: Sequence[int] | Offsets) -> int:
        """Address of a copy."""
        start = self.take(len(numbers))
        self._work.words[start : self.used] = numbers
        return self._work.address + 8 * start

    def offsets(self, places: Places, form: Form) -> int:
        """Address of the offsets of all places; a list serves every segment that shares it."""
        key = (id(places), *form.places_key)
        if key not in self._lists:
            start = self.take(places.count)
            place_offsets(places.index.numpy(), *form.places_key, self._work.words[start : self.used])
            self._lists[key] = self._work.address + 8 * start
        return self._lists[key]

    def upload(self) -> None:
        """One copy on the current stream."""
        work = self._work
        if work.table is not work.host:
            work.table[: self.used].copy_(work.host[: self.used], non_blocking=True)


def groups_of(segments: Sequence[Segment], slot: Span, tables: Tables, work: Work) -> tuple[list[Group], bool]:
    """The launches a chunk takes, and whether the segments follow each other through all of the slot.

    ValueError where something does not fit.
    """
    groups: dict[object, Group] = {}
    end = 0
    for segment in segments:
        memory, places, cast = segment.field, segment.places, segment.cast
        form = _form(segment, work.forms)
        planes, stride = memory.planes
        offset, pitch, size = segment.slot_offset, segment.slot_pitch, form.heads * places.count * form.wire_row_bytes
        if (
            memory.offset < 0
            or memory.offset + (planes - 1) * stride + form.reach > memory.memory.numel()
            or places.lowest < 0
            or places.highest >= form.places
            or offset < 0
            or pitch < 0
            or offset + (planes - 1) * pitch + size > slot.size_bytes
        ):
            check(segment, slot)
        if not size:
            continue
        group = groups.get((form, places.count))
        if group is None:
            group = groups[form, places.count] = Group(form, places.count)
        base, offsets = memory.memory.data_ptr() + memory.offset, tables.offsets(places, form)
        group.near_bits |= base
        group.far_bits |= offset
        if planes == 1:
            group.records += (base, offset, offsets, form.head_stride)
            end = offset + size if offset == end else -1
        else:
            group.near_bits |= stride
            group.far_bits |= pitch
            for plane in range(planes):
                group.records += (base + plane * stride, offset + plane * pitch, offsets, form.head_stride)
            end = offset + planes * size if offset == end and pitch == size else -1
        if cast is not None:
            group.casts.append((cast, planes))
    return list(groups.values()), end == slot.size_bytes


def _form(segment: Segment, forms: dict[object, Form]) -> Form:
    memory, cast = segment.field, segment.cast
    key = (memory.blocks, memory.tokens, memory.heads, memory.elements, memory.element_bytes)
    if cast is not None:
        shapes = [None if number.scale is None else number.scale.shape for number in (cast.memory, cast.wire)]
        key = (*key, cast.memory.name, cast.wire.name, memory.planes.count, *shapes)
    form = forms.get(key)
    if form is None:
        if cast is not None:
            check_cast(cast, memory)
        form = forms[key] = form_of(memory, cast)
    return form
