"""Messages between agents over ZeroMQ: links that deliver everything in order, or are lost and say so.

ZeroMQ alone reconnects in silence, drops what was under way and delivers ghosts of old incarnations. So a link is one
connection between two boots, its envelopes are numbered from 0, and the first gap, silence, other boot or full queue
ends it. Dial again for a new one.

The sockets are driven by the loop's `add_reader` on ZeroMQ's own descriptors: sending stays a plain call, there is no
task per socket, and asyncio and uvloop serve alike. A descriptor is edge-triggered, hence "drain after what we did".
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import zmq
from kvbridge_proto.codec import BadFrame, Limits, decode
from kvbridge_proto.peer import Body, Envelope, Ping, Pong
from kvbridge_proto.words import OURS

from ..errors import OperatorError, PeerError
from .endpoint import check_dialled, check_listened, is_ipv6
from .link import Link
from .sockets import GONE, UP, Port

TICK_S = 0.1
PROBE_S = 0.5
BACKLOG = 4096  # events nobody has taken; beyond, the sockets' own queues fill and push back
LINGER_MS = 100  # what a Goodbye gets when we close a link ourselves


@dataclass(frozen=True, slots=True)
class Settings:
    """Times in seconds. A peer that sends nothing for `silence_s`, pings included, is lost.

    That only matters for a stalled peer or a broken path: a dead one's connection ends at once. Engines that spin on
    `sched_yield` have kept an agent beside them off the processor for 4 s (2 cores, Linux 6.18, 2026-11-21).
    """

    connect_s: float = 5.0
    ping_s: float = 1.0
    silence_s: float = 15.0
    frame_bytes: int = 4 << 20
    queue_bytes: int = 64 << 20
    max_links: int = 1024


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message for us from the incarnation the link is with. Pings and pongs are answered here and do not show."""

    link: Link
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Lost:
    """The link's end, said once: nothing more comes from it, what is sent on it is dropped.

    `code` is one of peer_unreachable, peer_disconnected, peer_silent, peer_restarted, peer_not_reading,
    messages_lost, frame_too_large.
    """

    link: Link
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """Something that is not a message for us, dropped. `link` is None if it came from nobody we know."""

    link: Link | None
    code: str
    text: str


Event = Arrived | Lost | Rejected


class Control:
    """This agent's end of all links. Use as `async with`, on one loop; one task reads `events`.

    `listen` is None for an agent that only dials. Entry raises OperatorError. `rejected` counts what was dropped.
    """

    def __init__(
        self,
        boot: str,
        listen: str | None = None,
        *,
        settings: Settings | None = None,
        allow_wildcard: bool = False,
    ) -> None:
        self.boot = boot
        self.address = ""
        self.rejected: Counter[str] = Counter()
        self.settings = settings or Settings()
        self._listen = listen
        self._allow_wildcard = allow_wildcard
        self._limits = Limits(frame_bytes=self.settings.frame_bytes)
        self._events: deque[Event] = deque()
        self._dialled: dict[str, Link] = {}
        self._accepted: dict[bytes, Link] = {}
        self._ports: dict[Link, Port] = {}
        self._router: Port | None = None
        self._probe_at: float | None = None
        self._probed_at = 0.0
        self._is_closed = False

    async def __aenter__(self) -> Control:
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        try:
            self._bind()
        except BaseException:
            self._close()
            raise
        self._ticked_at = self._loop.time()
        self._ticking = self._loop.call_later(TICK_S, self._tick)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ticking.cancel()
        self._close()
        self._woken.set()

    def dial(self, address: str) -> Link:
        """The link to this address; a new one if there is none or it was lost. Raises PeerError."""
        if link := self._dialled.get(address):
            return link
        check_dialled(address)
        if len(self._dialled) >= self.settings.max_links:
            raise PeerError("too_many_links", f"links: {len(self._dialled)} dialled, limit {self.settings.max_links}")
        link = Link(self, address, None, self._loop.time())
        port = self._port(
            zmq.DEALER, is_ipv6(address), lambda: self._serve(link), lambda event: self._watched(link, event)
        )
        try:
            port.socket.connect(address)
        except zmq.ZMQError as error:
            port.close()
            raise PeerError("bad_address", f"{address}: {error}") from None
        self._dialled[address] = link
        self._ports[link] = port
        return link

    async def events(self) -> AsyncIterator[Event]:
        """What happens, in order, to one reader at a time; ends when the control closes."""
        while not self._is_closed:
            while self._events:
                yield self._events.popleft()
            self._woken.clear()
            if not self._events and not self._is_closed:
                await self._woken.wait()

    @property
    def links(self) -> list[Link]:
        """All that are not lost."""
        return [*self._dialled.values(), *self._accepted.values()]

    # -- sending, on behalf of a link ------------------------------------------------------------------------------

    def send(self, link: Link, body: Body) -> bool:
        """See `Link.send`."""
        if link.is_lost:
            return False
        frame = link.seal(self.boot, body)
        if len(frame) > self.settings.frame_bytes:
            limit = self.settings.frame_bytes
            self._lose(link, "frame_too_large", f"frame_bytes: ours {len(frame)}, limit {limit}")
            return False
        link.outbox.append(frame)
        link.waiting_bytes += len(frame)
        port = self._ports[link]
        self._flush(link)
        if not self._is_full:
            port.rouse()
        return not link.is_lost

    def close_link(self, link: Link) -> None:
        """See `Link.close`."""
        if not link.is_lost:
            self._end(link, LINGER_MS)

    def _flush(self, link: Link) -> None:
        port = self._ports[link]
        prefix = [] if link.identity is None else [link.identity]
        while link.outbox:
            try:
                port.send([*prefix, link.outbox[0]])
            except zmq.Again:
                break
            except zmq.ZMQError as error:
                self._lose(link, "peer_disconnected", str(error))
                return
            link.waiting_bytes -= len(link.outbox.popleft())
        if link.waiting_bytes > self.settings.queue_bytes:
            code = "peer_not_reading" if link.is_up else "peer_unreachable"
            self._lose(link, code, f"queue_bytes: {link.waiting_bytes} wait, limit {self.settings.queue_bytes}")

    # -- receiving -------------------------------------------------------------------------------------------------

    def _serve(self, link: Link) -> None:
        """A dialled link's socket may have something for us, or take something."""
        if link.is_lost:
            return
        self._flush(link)
        if link.is_lost or self._is_full:
            return
        for frames in self._ports[link].messages(1):
            if frames is None:
                self._reject(link, "frame_malformed", "frames: more than 1")
            else:
                self._take(link, frames[0], None)
            if link.is_lost or self._is_full:
                return

    def _serve_router(self) -> None:
        if self._router is None or self._is_full:
            return
        for frames in self._router.messages(2):
            if frames is None:
                self._reject(None, "frame_malformed", "frames: not 1 after the identity")
            else:
                identity = frames[0].bytes
                self._take(self._accepted.get(identity), frames[1], identity)
            if self._is_full:
                return

    def _take(self, link: Link | None, frame: zmq.Frame, identity: bytes | None) -> None:
        try:
            envelope: Envelope = decode(frame.buffer, Envelope, self._limits)
        except BadFrame as error:
            return self._reject(link, error.code, str(error))
        if not OURS.oldest <= envelope.version <= OURS.newest:
            return self._reject(link, "version_unknown", f"version: ours {OURS}, theirs {envelope.version}")
        if not envelope.sender or envelope.receiver not in ("", self.boot):
            text = f"boots: from {envelope.sender!r} to {envelope.receiver!r}, ours {self.boot!r}"
            return self._reject(link, "other_receiver", text)
        if link is not None and (fault := link.check(envelope)):
            self._lose(link, *fault)
            link = None
        elif link is not None:
            return self._heard(link, envelope)
        if identity is not None:
            self._greet(envelope, identity, frame)

    def _greet(self, envelope: Envelope, identity: bytes, frame: zmq.Frame) -> None:
        """A stranger's envelope: number 0 begins a link, any other is the tail of one that ended."""
        link = Link(self, str(frame.get("Peer-Address")), identity, self._loop.time())
        if fault := link.check(envelope):
            return self._reject(None, *fault)
        if len(self._accepted) >= self.settings.max_links:
            return self._reject(None, "too_many_links", f"links: limit {self.settings.max_links}")
        assert self._router is not None
        self._accepted[identity] = link
        self._ports[link] = self._router
        self._heard(link, envelope)

    def _heard(self, link: Link, envelope: Envelope) -> None:
        link.heard_at = self._loop.time()
        match envelope.body:
            case Ping(number=number):
                self.send(link, Pong(number=number))
            case Pong():
                pass
            case _:
                self._tell(Arrived(link, envelope))

    # -- watching --------------------------------------------------------------------------------------------------

    def _watched(self, link: Link, event: int) -> None:
        if link.is_lost:
            return
        if event == UP and not link.is_up:
            link.is_up = True
            link.heard_at = link.pinged_at = self._loop.time()
            self._serve(link)
        elif event == GONE and link.is_up:
            self._serve(link)  # its last words
            if not link.is_lost:
                self._lose(link, "peer_disconnected", f"{link.address} closed the connection")

    def _watched_router(self, event: int) -> None:
        # ZeroMQ does not say whose connection ended. Ask all, but not as often as strangers come and go.
        if event == GONE and self._probe_at is None:
            self._probe_at = max(self._loop.time(), self._probed_at + PROBE_S)

    def _tick(self) -> None:
        now = self._loop.time()
        self._ticking = self._loop.call_later(TICK_S, self._tick)
        self._serve_router()
        was_away = now - self._ticked_at > self.settings.silence_s / 2
        self._ticked_at = now
        for link in self.links:
            if link.is_dialled:
                self._serve(link)
            elif link.outbox:
                self._flush(link)
            if was_away:  # we were: what the peers sent meanwhile may still be on its way to us
                link.heard_at = now
            if not link.is_lost:
                self._judge(link, now)
        if self._probe_at is not None and now >= self._probe_at:
            self._probe_at, self._probed_at = None, now
            for link in list(self._accepted.values()):
                self.send(link, Ping(number=0))

    def _judge(self, link: Link, now: float) -> None:
        settings = self.settings
        if not link.is_up:
            if now - link.made_at > settings.connect_s:
                self._lose(link, "peer_unreachable", f"nobody answers at {link.address} in {settings.connect_s} s")
        elif now - link.heard_at > settings.silence_s and not self._is_full:
            self._lose(link, "peer_silent", f"nothing heard from {link.address} for {settings.silence_s} s")
        elif link.is_dialled and now - link.pinged_at >= settings.ping_s:
            link.pinged_at = now
            self.send(link, Ping(number=0))

    # -- ends ------------------------------------------------------------------------------------------------------

    def _lose(self, link: Link, code: str, reason: str) -> None:
        self._end(link, 0)
        self._tell(Lost(link, code, reason))

    def _end(self, link: Link, linger_ms: int) -> None:
        link.is_lost = True
        link.outbox.clear()
        port = self._ports.pop(link)
        if link.identity is None:
            del self._dialled[link.address]
            port.close(linger_ms)
        else:
            del self._accepted[link.identity]

    def _reject(self, link: Link | None, code: str, text: str) -> None:
        self.rejected[code] += 1
        self._tell(Rejected(link, code, text))

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        self._woken.set()

    @property
    def _is_full(self) -> bool:
        return len(self._events) >= BACKLOG

    def _bind(self) -> None:
        if self._listen is None:
            return
        check_listened(self._listen, allow_wildcard=self._allow_wildcard)
        self._router = self._port(zmq.ROUTER, is_ipv6(self._listen), self._serve_router, self._watched_router)
        try:
            self._router.socket.bind(self._listen)
        except zmq.ZMQError as error:
            raise OperatorError("listen_failed", f"listen {self._listen}: {error}") from error
        self.address = self._router.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def _port(self, kind: int, ipv6: bool, on_ready: Callable[[], None], on_watch: Callable[[int], None]) -> Port:
        return Port(
            self._context,
            kind,
            frame_bytes=self.settings.frame_bytes,
            ipv6=ipv6,
            silence_ms=int(self.settings.silence_s * 1000),
            on_ready=on_ready,
            on_watch=on_watch,
        )

    def _close(self) -> None:
        self._is_closed = True
        for link in self.links:
            self._end(link, LINGER_MS)
        if self._router is not None:
            self._router.close(LINGER_MS)
        self._context.term()  # waits for the lingering at most
