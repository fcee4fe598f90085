"""Layers of two engines that number them differently, or of which one has layers that the other lacks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from kvbridge_proto.pool import Pool

from kvbridge.errors import PeerError
from kvbridge.geometry.compat import Convertible, Incompatible, Same, verdict
from kvbridge.geometry.layers import align, unfilled
from kvbridge.geometry.plan import plan
from kvbridge.geometry.shard import assign, common
from testing.oracle import Shape, describe

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
    for sender in stages:
        for receiver in (*stages, named(describe(SHAPE), DRAFT)):
            assert align(sender, receiver) is sender
            assert not isinstance(verdict(sender, receiver), Incompatible)


def test_a_draft_layer_is_matched_by_name_under_another_number() -> None:
    sender = named(describe(SHAPE), DRAFT)
    receiver = renumbered(named(describe(SHAPE), DRAFT), {0: 0, 1: 1, 2: 2, 3: 5}, 6)
    found = align(sender, receiver)
    assert [(plane.layer, plane.part, plane.name) for plane in found.planes[-2:]] == [
        (5, "k", "draft.0"),
        (5, "v", "draft.0"),
    ]
    assert [layer is not None for layer in found.model.layers] == [True, True, True, False, False, True]
    assert not isinstance(verdict(sender, receiver), Incompatible)
    back = align(receiver, sender)
    assert [plane.layer for plane in back.planes] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert back.model == sender.model


def test_two_layers_that_changed_places_are_found() -> None:
    sender = named(describe(SHAPE), DRAFT)
    receiver = renumbered(sender, {0: 1, 1: 0, 2: 2, 3: 3}, 4)
    assert [plane.layer for plane in align(sender, receiver).planes] == [1, 1, 0, 0, 2, 2, 3, 3]


def test_a_prefill_only_layer_is_left_out() -> None:
    sender, receiver = named(describe(SHAPE), DRAFT), named(describe(replace(SHAPE, layers=3)), MODEL)
    assert verdict(sender, receiver) == Convertible(("layers: sender 4, receiver 3 and takes its own",))
    assert verdict(receiver, receiver) == Same()


def test_refuses_a_receiver_with_a_layer_more() -> None:
    sender, receiver = describe(replace(SHAPE, layers=3)), describe(SHAPE)
    assert verdict(sender, receiver) == Incompatible((f"layers: sender 3, receiver 4 (layer 3); {NEEDS}",))
    sender, receiver = named(sender, MODEL), named(receiver, DRAFT)
    assert verdict(sender, receiver) == Incompatible((f"layers: sender 3, receiver 4 (layer 3 draft.0); {NEEDS}",))


DRAFTED = replace(SHAPE, drafts=1, draft="eagle")
PLAIN = replace(SHAPE, layers=3)


def test_a_draft_layer_that_only_the_receiver_has_is_filled_with_zeros() -> None:
    filled = Convertible(("layers: sender 3, receiver 4 and fills 1 with zeros",))
    for names in ({}, DRAFT):
        sender, receiver = named(describe(PLAIN), names), named(describe(DRAFTED), names)
        assert verdict(sender, receiver) == filled
        assert verdict(receiver, sender) == Convertible(("layers: sender 4, receiver 3 and takes its own",))
        (takes,) = assign([sender], receiver)
        assert [(take.first_layer, take.end_layer) for take in takes] == [(0, 3)]


def test_a_pipeline_rank_without_the_draft_s_layer_says_nothing_of_it() -> None:
    """A later rank may hold it."""
    receiver = change(describe(replace(DRAFTED, pp_size=2)), model=change(describe(PLAIN).model, draft="eagle"))
    found = verdict(describe(DRAFTED), receiver)
    assert found == Convertible(("pp_size: sender 1, receiver 2",))


def test_a_missing_layer_of_the_model_is_refused_by_name_beside_a_draft() -> None:
    sender, receiver = named(describe(replace(SHAPE, layers=2)), MODEL), named(describe(DRAFTED), DRAFT)
    assert verdict(sender, receiver) == Incompatible((f"layers: sender 2, receiver 4 (layer 2 layers.2); {NEEDS}",))
    with pytest.raises(PeerError, match=r"layers: the receiver needs \[2, 3\)"):
        assign([sender], receiver)


def test_every_choice_of_ranks_and_missing_layers() -> None:
    """Exactly the draft layers that no rank has are unfilled. Any other missing layer, or part of one, is refused."""
    shape = Shape(layers=5, drafts=2, tp_size=1)
    receiver = describe(shape)
    for pp_layers in ((5,), (2, 3), (3, 1, 1)):
        ranks = [
            describe(replace(shape, pp_size=len(pp_layers), pp_layers=pp_layers), pp_rank=rank)
            for rank in range(len(pp_layers))
        ]
        keys = [(plane.layer, plane.part) for rank in ranks for plane in rank.planes]
        for lost in (set(some) for count in range(5) for some in itertools.combinations(keys, count)):
            senders = [
                change(rank, planes=tuple(p for p in rank.planes if (p.layer, p.part) not in lost)) for rank in ranks
            ]
            whole = {layer for layer in range(5) if {(layer, "k"), (layer, "v")} <= lost}
            torn = {layer for layer, _ in lost} - whole
            if torn or whole & {0, 1, 2}:
                with pytest.raises(PeerError, match=r"none of \d senders holds them"):
                    assign(senders, receiver)
                continue
            assert unfilled(senders, receiver) == tuple(sorted(whole))
            taken = [range(take.first_layer, take.end_layer) for takes in assign(senders, receiver) for take in takes]
            assert sorted(layer for layers in taken for layer in layers) == sorted({0, 1, 2, 3, 4} - whole)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"draft": "mtp"}, "draft: sender mtp, receiver eagle; needs the same draft model on both sides, or none on"),
        ({"draft": "", "kv_heads": 2}, "kv_heads: sender 2, receiver 4 (layer 3)"),
    ],
)
def test_a_draft_of_another_model_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    other, receiver = describe(replace(DRAFTED, **changes)), describe(DRAFTED)
    last = other.model.layers[3]
    layers = (*receiver.model.layers[:3], last)
    planes = (*receiver.planes[:-2], *other.planes[-2:])
    found = verdict(change(receiver, model=change(other.model, layers=layers), planes=planes), receiver)
    assert isinstance(found, Incompatible) and found.reasons[0].startswith(reason)


def test_a_draft_without_a_name_is_taken_for_the_same() -> None:
    assert verdict(describe(replace(DRAFTED, draft="")), describe(DRAFTED)) == Same()


def test_a_draft_is_compared_only_if_both_sides_have_its_layers() -> None:
    """A prefill engine that drafts from the prompt, or on another pipeline rank, says nothing of the draft's rows."""
    sender = describe(PLAIN)
    sender = change(sender, model=change(sender.model, draft="another"))
    assert not isinstance(verdict(sender, describe(DRAFTED)), Incompatible)


def test_a_number_is_no_match_where_its_name_is_another_layers() -> None:
    """The sender's layer 2 is what the receiver calls 3; the receiver's own 2 nobody has."""
    sender = named(describe(replace(SHAPE, layers=3)), {0: "layers.0", 1: "layers.1", 2: "draft.0"})
    found = verdict(sender, named(describe(SHAPE), DRAFT))
    assert found == Incompatible((f"layers: sender 3, receiver 4 (layer 2 layers.2); {NEEDS}",))


def test_kinds_of_the_same_name_must_agree() -> None:
    sender = named(describe(SHAPE), DRAFT)
    wide = replace(SHAPE, key_width=16)
    receiver = renumbered(named(describe(wide), DRAFT), {0: 0, 1: 1, 2: 2, 3: 5}, 6)
    found = verdict(sender, receiver)
    assert isinstance(found, Incompatible)
    assert (
        found.reasons[0] == "key_width: sender 8, receiver 16 (layer 0 and 3 more); needs the same model on both sides"
    )


def test_a_plan_takes_the_planes_of_the_same_name() -> None:
    sender = named(describe(SHAPE), DRAFT)
    receiver = renumbered(named(describe(replace(SHAPE, layout="hnd")), DRAFT), {0: 0, 1: 1, 2: 2, 3: 5}, 6)
    (takes,) = assign([sender], receiver)
    assert takes == common(sender, receiver)
    assert [(take.first_layer, take.end_layer) for take in takes] == [(0, 3), (5, 6)]
    pairs = plan(sender, receiver, takes, 0, 40, 1 << 16).pairs
    draft = [plane for plane in sender.planes if plane.name == "draft.0"]
    assert [(pair.sender.region, pair.sender.offset) for pair in pairs if pair.receiver.layer == 5] == [
        (plane.region, plane.offset) for plane in draft
    ]
