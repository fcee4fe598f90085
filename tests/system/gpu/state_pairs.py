"""Pairs of real vLLM engines of models with recurrent states, on GPUs: by kvbridge, and by NixlConnector in turns.

    python -m tests.system.gpu.state_pairs --out FOLDER [--only nemotron-equal] [--repeats 11] [--limit-s 300]
    python -m tests.system.gpu.state_pairs --cpu --out FOLDER        the same, small, on a CPU: to try the script

Needs vLLM and no network; one GPU, or two for engines of two ranks. Qwen3-Next (Gated DeltaNet) and Nemotron-H (Mamba
2) have a few layers and seeded weights. What is compared and timed is as in `sparse_pairs`; beside the rows of
attention, the states of all layers, byte for byte, by the tests' own reading of vLLM's layers. In "cached" pairs both
sides have the prefix cache, and have most of the prompts whose tokens are compared. NixlConnector wants
VLLM_SSM_CONV_STATE_LAYOUT=DS, which all engines here have.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tests.system.engines.fleet import prompt
from tests.system.engines.states import of_one_rank
from tests.system.gpu.pair_drive import Pair
from tests.system.gpu.pair_engines import NEMOTRON, QWEN, VLLM, RunningVLLM
from tests.system.gpu.pair_run import main
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

    def _states(self, where: Any, name: str, tokens: int) -> dict[str, np.ndarray]:
        assert isinstance(where, RunningVLLM)
        return of_one_rank(where.engine.states(name, tokens, self.engines.folder / "states.npz"))


class StateRun(SparseRun):
    engine = "state"

    def every(self) -> list[Pair]:
        return pairs_of(1 if self.chosen.cpu else self.gpus)

    def drive(self, pair: Pair) -> Any:
        return StateDrive(pair, self.engines)


if __name__ == "__main__":
    sys.exit(main(StateRun, __doc__ or "", "vllm"))
