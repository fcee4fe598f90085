"""The lock beside an agent's socket: who holds it is the one agent there, and knows that those before it are dead.

The kernel gives a lock (flock) to nobody while a process lives that holds it, and a process that is dead has closed all
its connections. So a list of those that held it, kept in the file itself, is proof of their death for who holds it now.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
from pathlib import Path

from ..errors import OperatorError

log = logging.getLogger("kvbridge.local")

KEPT = 64  # boots: whoever still waits for news of an older one has to rebuild its slots
LINE_BYTES = 17
BOOT = re.compile(rb"[0-9a-f]{16}")


class Lock:
    """Taken on construction, until `close`. Raises OperatorError if another agent holds it or it is not ours alone.

    `before` are the boots that have held it.
    """

    def __init__(self, socket: Path, boot: str) -> None:
        path = f"{socket}.lock"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
                raise OperatorError("socket_unsafe", f"socket {socket}: {path} is not a file of ours alone")
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OperatorError("socket_in_use", f"socket {socket}: another agent holds {path}") from None
            self.before = self._inherit(boot)
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        os.close(self._fd)

    def _inherit(self, boot: str) -> frozenset[str]:
        """Who was here before; and write down that we are, for whoever comes next."""
        lines = os.pread(self._fd, KEPT * LINE_BYTES, 0).splitlines()
        before = [line.decode() for line in lines if BOOT.fullmatch(line)]
        kept = "".join(f"{each}\n" for each in [*before, boot][-KEPT:]).encode()
        try:
            os.pwrite(self._fd, kept, 0)  # lines of one length each: cut off anywhere, the others stay what they were
        except OSError as error:
            log.warning("our boot was not written down, our successor will not know us: %s", error)
        return frozenset(before)
