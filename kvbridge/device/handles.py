"""Inside an engine: turns a tensor's storage into something another process can map. Light imports only."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from kvbridge_proto.pool import Handle

from ..errors import OperatorError
from . import driver

SHM = "/dev/shm"
VMM_SIZE_BYTES = 8  # the payload of a vmm_fd handle: the allocation's size, little-endian


def export(storage: torch.UntypedStorage, region: int, fd_index: int, shm: str = SHM) -> tuple[Handle, int | None]:
    """A handle of `storage`, and a new fd if it needs one. The caller sends that as number `fd_index` and closes it.

    CPU memory moves into shared memory in place (`shm` is where torch puts it); every view keeps working. GPU memory
    stays where it is. `region` is the storage's index in the pool; the region's size is `storage.nbytes()`. May be
    called again for the same storage. The memory must stay allocated until the agent has detached.
    Raises OperatorError, with the remedy, for memory that no other process can map.
    """
    if storage.device.type == "cpu":
        return _export_shared(storage, region, fd_index, shm)
    if storage.device.type == "cuda":
        return _export_cuda(storage, region, fd_index)
    raise OperatorError(
        "device_unsupported", f"device: {storage.device.type}, must be cpu or cuda; keep the KV cache there"
    )


def export_all(storages: Iterable[torch.UntypedStorage]) -> tuple[tuple[Handle, ...], list[int]]:
    """Every region's handle, in order, and the fds to send with them, which the caller closes. Raises as `export`."""
    handles: list[Handle] = []
    fds: list[int] = []
    try:
        for region, storage in enumerate(storages):
            handle, fd = export(storage, region, len(fds))
            handles.append(handle)
            fds += [] if fd is None else [fd]
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return tuple(handles), fds


def check_exportable(memory: driver.Allocation, address: int, size_bytes: int) -> None:
    """OperatorError unless another process can map `size_bytes` from `address` on through one handle. Pure.

    Virtual memory in several physical pieces is refused: torch builds an expandable segment of 20 MiB pieces, so a
    cache of 80 GB would need 4096 descriptors held open on both sides and 64 messages to pass them.
    """
    if memory.is_managed:
        raise OperatorError("managed_memory", "KV cache: is managed memory, must be plain; allocate it with cudaMalloc")
    if memory.is_pooled:
        raise OperatorError(
            "pool_memory",
            "KV cache: comes from a CUDA memory pool (cudaMallocAsync), must be plain; "
            "set PYTORCH_CUDA_ALLOC_CONF=backend:native",
        )
    remedy = (
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False in the engine, and start it without sleep mode "
        "(vLLM: no --enable-sleep-mode) or another allocator of virtual memory"
    )
    if memory.is_virtual and not memory.is_exportable:
        raise OperatorError(
            "vmm_not_exportable",
            f"KV cache: is virtual memory created without a POSIX file descriptor handle type; {remedy}",
        )
    end = memory.base + memory.size_bytes
    if memory.is_virtual and address + size_bytes > end:
        raise OperatorError(
            "vmm_in_pieces",
            f"KV cache: {size_bytes} bytes in several physical pieces, of which the first holds {end - address}, "
            f"must be one; {remedy}",
        )
    if not memory.is_virtual and not memory.is_legacy:
        raise OperatorError("ipc_unsupported", f"KV cache: the driver exports no handle of such memory; {remedy}")
    assert address + size_bytes <= end, f"storage: ends {address + size_bytes - end} bytes past its allocation"


def _export_cuda(storage: torch.UntypedStorage, region: int, fd_index: int) -> tuple[Handle, int | None]:
    """Without torch's own `_share_cuda_`, which counts users in a file that containers do not share."""
    gpu, address = driver.Gpu.open(str(storage.device)), storage.data_ptr()
    with gpu.current():
        memory = driver.allocation(address)
        check_exportable(memory, address, storage.nbytes())
        offset = address - memory.base
        if memory.is_virtual:
            size = memory.size_bytes.to_bytes(VMM_SIZE_BYTES, "little")
            fd = driver.vmm_export(address)
            return Handle(region=region, kind="vmm_fd", device=gpu.uuid, payload=size, offset=offset, fd=fd_index), fd
        payload = driver.ipc_export(memory.base)
    return Handle(region=region, kind="cuda_ipc", device=gpu.uuid, payload=payload, offset=offset), None


def _export_shared(storage: torch.UntypedStorage, region: int, fd_index: int, shm: str) -> tuple[Handle, int]:
    if torch.tensor([], dtype=torch.uint8).set_(storage).is_pinned():
        raise OperatorError(
            "pinned_memory",
            "KV cache: is pinned host memory, which cannot move into shared memory under the GPUs that use it; "
            "keep it in GPU memory, or unpinned",
        )
    if not storage.is_shared():
        _check_room(shm, storage.nbytes())
    # The fd belongs to the storage, which returns the same one at every call.
    fd, _size_bytes = storage._share_fd_cpu_()
    return Handle(region=region, kind="shm_fd", fd=fd_index), os.dup(fd)


def _check_room(shm: str, size_bytes: int) -> None:
    """Check first: if shared memory runs out while the storage is copied, the result is a bus fault, not an error."""
    try:
        room = os.statvfs(shm)
    except OSError:
        return
    free_bytes = room.f_bavail * room.f_frsize
    if size_bytes > free_bytes:
        raise OperatorError(
            "shm_full",
            f"{shm}: {free_bytes} bytes free, the KV cache needs {size_bytes}; enlarge it (docker: --shm-size)",
        )
