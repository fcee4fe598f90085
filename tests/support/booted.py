"""Boots a real systemd in its own namespaces, with only the agent's units.

It has its own processes, network, /etc, /run, /tmp, /var/cache and control group. Nothing that it changes outside these
outlives it. Needs root, and a host on which root may create all of these.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "systemd"
SYSTEMD = Path("/lib/systemd/systemd")
TOOLS = ("unshare", "nsenter", "mount", "systemctl", "systemd-sysusers", "systemd-tmpfiles")
HOMES = ("/engine", "/root")
UNITS = "/run/units"  # the only units; the host's own would mount, load and clean up things
START_S = 20.0
OF_NOBODY = "[Unit]\nDefaultDependencies=no\n"  # a target that pulls nothing in
# Cgroups of version 2, alone or beside those of version 1.
GROUPS = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")]


def why_not() -> str:
    """Why this machine cannot boot it. Empty if it can."""
    if os.geteuid() != 0:
        return "systemd in namespaces of its own needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None] + ([] if SYSTEMD.exists() else [str(SYSTEMD)])
    if missing:
        return f"needs {' and '.join(missing)}"
    if _groups() is None:
        return "no control groups of version 2 that may be written"
    tried = subprocess.run([*_unshared(), "mount", "-t", "tmpfs", "tmpfs", "/run"], capture_output=True, text=True)
    return f"no namespaces can be made: {tried.stderr.strip()}" if tried.returncode else ""


class Booted:
    """A running systemd. `root` is its file system as this process sees it."""

    def __init__(self, process: subprocess.Popen[bytes], pid: int) -> None:
        self._process = process
        self.pid = pid
        self.root = Path(f"/proc/{pid}/root")

    def run(self, *command: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as root."""
        entered = ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup"]
        return subprocess.run([*entered, *command], capture_output=True, text=True, timeout=seconds)

    def shows(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.run("systemctl", "show", unit, f"--property={name}", "--value").stdout.strip()

    def waits(self, unit: str, name: str, value: str, seconds: float) -> None:
        """Wait until the property has this value. Fails after `seconds`, with the unit's output."""
        end = time.monotonic() + seconds
        while (found := self.shows(unit, name)) != value:
            assert time.monotonic() < end, f"{name}={found}, not {value}\n{self.text(unit)}"
            time.sleep(0.1)

    def text(self, unit: str) -> str:
        """The output of the unit's process."""
        path = self.root / f"run/log/{unit}"
        return path.read_text(errors="replace") if path.exists() else ""


@contextmanager
def booted(folder: Path, drop_in: str = "") -> Iterator[Booted]:
    """A systemd with the agent's units, user and folders, as docs/systemd.md describes.

    It runs the program of this Python. The agent's output goes to a file. `drop_in` has other differences.
    """
    groups = _groups()
    assert groups is not None
    group = groups / f"kvbridge-test-{os.getpid()}"
    group.mkdir()
    script = folder / "boot"
    script.write_text("\n".join(_script(folder, drop_in)))
    inside = f"echo $$ > {group}/cgroup.procs; exec {shlex.join([*_unshared(), 'bash', '-eu', str(script)])}"
    process = subprocess.Popen(["bash", "-euc", inside], stderr=(folder / "boot.err").open("wb"))
    try:
        yield _once_up(process, folder)
    finally:
        process.kill()  # its child, pid 1 inside, dies with it, and with that all others
        process.wait()
        _remove(group)


def _groups() -> Path | None:
    return next((each for each in GROUPS if (each / "cgroup.controllers").exists() and os.access(each, os.W_OK)), None)


def _unshared() -> list[str]:
    kinds = ["--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup"]
    return ["unshare", *kinds, "--propagation=private", "--fork", "--kill-child=SIGKILL", "--mount-proc"]


def _script(folder: Path, drop_in: str) -> list[str]:
    """The commands that set up what pid 1 needs, then start it."""
    program = f"{sys.executable} -m kvbridge.cli"
    unit = (DEPLOY / "kvbridge-agent@.service").read_text().replace("/opt/kvbridge/bin/kvbridge", program)
    written = {
        "kvbridge-agent@.service": unit,
        "kvbridge-agent@.service.d/test.conf": f"[Service]\nStandardError=file:/run/log/%n\n{_seen()}{drop_in}",
    }
    written |= {f"{name}.target": OF_NOBODY for name in ("sysinit", "basic", "shutdown", "network-online", "test")}
    for name, text in written.items():
        path = folder / "units" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [
        "mount -t tmpfs tmpfs /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup",
        "mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys",
        f"mkdir -p {folder}/etc && cp -a /etc/. {folder}/etc && mount --bind {folder}/etc /etc",
        "mount -t tmpfs -o mode=0755 tmpfs /run && mkdir /run/log",
        f"cp -r {folder}/units {UNITS}",
        "mount -t tmpfs -o mode=0755 tmpfs /var/cache",
        *_empty_tmp(),
        f"systemd-sysusers {DEPLOY}/kvbridge.sysusers.conf",
        f"systemd-tmpfiles --create {DEPLOY}/kvbridge.tmpfiles.conf",
        f"export container=unshare SYSTEMD_UNIT_PATH={UNITS} SYSTEMD_GENERATOR_PATH=/run/none",
        f"exec {SYSTEMD} --system --unit=test.target --log-target=null --show-status=no",
    ]


def _empty_tmp() -> list[str]:
    """Nothing is in /tmp but this Python, if it or its checkout is there."""
    inside = [path for path in of_python() if Path("/tmp") in Path(path).parents]
    kept = [f"/run/kept/{number}" for number in range(len(inside))]
    return [
        *(f"mkdir -p {at} && mount --bind {path} {at}" for at, path in zip(kept, inside, strict=True)),
        "mount -t tmpfs -o mode=1777 tmpfs /tmp",
        *(f"mkdir -p {path} && mount --move {at} {path}" for at, path in zip(kept, inside, strict=True)),
    ]


def _seen() -> str:
    """Hide homes as the unit does, except this Python, which an operator would have installed elsewhere."""
    inside = [path for path in of_python() if any(Path(engine) in Path(path).parents for engine in HOMES)]
    return "ProtectHome=tmpfs\n" + "".join(f"BindReadOnlyPaths={path}\n" for path in inside) if inside else ""


def of_python() -> list[str]:
    """The folders of this Python and its imports. An operator would have installed them where they can be read."""
    places = {Path(sys.base_prefix), Path(sys.prefix), ROOT, *map(Path, sys.path)}
    found = sorted({place.resolve() for place in places if place.is_dir()})
    return [str(place) for place in found if not any(outer in place.parents for outer in found)]


def _once_up(process: subprocess.Popen[bytes], folder: Path) -> Booted:
    end = time.monotonic() + START_S
    while True:
        assert process.poll() is None and time.monotonic() < end, (folder / "boot.err").read_text()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if children:
            found = Booted(process, int(children[0]))
            if found.run("systemctl", "is-active", "test.target").stdout.strip() == "active":
                return found
        time.sleep(0.05)


def _remove(group: Path) -> None:
    """Remove a control group and those inside it. Their processes may take a moment to end."""
    end = time.monotonic() + START_S
    while group.exists():
        try:
            for path in sorted(group.rglob("*"), reverse=True):
                if path.is_dir():
                    path.rmdir()
            group.rmdir()
        except OSError:
            assert time.monotonic() < end, f"{group} is still in use"
            time.sleep(0.05)
