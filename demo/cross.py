"""`python -m demo --cross`: one real engine prefills and one of the other kind decodes, behind `kvbridge proxy`.

Runs both directions, with the same blocks and ranks on both sides and with different ones. Compares the tokens with
those of each engine alone, and the KV rows in one engine's memory with those in the other's.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from kvbridge.loopback.processes import ServerProcess, python_with

from .cross_engines import CrossFleet, DemoServer
from .model import prompt
from .rows import difference, load, wait_room

ANSWER_S = 60.0
PROMPTS = (40, 300, 1000)
DECODED = 16
SAMPLING = {"temperature": 0, "max_new_tokens": DECODED, "ignore_eos": True}
# On a CPU vLLM's blocks are multiples of 32 tokens.
VLLM, VLLM_TWO = DemoServer("vllm", 32), DemoServer("vllm", 64, ranks=2)
PREFILL, DECODE, ALONE = (DemoServer("sglang", 32, role=role) for role in ("prefill", "decode", "alone"))
DECODE_SMALL = DemoServer("sglang", 16, role="decode")
PAIRS = {
    "vLLM prefills, SGLang decodes": ((VLLM, DECODE), (VLLM, DECODE_SMALL), (VLLM_TWO, DECODE_SMALL)),
    "SGLang prefills, vLLM decodes": ((PREFILL, VLLM), (PREFILL, VLLM_TWO)),
}


@dataclass(frozen=True, slots=True)
class CrossOutcome:
    """One prompt through one pair. `difference` is empty if the rows are right."""

    sender: DemoServer
    receiver: DemoServer
    prompt_tokens: int
    moved_bytes: float
    alone: tuple[tuple[int, ...], tuple[int, ...]]  # vLLM's, SGLang's
    carried: tuple[int, ...]
    difference: str
    seconds: float

    @property
    def has_same_tokens(self) -> bool:
        return all(each == self.carried for each in self.alone)

    def complaints(self) -> Iterator[str]:
        if not self.has_same_tokens:
            yield f"decoded {self.carried}, each engine alone {self.alone[0]} and {self.alone[1]}"
        if self.difference:
            yield self.difference
        if not self.moved_bytes:
            yield "nothing was carried"


def run(vllm_python: Path | None, sglang_python: Path | None) -> None:
    """Exit code 1 if a token or a row differs, or nothing was carried. Raises OperatorError."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    console = Console()
    pythons = {"vllm": python_with("vllm", vllm_python), "sglang": python_with("sglang", sglang_python)}
    with tempfile.TemporaryDirectory(prefix="kvbridge-demo-") as folder, ExitStack() as stack:
        console.print("making a small model, and starting six real engines (3 minutes on two cores) ...")
        fleet = CrossFleet(Path(folder), stack, pythons)
        fleet.start(VLLM, VLLM_TWO, PREFILL, DECODE, DECODE_SMALL, ALONE)
        seeds, found = iter(range(1, 1000)), []  # prompts share no prefix
        for direction, pairs in PAIRS.items():
            outcomes = [outcome for pair in pairs for outcome in _carry_all(fleet, seeds, *pair)]
            report(console, direction, outcomes)
            found += outcomes
    conclude(console, found)


def _leave(number: int, _: Any) -> None:
    """The servers are in process groups of their own, so they must be ended: exit through the stack."""
    raise SystemExit(128 + number)


def _carry_all(fleet: CrossFleet, seeds: Iterator[int], sender: DemoServer, receiver: DemoServer) -> list[CrossOutcome]:
    """Every prompt through this pair."""
    with fleet.proxy(sender, receiver) as proxy:
        return [_carry(fleet, proxy, sender, receiver, prompt(count, next(seeds))) for count in PROMPTS]


def _carry(
    fleet: CrossFleet, proxy: ServerProcess, sender: DemoServer, receiver: DemoServer, tokens: list[int]
) -> CrossOutcome:
    """One prompt. Each engine is asked alone afterwards, so that no memory has the rows before they are carried."""
    before, began = fleet.moved_bytes(receiver), time.perf_counter()
    carried = _generate(proxy, tokens)
    seconds, moved = time.perf_counter() - began, fleet.moved_bytes(receiver) - before
    wrong = compare(fleet.rows, sender, receiver, len(tokens))
    body = {"prompt": tokens, "max_tokens": DECODED, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    of_vllm = fleet.servers[VLLM].ask("/v1/completions", body, ANSWER_S)["choices"][0]["token_ids"]
    alone = (tuple(of_vllm), _generate(fleet.servers[ALONE], tokens))
    return CrossOutcome(sender, receiver, len(tokens), moved, alone, carried, wrong, seconds)


def _generate(server: ServerProcess, tokens: list[int]) -> tuple[int, ...]:
    answer = server.ask("/generate", {"input_ids": tokens, "sampling_params": SAMPLING}, ANSWER_S)
    return tuple(answer["output_ids"])


def compare(folder: Path, sender: DemoServer, receiver: DemoServer, tokens: int) -> str:
    """What is wrong with the rows that the one request in this folder left; empty if nothing is.

    Deletes the files. Raises OperatorError (`no_rows`).
    """
    room = wait_room(folder)
    given = load(folder, "prefill", room, sender.files)
    taken = load(folder, "decode", room, receiver.files)
    for path in folder.glob("*.npz"):
        path.unlink()
    travelled = tokens - 1 if receiver.kind == "vllm" else tokens  # vLLM computes the prompt's last token itself
    return difference(given.first(travelled), taken.first(travelled), travelled)


def report(console: Console, direction: str, outcomes: Sequence[CrossOutcome]) -> None:
    """Print one direction's table, and below it what is wrong."""
    table = Table(title=f"{direction}, fp32", title_justify="left")
    for column in ("prefill", "decode", "prompt", "KB carried", "ms", "tokens", "KV rows"):
        table.add_column(column, justify="right" if column in ("prompt", "KB carried", "ms") else "left")
    for each in outcomes:
        table.add_row(
            each.sender.shape,
            each.receiver.shape,
            str(each.prompt_tokens),
            f"{each.moved_bytes / 1e3:.0f}",
            f"{each.seconds * 1e3:.0f}",
            "equal" if each.has_same_tokens else "WRONG",
            "WRONG" if each.difference else "equal",
        )
    console.print(table)
    for each in outcomes:
        for complaint in each.complaints():
            console.print(f"{each.prompt_tokens} tokens, {each.sender.shape} to {each.receiver.shape}: {complaint}")


def conclude(console: Console, outcomes: Sequence[CrossOutcome]) -> None:
    """Say what was compared. Raises typer.Exit(1) if anything is wrong."""
    console.print(
        f"{DECODED} tokens decoded of each prompt, compared with those of each engine alone; the KV rows in the "
        "decoding engine, with the reference conversion of those in the prefilling engine."
    )
    if any(True for outcome in outcomes for _ in outcome.complaints()):
        raise typer.Exit(1)
