"""Processes that tests fork from one that has imported everything."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.support.nursery import Child, nursery


def test_children_that_are_forked_at_once_are_told_apart(tmp_path: Path) -> None:
    """Else the wrong agent is killed."""
    nursery()
    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(partial(_born, tmp_path), range(64)))
    assert [pid for pid, _ in told] == [said for _, said in told]


def _born(folder: Path, number: int) -> tuple[int, int]:
    """The process id of a child as we are told it, and as the child finds it."""
    path = folder / str(number)
    statement = f"import os; open({str(path)!r}, 'w').write(str(os.getpid()))"
    with open(os.devnull, "wb") as nowhere:
        streams = (None, nowhere.fileno(), nowhere.fileno())
        child = Child(nursery().fork("timeit", ["-n1", "-r1", statement], streams))
    assert child.wait(60) == 0
    return child.pid, int(path.read_text())
