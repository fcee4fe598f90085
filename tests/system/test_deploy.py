"""The programs for which deploy/ has files accept these files, and the files agree with the options."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvbridge.agent.supervisor import BEATS_A_WATCHDOG
from kvbridge.config import load
from kvbridge.dataplane.threads import STUCK_S
from kvbridge.options import ENVIRONMENT_PREFIX, AgentConfig, options
from tests.support.packaged import ROOT, pinned

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
    assert watchdog_s > STUCK_S + watchdog_s / BEATS_A_WATCHDOG + 10


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


# The Dockerfile; to build it needs a registry of images:


FILE = ROOT / "deploy" / "image" / "Dockerfile"
TEXT = FILE.read_text()
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed (constraints.txt)")
def test_the_linter_takes_it(tmp_path: Path) -> None:
    assert HADOLINT is not None
    told = subprocess.run([HADOLINT, FILE], capture_output=True, text=True)
    assert (told.returncode, told.stdout) == (0, "")
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(TEXT.replace("WORKDIR /src", "WORKDIR src"))
    assert "DL3000" in subprocess.run([HADOLINT, wrong], capture_output=True, text=True).stdout


def test_it_copies_what_is_there_and_not_ignored() -> None:
    copied = [word for line in re.findall(r"^COPY (?!--from)(.+) \S+$", TEXT, re.MULTILINE) for word in line.split()]
    kept = re.findall(r"^!(.+)$", (FILE.parent / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert sorted(copied) == sorted(kept)
    assert all((ROOT / name).exists() for name in copied)
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values()
    assert {folder.split("/")[0] for folder in folders} <= set(copied)


def test_its_base_is_one_patch_version() -> None:
    assert re.findall(r"^ARG BASE=(.+)$", TEXT, re.MULTILINE) == re.findall(r"python:3\.11\.\d+-slim-bookworm", TEXT)
    assert set(re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE)) == {"${BASE}"}


def test_it_installs_only_versions_that_are_named() -> None:
    """That they go together, and that they are all, is what `make test-install` finds."""
    files = ["constraints.txt", "constraints-gpu.txt"]
    installs = re.findall(r"pip install (.+?)(?: \\)?$", TEXT, re.MULTILINE)
    assert len(installs) == 2
    for said in installs:
        assert re.findall(r"-c (\S+)", said) == files, said
        plain = [word for word in re.sub(r"-c \S+|--\S+", "", said).split() if word != ".[agent]"]
        assert set(plain) <= pinned(*(ROOT / name for name in files)).keys(), said


def test_it_runs_as_the_user_that_the_pods_name() -> None:
    (user,) = re.findall(r"^USER (\d+):\d+$", TEXT, re.MULTILINE)
    assert f"runAsUser: {user}\n" in (ROOT / "deploy/kubernetes/components/agent/pod.yaml").read_text()
