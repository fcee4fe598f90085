"""Messages between agents over ZeroMQ: links that deliver everything in order, or are lost and say so.

ZeroMQ alone reconnects silently, drops what was under way and delivers stale messages of old incarnations. So a link
is one connection between two incarnations. Its envelopes are numbered from 0, and the first gap, silence, other
incarnation or full queue ends it. Dial again for a new link.

The sockets are driven by the loop's `add_reader` on ZeroMQ's own descriptors: sending stays a plain call, and no socket
needs a task. The descriptors are edge-triggered, so a socket is read again after
every call on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

import zmq
from kvbridge_proto.common import OURS
from kvbridge_proto.framing import BadFrame, Decoder, Limits, encode
from kvbridge_proto.peer import LINK_OVER, Body, Envelope, Goodbye, Ping, Pong, Sessionless

from ..descriptors import are_short
from ..errors import OperatorError, PeerError
from ..state_machines import PeerLinkEvent
from .endpoint import is_ipv6, name_in
from .framed import Connection
from .link import Arrived, Event, Link, Lost, Reached, Rejected, Retried, Settings
from .names import Names
from .sockets import AGAIN, DRAIN_MESSAGES, GONE, REFUSED, UP, Port
from .trust import Trust
from .zap import AuthDoor, Buckets, guard, introduce

LINK_TICK_S = 0.1
REST_TICK_S = 0.5  # while no link waits to send, to be up or to be pinged
AWAY_S = 5 * LINK_TICK_S
PING_ROUND_S = 0.5
LOOK_UP_S = 0.5  # until a name without an address is looked up again: it may not be published yet
MOST_EVENTS = 4096  # untaken events; beyond that we stop reading, and the sockets' own queues push back
LINGER_MS = 100  # time for a Goodbye to leave when we close a link ourselves
TRIED_AT_ONCE, NEXT_SOCKETS_S = 8, 0.005  # setting up a socket takes about 0.3 ms


class Control:
    """This agent's end of all links. Use as `async with`, on one loop; one task reads `events`.

    `listen` is None for an agent that only dials. Entry raises OperatorError. `rejected` counts dropped input by code.
    """

    def __init__(
        self,
        incarnation: str,
        listen: str | None = None,
        *,
        settings: Settings | None = None,
        allow_wildcard: bool = False,
        trust: Trust | None = None,
    ) -> None:
        self.incarnation = incarnation
        self.trust = trust or Trust()
        self.address = ""
        self.rejected: Counter[str] = Counter()
        self.settings = settings or Settings()
        self._ping_s = self.settings.ping_s
        self._listen = listen
        self._allow_wildcard = allow_wildcard
        self._limits = Limits(frame_bytes=self.settings.frame_bytes)
        self._decoder: Decoder[Envelope] = Decoder(Envelope, self._limits)
        self._events: deque[Event] = deque()
        self._arrived: Callable[[Link, str, Body], None] | None = None
        self._dialled: dict[str, Link] = {}
        self._waiting: dict[Link, str] = {}  # dialled but not tried yet, with their endpoints
        self._tries_newest_next = True  # of `_waiting`
        self._unreached: dict[Link, None] = {}  # dialled and being tried; the oldest first
        self._retrying: asyncio.TimerHandle | None = None
        self._accepted: dict[bytes, Link] = {}
        self._ports: dict[Link, Port] = {}
        self._router: Port | None = None
        self._door: AuthDoor | None = None
        self._probe_at: float | None = None
        self._probed_at = 0.0
        self._was_full = False
        self._is_closed = False
        self._pipes: set[Connection[Envelope, Envelope]] = set()
        self._pipe_tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None  # of a task that hears a pipe

    async def __aenter__(self) -> Control:
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._names = Names()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        try:
            self._bind()
        except BaseException:
            self._close()
            raise
        self._ticked_at = self._loop.time()
        self._set_tick(self._ticked_at + LINK_TICK_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ticking.cancel()
        if self._retrying is not None:
            self._retrying.cancel()
        self._close()
        self._woken.set()

    def dial(self, address: str) -> Link:
        """The link to this address; a new one if there is none or it was lost. Raises PeerError.

        A new link may have to wait before it is tried. If too many wait, the one that has waited longest is lost.
        """
        if link := self._dialled.get(address):
            return link
        endpoint, key = self.trust.check_dialled(address)
        if (reached := len(self._dialled) - len(self._unreached) - len(self._waiting)) >= self.settings.max_links:
            raise PeerError("too_many_links", f"links: {reached} dialled, limit {self.settings.max_links}")
        if (count := len(self._waiting)) >= self.settings.max_waiting:
            oldest = next(iter(self._waiting))
            reason = f"links: {count} wait to be tried, limit {self.settings.max_waiting}: {oldest.address} gave way"
            self._lose(oldest, "too_many_links", reason)
        link = self._dialled[address] = Link(self, address, None, self._loop.time(), key)
        self._waiting[link] = endpoint
        self._tick_soon()
        if self._retrying is None:
            self._try_waiting()
        return link

    def _try_waiting(self) -> None:
        """Try waiting links while there is room, a few at a time because each takes a while.

        The newest and the oldest take turns, so a new link is tried soon however many wait before it.
        """
        self._retrying = None
        for _ in range(TRIED_AT_ONCE):
            if not self._waiting or not self._has_room():
                break
            link = next(reversed(self._waiting) if self._tries_newest_next else iter(self._waiting))
            self._tries_newest_next = not self._tries_newest_next
            self._try(link, self._waiting.pop(link))
        if self._waiting:
            self._retrying = self._loop.call_later(NEXT_SOCKETS_S, self._try_waiting)

    def _has_room(self) -> bool:
        """Whether one more link may be tried. To make room, one that was refused or has had `grace_s` may be lost.

        Requests can make up addresses by the thousand; an agent at a real one answers within `grace_s`.
        """
        if are_short():
            return False
        while (count := len(self._unreached)) >= self.settings.max_unreached:
            oldest = next(iter(self._unreached))
            last = next((link for link in self._unreached if link.is_refused), oldest)
            self._ports[last].watch()
            if last not in self._unreached:  # it has just answered
                continue
            if not last.is_refused and self._loop.time() - last.made_at < self.settings.grace_s:
                return False
            reason = f"links: {count} are tried, and {len(self._waiting)} more wait: {last.address} gave way"
            self._lose(last, "too_many_links", reason)
        return True

    def _try(self, link: Link, endpoint: str) -> None:
        link.made_at = self._loop.time()
        link.step(PeerLinkEvent.TRY)
        try:
            port = self._port(
                zmq.DEALER, is_ipv6(endpoint), lambda: self._serve(link), lambda event: self._watched(link, event)
            )
        except zmq.ZMQError as error:  # out of descriptors or sockets
            self._lose(link, "too_many_links", f"links: {len(self.links)}, no socket for {link.address}: {error}")
            return
        self._ports[link] = port
        self._unreached[link] = None
        try:
            introduce(port.socket, self.trust.keys, link.key)
            if name_in(endpoint):
                self._look_up(link, endpoint)
            else:
                port.connect(endpoint)
        except zmq.ZMQError as error:
            self._lose(link, "bad_address", f"{link.address}: {error}")

    def _look_up(self, link: Link, endpoint: str) -> None:
        if not link.is_lost and not self._is_closed:
            self._names.look_up(name_in(endpoint), partial(self._named, link, endpoint))

    def _named(self, link: Link, endpoint: str, addresses: Sequence[str], reason: str) -> None:
        """The name in an endpoint is looked up. Connect there, unless the link was given up meanwhile."""
        if link.is_lost:
            return
        if not addresses:
            link.is_refused = True
            if self._loop.time() + LOOK_UP_S < link.made_at + self.settings.connect_s:
                self._loop.call_later(LOOK_UP_S, self._look_up, link, endpoint)
            else:
                self._lose(link, "peer_unreachable", f"{link.address}: its name has no address: {reason}")
            return
        try:
            self._ports[link].connect(f"tcp://{addresses[0]}:{endpoint.rpartition(':')[2]}")
        except zmq.ZMQError as error:
            self._lose(link, "bad_address", f"{link.address}: {error}")

    def look_if_refused(self, link: Link, refused: Callable[[], None]) -> None:
        """Have `refused` called if the host of a dialled link refuses connections: nobody listens there now.

        A host that does not answer refuses nothing. Nothing is looked at while a look is under way.
        """
        if (port := self._ports.get(link)) is not None and not link.is_up:
            port.look_if_refused(refused)

    async def events(self, arrived: Callable[[Link, str, Body], None] | None = None) -> AsyncIterator[Event]:
        """Events in order, for one reader at a time. Ends when the control closes.

        What comes by a pipe while no event waits is given to `arrived` at once, as link, sender and message. This saves
        a turn of the loop. Raises what `arrived` raises.
        """
        self._arrived = arrived
        try:
            while not self._is_closed:
                while self._events:
                    yield self._events.popleft()
                self._woken.clear()
                if not self._events and not self._is_closed:
                    await self._woken.wait()
                if self._failure is not None:
                    raise self._failure
        finally:
            self._arrived = None

    @property
    def links(self) -> list[Link]:
        """All links that are not lost."""
        return [*self._dialled.values(), *self._accepted.values()]

    def set_trust(self, trust: Trust) -> None:
        """Use another list of keys: links whose key is not on it are lost at once. Our own pair must be the same."""
        self.trust = trust
        for link in self.links:
            if trust.name_of(link.key) is None:
                self.send(link, Goodbye(reason="your key is not on our list any more"))
                self._lose(link, "key_revoked", f"key {link.key} of {link.address} is not in peers any more")

    # -- sending, on behalf of a link ------------------------------------------------------------------------------

    def send(self, link: Link, body: Body) -> bool:
        """See `Link.send`."""
        if link.is_lost:
            return False
        frame = encode(link.number(self.incarnation, body))
        if len(frame) > self.settings.frame_bytes:
            limit = self.settings.frame_bytes
            self._lose(link, "frame_too_large", f"frame_bytes: {len(frame)} to send, limit {limit}")
            return False
        if link.pipe is not None and link.sends_by_pipe:
            link.pipe.send_encoded(frame)
            return True
        link.outbox.append(frame)
        link.waiting_bytes += len(frame)
        self._flush(link)
        if (port := self._ports.get(link)) is not None and not self._is_full:
            port.wake()
        return not link.is_lost

    def carry_by(self, link: Link, pipe: socket.socket) -> None:
        """Carry a link by a pipe whose other end the same peer has on this host. This wakes no thread of ZeroMQ's.

        The dialling side sends by the pipe at once. The other side does so once it has received something there, which
        proves that the peer has the pipe. Envelopes count in the order of their numbers, whichever way they come. The
        end of a pipe that was used ends the link.
        """
        if link.is_lost or link.pipe is not None:
            pipe.close()
            return
        link.pipe = Connection(pipe, Envelope, self._limits, self._pipes, most_fds=0)
        self._pipe_tasks.add(task := self._loop.create_task(self._hear_pipe(link, link.pipe)))
        task.add_done_callback(self._pipe_ended)
        if link.is_dialled:
            link.sends_by_pipe = True
            self.send(link, Ping(number=0))

    def close_link(self, link: Link) -> None:
        """See `Link.close`."""
        if not link.is_lost:
            self._end(link, LINGER_MS)

    def _flush(self, link: Link) -> None:
        port = self._ports.get(link)
        prefix = [] if link.identity is None else [link.identity]
        while link.outbox and port is not None:
            try:
                port.send([*prefix, link.outbox[0]])
            except zmq.Again:
                break
            except zmq.ZMQError as error:
                self._lose(link, "peer_disconnected", str(error))
                return
            link.waiting_bytes -= len(link.outbox.popleft())
        if link.outbox:
            self._tick_soon()
        if link.waiting_bytes > self.settings.queue_bytes:
            code = "peer_not_reading" if link.is_up else "peer_unreachable"
            self._lose(link, code, f"queue_bytes: {link.waiting_bytes} wait, limit {self.settings.queue_bytes}")

    # -- receiving -------------------------------------------------------------------------------------------------

    def _serve(self, link: Link) -> None:
        """Send and receive on a dialled link's socket, as far as it lets us."""
        if link.is_lost:
            return
        self._flush(link)
        if link.is_lost or self._is_full or not link.is_tried:
            return
        for frames in self._ports[link].messages(1):
            if frames is None:
                self._reject(link, "frame_malformed", "frames: more than 1")
            else:
                self._take(link, frames[0], None)
            if link.is_lost or self._is_full:
                return

    def _pipe_ended(self, task: asyncio.Task[None]) -> None:
        self._pipe_tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self._woken.set()

    async def _hear_pipe(self, link: Link, pipe: Connection[Envelope, Envelope]) -> None:
        """Take what comes by the link's pipe until it ends."""
        try:
            for count in itertools.count(1):
                if link.is_lost or (received := await pipe.receive()) is None:
                    break
                self._take_from_pipe(link, received[0])
                if count % DRAIN_MESSAGES == 0:
                    await asyncio.sleep(0)
                while self._is_full and not link.is_lost:  # noqa: ASYNC110 - the sockets wait for the next tick, too
                    await asyncio.sleep(LINK_TICK_S)
        except BadFrame as error:
            self._reject(link, error.code, str(error))
        finally:
            pipe.close()
            if not link.is_lost and link.sends_by_pipe:
                self._lose(link, "peer_disconnected", f"the pipe to {link.address}: {pipe.why}")
            elif not link.is_lost:  # the peer never got the pipe
                link.pipe = None

    def _take_from_pipe(self, link: Link, envelope: Envelope) -> None:
        """Take one envelope. Those before it may still be on their way by the connection."""
        if not self._is_for_us(link, envelope):
            return
        link.sends_by_pipe = True
        if envelope.number > link.expected:
            link.early[envelope.number] = envelope
            link.early_bytes += len(encode(envelope))
            if len(link.early) > MOST_EVENTS or link.early_bytes > self.settings.queue_bytes:
                reason = f"number: message {link.expected} is missing, {link.early_bytes} bytes came after it"
                self._lose(link, "messages_lost", reason)
        else:
            self._count_in(link, envelope, by_pipe=True)

    def _count_in(self, link: Link, envelope: Envelope, *, by_pipe: bool = False) -> bool:
        """Count it in, then early ones that follow it. False if it was not the next: the link is lost."""
        following: Envelope | None = envelope
        while following is not None and not link.is_lost:
            if fault := link.check(following):
                self._lose(link, *fault)
                return following is not envelope
            self._heard(link, following, by_pipe=by_pipe)
            following = link.early.pop(link.expected, None)
        if not link.early:
            link.early_bytes = 0
        return True

    def _serve_router(self) -> None:
        if self._router is None or self._is_full:
            return
        for frames in self._router.messages(2):
            if frames is None:
                self._reject(None, "frame_malformed", "frames: not 1 after the identity")
            else:
                self._receive_authenticated(frames[0].bytes, frames[1])
            if self._is_full:
                return

    def _receive_authenticated(self, identity: bytes, frame: zmq.Frame) -> None:
        """Take a message if its connection's proved key is still on our list and is its link's key."""
        key, link = _key_of(frame), self._accepted.get(identity)
        if self.trust.name_of(key) is None or (link is not None and link.key != key):
            return self._reject(link, "key_not_allowed", f"key {key or 'none'} of {frame.get('Peer-Address')}")
        self._take(link, frame, identity)

    def _take(self, link: Link | None, frame: zmq.Frame, identity: bytes | None) -> None:
        try:
            envelope = self._decoder.decode(frame.buffer)
        except BadFrame as error:
            return self._reject(link, error.code, str(error))
        if not self._is_for_us(link, envelope):
            return
        if link is not None and self._count_in(link, envelope):
            return
        if identity is not None:
            self._begin_link(envelope, identity, frame)

    def _is_for_us(self, link: Link | None, envelope: Envelope) -> bool:
        is_spoken = OURS.oldest <= envelope.version <= OURS.newest
        if not is_spoken and not isinstance(envelope.body, Sessionless):
            self._reject(link, "version_unknown", f"version: {envelope.version} of the message, {OURS} of this agent")
        elif not envelope.sender or envelope.receiver not in ("", self.incarnation):
            text = f"incarnations: from {envelope.sender!r} to {envelope.receiver!r}, this is {self.incarnation!r}"
            self._reject(link, "other_receiver", text)
        else:
            return True
        return False

    def _begin_link(self, envelope: Envelope, identity: bytes, frame: zmq.Frame) -> None:
        """An envelope without a link. Number 0 begins one; any other is the tail of a link that we gave up."""
        link = Link(self, str(frame.get("Peer-Address")), identity, self._loop.time(), _key_of(frame))
        if fault := link.check(envelope):
            return self._turn_away(envelope, identity, *fault)
        if len(self._accepted) >= self.settings.max_links:
            return self._turn_away(envelope, identity, "too_many_links", f"links: limit {self.settings.max_links}")
        same = sum((other.key, other.address) == (link.key, link.address) for other in self._accepted.values())
        if same >= self.settings.max_links_of_one:
            text = f"links: {same} with {link.address}, limit {self.settings.max_links_of_one}"
            return self._turn_away(envelope, identity, "too_many_links", text)
        assert self._router is not None
        self._accepted[identity] = link
        self._ports[link] = self._router
        self._heard(link, envelope)

    def _turn_away(self, envelope: Envelope, identity: bytes, code: str, text: str) -> None:
        """Say that there is no link by this connection, which ROUTER cannot close. Its peer may believe in one.

        It was frozen, for instance, and we gave it up meanwhile. Without an answer it would wait for its `silence_s`.
        """
        assert self._router is not None
        goodbye = Goodbye(reason=f"{code}: {text}")
        answer = Envelope(
            version=OURS.oldest, sender=self.incarnation, receiver=envelope.sender, number=LINK_OVER, body=goodbye
        )
        with contextlib.suppress(zmq.ZMQError):  # it is gone, or does not read
            self._router.send([identity, encode(answer)])
        self._reject(None, code, text)

    def _heard(self, link: Link, envelope: Envelope, *, by_pipe: bool = False) -> None:
        link.heard_at = self._loop.time()
        match envelope.body:
            case Ping(number=number):
                self.send(link, Pong(number=number))
            case Pong():
                pass
            case _ if by_pipe and self._arrived is not None and not self._events:
                self._arrived(link, envelope.sender, envelope.body)
            case _:
                self._tell(Arrived(link, envelope))

    # -- watching --------------------------------------------------------------------------------------------------

    def _watched(self, link: Link, event: int) -> None:
        if link.is_lost:
            return
        if event == UP and not link.is_up:
            link.step(PeerLinkEvent.CONNECT)
            del self._unreached[link]
            self._tell(Reached(link))
            link.heard_at = link.pinged_at = self._loop.time()
            self._serve(link)
        elif event == GONE and link.is_up:
            self._serve(link)  # what it sent before it closed
            if not link.is_lost:
                self._lose(link, "peer_disconnected", f"{link.address} closed the connection")
        elif event == REFUSED:
            self._lose(link, "key_refused", f"{link.address} does not let our key in; is it in its peers?")
        elif event == GONE:
            link.failures += 1
        elif event == AGAIN:
            link.is_refused = True
            self._tell(Retried(link))

    def _watched_router(self, event: int) -> None:
        # ZeroMQ does not say whose connection ended. Ping all, but less often than strangers come and go.
        if event == GONE and self._probe_at is None:
            self._probe_at = max(self._loop.time(), self._probed_at + PING_ROUND_S)
            self._tick_soon()

    def _tick(self) -> None:
        now = self._loop.time()
        away_s = now - max(self._ticked_at, self._tick_at - LINK_TICK_S)
        self._ticked_at = now
        try:
            self._look(now, away_s)
        finally:
            self._set_tick(now + self._rest_s(now))

    def _set_tick(self, at: float) -> None:
        self._tick_at = at
        self._ticking = self._loop.call_at(at, self._tick)

    def _tick_soon(self) -> None:
        """Something may be due before the next tick."""
        if self._tick_at > (at := self._loop.time() + LINK_TICK_S) and not self._is_closed:
            self._ticking.cancel()
            self._set_tick(at)

    def _rest_s(self, now: float) -> float:
        """Until the next tick. If we stall meanwhile, we see only the part that comes after it was due."""
        if self._was_full or self._probe_at is not None:
            return LINK_TICK_S
        due = min((now if link.outbox else link.look_at for link in self.links), default=now + REST_TICK_S)
        return max(LINK_TICK_S, min(due - now, REST_TICK_S, self.settings.silence_s / 30))

    def _look(self, now: float, away_s: float) -> None:
        """Act on what is due. We were away for so long: what peers sent meanwhile may not have been read."""
        self._serve_router()
        has_room = self._was_full and not self._is_full  # sockets that were not read meanwhile will not signal
        self._was_full = self._is_full
        for link in self.links:
            if now < link.look_at and not link.outbox and not has_room and away_s <= AWAY_S:
                continue
            if link.is_dialled:
                self._serve(link)
            elif link.outbox:
                self._flush(link)
            if away_s > self.settings.silence_s / 2:  # we stalled; what peers sent meanwhile may not be read yet
                link.heard_at = now
            if away_s > AWAY_S:
                link.made_at += away_s
            if not link.is_lost:
                self._judge(link, now)
                link.look_at = self._next_look(link)
        if self._probe_at is not None and now >= self._probe_at:
            self._probe_at, self._probed_at = None, now
            for link in list(self._accepted.values()):
                self.send(link, Ping(number=0))

    def _next_look(self, link: Link) -> float:
        """When a link that rests is to be pinged or may be lost: most ticks look at few. Before it is up, at once."""
        if not link.is_up:
            return link.made_at
        silence_s = self.settings.silence_s
        ping_at = link.pinged_at + self._ping_s
        if not link.is_dialled:
            ping_at = max(ping_at, link.heard_at + silence_s / 2)
        return min(ping_at, link.heard_at + silence_s)

    def _judge(self, link: Link, now: float) -> None:
        settings = self.settings
        if not link.is_tried:
            if now - link.made_at > settings.connect_s:
                reason = f"links: {len(self._waiting)} wait to be tried, {link.address} for {settings.connect_s} s"
                self._lose(link, "too_many_links", reason)
        elif not link.is_up:
            if now - link.made_at > settings.connect_s:
                reason = f"nobody answers at {link.address} in {settings.connect_s} s"
                if link.failures:
                    reason += f"; {link.failures} handshakes failed: is it an agent, is that its key, do both use keys?"
                self._lose(link, "peer_unreachable", reason)
        elif now - link.heard_at > settings.silence_s and not self._is_full:
            self._lose(link, "peer_silent", f"nothing heard from {link.address} for {settings.silence_s} s")
        elif now - link.pinged_at >= self._ping_s and (
            link.is_dialled or now - link.heard_at > settings.silence_s / 2  # the peer may ping too rarely for us
        ):
            link.pinged_at = now
            self.send(link, Ping(number=0))

    # -- ends ------------------------------------------------------------------------------------------------------

    def _lose(self, link: Link, code: str, reason: str) -> None:
        self._end(link, 0)
        self._tell(Lost(link, code, reason))

    def _end(self, link: Link, linger_ms: int) -> None:
        link.step(PeerLinkEvent.LOSE)
        link.outbox.clear()
        link.early.clear()
        if link.pipe is not None and linger_ms:
            link.pipe.close()  # queued messages leave, if the peer reads
            self._loop.call_later(linger_ms / 1000, link.pipe.shut)
        elif link.pipe is not None:
            link.pipe.shut()
        port = self._ports.pop(link, None)
        if link.identity is None:
            del self._dialled[link.address]
            self._waiting.pop(link, None)
            self._unreached.pop(link, None)
            if port is not None:
                port.close(linger_ms)
        else:
            del self._accepted[link.identity]

    def _reject(self, link: Link | None, code: str, text: str) -> None:
        self.rejected[code] += 1
        self._tell(Rejected(link, code, text))

    def _refused(self, code: str, text: str) -> None:
        """The AuthDoor refused a connection. Counted always; an event only while there is room for one."""
        if self._is_full:
            self.rejected[code] += 1
        else:
            self._reject(None, code, text)

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        self._woken.set()
        if self._is_full:
            self._was_full = True
            self._tick_soon()

    @property
    def _is_full(self) -> bool:
        return len(self._events) >= MOST_EVENTS

    def _bind(self) -> None:
        if self._listen is None:
            return
        self.trust.check_listened(self._listen, allow_wildcard=self._allow_wildcard)
        buckets = Buckets(self.settings.handshakes_per_s, self.settings.handshakes_at_once)
        try:
            self._door = AuthDoor(self._context, lambda: self.trust.keys, buckets, self._refused)
            self._router = self._port(zmq.ROUTER, is_ipv6(self._listen), self._serve_router, self._watched_router)
            guard(self._router.socket, self.trust.keys)
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
        if self._door is not None:
            self._door.close()
        for task in self._pipe_tasks:
            task.cancel()
        for pipe in list(self._pipes):
            pipe.shut()
        self._context.term()  # waits LINGER_MS at most


def _key_of(frame: zmq.Frame) -> str:
    """The key that its connection proved at the AuthDoor; "" without keys."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
