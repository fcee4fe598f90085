"""What the data plane sends next, and what it reports, while the loop decides other things."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from kvbridge_proto.engine import Failed
from kvbridge_proto.peer import SlotLease

from kvbridge.dataplane.orders import LeavingChunk, SendOrders
from kvbridge.exchange.orders import Broken, Credit, Gathered, Progress, Quiet, SendOrder, Sent, Shipped, StopSending
from tests.unit.exchange.network import NOTHING
from tests.unit.exchange.world import World

CHUNK_BYTES = 64


class Plan:
    def __init__(self, chunks: int) -> None:
        self.chunks = chunks

    def chunk(self, index: int) -> Any:
        return Chunk


class Chunk:
    size_bytes = CHUNK_BYTES


def send_orders(slots: int = 4, **transfers: int) -> SendOrders:
    """Transfers of so many chunks, all ready, none with a slot to go to."""
    made = SendOrders(slots)
    for name, chunks in transfers.items():
        made.order(SendOrder(name, 1, "r", "D0", Plan(chunks), b"", 1, ""), NOTHING, 0.0)
        made.progress(Progress(name, {}, chunks, 7), 0.0)
    return made


def lend(made: SendOrders, transfer: str, count: int) -> None:
    made.credit(Credit(transfer, tuple(SlotLease(slot, 1) for slot in range(count))), 0.0)


def begun(made: SendOrders) -> list[LeavingChunk]:
    chunks = []
    while (leaving := made.begin()) is not None:
        chunks.append(leaving)
    return chunks


def stop(transfer: str = "a") -> StopSending:
    return StopSending(transfer, "aborted", "test")


def test_a_transfer_says_what_it_shipped_that_its_blocks_are_free_and_that_it_is_sent() -> None:
    made = send_orders(a=2)
    lend(made, "a", 2)
    first, second = begun(made)
    assert (first.chunk, second.chunk, first.fence) == (0, 1, 7) and made.moving == 2
    made.gathered(first)
    made.written(first, 0.5, None)
    assert made.take_reports() == [Shipped("a", 1, CHUNK_BYTES, (0.5,))]
    made.gathered(second)
    assert made.take_reports() == [Gathered("a")]
    made.written(second, 0.25, None)
    assert made.take_reports() == [Shipped("a", 1, CHUNK_BYTES, (0.25,)), Sent("a")]
    assert not made.open and not made.moving and made.slots.free == 4


def test_each_chunk_waits_for_the_count_with_which_it_came() -> None:
    made = SendOrders(4)
    made.order(SendOrder("a", 1, "r", "D0", Plan(3), b"", 1, ""), NOTHING, 0.0)
    lend(made, "a", 3)
    assert not begun(made)
    made.progress(Progress("a", {}, 1, 5), 0.0)
    made.progress(Progress("a", {}, 3, 9), 0.0)
    assert [leaving.fence for leaving in begun(made)] == [5, 9, 9]


def test_a_chunk_is_asked_for_when_it_was_ordered_and_not_when_it_begins() -> None:
    """A withdrawal that is heard in between may be of the blocks that it reads (`awaits.taken_back`)."""
    made = SendOrders(4)
    made.order(SendOrder("a", 1, "r", "D0", Plan(2), b"", 1, ""), NOTHING, 1.0)
    made.progress(Progress("a", {}, 2, 0), 2.0)
    made.credit(Credit("a", (SlotLease(0, 1),)), 3.0)
    (first,) = begun(made)
    made.credit(Credit("a", (SlotLease(1, 1),)), 4.0)
    (second,) = begun(made)
    assert (first.asked_at, second.asked_at) == (3.0, 4.0)


def test_who_had_a_slot_longest_ago_has_the_next_one() -> None:
    made = send_orders(2, a=4, b=4)
    lend(made, "a", 4)
    lend(made, "b", 4)
    order = []
    for _ in range(4):
        for leaving in begun(made):
            order.append(leaving.order.transfer)
            made.gathered(leaving)
            made.written(leaving, 0.0, None)
    assert order == ["a", "b"] * 4


@pytest.mark.proves("G18")
@pytest.mark.parametrize("ends", [0.0, 0.01])
def test_of_64_receivers_each_has_its_turn_in_each_round_though_one_is_slow_or_stands_still(ends: float) -> None:
    """All have chunks to send. The writes to the first end in one of a hundred looks, or never."""
    made, chance, peers = SendOrders(16), random.Random(1), [f"D{number}" for number in range(64)]
    for number, peer in enumerate(peers):
        made.order(SendOrder(peer, number, "r", peer, Plan(1000), b"", 1, ""), NOTHING, 0.0)
        made.progress(Progress(peer, {}, 1000, 7), 0.0)
        lend(made, peer, 1000)
    under_way: list[LeavingChunk] = []
    turns: list[str] = []
    while len(turns) < 64 * 100:
        under_way += (began := begun(made))
        turns += [leaving.order.transfer for leaving in began]
        leaving = chance.choice(under_way)
        if leaving.order.transfer != "D0" or chance.random() < ends:
            under_way.remove(leaving)
            made.gathered(leaving)
            made.written(leaving, 0.0, None)
        assert Counter(leaving.order.transfer for leaving in under_way)["D0"] <= 11
    others = [peer for peer in turns if peer != "D0"]
    rounds = [others[at : at + 63] for at in range(0, len(others) - 62, 63)]
    assert all(len(set(each)) == 63 for each in rounds) and len(rounds) > 90


def test_nothing_begins_after_a_stop_and_quiet_comes_when_the_last_write_has_ended() -> None:
    made = send_orders(2, a=4)
    lend(made, "a", 4)
    first, second = begun(made)
    made.gathered(first)
    made.stop(stop())
    assert made.take_reports() == [] and not begun(made)
    made.gathered(second)
    assert made.take_reports() == [Gathered("a")]
    made.written(first, 0.0, None)
    made.written(second, 0.0, ("write_failed", "test"))
    assert made.take_reports() == [Shipped("a", 1, CHUNK_BYTES, (0.0,)), Quiet("a")]
    assert not begun(made) and made.slots.free == 2


def test_a_stop_while_only_writes_are_under_way_gives_the_blocks_back_at_once() -> None:
    made = send_orders(a=4)
    lend(made, "a", 1)
    (leaving,) = begun(made)
    made.gathered(leaving)
    assert made.take_reports() == []  # three more would be read
    made.stop(stop())
    assert made.take_reports() == [Gathered("a")]


def test_what_is_over_is_quiet_at_once() -> None:
    made = send_orders(a=1)
    lend(made, "a", 1)
    (leaving,) = begun(made)
    made.gathered(leaving)
    made.written(leaving, 0.0, None)
    made.stop(stop())
    assert made.take_reports() == [Shipped("a", 1, CHUNK_BYTES, (0.0,)), Gathered("a"), Sent("a"), Quiet("a")]
    made.credit(Credit("a", (SlotLease(0, 2),)), 0.0)
    made.progress(Progress("a", {}, 1, 1), 0.0)
    assert not begun(made)


def test_after_a_chunk_that_broke_no_other_is_begun() -> None:
    made = send_orders(1, a=4)
    lend(made, "a", 4)
    (leaving,) = begun(made)
    made.gathered(leaving)
    made.written(leaving, 0.0, ("gather_failed", "test"))
    assert made.take_reports() == [Broken("a", "gather_failed", "test")] and not begun(made)
    made.stop(stop())
    assert made.take_reports() == [Quiet("a")] and not made.open


def test_a_late_write_keeps_its_slot_and_holds_up_no_rebuild() -> None:
    made = send_orders(2, a=2)
    lend(made, "a", 2)
    first, second = begun(made)
    for leaving in (first, second):
        made.gathered(leaving)
    made.late(first, "write_timeout", "test")
    assert made.take_reports() == [Gathered("a"), Broken("a", "write_timeout", "test")]
    made.stop(stop())
    made.written(second, 0.0, None)
    assert not made.moving and made.slots.counts().quarantined == 1 and made.slots.free == 1
    made.slots.make(3)
    made.written(first, 0.0, None, is_late=True)
    assert made.take_reports()[-1] == Quiet("a") and made.slots.free == 3 and not made.moving


@pytest.mark.proves("G13")
def test_blocks_are_kept_until_the_data_plane_has_said_that_they_are_read_no_more(world: World) -> None:
    """The exchange has stopped the transfer; a chunk was begun before that was heard."""
    world.hold = {"gather"}
    world.begin()
    world.hold = {"gather", "order"}
    world.withdraw("r")
    world.run()
    assert not world.released()
    world.hold = {"gather"}
    world.run()
    assert not world.released()
    world.go_on()
    assert world.released()["r"].code == "withdrawn" and isinstance(world.answers()["r"], Failed)
    world.check_rest()
