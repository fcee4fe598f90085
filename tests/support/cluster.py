"""Answers the `kubectl` of a page's commands: what they apply starts as pods on nodes of this machine (pods.py).

The commands run on the first node. `python -m tests.support.cluster SOCKET ...` is their kubectl.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path
from threading import Thread
from typing import Any

import yaml

from tests.support.packaged import ROOT
from tests.support.pods import START_S, Node, Pod, nodes

PIECE_BYTES = 1 << 16


class Cluster:
    """`nodes` by name. Nothing is known of any but what commands say."""

    def __init__(self, folder: Path, nodes: dict[str, Node]) -> None:
        self.nodes, self._folder = nodes, folder
        self.pods: dict[str, Pod] = {}
        self._labels: dict[str, dict[str, str]] = {name: {} for name in nodes}
        self._namespaces: set[str] = set()
        self._secrets: dict[str, dict[str, str]] = {}
        self._started: dict[str, Future[None]] = {}
        self._starting = ThreadPoolExecutor(2)

    def close(self) -> None:
        for each in self.pods.values():
            each.close()
        self._starting.shutdown()

    def run(self, script: str) -> str:
        """What commands say that run on the first node, where deploy/ is the folder's. They must succeed."""
        command = next(iter(self.nodes.values())).inside("bash", "-euc", script)
        path = f"{self._folder.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        told = self._folder.parent / "told"
        with told.open("wb") as out:
            running = subprocess.Popen(
                command, cwd=told.parent, env=os.environ | {"PATH": path}, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            assert running.wait(2 * START_S) == 0, told.read_text()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
        return told.read_text()

    def kubectl(self, said: Sequence[str], place: Path) -> str:
        """What it prints. Raises AssertionError where it would fail."""
        if said[0] == "-n":
            assert said[1] in self._namespaces, f"no namespace {said[1]}"
            said = said[2:]
        match said:
            case ["label", "node", name, label]:
                key, _, value = label.partition("=")
                self._labels[name][key] = value
            case ["create", "namespace", name]:
                self._namespaces.add(name)
            case ["create", "secret", "generic", name, option]:
                file = place / option.removeprefix("--from-file=")
                self._secrets[name] = {file.name: file.read_text()}
            case ["apply", "-k", path]:
                self._apply(place / path)
            case ["rollout", "status", workload]:
                self._wait(workload.partition("/")[2])
            case ["get", "pods", "-o", "wide"]:
                nodes = {each.name: name for name, each in self.nodes.items()}
                return "".join(f"{name} {each.ip} {nodes[each.node.name]}\n" for name, each in self.pods.items())
            case ["get", "pod", name, "-o", "jsonpath={.status.podIP}"]:
                return self.pods[name].ip
            case ["exec", name, "-c", container, "--", *command]:
                return self.pods[name].asked(container, command)
            case ["port-forward", service, ports]:
                (address,) = self._services[service.removeprefix("service/")]
                return f"{ports.partition(':')[0]} {address} {ports.partition(':')[2]}"
            case _:
                raise AssertionError(f"not known here: kubectl {' '.join(said)}")
        return ""

    @property
    def _services(self) -> dict[str, list[str]]:
        return next(iter(self.nodes.values())).services

    def _apply(self, path: Path) -> None:
        told = subprocess.run(["kubectl", "kustomize", str(path)], capture_output=True, text=True)
        assert told.returncode == 0, told.stderr
        resources = list(yaml.safe_load_all(told.stdout))
        assert {each["metadata"].get("namespace") for each in resources} - {None} <= self._namespaces
        files = {each["metadata"]["name"]: each["data"] for each in resources if each["kind"] == "ConfigMap"}
        labels = {}
        for each in (each for each in resources if each["kind"] in ("StatefulSet", "Deployment")):
            for number in range(each["spec"]["replicas"]):
                made = self._pod(each, number, files | self._secrets)
                labels[made.name] = each["spec"]["template"]["metadata"]["labels"]
                if each["kind"] == "StatefulSet":
                    self._services[f"{made.name}.{each['spec']['serviceName']}"] = [made.ip]
        for each in (each for each in resources if each["kind"] == "Service"):
            chosen = each["spec"]["selector"].items()
            self._services[each["metadata"]["name"]] = [
                pod.ip for name, pod in self.pods.items() if chosen <= labels[name].items()
            ]
        self._started = {name: self._starting.submit(each.start) for name, each in self.pods.items()}

    def _pod(self, workload: dict[str, Any], number: int, files: dict[str, dict[str, str]]) -> Pod:
        """On the first node that has the labels which it asks for."""
        name, template = f"{workload['metadata']['name']}-{number}", workload["spec"]["template"]
        asked = template["spec"].get("nodeSelector", {}).items()
        node = next((self.nodes[each] for each, labels in self._labels.items() if asked <= labels.items()), None)
        assert node is not None, f"{name}: no node has the labels {dict(asked)}"
        claimed = [each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", [])]
        self.pods[name] = made = Pod(node, self._folder / name, name, template, files, claimed)
        return made

    def _wait(self, workload: str) -> None:
        end = time.monotonic() + START_S
        for name, each in self.pods.items():
            if name.rpartition("-")[0] == workload:
                self._started[name].result(START_S)
                while not all(each.passes(own["name"], "readinessProbe") for own in each.containers):
                    assert time.monotonic() < end, "".join(each.log(own["name"]) for own in each.containers)
                    time.sleep(0.2)


@contextmanager
def cluster(folder: Path, networks: dict[str, str]) -> Iterator[Cluster]:
    """Of nodes, by the name and the pods' network of each, which the `kubectl` in `folder` speaks to."""
    (folder / "pods").mkdir()
    with ExitStack() as stack:
        made = stack.enter_context(nodes(*networks.values()))
        running = Cluster(folder / "pods", dict(zip(networks, made, strict=True)))
        stack.callback(running.close)
        listener = stack.enter_context(Listener(str(folder / "socket"), "AF_UNIX"))
        Thread(target=_serve, args=(listener, running), daemon=True).start()
        program = folder / "kubectl"
        asked = f'PYTHONPATH={ROOT} exec {sys.executable} -m {__name__} {folder}/socket "$@"'
        program.write_text(f"#!/bin/sh\n{asked}\n")
        program.chmod(0o755)
        yield running


def _serve(listener: Listener, running: Cluster) -> None:
    while True:
        try:
            caller = listener.accept()
        except OSError:
            return  # closed
        with caller:
            said, place = caller.recv()
            try:
                caller.send((0, running.kubectl(said, Path(place))))
            except Exception as error:  # the command's failure
                caller.send((1, f"{type(error).__name__}: {error}"))


async def _forward(port: int, host: str, to: int) -> None:
    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(host, to)
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer), return_exceptions=True)

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    await server.serve_forever()


def main() -> None:
    path, *said = sys.argv[1:]
    with Client(path, "AF_UNIX") as asked:
        asked.send((said, str(Path.cwd())))
        code, text = asked.recv()
    if code == 0 and "port-forward" in said:
        port, host, to = text.split()
        asyncio.run(_forward(int(port), host, int(to)))
    sys.stdout.write(text)
    sys.exit(code)


if __name__ == "__main__":
    main()
