"""The unit's sandbox leaves an agent what it needs: a place to compile, temporary files, its socket and its lock."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbridge.errors import OperatorError
from kvbridge.local_agents import ask
from tests.support.sandbox import NOBODY, ROOT, Sandbox, why_not

START_S = 60
REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


@pytest.fixture
def sandbox() -> Sandbox:
    return Sandbox.read()


@pytest.mark.skipif(shutil.which("cc") is None, reason="compiles C: needs a compiler, as an agent beside a GPU does")
def test_a_kernel_and_its_launcher_are_compiled_in_the_units_sandbox(sandbox: Sandbox) -> None:
    with sandbox.start(
        [sys.executable, str(ROOT / "tests/support/sandboxed.py"), str(ROOT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        told, complaints = process.communicate(timeout=START_S)
    assert process.returncode == 0, complaints.decode(errors="replace")
    found = json.loads(told)
    assert found.pop("compiled").endswith(" bytes"), found
    assert found == {
        "stored": "/var/cache/kvbridge/tmp",
        "at_home": "/var/cache/kvbridge",
        "launched": "42",
        "outside": "",
    }


@pytest.fixture
def config() -> Iterator[Path]:
    """As in /etc/kvbridge, with an engine of another user."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "agent-0.toml"
        path.write_text('listen = "tcp://127.0.0.1:0"\nmetrics = ""\nallowed_uids = [65533]\ndevice = "cpu"\n')
        Path(folder).chmod(0o755)
        path.chmod(0o644)
        yield path


def test_an_agent_serves_in_the_units_sandbox(sandbox: Sandbox, config: Path) -> None:
    (program,) = sandbox.said["ExecStart"]
    command = program.replace("/opt/kvbridge/bin/kvbridge", f"{sys.executable} -m kvbridge.cli")
    command = command.replace("/etc/kvbridge/agent-0.toml", str(config))
    with sandbox.start(command.split(), stderr=subprocess.PIPE) as agent:
        socket = Path(f"/proc/{agent.pid}/root/run/kvbridge/agent-0.sock")  # its /run is not ours
        try:
            end = time.monotonic() + START_S
            while (state := asked(socket)) != "serving":
                assert agent.poll() is None and time.monotonic() < end, (state, agent.communicate()[1].decode())
                time.sleep(0.1)
            folder, socket_mode = socket.parent.stat(), stat.S_IMODE(socket.stat().st_mode)
            assert (stat.S_IMODE(folder.st_mode), folder.st_uid, socket_mode) == (0o750, NOBODY, 0o666)
            assert stat.S_IMODE(os.stat(f"{socket}.lock").st_mode) == 0o600
            agent.send_signal(signal.SIGTERM)
            assert agent.wait(20) == 0
        finally:
            agent.kill()


def asked(socket: Path) -> str:
    try:
        return ask(str(socket)).state
    except OperatorError as error:
        return str(error)
