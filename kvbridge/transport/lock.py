"""The lock beside an agent's socket: its holder is the only agent there, and knows that earlier holders are dead.

The kernel grants a lock (flock) to nobody while a process that holds it lives. So the file itself lists its holders,
and for the present one the list proves that the earlier ones are dead. It proves this only for those under the same
kernel: a file that several hosts see (or sandboxes with kernels of their own) may be locked in each of them. An agent
takes the lock before it opens anything that can write others' memory, and releases it after it has closed that. If it
is killed, the kernel does the same: it closes first what was opened last. What a dead process left in its kernel's send
buffers (UCX over TCP) may still come later. The digest catches it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
from pathlib import Path

from ..errors import OperatorError

log = logging.getLogger("kvbridge.local")

KEPT_INCARNATIONS = 64  # incarnations; a peer that still waits for proof about an older one has to rebuild its slots
KERNEL = Path("/proc/sys/kernel/random/boot_id")
LINE_BYTES = 54
INCARNATION = re.compile(rb"[0-9a-f]{16}")
PATH_BYTES = 107  # sun_path, less its NUL


class Lock:
    """Held until `close` by the agent that listens, or will listen, at the path `socket`.

    Raises OperatorError if another agent holds it, or if others could put another socket there. `before` are the
    incarnations that held it earlier.
    """

    def __init__(self, socket: str | Path, incarnation: str) -> None:
        self.socket = Path(socket)
        size = len(os.fsencode(self.socket))
        if size > PATH_BYTES:
            raise OperatorError("socket_path_too_long", f"socket path: {size} bytes, limit {PATH_BYTES}")
        try:
            check_folder(self.socket)
            self._take(incarnation)
        except FileNotFoundError:
            reason = f"{self.socket.parent} is not there; as the agent's user: mkdir -p -m 750 {self.socket.parent}"
            raise OperatorError("socket_unavailable", f"socket {self.socket}: {reason}") from None
        except OSError as error:
            raise OperatorError("socket_unavailable", f"socket {self.socket}: {error}") from error

    def close(self) -> None:
        os.close(self._fd)

    def _take(self, incarnation: str) -> None:
        path = f"{self.socket}.lock"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
                raise OperatorError("socket_unsafe", f"socket {self.socket}: {path} is not a file of ours alone")
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OperatorError("socket_in_use", f"socket {self.socket}: another agent holds {path}") from None
            self.before = self._inherit(incarnation)
        except BaseException:
            os.close(self._fd)
            raise

    def _inherit(self, incarnation: str) -> frozenset[str]:
        """Return the earlier incarnations, and add ours to the list for the next agent."""
        kernel = KERNEL.read_bytes().strip()
        recorded = os.pread(self._fd, KEPT_INCARNATIONS * LINE_BYTES, 0)
        whole = recorded[: recorded.rfind(b"\n") + 1].splitlines()  # a cut-off line could be longer than it looks
        lines = [line.partition(b" ") for line in whole]
        before = [found.decode() for found, _, under in lines if INCARNATION.fullmatch(found) and under == kernel]
        kept = b"".join(b"%s %s\n" % (each.encode(), kernel) for each in [*before, incarnation][-KEPT_INCARNATIONS:])
        try:  # all lines have one length: a write that is cut off leaves the others as they were
            if (written := os.pwrite(self._fd, kept, 0)) < len(kept):
                raise OSError(errno.ENOSPC, f"{written} of {len(kept)} bytes")
            os.ftruncate(self._fd, len(kept))  # the rest of a longer line could look like an incarnation
        except OSError as error:
            log.warning("our incarnation was not written down, our successor will not know us: %s", error)
        return frozenset(before)


def check_folder(socket: Path) -> None:
    """Raises OperatorError `socket_unsafe` if others could put another socket there, OSError if there is no folder.

    A folder that others may write is safe if it is sticky, like /tmp.
    """
    folder = socket.parent
    found = folder.stat()
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        mode = f"{stat.S_IMODE(found.st_mode):04o}"
        reason = f"{folder} has mode {mode}: anybody could replace it; chmod o-w (or +t) {folder}"
        raise OperatorError("socket_unsafe", f"socket {socket}: {reason}")
    if found.st_uid not in (0, os.geteuid()):
        raise OperatorError("socket_unsafe", f"socket {socket}: {folder} belongs to uid {found.st_uid}")
