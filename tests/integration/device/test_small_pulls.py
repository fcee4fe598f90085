"""Which small pulls share launches, and in what order they are taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from kvbridge_kernels.places import Places
from kvbridge_kernels.prepared_pull import PlacedPull

from kvbridge.device.small_pulls import MOST_WAITING, SmallPulls

OURS, THEIRS, OTHERS = (SimpleNamespace(name=name) for name in ("ours", "theirs", "others"))
SMALL, LARGE = SimpleNamespace(size_bytes=10), SimpleNamespace(size_bytes=30)


def pull_of(prepared: Any, *places: int) -> PlacedPull:
    """From these places into the next ones."""
    senders = np.array(places)
    return PlacedPull(prepared, [Places(senders)], [Places(senders + 1)])


def pulls_of(most_bytes: int, *kinds: Any) -> SmallPulls:
    """One of each of these kinds waits, with tickets from 1 on and places from ten times the ticket on."""
    small: Any = SmallPulls(most_bytes)
    for ticket, prepared in enumerate(kinds, 1):
        small.add(
            ticket, THEIRS if prepared is SMALL else OTHERS, OURS, pull_of(prepared, 10 * ticket, 10 * ticket + 5)
        )
    return small


def test_pulls_of_one_kind_are_taken_together_and_the_others_keep_their_order() -> None:
    small = pulls_of(100, SMALL, LARGE, SMALL, LARGE, SMALL)
    first = small.next()
    assert first.tickets == (1, 3, 5) and first.sender is THEIRS and first.receiver is OURS
    assert first.pull.chunks == 3 and first.size_bytes == 30
    assert first.pull.senders[0].array.tolist() == [10, 15, 30, 35, 50, 55]
    assert first.pull.receivers[0].array.tolist() == [11, 16, 31, 36, 51, 56]
    assert small.next().tickets == (2, 4) and not small


def test_no_more_share_launches_than_there_are_tables_for() -> None:
    small = pulls_of(25, SMALL, SMALL, SMALL, LARGE, LARGE)
    assert [small.next().tickets for _ in range(4)] == [(1, 2), (3,), (4,), (5,)]


def test_one_alone_is_pulled_as_it_is() -> None:
    small = pulls_of(100, SMALL)
    assert small.next().pull.chunks == 1


def test_memory_is_in_use_while_a_pull_waits() -> None:
    small: Any = pulls_of(100, SMALL, LARGE)
    assert all(map(small.is_using, (OURS, THEIRS, OTHERS)))
    small.next()
    assert not small.is_using(THEIRS) and small.is_using(OTHERS) and small.is_using(OURS)
    small.clear()
    assert not small.is_using(OURS)


def test_only_so_many_wait() -> None:
    assert pulls_of(100, *[SMALL] * (MOST_WAITING - 1)).has_room
    assert not pulls_of(100, *[SMALL] * MOST_WAITING).has_room
