"""Memory as cells, one per row of one head: an engine's blocks, and the copier that moves cells to slots and back.

A cell holds a number that says what was written: which prompt, token and row. So a foreign or torn byte shows as a
wrong number. The real plan decides where each cell goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NoReturn

from kvbridge_proto.pool import Pool

from kvbridge.device.copier import Compiling, Moved, compared
from kvbridge.device.staging import Span, Staging
from kvbridge.errors import EngineError
from kvbridge.geometry.check import places_of
from kvbridge.geometry.plan import Part

if TYPE_CHECKING:
    from .process import Process

KERNELS_S = 0.01  # how long kernels outlive their process (H200: 9 to 12 ms, 2026-11)
CELL_BYTES = 512
SLOT_CELLS = 8
SLOT_BYTES = CELL_BYTES * SLOT_CELLS
NOTHING = 0
MOST_MOVES = 3  # under way at once, of the kinds that check `has_room`


class SimBlocks:
    """The KV memory of one engine rank. Its agent may write only `wanted` blocks."""

    def __init__(self, name: str, pool: Pool, foul: Callable[[str], None]) -> None:
        self.name = name
        self.pool = pool
        self.cells = [NOTHING] * (pool.regions[0].size_bytes // CELL_BYTES)
        self.wanted: dict[int, str] = {}  # block -> the request that waits for its rows
        self.expected: dict[int, int] = {}  # cell -> what must be written there
        self.reached = 0  # the fence's count
        self.stream_at = 0.0  # when the engine's stream has done all of its work
        self.is_gone = False  # with its engine: writes do no harm any more
        self._foul = foul

    def foul(self, text: str) -> None:
        if not self.is_gone:
            self._foul(f"{self.name}: {text}")

    def put(self, at: int, block: int, values: list[int], counts: bool = True) -> None:
        """Our agent writes cells of a block. Without `counts` (a pull) it does not know yet whether they count."""
        request = self.wanted.get(block)
        if request is None:
            self.foul(f"block {block} was written while nobody wanted it")
            return
        for i, value in enumerate(values):
            expected = self.expected.get(at + i)
            if counts and expected is not None and expected != value:
                self.foul(f"{request}, block {block}: {spelled(value)} where {spelled(expected)} belongs")
            self.cells[at + i] = value


def spelled(value: int) -> str:
    """A cell's number for people."""
    if value <= NOTHING:
        return "nothing" if value == NOTHING else f"waste {-value}"
    return f"prompt {value >> 20} token {value >> 8 & 0xFFF} row {value & 0xFF}"


def written(prompt: int, token: int, row: int) -> int:
    """The number that an engine writes for this row."""
    return prompt << 20 | token << 8 | row


class SimAttached:
    """An `AttachedPool` to the agent, open until closed."""

    def __init__(self, blocks: SimBlocks, owner: Process | None = None) -> None:
        self.blocks = blocks
        self.pool = blocks.pool
        self.is_open = True
        self.owner = owner  # the agent of the engine whose memory this is, if that is a peer

    def hold(self) -> NoReturn:
        raise EngineError("detached", "cells have no address, so how fast they are read is not measured")

    def close(self) -> None:
        self.is_open = False


class Fence:
    """A `FencePage` to the agent."""

    def __init__(self, blocks: SimBlocks) -> None:
        self._blocks = blocks

    def reached(self, count: int) -> bool:
        return self._blocks.reached >= count

    def close(self) -> None: ...


Run = tuple[int, int, int]  # first cell, cells, block


def runs(part: Part) -> Iterator[tuple[int, list[Run]]]:
    """For each move: its first cell in the slot, and the runs of cells that follow one another from there."""
    for move in part.moves():
        plane, row = move.plane, move.wire.row_bytes // CELL_BYTES
        (step,) = plane.token_axis
        units = places_of(plane.token_axis)
        at: list[Run] = []
        places = move.places.tolist()
        for head in range(move.first_head, move.first_head + move.heads):
            base = plane.offset + head * plane.head_stride
            for place in places:
                block, unit = divmod(place, units)
                at.append(((base + block * plane.block_stride + unit * step.stride) // CELL_BYTES, row, block))
        yield move.slot_offset // CELL_BYTES, at


@dataclass(slots=True)
class _SimMove:
    attached: SimAttached
    seconds: float
    ends_at: float
    end: Callable[[], int]
    sender: SimAttached | None = None  # the peer's memory that is read
    failure: tuple[str, str] | None = None  # it was to begin late, and did not


class SimCopier:
    """Keeps the contract of `BlockCopier`. A move takes time: half of its cells move at its begin, half at its end."""

    memory: Literal["dram", "vram"] = "dram"
    device = "cpu"
    description = "simulated"

    def __init__(self, process: Process, digest: str) -> None:
        self.digests = (digest,)
        self._process = process
        self._count = 0
        self._moving: dict[int, _SimMove] = {}
        self._moved: list[Moved] = []
        self._compiled: dict[tuple[object, ...], float] = {}  # move -> when its kernels are compiled

    def _compile(self, *what: object) -> None:
        """Raise Compiling until the kernels for this move are compiled."""
        world = self._process.world
        if what not in self._compiled:
            seconds = world.compile_s()
            self._compiled[what] = world.clock.now + seconds
            if seconds:
                self._process.thread.post(seconds, self._process.rouse)
        due = self._compiled[what]
        if world.clock.now < due:
            raise Compiling(lambda: world.clock.now >= due)

    def staging(self, slot_bytes: int, slots: int) -> Staging:
        raise NotImplementedError

    def gather(self, pool: SimAttached, part: Part, slot: Span, digest_kind: str, host: Span | None = None) -> int:
        return self._read("gather", pool, part, slot.size_bytes, slot)

    def digest(self, pool: SimAttached, part: Part) -> int:
        return self._read("digest", pool, part, part.chunk.size_bytes, None)

    def _read(self, what: str, pool: SimAttached, part: Part, size_bytes: int, into: Span | None) -> int:
        """Half of the cells are read at once, the others when the move ends."""
        if not pool.is_open:
            raise EngineError("detached", "its memory is unmapped")
        self._compile(what, pool.blocks.name)
        cells = [NOTHING] * (size_bytes // CELL_BYTES)
        todo = list(_spread_all(part))
        half = len(todo) // 2
        memory = pool.blocks.cells
        _copy_out(memory, cells, todo[:half])

        def end() -> int:
            _copy_out(memory, cells, todo[half:])
            if into is not None:
                self._process.ram[into.address] = cells
            return digest_of(cells)

        ticket = self._begin(pool, end, None)
        self._happens(self._process, ticket)
        return ticket

    def scatter(
        self, pool: SimAttached, part: Part, slot: Span, digest_kind: str, expected: int, host: Span | None = None
    ) -> int:
        if not pool.is_open:
            raise EngineError("detached", "its memory is unmapped")
        self._compile("scatter", pool.blocks.name)
        count = slot.size_bytes // CELL_BYTES
        todo = list(_spread_all(part))
        half = len(todo) // 2

        def cells() -> list[int]:
            held = self._process.ram.get(slot.address, [])[:count]
            return held + [NOTHING] * (count - len(held))

        is_checked_first = digest_kind == "xxh3"  # a CPU checks a copy of the slot first; a GPU sums what it writes
        before = cells()
        if is_right(digest_of(before), expected):
            _copy_in(pool.blocks, before, todo[:half])

        def end() -> int:
            now = before if is_checked_first else cells()
            found = digest_of(now)
            if is_right(found, expected):
                _copy_in(pool.blocks, now, todo[half:])
            return found

        return self._begin(pool, end, expected)

    def pull(
        self,
        sender: SimAttached,
        theirs: Part,
        pool: SimAttached,
        ours: Part,
        has_digest: bool = False,
        others_follow: bool = False,
    ) -> int:
        if not (sender.is_open and pool.is_open):
            raise EngineError("detached", "its memory is unmapped")
        self._compile("pull", sender.blocks.name, pool.blocks.name, has_digest)
        at = {place + i: first + i for place, (first, count, _) in _spread_all(theirs) for i in range(count)}
        todo = list(_spread_all(ours))
        half = len(todo) // 2 * (self._count % 2)  # every other one begins late, as small pulls do
        slot = [NOTHING] * (ours.chunk.size_bytes // CELL_BYTES)
        data = self._process.world.data
        is_spoiled = has_digest and data.spoils()  # without a digest nobody would notice
        is_refused = not has_digest and not half and data.refuses()

        def read(some: list[tuple[int, Run]]) -> None:
            for place, (first, count, block) in some:
                values = [sender.blocks.cells[at[place + i]] for i in range(count)]
                if is_spoiled and place == todo[0][0]:
                    values[0] = NOTHING - 1
                slot[place : place + count] = values
                pool.blocks.put(first, block, values, counts=False)

        def end() -> int:
            if not sender.is_open:
                pool.blocks.foul(f"{sender.blocks.name} is read through a mapping that is closed")
            if not pool.is_open and not self._process.is_dead:  # kernels outlive a process
                pool.blocks.foul("it is written through a mapping that is closed")
            read(todo[half:])
            return digest_of(slot)

        read(todo[:half])
        ticket = self._begin(pool, end, None, self._process.world.pull_s())
        self._moving[ticket].sender = sender
        if is_refused:
            self._moving[ticket].failure = "pull_failed", "the launch was refused"
        if sender.owner is not None:
            self._happens(sender.owner, ticket)
        return ticket

    def _happens(self, owner: Process, ticket: int) -> None:
        """Let happen what is planned for the middle of the next read of an engine's blocks."""
        if (happens := owner.on_gather) is not None:
            owner.on_gather = None
            owner.world.clock.after(self._moving[ticket].seconds * 0.5, happens)

    def _begin(
        self, pool: SimAttached, end: Callable[[], int], expected: int | None, seconds: float | None = None
    ) -> int:
        self._count += 1
        ticket = self._count

        def over() -> None:
            failure = self._moving.pop(ticket).failure
            self._moved.append(compared(ticket, end(), expected) if failure is None else Moved(ticket, 0, failure))
            self._process.rouse()

        seconds = self._process.world.gather_s() if seconds is None else seconds
        self._moving[ticket] = _SimMove(pool, seconds, self._process.world.clock.now + seconds, end)
        self._process.thread.post(seconds, over)
        return ticket

    def outlive(self) -> None:
        """The process was killed. The kernels that it launched go on for a moment."""
        clock = self._process.world.clock
        for move in [each for each in self._moving.values() if each.failure is None]:
            clock.at(min(move.ends_at, clock.now + KERNELS_S), partial(_land, move.end))

    def zeros(self, pool: Pool) -> SimAttached:
        return SimAttached(SimBlocks("zeros", pool, self._process.world.foul))

    def make_room(self, moves: int) -> None: ...

    def warm(self, pool: SimAttached, part: Part, slot: Span | None) -> None: ...

    def warm_pull(self, sender: SimAttached, theirs: Part, pool: SimAttached, ours: Part, has_digest: bool) -> None: ...

    def copy(self, source: Span, target: Span) -> int:
        raise NotImplementedError

    def fill(self, span: Span, content: bytes) -> None:
        self._process.lanes[span.address] = content

    def read(self, span: Span) -> bytes:
        return self._process.lanes.get(span.address, b"")

    @property
    def has_room(self) -> bool:
        return len(self._moving) < MOST_MOVES

    def poll(self) -> list[Moved]:
        moved, self._moved = self._moved, []
        return moved

    def is_using(self, pool: SimAttached) -> bool:
        return any(pool in (move.attached, move.sender) for move in self._moving.values())

    def forget(self, pool: SimAttached) -> None: ...

    def close(self) -> None: ...


def _land(end: Callable[[], int]) -> None:
    end()


def digest_of(cells: list[int]) -> int:
    return hash(tuple(cells)) & (1 << 63) - 1


def is_right(found: int, expected: int) -> bool:
    """Whether the digests allow the rows to be written to the blocks."""
    return found == expected


def _spread(found: list[Run]) -> Iterator[tuple[int, Run]]:
    at = 0
    for run in found:
        yield at, run
        at += run[1]


def _spread_all(part: Part) -> Iterator[tuple[int, Run]]:
    """Where each run of cells lies in the slot (a pull has none, but its cells are numbered so) and in memory."""
    return ((at + i, run) for at, found in runs(part) for i, run in _spread(found))


def _copy_out(memory: list[int], slot: list[int], todo: list[tuple[int, Run]]) -> None:
    for at, (first, count, _) in todo:
        slot[at : at + count] = memory[first : first + count]


def _copy_in(blocks: SimBlocks, slot: list[int], todo: list[tuple[int, Run]]) -> None:
    for at, (first, count, block) in todo:
        blocks.put(first, block, slot[at : at + count])
