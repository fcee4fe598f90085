"""Runs the pods of a rendered manifest as a kubelet would, without a container runtime.

Each pod has its own network, PIDs, IPC and volumes. Each of its containers has a root of its own, in which a program of
this Python stands in for the image's, and the user, groups, environment and mounts that the manifest says. They start
in the manifest's order, and probes come from the node. Needs root.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.support.booted import of_python
from tests.support.packaged import ROOT

START_S = 300.0
STEP_S = 0.2  # between probes while something starts; the manifest's periods would only take longer
DOCKERFILE = (ROOT / "deploy/image/Dockerfile").read_text()
ENTRYPOINT: list[str] = json.loads(re.findall(r"^ENTRYPOINT (.+)$", DOCKERFILE, re.MULTILINE)[0])
PROGRAMS = "/opt/programs"
AGENT_ENVIRONMENT = {
    name: value
    for block in re.findall(r"^ENV ((?:.*\\\n)*.*)$", DOCKERFILE, re.MULTILINE)
    for name, value in re.findall(r"(\w+)=(\S+)", block)
}
OF_HOST = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
OF_ETC = ("passwd", "group", "nsswitch.conf", "hosts", "ld.so.cache", "alternatives")
STAND_IN = "testing.stand_in_engine"
CABLE = ("192.0.2.1", "192.0.2.2")  # of two nodes


def why_not() -> str:
    """Why this machine cannot run them; empty if it can."""
    if os.geteuid() != 0:
        return "pods need root"
    if missing := [each for each in ("ip", "unshare", "nsenter", "setpriv", "curl") if shutil.which(each) is None]:
        return f"needs {' and '.join(missing)}"
    with suppress(AssertionError), nodes("10.0.0.0/30"):
        return ""
    return "no network namespace can be made, or no bridge in it"


class Node:
    """A host of pods: their bridge with the host's own address, from which a kubelet probes."""

    def __init__(self, name: str, network: ipaddress.IPv4Network, services: dict[str, list[str]]) -> None:
        self.name = name
        self.network = network
        self.services = services  # the addresses behind each name, as pods of all nodes look it up
        self._hosts = network.hosts()
        self.address = str(next(self._hosts))

    def next_address(self) -> str:
        return str(next(self._hosts))

    def inside(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *command]

    def asked(self, url: str, timeout_s: float, body: str | None = None) -> tuple[int, str]:
        """The status of an HTTP request from the node, and the answer; 0 if there was none."""
        command = ["curl", "-s", "--max-time", str(timeout_s), "-w", "\n%{http_code}", url]
        command += ["-d", body] if body is not None else []
        text, _, code = subprocess.run(self.inside(*command), capture_output=True, text=True).stdout.rpartition("\n")
        return int(code or 0), text


@contextmanager
def nodes(*networks: str) -> Iterator[list[Node]]:
    """One for each network of pods, or two. Between two, packets of pods are routed by the hosts, by a cable."""
    services: dict[str, list[str]] = {}
    made = [
        Node(f"kvb-{os.getpid()}-node-{i}", ipaddress.IPv4Network(each), services) for i, each in enumerate(networks)
    ]
    try:
        for each in made:
            run("ip", "netns", "add", each.name)
            run("ip", "-n", each.name, "link", "set", "lo", "up")
            run("ip", "-n", each.name, "link", "add", "pods", "type", "bridge")
            run("ip", "-n", each.name, "addr", "add", f"{each.address}/{each.network.prefixlen}", "dev", "pods")
            run("ip", "-n", each.name, "link", "set", "pods", "up")
            run(*each.inside("sysctl", "-q", "net.ipv4.ip_forward=1"))
        if len(made) > 1:
            first, second = made
            run("ip", "-n", first.name, "link", "add", "hosts", "type", "veth", "peer", "hosts", "netns", second.name)
            for own, other, (ours, theirs) in (first, second, CABLE), (second, first, CABLE[::-1]):
                run("ip", "-n", own.name, "addr", "add", ours, "peer", theirs, "dev", "hosts")
                run("ip", "-n", own.name, "link", "set", "hosts", "up")
                run("ip", "-n", own.name, "route", "add", str(other.network), "via", theirs)
        yield made
    finally:
        for each in made:
            subprocess.run(["ip", "netns", "del", each.name], capture_output=True)


class Pod:
    """One pod of a template. `files` are those of each ConfigMap and Secret by its name.

    `claimed` names volumes that its workload claims, `given` has variables that a controller gives each container.
    """

    def __init__(
        self,
        node: Node,
        folder: Path,
        name: str,
        template: dict[str, Any],
        files: dict[str, dict[str, str]],
        claimed: Sequence[str] = (),
        given: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.node, self.folder, self.name, self.spec = node, folder, name, template["spec"]
        self._given = given
        self._volumes = [*self.spec.get("volumes", []), *({"name": each, "emptyDir": {}} for each in claimed)]
        self.ip = node.next_address()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._files = files
        self._namespace = f"kvb-{os.getpid()}-{name}"
        folder.mkdir()

    # What the manifest says:

    @property
    def containers(self) -> list[dict[str, Any]]:
        """In the order in which they start."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def container(self, name: str) -> dict[str, Any]:
        return next(each for each in self.containers if each["name"] == name)

    def environment(self, container: dict[str, Any]) -> dict[str, str]:
        fields = {"status.podIP": self.ip, "metadata.name": self.name}
        is_agent = container["image"].rpartition("/")[2].startswith("kvbridge-agent")
        found = dict(AGENT_ENVIRONMENT) if is_agent else {"PATH": "/usr/bin:/bin"}
        found["PATH"] = f"{PROGRAMS}:{found['PATH'].replace('$PATH', '/usr/bin:/bin')}"
        found.update(self._given)
        for each in container.get("env", []):
            source = each.get("valueFrom", {})
            if "fieldRef" in source:
                value = fields[source["fieldRef"]["fieldPath"]]
            elif "configMapKeyRef" in source:
                value = self._files[source["configMapKeyRef"]["name"]][source["configMapKeyRef"]["key"]]
            elif source.get("secretKeyRef", {}).get("optional"):
                continue  # there is no such Secret
            else:
                value = each["value"]
            found[each["name"]] = _expanded(value, found)
        return found

    def _command(self, container: dict[str, Any]) -> list[str]:
        said = [*(container.get("command") or ENTRYPOINT), *container.get("args", [])]
        said = [re.sub(r"^--device=cuda:\d$", "--device=cpu", each) for each in said]  # no node here has a GPU
        return [_expanded(each, self.environment(container)) for each in said]

    def _user(self, container: dict[str, Any]) -> tuple[int, int, int]:
        said = self.spec["securityContext"] | container.get("securityContext", {})
        return said["runAsUser"], (group := said.get("runAsGroup", 0)), said.get("fsGroup", group)

    # Its life:

    def start(self) -> None:
        """Start its containers, each once the one before it has ended or, of a sidecar, its startup probe passes."""
        self._join()
        self._make_volumes()
        for container in self.containers:
            self.start_container(container["name"])

    def start_container(self, name: str) -> None:
        container = self.container(name)
        script = self.folder / f"{name}.sh"
        script.write_text("\n".join(self._script(container)))
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = process = subprocess.Popen(
                [*self._inside(), "unshare", "--mount", "--propagation=private", "bash", "-eu", str(script)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        if container in self.spec.get("initContainers", []) and container.get("restartPolicy") != "Always":
            assert process.wait(START_S) == 0, self.log(name)
        end = time.monotonic() + START_S
        while not self.passes(name, "startupProbe"):
            assert process.poll() is None and time.monotonic() < end, self.log(name)
            time.sleep(STEP_S)

    def passes(self, name: str, kind: str) -> bool:
        """Whether a probe of a container passes. One that it does not have does."""
        container = self.container(name)
        probe = container.get(kind)
        if probe is None:
            return True
        asked = probe["httpGet"]
        (port,) = [each["containerPort"] for each in container["ports"] if each["name"] == asked["port"]]
        code, _ = self.node.asked(f"http://{self.ip}:{port}{asked['path']}", probe.get("timeoutSeconds", 1))
        return 200 <= code < 400

    def kill(self, name: str) -> None:
        """Kill all processes of a container."""
        process = self.running[name]
        subprocess.run(["kill", "-KILL", *_children(process.pid)], check=True)
        process.wait(10)

    def asked(self, name: str, command: Sequence[str]) -> str:
        """What a command says that runs in a container, as its user. It must succeed."""
        container = self.container(name)
        (first,) = _children(self.running[name].pid)
        inside = ["nsenter", f"--target={first}", "--mount", "--pid", "--net", "--ipc", "--uts", "--root", "--wd"]
        told = subprocess.run([*inside, *self._as_user(container), *command], capture_output=True, text=True)
        assert told.returncode == 0, told.stdout + told.stderr
        return told.stdout

    def log(self, name: str) -> str:
        return f"{self.name}/{name}: {(self.folder / f'{name}.log').read_text()[-3000:]}"

    def close(self) -> None:
        if "pause" in self.running:
            self.running.pop("pause").kill()  # the first process of its PIDs: with it all others die
        for process in self.running.values():
            process.wait(20)
        subprocess.run(["ip", "netns", "del", self._namespace], capture_output=True)

    # How it is made:

    def _join(self) -> None:
        """Its network, joined to the node's by a cable, and the process that keeps its namespaces."""
        device = tomllib.loads(self._agent_options())["net_devices"]
        name, outer = self._namespace, f"p{self.ip.rpartition('.')[2]}"
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", self.node.name, "link", "add", outer, "type", "veth", "peer", device, "netns", name)
        run("ip", "-n", self.node.name, "link", "set", outer, "master", "pods", "up")
        run("ip", "-n", name, "addr", "add", f"{self.ip}/{self.node.network.prefixlen}", "dev", device)
        run("ip", "-n", name, "link", "set", device, "up")
        run("ip", "-n", name, "route", "add", "default", "via", self.node.address)
        kinds = ["--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child=SIGKILL", "--propagation=private"]
        self.running["pause"] = subprocess.Popen(
            ["ip", "netns", "exec", name, "unshare", *kinds, "sleep", "infinity"], stdin=subprocess.DEVNULL
        )
        is_alone = len(self.containers) == 1
        assert is_alone or self.spec["shareProcessNamespace"], "each container would have PIDs of its own"
        end = time.monotonic() + 10
        while not (found := _children(self.running["pause"].pid)):
            assert time.monotonic() < end
            time.sleep(0.02)
        self._first = found[0]

    def _agent_options(self) -> str:
        (text,) = [files["agent.toml"] for files in self._files.values() if "agent.toml" in files]
        return text

    def _inside(self) -> list[str]:
        return ["nsenter", f"--target={self._first}", "--mount", "--pid", "--net", "--ipc", "--uts"]

    def _make_volumes(self) -> None:
        """As a kubelet makes them: writable by everybody, of the pod's group; files are links into a hidden folder."""
        group = self.spec["securityContext"].get("fsGroup", 0)
        for volume in self._volumes:
            path = self.folder / "volumes" / volume["name"]
            path.mkdir(parents=True)
            source = volume.get("configMap") or volume.get("secret")
            if source is None:
                if volume["emptyDir"].get("medium") == "Memory":
                    size = volume["emptyDir"]["sizeLimit"].removesuffix("i").lower()
                    run(*self._inside(), "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path))
                run(*self._inside(), "chown", f"0:{group}", str(path))
                run(*self._inside(), "chmod", "2777", str(path))
                continue
            (path / "..1").mkdir()
            (path / "..data").symlink_to("..1")
            for name, text in self._files[source.get("name") or source["secretName"]].items():
                file = path / "..1" / name
                file.write_text(text)
                file.chmod(source.get("defaultMode", 0o644))
                os.chown(file, 0, group)
                (path / name).symlink_to(f"..data/{name}")

    def _script(self, container: dict[str, Any]) -> list[str]:
        """What makes the container's root, and then runs its command there."""
        root = self.folder / "roots" / container["name"]
        root.mkdir(parents=True, exist_ok=True)
        lines = [f"mount -t tmpfs -o mode=0755 tmpfs {root}", f"cd {root}", "mkdir etc proc dev sys tmp opt run var"]
        for path in OF_HOST:
            lines.append(f"cp -P {path} . 2>/dev/null || " + _bound(path, path, root, is_read_only=True))
        lines += [_bound(path, path, root, is_read_only=True) for path in of_python()]
        lines += [f"cp -a /etc/{each} etc/" for each in OF_ETC if Path("/etc", each).exists()]
        named = [f"{address} {name}" for name, found in self.node.services.items() for address in found]
        lines += ["echo multi on > etc/host.conf", *(f"echo {each} >> etc/hosts" for each in named)]
        lines += ["mount -t proc proc proc", "mount -t sysfs sysfs sys", "chmod 1777 tmp"]
        lines += ["mount --rbind /dev dev", "mount -t tmpfs -o mode=1777 tmpfs dev/shm"]
        for mount in container.get("volumeMounts", []):
            volume = str(self.folder / "volumes" / mount["name"])
            lines.append(_bound(volume, mount["mountPath"], root, is_read_only=mount.get("readOnly", False)))
        lines += self._programs(container)
        if container.get("securityContext", {}).get("readOnlyRootFilesystem"):
            lines.append(f"mount -o remount,ro {root}")
        command = ["chroot", str(root), *self._as_user(container), *self._command(container)]
        return [*lines, f"exec {shlex.join(command)}"]

    def _as_user(self, container: dict[str, Any]) -> list[str]:
        user, group, own = self._user(container)
        caps = ["--no-new-privs", "--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all"]
        drop = ["setpriv", f"--reuid={user}", f"--regid={group}", f"--groups={own}", *caps]
        return [*drop, "env", "-i", *(f"{name}={value}" for name, value in self.environment(container).items())]

    def _programs(self, container: dict[str, Any]) -> list[str]:
        """What the image would have: kvbridge, or in place of the engine's program one that stands in for it."""
        is_agent = container["image"].rpartition("/")[2].startswith("kvbridge-agent")
        name = "kvbridge" if is_agent else self._command(container)[0]
        module = "kvbridge.cli" if name == "kvbridge" else STAND_IN
        text = f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m {module} "$@"\n'
        path = f".{PROGRAMS}/{name}"
        return [f"mkdir -p .{PROGRAMS}", f"printf %s {shlex.quote(text)} > {path}", f"chmod 755 {path}"]


def _bound(source: str, target: str, root: Path, *, is_read_only: bool) -> str:
    at = f"{root}{target}"
    read_only = f" && mount -o remount,bind,ro {at}" if is_read_only else ""
    return f"{{ mkdir -p {at} && mount --bind {source} {at}{read_only}; }}"


def _expanded(text: str, environment: dict[str, str]) -> str:
    """As Kubernetes does: $(NAME) of a variable that is known."""
    return re.sub(r"\$\((\w+)\)", lambda found: environment.get(found[1], found[0]), text)


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"
