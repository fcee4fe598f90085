"""What the two runners do alike: carry out what the exchange decides, then record what has happened."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from kvbridge_proto.engine import Failed, ToEngine
from kvbridge_proto.peer import Body

from ..dataplane.data_plane import DataPlane
from ..exchange.actions import Action, Ask, Reach, Send, Tell, WatchProcess
from ..exchange.orders import Order, Watch
from .current_engine import CurrentEngine
from .record import Event, Record


class Sending(Protocol):
    def send(self, peer: str, body: Body, /) -> None: ...


@dataclass(eq=False, repr=False)
class Runner(abc.ABC):
    """Runs on the loop. `_send_to` are the peers of its half."""

    _send_to: Sending = field(init=False)

    _data_plane: DataPlane
    _record: Record
    _current: CurrentEngine
    _clock: Callable[[], float]

    def do(
        self, actions: Iterable[Action], events: Iterable[Event] = (), heard_at: float | None = None, peer: str = ""
    ) -> None:
        """Carry these out; then record the `events` that they follow from, and what was done: somebody waits for them.

        `peer` is who sent the events. If an action fails, those before it are recorded, and its error is raised.
        """
        at = self._clock()  # what is sent now may be recorded by the other agent before we record it
        done: list[Action] = []
        try:
            for action in actions:
                match action:
                    case Send(peer=receiver, body=body):
                        self._send_to.send(receiver, body)
                        self._sent(body)
                    case Tell(message=message):
                        if isinstance(message, Failed):  # its engine may look for the line at once
                            said = "code=%s %s", message.code, message.reason
                            self._record.warn("failed", *said, number=message.number)
                        self._current.tell(message)
                        self._sent(message)
                    case Reach() | Ask() | WatchProcess() | Watch():
                        self._act(action)
                    case Order():
                        self._data_plane.give(action, self._current.memory)
                done.append(action)
        finally:
            note = self._record.note
            for event in events:
                note(event, at if heard_at is None else heard_at, peer)
            for action in done:
                match action:
                    case Send(peer=receiver, body=body, number=number):
                        note(body, at, receiver, number)
                    case Tell(message=message):
                        note(message, at)
                    case Reach() | Ask() | WatchProcess() | Order():
                        pass
                    case _:
                        note(action, at)

    @abc.abstractmethod
    def _act(self, action: Reach | Ask | WatchProcess | Watch) -> None:
        """Do what only this half does."""

    @abc.abstractmethod
    def _sent(self, said: Body | ToEngine) -> None:
        """Pass the failpoints of what has been sent."""
