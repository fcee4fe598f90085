"""Processes that tests fork from one that has imported everything."""

from __future__ import annotations

import ast
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from testing.hosts import DEVICE, two_hosts, why_not
from testing.nursery import Child, nursery


def test_children_that_are_forked_at_once_are_told_apart(tmp_path: Path) -> None:
    """Else the wrong agent is killed."""
    nursery()
    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(partial(_born, tmp_path), range(64)))
    assert [pid for pid, _ in told] == [said for _, said in told]


def test_who_gives_up_waiting_leaves_no_answer_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every later child is taken for the one before it."""
    _born(tmp_path, 1)
    os.kill(nursery()._process.pid, signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch, pytest.raises(TimeoutError):
            patch.setattr("testing.nursery.START_S", 0.1)
            _born(tmp_path, 2)
    finally:
        os.kill(nursery()._process.pid, signal.SIGCONT)
    pid, said = _born(tmp_path, 3)
    assert pid == said
    given_up, end = tmp_path / "2", time.monotonic() + 60
    while not given_up.exists() or not (text := given_up.read_text()):
        assert time.monotonic() < end
        time.sleep(0.01)
    os.waitpid(int(text), 0)


def _born(folder: Path, number: int) -> tuple[int, int]:
    """The process id of a child as we are told it, and as the child finds it."""
    path = folder / str(number)
    statement = f"import os; open({str(path)!r}, 'w').write(str(os.getpid()))"
    with open(os.devnull, "wb") as nowhere:
        streams = (None, nowhere.fileno(), nowhere.fileno())
        child = Child(nursery().fork("timeit", ["-n1", "-r1", statement], streams))
    assert child.wait(60) == 0
    return child.pid, int(path.read_text())


def test_a_child_is_born_in_another_place(tmp_path: Path) -> None:
    """Its process id is told as we see it, and it is ours to wait for."""
    if reason := why_not():
        pytest.skip(reason)
    statement = "import os; print(os.getpid(), os.listdir('/sys/class/net'))"
    with two_hosts(tmp_path) as (host, _, _):
        for place, is_own_pid in ((host.inside, False), (host.beside, True)):
            said = tmp_path / "said"
            with said.open("wb") as out:
                child = Child(nursery().fork("timeit", ["-n1", "-r1", statement], (None, out.fileno(), 2), place=place))
            assert child.wait(60) == 0
            number, _, rest = said.read_text().partition(" ")
            assert (int(number) == child.pid) == is_own_pid
            assert sorted(ast.literal_eval(rest.partition("]")[0] + "]")) == [DEVICE, "lo"]
