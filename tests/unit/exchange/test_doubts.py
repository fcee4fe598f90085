"""Slots in quarantine whose source is there, but will have no session: it can say all the same what it writes."""

from __future__ import annotations

import pytest
from kvbridge_proto.peer import Cancel, Drained

from kvbridge.exchange.actions import Send
from kvbridge.exchange.outbound import Outbound
from tests.unit.exchange.world import World


def doubted(key: str = "") -> World:
    """A want that failed with its slots lent, because its source was lost."""
    world = World(slots=4)
    world.key = key
    world.hold.add("write")
    world.offer("r", 16, 4)
    world.want("r", 16)
    world.run()
    sink = world.sinks[0]
    world.do(sink, sink.inbound.unreachable("P0", "peer_lost", "test", world.now))
    world.settle()
    assert sink.inbound.slots.counts().quarantined > 0
    return world


def test_a_source_that_refuses_is_asked_for_what_is_in_doubt() -> None:
    world = doubted()
    inbound = world.sinks[0].inbound
    boot = world.sources[0].home.agent.boot
    actions = inbound.refused("P0", boot)
    (asked,) = [action.body for action in actions if isinstance(action, Send)]
    assert isinstance(asked, Cancel)
    assert inbound.slots.counts().quarantined > 0  # to refuse proves nothing
    inbound.drained(boot, asked.transfer, "", "", world.now)
    assert inbound.slots.counts().free == 4


def ask(world: World, before: set[str]) -> bool:
    """Another start of the agent, that knows these to be dead, refuses a session. Whether it could say something."""
    inbound, successor = world.sinks[0].inbound, Outbound(before=before)
    asked = [action.body for action in inbound.refused("P0", "next") if isinstance(action, Send)]
    assert asked
    said = [answer for body in asked if isinstance(body, Cancel) for answer in successor.cancel("D0", body)]
    for answer in said:
        assert isinstance(answer, Send) and isinstance(answer.body, Drained)
        inbound.drained("next", answer.body.transfer, "", "", world.now)
    return bool(said)


def test_a_new_start_that_knows_the_one_before_to_be_dead_settles_what_that_one_left() -> None:
    world = doubted()
    assert ask(world, {"older", world.sources[0].home.agent.boot})
    assert world.sinks[0].inbound.slots.counts().free == 4


def test_that_another_start_answers_at_the_address_proves_nothing() -> None:
    """The address may lead elsewhere now, and the one before it may stand still only."""
    world = doubted()
    assert not ask(world, {"older"})
    assert world.sinks[0].inbound.slots.counts().quarantined > 0
    assert ask(world, {world.sources[0].home.agent.boot})


def test_a_transfer_of_a_dead_start_is_nobody_elses() -> None:
    outbound = Outbound(before={"dead"})
    assert outbound.renounce("D0", Cancel(transfer="t", code="", boot="dead"))
    assert not outbound.renounce("D0", Cancel(transfer="t", code="", boot="alive"))
    assert outbound.cancel("D0", Cancel(transfer="t", code="", boot="alive")) == []


def kept(world: World) -> int:
    """How much is kept of agents, sessions and doubts."""
    inbound = world.sinks[0].inbound
    return sum(len(kept) for part in (inbound._sources, inbound._doubts) for kept in vars(part).values())


def test_who_answers_is_kept_only_where_something_is_in_doubt_and_so_long() -> None:
    world = doubted()
    inbound, before = world.sinks[0].inbound, kept(world)
    for number in range(500):  # names that a client made up; they lead to agents that refuse
        inbound.refused(f"name-{number}", "next")
    assert kept(world) == before
    assert ask(world, {world.sources[0].home.agent.boot})
    assert kept(world) == 0 and inbound.slots.counts().free == 4


def test_another_agent_that_refuses_proves_nothing() -> None:
    world = doubted()
    inbound = world.sinks[0].inbound
    assert not inbound.refused("P1", "another boot")
    (transfer,) = world.sinks[0].inbound._doubts._of
    inbound.drained("another boot", transfer, "", "", world.now)
    assert inbound.slots.counts().quarantined > 0


@pytest.mark.parametrize("key", ["of another", ""])
@pytest.mark.parametrize("is_itself", [True, False])
def test_who_has_another_key_is_neither_asked_nor_believed_whatever_boot_and_address_it_has(
    key: str, is_itself: bool
) -> None:
    world = doubted("of P0")
    inbound, itself = world.sinks[0].inbound, world.sources[0].home.agent.boot
    boot, address = (itself, "elsewhere") if is_itself else ("next", "P0")
    (transfer,) = inbound._doubts._of
    assert not inbound.refused(address, boot, key)
    inbound.drained(boot, transfer, "", "", world.now, key)
    assert inbound.slots.counts().quarantined > 0
    (asked,) = [action.body for action in inbound.refused("P0", "next", "of P0") if isinstance(action, Send)]
    assert isinstance(asked, Cancel) and asked.boot == itself
    inbound.drained("next", transfer, "", "", world.now, key)
    assert inbound.slots.counts().quarantined > 0
    inbound.drained("next", transfer, "", "", world.now, "of P0")
    assert inbound.slots.counts().free == 4


def test_a_successor_may_answer_for_one_of_its_addresses_by_the_connection_to_another() -> None:
    world = doubted()
    inbound = world.sinks[0].inbound
    inbound.refused("also P0", "next")  # its session is with this address, and P0 turns out to be the same agent
    (asked,) = [action.body for action in inbound.refused("P0", "next") if isinstance(action, Send)]
    assert isinstance(asked, Cancel)
    inbound.drained("next", asked.transfer, "", "", world.now)
    assert inbound.slots.counts().free == 4
