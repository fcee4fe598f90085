"""On the engine's side, memory becomes shared in place, with a descriptor of its own."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import pytest
import torch
from msgspec.structs import replace

from kvbridge.device import driver
from kvbridge.device.handles import check_exportable, export, export_all
from kvbridge.errors import OperatorError
from testing.proc import descriptors
from testing.refusals import refused


def test_views_keep_working_and_the_fd_sees_what_they_write() -> None:
    whole = torch.arange(4096, dtype=torch.int32)
    view = whole[100:200]
    handle, fd = export(whole.untyped_storage(), region=3, fd_index=2)
    try:
        assert (handle.region, handle.kind, handle.fd, handle.device) == (3, "shm_fd", 2, "cpu")
        assert whole.tolist() == list(range(4096))
        view[0] = -7
        with mmap.mmap(fd, whole.untyped_storage().nbytes()) as pages:
            assert int.from_bytes(pages[400:404], "little", signed=True) == -7
    finally:
        os.close(fd)


def test_each_export_gives_a_new_fd_that_is_the_callers() -> None:
    storage = torch.zeros(64, dtype=torch.uint8).untyped_storage()
    _, first = export(storage, 0, 0)
    os.close(first)
    _, second = export(storage, 0, 0)
    assert os.fstat(second).st_size == 64
    assert not os.get_inheritable(second)
    os.close(second)
    storage[0] = 1  # the storage's own fd was not closed with it


def test_refuses_what_does_not_fit_into_shared_memory() -> None:
    with refused(OperatorError, "shm_full", r"0 bytes free, the KV cache needs 64"):
        export(torch.zeros(64, dtype=torch.uint8).untyped_storage(), 0, 0, shm="/proc")  # no room at all


def test_refuses_memory_that_is_not_of_the_cpu() -> None:
    with refused(OperatorError, "device_unsupported", "device: meta"):
        export(torch.empty(64, device="meta").untyped_storage(), 0, 0)


PLAIN = driver.Allocation(base=4096, size_bytes=1000, is_legacy=True)
PIECE = driver.Allocation(base=4096, size_bytes=1000, is_virtual=True, handle_types=driver.POSIX_FD)


@pytest.mark.parametrize(
    ("memory", "size_bytes", "code", "remedy"),
    [
        (replace(PLAIN, is_managed=True), 900, "managed_memory", "allocate it with cudaMalloc"),
        (replace(PLAIN, is_pooled=True, is_legacy=False), 900, "pool_memory", "backend:native"),
        (replace(PIECE, handle_types=0), 900, "vmm_not_exportable", "expandable_segments:False"),
        (replace(PIECE, handle_types=8), 900, "vmm_not_exportable", "no --enable-sleep-mode"),
        (PIECE, 901, "vmm_in_pieces", "901 bytes in several physical pieces, of which the first holds 900"),
        (replace(PLAIN, is_legacy=False), 900, "ipc_unsupported", "exports no handle"),
    ],
)
def test_refuses_gpu_memory_by_name_and_says_the_remedy(
    memory: driver.Allocation, size_bytes: int, code: str, remedy: str
) -> None:
    with refused(OperatorError, code, remedy):
        check_exportable(memory, 4196, size_bytes)


@pytest.mark.parametrize("memory", [PLAIN, PIECE, replace(PIECE, handle_types=driver.POSIX_FD | 8)])
def test_takes_gpu_memory_that_lies_in_one_allocation(memory: driver.Allocation) -> None:
    check_exportable(memory, 4196, 900)


def test_imports_nothing_an_engine_may_lack() -> None:
    code = "import sys; before = set(sys.modules); import torch; torch_has = set(sys.modules)\n"
    code += "import kvbridge.device.handles\n"
    code += "new = {name.split('.')[0] for name in set(sys.modules) - torch_has}\n"
    code += "print(' '.join(sorted(new & {'numpy', 'xxhash', 'zmq', 'nixl', 'triton', 'cuda', 'kvbridge_kernels'})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_exports_every_region_or_leaves_no_descriptor() -> None:
    good = [torch.zeros(64, dtype=torch.uint8).untyped_storage() for _ in range(3)]
    handles, fds = export_all(good)
    assert [(handle.region, handle.fd) for handle in handles] == [(0, 0), (1, 1), (2, 2)] and len(set(fds)) == 3
    for fd in fds:
        os.close(fd)
    before = descriptors()
    with pytest.raises(OperatorError, match="must be cpu or cuda"):
        export_all([*good, torch.empty(64, device="meta").untyped_storage()])
    assert descriptors() == before
