"""Who sends which rows: always an exact cover, spread over those who hold a row."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbridge_proto.peer import Take
from kvbridge_proto.pool import Pool

from kvbridge.errors import PeerError
from kvbridge.geometry.shard import assign
from testing.oracle import Shape, describe
from testing.refusals import refused

RANKS = (1, 2, 3, 4, 8)
Row = tuple[int, str, int]


def held(pool: Pool) -> Counter[Row]:
    return Counter(
        (plane.layer, plane.part, head)
        for plane in pool.planes
        for head in range(plane.first_head, plane.first_head + plane.heads)
    )


def taken(takes: tuple[Take, ...], receiver: Pool) -> Counter[Row]:
    """The rows that takes name: those of one part, or of all that the receiver has of a layer."""
    parts = {(plane.layer, plane.part) for plane in receiver.planes}
    return Counter(
        (layer, part, head)
        for take in takes
        for layer, part in parts
        if take.first_layer <= layer < take.end_layer and take.part in ("", part)
        for head in range(take.first_head, take.end_head)
    )


def ranks(shape: Shape) -> list[Pool]:
    return [describe(shape, tp, pp) for pp in range(shape.pp_size) for tp in range(shape.tp_size)]


@settings(max_examples=150)
@given(
    kv_heads=st.sampled_from([1, 2, 3, 4, 7, 8, 12]),
    layers=st.integers(1, 9),
    tp=st.tuples(st.sampled_from(RANKS), st.sampled_from(RANKS)),
    pp=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    order=st.randoms(use_true_random=False),
)
def test_the_assignment_is_an_exact_cover(kv_heads, layers, tp, pp, order) -> None:
    shape = Shape(kv_heads=kv_heads, layers=layers)
    senders = ranks(replace(shape, tp_size=tp[0], pp_size=min(layers, pp[0])))
    order.shuffle(senders)
    for receiver in ranks(replace(shape, tp_size=tp[1], pp_size=min(layers, pp[1]))):
        takes = assign(senders, receiver)
        assert len(takes) == len(senders)
        assert sum((taken(each, receiver) for each in takes), Counter()) == held(receiver)
        for sender, each in zip(senders, takes, strict=True):
            assert not taken(each, receiver) - held(sender)


@settings(max_examples=100)
@given(st.data())
def test_the_cover_is_exact_for_any_holdings(data: st.DataObject) -> None:
    """Senders with any layers and heads, also overlapping, also with a part missing: a cover or a refusal."""
    whole = describe(Shape(kv_heads=6, layers=6))

    def some(minimum: int) -> Pool:
        rows = data.draw(
            st.dictionaries(
                st.integers(0, 5), st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=minimum, max_size=6
            )
        )
        planes = []
        for plane in whole.planes:
            if plane.layer in rows and (minimum or data.draw(st.integers(0, 9))):
                first, heads = rows[plane.layer]
                if data.draw(st.integers(0, 3)) == 0:  # this part has heads of its own
                    first, heads = data.draw(st.tuples(st.integers(0, 5), st.integers(1, 6)))
                planes.append(msgspec.structs.replace(plane, first_head=first, heads=min(heads, 6 - first)))
        return msgspec.structs.replace(whole, planes=tuple(planes))

    senders, receiver = [some(0) for _ in range(data.draw(st.integers(1, 5)))], some(1)
    if held(receiver).keys() - sum((held(sender) for sender in senders), Counter()).keys():
        with refused(PeerError, "rows_not_held"):
            assign(senders, receiver)
        return
    takes = assign(senders, receiver)
    assert sum((taken(each, receiver) for each in takes), Counter()) == held(receiver)
    for sender, each in zip(senders, takes, strict=True):
        assert not taken(each, receiver) - held(sender)


def test_equal_ranks_take_from_their_like_in_one_piece() -> None:
    shape = Shape(kv_heads=8, layers=12, tp_size=4, pp_size=2)
    for index, receiver in enumerate(ranks(shape)):
        takes = assign(ranks(shape), receiver)
        pp, tp = divmod(index, 4)
        assert takes[index] == (Take(pp * 6, pp * 6 + 6, tp * 2, tp * 2 + 2),)
        assert sum(map(len, takes)) == 1


@pytest.mark.parametrize(
    ("senders", "receivers", "kv_heads", "expected"),
    [
        (8, 8, 4, {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1}),
        (8, 8, 1, dict.fromkeys(range(8), 1)),
        (8, 4, 2, {0: 1, 1: 1, 6: 1, 7: 1}),
        (4, 8, 2, {0: 2, 1: 2, 2: 2, 3: 2}),
    ],
)
def test_receivers_spread_over_the_holders_of_a_head(senders, receivers, kv_heads, expected) -> None:
    shape = Shape(kv_heads=kv_heads)
    pools = ranks(replace(shape, tp_size=senders))
    asked: Counter[int] = Counter()
    for receiver in ranks(replace(shape, tp_size=receivers)):
        asked.update(index for index, takes in enumerate(assign(pools, receiver)) if takes)
    assert asked == expected


def test_names_the_rows_that_nobody_holds() -> None:
    senders = ranks(Shape(kv_heads=8, layers=4, tp_size=2, pp_size=2))
    del senders[3]
    with refused(PeerError, "rows_not_held") as caught:
        assign(senders, describe(Shape(kv_heads=8, layers=4)))
    assert caught.value.reasons == (
        "layers: the receiver needs [2, 4), heads [4, 8), part k; none of 3 senders holds them",
    )
