"""`python -m demo --vllm` and `--cross`: a real engine prefills and another one decodes, behind `kvbridge proxy`.

Two vLLM engines with other blocks; or engines of both kinds, in both directions, with the same blocks and ranks on both
sides and with different ones. Compares the tokens with those of each engine alone, and the KV rows in one engine's
memory with those in the other's.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from kvbridge.loopback.servers import python_with
from testing.http_server import HttpServer

from .model import prompt
from .rows import difference, load, wait_room
from .servers import DemoFleet, DemoServer, ask_vllm, exit_on_signals

PROMPTS = (40, 300, 1000)
DECODED = 16
SAMPLING = {"temperature": 0, "max_new_tokens": DECODED, "ignore_eos": True}
# On a CPU vLLM's blocks are multiples of 32 tokens.
VLLM, VLLM_LARGE = DemoServer("vllm", 32), DemoServer("vllm", 128)
VLLM_TWO = DemoServer("vllm", 64, ranks=2)
PREFILL, DECODE, ALONE = (DemoServer("sglang", 32, role=role) for role in ("prefill", "decode", "alone"))
DECODE_SMALL = DemoServer("sglang", 16, role="decode")
Pairs = dict[str, tuple[tuple[DemoServer, DemoServer], ...]]
OF_VLLM: Pairs = {"vLLM prefills, vLLM decodes": ((VLLM, VLLM_LARGE), (VLLM_LARGE, VLLM))}
ACROSS: Pairs = {
    "vLLM prefills, SGLang decodes": ((VLLM, DECODE), (VLLM, DECODE_SMALL), (VLLM_TWO, DECODE_SMALL)),
    "SGLang prefills, vLLM decodes": ((PREFILL, VLLM), (PREFILL, VLLM_TWO)),
}


@dataclass(frozen=True, slots=True)
class RealOutcome:
    """One prompt through one pair. `difference` is empty if the rows are right."""

    sender: DemoServer
    receiver: DemoServer
    prompt_tokens: int
    moved_bytes: float
    alone: tuple[tuple[int, ...], ...]  # vLLM's, SGLang's if there is one
    carried: tuple[int, ...]
    difference: str
    seconds: float

    @property
    def has_same_tokens(self) -> bool:
        return all(each == self.carried for each in self.alone)

    def complaints(self) -> Iterator[str]:
        if not self.has_same_tokens:
            yield f"decoded {self.carried}, each engine alone {' and '.join(map(str, self.alone))}"
        if self.difference:
            yield self.difference
        if not self.moved_bytes:
            yield "nothing was carried"


def run(pairs: Pairs, chosen: Mapping[str, Path | None]) -> None:
    """`chosen` has the Python of each kind of engine that the pairs need.

    Exit code 1 if a token or a row differs, or nothing was carried. Raises OperatorError.
    """
    exit_on_signals()
    console = Console()
    pythons = {kind: python_with(kind, python, f"--{kind}-python") for kind, python in chosen.items()}
    engines = list(dict.fromkeys(each for group in pairs.values() for pair in group for each in pair))
    engines += [ALONE] if "sglang" in pythons else []
    with tempfile.TemporaryDirectory(prefix="kvbridge-demo-") as folder, ExitStack() as stack:
        console.print(f"making a small model, and starting {len(engines)} real engines (minutes on two cores) ...")
        fleet = DemoFleet(Path(folder), stack, pythons)
        fleet.start(*engines)
        seeds, found = iter(range(1, 1000)), []  # prompts share no prefix
        for direction, group in pairs.items():
            outcomes = [outcome for pair in group for outcome in _carry_all(fleet, seeds, *pair)]
            report(console, direction, outcomes)
            found += outcomes
    conclude(console, found)


def _carry_all(fleet: DemoFleet, seeds: Iterator[int], sender: DemoServer, receiver: DemoServer) -> list[RealOutcome]:
    """Every prompt through this pair."""
    with fleet.proxy(sender, receiver) as proxy:
        return [_carry(fleet, proxy, sender, receiver, prompt(count, next(seeds))) for count in PROMPTS]


def _carry(
    fleet: DemoFleet, proxy: HttpServer, sender: DemoServer, receiver: DemoServer, tokens: list[int]
) -> RealOutcome:
    """One prompt. Each engine is asked alone afterwards, so that no memory has the rows before they are carried."""
    before, began = fleet.moved_bytes(receiver), time.perf_counter()
    carried = _generate(proxy, tokens)
    seconds, moved = time.perf_counter() - began, fleet.moved_bytes(receiver) - before
    wrong = compare(fleet.rows, sender, receiver, len(tokens))
    alone = [tuple(ask_vllm(fleet.servers[VLLM], tokens, DECODED))]
    alone += [_generate(fleet.servers[ALONE], tokens)] if ALONE in fleet.servers else []
    return RealOutcome(sender, receiver, len(tokens), moved, tuple(alone), carried, wrong, seconds)


def _generate(server: HttpServer, tokens: list[int]) -> tuple[int, ...]:
    answer = server.answer("/generate", {"input_ids": tokens, "sampling_params": SAMPLING})
    return tuple(json.loads(answer)["output_ids"])


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


def report(console: Console, direction: str, outcomes: Sequence[RealOutcome]) -> None:
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


def conclude(console: Console, outcomes: Sequence[RealOutcome]) -> None:
    """Say what was compared. Raises typer.Exit(1) if anything is wrong."""
    console.print(
        f"{DECODED} tokens decoded of each prompt, compared with those of each engine alone; the KV rows in the "
        "decoding engine, with the reference conversion of those in the prefilling engine."
    )
    if any(True for outcome in outcomes for _ in outcome.complaints()):
        raise typer.Exit(1)
