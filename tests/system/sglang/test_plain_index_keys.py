"""Real SGLang servers of MiniMax M3: plain index keys travel beside K and V, in the layers that choose blocks.

A stand-in chooses all blocks (plugin.py). SGLang's own writer keeps the rows.
"""

from __future__ import annotations

from functools import partial

import pytest

from demo.model import KV_HEADS, LAYERS
from testing.kept import kept
from tests.system.engines.kinds import write_plain_sparse
from tests.system.sglang.fleet import Fleet, assert_idle, prompt
from tests.system.sglang.halfway import Interrupted, Pair
from tests.system.sglang.rows import assert_carried

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

CHOOSING, WIDTH, FP32 = range(1, LAYERS), 128, 4
# torch.compile, for which a CPU needs a compiler, is off.
CHANGES = {"environment": {"KVBRIDGE_TEST_INDEX_KEYS": "1", "TORCHDYNAMO_DISABLE": "1"}}
write = partial(write_plain_sparse, has_images=False)
minimax = kept(Fleet, write=write, changes=CHANGES)


@pytest.mark.parametrize(("sender", "receiver"), [("p64", "d128"), ("p64", "d16-two"), ("p16-two", "d128")])
def test_every_rank_gets_the_index_keys_and_its_heads_of_k_and_v(minimax: Fleet, sender: str, receiver: str) -> None:
    """What is decoded is what one server alone says."""
    for length in (1, 17, 128, 300):
        tokens = prompt(length, seed=length * 10 + sum(map(ord, sender + receiver)))
        ((room, answer),) = minimax.ask(sender, receiver, [tokens])
        given, taken = minimax.rows(sender, receiver, room)
        assert_carried(given, taken)
        kinds = {(layer, part) for layer in range(LAYERS) for part in "kv"}
        assert set(taken.rows) == kinds | {(layer, "index_key") for layer in CHOOSING}
        for (_, part), rows in given.rows.items():
            assert rows.shape == (length, 1 if part == "index_key" else KV_HEADS, WIDTH * FP32)
        minimax.assert_same_as_alone(tokens, answer)
    assert_idle(minimax, sender, receiver)


def test_prefixes_on_both_sides(minimax: Fleet) -> None:
    head = prompt(300, seed=4000)
    minimax.crossed("p64", "d128", head)
    for more in (1, 90):
        tokens = head + prompt(more, seed=4000 + more)
        (answer,) = minimax.crossed("p64", "d128", tokens)
        minimax.assert_same_as_alone(tokens, answer)


@pytest.fixture
def pair(minimax: Fleet) -> Pair:
    return Pair(minimax, "p64", "d128")


class TestInterrupted(Interrupted):
    pass
