"""What servers with real engines need: an environment, a Python, a port."""

from __future__ import annotations

import os
import random
import socket
import subprocess
from contextlib import closing, suppress
from pathlib import Path

from kvbridge.errors import OperatorError

# The environment of real engines. Without the first two, steps stall for 200 ms at random on a two-core machine.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "GLOO_SOCKET_IFNAME": "lo",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


def python_with(engine: str, chosen: Path | None) -> str:
    """A Python that can import `vllm` or `sglang`, and kvbridge. Default: the one in .venv-ENGINE.

    Raises OperatorError (`no_vllm`, `no_sglang`).
    """
    code = "no_vllm" if engine == "vllm" else "no_sglang"
    python = chosen or Path(f".venv-{engine}/bin/python")
    hint = f"give one with --{engine}-python, or run make .venv-{engine}/.ready, which makes .venv-{engine}"
    if not os.access(python, os.X_OK):
        raise OperatorError(code, f"no Python at {python}: {hint}")
    asked = f"import importlib.util as u, sys; sys.exit(not (u.find_spec({engine!r}) and u.find_spec('kvbridge')))"
    if subprocess.run([str(python), "-c", asked], capture_output=True).returncode:
        raise OperatorError(code, f"{python} does not have both {engine} and kvbridge: {hint}")
    return str(python.absolute())


def free_port() -> int:
    """None that Linux gives by itself to whoever asks for any: an engine listens minutes after it is told its port."""
    while True:
        port = random.SystemRandom().randrange(10000, 32768)
        with closing(socket.socket()) as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
