"""The GPU's copier: no move is over before its kernels are, and its digest equals the CPU's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvbridge_proto.common import Blocks

from kvbridge.device import copier_gpu, driver
from kvbridge.device.copier import Compiling, Moved
from kvbridge.device.copier_gpu import GpuBlockCopier
from kvbridge.device.mapping import wrap
from kvbridge.device.staging import Staging
from kvbridge.geometry.plan import Part, plan
from kvbridge.geometry.shard import assign
from kvbridge.geometry.tokens import BlockTable
from testing.carried import Mapped
from testing.oracle import Held, Shape, block_table, build, fill, table_of
from tests.integration.device.attached import attached
from tests.integration.device.moving import Moves
from tests.integration.device.moving import gather as gather_on_cpu

pytestmark = pytest.mark.gpu
TOKENS = 75
SPIN = 100_000_000  # 50 ms on an H200
SHAPE = Shape(layout="nhd", key_width=16, value_width=32, block_tokens=16, blocks=8)


def on_gpu(held: Held) -> Mapped:
    return Mapped(held.pool, [torch.from_numpy(region.copy()).cuda() for region in held.memory])


@pytest.fixture
def copier() -> Iterator[GpuBlockCopier]:
    copier = GpuBlockCopier(driver.Gpu.open("cuda:0"), 4)
    yield copier
    copier.close()


def one_chunk(held: Held) -> tuple[Any, int]:
    table = block_table(held.pool, table_of(held.pool, TOKENS, seed=1))
    (takes,) = assign([held.pool], held.pool)
    planned = plan(held.pool, held.pool, takes, 3, TOKENS, 1 << 20)
    assert planned.chunks == 1
    return Moves(Part(planned, planned.chunk(0), table, is_sender=True).moves()), planned.chunk(0).size_bytes


def filled() -> Held:
    held = build(SHAPE)
    fill(held, table_of(held.pool, TOKENS, seed=1), range(TOKENS))
    return held


def over(copier: GpuBlockCopier) -> Moved:
    while not (moved := copier.poll()):
        pass
    return moved[0]


@pytest.mark.parametrize("through_host", [False, True])
def test_gathers_what_a_cpu_gathers_and_puts_it_back(copier: GpuBlockCopier, through_host: bool) -> None:
    held = filled()
    moves, size = one_chunk(held)
    wanted = torch.full((size,), 0xA5, dtype=torch.uint8)
    with attached(held) as (_, pool):
        digest = gather_on_cpu(pool, moves.moves(), wanted, "sum64")
    sender, receiver = on_gpu(held), on_gpu(build(SHAPE))
    with closing(copier.staging(1 << 20, 2)) as slots, closing(Staging.pinned(1 << 20, 2)) as host:
        slot, pinned = slots.span(1, size), host.span(1, size) if through_host else None
        copier.gather(sender, moves, slot, "sum64", pinned)
        moved = over(copier)
        assert (moved.digest, moved.failure) == (digest, None)
        found = pinned.on_cpu() if pinned else torch.frombuffer(bytearray(copier.read(slot)), dtype=torch.uint8)
        assert torch.equal(found, wanted)
        if pinned:
            copier.fill(slot, bytes(size))  # it has to come from the host's slot
        copier.scatter(receiver, moves, slot, "sum64", digest, pinned)
        assert over(copier).failure is None
        copier.gather(receiver, moves, slot, "sum64")
        assert over(copier).digest == digest
        copier.scatter(receiver, moves, slot, "sum64", digest ^ 1)
        failure = over(copier).failure
        assert failure is not None and failure[0] == "digest_mismatch"


def test_a_move_is_not_over_before_its_kernel(copier: GpuBlockCopier) -> None:
    held = filled()
    moves, size = one_chunk(held)
    sender, receiver = on_gpu(held), on_gpu(build(SHAPE))
    before = [memory.clone() for memory in receiver.memories]
    with closing(copier.staging(1 << 20, 1)) as slots:
        slot = slots.span(0, size)
        copier.scatter(on_gpu(held), moves, slot, "sum64", 0)  # the kernels are compiled now
        copier.gather(sender, moves, slot, "sum64")
        left = 2
        while left:
            left -= len(copier.poll())
        assert all(map(torch.equal, before, receiver.memories))
        copier.fill(slot, bytes(size))
        with torch.cuda.stream(copier._out):
            torch.cuda._sleep(SPIN)
        copier.gather(sender, moves, slot, "sum64")
        assert copier.poll() == [] and copier.is_using(sender) and not any(copier.read(slot))
        digest = over(copier).digest
        assert not copier.is_using(sender) and any(copier.read(slot))
        with torch.cuda.stream(copier._in):
            torch.cuda._sleep(SPIN)
        copier.scatter(receiver, moves, slot, "sum64", digest)
        assert copier.poll() == [] and copier.is_using(receiver)
        assert all(map(torch.equal, before, receiver.memories)), "written already: then this test proves nothing"
        assert over(copier).failure is None
        assert not all(map(torch.equal, before, receiver.memories))


def test_new_kernels_are_compiled_beside_what_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, new = filled(), build(replace(SHAPE, layout="hnd"))
    (moves, size), (other, _) = one_chunk(known), one_chunk(new)
    sender, receiver, copier = on_gpu(known), on_gpu(new), GpuBlockCopier(driver.Gpu.open("cuda:0"), 2, aside=True)
    with closing(copier.staging(1 << 20, 2)) as slots, closing(copier):
        slot, far = slots.span(0, size), slots.span(1, size)
        wait_for(lambda: copier.gather(sender, moves, slot, "sum64"))
        digest, took = over(copier).digest, []
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        with pytest.raises(Compiling) as compiling:
            copier.scatter(receiver, other, far, "sum64", 0)
        assert copier.compiling
        began = time.perf_counter()
        while not compiling.value.is_over():
            at = time.perf_counter()
            copier.gather(sender, moves, slot, "sum64")
            assert over(copier).digest == digest
            took.append(time.perf_counter() - at)
        compiled_s = time.perf_counter() - began
        print(f"{len(took)} moves, the longest {max(took) * 1e3:.1f} ms, while {compiled_s * 1e3:.0f} ms were compiled")
        assert compiled_s > 0.1, "it was compiled already: then this test proves nothing"
        assert max(took) < compiled_s / 4
        copier.scatter(receiver, other, far, "sum64", 1)  # of zeros
        assert over(copier).failure == ("digest_mismatch", f"digest: sent {1:016x}, landed {0:016x}")


def wait_for(begin: Callable[[], int]) -> None:
    """Begin this once its kernels are compiled."""
    while True:
        try:
            begin()
        except Compiling as compiling:
            while not compiling.is_over():
                time.sleep(0.001)
        else:
            return


class Pulling:
    """Pulls of one block each, between two pools of `SHAPE` and a copier that begins two of them at once."""

    def __init__(self) -> None:
        self.sender, self.receiver = on_gpu(build(SHAPE)), on_gpu(build(SHAPE))
        for memory in self.sender.memories:
            memory.random_(0, 256)
        self._pool = self.sender.pool
        (takes,) = assign([self._pool], self._pool)
        self._plans = [plan(self._pool, self._pool, takes, 0, tokens, 1 << 20) for tokens in (16, 15, 14)]
        self.copier = GpuBlockCopier(driver.Gpu.open("cuda:0"), 1, pulls=2)
        for kind in range(len(self._plans)):  # which compiles the kernels
            self.begin(0, 0, kind=kind)
            over(self.copier)

    def begin(
        self, source: int, target: int, has_digest: bool = False, kind: int = 0, others_follow: bool = True
    ) -> int:
        """Read block `source` into block `target`. Pulls of two kinds move another number of tokens."""
        parts = [self._part(source, True, kind), self._part(target, False, kind)]
        return self.copier.pull(self.sender, parts[0], self.receiver, parts[1], has_digest, others_follow)

    def _part(self, block: int, is_sender: bool, kind: int) -> Part:
        planned, table = self._plans[kind], BlockTable.of(self._pool.groups[0], Blocks(0, 0, (block,)))
        return Part(planned, planned.chunk(0), {0: table}, is_sender)

    def launched(self) -> list[int]:
        """How many pulls share each launch that is under way."""
        return [len(move.tickets) for move in self.copier._moves]

    def blocks(self, pool: Mapped) -> list[list[torch.Tensor]]:
        """Every block, one tensor for each region."""
        regions = [memory.view(SHAPE.blocks, -1) for memory in pool.memories]
        return [[region[block] for region in regions] for block in range(SHAPE.blocks)]


@pytest.fixture
def pulling() -> Iterator[Pulling]:
    pulling = Pulling()
    yield pulling
    pulling.copier.close()


def test_small_pulls_share_launches(pulling: Pulling) -> None:
    """Each block is where it belongs, each ticket ends once, and memory is in use until then."""
    copier, wanted = pulling.copier, {4: 1, 6: 2, 2: 5}
    before = pulling.blocks(on_gpu(build(SHAPE)))
    tickets = [pulling.begin(source, target) for target, source in wanted.items()]
    assert not pulling.launched() and copier.is_using(pulling.sender) and copier.is_using(pulling.receiver)
    with torch.cuda.stream(copier._pulling[0]):
        torch.cuda._sleep(SPIN)
    assert copier.poll() == [] and pulling.launched() == [3] and copier.is_using(pulling.sender)
    assert over(copier) == Moved(tickets[0]) and not copier.is_using(pulling.sender) and copier.poll() == []
    sent = pulling.blocks(pulling.sender)
    for block, found in enumerate(pulling.blocks(pulling.receiver)):
        expected = sent[wanted[block]] if block in wanted else before[block]
        assert block == 0 or all(map(torch.equal, found, expected)), block


def test_tickets_of_a_shared_launch_end_together(pulling: Pulling) -> None:
    tickets, ended = [pulling.begin(1, 4), pulling.begin(2, 6)], list[Moved]()
    while len(ended) < 2:
        ended += pulling.copier.poll()
    assert ended == [Moved(ticket) for ticket in tickets]


def test_pulls_of_more_kinds_than_can_begin_at_once_wait_for_their_turn(pulling: Pulling) -> None:
    tickets = [pulling.begin(1, 2 + i, kind=kind) for i, kind in enumerate((0, 1, 2, 0, 1))]
    for stream in pulling.copier._pulling:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SPIN)
    assert pulling.copier.poll() == [] and pulling.launched() == [2, 2] and not pulling.copier.has_room
    ended: list[Moved] = []
    while len(ended) < 5:
        ended += pulling.copier.poll()
    assert sorted(each.ticket for each in ended) == tickets and pulling.copier.has_room


def test_a_small_pull_that_none_follows_does_not_wait_unless_others_do(pulling: Pulling) -> None:
    pulling.begin(1, 4, others_follow=False)
    assert pulling.launched() == [1] and over(pulling.copier)
    pulling.begin(1, 4)
    pulling.begin(2, 6, others_follow=False)
    assert not pulling.launched() and over(pulling.copier)


def test_a_pull_with_a_digest_does_not_wait(pulling: Pulling) -> None:
    pulling.begin(3, 3, has_digest=True)
    assert pulling.launched() == [1] and over(pulling.copier).digest


def test_small_pulls_that_cannot_be_launched_end_with_the_reason(
    pulling: Pulling, monkeypatch: pytest.MonkeyPatch
) -> None:
    tickets = [pulling.begin(1, 4), pulling.begin(2, 6)]
    with monkeypatch.context() as patch:
        patch.setattr(copier_gpu, "move", lambda *_: (_ for _ in ()).throw(RuntimeError("no launch")))
        failure = "pull_failed", "RuntimeError: no launch"
        assert pulling.copier.poll() == [Moved(ticket, failure=failure) for ticket in tickets]
    assert not pulling.copier.is_using(pulling.receiver) and pulling.copier.has_room


def test_slots_of_a_gpu_are_one_allocation_of_their_own(copier: GpuBlockCopier) -> None:
    with closing(copier.staging(1 << 20, 3)) as slots:
        assert driver.range_of(slots.base) == (slots.base, slots.size_bytes)
        assert len(driver.ipc_export(slots.base)) == 64
        memory = wrap(slots.base, slots.size_bytes, driver.Gpu.open("cuda:0"))
        copier.fill(slots.span(1), b"\x07" * 64)
        assert np.array_equal(memory[1 << 20 : (1 << 20) + 64].cpu().numpy(), np.full(64, 7, np.uint8))


def test_a_copy_brings_all_bytes(copier: GpuBlockCopier) -> None:
    with closing(copier.staging(1 << 20, 2)) as slots:
        content = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8).numpy().tobytes()
        copier.fill(slots.span(0), content)
        copier.copy(slots.span(0), slots.span(1))
        assert over(copier).failure is None
        assert copier.read(slots.span(1)) == content


def test_digests_of_one_bundle_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums are never cleared: a digest is what a move has added, after others, a copy and a launch that failed."""
    held = filled()
    moves, size = one_chunk(held)
    wanted = torch.empty(size, dtype=torch.uint8)
    with attached(held) as (_, pool):
        digest = gather_on_cpu(pool, moves.moves(), wanted, "sum64")
    sender, copier = on_gpu(held), GpuBlockCopier(driver.Gpu.open("cuda:0"), 1)
    with closing(copier.staging(1 << 20, 2)) as slots:
        slot = slots.span(0, size)
        for _ in range(2):
            copier.gather(sender, moves, slot, "sum64")
            assert over(copier).digest == digest
        copier.copy(slot, slots.span(1, size))
        assert over(copier).digest == 0
        copier.scatter(sender, moves, slot, "sum64", digest)
        assert over(copier) == Moved(4, digest)
        with monkeypatch.context() as patch:
            patch.setattr(driver, "copy_to_host", lambda *_: (_ for _ in ()).throw(RuntimeError("no copy")))
            with pytest.raises(RuntimeError, match="no copy"):
                copier.gather(sender, moves, slot, "sum64")  # its kernel has run: what it added is not the next one's
        copier.gather(sender, moves, slot, "sum64")
        assert over(copier).digest == digest
    copier.close()
