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
from testing.sim.scenario import OF_MESSAGES, PULLED, Fault, FaultKind, Scenario, SimRequest, make
from testing.sim.world import ScenarioOutcome, World
from tests.unit.sim.mutations import switched_off
from tests.unit.sim.test_slow_peers import TEMPLATE


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


def test_an_offer_that_ends_answers_one_of_the_wants_that_share_its_name() -> None:
    """The other waits for the next offer, until its deadline. Alone it would have been answered, and must be."""
    begun = replace(make(0), prefills=(1,), decodes=(1, 1), faults=(), is_pulled=False)
    one = replace(TEMPLATE, number=1, at=0.5, want_at=0.9, piece_tokens=2, piece_s=1.0, deadline_s=2.0, withdraw_s=0.1)
    other = replace(one, number=2, decode="D1", reads=1, want_at=1.2, withdraw_s=None)
    with prepared() as listener:
        both = play(replace(begun, requests=(one, other)), listener)
        assert not both.failure and both.ends["r1"] == ("released withdrawn", "failed withdrawn")
        assert both.ends["r2"] == ("?", "failed deadline")
        with switched_off("forget_ended_offers"):
            assert "r1: waited" in play(replace(begun, requests=(one,)), listener).failure


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


@pytest.mark.parametrize("route", ["nixl", "pull"])
def test_all_that_want_what_is_kept_at_once_get_it(route: str) -> None:
    """Several of one engine, and of several engines, some of it and all; each by a share of its own."""
    kept = replace(ASKED, is_kept=True)
    readers = [
        replace(kept, number=10 + i, decode=decode, reads=1, begins_as=1, is_kept=False, want_at=0.2, tokens=tokens)
        for i, (decode, tokens) in enumerate((("D0", 8), ("D0", 4), ("D1", 8), ("P1", 6), ("P1", 8)))
    ]
    with prepared() as listener:
        outcome = play(_calm(route, kept, *readers), listener)
    assert not outcome.failure
    assert {outcome.ends[each.name][1] for each in (kept, *readers)} == {"done"}, outcome.ends
    assert outcome.ends["r1"][0] == "released kept_no_longer"


@pytest.mark.parametrize("route", ["nixl", "pull"])
def test_answers_to_one_prompt_share_a_transfer(route: str) -> None:
    """What each was offered besides goes back once that is over, also if the first one's client goes away."""
    others = [replace(ASKED, number=10 + i, twin=1, joins=1, want_at=ASKED.want_at + 1e-4 * i) for i in range(3)]
    for abandon_s in (None, 0.0015):
        with prepared() as listener:
            outcome = play(_calm(route, replace(ASKED, abandon_s=abandon_s), *others), listener, is_told=True)
        assert not outcome.failure
        claims = [line for line in outcome.story if "Claim" in line and "rendezvous-1 " in line]
        assert len([line for line in claims if "first_token=0 " in line]) == 1 and len(claims) == 4, claims
        assert {outcome.ends[each.name][1] for each in others} == {"done"}
        assert outcome.ends["r1"][1] == ("aborted" if abandon_s else "done")


@pytest.mark.parametrize("route", ["nixl", "pull"])
@pytest.mark.parametrize("who", ["D0", "d00", "P0", "p00", "client"])
def test_an_answer_moves_though_a_side_is_lost_at_any_step(who: str, route: str) -> None:
    """It was prefilled by P0. D0 goes on with it, P0 fetches what it has, and offers it to D1."""
    moving = replace(ASKED, tokens=4)
    more = replace(moving, number=2, prefill="D0", decode="P0", sender="d00", want_at=0.15, tokens=6, begins_as=1)
    kept = replace(more, goes_on=1, is_kept=True)
    last = replace(more, number=3, prefill="P0", decode="D1", sender="p00", want_at=0.18, tokens=7, goes_on=2)
    kind: FaultKind = "kill engine" if who[0].isupper() else "kill agent"
    ends = set()
    with prepared() as listener:
        whole = play(_calm(route, moving, kept, last), listener, is_told=True)
        assert whole.ends["r3"] == ("released", "done") and not whole.failure
        moments = sorted({float(line[:9]) for line in whole.story if 0.1 < float(line[:9]) < 2.0})
        for at, moment in enumerate(moments[::2]):
            asked, faults = [moving, kept, last], tuple[Fault, ...]()
            if who == "client":  # in turn that of the answer, and that of what goes on with it
                asked[at % 2] = replace(asked[at % 2], abandon_s=max(0.0, moment - asked[at % 2].want_at))
            else:
                faults = (Fault(moment, kind, (who,), 0.5),)
            outcome = play(replace(_calm(route, *asked), faults=faults), listener)
            assert not outcome.failure, (moment, outcome.failure)
            ends.add(outcome.ends["r3"])
    assert ("released", "done") in ends and len(ends) > 1, ends


ASKED = replace(TEMPLATE, number=1, at=0.1, want_at=0.1, piece_s=0.001, deadline_s=2.0, hold_s=3.0)


def _calm(route: str, *requests: SimRequest) -> Scenario:
    """Two engines a side, and no faults."""
    more = {"slots": 2, "local": 2, "block_tokens": (2, 4), "has_fences": False, "is_impatient": False, "faults": ()}
    scenario = replace(make(0), prefills=(1, 1), decodes=(1, 1), requests=requests, blocks=20, is_mutual=True, **more)
    return replace(scenario, seed=PULLED, is_pulled=True) if route == "pull" else scenario


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
