"""Several answers to one prompt: each request has a room of its own, the same on both servers."""

from __future__ import annotations

import pytest

from kvbridge.adapters.engine.prompts import ROOMS
from kvbridge.adapters.sglang.samples import STRIDE, SampleRooms

N = 300
LAST = ROOMS[-1]


def made(room: object, count: int = N) -> list[object]:
    rooms = SampleRooms()
    return [rooms.next(room) for _ in range(count)]


@pytest.mark.parametrize("room", [1, 7, STRIDE, 1 << 40, LAST - 10**9, LAST])
def test_a_prompts_requests_have_rooms_of_their_own_beginning_with_its(room: int) -> None:
    found = made(room)
    assert found[0] == room and len(set(found)) == N
    assert all(type(each) is int and each in ROOMS for each in found)
    assert made(room) == found, "the other server counts differently"


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 8, 12, 16, 24, 32, 64, 96, 128, 256])
@pytest.mark.parametrize("room", [1, 7, LAST - 10**9, LAST])
def test_they_stay_with_the_replica(room: int, replicas: int) -> None:
    assert {each % replicas for each in made(room)} == {room % replicas}


def test_prompts_of_a_call_do_not_meet() -> None:
    """Whether their rooms follow each other, as SGLang numbers them, or a router gave two of them one."""
    rooms, prompts = SampleRooms(), [5, 6, 7, 5]
    found = [rooms.next(room) for _ in range(N) for room in prompts]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("room", [None, 0, -1, 1 << 63, "7", 7.0, True])
def test_what_is_no_room_stays_as_it_is(room: object) -> None:
    assert made(room, 3) == [room] * 3
