"""Layers of two engines that number them differently, or that have some the other has not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
from kvbridge_proto.pool import Plane, Pool

from kvbridge.geometry.compat import Convertible, Incompatible, Same, verdict
from kvbridge.geometry.layers import align
from kvbridge.geometry.plan import plan
from kvbridge.geometry.shard import assign, common
from tests.support.oracle import Shape, build, describe, fill, places_of, rows, run, tables_of, take_rows
from tests.support.pools import Held

SHAPE = Shape(layers=4)
change = msgspec.structs.replace
NEEDS = "needs every layer of the decode side on the prefill side"


def named(pool: Pool, names: dict[int, str]) -> Pool:
    return change(pool, planes=tuple(change(plane, name=names.get(plane.layer, "")) for plane in pool.planes))


def renumbered(pool: Pool, numbers: dict[int, int], layers: int) -> Pool:
    """The pool with its layers under these numbers, in a model of so many."""
    kept = [None] * layers
    for old, new in numbers.items():
        kept[new] = pool.model.layers[old]
    planes = tuple(change(p, layer=numbers[p.layer]) for p in pool.planes if p.layer in numbers)
    return change(pool, planes=planes, model=change(pool.model, layers=tuple(kept)))


MODEL = {0: "layers.0", 1: "layers.1", 2: "layers.2"}
DRAFT = {**MODEL, 3: "draft.0"}


def test_equal_numbers_need_nothing() -> None:
    pool, other = describe(SHAPE), describe(replace(SHAPE, layout="hnd"))
    assert align(pool, other) is pool
    assert align(named(pool, DRAFT), other) == named(pool, DRAFT)
    assert align(pool, named(other, DRAFT)) is pool


def test_uneven_splits() -> None:
    """A rank of a pipeline knows some names only, and none of the other ranks' layers."""
    stages = [named(describe(replace(SHAPE, pp_size=2, pp_layers=(3, 1)), pp_rank=rank), DRAFT) for rank in range(2)]
    for source in stages:
        for sink in (*stages, named(describe(SHAPE), DRAFT)):
            assert align(source, sink) is source
            assert not isinstance(verdict(source, sink), Incompatible)


def test_a_draft_layer_is_matched_by_name_under_another_number() -> None:
    source = named(describe(SHAPE), DRAFT)
    sink = renumbered(named(describe(SHAPE), DRAFT), {0: 0, 1: 1, 2: 2, 3: 5}, 6)
    found = align(source, sink)
    assert [(plane.layer, plane.part, plane.name) for plane in found.planes[-2:]] == [
        (5, "k", "draft.0"),
        (5, "v", "draft.0"),
    ]
    assert [layer is not None for layer in found.model.layers] == [True, True, True, False, False, True]
    assert not isinstance(verdict(source, sink), Incompatible)
    back = align(sink, source)
    assert [plane.layer for plane in back.planes] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert back.model == source.model


def test_two_layers_that_changed_places_are_found() -> None:
    source = named(describe(SHAPE), DRAFT)
    sink = renumbered(source, {0: 1, 1: 0, 2: 2, 3: 3}, 4)
    assert [plane.layer for plane in align(source, sink).planes] == [1, 1, 0, 0, 2, 2, 3, 3]


def test_a_prefill_only_layer_is_left_out() -> None:
    source, sink = named(describe(SHAPE), DRAFT), named(describe(replace(SHAPE, layers=3)), MODEL)
    assert verdict(source, sink) == Convertible(("layers: source 4, sink 3 and takes its own",))
    assert verdict(sink, sink) == Same()


def test_refuses_a_sink_with_a_layer_more() -> None:
    source, sink = describe(replace(SHAPE, layers=3)), describe(SHAPE)
    assert verdict(source, sink) == Incompatible((f"layers: source 3, sink 4 (layer 3); {NEEDS}",))
    source, sink = named(source, MODEL), named(sink, DRAFT)
    assert verdict(source, sink) == Incompatible((f"layers: source 3, sink 4 (layer 3 draft.0); {NEEDS}",))


def test_a_number_is_no_match_where_its_name_is_another_layers() -> None:
    """The source's layer 2 is what the sink calls 3; the sink's own 2 nobody has."""
    source = named(describe(replace(SHAPE, layers=3)), {0: "layers.0", 1: "layers.1", 2: "draft.0"})
    found = verdict(source, named(describe(SHAPE), DRAFT))
    assert found == Incompatible((f"layers: source 3, sink 4 (layer 2 layers.2); {NEEDS}",))


def test_kinds_of_the_same_name_must_agree() -> None:
    source = named(describe(SHAPE), DRAFT)
    wide = replace(SHAPE, key_width=16)
    sink = renumbered(named(describe(wide), DRAFT), {0: 0, 1: 1, 2: 2, 3: 5}, 6)
    found = verdict(source, sink)
    assert isinstance(found, Incompatible)
    assert found.reasons[0] == "key_width: source 8, sink 16 (layer 0 and 3 more); needs the same model on both sides"


def test_a_plan_takes_the_planes_of_the_same_name() -> None:
    source = named(describe(SHAPE), DRAFT)
    sink = renumbered(named(describe(replace(SHAPE, layout="hnd")), DRAFT), {0: 0, 1: 1, 2: 2, 3: 5}, 6)
    (takes,) = assign([source], sink)
    assert takes == common(source, sink)
    assert [(take.first_layer, take.end_layer) for take in takes] == [(0, 3), (5, 6)]
    strips = plan(source, sink, takes, 0, 40, 1 << 16).strips
    draft = [plane for plane in source.planes if plane.name == "draft.0"]
    assert [(strip.source.region, strip.source.offset) for strip in strips if strip.sink.layer == 5] == [
        (plane.region, plane.offset) for plane in draft
    ]


def test_rows_go_to_the_layer_of_the_same_name() -> None:
    source = build(SHAPE)
    source = Held(named(source.pool, DRAFT), source.memory)
    sink = build(replace(SHAPE, layout="hnd", block_tokens=32))
    numbers = {0: 1, 1: 0, 2: 2, 3: 5}
    sink = Held(renumbered(named(sink.pool, DRAFT), numbers, 6), sink.memory)
    ours, theirs = tables_of(source.pool, 50, 1), tables_of(sink.pool, 50, 2)
    fill(source, ours, range(50))
    (takes,) = assign([source.pool], sink.pool)
    run(plan(source.pool, sink.pool, takes, 0, 50, 1 << 12), source, ours, sink, theirs)
    origins = {(plane.name, plane.part): plane for plane in source.pool.planes}
    for plane in sink.pool.planes:
        found = take_rows(sink, plane, places_of(theirs[0], range(50), 32))
        assert np.array_equal(found, rows(origins[plane.name, plane.part], range(50)))


class Counted(tuple[Plane, ...]):
    """Planes that count how often somebody goes through all of them."""

    walks = 0

    def __iter__(self) -> Iterator[Plane]:
        self.walks += 1
        return super().__iter__()


def counted(pool: Pool) -> tuple[Pool, Counted]:
    planes = Counted(pool.planes)
    return change(pool, planes=planes), planes


def test_a_sink_is_read_as_often_for_many_sources_as_for_one() -> None:
    walks = []
    for ranks in (1, 4):
        shape = replace(SHAPE, tp_size=ranks)
        sources = [named(describe(shape, rank), DRAFT) for rank in range(ranks)]
        sink, planes = counted(named(describe(SHAPE), DRAFT))
        assign(sources, sink)
        walks.append(planes.walks)
    assert walks[0] == walks[1] > 0


def test_a_source_is_read_as_often_for_many_holdings_as_for_one() -> None:
    """Layers of other heads, one after another, are a holding each."""
    walks = []
    for layers in (1, 6):
        pool = describe(replace(SHAPE, layers=layers))
        planes = tuple(change(plane, heads=1 + plane.layer % 2) for plane in pool.planes)
        sink = change(pool, planes=planes)
        source, read = counted(sink)
        assert len(common(source, sink)) == layers
        walks.append(read.walks)
    assert walks[0] == walks[1] > 0
