"""Draft layers that no sender has get zeros: a want is done only with them, and never ends while they are written."""

from __future__ import annotations

import pytest
from kvbridge_proto.engine import Done, Failed
from kvbridge_proto.pool import Pool

from kvbridge.exchange.orders import Fill, Filled, Quiet
from tests.unit.exchange.world import World, make_pool

LAYERS = 2


def decoding(drafts: int = 1, ranks: int = 1) -> list[Pool]:
    return [make_pool("decode", rank, ranks, 16, layers=LAYERS + drafts, drafts=drafts) for rank in range(ranks)]


def prefilling(drafts: int = 0, ranks: int = 1) -> list[Pool]:
    return [make_pool("prefill", rank, ranks, 4, layers=LAYERS + drafts, drafts=drafts) for rank in range(ranks)]


def done_of(world: World) -> Done:
    (answer,) = (each.answers["r"] for each in world.receivers)
    assert isinstance(answer, Done), answer
    return answer


@pytest.mark.parametrize(
    ("ours", "theirs", "unfilled"), [(0, 1, 1), (0, 3, 3), (1, 3, 2), (1, 1, 0), (2, 1, 0), (1, 0, 0)]
)
def test_the_engine_is_told_how_many_layers_have_zeros(ours: int, theirs: int, unfilled: int) -> None:
    world = World(prefilling(ours), decoding(theirs))
    world.begin()
    assert done_of(world).unfilled_layers == unfilled
    assert len(world.heard(Filled)) == (unfilled > 0)
    world.check_done("r")


def test_every_rank_fills_its_own_blocks_once_however_many_senders_there_are() -> None:
    world = World(prefilling(ranks=2), decoding(ranks=2))
    world.begin()
    assert len(world.heard(Filled)) == 2
    world.check_done("r")


def test_nothing_is_filled_where_nothing_is_wanted() -> None:
    world = World(prefilling(), decoding())
    world.begin("before")
    world.serve("r", 64, 16)
    world.fetch("r", 64, (), first=64)
    assert done_of(world).unfilled_layers == 0 and len(world.heard(Filled)) == 1


def test_only_the_wanted_tokens_are_filled() -> None:
    world = World(prefilling(), decoding())
    world.offer("r", 64, 16)
    world.hold = {"order"}
    world.fetch("r", 64, first=20)
    (fill,) = (order for order in world.under_way("order") if isinstance(order, Fill))
    assert (fill.plan.first_token, fill.plan.end_token) == (20, 64)
    assert {plane.layer for plane in fill.zeros.planes} == {LAYERS}
    assert {int(each) for table in fill.zero_tables.values() for each in table.ids} == {0}


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_order_a_want_ends_once_its_zeros_are_written_or_never_will_be(seed: int) -> None:
    """The network says what is wrong: Done without zeros, or zeros after an answer."""
    world = World(prefilling(ranks=2), decoding(ranks=2), seed=seed)
    for i in range(4):
        world.offer(f"r{i}", 64, 16)
        world.want(f"r{i}", 64)
    for i in range(1, 1 + seed % 3):
        world.later(lambda i=i: world.abandon(f"r{i}"))
    if seed % 4 == 3:
        world.later(lambda: world.part(world.receiver, world.sender, "peer_left"))
    world.run()
    world.pass_time(200.0)
    world.run()
    answers = [answer for each in world.receivers for answer in each.answers.values()]
    assert len(answers) == 8 and all(isinstance(answer, Done | Failed) for answer in answers)
    world.check_rest()


def test_an_abandoned_want_ends_once_its_zeros_are_no_longer_written() -> None:
    """Also if all its rows have come."""
    world = World(prefilling(), decoding())
    world.hold = {"fill"}
    world.begin()
    assert not world.answers()
    world.abandon("r")
    world.run()
    assert not world.answers()
    world.go_on()
    assert world.failure().code == "aborted"
    assert [each.transfer for each in world.heard(Quiet)]
    world.check_rest()


def test_zeros_that_cannot_be_written_fail_the_want_by_name() -> None:
    world = World(prefilling(), decoding())
    world.hold = {"fill"}
    world.begin()
    ((_, _, fill, ordered),) = (event for event in world.events if event[0] == "fill")
    world.events.clear()
    world.receiver.receive_orders.report(Filled(fill.transfer, ("fill_failed", "no memory")))
    world.receiver.receive_orders.end_move(ordered)
    world.advance(world.receiver)
    world.go_on()
    assert (world.failure().code, world.failure().reason) == ("fill_failed", "no memory")
