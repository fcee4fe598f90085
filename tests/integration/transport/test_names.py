"""Names of dialled agents that a name server is slow to resolve, with real sockets and the system's resolver."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvbridge.transport.names import MOST_NAMES, Names
from tests.support.hosts import ROOT, why_not

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
        timeout=100,
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
    names, told = Names(), asyncio.Queue[tuple[str, str, str]]()
    for host in [*(f"n{index}" for index in range(MOST_NAMES)), "n1", "one more"]:
        names.look_up(host, lambda address, reason, host=host: told.put_nowait((host, address, reason)))
    assert await asyncio.wait_for(told.get(), 60.0) == ("one more", "", f"{MOST_NAMES} other names are being looked up")
    go_on.set()
    rest = [await asyncio.wait_for(told.get(), 60.0) for _ in range(MOST_NAMES + 1)]
    assert sorted(asked) == sorted(f"n{index}" for index in range(MOST_NAMES))
    assert ("n0", "", "no such host") in rest and rest.count(("n1", "10.0.0.1", "")) == 2
    names.look_up("n2", lambda address, reason: told.put_nowait(("again", address, reason)))
    assert await asyncio.wait_for(told.get(), 60.0) == ("again", "10.0.0.1", "")


async def test_while_too_many_hang_a_name_that_was_found_has_its_last_address(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def answer(host: str, *_: object) -> list[tuple[object, ...]]:
        assert host == "known" or go_on.wait(60.0)
        return [(0, 0, 0, "", ("10.0.0.7", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    names, told = Names(), asyncio.Queue[tuple[str, str]]()
    try:
        names.look_up("known", lambda address, reason: told.put_nowait((address, reason)))
        assert await asyncio.wait_for(told.get(), 60.0) == ("10.0.0.7", "")
        for index in range(MOST_NAMES):
            names.look_up(f"n{index}", lambda address, reason: None)
        names.look_up("known", lambda address, reason: told.put_nowait((address, reason)))
        assert await asyncio.wait_for(told.get(), 60.0) == ("10.0.0.7", "")
    finally:
        go_on.set()
