"""Single moments that random schedules almost never reach, with the simulator's agents."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from kvbridge_proto.engine import ToEngine, Withdraw
from kvbridge_proto.peer import Ping

from kvbridge.dataplane.attached import AttachedMemory
from kvbridge.loopback.messages import offer_of
from kvbridge.transport.link import Event, Lost
from testing.sim.run import play, prepared
from testing.sim.scenario import OF_MESSAGES, Fault, FaultKind, make
from testing.sim.world import ScenarioOutcome, World
from tests.unit.sim.mutations import switched_off


def test_what_an_engine_says_arrives_in_order() -> None:
    """Also what waits for the same moment behind a slow message: those moments must be one and the same number."""
    with prepared():
        for seed in range(20):
            world = World(replace(make(seed), requests=(), faults=()))
            world.begin()
            rank = world.engines["P0"].ranks[0]
            heard: list[int] = []
            rank.engine.answered = lambda rank, message, heard=heard: heard.append(message.number)
            while not rank.is_here:
                world.clock.run(world.clock.now + 1e-4)
            said = list(range(1, 101))
            for number in said:
                offer = offer_of(f"r{number}", 0, (), number=number)
                world.clock.after(number * 0.00097, partial(rank.say, offer))
                world.clock.after(number * 0.00097, partial(rank.say, Withdraw(number=number)))
            world.clock.run(1.0)
            world.end()
            assert heard == said


def test_an_agent_that_lets_go_refuses_only_when_it_touches_nothing_more() -> None:
    """An engine takes a refusal for the end of its request, and uses the blocks again."""
    with prepared():
        world = World(replace(make(0), requests=(), faults=()))
        world.begin()
        world.clock.run(0.1)
        process, rank = world.processes["p00"], world.engines["P0"].ranks[0]
        heard: list[ToEngine] = []
        rank.engine.answered = lambda rank, message: heard.append(message)
        done = process.loop.create_future()

        async def let_go(attached: AttachedMemory) -> bool:
            await done  # a gather is under way
            return True

        process.data_plane.let_go = let_go
        process.loop.call_soon(lambda: process.loop.create_task(process.engines.leave("stopping")))
        world.clock.run(0.2)
        rank.say(Withdraw(number=1))
        world.clock.run(1.0)
        too_soon = list(heard)
        process.loop.call_soon(done.set_result, None)
        world.clock.run(2.0)
        world.end()
        assert not too_soon
        assert [message.code for message in heard] == ["not_attached"] * 2


@pytest.mark.parametrize("speaker", ["the receiver", "the sender"])
@pytest.mark.parametrize("kind", OF_MESSAGES)
def test_a_message_that_does_not_come_in_turn_ends_the_link_at_both_ends(kind: FaultKind, speaker: str) -> None:
    """The dialling end hangs up. The listening one cannot: it answers what comes next."""
    with prepared():
        scenario = replace(make(0), prefills=(1,), decodes=(1,), requests=(), faults=(Fault(9.0, kind, ()),))
        world = World(scenario)
        world.begin()
        world.clock.run(0.1)
        world._ask(scenario.last())
        world.clock.run(0.5)
        (link,) = world.processes["d00"].links.open
        codes = _lost(world)
        assert link.peer is not None
        says = link if speaker == "the receiver" else link.peer
        world.chance = lambda probability: True
        says.send(Ping(number=1))
        world.disorder = lambda one, other: (kind,) if one == says.links.process.name else ()
        says.send(Ping(number=2))
        del world.chance, world.disorder
        says.send(Ping(number=3))
        world.clock.run(4.0)
        if speaker == "the receiver":
            assert codes == {"p00": "messages_lost", "d00": "link_over"}
        else:
            assert codes == {"d00": "messages_lost", "p00": "peer_disconnected"}
        assert not world.processes["d00"].links.open and not world.processes["p00"].links.open
        world._ask(scenario.last())
        world.clock.run(5.0)
        world.end()
        assert world._ends[900] == {True: "released", False: "done"}


def test_the_rest_of_a_failed_write_meets_the_digest_of_whoever_has_the_slot() -> None:
    """Nobody has quarantined it: the want of whoever has it fails, and would be wrong without the digest."""
    with prepared() as listener:
        seed = next(seed for seed in range(14, 1000, 16) if _is_met(play(make(seed), listener)))
        with switched_off("ignore_digest"):
            assert re.search(r"prompt \d.* where prompt \d", play(make(seed), listener).failure)


def _is_met(outcome: ScenarioOutcome) -> bool:
    """Whether a digest was wrong, and nothing but the rest of a write can be why."""
    assert not outcome.failure
    return "spoil" not in outcome.faults and any(end == "failed digest_mismatch" for _, end in outcome.ends.values())


def _lost(world: World) -> dict[str, str]:
    """By agent, how it has lost a link since."""
    codes: dict[str, str] = {}

    def listen(name: str, tell: Callable[[Event], None]) -> Callable[[Event], None]:
        def heard(event: Event) -> None:
            if isinstance(event, Lost):
                codes[name] = event.code
            tell(event)

        return heard

    for name, process in world.processes.items():
        process.links.tell = listen(name, process.links.tell)
    return codes
