"""Processes of the GPU bench: agents as an operator starts them, children that answer JSON lines, the MPS daemon."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from kvbridge_proto.status import TraceEntry

from bench.record import ROOT
from bench.scenario import Problem
from kvbridge.errors import KVBridgeError
from kvbridge.local_agents import ask_trace
from kvbridge.loopback.processes import AgentProcess, tail

STOP_S = 15.0


class Child:
    """A module of the bench that serves commands (`serve`) in a process of its own."""

    def __init__(self, module: str, log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = log.stem
        self._log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **(env or {})},
            )

    def ask(self, do: str, *, seconds: float = 90.0, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer. Raises Problem."""
        self.say(do, **arguments)
        return self.hear(seconds)

    def say(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Problem(f"{self.name} is gone: {self.tail()}") from None

    def hear(self, seconds: float = 90.0) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            raise Problem(f"{self.name} {'ended' if ready else f'is silent for {seconds:g} s'}: {self.tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Problem(f"{self.name}: {answer['error']}")
        return answer

    def tail(self) -> str:
        return tail(self._log)

    def end(self) -> None:
        end([self.process])


def serve(commands: object) -> None:
    """Answer each line of JSON with one, until stdin ends. A command is a method of `commands`."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        answer(commands, line)


def answer(commands: object, line: str) -> None:
    told = json.loads(line)
    try:
        found = getattr(commands, told.pop("do"))(**told) or {}
    except Exception as error:  # the edge of this process: the bench goes on
        found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found), flush=True)


def ask_all(children: Sequence[Child], do: str, arguments: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Send the same command to several at once. Waits for every answer before it raises Problem."""
    for child, each in zip(children, arguments, strict=True):
        child.say(do, **each)
    answers, problems = [], []
    for child in children:
        try:
            answers.append(child.hear())
        except Problem as problem:
            problems.append(str(problem))
    if problems:
        raise Problem("; ".join(problems))
    return answers


class BenchAgent(AgentProcess):
    """An agent of the bench. What is wrong with it is a Problem."""

    def __init__(
        self, sockets: Path, logs: Path, name: str, options: dict[str, str], env: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(sockets, name, options, env, log=str((logs / f"{name}.log").absolute()))

    def wait_serving(self) -> None:
        try:
            super().wait_serving()
        except KVBridgeError as error:
            raise Problem(str(error)) from None

    def check_alive(self) -> None:
        if self.process.poll() is not None:
            raise Problem(f"agent {self.name} ended with {self.process.returncode}; its log ends:\n{tail(self.log)}")

    def trace(self, names: Sequence[str]) -> tuple[TraceEntry, ...]:
        """What its journal says of these requests and of their transfers."""
        return ask_trace(self.socket, names, 5.0).entries


def end(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """Ask all to stop, then kill those that did not."""
    for process in processes:
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + STOP_S
    for process in processes:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """Run our own CUDA MPS daemon. Yields the environment that its clients need. Raises Problem."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        raise Problem("nvidia-cuda-mps-control is not on PATH")
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        env = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in env.values():
            Path(path).mkdir()
        whole = {**os.environ, **env}
        started = subprocess.run([control, "-d"], env=whole, capture_output=True, text=True, timeout=20)
        if started.returncode:
            raise Problem(f"MPS did not start: {started.stdout}{started.stderr}".strip())
        try:
            yield env
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([control], env=whole, input="quit\n", capture_output=True, text=True, timeout=30)
