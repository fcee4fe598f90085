"""Two or more machines back to back, with events in random orders."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbridge_proto.engine import Done, Refused
from kvbridge_proto.peer import Cancel, Refuse
from kvbridge_proto.pool import Pool
from msgspec.structs import replace

from kvbridge.exchange.orders import Dropped
from kvbridge.loopback.messages import number_of
from tests.unit.exchange.network import offer_of
from tests.unit.exchange.test_shares import ranks
from tests.unit.exchange.world import World

SEEDS = range(25)


SHARES = ranks("prefill", 3, 4, 4), ranks("decode", 2, 1, 16)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (2, 1), (1, 2), (2, 4), SHARES])
def test_carries_requests_whatever_the_order(senders: int | list[Pool], receivers: int | list[Pool], seed: int) -> None:
    world = World(senders, receivers, seed=seed)
    for i in range(6):
        if (seed + i) % 2:
            world.want(f"r{i}", 40 + i)
        world.offer(f"r{i}", 40 + i, 12)
        if not (seed + i) % 2:
            world.want(f"r{i}", 40 + i)
    world.run()
    for receiver in range(len(world.receivers)):
        assert [type(answer) for answer in world.answers(receiver).values()] == [Done] * 6
    for sender in range(len(world.senders)):
        assert len(world.released(sender)) == 6
    world.check_rest()


@pytest.mark.proves("G13")
def test_blocks_are_released_before_the_network_is_through() -> None:
    world = World(slots=8, local=8)
    world.hold = {"write"}
    world.begin("r", 8)
    assert "r" in world.released() and not world.answers()
    world.go_on()
    world.check_rest()


@pytest.mark.proves("G5")
def test_quarantined_slots_are_not_lent_again_by_time() -> None:
    world = World(slots=2)
    world.hold = {"write"}
    world.begin()
    world.abandon("r")
    world.run()
    world.begin("s", 16)
    world.pass_time(40)
    world.run()
    assert "s" not in world.answers() and world.receivers[0].slots.free == 0
    world.go_on()
    world.check_done("s")


@pytest.mark.proves("G16")
def test_a_want_without_offer_ends_by_its_deadline(world: World) -> None:
    world.fetch("r", 16, deadline=5)
    world.pass_time(6)
    world.run()
    assert world.failure().code == "deadline"
    world.check_rest()


@pytest.mark.proves("G16")
def test_an_offer_nobody_wants_is_released_by_its_hold(world: World) -> None:
    world.serve("r", 16, 4)
    world.pass_time(101)
    assert world.released()["r"].code == "offer_expired"
    world.check_rest()


@pytest.mark.parametrize("is_last", [False, True])
def test_what_is_said_of_an_offer_that_has_expired_is_no_new_offer(world: World, is_last: bool) -> None:
    """Its engine has the blocks back: it would not wait for whoever read them now."""
    world.serve("r", 8, 2, last=False)
    world.pass_time(101)
    assert world.released()["r"].code == "offer_expired"
    sending = world.senders[0].sending
    world.want("r", 16)
    more = offer_of("r", 16, 4, last=is_last, more=True)
    assert not sending.offer(more, world.senders[0].engine, world.now) and not sending.offers
    assert not sending.withdraw(more.number, "over", 0.0), "a second Released could be taken for another offer's"


def test_a_want_for_more_than_was_offered_fails_with_both_numbers(world: World) -> None:
    world.offer("r", 16, 4)
    world.fetch("r", 20)
    answer = world.failure()
    assert answer.code == "tokens_missing" and "20" in answer.reason
    world.check_rest() if not world.senders[0].sending.offers else world.pass_time(101)


@pytest.mark.proves("G7")
@settings(max_examples=150)
@given(
    st.integers(1, 3).filter(lambda n: n != 3),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 6),
    st.integers(0, 10**9),
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["abandon", "withdraw", "time"])), max_size=4),
)
def test_every_request_ends_once_and_nothing_leaks(
    senders: int, receivers: int, slots: int, seed: int, faults: list[tuple[int, str]]
) -> None:
    world = World(senders, receivers, slots=slots, seed=seed)
    for i in range(6):
        if seed % 2:
            world.want(f"r{i}", 24)
        world.offer(f"r{i}", 24, 6)
        if not seed % 2:
            world.want(f"r{i}", 24)
        for at, fault in faults:
            if at == i and fault == "abandon":
                world.abandon(f"r{i}")
            elif at == i and fault == "withdraw":
                world.withdraw(f"r{i}")
            elif at == i:
                world.pass_time(1)
    world.run()
    world.pass_time(200)
    world.run()
    for receiver in range(receivers):
        assert len(world.answers(receiver)) == 6
    for sender in range(senders):
        assert len(world.released(sender)) == 6
    world.check_rest()


NOTICE_LIES = {
    "transfer": "t999",
    "token": b"\0" * 16,
    "sender_incarnation": "another",
    "receiver_incarnation": "another",
    "sender_epoch": 7,
    "receiver_epoch": 7,
    "slot": 99,
    "generation": 99,
    "chunk": 77,
    "chunk_bytes": 1,
}


@pytest.mark.proves("G2", "G21", "T21")
@pytest.mark.parametrize("field", NOTICE_LIES)
def test_a_landed_chunk_counts_only_if_every_field_matches(world: World, field: str) -> None:
    world.hold = {"notice"}
    world.begin()
    receive_orders, (true, other, *_) = world.receivers[0].receive_orders, world.under_way("notice")
    lie = replace(true, **{field: NOTICE_LIES[field]})
    assert receive_orders.landed(lie) is None and receive_orders.scattering == 0
    landed = receive_orders.landed(true)
    assert landed is not None and landed.notice == true
    again = replace(true, slot=other.slot, generation=1)
    assert receive_orders.landed(again) is None  # the same chunk in another slot
    assert receive_orders.take_reports() == [Dropped(lie.transfer, lie.slot), Dropped(again.transfer, again.slot)]


@pytest.mark.parametrize("hold", ["hello", "gather", "scatter"])
def test_another_want_or_offer_under_an_open_number_is_refused_and_the_first_goes_on(world: World, hold: str) -> None:
    world.hold = {hold}
    world.begin()
    number = number_of("r")
    world.want("r", 48)
    world.offer("r", 48, 12)
    for what, node in (("want", world.receiver), ("offer", world.sender)):
        (refused,) = node.told
        assert isinstance(refused, Refused) and refused.code == "duplicate_request"
        assert (refused.about, refused.number) == (f"{what} {number}", 0)
    world.go_on()
    world.check_done("r")


def test_a_want_that_fails_before_its_claim_lets_the_reached_ranks_go() -> None:
    world = World(senders=2)
    world.offer("r", 64, 16)
    world.nodes["P1"].is_dead = True
    world.fetch("r", 64, first=37)
    assert world.failure().code == "peer_unreachable"
    assert world.released(0)["r"].code == ""
    assert not world.heard(Refuse)


@pytest.mark.proves("G5")
def test_a_sender_that_lost_us_does_not_call_drained_what_it_is_writing(world: World) -> None:
    """Whoever asks without a session must not hear that nothing is written while something is."""
    world.hold = {"write"}
    world.begin()
    sender, receiver = world.senders[0].sending, world.receivers[0]
    (transfer,) = sender.outgoing_transfers
    world.do(world.senders[0], sender.lost(receiver.engine.agent.incarnation))
    assert not sender.renounce(receiver.engine.agent.incarnation, Cancel(transfer=transfer, code=""))
    world.do(receiver, receiver.receiving.unreachable("P0", "peer_lost", "link ended", world.now))
    world.go_on()
    for each in (transfer, "never heard of"):
        assert sender.renounce(receiver.engine.agent.incarnation, Cancel(transfer=each, code=""))


def test_ranks_of_two_engines_are_not_taken_for_one() -> None:
    world = World(senders=2)
    other = world.nodes["P1"]
    pool = replace(other.engine.pool, engine=replace(other.engine.pool.engine, id="stranger"))
    other.engine = dataclasses.replace(other.engine, pool=pool)
    world.begin("r", 16)
    answer = world.failure()
    assert answer.code == "sender_ranks_mismatch" and "stranger" in answer.reason
