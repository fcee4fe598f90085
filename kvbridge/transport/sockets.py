"""ZeroMQ sockets on an event loop: set up, drained without blocking, watched for connects and disconnects."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Iterator

import zmq
from zmq.utils.monitor import parse_monitor_message

from .endpoint import is_ipv6, numeric

QUEUE_MESSAGES = 1000
INCOMING_MESSAGES = 64  # queued of each caller while we do not read, each up to frame_bytes
# TCP tries again after pauses that double: after an outage of 60 s it waits for up to 60 more. So a connection is given
# up before, and dialled anew. The kernel acknowledges for a process that is stopped or slow.
UNDELIVERED_MS, CONNECT_MS = 3000, 750
CURVE_BYTES = 64  # at least what CURVE adds to a frame (33 in libzmq 4.3)
DRAIN_MESSAGES = 256  # in one go, so that one loud peer does not hold the loop
GONE = zmq.EVENT_DISCONNECTED
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
UP = zmq.EVENT_HANDSHAKE_SUCCEEDED
AGAIN = zmq.EVENT_CONNECT_RETRIED
# Never watch HANDSHAKE_FAILED_PROTOCOL: under CURVE libzmq 4.3.5 reports it for any corrupt message, and in doing so
# loses the error; then it neither reads that connection any more nor ever closes it.
WATCHED = UP | GONE | REFUSED | AGAIN


class Port:
    """One socket and its monitor. Calls `on_ready` when there may be something to do, and `on_watch` with each event.

    Takes three descriptors, one more for its connection, and one while it looks whether it is refused. Raises
    zmq.ZMQError if it cannot be made.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        kind: int,
        *,
        frame_bytes: int,
        ipv6: bool,
        silence_ms: int,
        on_ready: Callable[[], None],
        on_watch: Callable[[int], None],
    ) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(kind)
        self._loop = asyncio.get_running_loop()
        self._on_ready = on_ready
        self._on_watch = on_watch
        self._is_closed = False
        self._is_woken = False
        self._endpoint = ""  # where it connects to
        self._end_look: Callable[[], None] | None = None
        try:
            _set_up(self.socket, frame_bytes, ipv6, silence_ms)
            self._monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(WATCHED)
        except BaseException:
            self.socket.close(0)
            raise
        self._fds = (int(self.socket.getsockopt(zmq.FD)), int(self._monitor.getsockopt(zmq.FD)))
        self._loop.add_reader(self._fds[0], self._on_ready)
        self._loop.add_reader(self._fds[1], self.watch)
        self.watch()  # ZeroMQ signals a descriptor only after a read found nothing

    def connect(self, endpoint: str) -> None:
        """To an address, not a name. Raises zmq.ZMQError."""
        self.socket.connect(endpoint)
        self._endpoint = endpoint

    def look_if_refused(self, refused: Callable[[], None]) -> None:
        """Have `refused` called if the host of our endpoint refuses connections, which nobody listens for.

        ZeroMQ says no more than that it tries again. So we connect ourselves, and hang up. One look at a time: another
        is left out.
        """
        if not self._endpoint or self._end_look is not None:
            return
        family = socket.AF_INET6 if is_ipv6(self._endpoint) else socket.AF_INET
        try:
            calling = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:  # out of descriptors
            return

        fd = calling.fileno()  # uvloop would keep the socket open for as long as it has it

        def end() -> None:
            self._end_look = None
            late.cancel()
            self._loop.remove_writer(fd)
            calling.close()

        def ended(error: int) -> None:
            end()
            if error == errno.ECONNREFUSED:
                refused()

        self._end_look = end
        late = self._loop.call_later(CONNECT_MS / 1000, end)
        try:
            error = calling.connect_ex(numeric(self._endpoint))
        except OSError:  # such as an address of an interface that is gone
            return end()
        if error != errno.EINPROGRESS:
            ended(error)
        else:
            self._loop.add_writer(fd, lambda: ended(calling.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)))

    def send(self, frames: list[bytes]) -> None:
        """Raises zmq.Again if it cannot be queued now, EHOSTUNREACH if a ROUTER's peer is gone."""
        self.socket.send_multipart(frames, zmq.NOBLOCK)

    def messages(self, parts: int) -> Iterator[list[zmq.Frame] | None]:
        """Received messages, at most DRAIN_MESSAGES; None for one that does not have exactly `parts` frames."""
        for _ in range(DRAIN_MESSAGES):
            if self._is_closed or not self._has_mail():  # catching zmq.Again costs ten times as much as asking
                return
            try:
                frame = self.socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            kept = [frame]
            count = 1
            while frame.more:
                frame = self.socket.recv(zmq.NOBLOCK, copy=False)
                count += 1
                if count <= parts:
                    kept.append(frame)
            yield kept if count == parts else None
        self.wake()

    def wake(self) -> None:
        """Call `on_ready` soon if something waits. Any call on the socket may have consumed the descriptor's edge."""
        if self._is_closed or self._is_woken or not self._has_mail():
            return
        self._is_woken = True
        self._loop.call_soon(self._woken)

    def _has_mail(self) -> bool:
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def close(self, linger_ms: int = 0) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._end_look is not None:
            self._end_look()
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(linger_ms)

    def _woken(self) -> None:
        self._is_woken = False
        if not self._is_closed:
            self._on_ready()

    def watch(self) -> None:
        """Report the events that have happened so far."""
        while not self._is_closed:
            try:
                parts = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_watch(parse_monitor_message(parts)["event"])


def _set_up(socket: zmq.Socket[bytes], frame_bytes: int, ipv6: bool, silence_ms: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IMMEDIATE, 1)  # queue nothing for an absent peer: it would arrive stale
    socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes + CURVE_BYTES)
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, INCOMING_MESSAGES if socket.type == zmq.ROUTER else QUEUE_MESSAGES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 2000)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 250)
    # The kernel detects dead connections, and our pings silent peers. libzmq 4.3.5 aborts the process if it has to send
    # or answer a heartbeat on a connection that was reset while its queue was full, so heartbeats are off.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, max(1, silence_ms // 1000))
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, max(1, silence_ms // 3000))
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.TCP_MAXRT, UNDELIVERED_MS)
    socket.setsockopt(zmq.IPV6, int(ipv6))
    if socket.type == zmq.ROUTER:
        # libzmq 4.3.5 leaks 18 KB for each connection that speaks ZMTP 1, but refuses those if there is a ZAP domain;
        # and 10 KB for each under an identity already in use. Our peers set none, so theirs are random.
        socket.setsockopt(zmq.ZAP_DOMAIN, b"kvbridge")
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a reply to a peer that is gone raises, and is not dropped silently
