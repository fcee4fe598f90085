"""An engine uses a name again at once, as SGLang does with a room. Real agents and the engines' side of the talk."""

from __future__ import annotations

import importlib.util
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import Offer

from testing.agents import AgentProcess, agent

TOY = Path(__file__).parents[3] / "docs" / "toy_engine.py"
ROOM, TOKENS, WAIT_S = "7", 64, 60.0


def toy_engine() -> Any:
    spec = importlib.util.spec_from_file_location("toy_engine", TOY)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


toy = toy_engine()


class Pair:
    """Two toy engines, each with its agent."""

    def __init__(self, giver: AgentProcess, taker: AgentProcess) -> None:
        self.giver = giver
        self.sender = toy.ToyEngine("prefill", giver.socket, 16, torch.bfloat16, False)
        self.receiver = toy.ToyEngine("decode", taker.socket, 24, torch.float32, True)

    def fetch(self, prompt: torch.Tensor) -> None:
        """What is offered in the room. Fails unless it is this prompt's rows."""
        self.receiver.ended.clear()
        self.receiver.fetch(ROOM, self.sender.talk.address, TOKENS)
        until(lambda: ROOM in self.receiver.ended, self.receiver.step)
        fetched = self.receiver.ended[ROOM]
        assert fetched.is_good, fetched
        assert torch.equal(self.receiver.read(ROOM, TOKENS), toy.kv_of(prompt).float()), "these are another request's"

    def is_offered(self) -> bool:
        return any(offered.request == ROOM for offered in self.giver.status.offers)


def until(holds: Callable[[], bool], step: Callable[[], None] = lambda: None) -> None:
    ends = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < ends
        step()
        time.sleep(0.002)


def prompt_of(seed: int) -> torch.Tensor:
    return torch.randint(0, 1000, (TOKENS,), generator=torch.Generator().manual_seed(seed))


@contextmanager
def pair(folder: Path, route: str) -> Iterator[Pair]:
    with (
        agent(folder, "prefill", device="cpu", routes=route) as giver,
        agent(folder, "decode", device="cpu", routes=route) as taker,
    ):
        made = Pair(giver, taker)
        with closing(made.sender.talk), closing(made.receiver.talk):
            made.sender.attach()
            made.receiver.attach()
            yield made


@pytest.mark.proves("G14")
@pytest.mark.parametrize("route", ["pull", "nixl"])
def test_a_late_answer_to_an_aborted_request_gives_nobody_the_pages_of_the_next(tmp_path: Path, route: str) -> None:
    """`Released` is on the socket when its request is aborted, and the agent hears of that late."""
    first, second, third = map(prompt_of, range(3))
    with pair(tmp_path, route) as made:
        sender, process = made.sender, made.giver.process
        sender.prefill(ROOM, first)
        made.fetch(first)
        until(lambda: not made.is_offered())
        process.send_signal(signal.SIGSTOP)
        assert process.is_stopped(10)
        (number,) = sender.talk._open
        sender.talk.withdraw(number, "aborted")
        until(lambda: ROOM in sender.ended, sender.step)  # the pages are free, and go to the next of that name
        sender.ended.clear()
        sender.prefill(ROOM, second)
        process.send_signal(signal.SIGCONT)
        until(made.is_offered)
        sender.step()
        sender.prefill("another room", third)  # in the pages of the second, if the engine was told that they are free
        made.fetch(second)
        until(lambda: ROOM in sender.ended, sender.step)
        assert sender.ended[ROOM].is_good and not sender.talk.is_open(number)


@pytest.mark.proves("G14")
def test_an_offer_that_ended_early_costs_no_later_one_of_its_name(tmp_path: Path) -> None:
    """Its engine never said the last word on it: the request was aborted meanwhile."""
    second = prompt_of(1)
    with pair(tmp_path, "pull") as made:
        sender = made.sender
        sender.allocate(ROOM, 16)
        pieces = (Blocks(0, 0, tuple(sender.blocks[ROOM])),)
        number = sender.talk.new_number()
        names = {"request": ROOM, "rendezvous": ROOM}
        sender.talk.offer(Offer(number=number, **names, tokens=16, blocks=pieces, is_last=False, hold_s=0.1))
        until(lambda: ROOM in sender.ended, sender.step)
        assert sender.ended.pop(ROOM).code == "offer_expired"
        sender.talk.withdraw(number, "aborted")
        sender.prefill(ROOM, second)
        made.fetch(second)
        until(lambda: ROOM in sender.ended, sender.step)
        assert sender.ended[ROOM].is_good
