"""Scales change while requests are under way: what was planned with the old ones fails, and nothing is mixed."""

from __future__ import annotations

import pytest
from kvbridge_proto.engine import Done, Failed
from kvbridge_proto.peer import Refuse

from kvbridge.exchange.orders import Dropped
from kvbridge.exchange.session import Session, answer, hello
from tests.unit.exchange.network import Node
from tests.unit.exchange.world import World, make_pool

SAYS = {"rescaled", "peer_left", "peer_lost", "no_session", "stale_epoch", "deadline", "offer_expired"}


def scaled(senders: int = 1, seed: int = 0) -> World:
    """fp8 under 0.5 at the sender, under 1 at the receiver."""
    pools = [make_pool("prefill", rank, senders, 4, 0.5) for rank in range(senders)]
    return World(pools, [make_pool("decode", 0, 1, 16, 1.0)], seed=seed)


def assert_never_mixed(world: World) -> None:
    """Every move went by a plan that knew the scales which its rows had, or were to have, when it began."""
    for pairs, is_sender, pool in world.moved:
        (held,) = {plane.codec.scales for plane in pool.planes}
        assert {(pair.sender if is_sender else pair.receiver).codec.scales for pair in pairs} == {held}


def rescale_after(world: World, node: Node, events: int) -> None:
    """When about so many other things have happened."""
    if events and len(world.events) > 1:
        world.later(lambda: rescale_after(world, node, events - 1))
    else:
        world.rescale(node, {"P": 0.125, "D": 0.0625}[node.name[0]])


@pytest.mark.proves("G21")
@pytest.mark.parametrize("who", ["P", "D", "PD"])
@pytest.mark.parametrize("seed", range(50))
def test_what_was_planned_before_fails_and_never_mixes(seed: int, who: str) -> None:
    world = scaled(2, seed)
    for i in range(6):
        world.want(f"r{i}", 40 + i)
        world.offer(f"r{i}", 40 + i, 12)
    for node in world.nodes.values():
        if node.name[0] in who:
            rescale_after(world, node, world.random.randrange(150))
    world.run()
    for _ in range(4):  # deadlines, and slots that only a new session can clear
        world.pass_time(50)
        world.run()
    world.begin("after", 40)
    answers = world.answers()
    assert len(answers) == 7 and isinstance(answers["after"], Done)
    assert {answer.code for answer in answers.values() if isinstance(answer, Failed)} <= SAYS
    for sender in range(2):
        assert len(world.released(sender)) == 7
    assert_never_mixed(world)
    world.check_rest()


def test_a_plan_of_the_old_scales_ends_with_the_code_and_a_new_want_gets_through() -> None:
    world = scaled()
    world.want("old", 40)
    world.run()  # claimed, nothing offered yet
    world.rescale(world.receivers[0], 0.25)
    world.run()
    assert world.failure("old").code == "rescaled"
    world.begin("new", 40)
    assert_never_mixed(world)
    world.check_done("new")


def test_a_want_that_was_reaching_goes_on() -> None:
    world = scaled()
    world.hold.add("hello")
    world.fetch("r", 40)
    assert not world.answers()
    world.rescale(world.receivers[0], 0.25)
    world.hold.clear()
    world.serve("r", 40, 12)
    assert_never_mixed(world)
    world.check_done("r")


@pytest.mark.parametrize("has_claimed", [False, True])
def test_a_want_of_which_nothing_came_reaches_a_sender_of_new_scales_again(has_claimed: bool) -> None:
    """Its claim, or its greeting, crosses the goodbye of the sender, and is under the scales from before."""
    world = scaled()
    world.begin("before", 40)
    world.hold |= {"message", "hello"}
    if not has_claimed:
        (receiver,) = world.receivers
        world.do(receiver, receiver.receiving.unreachable("P0", "peer_lost", "test", world.now))
    world.rescale(world.senders[0], 0.25)
    world.want("after", 40)  # the receiver has not heard of it
    world.offer("after", 40, 12)
    world.go_on()
    assert isinstance(answer := world.answers()["after"], Done), answer
    assert answer.moved_bytes == world.answers()["before"].moved_bytes
    assert_never_mixed(world)
    world.check_rest()


@pytest.mark.proves("G21")
def test_a_claim_of_the_epoch_before_is_refused_though_its_receiver_has_greeted_anew() -> None:
    """It comes late, by a link that was given up; its plan is the same, for only the revision is new."""
    world = scaled()
    world.begin("before", 40)
    (sender,), (receiver,) = world.senders, world.receivers
    world.hold.add("message")
    world.want("r", 40)
    world.rescale(sender, 0.5)
    session = answer(hello(receiver.engine), sender.engine)
    assert isinstance(session, Session)
    sender.accepted[receiver.engine.agent.incarnation] = session
    world.hold.clear()
    world.serve("r", 40, 12)
    assert [refuse.code for refuse in world.heard(Refuse)] == ["stale_epoch"] and not world.heard(Dropped)
    world.check_done("r")


def test_a_want_fails_when_its_sender_leaves_in_the_middle_of_its_rows() -> None:
    world = scaled()
    world.want("r", 240)
    world.serve("r", 120, 30, last=False)
    assert world.scatters and not world.answers()
    world.do(world.receiver, world.receiver.receiving.unreachable("P0", "peer_left", "test", world.now))
    world.settle()
    assert world.failure().code == "peer_left"


def test_a_want_ends_when_the_sender_that_said_goodbye_is_gone() -> None:
    world = scaled()
    world.fetch("r", 40)
    world.nodes["P0"].is_dead = True
    world.do(world.receiver, world.receiver.receiving.unreachable("P0", "peer_left", "test", world.now))
    world.run()
    assert world.failure().code == "peer_unreachable"
