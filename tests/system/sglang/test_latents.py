"""Real SGLang servers of a model that keeps a latent: every rank gets every byte of it."""

from __future__ import annotations

from functools import partial

import pytest

from demo.model import LAYERS
from testing.kept import kept
from tests.system.engines.kinds import LATENT, ROPE, write_latent
from tests.system.sglang.fleet import Fleet, assert_rows_come

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

# SGLang has no rotary embedding for a latent on a CPU but this one.
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
YARN |= {"mscale": 0.707, "mscale_all_dim": 0.707}


latents = kept(Fleet, write=partial(write_latent, rope_scaling=YARN))


@pytest.mark.parametrize(
    ("sender", "receiver"), [("p16", "d16"), ("p16-two", "d16"), ("p16", "d16-two"), ("p16", "d64-bf16")]
)
def test_every_rank_gets_the_latent(latents: Fleet, sender: str, receiver: str) -> None:
    latent = {(layer, "latent"): (1, 4 * (LATENT + ROPE)) for layer in range(LAYERS)}
    assert_rows_come(latents, sender, receiver, (1, 17, 300), latent)
