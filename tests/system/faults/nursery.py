"""Forks agents that have imported everything already: `python -m tests.system.faults.nursery`, told in lines of JSON.

An agent is a process of its own, as if an operator had started it, but in a tenth of the time; a matrix of faults
starts hundreds. Nothing has begun to run before the fork: no thread, no fabric, no socket.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

import torch  # noqa: F401 - imported here so that no agent has to
import uvloop  # noqa: F401
import zmq  # noqa: F401

import kvbridge.agent.daemon  # noqa: F401
from kvbridge.cli import main

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def serve() -> None:
    """Say the pid of each agent; they end with us."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        told = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run(**told)
        print(pid, flush=True)


def run(argv: list[str], log: str, environment: dict[str, str]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.closerange(3, 256)
    os.environ.update(environment)
    sys.argv = ["kvbridge", "agent", *argv]
    code = 70
    try:
        main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
