"""A loop that has just received something polls again for a while, and then sleeps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import uvloop

from kvbridge.dataplane.linger import Linger

T = TypeVar("T")


def _in_a_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it on a thread of its own: naps stay exact on the thread that lingered, and in the processes it starts."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(uvloop.run, coroutine).result()


async def _cpu_share(seconds: float) -> float:
    began = time.thread_time()
    await asyncio.sleep(seconds)
    return (time.thread_time() - began) / seconds


async def _turns(seconds: float) -> int:
    """How often the loop comes by in so long, if it has nothing else to do but what lingers."""
    loop, count = asyncio.get_running_loop(), 0
    until = loop.time() + seconds
    while loop.time() < until:
        await asyncio.sleep(0)
        count += 1
    return count


def test_a_stirred_loop_stays_awake_and_then_sleeps() -> None:
    async def run() -> tuple[float, float, float]:
        linger = Linger(0.2)
        before = await _cpu_share(0.1)
        linger.keep_awake()
        linger.keep_awake()  # one who looks is enough
        awake = await _cpu_share(0.15)
        await asyncio.sleep(0.1)
        return before, awake, await _cpu_share(0.2)

    before, awake, after = _in_a_thread(run())
    assert before < 0.05 and after < 0.05
    assert awake > 3 * max(before, after) and awake > 0.05


def test_it_lets_others_have_their_turn() -> None:
    async def run() -> int:
        Linger(0.2).keep_awake()
        return await _turns(0.1)

    assert _in_a_thread(run()) > 20  # of thousands where nobody else computes


def test_what_comes_ends_a_nap_at_once() -> None:
    async def run() -> list[float]:
        loop, ends = asyncio.get_running_loop(), []
        linger = Linger(1.0, nap_s=0.2)
        for _ in range(3):
            linger.keep_awake()
            await asyncio.sleep(0.02)  # it naps now
            came = loop.create_future()
            threading.Timer(0.02, loop.call_soon_threadsafe, (came.set_result, loop.time())).start()
            began = loop.time()
            await came
            ends.append(loop.time() - began)
        return ends

    assert sorted(_in_a_thread(run()))[1] < 0.1


def test_what_already_waits_in_the_loop_is_called_before_it_naps() -> None:
    async def run() -> float:
        loop = asyncio.get_running_loop()
        over = loop.create_future()
        began = loop.time()
        Linger(1.0, nap_s=0.5).keep_awake()
        loop.call_soon(lambda: loop.call_soon(lambda: over.set_result(None)))
        await over
        return loop.time() - began

    assert _in_a_thread(run()) < 0.2


def test_uvloop_tells_the_descriptor_in_which_a_loop_naps() -> None:
    async def run() -> int:
        loop: Any = asyncio.get_running_loop()
        return loop._get_backend_id()

    assert _in_a_thread(run()) > 0


def test_with_nothing_set_it_never_stays_awake() -> None:
    async def run() -> float:
        Linger(0.0).keep_awake()
        return await _cpu_share(0.2)

    assert _in_a_thread(run()) < 0.05
