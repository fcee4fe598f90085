"""What is fuzzed, and how a frame is judged: it may raise nothing, and may take a second of processor time.

Only a long run, by `python -m tests.integration.fuzz`, also checks that nothing grows.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from kvbridge_proto.framing import BadFrame, decode

CORPUS = Path(__file__).parent / "corpus"
SLOW_S = 1.0
HANG_S = 60.0  # by the wall clock: other processes may have the processors


class Target:
    """`run` raises whatever is wrong with what the frame did, and says how many frames or messages that were."""

    name = ""
    kind: Any = None  # of message, if a frame is one

    def frame(self, random: Random) -> bytes:
        raise NotImplementedError

    def run(self, frame: bytes) -> int:
        """One of a kind is read and judged; a bad one is refused by the codec."""
        try:
            message = decode(frame, self.kind)
        except BadFrame:
            return 1
        return self.judge(message) or 1

    def judge(self, message: Any) -> int | None:
        raise NotImplementedError

    @cached_property
    def folder(self) -> Path:
        """For files, gone when it is closed."""
        self._temporary = tempfile.TemporaryDirectory()
        return Path(self._temporary.name)

    def close(self) -> None:
        if "folder" in vars(self):
            self._temporary.cleanup()


class Slow(Exception):
    """One frame took more than SLOW_S of processor time."""


class Hang(BaseException):
    """One frame did not end."""


@dataclass(frozen=True, slots=True)
class Crash:
    """What a frame did; two are the same if they were raised at the same place."""

    frame: bytes
    kind: str
    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.place} ({len(self.frame)} bytes)\n{self.text}"


def judged(target: Target, frame: bytes) -> tuple[int, Crash | None]:
    """How many messages went in, and what was wrong with them."""
    began = time.process_time()
    count = 1
    try:
        with deadline(HANG_S):
            count = target.run(frame)
        if (took := time.process_time() - began) > SLOW_S:
            raise Slow(f"{took:.2f} s for {len(frame)} bytes, at most {SLOW_S}")
    except (Exception, Hang) as error:
        return count, _crash(frame, error)
    return count, None


def _crash(frame: bytes, error: BaseException) -> Crash:
    stack = traceback.extract_tb(error.__traceback__)
    place = next((f"{Path(s.filename).name}:{s.name}" for s in reversed(stack)), "")
    if isinstance(error, Hang | Slow):
        place = ""
    text = "".join(traceback.format_exception(error, limit=-8))
    return Crash(frame, type(error).__name__, place, text)


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises Hang in what takes longer. For the main thread."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang(f"not done in {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def minimised(target: Target, crash: Crash, tries: int = 2000) -> Crash:
    """A shorter frame that does the same, found by taking pieces out."""
    best, piece = crash, max(1, len(crash.frame) // 2)
    while piece and tries > 0:
        at, is_shorter = 0, False
        while at < len(best.frame) and tries > 0:
            tries -= 1
            _, found = judged(target, best.frame[:at] + best.frame[at + piece :])
            if found is not None and (found.kind, found.place) == (crash.kind, crash.place):
                best, is_shorter = found, True
            else:
                at += piece
        piece = piece if is_shorter and piece > 1 else piece // 2
    return best


def kept(name: str) -> list[Path]:
    """The frames that once did harm to this target."""
    return sorted((CORPUS / name).glob("*.bin"))
