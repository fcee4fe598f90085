"""Pairs of real engines of models with sliding windows, on GPUs: gpt-oss between vLLM engines, and across engines.

    python -m tests.system.gpu.window_pairs --out FOLDER [--only gpt-oss-64to16] [--repeats 11] [--limit-s 300]
    python -m tests.system.gpu.window_pairs --cpu --out FOLDER        the same, small, on a CPU: to try the script

Needs vLLM and no network; one GPU, or two for engines of two ranks. The pairs across engines need SGLang as well. All
models have four layers and seeded weights. gpt-oss has experts and sinks. Across engines it is Laguna, without experts,
with gpt-oss's widths and window: SGLang's kernels for experts are not everywhere. For each pair, before its times:

  rows       KV bytes on the decode side compared with those on the prefill side: of full layers all, of layers with a
             window those that the next tokens see
  tokens     compared with the decode engine alone, as `sparse_pairs` does, across engines as `cross_pairs` does

Then each prompt length: of vLLM's equal pair in turns with NixlConnector, as in `sparse_pairs`. Across engines, and to
SGLang, `transfer` and `ttft` are those of `cross_pairs`.

Exits with 1 if tokens or rows differ, with 2 if a pair could not be run to its end.
"""

from __future__ import annotations

import sys
from typing import Any

from demo.model import LAYERS
from demo.vllm_rows import LATER
from tests.system.engines.kinds import GPT_OSS_WINDOW
from tests.system.gpu.cross_pairs import CrossDrive
from tests.system.gpu.pair_drive import TIE, Drive, Pair, apart
from tests.system.gpu.pair_engines import ALONE, GPT_OSS, LAGUNA, VLLM, RunningVLLM, SGLang, Side, Voice
from tests.system.gpu.pair_run import main
from tests.system.gpu.sparse_pairs import SparseRun
from tests.system.gpu.vllm_pairs import VLLMDrive
from tests.system.sglang import rows

WINDOWED = {GPT_OSS: range(0, LAYERS, 2), LAGUNA: (1, 2)}  # layers


def pairs_of(gpus: int, is_cpu: bool = False) -> list[Pair]:
    """In the order of their worth. vLLM on a CPU has no blocks of 16 tokens that its kernels like."""
    far, small, large = (0,) if gpus == 1 else (1,), *((32, 128) if is_cpu else (16, 64))

    def vllm(what: str, at: tuple[int, ...], block: int = small, model: str = GPT_OSS, is_nixl: bool = False) -> VLLM:
        backend = "FLASH_ATTN" if model == GPT_OSS else "TRITON_ATTN"
        name, is_noted = f"{model}-{what}", model == LAGUNA
        return VLLM(name, at, block, is_nixl=is_nixl, model=model, backend=backend, is_noted=is_noted)

    def sglang(what: str, at: tuple[int, ...], page: int) -> SGLang:
        return SGLang(f"{LAGUNA}-{what}{page}", at, page, model=LAGUNA, role=what)

    beside = Pair(f"{GPT_OSS}-nixl", vllm("nixl-p", (0,), is_nixl=True), vllm("nixl-d", far, is_nixl=True))
    near, there, wide = vllm("p", (0,)), vllm("d", far), vllm("large", (0,), large)
    pairs = [
        Pair(f"{GPT_OSS}-equal", near, there, beside=beside),
        Pair(f"{GPT_OSS}-{large}to{small}", wide, there),
        Pair(f"{GPT_OSS}-{small}to{large}", near, vllm("large-d", far, large)),  # without a prefix cache
    ]
    if gpus > 1:
        two = vllm("two", (2, 3) if gpus > 3 else (0, 1))
        pairs += [Pair(f"{GPT_OSS}-tp2-to-tp1", two, there), Pair(f"{GPT_OSS}-tp1-to-tp2", near, two)]
    ours, theirs = vllm("p", (0,), model=LAGUNA), vllm("d", far, model=LAGUNA)
    pairs += [
        Pair(f"{LAGUNA}-vllm{small}-to-sglang64", ours, sglang("decode", far, 64)),
        Pair(f"{LAGUNA}-sglang64-to-vllm{small}", sglang("prefill", (0,), 64), theirs),
        Pair(f"{LAGUNA}-sglang16-to-64", sglang("prefill", (0,), 16), sglang("decode", far, 64)),
    ]
    return pairs


class Windowed(Drive):
    def assert_carried(self, given: rows.SavedRows, taken: rows.SavedRows, until: int) -> None:
        first = max(0, until + 1 + LATER + 1 - GPT_OSS_WINDOW)  # the prefill side may have one token more
        rows.assert_windows_carried(given, taken, WINDOWED[self.pair.sender.model], first)


class OfVLLM(Windowed, VLLMDrive):
    pass


class Across(Windowed, CrossDrive):
    def warm(self, length: int) -> None:
        """The first request is not among the medians."""


class WindowRun(SparseRun):
    engine = "window"
    says_the_same_on_cpus = True

    def every(self) -> list[Pair]:
        self.voices: dict[tuple[int, ...], Voice] = {}  # of the SGLang server alone, by prompt
        return pairs_of(self.gpus, self.chosen.cpu)

    @property
    def server(self) -> SGLang:
        return SGLang(ALONE, (0,), role=ALONE, model=LAGUNA)

    def alone(self) -> list[Side]:
        has_servers = any(isinstance(side, SGLang) for pair in self.pairs for side in (pair.sender, pair.receiver))
        return [self.server] if has_servers else []

    def begin(self) -> None:
        for length in self.chosen.lengths if self.alone() else ():
            for tokens in self.prompts(length):
                self.voices[tuple(tokens)] = self.engines.get(self.server).voice(tokens)

    def drive(self, pair: Pair) -> Any:
        of = OfVLLM if isinstance(pair.sender, VLLM) and isinstance(pair.receiver, VLLM) else Across
        return of(pair, self.engines)

    def compared(self, drive: Any, prompts: list[list[int]]) -> str:
        own, other = ([self._voice(side, tokens) for tokens in prompts] for side in (drive.receiver, drive.sender))
        said: str = drive.compare(prompts, max(TIE, 2 * apart(own, other)), own, other)
        return said

    def _voice(self, side: Any, tokens: list[int]) -> Voice:
        return side.voice(tokens) if isinstance(side, RunningVLLM) else self.voices[tuple(tokens)]


if __name__ == "__main__":
    sys.exit(main(WindowRun, __doc__ or "", "vllm", "sglang"))
