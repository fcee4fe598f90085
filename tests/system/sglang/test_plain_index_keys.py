"""Real SGLang servers of MiniMax M3: plain index keys travel beside K and V, in the layers that choose blocks.

A stand-in chooses all blocks (plugin.py). SGLang's own writer keeps the rows.
"""

from __future__ import annotations

from functools import partial

import pytest

from demo.model import KV_HEADS, LAYERS
from testing.kept import kept
from tests.system.engines.kinds import write_plain_sparse
from tests.system.sglang.fleet import Fleet, assert_prefixes_serve, assert_rows_come

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

CHOOSING, WIDTH, FP32 = range(1, LAYERS), 128, 4
# torch.compile, for which a CPU needs a compiler, is off.
CHANGES = {"environment": {"KVBRIDGE_TEST_INDEX_KEYS": "1", "TORCHDYNAMO_DISABLE": "1"}}
write = partial(write_plain_sparse, has_images=False)
minimax = kept(Fleet, write=write, changes=CHANGES)


@pytest.mark.parametrize(("sender", "receiver"), [("p64", "d128"), ("p64", "d16-two"), ("p16-two", "d128")])
def test_every_rank_gets_the_index_keys_and_its_heads_of_k_and_v(minimax: Fleet, sender: str, receiver: str) -> None:
    row = {(layer, part): (KV_HEADS, WIDTH * FP32) for layer in range(LAYERS) for part in "kv"}
    row |= {(layer, "index_key"): (1, WIDTH * FP32) for layer in CHOOSING}
    assert_rows_come(minimax, sender, receiver, (1, 17, 128, 300), row)


def test_prefixes_on_both_sides(minimax: Fleet) -> None:
    assert_prefixes_serve(minimax, "p64", "d128")
