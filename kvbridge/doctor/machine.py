"""Checks of the machine, or of the container: GPU, memory between processes, clock."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from ..dataplane.resources import chosen_gpu
from ..device import driver
from ..device.handles import SHM
from ..errors import OperatorError
from .finding import Finding, Subject, failed, not_here, ok, warning
from .neighbour import exporter, told

NVIDIA = Path("/proc/driver/nvidia/version")
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
SHM_BYTES = 1 << 30  # docker gives 64 MiB
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
MPS_PIPES = "/tmp/nvidia-mps"
NAMESPACES = {"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF}  # the inodes of the host's own (include/linux/proc_ns.h)
TIME_ERROR = 5  # of adjtimex: the clock is not synchronised
TIMEX_BYTES = 256  # struct timex has 208
NO_GPU = "no GPU here"


def gpu(subject: Subject, driver_version: Path = NVIDIA) -> Finding:
    """The agent's GPU, and the driver."""
    found = chosen_gpu(subject.config.device)
    if found is None and subject.config.device == "auto" and driver_version.exists():
        return failed(
            f"NVIDIA's driver is loaded ({driver_version}), but this process sees no GPU",
            "in a container: run it with the NVIDIA runtime and --gpus; else look at nvidia-smi",
        )
    if found is None:
        return not_here("device: cpu" if subject.config.device == "cpu" else NO_GPU)
    first = driver_version.read_text().splitlines()[0] if driver_version.exists() else "driver's version unknown"
    return ok(f"{found.device} = {found.uuid}; {first}")


def gpu_ipc(subject: Subject) -> Finding:
    """Whether one process of ours can map the GPU memory of another."""
    found = chosen_gpu(subject.config.device)
    if found is None:
        return not_here(NO_GPU)
    remedy = "give both containers the same GPU and different PIDs (not both 1), and no gVisor or MIG between them"
    try:
        with exporter("lend-gpu", found.device) as (_, handle), found.current():
            driver.ipc_close(driver.ipc_open(bytes.fromhex(handle)))
    except OperatorError as error:
        return failed(str(error), remedy)
    return ok("one process of ours mapped the GPU memory of another")


def mps(subject: Subject) -> Finding:
    """Whether the agent's kernels run beside the engine's, or take turns with them."""
    found = chosen_gpu(subject.config.device)
    if found is None:
        return not_here(NO_GPU)
    if found.is_under_mps:
        return ok("this process is a client of MPS")
    pipes = subject.environment.get("CUDA_MPS_PIPE_DIRECTORY", MPS_PIPES)
    if Path(pipes, "control").exists():
        return warning(
            f"an MPS daemon is at {pipes}, and this process is no client of it",
            "set CUDA_MPS_PIPE_DIRECTORY alike for the engine and the agent, and run both as the daemon's user",
        )
    return ok("no MPS: kernels of the agent and of the engine take turns")


def allocator(subject: Subject) -> Finding:
    """Whether torch's allocator uses expandable segments, pieces of virtual memory that may be impossible to map."""
    settings = {f"our {name}": subject.environment.get(name, "") for name in ALLOCATOR}
    pid = subject.status.engine.pid if subject.status and subject.status.engine else 0
    settings |= {f"{name} of the engine (pid {pid})": value for name, value in _allocator_of(pid).items()}
    for where, value in settings.items():
        if "expandable_segments:true" in value.lower().replace(" ", ""):
            return warning(
                f"{where} is {value}", "take expandable_segments:True out: the engine's memory may be impossible to map"
            )
    if chosen_gpu(subject.config.device) is None:
        return not_here(NO_GPU)
    whose = "ours and the engine's" if pid else "ours; no engine is attached"
    return ok(f"expandable segments are off ({whose})")


def _allocator_of(pid: int) -> dict[str, str]:
    """The allocator's variables of another process; empty if we may not look, or it is in another PID namespace."""
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0") if pid else []
    except OSError:
        return {}
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs) if name in ALLOCATOR}


def namespaces(subject: Subject) -> Finding:
    """Whether the engine and this process share the PID and IPC namespaces."""
    if subject.status is not None and subject.status.engine is not None:
        pid = subject.status.engine.pid
        try:
            apart = [name for name in NAMESPACES if _namespace(pid, name) != _namespace("self", name)]
        except OSError as error:
            return warning(f"the engine's process {pid} cannot be looked at: {error.strerror}", "run as its user")
        if apart:
            return warning(
                f"the engine's process {pid} has other namespaces than this one: {', '.join(apart)}",
                "share them (shareProcessNamespace in a pod, --pid and --ipc of docker); UCX's cuda_ipc needs PID",
            )
        return ok(f"the engine's process {pid} has our PID and IPC namespaces")
    own = [name for name, number in NAMESPACES.items() if _namespace("self", name) != number]
    found = f"{' and '.join(own).upper()} of a container's own" if own else "the host's"
    return ok(f"{found}; no engine is attached to compare with")


def _namespace(pid: int | str, name: str) -> int:
    return os.stat(f"/proc/{pid}/ns/{name}").st_ino


def shm(subject: Subject, folder: str = SHM, least_bytes: int = SHM_BYTES) -> Finding:
    """Whether there is room in shared memory, for engines on a CPU and for UCX."""
    room = os.statvfs(folder)
    free_bytes, size_bytes = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    text = f"{folder}: {free_bytes >> 20} MiB free of {size_bytes >> 20}"
    if free_bytes < least_bytes:
        return failed(
            f"{text}, should be {least_bytes >> 20} or more",
            "enlarge it: docker --shm-size=8g, in a pod an emptyDir of medium Memory at /dev/shm",
        )
    return ok(text)


def ptrace(subject: Subject) -> Finding:
    """Whether one process of ours may read another's memory, as UCX's cma does."""
    scope = f"yama/ptrace_scope {YAMA.read_text().strip()}" if YAMA.exists() else "no yama"
    try:
        with exporter("lend") as (pid, address):
            told("read", str(pid), address)
    except OperatorError as error:
        return failed(
            f"process_vm_readv between two of our processes: {error} ({scope})",
            "add the capability SYS_PTRACE, let seccomp pass process_vm_readv, or set kernel.yama.ptrace_scope to 0 or "
            "1; without it the route nixl on one host goes by TCP",
        )
    return ok(f"process_vm_readv between two of our processes works ({scope})")


def clock(subject: Subject) -> Finding:
    """Whether the wall clock is synchronised. Only logs depend on it: deadlines use the monotonic clock."""
    if ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES)) == TIME_ERROR:
        return warning(
            "the kernel says that the clock is not synchronised",
            "run chrony or systemd-timesyncd on the host, or logs of two hosts cannot be laid side by side",
        )
    return ok("synchronised")
