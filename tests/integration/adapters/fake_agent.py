"""The agent's end of the unix socket, for tests of what sits inside an engine. It answers as the test tells it.

It runs in the test's own thread, one `pump` at a time, so that the test decides the order of events. `alive` is for the
few places where an engine waits.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from kvbridge_proto.common import AgentCard
from kvbridge_proto.engine import Attach, Attached, Detached, Refused, Released, ToAgent, ToEngine, Withdraw
from kvbridge_proto.framing import FrameReader, pack

from kvbridge.adapters.engine.client import pidfd_of
from kvbridge.device.fence import FencePage

T = TypeVar("T")
FAKES: weakref.WeakValueDictionary[str, FakeAgent] = weakref.WeakValueDictionary()
SQUATTER = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("up", flush=True)
while True:
    engine, _ = listener.accept()
    print(engine.recv(1 << 16).hex(), flush=True)
"""


class FakeAgent:
    """One agent with one engine. `heard` keeps everything but Attach; `attaches` counts those.

    `fence` is the page that came with the last Attach, if one did.
    """

    def __init__(self, path: Path, address: str = "tcp://127.0.0.1:7700", incarnation: str = "incarnation-1") -> None:
        self.path = path
        self.address = address
        self.incarnation = incarnation
        self.attaches: list[Attach] = []
        self.heard: list[Any] = []
        self.fence: FencePage | None = None
        self.is_answering_attach = True
        self.is_shared = False  # whether it says that other agents read our memory on its word
        self.refusal: Refused | None = None  # what it says to Attach instead
        self.is_answering_withdrawals = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)
        self._engine: socket.socket | None = None
        self._pidfd, self._life = os.pipe()
        FAKES[str(path)] = self
        self._reader: FrameReader[Any] = FrameReader(ToAgent)

    def pump(self) -> None:
        """Take the connection if there is one, hear all that came."""
        if self._engine is None and self._listener.fileno() != -1:
            with contextlib.suppress(BlockingIOError):
                self._engine, _ = self._listener.accept()
                self._engine.setblocking(False)
                self._reader = FrameReader(ToAgent)
        while self._engine is not None:
            try:
                received, fds, _, _ = socket.recv_fds(self._engine, 1 << 20, 64)
            except BlockingIOError:
                return
            try:
                for message in self._reader.messages(received):
                    self._hear(message, fds)
            finally:
                for fd in fds:
                    os.close(fd)
            if not received:
                self.let_go()
                return

    def _hear(self, message: Any, fds: list[int]) -> None:
        if not isinstance(message, Attach):
            self.heard.append(message)
            if isinstance(message, Withdraw) and self.is_answering_withdrawals:
                self.say(Released(number=message.number, request="withdrawn", code="withdrawn"))
            return
        self.attaches.append(message)
        if message.fence_fd is not None:
            self.fence = FencePage(fds[message.fence_fd])
        if self.refusal is not None:
            self.say(self.refusal)
        elif self.is_answering_attach:
            agent = AgentCard(name="fake", incarnation=self.incarnation, address=self.address, version="1")
            self.say(Attached(version=1, epoch=len(self.attaches), agent=agent, is_shared=self.is_shared))

    def say(self, message: ToEngine) -> None:
        assert self._engine is not None, "no engine is connected"
        self._engine.sendall(pack(message))

    def take(self, kind: type[T]) -> list[T]:
        """What was heard of this kind since the last time."""
        self.pump()
        taken = [message for message in self.heard if isinstance(message, kind)]
        self.heard = [message for message in self.heard if not isinstance(message, kind)]
        return taken

    def one(self, kind: type[T]) -> T:
        (message,) = self.take(kind)
        return message

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Pump in a thread, for what waits for an agent."""
        stop = threading.Event()

        def live() -> None:
            while not stop.wait(0.002):
                self.pump()

        thread = threading.Thread(target=live)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.pump()  # what was said last

    def let_go(self) -> None:
        """As an agent that lives: the word, then the end."""
        if self._engine is not None:
            with contextlib.suppress(BrokenPipeError):
                self.say(Detached(epoch=len(self.attaches)))
            self.hang_up()

    def hang_up(self) -> None:
        """As a process that is being killed: its sockets are closed, and it is not gone yet."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def vanish(self) -> None:
        """Its process is gone."""
        if self._life >= 0:
            os.close(self._life)
            self._life = -1

    def die(self) -> None:
        """As a killed process: the connection and the listening socket are gone, and so is the process."""
        self.hang_up()
        self._listener.close()
        self.path.unlink(missing_ok=True)
        self.vanish()

    def __del__(self) -> None:
        self.vanish()
        os.close(self._pidfd)


def fake_pidfd(end: socket.socket) -> int:
    """What `pidfd_of` is to a real agent, for those of this process."""
    fake = FAKES.get(end.getpeername())
    return pidfd_of(end) if fake is None else os.dup(fake._pidfd)


@contextlib.contextmanager
def squatter(path: Path) -> Iterator[tuple[int, Callable[[], bytes]]]:
    """Another user who listens in an agent's place: its pid, and what the next that connects says first. Needs root."""
    command = ["/usr/bin/env", "python3", "-c", SQUATTER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, user=65534, group=65534) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
            lines = process.stdout
            yield process.pid, lambda: bytes.fromhex(lines.readline().decode())
        finally:
            process.kill()
