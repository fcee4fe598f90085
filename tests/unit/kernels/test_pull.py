"""The pull kernel's twin against gather and scatter through a slot. test_kernels.py tests the kernel itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kvbridge_kernels import launch_ref
from kvbridge_kernels.codecs_ref import Cast, Number
from kvbridge_kernels.launch_ref import move
from kvbridge_kernels.prepared import Prepared

from tests.unit.kernels.chunks import Shape, chunk_of
from tests.unit.kernels.pulls import JOINED, PULLS, WIRES, Ends, check_joined, check_pull, converted, ends_of
from tests.unit.kernels.rows import WHERE, Rows, segment_of

ROOT = Path(__file__).parents[3]


@pytest.fixture(params=[1 << 10, launch_ref.TILE_BYTES], ids=["small tiles", "tiles"], autouse=True)
def tile_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is moved at once says nothing about the result."""
    monkeypatch.setattr(launch_ref, "TILE_BYTES", request.param)


@pytest.mark.parametrize(("sender", "receiver"), PULLS, ids=str)
def test_rows_are_pulled_bit_for_bit(sender: Shape, receiver: Shape) -> None:
    check_pull(move, ends_of([sender], [receiver], 12, 11))


@pytest.mark.parametrize("ends", JOINED.values(), ids=JOINED)
def test_chunks_that_share_launches(ends: Ends) -> None:
    check_joined(move, ends)


@pytest.mark.parametrize("layouts", [("nhd", "hnd"), ("columns", "tiled")])
@pytest.mark.parametrize("old", WIRES)
@pytest.mark.parametrize("new", WIRES)
def test_every_codec_becomes_every_other(old: str, new: str, layouts: tuple[str, str]) -> None:
    for wire in {old, new, "fp32"}:
        for scales in (None, (2, 3)):
            check_pull(move, converted(old, new, wire, scales, layouts))


@pytest.mark.parametrize("sender", WHERE)
@pytest.mark.parametrize("receiver", WHERE)
def test_rows_with_scales_of_their_own_at_both_ends(sender: str, receiver: str) -> None:
    one, size = segment_of(Rows(sender, planes=2), "fp8_e4m3", Number("fp32"), 9, tame=True)
    other, _ = segment_of(Rows(receiver, planes=2, block_tokens=8), "int8", Number("fp32"), 9, seed=3)
    check_pull(move, ([one], [other], size))


@pytest.mark.parametrize("first", [0, 5, 16])
def test_blocks_in_the_order_of_a_table(first: int) -> None:
    """Consecutive tokens of random blocks, 4 and 16 long, from inside of both on."""
    senders, receivers, size = ends_of([Shape("nhd", planes=2)], [Shape("hnd", planes=2, block_tokens=16)], 40, 100)
    tokens = torch.arange(first, first + 100)
    for segments, block_tokens in ((senders, 4), (receivers, 16)):
        table = torch.randperm(40, generator=torch.Generator().manual_seed(block_tokens))
        index = table[tokens // block_tokens % 40] * block_tokens + tokens % block_tokens
        segments[0] = replace(segments[0], places=type(segments[0].places)(index))
    check_pull(move, (senders, receivers, size))


def test_what_does_not_meet_is_refused() -> None:
    senders, receivers, size = ends_of([Shape("nhd", planes=2)], [Shape("hnd", planes=2)], 3, 5)
    late = replace(receivers[0], slot_offset=16)
    fp8, fp16 = (Cast(Number("bf16"), Number(name)) for name in ("fp8_e4m3", "fp16"))
    fewer, _ = chunk_of([Shape("nhd", planes=2)], 3, 4)
    for theirs, reason in [
        ([late], "sender: a plane at byte 0 of the slot, the receiver has none there"),
        ([*receivers, replace(receivers[0], slot_offset=size)], f"receiver: a plane at byte {size} of the slot"),
        ([replace(receivers[0], cast=fp8)], r"the sender has \(2, 5, 128\), the receiver \(2, 5, 64\)"),
        ([replace(receivers[0], places=fewer[0].places)], r"the sender has \(2, 5, 128\), the receiver \(2, 4, 128\)"),
    ]:
        with pytest.raises(ValueError, match=reason):
            Prepared(senders, theirs, 4 * size)
    one = replace(senders[0], cast=fp16)
    with pytest.raises(
        ValueError, match=r"codecs on the wire: \['bf16', 'fp16'\], sender and receiver must have the same"
    ):
        Prepared([one], [replace(receivers[0], cast=Cast(Number("fp16"), Number("bf16")))], size)
    narrow = replace(senders[0], field=replace(senders[0].field, offset=senders[0].field.memory.numel()))
    with pytest.raises(ValueError, match="field ends at byte"):
        Prepared([narrow], receivers, size)


def test_no_places_are_fine() -> None:
    check_pull(move, ends_of([Shape("nhd")], [Shape("hnd")], 3, 0))
