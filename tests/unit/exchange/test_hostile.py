"""A receiver, a sender or an engine says what cannot be true: it is soon refused by name, and leaves nothing."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import Done, Failed, Want
from kvbridge_proto.peer import Cancel, Check, Drained, Ready, Renew, Settled, SlotLease, Sum, Take

from kvbridge.exchange.actions import Carried, Send
from kvbridge.exchange.orders import SendOrder
from kvbridge.exchange.sender import MOST_RENOUNCED, Sender
from kvbridge.loopback.messages import number_of
from kvbridge.routes.pull.halves import LEASE_S, OutgoingByPull
from kvbridge.routes.registry import sending_routes
from kvbridge.routes.slots.halves import MOST_LEASES, OutgoingBySlots
from kvbridge.state_machines import TransferState
from testing.halves import by_slots
from tests.unit.exchange.claimant import ALL, QUICK_S, Claimant, leases
from tests.unit.exchange.network import want_of
from tests.unit.exchange.world import BLOCKS, HEADS, LAYERS, World

pytestmark = pytest.mark.proves("G25")

HUGE = (1 << 62) + 1

BAD_CLAIMS: dict[str, tuple[str, dict[str, Any]]] = {
    "layers that do not exist": ("bad_take", {"takes": (Take(0, LAYERS + 1, 0, HEADS),)}),
    "heads that do not exist": ("bad_take", {"takes": (Take(0, LAYERS, 0, HEADS + 1),)}),
    "layers beyond all": ("bad_take", {"takes": (Take(HUGE, HUGE + 1, 0, HEADS),)}),
    "heads beyond all": ("bad_take", {"takes": (Take(0, 1, HUGE, HUGE + 1),)}),
    "no layers": ("bad_take", {"takes": (Take(1, 1, 0, HEADS),)}),
    "layers turned round": ("bad_take", {"takes": (Take(2, 1, 0, HEADS),)}),
    "heads turned round": ("bad_take", {"takes": (Take(0, 1, 3, 1),)}),
    "rows taken twice": ("bad_take", {"takes": ALL * 2}),  # two moves would write each
    "rows taken 4096 times": ("bad_take", {"takes": ALL * 4096}),
    "tokens turned round": ("bad_tokens", {"first_token": 9, "end_token": 3}),
    "another plan": ("plan_mismatch", {"plan": "0" * 16}),
    "another plan for all tokens there could be": ("plan_mismatch", {"end_token": HUGE, "plan": "0" * 16}),
    "another engine's epoch": ("stale_epoch", {"sender_epoch": 2}),
    "another epoch of its own": ("stale_epoch", {"receiver_epoch": 2}),
    "leases for chunks that are none": ("bad_lease", {"leases": leases(4096)}),
    "leases for nothing": ("bad_lease", {"takes": (), "leases": leases(1)}),
    "a second rank of one": ("bad_receiver", {"receiver": 1, "receivers": 1}),
    "an eighth rank of four": ("bad_receiver", {"receiver": 7, "receivers": 4}),
    "a rank of too many": ("bad_receiver", {"receiver": 5, "receivers": 1 << 40}),
}


@pytest.fixture
def peer() -> Claimant:
    return Claimant()


@pytest.mark.proves("T19")
@pytest.mark.parametrize("case", BAD_CLAIMS)
def test_a_claim_that_cannot_be_is_refused(peer: Claimant, case: str) -> None:
    code, changes = BAD_CLAIMS[case]
    assert peer.refusal(**({"plan": ""} if code in ("bad_take", "bad_tokens") else {}) | changes) == code
    peer.still_works()


def test_slots_are_lent_for_chunks_and_no_more(peer: Claimant) -> None:
    """In the claim, which is refused, or later, which ends that transfer alone."""
    assert peer.waits("x")
    chunks = peer.sending.outgoing_transfers["x"].plan.chunks
    assert peer.refusal("more", leases=leases(chunks + 1)) == "bad_lease"
    assert peer.waits("enough", leases=leases(chunks))
    for generation in range(chunks):
        assert peer.grant("x", SlotLease(0, generation + 1)) == []
    (ended,) = peer.grant("x", SlotLease(0, 99))
    assert isinstance(ended, Send) and isinstance(ended.body, Drained) and ended.body.code == "bad_lease"
    assert set(peer.sending.outgoing_transfers) == {"enough"}


def test_unused_slots_of_one_receiver_are_bounded_over_all_its_claims(peer: Claimant) -> None:
    assert peer.waits("all", end_token=1 << 20, leases=leases(MOST_LEASES))
    assert peer.sending.outgoing_transfers["all"].plan.chunks > MOST_LEASES
    assert peer.refusal("one", leases=leases(1)) == "bad_lease"
    assert peer.waits("none")


def test_a_claim_of_more_tokens_than_there_are_ends_when_all_is_offered(peer: Claimant) -> None:
    actions = peer.say(end_token=1 << 40)
    assert [a.body.code for a in actions if isinstance(a, Send) and isinstance(a.body, Drained)] == ["tokens_missing"]
    assert not peer.sending.outgoing_transfers and not any(isinstance(a, SendOrder) for a in actions)


@pytest.mark.proves("G13")
def test_a_claim_that_lends_nothing_reads_nothing_once_the_blocks_are_given_back(peer: Claimant) -> None:
    """Neither beside one that is served in its place, nor later, slot by slot."""
    world, sender = peer.world, peer.sender
    world.do(sender, peer.say(transfer="greedy", end_token=32, deadline_s=86400.0))
    world.do(sender, peer.say(transfer="done", end_token=0, takes=()))
    assert "done" not in peer.sending.outgoing_transfers and not world.released(), "the other has not read yet"
    world.do(sender, peer.grant("greedy", *peer.receiver.slots.lend(1, "greedy", "peer")))
    world.hold = {"gather"}
    world.run()
    assert sender.send_orders.moving == 1
    world.pass_time(101)
    assert not peer.grant("greedy", SlotLease(0, 2), SlotLease(1, 2))
    world.run()
    assert not world.released(), "it is being read"
    world.go_on()
    assert world.released()["r"].code == "offer_expired"


def test_a_claim_cannot_change_how_many_receivers_an_offer_waits_for(peer: Claimant) -> None:
    peer.world.do(peer.sender, peer.say(transfer="first", receiver=1, receivers=2))
    (drained,) = [action.body for action in peer.say(transfer="second") if isinstance(action, Send)]
    assert isinstance(drained, Drained) and drained.code == "bad_receiver" and "first 2, now 1" in drained.reason
    assert peer.sending.offers[number_of("r")].receivers == 2 and not peer.world.released()


def called(peer: Claimant, incarnation: str) -> None:
    """It has a session under this name from now on."""
    peer.session = replace(peer.session, peer=msgspec.structs.replace(peer.session.peer, incarnation=incarnation))


@pytest.mark.proves("T22")
def test_open_claims_of_one_receiver_are_bounded(peer: Claimant) -> None:
    peer.sending = Sender(sending_routes, most_claims=3)
    nothing: dict[str, Any] = {"takes": (), "end_token": 0}
    assert all(peer.waits(f"claim {number}", **nothing) for number in range(3))
    assert peer.refusal("more", **nothing) == "too_many_claims"
    called(peer, "another")
    assert peer.waits("theirs", **nothing)


@pytest.mark.proves("T22")
def test_open_claims_of_all_receivers_together_are_bounded(peer: Claimant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbridge.exchange.sender.MOST_CLAIMS_OF_ALL", 4)
    for number in range(4):
        called(peer, f"receiver {number}")
        assert peer.waits(f"claim {number}")
    assert peer.refusal("more") == "too_many_transfers"
    assert peer.sending.lost("receiver 1") == []
    assert peer.waits("theirs")


def test_what_was_called_drained_cannot_be_claimed_any_more(peer: Claimant) -> None:
    """A claim may come by a link that was given up, after its receiver has asked by another and lent the slots
    again."""
    asked = Cancel(transfer="late", code="forgotten")
    assert peer.sending.renounce(peer.incarnation, asked)
    assert peer.refusal("late", leases=leases(1)) == "cancelled"
    for number in range(MOST_RENOUNCED):  # bounded; what was asked about last stays
        assert peer.sending.renounce(peer.incarnation, asked if number == 1 else Cancel(transfer=f"u{number}", code=""))
    assert peer.refusal("late", leases=leases(1)) == "cancelled"
    assert len(peer.sending._renounced) == MOST_RENOUNCED
    assert peer.refusal(f"u{MOST_RENOUNCED - 1}") == "cancelled"
    assert peer.waits("other") and "other" in peer.sending.outgoing_transfers


@pytest.mark.proves("T20")
def test_another_receiver_cannot_touch_a_transfer(peer: Claimant) -> None:
    assert peer.waits("x")
    assert peer.grant("x", SlotLease(0, 1), incarnation="another") == peer.cancel("c", incarnation="another") == []
    (out,) = peer.sending.outgoing_transfers.values()
    assert isinstance(out, OutgoingBySlots) and not out.early


def test_another_receiver_cannot_keep_or_end_what_is_read() -> None:
    peer = Claimant(is_pulling=True)
    peer.say()
    sending, now = peer.sending, peer.world.now
    assert sending.answers(now, now, lambda count: True)
    sending.on_message("another", Renew(transfer="x", number=1))
    assert not sending.has_pending and sending.answers(now + 0.1, now + 0.1, lambda count: True) == []
    assert sending.on_message("another", Check(transfer="x", digests=(Sum(0, 1),))) == []
    assert sending.on_message("another", Settled(transfer="x")) == []
    (out,) = sending.outgoing_transfers.values()
    assert (
        isinstance(out, OutgoingByPull)
        and (out.granted.renewal, out.granted.ends) == (0, now + LEASE_S)
        and not out.asked
    )
    whole = Carried(out.session, out.plan.chunks, out.plan.total_bytes)
    assert whole in sending.on_message(peer.incarnation, Settled(transfer="x"))


@pytest.mark.proves("T20")
@pytest.mark.parametrize("who", ["another rank", "nobody", "its name with another key", "its name without a key"])
def test_another_sender_cannot_touch_a_transfer(who: str) -> None:
    world = World(senders=2)
    world.senders_key = "of P"
    world.hold = {"gather"}
    world.begin()
    receiving = world.receivers[0].receiving
    of_p0 = next(t for t, each in receiving.incoming_transfers.items() if each.address == "P0")
    incoming = receiving.incoming_transfers[of_p0]
    its = world.nodes["P0"].incarnation
    name, key = {
        "another rank": (world.nodes["P1"].incarnation, "of P"),
        "nobody": ("nobody", "of P"),
        "its name with another key": (its, "of another"),
        "its name without a key": (its, ""),
    }[who]
    before = by_slots(receiving).slots.counts(), incoming.ready
    for hear in (
        lambda: receiving.on_message(name, Ready(transfer=of_p0, chunks=10**9), 0.0, key),
        lambda: receiving.failing(name, of_p0, "c", "not mine", 0.0, key),
        lambda: receiving.drained(name, of_p0, "c", "not mine", 0.0, key),
    ):
        assert not [a for a in hear() if not isinstance(a, Send)]
        assert (by_slots(receiving).slots.counts(), incoming.ready) == before
    world.go_on()
    world.check_done("r")


def test_a_sender_that_promises_more_than_there_is_gets_no_more_slots() -> None:
    world = World(slots=64)
    world.fetch("r", 64)
    receiving, incarnation = world.receivers[0].receiving, world.senders[0].engine.agent.incarnation
    (transfer,) = receiving.incoming_transfers
    chunks = receiving.incoming_transfers[transfer].plan.chunks
    for told in (1 << 62, -1, 0):
        receiving.on_message(incarnation, Ready(transfer=transfer, chunks=told), 0.0)
        assert by_slots(receiving).slots.lent_to(transfer) <= chunks
    receiving.on_message(incarnation, Ready(transfer="no such transfer", chunks=5), 0.0)


def test_transfers_without_slots_are_forgotten_though_their_sender_never_says_drained() -> None:
    world = World(slots=2)
    world.fetch("first", end=32)
    (node,) = world.receivers
    machine = node.receiving
    world.hold = {"message"}  # the sender hears and says nothing any more
    for number in range(50):
        world.want(f"r{number}", end=32)
        world.abandon(f"r{number}")
        world.settle()
    held = list(machine.incoming_transfers.values())
    assert len(held) <= 1 + len(by_slots(machine).slots)
    assert all(incoming.state is not TransferState.ENDED for incoming in held)
    world.hold = set()
    world.serve("first", tokens=32, blocks=8)
    assert isinstance(world.answers()["first"], Done)
    world.pass_time(1000)
    world.run()
    world.check_rest()


# Our own engine:


ENGINE_LIES: dict[str, tuple[str, Want]] = {
    "a block beyond the pool": ("block_out_of_range", want_of("r", 64, (Blocks(0, 0, (0, 1, 2, BLOCKS)),))),
    "the largest block id": ("block_out_of_range", want_of("r", 64, (Blocks(0, 0, (0, 1, 2, (1 << 31) - 1)),))),
    "a negative block": ("block_out_of_range", want_of("r", 64, (Blocks(0, 0, (0, 1, 2, -1)),))),
    "a gap": ("blocks_not_contiguous", want_of("r", 64, (Blocks(0, 0, (0, 1)), Blocks(0, 3, (2, 3))))),
    "an overlap": ("blocks_not_contiguous", want_of("r", 64, (Blocks(0, 0, (0, 1)), Blocks(0, 1, (2, 3))))),
    "a group that is none": ("unknown_group", want_of("r", 64, (Blocks(1, 0, (0, 1, 2, 3)),))),
    "the last group there could be": ("unknown_group", want_of("r", 64, (Blocks(255, 0, (0,)),))),
    "too few blocks": ("blocks_too_few", want_of("r", 64, (Blocks(0, 0, (0, 1, 2)),))),
    "all tokens there could be": ("blocks_too_few", want_of("r", HUGE, (Blocks(0, 0, (0, 1)),))),
    "blocks from the end of time": ("blocks_too_few", want_of("r", 64, (Blocks(0, HUGE, (0, 1)),))),
    "a range turned round": ("bad_range", want_of("r", 1, (), first=5)),
    "one block for two entries": ("block_repeated", want_of("r", 64, (Blocks(0, 0, (3, 3, 1, 2)),))),
}


@pytest.mark.proves("T37")
@pytest.mark.parametrize("case", ENGINE_LIES)
def test_a_want_that_cannot_be_fails_alone(world: World, case: str) -> None:
    node = world.receivers[0]
    code, want = ENGINE_LIES[case]
    began = time.monotonic()
    (answer,) = node.receiving.want(want, node.engine, 0.0)
    assert time.monotonic() - began < QUICK_S
    assert isinstance(answer.message, Failed) and answer.message.code == code, answer
    assert not node.receiving.wants and node.slots.free == len(node.slots)
