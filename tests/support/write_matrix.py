"""Writes docs/convertible.md: what can be carried, each line judged by the verdict over all of its cases."""

from __future__ import annotations

from pathlib import Path

from kvbridge.geometry.compat import Incompatible, Same, changes, verdict
from tests.support.carried import pools_of
from tests.support.matrix import ROWS, Row

PAGE = Path(__file__).parents[2] / "docs/convertible.md"
HEAD = """# What can be carried

`kvbridge plan A.json B.json` says of two pools whether they fit, what would be converted and what that means. This page
says it of kinds of pairs. [Rounding](#rounding), [scales](#scales) and [what adapters refuse](#what-adapters-refuse)
stand below the table.

Written by `python -m tests.support.write_matrix`; do not edit. Each line stands for the cases that
`tests/unit/test_matrix.py` carries from one pool to another and compares, element by element, with a reference that
knows no plan; `tests/system/gpu/test_matrix.py` sees a GPU write the same bytes. The verdict is the one that two agents
reach when they meet. What differs is converted on the way. What stands in the way is named as below, with both values;
in those texts `source` is the prefilling side and `sink` the decoding one. Pairs that are refused are not carried: the
test sees that nothing moves them without an error.

"""
TAIL = """
Where several ranks hold the same rows of a latent, each receiver takes them from one.

On equal sides whole blocks travel, so the unused end of a request's last block may carry what the sender's block held
before. The engine never reads it: it is beyond the request's length, and is overwritten as the request grows.

## Rounding

Numbers of 8 bits are rounded to nearest even and saturate. Under a scale s a number x is off by at most

| codec | off by at most | up to |
|---|---|---|
| fp8 e4m3 | \\|x\\|/16 + s/1024 | 448 s |
| fp8 e5m2 | \\|x\\|/8 + s/131072 | 57344 s |
| int8 | s/2 | 127 s |

s is of the plane, of the head or of the row, as the receiver keeps it. In fp16 and bf16 what is too large becomes an
infinity, as in torch's own casts: an engine in bf16 may hold numbers that fp16 has not (65520 and more). fp8 on a GPU
needs compute capability 8.9. vLLM's CPU backend rounds fp8 towards zero when it writes its cache; kvbridge rounds to
nearest even.

## Scales

Rows of an fp8 cache whose scales differ are requantized to the receiver's (`kvbridge plan` says by how much they change
at most). With `"kvbridge_scales": "adopt"` on the decode side, vLLM takes the scales of the first engine it fetches
from, and the bytes come as they are. This works only before the first request is computed or received there, warm-up
included, and with the backends `FLASH_ATTN`, `TRITON_ATTN` and `CPU_ATTN`. Otherwise vLLM keeps its own scales, and
fetches of rows under others fail with `adopt_refused`, which names both.

## What adapters refuse

This page is of pools as agents see them. The vLLM adapter describes fewer: when an engine starts it refuses, by name,
layers with recurrent state (Mamba), and caches in MXFP8 or NVFP4 other than the latent rows of 352 bytes; of int8 it
knows rows with scales of their own only. SGLang's adapter: [its limits](sglang.md#limits).
"""


def page() -> str:
    lines = [HEAD.rstrip(), "", "| pair | carried | what is converted, or what stands in the way | cases |"]
    lines.append("|---|---|---|---|")
    return "\n".join([*lines, *map(_line, ROWS)]) + "\n" + TAIL


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
    reasons = dict.fromkeys(reason for each in refused for reason in each.reasons)
    return f"| {row.words} | no | {'<br>'.join(f'`{reason}`' for reason in reasons)} | {len(found)} |"


if __name__ == "__main__":
    PAGE.write_text(page())
