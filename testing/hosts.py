"""Two hosts on one machine: each has its own network, PID, IPC and mount namespaces, and a kernel of its own by name.

The path between them delays packets, loses some or all of them, as told.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from testing import path_relay
from testing.nursery import Place
from testing.path_relay import enter_network

DEVICE = path_relay.DEVICE.decode()
ROOT = Path(__file__).parents[1]
UNSHARE = ("unshare", "--net", "--ipc", "--mount", "--pid", "--fork", "--kill-child")
START_S = 180.0
# What a host has instead of the machine's: its own processes, its own network devices, and another boot id.
OWN = """
mount -t proc proc /proc && mount -t sysfs sysfs /sys && mount --bind "$1" /proc/sys/kernel/random/boot_id &&
ip link set lo up && echo so && exec sleep infinity
"""


def why_not() -> str:
    """Why this machine cannot have them; empty if it can. Worded as tests/conftest.py lets a test skip in CI."""
    if os.geteuid() != 0:
        return "no namespaces without root"
    if missing := [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]:
        return f"needs {' and '.join(missing)}: install iproute2 and util-linux"
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True)
    if tried.returncode:
        return f"no namespaces can be made: {tried.stderr.strip()[:200]}"
    return "" if Path("/dev/net/tun").exists() else "no network namespace without /dev/net/tun"


@dataclass(frozen=True)
class Host:
    """`pid` is of its first process, as this machine numbers it."""

    name: str
    address: str
    folder: Path
    pid: int

    def within(self, *command: str) -> list[str]:
        """The command line that runs a command on this host."""
        return ["nsenter", f"--target={self.pid}", "--net", "--ipc", "--mount", "--pid", "--", *command]

    @property
    def inside(self) -> Place:
        """For a process of this host."""
        return Place(self.pid, ("net", "ipc", "mnt", "pid"))

    @property
    def beside(self) -> Place:
        """On this host's network, but with the process ids and the kernel of this machine.

        By shared memory, which UCX would take on one machine, no packet is dropped.
        """
        return Place(self.pid, ("net", "ipc"), (("sysfs", "/sys", "sysfs"),), {"UCX_TLS": "tcp"})

    def connected(self, port: int, seconds: float) -> socket.socket:
        """To a port of its loopback. A socket stays in the network where it was made."""

        def connect() -> socket.socket:
            enter_network(self.pid)
            return socket.create_connection(("127.0.0.1", port), seconds)

        with ThreadPoolExecutor(1) as its_own:  # a network is a thread's
            return its_own.submit(connect).result()

    def run(self, *command: str) -> None:
        done = subprocess.run(self.within(*command), capture_output=True, text=True, timeout=START_S)
        assert done.returncode == 0, f"{self.name}: {' '.join(command)}: {done.stderr}"


class NetworkPath:
    """What two hosts are joined by."""

    def __init__(self, relay: subprocess.Popen[str], hosts: tuple[Host, Host]) -> None:
        self._relay = relay
        self._hosts = hosts
        self._told = {"delay_s": 0.0, "loss": 0.0, "is_cut": False}

    def becomes(self, *, round_trip_s: float = 0.0, loss: float = 0.0) -> None:
        """So long for a packet and its answer, with this share of all packets lost."""
        self._tell(delay_s=round_trip_s / 2, loss=loss)

    def cut(self) -> None:
        """From now on every packet is dropped, both ways, and nobody is told."""
        self._tell(is_cut=True)

    def heal(self) -> None:
        self._tell(is_cut=False)

    def down(self) -> None:
        """From now on both hosts see their device without a carrier: the kernel drops what is sent."""
        self._link("down")

    def up(self) -> None:
        self._link("up")

    def _link(self, state: str) -> None:
        for host in self._hosts:
            host.run("ip", "link", "set", DEVICE, state)

    def _tell(self, **more: float) -> None:
        self._told |= more
        assert self._relay.stdin is not None and self._relay.stdout is not None
        self._relay.stdin.write(json.dumps(self._told) + "\n")
        self._relay.stdin.flush()
        assert self._relay.stdout.readline() == "so\n"


@contextmanager
def two_hosts(folder: Path, is_one_machine: bool = False) -> Iterator[tuple[Host, Host, NetworkPath]]:
    """Two hosts with nothing running, and the path between them. All that runs on them ends with them.

    As pods of one machine, they have one boot id.
    """
    boot_ids = [str(uuid.uuid4())] * 2 if is_one_machine else [str(uuid.uuid4()) for _ in "ab"]
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(_host(folder, name, f"10.231.77.{i}", boot_id))
            for i, (name, boot_id) in enumerate(zip("ab", boot_ids, strict=True), 1)
        )
        command = [sys.executable, path_relay.__file__, str(first.pid), str(second.pid)]
        relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.callback(_end, relay)
        assert relay.stdout is not None and relay.stdout.readline() == "so\n"
        for host, other in ((first, second), (second, first)):
            host.run("ip", "addr", "add", f"{host.address}/32", "peer", other.address, "dev", DEVICE)
            host.run("ip", "link", "set", DEVICE, "txqueuelen", "10000", "up")
        yield first, second, NetworkPath(relay, (first, second))


@contextmanager
def _host(folder: Path, name: str, address: str, boot_id: str) -> Iterator[Host]:
    own = folder / name
    own.mkdir()
    (own / "boot_id").write_text(f"{boot_id}\n")
    command = [*UNSHARE, "sh", "-c", OWN, "sh", str(own / "boot_id")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "so\n"
        yield Host(name, address, own, _child_of(process.pid))
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(START_S)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def _child_of(pid: int) -> int:
    """The child that a process forks and waits for."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if words := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            return int(words[0])
        time.sleep(0.01)
    raise AssertionError(f"process {pid} forks no child")
