"""A peer with a session says what no honest one would: it harms itself, and costs us little."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from kvbridge_proto.engine import Done
from kvbridge_proto.peer import Cancel, Drained, Grant, Refuse, SlotLease

from kvbridge.exchange.actions import Action, Send
from kvbridge.exchange.containers import Deadlines
from kvbridge.exchange.sender import MOST_LEASES, MOST_RENOUNCED, Sender
from kvbridge.exchange.session import Session
from kvbridge.states import IncomingState
from tests.unit.exchange.world import World


class Claimant:
    """D0 as P0 knows it, saying what the test wants it to say."""

    def __init__(self) -> None:
        self.world = World()
        (sender,) = self.world.senders
        self.machine, self.engine = sender.sending, sender.engine
        self.world.want("seen", end=32)
        self.world.run()  # a session, and a claim that waits
        (self.session,) = sender.accepted.values()
        assert isinstance(self.session, Session)
        (out,) = self.machine.outgoing_transfers.values()
        self.incarnation, self.first = out.incarnation, out.claim

    def claim(self, **changes: object) -> list[Action]:
        return self.machine.claim(msgspec.structs.replace(self.first, **changes), self.session, self.engine, 0.0)


def refusal(actions: list[Action]) -> str:
    (action,) = actions
    assert isinstance(action, Send) and isinstance(action.body, Refuse) and action.body.about
    return action.body.code


def leases(count: int, generation: int = 1) -> tuple[SlotLease, ...]:
    return tuple(SlotLease(slot, generation) for slot in range(count))


def test_a_claim_with_more_slots_than_chunks_is_refused() -> None:
    peer = Claimant()
    (out,) = peer.machine.outgoing_transfers.values()
    assert refusal(peer.claim(transfer="more", leases=leases(out.plan.chunks + 1))) == "bad_lease"
    assert peer.claim(transfer="enough", leases=leases(out.plan.chunks)) == []


def test_a_grant_of_more_slots_than_chunks_ends_that_transfer_alone() -> None:
    peer = Claimant()
    peer.claim(transfer="other", leases=())
    (out,) = [each for each in peer.machine.outgoing_transfers.values() if each.transfer == "other"]
    assert peer.machine.grant(peer.incarnation, Grant(transfer="other", leases=leases(out.plan.chunks))) == []
    (said,) = peer.machine.grant(peer.incarnation, Grant(transfer="other", leases=leases(1, 9)))
    assert isinstance(said, Send) and said.body.code == "bad_lease"
    assert set(peer.machine.outgoing_transfers) == {peer.first.transfer}


def test_unused_slots_of_one_receiver_are_bounded_over_all_its_claims() -> None:
    peer = Claimant()
    tokens = 1 << 20
    plan = peer.session.planner.plan(peer.first.takes, 0, tokens, peer.session.slot_bytes)
    assert plan.chunks > MOST_LEASES
    large = {"first_token": 0, "end_token": tokens, "plan": plan.digest}
    held = sum(out.lent for out in peer.machine.outgoing_transfers.values())
    assert peer.claim(transfer="all", leases=leases(MOST_LEASES - held), **large) == []
    assert refusal(peer.claim(transfer="one", leases=leases(1), **large)) == "bad_lease"
    assert peer.claim(transfer="none", leases=(), **large) == []


def test_a_claim_of_no_rank_is_refused() -> None:
    peer = Claimant()
    for receiver, receivers in ((1, 1), (7, 4), (5, 1 << 40)):
        assert refusal(peer.claim(transfer="t", receiver=receiver, receivers=receivers)) == "bad_receiver"


def test_a_claim_that_lends_nothing_reads_nothing_once_the_blocks_are_given_back() -> None:
    """Neither beside one that is served in its place, nor later, slot by slot."""
    peer = Claimant()
    world, (sender,) = peer.world, peer.world.senders
    rendezvous: dict[str, object] = {"rendezvous": "rendezvous", "want": "any"}
    nothing = peer.session.planner.plan((), 0, 0, peer.session.slot_bytes)
    world.do(sender, peer.claim(transfer="greedy", leases=(), deadline_s=86400.0, **rendezvous))
    world.offer("r", 32, 8, rendezvous="rendezvous")
    world.do(sender, peer.claim(transfer="done", takes=(), leases=(), end_token=0, plan=nothing.digest, **rendezvous))
    assert "done" not in peer.machine.outgoing_transfers and not world.released(), "the other has not read yet"
    world.do(sender, peer.machine.grant(peer.incarnation, Grant(transfer="greedy", leases=leases(1))))
    world.hold = {"gather"}
    world.run()
    assert sender.send_orders.moving == 1
    world.pass_time(101)
    assert not peer.machine.grant(peer.incarnation, Grant(transfer="greedy", leases=leases(1, 2)))
    world.run()
    assert not world.released(), "it is being read"
    world.hold = set()
    world.run()
    assert world.released()["r"].code == "offer_expired"


def test_a_claim_cannot_change_how_many_receivers_an_offer_waits_for() -> None:
    peer = Claimant()
    world, (sender,) = peer.world, peer.world.senders
    world.offer("r", 32, 8, rendezvous="rendezvous")
    world.do(
        sender, peer.claim(transfer="first", leases=(), rendezvous="rendezvous", want="w", receiver=1, receivers=2)
    )
    said = peer.claim(transfer="second", leases=(), rendezvous="rendezvous", want="w", receiver=0, receivers=1)
    (drained,) = [action.body for action in said if isinstance(action, Send)]
    assert isinstance(drained, Drained) and drained.code == "bad_receiver" and "first 2, now 1" in drained.reason
    assert peer.machine.offers["r"].receivers == 2 and not world.released()


def test_open_claims_of_one_receiver_are_bounded() -> None:
    peer = Claimant()
    nothing: dict[str, object] = {
        "takes": (),
        "leases": (),
        "end_token": peer.first.first_token,
        "rendezvous": "nobody's",
    }
    plan = peer.session.planner.plan((), peer.first.first_token, peer.first.first_token, peer.session.slot_bytes)
    peer.machine = Sender(most_claims=3)
    for number in range(3):
        assert peer.claim(transfer=f"claim {number}", plan=plan.digest, **nothing) == []
    assert refusal(peer.claim(transfer="more", plan=plan.digest, **nothing)) == "too_many_claims"
    peer.session = replace(peer.session, peer=msgspec.structs.replace(peer.session.peer, incarnation="another"))
    assert peer.claim(transfer="theirs", plan=plan.digest, **nothing) == []


def test_open_claims_of_all_receivers_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbridge.exchange.sender.MOST_CLAIMS_OF_ALL", 4)
    peer = Claimant()
    for number in range(3):
        peer.session = replace(
            peer.session, peer=msgspec.structs.replace(peer.session.peer, incarnation=f"receiver {number}")
        )
        assert peer.claim(transfer=f"claim {number}", leases=(), rendezvous="nobody's") == []
    assert refusal(peer.claim(transfer="more", leases=(), rendezvous="nobody's")) == "too_many_transfers"
    assert peer.machine.lost("receiver 1") == []
    assert peer.claim(transfer="theirs", leases=(), rendezvous="nobody's") == []


def test_what_was_called_drained_cannot_be_claimed_any_more() -> None:
    """A claim may come by a link that was given up, after its receiver has asked by another and lent the slots
    again."""
    peer = Claimant()
    asked = Cancel(transfer="late", code="forgotten")
    assert peer.machine.renounce(peer.incarnation, asked)
    assert refusal(peer.claim(transfer="late", leases=leases(1))) == "cancelled"
    for number in range(MOST_RENOUNCED):  # bounded; what was asked about last stays
        assert peer.machine.renounce(peer.incarnation, asked if number == 1 else Cancel(transfer=f"u{number}", code=""))
    assert refusal(peer.claim(transfer="late", leases=leases(1))) == "cancelled"
    assert len(peer.machine._renounced) == MOST_RENOUNCED
    assert refusal(peer.claim(transfer=f"u{MOST_RENOUNCED - 1}", leases=())) == "cancelled"
    assert peer.claim(transfer="other", leases=()) == [] and "other" in peer.machine.outgoing_transfers


def test_transfers_without_slots_are_forgotten_though_their_sender_never_says_drained() -> None:
    world = World(slots=2)
    world.want("first", end=32)
    world.run()
    (node,) = world.receivers
    machine = node.receiving
    world.hold = {"message"}  # the sender hears and says nothing any more
    for number in range(50):
        world.want(f"r{number}", end=32)
        world.abandon(f"r{number}")
        world.settle()
    held = [incoming for each in machine._wanted_by.values() for incoming in each.incoming_transfers.values()]
    assert len(held) <= 1 + len(machine.slots)
    assert all(incoming.state is not IncomingState.ENDED for incoming in held)
    world.hold = set()
    world.offer("first", tokens=32, blocks=8)
    world.run()
    assert isinstance(world.answers()["first"], Done)
    world.pass_time(1000)
    world.run()
    world.check_rest()


def test_deadlines_that_were_moved_or_cleared_are_not_kept() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for number in range(10_000):
        deadlines.set("moved", 1000.0 + number)
        deadlines.set(f"cleared {number}", 2000.0)
        deadlines.clear(f"cleared {number}")
    assert len(deadlines._heap) < 100
    for number in range(1000):
        deadlines.set(f"kept {number}", float(number))
    for number in range(0, 1000, 2):
        deadlines.clear(f"kept {number}")
    assert deadlines.next() == 1.0
    assert deadlines.due(500.0) == [f"kept {number}" for number in range(1, 500, 2)]
    assert deadlines.due(1e6) == [*(f"kept {number}" for number in range(501, 1000, 2)), "moved"]
    assert deadlines.next() is None
