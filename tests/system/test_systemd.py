"""The unit under a real systemd: started once it serves, watched, in its sandbox, stopped in order."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvbridge.local_agents import ask
from tests.support.booted import ROOT, Booted, booted, why_not

REASON = why_not()
pytestmark = [pytest.mark.systemd, pytest.mark.skipif(bool(REASON), reason=REASON)]

CONFIG = 'listen = "tcp://127.0.0.1:{port}"\nmetrics = ""\ndevice = "cpu"\nallowed_uids = [65533]\n'  # an engine's user
UNIT = "kvbridge-agent@{}.service"


def configured(systemd: Booted, number: int) -> str:
    """One GPU's instance, as docs/systemd.md has it made. Its name."""
    (systemd.root / f"etc/kvbridge/agent-{number}.toml").write_text(CONFIG.format(port=7700 + number))
    return UNIT.format(number)


def test_an_agent_for_each_gpu_is_started_once_it_serves_and_stops_in_order(tmp_path: Path) -> None:
    with booted(tmp_path) as systemd:
        units = [configured(systemd, number) for number in range(2)]
        told = systemd.run("systemctl", "start", *units)
        assert told.returncode == 0, [systemd.text(unit) for unit in units]
        for number, unit in enumerate(units):
            socket = systemd.root / f"run/kvbridge/agent-{number}.sock"
            assert ask(str(socket)).state == "serving"
            modes = [stat.S_IMODE(os.stat(path).st_mode) for path in (socket, f"{socket}.lock")]
            assert modes == [0o666, 0o600]  # that other user may connect
            assert systemd.shows(unit, "StatusText") == "serving"
        folder = (systemd.root / "run/kvbridge").stat()
        assert folder.st_mode & 0o777 == 0o750 and folder.st_uid != 0
        assert systemd.run("systemctl", "stop", *units).returncode == 0
        for unit in units:
            assert systemd.shows(unit, "Result") == "success" and "draining" in systemd.text(unit)
        assert (systemd.root / "run/kvbridge/agent-0.sock.lock").exists()  # the next start learns whose life is over


def test_a_checkout_below_tmp_is_seen_there(tmp_path: Path) -> None:
    """The systemd that is booted has an empty /tmp of its own."""
    checkout = tmp_path / "checkout"
    hidden = shutil.ignore_patterns(".*", "__pycache__", "build")
    shutil.copytree(ROOT, checkout, ignore=hidden, symlinks=True)
    environment = checkout / ".venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin/python").symlink_to(Path(sys.executable).resolve())
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", environment)
    (environment / "lib").symlink_to(Path(sys.prefix) / "lib")
    command = [str(environment / "bin/python"), "-m", "pytest", "--basetemp", str(tmp_path / "inner")]
    command += ["-m", "systemd", "tests/system/test_systemd.py", "-k", "for_each_gpu"]
    told = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=200)
    assert told.returncode == 0 and told.stdout.startswith("."), told.stdout[-3000:] + told.stderr


def test_an_agent_that_cannot_serve_is_not_started(tmp_path: Path) -> None:
    with booted(tmp_path) as systemd:
        unit = configured(systemd, 0)
        (systemd.root / "etc/kvbridge/agent-0.toml").write_text('slot_bytes = "many"\n')
        assert systemd.run("systemctl", "start", unit).returncode != 0
        assert systemd.shows(unit, "ExecMainStatus") == "2" and systemd.shows(unit, "NRestarts") == "0"


def test_an_agent_whose_driver_comes_late_is_tried_until_it_serves(tmp_path: Path) -> None:
    """More often than systemd's own limit, five quick failures. A file is the driver."""
    driver = "etc/kvbridge/driver"
    with booted(tmp_path, drop_in=f"ExecStartPre=test -e /{driver}\nRestartSec=100ms\n") as systemd:
        unit = configured(systemd, 0)
        systemd.run("systemctl", "start", "--no-block", unit)
        end = time.monotonic() + 60
        while int(systemd.shows(unit, "NRestarts") or 0) < 8:
            assert time.monotonic() < end, systemd.shows(unit, "Result")
            time.sleep(0.1)
        (systemd.root / driver).touch()
        systemd.waits(unit, "StatusText", "serving", 60)


def test_an_agent_that_stands_still_is_ended_and_started_again(tmp_path: Path) -> None:
    """What ends the feeding is a test of its own (agent/test_supervisor.py); here the whole process stands still."""
    with booted(tmp_path, drop_in="WatchdogSec=3\nTimeoutAbortSec=1\n") as systemd:
        unit = configured(systemd, 0)
        assert systemd.run("systemctl", "start", unit).returncode == 0, systemd.text(unit)
        first = systemd.shows(unit, "MainPID")
        time.sleep(4)
        assert systemd.shows(unit, "MainPID") == first  # it is fed
        systemd.run("kill", "-STOP", first)
        systemd.waits(unit, "NRestarts", "1", 20)
        systemd.waits(unit, "ActiveState", "active", 40)
        assert systemd.shows(unit, "StatusText") == "serving" and systemd.shows(unit, "MainPID") != first


@pytest.mark.skipif(shutil.which("cc") is None, reason="compiles C: needs a compiler, as an agent beside a GPU does")
def test_a_kernel_and_its_launcher_are_compiled_in_the_sandbox_that_systemd_makes(tmp_path: Path) -> None:
    instead = f"ExecStart={sys.executable} {ROOT}/tests/support/sandboxed.py {ROOT}"
    drop_in = f"Type=oneshot\nRestart=no\nWatchdogSec=0\nStandardOutput=file:/run/log/said\nExecStart=\n{instead}\n"
    with booted(tmp_path, drop_in) as systemd:
        unit = configured(systemd, 0)
        assert systemd.run("systemctl", "start", unit).returncode == 0, systemd.text(unit)
        found = json.loads((systemd.root / "run/log/said").read_text())
        assert found.pop("compiled").endswith(" bytes"), found
        assert found == {
            "stored": "/var/cache/kvbridge/tmp",
            "at_home": "/var/cache/kvbridge",
            "launched": "42",
            "outside": "",
        }
