"""What lands is checked by the data plane against its own receive orders, while the loop decides other things."""

from __future__ import annotations

from kvbridge_proto.engine import Failed
from kvbridge_proto.peer import Lease, Notice

from kvbridge.dataplane.receiving import Arrival
from kvbridge.exchange.orders import Broken, Dropped, Landed, Lend, Quiet, StopReceiving
from tests.unit.exchange.world import Node, World


def landing() -> tuple[World, Node, list[Notice]]:
    """A want of which chunks have landed, and nobody has looked yet."""
    world = World()
    world.offer("r", 64, 16)
    world.want("r", 64)
    world.hold = {"notice"}
    world.run()
    return world, world.sinks[0], world.notices


def lease_of(notice: Notice) -> Lease:
    return Lease(notice.slot, notice.generation)


def taken(sink: Node, notice: Notice) -> Arrival:
    arrival = sink.receiving.landed(notice)
    assert arrival is not None
    return arrival


def test_a_want_given_up_while_chunks_are_scattered_fails_afterwards() -> None:
    world, sink, (first, second, late, *_) = landing()
    arrivals = [taken(sink, notice) for notice in (first, second)]
    world.abandon("r")
    world.settle()
    for arrival in arrivals:
        assert not world.answers(), "the engine may use its blocks, and a scatter runs"
        sink.receiving.scattered(arrival, None)
        world._report(sink)
        world.settle()
    assert isinstance(failed := world.answers()["r"], Failed) and failed.code == "aborted"
    assert sink.receiving.landed(late) is None


def test_a_notice_between_a_stop_and_its_quiet_is_dropped_and_its_slot_stays_in_quarantine() -> None:
    _, sink, (first, second, *_) = landing()
    arrival = taken(sink, first)
    sink.receiving.stop(StopReceiving(first.transfer, "aborted", "test"))
    assert sink.receiving.landed(second) is None
    sink.receiving.scattered(arrival, None)
    landed, *others = sink.receiving.take_reports()
    assert landed == Landed(first.transfer, (lease_of(first),), 1, first.chunk_bytes)
    assert others == [Dropped(second.transfer, second.slot), Quiet(first.transfer)]
    assert sink.receiving.lent == sink.receiving.scattering == 0


def test_a_slot_whose_landing_crosses_a_stop_is_free_though_the_others_are_not() -> None:
    world, sink, (first, *_) = landing()
    arrival = taken(sink, first)
    sink.receiving.scattered(arrival, None)
    world.abandon("r")  # before that is heard
    before = sink.inbound.slots.counts()
    assert before.free == 0 and before.quarantined == len(sink.inbound.slots)
    world._report(sink)
    world.settle()
    after = sink.inbound.slots.counts()
    assert (after.free, after.quarantined) == (1, before.quarantined - 1)
    assert isinstance(world.answers()["r"], Failed)


def test_a_slot_is_not_lent_again_while_what_landed_in_it_is_read() -> None:
    world, sink, (first, *_) = landing()
    arrival = taken(sink, first)
    boot = world.sources[0].home.agent.boot
    world.do(sink, sink.inbound.drained(boot, first.transfer, "", "", world.now))
    world.settle()
    assert sink.inbound.slots.free == 0
    sink.receiving.scattered(arrival, None)
    world._report(sink)
    world.settle()
    assert sink.inbound.slots.free == len(sink.inbound.slots)


def test_a_chunk_that_breaks_is_reported_with_the_slot_that_it_leaves() -> None:
    _, sink, (first, *_) = landing()
    sink.receiving.scattered(taken(sink, first), ("digest_mismatch", "test"))
    landed, broken = sink.receiving.take_reports()
    assert landed == Landed(first.transfer, (lease_of(first),), 0, 0)
    assert broken == Broken(first.transfer, "digest_mismatch", "test")


def test_leases_that_come_after_all_has_come_and_stops_of_what_is_over_leave_nothing() -> None:
    _, sink, _ = landing()
    receiving = sink.receiving
    lent = receiving.lent
    receiving.lend(Lend("over", (Lease(0, 9),)))
    receiving.stop(StopReceiving("over", "aborted", "test"))
    assert receiving.take_reports() == [Quiet("over")] and receiving.lent == lent


def test_a_refused_claim_takes_back_the_leases_that_were_lent_with_it() -> None:
    world = World()
    world.want("r", 64)
    world.hold = {"message", "order"}
    world.run()
    sink, boot = world.sinks[0], world.sources[0].home.agent.boot
    (transfer,) = sink.inbound._wanted_by
    world.do(sink, sink.inbound.drained(boot, transfer, "stale_epoch", "test", world.now))
    assert not world.answers() and sink.inbound.slots.free < len(sink.inbound.slots)
    world.settle()
    assert isinstance(world.answers()["r"], Failed) and sink.inbound.slots.free == len(sink.inbound.slots)
    assert not sink.receiving._open and not sink.receiving.lent
