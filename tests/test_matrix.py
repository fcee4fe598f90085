"""Every case of the matrix: what the verdict says of it is what carrying it gives, and the page says the same."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from kvbridge.geometry.compat import Incompatible, verdict

from .carried import OnCpu, carried, pools_of
from .matrix import ROWS, Row, pairwise
from .write_matrix import PAGE, page

REASON = re.compile(r"^\w+: source .+, sink .+; needs .+$")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_the_verdict_says_is_what_carrying_it_gives(row: Row) -> None:
    for number, case in enumerate(row.cases()):
        found = verdict(*pools_of(case, number))
        if isinstance(found, Incompatible):
            assert all(REASON.match(reason) for reason in found.reasons), found.reasons
            with pytest.raises(Exception):  # noqa: B017  whatever it is that does not go on
                _, wrong = carried(case, number, OnCpu())
                assert not wrong
            continue
        _, wrong = carried(case, number, OnCpu())
        assert not wrong, f"case {number}: {wrong}\n{case.source}\n{case.sink}\nfrom {case.first}, {found}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_all_of_a_row_can_be_carried_or_nothing(row: Row) -> None:
    found = [verdict(*pools_of(case, number)) for number, case in enumerate(row.cases())]
    assert found
    assert len({isinstance(each, Incompatible) for each in found}) == 1, found


def test_every_two_values_are_together_in_some_choice() -> None:
    axes = {"a": (1, 2, 3), "b": "xy", "c": (None, True, 0.5, 4), "d": (7,)}
    chosen = pairwise(axes)
    for one, other in itertools.combinations(axes, 2):
        for pair in itertools.product(axes[one], axes[other]):
            assert any((each[one], each[other]) == pair for each in chosen)
    assert len(chosen) <= 3 * 4 * 2


def test_the_page_is_fresh() -> None:
    assert Path(PAGE).read_text() == page(), "python -m tests.write_matrix"


def test_rows_have_names_of_their_own() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
