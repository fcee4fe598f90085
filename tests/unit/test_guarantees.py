"""docs/guarantees.md: every promise names tests, and says which of them need what not every machine has."""

from __future__ import annotations

import pytest

from tests.support.cited import ROOT, cited

PAGE = (ROOT / "docs/guarantees.md").read_text()
PROMISES = PAGE.partition("## Not promised")[0].split("\n### ")[1:]


def test_there_are_promises() -> None:
    assert len(PROMISES) > 10


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.splitlines()[0][:40])
def test_every_promise_names_a_test_and_what_it_needs(promise: str) -> None:
    tests = cited(promise)
    assert tests
    for each in tests:
        assert each.said == each.needs, f"{each.path}::{each.test} runs {each.needs or 'anywhere'}"
    needs = {each.needs for each in tests}
    for need, thing in (("on a GPU", "a GPU"), ("with vLLM", "vLLM")):
        said = f"No test without {thing} shows it." in " ".join(promise.split())
        assert said == (needs == {need}), f"shown {needs}"
