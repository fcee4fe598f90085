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

Which pairs of caches can be converted. Two pools of your own: `kvbridge plan A.json B.json`; families of models:
[models.md](models.md).

Written by `make golden`; do not edit. `tests/unit/test_matrix.py` carries each line's cases from one pool to another
and compares them, element by element, with a reference that knows no plan, and sees that nothing moves a refused pair
without an error; `tests/system/gpu/test_matrix.py` sees a GPU write the same bytes. `sender` is the prefill side
([compat.py](../kvbridge/geometry/compat.py)).

"""
TAIL = r"""
Where both sides keep the tokens of a block alike, they travel in units, as many tokens as divide the blocks of both. So
the rows from a request's last token to the end of its unit may hold what the sender's block held before. The engine
never reads them.

## Drafts

Layers of a draft model (EAGLE, MTP, another model) may be on one side only. Those that only the decode side has get
zeros: the draft guesses worse until it has computed rows of its own ([how
much](benchmarks.md#two-vllm-engines-on-gpus)), and the tokens stay right. Refused: a draft model of another name or
shape on the other side. Drafts of n-grams have no rows. Behind a vLLM prefill SGLang's first step has no hidden state
to draft from.

## Rounding

Numbers of 8 bits are rounded to nearest even and saturate. Under a scale s a number x is off by at most

| codec | off by at most | up to |
|---|---|---|
BOUNDS

- s is the receiver's scale: of the plane, of the head or of the row.
- In fp16 and bf16 a number that is too large becomes an infinity, as in torch (bf16's 65520 and more in fp16).
- fp8 on a GPU needs compute capability 8.9.
- vLLM's CPU backend itself rounds fp8 towards zero.

## Scores

DeepSeek V4's compressors keep kv and a score of each token that the next rows will be made of. vLLM has added a weight
to the score, by the token's place in its row; SGLang adds it when it makes the row. Agents copy the scores. When all
rows are there, the receiving engine's process adds the weight, or takes it off, in fp32
([scores.py](../kvbridge/adapters/engine/scores.py)). From SGLang to vLLM that is the sum that vLLM itself makes. From
vLLM to SGLang the sum s is rounded once more: SGLang then adds the weight w to s - w, and gets s with an error of at
most 2^-24 (\|s\| + \|s - w\|). An SGLang decode side that keeps these rows in bf16
(`SGLANG_DSV4_COMPRESS_STATE_DTYPE`) is refused, as it would round twice.

## Index keys

SGLang multiplies the index keys of some models, and its queries, by a Hadamard matrix; vLLM does not. kvbridge decodes
such a key, multiplies it in fp32, and rounds it to fp8 again as vLLM's writers and SGLang's Triton one do (scales up to
a power of two; 1e-4 counts as the least largest number of a row; SGLang's CUDA writer does not round scales, its
readers take any). So a key is rounded twice. The bound above holds for the second; by the first each number is off by
at most 1/16 of the row's length (root of the sum of squares) plus 12 s/1024, with the sender's s.

For a choice of 2048 of 16384 tokens ([index_choices.py](../bench/scenarios/index_choices.py), 64 heads, 64 queries;
39a3188c, a 2-core AMD EPYC), shares of the tokens that are chosen:

| into a cache of | keys | as its own engine would | as fp32 would |
|---|---|---|---|
| vLLM | its own | 1 | 0.971, 0.971 |
| vLLM | converted from SGLang's | 0.969, 0.990 | 0.965, 0.970 |
| SGLang | its own | 1 | 0.971, 0.993 |
| SGLang | converted from vLLM's | 0.965, 0.980 | 0.964, 0.979 |
| either | not converted | 0.134, 0.200 | 0.134, 0.200 |

Of random keys, and of keys near a subspace with four large numbers each, no real model's. At random: 0.125.

Keys whose scales are four exponents (vLLM 0.33 on SM100), to and from a vLLM on other GPUs, keep their values exactly.
Keys that both sides rotate, or neither, with scales of one form, are copied. Through slots converted keys cross as 512
bytes a token, not 132.

## Scales

Rows of an fp8 cache are requantized to the receiver's scales; `kvbridge plan` says by how much they change at most.

With `"kvbridge_scales": "adopt"` on the decode side, vLLM takes the scales of the first engine it fetches from, and
bytes come unchanged: only before a first request, warm-up included, and with `FLASH_ATTN`, `TRITON_ATTN` or `CPU_ATTN`.
Otherwise fetches under other scales fail with `adopt_refused`.

## What adapters refuse

Adapters describe fewer kinds than agents carry:

- The vLLM adapter refuses, by name, when an engine starts: recurrent states in `mamba_cache_mode` `all`, those of Mamba
  1 and lightning beside drafts, and replicated convolutions (Qwen4-exp); index keys in other forms than DeepSeek
  V3.2's, V4's and MiniMax M3's, compressed caches and rings but DeepSeek V4's and V4.1's, attention backends whose
  order of rows it does not know ([those that it does](../kvbridge/adapters/vllm/backends.py)), and caches in NVFP4
  other than FlashInfer's (0.32 or later) and latent rows of 352 bytes. Of int8 it knows only rows with scales of their
  own; MXFP8 vLLM does not have.
- The SGLang adapter: [its limits](sglang.md#limits).
"""


def page() -> str:
    lines = [HEAD.rstrip(), "", "| pair | what is converted, or what stands in the way |", "|---|---|"]
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
        return f"| {row.words} | {converted} |"
    first = next(reason for each in refused for reason in each.reasons)
    return f"| {row.words} | **refused**: `{WHERE.sub('', first)}` |"


if __name__ == "__main__":
    PAGE.write_text(page())
