"""Every (state, event) pair of every machine: it is in the table, or it raises and changes nothing."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
from kvbridge_proto.common import VersionRange
from kvbridge_proto.peer import Refuse
from msgspec.structs import replace

from kvbridge import state_machines as tables
from kvbridge.exchange.route import Site
from kvbridge.exchange.session import accept, answer, hello, welcome
from kvbridge.exchange.transfer import Transfer
from kvbridge.routes.pull.halves import IncomingByPull, OutgoingByPull
from kvbridge.routes.slots.halves import IncomingBySlots, OutgoingBySlots
from kvbridge.state_machines import (
    IllegalEvent,
    LinkState,
    OfferState,
    PeerLinkState,
    SessionState,
    SlotEvent,
    SlotState,
    StateTable,
    TransferState,
    WantState,
)
from tests.unit.exchange.world import World

MACHINES = [
    (tables.SLOT_TABLE, SlotState, SlotEvent, SlotState.FREE),
    (tables.SESSION_TABLE, SessionState, tables.SessionEvent, SessionState.NEW),
    (tables.WANT_TABLE, WantState, tables.WantEvent, WantState.REACHING),
    (tables.TRANSFER_TABLE, TransferState, tables.TransferEvent, TransferState.WAITING),
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
            if (state, event) in table and state in reached:
                reached.add(table[state, event])
            elif (state, event) not in table:
                with pytest.raises(IllegalEvent, match=f"{event.name} in state {state.name}"):
                    table[state, event]
    assert reached == set(states)


LIFE = {
    ("WAITING", "bind"): "FLOWING",
    ("WAITING", "end"): "ENDED",
    ("FLOWING", "finish"): "ENDED",
    ("FLOWING", "stop"): "STOPPING",
    ("FLOWING", "end"): "ENDED",
    ("STOPPING", "end"): "ENDED",
}


@pytest.mark.parametrize(("state", "verb"), list(product(TransferState, ("bind", "finish", "stop", "end"))))
def test_a_transfer_of_either_side_lives_one_life(state: TransferState, verb: str) -> None:
    for transfer in (OutgoingBySlots, OutgoingByPull, IncomingBySlots, IncomingByPull):
        assert getattr(transfer, verb) is getattr(Transfer, verb), "no side and no route has a life of its own"
    lives = Transfer("t", session=None, plan=None)
    lives.state = state
    if (after := LIFE.get((state.name, verb))) is None:
        with pytest.raises(IllegalEvent):
            getattr(lives, verb)()
    else:
        getattr(lives, verb)()
    assert lives.state.name == (after or state.name)
    assert lives.is_open == (lives.state.name in ("WAITING", "FLOWING"))


def _refusal(**changes: object) -> Refuse:
    world = World()
    ours, theirs = world.senders[0].engine, world.receivers[0].engine
    found = answer(replace(hello(theirs), **changes), ours)
    assert isinstance(found, Refuse)
    return found


def test_refuses_other_versions_digests_fabrics_models_and_itself(world: World) -> None:
    sender, receiver = world.senders[0].engine, world.receivers[0].engine
    assert "sender 1-1, receiver 7-9" in _refusal(versions=VersionRange(7, 9)).reasons[0]
    assert _refusal(digests=("other",)).code == "no_common_digest"
    assert _refusal(fabric=replace(receiver.site.fabric, kind="other")).code == "fabric_mismatch"
    refused = _refusal(fabric=replace(receiver.site.fabric, base=(1 << 62) + 77, slots=4096, slot_bytes=1 << 50))
    assert refused.code == "bad_card" and "4096" in refused.reasons[0] and str(1 << 62)[:9] not in refused.reasons[0]
    assert answer(hello(sender), sender).code == "same_agent"
    assert answer(hello(receiver), None).code == "no_engine"
    layers = tuple(replace(layer, key_width=96) for layer in receiver.pool.model.layers)
    refused = _refusal(pool=replace(receiver.pool, model=replace(receiver.pool.model, layers=layers)))
    assert refused.code == "incompatible" and any("96" in r and "8" in r for r in refused.reasons)


def test_a_receiver_refuses_a_welcome_it_cannot_keep(world: World) -> None:
    sender, receiver = world.senders[0].engine, world.receivers[0].engine
    session = answer(hello(receiver), sender)
    good = welcome(session, sender)
    assert accept(good, receiver).peer == sender.agent
    assert accept(replace(good, version=9), receiver).code == "version_mismatch"
    assert accept(replace(good, digest="other"), receiver).code == "no_common_digest"
    assert accept(replace(good, slot_bytes=1 << 30), receiver).code == "slot_mismatch"
    picky = dataclasses.replace(receiver, site=Site(receiver.site.fabric, routes=("nixl",)))
    assert accept(replace(good, route="direct"), picky).code == "route_mismatch"
