"""Single moments that random schedules hardly ever meet, on the simulator's agents."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvbridge_proto.engine import ToEngine, Withdraw

from kvbridge.agent.attachment import Attachment
from kvbridge.sim.run import prepared
from kvbridge.sim.scenario import make
from kvbridge.sim.world import World


def test_what_an_engine_says_arrives_in_order() -> None:
    """Also what waits for the same moment behind a slow message: those moments must be one and the same number."""
    with prepared():
        for seed in range(20):
            world = World(replace(make(seed), requests=(), faults=()))
            world.begin()
            rank = world.engines["P0"].ranks[0]
            heard: list[str] = []
            rank.engine.answered = lambda rank, message, heard=heard: heard.append(message.request)  # type: ignore[misc]
            while not rank.is_here:
                world.clock.run(world.clock.now + 1e-4)
            said = [f"r{i}" for i in range(100)]
            for i, name in enumerate(said):
                world.clock.after(i * 0.00097, partial(rank.say, Withdraw(request=name)))
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
        rank.engine.answered = lambda rank, message: heard.append(message)  # type: ignore[method-assign]
        done = process.loop.create_future()

        async def let_go(attachment: Attachment) -> None:
            await done  # a gather is under way

        process.mover.let_go = let_go  # type: ignore[method-assign]
        process.loop.call_soon(lambda: process.loop.create_task(process.engines.leave("stopping")))
        world.clock.run(0.2)
        rank.say(Withdraw(request="r"))
        world.clock.run(1.0)
        too_soon = list(heard)
        process.loop.call_soon(done.set_result, None)
        world.clock.run(2.0)
        world.end()
        assert not too_soon
        assert [message.code for message in heard] == ["not_attached"] * 2
