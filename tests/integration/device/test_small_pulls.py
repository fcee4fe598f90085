"""Which small pulls share launches, and in what order they are taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from kvbridge_kernels.prepared import Placed, joined
from kvbridge_kernels.segment import Places

from kvbridge.device.small_pulls import MOST_SMALL_PULLS, MOST_TOGETHER_BYTES, SmallPull, SmallPulls

OURS, THEIRS, OTHERS = (SimpleNamespace(name=name) for name in ("ours", "theirs", "others"))
SMALL, LARGE = (
    SimpleNamespace(slot_bytes=MOST_TOGETHER_BYTES // 8),
    SimpleNamespace(slot_bytes=MOST_TOGETHER_BYTES // 2),
)


def pulls_of(most: int, *kinds: Any) -> SmallPulls:
    """One of each of these kinds waits, with tickets from 1 on and places from ten times the ticket on."""
    small = SmallPulls()
    for ticket, prepared in enumerate(kinds, 1):
        sender: Any = THEIRS if prepared is SMALL else OTHERS
        senders = np.array([10 * ticket, 10 * ticket + 5])
        pull = Placed(prepared, [[Places(senders)], [Places(senders + 1)]])
        small.add(SmallPull((ticket,), sender, cast(Any, OURS), pull, most))
    return small


def test_pulls_of_one_kind_are_taken_together_and_the_others_keep_their_order() -> None:
    small = pulls_of(1000, SMALL, LARGE, SMALL, LARGE, SMALL)
    first = small.take()
    assert first.tickets == (1, 3, 5) and first.sender is THEIRS and first.receiver is OURS
    assert first.pull.chunks == 3
    assert first.pull.places[0][0].array.tolist() == [10, 15, 30, 35, 50, 55]
    assert first.pull.places[1][0].array.tolist() == [11, 16, 31, 36, 51, 56]
    assert small.take().tickets == (2, 4) and not small


def test_every_list_of_places_grows() -> None:
    pull = Placed(cast(Any, SMALL), [[Places(np.array([i])) for i in range(3)], [Places(np.array([9]))]])
    found = joined([pull, pull._replace(places=[[Places(np.array([i])) for i in (5, 6, 7)], pull.places[1]])])
    assert [places.array.tolist() for places in found.places[0]] == [[0, 5], [1, 6], [2, 7]]
    assert [places.array.tolist() for places in found.places[1]] == [[9, 9]]


def test_no_more_share_launches_than_the_first_can_wait_for() -> None:
    small = pulls_of(1000, *[SMALL] * 9, LARGE, LARGE, LARGE)
    taken = [small.take().tickets for _ in range(4)]
    assert taken == [(1, 2, 3, 4, 5, 6, 7, 8), (9,), (10, 11), (12,)]


def test_no_more_share_launches_than_there_are_tables_for() -> None:
    small = pulls_of(2, SMALL, SMALL, SMALL)
    assert [small.take().tickets for _ in range(2)] == [(1, 2), (3,)]
    small = pulls_of(1, SMALL, SMALL)
    assert [small.take().tickets for _ in range(2)] == [(1,), (2,)]


def test_one_alone_is_pulled_as_it_is() -> None:
    small = pulls_of(1000, SMALL)
    assert small.take().pull.chunks == 1


def test_memory_is_in_use_while_a_pull_waits() -> None:
    small: Any = pulls_of(1000, SMALL, LARGE)
    assert all(map(small.is_using, (OURS, THEIRS, OTHERS)))
    small.take()
    assert not small.is_using(THEIRS) and small.is_using(OTHERS) and small.is_using(OURS)
    small.clear()
    assert not small.is_using(OURS)


def test_only_so_many_wait() -> None:
    assert pulls_of(1000, *[SMALL] * (MOST_SMALL_PULLS - 1)).has_room
    assert not pulls_of(1000, *[SMALL] * MOST_SMALL_PULLS).has_room
