"""How tests/system/gpu/cross_pairs.py evaluates its figures. Needs no engine and no GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.system.gpu.cross_pairs import FoundAcross, ratios
from tests.system.gpu.pair_drive import DECODED, Voice, alike, apart, parting

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from gpu_table import cross_lines

TOKENS = list(range(DECODED))


def saying(tokens: list[int], **chances: float) -> Voice:
    likely = {int(token.removeprefix("t")): value for token, value in chances.items()}
    return Voice(tokens, [likely] * DECODED)


def test_engines_may_part_where_both_tokens_are_as_likely() -> None:
    own = saying(TOKENS, t3=-1.0, t90=-1.2, t91=-2.0)
    for other, verdict in (
        (90, "tie at 3 (0.20 of 0.25)"),
        (91, "NO at 3 (1.00 of 0.25)"),
        (92, "NO at 3 (inf of 0.25)"),
    ):
        ours = [*TOKENS[:3], other, *TOKENS[4:]]
        assert alike(ours, TOKENS) == 3
        assert parting(ours, own, 3, 0.25) == verdict
    assert apart([own], [saying(TOKENS, t3=-1.5, t90=-1.1)]) == pytest.approx(0.5)
    assert apart([own], [saying([7, *TOKENS[1:]], t3=-1.0)]) == 0


def test_a_pair_is_held_against_the_faster_equal_pair() -> None:
    rows = [{"tokens": 1024, "transfer_ms": 4.0, "ttft_ms": 60.0, "handover_ms": 30.0}]
    against = {
        "vllm": [{"transfer_ms": 5.0, "ttft_ms": 40.0, "handover_ms": 30.0}],
        "sglang": [{"transfer_ms": 4.0, "ttft_ms": 60.0, "handover_ms": 20.0}],
    }
    found = FoundAcross("vllm16-to-sglang64", kv_rows="yes", tokens={1024: "yes"}, rows=rows, against=against)
    found.ratios = ratios(rows, against)
    assert found.ratios[0]["ttft_ms"] == {"vllm": 1.5, "sglang": 1.0, "worse": 1.5}
    failed = FoundAcross("sglang64-to-vllm16", failure="no answer")
    results = {"weights": {"same": "yes"}, "pairs": json.loads(json.dumps([vars(found), vars(failed)]))}
    assert [line.met for line in cross_lines(results)] == [True, True, False, None, True, False]
