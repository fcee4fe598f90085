"""The second process of checks that need two: `python -m kvbridge.doctor.neighbour WORD ...`.

lend           prints the address of a page of its memory, and waits
read PID AT    reads that page out of another process
lend-gpu DEV   prints the CUDA IPC handle of memory on this GPU, and waits
nixl DEVICES   starts NIXL's UCX backend and prints its plugins; if UCX aborts, only this process ends

`told` and `exporter` start it with a time limit, and always end it.
"""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from ..errors import OperatorError

COMMAND = (sys.executable, "-m", "kvbridge.doctor.neighbour")
NEIGHBOUR_ANSWER_S = 30.0


def told(*words: str) -> str:
    """The output of a neighbour that ends by itself. Raises OperatorError (`neighbour_failed`) with its last line."""
    try:
        done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=NEIGHBOUR_ANSWER_S)
    except subprocess.TimeoutExpired:
        raise OperatorError("neighbour_failed", f"{words[0]}: no answer in {NEIGHBOUR_ANSWER_S:g} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        raise OperatorError("neighbour_failed", lines[-1])
    return done.stdout.strip()


@contextmanager
def exporter(*words: str) -> Iterator[tuple[int, str]]:
    """Run a neighbour that exports something. Yields its PID and what it printed. Raises as `told` does."""
    with subprocess.Popen(
        [*COMMAND, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            ready, _, _ = select.select([process.stdout], [], [], NEIGHBOUR_ANSWER_S)
            line = process.stdout.readline().strip() if ready else ""
            if not line:
                process.kill()
                lines = process.stderr.read().strip().splitlines() or [
                    f"{words[0]}: no answer in {NEIGHBOUR_ANSWER_S:g} s"
                ]
                raise OperatorError("neighbour_failed", lines[-1])
            yield process.pid, line
        finally:
            process.kill()


PATTERN = b"kvbridge doctor "
GPU_BYTES = 2 << 20
PR_SET_PTRACER, ANY_PROCESS = 0x59616D61, ctypes.c_ulong(-1)


class LentPiece(ctypes.Structure):
    """The kernel's `struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


def main() -> None:
    match sys.argv[1:]:
        case ["lend"]:
            _lend()
        case ["read", pid, address]:
            _read(int(pid), int(address))
        case ["lend-gpu", device]:
            _lend_gpu(device)
        case ["nixl", devices]:
            _start_nixl(devices)
        case words:
            sys.exit(f"neighbour: {words}?")


def _lend() -> None:
    page = ctypes.create_string_buffer(PATTERN)
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ANY_PROCESS, 0, 0, 0)  # as UCX does under yama
    print(ctypes.addressof(page), flush=True)
    sys.stdin.readline()


def _read(pid: int, address: int) -> None:
    page = ctypes.create_string_buffer(len(PATTERN))
    ours, theirs = LentPiece(ctypes.addressof(page), len(PATTERN)), LentPiece(address, len(PATTERN))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    count = libc.process_vm_readv(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
    if count < 0:
        sys.exit(os.strerror(ctypes.get_errno()))
    if page.raw != PATTERN:
        sys.exit(f"read {count} bytes, and not those that are there")


def _lend_gpu(device: str) -> None:
    from ..device import driver

    with driver.Gpu.open(device).current():
        print(driver.ipc_export(driver.allocate(GPU_BYTES)).hex(), flush=True)
        sys.stdin.readline()


def _start_nixl(devices: str) -> None:
    from ..transport.fabric_nixl import NixlFabric

    fabric = NixlFabric("doctor", net_devices=devices)
    print(f"nixl {version('nixl')}, plugins {', '.join(sorted(fabric.plugins))}", flush=True)
    fabric.close()


if __name__ == "__main__":
    main()
