"""Fuzzes every decoder and the code behind it for a short while, and replays the frames that once did harm."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from tests.integration.fuzz.target import CORPUS, Target, judged, kept
from tests.integration.fuzz.targets import NAMES, made

pytestmark = pytest.mark.proves("G25")

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
        "agents": 3000,
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
