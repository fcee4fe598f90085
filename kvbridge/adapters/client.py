"""The engine's end of the agent's unix socket: never blocks a step, opens no thread, raises nothing into the engine.

After start-up the engine's own steps drive it: `send` queues, `poll` moves bytes both ways. Whatever goes wrong makes
the connection lost and says why; the caller fails what it was waiting for and may `reconnect`.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvbridge_proto.codec import LIMITS, BadFrame, Limits
from kvbridge_proto.engine import Abandon, Attach, Detach, Done, Offer, Released, ToAgent, ToEngine, Want, Withdraw
from kvbridge_proto.stream import HEADER, StreamReader, pack

from ..errors import OperatorError
from ..failpoints import failpoint

RETRY_S = 0.05
MAX_FDS = 64
RECEIVE_BYTES = 1 << 18
_CREDENTIALS = struct.Struct("iII")
POLL_BYTES = 4 << 20  # at most this much is read in one poll: an agent must not be able to hold up a step


@dataclass(slots=True)
class _Frame:
    """What is left of one frame; `fds` are ours, and leave with its first byte."""

    left: memoryview
    fds: list[int]


class EngineClient:
    """One connection to the agent at `path`, used from one thread.

    What is sent gives our memory away, so nothing is before the kernel has said that who listens there is our own user,
    root or one of `agent_uids`: while the agent is down, whoever may write in the folder can listen at its path.
    `unsent_bytes` and `stall_s` bound how much, and how long, an agent that does not read may hold back. A child
    forked while connected drops it (`drop_copy`), or the agent could not see this process die.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        agent_uids: Iterable[int] = (),
        unsent_bytes: int = 64 << 20,
        stall_s: float = 30.0,
        limits: Limits = LIMITS,
    ) -> None:
        self.path = os.fspath(path)
        self.why = "not connected yet"
        self.is_foreign = False  # whether the last try found somebody else's process at `path`
        self._agent_uids = frozenset([0, os.geteuid(), *agent_uids])
        self._unsent_limit = unsent_bytes
        self._stall_s = stall_s
        self._limits = limits
        self._socket: socket.socket | None = None
        self._reader: StreamReader[ToEngine] = StreamReader(ToEngine, limits)
        self._unsent: deque[_Frame] = deque()
        self._unsent_bytes = 0
        self._moved_at = 0.0

    def __repr__(self) -> str:
        return f"<EngineClient {self.path} {'connected' if self.is_connected else f'lost: {self.why}'}>"

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

    def connect(self, timeout_s: float) -> bool:
        """Wait until the agent is there, for start-up only. False, with `why`, if it is not in time."""
        end = time.monotonic() + timeout_s
        while not self.reconnect():
            if time.monotonic() + RETRY_S > end:
                self.why = f"no agent at {self.path} within {timeout_s} s: {self.why}"
                return False
            time.sleep(RETRY_S)
        return True

    def reconnect(self) -> bool:
        """Try once, without waiting; drops what was queued before. False, with `why`, if the agent is not there."""
        self.close("connecting anew")
        attempt = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        attempt.setblocking(False)
        try:
            attempt.connect(self.path)
            self._check_uid(attempt)
        except (OSError, OperatorError) as error:
            attempt.close()
            self.is_foreign = isinstance(error, OperatorError)
            self.why = f"{error.code}: {error}" if isinstance(error, OperatorError) else str(error)
            return False
        self._socket, self.is_foreign = attempt, False
        self._reader = StreamReader(ToEngine, self._limits)
        self._moved_at = time.monotonic()
        self.why = ""
        return True

    def _check_uid(self, attempt: socket.socket) -> None:
        """OperatorError unless the process that began to listen there was one that we may give our memory to."""
        credentials = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid not in self._agent_uids:
            reason = f"agent_uids: pid {pid} of uid {uid} listens at {self.path}, allowed {sorted(self._agent_uids)}"
            raise OperatorError("uid_not_allowed", reason)

    def send(self, message: ToAgent, fds: Sequence[int] = ()) -> bool:
        """Queue a message, with descriptors the caller may close at once. Never blocks.

        False if it will not be sent: the connection is lost, or no agent would take such a message (it cannot be
        encoded, is too large, has too many or bad descriptors) and the connection stays. `why` says which.
        """
        if self._socket is None:
            return False
        try:
            frame = pack(message)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:  # a lone surrogate is a ValueError
            self.why = f"message: {type(message).__name__} cannot be encoded: {error}"
            return False
        if len(frame) - HEADER.size > self._limits.frame_bytes:
            self.why = f"frame_bytes: got {len(frame) - HEADER.size}, limit {self._limits.frame_bytes}"
            return False
        if self._unsent_bytes + len(frame) > self._unsent_limit:
            self._lose(f"unsent_bytes: limit {self._unsent_limit}: the agent does not read")
            return False
        try:
            ours = _duplicate(fds)
        except OSError as error:
            self.why = f"fds: {error}"
            return False
        if not self._unsent:
            self._moved_at = time.monotonic()
        self._unsent.append(_Frame(memoryview(frame), ours))
        self._unsent_bytes += len(frame)
        self._flush()
        _pass_sent(message)
        return True

    def poll(self) -> list[ToEngine]:
        """Send what waits, return what came. Never blocks. Messages that came before a loss are still returned."""
        messages: list[ToEngine] = []
        self._flush()
        if self._socket is None:
            return messages
        try:
            for received in self._received():
                messages.extend(self._reader.feed(received))
        except BadFrame as error:
            self._lose(f"bad frame from the agent: {error.code}: {error}")
        except OSError as error:
            self._lose(f"connection failed: {error}")
        if self._unsent and time.monotonic() - self._moved_at > self._stall_s:
            self._lose(f"stall_s: {self._stall_s} passed: the agent does not read")
        for message in messages:
            _pass_heard(message)
        return messages

    def fileno(self) -> int:
        """For a selector; -1 when lost."""
        return self._socket.fileno() if self._socket is not None else -1

    def close(self, why: str = "closed here") -> None:
        """End the connection. The agent takes this for the engine's end. Idempotent."""
        if self._socket is not None:
            self._lose(why)

    def drop_copy(self) -> None:
        """In a forked child: close its copies of our descriptors, with no word to the agent."""
        self._lose("forked: the connection is the parent's")

    def _received(self) -> Iterator[bytes]:
        budget = POLL_BYTES
        while budget > 0 and self._socket is not None:
            try:
                received = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return
            if not received:
                self._lose("the agent is gone")
                return
            budget -= len(received)
            yield received

    def _flush(self) -> None:
        while self._unsent and self._socket is not None:
            frame = self._unsent[0]
            try:
                sent = self._send(self._socket, frame)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):  # `poll` reads its last words and then sees the end
                self._drop_unsent()
                return
            except OSError as error:
                self._lose(f"connection failed: {error}")
                return
            self._moved_at = time.monotonic()
            self._unsent_bytes -= sent
            frame.left = frame.left[sent:]
            _close(frame.fds)
            if not frame.left:
                self._unsent.popleft()

    @staticmethod
    def _send(to: socket.socket, frame: _Frame) -> int:
        if not frame.fds:
            return to.send(frame.left, socket.MSG_NOSIGNAL)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", frame.fds))
        return to.sendmsg([frame.left], [rights], socket.MSG_NOSIGNAL)

    def _lose(self, why: str) -> None:
        self.why = why
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._drop_unsent()

    def _drop_unsent(self) -> None:
        for frame in self._unsent:
            _close(frame.fds)
        self._unsent.clear()
        self._unsent_bytes = 0


def _pass_sent(message: ToAgent) -> None:
    match message:
        case Attach():
            failpoint("engine.attach_sent")
        case Offer():
            failpoint("engine.offer_sent")
        case Withdraw():
            failpoint("engine.withdraw_sent")
        case Want():
            failpoint("engine.want_sent")
        case Abandon():
            failpoint("engine.abandon_sent")
        case Detach():
            failpoint("engine.detach_sent")


def _pass_heard(message: ToEngine) -> None:
    match message:
        case Done():
            failpoint("engine.done_heard")
        case Released():
            failpoint("engine.released_heard")


def _duplicate(fds: Sequence[int]) -> list[int]:
    if len(fds) > MAX_FDS:
        raise OSError(f"got {len(fds)}, limit {MAX_FDS}")
    ours: list[int] = []
    try:
        ours.extend(os.dup(fd) for fd in fds)
    except OSError:
        _close(ours)
        raise
    return ours


def _close(fds: list[int]) -> None:
    """Close and forget."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    fds.clear()
