"""The lock says which agents ran before, and so which are certainly dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbridge.errors import OperatorError
from kvbridge.transport.lock import KEPT_INCARNATIONS, KERNEL, LINE_BYTES, Lock

HOLD = """
import sys, time
from pathlib import Path
from kvbridge.transport.lock import Lock
lock = Lock(Path(sys.argv[1]), sys.argv[2])
print(*sorted(lock.before), flush=True)
time.sleep(60)
"""


def incarnations(count: int) -> list[str]:
    return [f"{number:016x}" for number in range(count)]


def held(path: Path, incarnation: str) -> set[str]:
    lock = Lock(path, incarnation)
    lock.close()
    return set(lock.before)


def test_each_holder_knows_those_before_it(tmp_path: Path) -> None:
    names = incarnations(5)
    for number, incarnation in enumerate(names):
        assert held(tmp_path / "a.sock", incarnation) == set(names[:number])
    assert held(tmp_path / "b.sock", "0" * 16) == set()


def test_keeps_so_many_and_the_last_of_them(tmp_path: Path) -> None:
    names = incarnations(2 * KEPT_INCARNATIONS + 3)
    for incarnation in names:
        held(tmp_path / "a.sock", incarnation)
    assert held(tmp_path / "a.sock", "f" * 16) == set(names[-KEPT_INCARNATIONS:])
    assert (tmp_path / "a.sock.lock").stat().st_size == KEPT_INCARNATIONS * LINE_BYTES


def test_who_held_it_under_another_kernel_may_live_there_yet(tmp_path: Path) -> None:
    """A folder that hosts share, whose locks each of them keeps for itself."""
    path = tmp_path / "a.sock"
    held(path, "a" * 16)
    lock = Path(f"{path}.lock")
    ours = KERNEL.read_text().strip()
    lock.write_text(lock.read_text().replace(ours, "11111111-2222-3333-4444-555555555555"))
    assert held(path, "b" * 16) == set()
    assert held(path, "c" * 16) == {"b" * 16}


def no_space(*_: object) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("write", [no_space, lambda fd, kept, at: len(kept) // 2], ids=["none", "half of it"])
def test_a_full_disk_costs_the_successor_its_knowledge_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, write: Any
) -> None:
    path = tmp_path / "a.sock"
    held(path, "a" * 16)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write)
        assert held(path, "b" * 16) == {"a" * 16}
    (record,) = caplog.records
    assert "our incarnation was not written down" in record.getMessage()
    assert write is not no_space or ("No space left" in caplog.text and held(path, "c" * 16) == {"a" * 16})


def test_who_lives_is_nobodys_predecessor(tmp_path: Path) -> None:
    """A process that stands still holds the lock as well; once it is killed, the next one knows."""
    path, incarnation = tmp_path / "a.sock", "a" * 16
    holder = subprocess.Popen([sys.executable, "-c", HOLD, path, incarnation], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "\n"
        os.kill(holder.pid, signal.SIGSTOP)
        with pytest.raises(OperatorError) as raised:
            Lock(path, "b" * 16)
        assert raised.value.code == "socket_in_use"
    finally:
        holder.kill()
        holder.wait()
    assert held(path, "b" * 16) == {incarnation}
