"""Moves rows between an engine's blocks and slots, on a CPU or a GPU: the contract of both copiers.

Every call is made on the data plane's thread. `gather`, `digest`, `scatter`, `pull` and `copy` begin a move and return
its ticket at once, though a pull may begin only at a later `poll`. The move is over when `poll` says so; until then
memory, slots and pool must stay as they are. All but `copy` may raise Compiling, if they need new kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from kvbridge_kernels.segment import Span
from kvbridge_proto.pool import Pool

from ..geometry.plan import Part
from .memory import AttachedPool
from .staging import Staging


@dataclass(frozen=True, slots=True)
class Moved:
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


class BlockCopier(Protocol):
    """One processor and the memory it works on."""

    @property
    def memory(self) -> Literal["dram", "vram"]:
        """Which memory its slots are in."""

    @property
    def device(self) -> str:
        """As torch spells it."""

    @property
    def digests(self) -> tuple[str, ...]:
        """The kinds of digest it can compute, the fastest first."""

    @property
    def description(self) -> str:
        """For people: which processor, and how it is shared with the engine."""

    def staging(self, slot_bytes: int, slots: int) -> Staging:
        """Allocate slots. Raises OperatorError if there is not enough memory."""

    def zeros(self, pool: Pool) -> AttachedPool:
        """Memory of our own for this pool, all zeros, for `pull` to read. The caller closes it after `forget`."""

    def make_room(self, moves: int) -> None:
        """Allow `moves` more moves under way at once, of the kinds that do not check `has_room`."""

    def gather(
        self,
        pool: AttachedPool,
        part: Part,
        slot: Span,
        digest_kind: str,
        host: Span | None = None,
    ) -> int:
        """Fill `slot` from the engine's blocks, padding with zeros, then copy it to `host` if that is given.

        `slot` may be a peer's memory. EngineError, with nothing begun, if the engine is gone or the part is invalid.
        """

    def digest(self, pool: AttachedPool, part: Part) -> int:
        """Find the sum64 that `gather` would, without writing to a slot. Raises as `gather`."""

    def scatter(
        self,
        pool: AttachedPool,
        part: Part,
        slot: Span,
        digest_kind: str,
        expected: int,
        host: Span | None = None,
    ) -> int:
        """Put the rows in `slot`, copied there from `host` first if that is given, into the engine's blocks.

        A digest other than `expected` is the failure `digest_mismatch`; a GPU may have written the blocks by then. The
        digest is of the very bytes that are written: peers may write to the slot at any time, so it is read once.
        """

    def pull(self, sender: AttachedPool, theirs: Part, pool: AttachedPool, ours: Part, has_digest: bool = False) -> int:
        """Read a chunk from the blocks of a peer's engine, convert it, and write it into our engine's blocks.

        With `has_digest` the rows that are read also give their sum64, as `gather` would find it. The move fails
        (`pull_failed`) if it was to begin later and then could not.

        EngineError, with nothing begun, if either engine is gone or a part is invalid.
        """

    def warm(self, pool: AttachedPool, part: Part, slot: Span | None) -> None:
        """Begin to compile for parts like this one, so that the first request does not wait.

        Without a slot, compile for `digest` only.
        """

    def warm_pull(self, sender: AttachedPool, theirs: Part, pool: AttachedPool, ours: Part, has_digest: bool) -> None:
        """The same for `pull`."""

    def copy(self, source: Span, target: Span) -> int:
        """Copy between two slots, either of which may be a peer's. This move has no digest."""

    def fill(self, span: Span, content: bytes) -> None:
        """Write to a span of our own. Returns when it is written."""

    def read(self, span: Span) -> bytes:
        """The bytes that a span of our own holds now."""

    @property
    def has_room(self) -> bool:
        """Whether another pull or digest may be asked for. Otherwise ask after a `poll`. Other moves do not check."""

    def poll(self) -> list[Moved]:
        """Begin what waits. Returns the moves that ended since the last call. Raises only what ends the agent."""

    def is_using(self, pool: AttachedPool) -> bool:
        """Whether a move of this pool, ours or a peer's, is under way."""

    def forget(self, pool: AttachedPool) -> None:
        """Keep nothing of this pool, which is about to be closed."""

    def close(self) -> None:
        """Wait for the moves under way. Idempotent."""


def compared(ticket: int, digest: int, expected: int | None) -> Moved:
    """A finished move, good if its digest is the expected one (any, if None)."""
    if expected is None or digest == expected:
        return Moved(ticket, digest)
    return Moved(ticket, digest, ("digest_mismatch", f"digest: sent {expected:016x}, landed {digest:016x}"))
