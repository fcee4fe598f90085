"""A claim for which no offer is there: what the receiver was told, against all that a sender can know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvbridge_proto.common import AgentCard, attachment_name
from kvbridge_proto.engine import Failed, NoOffer
from kvbridge_proto.peer import Drained

from kvbridge.exchange.actions import Send
from kvbridge.exchange.offers import ENDED_S
from kvbridge.exchange.transfer import Known
from kvbridge.loopback.messages import number_of
from tests.unit.exchange.claimant import Claimant
from tests.unit.exchange.world import World

pytestmark = pytest.mark.proves("G16")

BEFORE_S = 1.0


def nothing(peer: Claimant) -> None:
    peer.sending._rendezvous.forget_ended()


def taken(peer: Claimant) -> None:
    peer.world.offer("x", 16, 4, rendezvous="id", last=False)
    peer.say(transfer="first", want="first", rendezvous="id")


def fetched(peer: Claimant) -> None:
    peer.world.offer("x", 64, 16, rendezvous="id")
    peer.world.fetch("first", 64, rendezvous="id")


def declined(peer: Claimant) -> None:
    peer.world.offer("x", 64, 16, rendezvous="id")
    peer.world.fetch("first", 0, rendezvous="id")


def ended(peer: Claimant) -> None:
    peer.world.offer("x", 64, 16, rendezvous="id")
    peer.world.withdraw("x")
    peer.say(transfer="first", want="first", rendezvous="id")  # hears of the end; the next one as well


STATES: dict[Known, Callable[[Claimant], None]] = {
    Known.NOTHING: nothing,
    Known.TAKEN: taken,
    Known.FETCHED: fetched,
    Known.DECLINED: declined,
    Known.ENDED: ended,
}
CODES = {
    Known.NOTHING: "unknown_offer",
    Known.TAKEN: "already_fetched",
    Known.FETCHED: "already_fetched",
    Known.DECLINED: "already_declined",
    Known.ENDED: "withdrawn",
}


def ended_call(peer: Claimant, call: str = "id", now: float | None = None) -> None:
    said = NoOffer(call=call, code="prefill_refused", reason="status 404")
    peer.sending.no_offer(said, peer.world.now if now is None else now)


def answered(peer: Claimant, read_at: float | None = None) -> list[Drained]:
    """What receivers hear once all is read that the engine had sent by `read_at`, or by now."""
    now = peer.world.now
    actions = peer.sending.answers(now, now if read_at is None else read_at, lambda count: True)
    return [each.body for each in actions if isinstance(each, Send) and isinstance(each.body, Drained)]


def late(peer: Claimant, rendezvous: str = "id", transfer: str = "late", **more: Any) -> None:
    assert peer.say(transfer=transfer, want=transfer, rendezvous=rendezvous, **more) == []


@pytest.mark.parametrize("who", ["nobody", "receiver", "sender"])
@pytest.mark.parametrize("known", Known)
def test_waits_where_an_offer_may_come_and_hears_at_once_where_none_can(known: Known, who: str) -> None:
    """`who` knows that the prefill has ended."""
    peer = Claimant()
    STATES[known](peer)
    if who == "sender":
        ended_call(peer, "")  # "id" has no slash
    late(peer, is_offered=who == "receiver")
    assert peer.sending.has_pending == (who != "nobody")
    assert answered(peer, peer.world.now - BEFORE_S) == [], "its engine may have said more by then"
    said = answered(peer)
    assert not peer.sending.has_pending
    if who == "nobody":
        assert not said and "late" in peer.sending.outgoing_transfers
        peer.world.serve("y", 64, 16, rendezvous="id")
        assert "y" not in peer.sending.offers or peer.sending.offers["y"].want == "late", "it gets what comes"
        return
    (drained,) = said
    assert "late" not in peer.sending.outgoing_transfers
    reason = {Known.ENDED: "test"}.get(known, known.reason)
    if who == "sender" and known is Known.NOTHING:
        assert (drained.code, drained.reason) == ("prefill_refused", "status 404")
    else:
        assert (drained.transfer, drained.code, drained.reason) == ("late", CODES[known], reason)


def test_the_end_of_a_call_that_is_forgotten_before_the_answer_ends_no_claim() -> None:
    peer = Claimant()
    ended_call(peer, "")
    late(peer)
    peer.sending._rendezvous.forget_old(peer.world.now + ENDED_S + 1)
    assert answered(peer) == [] and "late" in peer.sending.outgoing_transfers


def test_an_offer_that_comes_before_all_is_read_is_no_end() -> None:
    peer = Claimant()
    late(peer, is_offered=True)
    assert answered(peer, peer.world.now - BEFORE_S) == [] and peer.sending.has_pending
    peer.world.offer("y", 64, 16, rendezvous="id")
    assert peer.sending.offers[number_of("y")].want == "late"


CALL = "room/7"
IN = [f"{CALL}/{digit * 40}" for digit in "ab"]
OUT = ["room/77/" + "a" * 40, "room/7", f"{CALL}/0/" + "a" * 40, "prompt-" + "a" * 40]


def test_a_call_that_ended_early_ends_the_claims_of_its_prompts_and_no_others() -> None:
    peer = Claimant()
    for rendezvous in IN + OUT:
        late(peer, rendezvous, transfer=rendezvous)
    ended_call(peer, CALL)
    assert [each.transfer for each in answered(peer)] == IN
    for rendezvous in IN + OUT:
        late(peer, rendezvous, transfer=f"then {rendezvous}")
    said = answered(peer)
    assert [each.transfer for each in said] == [f"then {each}" for each in IN]
    assert {(each.code, each.reason) for each in said} == {("prefill_refused", "status 404")}


@pytest.mark.parametrize("is_offered_before", [True, False])
def test_what_a_call_has_offered_is_served_though_the_call_ends_early(is_offered_before: bool) -> None:
    """Before it ended; or after, by another call of its name."""
    peer = Claimant()
    if is_offered_before:
        peer.world.offer("y", 64, 16, rendezvous=IN[0])
        ended_call(peer, CALL)
    else:
        ended_call(peer, CALL)
        peer.world.offer("y", 64, 16, rendezvous=IN[0])
        late(peer, IN[1], transfer="waits")
        assert answered(peer) == []
    assert peer.say(transfer="late", want="late", rendezvous=IN[0])
    assert peer.sending.offers[number_of("y")].want == "late"


def test_the_end_of_a_call_is_forgotten_after_five_minutes_or_with_its_engine() -> None:
    peer = Claimant()
    ended_call(peer, CALL, now=peer.world.now - ENDED_S - 1)
    ended_call(peer, "room/8")
    late(peer, IN[0], transfer="old")
    peer.sending.engine_left(peer.world.now)
    late(peer, "room/8/" + "a" * 40, transfer="of an engine that left")
    assert answered(peer) == []


def test_a_claim_that_waits_for_a_rebuild_is_not_refused() -> None:
    """There is an offer for it."""
    peer = Claimant()
    peer.world.offer("x", 64, 16, rendezvous="id")
    peer.sending.pause(is_alone=True)
    assert peer.say(transfer="late", want="late", rendezvous="id", is_offered=True) == []
    assert peer.sending.has_pending
    assert answered(peer) == [] and "late" in peer.sending.outgoing_transfers
    assert not peer.sending.has_pending, "it is not looked at again with every message"
    assert peer.sending.resume() and peer.sending.offers[number_of("x")].want == "late"


def test_a_claim_that_waits_for_a_rebuild_hears_that_another_has_taken_what_it_waited_for() -> None:
    peer = Claimant()
    peer.world.offer("x", 64, 16, rendezvous="id")
    peer.sending.pause(is_alone=True)
    late(peer, is_offered=True)
    assert answered(peer) == []
    peer.say(transfer="other", want="other", rendezvous="id", takes=(), end_token=0)
    assert [(each.transfer, each.code) for each in answered(peer)] == [("late", "already_declined")]


def test_a_preempted_prompt_that_is_offered_again_is_no_end(world: World) -> None:
    world.offer("r", 64, 16)
    world.withdraw("r", comes_again=True)
    world.serve("r~1", 64, 16, rendezvous="r")
    world.fetch("r", 64, is_offered=True)
    world.check_done("r")


@pytest.mark.parametrize(("epoch", "code"), [(1, "unknown_offer"), (7, "started_after_it_was_offered")])
def test_a_receiver_that_meets_another_attachment_says_that_it_began_later(world: World, epoch: int, code: str) -> None:
    card: AgentCard = world.senders[0].engine.agent
    world.want("r", 64, is_offered=True, offered_to=attachment_name(card, epoch))
    world.run()
    world.do(world.sender, world.sender.sending.answers(world.now, world.now, lambda count: True))
    world.run()
    answer = world.answers()["r"]
    assert isinstance(answer, Failed) and answer.code == code, answer
    assert epoch == 1 or (f"/{epoch}" in answer.reason and "P0" in answer.reason)


def test_ends_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbridge.exchange.offers.MOST_ENDED", 3)
    peer = Claimant()
    for number in range(5):
        peer.world.offer(f"x{number}", 64, 16)
        peer.world.withdraw(f"x{number}")
        ended_call(peer, f"room/{number}")
    assert list(peer.sending._rendezvous._last) == ["x2", "x3", "x4"]
    assert list(peer.sending._rendezvous._ended_calls) == ["room/2", "room/3", "room/4"]
