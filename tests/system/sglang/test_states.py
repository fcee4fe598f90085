"""Real SGLang servers of models with states beside attention: states and rows, and what is said from them.

Of Gated DeltaNet, and of short convolutions alone (LFM2).

SGLang's prefix cache of states takes pages of one token on a CPU, and no other.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest

from testing.kept import kept
from testing.waiting import wait_for
from tests.system.engines.states import CONV_ROWS, of_one_rank
from tests.system.sglang.fleet import Answer, Fleet, assert_idle, prompt
from tests.system.sglang.halfway import Interrupted, Pair
from tests.system.sglang.rows import assert_carried
from tests.system.sglang.server import ServerConfig
from tests.system.sglang.states import ENVIRONMENT, write, write_convolutions

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

MOST = ("--max-mamba-cache-size", "40")  # slots: by its own reckoning it would take a third of the memory
CACHING = (*MOST, "--mamba-radix-cache-strategy", "no_buffer")
PREFILL = ServerConfig("prefill", keeps_prefixes=False, flags=MOST, environment=ENVIRONMENT)
DECODE = replace(PREFILL, role="decode")
# Takes running requests out every few steps, and puts them back.
RETRACTS = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
SERVERS = {
    "p16": PREFILL,
    "p1-caching": replace(PREFILL, page_size=1, keeps_prefixes=True, flags=CACHING),
    "p32-two": replace(PREFILL, page_size=32, tensor_parallel_size=2),
    "d64": replace(DECODE, page_size=64, environment=ENVIRONMENT | RETRACTS),
    "d1-caching": replace(DECODE, page_size=1, keeps_prefixes=True, flags=CACHING),
    "d16-two": replace(DECODE, tensor_parallel_size=2),
    "alone": replace(PREFILL, role="alone"),
}
LENGTHS = [1, 2, CONV_ROWS, CONV_ROWS + 1, CONV_ROWS + 2, 15, 16, 17, 63, 64, 65, 257, 300, 600]

states = kept(Fleet, write=write, others=SERVERS, start=("p16", "d64", "alone"))
convolutions = kept(Fleet, write=write_convolutions, others=SERVERS, start=("p16", "d64", "alone"))


@dataclass(frozen=True)
class StatePair(Pair):
    """`crossed` compares rows, states and tokens. A slot has so many `parts`."""

    parts: int = 3 * 4

    def crossed(self, tokens: list[int]) -> Answer:
        ((room, answer),) = self.fleet.ask(self.sender, self.receiver, [tokens])
        self.check(room)
        self.fleet.assert_same_as_alone(tokens, answer)
        return answer

    def check(self, room: int) -> None:
        assert_carried(*self.fleet.rows(self.sender, self.receiver, room))
        ours, theirs = self.of("prefill", self.sender, room), self.of("decode", self.receiver, room)
        assert ours.keys() == theirs.keys() and len(ours) == self.parts
        for key, each in ours.items():
            assert each.any(), f"{key}: zeros"
            assert np.array_equal(each, theirs[key]), key

    def of(self, side: str, name: str, room: int) -> dict[str, np.ndarray]:
        """The state as one rank would have it."""
        ranks = range(self.fleet.configs[name].ranks)
        paths = [self.fleet.kept / f"{side}-states-{room}-{rank}.npz" for rank in ranks]
        for path in paths:
            wait_for(path.exists, 20)
        return of_one_rank([dict(np.load(path)) for path in paths])


@pytest.fixture
def pair(states: Fleet) -> StatePair:
    return StatePair(states, "p16", "d64")


@pytest.mark.parametrize("length", LENGTHS)
def test_decodes_from_the_state_that_another_server_left(pair: StatePair, length: int) -> None:
    """From 257 tokens on the prompt is computed in chunks. Running requests are taken out and put back."""
    pair.crossed(prompt(length, seed=length))


def test_many_at_once_while_requests_are_taken_out_and_put_back(pair: StatePair) -> None:
    """Slots are used again and again: whoever wrote one too early would change another's state or tokens."""
    prompts = [prompt(20 + 13 * i, seed=3000 + i) for i in range(12)]
    with ThreadPoolExecutor(12) as pool:
        said = list(pool.map(lambda each: pair.fleet.ask(pair.sender, pair.receiver, [each])[0], prompts))
    for tokens, (room, answer) in zip(prompts, said, strict=True):
        pair.check(room)
        pair.fleet.assert_same_as_alone(tokens, answer)
    assert "Testing retraction. #retracted_reqs: 1" in pair.fleet[pair.receiver].text()
    assert_idle(pair.fleet, pair.sender, pair.receiver)


class TestInterrupted(Interrupted):
    pass


@pytest.mark.parametrize(("sender", "receiver"), [("p32-two", "d64"), ("p16", "d16-two")])
def test_every_rank_gets_its_heads(states: Fleet, sender: str, receiver: str) -> None:
    for length in (1, CONV_ROWS + 1, 65, 300):
        StatePair(states, sender, receiver).crossed(prompt(length, seed=4000 + length + (sender == "p16")))
    assert_idle(states, sender, receiver)


def test_prefixes_that_either_side_has(states: Fleet) -> None:
    """The prefix cache has copies of states, which do not travel. The decode side's may have all of a prompt."""
    pair = StatePair(states, "p1-caching", "d1-caching")
    head = prompt(120, seed=5000)
    first = pair.crossed(head)
    more = pair.crossed(head + prompt(30, seed=5001))
    assert more.cached, "the prefill side had nothing of it"
    grown = head + list(first.tokens[:-1])
    for tokens in (grown, grown + prompt(9, seed=5002)):  # rows of the answer are those that each side computed itself
        ((_, answer),) = states.ask(pair.sender, pair.receiver, [tokens])
        states.assert_same_as_alone(tokens, answer)
    assert_idle(states, pair.sender, pair.receiver)


@pytest.mark.parametrize(("sender", "receiver"), [("p16", "d64"), ("p32-two", "d64"), ("p16", "d16-two")])
def test_a_convolution_alone_comes_to_other_pages_and_ranks(convolutions: Fleet, sender: str, receiver: str) -> None:
    of = StatePair(convolutions, sender, receiver, parts=3)
    for length in (1, 2, 3, 4, 16, 65, 300):
        of.crossed(prompt(length, seed=6000 + length + 7 * len(sender + receiver)))
    assert_idle(convolutions, sender, receiver)
