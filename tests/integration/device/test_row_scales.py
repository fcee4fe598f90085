"""Rows under scales of their own, and latents, through mapped memory and slots, against the slow codecs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from kvbridge_kernels.codecs_ref import LARGEST
from kvbridge_proto.peer import Take
from kvbridge_proto.pool import CodecName, Plane, Pool, Step

from kvbridge.device.batch import batches
from kvbridge.errors import EngineError
from kvbridge.geometry.plan import Move, plan
from kvbridge.geometry.wire import PLAIN, ROW_SCALED
from tests.integration.device.attached import attached
from tests.integration.device.moving import gather, scatter
from tests.integration.device.test_porter_cpu import carry
from tests.support.oracle import POISON, Held, Shape, describe, places_of, put_rows
from tests.unit.geometry.scaled import latent_pool, poisoned, rows_at, scaled_pool, table_of, without_rows
from tests.unit.kernels import slow_codecs as slow

TOKENS = range(5, 70)


def transfer(source: Held, sink: Pool, takes: Sequence[Take], slot_bytes: int = 1 << 14) -> tuple[Held, list[int]]:
    """What the sink holds afterwards, poison wherever nothing was written; its table, too."""
    ours, theirs = table_of(source.pool, TOKENS, 1), table_of(sink, TOKENS, 2)
    planned = plan(source.pool, sink, takes, TOKENS.start, TOKENS.stop, slot_bytes)
    with ExitStack() as stack:
        _, source_pool = stack.enter_context(attached(source))
        engine, sink_pool = stack.enter_context(attached(poisoned(sink)))
        carry(planned, source_pool, ours, sink_pool, theirs)
        kept = engine.copy()
    for region in without_rows(kept, theirs, range(TOKENS.start, len(theirs) * sink.groups[0].block_tokens)):
        assert set(np.unique(region)) <= {0, POISON}
    return kept, theirs


def patterns(raw: np.ndarray, name: str) -> np.ndarray:
    """Bytes [..., row] as what slow_codecs calls patterns."""
    raw = np.ascontiguousarray(raw)
    if name == "fp32":
        return raw.view(np.float32)
    return raw.view({1: np.uint8, 2: np.uint16}[PLAIN[name]]).astype(np.int64)


def numbers(found: np.ndarray, name: str, scale: float | None = None) -> np.ndarray:
    """fp32 [..., width] of stored rows."""
    return slow.decode(patterns(found, name), name, scale)


def quantized(values: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Patterns of rows and the scale of each, by the definition."""
    scale = np.maximum(np.abs(values).max(axis=-1, keepdims=True) / np.float32(LARGEST[name]), np.float32(2.0**-100))
    return slow.encode(values, name, scale), scale


def normal_numbers(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(count) * np.exp2(rng.uniform(-6, 6, count))).astype(np.float32)


def fill(held: Held, table: Sequence[int]) -> None:
    """Ordinary numbers in every row, and scales of very different sizes."""
    for seed, plane in enumerate(held.pool.planes):
        codec, places = plane.codec, places_of(table, TOKENS, held.pool.groups[0].block_tokens)
        count = len(TOKENS) * plane.heads
        if codec.name == "fp8_ds_mla":
            parts = [
                normal_numbers(count * 512, seed).clip(-400, 400),
                np.exp2(normal_numbers(count * 4, seed + 1).clip(-9, 9)),
                normal_numbers(count * 64, seed + 2),
            ]
            names = ("fp8_e4m3", "fp32", "bf16")
            raw = [stored(part, name).reshape(count, -1) for part, name in zip(parts, names, strict=True)]
            rows = np.concatenate(raw, axis=1)
        elif codec.width == 1:
            rows = stored(np.exp2(normal_numbers(count, seed).clip(-9, 9)), "fp32")
        else:
            name = ROW_SCALED.get(codec.name, codec.name)
            values = normal_numbers(count * codec.width, seed)
            rows = stored(values / np.float32(codec.scales[0]) if codec.scales else values, name)
        put_rows(held, plane, places, rows.reshape(len(TOKENS), plane.heads, codec.row_bytes))


def stored(values: np.ndarray, name: str) -> np.ndarray:
    """Bytes of fp32 numbers in a codec."""
    found = slow.encode(values.astype(np.float32), name)
    return found.astype({1: np.uint8, 2: np.uint16, 4: np.float32}[PLAIN[name]]).view(np.uint8)


LATENTS: list[tuple[CodecName, tuple[float, ...]]] = [
    ("bf16", ()),
    ("fp16", ()),
    ("fp32", ()),
    ("fp8_e4m3", (0.37,)),
    ("fp8_e4m3", ()),
    ("int8", (0.9,)),
]


def latent_numbers(rows: np.ndarray, name: CodecName, scales: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Tiles [token, 4, 128] and rope [token, 64] of stored rows [token, row], by the definition of both."""
    if name != "fp8_ds_mla":
        values = numbers(rows, name, scales[0] if scales else None)
        return values[:, :512].reshape(-1, 4, 128), values[:, 512:]
    scale = np.ascontiguousarray(rows[:, 512:528]).view(np.float32)[:, :, None]
    tiles = slow.decode(rows[:, :512].reshape(-1, 4, 128).astype(np.int64), "fp8_e4m3", scale)
    return tiles, numbers(rows[:, 528:], "bf16")


@pytest.mark.parametrize("block_tokens", [16, 64])
@pytest.mark.parametrize(("name", "scales"), LATENTS)
def test_a_packed_latent_becomes_a_plain_one(name: CodecName, scales: tuple[float, ...], block_tokens: int) -> None:
    source, sink = poisoned(latent_pool("fp8_ds_mla")), latent_pool(name, scales, block_tokens=block_tokens)
    fill(source, table_of(source.pool, TOKENS, 1))
    found, placed = transfer(source, sink, [Take(0, 2, 0, 1)])
    for layer in range(2):
        sent = rows_at(source, layer, "latent", table_of(source.pool, TOKENS, 1), TOKENS)[:, 0]
        tiles, rope = latent_numbers(sent, "fp8_ds_mla", ())
        wanted = np.concatenate([tiles.reshape(len(TOKENS), 512), rope], axis=1)
        got = patterns(rows_at(found, layer, "latent", placed, TOKENS)[:, 0], name)
        assert slow.same(got, slow.encode(wanted, name, scales[0] if scales else None), name).all()


@pytest.mark.parametrize("block_tokens", [16, 64])
@pytest.mark.parametrize(("name", "scales"), LATENTS)
def test_a_plain_latent_becomes_a_packed_one(name: CodecName, scales: tuple[float, ...], block_tokens: int) -> None:
    """Each tile of 128 under its own largest number; the rope as bf16, the same bits if it was that."""
    source, sink = poisoned(latent_pool(name, scales)), latent_pool("fp8_ds_mla", block_tokens=block_tokens)
    fill(source, table_of(source.pool, TOKENS, 1))
    found, placed = transfer(source, sink, [Take(0, 2, 0, 1)])
    for layer in range(2):
        sent = rows_at(source, layer, "latent", table_of(source.pool, TOKENS, 1), TOKENS)[:, 0]
        tiles, rope = latent_numbers(sent, name, scales)
        rope = through_wire(rope, "bf16", name, scales)
        wanted, scale = quantized(tiles, "fp8_e4m3")
        got = rows_at(found, layer, "latent", placed, TOKENS)[:, 0]
        assert np.array_equal(np.ascontiguousarray(got[:, 512:528]).view(np.float32), scale[:, :, 0])
        assert np.array_equal(got[:, :512].reshape(-1, 4, 128), wanted)
        assert np.array_equal(patterns(got[:, 528:], "bf16"), slow.encode(rope, "bf16"))


def through_wire(values: np.ndarray, sink: CodecName, source: CodecName, scales: tuple[float, ...]) -> np.ndarray:
    """Between plain codecs the narrower one crosses, so what arrives has been rounded to it once."""
    narrow, scale = (source, scales) if PLAIN[source] <= PLAIN[sink] else (sink, ())
    each = scale[0] if scale else None
    return slow.decode(slow.encode(values, narrow, each), narrow, each)


NUMBERS: list[tuple[CodecName, tuple[float, ...]]] = [
    *(("fp8_row_scale", ()), ("int8_row_scale", ())),
    *(("bf16", ()), ("fp16", ()), ("fp32", ())),
    *(("fp8_e4m3", (0.5,)), ("fp8_e5m2", (3.0,)), ("int8", (0.9,))),
]
SHAPE = Shape(layers=2, kv_heads=4, key_width=16, value_width=32, block_tokens=16, blocks=6)


def numbered_pool(name: CodecName, scales: tuple[float, ...], block_tokens: int) -> Pool:
    shape = replace(SHAPE, block_tokens=block_tokens, blocks=96 // block_tokens)
    if name in ROW_SCALED:
        return scaled_pool(replace(shape, codec="fp8_e4m3"), name)
    return describe(replace(shape, codec=name, scales={"k": scales, "v": scales}))


def numbers_in(held: Held, layer: int, part: str, table: Sequence[int], name: CodecName, scales: tuple[float, ...]):
    """Patterns, and fp32 numbers, [token, head, width] of one part."""
    rows = rows_at(held, layer, part, table, TOKENS)
    kept = patterns(rows, ROW_SCALED.get(name, name))
    if name not in ROW_SCALED:
        return kept, slow.decode(kept, name, scales[0] if scales else None)
    own = rows_at(held, layer, f"{part}_scale", table, TOKENS)
    return kept, slow.decode(kept, ROW_SCALED[name], np.ascontiguousarray(own).view(np.float32))


@pytest.mark.parametrize("heads", [(0, 4), (1, 3)])
@pytest.mark.parametrize(("new", "new_scales"), NUMBERS)
@pytest.mark.parametrize(("old", "old_scales"), NUMBERS[:2])
def test_rows_with_scales_become_any_numbers_and_again(
    old: CodecName, old_scales: tuple[float, ...], new: CodecName, new_scales: tuple[float, ...], heads: tuple[int, int]
) -> None:
    ours = numbered_pool(old, old_scales, 16)
    source, sink = poisoned(ours), numbered_pool(new, new_scales, 32)
    fill(source, table_of(ours, TOKENS, 1))
    check_numbers(source, old, old_scales, sink, new, new_scales, heads)
    if new not in ROW_SCALED:
        source = poisoned(numbered_pool(new, new_scales, 16))
        fill(source, table_of(source.pool, TOKENS, 1))
        check_numbers(source, new, new_scales, numbered_pool(old, old_scales, 32), old, old_scales, heads)


def check_numbers(
    source: Held,
    old: CodecName,
    old_scales: tuple[float, ...],
    sink: Pool,
    new: CodecName,
    new_scales: tuple[float, ...],
    heads: tuple[int, int],
) -> None:
    found, placed = transfer(source, sink, [Take(0, 2, *heads)])
    part = slice(*heads)
    for layer in range(2):
        for name in ("k", "v"):
            sent, values = numbers_in(source, layer, name, table_of(source.pool, TOKENS, 1), old, old_scales)
            got, back = numbers_in(found, layer, name, placed, new, new_scales)
            if old == new:
                assert np.array_equal(got[:, part], sent[:, part]) and np.array_equal(back[:, part], values[:, part])
            elif new not in ROW_SCALED:
                wanted = slow.encode(values, new, new_scales[0] if new_scales else None)
                assert slow.same(got, wanted, new)[:, part].all()
            else:
                wanted, scale = quantized(values, ROW_SCALED[new])
                assert np.array_equal(got[:, part], wanted[:, part])
                own = np.ascontiguousarray(rows_at(found, layer, f"{name}_scale", placed, TOKENS)).view(np.float32)
                assert np.array_equal(own[:, part], scale[:, part])
            others = np.ones(4, bool)
            others[part] = False
            assert (rows_at(found, layer, name, placed, TOKENS)[:, others] == POISON).all()


def scaled_moves(pool: Pool, heads: int = 2) -> list[Move]:
    """Two heads of every K of a pool, as plain numbers."""
    planes = {(plane.layer, plane.part): plane for plane in pool.planes}
    plain = msgspec.structs.replace(planes[0, "k"].codec, name="fp32", element_bytes=4, row_bytes=64)
    return [
        Move(planes[layer, "k"], 1, heads, plain, 4096 * layer, np.arange(5), 1, planes[layer, "k_scale"])
        for layer in range(2)
    ]


def in_one_region(pool: Pool) -> Pool:
    """Its layers' K one after another, so that they are one batch."""
    size = pool.regions[0].size_bytes
    planes = [
        msgspec.structs.replace(plane, region=0, offset=plane.offset + plane.layer * size)
        for plane in pool.planes
        if plane.part.startswith("k")
    ]
    return msgspec.structs.replace(
        pool, planes=tuple(planes), regions=(msgspec.structs.replace(pool.regions[0], size_bytes=2 * size),)
    )


def test_layers_whose_scales_lie_alike_move_in_one_call() -> None:
    pool = in_one_region(scaled_pool(replace(SHAPE, codec="fp8_e4m3"), "fp8_row_scale"))
    first, second = scaled_moves(pool)
    assert len(list(batches([first, second]))) == 1
    other = msgspec.structs.replace(second.scale, offset=second.scale.offset + 4)
    assert len(list(batches([first, replace(second, scale=other)]))) == 2
    assert len(list(batches([first, replace(second, scale=None)]))) == 2


def wrong_scales(good: Move) -> dict[str, Plane]:
    scale = good.scale
    assert scale is not None
    change = msgspec.structs.replace
    return {
        "another stride of blocks": change(scale, block_stride=scale.block_stride - 4),
        "another stride of tokens": change(scale, token_axis=(Step(16, 4),)),
        "another region": change(scale, region=1),
        "outside of the region": change(scale, offset=1 << 30),
        "fewer heads": change(scale, heads=1),
        "another codec": change(scale, codec=change(scale.codec, name="opaque")),
    }


@pytest.mark.parametrize(
    "what", wrong_scales(scaled_moves(scaled_pool(replace(SHAPE, codec="fp8_e4m3"), "fp8_row_scale"))[0])
)
def test_refuses_scales_that_are_not_those_of_the_rows(what: str) -> None:
    held = poisoned(scaled_pool(replace(SHAPE, codec="fp8_e4m3"), "fp8_row_scale"))
    good = scaled_moves(held.pool)
    slot = torch.full((1 << 14,), POISON, dtype=torch.uint8)
    with attached(held) as (engine, pool):
        for move in (gather, scatter):
            with pytest.raises(EngineError) as caught:
                move(pool, [good[1], replace(good[0], scale=wrong_scales(good[0])[what])], slot)
            assert caught.value.code == ("plane_outside_region" if what == "outside of the region" else "bad_plane")
        assert (slot == POISON).all() and all((region == POISON).all() for region in engine.memory)
        bare = replace(good[0], scale=None)
        with pytest.raises(EngineError, match="codec: fp8_row_scale, on the wire fp32"):
            gather(pool, [bare], slot)
