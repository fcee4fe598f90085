"""Real engines of a model with sparse attention: index keys travel beside its latents, in the layers that have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.model import LAYERS
from testing.kept import kept
from tests.system.engines.fleet import Fleet, prompt
from tests.system.engines.halfway import Interrupted, Pairs
from tests.system.engines.index_keys import SCALE, WIDTH
from tests.system.engines.kinds import write_sparse
from tests.system.sglang.rows import assert_carried

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

PLUGIN = Path(__file__).parent / "dsa_plugin"
INDEXED = range(0, LAYERS, 2)


sparse = kept(
    Fleet,
    dtype="float32",
    write=write_sparse,
    more={"attention_backend": "CPU_MLA"},
    environment={"PYTHONPATH": str(PLUGIN)},
    options={"kvbridge_deadline_s": 10},
    start=("sixteen", "two-sixteen"),
)


@pytest.mark.parametrize(("sender", "receiver"), [("sixteen", "two-sixteen"), ("two-sixteen", "sixteen")])
def test_every_rank_gets_the_index_keys_whatever_the_number_of_ranks(sparse: Fleet, sender: str, receiver: str) -> None:
    """Read by the tests' own reader, in every rank: the same bytes as where they were computed."""
    for length in (2, 17, 300):
        tokens = prompt(length, seed=length + 1 + (sender == "sixteen"))
        answer, ours, theirs = sparse.crossed(sender, receiver, tokens)
        assert answer.cached == len(tokens) - 1, "the prompt did not travel, it was computed again"
        assert_carried(ours, theirs)
        assert {layer for layer, part in ours.rows if part == "index_key"} == set(INDEXED)
        assert {layer for layer, part in ours.rows if part == "latent"} == set(range(LAYERS))
        for layer in INDEXED:
            assert ours.rows[layer, "index_key"].shape == (length - 1, 1, WIDTH)
            assert ours.rows[layer, "index_key_scale"].shape == (length - 1, 1, SCALE)


class TestInterrupted(Interrupted):
    @pytest.fixture
    def pairs(self, sparse: Fleet) -> Pairs:
        return Pairs(sparse, ("sixteen", "two-sixteen"), ("two-sixteen", "sixteen"))
