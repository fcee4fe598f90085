"""Gives each sample of a prompt (`n` > 1) a room of its own. Pure.

SGLang turns such a prompt into n + 1 requests, all in the prompt's room. The first only fills the prefix cache, and the
others are copies of it. A room belongs to one request at a time (`rooms.py`), so each request needs its own. Both
servers send these requests in the same order, so they number the rooms alike.
"""

from __future__ import annotations

import math
from collections import Counter

from ..engine.prompts import ROOMS

# Far enough apart that the rooms of a batch, which may be consecutive, do not collide. Also a multiple of all likely
# replica counts: SGLang picks the replica by the room's remainder, and all samples must go to the replica whose cache
# the first request has filled.
STRIDE = math.lcm(*range(1, 17), 1024)
TURN = ROOMS.stop // STRIDE * STRIDE


class SampleRooms:
    """The rooms of one call."""

    def __init__(self) -> None:
        self._sent: Counter[int] = Counter()

    def next(self, room: object) -> object:
        """A room for the next request sent in `room`. An invalid room is returned as it is, and refused later."""
        if type(room) is not int or room not in ROOMS:
            return room
        count, self._sent[room] = self._sent[room], self._sent[room] + 1
        return (room - 1 + count * STRIDE) % TURN + 1 if count else room
