"""`python -m demo --vllm`: a vLLM engine prefills, one with another block size decodes; the tokens are compared."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from kvbridge.loopback.processes import SETTINGS, AgentProcess, EngineProcess, agents, end, moved_bytes, python_with

from .model import prompt
from .vllm_cpu import SETTINGS as VLLM_SETTINGS

START_S = 240.0
ANSWER_S = 60.0
PROMPTS = (40, 300, 1000, 1500)
DECODED = 16
BLOCKS = (32, 128)
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(frozen=True, slots=True)
class VLLMOutcome:
    """One prompt: the decode engine's tokens after the transfer (`carried`), and without one (`alone`)."""

    prompt_tokens: int
    moved_bytes: float
    alone: tuple[int, ...]
    carried: tuple[int, ...]
    alone_s: float
    carried_s: float


def run(python: Path | None) -> None:
    """Exit code 1 if any token differs or nothing was carried. Raises OperatorError without a Python that has vLLM."""
    console = Console()
    found = python_with("vllm", python)
    with tempfile.TemporaryDirectory(prefix="kvbridge-demo-") as folder, ExitStack() as stack:
        where = Path(folder)
        console.print("starting two agents and making a small model ...")
        running = stack.enter_context(agents(where, ("prefill", "decode")))
        maker = _start(stack, where, found, "model", 0, {"make_model": str(where / "model")})
        maker.hear("ready", START_S)
        console.print(f"starting two vLLM engines, blocks of {BLOCKS[0]} and {BLOCKS[1]} tokens (about 30 s) ...")
        engines = [
            _start(stack, where, found, agent.name, core, _job(where, agent, size))
            for core, (agent, size) in enumerate(zip(running, BLOCKS, strict=True))
        ]
        for engine in engines:
            engine.hear("ready", START_S)
        outcomes = [_carry(engines[0], engines[1], running[1], count) for count in PROMPTS]
    _report(console, outcomes)
    if any(outcome.alone != outcome.carried or not outcome.moved_bytes for outcome in outcomes):
        raise typer.Exit(1)


def _job(folder: Path, agent: AgentProcess, block_size: int) -> dict[str, Any]:
    return {
        "model": str(folder / "model"),
        "socket": agent.socket,
        "block_size": block_size,
        "kv_cache_dtype": "auto",
    }


def _start(stack: ExitStack, folder: Path, python: str, name: str, core: int, job: dict[str, Any]) -> EngineProcess:
    cores = sorted(os.sched_getaffinity(0))
    settings = {
        **SETTINGS,
        **VLLM_SETTINGS,
        "VLLM_CPU_OMP_THREADS_BIND": str(cores[core % len(cores)]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    command = ["env", *(f"{key}={value}" for key, value in settings.items())]
    command += [python, "-m", "demo.vllm_engine", json.dumps(job)]
    engine = EngineProcess(name, command, folder / f"{name}.err")
    stack.callback(end, engine.process)
    return engine


def _carry(prefill: EngineProcess, decode: EngineProcess, receiver: AgentProcess, count: int) -> VLLMOutcome:
    """One prompt, once by the decode engine alone, once prefilled by the other engine."""
    tokens = prompt(count)
    alone = _ask(decode, tokens, DECODED, None)
    before = moved_bytes(receiver)
    prefilled = _ask(prefill, tokens, 1, REMOTE_DECODE)
    carried = _ask(decode, tokens, DECODED, prefilled["params"])
    moved, both = moved_bytes(receiver) - before, (alone["seconds"], carried["seconds"])
    return VLLMOutcome(count, moved, tuple(alone["tokens"]), tuple(carried["tokens"]), *both)


def _ask(engine: EngineProcess, tokens: Sequence[int], max_tokens: int, params: Any) -> dict[str, Any]:
    engine.say(json.dumps({"prompt": list(tokens), "max_tokens": max_tokens, "params": params}))
    return engine.hear("answer", ANSWER_S)


def _report(console: Console, outcomes: Sequence[VLLMOutcome]) -> None:
    table = Table(title=f"prefill in blocks of {BLOCKS[0]}, decode in blocks of {BLOCKS[1]}", title_justify="left")
    for column in ("prompt", "KB carried", "alone ms", "carried ms", "tokens", "result"):
        table.add_column(column, justify="left" if column in ("tokens", "result") else "right")
    for outcome in outcomes:
        table.add_row(
            str(outcome.prompt_tokens),
            f"{outcome.moved_bytes / 1e3:.0f}",
            f"{outcome.alone_s * 1e3:.0f}",
            f"{outcome.carried_s * 1e3:.0f}",
            " ".join(map(str, outcome.carried[:6])) + " ...",
            "equal" if outcome.alone == outcome.carried else f"WRONG: alone {outcome.alone}",
        )
    console.print(table)
    console.print(f"{DECODED} tokens decoded of each prompt, compared with the decoding engine all alone.")
