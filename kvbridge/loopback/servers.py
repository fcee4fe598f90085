"""A server on this host as a child process: its own process group, its log, whether it answers, its end."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from ..errors import OperatorError

HEALTH_S = 5.0
# The environment of an engine on a CPU. Without the first two, steps stall for 200 ms at random on a two-core machine.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GLOO_SOCKET_IFNAME": "lo"}
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LIBC = ctypes.CDLL(None)


def python_with(engine: str, chosen: Path | None, option: str) -> str:
    """A Python that can import `vllm` or `sglang`, and kvbridge. Default: the one in .venv-ENGINE.

    `option` is the flag that names another. Raises OperatorError (`no_vllm`, `no_sglang`).
    """
    code = "no_vllm" if engine == "vllm" else "no_sglang"
    python = chosen or Path(f".venv-{engine}/bin/python")
    hint = f"give one with {option}, or run make .venv-{engine}/.ready, which makes .venv-{engine}"
    if not os.access(python, os.X_OK):
        raise OperatorError(code, f"no Python at {python}: {hint}")
    asked = f"import importlib.util as u, sys; sys.exit(not (u.find_spec({engine!r}) and u.find_spec('kvbridge')))"
    if subprocess.run([str(python), "-c", asked], capture_output=True).returncode:
        raise OperatorError(code, f"{python} does not have both {engine} and kvbridge: {hint}")
    return str(python.absolute())


def vllm_transfer(socket: str, on_failure: str, role: str = "kv_both") -> str:
    """vLLM's --kv-transfer-config for an engine whose agents are at `socket`, with {rank} in it."""
    transfer = {
        "kv_connector": "KVBridgeConnector",
        "kv_role": role,
        "kv_load_failure_policy": on_failure,
        "kv_connector_extra_config": {"kvbridge_socket": socket},
    }
    return json.dumps(transfer)


class ServerProcess:
    """It runs in the folder of its log, with what it starts in one process group. `environment` is added to ours.

    If `is_bound`, it gets SIGTERM when the thread that started it ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        is_bound: bool = False,
    ) -> None:
        self.host = host
        self.port = port
        self.log = log
        told = ["env", *(f"{key}={value}" for key, value in (environment or {}).items()), *command]
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                told, cwd=log.parent, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                process_group=0,  # not a session: Linux gives all sessions equal shares, whatever `nice` says inside
                preexec_fn=partial(LIBC.prctl, PR_SET_PDEATHSIG, signal.SIGTERM) if is_bound else None,
            )  # fmt: skip

    @property
    def name(self) -> str:
        return self.log.stem

    def is_up(self, path: str = "/health") -> bool:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=HEALTH_S)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", path)
            return connection.getresponse().status == 200
        return False

    def stop(self, seconds: float) -> None:
        """Ask it to stop; after `seconds`, or once it has, kill what is left of its group."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.kill()

    def kill(self) -> None:
        """With the processes that it has started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
