"""Real SGLang servers with Gated DeltaNet that draft by the model's own module (NEXTN), one token in a step.

The module's weights are seeded: its guesses are nearly all rejected, so each step goes back to a state before.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from testing.kept import kept
from tests.system.engines.drafts import repetitive
from tests.system.engines.states import CONV_ROWS, GATED
from tests.system.sglang.drafting import VARIABLE
from tests.system.sglang.fleet import Answer, Fleet, assert_idle
from tests.system.sglang.rows import SavedRows, assert_carried
from tests.system.sglang.states import ENVIRONMENT, write
from tests.system.sglang.test_states import DECODE, MOST, PREFILL, RETRACTS, StatePair

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

DRAFTS = (
    *(*MOST, "--speculative-algorithm", "NEXTN", "--speculative-num-steps", "1"),
    *("--speculative-num-draft-tokens", "2", "--speculative-eagle-topk", "1"),
)
TOLD = ENVIRONMENT | {VARIABLE: "1"}
LAYERS = GATED["num_hidden_layers"]
SERVERS = {
    "p16": PREFILL,
    "d64": replace(DECODE, page_size=64),
    "p16-drafts": replace(PREFILL, flags=DRAFTS, environment=TOLD),
    "d64-drafts": replace(DECODE, page_size=64, flags=DRAFTS, environment=TOLD | RETRACTS),
    "d16-two-drafts": replace(DECODE, tensor_parallel_size=2, flags=DRAFTS, environment=TOLD),
    "alone-drafts": replace(PREFILL, role="alone", flags=DRAFTS, environment=TOLD),
}
LENGTHS = [1, 2, CONV_ROWS, CONV_ROWS + 1, 16, 63, 64, 65, 300]


class Drafting(Fleet):
    def body(self, sender: str, *args: object, **more: object) -> dict[str, object]:
        """Without probabilities, which are not told of drafts."""
        return super().body(sender, *args, **{"return_logprob": False, "top_logprobs_num": 0} | more)  # type: ignore[arg-type]


drafting = kept(
    Drafting,
    write=lambda folder: write(folder, {"num_nextn_predict_layers": 1}),
    others=SERVERS,
    start=("p16-drafts", "d64-drafts", "alone-drafts"),
)


class DraftedPair(StatePair):
    """`crossed` compares states, rows with the module's, and tokens with those of one server that drafts."""

    def crossed(self, tokens: list[int]) -> Answer:
        ((room, answer),) = self.fleet.ask(self.sender, self.receiver, [tokens])
        self.check(room)
        body = self.fleet.body("alone-drafts", tokens, None, bootstrap_host=None, bootstrap_port=None)
        status, said = self.fleet["alone-drafts"].generate(body)
        assert status == 200 and said["meta_info"]["spec_num_proposed_drafts"], said
        assert tuple(said["output_ids"]) == answer.tokens
        return answer

    def check(self, room: int) -> None:
        given, taken = self.fleet.rows(self.sender, self.receiver, room)
        for side, name in ((given, self.sender), (taken, self.receiver)):
            assert {layer for layer, _ in side.rows} == {LAYERS - 1, LAYERS - ("drafts" not in name)}
        if "drafts" in self.receiver and "drafts" not in self.sender:
            module = {key: rows for key, rows in taken.rows.items() if key[0] == LAYERS}
            assert module and not any(rows.any() for rows in module.values())
        both = given.rows.keys() & taken.rows.keys()
        assert_carried(*(SavedRows({key: side.rows[key] for key in both}, side.codec) for side in (given, taken)))
        ours, theirs = self.of("prefill", self.sender, room), self.of("decode", self.receiver, room)
        assert ours.keys() == theirs.keys() and len(ours) == 3 * 4
        for key, each in ours.items():
            assert each.any() and np.array_equal(each, theirs[key]), key


@pytest.mark.parametrize("length", LENGTHS)
def test_states_and_the_modules_rows_come_together(drafting: Fleet, length: int) -> None:
    """Running requests are taken out and put back."""
    DraftedPair(drafting, "p16-drafts", "d64-drafts").crossed(repetitive(length, seed=length))
    assert_idle(drafting, "p16-drafts", "d64-drafts")


@pytest.mark.parametrize(
    ("sender", "receiver"), [("p16", "d64-drafts"), ("p16-drafts", "d64"), ("p16-drafts", "d16-two-drafts")]
)
def test_either_side_may_draft_alone_and_have_other_ranks(drafting: Fleet, sender: str, receiver: str) -> None:
    for length in (1, CONV_ROWS + 1, 65, 300):
        DraftedPair(drafting, sender, receiver).crossed(repetitive(length, seed=1000 + length))
    assert_idle(drafting, sender, receiver)
