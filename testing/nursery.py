"""Starts processes by forking one that has imported all of kvbridge, in a tenth of a second instead of four.

A child has its own command line, environment and process id, like any program, but its modules are already imported. It
becomes a child of the process that asked (PR_SET_CHILD_SUBREAPER), which waits for it. It dies with that process. It
may be born in another `Place`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
CLONE_NEWNS = 0x20000  # linux/sched.h
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 1 << 18  # linux/mount.h
START_S = 180.0  # at a load of 26, two cores needed more than 60 s to fork once
RUN_S = 240.0  # less than the tests' own limit: a command that hangs is killed and its output shown
MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where a child is born: in namespaces of process `pid`, of these kinds of `/proc/PID/ns`, with more `environment`.

    With `mounts`, it has a mount namespace of its own and in it these: (source, target, type); the type "" binds.
    """

    pid: int = 0
    kinds: tuple[str, ...] = ()
    mounts: tuple[tuple[str, str, str], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


HERE = Place()


class Child:
    """A child process, with the methods of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._ended)
        return self.returncode

    def is_dead(self, seconds: float = 0.0) -> bool:
        """Whether it ends within `seconds`."""
        if self.poll() is None:
            select.select([self._ended], [], [], seconds)
        return self.poll() is not None

    def is_stopped(self, seconds: float) -> bool:
        """Whether SIGSTOP has stopped it within `seconds`."""
        end = time.monotonic() + seconds
        while _state(self.pid) != "T":
            if self.is_dead() or time.monotonic() >= end:
                return False
            time.sleep(0.01)
        return True

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.poll() is None and not select.select([self._ended], [], [], timeout)[0]:
            assert timeout is not None
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        returncode = self.poll()
        assert returncode is not None
        return returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        assert self.is_dead(60.0), f"{self.pid} does not die"

    def end(self, seconds: float = 10.0) -> None:
        """Ask it to end, even if it is stopped. Kill it if it does not."""
        self.send_signal(signal.SIGCONT)
        self.terminate()
        if not self.is_dead(seconds):
            self.kill()


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


class PipedChild(Child):
    """A child that we speak to: `stdin` and `stdout` are our ends of its streams. `errors` None means our stderr."""

    def __init__(
        self,
        module: str,
        *arguments: object,
        errors: int | None = None,
        env: Mapping[str, str] | None = None,
        place: Place = HERE,
    ) -> None:
        heard, told = os.pipe()
        read, said = os.pipe()
        if errors is None:
            assert sys.__stderr__ is not None
            errors = sys.__stderr__.fileno()
        super().__init__(nursery().fork(module, arguments, (heard, said, errors), env, place=place))
        os.close(heard)
        os.close(said)
        self.stdin, self.stdout = os.fdopen(told, "wb"), os.fdopen(read, "rb")

    def close(self) -> None:
        """Kill it, even if it is stopped."""
        self.kill()
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Nursery:
    """Forks processes of one Python."""

    def __init__(self, python: str = sys.executable) -> None:
        assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(START_S)
        with theirs:
            command = [python, "-m", "testing.nursery"]
            env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # otherwise its import starts threads
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=theirs.fileno(), stdout=subprocess.DEVNULL
            )
        atexit.register(self.close)

    def fork(
        self,
        module: str,
        arguments: Sequence[object],
        streams: tuple[int | None, int, int],
        env: Mapping[str, str] | None = None,
        nofile: tuple[int, int] | None = None,
        place: Place = HERE,
    ) -> int:
        """Start a child that runs a module as a program. Returns its process id, as we see it.

        `streams` are its standard input (None is empty), output and error. `env` is added to our environment. `nofile`
        are the limits of its descriptors.
        """
        asked: dict[str, Any] = {
            "module": module,
            "arguments": list(map(str, arguments)),
            "nofile": nofile,
            "cwd": os.getcwd(),
            "env": {**os.environ, **place.environment, **(env or {})},
            "place": asdict(place),
        }
        told, tells = socket.socketpair()  # for this child alone
        with open(os.devnull, "rb") as empty, told:
            stdin, stdout, stderr = streams
            with tells:
                fds = [empty.fileno() if stdin is None else stdin, stdout, stderr, tells.fileno()]
                socket.send_fds(self._socket, [json.dumps(asked).encode()], fds)
            told.settimeout(START_S)
            with told.makefile("rb") as answer:  # it ends once the child is ours
                return int(answer.read())

    def run(
        self,
        module: str,
        *arguments: object,
        timeout_s: float = RUN_S,
        env: Mapping[str, str] | None = None,
        place: Place = HERE,
    ) -> subprocess.CompletedProcess[str]:
        """Run a module until it ends, as `subprocess.run(text=True)`. Raises subprocess.TimeoutExpired."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            child = Child(self.fork(module, arguments, (None, out.fileno(), errors.fileno()), env, place=place))
            try:
                code = child.wait(timeout_s)
            finally:
                child.kill()
            for stream in (out, errors):
                stream.seek(0)
            command = [module, *map(str, arguments)]
            return subprocess.CompletedProcess(command, code, out.read().decode(), errors.read().decode())

    def close(self) -> None:
        self._socket.close()
        self._process.wait(10)


@functools.cache
def nursery(python: str = sys.executable) -> Nursery:
    """The nursery of this process, made when it is first needed."""
    return Nursery(python)


def kvbridge(
    *arguments: object, timeout_s: float = RUN_S, place: Place = HERE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command `kvbridge` until it ends, for a terminal of 160 columns."""
    env = {"COLUMNS": "160", **environment}
    return nursery().run("kvbridge.cli", *arguments, timeout_s=timeout_s, env=env, place=place)


def _serve(asking: socket.socket) -> dict[str, Any] | None:
    """Fork for whoever asks. Returns in each child what it is to run, and None when nobody is left to ask."""
    while True:
        message, fds, _, _ = socket.recv_fds(asking, MESSAGE_BYTES, 4)
        if not message:
            return None
        if (between := os.fork()) == 0:
            return _born(json.loads(message), fds)
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def _born(told: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Enter the place and fork the child there; returns in it, once it belongs to the one that asked."""
    *streams, tells = fds
    _enter(Place(**told["place"]))
    end_of_between = os.pidfd_open(os.getpid())
    if pid := os.fork():  # it enters a PID namespace, which we do not
        with contextlib.suppress(OSError):  # who asked may have given up
            os.write(tells, str(pid).encode())
        os._exit(0)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    select.select([end_of_between], [], [])
    for fd in (*fds, end_of_between):
        os.close(fd)
    return told


def _enter(place: Place) -> None:
    """Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: Any) -> None:
        if getattr(libc, name)(*arguments):
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    namespaces = [os.open(f"/proc/{place.pid}/ns/{kind}", os.O_RDONLY) for kind in place.kinds]
    for fd in namespaces:
        call("setns", fd, 0)
        os.close(fd)
    if place.mounts:
        call("unshare", CLONE_NEWNS)
        call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    for source, target, kind in place.mounts:
        call("mount", source.encode(), target.encode(), kind.encode() or None, 0 if kind else MS_BIND, None)


def _become(told: dict[str, Any]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.environ.clear()
    os.environ.update(told["env"])
    os.chdir(told["cwd"])
    if told["nofile"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, tuple(told["nofile"]))
    sys.modules.pop(told["module"], None)  # it is run anew, not imported
    sys.argv = [told["module"], *told["arguments"]]
    _end(_ran(told["module"]))


def _ran(module: str) -> int:
    """Run a module. Returns the exit code that Python would give it."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        sys.stderr.write(f"{ended.code}\n")
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> None:
    """End as Python does, without tearing down the imported modules, which takes most of a second."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    importlib.import_module("kvbridge.agent.daemon")
    from kvbridge.commands import app

    app.command()(["config", "show"], standalone_mode=False)  # so that all is imported and built
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads, of which a child would have one"
    gc.collect()
    gc.freeze()  # so that collections in a child copy no pages of imported modules
    asking = socket.socket(fileno=os.dup(0))
    told = _serve(asking)
    asking.close()
    if told is not None:
        _become(told)


if __name__ == "__main__":
    main()
