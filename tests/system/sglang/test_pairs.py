"""Real SGLang servers that differ: the rows that arrive are the reference conversion of those that were sent.

If both sides keep KV as the prefill server computed it, tokens equal those of a single server.
"""

from __future__ import annotations

import pytest

from testing.kept import kept
from tests.system.sglang.fleet import Fleet, assert_idle, assert_says_the_same, assert_sixteen_at_once, prompt, seed_of
from tests.system.sglang.rows import assert_carried

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

LENGTHS = (1, 15, 16, 17, 64, 300, 700)


fleet = kept(Fleet, start=("p16", "d16", "p16-two", "d32", "alone"))


# Pipeline stages of one side are nothing to the other.
@pytest.mark.parametrize(
    ("sender", "receiver"),
    [("p16", "d16"), ("p16-two", "d16"), ("p16", "d32"), ("p16-stages", "d16"), ("p16", "d16-stages")],
)
def test_says_what_one_server_alone_says(fleet: Fleet, sender: str, receiver: str) -> None:
    assert_says_the_same(fleet, sender, receiver, LENGTHS)


@pytest.mark.parametrize("length", [257, 512, 513, 1500])
def test_a_prompt_that_is_computed_in_chunks(fleet: Fleet, length: int) -> None:
    tokens = prompt(length, seed=4000 + length)
    before = fleet["p16"].text().count("Prefill batch")
    (answer,) = fleet.crossed("p16", "d32", tokens)
    assert fleet["p16"].text().count("Prefill batch") - before >= -(-length // 256)
    fleet.assert_same_as_alone(tokens, answer)


@pytest.mark.parametrize(("sender", "receiver"), [("p16", "d16"), ("p16", "d32"), ("p16-two", "d16")])
def test_a_prefix_that_the_decoding_side_has_does_not_travel(fleet: Fleet, sender: str, receiver: str) -> None:
    head = prompt(256, seed=seed_of(sender, receiver, 50))
    first, second = head + prompt(90, seed=6), head + prompt(120, seed=7)
    fleet.crossed(sender, receiver, first)
    before = fleet.moved_bytes(receiver)
    (answer,) = fleet.crossed(sender, receiver, second)
    moved = fleet.moved_bytes(receiver) - before
    fleet.assert_same_as_alone(second, answer)
    row = 4 * 2 * 4 * 128  # layers, parts, heads, bytes
    assert 0 < moved < (len(second) - 256 + 32) * row, f"{moved} bytes moved: the prefix travelled too"


def test_a_prefix_that_the_prefilling_side_has_is_carried_as_well(fleet: Fleet) -> None:
    """It is sent early, before the rest is computed."""
    head = prompt(300, seed=4100)
    fleet.crossed("p16", "d16", head)
    tokens = head + prompt(200, seed=4101)
    (answer,) = fleet.crossed("p16", "d32", tokens)
    fleet.assert_same_as_alone(tokens, answer)


@pytest.mark.parametrize(("sender", "receiver"), [("p16", "d16"), ("p16", "d32"), ("p16-two", "d16")])
def test_sixteen_requests_at_once(fleet: Fleet, sender: str, receiver: str) -> None:
    assert_sixteen_at_once(fleet, sender, receiver)


def test_a_batch_has_a_room_for_each_of_its_prompts(fleet: Fleet) -> None:
    prompts = [prompt(30 + 50 * i, seed=4200 + i) for i in range(8)]
    for tokens, answer in zip(prompts, fleet.crossed("p16", "d32", *prompts), strict=True):
        fleet.assert_same_as_alone(tokens, answer)
    assert_idle(fleet, "p16", "d32")


def test_one_prompt_several_times_in_one_request(fleet: Fleet) -> None:
    """As a router asks for n > 1: the prompt as often, each with a room of its own."""
    tokens = prompt(200, seed=4300)
    answers = fleet.crossed("p16", "d16", *[tokens] * 4)
    for answer in answers:
        fleet.assert_same_as_alone(tokens, answer)
    assert_idle(fleet, "p16", "d16")


# The last ones: their servers are of no use to others, and push those out.
@pytest.mark.parametrize(("sender", "receiver"), [("p16", "d16-two"), ("p32", "d16"), ("p1", "d64")])
def test_says_the_same_whatever_the_two_disagree_on(fleet: Fleet, sender: str, receiver: str) -> None:
    assert_says_the_same(fleet, sender, receiver, LENGTHS)


@pytest.mark.parametrize(
    ("sender", "receiver", "codecs"),
    [("p16", "d16-bf16", ("fp32", "bf16")), ("p16-bf16", "d16-fp8", ("bf16", "fp8_e4m3"))],
)
def test_rows_are_converted_on_the_way(fleet: Fleet, sender: str, receiver: str, codecs: tuple[str, str]) -> None:
    for length in LENGTHS:
        ((room, answer),) = fleet.ask(sender, receiver, [prompt(length, seed=seed_of(sender, receiver, length))])
        given, taken = fleet.rows(sender, receiver, room)
        assert (given.codec, taken.codec) == codecs
        assert_carried(given, taken)
        assert len(set(answer.tokens)) > 3, answer
    assert_idle(fleet, sender, receiver)
