"""The key of a model: equal if KV can be carried, different for different models. And traits fit for labels."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import msgspec
import pytest

from kvbridge.geometry.compat import Incompatible, verdict
from kvbridge.geometry.plan import plan
from kvbridge.geometry.shard import assign
from kvbridge.geometry.traits import MOST_VALUE, model_key, prompt_size, traits
from testing.pools import Shape, build_all, mla

BASE = Shape("nhd", layers=4)
ALIKE = [
    BASE,
    *(replace(BASE, layout=layout) for layout in ("hnd", "packed", "cross_layer", "cpu_vec")),
    *(replace(BASE, block_tokens=size) for size in (1, 64)),
    *(replace(BASE, tp_size=size) for size in (2, 4)),
    replace(BASE, pp_size=2),
    replace(BASE, codec="fp8_e4m3"),
    replace(BASE, kinds=("full", "sliding"), window=64),
    replace(BASE, kinds=("sliding",), window=64),
]
OTHERS = [
    replace(BASE, kv_heads=8),
    replace(BASE, key_width=16),
    replace(BASE, value_width=16),
    replace(BASE, model="another"),
    mla(layers=4),
]


def test_what_can_be_carried_has_one_key_on_every_rank() -> None:
    carried = 0
    for one, other in itertools.product(ALIKE, ALIKE):
        for sender, receiver in itertools.product(build_all(one), build_all(other)):
            if not isinstance(verdict(sender.pool, receiver.pool), Incompatible):
                assert model_key(sender.pool) == model_key(receiver.pool), (one, other)
                carried += 1
    assert carried > 200


def test_other_models_have_other_keys() -> None:
    keys = [{model_key(held.pool) for held in build_all(shape)} for shape in (BASE, *OTHERS)]
    assert all(len(each) == 1 for each in keys) and len(set.union(*keys)) == len(keys)
    for other in OTHERS:
        sender, receiver = build_all(BASE)[0].pool, build_all(other)[0].pool
        assert isinstance(verdict(sender, receiver), Incompatible)


def test_traits_are_of_all_ranks_and_can_be_labels() -> None:
    for shape in ALIKE:
        (said,) = {traits(held.pool) for held in build_all(shape)}
        for value in map(str, msgspec.to_builtins(said).values()):
            assert re.fullmatch(r"[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?", value) and len(value) <= MOST_VALUE, value
    assert traits(build_all(replace(BASE, tp_size=2))[0].pool).tp_size == 2
    windowed = replace(BASE, kinds=("full", "sliding"), window=64, group_tokens={"sliding": 32})
    assert traits(build_all(windowed)[0].pool).block_tokens == "16_32"


@pytest.mark.parametrize(
    "shape",
    [
        *ALIKE,
        mla(layers=4),
        replace(BASE, kinds=("full", "sliding"), window=32, codec="int8_row_scale"),
        replace(BASE, cp_size=2),
    ],
)
def test_the_size_of_prompts_is_that_of_what_travels(shape: Shape) -> None:
    for held in build_all(shape):
        pool, size = held.pool, prompt_size(held.pool)
        all_ranks = [each.pool for each in build_all(shape)]
        taken = list(zip(all_ranks, assign(all_ranks, pool), strict=True))
        short, long = (
            sum(plan(each, pool, takes, 0, tokens, 1 << 20).total_bytes for each, takes in taken)
            for tokens in (1024, 2048)
        )
        assert long - short == 1024 * size.token_bytes
        assert long == 2048 * size.token_bytes + size.prompt_bytes
        keeps_all = "full" in shape.kinds
        assert size.tokens == keeps_all * shape.blocks * shape.block_tokens * shape.cp_size


def test_groups_of_the_same_memory_share_its_blocks() -> None:
    """As vLLM's do, where layers that keep all tokens outnumber the others."""
    pool = build_all(BASE)[0].pool
    first = [plane for plane in pool.planes if plane.layer == 0]
    second = [msgspec.structs.replace(plane, layer=1, group=1) for plane in first]
    shared = msgspec.structs.replace(pool, groups=pool.groups * 2, planes=(*first, *second))
    assert prompt_size(shared).tokens == BASE.blocks // 2 * BASE.block_tokens
