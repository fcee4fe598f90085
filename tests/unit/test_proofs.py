"""Promises and threats: the pages' tables are what the tests are marked with, and none is without a test."""

from __future__ import annotations

import re

import pytest

from tests.support.cited import ROOT, cited
from tests.support.write_proofs import PAGES, proofs, written
from tests.unit.sim.mutations import PROVES

TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
NUMBERED = re.compile(r"^(?:### |\| )([GT]\d+) (?!\| `)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_the_table_is_what_tests_are_marked_with(page: str) -> None:
    assert written(page, TEXTS[page]) == TEXTS[page], "make golden"


@pytest.mark.parametrize(("page", "at_least"), [("docs/guarantees.md", 20), ("docs/threat-model.md", 30)])
def test_each_promise_and_threat_is_proved_and_nothing_else(page: str, at_least: int) -> None:
    numbers = NUMBERED.findall(TEXTS[page])
    assert numbers == [f"{PAGES[page]}{n + 1}" for n in range(len(numbers))] and len(numbers) >= at_least
    assert {number for number in proofs() if number[0] == PAGES[page]} == set(numbers)
    assert {number for number in PROVES if number[0] == PAGES[page]} <= set(numbers)


def test_each_promise_is_proved_by_a_test_that_runs_anywhere() -> None:
    needs = {number: {cited(test)[0].needs for test in tests} for number, tests in proofs().items()}
    assert [number for number, needed in needs.items() if number[0] == "G" and "" not in needed] == []
