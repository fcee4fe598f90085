"""Rooms of one call for several answers to a prompt (`n` > 1). Pure.

SGLang makes n + 1 requests of such a prompt, all in the prompt's one room: the first only fills the prefix cache, the
others are copies of it. A room is one request's at a time (`rendezvous.py`), so each gets its own. Both servers send
these requests in one order and number their rooms alike.
"""

from __future__ import annotations

import math
from collections import Counter

from ..engine.prompts import ROOMS

# So far apart that rooms of a batch, which may follow each other, do not meet. And a multiple of all likely numbers of
# replicas: SGLang picks one by the room's remainder, and all answers go where the first request has filled the cache.
STRIDE = math.lcm(*range(1, 17), 1024)
TURN = ROOMS.stop // STRIDE * STRIDE


class SampleRooms:
    """Of one call."""

    def __init__(self) -> None:
        self._sent: Counter[int] = Counter()

    def next(self, room: object) -> object:
        """The room of the next request that is sent in this one. What is no room stays as it is, and is refused."""
        if type(room) is not int or room not in ROOMS:
            return room
        count, self._sent[room] = self._sent[room], self._sent[room] + 1
        return (room - 1 + count * STRIDE) % TURN + 1 if count else room
