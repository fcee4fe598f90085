"""Carries tokens from one made-up engine to another through a copier, and looks at every byte there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from kvbridge_kernels import launch_ref
from kvbridge_kernels.segment import Span
from kvbridge_kernels.tables import Work
from kvbridge_proto.pool import Pool

from kvbridge.device.copier import CpuBlockCopier
from kvbridge.device.mapping import HostMappings
from kvbridge.device.memory import AttachedPool, PartSide, Templates
from kvbridge.errors import KVBridgeError
from kvbridge.geometry.layers import align_all, unfilled
from kvbridge.geometry.plan import Part, plan
from kvbridge.geometry.shard import assign
from kvbridge.geometry.unfilled import Filling
from testing.matrix import Case
from testing.oracle import Table, block_table, fill, tables_of, tail_of
from testing.pools import Held, Shape, build, build_all, describe, ranks_of
from testing.slow_rows import twin_of, wrong


class Carrier(Protocol):
    """Moves a part between a pool's memory and a slot of its own."""

    def carry(self, sender: Held, gather: Part, receiver: Held, scatter: Part, slot_bytes: int) -> None: ...


class Mapped(AttachedPool):
    """A pool in this process's own memory, used like an open AttachedPool."""

    def __init__(self, pool: Pool, memories: list[torch.Tensor]) -> None:
        super().__init__(pool, HostMappings(), memories)
        self.memories = memories


class OnCpu:
    """Carries with the CPU's copier, in the pools' own memory."""

    def __init__(self, copier: CpuBlockCopier | None = None) -> None:
        self._copier = copier or CpuBlockCopier()
        self._mapped: dict[int, tuple[Held, Mapped]] = {}

    def carry(self, sender: Held, gather: Part, receiver: Held, scatter: Part, slot_bytes: int) -> None:
        slot = torch.full((slot_bytes,), 0xA5, dtype=torch.uint8)
        span = Span(slot.data_ptr(), slot.numel())
        self._copier.gather(self._of(sender), gather, span, "sum64")
        (gathered,) = self._copier.poll()
        assert gathered.failure is None, gathered.failure
        self._copier.scatter(self._of(receiver), scatter, span, "sum64", gathered.digest)
        (scattered,) = self._copier.poll()
        if scattered.failure is not None:
            raise KVBridgeError(*scattered.failure)

    def _of(self, held: Held) -> Mapped:
        if id(held) not in self._mapped:
            self._mapped[id(held)] = held, Mapped(held.pool, [torch.from_numpy(region) for region in held.memory])
        return self._mapped[id(held)][1]


class BothWays(OnCpu):
    """By a slot, and then what was there is put back and the same is pulled."""

    def carry(self, sender: Held, gather: Part, receiver: Held, scatter: Part, slot_bytes: int) -> None:
        before = receiver.copy()
        super().carry(sender, gather, receiver, scatter, slot_bytes)
        wanted = receiver.copy()
        for region, was in zip(receiver.memory, before.memory, strict=True):
            region[:] = was
        ours, theirs, slot = self._of(sender), self._of(receiver), torch.zeros(slot_bytes, dtype=torch.uint8)
        self._copier.pull(ours, gather, theirs, scatter, has_digest=True)
        assert all(np.array_equal(*pair) for pair in zip(receiver.memory, wanted.memory, strict=True))
        self._copier.gather(ours, gather, Span(slot.data_ptr(), slot.numel()), "sum64")
        self._copier.digest(ours, gather)
        found, sums = [moved.digest for moved in self._copier.poll()], torch.zeros(1, dtype=torch.int64)
        with ours.hold() as regions, theirs.hold() as receiver_regions:
            sides = PartSide(ours, regions, gather), PartSide(theirs, receiver_regions, scatter)
            launch_ref.move(Templates().of(*sides, gather.chunk.size_bytes), Work("cpu"), None, sums)
        assert found == [int(sums) & (2**64 - 1)] * 3, "a read, a gather and a look have one digest"


def pools_of(case: Case, number: int) -> tuple[Pool, Pool]:
    """The pools for the verdict: the sender's first rank and one of the receiver's ranks."""
    ranks = ranks_of(case.receiver)
    return describe(case.sender), describe(case.receiver, *ranks[number % len(ranks)])


def move(
    senders: Sequence[Held],
    table: Table,
    receiver: Held,
    receiver_table: Table,
    tokens: range,
    slot_bytes: int,
    carrier: Carrier,
) -> None:
    """Carries tokens to one receiver from all ranks of the sender, whose tables are the same."""
    takes = assign([sender.pool for sender in senders], receiver.pool)
    for sender, taken in zip(senders, takes, strict=True):
        planned = plan(sender.pool, receiver.pool, taken, tokens.start, tokens.stop, slot_bytes)
        ours = block_table(sender.pool, table, 0, tokens.stop)
        theirs = block_table(receiver.pool, receiver_table, 0, tokens.stop)
        for index in range(planned.chunks):
            chunk = planned.chunk(index)
            parts = Part(planned, chunk, ours, True), Part(planned, chunk, theirs, False)
            carrier.carry(sender, parts[0], receiver, parts[1], chunk.size_bytes)
    if missing := unfilled(align_all([sender.pool for sender in senders], receiver.pool), receiver.pool):
        fill_with_zeros(missing, receiver, receiver_table, tokens, carrier)


def fill_with_zeros(layers: Sequence[int], receiver: Held, table: Table, tokens: range, carrier: Carrier) -> None:
    """What a receiver's agent does with layers that no sender has."""
    filling = Filling(receiver.pool, layers)
    zeros = Held(filling.zeros, (np.zeros(filling.zeros.regions[0].size_bytes, np.uint8),))
    planned, theirs = filling.plan(tokens.start, tokens.stop), block_table(receiver.pool, table, 0, tokens.stop)
    for index in range(planned.chunks):
        chunk = planned.chunk(index)
        parts = Part(planned, chunk, filling.tables(theirs), True), Part(planned, chunk, theirs, False)
        carrier.carry(zeros, parts[0], receiver, parts[1], chunk.size_bytes)


class Filled(NamedTuple):
    """All ranks of a case's sender, which nobody writes, and their table."""

    senders: list[Held]
    table: Table


def filled(case: Case) -> Filled:
    """The sender of a case: the same for every rank of the receiver."""
    senders = build_all(case.sender)
    table = tables_of(senders[0].pool, case.end, seed=1)
    for sender in senders:
        fill(sender, table, range(case.end), is_tame=True)
    return Filled(senders, table)


def carried(case: Case, number: int, carrier: Carrier, given: Filled | None = None) -> tuple[Held, str]:
    """The receiver afterwards, and what is wrong in it ("" if nothing is). Raises if the case cannot be carried."""
    ranks = ranks_of(case.receiver)[number % len(ranks_of(case.receiver))]
    (senders, table), receiver = given or filled(case), build(case.receiver, *ranks)
    receiver_table = tables_of(receiver.pool, case.end, seed=2)
    before, tokens = receiver.copy(), range(case.first, case.end)
    move(senders, table, receiver, receiver_table, tokens, case.slot_bytes, carrier)
    tail = tail_of(senders, receiver, receiver_table, tokens)
    twin, only_here = twin_of(case.sender, case.receiver, ranks), range(case.sender.layers, case.receiver.layers)
    return receiver, wrong(twin, receiver, before, receiver_table, tokens, tail, only_here)


@cache
def _copier() -> CpuBlockCopier:
    return CpuBlockCopier()


def carry(sender: Shape, receiver: Shape, tokens: range, slot_bytes: int = 1 << 13) -> None:
    """Carries tokens to every rank of the receiver. Fails if anything is wrong there."""
    case = Case(sender, receiver, tokens.start, tokens.stop, slot_bytes)
    given, carrier = filled(case), OnCpu(_copier())
    for number in range(len(ranks_of(receiver))):
        _, wrong = carried(case, number, carrier, given)
        assert not wrong, f"{wrong}\n{case}, rank {number}"
