"""Pairs of real vLLM engines of models with recurrent states, on GPUs: by kvbridge, and by NixlConnector in turns.

    python -m tests.system.gpu.state_pairs --out FOLDER [--only nemotron-equal] [--repeats 11] [--limit-s 300]
    python -m tests.system.gpu.state_pairs --drafts --out FOLDER [--lengths 2,5,129,1000]    engines that draft instead
    python -m tests.system.gpu.state_pairs --cpu --out FOLDER        the same, small, on a CPU: to try the script

Needs vLLM and no network; one GPU, or two for engines of two ranks. Qwen3-Next (Gated DeltaNet) and Nemotron-H (Mamba
2) have a few layers and seeded weights. What is compared and timed is as in `sparse_pairs`; beside the rows of
attention, the states of all layers, byte for byte, by the tests' own reading of vLLM's layers. In "cached" pairs both
sides have the prefix cache, and have most of the prompts whose tokens are compared. NixlConnector wants
VLLM_SSM_CONV_STATE_LAYOUT=DS, which all engines here have.

With --drafts engines draft by MTP or n-grams, other numbers of tokens or on one side only, and nothing is timed. Rows
of a layer that only the decode side has are zeros. `drafted` is how many tokens were drafted and accepted there.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from typing import Any

import numpy as np

from demo.rows import SavedRows
from tests.system.engines.drafts import repetitive
from tests.system.engines.fleet import prompt
from tests.system.engines.states import of_one_rank
from tests.system.gpu.pair_drive import Pair
from tests.system.gpu.pair_engines import NEMOTRON, QWEN, VLLM, RunningVLLM
from tests.system.gpu.pair_run import Found, main
from tests.system.gpu.sparse_pairs import SparseRun
from tests.system.gpu.vllm_pairs import VLLMDrive


def pairs_of(gpus: int) -> list[Pair]:
    """In the order of their worth."""
    far = (0,) if gpus == 1 else (1,)
    pairs: list[Pair] = []
    for model in (NEMOTRON, QWEN):

        def vllm(
            what: str, at: tuple[int, ...], is_nixl: bool = False, has_prefixes: bool = False, model: str = model
        ) -> VLLM:
            same = {"is_nixl": is_nixl, "has_prefixes": has_prefixes, "model": model}
            return VLLM(f"{model}-{what}", at, 32, backend="", **same)  # type: ignore[arg-type]

        beside = Pair(f"{model}-nixl", vllm("nixl-p", (0,), True), vllm("nixl-d", far, True))
        near, there = vllm("p", (0,)), vllm("d", far)
        cached = [vllm(f"cached-{side}", at, has_prefixes=True) for side, at in (("p", (0,)), ("d", far))]
        pairs += [Pair(f"{model}-equal", near, there, beside=beside), Pair(f"{model}-cached", cached[0], cached[1])]
        if gpus > 1:
            ranks = (2, 3) if gpus > 3 else (0, 1)
            two = vllm("two", ranks)
            beside = Pair(f"{model}-nixl2", vllm("nixl-two", ranks, True), vllm("nixl-d", far, True))
            pairs += [Pair(f"{model}-tp2-to-tp1", two, there, beside=beside), Pair(f"{model}-tp1-to-tp2", near, two)]
    return pairs


def drafted_pairs() -> list[Pair]:
    """All on one GPU, in the order of their worth."""

    def vllm(model: str, method: str = "", tokens: int = 0, has_prefixes: bool = False) -> VLLM:
        name = f"{model}-{method or 'plain'}{tokens or ''}{'-cached' * has_prefixes}"
        return VLLM(name, (0,), 32, model=model, backend="", has_prefixes=has_prefixes, drafts=(method, tokens))

    qwen, nemotron = vllm(QWEN), vllm(NEMOTRON)
    three, two, ngrams = vllm(QWEN, "mtp", 3), vllm(QWEN, "mtp", 2), vllm(QWEN, "ngram", 2)
    cached = [vllm(QWEN, "mtp", tokens, has_prefixes=True) for tokens in (3, 2)]
    mamba3, mamba2 = vllm(NEMOTRON, "ngram", 3), vllm(NEMOTRON, "ngram", 2)
    return [
        Pair("qwen-mtp", three, two),
        Pair("qwen-mtp-decode", qwen, two),
        Pair("nemotron-ngram", mamba3, mamba2),
        Pair("qwen-mtp-cached", cached[0], cached[1]),
        Pair("nemotron-ngram-decode", nemotron, mamba2),
        Pair("qwen-ngram-decode", qwen, ngrams),
        Pair("qwen-mtp-prefill", three, qwen),
        Pair("nemotron-ngram-prefill", mamba3, nemotron),
    ]


class StateDrive(VLLMDrive):
    def compare_rows(self) -> str:
        said = super().compare_rows()
        for length in self.row_tokens:
            came = self.decode(prompt(length, seed=350 + length), 2)
            named = (self.sender, came.sender_name), (self.receiver, came.receiver_name)
            ours, theirs = (self._states(where, name, length - 1) for where, name in named)
            assert ours.keys() == theirs.keys() and ours
            for key, rows in ours.items():
                assert rows.any() and np.array_equal(rows, theirs[key]), f"{length} tokens: {key}"
        return said

    def assert_carried(self, given: SavedRows, taken: SavedRows, until: int) -> None:
        """Rows of a layer that the sender has not are zeros."""
        assert not any(rows.any() for key, rows in taken.rows.items() if key not in given.rows)
        both = given.rows.keys() & taken.rows.keys()
        ours, theirs = (SavedRows({key: each.rows[key] for key in sorted(both)}, each.codec) for each in (given, taken))
        super().assert_carried(ours, theirs, until)

    def drafted(self) -> dict[str, int]:
        """On the decode side since the last time."""
        assert isinstance(self.receiver, RunningVLLM)
        steps = [step for steps in self.receiver.engine.ask("drafted", 30.0)["steps"].values() for step in steps]
        return {"drafted": sum(each for each, _ in steps), "accepted": sum(each for _, each in steps)}

    def _states(self, where: Any, name: str, tokens: int) -> dict[str, np.ndarray]:
        assert isinstance(where, RunningVLLM)
        return of_one_rank(where.engine.states(name, tokens, self.engines.folder / "states.npz"))


class StateRun(SparseRun):
    engine = "state"

    @staticmethod
    def more_options(parser: ArgumentParser) -> None:
        parser.add_argument("--drafts", action="store_true", help="engines that draft")

    def every(self) -> list[Pair]:
        return drafted_pairs() if self.chosen.drafts else pairs_of(1 if self.chosen.cpu else self.gpus)

    def prompts(self, length: int) -> list[list[int]]:
        """What drafts of n-grams guess some of."""
        several = range(self.chosen.prompts)
        return (
            [repetitive(length, seed=600 + each) for each in several] if self.chosen.drafts else super().prompts(length)
        )

    def show(self, pair: Pair, found: Found) -> None:
        if not self.chosen.drafts:
            return super().show(pair, found)
        drive = self.drive(pair)
        for length in self.chosen.lengths:
            drive.warm(length)
        drive.row_tokens, found.kv_rows = self.chosen.lengths, "NO"  # unless it returns
        found.kv_rows = drive.compare_rows()
        found.route = drive.receiver.route(drive.sender)
        drive.drafted()
        for length in self.chosen.lengths:
            found.tokens[length] = self.compared(drive, self.prompts(length))
        found.drafted = drive.drafted()

    def drive(self, pair: Pair) -> Any:
        return StateDrive(pair, self.engines)


if __name__ == "__main__":
    sys.exit(main(StateRun, __doc__ or "", "vllm"))
