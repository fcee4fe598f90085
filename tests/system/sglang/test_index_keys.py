"""Real SGLang servers of a model with sparse attention: index keys travel beside its latents.

SGLang has no page but one of 64 tokens for it. A stand-in chooses all tokens (plugin.py).
"""

from __future__ import annotations

from functools import partial

import pytest

from demo.model import LAYERS
from testing.kept import kept
from tests.system.engines.kinds import write_sparse
from tests.system.sglang.fleet import Fleet, assert_idle, prompt
from tests.system.sglang.halfway import Interrupted, Pair
from tests.system.sglang.rows import assert_carried
from tests.system.sglang.server import ServerConfig
from tests.system.sglang.test_latents import YARN

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

INDEXED = range(0, LAYERS, 2)
OTHERS = {
    "p64-replicas": ServerConfig("prefill", page_size=64, tensor_parallel_size=2, data_parallel_size=2),
    "d64-replicas": ServerConfig("decode", page_size=64, tensor_parallel_size=2, data_parallel_size=2),
}
CHANGES = {"kv_cache_dtype": "bfloat16", "environment": {"KVBRIDGE_TEST_INDEX_KEYS": "1"}}
write = partial(write_sparse, rope_scaling=YARN, indexer_rope_interleave=True)
sparse = kept(Fleet, write=write, changes=CHANGES, others=OTHERS)


@pytest.mark.parametrize(("sender", "receiver"), [("p64", "d64"), ("p64", "d64-two"), ("p64-two", "d64")])
def test_every_rank_gets_the_index_keys(sparse: Fleet, sender: str, receiver: str) -> None:
    """Read by the tests' own reading of pages; what is decoded is what one server alone says."""
    for length in (1, 17, 64, 300):
        tokens = prompt(length, seed=length * 10 + sum(map(ord, sender + receiver)))
        ((room, answer),) = sparse.ask(sender, receiver, [tokens])
        given, taken = sparse.rows(sender, receiver, room)
        assert_carried(given, taken)
        assert {layer for layer, part in taken.rows if part == "index_key"} == set(INDEXED)
        assert {layer for layer, part in taken.rows if part == "latent"} == set(range(LAYERS))
        assert {rows.shape[1:] for (_, part), rows in given.rows.items() if part == "index_key"} == {(1, 128)}
        sparse.assert_same_as_alone(tokens, answer)
    assert_idle(sparse, sender, receiver)


def test_prefixes_on_both_sides(sparse: Fleet) -> None:
    head = prompt(200, seed=4000)
    sparse.crossed("p64", "d64", head)
    for more in (1, 90):
        tokens = head + prompt(more, seed=4000 + more)
        (answer,) = sparse.crossed("p64", "d64", tokens)
        sparse.assert_same_as_alone(tokens, answer)


@pytest.fixture
def pair(sparse: Fleet) -> Pair:
    return Pair(sparse, "p64", "d64")


class TestInterrupted(Interrupted):
    pass


# The last one: replicas of SGLang turn without rest.
@pytest.mark.parametrize(("sender", "receiver"), [("p64-replicas", "d64"), ("p64", "d64-replicas")])
def test_every_replica_gives_and_gets_the_index_keys(sparse: Fleet, sender: str, receiver: str) -> None:
    """Rooms that follow each other go to one replica after the other."""
    test_every_rank_gets_the_index_keys(sparse, sender, receiver)
    sparse.kill(sender if receiver == "d64" else receiver)
