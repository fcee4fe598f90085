"""Slots: where they are and how large."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from kvbridge_proto.peer import PROBE_LANES

from kvbridge.device.staging import Staging
from kvbridge.errors import OperatorError
from testing.proc import resident_bytes


def test_slots_lie_one_behind_the_other_from_a_page_border_on() -> None:
    with closing(Staging.pageable(slot_bytes=192, slots=5)) as staging:
        assert staging.base % mmap.PAGESIZE == 0
        assert [staging.address(i) - staging.base for i in range(5)] == [0, 192, 384, 576, 768]
        assert [staging.span(i).address for i in range(5)] == [staging.address(i) for i in range(5)]
        assert staging.size_bytes == 6 * 192
        staging.span(3).on_cpu().fill_(9)
        slots = [staging.span(i).on_cpu() for i in (2, 3, 4)]
        assert slots[0].max() == 0 and slots[1].min() == 9 and slots[2].max() == 0


def test_lanes_lie_behind_the_slots_and_apart_from_each_other() -> None:
    with closing(Staging.pageable(slot_bytes=4096, slots=2)) as staging:
        lanes = [staging.lane(i) for i in range(PROBE_LANES)]
        assert lanes[0].address == staging.base + 2 * 4096
        assert all(one.address + one.size_bytes == other.address for one, other in pairwise(lanes))
        assert lanes[-1].address + lanes[-1].size_bytes == staging.base + staging.size_bytes
        assert staging.lane(PROBE_LANES) == lanes[0]


def test_a_slot_can_be_shorter() -> None:
    with closing(Staging.pageable(slot_bytes=128, slots=2)) as staging:
        assert staging.span(1).size_bytes == 128
        assert staging.span(1, 100).size_bytes == 100
        assert staging.span(1, 0).size_bytes == 0
        with pytest.raises(AssertionError, match="size_bytes: 129, slot_bytes 128"):
            staging.span(1, 129)
        for index in (-1, 2):
            with pytest.raises(AssertionError, match=f"slot: {index} of 2"):
                staging.address(index)


def test_close_gives_the_memory_back() -> None:
    size_bytes = 64 << 20
    staging = Staging.pageable(slot_bytes=size_bytes, slots=1)
    address = f"{staging.base:x}-"
    assert resident_bytes() > size_bytes
    before = resident_bytes()
    staging.close()
    assert before - resident_bytes() > size_bytes // 2
    assert address not in Path("/proc/self/maps").read_text()
    with pytest.raises(AssertionError, match="staging is closed"):
        staging.span(0)


@pytest.mark.parametrize(("slot_bytes", "slots"), [(0, 1), (100, 1), (64, 0), (-64, 1)])
def test_refuses_sizes_that_cannot_be(slot_bytes: int, slots: int) -> None:
    with pytest.raises(OperatorError, match=f"slot_bytes: {slot_bytes}") as caught:
        Staging.pageable(slot_bytes, slots)
    assert caught.value.code == "slot_bytes"


@pytest.mark.proves("G6")
def test_what_is_sealed_takes_no_write_and_its_addresses_no_other_memory() -> None:
    size_bytes = 64 << 20
    staging = Staging.pageable(slot_bytes=size_bytes, slots=1)
    before = resident_bytes()
    assert staging.seal() == 0
    assert before - resident_bytes() > size_bytes // 2
    line = next(line for line in Path("/proc/self/maps").read_text().splitlines() if f"{staging.base:x}-" in line)
    assert " ---p " in line
    assert write_as_a_peer(staging.base) == errno.EFAULT
    staging.close()
    gc.collect()
    assert f"{staging.base:x}-" in Path("/proc/self/maps").read_text(), "something else may be put there now"
    assert staging.seal() == 0


def test_memory_of_a_gpu_stays_ours_when_it_is_sealed() -> None:
    freed: list[bool] = []
    staging = Staging(4096, 3, "vram", 1 << 40, lambda: freed.append(True))
    assert staging.seal() == staging.size_bytes == 4 * 4096
    staging.close()
    assert not freed and staging.seal() == 0


def write_as_a_peer(address: int) -> int:
    """How UCX writes to another process of the machine; 0 or the errno."""

    class Piece(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))

    libc, ours = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(8)
    pieces = [Piece(ctypes.addressof(ours), 8), Piece(address, 8)]
    written = libc.process_vm_writev(os.getpid(), ctypes.byref(pieces[0]), 1, ctypes.byref(pieces[1]), 1, 0)
    return 0 if written == 8 else ctypes.get_errno()
