"""If a safety rule is switched off in the real code, the simulator notices, at once or within some hundred seeds."""

from __future__ import annotations

import pytest

from kvbridge.exchange.sender import Sender
from tests.unit.sim.mutations import AGAINST_LIARS, MUTATIONS, OF_A_MOMENT, PROVES, Rule
from tests.unit.sim.noticed import Broken, found, noticed

MOST = 1000


@pytest.mark.parametrize("rule", MUTATIONS)
def test_the_simulator_notices_a_rule_that_is_off(rule: str) -> None:
    """By what goes wrong without it, and not by any failure."""
    assert found(rule, MOST)


def test_code_that_does_not_fit_is_no_rule_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MUTATIONS, "broken", Rule(lambda put: put(Sender, "claim", lambda self: [])))
    with pytest.raises(Broken, match="TypeError"):
        noticed("broken", 5)


def test_each_rule_keeps_a_promise() -> None:
    kept = [rule for rules in PROVES.values() for rule in rules]
    assert sorted(kept) == sorted({*MUTATIONS, *AGAINST_LIARS, *OF_A_MOMENT})
