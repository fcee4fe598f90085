"""Processes that share our PID namespace: which one a peer is, and when it has ended.

A pidfd is readable once all threads of its process have left `exit`: by then the kernel has closed its descriptors and
given up its memory, so it runs no kernels on a GPU and posts no writes. Between a peer's word and `pidfd_open` the
number may have gone to another process, so the start time is compared after the pidfd was opened.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from kvbridge_proto.peer import ProcessCard

# What an ended process had given to its kernel (UCX over TCP) or to MPS lands within 20 ms; proofs by a lock, too,
# come no sooner than this, as the next holder has to start.
DEAD_S = 1.0
STARTED = 22 - 3  # where /proc/PID/stat has the start time, among the fields after the program's name


def own_process() -> ProcessCard | None:
    """Which process we are. None if /proc does not say."""
    try:
        return ProcessCard(pid=os.getpid(), started=_started("self"))
    except (OSError, ValueError, IndexError):
        return None


def _started(pid: int | str) -> int:
    """When this process was started, in ticks since the boot. Raises OSError, ValueError, IndexError."""
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[STARTED])


class Processes(Protocol):
    """Watches processes of other agents."""

    def watch(self, process: ProcessCard) -> bool:
        """Watch it. False if the kernel does not show it, or has another process under this number."""

    def ended(self) -> list[ProcessCard]:
        """Those whose end is DEAD_S ago, once each."""

    def keep(self, needed: Collection[ProcessCard]) -> None:
        """Watch these only."""

    def close(self) -> None:
        """Watch none."""


class Pidfds:
    """Processes, watched by the kernel. Used on one loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._fds: dict[ProcessCard, int] = {}
        self._ended: dict[ProcessCard, float] = {}  # since when
        self._poll = select.poll()

    def watch(self, process: ProcessCard) -> bool:
        if process in self._fds:
            return True
        try:
            fd = os.pidfd_open(process.pid)
        except OSError:
            return False
        try:
            is_it = _started(process.pid) == process.started
        except (OSError, ValueError, IndexError):  # hidden by hidepid, for instance
            is_it = False
        if not is_it:
            os.close(fd)
            return False
        self._fds[process] = fd
        self._poll.register(fd, select.POLLIN)
        return True

    def ended(self) -> list[ProcessCard]:
        if not self._fds:
            return []
        now = self._clock()
        readable = {fd for fd, _ in self._poll.poll(0)}
        for process, fd in self._fds.items():
            if fd in readable:
                self._ended.setdefault(process, now)
        over = [process for process, since in self._ended.items() if now - since >= DEAD_S]
        for process in over:
            self._forget(process)
        return over

    def keep(self, needed: Collection[ProcessCard]) -> None:
        for process in [each for each in self._fds if each not in needed]:
            self._forget(process)

    def close(self) -> None:
        self.keep(())

    def _forget(self, process: ProcessCard) -> None:
        fd = self._fds.pop(process)
        self._ended.pop(process, None)
        self._poll.unregister(fd)
        os.close(fd)
