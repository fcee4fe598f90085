"""A small read is begun on the loop, in the turn of the data plane's thread while that sleeps."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from kvbridge import failpoints
from kvbridge.dataplane import data_plane as data_plane_module
from kvbridge.dataplane.attached import Job, WaitMove
from kvbridge.dataplane.data_plane import DataPlane
from kvbridge.device.copier import CpuBlockCopier, DeviceLost, Moved
from kvbridge.exchange.orders import AwaitedPull, Pull, Pulled, ReceivingReport
from kvbridge.routes.pull.halves import ReadLease
from kvbridge.routes.pull.job import Opened
from testing.waiting import wait_for
from tests.integration.routes.test_routes import Agents

WHOSE = ("incarnation", 1, "")
LOOP = threading.get_ident()


class Threads(CpuBlockCopier):
    """Tells which threads began reads and looked for their ends. A read is over once it `may_end`."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []
        self.awaited: list[int] = []
        self.is_wrong = False
        self.looked: set[int] = set()
        self.may_end, self.is_lost, self.is_interrupted = True, False, False

    def pull(self, *_: Any) -> int:
        if self.is_lost:
            raise DeviceLost("gone")
        if self.is_interrupted:
            raise KeyboardInterrupt
        self.begun.append(threading.get_ident())
        return self._over(0)

    def await_pull(self, *_: Any) -> None:
        self.awaited.append(threading.get_ident())
        if self.is_wrong:
            raise RuntimeError("wrong")

    def poll(self) -> list[Moved]:
        self.looked.add(threading.get_ident())
        return super().poll() if self.may_end else []


class Ears:
    def __init__(self) -> None:
        self.ended: list[str] = []
        self.died: list[BaseException] = []

    def on_receive_orders(self, reports: Sequence[ReceivingReport]) -> None:
        self.ended += [each.transfer for each in reports if isinstance(each, Pulled)]

    def on_data_plane_died(self, error: BaseException) -> None:
        self.died.append(error)


class Sleeper(DataPlane):
    """Says when its thread sleeps until it is woken."""

    sleeps = False

    def _sleep(self, seconds: float) -> bool:
        self.sleeps = seconds == data_plane_module.IDLE_S
        return super()._sleep(seconds)


@pytest.fixture(autouse=True)
def _sound_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_plane_module, "IDLE_S", 300.0)


@pytest.fixture
def copier() -> Threads:
    return Threads()


@pytest.fixture
def ears() -> Ears:
    return Ears()


@asynccontextmanager
async def serving(copier: Threads, ears: Ears, **more: Any) -> AsyncIterator[DataPlane]:
    with ExitStack() as stack:
        resources = replace(Agents(stack).sender, copier=copier)
        data_plane = Sleeper(lambda: resources, "us", cast(Any, ears), 5.0, **more)
        await data_plane.start()
        data_plane._pulling._peers[WHOSE] = Opened(cast(Any, SimpleNamespace(close=lambda: None)), None, lambda: None)
        await asyncio.to_thread(wait_for, lambda: data_plane.sleeps and not data_plane._turn.locked())
        yield data_plane
        await data_plane.stop()


def read(
    data_plane: DataPlane,
    transfer: str = "t",
    chunks: int = 1,
    size_bytes: int = 1024,
    has_reached: Callable[[int], bool] = lambda count: True,
) -> None:
    lease = ReadLease(time.monotonic())
    lease.answered(0)
    plan: Any = SimpleNamespace(total_bytes=size_bytes, chunk=lambda index: index, bytes_of=lambda *_: size_bytes)
    attached: Any = SimpleNamespace(memory=object(), liveness=SimpleNamespace(has_left=False), has_reached=has_reached)
    data_plane.give(Pull(transfer, "r", WHOSE, plan, {}, {}, 0, chunks, lease, 0, frozenset()), attached)


async def until(happened: Any) -> None:
    async with asyncio.timeout(60):
        while not happened():  # noqa: ASYNC110 - the thread tells nobody
            await asyncio.sleep(0.001)


async def test_it_is_begun_here_and_its_end_is_seen_here(copier: Threads, ears: Ears) -> None:
    async with serving(copier, ears) as data_plane:
        copier.looked.clear()
        read(data_plane)
        assert copier.begun == [LOOP] and copier.looked == {LOOP} and not ears.ended, "it is told later"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert ears.ended == ["t"]


def await_read(data_plane: DataPlane, chunks: int = 2) -> None:
    plan: Any = SimpleNamespace(total_bytes=1, chunks=chunks)
    data_plane.give(AwaitedPull("t", WHOSE, plan, {}), cast(Any, SimpleNamespace(memory=object())))


@pytest.mark.parametrize("is_wrong", [False, True])
async def test_it_is_prepared_here_while_its_sender_is_asked(copier: Threads, ears: Ears, is_wrong: bool) -> None:
    """If that fails, the read itself will say so."""
    async with serving(copier, ears) as data_plane:
        copier.is_wrong = is_wrong
        await_read(data_plane)
        assert copier.awaited == [LOOP] and not copier.begun
        read(data_plane)
        await until(lambda: ears.ended == ["t"])


async def test_nothing_is_prepared_that_the_thread_will_read_or_while_it_works(copier: Threads, ears: Ears) -> None:
    async with serving(copier, ears) as data_plane:
        await_read(data_plane, chunks=3)
        with data_plane._turn:
            await_read(data_plane)
        assert not copier.awaited and not data_plane._tasks


async def test_two_of_rows_and_states_are_begun_here(copier: Threads, ears: Ears) -> None:
    """As a rank wants them of two."""
    async with serving(copier, ears) as data_plane:
        copier.may_end = False
        for transfer in ("one", "two"):
            read(data_plane, transfer, chunks=2)
        assert copier.begun == [LOOP] * 4
        copier.may_end = True
        await until(lambda: ears.ended == ["one", "two"])


@pytest.mark.parametrize("is_over", [True, False])
async def test_a_message_that_waits_comes_before_the_end(copier: Threads, ears: Ears, is_over: bool) -> None:
    """It may be another sender's answer. The end is seen at once, or looked for."""
    async with serving(copier, ears) as data_plane:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            heard: list[tuple[bool, bool]] = []

            def hear() -> None:
                heard.append((bool(copier.looked), bool(ears.ended)))
                asyncio.get_running_loop().remove_reader(ours)

            asyncio.get_running_loop().add_reader(ours, hear)
            theirs.send(b"answer")
            copier.may_end = is_over
            read(data_plane)
            copier.looked.clear()
            copier.may_end = True
            await until(lambda: ears.ended == ["t"])
            assert heard == [(False, False)]


@pytest.mark.parametrize(
    "why", ["two are under way", "the thread reads", "it has three chunks", "it is large", "a failpoint is armed"]
)
async def test_it_is_left_to_the_thread_if(
    copier: Threads, ears: Ears, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(copier, ears) as data_plane:
        if why == "two are under way":
            copier.may_end = False
            for transfer in ("first", "second"):
                read(data_plane, transfer)
        elif why == "the thread reads":
            copier.may_end = False
            read(data_plane, "first", chunks=3)
            await until(lambda: len(copier.begun) == 3 and not data_plane._turn.locked())
        elif why == "a failpoint is armed":
            monkeypatch.setattr(failpoints, "_armed", None)
            failpoints.arm("sender.gathered=kill")
        read(
            data_plane,
            chunks=3 if why == "it has three chunks" else 1,
            size_bytes=copier.brief_bytes + (why == "it is large"),
        )
        copier.may_end = True
        await until(lambda: "t" in ears.ended)
        assert copier.begun[-1] != LOOP


async def test_the_thread_is_woken_to_see_the_end_of_one_that_takes_longer(copier: Threads, ears: Ears) -> None:
    async with serving(copier, ears) as data_plane:
        copier.may_end = False
        copier.looked.clear()
        read(data_plane)
        await until(lambda: copier.looked - {LOOP})
        copier.may_end = True
        await until(lambda: ears.ended == ["t"])
        assert copier.begun == [LOOP]


async def test_the_thread_is_woken_if_one_of_two_waits_for_its_engine(copier: Threads, ears: Ears) -> None:
    """The loop does not look while one waits for a fence, and nobody else would wake a thread that sleeps soundly."""
    reached: list[int] = []
    async with serving(copier, ears) as data_plane:
        copier.may_end = False
        read(data_plane, "first")
        read(data_plane, "second", has_reached=lambda count: bool(reached))
        assert copier.begun == [LOOP]
        reached.append(1)
        copier.may_end = True
        await until(lambda: sorted(ears.ended) == ["first", "second"])


async def test_the_loop_does_not_go_on_with_what_the_thread_began_meanwhile(
    copier: Threads, ears: Ears, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a send: its gather is over, and NIXL, which one thread owns, may block while the write is posted."""
    monkeypatch.setattr(data_plane_module, "LOOKING_S", 60.0)
    monkeypatch.setattr(data_plane_module, "_pause", lambda still_s: 0.2)  # meanwhile only the loop looks
    ran: list[int] = []

    def send() -> Job:
        ran.append(threading.get_ident())
        yield WaitMove(copier._over(0))
        ran.append(threading.get_ident())

    async with serving(copier, ears) as data_plane:
        copier.may_end = False
        read(data_plane)
        data_plane._put(lambda: data_plane._resume(send(), None))
        await until(lambda: ran)
        copier.may_end = True
        await until(lambda: len(ran) == 2 and ears.ended)
        assert LOOP not in ran


async def test_a_lost_gpu_ends_the_data_plane_as_if_its_thread_had_met_it(copier: Threads, ears: Ears) -> None:
    async with serving(copier, ears) as data_plane:
        copier.is_lost = True
        read(data_plane)
        await until(lambda: ears.died)
        assert isinstance(ears.died[0], DeviceLost)
        copier.is_lost = False
        read(data_plane, "later")
        assert not copier.begun, "nobody begins anything any more"


async def test_a_loop_that_is_interrupted_in_the_turn_ends_it(copier: Threads, ears: Ears) -> None:
    """As by Ctrl-C; the thread would wait for its turn until the watchdog ends the process."""
    async with serving(copier, ears) as data_plane:
        copier.is_interrupted = True
        with pytest.raises(KeyboardInterrupt):
            read(data_plane)
        assert not data_plane._turn.locked()


@pytest.mark.proves("G19")
async def test_a_loop_that_hangs_in_the_turn_ends_the_process(copier: Threads, ears: Ears) -> None:
    """As in a driver call that does not return: nobody else could see it."""
    said = threading.Event()

    def end(reason: str) -> NoReturn:
        said.set()
        raise RuntimeError(reason)

    async with serving(copier, ears, stuck_s=0.25, end=end) as data_plane:
        assert data_plane._turn.acquire(timeout=60)
        data_plane.close_peer(("nobody", 1, ""))  # wakes the thread
        assert said.wait(60)
        await until(lambda: ears.died)
