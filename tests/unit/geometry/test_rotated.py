"""Rows that one side multiplies by a Hadamard matrix, and rows whose scales have another form: byte for byte.

What they must be is computed by tests/support/index_keys.py, from the definitions of the engines' writers.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from kvbridge_proto.peer import Take
from kvbridge_proto.pool import Pool

from kvbridge.geometry.check import check_pool
from kvbridge.geometry.compat import Convertible, Incompatible, Same, changes, verdict
from kvbridge.geometry.explain import sentence
from kvbridge.geometry.plan import plan
from kvbridge.geometry.shard import assign, common
from testing.carried import OnCpu, move
from testing.oracle import (
    More,
    Shape,
    build,
    build_all,
    describe,
    fill,
    mla,
    put_rows,
    rows,
    rows_at,
    tables_of,
    take_rows,
)
from testing.pools import Held
from tests.support import index_keys

VLLM = More("index_key", width=128, codec="fp8_row_scale", page_tokens=64, scale_codec="pow2_fp32")
PACKED = replace(VLLM, scale_codec="ue8m0_x4")
SGLANG = replace(VLLM, part="rotated_index_key")
KEYS = {"vLLM": VLLM, "vLLM on SM100": PACKED, "SGLang, rotated": SGLANG}
UNLIKE = [pair for pair in itertools.permutations(KEYS, 2)]
TOKENS = range(3, 200)
DIGESTS = ("7145990f8bf3ebc88f037c8f079e17fb", "c50ab9641168ec3cad511037a7f5cf85", "b114139e4b0fb054989f7df37d703bfd")
SLOT_BYTES = 1 << 16


def model(key: More, **changes: object) -> Shape:
    """Latents, and index keys in three of four layers."""
    return replace(mla(layers=4, more=(replace(key, layers=(0, 2, 3)),), blocks=8, block_tokens=64), **changes)


def carried(
    sender: Shape, receiver: Shape, seed: int
) -> list[tuple[Held, Held, dict[int, tuple[int, ...]], list[Held]]]:
    """Each rank of the receiver with its memory before, its blocks, and the senders."""
    senders, found = build_all(sender), []
    table = tables_of(senders[0].pool, TOKENS.stop, seed=seed)
    for each in senders:
        fill(each, table, range(TOKENS.stop), is_tame=True)
        with_any_scales(each, table, seed)
    for rank in range(receiver.tp_size):
        held = build(receiver, rank)
        before, theirs = held.copy(), tables_of(held.pool, TOKENS.stop, seed=seed + 1)
        move(senders, table, held, theirs, TOKENS, SLOT_BYTES, OnCpu())
        found.append((held, before, theirs, senders))
    return found


def with_any_scales(held: Held, table: dict[int, tuple[int, ...]], seed: int) -> None:
    """Scales as SGLang's fused writer makes them: no powers of two."""
    for plane in held.pool.planes:
        if plane.codec.name == "pow2_fp32" and plane.part.startswith("rotated_"):
            token, places = rows_at(held.pool, plane.group, table, range(TOKENS.stop))
            put_rows(held, plane, places, scales_of(plane.layer, token))


def scales_of(layer: int, token: np.ndarray) -> np.ndarray:
    made = np.float32(1e-3) * (1 + (token * 37 + layer * 11) % 101).astype("<f4")
    return made.view(np.uint8).reshape(-1, 1, 4)


def sent(pool: Pool, layer: int, key: More, token: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The keys and scales of a sender's layer, as `carried` filled it."""
    planes = {(plane.layer, plane.part): plane for plane in pool.planes}
    keys = rows(planes[layer, key.part], token, is_tame=True)
    if key.part.startswith("rotated_"):
        return keys, scales_of(layer, token)
    return keys, rows(planes[layer, f"{key.part}_scale"], token, is_tame=True)


@pytest.mark.parametrize(("ours", "theirs"), UNLIKE)
def test_keys_arrive_as_the_other_engine_keeps_them(ours: str, theirs: str) -> None:
    """Whatever the ranks and blocks; and nothing else in the receiver changes but the latents beside them.

    Each pair has half of the ranks' and blocks' pairs.
    """
    given, taken = KEYS[ours], KEYS[theirs]
    rotates = given.part != taken.part
    cases = itertools.product(((1, 1), (2, 1), (1, 2)), ((64, 64), (128, 64), (64, 128), (16, 64), (128, 16)))
    for seed, ((sends, takes), (block, other)) in [*enumerate(cases)][UNLIKE.index((ours, theirs)) % 2 :: 2]:
        sender = model(given, tp_size=sends, block_tokens=block, blocks=-(-200 // block) + 2)
        receiver = model(taken, tp_size=takes, block_tokens=other, blocks=-(-200 // other) + 2, pad_bytes=16)
        for held, before, table, senders in carried(sender, receiver, seed):
            expected = before.copy()
            for plane in held.pool.planes:
                token, places = rows_at(held.pool, plane.group, table, TOKENS)
                if plane.part == "latent":
                    put_rows(expected, plane, places, rows(plane, token, is_tame=True))
                elif not plane.part.endswith("_scale"):
                    keys, scales = sent(senders[0].pool, plane.layer, given, token)
                    keys, scales = index_keys.received(keys, scales, given.scale_codec, taken.scale_codec, rotates)
                    put_rows(expected, plane, places, keys)
                    (own,) = [p for p in held.pool.planes if (p.layer, p.part) == (plane.layer, f"{plane.part}_scale")]
                    put_rows(expected, own, places, scales)
            for plane in held.pool.planes:  # the rest of a last block may come along where latents are copied
                _, places = rows_at(held.pool, plane.group, table, range(TOKENS.stop))
                assert np.array_equal(take_rows(held, plane, places), take_rows(expected, plane, places)), plane


def test_keys_that_are_unpacked_keep_their_values_exactly() -> None:
    """Where a row's largest number was rounded down, its scale halves and its numbers double."""
    rng = np.random.default_rng(8)
    values = rng.standard_normal((4000, 128)).astype(np.float32) * np.exp2(rng.integers(-18, 9, (4000, 1)))
    values[:100] *= np.float32(224.01) * np.exp2(-8.0) / np.abs(values[:100]).max(axis=1, keepdims=True)
    keys, scales = index_keys.stored(values.astype(np.float32), "ue8m0_x4")
    other, others = index_keys.received(keys, scales, "ue8m0_x4", "pow2_fp32", False)
    there, here = index_keys.numbers(keys, scales, "ue8m0_x4"), index_keys.numbers(other, others, "pow2_fp32")
    assert np.array_equal(there, here) and (keys != other).any(axis=1).sum() >= 100


def test_keys_that_both_sides_keep_alike_are_copied() -> None:
    """The digests are those of 41d99d0, before which nothing was rotated: such plans must not change."""
    for (name, key), digest in zip(KEYS.items(), DIGESTS, strict=True):
        sender = describe(model(key))
        assert verdict(sender, sender) == Same()
        planned = plan(sender, sender, common(sender, sender), 0, 200, SLOT_BYTES)
        assert not any(pair.rotates or pair.sender_scale for pair in planned.pairs)
        assert planned.digest == digest, name


def test_the_verdict_says_what_becomes_of_them_and_so_do_people_hear_it() -> None:
    rotation = "rotation: sender {}, receiver {} (layer 0 {} and 2 more)"
    for ours, theirs in UNLIKE:
        given, taken = KEYS[ours], KEYS[theirs]
        sender, receiver = describe(model(given)), describe(model(taken))
        found = verdict(sender, receiver)
        assert isinstance(found, Convertible) and found.conversion == "codec"
        sides = ["Hadamard" if key.part.startswith("rotated_") else "none" for key in (given, taken)]
        said = [rotation.format(*sides, given.part)] if sides[0] != sides[1] else []
        if given.scale_codec != taken.scale_codec:
            forms = f"sender {given.scale_codec}, receiver {taken.scale_codec}"
            said = [f"scale_codec: {forms} (layer 0 {given.part} and 2 more)", *said]
        assert list(found.changes) == said
        for change in changes(sender, receiver):
            words = sentence(change, sender, receiver)
            assert words.endswith("off by at most |x|/16 + s/1024, saturating at 448 s, with the s of each row")
            assert ("a Hadamard matrix at the receiver; 512 bytes of a row cross" in words) == (
                change.field == "rotation"
            )


def test_a_take_has_the_receivers_name_of_a_part() -> None:
    """Older agents read the takes of pairs that they know as before."""
    for ours, theirs in itertools.product(KEYS, KEYS):
        sender, receiver = describe(model(KEYS[ours])), describe(model(KEYS[theirs]))
        part = KEYS[theirs].part
        expected = {Take(0, 1, 0, 1, part), Take(2, 4, 0, 1, part), Take(0, 4, 0, 1, "latent")}
        assert set(assign([sender], receiver)[0]) == set(common(sender, receiver)) == expected


def test_plain_rows_are_rotated_as_the_sender_has_them() -> None:
    """bf16 to fp8 is rotated before it is rounded, fp8 to bf16 crosses as fp32; equal codecs are rotated too."""
    plain = replace(VLLM, codec="bf16", page_tokens=0, scale_codec="fp32")
    for given, taken, crosses in (
        (plain, SGLANG, "bf16"),
        (SGLANG, plain, "fp32"),
        (plain, replace(plain, part=SGLANG.part), "bf16"),
        (replace(plain, codec="fp8_e4m3"), replace(plain, part=SGLANG.part), "fp8_e4m3"),
        (plain, replace(plain, codec="fp8_e5m2", part=SGLANG.part), "bf16"),
    ):
        sender, receiver = describe(model(given)), describe(model(taken))
        planned = plan(sender, receiver, common(sender, receiver), 0, 200, SLOT_BYTES)
        assert {pair.wire.name for pair in planned.pairs if pair.rotates} == {crosses}
        (held, _, table, senders), *_ = carried(model(given), model(taken), 5)
        for plane in held.pool.planes:
            if plane.part != taken.part:
                continue
            token, places = rows_at(held.pool, plane.group, table, TOKENS)
            values = index_keys.rotated(plain_numbers(senders[0], plane.layer, given, token))
            found = take_rows(held, plane, places)
            if taken.codec == "fp8_row_scale":
                assert np.array_equal(found, index_keys.stored(values, taken.scale_codec)[0])
            else:
                words = found.view("<u2").astype(np.int64) if taken.codec == "bf16" else found
                assert np.array_equal(words, index_keys.encode(values, taken.codec))


def plain_numbers(sender: Held, layer: int, key: More, token: np.ndarray) -> np.ndarray:
    if key.codec == "fp8_row_scale":
        return index_keys.numbers(*sent(sender.pool, layer, key, token), key.scale_codec)
    (plane,) = [plane for plane in sender.pool.planes if (plane.layer, plane.part) == (layer, key.part)]
    stored = rows(plane, token, is_tame=True)
    return index_keys.decode(stored.view("<u2").astype(np.int64) if key.codec == "bf16" else stored, key.codec)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"width": 96},
            "rotation: sender none, receiver Hadamard (layer 0 index_key and 3 more); needs rows that both",
        ),
        (
            {"width": 2048},
            "rotation: sender none, receiver Hadamard (layer 0 index_key and 3 more); needs rows that both",
        ),
        (
            {"codec": "opaque"},
            "rotation: sender none, receiver Hadamard (layer 0 index_key and 3 more); needs rows that",
        ),
    ],
)
def test_what_cannot_be_rotated_is_refused_by_name(changes: dict[str, object], reason: str) -> None:
    key = replace(VLLM, **changes)
    sender, receiver = (describe(mla(layers=4, more=(replace(key, part=part),))) for part in KEYS_OF)
    assert verdict(sender, sender) == Same() == verdict(receiver, receiver)
    found = verdict(sender, receiver)
    assert isinstance(found, Incompatible) and any(each.startswith(reason) for each in found.reasons), found


KEYS_OF = ("index_key", "rotated_index_key")


def test_a_chunk_has_half_of_the_room_for_lists_of_places_at_most() -> None:
    """A copier has a sixteenth of a slot for them. Rows and their scales have a list each, on both sides of a pull."""
    slot_bytes = 32 << 20
    sender, receiver = (describe(mla(layers=1, more=(key,), block_tokens=64, blocks=3000)) for key in (VLLM, SGLANG))
    planned = plan(sender, receiver, (Take(0, 1, 0, 1, SGLANG.part),), 0, 190_000, slot_bytes)
    chunks = map(planned.chunk, range(planned.chunks))
    assert 4 * 8 * max(chunk.end_local - chunk.first_local for chunk in chunks) <= slot_bytes // 16 // 2


def test_a_layer_has_its_keys_rotated_or_not() -> None:
    pool = describe(mla(layers=1, more=(VLLM, SGLANG)))
    assert "part: layer 0 has index_key in two forms" in check_pool(pool)


def test_rotated_rows_of_attention_are_the_models() -> None:
    pool = describe(mla(layers=1))
    (latent,) = pool.planes
    rotated = msgspec.structs.replace(latent, part="rotated_latent")
    narrow = msgspec.structs.replace(pool.model.layers[0], key_width=latent.codec.width // 2)
    assert not check_pool(msgspec.structs.replace(pool, planes=(rotated,)))
    model_of = msgspec.structs.replace(pool.model, layers=(narrow,))
    (said,) = check_pool(msgspec.structs.replace(pool, model=model_of, planes=(rotated,)))
    assert f"the model's key_width {latent.codec.width // 2}" in said


def test_all_that_people_hear_of_a_row_names_the_bytes_that_cross() -> None:
    plain = replace(VLLM, codec="bf16", page_tokens=0, scale_codec="fp32")
    for given, taken, row_bytes in ((plain, SGLANG, 256), (SGLANG, plain, 512)):
        sender, receiver = describe(model(given)), describe(model(taken))
        said = [sentence(change, sender, receiver) for change in changes(sender, receiver)]
        crossing = [words for words in said if "of a row cross" in words]
        assert len(crossing) == 2 and all(f"{row_bytes} bytes of a row cross" in words for words in crossing), said


def test_scales_in_another_region_than_their_rows_are_refused() -> None:
    sender, receiver = describe(model(VLLM)), describe(model(PACKED))
    moved = msgspec.structs.replace(
        receiver,
        planes=tuple(
            msgspec.structs.replace(plane, region=plane.region - 1) if plane.part == "index_key_scale" else plane
            for plane in receiver.planes
        ),
    )
    for pools in ((sender, moved), (moved, sender)):
        found = verdict(*pools)
        assert isinstance(found, Incompatible)
        assert any(each.endswith("needs scales in the memory region of their rows") for each in found.reasons), found
