"""Whole transfers by slots and by pulls: both leave the same bytes, and those are what the slow rows say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from kvbridge_kernels.launch_ref import move
from kvbridge_kernels.segment import Span
from kvbridge_kernels.tables import Work

from kvbridge.device.templates import PartSide, Templates
from kvbridge.geometry.plan import Part
from testing.carried import OnCpu, carried
from testing.matrix import ROWS, Case
from testing.oracle import LAYOUTS, Held, Shape, mla
from testing.pools import ranks_of

ALSO_PULLED = {
    *("equal", "codecs", "scales", "row scales", "row scales of equal sides", "block scales"),
    *("latents", "packed latents", "windows", "states", "anything at once"),
}
HYBRID = Shape(layers=4, kinds=("full", "sliding", "state", "chunked"), window=24, blocks=16)
CASES = {
    "tensor parallel": (Shape(tp_size=4, kv_heads=8), Shape(tp_size=1, kv_heads=8, layout="hnd", block_tokens=64)),
    "repeated heads": (Shape(tp_size=8, kv_heads=4), Shape(tp_size=2, kv_heads=4, layout="hnd")),
    "pipeline": (Shape(layers=7, pp_size=3), Shape(layers=7, pp_size=2, layout="cross_layer", block_tokens=8)),
    "context parallel": (Shape(cp_size=2), Shape(cp_size=4, cp_interleave=16, layout="hnd", block_tokens=8)),
    "context and tensor": (Shape(cp_size=2, tp_size=2), Shape(tp_size=4, layout="packed", block_tokens=32)),
    "windows and states": (HYBRID, replace(HYBRID, layout="hnd", block_tokens=8, blocks=24)),
    "states of two ranks": (replace(HYBRID, tp_size=2), replace(HYBRID, tp_size=2, block_tokens=8, blocks=24)),
    "latents": (mla("fp8_ds_mla", layers=3), mla("fp8_ds_mla", layers=3, block_tokens=64, pad_bytes=64)),
    "odd heads": (Shape(kv_heads=3, key_width=7, value_width=9), Shape(kv_heads=3, key_width=7, value_width=9,
                  layout="packed_hnd", block_tokens=24)),
    "scales beside rows": (Shape(codec="fp8_row_scale"), Shape(codec="fp8_row_scale", layout="hnd", tp_size=2)),
}  # fmt: skip
WIDE = Shape(key_width=16, value_width=32, blocks=8)
ODD = Shape(layout="cpu_vec", key_width=24, value_width=12, codec="fp8_e4m3", blocks=8)


class BothWays(OnCpu):
    """By a slot, and then what was there is put back and the same is pulled."""

    def carry(self, sender: Held, gather: Part, receiver: Held, scatter: Part, slot_bytes: int) -> None:
        before = receiver.copy()
        super().carry(sender, gather, receiver, scatter, slot_bytes)
        wanted = receiver.copy()
        for region, was in zip(receiver.memory, before.memory, strict=True):
            region[:] = was
        ours, theirs, slot = self._of(sender), self._of(receiver), torch.zeros(slot_bytes, dtype=torch.uint8)
        self._copier.pull(ours, gather, theirs, scatter, has_digest=True)
        assert all(np.array_equal(*pair) for pair in zip(receiver.memory, wanted.memory, strict=True))
        self._copier.gather(ours, gather, Span(slot.data_ptr(), slot.numel()), "sum64")
        self._copier.digest(ours, gather)
        found, sums = [moved.digest for moved in self._copier.poll()], torch.zeros(1, dtype=torch.int64)
        with ours.hold() as regions, theirs.hold() as receiver_regions:
            sides = PartSide(ours, regions, gather), PartSide(theirs, receiver_regions, scatter)
            move(Templates().of(*sides, gather.chunk.size_bytes), Work("cpu"), None, sums)
        assert found == [int(sums) & (2**64 - 1)] * 3, "a read, a gather and a look have one digest"


@pytest.mark.proves("G4")
@pytest.mark.parametrize("row", [row for row in ROWS if row.name in ALSO_PULLED], ids=lambda row: row.name)
def test_what_is_pulled_is_what_comes_by_slots(row) -> None:
    for number, case in enumerate(row.cases()):
        for rank in row.ranks(case, number):
            assert carried(case, rank, BothWays())[1] == "", case


@pytest.mark.parametrize("name", CASES)
def test_shards_windows_and_states_are_pulled_and_written_to_where_they_belong(name: str) -> None:
    ours, theirs = CASES[name]
    for first, end in ((0, 75), (37, 75), (33, 34)):
        for rank in range(len(ranks_of(theirs))):
            assert carried(Case(ours, theirs, first, end), rank, BothWays())[1] == ""


@pytest.mark.parametrize("receiver", LAYOUTS)
@pytest.mark.parametrize("sender", ["nhd", "cpu_vec", "cpu_amx", "packed_hnd"])
def test_any_layout_becomes_any_other(sender: str, receiver: str) -> None:
    ours = replace(WIDE, layout=sender)
    theirs = replace(ours, layout=receiver, block_tokens=32, blocks=6)
    for first, end in ((0, 75), (37, 75), (32, 64), (5, 6)):
        assert carried(Case(ours, theirs, first, end), 0, BothWays())[1] == ""


@pytest.mark.parametrize(
    "case",
    [
        *(Case(replace(WIDE, layout=layout), replace(WIDE, layout=layout), 0, 75) for layout in LAYOUTS),
        *(Case(replace(WIDE, kv_heads=6, tp_size=ours), replace(WIDE, kv_heads=6, tp_size=theirs), 0, 75)
          for ours, theirs in ((2, 1), (1, 2), (4, 2), (3, 1), (8, 1))),
        *(Case(ODD, replace(ODD, block_tokens=24), 3, 60, slot_bytes) for slot_bytes in (64, 256, 1000, 1 << 20)),
    ],
)  # fmt: skip
def test_the_same_layout_other_ranks_and_slots_of_any_size(case: Case) -> None:
    for rank in range(len(ranks_of(case.receiver))):
        assert carried(case, rank, BothWays())[1] == ""
