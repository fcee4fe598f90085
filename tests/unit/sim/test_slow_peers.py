"""One peer that is slow or stands still, beside others: what it holds is bounded, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import pytest

from testing.sim.run import prepared
from testing.sim.scenario import SimRequest, make
from testing.sim.world import World

pytestmark = pytest.mark.proves("G18")

SLOTS = 3


class Fleet(World):
    """Engines and agents that serve requests as they are asked, and how long each want took."""

    numbers = count(1)

    def fetch(self, prefill: str, decode: str, tokens: int = 8, deadline_s: float = 5.0) -> int:
        """A prompt that is offered and wanted now. Returns its number."""
        number = next(self.numbers)
        request = replace(
            TEMPLATE,
            number=number,
            prefill=prefill,
            decode=decode,
            sender=f"p{prefill[1:]}0",
            tokens=tokens,
            deadline_s=deadline_s,
            hold_s=deadline_s,
        )
        self._ask((request,))
        return number

    def end_of(self, number: int) -> str:
        return self._ends[number].get(False, "")

    def wait(self, *numbers: int, seconds: float) -> dict[int, float]:
        """Seconds until each of these wants is done, as far as they are within so many."""
        began, found = self.clock.now, dict[int, float]()
        while len(found) < len(numbers) and self.clock.now < began + seconds:
            self.clock.run(self.clock.now + 1e-3)
            for number in numbers:
                if number not in found and self.end_of(number) == "done":
                    found[number] = self.clock.now - began
        return found


TEMPLATE = SimRequest(
    number=0,
    prefill="P0",
    decode="D0",
    sender="p00",
    at=0.0,
    want_at=0.0,
    tokens=8,
    first_token=0,
    piece_tokens=8,
    piece_s=0.0,
    deadline_s=5.0,
    hold_s=5.0,
    is_fenced=False,
    withdraw_s=None,
    abandon_s=None,
)


@contextmanager
def fleet(prefills: int, decodes: int) -> Iterator[Fleet]:
    """So many engines of one rank each, all of which have met."""
    engines = {"prefills": (1,) * prefills, "decodes": (1,) * decodes, "requests": (), "faults": ()}
    slots = {"slots": SLOTS, "local": SLOTS, "block_tokens": (4, 2)}
    with prepared():
        world = Fleet(replace(make(0), **engines, **slots, has_fences=False, is_impatient=False, write_timeout_s=1.0))
        world.begin()
        world.clock.run(0.1)
        pairs = [(f"P{p}", f"D{d}") for p in range(prefills) for d in range(decodes)]
        for pair in pairs:
            assert world.wait(world.fetch(*pair, tokens=2), seconds=2.0)
        yield world
        world.end()


def test_a_sender_that_stands_still_leaves_slots_to_the_others() -> None:
    with fleet(prefills=2, decodes=1) as world:
        frozen = world.processes["p00"]
        frozen.on_gather = lambda: frozen.freeze(frozen.loop, frozen.thread)
        stuck = world.fetch("P0", "D0")
        world.clock.run(world.clock.now + 0.05)
        assert frozen.is_frozen and world.processes["d00"].slots.lent == SLOTS - 1
        for _ in range(5):
            assert world.wait(world.fetch("P1", "D0"), seconds=0.5)
        assert world.wait(stuck, seconds=4.0) == {}
        assert world.wait(world.fetch("P1", "D0"), seconds=0.5), "its slots are in quarantine"


def test_a_receiver_that_stands_still_leaves_slots_to_the_others() -> None:
    """As over TCP: what is written to it does not land."""
    with fleet(prefills=1, decodes=2) as world:
        frozen = world.processes["d00"]
        world.data.hung = {("p00", "d00")}
        stuck = world.fetch("P0", "D0")
        world.clock.run(world.clock.now + 0.05)
        frozen.freeze(frozen.loop, frozen.thread)
        assert world.processes["p00"].data_plane.send_orders.slots.free == 1
        for _ in range(2):  # within write_timeout_s
            assert world.wait(world.fetch("P0", "D1", tokens=4), seconds=0.4)
        assert world.end_of(stuck) == ""
