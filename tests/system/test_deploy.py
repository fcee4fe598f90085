"""The programs for which deploy/ has files accept these files, and the files agree with the options."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvbridge.agent.supervisor import CHECKS
from kvbridge.config import load
from kvbridge.dataplane.threads import STUCK_S
from kvbridge.options import ENVIRONMENT_PREFIX, AgentConfig, options

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "systemd" / "kvbridge-agent@.service"
EXPOSURE = 25  # tenths, as systemd-analyze counts; 0 is closed, 100 open

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """An instance of the unit whose program exists."""
    text = UNIT.read_text().replace("/opt/kvbridge/bin/kvbridge", "/bin/true").replace("User=kvbridge", "User=root")
    path = tmp_path / "kvbridge-agent@0.service"
    path.write_text(text.replace("Group=kvbridge", "Group=root"))
    return path


@needs_systemd
def test_systemd_accepts_the_unit(unit: Path) -> None:
    told = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", "--man=no", str(unit)], capture_output=True, text=True
    )
    about_us = [line for line in told.stderr.splitlines() if "kvbridge" in line]
    assert told.returncode == 0, told.stderr
    assert about_us == []


@needs_systemd
def test_the_unit_is_hardened(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("User=root", "User=nobody").replace("Group=root", "Group=nogroup"))
    told = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}", "--no-pager", str(unit)],
        capture_output=True,
        text=True,
    )
    if "offline" in told.stderr and told.returncode:
        pytest.skip(f"this systemd-analyze cannot judge offline: {told.stderr.strip()}")
    assert told.returncode == 0, told.stdout[-1500:] + told.stderr


def test_the_unit_kills_later_than_the_agent_ends_by_itself() -> None:
    stop_s = float(re.search(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE)[1])  # type: ignore[index]
    assert stop_s >= AgentConfig().drain_s + STUCK_S + 10


def test_systemd_waits_longer_for_the_data_thread_than_one_thing_may_take() -> None:
    watchdog_s = float(re.search(r"^WatchdogSec=(\d+)$", UNIT.read_text(), re.MULTILINE)[1])  # type: ignore[index]
    assert watchdog_s > STUCK_S + watchdog_s / CHECKS + 10


def test_the_unit_sets_options_that_exist() -> None:
    named = re.findall(rf"^Environment={ENVIRONMENT_PREFIX}(\w+)=", UNIT.read_text(), re.MULTILINE)
    assert named
    assert {name.lower() for name in named} <= options().keys()


@needs_systemd
def test_systemd_accepts_the_unit_with_a_key(unit: Path) -> None:
    """The lines that an operator takes the # from."""
    text = re.sub(r"^#(LoadCredential=|Environment=KVBRIDGE_)", r"\1", unit.read_text(), flags=re.MULTILINE)
    assert text.count("\nLoadCredential=key:") == 1 and "\nEnvironment=KVBRIDGE_KEY=%d/key\n" in text
    unit.write_text(text)
    test_systemd_accepts_the_unit(unit)
    named = re.findall(rf"^Environment={ENVIRONMENT_PREFIX}(\w+)=", text, re.MULTILINE)
    assert {"key", "peers"} <= {name.lower() for name in named} <= options().keys()


def test_a_reload_is_the_signal_that_reads_the_peers_again() -> None:
    assert "\nExecReload=/bin/kill -HUP $MAINPID\n" in UNIT.read_text()


def test_the_unit_starts_an_agent_again_whatever_ended_it_but_a_wrong_option() -> None:
    """A SIGHUP that comes before the agent's first line ends it, and to systemd that is a clean end."""
    assert "\nRestart=always\n" in UNIT.read_text()
    assert "\nRestartPreventExitStatus=2\n" in UNIT.read_text()
    assert "\nStartLimitIntervalSec=0\n" in UNIT.read_text()


def test_the_page_gives_each_gpu_a_file_that_an_agent_takes(tmp_path: Path) -> None:
    page = (DEPLOY.parent / "docs/systemd.md").read_text()
    (loop,) = re.findall(r"^for i in .*?^done$", page, re.MULTILINE | re.DOTALL)
    subprocess.run(["bash", "-euc", loop.replace("/etc/kvbridge", str(tmp_path))], check=True)
    found = [load(str(path)) for path in sorted(tmp_path.glob("agent-*.toml"))]
    assert [config.device for config in found] == [f"cuda:{i}" for i in range(8)]
    assert len({config.listen for config in found} | {config.metrics for config in found}) == 16


def test_prometheus_scrapes_where_an_agent_serves() -> None:
    assert AgentConfig().metrics in (DEPLOY / "prometheus" / "kvbridge.yml").read_text()
