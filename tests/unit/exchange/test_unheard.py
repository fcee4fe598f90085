"""Wants that fail while their sender cannot be reached: it hears of them once it is, and gives its blocks back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvbridge_proto.peer import Cancel, Claim, Drained, Refuse

from kvbridge.exchange.actions import Send
from kvbridge.exchange.receiver import ASK_AGAIN_S, UNHEARD_AGAIN_S
from kvbridge.exchange.sender import LATE_S
from kvbridge.exchange.wants import UNHEARD_S
from kvbridge.loopback.messages import number_of
from tests.unit.exchange.world import World, make_pool

pytestmark = pytest.mark.proves("G16")


def cut(world: World) -> None:
    """Nothing that was said arrives, and both sides notice."""
    world.events[:] = [each for each in world.events if each[0] != "message"]
    for receiver in world.receivers:
        for sender in world.senders:
            world.lose_link(receiver, sender)


def reached_again(world: World) -> None:
    """Nobody wants anything: the receiver tries by itself, first the rank that it knows, then the others."""
    for _ in world.senders:
        world.pass_time(UNHEARD_AGAIN_S)
        world.run()


def silent(world: World, request: str) -> None:
    """Its claim is lost on the way, and the session ends."""
    world.want(request, 64)
    cut(world)


def aborted(world: World, request: str) -> None:
    """The same, but the want is given up before the session ends: the cancel is lost as well."""
    world.want(request, 64)
    world.abandon(request)
    cut(world)


def unreachable(world: World, request: str) -> None:
    """There is no session."""
    cut(world)
    for node in world.senders:
        node.is_dead = True
    world.fetch(request, 64)
    for node in world.senders:
        node.is_dead = False


def abandoned(world: World, request: str) -> None:
    """It is given up while there is no session."""
    cut(world)
    world.want(request, 64)
    world.abandon(request)
    assert {each[0] for each in world.events} == {"hello"}
    world.events.clear()


FAILURES = {"silent": silent, "aborted": aborted, "unreachable": unreachable, "abandoned": abandoned}


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2)])
@pytest.mark.parametrize("how", FAILURES)
def test_a_failed_want_is_told_once_its_sender_is_reached_again(how: str, ranks: tuple[int, int]) -> None:
    world = World(*ranks)
    world.begin("before")
    world.serve("r", 64, 16)
    FAILURES[how](world, "r")
    world.run()
    assert all(type(world.answers(at)["r"]).__name__ == "Failed" for at in range(ranks[1]))
    assert all([each.request for each in node.sending.offers.values()] == ["r"] for node in world.senders)
    reached_again(world)
    assert not any(node.sending.offers for node in world.senders)
    assert not any(len(node.receiving._unheard) or node.receiving._cancelled for node in world.receivers)
    world.begin("after")
    world.check_done("after")


def test_what_was_not_offered_is_not_waited_for(world: World) -> None:
    """The claim that tells of a failed want would take what a later request is offered."""
    world.begin("before")
    silent(world, "r")
    reached_again(world)
    (sender,) = world.senders
    world.do(sender, sender.sending.answers(world.now, world.now, lambda count: True))
    assert not sender.sending.outgoing_transfers
    world.begin("r")
    world.check_done("r")


@pytest.mark.parametrize("senders", [1, 2])
def test_a_want_has_what_was_offered_since_before_a_failed_one_is_told(senders: int) -> None:
    """Of the same prompt: the failed one's claim, which needs nothing, would take it from the one that waits."""
    world = World(senders)
    world.begin("before")
    silent(world, "r")
    world.offer("again", 64, 16, rendezvous="r")
    world.fetch("again", 64, rendezvous="r")
    for sender in world.senders:
        world.do(sender, sender.sending.answers(world.now, world.now, lambda count: True))
    world.run()
    world.check_done("again")
    assert not any(len(node.receiving._unheard) for node in world.receivers)


def test_a_want_whose_cancel_was_confirmed_is_not_told_again(world: World) -> None:
    world.begin("before")
    world.fetch("r", 64)
    world.abandon("r")
    world.run()
    (receiver,) = world.receivers
    assert not receiver.receiving._cancelled
    cut(world)
    assert not len(receiver.receiving._unheard)


def test_they_are_forgotten_in_time_and_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbridge.exchange.wants.MOST_UNHEARD", 3)
    (sender,), (receiver,) = world.senders, world.receivers
    world.begin("before")
    cut(world)
    for number in range(5):
        world.want(f"r{number}", 64)
    sender.is_dead = True
    cut(world)
    world.run()
    assert len(receiver.receiving._unheard) == 3
    world.pass_time(UNHEARD_S)
    world.run()
    assert not len(receiver.receiving._unheard)
    world.pass_time(UNHEARD_AGAIN_S)
    assert not world.events, "and nobody is reached for them any more"


def test_each_rank_is_told_once() -> None:
    """One of two had its claim, and served it."""
    world = World(senders=2)
    world.begin("before")
    world.serve("r", 64, 16)
    world.want("r", 64)
    claims = [each for each in world.events if isinstance(each[-1], Claim)]
    assert len(claims) == 2, world.events
    world.events.remove(claims[1])
    world.run()
    lost = claims[1][2]
    node, (receiver,) = world.nodes[lost], world.receivers
    node.accepted.pop(receiver.incarnation, None)
    world.do(node, node.sending.lost(receiver.incarnation))
    said = receiver.receiving.unreachable(lost, "peer_lost", "cut", world.now)
    assert not [each for each in said if isinstance(each, Send) and isinstance(each.body, Claim)]
    world.do(receiver, said)
    world.run()
    reached_again(world)
    assert not any(each.sending.offers for each in world.senders)


def test_a_rank_that_was_not_known_is_told_too() -> None:
    """The want fails before the rank at its sender's address has heard of its engine's other one."""
    world = World(senders=2)
    first = world.sender
    whole, first.engine = first.engine, replace(first.engine, ranks=first.engine.ranks[:1])
    world.serve("r", 64, 16)
    world.fetch("r", 64)
    world.abandon("r")
    world.run()
    world.pass_time(ASK_AGAIN_S)  # what was asked for the want
    world.run()
    assert [bool(node.sending.offers) for node in world.senders] == [False, True]
    first.engine = whole
    reached_again(world)
    assert not any(node.sending.offers for node in world.senders)


def test_a_sender_that_was_never_met_is_not_tried_again(world: World) -> None:
    """Requests may name any number of addresses where nobody is."""
    (sender,), (receiver,) = world.senders, world.receivers
    sender.is_dead = True
    world.fetch("r", 64)
    assert world.failure().code == "peer_unreachable"
    assert not len(receiver.receiving._unheard)
    world.pass_time(UNHEARD_AGAIN_S)
    assert not world.events


def test_a_sender_that_refuses_is_not_tried_again(world: World) -> None:
    """It has no offers to give back, or will not be told."""
    (receiver,) = world.receivers
    world.begin("before")
    silent(world, "r")
    world.run()
    assert len(receiver.receiving._unheard) == 1
    for code, kept in (("busy", 1), ("peer_unreachable", 1), ("no_engine", 0)):
        world.do(receiver, receiver.receiving.unreachable("P0", code, "test", world.now))
        assert len(receiver.receiving._unheard) == kept, code


def test_a_failed_want_is_told_under_the_epoch_of_the_session_that_tells_it() -> None:
    """The receiver's engine has other scales (or weights) by then. A stale epoch would end the new session."""
    world = World([make_pool("prefill", 0, 1, 4, scale=0.5)], [make_pool("decode", 0, 1, 16, scale=0.5)])
    (sender,), (receiver,) = world.senders, world.receivers
    world.begin("before")
    world.serve("r", 64, 16)
    aborted(world, "r")
    world.run()
    world.rescale(receiver, 0.25)
    reached_again(world)
    assert not sender.sending.offers
    assert not world.heard(Refuse)
    world.begin("after")
    world.check_done("after")


@pytest.mark.parametrize("is_done", [True, False], ids=["its want is done", "its want fails"])
def test_a_rank_of_which_nothing_is_needed_is_told_again_if_its_session_is_lost(is_done: bool) -> None:
    """Each receiver takes the rows of one of two ranks, and sends the other a claim without any."""
    world = World(2, 2)
    receiver, other = world.receivers[0], world.senders[1]
    world.begin("before")
    world.serve("r", 64, 16)
    world.want("r", 64)
    empty = [each for each in world.events if isinstance(each[-1], Claim) and not each[-1].takes]
    (lost,) = [each for each in empty if (each[1], each[2]) == (receiver.name, other.name)]
    world.events.remove(lost)
    world.lose_link(receiver, other)
    if not is_done:
        world.abandon("r")
    world.run()
    assert [bool(each.sending.offers) for each in world.senders] == [False, True]
    reached_again(world)
    assert not any(each.sending.offers for each in world.senders)
    assert not any(len(node.receiving._unheard) for node in world.receivers)
    world.begin("after")
    world.check_done("after")


@pytest.mark.parametrize("is_over", [False, True], ids=["it was given back", "it had ended"])
def test_what_a_rank_is_told_again_takes_no_offer_of_an_equal_prompt(is_over: bool) -> None:
    """It had heard it the first time. The other prompt has the same id, and nobody has claimed its offer yet."""
    world = World(2, 2)
    receiver, (first, other) = world.receivers[0], world.senders
    world.begin("before")
    world.offer("a", 32, 8, last=False, rendezvous="r", at=first)
    world.offer("a", 64, 16, rendezvous="r", at=other)
    if is_over:
        world.do(other, other.sending.withdraw(number_of("a"), "test", world.now))
    world.fetch("a", 64, rendezvous="r")
    assert not other.sending.offers
    world.lose_link(receiver, other)
    world.offer("a", 64, 8, 8, rendezvous="r", at=first)
    world.run()
    assert type(world.answers()["a"]).__name__ == "Done"
    world.offer("b", 64, 16, rendezvous="r")
    heard = len(world.heard(Claim))
    reached_again(world)
    assert [each.takes for each in world.heard(Claim)[heard:]] == [()], "it was told again"
    assert [each.want for each in other.sending.offers.values()] == [None]
    world.fetch("b", 64, rendezvous="r")
    world.check_done("b")


@pytest.mark.parametrize(("waited_s", "is_met"), [(0.0, True), (LATE_S, False)])
def test_a_claim_of_a_failed_want_that_takes_nothing_waits_for_a_moment_only(waited_s: float, is_met: bool) -> None:
    """This rank's offer may just be late. After that it would take another prompt's under the same id."""
    world = World(2, 2)
    receiver, (first, other) = world.receivers[0], world.senders
    world.begin("before")
    world.offer("a", 32, 8, last=False, rendezvous="r", at=first)
    world.fetch("a", 64, rendezvous="r")
    assert other.sending.is_awaited("r")
    world.abandon("a")
    world.run()
    world.pass_time(waited_s)
    world.offer("later", 64, 16, rendezvous="r", at=other)
    world.run()
    (offered,) = other.sending.offers.values()
    assert (offered.want is not None) == is_met and not other.sending.is_awaited("r")
    assert not receiver.receiving.wants


def test_a_claim_that_was_cancelled_is_told_why() -> None:
    """Not that its deadline passed, though it waited a moment longer."""
    world = World(2, 2)
    first, other = world.senders
    world.offer("a", 32, 8, last=False, rendezvous="r", at=first)
    world.fetch("a", 64, rendezvous="r")
    (claimed,) = [each for each in other.sending.outgoing_transfers.values() if not each.plan.chunks]
    world.abandon("a")
    world.run()
    said = other.sending.tick(world.now + LATE_S)
    (drained,) = [each.body for each in said if isinstance(each, Send) and isinstance(each.body, Drained)]
    assert (drained.transfer, drained.code) == (claimed.transfer, "aborted")
    assert claimed.stopped_by == ("aborted", "abandoned by the engine")


def test_a_claim_without_rows_that_was_served_is_not_remembered_once_it_is_cancelled() -> None:
    """The sender remembers a bounded number of transfers for claims that may still come. This one has come."""
    world = World(2, 2)
    first, other = world.senders
    world.offer("a", 32, 8, last=False, rendezvous="r", at=first)
    world.offer("a", 64, 16, rendezvous="r", at=other)
    world.fetch("a", 64, rendezvous="r")
    assert not other.sending.outgoing_transfers
    world.abandon("a")
    world.run()
    assert not world.receivers[0].receiving.wants
    assert len(world.heard(Cancel)) == 2 and not other.sending._renounced
