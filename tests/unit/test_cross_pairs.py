"""How scripts that drive pairs of engines on GPUs fit them to memory, and how figures are evaluated. No engines."""

from __future__ import annotations

import json

import pytest

from bench.goals import cross_lines
from tests.system.gpu import cross_pairs, sglang_pairs, sparse_pairs, vllm_pairs, window_pairs
from tests.system.gpu.cross_pairs import ratios
from tests.system.gpu.pair_drive import DECODED, Pair, Voice, alike, apart, parting
from tests.system.gpu.pair_engines import ALONE, SGLang, Side
from tests.system.gpu.pair_run import Found, batches, sides_of

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


ALONES = [SGLang("alone-1", (0,), role=ALONE), SGLang("alone-2", (0, 1), role=ALONE)]
EQUAL_SGLANG = sides_of(sglang_pairs.pairs_of(2)[:1])
EQUAL_BOTH = sides_of(cross_pairs.equal_pairs(False).values())


@pytest.mark.parametrize(
    ("pairs", "kept", "alone"),
    [
        (sglang_pairs.pairs_of(2), EQUAL_SGLANG, ALONES),
        (cross_pairs.pairs_of(False), EQUAL_BOTH, ALONES[:1]),
        (vllm_pairs.gpu_pairs(1), [], []),
        (vllm_pairs.gpu_pairs(2), [], []),
        (sparse_pairs.gpu_pairs(2), [], []),
        (window_pairs.pairs_of(2), [], ALONES[:1]),
    ],
)
@pytest.mark.parametrize("per_gpu", [3, 5])  # 80 GB, 141 GB
def test_no_batch_of_pairs_starts_more_servers_than_fit(
    pairs: list[Pair], kept: list[Side], alone: list[Side], per_gpu: int
) -> None:
    found = batches(pairs, kept, alone, per_gpu)
    assert [pair for batch in found for pair in batch] == pairs
    for number, batch in enumerate(found):
        up = {*kept, *(alone if number == 0 else ()), *sides_of(batch)}
        for gpu in (0, 1):
            assert sum(1 / len(side.gpus) for side in up if gpu in side.gpus) <= per_gpu, (number, up)
    assert len(found) < len(pairs)


def test_a_pair_is_held_against_the_faster_equal_pair() -> None:
    rows = [{"tokens": 1024, "transfer_ms": 4.0, "ttft_ms": 60.0, "handover_ms": 30.0}]
    against = {
        "vllm": [{"transfer_ms": 5.0, "ttft_ms": 40.0, "handover_ms": 30.0}],
        "sglang": [{"transfer_ms": 4.0, "ttft_ms": 60.0, "handover_ms": 20.0}],
    }
    found = Found("vllm16-to-sglang64", kv_rows="yes", tokens={1024: "yes"}, rows=rows, against=against)
    found.ratios = ratios(rows, against)
    assert found.ratios[0]["ttft_ms"] == {"vllm": 1.5, "sglang": 1.0, "worse": 1.5}
    failed = Found("sglang64-to-vllm16", failure="no answer")
    results = {"weights": {"same": "yes"}, "pairs": json.loads(json.dumps([vars(found), vars(failed)]))}
    assert [line.met for line in cross_lines(results)] == [True, True, False, None, True, False]
