"""What the kernel says of a process, by its id or "self"."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path


def descriptors(pid: int | str = "self") -> int:
    """How many it has open."""
    if pid == "self":
        gc.collect()  # what was left to it must not close between two counts
    return len(os.listdir(f"/proc/{pid}/fd"))


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def resident_bytes(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def stat_of(task: Path) -> list[str]:
    """Of a process or a thread, from its state on."""
    return (task / "stat").read_text().rpartition(")")[2].split()


def cpu_s(pid: int) -> float:
    """Processor time of all its threads."""
    fields = stat_of(Path(f"/proc/{pid}"))
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


COSTS = 3


class Stopwatch:
    """How long something takes, less what we and all that we started lose by waiting for a processor meanwhile.

    So a limit may be as short as on an idle machine, and a busy one cannot use it up. One second of such a wait costs
    COSTS: whoever stood still begins to wait for others anew.
    """

    def __init__(self) -> None:
        self._began, self._stolen, self._first = time.monotonic(), _stolen_s(), _waited_s()
        self._last = dict(self._first)

    def seconds(self) -> float:
        return self.whole_s() - self.lost_s()

    def whole_s(self) -> float:
        return time.monotonic() - self._began

    def lost_s(self) -> float:
        return COSTS * (sum(self._waited()) + _stolen_s() - self._stolen)

    def slowest_thread_waited_s(self) -> float:
        """What the thread that waited longest lost: of what a single thread does, now and then."""
        return max(self._waited()) + _stolen_s() - self._stolen

    def _waited(self) -> list[float]:
        self._last |= _waited_s()  # of threads that have ended, what was seen last
        return [seconds - self._first.get(task, 0.0) for task, seconds in self._last.items()]


def _waited_s() -> dict[str, float]:
    """How long each of our threads, and of those of all that we started, was ready to run and did not."""
    waited = {}
    for task in _tasks(os.getpid()):
        with contextlib.suppress(OSError):
            waited[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return waited


def _tasks(pid: int) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            yield task
            for child in (task / "children").read_text().split():
                yield from _tasks(int(child))


def descendants(pid: int) -> list[int]:
    """Processes that it has started, and those that these have."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def _stolen_s() -> float:
    """Of all processors, by other machines on the same host."""
    return int(Path("/proc/stat").read_text().split("\n")[0].split()[8]) / os.sysconf("SC_CLK_TCK")


def mapped(pid: int, what: str) -> int:
    """How many of its mappings are of files whose name or inode this is."""
    lines = (line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return sum(what == line[4] or any(what in word for word in line[5:]) for line in lines)


def listening(pid: int) -> set[str]:
    """Where it has listening TCP sockets: address and port."""
    folder, own, found = Path(f"/proc/{pid}"), set[str](), set[str]()
    for fd in (folder / "fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(fd))
    for table, family, size in (("tcp", socket.AF_INET, 4), ("tcp6", socket.AF_INET6, 16)):
        for line in (folder / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                host, port = fields[1].split(":")
                words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, 2 * size, 8)]
                found.add(f"{socket.inet_ntop(family, b''.join(words))}:{int(port, 16)}")
    return found
