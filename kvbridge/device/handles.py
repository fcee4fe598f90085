"""Inside an engine: turns a tensor's storage into something another process can map. Light imports only."""

from __future__ import annotations

import os

import torch
from kvbridge_proto.pool import Handle

from ..errors import OperatorError

SHM = "/dev/shm"


def export(storage: torch.UntypedStorage, region: int, fd_index: int, shm: str = SHM) -> tuple[Handle, int]:
    """Move `storage` into shared memory in place and return its handle and a new fd, the caller's to send and close.

    Every view of the storage keeps working. `region` is the storage's index in the pool, `fd_index` the fd's place
    beside the message; the region's size is `storage.nbytes()`; `shm` is where torch puts shared memory. May be
    called again for the same storage.
    OperatorError when the storage is on a device nobody can map yet, or does not fit into shared memory.
    """
    if storage.device.type != "cpu":
        raise OperatorError(
            "device_unsupported", f"device: {storage.device.type}, only cpu memory can be shared; run the engine there"
        )
    if not storage.is_shared():
        _check_room(shm, storage.nbytes())
    # The fd belongs to the storage, which gives the same one at every call.
    fd, _size_bytes = storage._share_fd_cpu_()
    return Handle(region=region, kind="shm_fd", fd=fd_index), os.dup(fd)


def _check_room(shm: str, size_bytes: int) -> None:
    """Running out of shared memory is no error but a bus fault while the storage is copied, so look first."""
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
