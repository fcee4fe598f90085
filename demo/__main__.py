"""The command `python -m demo`: shows on one machine what kvbridge does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbridge.commands.app import told
from kvbridge.config import load
from kvbridge.errors import OperatorError


def demo(
    device: Annotated[
        str, typer.Option(help="Where the engines' memory is: cpu, or GPUs to deal out, such as cuda:0,cuda:1.")
    ] = "cpu",
    routes: Annotated[str, typer.Option(help="Ways that agents may use, the best first.")] = "direct,nixl,host",
    vllm: Annotated[bool, typer.Option("--vllm", help="Two real vLLM engines instead of synthetic ones.")] = False,
    cross: Annotated[bool, typer.Option("--cross", help="A real vLLM engine and one of SGLang, both ways.")] = False,
    upgrade_from: Annotated[
        Path | None,
        typer.Option(
            help="Four real vLLM engines and their agents, upgraded from this wheel one by one under traffic."
        ),
    ] = None,
    vllm_python: Annotated[
        Path | None, typer.Option(help="A Python that has vLLM and kvbridge. Default: .venv-vllm/bin/python.")
    ] = None,
    sglang_python: Annotated[
        Path | None, typer.Option(help="A Python that has SGLang and kvbridge. Default: .venv-sglang/bin/python.")
    ] = None,
) -> None:
    """Two engines that disagree, two agents, real ZeroMQ and NIXL on this machine; every element is checked.

    \b
    Examples:
      python -m demo
      python -m demo --device cuda:0,cuda:1
      python -m demo --vllm --vllm-python .venv-vllm/bin/python
    """
    with told("demo"):
        for each in device.split(","):
            load(flags={"device": each, "routes": routes}, environment={})
        if vllm + cross + (upgrade_from is not None) > 1:
            raise OperatorError("bad_option", "--vllm, --cross and --upgrade-from: one of them")
        if upgrade_from is not None:
            from demo.upgrade import run as run_upgrade

            run_upgrade(upgrade_from, vllm_python)
        elif vllm:
            from demo.real import OF_VLLM
            from demo.real import run as run_real

            run_real(OF_VLLM, {"vllm": vllm_python})
        elif cross:
            from demo.real import ACROSS
            from demo.real import run as run_real

            run_real(ACROSS, {"vllm": vllm_python, "sglang": sglang_python})
        else:
            from demo.run import run

            run(devices=device.split(","), routes=routes)


if __name__ == "__main__":
    typer.run(demo)
