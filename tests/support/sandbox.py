"""The sandbox of the systemd unit without systemd: enacts the unit's directives in a mount namespace. Needs root.

Where systemd can be booted, booted.py has it enact all of them. Directives that are not enacted here are in OTHER. A
directive that is neither there nor enacted is an error.
"""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "kvbridge-agent@.service"
NOBODY = 65534  # stands for the unit's user, which this machine does not have
PLACES = {"RuntimeDirectory": "/run", "CacheDirectory": "/var/cache"}
SPECIFIERS = {"%i": "0", "%t": "/run", "%C": "/var/cache", "%%": "%"}
HOMES = ("/engine", "/root")
ENACTED = {
    *("User", "Group", "Environment", "ExecStart", "UMask", "NoNewPrivileges", "CapabilityBoundingSet"),
    *("AmbientCapabilities", "ProtectSystem", "ProtectHome", "ProtectKernelTunables", "ProtectControlGroups"),
    *("RuntimeDirectory", "RuntimeDirectoryMode", "CacheDirectory", "CacheDirectoryMode", "LimitNOFILE", "LimitCORE"),
    "LimitMEMLOCK",
}
OTHER = {
    *("Type", "NotifyAccess", "TimeoutStartSec", "WatchdogSec", "EnvironmentFile", "ExecReload", "Restart"),
    *("RestartSec", "RestartPreventExitStatus", "KillSignal", "TimeoutStopSec", "RuntimeDirectoryPreserve"),
    *("PrivateMounts", "ProtectProc", "ProtectClock", "ProtectHostname", "ProtectKernelLogs"),
    *("ProtectKernelModules", "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID", "RestrictAddressFamilies"),
    *("LockPersonality", "RemoveIPC", "SystemCallArchitectures", "SystemCallFilter", "SystemCallErrorNumber"),
}


def why_not() -> str:
    """Why this machine cannot make it. Empty if it can."""
    if os.geteuid() != 0:
        return "a mount namespace needs root"
    missing = [tool for tool in ("unshare", "setpriv", "mount", "bash") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)}"
    mount = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/run"]
    tried = subprocess.run(mount, capture_output=True, text=True)
    return f"no mount namespace can be made: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass(frozen=True)
class Sandbox:
    """The directives of the unit for the process of one instance."""

    said: dict[str, list[str]]

    @classmethod
    def read(cls, unit: Path = UNIT) -> Sandbox:
        said: dict[str, list[str]] = {}
        service = unit.read_text().partition("[Service]")[2].partition("[Install]")[0]
        for line in service.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.partition("=")
                said.setdefault(name, []).append(_specified(value))
        unknown = said.keys() - ENACTED - OTHER
        assert not unknown, f"sandbox.py knows nothing of {unknown}: enact it, or put it into OTHER"
        fixed = {
            "ProtectSystem": "strict",
            "ProtectHome": "yes",
            "CapabilityBoundingSet": "",
            "AmbientCapabilities": "",
        }
        fixed |= dict.fromkeys(("NoNewPrivileges", "ProtectKernelTunables", "ProtectControlGroups"), "yes")
        assert all(said.get(name) == [value] for name, value in fixed.items()), "sandbox.py enacts other values"
        return cls(said)

    @property
    def environment(self) -> dict[str, str]:
        """The environment that systemd gives every service of a user, and the unit's own."""
        user = pwd.getpwuid(NOBODY)
        found = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        found |= {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": user.pw_shell}
        return found | dict(part.split("=", 1) for line in self.said["Environment"] for part in shlex.split(line))

    def directories(self) -> list[tuple[str, str]]:
        """The folders that it may write, with their modes, the outer ones first."""
        return [
            (f"{place}/{name}", self.said.get(f"{kind}Mode", ["0755"])[0])
            for kind, place in PLACES.items()
            for name in " ".join(self.said.get(kind, [])).split()
        ]

    def start(self, command: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
        """Start a command in the sandbox. It has the pid of the returned process."""
        inside = ["env", "-i", *(f"{name}={value}" for name, value in self.environment.items()), *command]
        lowered = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs"]
        lowered += ["--bounding-set=-all", "--inh-caps=-all", *inside]
        then = [f"umask {self.said['UMask'][0]}", "cd /", f"exec {shlex.join(lowered)}"]
        script = [*self._mounts(), *self._limits(), *then]
        return subprocess.Popen(  # type: ignore[call-overload]
            ["unshare", "--mount", "--propagation=private", "bash", "-euc", "\n".join(script)], **options
        )

    def _limits(self) -> list[str]:
        """Commands that set the unit's limits, if this machine lets root raise them."""
        flags = {"NOFILE": "n", "CORE": "c", "MEMLOCK": "l"}
        meant = {flag: self.said[f"Limit{name}"][0].replace("infinity", "unlimited") for name, flag in flags.items()}
        return [f"ulimit -{flag} {value} 2>/dev/null || true" for flag, value in meant.items()]

    def _mounts(self) -> list[str]:
        """Commands that make empty folders to write to, hide homes, and make all else read-only."""
        script = [f"mount -t tmpfs -o mode=0755 tmpfs {place}" for place in PLACES.values()]
        script += _hidden(HOMES, of_python())
        for path, mode in self.directories():
            script.append(f"mkdir -p {path}; chmod {mode} {path}; chown {NOBODY}:{NOBODY} {path}")
        tops = [path for path, _ in self.directories() if str(Path(path).parent) in PLACES.values()]
        script += [f"mount --bind {top} {top}" for top in tops]
        kept = "|".join(f"{top}|{top}/*" for top in [*tops, "/proc", "/sys", "/dev"])
        remount = 'mount -o remount,bind,ro "$mounted" 2>/dev/null || ! mountpoint -q "$mounted"'
        script.append("cut -d' ' -f5 /proc/self/mountinfo | while read -r mounted")
        script.append(f"do case $mounted in {kept}) ;; *) {remount} ;; esac; done")
        script += ["mount --bind /proc/sys /proc/sys", "mount -o remount,bind,ro /proc/sys"]
        script += ["mount --rbind /sys /sys", "mount -o remount,bind,ro /sys"]
        return script


def _specified(value: str) -> str:
    for specifier, meant in SPECIFIERS.items():
        value = value.replace(specifier, meant)
    return value


def of_python() -> list[str]:
    """The folders of this Python and its imports. An operator would have installed them where they can be read."""
    places = {Path(sys.base_prefix), Path(sys.prefix), ROOT, *map(Path, sys.path)}
    found = sorted({place.resolve() for place in places if place.is_dir()})
    return [str(place) for place in found if not any(outer in place.parents for outer in found)]


def _hidden(homes: Iterable[str], needed: Iterable[str]) -> list[str]:
    """Commands that hide homes, except what is needed."""
    script = []
    for engine in filter(os.path.isdir, homes):
        inside = [path for path in needed if Path(engine) in Path(path).parents]
        kept = [(path, f"/run/.kept{number}") for number, path in enumerate(inside)]
        script += [f"mkdir {place}; mount --bind {path} {place}" for path, place in kept]
        script.append(f"mount -t tmpfs -o mode={'0755' if kept else '0000'} tmpfs {engine}")
        script += [f"mkdir -p {path}; mount --move {place} {path}; rmdir {place}" for path, place in kept]
    return script
