"""How long an offer is kept: a short time by itself, longer while somebody waits, not at all if blocks are lacking."""

from __future__ import annotations

import pytest
from kvbridge_proto.engine import Held
from kvbridge_proto.peer import Hold
from msgspec.structs import replace

from kvbridge.agent.status import offers
from kvbridge.exchange.offers import AWAITED_S
from kvbridge.exchange.sender import FRESH_S, Sender
from kvbridge.exchange.wants import HOLD_EVERY_S
from kvbridge.loopback.messages import number_of
from kvbridge.routes.pull.halves import LEASE_S
from tests.unit.exchange.network import offer_of
from tests.unit.exchange.world import World
from tests.unit.routes.test_verify import PromisingSender

pytestmark = pytest.mark.proves("G17")

HOLD_S = 100.0  # of the world's offers


def wait(world: World, seconds: float) -> None:
    """Time passes as it does in an agent, in small steps."""
    end = world.now + seconds
    while world.now < end:
        world.pass_time(min(1.0, end - world.now))
        world.run()


def left_s(sending: Sender, now: float) -> float | None:
    """What `kvbridge status` says of the only offer."""
    (offer,) = offers(sending, str, now)
    return offer.left_s


def test_status_says_how_long_an_open_offer_is_held(world: World) -> None:
    world.serve("r", 64, 16)
    sending, began = world.senders[0].sending, world.now
    assert left_s(sending, began) == HOLD_S
    assert left_s(sending, began + 0.0001) == HOLD_S - 0.001, "rounded down: it is not held for longer"
    assert left_s(sending, began + 99.9996) == 0.0
    assert left_s(sending, began + HOLD_S + 5) == 0.0, "late, and not less than nothing"
    world.expect("r")
    wait(world, 2 * HOLD_S)
    left = left_s(sending, world.now)
    assert left is not None and HOLD_S - 2 * HOLD_EVERY_S < left <= HOLD_S, "it is held anew while somebody waits"


def test_status_says_how_long_a_read_lease_keeps_the_blocks_of_an_ended_offer() -> None:
    at = PromisingSender()
    open_s = left_s(at.sending, at.now)
    assert open_s is not None and open_s > LEASE_S
    (request,) = at.sending.offers
    at.sending.withdraw(request, "gone", at.now)
    assert [(each.state, each.left_s) for each in offers(at.sending, str, at.now)] == [("ending", LEASE_S)]
    assert left_s(at.sending, at.now + LEASE_S - 0.0501) == 0.050
    at.sending.tick(at.now + LEASE_S)
    assert not at.sending.offers


def test_status_names_no_time_for_an_ended_offer_that_is_still_gathered(world: World) -> None:
    world.hold.add("gather")
    world.begin()
    sending = world.senders[0].sending
    assert left_s(sending, world.now) is not None
    world.withdraw("r")
    assert [(each.state, each.left_s) for each in offers(sending, str, world.now)] == [("ending", None)]


@pytest.mark.parametrize("senders", [1, 2])
@pytest.mark.parametrize("receivers", [1, 2])
def test_an_offer_is_held_while_a_request_queues_for_it(senders: int, receivers: int) -> None:
    world = World(senders, receivers)
    world.offer("r", 64, 16)
    world.expect("r")
    world.run()
    assert all(len(sender.accepted) == receivers for sender in world.senders), (
        "sessions are there before they are needed"
    )
    wait(world, 5 * HOLD_S)
    assert not any(world.released(sender) for sender in range(senders))
    world.fetch("r", 64)
    assert all("r" in world.answers(receiver) for receiver in range(receivers))
    wait(world, HOLD_S)
    world.check_rest()


def test_a_want_that_waits_has_its_offer_held(world: World) -> None:
    world.hold.add("gather")
    world.offer("r", 64, 16)
    world.want("r", 64, deadline=10 * HOLD_S)
    wait(world, 5 * HOLD_S)
    assert not world.released()
    world.go_on()
    world.check_done("r")


@pytest.mark.parametrize("end", ["abandon", "engine_left", "empty want"])
def test_who_waits_no_longer_holds_no_longer(world: World, end: str) -> None:
    world.offer("r", 64, 16)
    world.expect("r")
    wait(world, 2 * HOLD_S)
    if end == "abandon":
        world.abandon("r")
    elif end == "engine_left":
        world.do(world.receivers[0], world.receivers[0].receiving.engine_left(world.now))
    else:
        world.want("r", 0)
    assert not world.receivers[0].receiving.expected
    wait(world, HOLD_S + HOLD_EVERY_S)
    assert "r" in world.released()


def test_the_senders_engine_hears_that_its_offer_is_held(world: World) -> None:
    world.offer("r", 64, 16)
    world.expect("r")
    wait(world, 2.0)
    assert Held(numbers=(number_of("r"),)) in world.senders[0].told


def test_all_that_waits_is_said_at_once_and_only_every_few_seconds(world: World) -> None:
    for number in range(50):
        world.expect(f"r{number}")
    wait(world, 4 * HOLD_EVERY_S)
    assert len(world.heard(Hold)) <= 6
    assert any(len(hold.rendezvous_ids) == 50 for hold in world.heard(Hold))


def test_a_request_that_gets_its_blocks_at_once_costs_no_message(world: World) -> None:
    world.begin("warm", 16)
    world.pass_time(0.0)  # the next round is some seconds away
    world.expect("r")
    world.pass_time(0.02)
    world.begin()
    world.pass_time(0.1)
    world.run()
    assert not world.heard(Hold)
    world.check_rest()


def test_one_word_holds_one_offer_of_a_rendezvous(world: World) -> None:
    for number in range(3):
        world.offer(f"r{number}", 64, 16, rendezvous="same")
    world.now += 50
    world.do(world.sender, world.sender.sending.hold("incarnation", ("same", "same"), world.now))
    wait(world, 51)
    assert set(world.released()) == {"r2"}


def reclaim(world: World, blocks: int, short_s: float = FRESH_S, fence: int = 0) -> set[str]:
    """Which offers end when the sender's engine is short of so many blocks for so long, at this count of its fence."""
    before = set(world.released())
    world.do(world.sender, world.sender.sending.reclaim(blocks, world.now, fence.__ge__))
    if short_s:
        world.now += short_s
        world.do(world.sender, world.sender.sending.reclaim(blocks, world.now, fence.__ge__))
    new = set(world.released()) - before
    assert all(world.released()[name].code in ("reclaimed", "kept_no_longer") for name in new)
    return new


def test_the_oldest_go_first_and_no_more_than_needed(world: World) -> None:
    for number in range(4):
        world.offer(f"r{number}", 64, 16)
        world.now += 1
    assert reclaim(world, 17) == {"r0", "r1"}
    assert reclaim(world, 1, 0) == {"r2"}


def keep(world: World, name: str, most_kept: int) -> None:
    """An answer of 16 blocks is kept, which begins like no other."""
    offer = replace(offer_of(name, 64, 16), prefixes=(name.ljust(20).encode(),), most_kept=most_kept)
    world.do(world.sender, world.sender.sending.offer(offer, world.sender.engine, world.now))


def test_kept_answers_make_room_for_later_ones_and_prompts_stay(world: World) -> None:
    world.offer("prompt", 64, 16)
    for number in range(5):
        keep(world, f"r{number}", most_kept=48)
    assert set(world.released()) == {"r0", "r1"}


def test_what_is_being_released_makes_room_once(world: World) -> None:
    """The blocks of a kept answer that ended are read for a while yet: no other goes in its stead."""
    world.hold.add("gather")
    keep(world, "r", most_kept=32)
    world.want("r", 64)
    world.run()
    world.do(world.sender, world.sender.sending.withdraw(number_of("r"), "no more", world.now))
    for name in ("r1", "r2"):
        keep(world, name, most_kept=32)
    assert not world.released(), "one is still read, and two are as many as may be kept"
    keep(world, "r3", most_kept=32)
    assert set(world.released()) == {"r1"}
    world.go_on()


def test_an_engine_that_is_short_of_blocks_gets_those_of_kept_answers_first(world: World) -> None:
    world.offer("prompt", 64, 16)
    world.now += 1
    keep(world, "r", most_kept=100)
    assert reclaim(world, 1) == {"r"}
    assert reclaim(world, 1) == {"prompt"}


def test_an_offer_that_has_only_just_been_computed_is_left(world: World) -> None:
    """A prompt is offered when its last tokens are scheduled: the steps until they are computed take their time."""
    world.offer("r", 64, 16)
    (offered,) = world.sender.sending.offers.values()
    offered.grew(7, offered.tokens)
    world.now += 10
    assert reclaim(world, 100, fence=6) == set()
    assert reclaim(world, 100, FRESH_S / 2, fence=7) == set()
    assert reclaim(world, 100, FRESH_S / 2, fence=7) == {"r"}


def test_an_offer_that_is_still_computed_is_left(world: World) -> None:
    world.offer("r", 32, 8, last=False)
    world.now += 10
    assert reclaim(world, 100) == set()


def test_an_offer_that_is_claimed_is_left(world: World) -> None:
    world.hold.add("gather")
    world.begin()
    world.now += 10
    assert reclaim(world, 100) == set()
    world.go_on()
    world.check_done("r")


def test_an_offer_that_is_awaited_is_left_for_as_long_as_that_is_said(world: World) -> None:
    world.offer("r", 64, 16)
    world.expect("r")
    wait(world, 2 * AWAITED_S)
    assert reclaim(world, 100) == set()
    world.abandon("r")
    wait(world, AWAITED_S + 1)
    assert reclaim(world, 100) == {"r"}


def test_an_offer_is_left_that_was_awaited_before_it_was_made(world: World) -> None:
    world.expect("r")
    wait(world, 2.0)
    world.offer("r", 64, 16)
    world.now += FRESH_S
    assert reclaim(world, 100) == set()
    sending = world.senders[0].sending
    assert sending.unclaimed(world.now + AWAITED_S + 1) == [sending.offers[number_of("r")]]


def test_two_receivers_that_wait_for_equal_prompts_hold_one_each(world: World) -> None:
    for number in range(3):
        world.offer(f"r{number}", 64, 16, rendezvous="same")
    world.now += 50
    for incarnation in ("one", "two"):
        world.do(world.sender, world.sender.sending.hold(incarnation, ("same",), world.now))
    world.now += FRESH_S
    assert reclaim(world, 100) == {"r2"}
    wait(world, 51)
    assert set(world.released()) == {"r2"}


def test_nobody_is_told_before_all_ranks_of_a_sender_can_hear_it() -> None:
    world = World(senders=2)
    for number in range(2):
        world.offer(f"r{number}", 64, 16)
    world.hold.add("hello")
    world.expect("r0")
    world.pass_time(0.0)
    world.pass_time(0.1)
    world.hold.clear()
    world.step()  # a session with the first rank
    world.pass_time(0.1)
    assert not world.heard(Hold)
    world.run()
    wait(world, 0.2)
    assert len(world.heard(Hold)) >= 2, "both ranks hear of it, without waiting for the next round"


def test_what_is_said_of_unknown_rendezvous_ids_and_requests_is_nothing(world: World) -> None:
    sender, receiver = world.senders[0], world.receivers[0]
    assert sender.sending.hold("incarnation", ("nowhere",) * 1000, 0.0) == []
    assert sender.sending.reclaim(1 << 40, 0.0, bool) == []
    assert receiver.receiving.abandon(number_of("nobody"), 0.0) == []


def test_expected_requests_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbridge.exchange.receiver.MOST_WANTS", 3)
    for number in range(5):
        world.expect(f"r{number}")
    assert len(world.receivers[0].receiving.expected) == 3


def test_many_rendezvous_ids_are_said_in_several_messages() -> None:
    from kvbridge.exchange.wants import holds

    said = holds([f"rendezvous {number}" for number in range(2500)])
    assert [len(hold.rendezvous_ids) for hold in said] == [1024, 1024, 452]
    assert all(isinstance(hold, Hold) for hold in said)
