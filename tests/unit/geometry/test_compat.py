"""Verdicts: what is the same, what can be converted, and refusals that name the field and both values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from kvbridge_proto.pool import Pool, Step

from kvbridge.geometry.check import MOST_REASONS
from kvbridge.geometry.compat import MULTIPLE, NO_REUSE, Convertible, Incompatible, Same, check_pool, verdict
from testing.oracle import LAYOUTS, Shape, describe, mla

pytestmark = pytest.mark.proves("G22")

SHAPE = Shape(key_width=32, value_width=16)
change = msgspec.structs.replace


def reasons(sender: Pool, receiver: Pool) -> tuple[str, ...]:
    found = verdict(sender, receiver)
    assert isinstance(found, Incompatible), found
    return found.reasons


def with_layers(pool: Pool, **changes: Any) -> Pool:
    return change(pool, model=change(pool.model, layers=tuple(change(layer, **changes) for layer in pool.model.layers)))


def with_planes(pool: Pool, **changes: Any) -> Pool:
    return change(pool, planes=tuple(change(plane, **changes) for plane in pool.planes))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_a_pool_that_can_be(layout: str) -> None:
    for changes in ({}, {"tp_size": 3, "kv_heads": 7}, {"pad_bytes": 100}):
        pool = describe(replace(SHAPE, layout=layout, **changes))
        assert check_pool(pool) == ()
        assert verdict(pool, pool) == Same()


SAME_MODEL = "; needs the same model on both sides"
SAME_CODEC = "; needs the same kv_cache_dtype on both sides"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"key_width": 64}, f"key_width: sender 32, receiver 64 (layer 0 and 1 more){SAME_MODEL}"),
        ({"value_width": 64}, f"value_width: sender 16, receiver 64 (layer 0 and 1 more){SAME_MODEL}"),
        ({"kv_heads": 8}, f"kv_heads: sender 4, receiver 8 (layer 0 and 1 more){SAME_MODEL}"),
        ({"model": "other"}, f"model: sender oracle, receiver other{SAME_MODEL}"),
        ({"codec": "opaque"}, f"codec: sender bf16, receiver opaque of 32 bytes (layer 0 k and 1 more){SAME_CODEC}"),
    ],
)
def test_refuses_another_model(changes: dict[str, Any], expected: str) -> None:
    ours, theirs = describe(SHAPE), describe(replace(SHAPE, **changes))
    assert expected in reasons(ours, theirs)


def test_refuses_a_model_of_another_depth_though_it_has_all_layers_that_are_asked_for() -> None:
    """A draft model's layers may be there on one side only; the model's own may not."""

    def deep(layers: int, depth: int) -> Pool:
        pool = describe(replace(SHAPE, layers=layers))
        return msgspec.structs.replace(pool, model=msgspec.structs.replace(pool.model, depth=depth))

    assert reasons(deep(4, 4), deep(2, 2)) == (f"depth: sender 4, receiver 2{SAME_MODEL}",)
    for sender, receiver in ((deep(4, 0), deep(2, 2)), (deep(4, 2), deep(2, 0)), (deep(3, 2), deep(2, 2))):
        assert not isinstance(verdict(sender, receiver), Incompatible)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ({}, {"rope_width": 64}, "rope_width: sender 0, receiver 64"),
        ({}, {"kind": "mla"}, "kind: sender full, receiver mla"),
        ({"window": 64}, {"window": 128}, "window: sender 64, receiver 128"),
    ],
)
def test_refuses_layers_of_another_kind(ours: dict[str, Any], theirs: dict[str, Any], expected: str) -> None:
    pool = describe(SHAPE)
    found = reasons(with_layers(pool, **ours), with_layers(pool, **theirs))
    assert found == (f"{expected} (layer 0 and 1 more){SAME_MODEL}",)


SPLIT = {"cp_size": 2, "cp_interleave": 16}


@pytest.mark.parametrize(
    ("sender", "receiver", "expected"),
    [
        ({"codec": "int8"}, {"codec": "int8", "scales": {"k": (2.0,), "v": (2.0,)}},
         ("scales: sender none, receiver 2 (layer 0 k and 3 more)",)),
        ({}, {"block_tokens": 32}, ("block_tokens: sender 16, receiver 32 (layer 0 k and 3 more)",)),
        ({}, {"codec": "fp8_e4m3"}, ("codec: sender bf16, receiver fp8_e4m3 (layer 0 k and 3 more)",)),
        ({}, {"tp_size": 2}, ("tp_size: sender 1, receiver 2",)),
        ({}, {"pp_size": 2}, ("pp_size: sender 1, receiver 2",)),
        ({}, {"layout": "hnd"}, ("layout: sender block > token > head > element, receiver block > head > token > "
                                 "element (layer 0 k and 3 more)",)),
        ({}, SPLIT, ("tp_size: sender 1, receiver 2", "cp_size: sender 1, receiver 2")),
        (SPLIT, SPLIT | {"cp_interleave": 3}, ("cp_interleave: sender 16, receiver 3",)),
    ],
)  # fmt: skip
def test_says_nothing_but_what_is_converted(
    sender: dict[str, Any], receiver: dict[str, Any], expected: tuple[str, ...]
) -> None:
    assert verdict(describe(replace(SHAPE, **sender)), describe(replace(SHAPE, **receiver))) == Convertible(expected)


def test_refuses_interleaves_that_are_never_in_step() -> None:
    sender, receiver = (describe(replace(SHAPE, cp_size=2, cp_interleave=il)) for il in (1021, 1019))
    assert reasons(sender, receiver) == (
        "cp_interleave: sender 1021 x 2 ranks, receiver 1019 x 2 ranks; "
        "needs interleaves whose common period is below 65536 tokens",
    )


HYBRID = "the hybrid KV cache manager on the receiver, or off at the sender"


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (("full", 0), ("sliding", 64), Convertible(("kind: sender full, receiver sliding 64 (layer 0 k and 3 more)",))),
        (("full", 0), ("chunked", 64), Convertible(("kind: sender full, receiver chunked 64 (layer 0 k and 3 more)",))),
        (("sliding", 64), ("sliding", 64), Same()),
        (
            ("sliding", 64),
            ("full", 0),
            f"kind: sender sliding 64, receiver full (layer 0 k and 3 more); needs {HYBRID}",
        ),
        (
            ("sliding", 64),
            ("chunked", 64),
            f"kind: sender sliding 64, receiver chunked 64 (layer 0 k and 3 more); needs {HYBRID}",
        ),
        (
            ("chunked", 64),
            ("chunked", 32),
            f"kind: sender chunked 64, receiver chunked 32 (layer 0 k and 3 more); needs {HYBRID}",
        ),
    ],
)
def test_a_window_comes_from_all_tokens_or_from_the_same_window(
    ours: tuple[Any, int], theirs: tuple[Any, int], expected: Any
) -> None:
    sender, receiver = (describe(replace(SHAPE, kinds=(kind,), window=window)) for kind, window in (ours, theirs))
    assert (
        (expected in reasons(sender, receiver)) if isinstance(expected, str) else verdict(sender, receiver) == expected
    )


def test_a_state_is_cut_by_heads_and_every_context_parallel_rank_has_it() -> None:
    shape = replace(SHAPE, kinds=("full", "state"))
    pool, other = describe(shape), describe(replace(shape, tp_size=2))
    assert check_pool(pool) == () and verdict(pool, pool) == Same()
    assert verdict(pool, other) == Convertible(("tp_size: sender 1, receiver 2",))
    split = describe(replace(shape, cp_size=2))
    assert check_pool(split) == () and verdict(split, split) == Same()
    assert verdict(pool, split) == Convertible(("tp_size: sender 1, receiver 2", "cp_size: sender 1, receiver 2"))


def test_refuses_a_state_of_another_width() -> None:
    pool = describe(replace(SHAPE, kinds=("full", "state")))
    conv = pool.planes[2]
    narrow = change(conv, codec=change(conv.codec, width=3, row_bytes=6), element_axis=conv.element_axis[:1])
    other = change(pool, planes=(*pool.planes[:2], narrow, *pool.planes[3:]))
    assert reasons(pool, other) == (f"width: sender 6, receiver 3 (layer 1 conv_x){SAME_MODEL}",)


def test_a_layer_that_one_side_does_not_know_is_not_compared() -> None:
    """A rank knows the layers of its own pipeline stage only."""
    first, last = (describe(replace(SHAPE, pp_size=2), pp_rank=rank) for rank in range(2))
    mine = change(first, model=change(first.model, layers=(first.model.layers[0], None)))
    yours = change(last, model=change(last.model, layers=(None, last.model.layers[1])))
    assert check_pool(mine) == check_pool(yours) == ()
    assert not isinstance(verdict(mine, yours), Incompatible)
    wide = describe(replace(SHAPE, key_width=96))
    assert f"key_width: sender 32, receiver 96 (layer 0){SAME_MODEL}" in reasons(mine, wide)


def test_a_packed_row_moves_to_its_like_only() -> None:
    latent, opaque = describe(mla("fp8_ds_v4", key_width=512)), describe(mla("opaque", key_width=576))
    assert verdict(latent, latent) == verdict(opaque, opaque) == Same()
    other = describe(mla("bf16", key_width=512))
    assert reasons(latent, other) == (
        f"codec: sender fp8_ds_v4 of 576 bytes, receiver bf16 (layer 0 latent and 1 more){SAME_CODEC}",
    )


def test_rows_that_are_not_converted_need_the_same_scales() -> None:
    """Those in memory are parts of one that the checkpoint has. Numbers of 8 bits are requantized instead."""
    one, other = ({"k": (scale,), "v": (scale,)} for scale in (0.5, 0.25))
    for codec, expected in (("nvfp4", True), ("int8", False)):
        ours, theirs = (describe(replace(SHAPE, codec=codec, scales=scales)) for scales in (one, other))
        assert check_pool(ours) == () and verdict(ours, ours) == Same()
        judged = verdict(ours, theirs)
        assert isinstance(judged, Incompatible) == expected
        if isinstance(judged, Incompatible):
            assert judged.reasons[0].startswith("scales: sender 0.5, receiver 0.25 (layer 0 k and 3 more)")


@pytest.mark.parametrize(
    ("sender", "receiver", "expected"),
    [
        ((16, 1), (32, 1), "sender 16, receiver 32"),
        ((48, 1), (32, 1), "sender 48, receiver 32"),
        ((16, 1), (16, 2), "sender 16, receiver 16 x 2 ranks"),
        ((16, 2), (16, 3), "sender 16 x 2 ranks, receiver 16 x 3 ranks"),
        ((16, 2), (32, 1), ""),
        ((64, 1), (16, 2), ""),
    ],
)
def test_windows_need_a_block_that_is_a_multiple(
    sender: tuple[int, int], receiver: tuple[int, int], expected: str
) -> None:
    """What the sender keeps begins on a border of its own blocks; of those with all tokens any block will do."""
    for kinds in (("sliding",), ("chunked",), ("full",)):
        shape = replace(SHAPE, kinds=kinds, window=65)
        ours, theirs = (
            describe(replace(shape, block_tokens=block, cp_size=size)) for block, size in (sender, receiver)
        )
        if expected and kinds != ("full",):
            assert reasons(ours, theirs) == (f"block_tokens: {expected} (layer 0 k and 3 more); needs {MULTIPLE}",)
            vllm = change(theirs, engine=change(theirs.engine, kind="vllm"))
            assert reasons(ours, vllm) == (f"block_tokens: {expected} (layer 0 k and 3 more); needs {NO_REUSE}",)
            private = replace(shape, block_tokens=receiver[0], cp_size=receiver[1], begins_inside=True)
            assert isinstance(verdict(ours, describe(private)), Convertible)
        else:
            assert isinstance(verdict(ours, theirs), Convertible)
        from_all = describe(replace(SHAPE, block_tokens=sender[0], cp_size=sender[1]))
        assert isinstance(verdict(from_all, theirs), Convertible)


def test_chunks_that_are_whole_blocks_of_the_receiver_come_from_any_block() -> None:
    small, large, other = (
        describe(replace(SHAPE, kinds=("chunked",), window=96, block_tokens=tokens)) for tokens in (16, 48, 64)
    )
    assert isinstance(verdict(small, large), Convertible)
    assert reasons(small, other)


def test_a_latent_is_cut_only_where_its_numbers_lie_side_by_side() -> None:
    size = 1 << 21
    spread = with_planes(describe(mla(blocks=1)), element_axis=(Step(288, 4), Step(2, 2)))
    spread = change(spread, regions=(change(spread.regions[0], size_bytes=size),) * 2)
    assert check_pool(spread) == ()
    assert reasons(spread, describe(mla("fp8_ds_mla"))) == (
        "codec: sender bf16, 2 bytes apart, receiver fp8_ds_mla of 656 bytes (layer 0 latent and 1 more); "
        "needs rows whose numbers lie side by side",
    )


def test_refuses_a_sender_that_lacks_a_part() -> None:
    pool = describe(SHAPE)
    keys = change(pool, planes=tuple(plane for plane in pool.planes if plane.part == "k"))
    assert reasons(keys, pool) == (f"parts: sender k, receiver k v (layer 0 and 1 more){SAME_MODEL}",)
    assert verdict(pool, keys) == Same()


def test_reasons_fit_a_message() -> None:
    pool = with_planes(describe(replace(SHAPE, layers=100)), group=5)
    found = check_pool(pool)
    assert len(found) == MOST_REASONS + 1 <= 64
    assert found[-1] == f"and {200 - MOST_REASONS} reasons more"
    assert all(len(reason) <= 1024 for reason in reasons(pool, pool))


def test_a_reason_fits_a_message() -> None:
    """Each part may have a name of 32 letters, and a layer as many parts as a pool has planes."""
    pool = describe(replace(SHAPE, layers=1))
    planes = tuple(change(pool.planes[0], part=f"{index:032}") for index in range(200))
    (found,) = reasons(pool, change(pool, planes=planes))
    assert found.startswith("parts: sender k v, receiver 000") and found.endswith("...") and len(found) == 1024
