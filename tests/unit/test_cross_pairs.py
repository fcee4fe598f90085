"""How tests/system/gpu/cross_pairs.py evaluates its figures. Needs no engine and no GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from demo.model import write_config
from tests.system.engines import weights
from tests.system.gpu.cross_pairs import FoundAcross, _same_weights, ratios
from tests.system.gpu.pair_drive import DECODED, Voice, alike, apart, parting

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from gpu_table import cross_lines

TOKENS = list(range(DECODED))


def model_of(**tensors: torch.Tensor) -> Any:
    named = [(name.replace("_", "."), each) for name, each in tensors.items()]
    return SimpleNamespace(named_parameters=lambda: named)


def saying(tokens: list[int], **chances: float) -> Voice:
    likely = {int(token.removeprefix("t")): value for token, value in chances.items()}
    return Voice(tokens, [likely] * DECODED)


def test_seeded_weights_are_the_same_each_time_and_others_in_each_layer(tmp_path: Path) -> None:
    config = json.loads((write_config(tmp_path) / "config.json").read_text())
    one, other = (dict(weights.seeded(config, torch.empty(0, dtype=torch.bfloat16))) for _ in range(2))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["model.layers.0.mlp.up_proj.weight"], one["model.layers.1.mlp.up_proj.weight"])


@pytest.mark.parametrize("change", ["value", "places", "name", "packed"])
def test_a_digest_tells_weights_apart(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "CHUNK", 7)
    values = torch.randn(5, 6).to(torch.bfloat16)
    other = values.clone()
    if change == "value":
        other[4, 5] += 1
    elif change == "places":
        other[4, 5], other[0, 0] = values[0, 0], values[4, 5]
    elif change == "packed":
        other = torch.empty(0)
    found = weights.digests(model_of(a_weight=values, a_bias=values))
    assert found == weights.digests(model_of(a_weight=values.clone())) and len(found) == 1
    named = {"b_weight": other} if change == "name" else {"a_weight": other}
    assert weights.digest(found) != weights.digest(weights.digests(model_of(**named)))


def test_weights_are_the_same_or_are_named() -> None:
    one = {"a.weight": 1, "b.weight": 2}
    assert _same_weights({"vllm": one, "sglang": dict(one)}) == "yes, 2 tensors in 2 engines"
    assert _same_weights({"vllm": one, "sglang": one | {"b.weight": 3}}) == "NO: 1 of 2 differ b.weight"
    assert _same_weights({"vllm": one, "sglang": {"a.weight": 1}}) == "NO: 1 of 2 differ b.weight"
    assert _same_weights({"vllm": one, "sglang": {}}) == "NO: 2 of 2 differ a.weight, b.weight"
    assert _same_weights({}).startswith("NO")


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
