"""Real processes that are watched: only their end is told, and only if the kernel still has them under their number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvbridge_proto.peer import ProcessCard
from msgspec import structs

from kvbridge.transport.processes import DEAD_S, Pidfds, own_process
from testing.waiting import wait_for

ROOT = Path(__file__).resolve().parents[3]
CARD = "from kvbridge.transport.processes import *; c = own_process(); print(c.pid, c.started, flush=True)"
# The main thread ends, another goes on.
WITHOUT_MAIN = (
    f"{CARD}; import ctypes, threading; threading.Thread(target=input).start(); ctypes.CDLL(None).pthread_exit(0)"
)
UNWATCHED = (
    "import sys; from testing.unwatched import forbid; from kvbridge.transport.processes import *; "
    "forbid(); sys.exit(Pidfds().watch(own_process()))"
)

pytestmark = pytest.mark.proves("G5")


class Watching(Pidfds):
    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(lambda: self.now)

    def is_readable(self) -> bool:
        return bool(self._poll.poll(0))


@pytest.fixture
def pidfds() -> Iterator[Watching]:
    made = Watching()
    before = os.listdir("/proc/self/fd")
    yield made
    made.close()
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def begun(code: str) -> tuple[subprocess.Popen[str], ProcessCard]:
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    pid, started = map(int, child.stdout.readline().split())
    return child, ProcessCard(pid=pid, started=started)


@pytest.mark.parametrize("code", [f"{CARD}; input()", WITHOUT_MAIN], ids=["whole", "without its main thread"])
def test_the_end_of_a_process_is_told_once_and_some_time_later(code: str, pidfds: Watching) -> None:
    child, process = begun(code)
    with child:
        try:
            assert pidfds.watch(process) and pidfds.watch(process)
            if code == WITHOUT_MAIN:
                wait_for(lambda: b"State:\tZ" in Path(f"/proc/{process.pid}/status").read_bytes())
            pidfds.now += 100.0
            assert pidfds.ended() == [] and not pidfds.is_readable()
        finally:
            child.send_signal(signal.SIGKILL)
        wait_for(pidfds.is_readable)
        assert pidfds.ended() == []
        pidfds.now += DEAD_S / 2
        assert pidfds.ended() == []
        pidfds.now += DEAD_S / 2
        assert pidfds.ended() == [process]
        assert pidfds.ended() == []


def test_one_that_nobody_has_waited_for_has_ended_and_one_that_is_gone_is_not_watched(pidfds: Watching) -> None:
    child, process = begun(CARD)
    with child:
        wait_for(lambda: b"State:\tZ" in Path(f"/proc/{process.pid}/status").read_bytes())
        assert pidfds.watch(process)
        pidfds.keep([process])
        assert pidfds.ended() == []
        pidfds.now += DEAD_S
        assert pidfds.ended() == [process]
    assert not pidfds.watch(process)


def test_a_number_that_another_process_has_now_is_not_watched(pidfds: Watching) -> None:
    ours = own_process()
    assert ours is not None and ours.pid == os.getpid()
    assert not pidfds.watch(structs.replace(ours, started=ours.started - 1))
    assert pidfds.watch(ours)
    pidfds.keep([])
    assert not pidfds._fds


def test_where_the_kernel_gives_no_pidfd_nothing_is_watched() -> None:
    assert subprocess.run([sys.executable, "-c", UNWATCHED], cwd=ROOT).returncode == 0
