"""Real SGLang servers of a model that keeps a latent: every rank gets every byte of it."""

from __future__ import annotations

from functools import partial

import pytest

from testing.kept import kept
from tests.system.engines.kinds import LATENT, ROPE, write_latent
from tests.system.sglang.fleet import Fleet, assert_idle, prompt
from tests.system.sglang.rows import assert_carried

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

# SGLang has no rotary embedding for a latent on a CPU but this one.
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
YARN |= {"mscale": 0.707, "mscale_all_dim": 0.707}


latents = kept(Fleet, write=partial(write_latent, rope_scaling=YARN))


@pytest.mark.parametrize(
    ("sender", "receiver"), [("p16", "d16"), ("p16-two", "d16"), ("p16", "d16-two"), ("p16", "d64-bf16")]
)
def test_every_rank_gets_the_latent(latents: Fleet, sender: str, receiver: str) -> None:
    for length in (1, 17, 300):
        tokens = prompt(length, seed=length * 100 + sum(map(ord, sender + receiver)))
        ((room, answer),) = latents.ask(sender, receiver, [tokens])
        given, taken = latents.rows(sender, receiver, room)
        assert_carried(given, taken)
        assert {part for _, part in taken.rows} == {"latent"}
        assert {rows.shape[1:] for rows in given.rows.values()} == {(1, 4 * (LATENT + ROPE))}
        if given.codec == taken.codec:
            latents.assert_same_as_alone(tokens, answer)
    assert_idle(latents, sender, receiver)
