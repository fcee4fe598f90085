"""Shares our engine's memory with receivers, and maps that of senders, for the route `pull`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

from kvbridge_proto.door import Ticket

from ..dataplane.attached import AttachedMemory
from ..dataplane.data_plane import DataPlane
from ..errors import PeerError
from ..exchange.route import Rate
from ..exchange.session import Session
from ..failpoints import failpoint
from ..transport.door import Handover, Importer, MemoryDoor, Shared, open_memory
from ..transport.link import Link

log = logging.getLogger("kvbridge.doors")

LINK_FIRST_S = 0.02  # for the link to report the end of the session: it has the reason, and closes the memory itself

Ended = Callable[[str, str], None]  # code, reason


class Doors:
    """The memory that one agent shares and maps. This one is of an agent that does neither."""

    async def serve(self) -> None:
        """Answer callers at our door, and watch the memory we have mapped, until cancelled."""

    def admit(self, session: Session, link: Link) -> Ticket | None:
        """The ticket with which this session's receiver may open our engine's memory; None if nothing is shared.

        Opening it also hands over a pipe, if the link has none.
        """
        return None

    def revoke(self, session: Session) -> None:
        """The session is over: void its ticket, and tell its receiver to close the memory."""

    async def enter(self, session: Session, ticket: Ticket, link: Link, ended: Ended) -> Rate | None:
        """Map the memory of the sender's engine. Returns the read rate, if it was measured. Raises KVBridgeError.

        `ended` is called when the sender's agent wants it closed, or is gone; not once we have closed it ourselves.
        """
        raise PeerError("sharing_off", "share_memory is off at the receiver, or its routes do not name pull")

    def share(self, attached: AttachedMemory) -> None:
        """Hand over this memory from now on."""

    def withdraw(self, attached: AttachedMemory, reason: str) -> None:
        """Stop handing over this memory, and tell its importers to close it."""

    def importers(self) -> list[Importer]:
        """Which processes have our engine's memory mapped."""
        return []


class LocalDoors(Doors):
    """Our door, and those of other agents on this host. `name` is this agent's, for their logs."""

    def __init__(self, door: MemoryDoor, data_plane: DataPlane, name: str, allowed_uids: Iterable[int]) -> None:
        self._door = door
        self._data_plane = data_plane
        self._name = name
        self._allowed_uids = tuple(allowed_uids)
        self._listening: asyncio.TaskGroup

    async def serve(self) -> None:
        async with asyncio.TaskGroup() as self._listening:
            await self._door.serve()

    def admit(self, session: Session, link: Link) -> Ticket | None:
        return self._door.admit(session.peer.incarnation, None if link.pipe else link.carry_by)

    def revoke(self, session: Session) -> None:
        self._door.dismiss(session.peer.incarnation, "the session is over")

    async def enter(self, session: Session, ticket: Ticket, link: Link, ended: Ended) -> Rate | None:
        handover = await open_memory(ticket, self._name, allowed_uids=self._allowed_uids)
        with contextlib.ExitStack() as stack:
            stack.callback(handover.close)
            if (pipe := handover.take_pipe()) is not None:
                link.carry_by(pipe)
            what = session.memory_id, session.peer_pool, handover.handles, handover.fds
            rate = await self._data_plane.open_peer(*what, handover.close, handover.fence_fd)
            stack.pop_all()
        failpoint("receiver.memory_opened")
        handover.close_fds()
        self._listening.create_task(_listen(handover, ended))
        return rate

    def share(self, attached: AttachedMemory) -> None:
        if (shared := attached.shared) is not None:
            self._door.share(Shared(attached.epoch, shared.handles, shared.fds, shared.fence))

    def withdraw(self, attached: AttachedMemory, reason: str) -> None:
        self._door.end(attached.epoch, reason)

    def importers(self) -> list[Importer]:
        return self._door.importers()


async def _listen(handover: Handover, ended: Ended) -> None:
    """Wait until the memory is to be closed, and report that: our link may not have heard that the session is over."""
    reason = await handover.ending()
    if not handover.is_closed:
        await asyncio.sleep(LINK_FIRST_S)
    if handover.is_closed:
        return
    try:
        ended("peer_lost" if handover.is_peer_gone else "peer_left", reason)
    except Exception:
        log.exception("the end of a peer's memory could not be handled: %s", reason)
