"""Our sessions with other agents, dialled and accepted, and the dispatch of what comes in."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvbridge_proto.peer import Body, Goodbye, Hello, OfReceiver, OfSender, Refuse, Welcome
from kvbridge_proto.status import PeerStatus

from ..dataplane.data_plane import DataPlane
from ..exchange.session import Session
from ..states import SessionState
from ..transport.control import Control
from ..transport.events import Arrived, Lost, Reached, Rejected
from ..transport.link import Link
from .incoming_peers import IncomingPeers
from .metrics import Metrics
from .outgoing_peers import OutgoingPeer, OutgoingPeers
from .status import peer_statuses

log = logging.getLogger("kvbridge.peers")

WARN_REJECTED_S = 60.0


@dataclass(eq=False, repr=False)
class Peers:
    """Opens and ends sessions. What they are used for is up to the receiver and the sender."""

    _control: Control
    outgoing: OutgoingPeers
    incoming: IncomingPeers
    _data_plane: DataPlane
    _metrics: Metrics
    _clock: Callable[[], float] = time.monotonic
    _warned: dict[str, float] = field(default_factory=dict, init=False)

    async def serve(self) -> None:
        """Handle what comes in until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            async for event in self._control.events(partial(self._take, tasks)):
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
        """End all sessions, because our engine left or we are stopping: the epoch they name is over."""
        self.outgoing.give_up(self.renew(reason), "engine_left", reason)

    def renew(self, reason: str) -> list[str]:
        """End all sessions, because our engine has a new epoch or new slots. Returns the addresses of senders.

        The receiver is told by the caller, and reaches again for those it needs.
        """
        addresses = self.outgoing.renew(reason)
        self.incoming.renew(reason)
        return addresses

    def statuses(self) -> list[PeerStatus]:
        name_of = self._control.trust.name_of
        return peer_statuses(self.outgoing.sessions.values(), self.incoming.sessions.values(), name_of)

    # Callable from any thread: `list` copies atomically.

    def count_dialled(self, state: SessionState) -> int:
        """How many sessions that we dialled are in this state."""
        return sum(each.state is state for each in list(self.outgoing.sessions.values()))

    def count_accepted(self) -> int:
        return len(self.incoming.sessions)

    def open_dialled(self) -> list[Session]:
        """Open sessions with senders."""
        return [each.session for each in list(self.outgoing.sessions.values()) if each.session is not None]

    def open_accepted(self) -> list[Session]:
        """Open sessions with receivers."""
        return [each.session for each in list(self.incoming.sessions.values())]

    def _take(self, tasks: asyncio.TaskGroup, link: Link, sender: str, body: Body) -> None:
        """Handle one message. A failure costs its link and nothing else."""
        try:
            if isinstance(body, Hello):  # its answer waits for the data plane; nothing else may
                if (answered := self.incoming.hello_received(link, sender, body)) is not None:
                    tasks.create_task(self._answer(link, f"Hello of {sender}", answered))
            elif isinstance(body, Welcome) and link.is_dialled:
                tasks.create_task(self._welcome(link, body))
            elif isinstance(body, Refuse) and (dialled := self._to_greet_again(link, body)) is not None:
                tasks.create_task(
                    self._answer(link, f"Refuse of {link.address}", self.outgoing.greet_with_slots(dialled))
                )
            else:
                if link.is_dialled or sender in self.incoming.sessions:
                    self._data_plane.linger.keep_awake()
                self._hear(link, sender, body)
        except Exception:
            self._fault(link, f"{type(body).__name__} of {sender}")

    def _to_greet_again(self, link: Link, refuse: Refuse) -> OutgoingPeer | None:
        """The peer to greet again: it refused because it has to write, and our Hello named no slots."""
        is_of_hello = refuse.code == "no_slots" and not refuse.about
        return self.outgoing.lacks_slots(link) if is_of_hello and link.is_dialled else None

    def _welcome(self, link: Link, greeting: Welcome) -> Coroutine[Any, Any, None]:
        """Answer a Welcome for the session that this link carries now: once the task runs it may carry another."""
        return self._answer(link, f"Welcome of {link.address}", self.outgoing.welcomed(link, greeting))

    async def _answer(self, link: Link, what: str, answered: Coroutine[Any, Any, None]) -> None:
        try:
            await answered
        except Exception:
            self._fault(link, what)

    def _hear(self, link: Link, sender: str, body: Body) -> None:
        if link.is_dialled and isinstance(body, OfSender | Goodbye):
            self.outgoing.hear(link, sender, body)
        elif isinstance(body, OfReceiver | Goodbye):
            self.incoming.hear(link, sender, body)
        else:
            self._metrics.rejected("unexpected_message")

    def _lose(self, link: Link, reason: str) -> None:
        (self.outgoing if link.is_dialled else self.incoming).lose(link, reason)

    def _fault(self, link: Link, what: str) -> None:
        """We failed to handle a message: log the cause, and end the link."""
        log.exception("a message could not be handled: %s", what)
        self._metrics.rejected("internal_error")
        link.close()
        self._lose(link, "internal_error: see the log")

    def _rejected(self, code: str, text: str) -> None:
        self._metrics.rejected(code)
        now = self._clock()
        if (
            now - self._warned.get(code, -WARN_REJECTED_S) >= WARN_REJECTED_S
        ):  # counted every time, logged once a minute
            self._warned[code] = now
            log.warning("rejected a message: code=%s %s", code, text)
