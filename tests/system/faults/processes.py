"""Agents and engines as the runner of faults handles them: started armed or not, stopped, killed, inspected."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvbridge_proto.status import Status

from kvbridge.errors import OperatorError
from kvbridge.failpoints import VARIABLE
from kvbridge.local_agents import ask
from testing.agents import PYTHON
from testing.engine import Job
from testing.engine_process import EngineProcess
from testing.nursery import HERE, Child, Place, nursery

START_S = 180.0
POOL = "kvbridge-fault"  # how memory of engines is called in /proc/PID/maps


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


class Agent(Child):
    """`kvbridge agent`. The option True is a flag."""

    address = ""

    def __init__(
        self,
        folder: Path,
        name: str,
        options: Mapping[str, str | bool],
        armed: str = "",
        place: Place = HERE,
    ) -> None:
        own: dict[str, str | bool] = {"socket": str(folder / f"{name}.sock"), "listen": "tcp://127.0.0.1:0"}
        told = {"name": name, "metrics": "", **own, **options}
        self.socket = str(told["socket"])
        self.log = Path(self.socket).with_suffix(".log")
        self.is_armed = bool(armed)
        argv = ["agent"]
        for key, value in told.items():
            argv += [f"--{key.replace('_', '-')}", *([value] if isinstance(value, str) else [])]
        with self.log.open("ab") as log:
            streams = None, log.fileno(), log.fileno()
            super().__init__(nursery(PYTHON).fork("kvbridge.cli", argv, streams, {VARIABLE: armed}, place=place))

    def wait_serving(self) -> Status | None:
        """Armed, it may die or stand still before anybody could ask it: that is as good, and None."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self.is_dead() or self.is_stopped(0.0):
                if self.is_armed:
                    return None
                break
            if (status := self.status()) is not None and status.state == "serving":
                self.address = status.agent.address
                return status
            time.sleep(0.02)
        raise AssertionError(f"the agent does not serve:\n{self.tail()}")

    def serving(self) -> Status:
        """Once it serves. For one that is not armed."""
        status = self.wait_serving()
        assert status is not None
        return status

    def status(self) -> Status | None:
        try:
            return ask(self.socket, 2.0)
        except OperatorError:
            return None

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Engine(EngineProcess):
    """`testing.engine`."""

    def __init__(self, job: Job, log: Path, armed: str = "", place: Place = HERE) -> None:
        super().__init__("testing.engine", job, log, {VARIABLE: armed}, place)
