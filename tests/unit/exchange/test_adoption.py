"""A receiver that could take its sender's scales: its engine is asked once, and the answer holds for all who wait."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvbridge_proto.engine import Adopt, Done, Failed, Refused

from tests.unit.exchange.world import World, make_pool

WHY = "scales: requests have been computed under ours"


def adopting(*senders: float, ranks: int = 1, seed: int = 0) -> World:
    """Senders under these scales (each an engine, or ranks of one), and a receiver under 1 that asks for theirs."""
    if len(senders) == 1:
        pools = [make_pool("prefill", rank, ranks, 4, senders[0]) for rank in range(ranks)]
    else:
        pools = [make_pool(f"prefill-{index}", 0, 1, 4, scale) for index, scale in enumerate(senders)]
    world = World(pools, [make_pool("decode", 0, 1, 16, 1.0)], seed=seed)
    if len(senders) > 1:
        for node, rank in zip(world.senders, world.senders[0].engine.ranks, strict=True):
            node.engine = replace(node.engine, ranks=(rank,))
    world.receiver.engine = replace(world.receiver.engine, policy="adopt")
    return world


def asked(world: World) -> list[Adopt]:
    return [message for message in world.receivers[0].told if isinstance(message, Adopt)]


def two_wait(world: World) -> None:
    for request in ("a", "b"):
        world.want(request, 40)
        world.offer(request, 40, 12)
    world.run()


def decline(world: World, revision: int) -> None:
    world.do(world.receiver, world.receiver.receiving.declined(revision, WHY, world.now))


def assert_taken_over(world: World) -> None:
    """Every row lay under one and the same scale when it was read and when it was written, and moved as it was."""
    assert len({plane.codec.scales for _, _, pool in world.moved for plane in pool.planes}) == 1
    for pairs, _, _ in world.moved:
        assert all(pair.sender.codec.scales == pair.receiver.codec.scales for pair in pairs)


def test_the_engine_is_asked_once_and_all_who_waited_go_on() -> None:
    world = adopting(0.5, ranks=2)
    two_wait(world)
    assert not world.answers() and not world.moved
    (question,) = asked(world)
    assert question.revision == 1
    assert {(each.layer, each.part) for each in question.scales} == {(0, "k"), (0, "v"), (1, "k"), (1, "v")}
    assert {each.scales for each in question.scales} == {(0.5,)}
    world.rescale(world.receivers[0], 0.5, question.revision)
    world.run()
    world.begin("c", 40)
    assert {type(answer) for answer in world.answers().values()} == {Done} and len(world.answers()) == 3
    assert len(asked(world)) == 1
    assert_taken_over(world)
    world.check_rest()


def test_a_decline_fails_all_who_wait_by_name_and_is_remembered() -> None:
    world = adopting(0.5)
    two_wait(world)
    decline(world, 1)
    world.begin("c", 40)
    for request in "abc":
        failed = world.failure(request)
        assert failed.code == "adopt_refused"
        assert failed.reason == f"scales: sender 0.5, receiver 1 (layer 0 k); needs scales=requantize ({WHY})"
        assert world.released()[request].code == ""  # the sender was told that nothing is needed
    assert len(asked(world)) == 1 and not world.moved
    world.check_rest()


def test_an_engine_that_takes_yet_others_is_not_asked_again() -> None:
    world = adopting(0.5)
    world.begin("r", 40)
    world.rescale(world.receivers[0], 0.125, 1)
    world.run()
    failed = world.failure()
    assert failed.code == "adopt_refused"
    assert "sender 0.5, receiver 0.125 (layer 0 k)" in failed.reason and "took others" in failed.reason
    assert len(asked(world)) == 1 and not world.moved
    world.check_rest()


@pytest.mark.parametrize(("sender", "end"), [(0.0, 40), (1.0, 40), (0.5, 0)])
def test_nothing_is_asked_where_there_is_nothing_to_take(sender: float, end: int) -> None:
    world = adopting(sender)
    world.want("r", end)
    world.serve("r", 40, 12)
    assert isinstance(world.answers()["r"], Done) and not asked(world)
    world.check_rest()


def test_another_engine_is_asked_anew() -> None:
    world = adopting(0.5)
    world.fetch("r", 40)
    decline(world, 1)
    world.do(world.receiver, world.receiver.receiving.engine_left(world.now))
    world.fetch("again", 40)
    assert [question.revision for question in asked(world)] == [1, 1]


@pytest.mark.proves("G16")
def test_the_want_of_an_engine_that_does_not_answer_ends_by_its_deadline() -> None:
    world = adopting(0.5)
    world.begin("r", 40)
    world.pass_time(50)
    world.run()
    failed = world.failure()
    assert failed.code == "deadline" and "agreeing" in failed.reason
    world.check_rest()


def test_an_answer_that_nobody_asked_for_is_refused() -> None:
    world = adopting(0.5)
    decline(world, 7)
    (said,) = world.receivers[0].told
    assert isinstance(said, Refused) and said.code == "stale_revision" and said.about == "decline 7"


def test_a_second_sender_of_yet_other_scales_is_declined_alone() -> None:
    world = adopting(0.5, 0.25)
    for number, sender in enumerate(("P0", "P1", "P1", "P0")):
        world.want(f"r{number}", 40, sender=sender)
        world.serve(f"r{number}", 40, 12)
        if number == 0:
            world.rescale(world.receivers[0], 0.5, 1)
        elif number == 1:
            decline(world, 2)  # rows of the first are there
        world.run()
    assert [question.revision for question in asked(world)] == [1, 2]
    answers = world.answers()
    assert [type(answers[f"r{number}"]) for number in range(4)] == [Done, Failed, Failed, Done]
    assert {answers[name].code for name in ("r1", "r2")} == {"adopt_refused"}
    assert "sender 0.25, receiver 0.5 (layer 0 k)" in answers["r2"].reason
    assert_taken_over(world)


@pytest.mark.parametrize("seed", range(50))
def test_whatever_comes_first_nothing_is_requantized_or_mixed(seed: int) -> None:
    """The engine takes the first scales that it is asked about, and answers when it likes."""
    world = adopting(0.5, 0.25, seed=seed)
    answered = 0

    def answer() -> None:
        nonlocal answered
        for question in asked(world)[answered:]:
            answered += 1
            if question.revision == 1:
                world.rescale(world.receiver, question.scales[0].scales[0], 1)
            else:
                decline(world, question.revision)

    for number in range(8):
        world.want(f"r{number}", 40 + number, sender=f"P{world.random.randrange(2)}")
        world.offer(f"r{number}", 40 + number, 12)
        for _ in range(world.random.randrange(20)):
            world.later(answer)
    world.run()
    while answered < len(asked(world)):
        answer()
        world.run()
    answers = world.answers()
    assert len(answers) == 8 and any(isinstance(each, Done) for each in answers.values())
    assert {each.code for each in answers.values() if isinstance(each, Failed)} <= {"adopt_refused"}
    assert len(asked(world)) <= 2
    assert_taken_over(world)
    for _ in range(3):
        world.pass_time(50)
        world.run()
    world.check_rest()
