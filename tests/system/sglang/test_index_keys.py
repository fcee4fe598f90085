"""Real SGLang servers of a model with sparse attention: index keys travel beside its latents.

SGLang has no page but one of 64 tokens for it. A stand-in chooses all tokens (plugin.py).
"""

from __future__ import annotations

from functools import partial

import pytest

from demo.model import LAYERS
from testing.kept import kept
from tests.system.engines.kinds import LATENT, ROPE, write_sparse
from tests.system.sglang.fleet import Fleet, assert_prefixes_serve, assert_rows_come
from tests.system.sglang.halfway import Interrupted, Pair
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
    row = {(layer, "latent"): (1, 2 * (LATENT + ROPE)) for layer in range(LAYERS)}
    row |= {
        (layer, part): (1, size) for layer in INDEXED for part, size in (("index_key", 128), ("index_key_scale", 4))
    }
    assert_rows_come(sparse, sender, receiver, (1, 17, 64, 300), row)


def test_prefixes_on_both_sides(sparse: Fleet) -> None:
    assert_prefixes_serve(sparse, "p64", "d64")


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
