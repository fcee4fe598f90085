"""Runs `python -m ...` or a script where the kernel gives no pidfd: `python -m testing.unwatched ARGUMENTS`."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

SET_NO_NEW_PRIVS, SET_SECCOMP, FILTER = 38, 22, 2
NUMBER, OPTION = 0, 16 + 2 * 8  # where seccomp_data has the system call's number, and its third argument
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # BPF: load a word, jump if it is equal to this, return
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
PIDFD_OPEN, GETSOCKOPT = 434, 209 if platform.machine() == "aarch64" else 55
SO_PEERPIDFD = 77


def forbid() -> None:
    """From here on, in this process and its children, neither `pidfd_open` nor SO_PEERPIDFD works."""
    program = b"".join(
        struct.pack("HBBI", code, yes, no, value)
        for code, yes, no, value in (
            (LOAD, 0, 0, NUMBER),
            (EQUAL, 4, 0, PIDFD_OPEN),
            (EQUAL, 0, 2, GETSOCKOPT),
            (LOAD, 0, 0, OPTION),
            (EQUAL, 1, 0, SO_PEERPIDFD),
            (RETURN, 0, 0, ALLOW),
            (RETURN, 0, 0, ERRNO | errno.EPERM),
        )
    )
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    for arguments in ((SET_NO_NEW_PRIVS, 1, 0, 0, 0), (SET_SECCOMP, FILTER, ctypes.create_string_buffer(fprog), 0, 0)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    forbid()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
