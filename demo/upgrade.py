"""`python -m demo --upgrade-from WHEEL`: two engines of each role and their agents, upgraded one by one under traffic.

At first all run the kvbridge in the wheel, in the end all run this one. In between each version meets the other in
every place. Clients ask `kvbridge proxy` all the time and compare each answer with that of one engine alone.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import typer
from rich.console import Console

from kvbridge.errors import OperatorError
from kvbridge.loopback.servers import python_with

from .model import prompt
from .servers import ask_vllm, exit_on_signals
from .upgrade_fleet import UpgradeFleet, UpgradeMember

CLIENTS = 2
PAUSE_S = 1.0  # of a client, between two requests
SETTLED = 8  # answers to wait for, of requests asked after a step
SETTLE_S = 60.0  # for how long
MOST_COMPUTED = 0.5  # of the prompts after a step, or the versions do not understand each other
PROMPTS = (120, 300, 500, 700)
DECODED = 12


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got. `failure` says why it got no answer. Up to `tokens` of the prompt may have been carried."""

    seconds: float
    tokens: int = 0
    is_wrong: bool = False
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the clients saw for a while, and how many tokens decode engines fetched in that time."""

    answers: Sequence[Answer]
    fetched: float

    def __add__(self, more: Seen) -> Seen:
        return Seen([*self.answers, *more.answers], self.fetched + more.fetched)

    @property
    def computed_share(self) -> float:
        """The share of prompt tokens that decode engines computed again. Requests under way at either end blur it."""
        tokens = sum(each.tokens for each in self.answers)
        return max(0.0, 1 - self.fetched / tokens) if tokens else 0.0

    @property
    def shows_much_carried(self) -> bool:
        """Whether clients were answered after a step, and most of their prompts were not computed again."""
        return len(self.answers) >= SETTLED and self.computed_share <= MOST_COMPUTED

    @property
    def failed(self) -> int:
        return sum(bool(each.failure) for each in self.answers)

    @property
    def wrong(self) -> int:
        return sum(each.is_wrong for each in self.answers)

    def __str__(self) -> str:
        slowest = max((each.seconds for each in self.answers), default=0.0)
        said = f"{len(self.answers)} requests: {self.failed} failed, {self.wrong} wrong, slowest {slowest:.1f} s"
        return f"{said}; {self.computed_share:.0%} of the prompts computed again"


class Traffic:
    """Clients that ask until they are told to stop. `alone`: the prompts, each with the answer of one engine alone."""

    def __init__(self, fleet: UpgradeFleet, alone: Sequence[tuple[list[int], list[int]]]) -> None:
        self._fleet = fleet
        self._fetched = 0.0
        self._alone = alone
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._answers: list[Answer] = []
        self._clients = [threading.Thread(target=self._ask_on, args=(i,)) for i in range(CLIENTS)]

    def __enter__(self) -> Traffic:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the requests under way. `take` has them then."""
        self._stopped.set()
        for client in self._clients:
            client.join()

    def take(self) -> Seen:
        """What the clients saw since the last call."""
        with self._lock:
            taken, self._answers = self._answers, []
        before, self._fetched = self._fetched, self._fleet.fetched()
        return Seen(taken, self._fetched - before)

    def settle(self) -> Seen:
        """Wait for the requests under way and SETTLED more, at most SETTLE_S. Returns what the clients saw."""
        last = time.monotonic() + SETTLE_S
        while len(self._answers) < CLIENTS + SETTLED and time.monotonic() < last:
            time.sleep(0.1)
        return self.take()

    def _ask_on(self, first: int) -> None:
        for tokens, expected in cycle([*self._alone[first:], *self._alone[:first]]):
            answer = self._ask(tokens, expected)
            with self._lock:
                self._answers.append(answer)
            if self._stopped.wait(PAUSE_S):
                return

    def _ask(self, tokens: list[int], expected: list[int]) -> Answer:
        began = time.monotonic()
        try:
            got = ask_vllm(self._fleet.proxy, tokens, DECODED)
        except OperatorError as error:
            return Answer(time.monotonic() - began, failure=str(error).partition(";")[0])
        return Answer(time.monotonic() - began, len(tokens) - 1, got != expected)


def run(wheel: Path, vllm_python: Path | None) -> None:
    """Exit code 1 if a request failed, a token is wrong, or after a step few are answered or most is computed.

    Raises OperatorError.
    """
    exit_on_signals()
    console = Console()
    python = python_with("vllm", vllm_python, "--vllm-python")
    with tempfile.TemporaryDirectory(prefix="kvbridge-demo-") as folder, ExitStack() as stack:
        console.print(
            f"starting four real vLLM engines and their agents, all with {wheel.name} (a minute or two) ...",
            soft_wrap=True,
        )
        fleet = UpgradeFleet(Path(folder), stack, python, wheel)
        fleet.start()
        prompts = [prompt(count, seed) for seed, count in enumerate(PROMPTS, 1)]
        alone = [(tokens, ask_vllm(fleet.members[0].engine, tokens, DECODED)) for tokens in prompts]
        with Traffic(fleet, alone) as traffic:
            found = [_step(console, traffic, "all as in the wheel", lambda: "")]
            for member in fleet.members:
                found.append(_step(console, traffic, f"agent {member.name}", _agent(fleet, member)))
                found.append(_step(console, traffic, f"engine {member.name}", _engine(fleet, member)))
        rest = traffic.take()
    conclude(console, found, rest)


def _agent(fleet: UpgradeFleet, member: UpgradeMember) -> Callable[[], str]:
    def step() -> str:
        drained_s, attached_s = fleet.upgrade_agent(member)
        return f"drained in {drained_s:.1f} s, its engine attached {attached_s:.1f} s after that"

    return step


def _engine(fleet: UpgradeFleet, member: UpgradeMember) -> Callable[[], str]:
    def step() -> str:
        finished_s, absent_s = fleet.upgrade_engine(member)
        return f"finished what it had in {finished_s:.1f} s, was away for {absent_s:.0f} s"

    return step


def _step(console: Console, traffic: Traffic, name: str, step: Callable[[], str]) -> tuple[Seen, Seen]:
    """Do a step. Returns what the clients saw during it, and for a while after."""
    done = step()
    during, after = traffic.take(), traffic.settle()
    console.print(f"[bold]{name}[/bold]  {done}".rstrip(), soft_wrap=True)
    if during.answers:
        console.print(f"  meanwhile  {during}", soft_wrap=True)
    console.print(f"  then       {after}", soft_wrap=True)
    _say_failures(console, during + after)
    return during, after


def _say_failures(console: Console, seen: Seen) -> None:
    for failure in {each.failure for each in seen.answers if each.failure}:
        console.print(f"  [red]failed[/red]: {failure}", highlight=False)


def conclude(console: Console, steps: Sequence[tuple[Seen, Seen]], rest: Seen) -> None:
    """Print the sum of all steps and the rest, under way after them. Exit code 1 as `run` says."""
    whole = sum((during + after for during, after in steps), rest)
    _say_failures(console, rest)
    console.print(f"[bold]all steps[/bold]  {whole}", soft_wrap=True)
    if whole.failed or whole.wrong or not all(after.shows_much_carried for _, after in steps):
        raise typer.Exit(1)
