"""Agents and engines as the runner of faults holds them: started armed or not, stopped, killed, looked into."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from kvbridge_proto.status import Status

from kvbridge.errors import OperatorError
from kvbridge.failpoints import VARIABLE
from kvbridge.local_agents import ask
from tests.system.faults.engine import Job

START_S = 30.0
POOL = "kvbridge-fault"  # how memory of engines is called in /proc/PID/maps


class Nursery:
    """Where agents are forked, in that network namespace."""

    def __init__(self, netns: str = "") -> None:
        self.netns = netns
        inside = ["ip", "netns", "exec", netns] if netns else []
        self._process = subprocess.Popen(
            [*inside, sys.executable, "-m", "tests.system.faults.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def fork(self, argv: list[str], log: Path, environment: dict[str, str]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        told = {"argv": argv, "log": str(log), "environment": environment}
        self._process.stdin.write(json.dumps(told) + "\n")
        ready, _, _ = select.select([self._process.stdout], [], [], START_S)
        assert ready, "no agent was forked"
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)


class Process:
    """One process by its pid; it is ours, so the number is not anybody else's before we let go of its descriptor."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._fd)

    def is_dead(self, seconds: float = 0.0) -> bool:
        return bool(select.select([self._fd], [], [], seconds)[0])

    def is_stopped(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while _state(self.pid) != "T":
            if self.is_dead() or time.monotonic() >= end:
                return False
            time.sleep(0.01)
        return True

    def send(self, number: int) -> None:
        if not self.is_dead():
            signal.pidfd_send_signal(self._fd, number)

    def end(self, seconds: float = 10.0) -> None:
        """Ask, then make it."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        if not self.is_dead(seconds):
            self.send(signal.SIGKILL)
            assert self.is_dead(10.0), f"{self.pid} does not die"

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        assert self.is_dead(10.0), f"{self.pid} does not die"


# Where the kernel lists sockets. One of none is a TCP connection that is over, of which only the descriptor is left.
TABLES = ("tcp", "tcp6", "udp", "udp6", "unix", "netlink", "packet", "raw", "raw6")


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds of the system. `over` are sockets whose connection has ended, and of no use to anybody."""

    fds: int  # but those
    over: int
    threads: int
    shared: int  # mappings of shared memory, engines' included

    @staticmethod
    def by(pid: int) -> Held:
        links = _links(pid)
        listed = {word for table in TABLES for word in _words(pid, table)}
        over = sum(link.startswith("socket:[") and link[8:-1] not in listed for link in links)
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        shared = sum("memfd:" in line or "/dev/shm" in line or "/SYSV" in line for line in maps)
        return Held(len(links) - over, over, len(os.listdir(f"/proc/{pid}/task")), shared)

    def is_within(self, before: Held, over: int = 0) -> bool:
        """Whether it is no more than before, but for so many sockets that are over."""
        more = self.over - before.over
        return (
            self.fds <= before.fds and more <= over and self.threads <= before.threads and self.shared <= before.shared
        )


def _links(pid: int) -> list[str]:
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return links


def _words(pid: int, table: str) -> list[str]:
    path = Path(f"/proc/{pid}/net/{table}")
    return path.read_text().split() if path.exists() else []


def maps_pool(pid: int, name: str) -> bool:
    """Whether that process maps the memory of that engine."""
    return f"memfd:{name} " in Path(f"/proc/{pid}/maps").read_text()


def free_address() -> str:
    """Where an agent can listen, die and listen again: the kernel gives such a port to no connection meanwhile."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10000, max(given, 20000))
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return f"tcp://127.0.0.1:{port}"


class Agent(Process):
    """`kvbridge agent`."""

    def __init__(self, nursery: Nursery, folder: Path, name: str, options: dict[str, str], armed: str = "") -> None:
        self.socket, self.log = str(folder / f"{name}.sock"), folder / f"{name}.log"
        self.options = {"name": name, "socket": self.socket, "listen": "tcp://127.0.0.1:0", "metrics": ""} | options
        said = {f"--{key.replace('_', '-')}": value for key, value in self.options.items()}
        argv = [part for flag, value in said.items() for part in ((flag,) if value == "true" else (flag, value))]
        # Between namespaces of one machine UCX would go by shared memory, where no packet is dropped.
        environment = {VARIABLE: armed} | ({"UCX_TLS": "tcp"} if nursery.netns else {})
        super().__init__(nursery.fork(argv, self.log, environment))
        self.address, self.is_armed = "", bool(armed)

    def wait_serving(self) -> None:
        """Armed, it may die or stand still before anybody could ask it: that is as good."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self.is_dead() or self.is_stopped(0.0):
                if self.is_armed:
                    return
                break
            if (status := self.status()) is not None and status.state == "serving":
                self.address = status.agent.address
                return
            time.sleep(0.02)
        raise AssertionError(f"the agent does not serve:\n{self.tail()}")

    def status(self) -> Status | None:
        try:
            return ask(self.socket, 2.0)
        except OperatorError:
            return None

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Engine(Process):
    """`tests.system.faults.engine`; what it says is kept until it is asked for."""

    def __init__(self, job: Job, log: Path, armed: str = "") -> None:
        self.job, self.log = job, log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.system.faults.engine", msgspec.json.encode(job).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | {VARIABLE: armed},
            )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        super().__init__(self.process.pid)
        self._unread = b""
        self.said: list[dict[str, Any]] = []

    def tell(self, do: str, **more: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            assert self.is_dead(1.0)

    def hear(self, seconds: float = 0.0) -> bool:
        """Take in what it says within so long; False if nothing came."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            return False
        got = self.process.stdout.read()
        *lines, self._unread = (self._unread + (got or b"")).split(b"\n")
        self.said += [json.loads(line) for line in lines]
        if not got:
            time.sleep(0.01)
        return bool(got)

    def wait(self, event: str, seconds: float = START_S) -> dict[str, Any]:
        """The first such event; it is taken out."""
        end = time.monotonic() + seconds
        while True:
            for each in self.said:
                if each["event"] == event:
                    self.said.remove(each)
                    return each
            assert time.monotonic() < end, f"{self.job.role} engine: no {event} in {seconds} s: {self.said[-5:]}"
            assert not self.is_dead() or self.hear(), f"{self.job.role} engine died: {self.log.read_text()[-2000:]}"
            self.hear(0.1)

    def close(self) -> None:
        self.send(signal.SIGCONT)
        self.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
