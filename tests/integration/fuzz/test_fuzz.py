"""Fuzzes every decoder and the code behind it for a short while, and replays the frames that once did harm."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from tests.integration.fuzz import __main__ as long
from tests.integration.fuzz.target import CORPUS, Target, judged, kept, minimised
from tests.integration.fuzz.targets import NAMES, made

# So many that each takes two seconds of one core at most.
FRAMES = {
    **dict.fromkeys(("envelope", "notice", "probe", "engine", "answer", "door", "memory", "client"), 15_000),
    **{
        "stream": 4000,
        "fds": 6000,
        "params": 6000,
        "config": 1000,
        "keylist": 600,
        "bootlist": 600,
        "poolfile": 300,
        "status": 150,
        "pools": 2500,
        "machines": 3000,
        "agents": 600,
    },
}


@contextlib.contextmanager
def target_of(name: str) -> Iterator[Target]:
    gc.collect()
    gc.freeze()  # what other tests left would be looked at in the middle of a frame, for a second
    try:
        with closing(made(name)) as target:
            yield target
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_the_named_errors_comes_of_any_frame(name: str) -> None:
    random, done = Random(f"make test: {name}"), 0
    with target_of(name) as target:
        while done < FRAMES[name]:
            messages, crash = judged(target, target.frame(random))
            assert crash is None, f"{crash}\nframe: {crash.frame[:2000].hex()}"
            done += messages


@pytest.mark.parametrize(
    "path", [path for name in NAMES for path in kept(name)], ids=lambda p: f"{p.parent.name}/{p.stem}"
)
def test_what_once_did_harm_does_none(path: Path) -> None:
    with target_of(path.parent.name) as target:
        _, crash = judged(target, path.read_bytes())
    assert crash is None, crash


def test_every_kept_frame_is_of_a_target() -> None:
    assert {path.parent.name for path in CORPUS.rglob("*.bin")} <= NAMES.keys()


class Touchy:
    """Does harm when a frame has an A before a B."""

    name = "touchy"

    def frame(self, random: Random) -> bytes:
        return random.randbytes(40)

    def run(self, frame: bytes) -> int:
        if b"B" in frame[frame.find(b"A") + 1 :] and b"A" in frame:
            raise KeyError("found")
        if frame == b"hang":
            while True:
                pass
        return 1

    def close(self) -> None: ...


def test_a_crash_is_found_and_made_as_small_as_it_can_be() -> None:
    target, random = Touchy(), Random(1)
    crash = next(found for _ in range(10_000) if (found := judged(target, target.frame(random))[1]))
    assert minimised(target, crash).frame == b"AB" and crash.kind == "KeyError"


class Hoarder(Touchy):
    """Keeps some of what it is told."""

    name = "hoarder"

    def __init__(self, size_bytes: int) -> None:
        self._kept: list[bytes] = []
        self._size = size_bytes

    def run(self, frame: bytes) -> int:
        self._kept.append(frame[:1] * self._size)
        return 1


@pytest.mark.parametrize(("size_bytes", "has_grown"), [(100_000, True), (1, False)])
def test_a_long_run_in_which_memory_grows_has_failed(
    size_bytes: int, has_grown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long, "JUDGED_S", 0.0)
    assert long.fuzz(Hoarder(size_bytes), 500, 0, 60)["has_grown"] is has_grown


def test_a_frame_that_does_not_end_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.integration.fuzz.target.HANG_S", 0.2)
    _, crash = judged(Touchy(), b"hang")
    assert crash is not None and crash.kind == "Hang"
