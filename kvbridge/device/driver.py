"""The few CUDA driver calls that torch does not offer, each checked. CUDA is imported at the first call.

All of them work in a device's primary context, the one torch uses, because a process may open another's memory in one
context only. Addresses are plain integers.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import OperatorError
from ..values import Value

KERNEL_GPUS = Path("/proc/driver/nvidia/gpus")
IPC_HANDLE_BYTES = 64
STREAM_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
PCI_ADDRESS_BYTES = 32  # "00000000:15:00.0" and a zero
POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class CudaError(OperatorError):
    """A driver call failed; `result` is CUDA's name for it, such as CUDA_ERROR_INVALID_VALUE."""

    def __init__(self, call: str, result: str, text: str) -> None:
        super().__init__("cuda_failed", f"{call}: {result}: {text}")
        self.result = result


class Gpu(Value):
    """A device of this process. Its context lives as long as the process: nothing here releases it."""

    ordinal: int
    uuid: str
    context: Any

    @classmethod
    def open(cls, device: str) -> Gpu:
        """`device` is "cuda", "cuda:N" as this process counts, or a UUID "GPU-...".

        OperatorError `cuda_unavailable`, or `device_unknown` if this process does not see such a GPU.
        """
        seen = uuids()
        if device in seen:
            ordinal = seen.index(device)
        else:
            name, _, number = device.partition(":")
            ordinal = int(number) if number.isdecimal() else 0 if device == "cuda" else -1
            if name != "cuda" or not 0 <= ordinal < len(seen):
                listed = ", ".join(f"cuda:{i} = {seen[i]}" for i in range(len(seen)))
                raise OperatorError("device_unknown", f"device: {device}, this process sees {listed or 'no GPU'}")
        context = _call("cuDevicePrimaryCtxRetain", _call("cuDeviceGet", ordinal))
        return cls(ordinal, seen[ordinal], context)

    @property
    def device(self) -> str:
        """As torch spells it."""
        return f"cuda:{self.ordinal}"

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this the calling thread's context inside the block. Every function below without `gpu` needs one."""
        _call("cuCtxPushCurrent", self.context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent")

    def use(self) -> None:
        """Make this the calling thread's context from here on."""
        _call("cuCtxSetCurrent", self.context)

    @property
    def pci_address(self) -> str:
        """As the kernel spells it, with four digits for the domain: "0000:15:00.0"."""
        address: bytes = _call("cuDeviceGetPCIBusId", PCI_ADDRESS_BYTES, _call("cuDeviceGet", self.ordinal))
        domain, _, place = address.partition(b"\0")[0].decode().lower().partition(":")
        return f"{int(domain, 16):04x}:{place}"

    @property
    def is_under_mps(self) -> bool:
        """Whether this process is a client of the multi-process service."""
        return bool(_attribute(self, "CU_DEVICE_ATTRIBUTE_MPS_ENABLED"))

    @property
    def has_stream_writes(self) -> bool:
        return bool(_attribute(self, "CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS"))


def uuids() -> list[str]:
    """The UUIDs of the GPUs this process sees, in its own order. A GPU's UUID is the same in every container."""
    _call("cuInit", 0)
    devices = [_call("cuDeviceGet", i) for i in range(_call("cuDeviceGetCount"))]
    return [f"GPU-{uuid.UUID(bytes=bytes(_call('cuDeviceGetUuid', device).bytes))}" for device in devices]


def can_access_peer(gpu: Gpu, peer: str) -> bool | None:
    """Whether `gpu` can reach the memory of the GPU with UUID `peer`. None if this process does not see it."""
    seen = uuids()
    if peer not in seen:
        return None
    ours, theirs = _call("cuDeviceGet", gpu.ordinal), _call("cuDeviceGet", seen.index(peer))
    return peer == gpu.uuid or bool(_call("cuDeviceCanAccessPeer", ours, theirs))


class Allocation(Value):
    """What the driver knows about an address. Base and size of virtual memory are of one physical piece."""

    base: int
    size_bytes: int
    is_managed: bool = False
    is_pooled: bool = False
    is_virtual: bool = False
    is_legacy: bool = False
    handle_types: int = 0

    @property
    def is_exportable(self) -> bool:
        """Whether it can be exported as a file descriptor."""
        return bool(self.handle_types & POSIX_FD)


def allocation(address: int) -> Allocation:
    """The allocation that holds `address`, on a GPU of this process. Raises CudaError for other addresses."""
    base, size_bytes = range_of(address)
    return Allocation(
        base,
        size_bytes,
        is_managed=bool(_pointer("CU_POINTER_ATTRIBUTE_IS_MANAGED", address)),
        is_pooled=int(_pointer("CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE", address)) != 0,
        is_virtual=_is_virtual(address),
        is_legacy=bool(_pointer("CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE", address)),
        handle_types=int(_pointer("CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES", address)),
    )


def range_of(address: int) -> tuple[int, int]:
    """Base and size in bytes of the allocation, or of the virtual mapping, that holds `address`. It may be imported."""
    base, size_bytes = _call("cuMemGetAddressRange", address)
    return int(base), int(size_bytes)


def allocate(size_bytes: int) -> int:
    """Allocate plain memory, which legacy IPC and every fabric accept. At least 256-byte aligned, not cleared."""
    return int(_call("cuMemAlloc", size_bytes))


def free(address: int) -> None:
    _call("cuMemFree", address)


def ipc_export(address: int) -> bytes:
    """The handle of the allocation that holds `address`; it opens at the allocation's base."""
    handle = _call("cuIpcGetMemHandle", address)
    return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)


def ipc_open(payload: bytes) -> int:
    """Map another process's allocation for the current device, even from a peer GPU. Close it once for every open."""
    assert len(payload) == IPC_HANDLE_BYTES, f"payload: {len(payload)} bytes, must be {IPC_HANDLE_BYTES}"
    handle = _cuda().CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), payload, IPC_HANDLE_BYTES)
    return int(_call("cuIpcOpenMemHandle", handle, _cuda().CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value))


def ipc_close(address: int) -> None:
    """Unmap what `ipc_open` mapped. No kernel or copy may still use it."""
    _call("cuIpcCloseMemHandle", address)


def vmm_export(address: int) -> int:
    """A new descriptor of the physical memory behind a virtual address. The caller closes it."""
    handle = _call("cuMemRetainAllocationHandle", address)
    try:
        fd = int(_call("cuMemExportToShareableHandle", handle, _posix_fd(), 0))
    finally:
        vmm_release(handle)
    return fd


def vmm_import(fd: int) -> int:
    """A handle of the physical memory behind a descriptor, which stays the caller's."""
    return int(_call("cuMemImportFromShareableHandle", fd, _posix_fd()))


def vmm_map(gpu: Gpu, handle: int, size_bytes: int) -> int:
    """Map physical memory of exactly `size_bytes` for `gpu` to read and write. Returns the address."""
    address = int(_call("cuMemAddressReserve", size_bytes, 0, 0, 0))
    try:
        _call("cuMemMap", address, size_bytes, 0, handle, 0)
        try:
            _call("cuMemSetAccess", address, size_bytes, [_access(gpu)], 1)
        except BaseException:
            _call("cuMemUnmap", address, size_bytes)
            raise
    except BaseException:
        _call("cuMemAddressFree", address, size_bytes)
        raise
    return address


def vmm_unmap(address: int, size_bytes: int) -> None:
    """Undo `vmm_map`. No kernel or copy may still use the memory."""
    _call("cuMemUnmap", address, size_bytes)
    _call("cuMemAddressFree", address, size_bytes)


def vmm_release(handle: int) -> None:
    """Drop a reference. The memory is freed with its last mapping and descriptor."""
    _call("cuMemRelease", handle)


def host_register(address: int, size_bytes: int) -> int:
    """Pin host pages for every context. Returns the address at which GPUs reach them."""
    flags = _cuda().CU_MEMHOSTREGISTER_PORTABLE | _cuda().CU_MEMHOSTREGISTER_DEVICEMAP
    _call("cuMemHostRegister", address, size_bytes, flags)
    return int(_call("cuMemHostGetDevicePointer", address, 0))


def host_unregister(address: int) -> None:
    _call("cuMemHostUnregister", address)


def new_stream(gpu: Gpu, priority: int = 0) -> int:
    """A non-blocking stream, for torch.cuda.ExternalStream. It lives as long as the process.

    A lower number is a higher priority. torch's own streams come from a pool of 32, made with the first one, which take
    70 MiB (NVIDIA H200, torch 2.11, 2026-11).
    """
    with gpu.current():
        return int(_call("cuStreamCreateWithPriority", STREAM_NON_BLOCKING, priority))


def write_in_order(stream: int, address: int, value: int) -> None:
    """Store 8 bytes once everything enqueued on `stream` has finished and its writes are visible to all."""
    # 0 is CU_STREAM_WRITE_VALUE_DEFAULT, which includes a memory fence.
    _call("cuStreamWriteValue64", stream, address, value, 0)


def copy_to_host(host: int, device: int, size_bytes: int, stream: int) -> None:
    """Enqueue. If `host` is not pinned, the call waits."""
    _call("cuMemcpyDtoHAsync", host, device, size_bytes, stream)


def copy_to_device(device: int, host: int, size_bytes: int, stream: int) -> None:
    """Enqueue. If `host` is not pinned, the call waits."""
    _call("cuMemcpyHtoDAsync", device, host, size_bytes, stream)


def copy_on_device(target: int, source: int, size_bytes: int, stream: int) -> None:
    """Enqueue. A copy engine does it between two GPUs with peer access, a kernel within one GPU."""
    _call("cuMemcpyDtoDAsync", target, source, size_bytes, stream)


def _is_virtual(address: int) -> bool:
    """Whether it was mapped with the virtual memory functions."""
    try:
        handle = _call("cuMemRetainAllocationHandle", address)
    except CudaError as error:
        if error.result == "CUDA_ERROR_INVALID_VALUE":
            return False
        raise
    vmm_release(handle)
    return True


def _access(gpu: Gpu) -> Any:
    cuda = _cuda()
    access = cuda.CUmemAccessDesc()
    access.location = _location(gpu)
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _location(gpu: Gpu) -> Any:
    cuda = _cuda()
    location = cuda.CUmemLocation()
    location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = gpu.ordinal
    return location


def _posix_fd() -> Any:
    return _cuda().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _attribute(gpu: Gpu, name: str) -> Any:
    return _call("cuDeviceGetAttribute", getattr(_cuda().CUdevice_attribute, name), _call("cuDeviceGet", gpu.ordinal))


def _pointer(attribute: str, address: int) -> Any:
    return _call("cuPointerGetAttribute", getattr(_cuda().CUpointer_attribute, attribute), address)


def _cuda() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        remedy = "install cuda-bindings of the CUDA that torch was built for"
        raise OperatorError("cuda_unavailable", f"{error}: {_seen_by_kernel(remedy)}") from error
    return driver


def _call(name: str, *arguments: Any) -> Any:
    """What the driver call returns besides its result: nothing, a value, or a tuple."""
    cuda = _cuda()
    try:
        result, *values = getattr(cuda, name)(*arguments)
    except RuntimeError as error:  # raised by the bindings if there is no libcuda
        remedy = "install the NVIDIA driver's libcuda.so.1"
        raise OperatorError("cuda_unavailable", f"{name}: {error}: {_seen_by_kernel(remedy)}") from error
    if result != cuda.CUresult.CUDA_SUCCESS:
        _raise(cuda, name, result)
    return values[0] if len(values) == 1 else tuple(values)


def _raise(cuda: Any, call: str, result: Any) -> None:
    _, text = cuda.cuGetErrorString(result)
    failure = CudaError(call, result.name, text.decode() if text else "")
    if call == "cuInit":
        remedy = _seen_by_kernel("see nvidia-smi and CUDA_VISIBLE_DEVICES")
        raise OperatorError("cuda_unavailable", f"{failure}: {remedy}") from failure
    raise failure


def _seen_by_kernel(remedy: str) -> str:
    """Which GPUs the kernel's driver has, which says whether `remedy` can help."""
    files = sorted(KERNEL_GPUS.glob("*/information"))
    models = [line.partition(":")[2].strip() for each in files for line in each.read_text().splitlines()[:1]]
    if not models:
        return "this machine has no NVIDIA GPU, or its kernel no driver for it; for the CPU set device to cpu"
    return f"{remedy}; this machine has {', '.join(models)}"
