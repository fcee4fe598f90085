"""The data plane checks arrivals against its own receive orders, while the loop decides other things."""

from __future__ import annotations

import pytest
from kvbridge_proto.engine import Failed
from kvbridge_proto.peer import Notice, SlotLease

from kvbridge.dataplane.orders import LandedChunk
from kvbridge.exchange.orders import Broken, Dropped, Landed, Lend, Quiet, StopReceiving
from tests.unit.exchange.network import Node
from tests.unit.exchange.world import World


def landing() -> tuple[World, Node, list[Notice]]:
    """A want of which chunks have landed, and nobody has looked yet."""
    world = World()
    world.hold = {"notice"}
    world.begin()
    return world, world.receivers[0], world.under_way("notice")


def lease_of(notice: Notice) -> SlotLease:
    return SlotLease(notice.slot, notice.generation)


def taken(receiver: Node, notice: Notice) -> LandedChunk:
    landed = receiver.receive_orders.landed(notice)
    assert landed is not None
    return landed


@pytest.mark.proves("G7")
def test_a_want_given_up_while_chunks_are_scattered_fails_afterwards() -> None:
    world, receiver, (first, second, late, *_) = landing()
    arrivals = [taken(receiver, notice) for notice in (first, second)]
    world.abandon("r")
    world.settle()
    for landed in arrivals:
        assert not world.answers(), "the engine may use its blocks, and a scatter runs"
        receiver.receive_orders.scattered(landed, None)
        world.advance(receiver)
        world.settle()
    assert world.failure().code == "aborted"
    assert receiver.receive_orders.landed(late) is None


def test_a_notice_between_a_stop_and_its_quiet_is_dropped_and_its_slot_stays_in_quarantine() -> None:
    _, receiver, (first, second, *_) = landing()
    landed = taken(receiver, first)
    receiver.receive_orders.stop(StopReceiving(first.transfer, "aborted", "test"))
    assert receiver.receive_orders.landed(second) is None
    receiver.receive_orders.scattered(landed, None)
    landed, *others = receiver.receive_orders.take_reports()
    assert landed == Landed(first.transfer, (lease_of(first),), 1, first.chunk_bytes)
    assert others == [Dropped(second.transfer, second.slot), Quiet(first.transfer)]
    assert receiver.receive_orders.lent == receiver.receive_orders.scattering == 0


def test_a_slot_whose_landing_crosses_a_stop_is_free_though_the_others_are_not() -> None:
    world, receiver, (first, *_) = landing()
    landed = taken(receiver, first)
    receiver.receive_orders.scattered(landed, None)
    world.abandon("r")  # before that is heard
    before = receiver.slots.counts()
    assert before.quarantined == len(receiver.slots) - before.free > 1
    world.advance(receiver)
    world.settle()
    after = receiver.slots.counts()
    assert (after.free, after.quarantined) == (before.free + 1, before.quarantined - 1)
    assert isinstance(world.answers()["r"], Failed)


@pytest.mark.proves("G5")
def test_a_slot_is_not_lent_again_while_what_landed_in_it_is_read() -> None:
    world, receiver, (first, *_) = landing()
    landed, free = taken(receiver, first), receiver.slots.free
    incarnation = world.senders[0].engine.agent.incarnation
    world.do(receiver, receiver.receiving.drained(incarnation, first.transfer, "", "", world.now))
    world.settle()
    assert receiver.slots.free == free < len(receiver.slots) - 1
    receiver.receive_orders.scattered(landed, None)
    world.advance(receiver)
    world.settle()
    assert receiver.slots.free == len(receiver.slots)


def test_a_chunk_that_breaks_is_reported_with_the_slot_that_it_leaves() -> None:
    _, receiver, (first, *_) = landing()
    receiver.receive_orders.scattered(taken(receiver, first), ("digest_mismatch", "test"))
    landed, broken = receiver.receive_orders.take_reports()
    assert landed == Landed(first.transfer, (lease_of(first),), 0, 0)
    assert broken == Broken(first.transfer, "digest_mismatch", "test")


def test_leases_that_come_after_all_has_come_and_stops_of_what_is_over_leave_nothing() -> None:
    _, receiver, _ = landing()
    receive_orders = receiver.receive_orders
    lent = receive_orders.lent
    receive_orders.lend(Lend("over", (SlotLease(0, 9),)))
    receive_orders.stop(StopReceiving("over", "aborted", "test"))
    assert receive_orders.take_reports() == [Quiet("over")] and receive_orders.lent == lent


def test_a_refused_claim_takes_back_the_leases_that_were_lent_with_it(world: World) -> None:
    world.hold = {"message", "order"}
    world.fetch("r", 64)
    receiver, incarnation = world.receivers[0], world.senders[0].engine.agent.incarnation
    (transfer,) = receiver.receiving.incoming_transfers
    world.do(receiver, receiver.receiving.drained(incarnation, transfer, "stale_epoch", "test", world.now))
    assert not world.answers() and receiver.slots.free < len(receiver.slots)
    world.settle()
    assert isinstance(world.answers()["r"], Failed) and receiver.slots.free == len(receiver.slots)
    assert not receiver.receive_orders._open and not receiver.receive_orders.lent
