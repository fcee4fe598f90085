"""A model that keeps nothing but a latent (MLA) from vLLM to SGLang, and back, with one rank or two on either side.

Every rank has every byte of it. Tokens are compared with SGLang alone, where SGLang decodes: vLLM's CPU backend says
other tokens when it computes the last token of a prompt alone (see engines/test_latents.py).
"""

from __future__ import annotations

from functools import partial

import pytest

from demo.model import LAYERS
from testing.kept import kept
from tests.system.cross.fleet import TOKENS, Cross
from tests.system.engines.kinds import write_latent
from tests.system.engines.test_latents import BACKEND
from tests.system.sglang.fleet import assert_idle, assert_same_tokens, prompt
from tests.system.sglang.rows import SavedRows, assert_carried
from tests.system.sglang.test_latents import YARN

pytestmark = [pytest.mark.cross, pytest.mark.timeout(900)]

latents = kept(
    Cross,
    write=partial(write_latent, rope_scaling=YARN),
    of_vllm={"more": {"attention_backend": BACKEND}, "start": ("sixteen", "two-sixteen")},
    start=("p16", "d16", "alone"),
)
LENGTHS = (2, 17, 300)


@pytest.mark.parametrize(("sender", "receiver"), [("sixteen", "d16"), ("two-sixteen", "d16"), ("sixteen", "d16-two")])
def test_vllm_prefills_and_sglang_decodes(latents: Cross, sender: str, receiver: str) -> None:
    for length in LENGTHS:
        tokens = prompt(length, seed=length + 100 * (sender == "two-sixteen") + 200 * (receiver == "d16-two"))
        answer, given, taken = latents.to_sglang(sender, receiver, tokens)
        assert_came(given, taken)
        assert_same_tokens(latents.sglang.alone(tokens, TOKENS), answer)
    assert_idle(latents.sglang, receiver)
    latents.vllm[sender].wait_empty()


@pytest.mark.parametrize(("sender", "receiver"), [("p16", "sixteen"), ("p16", "two-sixteen"), ("p16-two", "sixteen")])
def test_sglang_prefills_and_vllm_decodes(latents: Cross, sender: str, receiver: str) -> None:
    for length in LENGTHS:
        tokens = prompt(length, seed=500 + length + 100 * (sender == "p16-two") + 200 * (receiver == "two-sixteen"))
        _, cached, given, taken = latents.to_vllm(sender, receiver, tokens)
        assert cached == len(tokens) - 1, "the prompt did not travel, it was computed again"
        assert_came(given, taken)
    assert_idle(latents.sglang, sender)
    latents.vllm[receiver].wait_empty()


def assert_came(given: SavedRows, taken: SavedRows) -> None:
    assert set(taken.rows) == {(layer, "latent") for layer in range(LAYERS)}
    assert_carried(given, taken)
