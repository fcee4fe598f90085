"""Sessions, if things change between a greeting and its answer. A list plays the control side."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from kvbridge_proto.common import Rank
from kvbridge_proto.peer import Hello, Probe

from kvbridge.exchange.route import Routed
from kvbridge.exchange.session import Session, answer, welcome
from tests.integration.agent.player import joined
from tests.integration.agent.wire import Wire
from tests.unit.exchange.world import World


class Player:
    """The control that dials, the data plane that looks for probes, and the receiver that hears: all the test's."""

    def __init__(self) -> None:
        self.wire = Wire("P0", is_dialled=True)
        self.may_answer = asyncio.Event()
        self.opened_with: list[Session] = []
        self.over: list[str] = []

    def dial(self, address: str) -> Wire:
        return self.wire

    async def is_proved(self, *_: object) -> bool:
        await self.may_answer.wait()
        return True

    def met(self, session: Session) -> None: ...

    def opened(self, address: str, session: Session) -> None:
        self.opened_with.append(session)

    def unreachable(self, address: str, code: str, reason: str) -> None:
        self.over.append(code)


async def story(change: str) -> Player:
    """A receiver dials, is welcomed, and while it looks for the probe its engine does something."""
    world, player = World(), Player()
    homes = [world.receivers[0].engine]
    sender = world.senders[0].engine
    peers = joined(player, player, lambda: homes[0], 5.0)
    peers.outgoing.reach("P0")
    (greeting,) = player.wire.sent
    assert isinstance(greeting, Hello)
    session = answer(greeting, sender)
    assert isinstance(session, Session)
    lane = greeting.probe_lane + (change == "another lane")
    probe = Probe(lane=lane, seed=1, size_bytes=64, bytes_per_s=1e9)
    player.wire.peer_incarnation = sender.agent.incarnation
    said = welcome(replace(session, routed=Routed("nixl", "", probe)), sender)
    waiting = [asyncio.create_task(peers._welcome(player.wire, said)) for _ in range(2 if change == "twice" else 1)]
    await asyncio.sleep(0)
    if change == "more ranks":
        homes[0] = replace(homes[0], ranks=(*homes[0].ranks, Rank(tp_rank=1, pp_rank=0, address="D1")))
    elif change == "another engine":
        homes[0] = replace(homes[0], epoch=2)
    player.may_answer.set()
    await asyncio.gather(*waiting)
    return player


def heard(change: str) -> tuple[int, list[str]]:
    player = asyncio.run(story(change))
    assert not player.wire.is_lost
    return len(player.opened_with), player.over


def test_a_welcome_opens_a_session() -> None:
    assert heard("nothing") == (1, [])


def test_a_session_opens_though_the_engine_names_its_ranks_meanwhile() -> None:
    assert heard("more ranks") == (1, [])


def test_a_session_does_not_open_for_an_engine_that_has_left() -> None:
    assert heard("another engine") == (0, [])


def test_the_answer_to_a_hello_that_was_given_up_is_ignored() -> None:
    assert heard("another lane") == (0, [])


def test_a_welcome_said_twice_opens_one_session() -> None:
    assert heard("twice") == (1, [])


def test_an_agent_without_an_engine_leaves_no_half_session_behind() -> None:
    """Else nobody would be greeted at that address once there is an engine: its wants would wait for nothing."""
    world, player = World(), Player()
    homes: list[Any] = [None]
    peers = joined(player, player, lambda: homes[0], 5.0)
    peers.outgoing.reach("P0")
    assert player.over == ["not_attached"] and not player.wire.sent
    homes[0] = world.receivers[0].engine
    peers.outgoing.reach("P0")
    assert isinstance(player.wire.sent[0], Hello)
