"""Bootstrap rooms of one rank: whose each is, what the other server has said of it, how it ended. Pure, but for a lock.

A room is a number that a client may choose, so it may come twice, with another prompt, or from a stranger. It is one
request's at a time: from `enter` to `leave`. What the other server says may come before that, and after it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from .messages import Asked, Row

MOST_ROOMS = 65536  # asked for without a request
MOST_ASKING = 1024  # ranks, of one room
FORGET_S = 900.0  # a question whose request never came
FAILED_S = 300.0  # a question that comes so long after its request has failed is told so
OTHER_PROMPT = "the request of the other side has another prompt, adapter, media or salt"


@dataclass(slots=True)
class Room:
    """`owner` is the request of ours that has it, `prompt` its digest; "" until they are known.

    `is_open`: nobody asks for it before it is computed (`foreign.py`).
    """

    since: float
    owner: object | None = None
    prompt: str = ""
    is_open: bool = False
    asked: dict[tuple[str, int], Asked] = field(default_factory=dict)
    row: Row | None = None


class Rooms:
    """Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rooms: dict[int, Room] = {}
        self._failed: dict[int, tuple[str, float]] = {}  # why, and when

    def enter(self, number: int, owner: object, now: float) -> str:
        """From here on it is this request's. Why it is not, or ""."""
        if type(number) is not int or not 0 < number < 1 << 63:
            return f"bootstrap_room {number}: must be a number in [1, 2^63)"
        with self._lock:
            room = self._rooms.setdefault(number, Room(now))
            if room.owner is not None:
                return f"bootstrap_room {number}: in use by another request"
            room.owner = owner
            self._failed.pop(number, None)
            return ""

    def is_of(self, number: int, owner: object) -> bool:
        with self._lock:
            room = self._rooms.get(number)
            return room is not None and room.owner is owner

    def bind(self, number: int, owner: object, prompt: str) -> list[Asked]:
        """What its request is about. Whoever asked for another prompt is answered that it is not this one."""
        with self._lock:
            room = self._rooms.get(number)
            if room is None or room.owner is not owner:
                return []
            room.prompt, room.row = prompt, None
            strangers = [each for each in room.asked.values() if each.prompt != prompt]
            room.asked = {place: each for place, each in room.asked.items() if each.prompt == prompt}
            return strangers

    def open(self, number: int, owner: object) -> None:
        with self._lock:
            room = self._rooms.get(number)
            if room is not None and room.owner is owner:
                room.is_open = True

    def is_open(self, number: int) -> bool:
        """Whether its prefill may begin, though nobody has asked."""
        with self._lock:
            room = self._rooms.get(number)
            return room is not None and room.is_open and bool(room.prompt)

    def prompt(self, number: int) -> str:
        with self._lock:
            room = self._rooms.get(number)
            return "" if room is None else room.prompt

    # What the other server says:

    def ask(self, asked: Asked, now: float) -> str:
        """A rank of the decode side has places for this prompt. Why it will not be served, or ""."""
        with self._lock:
            if (failed := self._failed.get(asked.room)) is not None:
                return failed[0]
            if asked.room not in self._rooms and len(self._rooms) >= MOST_ROOMS:
                return f"rooms: {MOST_ROOMS} are asked for"
            room = self._rooms.setdefault(asked.room, Room(now))
            if room.prompt and room.prompt != asked.prompt:
                return f"bootstrap_room {asked.room}: {OTHER_PROMPT}"
            if len(room.asked) >= MOST_ASKING:
                return f"bootstrap_room {asked.room}: {MOST_ASKING} ranks have asked"
            room.asked[asked.endpoint, asked.dst_port] = asked
            return ""

    def whole(self, number: int) -> list[Asked]:
        """All ranks of the decode side that will ask, once they have and the request is known; none before."""
        with self._lock:
            room = self._rooms.get(number)
            if room is None or not room.prompt or not room.asked:
                return []
            asked = list(room.asked.values())
            return asked if len(asked) >= asked[0].ranks else []

    def has_asked(self, number: int, place: tuple[str, int]) -> bool:
        with self._lock:
            room = self._rooms.get(number)
            return room is not None and place in room.asked

    def unask(self, number: int, place: tuple[str, int]) -> bool:
        """That rank asks no more. Whether it had."""
        with self._lock:
            room = self._rooms.get(number)
            if room is None or room.asked.pop(place, None) is None:
                return False
            if room.owner is None and not room.asked:
                del self._rooms[number]
            return True

    def put(self, row: Row) -> bool:
        """The auxiliary row of a prompt. Whether a request of ours waits for it."""
        with self._lock:
            room = self._rooms.get(row.room)
            if room is None or not room.prompt or room.prompt != row.prompt:
                return False
            room.row = row
            return True

    def row(self, number: int) -> Row | None:
        with self._lock:
            room = self._rooms.get(number)
            return None if room is None else room.row

    # The end:

    def leave(self, number: int, owner: object, failure: str, now: float) -> list[Asked]:
        """Its request is over. Whom to tell, if it has failed; who asks later hears of it by `ask`."""
        with self._lock:
            room = self._rooms.get(number)
            if room is None or room.owner is not owner:
                return []
            del self._rooms[number]
            if not failure:
                return []
            self._failed[number] = (failure, now)
            return list(room.asked.values())

    def forget_old(self, now: float) -> list[int]:
        """Questions for requests that never came, and failures that nobody asked for. Which rooms were let go."""
        with self._lock:
            old = [n for n, room in self._rooms.items() if room.owner is None and now - room.since > FORGET_S]
            for number in old:
                del self._rooms[number]
            for number in [number for number, (_, at) in self._failed.items() if now - at > FAILED_S]:
                del self._failed[number]
            return old

    def owned(self) -> list[int]:
        """Rooms that a request of ours has."""
        with self._lock:
            return [number for number, room in self._rooms.items() if room.owner is not None]


def endpoints(asked: Iterable[Asked]) -> list[tuple[str, int]]:
    """Where they are to be answered, each once."""
    return sorted({(each.endpoint, each.dst_port) for each in asked})
