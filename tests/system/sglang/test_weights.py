"""Servers whose weights change: rows of some weights are never used with others, and a flush need not wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.model import write_model
from tests.system.kept import kept
from tests.system.sglang.fleet import Fleet, assert_idle, prompt

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]
NAMES = SENDER, RECEIVER, ALONE = "p16", "d32", "alone"


fleet = kept(Fleet, start=NAMES)


def load(fleet: Fleet, name: str, model: Path, version: str | None) -> None:
    body = {"model_path": str(model), "weight_version": version, "flush_cache": True}
    status, said = fleet[name].ask("/update_weights_from_disk", body, 60)
    assert status == 200, said


def failed(fleet: Fleet, tokens: list[int]) -> str:
    """What the decode server says of a prompt that it does not get."""
    (given, why), (status, said) = fleet.both(SENDER, RECEIVER, fleet.body(SENDER, tokens, fleet.room()))
    assert given != 200 and status != 200, (why, said)
    return str(said)


def test_rows_of_the_weights_of_before_are_never_used(fleet: Fleet, tmp_path: Path) -> None:
    model, tokens = write_model(tmp_path, seed=5), prompt(300, seed=501)
    of_a = fleet.alone(tokens)
    fleet.crossed(SENDER, RECEIVER, prompt(300, seed=502))
    load(fleet, ALONE, model, "B")
    assert fleet.alone(tokens).tokens != of_a.tokens
    load(fleet, SENDER, model, "B")
    assert "other_weights" in failed(fleet, tokens)
    load(fleet, RECEIVER, model, None)  # the same weights, but who knows?
    assert "other_weights" in failed(fleet, tokens)
    status, said = fleet[RECEIVER].ask("/update_weight_version", {"new_version": "B", "abort_all_requests": False}, 30)
    assert status == 200, said
    (answer,) = fleet.crossed(SENDER, RECEIVER, tokens)
    fleet.assert_same_as_alone(tokens, answer)
    assert_idle(fleet, SENDER, RECEIVER)
