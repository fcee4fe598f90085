"""Addresses where nobody listens, and exhausted descriptors: what they cost others."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest
import zmq

from kvbridge import descriptors
from kvbridge.transport.control import Control
from kvbridge.transport.link import Arrived, Event, Link, Lost, Reached, Settings
from tests.integration.transport.ears import LOOPBACK, ROOT, Ear, cancel, remote

LONG = Settings(connect_s=600.0, grace_s=60.0)  # however busy the machine is, who is there answers in time
FEW = Settings(connect_s=60.0, max_unreached=8, grace_s=0.5)


def silent(stack: ExitStack, count: int) -> list[str]:
    """Addresses where a connection is taken, and never a word said."""
    found = []
    for _ in range(count):
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(8)
        found.append(f"tcp://127.0.0.1:{listening.getsockname()[1]}")
    return found


def closed(count: int) -> list[str]:
    return [f"tcp://127.0.7.7:{2000 + number}" for number in range(count)]


def give_way(made_up: list[Link]) -> None:
    """Those that are tried have had all their grace."""
    for link in made_up:
        if link.is_tried:
            link.made_at = time.monotonic() - 2 * LONG.grace_s


async def until_lost(control: Control, count: int) -> Counter[str]:
    """The codes of so many losses, and of nothing else but who was reached."""
    codes: Counter[str] = Counter()
    async with asyncio.timeout(60):
        async for event in control.events():
            if isinstance(event, Lost):
                codes[event.code] += 1
            if codes.total() == count:
                break
    return codes


@pytest.mark.proves("T5")
@pytest.mark.parametrize("kind", ["silent", "closed"])
async def test_who_answers_is_reached_among_thousands_where_nobody_is(kind: str) -> None:
    with ExitStack() as stack:
        _, real = stack.enter_context(remote("sender"))
        async with Control("receiver", settings=replace(LONG, max_unreached=32)) as receiver:
            made_up = []
            for number, address in enumerate(silent(stack, 600) if kind == "silent" else closed(3000)):
                made_up.append(receiver.dial(address))
                if number == 300:
                    link = receiver.dial(real)
                await asyncio.sleep(0)
            async with asyncio.timeout(60):
                while not link.is_up or sum(each.is_lost for each in made_up) < 500:
                    assert not link.is_lost
                    give_way(made_up)
                    await asyncio.sleep(0.01)
            assert (await until_lost(receiver, 500)).keys() == {"too_many_links"}


@pytest.mark.proves("T5")
@pytest.mark.parametrize("most", [4096, 100])
async def test_a_newcomer_has_a_place_soon_however_many_wait(most: int) -> None:
    with ExitStack() as stack:
        _, real = stack.enter_context(remote("sender"))
        async with Control("receiver", settings=replace(LONG, max_unreached=8, max_waiting=most)) as receiver:
            made_up = [receiver.dial(address) for address in silent(stack, 400)]
            link = receiver.dial(real)
            async with asyncio.timeout(60):
                while not link.is_up:
                    assert not link.is_lost
                    if not link.is_tried:
                        give_way(made_up)
                    await asyncio.sleep(0.01)
            assert sum(not (each.is_tried or each.is_lost) for each in made_up) > min(most, 400) - 60


async def test_those_that_found_nobody_give_way_first_and_then_the_oldest() -> None:
    with ExitStack() as stack:
        async with Control("receiver", settings=FEW) as receiver:
            began = time.monotonic()
            waiting = [receiver.dial(address) for address in silent(stack, 4)]
            refused = [receiver.dial(address) for address in closed(4)]
            while not all(link.is_refused for link in refused):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            later = [receiver.dial(address) for address in silent(stack, 5)]
            ear = Ear(receiver)
            lost = [await ear.hear(Lost) for _ in range(5)]
            assert time.monotonic() - began >= FEW.grace_s
            assert receiver.links == [*waiting[1:], *later]
            assert [event.link for event in lost] == [*refused, waiting[0]]
            assert {event.code for event in lost} == {"too_many_links"}


async def test_who_is_up_is_said_and_makes_room_for_nobody() -> None:
    with ExitStack() as stack:
        async with Control("sender", LOOPBACK) as sender, Control("receiver", settings=FEW) as receiver:
            link = receiver.dial(sender.address)
            heard: list[Event] = []
            async for event in receiver.events():
                heard.append(event)
                break
            assert heard == [Reached(link)]
            for address in silent(stack, 20):
                receiver.dial(address)
            assert not link.is_lost and sum(each.is_tried for each in receiver.links) == 9
            link.send(cancel("t"))
            assert isinstance(await Ear(sender).next(), Arrived)


@pytest.mark.proves("T5")
def test_a_dial_for_which_no_descriptors_are_left_fails_alone() -> None:
    """In processes of their own: the limit is the process's, and libzmq ends processes that it cannot serve."""
    command = [sys.executable, "-m", "tests.integration.transport.test_unreached"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    expected = [f"{left} {words}" for left in range(9) for words in ("too_many_links", "served", "ended 0")]
    assert ended.stdout.splitlines() == expected, ended.stderr


async def starved(left: int) -> None:
    """So many descriptors are left; sockets are tried all the same."""
    async with Control("sender", LOOPBACK) as sender, Control("receiver") as receiver:
        ear, link = Ear(sender), receiver.dial(sender.address)
        link.send(cancel("before"))
        await ear.hear(Arrived)
        before = len(os.listdir("/proc/self/fd"))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + left + 8, limits[1]))
        filler = []
        with suppress(OSError):
            while True:
                filler.append(os.dup(0))
        for _ in range(left):
            os.close(filler.pop())
        assert descriptors.are_short()
        waiting = receiver.dial("tcp://127.0.7.7:2000")
        assert not waiting.is_tried and not waiting.is_lost
        ports, failed = [], 0
        for _ in range(8):
            try:
                ports.append(receiver._port(zmq.DEALER, False, lambda: None, lambda event: None))
            except zmq.ZMQError:
                failed += 1
        assert failed
        for port in ports:
            port.close()
        receiver._try(waiting, receiver._waiting.pop(waiting))  # as if there were room
        print(left, (await Ear(receiver).hear(Lost)).code if left < 3 else "too_many_links", flush=True)
        link.send(cancel("after"))
        assert (await ear.hear(Arrived)).envelope.body == cancel("after")
        waiting.close()
        for fd in filler:
            os.close(fd)
        async with asyncio.timeout(60):  # what was made of a socket goes
            while len(os.listdir("/proc/self/fd")) > before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        print(left, "served", flush=True)


async def test_a_context_that_is_full_costs_one_dial() -> None:
    async with Control("receiver") as receiver:
        receiver._context.set(zmq.MAX_SOCKETS, 16)
        made_up = [receiver.dial(address) for address in closed(16)]
        codes = Counter(event.code for event in receiver._events if isinstance(event, Lost))
        assert codes.keys() == {"too_many_links"} and codes.total() + len(receiver.links) == len(made_up)


async def test_who_gets_no_turn_hears_so_by_name() -> None:
    settings = Settings(connect_s=0.5, max_unreached=2, grace_s=9.0, max_waiting=3)
    with ExitStack() as stack:
        async with Control("receiver", settings=settings) as receiver:
            dialled = [receiver.dial(address) for address in silent(stack, 6)]
            event = await Ear(receiver).loses("too_many_links", dialled[2])
            assert "3 wait to be tried, limit 3" in event.reason
            codes = await until_lost(receiver, 5)
            # Their time is over in one tick, in which a place that becomes free may be one's turn yet.
            assert codes.keys() == {"too_many_links", "peer_unreachable"} and codes.total() == 5
            assert codes["peer_unreachable"] >= 2


def test_the_limit_is_raised_as_far_as_is_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    most = resource.RLIM_INFINITY
    cases = [((1024, 4096), 4096), ((1024, most), 1 << 16), ((1024, 1 << 30), 1 << 16), ((1 << 20, 1 << 20), 1 << 20)]
    for limits, expected in cases:
        was = [limits]
        monkeypatch.setattr(resource, "getrlimit", lambda _, was=was: was[-1])
        monkeypatch.setattr(resource, "setrlimit", lambda _, now, was=was: was.append(now))
        assert descriptors.raised() == expected == was[-1][0] and was[-1][1] == limits[1]


@pytest.mark.parametrize(("limit", "expected"), [(100, 1), (1024, 48), (4096, 240), (20000, 1024), (1 << 20, 1024)])
def test_links_are_bounded_well_below_the_limit(limit: int, expected: int) -> None:
    assert descriptors.links(limit, 1024) == expected


if __name__ == "__main__":
    for left in range(9):  # forks: imports take longer than what is tried
        if (pid := os.fork()) == 0:
            asyncio.run(starved(left))
            sys.exit()
        print(left, "ended", os.waitpid(pid, 0)[1], flush=True)
