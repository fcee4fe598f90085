"""A loop that has just received something polls again for a while, and then sleeps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import uvloop

from kvbridge.dataplane import threads
from kvbridge.dataplane.threads import Linger

T = TypeVar("T")


def _in_a_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it on a thread of its own: naps stay exact on the thread that lingered, and in the processes it starts."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(uvloop.run, coroutine).result()


LONG_NAP_S, SOON_S = 20.0, 10.0  # a nap that is not ended is seen on the busiest machine


class CountedLinger(Linger):
    looks = 0

    def _look(self, loop: asyncio.AbstractEventLoop, awaited: list[int]) -> None:
        self.looks += 1
        super()._look(loop, awaited)


def test_a_stirred_loop_stays_awake_and_then_sleeps() -> None:
    async def run() -> None:
        linger = CountedLinger(0.2)
        await asyncio.sleep(0.02)
        assert not linger.looks
        linger.keep_awake()
        linger.keep_awake()
        for turn in range(1, 10):
            await asyncio.sleep(0)
            assert linger.looks <= turn, "one who looks is enough"
        async with asyncio.timeout(SOON_S):
            while linger._is_looking:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
        looks = linger.looks
        assert looks > 5
        await asyncio.sleep(0.05)
        assert linger.looks == looks

    _in_a_thread(run())


def test_at_first_it_does_not_nap_unless_another_thread_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "SPIN_S", 2 * LONG_NAP_S)

    async def run(is_needed: bool) -> int:
        linger = CountedLinger(2 * LONG_NAP_S, 0.5, lambda: is_needed)
        linger.keep_awake()
        await asyncio.sleep(0.2)  # a nap of half a second would outlast it
        return linger.looks

    assert _in_a_thread(run(True)) < 10 < 100 < _in_a_thread(run(False))


def test_it_lets_others_have_their_turn() -> None:
    async def run() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        Linger(2 * SOON_S).keep_awake()
        for _ in range(100):
            await asyncio.sleep(0)
        return loop.time() - began

    assert _in_a_thread(run()) < SOON_S


def test_what_comes_ends_a_nap_at_once() -> None:
    async def run() -> float:
        loop, linger = asyncio.get_running_loop(), Linger(1.0, LONG_NAP_S)
        linger.keep_awake()
        await asyncio.sleep(0)
        came = loop.create_future()
        threading.Timer(0.1, loop.call_soon_threadsafe, (came.set_result, None)).start()  # it naps then
        began = loop.time()
        await came
        linger._until = 0.0  # it would nap once more
        return loop.time() - began

    assert _in_a_thread(run()) < SOON_S


def test_what_already_waits_in_the_loop_is_called_before_it_naps() -> None:
    async def run() -> float:
        loop, linger = asyncio.get_running_loop(), Linger(1.0, LONG_NAP_S)
        over = loop.create_future()
        began = loop.time()
        linger.keep_awake()
        loop.call_soon(lambda: loop.call_soon(lambda: over.set_result(None)))
        await over
        linger._until = 0.0
        return loop.time() - began

    assert _in_a_thread(run()) < SOON_S


def test_uvloop_tells_the_descriptor_in_which_a_loop_naps() -> None:
    async def run() -> int:
        loop: Any = asyncio.get_running_loop()
        return loop._get_backend_id()

    assert _in_a_thread(run()) > 0


def test_with_nothing_set_it_never_stays_awake() -> None:
    async def run() -> int:
        linger = CountedLinger(0.0)
        linger.keep_awake()
        await asyncio.sleep(0.02)
        return linger.looks

    assert _in_a_thread(run()) == 0
