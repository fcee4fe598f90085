"""Who moves rows between an engine's blocks and slots: a CPU, or a GPU's streams. The contract of both.

Every call is made on the data plane's thread. A move is begun by `gather`, `digest`, `scatter`, `pull` or `copy`, which
return a ticket at once, and is over when `poll` says so; until then memory, slots and pool stay as they are. All but
`copy` may raise Compiling where kernels are new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from kvbridge_kernels.segment import Span

from ..geometry.plan import Part
from .memory import AttachedPool
from .staging import Staging


@dataclass(frozen=True, slots=True)
class Moved:
    """A move is over. `digest` is that of the slot's bytes; with a `failure`, (code, reason), nothing counts."""

    ticket: int
    digest: int = 0
    failure: tuple[str, str] | None = None


class DeviceLost(BaseException):
    """The GPU does not work for this process any more: nothing can be finished or begun, the agent has to end.

    No Exception, so that no job takes it for its own failure.
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
        """Where its slots are."""

    @property
    def device(self) -> str:
        """As torch spells it."""

    @property
    def digests(self) -> tuple[str, ...]:
        """The kinds of digest it can make, the fastest first."""

    @property
    def description(self) -> str:
        """For people: which processor, and how it is shared with the engine."""

    def staging(self, slot_bytes: int, slots: int) -> Staging:
        """Slots of its own memory. OperatorError if there is no room."""

    def make_room(self, moves: int) -> None:
        """So many more may be under way at once that do not ask whether there is room."""

    def gather(
        self,
        pool: AttachedPool,
        part: Part,
        slot: Span,
        digest_kind: str,
        host: Span | None = None,
    ) -> int:
        """Fill `slot` from the engine's blocks, padding with zeros, then copy it to `host` if that is given.

        `slot` may be a peer's memory. EngineError when the engine is gone or the part is not right: nothing was begun.
        """

    def digest(self, pool: AttachedPool, part: Part) -> int:
        """The sum64 that `gather` would find, without a slot: nothing is written. EngineError as there."""

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
        digest is that of the very bytes that are written: peers may write to the slot at any time, so it is read once.
        """

    def pull(self, sender: AttachedPool, theirs: Part, pool: AttachedPool, ours: Part, has_digest: bool = False) -> int:
        """Read a chunk out of the blocks of a peer's engine into those of ours, converted on the way.

        With `has_digest` its sum64 is taken of the very rows that are read: what `gather` would find for them.

        EngineError when either engine is gone or a part is not right: nothing was begun.
        """

    def warm(self, pool: AttachedPool, part: Part, slot: Span | None) -> None:
        """Begin to compile for parts like this one, so that the first request does not wait. Without a slot for
        `digest` alone.
        """

    def warm_pull(self, sender: AttachedPool, theirs: Part, pool: AttachedPool, ours: Part, has_digest: bool) -> None:
        """The same for `pull`."""

    def copy(self, sender: Span, target: Span) -> int:
        """Copy between two slots, either of which may be a peer's; a move without a digest."""

    def fill(self, span: Span, content: bytes) -> None:
        """Write to a span of our own, now."""

    def read(self, span: Span) -> bytes:
        """What a span of our own holds, now."""

    @property
    def has_room(self) -> bool:
        """Whether another pull or digest may be begun; else one has to end first. Other moves do not ask."""

    def poll(self) -> list[Moved]:
        """The moves that are over since the last call. Raises only what ends the agent."""

    def is_using(self, pool: AttachedPool) -> bool:
        """Whether a move of this pool, ours or a peer's, is under way."""

    def forget(self, pool: AttachedPool) -> None:
        """The pool is about to be closed: keep nothing of it."""

    def close(self) -> None:
        """Wait for what is under way. Idempotent."""


def compared(ticket: int, digest: int, expected: int | None) -> Moved:
    """A finished move, good if its digest is the expected one (any, if None)."""
    if expected is None or digest == expected:
        return Moved(ticket, digest)
    return Moved(ticket, digest, ("digest_mismatch", f"digest: sent {expected:016x}, landed {digest:016x}"))
