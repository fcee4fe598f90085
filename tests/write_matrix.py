"""Writes docs/convertible.md: what can be carried, each line judged by the verdict over all of its cases."""

from __future__ import annotations

from pathlib import Path

from kvbridge.geometry.compat import Incompatible, Same, changes, verdict

from .carried import pools_of
from .matrix import ROWS, Row

PAGE = Path(__file__).parents[1] / "docs/convertible.md"
HEAD = """# What can be carried

Written by `python -m tests.write_matrix`; do not edit. Each line stands for the cases that `tests/test_matrix.py`
carries from one pool to another and compares, element by element, with a reference that knows no plan; its verdict is
the one that two agents reach when they meet. What differs is converted on the way; what stands in the way is named as
below, with both values. Rows that are refused are not carried: the test sees that nothing moves them without an error.
`kvbridge plan A.json B.json` says it of two pools.

This page is of pools as agents see them. The vLLM adapter describes fewer: when an engine starts it refuses, by name,
layers with recurrent state (Mamba), and caches in MXFP8 or NVFP4 other than the latent rows of 352 bytes; of int8 it
knows rows with scales of their own only.

"""


def page() -> str:
    lines = [HEAD.rstrip(), "", "| pair | carried | what is converted, or what stands in the way | cases |"]
    lines.append("|---|---|---|---|")
    return "\n".join([*lines, *map(_line, ROWS)]) + "\n"


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
