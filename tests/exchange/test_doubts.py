"""Slots in quarantine whose source is there, but will have no session: it can say all the same what it writes."""

from __future__ import annotations

from kvbridge_proto.peer import Cancel

from kvbridge.exchange.actions import Send
from tests.exchange.world import World


def doubted() -> World:
    """A want that failed with its slots lent, because its source was lost."""
    world = World(slots=4)
    world.hold.add("write")
    world.offer("r", 16, 4)
    world.want("r", 16)
    world.run()
    sink = world.sinks[0]
    world.do(sink, sink.inbound.unreachable("P0", "peer_lost", "test", world.now))
    assert sink.inbound.slots.counts().quarantined > 0
    return world


def test_a_source_that_refuses_is_asked_for_what_is_in_doubt() -> None:
    world = doubted()
    inbound = world.sinks[0].inbound
    actions = inbound.refused("P0", world.sources[0].home.agent.boot)
    (asked,) = [action.body for action in actions if isinstance(action, Send)]
    assert isinstance(asked, Cancel)
    assert inbound.slots.counts().quarantined > 0  # to refuse proves nothing
    inbound.drained("P0", asked.transfer, "", "", world.now)
    assert inbound.slots.counts().free == 4


def test_a_new_start_that_refuses_proves_that_the_one_before_is_gone() -> None:
    world = doubted()
    inbound = world.sinks[0].inbound
    assert not inbound.refused("P0", "another boot")
    assert inbound.slots.counts().free == 4


def test_another_agent_that_refuses_proves_nothing() -> None:
    world = doubted()
    inbound = world.sinks[0].inbound
    inbound.refused("P1", "another boot")
    assert inbound.slots.counts().quarantined > 0
