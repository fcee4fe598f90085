"""The bootstrap rooms of one rank: who owns each, what the other server said of it, how it ended. Pure but for a lock.

A room is a number that a client may choose. So the same number may come twice, with another prompt, or from a stranger.
A room belongs to one request at a time, from `enter` to `leave`. The other server's messages may come before and after.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...oneline import shown
from ..engine.prompts import ROOMS
from .messages import Asked
from .metadata import Metadata

MOST_ROOMS = 65536  # at this number a question opens no new room
MOST_ASKING = 1024  # ranks that may ask for one room
ROOM_KEPT_S = 900.0  # how long a question waits for its request to come
FAILED_S = 300.0  # how long after a failure a late question still gets its reason
OTHER_PROMPT = "the request of the other side has another prompt, adapter, media or salt"


@dataclass(slots=True)
class Room:
    """`owner` is our request in the room, None until it comes. `prompt` is its digest, "" until known.

    `is_open`: no decode rank will ask, so the prefill may begin unasked (`foreign.py`).
    """

    since: float
    owner: object | None = None
    prompt: str = ""
    is_open: bool = False
    asked: dict[tuple[str, int], Asked] = field(default_factory=dict)
    metadata: Metadata | None = None


NO_ROOM = Room(0.0)  # what is read where there is none; nobody owns it


class Rooms:
    """All rooms of one rank. Any thread may call. To read one value of a room needs no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rooms: dict[int, Room] = {}
        self._failed: dict[int, tuple[str, float]] = {}  # why, and when

    def enter(self, number: int, owner: object, now: float) -> str:
        """Give the room to this request. Returns why not, or ""."""
        if type(number) is not int or number not in ROOMS:
            return f"bootstrap_room {shown(number)}: must be a number in [1, 2^63)"
        with self._lock:
            room = self._rooms.setdefault(number, Room(now))
            if room.owner is not None:
                return f"bootstrap_room {number}: in use by another request"
            room.owner = owner
            self._failed.pop(number, None)
            return ""

    def is_of(self, number: int, owner: object) -> bool:
        return self._rooms.get(number, NO_ROOM).owner is owner

    def bind(self, number: int, owner: object, prompt: str, is_open: bool = False) -> list[Asked]:
        """Set the digest of the request's prompt. Drops and returns the questions for another prompt."""
        with self._lock:
            room = self._rooms.get(number, NO_ROOM)
            if room.owner is not owner:
                return []
            room.prompt, room.is_open, room.metadata = prompt, is_open, None
            strangers = [each for each in room.asked.values() if each.prompt != prompt]
            room.asked = {place: each for place, each in room.asked.items() if each.prompt == prompt}
            return strangers

    # What the other server says:

    def ask(self, asked: Asked, now: float) -> str:
        """A decode rank has pages for this prompt. Returns why it will not be served, or ""."""
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

    def waiting(self) -> list[tuple[int, list[Asked]]]:
        """All questions, by room."""
        with self._lock:
            return [(number, [*room.asked.values()]) for number, room in self._rooms.items() if room.asked]

    def whole(self, number: int) -> list[Asked] | None:
        """The questions of all decode ranks, once all have asked and the prompt is known. None before that.

        An open room needs none: until all have asked, none of them counts.
        """
        with self._lock:
            room = self._rooms.get(number, NO_ROOM)
            asked = list(room.asked.values())
            if not room.prompt:
                return None
            if asked and len(asked) >= asked[0].ranks:
                return asked
            return [] if room.is_open else None

    def unask(self, number: int, place: tuple[str, int]) -> bool:
        """Drop that rank's question. Returns whether there was one."""
        with self._lock:
            room = self._rooms.get(number, NO_ROOM)
            if room.asked.pop(place, None) is None:
                return False
            if room.owner is None and not room.asked:
                del self._rooms[number]
            return True

    def put(self, said: Metadata) -> None:
        """Keep the first token of a prompt, if a request of ours waits for it."""
        with self._lock:
            room = self._rooms.get(said.room, NO_ROOM)
            if room.prompt and room.prompt == said.prompt:
                room.metadata = said

    def metadata(self, number: int) -> Metadata | None:
        return self._rooms.get(number, NO_ROOM).metadata

    # The end:

    def leave(self, number: int, owner: object, failure: str, now: float) -> list[Asked]:
        """The request is over. If it failed, returns the questions to answer; later ones get the failure from `ask`."""
        with self._lock:
            if not self.is_of(number, owner):
                return []
            room = self._rooms.pop(number)
            if not failure:
                return []
            self._failed[number] = (failure, now)
            return list(room.asked.values())

    def forget_old(self, now: float) -> None:
        """Drop old failures, and rooms whose request never came."""
        with self._lock:
            for number in [n for n, each in self._rooms.items() if not each.owner and now - each.since > ROOM_KEPT_S]:
                del self._rooms[number]
            for number in [number for number, (_, at) in self._failed.items() if now - at > FAILED_S]:
                del self._failed[number]

    def owned(self) -> list[int]:
        """The rooms that have a request of ours."""
        with self._lock:
            return [number for number, room in self._rooms.items() if room.owner is not None]


def endpoints(asked: Iterable[Asked]) -> list[tuple[str, int]]:
    """Where to send the answers, each address once."""
    return sorted({(each.endpoint, each.dst_port) for each in asked})
