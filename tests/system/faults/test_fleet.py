"""Agents of a fleet are killed one after the other under traffic: all that is asked for comes, and nothing else."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.system.faults.fleet import Fleet

pytestmark = pytest.mark.proves("G20", "G21")

SIZE, SECONDS, RATE, EVERY_S = 6, 8.0, 8.0, 1.0
DEADLINE_S = 20.0  # no verdict depends on how busy the machine is: what is killed is noticed without it


def test_every_request_ends_with_its_own_rows_though_an_agent_is_killed_every_second(tmp_path: Path) -> None:
    """`python -m bench killed` is of sixteen agents, for two minutes, and says how long requests take."""
    with ExitStack() as stack:
        carried = Fleet(tmp_path, stack, size=SIZE, deadline_s=DEADLINE_S).run(SECONDS, RATE, EVERY_S)
    assert carried.kills and carried.seconds
    assert carried.codes, "no kill has met a request"
