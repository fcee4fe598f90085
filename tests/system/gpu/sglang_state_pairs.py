"""SGLang servers of a model with Gated DeltaNet states, on GPUs, with SGLang's own Triton kernels.

    python -m tests.system.gpu.sglang_state_pairs --out FOLDER [--only qwen-16to64] [--repeats 6] [--limit-s 300]
    python -m tests.system.gpu.sglang_state_pairs --cpu --out FOLDER     the same, small, on a CPU: to try the script

Needs SGLang and no network; one GPU, or two for servers of two ranks. Qwen3-Next has a few layers, seeded weights and
no experts, for which SGLang's kernels are not everywhere. Rows, tokens and times are as in `window_pairs`; beside the
rows of attention, the states of all layers are compared byte for byte, by the tests' own reading of SGLang's layers.

Exits with 1 if tokens, rows or states differ, with 2 if a pair could not be run to its end.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from testing.waiting import wait_for
from tests.system.engines.states import of_one_rank
from tests.system.gpu.pair_drive import Pair
from tests.system.gpu.pair_engines import ALONE, QWEN_DENSE, Running, SGLang
from tests.system.gpu.pair_run import main
from tests.system.gpu.window_pairs import Across, WindowRun
from tests.system.sglang import rows


def pairs_of(gpus: int) -> list[Pair]:
    """In the order of their worth."""
    far = (0,) if gpus == 1 else (1,)

    def sglang(what: str, at: tuple[int, ...], page: int) -> SGLang:
        return SGLang(f"{QWEN_DENSE}-{what}{page}-{len(at)}", at, page, model=QWEN_DENSE, role=what)

    near, there = sglang("prefill", (0,), 16), sglang("decode", far, 64)
    pairs = [Pair("qwen-16to64", near, there)]
    if gpus > 1:
        two = (2, 3) if gpus > 3 else (0, 1)
        pairs += [Pair("qwen-tp2-to-tp1", sglang("prefill", two, 16), there)]
        pairs += [Pair("qwen-tp1-to-tp2", near, sglang("decode", two, 64))]
    return pairs


class StateDrive(Across):
    states: dict[str, dict[str, np.ndarray]]  # of the prompt that is looked at, by side

    def _rows(self, where: Running, side: str, came: Any, until: int) -> rows.SavedRows:
        ranks = range(len(where.side.gpus))
        paths = [self.engines.kept / f"{side}-states-{came.room}-{rank}.npz" for rank in ranks]
        for path in paths:
            wait_for(path.exists, 20)
        states = of_one_rank([dict(np.load(path)) for path in paths])
        self.states = ({} if side == "prefill" else self.states) | {side: states}
        return super()._rows(where, side, came, until)

    def assert_carried(self, given: rows.SavedRows, taken: rows.SavedRows, until: int) -> None:
        rows.assert_carried(given, taken)
        ours, theirs = self.states["prefill"], self.states["decode"]
        assert ours.keys() == theirs.keys() and ours
        for key, each in ours.items():
            assert each.any() and np.array_equal(each, theirs[key]), f"{until} tokens: {key}"


class StateRun(WindowRun):
    engine = "sglang_state"

    def every(self) -> list[Pair]:
        super().every()
        return pairs_of(1 if self.chosen.cpu else self.gpus)

    @property
    def server(self) -> SGLang:
        return SGLang(ALONE, (0,), role=ALONE, model=QWEN_DENSE)

    def drive(self, pair: Pair) -> Any:
        return StateDrive(pair, self.engines)


if __name__ == "__main__":
    sys.exit(main(StateRun, __doc__ or "", "sglang"))
