"""Real agent processes, with this process as their engines: oracle pools in shared memory behind real unix sockets."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kvbridge_proto.engine import Descriptors, Done, Failed, Released, ToEngine
from kvbridge_proto.framing import FRAME_FDS, FrameReader, pack
from kvbridge_proto.status import Status, StatusQuery

from kvbridge.device.handles import export_all
from kvbridge.loopback.engine import SyntheticEngine
from kvbridge.loopback.messages import directory_of, offer_of, want_of
from kvbridge.unix_socket import close_fds
from testing.nursery import HERE, Child, Place, nursery
from testing.oracle import Held, Shape, build

# Tests that run in an engine's environment start agents from the agents' own.
PYTHON = os.environ.get("KVBRIDGE_TEST_AGENT_PYTHON") or sys.executable
START_S = 120.0  # at a load of 15, one of two in namespaces of its own took more than 30 s
ANSWER_S = 120.0
PATIENT_S = 60  # of peers and wants: on a busy machine a process may stand still for many seconds
HOLD_S = 600.0  # of offers: a test that took 16 s took four minutes at a load of 50


class Client:
    """One connection to an agent's unix socket."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(str(path))
        self._reader: FrameReader[ToEngine] = FrameReader(ToEngine)
        self.heard: list[ToEngine] = []
        self.is_closed = False

    def send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        frame, fds = pack(message), tuple(fds)
        while len(fds) > FRAME_FDS:
            socket.send_fds(self.socket, [pack(Descriptors())], list(fds[:FRAME_FDS]))
            fds = fds[FRAME_FDS:]
        sent = socket.send_fds(self.socket, [frame], list(fds)) if fds else 0
        self.socket.sendall(frame[sent:])

    def hear(self, seconds: float) -> bool:
        """Wait for something to come in, this long at most; False if nothing did."""
        ready, _, _ = select.select([self.socket], [], [], seconds)
        if not ready:
            return False
        try:
            received = self.socket.recv(1 << 20)
        except ConnectionResetError:
            received = b""
        self.is_closed = not received
        self.heard += self._reader.messages(received)
        return True

    def wait(self, *kinds: type, request: str | None = None, seconds: float = ANSWER_S) -> Any:
        """The first message of these kinds (about this request); it is taken out. Fails by its deadline."""
        end = time.monotonic() + seconds
        while True:
            for message in self.heard:
                about = getattr(message, "request", getattr(message, "about", None))
                if isinstance(message, kinds) and request in (None, about):
                    self.heard.remove(message)
                    return message
            left = end - time.monotonic()
            assert not self.is_closed, f"the agent closed the connection; heard {self.heard}"
            assert left > 0 and self.hear(left), f"no {kinds} for {request} in {seconds} s; heard {self.heard}"

    def wait_closed(self) -> None:
        end = time.monotonic() + ANSWER_S
        while not self.is_closed:
            assert self.hear(max(0.0, end - time.monotonic())), "the agent did not close the connection"

    def close(self) -> None:
        self.socket.close()


def is_at_rest(status: Status) -> bool:
    """No transfer is under way, and no slot is anything but free."""
    slots = (status.receive_slots, status.send_slots)
    return not status.transfers and not any(each.lent or each.landed or each.quarantined for each in slots)


@dataclass
class AgentProcess:
    """`kvbridge agent`, as an operator starts it."""

    process: Child
    socket: Path
    log: Path
    listen: str = ""

    @property
    def status(self) -> Status:
        with contextlib.closing(Client(self.socket)) as client:
            client.send(StatusQuery())
            return client.wait(Status)

    @property
    def address(self) -> str:
        return self.status.agent.address

    def text(self) -> str:
        return self.log.read_text()

    def kill(self) -> None:
        self.process.kill()

    def stop(self, seconds: float = ANSWER_S) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


@contextlib.contextmanager
def agent(
    folder: Path,
    name: str,
    start_s: float = START_S,
    module: str = "kvbridge.cli",
    nofile: tuple[int, int] | None = None,
    place: Place = HERE,
    is_watching: bool = True,
    **options: Any,
) -> Iterator[AgentProcess]:
    """Start an agent, yield it when it serves, end it. An option that is None is left to the agent's own default.

    `nofile` are the soft and the hard limit of its descriptors. Unless it `is_watching`, the kernel gives it no pidfds.
    """
    path, log = folder / f"{name}.sock", folder / f"{name}.log"
    chosen = {"socket": path, "listen": "tcp://127.0.0.1:0", "name": name, "metrics": "", "receive_slots": 8}
    chosen |= {"send_slots": 4, "slot_bytes": 65536, "connect_s": PATIENT_S, "silence_s": PATIENT_S} | options
    said = {key: value for key, value in chosen.items() if value is not None}
    flags = [
        part
        for key, value in said.items()
        for part in ([f"--{key.replace('_', '-')}"] + ([] if value is True else [str(value)]))
    ]
    before = [] if is_watching else ["-m", module]
    with log.open("ab") as out:
        pid = nursery(PYTHON).fork(
            module if is_watching else "testing.unwatched",
            [*before, "agent", *flags],
            (None, out.fileno(), out.fileno()),
            nofile=nofile,
            place=place,
        )
    process = Child(pid)
    running = AgentProcess(process, path, log)
    try:
        _wait_serving(running, start_s)
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                running.kill()


@contextlib.contextmanager
def attached(agent: AgentProcess, shape: Shape = Shape("nhd")) -> Iterator[OracleEngine]:  # noqa: B008 - it is frozen
    """An engine at this agent."""
    with contextlib.closing(OracleEngine(agent, build(shape))) as engine:
        engine.attach()
        yield engine


def _wait_serving(running: AgentProcess, start_s: float) -> None:
    end = time.monotonic() + start_s
    while running.process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError, AssertionError):
            if running.status.state == "serving":
                return
        time.sleep(0.05)
    raise AssertionError(f"the agent does not serve:\n{running.text()}")


class OracleEngine(SyntheticEngine):
    """An engine rank whose pool the oracle built. `held` is its memory, which it shares with the agent."""

    def __init__(self, agent: AgentProcess, held: Held, agent_uids: Iterable[int] = ()) -> None:
        regions = [torch.from_numpy(region).clone().share_memory_() for region in held.memory]
        super().__init__(str(agent.socket), held.pool, regions, agent_uids=agent_uids)
        self.agent = agent
        self.held = Held(held.pool, tuple(region.numpy() for region in regions))
        self.connect()

    @property
    def inode(self) -> str:
        """Of its first region, by which `proc.mapped` knows it."""
        _, fds = export_all([self.regions[0].untyped_storage()])
        number = os.fstat(fds[0]).st_ino
        close_fds(fds)
        return str(number)

    def directory(self, *agents: AgentProcess) -> None:
        self.client.send(directory_of([each.address for each in agents], self.pool.shard.tp_size))

    def offer(self, request: str, table: list[int], tokens: int, *, first: int = 0, **changes: Any) -> None:
        self.client.send(offer_of(request, tokens, table, first=first, **{"hold_s": HOLD_S} | changes))

    def want(self, request: str, sender: str, table: list[int], tokens: range, **changes: Any) -> None:
        changes = {"deadline_s": PATIENT_S} | changes
        self.client.send(want_of(request, sender, tokens, table, self.pool.groups[0].block_tokens, **changes))

    def answer(self, request: str, seconds: float = ANSWER_S) -> Done | Failed:
        answer: Done | Failed = self.told(Done, Failed, request=request, seconds=seconds)
        return answer

    def done(self, request: str) -> None:
        answer = self.answer(request)
        assert isinstance(answer, Done), answer

    def failed(self, request: str, code: str, seconds: float = ANSWER_S) -> str:
        """The reason."""
        answer = self.answer(request, seconds)
        assert isinstance(answer, Failed) and answer.code == code, answer
        return answer.reason

    def released(self, request: str, seconds: float = ANSWER_S) -> Released:
        answer: Released = self.told(Released, request=request, seconds=seconds)
        return answer

    def wait_closed(self) -> None:
        """Until the agent has closed the connection."""
        end = time.monotonic() + ANSWER_S
        while not self.client.has_ended:
            assert time.monotonic() < end, "the agent did not close the connection"
            self.hear(0.02)
