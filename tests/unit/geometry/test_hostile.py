"""A peer's pool may be anything that the wire allows: its cost stays in proportion to its size."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from kvbridge_proto.common import MAX_RANKS, Blocks, Rank
from kvbridge_proto.engine import Directory, ToAgent
from kvbridge_proto.framing import BadFrame, decode, encode
from kvbridge_proto.pool import Group, Pool
from msgspec.structs import replace

from kvbridge.geometry.compat import Convertible, Same, check_pool, verdict
from kvbridge.geometry.plan import Planner
from kvbridge.geometry.shard import assign
from kvbridge.geometry.tokens import BlockTable
from testing.pools import Shape, describe

pytestmark = pytest.mark.proves("G25")


@pytest.mark.parametrize("block_tokens", [1 << 31, 1 << 40])
@pytest.mark.parametrize("is_sender", [True, False])
def test_a_group_of_huge_blocks_costs_no_table_of_states(block_tokens: int, is_sender: bool) -> None:
    ours = describe(Shape(kinds=("state", "full")))
    theirs = replace(ours, groups=(*ours.groups, Group(kind="full", block_tokens=block_tokens, blocks=1)))
    assert verdict(ours, theirs) == Same()
    pools = (ours, theirs) if is_sender else (theirs, ours)
    assert Planner(*pools).samples(1 << 20, is_sender) == []


def test_a_huge_block_costs_no_more_than_the_tokens_asked_for() -> None:
    group = Group(kind="full", block_tokens=1 << 24, blocks=4)
    table = BlockTable.of(group, Blocks(0, 7, (3, 1)))
    first = 8 * (1 << 24)
    tracemalloc.start()
    found = table.places(first - 2, first + 2)
    assert tracemalloc.get_traced_memory()[1] < 1 << 16
    tracemalloc.stop()
    assert found.tolist() == [(4 << 24) - 2, (4 << 24) - 1, 1 << 24, (1 << 24) + 1]
    assert table.places(first, first + 3, 2).tolist() == [1 << 23, (1 << 23) + 1]


def test_layers_that_all_have_other_parts_are_assigned_in_no_time() -> None:
    """Found quadratic: 1.5 s for each such sender."""
    ours = describe(Shape())
    layer, plane = ours.model.layers[0], ours.planes[0]
    more = tuple(replace(plane, layer=index, part=f"part {index}") for index in range(2, 4096))
    model = replace(ours.model, layers=(layer,) * 4096)
    theirs = replace(ours, model=model, planes=(*ours.planes, *more))
    assert isinstance(verdict(theirs, ours), Convertible)
    began = time.process_time()
    takes = assign([theirs] * 4, ours)
    assert time.process_time() - began < 2
    assert [len(each) for each in takes] == [1, 0, 0, 0]


def test_a_plane_has_one_reason_for_all_its_bad_scales() -> None:
    """Found to make four million sentences, 544 MiB, out of one Hello."""
    ours = describe(Shape(codec="fp8_e4m3"))
    planes = tuple(replace(plane, codec=replace(plane.codec, scales=(0.0,) * 4096)) for plane in ours.planes)
    reasons = check_pool(replace(ours, planes=planes))
    assert sum("finite number" in reason for reason in reasons) == len(planes) and "more" not in reasons[-1]


def test_refuses_more_ranks_than_links() -> None:
    ours = describe(Shape())
    many = replace(ours, shard=replace(ours.shard, tp_size=MAX_RANKS // 2, pp_size=3))
    (reason,) = check_pool(many)
    assert "1536 ranks, at most 1024" in reason
    assert not check_pool(replace(ours, shard=replace(ours.shard, tp_size=MAX_RANKS)))
    rank = Rank(tp_rank=0, pp_rank=0, address="x")
    assert decode(encode(Directory(ranks=(rank,) * MAX_RANKS)), ToAgent)
    with pytest.raises(BadFrame, match="ranks"):
        decode(encode(Directory(ranks=(rank,) * (MAX_RANKS + 1))), ToAgent)


def test_a_pool_of_a_frame_full_of_planes_is_judged_soon() -> None:
    ours: Pool = describe(Shape())
    theirs = replace(ours, planes=tuple(replace(ours.planes[0], layer=9, part=str(index)) for index in range(25_000)))
    began = time.process_time()
    reasons = check_pool(theirs)
    assert time.process_time() - began < 2 and "more" in reasons[-1]
