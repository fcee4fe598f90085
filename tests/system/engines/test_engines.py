"""Two real engines that differ: tokens as from one engine alone, and the KV bytes of the prefill side."""

from __future__ import annotations

import time

import pytest

from testing.kept import kept
from testing.waiting import wait_for
from tests.system.engines.fleet import (
    PREFILL,
    Fleet,
    assert_same_as_alone,
    name_weights,
    needs_fp8,
    prompt,
    reweigh,
)
from tests.system.sglang.rows import assert_carried

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


fleet = kept(Fleet, start=("small", "large", "alone"))


@pytest.mark.parametrize(
    ("sender", "receiver"), [("small", "large"), ("large", "small")], ids=["32 to 128", "128 to 32"]
)
@pytest.mark.parametrize("length", [2, 33, 127, 128, 700])
def test_decodes_what_an_engine_with_other_blocks_prefilled(
    fleet: Fleet, sender: str, receiver: str, length: int
) -> None:
    assert_same_as_alone(fleet, sender, receiver, prompt(length, seed=2 * length + (sender == "large")))


def attached(fleet: Fleet, name: str) -> list[tuple[int, int]]:
    """The engine of each of its agents."""
    engines = [agent.status.engine for agent in fleet.agents[name]]
    assert all(engines), engines
    return [(each.epoch, each.pid) for each in engines if each]


def test_engines_that_serve_both_roles_do_so_at_once_and_stay_attached(fleet: Fleet) -> None:
    """Each prefills for the other and decodes what the other prefilled, side by side; no agent hears of a role."""
    names = ("small", "large")
    before = {name: attached(fleet, name) for name in names}
    tokens = {
        name: [prompt(300 + seed, seed=901 + seed + 10 * (name == "large")) for seed in range(4)] for name in names
    }
    asked = {}
    for sender, receiver in (names, names[::-1]):
        for prefilled in [(each, fleet.prefill(sender, each)[1]) for each in tokens[sender]]:
            asked[fleet.name(f"d-{receiver}")] = (receiver, *prefilled)
    for request, (receiver, each, prefill) in asked.items():
        fleet[receiver].submit(request, each, 12, prefill.params)
    for request, (receiver, each, _) in asked.items():
        answer = fleet[receiver].result(request)
        assert answer.cached == len(each) - 1 and list(answer.tokens) == fleet.alone(each, 12)
    assert {name: attached(fleet, name) for name in names} == before


@needs_fp8
@pytest.mark.parametrize(("sender", "receiver"), [("small", "fp8"), ("fp8", "small")])
def test_narrows_bf16_to_fp8_and_widens_it_by_the_reference_conversion(
    fleet: Fleet, sender: str, receiver: str
) -> None:
    tokens = prompt(500, seed=1 + (sender == "fp8"))
    answer, ours, theirs = fleet.crossed(sender, receiver, tokens)
    assert answer.cached == len(tokens) - 1 and len(answer.tokens) == 12
    assert {ours.codec, theirs.codec} == {"bf16", "fp8_e4m3"}
    assert_carried(ours, theirs)


def test_chunks_leave_while_the_prompt_is_being_prefilled(fleet: Fleet) -> None:
    """Both engines get the request at once, as the push proxy does it; 256 tokens a step make several offers."""
    tokens = prompt(1500, seed=3)
    room, sender = fleet.name("both"), fleet.agents["small"][0]
    params = fleet.fetched("small", room) | {"tp_size": 1, "pp_size": 1}
    offers = sender.text().count("offered: ")
    fleet["large"].submit(f"cmpl-{room}-0", tokens, 12, params)
    time.sleep(0.3)
    fleet["small"].submit(f"cmpl-{room}-0", tokens, 1, dict(PREFILL))
    answer = fleet["large"].result(f"cmpl-{room}-0")
    assert fleet["small"].result(f"cmpl-{room}-0").reason
    assert_carried(*(fleet.rows(name, f"cmpl-{room}-0", 0, len(tokens) - 1) for name in ("small", "large")))
    assert answer.cached == len(tokens) - 1
    assert list(answer.tokens) == fleet.alone(tokens, 12)
    lines = [line for line in sender.text().splitlines() if f"rendezvous={room}/" in line and "offered: " in line]
    assert len(lines) >= 5 and sender.text().count("offered: ") - offers >= 5


def test_a_prefix_that_the_decode_side_has_does_not_travel(fleet: Fleet) -> None:
    head = prompt(256, seed=4)
    first, second = head + prompt(90, seed=5), head + prompt(120, seed=6)
    fleet.crossed("small", "large", first)
    before = fleet.moved_bytes("large")
    answer, ours, theirs = fleet.crossed("small", "large", second)
    moved = fleet.moved_bytes("large") - before
    assert answer.cached == len(second) - 1
    assert_carried(ours, theirs)
    assert list(answer.tokens) == fleet.alone(second, 12)
    row = 4 * 2 * 4 * 64  # layers, parts, heads, bytes
    assert moved < (len(second) - 256 + 128) * row, f"{moved} bytes moved: the prefix travelled too"


def test_the_agent_knows_which_share_of_the_prompts_came_and_why_the_rest_did_not(fleet: Fleet) -> None:
    (agent,) = fleet.agents["large"]
    before = agent.status.counters
    fleet.crossed("small", "large", prompt(300, seed=45))
    untagged = prompt(201, seed=46)
    fleet["large"].run(fleet.name("untagged"), untagged, 4)
    dead = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1, "remote_request_id": "dead"}
    fleet["large"].run(fleet.name("dead"), prompt(101, seed=47), 4, dead)

    def grown(name: str) -> float:
        return agent.status.counters.get(name, 0.0) - before.get(name, 0.0)

    wait_for(lambda: grown("kvbridge_prompts_computed_here_total{reason=untagged}") == 1)
    assert grown("kvbridge_prompt_tokens_computed_here_total{reason=untagged}") == 200
    assert grown("kvbridge_prompts_computed_here_total{reason=peer_unreachable}") == 1
    assert grown("kvbridge_prompt_tokens_computed_here_total{reason=peer_unreachable}") == 100
    assert grown("kvbridge_prompt_tokens_fetched_total") == 299
    wait_for(lambda: "computed here lately, not fetched: " in agent.text())
    assert "(they name nothing to fetch" in agent.text()


def test_an_aborted_request_leaves_nothing_behind(fleet: Fleet) -> None:
    tokens = prompt(600, seed=50)
    request = fleet.name("aborted")
    fleet["large"].submit(request, tokens, 12, fleet.fetched("small", "nobody"))
    time.sleep(0.5)
    assert fleet.agents["large"][0].status.transfers
    fleet["large"].abort(request)
    fleet["large"].wait_empty()
    sender = fleet.name("unwanted")
    fleet["small"].submit(sender, prompt(1500, seed=51), 400, dict(PREFILL))  # or it may end first, and is held
    fleet["small"].abort(sender)
    fleet["small"].wait_empty()
    answer, ours, theirs = fleet.crossed("small", "large", prompt(100, seed=52))
    assert answer.cached == 99
    assert_carried(ours, theirs)
    assert not fleet.agents["large"][0].status.transfers


SOON_S = 15.0  # a want that waits for its offer does so for 40 s here


def test_two_answers_of_a_call_share_what_one_prefill_offered(fleet: Fleet) -> None:
    """One fetches, and the other finds the rows in the prefix cache; vLLM names such requests like this."""
    tokens = prompt(700, seed=53)
    _, prefilled = fleet.prefill("small", tokens)
    call = fleet.name("n")
    names = [f"{sample}_cmpl-{call}-0-{sample}a2b3c4d" for sample in range(2)]
    before = fleet.moved_bytes("large")
    for name in names:
        fleet["large"].submit(name, tokens, 12, prefilled.params)
    answers = [fleet["large"].result(name, SOON_S) for name in names]
    row = 4 * 2 * 4 * 64  # layers, parts, heads, bytes
    assert fleet.moved_bytes("large") - before < (len(tokens) + 128) * row, "it travelled twice"
    assert [answer.cached for answer in answers] == [len(tokens) - 1, len(tokens) // 128 * 128]
    assert all(list(answer.tokens) == fleet.alone(tokens, 12) for answer in answers)
    fleet["small"].wait_empty()


def test_a_decode_leg_that_is_tried_again_elsewhere_computes_at_once(fleet: Fleet) -> None:
    """Elsewhere is another engine, whose prefix cache is empty."""
    tokens = prompt(500, seed=54)
    _, prefilled = fleet.prefill("small", tokens)
    first = fleet["large"].run(fleet.name("first"), tokens, 12, prefilled.params)
    again = fleet.name("again")
    fleet.kill("large")
    fleet.start("large")
    fleet["large"].submit(again, tokens, 12, prefilled.params)
    second = fleet["large"].result(again, SOON_S)
    assert (first.cached, second.cached) == (len(tokens) - 1, 0)
    assert list(first.tokens) == list(second.tokens) == fleet.alone(tokens, 12)
    assert "code=already_fetched" in fleet.agents["large"][0].text()


def test_a_prefill_agent_replaced_between_the_legs_costs_a_recomputation_at_once(fleet: Fleet) -> None:
    fleet.crossed("small", "large", prompt(60, seed=55))
    tokens = prompt(300, seed=56)
    _, prefilled = fleet.prefill("small", tokens)
    assert fleet.agents["small"][0].stop() == 0
    fleet.start_agents("small")
    wait_for(lambda: fleet.agents["small"][0].status.engine is not None, 10.0)
    request = fleet.name("late")
    fleet["large"].submit(request, tokens, 12, prefilled.params)
    answer = fleet["large"].result(request, SOON_S)
    assert answer.cached == 0 and list(answer.tokens) == fleet.alone(tokens, 12)
    assert "code=started_after_it_was_offered" in fleet.agents["large"][0].text()
    fleet["small"].wait_empty()


@pytest.mark.proves("G20")
def test_an_agent_killed_in_mid_transfer_costs_a_recomputation_and_nothing_else(fleet: Fleet) -> None:
    tokens = prompt(900, seed=60)
    request = fleet.name("orphan")
    fleet["large"].submit(request, tokens, 12, fleet.fetched("small", "later"))
    time.sleep(0.5)
    assert fleet.agents["large"][0].status.transfers
    fleet.agents["large"][0].kill()
    answer = fleet["large"].result(request)
    assert answer.cached == 0 and list(answer.tokens) == fleet.alone(tokens, 12)
    fleet.start_agents("large")
    wait_for(lambda: fleet.agents["large"][0].status.engine is not None, 3.0)
    answer, ours, theirs = fleet.crossed("small", "large", prompt(200, seed=62))
    assert answer.cached == 199
    assert_carried(ours, theirs)


@pytest.mark.proves("G20")
@pytest.mark.parametrize("side", ["small", "large"])
def test_an_idle_engine_attaches_again_before_the_next_request(fleet: Fleet, side: str) -> None:
    """It makes no step meanwhile; the request that wakes it is carried."""
    fleet.crossed("small", "large", prompt(60, seed=63))
    fleet[side].wait_empty()
    log = fleet.folder / f"{side}.log"
    before = log.read_text().count("lost the agent"), log.read_text().count("kvbridge: attached to")
    time.sleep(1.5)
    fleet.agents[side][0].kill()
    wait_for(lambda: log.read_text().count("lost the agent") > before[0], 1.0)
    time.sleep(1.0)
    fleet.start_agents(side)
    wait_for(lambda: fleet.agents[side][0].status.engine is not None, 3.0)
    assert log.read_text().count("kvbridge: attached to") > before[1]
    answer, ours, theirs = fleet.crossed("small", "large", prompt(200, seed=64 + (side == "small")))
    assert answer.cached == 199
    assert_carried(ours, theirs)


@pytest.mark.proves("G20")
def test_a_dead_prefill_agent_costs_a_recomputation_and_nothing_else(fleet: Fleet) -> None:
    tokens = prompt(400, seed=70)
    _, prefilled = fleet.prefill("large", tokens)
    fleet.agents["large"][0].kill()
    answer = fleet["small"].run(fleet.name("orphan"), tokens, 12, prefilled.params)
    assert answer.cached == 0 and list(answer.tokens) == fleet.alone(tokens, 12)
    fleet["large"].wait_empty()
    result = fleet["large"].run(fleet.name("alive"), tokens, 3)
    assert len(result.tokens) == 3
    fleet.start_agents("large")
    wait_for(lambda: fleet.agents["large"][0].status.engine is not None)


@pytest.mark.proves("G10")
def test_rows_of_the_weights_of_before_are_never_used(fleet: Fleet) -> None:
    """Whichever side has other weights or another name. The last test here: its engines have other weights then."""
    small, large, alone = (fleet[name] for name in ("small", "large", "alone"))
    tokens = [prompt(300, seed=seed) for seed in (77, 78, 79)]
    of_a = fleet.alone(tokens[0], 12)
    params = [fleet.prefill("small", tokens[0])[1].params]
    for engine in (small, large, alone):
        reweigh(engine)
    small.wait_empty(timeout_s=15)  # the held prompt was given up: it would stay for 30 s
    params.append(fleet.prefill("small", tokens[1])[1].params)
    name_weights(small, "B")  # the decode side has no name yet
    params.append(fleet.prefill("small", tokens[2])[1].params)
    answers = [large.run(fleet.name("d"), each, 12, told) for each, told in zip(tokens, params, strict=True)]
    assert [list(each.tokens) for each in answers] == [fleet.alone(each, 12) for each in tokens]
    assert list(answers[0].tokens) != of_a and [each.cached for each in answers] == [0, 0, 0]
    counted = "kvbridge_prompts_computed_here_total{reason=other_weights}"
    wait_for(lambda: fleet.agents["large"][0].status.counters.get(counted) == 3)
    name_weights(large, "B")
    assert_same_as_alone(fleet, "small", "large", prompt(300, seed=80))
