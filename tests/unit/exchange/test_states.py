"""Every (state, event) pair of every machine: it is in the table, or it raises and changes nothing."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
from kvbridge_proto.common import VersionRange
from kvbridge_proto.peer import Refuse, SlotLease
from msgspec.structs import replace

from kvbridge import states as tables
from kvbridge.exchange.containers import Deadlines
from kvbridge.exchange.route import Site
from kvbridge.exchange.session import accept, answer, hello, welcome
from kvbridge.exchange.slots import SlotPool
from kvbridge.states import (
    IllegalEvent,
    IncomingState,
    LinkState,
    OfferState,
    OutgoingState,
    PeerLinkState,
    SessionState,
    SlotEvent,
    SlotState,
    StateTable,
    WantState,
)
from tests.unit.exchange.world import World

MACHINES = [
    (tables.SLOT_TABLE, SlotState, SlotEvent, SlotState.FREE),
    (tables.SESSION_TABLE, SessionState, tables.SessionEvent, SessionState.NEW),
    (tables.WANT_TABLE, WantState, tables.WantEvent, WantState.REACHING),
    (tables.INCOMING_TABLE, IncomingState, tables.IncomingEvent, IncomingState.CLAIMED),
    (tables.OUTGOING_TABLE, OutgoingState, tables.OutgoingEvent, OutgoingState.WAITING),
    (tables.OFFER_TABLE, OfferState, tables.OfferEvent, OfferState.OPEN),
    (tables.LINK_TABLE, LinkState, tables.LinkEvent, LinkState.DETACHED),
    (tables.PEER_LINK_TABLE, PeerLinkState, tables.PeerLinkEvent, PeerLinkState.QUEUED),
]


def test_every_table_is_looked_at() -> None:
    known = {id(each) for each in vars(tables).values() if isinstance(each, StateTable)}
    assert {id(table) for table, *_ in MACHINES} == known


@pytest.mark.parametrize(("table", "states", "events", "first"), MACHINES)
def test_illegal_events_raise_and_all_states_are_reached(table: StateTable, states, events, first) -> None:
    reached = {first}
    for _ in states:
        for state, event in product(states, events):
            if table.allows(state, event) and state in reached:
                reached.add(table.after(state, event))
            elif not table.allows(state, event):
                with pytest.raises(IllegalEvent, match=f"{event.name} in state {state.name}"):
                    table.after(state, event)
    assert reached == set(states)


def test_a_slot_counts_only_under_its_own_lease() -> None:
    slots = SlotPool(2)
    (lease,) = slots.lend(1, "a")
    slots.land([SlotLease(lease.slot, lease.generation + 1)], "a")
    slots.land([lease], "b")
    assert slots.free == 1
    slots.land([lease], "a")
    assert slots.free == 2
    slots.land([lease], "a")
    assert slots.free == 2 and slots.lent == 0


def test_a_slot_that_was_quarantined_after_its_one_write_had_landed_is_free_once_that_is_reported() -> None:
    slots = SlotPool(2)
    landed, _ = slots.lend(2, "a")
    assert slots.doubt("a") == 2
    slots.land([landed], "a")
    assert slots.free == 1 and slots.counts().quarantined == 1 and slots.has_out("a")


def test_what_landed_in_slots_of_before_a_rebuild_frees_none_of_after_it() -> None:
    slots = SlotPool(1)
    (before,) = slots.lend(1, "a")
    slots.doubt("a")
    slots.rebuilt()
    slots.lend(1, "b")
    slots.land([before], "a")
    assert slots.free == 0


def test_a_quarantined_slot_needs_its_own_proof() -> None:
    slots = SlotPool(3)
    for transfer in "abc":
        slots.lend(1, transfer)
        assert slots.doubt(transfer) == 1
    assert slots.free == 0 and slots.lend(1, "d") == ()
    assert slots.drain("a") == 1 and slots.drain("a") == 0 and slots.free == 1
    assert slots.rebuilt() == 2 and slots.free == 3


def test_generations_never_repeat() -> None:
    slots = SlotPool(1)
    seen = set()
    for i in range(50):
        (lease,) = slots.lend(1, f"t{i}")
        seen.add(lease.generation)
        slots.drain(f"t{i}")
    assert len(seen) == 50


def test_deadlines_far_away_that_were_cleared_are_not_kept() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("kept", 5.0)
    for number in range(10_000):
        deadlines.set(f"{number}", 86400.0)
        deadlines.clear(f"{number}")
        deadlines.set("moved", 7.0 + number)
    assert len(deadlines) < 100
    assert deadlines.due(6.0) == ["kept"] and deadlines.due(1e6) == ["moved"] and deadlines.next() is None


def test_deadlines_move_and_clear() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 5)
    deadlines.set("b", 3)
    deadlines.set("a", 2)
    deadlines.clear("b")
    assert deadlines.next() == 2 and deadlines.due(1.9) == [] and deadlines.due(10) == ["a"]
    assert deadlines.next() is None and deadlines.due(100) == []


def _refusal(**changes: object) -> Refuse:
    world = World()
    ours, theirs = world.senders[0].engine, world.receivers[0].engine
    found = answer(replace(hello(theirs), **changes), ours)
    assert isinstance(found, Refuse)
    return found


def test_refuses_other_versions_digests_fabrics_models_and_itself() -> None:
    world = World()
    sender, receiver = world.senders[0].engine, world.receivers[0].engine
    assert "ours 1-1, theirs 7-9" in _refusal(versions=VersionRange(7, 9)).reasons[0]
    assert _refusal(digests=("other",)).code == "no_common_digest"
    assert _refusal(fabric=replace(receiver.site.fabric, kind="other")).code == "fabric_mismatch"
    refused = _refusal(fabric=replace(receiver.site.fabric, base=(1 << 62) + 77, slots=4096, slot_bytes=1 << 50))
    assert refused.code == "bad_card" and "4096" in refused.reasons[0] and str(1 << 62)[:9] not in refused.reasons[0]
    assert answer(hello(sender), sender).code == "same_agent"
    assert answer(hello(receiver), None).code == "no_engine"
    layers = tuple(replace(layer, key_width=96) for layer in receiver.pool.model.layers)
    refused = _refusal(pool=replace(receiver.pool, model=replace(receiver.pool.model, layers=layers)))
    assert refused.code == "incompatible" and any("96" in r and "8" in r for r in refused.reasons)


def test_a_receiver_refuses_a_welcome_it_cannot_keep() -> None:
    world = World()
    sender, receiver = world.senders[0].engine, world.receivers[0].engine
    session = answer(hello(receiver), sender)
    good = welcome(session, sender)
    assert accept(good, receiver).peer == sender.agent
    assert accept(replace(good, version=9), receiver).code == "version_mismatch"
    assert accept(replace(good, digest="other"), receiver).code == "no_common_digest"
    assert accept(replace(good, slot_bytes=1 << 30), receiver).code == "slot_mismatch"
    picky = dataclasses.replace(receiver, site=Site(receiver.site.fabric, routes=("nixl",)))
    assert accept(replace(good, route="direct"), picky).code == "route_mismatch"
