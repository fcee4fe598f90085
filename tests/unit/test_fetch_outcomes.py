"""When an engine is told that it computes prompts that it could fetch, and what it is told."""

from __future__ import annotations

from kvbridge.agent.metrics import CAUSES, WARN_EVERY_S, WARN_SOON_S, FetchOutcomes
from kvbridge.exchange.transfer import Known


def test_nothing_is_said_while_all_is_fetched() -> None:
    share = FetchOutcomes()
    share.fetch(100, 0.0)
    share.offer(0.0)
    assert [share.due(now) for now in (0.0, WARN_SOON_S, WARN_EVERY_S, 10 * WARN_EVERY_S)] == [""] * 4


def test_the_first_word_comes_soon_and_the_next_a_minute_later() -> None:
    share, heard = FetchOutcomes(), {}
    for second in range(200):
        share.compute("untagged", 10, float(second))
        if said := share.due(float(second)):
            heard[second] = int(said.split(": ")[1].split()[0])
    assert heard == {5: 6, 65: 60, 125: 60, 185: 60}


def test_it_names_how_many_why_and_which_share_came() -> None:
    share = FetchOutcomes()
    share.fetch(250, 0.5)
    share.compute("untagged", 500, 1.0)
    share.compute("deadline", 150, 2.0)
    share.compute("untagged", 100, 3.0)
    assert share.due(5.9) == ""
    assert share.due(6.0) == (
        "computed here lately, not fetched: 3 prompts of 750 tokens; 25% of prompt tokens came by the bridge: "
        f"2 untagged ({CAUSES['untagged']}); 1 deadline ({CAUSES['deadline']})"
    )
    assert share.due(6.0 + WARN_EVERY_S) == ""


def test_whatever_a_claim_is_answered_with_has_a_cause() -> None:
    answers = {known.code for known in Known}
    assert answers | {"started_after_it_was_offered", "prefill_refused"} <= CAUSES.keys()


def test_a_reason_without_a_known_cause_is_named() -> None:
    share = FetchOutcomes()
    share.compute("digest_mismatch", 16, 0.0)
    assert share.due(WARN_SOON_S).endswith("; 0% of prompt tokens came by the bridge: 1 digest_mismatch")


def test_an_engine_that_prefills_for_others_may_compute_for_itself() -> None:
    share = FetchOutcomes()
    share.offer(0.0)
    share.compute("untagged", 16, 0.0)
    assert share.due(WARN_SOON_S) == ""
    share.compute("untagged", 16, WARN_SOON_S)
    assert "1 untagged" in share.due(WARN_SOON_S + WARN_EVERY_S), "it offered none since"


def test_an_engine_that_fetches_and_offers_is_there_to_decode() -> None:
    share = FetchOutcomes()
    share.offer(0.0)
    share.fetch(16, 0.0)
    share.compute("untagged", 16, 0.0)
    assert "50% of prompt tokens" in share.due(WARN_SOON_S)


def test_what_an_engine_that_prefills_was_to_fetch_is_said() -> None:
    share = FetchOutcomes()
    share.offer(0.0)
    share.compute("untagged", 16, 0.0)
    share.compute("deadline", 16, 0.0)
    assert "1 deadline" in share.due(WARN_SOON_S)


def test_what_came_long_before_is_no_part_of_the_share() -> None:
    share = FetchOutcomes()
    share.fetch(10_000_000, 0.0)
    share.offer(0.0)
    share.compute("untagged", 100, 3600.0)
    assert "; 0% of prompt tokens" in share.due(3600.0 + WARN_SOON_S)
