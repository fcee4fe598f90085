"""Names of dialled agents that a name server is slow to resolve, with real sockets and the system's resolver."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from kvbridge_proto.peer import Goodbye

from kvbridge.transport.control import Control
from kvbridge.transport.link import Arrived, Lost, Settings
from kvbridge.transport.names import MOST_LOOKUPS, MOST_OF_A_NAME, Names
from kvbridge.transport.trust import Trust
from testing.hosts import ROOT, why_not

SLOW_NAMES = Path(__file__).with_name("slow_names.py")
INSIDE = (
    'ip link set lo up && mount --bind "$1" /etc/resolv.conf && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
)


@pytest.mark.proves("T5")
def test_a_name_that_is_slow_to_resolve_delays_no_other_link(tmp_path: Path) -> None:
    """ZeroMQ looks names up on the thread that carries all links: they stood still for two minutes here."""
    if reason := why_not():
        pytest.skip(reason)
    resolver, hosts = tmp_path / "resolv.conf", tmp_path / "hosts"
    resolver.write_text("nameserver 127.0.0.1\noptions timeout:30 attempts:4\n")
    hosts.write_text("127.0.0.1 localhost\n")
    command = ["unshare", "--net", "--mount", "sh", "-euc", INSIDE, "sh", str(resolver), str(hosts)]
    done = subprocess.run(
        [*command, sys.executable, str(SLOW_NAMES)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
    )
    told = ["first arrived", "another link arrived", "another name arrived", "3 wait for their name"]
    assert done.stdout.splitlines() == told, done.stderr[-2000:]


@pytest.mark.proves("T5")
async def test_names_are_looked_up_at_once_up_to_a_bound_and_each_by_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on, asked = threading.Event(), []

    def answer(host: str, *_: object) -> list[tuple[object, ...]]:
        asked.append(host)
        assert go_on.wait(60.0)
        if host == "n0":
            raise OSError("no such host")
        return [(0, 0, 0, "", ("10.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    names, told = Names(), asyncio.Queue[tuple[str, Sequence[str], str]]()
    for host in [*(f"n{index}" for index in range(MOST_LOOKUPS)), "n1", "one more"]:
        names.look_up(host, lambda address, reason, host=host: told.put_nowait((host, address, reason)))
    assert await asyncio.wait_for(told.get(), 60.0) == (
        "one more",
        (),
        f"{MOST_LOOKUPS} other names are being looked up",
    )
    go_on.set()
    rest = [await asyncio.wait_for(told.get(), 60.0) for _ in range(MOST_LOOKUPS + 1)]
    assert sorted(asked) == sorted(f"n{index}" for index in range(MOST_LOOKUPS))
    assert ("n0", (), "no such host") in rest and rest.count(("n1", ("10.0.0.1",), "")) == 2
    names.look_up("n2", lambda address, reason: told.put_nowait(("again", address, reason)))
    assert await asyncio.wait_for(told.get(), 60.0) == ("again", ("10.0.0.1",), "")


async def test_while_too_many_hang_a_name_that_was_found_has_its_last_address(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def answer(host: str, *_: object) -> list[tuple[object, ...]]:
        assert host == "known" or go_on.wait(60.0)
        return [(0, 0, 0, "", ("10.0.0.7", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    names, told = Names(), asyncio.Queue[tuple[Sequence[str], str]]()
    try:
        names.look_up("known", lambda address, reason: told.put_nowait((address, reason)))
        assert await asyncio.wait_for(told.get(), 60.0) == (("10.0.0.7",), "")
        for index in range(MOST_LOOKUPS):
            names.look_up(f"n{index}", lambda address, reason: None)
        names.look_up("known", lambda address, reason: told.put_nowait((address, reason)))
        assert await asyncio.wait_for(told.get(), 60.0) == (("10.0.0.7",), "")
    finally:
        go_on.set()


@pytest.mark.proves("T5")
async def test_who_wait_for_one_name_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def answer(*_: object) -> list[tuple[object, ...]]:
        assert go_on.wait(60.0)
        return [(0, 0, 0, "", ("10.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    names, told = Names(), asyncio.Queue[tuple[int, Sequence[str], str]]()
    try:
        for index in range(MOST_OF_A_NAME + 1):
            names.look_up("slow", lambda address, reason, index=index: told.put_nowait((index, address, reason)))
        assert await asyncio.wait_for(told.get(), 60.0) == (MOST_OF_A_NAME, (), f"{MOST_OF_A_NAME} wait for it")
    finally:
        go_on.set()
    for index in range(MOST_OF_A_NAME):
        assert await asyncio.wait_for(told.get(), 60.0) == (index, ("10.0.0.1",), "")


async def test_a_name_that_is_published_late_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a pod that has only just begun. One that never is fails with the resolver's reason."""
    asked = []

    def answer(host: str, *_: object) -> list[tuple[object, ...]]:
        asked.append(host)
        if host != "late.example" or asked.count(host) < 3:
            raise OSError("no such host")
        return [(0, 0, 0, "", ("127.0.0.1", 0))]

    trust = Trust(places=("*:*",), allow_unauthenticated=True)
    async with (
        Control("served", "tcp://127.0.0.1:0") as served,
        Control("dialler", trust=trust, settings=Settings(connect_s=60.0)) as dialler,
        Control("hasty", trust=trust, settings=Settings(connect_s=2.0)) as hasty,
    ):
        monkeypatch.setattr(socket, "getaddrinfo", answer)
        port = served.address.rpartition(":")[2]
        assert dialler.dial(f"tcp://late.example:{port}").send(Goodbye(reason="here"))
        hasty.dial(f"tcp://never.example:{port}")

        async def first(control: Control, kind: type) -> object:
            return await anext(each async for each in control.events() if isinstance(each, kind))

        lost = await asyncio.wait_for(first(hasty, Lost), 60.0)
        assert isinstance(lost, Lost) and lost.code == "peer_unreachable" and "no such host" in lost.reason
        reading = asyncio.create_task(first(dialler, Lost))
        arrived = await asyncio.wait_for(first(served, Arrived), 60.0)
        assert isinstance(arrived, Arrived) and arrived.envelope.body == Goodbye(reason="here")
        reading.cancel()
    assert asked.count("late.example") == 3 and asked.count("never.example") > 1
