"""Failpoints: each name has one place in the code and a line in the table, and does what it was told, once."""

from __future__ import annotations

import ast
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbridge import failpoints
from kvbridge.adapters.engine import client
from kvbridge.agent import runners
from kvbridge.errors import FabricError, OperatorError
from kvbridge.failpoints import PLACES, arm, armed, failpoint
from testing.nursery import kvbridge

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    arm("")


def uses() -> list[str]:
    """The name of every failpoint in the code, as often as it is passed there."""
    found = []
    for path in sorted((ROOT / "kvbridge").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "failpoint":
                (name,) = node.args
                if path.name in ("client.py", "runners.py") and ast.unparse(name) == "place":
                    continue  # of one of its two tables
                assert isinstance(name, ast.Constant), f"{path.relative_to(ROOT)}:{node.lineno}: not a plain name"
                found.append(name.value)
    tables = (client.SENT, client.HEARD, runners.SENT, runners.HEARD)
    return [*map(str, found), *(place for table in tables for place in table.values())]


def test_every_name_is_in_the_code_once_and_in_the_table() -> None:
    assert sorted(uses()) == sorted(PLACES)


def test_fires_once_at_the_nth_pass() -> None:
    assert arm("sender.gather_begun=fail@2") == ("sender.gather_begun=fail@2",)
    failpoint("sender.gather_begun")
    failpoint("sender.write_begun")
    with pytest.raises(FabricError, match=r"sender\.gather_begun"):
        failpoint("sender.gather_begun")
    assert armed() == ()
    failpoint("sender.gather_begun")


def test_pauses() -> None:
    arm("receiver.scattered=pause:0.05")
    began = time.monotonic()
    failpoint("receiver.scattered")
    assert time.monotonic() - began >= 0.05


@pytest.mark.parametrize(
    "said",
    [
        "nowhere=kill",
        "sender.gathered=explode",
        "sender.gathered=fail",
        "sender.gathered=kill@0",
        "sender.gathered=kill@x",
        "sender.gathered=kill:3",
        "sender.gathered=pause",
        "sender.gathered=pause:x",
        "sender.gathered",
    ],
)
def test_refuses_what_it_does_not_know(said: str) -> None:
    with pytest.raises(OperatorError, match="KVBRIDGE_FAILPOINTS"):
        arm(said)


def test_kills_its_own_process() -> None:
    program = (
        "from kvbridge.failpoints import *; arm_from_environment(); failpoint('receiver.scattered'); print('alive')"
    )
    for said, code in (("receiver.scattered=kill", -9), ("", 0)):
        ended = subprocess.run(
            [sys.executable, "-c", program], env={failpoints.VARIABLE: said, "PYTHONPATH": str(ROOT)}, timeout=20
        )
        assert ended.returncode == code


STOPS = """
import os, threading
from kvbridge.failpoints import arm, failpoint
arm("receiver.read_begun=stop")
begin = threading.Event()
def passes():
    begin.wait()
    failpoint("receiver.read_begun")
    os.write(1, b"goes on")
thread = threading.Thread(target=passes)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
thread.start()
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
begin.set()
thread.join()
"""


def test_stops_the_thread_that_passes_it_where_it_is() -> None:
    """A signal to the process is taken by its main thread; until that has a processor, the other would go on."""
    with subprocess.Popen([sys.executable, "-c", STOPS], stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        said = select.select([process.stdout], [], [], 0)[0]
        process.send_signal(signal.SIGCONT)
        assert not said and process.stdout.read() == b"goes on"


def test_an_agent_does_not_start_with_a_name_that_it_does_not_know(tmp_path: Path) -> None:
    said = {failpoints.VARIABLE: "nowhere=kill"}
    ended = kvbridge("agent", "--socket", tmp_path / "a.sock", "--metrics", "", **said)
    assert ended.returncode not in (0, -9) and "no failpoint 'nowhere'" in ended.stderr
