"""What another agent on this host needs to open our engine's memory, kept from attach until the epoch ends."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Self

from kvbridge_proto.pool import Handle

from ..errors import EngineError, OperatorError
from .mapping import fd_of


class SharedHandles:
    """The handles of one epoch and descriptors of our own, which each handle's `fd` numbers.

    Descriptors of shared memory are read-only: a process that gets one cannot map it for writing. (A process of the
    memory's owner could reopen it through /proc, but could also write to the engine itself.)
    """

    def __init__(self, handles: tuple[Handle, ...], fds: tuple[int, ...]) -> None:
        self.handles = handles
        self.fds = fds

    @classmethod
    def keep(cls, handles: Sequence[Handle], fds: Sequence[int]) -> Self:
        """Keep the handles of an attach, with descriptors of our own. Its fds stay the caller's.

        OperatorError `not_shareable` for shared memory that our user may not open, EngineError for a missing fd.
        """
        ours: dict[int, int] = {}  # by the fd that came: handles may share one
        try:
            for handle in handles:
                if handle.kind != "cuda_ipc" and (theirs := fd_of(handle, fds)) not in ours:
                    ours[theirs] = _of_our_own(handle, theirs)
        except BaseException:
            _close(list(ours.values()))
            raise
        numbers = {theirs: number for number, theirs in enumerate(ours)}
        kept = [
            Handle(
                region=each.region,
                kind=each.kind,
                device=each.device,
                payload=each.payload,
                offset=each.offset,
                fd=None if each.kind == "cuda_ipc" else numbers[fd_of(each, fds)],
            )
            for each in handles
        ]
        return cls(tuple(kept), tuple(ours.values()))

    def close(self) -> None:
        """Idempotent. Descriptors that other agents were given stay open there."""
        _close(self.fds)
        self.fds = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _of_our_own(handle: Handle, fd: int) -> int:
    try:
        if handle.kind == "shm_fd":
            return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        return os.dup(fd)
    except PermissionError as error:
        remedy = "run agent and engine as one user, or set share_memory = false"
        raise OperatorError("not_shareable", f"region {handle.region}: {error.strerror}; {remedy}") from error
    except OSError as error:
        raise EngineError("region_unmappable", f"fd of region {handle.region}: {error.strerror}") from error


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
