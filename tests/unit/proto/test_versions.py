"""Both sides pick the newest version that both speak, or find that there is none."""

from __future__ import annotations

import pytest
from kvbridge_proto.common import VersionRange, negotiate

CASES = [
    ((1, 1), (1, 1), 1),
    ((1, 3), (1, 3), 3),
    ((1, 3), (2, 5), 3),
    ((2, 5), (1, 3), 3),
    ((1, 1), (1, 9), 1),
    ((4, 4), (1, 9), 4),
    ((1, 1), (2, 2), None),
    ((2, 2), (1, 1), None),
    ((1, 2), (4, 6), None),
    ((1, 1), (3, 1), None),  # turned round: nobody's range
    ((1, 5), (4, 2), None),
]


@pytest.mark.parametrize(("ours", "theirs", "agreed"), CASES)
def test_both_sides_find_the_same(ours: tuple[int, int], theirs: tuple[int, int], agreed: int | None) -> None:
    one, other = VersionRange(*ours), VersionRange(*theirs)
    assert negotiate(one, other) == negotiate(other, one) == agreed
