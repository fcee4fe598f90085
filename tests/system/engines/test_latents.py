"""Real engines of a model that keeps a latent: every rank gets every byte of it."""

from __future__ import annotations

import pytest

from testing.kept import kept
from tests.system.engines.fleet import Fleet, prompt
from tests.system.engines.kinds import LATENT, ROPE, write_latent
from tests.system.sglang.rows import assert_carried

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

# By itself vLLM takes AMX_MLA where the processor has AMX, and that one takes bf16 weights only.
BACKEND = "CPU_MLA"


latents = kept(
    Fleet, dtype="float32", write=write_latent, more={"attention_backend": BACKEND}, start=("sixteen", "two-sixteen")
)


@pytest.mark.parametrize(("sender", "receiver"), [("sixteen", "two-sixteen"), ("two-sixteen", "sixteen")])
@pytest.mark.parametrize("length", [2, 17, 300])
def test_every_rank_gets_the_latent_whatever_the_number_of_ranks(
    latents: Fleet, sender: str, receiver: str, length: int
) -> None:
    """Rows only: of a model with latents vLLM's CPU backend says other tokens when it computes the last token of the
    prompt alone, as one that fetched the rest does, than when it computes it with the others; without us, too."""
    tokens = prompt(length, seed=length + 1 + (sender == "sixteen"))
    answer, ours, theirs = latents.crossed(sender, receiver, tokens)
    assert answer.cached == len(tokens) - 1, "the prompt did not travel, it was computed again"
    assert_carried(ours, theirs)
    assert {part for _, part in ours.rows} == {"latent"} and all(rows.any(axis=2).all() for rows in ours.rows.values())
    assert {rows.shape[1] for rows in ours.rows.values()} == {1}
    assert {rows.shape[2] for rows in ours.rows.values()} == {4 * (LATENT + ROPE)}


@pytest.mark.parametrize("name", ["sixteen", "two-sixteen"])
def test_its_pools_are_known_before_it_starts(latents: Fleet, name: str) -> None:
    latents.assert_known_beforehand(name)
