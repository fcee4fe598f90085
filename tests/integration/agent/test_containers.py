"""Agents in containers of one host: the same kernel, each with a mount namespace of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from kvbridge_proto.engine import Done

from testing.agents import agent, attached
from testing.nursery import Nursery
from testing.pairs import carry

SHARED = "/mnt"  # each container has a folder of its own there
MOUNT = f'mount --bind "$0" {SHARED} && exec "$@"'
UNSHARE = ("unshare", "--mount", "--propagation=private")


def why_not() -> str:
    if os.geteuid() != 0:
        return "no namespaces without root"
    tried = subprocess.run([*UNSHARE, "sh", "-c", MOUNT, "/tmp", "true"], capture_output=True, text=True)
    return f"no namespaces can be made: {tried.stderr.strip()}" if tried.returncode else ""


Container = tuple[Nursery, Path]


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Container]]:
    """Two, each with the folder that it has at SHARED."""
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        folders = [tmp_path_factory.mktemp(side) for side in ("prefill", "decode")]
        made = [Nursery(within=(*UNSHARE, "sh", "-c", MOUNT, str(folder))) for folder in folders]
        for each in made:
            stack.callback(each.close)
        yield list(zip(made, folders, strict=True))


@pytest.mark.parametrize("sockets", [("agent", "agent"), ("prefill", "decode")], ids=["one path", "two paths"])
def test_containers_of_one_host_do_not_call_at_each_others_doors(
    sockets: tuple[str, str], containers: list[Container], stack: ExitStack
) -> None:
    """At the path of the sender's door is the receiver's own, or none."""
    engines = []
    for (nursery, folder), name in zip(containers, sockets, strict=True):
        options = {"socket": f"{SHARED}/{name}.sock", "log_level": "debug"}
        engines.append(
            stack.enter_context(attached(stack.enter_context(agent(folder, name, born_in=nursery, **options))))
        )
    sender, receiver = engines
    assert isinstance(answer := carry(sender, receiver, "r"), Done), answer
    (peer,) = receiver.agent.status.peers
    assert peer.route_name == "nixl" and f"door {SHARED}/{sockets[0]}.sock.door: " in peer.route, peer.route
    assert "the peer is in another container" in peer.route
    for side in engines:
        lines = [line for line in side.agent.text().splitlines() if " DEBUG " not in line]
        assert not [line for line in lines if "kvbridge.door" in line or " WARNING " in line], side.agent.text()
        assert not [line for line in lines if "route does not work" in line], side.agent.text()
