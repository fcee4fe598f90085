"""The engine's end of the agent's unix socket: never blocks a step, opens no thread, raises nothing into the engine.

`send` queues, `poll` moves bytes both ways. After a connection fault nothing more is sent and `why` gives the reason;
messages from the agent are still read until it closes its end. A closed socket does not mean a dead process: see
`is_agent_gone`.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Sequence

from kvbridge_proto.engine import (
    Abandon,
    Attach,
    Detach,
    Done,
    Offer,
    Released,
    ToAgent,
    ToEngine,
    Want,
    Withdraw,
)
from kvbridge_proto.framing import (
    LIMITS,
    MESSAGE_FDS,
    BadFrame,
    Decoder,
    FrameReader,
    FrameWriter,
    Limits,
    encode,
    framed,
)

from ...errors import OperatorError
from ...failpoints import failpoint
from ...unix_socket import SEND, close_fds, credentials_of, send_beside

CONNECT_RETRY_S = 0.05
SO_PEERPIDFD = 77  # since Linux 6.5; Python does not name it
RECEIVE_BYTES = 1 << 18
POLL_BYTES = 4 << 20  # read at most this much in one poll: an agent must not be able to hold up a step
# Failpoints that are passed once a message of this kind is queued, and once one has been read.
SENT: dict[type, str] = {
    Attach: "engine.attach_sent",
    Offer: "engine.offer_sent",
    Withdraw: "engine.withdraw_sent",
    Want: "engine.want_sent",
    Abandon: "engine.abandon_sent",
    Detach: "engine.detach_sent",
}
HEARD: dict[type, str] = {Done: "engine.done_heard", Released: "engine.released_heard"}


def pidfd_of(end: socket.socket) -> int:
    """A pidfd of the process that listens at the other end, readable once it is gone. -1 if none can be had.

    That happens on a kernel without SO_PEERPIDFD, for a process in a PID namespace that we cannot see.
    """
    with contextlib.suppress(OSError):
        return end.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    if (pid := credentials_of(end)[0]) > 0:
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return -1


class EngineClient:
    """One connection to the agent at `path`, used by one thread at a time.

    Messages give our memory away. So nothing is sent until the kernel confirms that the listener's user is ours, root
    or one of `agent_uids`: while the agent is down, anyone who may write in the folder can listen at its path. Nor to a
    process whose end we could not see, unless `allow_unwatched`: its kernels may write our memory after its socket has
    closed.
    `unsent_bytes` and `stall_s` bound how much data, and for how long, an agent that does not read may hold back. A
    child forked while connected must call `close`, or the agent could not see this process die.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        agent_uids: Iterable[int] = (),
        allow_unwatched: bool = False,
        unsent_bytes: int = 64 << 20,
        stall_s: float = 30.0,
        limits: Limits = LIMITS,
        pidfd_of: Callable[[socket.socket], int] = pidfd_of,
    ) -> None:
        self.path = os.fspath(path)
        self.why = "not connected yet"
        self.is_barred = False  # whether the last try found a process at `path` that may not have our memory
        self._agent_uids = frozenset([0, os.geteuid(), *agent_uids])
        self._allow_unwatched = allow_unwatched
        self._unsent_limit = unsent_bytes
        self._stall_s = stall_s
        self._limits = limits
        self._pidfd_of = pidfd_of
        self._socket: socket.socket | None = None
        self.pidfd = -1  # readable once the agent's process is gone; -1 where that cannot be known
        self._news = select.poll()  # of the socket and the process
        self._is_hung_up = False  # nothing more is sent
        self._reader: FrameReader[ToEngine] = FrameReader(ToEngine, limits)
        self._decoder: Decoder[ToAgent] = Decoder(ToAgent, limits)
        self._writer = FrameWriter()  # descriptors in it are our duplicates
        self._moved_at = 0.0

    def __repr__(self) -> str:
        return f"<EngineClient {self.path} {'connected' if self.is_connected else f'lost: {self.why}'}>"

    @property
    def is_connected(self) -> bool:
        """Whether a message may be sent."""
        return self._socket is not None and not self._is_hung_up

    @property
    def has_ended(self) -> bool:
        """Whether no socket is open: the agent closed its end, or we closed ours in both directions."""
        return self._socket is None

    @property
    def is_agent_gone(self) -> bool:
        """Whether the agent's process is known to be gone. Until then its kernels may run, whatever its socket says."""
        if self.pidfd < 0:
            return False
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def is_quiet(self) -> bool:
        """Whether `poll` has nothing to move, and the agent lives: a step asks this twice, so it is one system call."""
        is_connected = self._socket is not None and not self._is_hung_up
        return is_connected and not self._writer.unsent_bytes and not self._news.poll(0)

    def connect(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the agent; for start-up only. False, with `why`, if it does not come in time."""
        end = time.monotonic() + timeout_s
        while not self.reconnect():
            if time.monotonic() + CONNECT_RETRY_S > end:
                self.why = f"no agent at {self.path} within {timeout_s} s: {self.why}"
                return False
            time.sleep(CONNECT_RETRY_S)
        return True

    def reconnect(self) -> bool:
        """Try once, without waiting. Drops what was queued. False, with `why`, if the agent is not there."""
        self.close("connecting anew")
        attempt = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        attempt.setblocking(False)
        try:
            attempt.connect(self.path)
            self._check_uid(attempt)
            self.pidfd = self._pidfd_of(attempt)
            if self.pidfd < 0 and not self._allow_unwatched:
                reason = f"allow_unwatched: off, and there is no pidfd of the process that listens at {self.path}"
                raise OperatorError("agent_unwatched", reason)
        except (OSError, OperatorError) as error:
            attempt.close()
            self.is_barred = isinstance(error, OperatorError)
            self.why = f"{error.code}: {error}" if isinstance(error, OperatorError) else str(error)
            return False
        self._socket, self.is_barred = attempt, False
        self._is_hung_up = False
        self._news = select.poll()
        for each in (attempt.fileno(), self.pidfd):
            if each >= 0:
                self._news.register(each, select.POLLIN)
        self._reader = FrameReader(ToEngine, self._limits)
        self._moved_at = time.monotonic()
        self.why = ""
        return True

    def _check_uid(self, attempt: socket.socket) -> None:
        """Raise OperatorError unless the process that called listen() there had a uid that we may give memory to."""
        pid, uid, _ = credentials_of(attempt)
        if uid not in self._agent_uids:
            reason = f"agent_uids: pid {pid} of uid {uid} listens at {self.path}, allowed {sorted(self._agent_uids)}"
            raise OperatorError("uid_not_allowed", reason)

    def send(self, message: ToAgent, fds: Sequence[int] = ()) -> bool:
        """Queue a message, with descriptors that the caller may close at once. Never blocks.

        False if it will not be sent; `why` gives the reason. Either the connection is lost, or no agent would take
        this message (`why_unfit`, too many or bad descriptors) and the connection stays. Descriptors that do not fit in
        one frame are sent with frames before it.
        """
        if not self.is_connected:
            return False
        try:
            frame = framed(self._checked(message))
        except BadFrame as error:
            self.why = str(error)
            return False
        if self._writer.unsent_bytes + len(frame) > self._unsent_limit:
            self.hang_up(f"unsent_bytes: limit {self._unsent_limit}: the agent does not read")
            return False
        try:
            ours = _duplicate(fds)
        except OSError as error:
            self.why = f"fds: {error}"
            return False
        if not self._writer.unsent_bytes:
            self._moved_at = time.monotonic()
        self._writer.put(frame, ours)
        self._flush()
        if (place := SENT.get(type(message))) is not None:
            failpoint(place)
        return True

    def why_unfit(self, message: ToAgent) -> str:
        """Why no agent would take this message, or "". An agent would end the connection over it."""
        try:
            self._checked(message)
        except BadFrame as error:
            return str(error)
        return ""

    def _checked(self, message: ToAgent) -> bytes:
        """The message, encoded. Raises BadFrame."""
        try:
            body = encode(message)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:  # a lone surrogate is a ValueError
            reason = f"message: {type(message).__name__} cannot be encoded: {error}"
            raise BadFrame("message_invalid", reason) from None
        try:
            self._decoder.check(body)
        except BadFrame as error:
            raise BadFrame(error.code, f"{type(message).__name__}: {error}") from None
        return body

    @property
    def is_all_sent(self) -> bool:
        """Whether everything queued has left this process."""
        return not self._writer.unsent_bytes

    def poll(self) -> list[ToEngine]:
        """Send what is queued, return what came. Never blocks. Messages that came before a loss are still returned."""
        messages: list[ToEngine] = []
        self._flush()
        budget = POLL_BYTES
        try:
            while budget > 0 and self._socket is not None:
                if not (received := self._socket.recv(RECEIVE_BYTES)):
                    self._lose("the agent is gone")
                budget -= len(received)
                try:
                    messages.extend(self._reader.messages(received))
                except BadFrame as error:
                    self.hang_up(f"bad frame from the agent: {error.code}: {error}")
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(f"connection failed: {error}")
        if self._writer.unsent_bytes and time.monotonic() - self._moved_at > self._stall_s:
            self.hang_up(f"stall_s: {self._stall_s} passed: the agent does not read")
        for message in messages:
            if (place := HEARD.get(type(message))) is not None:
                failpoint(place)
        return messages

    def fileno(self) -> int:
        """For a selector; -1 if no socket is open."""
        return self._socket.fileno() if self._socket is not None else -1

    def hang_up(self, why: str) -> None:
        """Send nothing more: the agent takes this for the engine's end. Its messages are still read. Idempotent."""
        if self.is_connected:
            assert self._socket is not None
            self.why, self._is_hung_up = why, True
            close_fds(self._writer.clear())
            with contextlib.suppress(OSError):  # the agent's end may be closed already; the next read shows that
                self._socket.shutdown(socket.SHUT_WR)

    def close(self, why: str = "closed here") -> None:
        """Close the connection and stop watching the agent's process. Idempotent."""
        if self._socket is not None:
            self._lose(why)
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def _flush(self) -> None:
        try:
            while self._writer.unsent_bytes and self._socket is not None:
                piece, fds = self._writer.head()
                sent = send_beside(self._socket, piece, fds) if fds else self._socket.send(piece, SEND)
                self._moved_at = time.monotonic()
                if left := self._writer.sent(sent):
                    close_fds(left)
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):  # `poll` reads its last messages, then sees the end
            close_fds(self._writer.clear())
        except OSError as error:
            self.hang_up(f"connection failed: {error}")

    def _lose(self, why: str) -> None:
        if not self._is_hung_up:
            self.why = why
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        close_fds(self._writer.clear())


def _duplicate(fds: Sequence[int]) -> list[int]:
    if len(fds) > MESSAGE_FDS:
        raise OSError(f"got {len(fds)}, limit {MESSAGE_FDS}")
    ours: list[int] = []
    try:
        ours.extend(os.dup(fd) for fd in fds)
    except OSError:
        close_fds(ours)
        raise
    return ours
