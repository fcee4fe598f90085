"""Carries one case of the matrix through a porter, into one rank of the sink."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from kvbridge_kernels.segment import Span
from kvbridge_proto.pool import Pool

from kvbridge.device.memory import Regions
from kvbridge.device.porter_cpu import CpuPorter
from kvbridge.errors import KVBridgeError
from kvbridge.geometry.plan import Part, plan
from kvbridge.geometry.shard import assign
from tests.support.matrix import Case
from tests.support.oracle import block_table, fill, tables_of, tail_of
from tests.support.pools import Held, build, build_all, ranks_of
from tests.support.slow_rows import twin_of, wrong


class Carrier(Protocol):
    """Moves a part between a pool's memory and a slot of its own."""

    def carry(self, source: Held, gather: Part, sink: Held, scatter: Part, slot_bytes: int) -> None: ...


class Mapped:
    """A pool whose memory is this process's own: what AttachedPool is once it is open."""

    def __init__(self, pool: Pool, memories: list[torch.Tensor]) -> None:
        self.pool, self.memories = pool, memories

    @contextmanager
    def hold(self) -> Iterator[Regions]:
        yield Regions(self.memories)


class OnCpu:
    """By the CPU's porter, in the pools' own memory."""

    def __init__(self) -> None:
        self._porter = CpuPorter()
        self._mapped: dict[int, Mapped] = {}

    def carry(self, source: Held, gather: Part, sink: Held, scatter: Part, slot_bytes: int) -> None:
        slot = torch.full((slot_bytes,), 0xA5, dtype=torch.uint8)
        span = Span(slot.data_ptr(), slot.numel())
        self._porter.gather(self._of(source), gather, span, "sum64")
        (gathered,) = self._porter.poll()
        assert gathered.failure is None, gathered.failure
        self._porter.scatter(self._of(sink), scatter, span, "sum64", gathered.digest)
        (scattered,) = self._porter.poll()
        if scattered.failure is not None:
            raise KVBridgeError(*scattered.failure)

    def _of(self, held: Held) -> Mapped:
        if id(held) not in self._mapped:
            self._mapped[id(held)] = Mapped(held.pool, [torch.from_numpy(region) for region in held.memory])
        return self._mapped[id(held)]


def pools_of(case: Case, number: int) -> tuple[Pool, Pool]:
    """What the verdict is asked about: the first rank of the source, some rank of the sink."""
    ranks = ranks_of(case.sink)
    return build(case.source).pool, build(case.sink, *ranks[number % len(ranks)]).pool


def carried(case: Case, number: int, carrier: Carrier) -> tuple[Held, str]:
    """The sink afterwards, and what is wrong in it (nothing, if all is right). Raises if it cannot be carried."""
    ranks = ranks_of(case.sink)[number % len(ranks_of(case.sink))]
    sources, sink = build_all(case.source), build(case.sink, *ranks)
    table, sink_table = tables_of(sources[0].pool, case.end, seed=1), tables_of(sink.pool, case.end, seed=2)
    for source in sources:
        fill(source, table, range(case.end), is_tame=True)
    before, tokens = sink.copy(), range(case.first, case.end)
    takes = assign([source.pool for source in sources], sink.pool)
    for source, taken in zip(sources, takes, strict=True):
        planned = plan(source.pool, sink.pool, taken, tokens.start, tokens.stop, case.slot_bytes)
        ours = block_table(source.pool, table, 0, tokens.stop)
        theirs = block_table(sink.pool, sink_table, 0, tokens.stop)
        for index in range(planned.chunks):
            chunk = planned.chunk(index)
            parts = Part(planned, chunk, ours, True), Part(planned, chunk, theirs, False)
            carrier.carry(source, parts[0], sink, parts[1], chunk.size_bytes)
    tail = tail_of(sources, sink, sink_table, tokens)
    return sink, wrong(twin_of(case.source, case.sink, ranks), sink, before, sink_table, tokens, tail)
