"""Claims on an offer that has ended, and wants about which a rank is silent: they are answered once it is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import Done, Released

from kvbridge.exchange.offers import ENDED_S, Rendezvous
from kvbridge.loopback.messages import number_of
from tests.unit.exchange.world import World

SOON_S = 1.0


def withdrawn(world: World) -> None:
    world.offer("r", 64, 16)
    world.withdraw("r")


def expired(world: World) -> None:
    world.offer("r", 64, 16)
    world.pass_time(101)


def broken(world: World) -> None:
    world.offer("r", 16, (Blocks(0, 0, (10**6,)),))


def refused(world: World) -> None:
    world.offer("other", 64, 16)
    world.offer("another", 64, 16)
    world.offer("r", 64, 16)


def rescaled(world: World) -> None:
    world.offer("r", 64, 16)
    world.do(world.sender, world.sender.sending.rescaled("test", world.now))


ENDS = {
    "withdrawn": withdrawn,
    "offer_expired": expired,
    "block_out_of_range": broken,
    "too_many_offers": refused,
    "rescaled": rescaled,
}


@pytest.mark.proves("G16")
@pytest.mark.parametrize("code", ENDS)
def test_a_claim_on_an_offer_that_has_ended_hears_at_once_why(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbridge.exchange.sender.MOST_OFFERS", 2)
    world = World()
    ENDS[code](world)
    world.fetch("r", 64)
    assert world.failure("r").code == code
    assert not world.nodes["P0"].sending._rendezvous._ended


@pytest.mark.proves("G16")
@pytest.mark.parametrize("comes_again", [False, True])
@pytest.mark.parametrize("is_wanted_first", [False, True])
def test_all_receivers_of_a_want_hear_the_same_though_another_is_offered_meanwhile(
    is_wanted_first: bool, comes_again: bool
) -> None:
    """Another is offered in the rendezvous, and only then the second receiver of a want comes whose first has
    failed."""
    world = World(receivers=2)
    world.offer("r", 32, 8, last=False)
    if is_wanted_first:
        world.fetch("r", 64, at=world.receivers[0])
    world.withdraw("r", comes_again and is_wanted_first)
    if not is_wanted_first:
        world.want("r", 64, at=world.receivers[0])
    world.run()
    assert world.failure("r").code == "withdrawn"
    world.offer("s", 64, 16, rendezvous="r")
    world.fetch("r", 64, at=world.receivers[1])
    assert world.failure("r", 1).code == "withdrawn"
    world.fetch("again", 64, rendezvous="r")
    assert all(isinstance(world.answers(receiver)["again"], Done) for receiver in (0, 1))
    world.check_rest()


def test_a_receiver_that_never_came_in_time_hears_that_the_offer_expired() -> None:
    world = World(receivers=2)
    world.offer("r", 64, 16)
    world.fetch("r", 64, at=world.receivers[0])
    world.pass_time(101)
    world.fetch("r", 64, at=world.receivers[1])
    assert world.failure("r", 1).code == "offer_expired"
    world.check_rest()


def test_a_want_that_failed_may_come_again_under_its_name(world: World) -> None:
    withdrawn(world)
    world.fetch("r", 64)
    assert world.failure("r").code == "withdrawn"
    world.fetch("r", 64)
    assert not world.answers(), "one offer's end is the answer to one want"
    world.serve("s", 64, 16, rendezvous="r")
    world.check_done("r")


def test_another_offer_in_the_rendezvous_is_what_claims_come_for(world: World) -> None:
    withdrawn(world)
    world.offer("s", 64, 16, rendezvous="r")
    world.fetch("r", 64)
    assert isinstance(world.answers()["r"], Done)
    world.fetch("next", 64, rendezvous="r")  # the end of the first is forgotten
    assert "next" not in world.answers()


def test_a_preempted_prompt_is_waited_for(world: World) -> None:
    world.offer("r", 64, 16)
    world.withdraw("r", comes_again=True)
    world.fetch("r", 64)
    assert not world.answers()
    world.serve("r~1", 64, 16, rendezvous="r")
    world.check_done("r")


def test_the_end_of_a_write_gives_nothing_back_of_what_is_offered_under_that_name_since(world: World) -> None:
    """Released comes when the blocks are read: what was gathered of them may be on its way, or late."""
    (sender,) = world.senders
    world.hold = {"write"}
    world.begin()
    world.withdraw("r", comes_again=True)
    world.run()
    assert "r" in world.released() and sender.sending.outgoing_transfers
    world.offer("r", 64, 16)
    world.go_on()
    assert not sender.sending.outgoing_transfers and "r" in world.released() and number_of("r") in sender.sending.offers
    world.fetch("next", 64, rendezvous="r")
    assert isinstance(world.answers()["next"], Done)
    assert [told.code for told in sender.told if isinstance(told, Released)] == ["withdrawn", ""]
    assert not sender.sending.offers and sender.send_orders.slots.free == len(sender.send_orders.slots)


@pytest.mark.parametrize("end", [64, 0])
def test_an_offer_that_was_served_is_not_remembered(end: int) -> None:
    """The next equal prompt has the same rendezvous; its claim may come before its offer."""
    world = World(receivers=2)
    world.offer("a", 64, 16, rendezvous="prompt")
    world.fetch("a", end, rendezvous="prompt")
    world.withdraw("a")
    world.fetch("b", 64, rendezvous="prompt")
    assert "b" not in world.answers()
    world.serve("b", 64, 16, rendezvous="prompt")
    assert all(isinstance(world.answers(receiver)["b"], Done) for receiver in (0, 1))
    world.check_rest()


def test_of_two_equal_prompts_the_one_that_is_open_goes_first(world: World) -> None:
    for name in ("a", "b"):
        world.offer(name, 64, 16, rendezvous="prompt")
    world.withdraw("a")
    for name in ("c", "d"):
        world.want(name, 64, rendezvous="prompt")
    world.run()
    assert isinstance(world.answers()["c"], Done) and world.failure("d").code == "withdrawn"


def test_ends_are_forgotten_in_time_and_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbridge.exchange.offers.MOST_ENDED", 3)
    rendezvous_ids: Rendezvous = world.nodes["P0"].sending._rendezvous
    for number in range(5):
        world.offer(f"r{number}", 64, 16)
        world.withdraw(f"r{number}")
    assert list(rendezvous_ids._ended) == ["r2", "r3", "r4"] and len(rendezvous_ids._by_age) == 3
    world.pass_time(ENDED_S)
    world.fetch("r4", 64, deadline=SOON_S)
    assert "r4" not in world.answers() and not rendezvous_ids._ended and not rendezvous_ids._by_age


def test_an_engine_that_left_takes_its_ends_with_it(world: World) -> None:
    withdrawn(world)
    world.do(world.sender, world.sender.sending.engine_left(world.now))
    assert not world.sender.sending._rendezvous._ended


def test_claims_that_wait_for_a_rebuild_hear_of_an_end_at_once(world: World) -> None:
    world.offer("r", 64, 16)
    world.sender.sending.pause(is_alone=True)
    world.fetch("r", 64)
    assert not world.answers()
    world.withdraw("r")
    world.run()
    assert world.failure("r").code == "withdrawn"
    world.check_rest()


def test_a_rank_that_offers_nothing_is_named_at_the_deadline() -> None:
    world = World(senders=2)
    world.want("r", 64)
    world.serve("r", 64, 16, at=world.senders[0])
    world.pass_time(50)
    world.settle()
    answer = world.failure()
    assert answer.code == "deadline" and answer.reason.endswith("chunks; nothing came from P1"), answer


def test_a_rank_that_its_engine_has_not_named_is_missed_at_the_deadline() -> None:
    world = World(senders=2)
    for node in world.senders:
        node.engine = replace(node.engine, ranks=())
    world.want("r", 64)
    world.run(20)
    world.pass_time(50)
    answer = world.failure()
    assert answer.code == "deadline" and "1 of 2 ranks, for its engine has told P0 of 1 only" in answer.reason


@pytest.mark.proves("G16")
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_dead_agent_had_offered_is_not_waited_for_and_what_its_successor_may_offer_is(ranks: int) -> None:
    """The last rank's host refuses connections, as it was asked at 1.0."""
    world = World(senders=ranks)
    receiver, last = world.receivers[0], world.senders[-1]
    world.begin("before")
    world.lose_link(receiver, last)
    last.is_dead = True
    world.hold = {"hello"}
    for request, now, is_offered in (("offered", 0.0, True), ("to come", 0.0, False), ("later", 2.0, True)):
        world.now = now
        world.want(request, 64, is_offered=is_offered)
    world.do(receiver, receiver.receiving.absent("another", 1.0, world.now))
    assert world.answers().keys() == {"before"}
    world.do(receiver, receiver.receiving.absent(last.name, 1.0, world.now))
    assert world.answers().keys() == {"before", "offered"}
    failure = world.failure("offered")
    assert failure.code == "peer_unreachable" and last.name in failure.reason and "taken for gone" in failure.reason
