"""If a safety rule is switched off in the real code, the simulator notices, at once or within some hundred seeds."""

from __future__ import annotations

import pytest

from kvbridge.exchange.sender import Sender
from sim.scenario import PULLED
from tests.unit.sim.missed import Broken, missed
from tests.unit.sim.mutations import MUTATIONS, Rule

MOST = 1000


@pytest.mark.parametrize("rule", MUTATIONS)
def test_the_simulator_misses_this_rule(rule: str) -> None:
    """By what goes wrong without it, and not by any failure."""
    known = MUTATIONS[rule]
    assert missed(rule, 1, known.seed, known.how) or missed(rule, MOST, known.seed & PULLED, known.how)


def test_code_that_does_not_fit_is_no_rule_that_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MUTATIONS, "broken", Rule(lambda put: put(Sender, "claim", lambda self: [])))
    with pytest.raises(Broken, match="TypeError"):
        missed("broken", 5)
