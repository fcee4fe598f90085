"""A claim for which no offer is there: what the receiver was told, against all that a sender can know."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kvbridge_proto.common import AgentCard, attachment_name
from kvbridge_proto.engine import Failed
from kvbridge_proto.peer import Drained

from kvbridge.exchange.actions import Send
from kvbridge.exchange.answers import ANSWERS, Known
from kvbridge.loopback.messages import number_of
from tests.unit.exchange.claimant import Claimant
from tests.unit.exchange.world import World

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
    Known.UNREAD: fetched,
    Known.NOTHING: nothing,
    Known.TAKEN: taken,
    Known.FETCHED: fetched,
    Known.DECLINED: declined,
    Known.ENDED: ended,
}
CODES = {
    Known.UNREAD: "",
    Known.NOTHING: "unknown_offer",
    Known.TAKEN: "already_fetched",
    Known.FETCHED: "already_fetched",
    Known.DECLINED: "already_declined",
    Known.ENDED: "withdrawn",
}


@pytest.mark.parametrize("is_offered", [False, True])
@pytest.mark.parametrize("known", Known)
def test_waits_where_an_offer_may_come_and_hears_at_once_where_none_can(known: Known, is_offered: bool) -> None:
    peer = Claimant()
    STATES[known](peer)
    now = peer.world.now
    assert peer.say(transfer="late", want="late", rendezvous="id", is_offered=is_offered) == []
    read_at = now - BEFORE_S if known is Known.UNREAD else now
    said = [each.body for each in peer.sending.answers(now, read_at, lambda count: True) if isinstance(each, Send)]
    if not is_offered or known is Known.UNREAD:
        assert not said and "late" in peer.sending.outgoing_transfers
        assert peer.sending.is_owing == is_offered
        peer.world.serve("y", 64, 16, rendezvous="id")
        assert "y" not in peer.sending.offers or peer.sending.offers["y"].want == "late", "it gets what comes"
        return
    (drained,) = said
    assert isinstance(drained, Drained) and (drained.transfer, drained.code) == ("late", CODES[known])
    refusal = ANSWERS[True, known]
    assert refusal is not None and drained.reason == ("test" if known is Known.ENDED else refusal.reason)
    assert not peer.sending.is_owing and "late" not in peer.sending.outgoing_transfers


def test_the_table_has_an_answer_for_every_pair_and_without_word_of_an_offer_all_wait() -> None:
    assert ANSWERS.keys() == {(is_offered, known) for is_offered in (False, True) for known in Known}
    waits = {pair for pair, refusal in ANSWERS.items() if refusal is None}
    assert waits == {(False, known) for known in Known} | {(True, Known.UNREAD)}


def test_a_claim_that_waits_for_a_rebuild_is_not_refused() -> None:
    """There is an offer for it."""
    peer = Claimant()
    peer.world.offer("x", 64, 16, rendezvous="id")
    peer.sending.pause(is_alone=True)
    assert peer.say(transfer="late", want="late", rendezvous="id", is_offered=True) == []
    now = peer.world.now
    assert peer.sending.answers(now, now, lambda count: True) == [] and "late" in peer.sending.outgoing_transfers
    assert peer.sending.resume() and peer.sending.offers[number_of("x")].want == "late"


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
    monkeypatch.setattr("kvbridge.exchange.outgoing.MOST_ENDED", 3)
    peer = Claimant()
    for number in range(5):
        peer.world.offer(f"x{number}", 64, 16)
        peer.world.withdraw(f"x{number}")
    assert list(peer.sending._rendezvous._last) == ["x2", "x3", "x4"]
