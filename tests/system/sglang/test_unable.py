"""Two real servers that cannot share KV: the client has an error within a second, and both go on."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from testing.kept import kept
from tests.system.sglang.fleet import CONFIGS, Fleet, assert_idle, assert_works, prompt

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

SOON_S = 1.0
# Of the same model by another name, and of one with fewer layers by the same name.
OTHERS = {
    "d16-other": replace(CONFIGS["d16"], environment={"KVBRIDGE_ENGINE_MODEL_NAME": "another"}),
    "p16-shallow": replace(CONFIGS["p16"], flags=("--json-model-override-args", '{"num_hidden_layers": 2}')),
}


fleet = kept(Fleet, others=OTHERS, start=("p16", "d16", "alone", *OTHERS))


def timed(fleet: Fleet, name: str, body: dict[str, Any]) -> tuple[float, int, str]:
    began = time.monotonic()
    status, said = fleet[name].generate(body)
    return time.monotonic() - began, status, str(said)


@pytest.mark.parametrize(("sender", "receiver"), [("p16", "d16-other"), ("p16-shallow", "d16")])
def test_a_request_of_two_models_fails_within_a_second(fleet: Fleet, sender: str, receiver: str) -> None:
    """Also the first time, when the two agents have never met."""
    for seed in (1, 2, 3):
        body = fleet.body(sender, prompt(300, seed=seed), fleet.room())
        with ThreadPoolExecutor(2) as pool:
            given, taken = (pool.submit(timed, fleet, name, body) for name in (sender, receiver))
        seconds, status, said = taken.result()
        assert status != 200 and "incompatible" in said, said
        assert seconds < SOON_S
        seconds, status, said = given.result()
        assert status != 200, said
        assert seconds < SOON_S
    assert_idle(fleet, sender, receiver)
    assert_works(fleet, "p16", "d16", seed=4)
