"""A real vLLM engine in a process of its own, commanded over a socket pair. Many requests run at once.

The test's side (`EngineProcess`) needs no vLLM. The engine's side runs
`tests.system.engines.engine_loop` with the Python that has vLLM.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from demo.processes import SETTINGS
from demo.rows import SavedRows
from kvbridge.adapters.vllm.on_cpu import SETTINGS as VLLM_SETTINGS

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class EngineConfig:
    """How the engine is started. `cores` are pinned, one a tensor-parallel rank ("0" or "0|1")."""

    model: str
    block_size: int = 32
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    max_model_len: int = 2048
    enable_prefix_caching: bool = False
    cores: str = "0"
    engine_id: str = ""
    on_failure: str = "recompute"
    connector: dict[str, Any] | None = None  # kv_connector_extra_config; None runs the engine alone
    more: dict[str, Any] = field(default_factory=dict)  # any other engine argument
    environment: dict[str, str] = field(default_factory=dict)  # of the engine's process, beside this one's


@dataclass(frozen=True)
class Result:
    """A finished request. `params` is what a proxy would hand on; `cached` counts prompt tokens not computed here.

    `seconds` passed in the engine's process from handing it the request to its last token, `first_s` to its first, and
    `came_s` until its scheduler heard that KV had come; 0 if none did.
    `others` are the other answers of a request for several.
    """

    tokens: tuple[int, ...]
    reason: str
    params: dict[str, Any] | None
    cached: int
    seconds: float
    first_s: float
    came_s: float
    others: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Rows(SavedRows):
    """With the codec of each plane, and its scales."""

    codecs: dict[tuple[int, str], dict[str, Any]]


class EngineDied(RuntimeError):
    """The engine's process ended, or said nothing in time; the text holds the end of its log."""


class EngineProcess:
    """Start it, `wait_ready`, use it, `close` it (or use `with`). `python` must have vLLM; logs go to `log`."""

    def __init__(self, config: EngineConfig, log: Path, python: str = sys.executable) -> None:
        self.config = config
        self.log = log
        self._ours, theirs = socket.socketpair()
        self._buffer = b""
        self._finished: dict[str, Result] = {}
        self._answers: dict[str, list[dict[str, Any]]] = {}
        # Ranks that wait for each other spin: on as many cores as there are of them the agents would get none.
        meekly = ["nice", "-n", "10"] if config.tensor_parallel_size > 1 else []
        with theirs, log.open("wb") as out:
            self.process = subprocess.Popen(
                [
                    *meekly,
                    python,
                    "-m",
                    "tests.system.engines.engine_loop",
                    str(theirs.fileno()),
                    json.dumps(asdict(config)),
                ],
                cwd=ROOT,
                env=os.environ | _environment(config) | config.environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self, timeout_s: float = 180.0) -> None:
        self._answer("ready", timeout_s)

    def submit(
        self,
        request: str,
        tokens: Sequence[int],
        max_tokens: int = 1,
        params: dict[str, Any] | None = None,
        dump: Path | None = None,
        answers: int = 1,
    ) -> None:
        """Greedy, never stops early. `params` are the kv_transfer_params.

        With `dump`, the rows of all tokens but the prompt's last are kept in the step that ends the request, before
        its blocks can be another's: ask for them with `dumped`.
        """
        kept = None if dump is None else (0, len(tokens) - 1, str(dump))
        what = {"tokens": list(tokens), "max_tokens": max_tokens, "params": params, "dump": kept, "answers": answers}
        self._say(op="submit", request=request, **what)

    def dumped(self, request: str, path: Path) -> Rows:
        """What `submit(dump=path)` kept of a request whose result is here."""
        (answer,) = [each for each in self._answers.get("dumped", ()) if each["request"] == request]
        self._answers["dumped"].remove(answer)
        return _load(answer, path)

    def result(self, request: str, timeout_s: float = 60.0) -> Result:
        """Wait for one request; what others finish meanwhile is kept."""
        end = time.monotonic() + timeout_s
        while request not in self._finished:
            self._hear(end, f"{request} to finish")
        return self._finished.pop(request)

    def take(self, timeout_s: float) -> dict[str, Result]:
        """What has finished by now; waits so long for the first word of the engine."""
        if not self._finished and select.select([self._ours], [], [], timeout_s)[0]:
            self._hear(time.monotonic(), "what finished")
        finished, self._finished = self._finished, {}
        return finished

    def run(
        self, request: str, tokens: Sequence[int], max_tokens: int = 1, params: dict[str, Any] | None = None
    ) -> Result:
        self.submit(request, tokens, max_tokens, params)
        return self.result(request)

    def results(self, requests: Iterable[str], timeout_s: float = 120.0) -> dict[str, Result]:
        end = time.monotonic() + timeout_s
        return {request: self.result(request, end - time.monotonic()) for request in requests}

    def abort(self, request: str) -> None:
        """The request will have no result, unless it finished before."""
        self._say(op="abort", request=request)

    def dump(self, request: str, first: int, end: int, path: Path, timeout_s: float = 60.0) -> Rows:
        """KV of tokens [first, end) of a request that has or had blocks here; soon after it ended, or others use
        them. `path` is a scratch file."""
        self._say(op="dump", request=request, first=first, end=end, path=str(path))
        return _load(self._answer("dumped", timeout_s), path)

    def states(self, request: str, tokens: int, path: Path) -> list[dict[str, np.ndarray]]:
        """Each rank's recurrent states, "LAYER.PART" -> bytes: as they came, or after `tokens` tokens computed here."""
        ranks = self.ask("states", 60.0, request=request, tokens=tokens, path=str(path))["ranks"]
        with np.load(path) as arrays:
            found: list[dict[str, np.ndarray]] = [{} for _ in range(ranks)]
            for key in arrays:
                rank, _, name = key.partition(".")
                found[int(rank)][name] = arrays[key]
        return found

    def state(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """requests: still known to the scheduler; free_blocks, blocks: of its pool; steps, preempted: so far; link: the
        connector's connection to its agent; cpu_s: of the process, so far."""
        return self.ask("state", timeout_s)

    def wait_empty(self, timeout_s: float = 30.0) -> None:
        """Wait until the scheduler holds nothing: every block is free again."""
        end = time.monotonic() + timeout_s
        while (state := self.state())["requests"] or state["free_blocks"] != state["blocks"]:
            if time.monotonic() > end:
                raise EngineDied(f"not empty within {timeout_s} s: {state}\n{self.tail()}")
            time.sleep(0.05)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._say(op="quit")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.kill()

    def kill(self) -> None:
        """The engine and its workers, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._ours.close()

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def ask(self, op: str, timeout_s: float, **more: Any) -> dict[str, Any]:
        """What the loop's own op of this name answers."""
        self._say(op=op, **more)
        return self._answer(op, timeout_s)

    def _say(self, **message: Any) -> None:
        self._ours.sendall(json.dumps(message).encode() + b"\n")

    def _answer(self, kind: str, timeout_s: float) -> dict[str, Any]:
        end = time.monotonic() + timeout_s
        while not self._answers.get(kind):
            self._hear(end, kind)
        return self._answers[kind].pop(0)

    def _hear(self, end: float, awaited: str) -> None:
        ready, _, _ = select.select([self._ours], [], [], max(0.0, end - time.monotonic()))
        received = self._ours.recv(1 << 20) if ready else b""
        if not received:
            what = "died" if ready else "was silent"
            raise EngineDied(f"engine {what} (exit {self.process.poll()}) while waiting for {awaited}\n{self.tail()}")
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        for line in lines:
            message = json.loads(line)
            kind = message.pop("kind")
            if kind == "finished":
                request = message.pop("request")
                tokens, *others = (tuple(each) for each in message.pop("tokens"))
                self._finished[request] = Result(tokens, others=tuple(others), **message)
            else:
                self._answers.setdefault(kind, []).append(message)


def _load(answer: dict[str, Any], path: Path) -> Rows:
    if "error" in answer:
        raise ValueError(answer["error"])
    rows, codecs = {}, {}
    with np.load(path) as arrays:
        for key, codec in answer["codecs"].items():
            layer, part = key.split(".")
            rows[int(layer), part] = arrays[key].swapaxes(0, 1)
            codecs[int(layer), part] = codec
    names = {codec["name"] for codec in codecs.values()}
    return Rows(rows, names.pop() if len(names) == 1 else "several", codecs)


def _environment(config: EngineConfig) -> dict[str, str]:
    return {
        **SETTINGS,
        **VLLM_SETTINGS,
        "VLLM_CPU_OMP_THREADS_BIND": config.cores,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "PYTHONUNBUFFERED": "1",
    }
