"""Our sessions with other agents: those we dialled to fetch from, those that dialled us. Who hears what comes in."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from kvbridge_proto.peer import (
    BlockTables,
    Body,
    Cancel,
    Check,
    Checked,
    Claim,
    Drained,
    Failing,
    Goodbye,
    Grant,
    Hello,
    Hold,
    Ready,
    Refuse,
    Renew,
    Settled,
    Welcome,
)
from kvbridge_proto.status import PeerStatus

from ..dataplane.data_plane import DataPlane
from ..exchange.session import Session
from ..states import SessionState
from ..transport.control import Control
from ..transport.events import Arrived, Lost, Reached, Rejected
from ..transport.link import Link
from .incoming_peers import IncomingPeers
from .metrics import Metrics
from .outgoing_peers import OutgoingPeers
from .peer_records import OutgoingPeer
from .status import peer_statuses

log = logging.getLogger("kvbridge.peers")

WARN_S = 60.0


class Peers:
    """Sessions come and go here; what they are for is the receiver's and the sender's business."""

    def __init__(
        self,
        control: Control,
        outgoing: OutgoingPeers,
        incoming: IncomingPeers,
        data_plane: DataPlane,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.outgoing = outgoing
        self.incoming = incoming
        self._control = control
        self._data_plane = data_plane
        self._metrics = metrics
        self._clock = clock
        self._warned: dict[str, float] = {}

    async def serve(self) -> None:
        """Hear what comes in until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            async for event in self._control.events():
                match event:
                    case Reached(link=link):
                        self.outgoing.reached(link)
                    case Arrived(link=link, envelope=envelope):
                        self._take(tasks, link, envelope.sender, envelope.body)
                    case Lost(link=link, code=code, reason=reason):
                        self._lose(link, f"{code}: {reason}")
                    case Rejected(code=code, text=text):
                        self._rejected(code, text)

    def end_all(self, reason: str) -> None:
        """Our engine left or we are stopping: every session names an epoch that is over."""
        self.outgoing.give_up(self.renew(reason), "engine_left", reason)

    def renew(self, reason: str) -> list[str]:
        """Another epoch of the same engine: sessions end, the receiver knows and asks anew for whom it needs."""
        addresses = self.outgoing.renew(reason)
        self.incoming.renew(reason)
        return addresses

    def statuses(self) -> list[PeerStatus]:
        name_of = self._control.trust.name_of
        return peer_statuses(self.outgoing.sessions.values(), self.incoming.sessions.values(), name_of)

    # Any thread may ask for these: each list is made without a step of Python in between.

    def count_dialled(self, state: SessionState) -> int:
        """How many sessions that we dialled are in this state."""
        return sum(each.state is state for each in list(self.outgoing.sessions.values()))

    def count_accepted(self) -> int:
        return len(self.incoming.sessions)

    def open_dialled(self) -> list[Session]:
        """Sessions with those that we fetch from."""
        return [each.session for each in list(self.outgoing.sessions.values()) if each.session is not None]

    def open_accepted(self) -> list[Session]:
        """Sessions with those that fetch from us."""
        return [each.session for each in list(self.incoming.sessions.values())]

    def _take(self, tasks: asyncio.TaskGroup, link: Link, sender: str, body: Body) -> None:
        """One message; what goes wrong with it costs its link and nothing else."""
        try:
            if isinstance(body, Hello):  # waits for the data plane; nobody else shall
                if (answered := self.incoming.knocked(link, sender, body)) is not None:
                    tasks.create_task(self._answer(link, f"Hello of {sender}", answered))
            elif isinstance(body, Welcome) and link.is_dialled:
                tasks.create_task(self._welcome(link, body))
            elif (dialled := self._to_greet_again(link, body)) is not None:
                tasks.create_task(
                    self._answer(link, f"Refuse of {link.address}", self.outgoing.greet_with_slots(dialled))
                )
            else:
                if link.is_dialled or sender in self.incoming.sessions:
                    self._data_plane.stir()
                self._hear(link, sender, body)
        except Exception:
            self._fault(link, f"{type(body).__name__} of {sender}")

    def _to_greet_again(self, link: Link, body: Body) -> OutgoingPeer | None:
        """Who would write to slots of ours, where our greeting named none."""
        is_of_hello = isinstance(body, Refuse) and body.code == "no_slots" and not body.about
        return self.outgoing.lacks_slots(link) if is_of_hello and link.is_dialled else None

    def _welcome(self, link: Link, greeting: Welcome) -> Coroutine[Any, Any, None]:
        """Answers whom we greet now: once this has its turn, that may be over, and the link greet for another."""
        return self._answer(link, f"Welcome of {link.address}", self.outgoing.welcomed(link, greeting))

    async def _answer(self, link: Link, what: str, answered: Coroutine[Any, Any, None]) -> None:
        try:
            await answered
        except Exception:
            self._fault(link, what)

    def _hear(self, link: Link, sender: str, body: Body) -> None:
        match body:
            case BlockTables() | Checked() | Ready() | Failing() | Drained() | Refuse() | Goodbye() if link.is_dialled:
                self.outgoing.hear(link, sender, body)
            case Claim() | Grant() | Renew() | Check() | Cancel() | Hold() | Settled() | Goodbye():
                self.incoming.hear(link, sender, body)
            case _:
                self._metrics.rejected("unexpected_message")

    def _lose(self, link: Link, reason: str) -> None:
        (self.outgoing if link.is_dialled else self.incoming).lose(link, reason)

    def _fault(self, link: Link, what: str) -> None:
        """Our own fault: it costs the link, the log has the cause."""
        log.exception("a message could not be handled: %s", what)
        self._metrics.rejected("internal_error")
        link.close()
        self._lose(link, "internal_error: see the log")

    def _rejected(self, code: str, text: str) -> None:
        self._metrics.rejected(code)
        now = self._clock()
        if now - self._warned.get(code, -WARN_S) >= WARN_S:  # counted each time, said once a minute
            self._warned[code] = now
            log.warning("rejected a message: code=%s %s", code, text)
