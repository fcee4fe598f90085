"""The fence between an engine and its agent, on the CPU: counts cross processes, bad pages are refused."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing

import pytest

from kvbridge.device.fence import EngineFence, FencePage
from kvbridge.device.mapping import SharedHandles
from kvbridge.errors import EngineError
from testing.waiting import wait_for

ENGINE = """
import mmap, sys
from kvbridge.device.fence import EngineFence
fence, pages = EngineFence("cpu"), mmap.mmap(int(sys.argv[1]), 4096)
print(fence.fd, flush=True)
for line in sys.stdin:
    pages[0] = int(line)
    print(fence.mark(), flush=True)
"""


def test_counts_go_up_by_one_and_are_reached_in_order() -> None:
    with closing(EngineFence("cpu")) as fence:
        page = FencePage(fence.fd)
        assert page.reached(0)
        assert not page.reached(1)
        for count in (1, 2, 3):
            assert fence.mark() == count
            assert [page.reached(count - 1), page.reached(count), page.reached(count + 1)] == [True, True, False]
        page.close()


def test_another_process_sees_the_mark_and_what_was_written_before_it() -> None:
    memory = os.memfd_create("memory")
    os.ftruncate(memory, 4096)
    command = [sys.executable, "-c", ENGINE, str(memory)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[memory], text=True, bufsize=1
    ) as engine:
        assert engine.stdin and engine.stdout
        fd = os.open(f"/proc/{engine.pid}/fd/{int(engine.stdout.readline())}", os.O_RDWR)
        page = FencePage(fd)
        os.close(fd)
        for count in (1, 2):
            assert not page.reached(count)
            engine.stdin.write(f"{count + 76}\n")
            wait_for(lambda count=count: page.reached(count))
            assert os.pread(memory, 1, 0)[0] == count + 76
            assert engine.stdout.readline() == f"{count}\n"
        engine.kill()
        engine.wait(60)
        assert page.reached(2) and not page.reached(3)  # a dead engine's page still says how far it came
        page.close()
    os.close(memory)


def test_the_page_stays_the_agents_when_the_engine_has_closed_it() -> None:
    fence = EngineFence("cpu")
    page = FencePage(fence.fd)
    fence.mark()
    fence.close()
    fence.close()
    assert page.reached(1)
    page.close()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: page(4096, is_sealed=False), "4096 bytes, seals 0x0"),
        (lambda: page(8, is_sealed=True), "8 bytes, seals"),
        (lambda: os.open("/dev/null", os.O_RDWR), "Invalid argument"),
        (lambda: os.open(__file__, os.O_RDONLY), "fence: "),
        (lambda: os.pipe()[0], "Invalid argument"),
    ],
    ids=["a page its engine could cut off", "too short", "a device", "a file", "a pipe"],
)
def test_refuses_what_is_no_sealed_page(make: Callable[[], int], reason: str) -> None:
    fd = make()
    with pytest.raises(EngineError, match=reason) as caught:
        FencePage(fd)
    assert caught.value.code == "fence_unmappable"
    os.close(fd)


def test_an_engine_cannot_cut_off_the_page_the_agent_reads() -> None:
    with closing(EngineFence("cpu")) as fence, pytest.raises(PermissionError):
        os.ftruncate(fence.fd, 0)


def test_other_agents_get_the_page_for_reading_only() -> None:
    with closing(EngineFence("cpu")) as fence, closing(SharedHandles.keep((), (), fence.fd)) as shared:
        assert shared.fence is not None
        theirs = shared.fds[shared.fence]
        with closing(FencePage(theirs)) as read:
            assert not read.reached(1) and fence.mark() == 1 and read.reached(1)
        with pytest.raises(PermissionError):
            mmap.mmap(theirs, mmap.PAGESIZE)


def test_a_page_that_may_not_be_opened_again_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing is read ahead, and the memory is shared all the same."""

    def refused(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refused)
    with closing(EngineFence("cpu")) as fence, closing(SharedHandles.keep((), (), fence.fd)) as shared:
        assert (shared.fence, shared.fds) == (None, ())


def page(size_bytes: int, is_sealed: bool) -> int:
    fd = os.memfd_create("page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK if is_sealed else 0)
    return fd
