"""Writes docs/convertible.md: what can be carried, by the verdicts of all cases of each line."""

from __future__ import annotations

import re
from pathlib import Path

from kvbridge.geometry.compat import Incompatible, Same, changes, verdict
from kvbridge.geometry.explain import BOUNDS
from testing.carried import pools_of
from testing.matrix import ROWS, Row

WHERE = re.compile(r" \(layer \d+[^)]*\)")
PAGE = Path(__file__).parents[2] / "docs/convertible.md"
HEAD = """# What can be carried

Which pairs of caches can be converted. For two pools of your own ask `kvbridge plan A.json B.json`; for families of
models see [models.md](models.md). Below the table: [drafts](#drafts), [rounding](#rounding), [scales](#scales),
[what adapters refuse](#what-adapters-refuse).

Written by `python -m tests.support.write_matrix`; do not edit. Each line stands for cases that
`tests/unit/test_matrix.py` carries from one pool to another and compares, element by element, with a reference that
knows no plan; `tests/system/gpu/test_matrix.py` sees a GPU write the same bytes. What differs is converted on the way.
What stands in the way is named with both values, as two agents do when they meet
([compat.py](../kvbridge/geometry/compat.py)): `sender` is the prefill side, `receiver` the decode side. Pairs
that are refused are not carried: the test sees that nothing moves them without an error.

"""
TAIL = """
Several ranks may hold the same rows of a latent. Then each receiver takes them from one of them.

Where both sides keep the tokens of a block alike, they travel in units: as many tokens as divide the blocks of both, a
whole block if these are equal. So the rows between a request's last token and the end of its unit may carry what the
sender's block held before. The engine never reads them, and overwrites them as the request grows.

## Drafts

Layers of a draft model (EAGLE, MTP, another model) may be on one side only. Those that only the prefill side has stay
where they are. Those that only the decode side has get zeros for the prompt's tokens, since a page holds whatever a
request before it left there. The draft then guesses worse until it has computed rows of its own
([how much](benchmarks.md#two-vllm-engines-on-gpus)), and the tokens stay right: the model checks every guess. A draft
model of another name or shape on the other side is refused, and so is a missing layer of the model itself. Drafts of
n-grams have no rows. Behind a vLLM prefill SGLang's first step has no hidden state to draft from, so of a short answer
fewer drafts are accepted.

## Rounding

Numbers of 8 bits are rounded to nearest even and saturate. Under a scale s a number x is off by at most

| codec | off by at most | up to |
|---|---|---|
BOUNDS

- s is the receiver's scale: of the plane, of the head or of the row.
- In fp16 and bf16 a number that is too large becomes an infinity, as in torch's own casts. An engine in bf16 may hold
  numbers that fp16 cannot (65520 and more).
- fp8 on a GPU needs compute capability 8.9.
- vLLM's CPU backend rounds fp8 towards zero when it writes its cache. kvbridge rounds to nearest even.

## Index keys

SGLang multiplies the index keys of some models by a Hadamard matrix, and its queries too; vLLM does not. kvbridge
multiplies such a key on the way: it is decoded, multiplied in fp32, and rounded to fp8 again as vLLM's writers and
SGLang's Triton one do. (The scale is rounded up to a power of two; 1e-4 counts as the least largest number of a row.
SGLang's CUDA writer does not round scales, and its readers take any.) So a key differs from the one that the receiving
engine would have computed by the sender's rounding as well as its own. The bound above holds for the second. The first
is spread over the row: each number is off by at most 1/16 of the row's length (root of the sum of squares) plus
12 s/1024, with the sender's s.

What that means for a choice of 2048 of 16384 tokens ([index_choices.py](../bench/scenarios/index_choices.py), 64
heads, 64 queries; at 39a3188c on a 2-core AMD EPYC), as shares of the tokens that are chosen:

| into a cache of | keys | as its own engine would | as fp32 would |
|---|---|---|---|
| vLLM | its own | 1 | 0.971, 0.971 |
| vLLM | converted from SGLang's | 0.969, 0.990 | 0.965, 0.970 |
| SGLang | its own | 1 | 0.971, 0.993 |
| SGLang | converted from vLLM's | 0.965, 0.980 | 0.964, 0.979 |
| either | not converted | 0.134, 0.200 | 0.134, 0.200 |

The first share is of random keys, the second of keys that lie near a subspace and have four large numbers each; none is
a real model's. 2048 tokens chosen at random would share 0.125.

Keys whose scales are four exponents (vLLM 0.33 on SM100), to and from a vLLM on other GPUs, keep their values exactly.
Keys that both sides rotate, or neither, with scales of one form, are copied. Converted keys cross as 512 bytes a token
where they take slots, not 132; by `pull` nothing more crosses.

## Scales

Rows of an fp8 cache whose scales differ are requantized to the receiver's. `kvbridge plan` says by how much they
change at most.

With `"kvbridge_scales": "adopt"` on the decode side, vLLM instead takes the scales of the first engine it fetches
from, and the bytes come unchanged. This works only before the first request is computed or received there, warm-up
included, and only with the backends `FLASH_ATTN`, `TRITON_ATTN` and `CPU_ATTN`. Otherwise vLLM keeps its own scales,
and fetches of rows under others fail with `adopt_refused`.

## What adapters refuse

The table is about pools as agents see them. Adapters describe fewer kinds:

- The vLLM adapter refuses, by name, when an engine starts: recurrent states other than those of Gated DeltaNet and
  Mamba 2, and these beside a prefix cache, drafts or attention in the same layer; index keys in other forms than
  DeepSeek V3.2's and MiniMax M3's, compressed caches, rings, attention backends whose order of rows it does
  not know ([those that it does](../kvbridge/adapters/vllm/backends.py)), caches in MXFP8, and caches in NVFP4 other
  than latent rows of 352 bytes. Of int8 it knows only rows with scales of their own.
- The SGLang adapter: [its limits](sglang.md#limits).
"""


def page() -> str:
    lines = [HEAD.rstrip(), "", "| pair | carried | what is converted, or what stands in the way | cases |"]
    lines.append("|---|---|---|---|")
    return "\n".join([*lines, *map(_line, ROWS)]) + "\n" + TAIL.replace("BOUNDS", _bounds())


def _bounds() -> str:
    """The lines of the table of rounding."""
    found = [(name.replace("_", " "), bound.off_by.replace("|", r"\|"), bound.up_to) for name, bound in BOUNDS.items()]
    return "\n".join(f"| {name} | {off_by} | {up_to} |" for name, off_by, up_to in found)


def _line(row: Row) -> str:
    pairs = [pools_of(case, number) for number, case in enumerate(row.cases())]
    found = [verdict(*pair) for pair in pairs]
    refused = [each for each in found if isinstance(each, Incompatible)]
    if not refused:
        fields = dict.fromkeys(change.field for pair in pairs for change in changes(*pair))
        converted = ", ".join(f"`{field}`" for field in fields)
        if any(isinstance(each, Same) for each in found):
            converted = f"nothing, or {converted}" if converted else "nothing"
        return f"| {row.words} | yes | {converted} | {len(found)} |"
    first, *others = dict.fromkeys(reason for each in refused for reason in each.reasons)
    alike = f"; {len(others)} more with other values" if others else ""
    return f"| {row.words} | no | `{WHERE.sub('', first)}`{alike} | {len(found)} |"


if __name__ == "__main__":
    PAGE.write_text(page())
