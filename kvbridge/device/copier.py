"""Moves rows between an engine's blocks and slots: the contract of both copiers, and the one without a GPU.

Calls are made by one thread at a time: the data plane's, or one that has called `use_here`. `gather`, `digest`,
`scatter`, `pull` and `copy` begin a move and return its ticket at once, though a pull may begin only at a later `poll`.
The move is over when `poll` says so; until then memory, slots and pool must stay as they are. All but `copy` may raise
Compiling, if they need new kernels.
"""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from kvbridge_kernels.digest_ref import digest as xxh3
from kvbridge_kernels.digest_ref import sum64
from kvbridge_kernels.field import Scratch
from kvbridge_kernels.launch_ref import move
from kvbridge_kernels.segment import Span
from kvbridge_kernels.tables import Work
from kvbridge_proto.pool import Pool

from ..geometry.plan import Part, Plan
from ..geometry.tokens import BlockTable
from ..values import Value
from .memory import AttachedPool, PartSide, Templates
from .staging import Staging


class Moved(Value):
    """A move is over. `digest` is of the bytes moved. With a `failure`, (code, reason), nothing of it counts."""

    ticket: int
    digest: int = 0
    failure: tuple[str, str] | None = None


class DeviceLost(BaseException):
    """The GPU no longer works for this process: no move can end or begin, so the agent has to end.

    Not an Exception, so that no job takes it for its own failure.
    """


class Compiling(Exception):
    """Nothing was begun: kernels that the move needs are being compiled. Try again once it `is_over`."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        super().__init__("kernels are being compiled")
        self.is_over = is_over


class BlockCopier(abc.ABC):
    """One processor and the memory it works on. The defaults are those of one that has moved all when a call returns.

    Pulls of up to `brief_bytes` in a chunk or two begin no later than another thread would wake.
    """

    memory: Literal["dram", "vram"]  # that its slots are in
    device: str  # as torch spells it
    digests: tuple[str, ...]  # the kinds that it can compute, the fastest first
    description: str  # for people: which processor, and how it is shared with the engine
    brief_bytes: int

    def __init__(self) -> None:
        self._templates = Templates()
        self._count = 0  # tickets so far

    def use_here(self) -> None:
        """Let the calling thread make calls, too."""
        return

    @abc.abstractmethod
    def staging(self, slot_bytes: int, slots: int) -> Staging:
        """Allocate slots. Raises OperatorError if there is not enough memory."""

    def zeros(self, pool: Pool) -> AttachedPool:
        """Memory of our own for this pool, all zeros, for `pull` to read. The caller closes it after `forget`."""
        return AttachedPool.of_zeros(pool, self.device)

    def make_room(self, moves: int) -> None:
        """Allow `moves` more moves under way at once, of the kinds that do not check `has_room`."""
        return

    @abc.abstractmethod
    def gather(self, pool: AttachedPool, part: Part, slot: Span, digest_kind: str, host: Span | None = None) -> int:
        """Fill `slot` from the engine's blocks, padding with zeros, then copy it to `host` if that is given.

        `slot` may be a peer's memory. EngineError, with nothing begun, if the engine is gone or the part is invalid.
        """

    @abc.abstractmethod
    def digest(self, pool: AttachedPool, part: Part) -> int:
        """Find the sum64 that `gather` would, without writing to a slot. Raises as `gather`."""

    @abc.abstractmethod
    def scatter(
        self, pool: AttachedPool, part: Part, slot: Span, digest_kind: str, expected: int, host: Span | None = None
    ) -> int:
        """Put the rows in `slot`, copied there from `host` first if that is given, into the engine's blocks.

        A digest other than `expected` is the failure `digest_mismatch`; a GPU may have written the blocks by then. The
        digest is of the very bytes that are written: peers may write to the slot at any time, so it is read once.
        """

    @abc.abstractmethod
    def pull(
        self,
        sender: AttachedPool,
        theirs: Part,
        pool: AttachedPool,
        ours: Part,
        has_digest: bool = False,
        others_follow: bool = False,
    ) -> int:
        """Read a chunk from the blocks of a peer's engine, convert it, and write it into our engine's blocks.

        With `has_digest` the rows that are read also give their sum64, as `gather` would find it. If `others_follow`
        before the next `poll`, it may wait for them, to share their launch. The move fails (`pull_failed`) if it was to
        begin later and then could not.

        EngineError, with nothing begun, if either engine is gone or a part is invalid.
        """

    def warm(self, pool: AttachedPool, part: Part, slot: Span | None) -> None:
        """Begin to compile for parts like this one, so that the first request does not wait.

        Without a slot, compile for `digest` only.
        """
        return

    def warm_pull(self, sender: AttachedPool, theirs: Part, pool: AttachedPool, ours: Part, has_digest: bool) -> None:
        """The same for `pull`. `sender` may be our own pool, in the place of one that is equal."""
        return

    def await_pull(
        self, sender: AttachedPool, plan: Plan, pool: AttachedPool, tables: Mapping[int, BlockTable]
    ) -> None:
        """This plan's chunks will be pulled into the blocks of these very tables. The sender's are not known yet.

        Do what does not need them, if to begin takes longer than to move. Raises as `pull`.
        """
        return

    @property
    def compiling(self) -> int:
        """How many kernels are being compiled or wait for it. Callable from any thread."""
        return 0

    @abc.abstractmethod
    def copy(self, source: Span, target: Span) -> int:
        """Copy between two slots, either of which may be a peer's. This move has no digest."""

    @abc.abstractmethod
    def fill(self, span: Span, content: bytes) -> None:
        """Write to a span of our own. Returns when it is written."""

    @abc.abstractmethod
    def read(self, span: Span) -> bytes:
        """The bytes that a span of our own holds now."""

    @property
    def has_room(self) -> bool:
        """Whether another pull or digest may be asked for. Otherwise ask after a `poll`. Other moves do not check."""
        return True

    @abc.abstractmethod
    def poll(self) -> list[Moved]:
        """Begin what waits. Returns the moves that ended since the last call. Raises only what ends the agent."""

    def is_using(self, pool: AttachedPool) -> bool:
        """Whether a move of this pool, ours or a peer's, is under way."""
        return False

    def forget(self, pool: AttachedPool) -> None:
        """Keep nothing of this pool, which is about to be closed."""
        self._templates.forget(pool)

    @abc.abstractmethod
    def close(self) -> None:
        """Wait for the moves under way. Idempotent."""


class CpuBlockCopier(BlockCopier):
    """The copier without a GPU: rows are moved by this thread, at once. The copies release the GIL.

    Peers may write to a slot at any time, so it is read once: a chunk is copied out, and only the copy is checked and
    scattered. A late write cannot change what was checked.
    """

    memory = "dram"
    device = "cpu"
    digests = ("xxh3", "sum64")
    description = "cpu"
    brief_bytes = 1 << 18

    def __init__(self) -> None:
        super().__init__()
        self._work = Work("cpu")
        self._copies = Scratch()
        self._moved: list[Moved] = []

    def staging(self, slot_bytes: int, slots: int) -> Staging:
        return Staging.pageable(slot_bytes, slots)

    def gather(self, pool: AttachedPool, part: Part, slot: Span, digest_kind: str, host: Span | None = None) -> int:
        assert host is None, "the slots are in host memory already"
        sums = _sums(digest_kind)
        with pool.hold() as regions:
            move(self._templates.of(PartSide(pool, regions, part), None, slot.size_bytes), self._work, slot, sums)
        return self._over(_word(int(sums.item())) if sums is not None else xxh3(slot.on_cpu()))

    def digest(self, pool: AttachedPool, part: Part) -> int:
        sums, size_bytes = torch.zeros(1, dtype=torch.int64), part.chunk.size_bytes
        with pool.hold() as regions:
            move(self._templates.of(PartSide(pool, regions, part), None, size_bytes), self._work, None, sums)
        return self._over(_word(int(sums.item())))

    def scatter(
        self, pool: AttachedPool, part: Part, slot: Span, digest_kind: str, expected: int, host: Span | None = None
    ) -> int:
        assert host is None, "the slots are in host memory already"
        copy = self._copies.take("chunk", slot.size_bytes, torch.device("cpu"))
        ctypes.memmove(copy.data_ptr(), slot.address, slot.size_bytes)
        with pool.hold() as regions:
            placed = self._templates.of(None, PartSide(pool, regions, part), slot.size_bytes)
            found = _word(sum64(placed.segments, copy)) if digest_kind == "sum64" else xxh3(copy)
            if found == expected:
                move(placed, self._work, Span(copy.data_ptr(), slot.size_bytes))
        return self._over(found, expected)

    def pull(
        self,
        sender: AttachedPool,
        theirs: Part,
        pool: AttachedPool,
        ours: Part,
        has_digest: bool = False,
        others_follow: bool = False,
    ) -> int:
        sums = _sums("sum64") if has_digest else None
        with sender.hold() as sender_regions, pool.hold() as regions:
            sides = PartSide(sender, sender_regions, theirs), PartSide(pool, regions, ours)
            move(self._templates.of(*sides, ours.chunk.size_bytes), self._work, None, sums)
        return self._over(_word(int(sums.item())) if sums is not None else 0)

    def copy(self, source: Span, target: Span) -> int:
        ctypes.memmove(target.address, source.address, min(source.size_bytes, target.size_bytes))
        return self._over(0)

    def fill(self, span: Span, content: bytes) -> None:
        ctypes.memmove(span.address, content, min(span.size_bytes, len(content)))

    def read(self, span: Span) -> bytes:
        return ctypes.string_at(span.address, span.size_bytes)

    def poll(self) -> list[Moved]:
        moved, self._moved = self._moved, []
        return moved

    def close(self) -> None:
        self._moved.clear()
        self._copies = Scratch()

    def _over(self, digest: int, expected: int | None = None) -> int:
        self._count += 1
        self._moved.append(compared(self._count, digest, expected))
        return self._count


def _sums(digest_kind: str) -> torch.Tensor | None:
    """The tensor that kernels add a sum64 to. None for other digests, which are taken of the whole chunk."""
    return torch.zeros(1, dtype=torch.int64) if digest_kind == "sum64" else None


def _word(total: int) -> int:
    """A sum64 as it is on the wire."""
    return total & (2**64 - 1)


def compared(ticket: int, digest: int, expected: int | None) -> Moved:
    """A finished move, good if its digest is the expected one (any, if None)."""
    if expected is None or digest == expected:
        return Moved(ticket, digest)
    return Moved(ticket, digest, ("digest_mismatch", f"digest: sent {expected:016x}, landed {digest:016x}"))
