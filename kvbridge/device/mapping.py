"""Opens handles: maps the regions of an engine's memory, ours or a peer's. And keeps them, for others to open."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import stat
from collections.abc import Sequence
from typing import Any, Protocol, Self

import numpy as np
import torch
from kvbridge_kernels.field import Mapped
from kvbridge_kernels.segment import Span
from kvbridge_proto.pool import Handle

from ..device import driver
from ..errors import EngineError, OperatorError
from ..values import replace
from .handles import VMM_SIZE_BYTES

log = logging.getLogger("kvbridge.mapping")

OWN_MEMORY = {"CUDA_ERROR_INVALID_CONTEXT"}
NO_PEER = {"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "CUDA_ERROR_TOO_MANY_PEERS"}
STALE = {"CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_INVALID_HANDLE", "CUDA_ERROR_MAP_FAILED", "CUDA_ERROR_INVALID_DEVICE"}


class Mappings(Protocol):
    """The mappings of one pool's handles. One thread at a time."""

    def map(self, handle: Handle, size_bytes: int, fds: Sequence[int]) -> torch.Tensor | Mapped:
        """The region's bytes, valid until `close`. EngineError or OperatorError if the handle cannot be opened."""

    def close(self) -> None:
        """Unmap everything at once. No move may be under way, and no tensor may be used afterwards."""


def mappings_for(device: str) -> Mappings:
    """Mappings for our engine's memory. `device` is the agent's: "cpu", or its GPU as torch spells it."""
    return HostMappings() if device == "cpu" else GpuMappings(driver.Gpu.open(device))


def peer_mappings_for(device: str) -> Mappings:
    """Mappings for a peer's memory, which we read and never write."""
    return HostMappings(is_readonly=True) if device == "cpu" else PeerMappings(driver.Gpu.open(device))


class HostMappings:
    """Shared memory in this process's address space. If it is read-only, a write to a tensor of it is a fault."""

    def __init__(self, is_readonly: bool = False) -> None:
        self._access = mmap.PROT_READ if is_readonly else mmap.PROT_READ | mmap.PROT_WRITE
        self._pages: list[mmap.mmap] = []

    def map(self, handle: Handle, size_bytes: int, fds: Sequence[int]) -> torch.Tensor:
        check_kind(handle, "cpu")
        fd = fd_of(handle, fds)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise EngineError("region_unmappable", f"fd of region {handle.region}: is no shared memory")
            check_end(handle, size_bytes, status.st_size, "its fd")
            lead = handle.offset % mmap.ALLOCATIONGRANULARITY
            start = handle.offset - lead
            pages = mmap.mmap(fd, lead + size_bytes, mmap.MAP_SHARED, self._access, offset=start)
        except (OSError, ValueError, OverflowError) as error:
            raise EngineError("region_unmappable", f"region {handle.region}: {error}") from error
        self._pages.append(pages)
        address = int(np.frombuffer(pages, np.uint8).ctypes.data)  # not by torch, which warns of a read-only buffer
        return Span(address + lead, size_bytes).on_cpu()

    def close(self) -> None:
        while self._pages:
            self._pages.pop().close()


class GpuMappings:
    """Memory of another process on `gpu`. An allocation that holds several regions is opened once."""

    def __init__(self, gpu: driver.Gpu) -> None:
        self._gpu = gpu
        self._imported: dict[bytes, int] = {}
        self._mapped: list[tuple[int, int]] = []

    def map(self, handle: Handle, size_bytes: int, fds: Sequence[int]) -> torch.Tensor:
        check_kind(handle, self._gpu.device)
        check_device(handle, self._gpu.uuid)
        with self._gpu.current():
            return wrap(self.open(handle, size_bytes, fds), size_bytes, self._gpu)

    def open(self, handle: Handle, size_bytes: int, fds: Sequence[int]) -> int:
        """Map the region for `gpu`, whichever GPU holds it. Returns its address, raises as `map`. `gpu` is current."""
        check_payload(handle)
        if handle.kind == "cuda_ipc":
            address = self._import(handle)
            check_end(handle, size_bytes, driver.range_of(address)[1], "its allocation")
        else:
            address = self._map_fd(handle, size_bytes, fd_of(handle, fds))
        return address + handle.offset

    def close(self) -> None:
        """Does not wait: every kernel and copy on the regions must have ended."""
        with self._gpu.current(), contextlib.ExitStack() as stack:  # if one fails, the others are still unmapped
            for address in self._imported.values():
                stack.callback(driver.ipc_close, address)
            for address, size_bytes in self._mapped:
                stack.callback(driver.vmm_unmap, address, size_bytes)
            self._imported, self._mapped = {}, []

    def _import(self, handle: Handle) -> int:
        if handle.payload not in self._imported:
            peer = "" if handle.device == self._gpu.uuid else handle.device
            self._imported[handle.payload] = open_ipc(self._gpu, handle.payload, f"region {handle.region}", peer)
        return self._imported[handle.payload]

    def _map_fd(self, handle: Handle, size_bytes: int, fd: int) -> int:
        """Map the whole allocation: the driver cannot map a part of one, nor tell its size."""
        held_bytes = int.from_bytes(handle.payload, "little")
        check_end(handle, size_bytes, held_bytes, "its allocation")
        if handle.device != self._gpu.uuid:
            can_access = driver.can_access_peer(self._gpu, handle.device)
            check_peer(self._gpu.uuid, handle.device, can_access, f"region {handle.region}")
        try:
            physical = driver.vmm_import(fd)
            try:
                address = driver.vmm_map(self._gpu, physical, held_bytes)
            finally:
                driver.vmm_release(physical)
        except driver.CudaError as error:
            reason = f"the fd of region {handle.region}, said to hold {held_bytes} bytes: {error}"
            raise EngineError("region_unmappable", reason) from error
        self._mapped.append((address, held_bytes))
        return address


class PeerMappings:
    """Memory of a peer's engine, which kernels on `gpu` read by address: torch takes no address of another GPU."""

    def __init__(self, gpu: driver.Gpu) -> None:
        self._gpu = gpu
        self._mappings = GpuMappings(gpu)

    def map(self, handle: Handle, size_bytes: int, fds: Sequence[int]) -> Mapped:
        check_kind(handle, self._gpu.device)
        with self._gpu.current():
            return Mapped(self._mappings.open(handle, size_bytes, fds), size_bytes, self._gpu.ordinal)

    def close(self) -> None:
        self._mappings.close()


def open_ipc(gpu: driver.Gpu, payload: bytes, what: str, peer: str = "") -> int:
    """Map another process's allocation for `gpu`. Returns its address. `peer` is the GPU that holds it, if not `gpu`.

    The caller closes it with `driver.ipc_close`, under `gpu.current()`. `what` names it in errors: OperatorError
    `no_peer_access`, EngineError `own_memory` and `region_unmappable`.
    """
    if peer:
        check_peer(gpu.uuid, peer, driver.can_access_peer(gpu, peer), what)
    try:
        with gpu.current():
            return driver.ipc_open(payload)
    except driver.CudaError as error:
        if error.result in NO_PEER:
            raise OperatorError("no_peer_access", f"{what}: {gpu.uuid} and {peer or gpu.uuid}: {error}") from error
        if error.result in OWN_MEMORY:
            reason = "belongs to this process, or to one of the same process id in another container"
            raise EngineError("own_memory", f"{what}: {reason}: {error}") from error
        if error.result in STALE:
            raise EngineError("region_unmappable", f"{what}: {error}") from error
        raise


def wrap(address: int, size_bytes: int, gpu: driver.Gpu) -> torch.Tensor:
    """A uint8 tensor over memory that torch neither copies nor owns."""
    tensor = torch.as_tensor(_Bytes(address, size_bytes), device=gpu.device)
    assert tensor.data_ptr() == address, "torch made a copy"
    return tensor


class _Bytes:
    """Memory in the form that torch accepts."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size_bytes,),
            "strides": None,
            "data": (address, False),
        }


def check_kind(handle: Handle, device: str) -> None:
    """Raises OperatorError for a handle that an agent on `device` cannot open."""
    kinds = ("shm_fd",) if device == "cpu" else ("cuda_ipc", "vmm_fd")
    if handle.kind in kinds:
        return
    wanted = handle.device if handle.kind != "shm_fd" else "cpu"
    raise OperatorError(
        "handle_kind_unsupported",
        f"handle kind: {handle.kind}, this agent on {device} opens {' and '.join(kinds)}; "
        f"start the agent with --device {wanted}",
    )


def check_device(handle: Handle, ours: str) -> None:
    """Raises OperatorError unless the region is on our GPU."""
    if handle.device != ours:
        raise OperatorError(
            "wrong_device",
            f"region {handle.region}: lies on {handle.device}, this agent serves {ours}; "
            f"attach to the agent of that GPU, or start this one with --device {handle.device}",
        )


def check_peer(ours: str, peer: str, can_access: bool | None, what: str) -> None:
    """Raises OperatorError if `can_access` is False. If it is None (unknown), opening the memory will show."""
    if can_access is False:
        raise OperatorError(
            "no_peer_access",
            f"{what}: {ours} cannot access the memory of {peer}; use the route nixl or host between them",
        )


def check_payload(handle: Handle) -> None:
    wanted = driver.IPC_HANDLE_BYTES if handle.kind == "cuda_ipc" else VMM_SIZE_BYTES
    if len(handle.payload) != wanted:
        raise EngineError(
            "region_unmappable", f"payload of region {handle.region}: {len(handle.payload)} bytes, must be {wanted}"
        )


def check_end(handle: Handle, size_bytes: int, held_bytes: int, holder: str) -> None:
    if handle.offset + size_bytes > held_bytes:
        end = handle.offset + size_bytes
        raise EngineError("region_too_small", f"region {handle.region}: ends at byte {end}, {holder} has {held_bytes}")


def fd_of(handle: Handle, fds: Sequence[int]) -> int:
    if handle.fd is None or handle.fd >= len(fds):
        raise EngineError("fd_missing", f"fd of region {handle.region}: {handle.fd}, {len(fds)} came with the message")
    return fds[handle.fd]


class SharedHandles:
    """The handles of one epoch and descriptors of our own, which each handle's `fd` numbers, and `fence`.

    Descriptors of shared memory are read-only: a process that gets one cannot map it for writing. (A process of the
    memory's owner could reopen it through /proc, but could also write to the engine itself.)
    """

    def __init__(self, handles: tuple[Handle, ...], fds: tuple[int, ...], fence: int | None = None) -> None:
        self.handles = handles
        self.fds = fds
        self.fence = fence

    @classmethod
    def keep(cls, handles: Sequence[Handle], fds: Sequence[int], fence_fd: int | None = None) -> Self:
        """Keep the handles of an attach, with descriptors of our own. Its fds stay the caller's.

        And `fence_fd`, that of the fence's page, if our user may open it for reading only.

        OperatorError `not_shareable` for shared memory that our user may not open, EngineError for a missing fd.
        """
        ours: dict[int, int] = {}  # by the fd that came: handles may share one
        try:
            for handle in handles:
                if handle.kind != "cuda_ipc" and (theirs := fd_of(handle, fds)) not in ours:
                    ours[theirs] = _of_our_own(handle, theirs)
        except BaseException:
            _close(list(ours.values()))
            raise
        numbers = {theirs: number for number, theirs in enumerate(ours)}
        kept_fds, fence = [*ours.values()], None
        if fence_fd is not None:
            try:
                kept_fds.append(_read_only(fence_fd))
                fence = len(kept_fds) - 1
            except OSError as error:
                log.info("receivers on this host read nothing ahead: the fence's page cannot be shared: %s", error)
        kept = [replace(each, fd=None if each.kind == "cuda_ipc" else numbers[fd_of(each, fds)]) for each in handles]
        return cls(tuple(kept), tuple(kept_fds), fence)

    def close(self) -> None:
        """Idempotent. Descriptors that other agents were given stay open there."""
        _close(self.fds)
        self.fds = ()


def _of_our_own(handle: Handle, fd: int) -> int:
    try:
        if handle.kind == "shm_fd":
            return _read_only(fd)
        return os.dup(fd)
    except PermissionError as error:
        remedy = "run agent and engine as one user, or set share_memory = false"
        raise OperatorError("not_shareable", f"region {handle.region}: {error.strerror}; {remedy}") from error
    except OSError as error:
        raise EngineError("region_unmappable", f"fd of region {handle.region}: {error.strerror}") from error


def _read_only(fd: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
