"""SGLang servers on one GPU that draft (EAGLE): how many drafts are accepted in a step, by one server and by a pair.

    python -m tests.system.gpu.sglang_draft_pairs --out FOLDER [--prompts 200] [--steps 3]
    python -m tests.system.gpu.sglang_draft_pairs --cpu --out FOLDER --prompts 24      the same on the processor

Needs SGLang and no network. A server alone, and a pair of pages of 16 and 32 tokens with an agent each; all on one GPU,
with a small seeded model (tests/system/engines/drafts.py) that guesses right often, but not always:

  one, pair  tokens accepted in a step, over all prompts
  zeros      the same, over a fifth of the prompts, behind a prefill server that drafts nothing; `one_of_these` is what
             the server alone accepts of them
  tokens     prompts that go on as in the server alone. Few may not: bf16 ties
  rows       KV bytes of both sides compared, the draft's layer too

Writes sglang_draft_pairs.json. Exits with 1 if a pair accepts another number than one server by more than 1 %, or if
rows differ; with 2 if it could not be run to its end.
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
from demo.model import LAYERS
from tests.system.engines.drafts import MORE, repetitive
from tests.system.engines.fleet import prompt
from tests.system.gpu.draft_pairs import MOST_APART
from tests.system.gpu.pair_engines import AGENT_START_S, POOL_TOKENS
from tests.system.gpu.pair_run import machine
from tests.system.sglang.drafts import Drafting, per_step
from tests.system.sglang.rows import assert_carried

ON_GPU = {"gpus": (0,), "dtype": "bfloat16", "max_total_tokens": POOL_TOKENS, "keeps_prefixes": False}


class OnGpu(Drafting):
    agent_options: Mapping[str, Any] = {"device": "cuda:0", "log_level": "debug", "start_s": AGENT_START_S}


def measured(fleet: Drafting, count: int) -> dict[str, Any]:
    """What it showed."""
    prompts = [repetitive(40 + i % 90, seed=i) for i in range(count)]
    for receiver, sender in (("alone", ""), ("d32-drafts", "p16-drafts")):
        fleet.many(receiver, sender, prompts[:2])  # kernels are compiled
    began = time.monotonic()
    alone = fleet.many("alone", "", prompts)
    pair = fleet.many("d32-drafts", "p16-drafts", prompts)
    one, two = per_step(alone), per_step(pair)
    same = sum(ours["output_ids"] == theirs["output_ids"] for ours, theirs in zip(alone, pair, strict=True))
    some = [repetitive(40 + i % 90, seed=1000 + i) for i in range(count // 5)]
    return {
        "prompts": count,
        "one": round(one, 4),
        "pair": round(two, 4),
        "apart": round(abs(two / one - 1), 4),
        "tokens": f"{same} of {count}",
        "one_of_these": round(per_step(fleet.many("alone", "", some)), 4),
        "zeros": round(per_step(fleet.many("d32-drafts", "p16", some)), 4),
        "seconds": round(time.monotonic() - began, 1),
        "rows": _rows(fleet),
    }


def _rows(fleet: Drafting) -> str:
    (said,) = fleet.many("d32-drafts", "p16-drafts", [prompt(300, seed=900)])
    given, taken = fleet.rows("p16-drafts", "d32-drafts", said["room"])
    try:
        assert {layer for layer, _ in taken.rows} == set(range(LAYERS + 1))
        assert_carried(given, taken)
    except AssertionError as error:
        return f"NO: {str(error)[:300]}"
    return "equal"


def main() -> int:
    """The exit code."""
    chosen = _options()
    chosen.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="drafts-") as name, ExitStack() as stack:
        try:
            if chosen.cpu:
                fleet = Drafting(Path(name), stack, environment={"TRITON_INTERPRET": "1"}, plain=("p16",))
            else:
                fleet = OnGpu(Path(name), stack, chosen.steps, ON_GPU, plain=("p16",))
            found = measured(fleet, chosen.prompts)
        except Exception as error:
            found = {"failure": f"{type(error).__name__}: {str(error)[-3000:]}"}
            traceback.print_exc(limit=-3)
        for log in Path(name).glob("*.log"):
            shutil.copy(log, chosen.out)
    print(found, flush=True)
    about = {
        **machine("sglang"),
        "steps": 1 if chosen.cpu else chosen.steps,
        "prompts": chosen.prompts,
        "decoded": MORE,
    }
    record.write("sglang_draft_pairs", {**about, **found}, chosen.out)
    if "failure" in found:
        return 2
    return int(found["apart"] > MOST_APART or "NO" in found["rows"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the figures and the logs")
    parser.add_argument("--cpu", action="store_true", help="on the processor: to try the script")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--steps", type=int, default=3, help="tokens drafted in a step")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
