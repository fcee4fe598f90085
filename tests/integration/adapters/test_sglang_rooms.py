"""Bootstrap rooms: a client may choose the number, but only one request at a time has it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvbridge.adapters.sglang.messages import Asked
from kvbridge.adapters.sglang.metadata import Metadata
from kvbridge.adapters.sglang.rooms import (
    FAILED_S,
    MOST_ASKING,
    MOST_ROOMS,
    OTHER_PROMPT,
    ROOM_KEPT_S,
    Rooms,
    endpoints,
)

ASKED = Asked(room=7, prompt="ab", first_token=16, endpoint="10.0.0.1", dst_port=4000, rank=0, ranks=2)
OTHER = replace(ASKED, dst_port=4001, rank=1)
SAID = Metadata(room=7, prompt="ab", fields=(b"1",))


@pytest.fixture
def rooms() -> Rooms:
    return Rooms()


@pytest.mark.proves("G9")
def test_a_room_is_one_requests_at_a_time(rooms: Rooms) -> None:
    assert rooms.enter(7, "first", 0) == ""
    assert "in use" in rooms.enter(7, "second", 0)
    assert rooms.is_of(7, "first") and not rooms.is_of(7, "second")
    assert rooms.leave(7, "second", "failed", 0) == [] and rooms.is_of(7, "first")
    rooms.leave(7, "first", "", 0)
    assert rooms.enter(7, "second", 0) == "" and rooms.is_of(7, "second")


@pytest.mark.parametrize("number", [0, -1, 1 << 63, None, "7", True])
def test_what_is_no_room_is_refused(rooms: Rooms, number: int) -> None:
    """SGLang takes 0 for a row that has not come yet."""
    assert "bootstrap_room" in rooms.enter(number, "first", 0)


@pytest.mark.parametrize("is_asked_first", [True, False])
def test_it_is_whole_when_its_request_and_all_that_ask_are_there(rooms: Rooms, is_asked_first: bool) -> None:
    steps = [lambda: rooms.ask(ASKED, 0), lambda: rooms.ask(OTHER, 0), lambda: _begin(rooms)]
    for step in steps if is_asked_first else reversed(steps):
        assert not rooms.whole(7)
        assert not step()
    assert sorted(each.rank for each in rooms.whole(7)) == [0, 1]
    assert endpoints(rooms.whole(7)) == [("10.0.0.1", 4000), ("10.0.0.1", 4001)]


def _begin(rooms: Rooms) -> str:
    rooms.enter(7, "first", 0)
    assert rooms.bind(7, "first", "ab") == []
    return ""


def test_an_open_room_counts_none_until_all_have_asked(rooms: Rooms) -> None:
    """An early rank's prefix would be all ranks' otherwise, and it alone would get the row."""
    rooms.enter(7, "first", 0)
    rooms.bind(7, "first", "ab", is_open=True)
    rooms.ask(ASKED, 0)
    assert rooms.whole(7) == []
    rooms.ask(OTHER, 0)
    assert rooms.whole(7) == [ASKED, OTHER]


def test_who_asks_twice_is_one(rooms: Rooms) -> None:
    _begin(rooms)
    rooms.ask(ASKED, 0)
    rooms.ask(ASKED, 0)
    assert not rooms.whole(7)


@pytest.mark.proves("G9")
def test_whoever_asks_for_another_prompt_is_told_so_and_nobody_else(rooms: Rooms) -> None:
    stranger = replace(OTHER, prompt="cd")
    assert not rooms.ask(ASKED, 0) and not rooms.ask(stranger, 0)
    rooms.enter(7, "first", 0)
    assert rooms.bind(7, "first", "ab") == [stranger], "who came before the request"
    assert OTHER_PROMPT in rooms.ask(stranger, 0), "and after it"
    assert not rooms.ask(OTHER, 0) and len(rooms.whole(7)) == 2
    assert rooms.unask(7, ("10.0.0.1", 4001)) and not rooms.unask(7, ("10.0.0.9", 4001))


def test_who_asks_no_more_is_not_counted(rooms: Rooms) -> None:
    rooms.ask(ASKED, 0)
    assert rooms.unask(7, ("10.0.0.1", 4000)) and not rooms.unask(7, ("10.0.0.1", 4000))
    _begin(rooms)
    rooms.ask(OTHER, 0)
    assert not rooms.whole(7)


def test_a_request_that_has_failed_is_told_to_all_that_asked_or_ask_yet(rooms: Rooms) -> None:
    _begin(rooms)
    rooms.ask(ASKED, 0)
    assert rooms.leave(7, "first", "aborted", 1) == [ASKED]
    assert rooms.ask(OTHER, 2) == "aborted"
    assert rooms.enter(7, "next", 3) == "" and not rooms.ask(OTHER, 3), "the next one is another"


def test_a_request_that_succeeded_leaves_nothing(rooms: Rooms) -> None:
    _begin(rooms)
    rooms.ask(ASKED, 0)
    assert rooms.leave(7, "first", "", 1) == [] and not rooms.owned() and not rooms.whole(7)


def test_a_first_token_is_taken_for_its_own_request_only(rooms: Rooms) -> None:
    rooms.put(SAID)
    assert rooms.metadata(7) is None, "nobody waits"
    rooms.enter(7, "first", 0)
    for said in (SAID, replace(SAID, prompt="")):
        rooms.put(said)
        assert rooms.metadata(7) is None, "it is not known for what"
    rooms.bind(7, "first", "ab")
    rooms.put(replace(SAID, prompt="cd"))
    assert rooms.metadata(7) is None
    rooms.put(SAID)
    assert rooms.metadata(7) == SAID
    rooms.leave(7, "first", "", 1)
    rooms.enter(7, "next", 2)
    assert rooms.metadata(7) is None


def test_nothing_is_kept_for_ever(rooms: Rooms) -> None:
    rooms.ask(ASKED, 0)
    rooms.enter(8, "one", 0)
    rooms.enter(9, "other", 0)
    rooms.leave(9, "other", "failed", 0)
    rooms.forget_old(FAILED_S + 1)
    assert not rooms.ask(replace(ASKED, room=9), FAILED_S + 1) and 7 in rooms._rooms
    rooms.forget_old(ROOM_KEPT_S + 1)
    assert 7 not in rooms._rooms and rooms.owned() == [8]


def test_strangers_cannot_fill_it(rooms: Rooms) -> None:
    for number in range(MOST_ROOMS):
        assert not rooms.ask(replace(ASKED, room=number + 1), 0)
    assert "are asked for" in rooms.ask(replace(ASKED, room=MOST_ROOMS + 1), 0)
    assert rooms.enter(MOST_ROOMS + 1, "ours", 0) == "", "our own request has room all the same"
    for port in range(MOST_ASKING):
        rooms.ask(replace(ASKED, dst_port=port + 1), 0)
    assert "have asked" in rooms.ask(replace(ASKED, dst_port=60000), 0)
