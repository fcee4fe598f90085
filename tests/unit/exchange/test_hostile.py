"""A peer that has a session and says what no honest one would: it costs that peer, and little of ours."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from kvbridge_proto.engine import Done
from kvbridge_proto.peer import Cancel, Drained, Grant, Lease, Refuse

from kvbridge.exchange.actions import Action, Send
from kvbridge.exchange.claims import MOST_LEASES
from kvbridge.exchange.intake import IntakeState
from kvbridge.exchange.lease import Deadlines
from kvbridge.exchange.outbound import MOST_RENOUNCED, Outbound
from kvbridge.exchange.session import Session
from tests.unit.exchange.world import World


class Claimant:
    """D0 as P0 knows it, saying what the test wants it to say."""

    def __init__(self) -> None:
        self.world = World()
        (source,) = self.world.sources
        self.machine, self.home = source.outbound, source.home
        self.world.want("seen", end=32)
        self.world.run()  # a session, and a claim that waits
        (self.session,) = source.accepted.values()
        assert isinstance(self.session, Session)
        (out,) = self.machine.outlets.values()
        self.boot, self.first = out.boot, out.claim

    def claim(self, **changes: object) -> list[Action]:
        return self.machine.claim(msgspec.structs.replace(self.first, **changes), self.session, self.home, 0.0)


def refusal(actions: list[Action]) -> str:
    (action,) = actions
    assert isinstance(action, Send) and isinstance(action.body, Refuse) and action.body.about
    return action.body.code


def leases(count: int, generation: int = 1) -> tuple[Lease, ...]:
    return tuple(Lease(slot, generation) for slot in range(count))


def test_a_claim_with_more_slots_than_chunks_is_refused() -> None:
    peer = Claimant()
    (out,) = peer.machine.outlets.values()
    assert refusal(peer.claim(transfer="more", leases=leases(out.plan.chunks + 1))) == "bad_lease"
    assert peer.claim(transfer="enough", leases=leases(out.plan.chunks)) == []


def test_a_grant_of_more_slots_than_chunks_ends_that_transfer_alone() -> None:
    peer = Claimant()
    peer.claim(transfer="other", leases=())
    (out,) = [each for each in peer.machine.outlets.values() if each.transfer == "other"]
    assert peer.machine.grant(peer.boot, Grant(transfer="other", leases=leases(out.plan.chunks))) == []
    (said,) = peer.machine.grant(peer.boot, Grant(transfer="other", leases=leases(1, 9)))
    assert isinstance(said, Send) and said.body.code == "bad_lease"  # type: ignore[union-attr]
    assert set(peer.machine.outlets) == {peer.first.transfer}


def test_unused_slots_of_one_sink_are_bounded_over_all_its_claims() -> None:
    peer = Claimant()
    tokens = 1 << 20
    plan = peer.session.planner.plan(peer.first.takes, 0, tokens, peer.session.slot_bytes)
    assert plan.chunks > MOST_LEASES
    large = {"first_token": 0, "end_token": tokens, "plan": plan.digest}
    held = sum(out.lent for out in peer.machine.outlets.values())
    assert peer.claim(transfer="all", leases=leases(MOST_LEASES - held), **large) == []
    assert refusal(peer.claim(transfer="one", leases=leases(1), **large)) == "bad_lease"
    assert peer.claim(transfer="none", leases=(), **large) == []


def test_a_claim_of_no_rank_is_refused() -> None:
    peer = Claimant()
    for sink, sinks in ((1, 1), (7, 4), (5, 1 << 40)):
        assert refusal(peer.claim(transfer="t", sink=sink, sinks=sinks)) == "bad_sink"


def test_a_claim_that_lends_nothing_reads_nothing_once_the_blocks_are_given_back() -> None:
    """Neither beside one that is served in its place, nor later, slot by slot."""
    peer = Claimant()
    world, (source,) = peer.world, peer.world.sources
    room: dict[str, object] = {"room": "room", "want": "any"}
    nothing = peer.session.planner.plan((), 0, 0, peer.session.slot_bytes)
    world.do(source, peer.claim(transfer="greedy", leases=(), deadline_s=86400.0, **room))
    world.offer("r", 32, 8, room="room")
    world.do(source, peer.claim(transfer="done", takes=(), leases=(), end_token=0, plan=nothing.digest, **room))
    assert "done" not in peer.machine.outlets and not world.released(), "the other has not read yet"
    world.do(source, peer.machine.grant(peer.boot, Grant(transfer="greedy", leases=leases(1))))
    world.hold = {"gather"}
    world.run()
    assert source.sending.moving == 1
    world.pass_time(101)
    assert not peer.machine.grant(peer.boot, Grant(transfer="greedy", leases=leases(1, 2)))
    world.run()
    assert not world.released(), "it is being read"
    world.hold = set()
    world.run()
    assert world.released()["r"].code == "offer_expired"


def test_a_claim_cannot_change_how_many_sinks_an_offer_waits_for() -> None:
    peer = Claimant()
    world, (source,) = peer.world, peer.world.sources
    world.offer("r", 32, 8, room="room")
    world.do(source, peer.claim(transfer="first", leases=(), room="room", want="w", sink=1, sinks=2))
    said = peer.claim(transfer="second", leases=(), room="room", want="w", sink=0, sinks=1)
    (drained,) = [action.body for action in said if isinstance(action, Send)]
    assert isinstance(drained, Drained) and drained.code == "bad_sink" and "first 2, now 1" in drained.reason
    assert peer.machine.offers["r"].sinks == 2 and not world.released()


def test_open_claims_of_one_sink_are_bounded() -> None:
    peer = Claimant()
    nothing: dict[str, object] = {"takes": (), "leases": (), "end_token": peer.first.first_token, "room": "nobody's"}
    plan = peer.session.planner.plan((), peer.first.first_token, peer.first.first_token, peer.session.slot_bytes)
    peer.machine = Outbound(most_claims=3)
    for number in range(3):
        assert peer.claim(transfer=f"claim {number}", plan=plan.digest, **nothing) == []
    assert refusal(peer.claim(transfer="more", plan=plan.digest, **nothing)) == "too_many_claims"
    peer.session = replace(peer.session, peer=msgspec.structs.replace(peer.session.peer, boot="another"))
    assert peer.claim(transfer="theirs", plan=plan.digest, **nothing) == []


def test_open_claims_of_all_sinks_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbridge.exchange.outbound.MOST_CLAIMS_OF_ALL", 4)
    peer = Claimant()
    for number in range(3):
        peer.session = replace(peer.session, peer=msgspec.structs.replace(peer.session.peer, boot=f"sink {number}"))
        assert peer.claim(transfer=f"claim {number}", leases=(), room="nobody's") == []
    assert refusal(peer.claim(transfer="more", leases=(), room="nobody's")) == "too_many_transfers"
    assert peer.machine.lost("sink 1") == []
    assert peer.claim(transfer="theirs", leases=(), room="nobody's") == []


def test_what_was_called_drained_cannot_be_claimed_any_more() -> None:
    """A claim may come by a link that was given up, after its sink has asked by another and lent the slots again."""
    peer = Claimant()
    asked = Cancel(transfer="late", code="forgotten")
    assert peer.machine.renounce(peer.boot, asked)
    assert refusal(peer.claim(transfer="late", leases=leases(1))) == "cancelled"
    for number in range(MOST_RENOUNCED):  # bounded; what was asked about last stays
        assert peer.machine.renounce(peer.boot, asked if number == 1 else Cancel(transfer=f"u{number}", code=""))
    assert refusal(peer.claim(transfer="late", leases=leases(1))) == "cancelled"
    assert len(peer.machine._renounced) == MOST_RENOUNCED
    assert refusal(peer.claim(transfer=f"u{MOST_RENOUNCED - 1}", leases=())) == "cancelled"
    assert peer.claim(transfer="other", leases=()) == [] and "other" in peer.machine.outlets


def test_transfers_without_slots_are_forgotten_though_their_source_never_says_drained() -> None:
    world = World(slots=2)
    world.want("first", end=32)
    world.run()
    (node,) = world.sinks
    machine = node.inbound
    world.hold = {"message"}  # the source hears and says nothing any more
    for number in range(50):
        world.want(f"r{number}", end=32)
        world.abandon(f"r{number}")
        world.settle()
    held = [intake for each in machine._wanted_by.values() for intake in each.intakes.values()]
    assert len(held) <= 1 + len(machine.slots)
    assert all(intake.state is not IntakeState.ENDED for intake in held)
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
