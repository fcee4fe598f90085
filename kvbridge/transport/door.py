"""The memory door: an agent hands handles to its engine's memory to other agents of its host, and to nobody else.

It is a unix socket beside the agent's own. The kernel says which process and user calls. A token that travelled in the
authenticated handshake says for which session and which epoch of the engine. A connection stays open as long as the
receiver has the memory mapped, so its end is the end of the mapping, or of the process that had it. On a GPU a process
ends some 10 ms before its kernels do; they may still read, but what they read does not count.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from kvbridge_proto.common import OURS, negotiate
from kvbridge_proto.door import (
    DOOR_SUFFIX,
    TOKEN_BYTES,
    FromDoor,
    MemoryEnding,
    MemoryOpened,
    OpenMemory,
    Ticket,
    ToDoor,
)
from kvbridge_proto.engine import Refused
from kvbridge_proto.framing import LIMITS, BadFrame, Limits
from kvbridge_proto.pool import Handle
from msgspec import structs

from ..errors import PeerError
from ..failpoints import failpoint
from ..unix_socket import close_fds, credentials_of
from ..values import Value, replace
from .framed import Connection
from .local import Server, file_of, is_allowed
from .lock import KERNEL, Lock

log = logging.getLogger("kvbridge.door")

# Takes our end of a pipe. The door's connection cannot be the pipe: it ends at each new epoch, over which the link goes
# on, and it outlives a lost link until no kernel reads. A round trip costs the same by both (35 us of CPU, 2-core
# AMD EPYC, November 2026), so a pipe of its own costs only what opening it does, once a link.
Pipe = Callable[[socket.socket], None]

MAX_IMPORTERS = 256
MAX_CALLERS = 32  # connections that have not been handed anything
MAX_TOKENS = 1024  # that have not been shown yet
CALL_S = 1.0  # for the first message
HAND_OVER_S = 2.0  # for the handles to leave
STEPS = 8  # in which such time is counted; each counts once, however long our loop stood still in it
CALL_LIMITS = Limits(frame_bytes=2048)
ELSEWHERE = "the peer is in another container, which does not share this folder"
REFUSALS = frozenset(
    [
        *("uid_not_allowed", "too_many_connections", "caller_slow", "version_mismatch"),
        *("wrong_token", "stale_epoch", "frame_malformed", "frame_too_large", "message_invalid", "too_many_fds"),
    ]
)


class Shared(Value):
    """One epoch's memory as it is handed over. The owner keeps the fds open until `MemoryDoor.end` has returned."""

    epoch: int
    handles: tuple[Handle, ...]
    fds: tuple[int, ...]
    fence: int | None = None  # which of the fds is the page of the engine's fence


class Importer(Value):
    """A process that has our engine's memory mapped. `over_at` is when it was told to close it, None before."""

    pid: int
    uid: int
    agent: str
    session: str
    epoch: int
    since: float
    over_at: float | None = None


class MemoryDoor(Server["_Caller"]):
    """Listens beside the lock's socket. Use as `async with`, then `serve` until cancelled; all on one loop.

    Users in `allowed_uids` may call, besides our own user and root. `clock` gives the times in `Importer`.
    Raises OperatorError on entry.
    """

    def __init__(
        self,
        lock: Lock,
        *,
        allowed_uids: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(Path(f"{lock.socket}{DOOR_SUFFIX}"), frozenset([os.getuid(), *allowed_uids]), MAX_CALLERS)
        self._machine = KERNEL.read_text().strip()
        self._clock = clock
        self._shared: Shared | None = None
        self._tickets: dict[str, tuple[Ticket, Pipe | None]] = {}  # by session, the newest last
        self._importers: dict[_Caller, Importer] = {}

    def connection(self, accepted: socket.socket) -> _Caller:
        return _Caller(accepted, self.open)

    def is_kept(self, connection: _Caller) -> bool:
        return connection in self._importers

    # Called by the agent:

    def share(self, shared: Shared) -> None:
        """From now on hand this over, and nothing older."""
        self._shared = shared

    def admit(self, session: str, pipe: Pipe | None = None) -> Ticket | None:
        """A ticket for what is shared now, good for one opening. Earlier tickets of the session become void.

        If `pipe` is given, the opener gets one end of a pipe, and `pipe` the other. None if nothing is shared.
        """
        if self._shared is None:
            return None
        self._tickets.pop(session, None)
        while len(self._tickets) >= MAX_TOKENS:
            del self._tickets[next(iter(self._tickets))]
        ticket = Ticket(
            machine=self._machine,
            path=str(self.path),
            session=session,
            epoch=self._shared.epoch,
            token=secrets.token_bytes(TOKEN_BYTES),
            socket=self.file,
        )
        self._tickets[session] = ticket, pipe
        return ticket

    def dismiss(self, session: str, reason: str) -> None:
        """The session is over: void its ticket, and tell its importer to close the memory."""
        self._tickets.pop(session, None)
        self._tell(reason, lambda importer: importer.session == session)

    def end(self, epoch: int, reason: str) -> None:
        """The engine leaves, or its memory changes: stop handing out this epoch, and tell its importers to close it.

        Does not wait for them. Until they have closed it, `importers` names them, and a GPU does not free the memory.
        """
        if self._shared is not None and self._shared.epoch == epoch:
            self._shared = None
        for caller in [each for each in self.open if each.taking == epoch]:
            caller.shut()  # its fds are about to be closed
        self._tell(reason, lambda importer: importer.epoch == epoch)

    def importers(self) -> list[Importer]:
        """Who has which epoch mapped, the longest first."""
        return list(self._importers.values())

    async def serve(self) -> None:
        """Answer callers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                caller = await self.accept()
                if len(self._importers) >= MAX_IMPORTERS:
                    self.refuse(caller, "too_many_connections", f"importers: limit {MAX_IMPORTERS}")
                else:
                    tasks.create_task(self._answer(caller))

    # Answers to callers:

    async def _answer(self, caller: _Caller) -> None:
        """Serve one caller, from its first byte to its end."""
        try:
            shared, request, pipe = await self._proven(caller)
            await self._hand_over(caller, shared, request, pipe)
            if await caller.receive() is not None:
                raise PeerError("message_invalid", "more was said than open_memory")
        except (PeerError, BadFrame) as error:
            self.refuse(caller, error.code, str(error)[:1024])
        except Exception:
            log.exception("pid=%d", caller.pid)
        finally:
            if (importer := self._importers.pop(caller, None)) is not None:
                log.info(
                    "closed by pid=%d agent=%s epoch=%d: %s", importer.pid, importer.agent, importer.epoch, caller.why
                )
            caller.close("done")
            if caller.taking is not None:
                caller.shut()

    async def _proven(self, caller: _Caller) -> tuple[Shared, OpenMemory, Pipe | None]:
        """Check the first message. Returns what the caller may have; raises PeerError with the refusal's code."""
        try:
            async with _within(CALL_S):
                received = await caller.receive()
        except TimeoutError:
            raise PeerError("caller_slow", f"the first message: not all here after {CALL_S} s") from None
        if received is None:
            raise PeerError("caller_slow", "it left without a word")
        request, _ = received
        ticket, pipe = self._tickets.get(request.session, (None, None))
        if ticket is None or not hmac.compare_digest(ticket.token, request.token):
            raise PeerError("wrong_token", "token: not the one of an open session, or shown before")
        del self._tickets[request.session]
        ours = None if self._shared is None else self._shared.epoch
        if self._shared is None or {request.epoch, ticket.epoch} != {ours}:
            raise PeerError(
                "stale_epoch", f"epoch: receiver {request.epoch}, of the token {ticket.epoch}, sender {ours}"
            )
        if negotiate(OURS, request.versions) is None:
            raise PeerError("version_mismatch", f"versions: sender {OURS}, receiver {request.versions}")
        return self._shared, request, pipe

    async def _hand_over(self, caller: _Caller, shared: Shared, request: OpenMemory, pipe: Pipe | None) -> None:
        """Send the handles. Raises PeerError if they are not all taken.

        The caller is an importer before the first byte leaves: that byte may be enough for it to map the memory.
        """
        importer = Importer(caller.pid, caller.uid, request.agent, request.session, shared.epoch, self._clock())
        self._importers[caller] = importer
        version = negotiate(OURS, request.versions)
        assert version is not None, "_proven has looked"
        caller.taking = shared.epoch
        opened = MemoryOpened(version=version, epoch=shared.epoch, handles=shared.handles, fence=shared.fence)
        with ExitStack() as until_taken:
            if pipe is None:
                caller.send(opened, shared.fds)
            else:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                until_taken.callback(theirs.close)
                pipe(ours)
                opened = structs.replace(opened, pipe=len(shared.fds))
                caller.send(opened, (*shared.fds, theirs.fileno()))
            try:
                async with _within(HAND_OVER_S):
                    await caller.flush()
            except TimeoutError:
                caller.shut()
                raise PeerError("caller_slow", f"the handles: not all taken after {HAND_OVER_S} s") from None
        caller.taking = None
        failpoint("sender.memory_handed")
        log.info("handed to pid=%d uid=%d agent=%s epoch=%d", caller.pid, caller.uid, request.agent, shared.epoch)

    def _tell(self, reason: str, is_meant: Callable[[Importer], bool]) -> None:
        for caller, importer in self._importers.items():
            if is_meant(importer) and importer.over_at is None:
                caller.send(MemoryEnding(reason=reason[:1024]))
                self._importers[caller] = replace(importer, over_at=self._clock())


class _Caller(Connection[ToDoor, FromDoor]):
    """A receiver at our door. It must send no descriptors."""

    def __init__(self, accepted: socket.socket, owner: set[_Caller]) -> None:
        self.taking: int | None = None  # the epoch whose fds are being sent
        super().__init__(accepted, ToDoor, CALL_LIMITS, owner, most_fds=0)


class Handover:
    """A peer's memory as it was handed to us. We may map it until `close`, which the peer waits for.

    `close_fds`, to be called once they are mapped, or `close` closes the `fds`. It also closes the pipe, if we were
    given one; call `take_pipe` before to keep it.
    """

    def __init__(self, connection: Connection[FromDoor, ToDoor], opened: MemoryOpened, fds: list[int]) -> None:
        self.epoch = opened.epoch
        self.handles = opened.handles
        self.fds = fds
        self._pipe, self._fence = opened.pipe, opened.fence
        self.is_peer_gone = False  # `ending` returned because the peer's agent closed its end of the connection
        self._connection = connection

    @property
    def is_closed(self) -> bool:
        """Whether we have closed it."""
        return self._connection.is_closed

    async def ending(self) -> str:
        """Wait until the memory must be closed, because its agent says so or is gone. Returns the reason."""
        try:
            received = await self._connection.receive()
        except BadFrame as error:
            return f"{error.code}: {error}"
        if received is None:
            self.is_peer_gone = True
            return f"the peer's agent is gone: {self._connection.why}"
        message, fds = received
        close_fds(fds)
        return message.reason if isinstance(message, MemoryEnding) else f"said {type(message).__name__}"

    def take_pipe(self) -> socket.socket | None:
        """The pipe given beside the handles, if any; the caller must close it. PeerError if it is something else."""
        if self._pipe is None or self._pipe >= len(self.fds):
            return None
        fd = os.dup(self.fds[self._pipe])
        try:
            pipe = socket.socket(fileno=fd)
        except OSError as error:
            os.close(fd)
            raise PeerError("door_refused", f"pipe: {error}") from error
        if (pipe.family, pipe.type) != (socket.AF_UNIX, socket.SOCK_STREAM):
            pipe.close()
            raise PeerError("door_refused", f"pipe: {pipe.family!r} {pipe.type!r}, must be a unix stream socket")
        return pipe

    @property
    def fence_fd(self) -> int | None:
        """The descriptor of the fence's page, if we were given it."""
        return None if self._fence is None or self._fence >= len(self.fds) else self.fds[self._fence]

    def close_fds(self) -> None:
        close_fds(self.fds)
        self.fds = []

    def close(self) -> None:
        """Tell the peer that none of the memory is mapped any more. Idempotent."""
        self.close_fds()
        self._connection.close()
        self._connection.shut()


async def open_memory(
    ticket: Ticket, agent: str, *, allowed_uids: Iterable[int] = (), within_s: float = 2.0
) -> Handover:
    """Get a peer's memory handed over, as its ticket promises. `agent` is our name.

    Raises PeerError `wrong_machine`, `door_elsewhere` if its path leads to another socket here or to none (we are in
    another container), `door_unreachable`, `uid_not_allowed` if the process that listens there is not our user's,
    root's or an allowed user's, `door_refused`, or the code that it refuses with.
    """
    if ticket.machine != KERNEL.read_text().strip() or not ticket.path.endswith(DOOR_SUFFIX):
        raise PeerError("wrong_machine", f"door: {ticket.path} of machine {ticket.machine} is none of ours")
    _check_socket(ticket)
    with ExitStack() as stack:
        try:
            async with _within(within_s):
                connection = await _connected(ticket.path, frozenset([os.getuid(), *allowed_uids]))
                stack.callback(connection.shut)
                shown = OpenMemory(
                    versions=OURS, session=ticket.session, epoch=ticket.epoch, token=ticket.token, agent=agent
                )
                connection.send(shown)
                received = await connection.receive()
        except (TimeoutError, OSError, BadFrame) as error:
            raise PeerError("door_unreachable", f"door {ticket.path}: {error or 'no answer'}") from error
        if received is None:
            raise PeerError("door_unreachable", f"door {ticket.path}: {connection.why}")
        message, fds = received
        if not isinstance(message, MemoryOpened) or message.epoch != ticket.epoch:
            close_fds(fds)
            raise _refusal(message, ticket)
        stack.pop_all()
        return Handover(connection, message, fds)


@asynccontextmanager
async def _within(seconds: float) -> AsyncIterator[None]:
    """`asyncio.timeout`, but for the time in which our own loop stood still: what came then was not read yet."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle
    async with asyncio.timeout(None) as timeout:

        def count(left: int) -> None:
            nonlocal timer
            if left:
                timer = loop.call_later(seconds / STEPS, count, left - 1)
            else:
                timeout.reschedule(loop.time())

        timer = loop.call_later(seconds / STEPS, count, STEPS - 1)
        try:
            yield
        finally:
            timer.cancel()


def _check_socket(ticket: Ticket) -> None:
    """Raises PeerError `door_elsewhere`. Containers of one node often use one path, each for a socket of its own."""
    try:
        here = file_of(os.lstat(ticket.path))
    except OSError as error:
        raise PeerError("door_elsewhere", f"door {ticket.path}: not here ({error.strerror}): {ELSEWHERE}") from error
    if ticket.socket not in ("", here):
        raise PeerError("door_elsewhere", f"door {ticket.path}: here that is another socket: {ELSEWHERE}")


def _refusal(message: FromDoor, ticket: Ticket) -> PeerError:
    if isinstance(message, MemoryOpened):
        return PeerError(
            "stale_epoch", f"epoch: of the token {ticket.epoch}, of the memory handed over {message.epoch}"
        )
    if not isinstance(message, Refused):
        return PeerError("door_refused", f"door: said {type(message).__name__}")
    code = message.code if message.code in REFUSALS else "door_refused"
    return PeerError(code, *(message.reasons or (message.code,)))


async def _connected(path: str, allowed_uids: frozenset[int]) -> Connection[FromDoor, ToDoor]:
    """Connect. A foreign user who listens in our peer's place is told nothing: it would get the token."""
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connecting.setblocking(False)
        while True:
            try:
                connecting.connect(path)
                break
            except BlockingIOError:  # the backlog is full; event loops would take this for a connection under way
                await asyncio.sleep(0.01)
        pid, uid, _ = credentials_of(connecting)
        if not is_allowed(uid, allowed_uids):
            raise PeerError(
                "uid_not_allowed", f"door {path}: pid {pid} of uid {uid} listens, allowed {set(allowed_uids)}"
            )
        return Connection(connecting, FromDoor, LIMITS, set())
    except BaseException:
        connecting.close()
        raise
