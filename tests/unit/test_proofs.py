"""Promises and threats: each that the pages number has a test that is marked with it, and no test has another."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.cited import ROOT, cited
from tests.support.proofs import proofs
from tests.unit.sim.mutations import PROVES

NUMBERED = re.compile(r"^(?:### |\| )([GT]\d+) ", re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "letter", "at_least"), [("docs/guarantees.md", "G", 20), ("docs/threat-model.md", "T", 30)]
)
def test_each_promise_and_threat_is_proved_and_nothing_else(page: str, letter: str, at_least: int) -> None:
    numbers = NUMBERED.findall((ROOT / page).read_text())
    assert numbers == [f"{letter}{n + 1}" for n in range(len(numbers))] and len(numbers) >= at_least
    assert {number for number in proofs() if number[0] == letter} == set(numbers)
    assert {number for number in PROVES if number[0] == letter} <= set(numbers)


def test_each_promise_is_proved_by_a_test_that_runs_anywhere() -> None:
    needs = {number: {cited(test)[0].needs for test in tests} for number, tests in proofs().items()}
    assert [number for number, needed in needs.items() if number[0] == "G" and "" not in needed] == []


def test_the_command_of_the_pages_prints_the_tests_of_a_promise_and_its_rules() -> None:
    printed = subprocess.check_output([sys.executable, "-m", "tests.support.proofs", "G15"], cwd=ROOT, text=True)
    fence = "  tests/integration/agent/test_fence.py::test_nothing_is_read_before_the_sender_engine_has_computed_it"
    assert printed.startswith("G15\n") and {fence, "  rule ignore_fence"} <= set(printed.splitlines())
    assert "test_waits_for_both_engines_streams (GPU)" in printed
