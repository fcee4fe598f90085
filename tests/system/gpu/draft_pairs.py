"""Engines on one GPU that draft: how many drafts are accepted in a step, by one engine alone and by a pair.

    python -m tests.system.gpu.draft_pairs --out FOLDER [--only mtp,eagle] [--prompts 200] [--at-once 8] [--limit-s 420]
    python -m tests.system.gpu.draft_pairs --only sglang --out FOLDER [--prompts 200] [--steps 3]
    python -m tests.system.gpu.draft_pairs --cpu --only eagle --out FOLDER      the same on the processor

Needs vLLM, or SGLang for the method `sglang` (EAGLE), and no network. For each method an engine alone, and a pair of
other block sizes with an agent each; all on one GPU, with a small seeded model (tests/system/engines/drafts.py) that
guesses right often, but not always:

  one, pair  tokens accepted in a step with drafts, over all prompts
  zeros      the same, over a fifth of the prompts, behind a prefill engine that drafts nothing; `one_of_these` is what
             the engine alone accepts of them
  tokens     prompts that go on as in the engine alone. Few may not: bf16 ties
  rows       KV bytes of both sides compared, the draft's layers too

Writes draft_pairs.json, for `sglang` alone sglang_draft_pairs.json. Exits with 1 if a pair accepts another number than
one engine by more than 1 %, or if rows differ; with 2 if a method could not be run to its end.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench import record
from demo.model import LAYERS
from tests.system.engines import drafts as vllm
from tests.system.engines.drafts import DRAFT_LAYERS, DRAFTED, MORE, PLAIN, repetitive
from tests.system.engines.fleet import prompt
from tests.system.gpu.pair_engines import AGENT_START_S, GPU_ENVIRONMENT, POOL_TOKENS
from tests.system.gpu.pair_run import machine
from tests.system.sglang import drafts as sglang
from tests.system.sglang.rows import assert_carried

MOST_APART = 0.01
SGLANG = "sglang"
ON_GPU = {"device": "cuda:0", "log_level": "debug", "start_s": AGENT_START_S}  # agents' options


class OfVLLM:
    """`pair` are the names of the prefill and the decode engine, `plain` that of one that drafts nothing."""

    pair, plain = ("small", "large"), PLAIN

    class OnGpu(vllm.Drafting):
        agent_options = ON_GPU

    def __init__(self, folder: Path, stack: ExitStack, chosen: argparse.Namespace, method: str) -> None:
        if chosen.cpu:
            self.fleet = vllm.Drafting(folder, stack, method, at_once=chosen.at_once)
            return
        self.fleet = self.OnGpu(
            folder,
            stack,
            method,
            at_once=chosen.at_once,
            engine_options={"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30},
            environment=GPU_ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": "0"},
            options={"kvbridge_connect_s": 60},
        )

    def answers(self, receiver: str, sender: str, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
        """What is decoded, and the drafts accepted in a step."""
        return self.fleet.answers(receiver, sender, prompts), self.fleet.per_step(receiver)

    def compare_rows(self) -> None:
        for sender, receiver in (self.pair, self.pair[::-1]):
            answer, ours, theirs = self.fleet.crossed(sender, receiver, prompt(300, seed=900 + (sender == "small")))
            assert answer.cached == 299 and {layer for layer, _ in theirs.rows} == set(range(self.fleet.layers))
            assert_carried(ours, theirs)


class OfSGLang:
    pair, plain = ("p16-drafts", "d32-drafts"), "p16"

    class OnGpu(sglang.Drafting):
        agent_options = ON_GPU

    def __init__(self, folder: Path, stack: ExitStack, chosen: argparse.Namespace, _: str) -> None:
        if chosen.cpu:
            environment = {"TRITON_INTERPRET": "1"}
            self.fleet = sglang.Drafting(folder, stack, environment=environment, plain=(self.plain,))
            return
        changes = {"gpus": (0,), "dtype": "bfloat16", "max_total_tokens": POOL_TOKENS, "keeps_prefixes": False}
        self.fleet = self.OnGpu(folder, stack, chosen.steps, changes, plain=(self.plain,))

    def answers(self, receiver: str, sender: str, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
        said = self.fleet.many(receiver, sender, prompts)
        return [each["output_ids"] for each in said], sglang.per_step(said)

    def compare_rows(self) -> None:
        (said,) = self.fleet.many(*self.pair[::-1], [prompt(300, seed=900)])
        given, taken = self.fleet.rows(*self.pair, said["room"])
        assert {layer for layer, _ in taken.rows} == set(range(LAYERS + 1))
        assert_carried(given, taken)


def measured(of: OfVLLM | OfSGLang, count: int) -> dict[str, Any]:
    """What one method showed."""
    sender, receiver = of.pair
    prompts = [repetitive(40 + i % 90, seed=i) for i in range(count)]
    for each in (("alone", ""), (receiver, sender)):
        of.answers(*each, prompts[:2])  # kernels are compiled
    began = time.monotonic()
    alone, one = of.answers("alone", "", prompts)
    pair, two = of.answers(receiver, sender, prompts)
    some = [repetitive(40 + i % 90, seed=1000 + i) for i in range(count // 5)]
    found = {
        "one": round(one, 4),
        "pair": round(two, 4),
        "apart": round(abs(two / one - 1), 4),
        "tokens": f"{sum(map(list.__eq__, alone, pair))} of {count}",
        "one_of_these": round(of.answers("alone", "", some)[1], 4),
        "zeros": round(of.answers(receiver, of.plain, some)[1], 4),
        "seconds": round(time.monotonic() - began, 1),
    }
    try:
        of.compare_rows()
    except AssertionError as error:
        return found | {"rows": f"NO: {str(error)[:300]}"}
    return found | {"rows": "equal"}


def main() -> int:
    """The exit code."""
    chosen = _options()
    chosen.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    began = time.monotonic()
    for method in chosen.only:
        if time.monotonic() - began > chosen.limit_s:
            results[method] = {"failure": f"not begun: {chosen.limit_s:.0f} s were spent"}
            continue
        with tempfile.TemporaryDirectory(prefix="drafts-") as name, ExitStack() as stack:
            try:
                make = OfSGLang if method == SGLANG else OfVLLM
                results[method] = measured(make(Path(name), stack, chosen, method), chosen.prompts)
            except Exception as error:  # the other methods are worth their time
                results[method] = {"failure": f"{type(error).__name__}: {str(error)[-3000:]}"}
                traceback.print_exc(limit=-3)
            for log in Path(name).glob("*.log"):
                shutil.copy(log, chosen.out / f"{method}-{log.name}")
        print(method, results[method], flush=True)
        _write(chosen, results)
    if any(each.get("apart", 0) > MOST_APART or "NO" in each.get("rows", "") for each in results.values()):
        return 1
    return 2 if any("failure" in each for each in results.values()) else 0


def _write(chosen: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    about = {"prompts": chosen.prompts, "decoded": MORE}
    if chosen.only == [SGLANG]:
        steps = 1 if chosen.cpu else chosen.steps
        record.write("sglang_draft_pairs", {**machine(SGLANG), "steps": steps, **about, **results[SGLANG]}, chosen.out)
    else:
        record.write("draft_pairs", {**machine("vllm"), "drafted": DRAFTED, **about, "methods": results}, chosen.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the figures and the logs")
    parser.add_argument("--cpu", action="store_true", help="on the processor: to try the script")
    parser.add_argument("--only", default=",".join(DRAFT_LAYERS), type=lambda text: text.split(","), help="methods")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=8, help="requests of vLLM under way at a time")
    parser.add_argument("--steps", type=int, default=3, help="tokens that SGLang drafts in a step")
    parser.add_argument("--limit-s", type=float, default=420.0, help="no method begins after so long")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
