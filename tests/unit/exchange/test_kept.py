"""What is kept serves any number of wants, at once and one after the other, until its engine needs its blocks."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from kvbridge_proto.engine import Done, Held, KeptBy
from kvbridge_proto.peer import Keeps
from msgspec.structs import replace

from kvbridge.agent.kept import KeptAnswers
from kvbridge.agent.status import held, offers
from kvbridge.exchange.sender import FRESH_S
from kvbridge.loopback.messages import number_of
from tests.unit.exchange.network import offer_of
from tests.unit.exchange.world import World

HOLD_S = 100.0


@pytest.mark.parametrize("address", ["", "P0", "tcp://0.0.0.0:7700", "tcp://[::1", "tcp://h:0#key"])
def test_what_is_kept_where_nobody_can_dial_is_not_passed_on(address: str) -> None:
    told: list[KeptBy] = []
    answers = KeptAnswers(lambda kept: None, told.append)
    for each in (address, "tcp://h:7700#key"):
        session: Any = SimpleNamespace(peer=SimpleNamespace(incarnation="a", address=each))
        answers.heard(session, Keeps(rendezvous="kept", prefixes=(b"a" * 20,)))
    assert [each.sender for each in told] == ["tcp://h:7700#key"]


def keep(world: World, name: str = "kept", prefixes: str = "ab", most: int = 1000, hold_s: float = HOLD_S) -> None:
    """All ranks keep 64 tokens, in 16 blocks. Each letter stands for the digest of a prefix."""
    offer = replace(offer_of(name, 64, 16), prefixes=tuple(each.encode() * 20 for each in prefixes), most_kept=most)
    for node in world.senders:
        world.do(node, node.sending.offer(replace(offer, hold_s=hold_s), node.engine, world.now))


def want(world: World, name: str, tokens: int = 64, kept: str = "kept") -> None:
    world.want(name, tokens, rendezvous=kept, is_offered=True)


def wait(world: World, seconds: float) -> None:
    world.pass_time(seconds)
    world.run()


def are_done(world: World, *names: str) -> bool:
    return all(isinstance(world.answers(rank)[name], Done) for name in names for rank in range(len(world.receivers)))


def ended(world: World) -> dict[str, str]:
    return {name: each.code for name, each in world.released().items()}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_wants_read_it_at_once_and_later_and_it_stays(senders: int, receivers: int, seed: int) -> None:
    world = World(senders, receivers, seed=seed)
    keep(world)
    for number in range(4):  # their claims and reads come in any order
        want(world, f"r{number}", (16, 32, 48, 64)[number])
    world.run()
    assert are_done(world, *(f"r{number}" for number in range(4)))
    want(world, "later")
    world.run()
    assert are_done(world, "later") and not world.released()
    wait(world, HOLD_S + 1)
    for sender in range(senders):
        assert {name: each.code for name, each in world.released(sender).items()} == {"kept": "kept_no_longer"}
    world.check_rest()


def test_who_comes_before_it_is_kept_shares_it_too(world: World) -> None:
    for name in ("one", "two"):
        world.want(name, 64, rendezvous="kept")
    world.run()
    keep(world)
    world.run()
    assert are_done(world, "one", "two") and not world.released()


@pytest.mark.parametrize("end", ["is released by command", "makes room"])
def test_what_ends_while_it_is_read_is_read_to_its_end(world: World, end: str) -> None:
    world.hold.add("gather")
    keep(world)
    want(world, "one")
    world.run()
    if end == "is released by command":
        released, actions = world.sender.sending.release(world.now)
        world.do(world.sender, actions)
        assert released == 1
    else:
        keep(world, "other", "xy", most=16)
    assert not world.released()
    world.go_on()
    assert are_done(world, "one")
    assert ended(world) == ({"kept": "kept_no_longer"} if "command" in end else {})
    if "command" in end:
        want(world, "late")
        world.run()
        assert world.failure("late").code == "kept_no_longer"


def test_it_is_kept_for_longer_if_it_is_used(world: World) -> None:
    keep(world)
    for number in range(5):
        wait(world, HOLD_S - 1)
        want(world, f"r{number}")
        world.run()
    assert not world.released()
    wait(world, HOLD_S + 1)
    assert ended(world) == {"kept": "kept_no_longer"}


def test_what_its_engine_takes_back_is_released_once_nobody_reads_it() -> None:
    world = World(seed=1)
    world.hold.add("gather")
    keep(world)
    for number in range(3):
        want(world, f"r{number}")
    world.run()
    world.withdraw("kept")
    assert not world.released(), "it may still be read"
    want(world, "late")
    world.run()
    world.go_on()
    assert ended(world) == {"kept": "withdrawn"}
    assert {world.failure(name).code for name in ("r0", "r1", "r2", "late")} == {"withdrawn"}
    world.check_rest()


def test_what_was_used_last_goes_last(world: World) -> None:
    for name, prefixes in (("one", "a"), ("two", "b"), ("three", "c")):
        keep(world, name, prefixes, most=48)
    want(world, "r", kept="one")
    world.run()
    keep(world, "four", "d", most=48)
    assert ended(world) == {"two": "kept_no_longer"}
    world.now += FRESH_S
    for _ in range(2):
        world.do(world.sender, world.sender.sending.reclaim(1, world.now, lambda fence: True))
        world.now += FRESH_S
    assert set(ended(world)) == {"two", "three"}


def test_what_is_read_is_not_taken_for_others(world: World) -> None:
    world.hold.add("gather")
    keep(world)
    want(world, "r")
    world.run()
    keep(world, "other", "xy", most=16)
    world.now += FRESH_S
    for _ in range(2):
        world.do(world.sender, world.sender.sending.reclaim(100, world.now, lambda fence: True))
        world.now += FRESH_S
    assert set(ended(world)) == {"other"}
    world.go_on()
    assert are_done(world, "r") and set(ended(world)) == {"other"}


PREFIXES = ("a", "ab", "abc", "aX", "x", "xB")


@pytest.mark.parametrize("first", PREFIXES)
@pytest.mark.parametrize("second", PREFIXES)
def test_of_two_of_which_one_begins_with_the_other_the_longer_is_kept(world: World, first: str, second: str) -> None:
    """A digest is of all tokens up to its end: one that another has in the same place says that all of it is there."""
    keep(world, "first", first)
    keep(world, "second", second)
    expected = {"second"} if first.startswith(second) else {"first"} if second.startswith(first) else set()
    assert set(ended(world)) == expected


def test_a_chat_holds_no_more_than_its_last_turn(world: World) -> None:
    for turn in range(1, 9):
        keep(world, f"turn{turn}", "abcdefgh"[:turn])
    assert set(ended(world)) == {f"turn{turn}" for turn in range(1, 8)}


def test_a_shorter_one_that_is_read_stays_beside_the_longer(world: World) -> None:
    world.hold.add("gather")
    keep(world, "short", "a")
    want(world, "r", kept="short")
    world.run()
    keep(world, "long", "ab")
    assert not world.released()
    world.go_on()
    assert are_done(world, "r") and not world.released()


def test_one_between_two_that_are_kept_ends_with_the_shorter(world: World) -> None:
    world.hold.add("gather")
    keep(world, "short", "a")
    want(world, "r", kept="short")
    world.run()
    keep(world, "long", "abc")
    world.go_on()
    keep(world, "between", "ab")
    assert set(ended(world)) == {"short", "between"}


def test_a_prompt_that_is_kept_again_renews_what_is_kept(world: World) -> None:
    keep(world, "one")
    wait(world, HOLD_S - 1)
    keep(world, "two", "a")
    wait(world, HOLD_S - 1)
    assert ended(world) == {"two": "kept_no_longer"}


def test_of_a_want_that_needs_nothing_it_is_none_the_less_kept(world: World) -> None:
    keep(world)
    want(world, "r", 0)
    world.run()
    assert not world.released()


def test_a_share_that_nobody_finishes_ends_with_its_time(world: World) -> None:
    """One rank of two claims it, and the other never comes."""
    keep(world)
    share = world.sender.sending._share(world.sender.sending.engines_offers[0], world.now)
    share.want, share.receivers = "want", 2
    wait(world, HOLD_S + 1)
    assert ended(world) == {"kept": "kept_no_longer"}
    world.check_rest()


def test_a_lost_receiver_frees_its_share(world: World) -> None:
    world.hold.add("gather")
    keep(world)
    want(world, "r")
    world.run()
    world.do(world.sender, world.sender.sending.lost(world.receiver.incarnation))
    world.go_on()
    for _ in range(40):
        wait(world, 1.0)
    sending = world.sender.sending
    assert [each.request for each in sending.offers.values()] == ["kept"] and not sending.engines_offers[0].shares


def test_the_engine_and_status_hear_of_one_offer(world: World) -> None:
    world.hold.add("gather")
    keep(world)
    for name in ("one", "two"):
        want(world, name)
    world.run()
    sending, now = world.sender.sending, world.now
    assert [(each.request, each.state) for each in offers(sending, str, now)] == [("kept", "claimed")]
    assert (held(sending, now).offers, held(sending, now).unclaimed, held(sending, now).tokens) == (1, 0, 64)
    world.do(world.sender, sending.hold("incarnation", ("kept",) * 3, now))
    numbers = [number for message in world.sender.told if isinstance(message, Held) for number in message.numbers]
    assert numbers == [number_of("kept")]
    world.go_on()
    assert [each.state for each in offers(sending, str, now)] == ["awaited"]


@pytest.mark.parametrize("seed", range(300))
def test_whatever_comes_between_nothing_is_left_and_nothing_released_twice(seed: int) -> None:
    """Wants, withdrawals, abandons, lost time and making room, in any order."""
    ranks = 1 + seed % 2
    world = World(ranks, 1 + seed // 2 % 2, seed=seed)
    choose, names = world.random, count()
    kept: list[str] = []
    for step in range(25):
        what = choose.choice(("keep", "want", "want", "want", "abandon", "withdraw", "time", "steps", "steps"))
        if what == "keep":
            kept.append(f"k{step}")
            keep(world, kept[-1], choose.choice(PREFIXES), choose.choice((32, 100)), hold_s=choose.choice((0.5, 50.0)))
        elif what == "want" and kept:
            want(world, f"w{next(names)}", choose.choice((16, 64)), choose.choice(kept))
        elif what == "abandon":
            world.abandon(f"w{choose.randrange(10)}")
        elif what == "withdraw" and kept:
            world.withdraw(choose.choice(kept))
        elif what == "time":
            world.pass_time(choose.choice((0.1, 1.0)))
        else:
            for _ in range(choose.randrange(30)):
                world.step()
    world.run()
    for _ in range(30):
        wait(world, 5.0)
    for sender in range(ranks):
        assert set(world.released(sender)) == set(kept)
    world.check_rest()
