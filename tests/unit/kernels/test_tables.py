"""How tables reach the GPU: one copy of the used part, on the launch's own stream if `work` can copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kvbridge_kernels.field import Axis
from kvbridge_kernels.segment import Places
from kvbridge_kernels.tables import IN_PLACE_BYTES, LaunchTables, Work


def apart(copied: list[tuple[int, int, int, int]]) -> Work:
    """As on a GPU: the table is not the host's."""
    work = Work("cpu", 4096, copy=lambda *told: copied.append(told))
    work.table = torch.zeros_like(work.host)
    return work


def test_what_is_used_is_copied_on_the_stream_that_is_named() -> None:
    copied: list[tuple[int, int, int, int]] = []
    work = apart(copied)
    tables = LaunchTables(work, IN_PLACE_BYTES + 1)
    address = tables.put(torch.arange(5).numpy())
    assert address == work.table.data_ptr()
    tables.upload(77)
    assert copied == [(work.table.data_ptr(), work.host.data_ptr(), 40, 77)]
    tables.upload()  # no stream is named: torch's current one
    assert work.table[:5].tolist() == [0, 1, 2, 3, 4] and len(copied) == 1


def test_small_slots_are_read_in_place() -> None:
    copied: list[tuple[int, int, int, int]] = []
    work = apart(copied)
    tables = LaunchTables(work, IN_PLACE_BYTES)
    assert tables.put(torch.arange(5).numpy()) == work.host.data_ptr()
    tables.upload(77)
    assert not copied


@pytest.mark.parametrize(
    ("block_stride", "tokens"),
    [(64, (Axis(4, 16),)), (100, (Axis(4, 16),)), (7, ()), (512, (Axis(2, 256), Axis(4, 8)))],
    ids=str,
)
def test_offsets_that_were_listed_before_are_used(block_stride: int, tokens: tuple[Axis, ...]) -> None:
    places, other = (Places(np.array([3, 0, 65, 64], np.int64)) for _ in range(2))
    work = Work("cpu", 4096)
    tables = LaunchTables(work, IN_PLACE_BYTES)
    places.list_offsets(block_stride, tokens)
    found = [(tables.offsets(each, block_stride, tokens) - tables.address) // 8 for each in (places, other)]
    assert found == [0, 4] and work.words[:4].tolist() == work.words[4:8].tolist()
    places.offsets[block_stride, tokens] += 1
    tables.offsets(places, block_stride, tokens)
    assert (work.words[8:12] == work.words[:4] + 1).all()
