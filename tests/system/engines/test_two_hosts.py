"""Data parallelism of vLLM on two hosts, with NIXL over TCP between them. One agent a replica.

Both replicas of prefill are on the first host. Decode has its first replica and its balancer on the second host, and a
headless one on the first.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from demo.processes import SETTINGS, free_port
from demo.pythonpath import of_checkout
from demo.servers import vllm_flags
from kvbridge.adapters.vllm.on_cpu import VLLM_SERVER
from kvbridge.transport.keys import write_pair
from testing.hosts import DEVICE, Host, two_hosts, why_not
from testing.http_server import HttpServer
from tests.support.pages import OFFLINE, ROOT, block
from tests.system.engines.kinds import write_experts
from tests.system.engines.replicas import (
    COMMON,
    CPUS,
    PAGE,
    REPLICAS,
    Replica,
    assert_all_to_all,
    assert_numbered,
    assert_spread,
    environments,
)
from tests.system.faults.two_hosts import HostAgent

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(660)]

START_S = 600.0
PORT, RPC_PORT = 7700, 29500


class HostServer(HttpServer):
    """vLLM on a host, which keeps rows in `folder`. It answers on its host's loopback."""

    def __init__(self, host: Host, name: str, folder: Path, flags: Sequence[str]) -> None:
        self._host = host
        environment = SETTINGS | VLLM_SERVER | of_checkout()
        environment |= {"VLLM_HOST_IP": host.address, "GLOO_SOCKET_IFNAME": DEVICE}
        port = free_port()
        vllm = [sys.executable, "-m", "tests.system.engines.replica_engine", *flags]
        own = [] if "--headless" in flags else ["--host", "127.0.0.1", "--port", str(port)]
        within = host.within("sh", "-c", 'cd "$0" && exec "$@"', str(folder), *vllm, *own)
        super().__init__(within, port, folder / f"{name}.log", environment)

    def connection(self, seconds: float) -> http.client.HTTPConnection:
        connection = super().connection(seconds)
        connection.sock = self._host.connected(self.port, seconds)
        return connection


class Sides:
    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self._model = str(write_experts(folder / "model"))
        write_pair(folder / "key")
        a, b, _ = stack.enter_context(two_hosts(folder))
        spread = ["--data-parallel-address", b.address, "--data-parallel-rpc-port", str(RPC_PORT)]
        spread += ["--data-parallel-size-local", "1"]
        agents = [self._agent(stack, *each) for each in ((a, "p-0", 0), (a, "p-1", 1), (a, "d-0", 2), (b, "d-0", 0))]
        for agent in agents:
            agent.wait_serving()  # before engines want the processor
        prefill = self._serve(stack, a, "p", 32, [])
        decode = self._serve(stack, b, "d", 64, spread)
        self._serve(stack, a, "d", 64, [*spread, "--headless", "--data-parallel-start-rank", "1"])
        for server in (prefill, decode):
            server.wait_up(seconds=START_S)
        self.prefill = [Replica(prefill, rank, agents[rank].serving, host="a") for rank in range(REPLICAS)]
        self.decode = [Replica(decode, rank, agents[3 - rank].serving, host="ba"[rank]) for rank in range(REPLICAS)]

    def _agent(self, stack: contextlib.ExitStack, host: Host, name: str, number: int) -> HostAgent:
        told = {"socket": str(host.folder / f"{name}.sock"), "listen": f"tcp://{host.address}:{PORT + number}"}
        told |= {"dial": "10.231.77.0/24:*", "key": str(self.folder / "key"), "slot_bytes": str(1 << 20)}
        agent = HostAgent(host, name=f"{host.name}-{name}", **told)
        stack.callback(agent.end)
        return agent

    def _serve(self, stack: contextlib.ExitStack, host: Host, name: str, block: int, more: Sequence[str]) -> HostServer:
        socket = str(host.folder / f"{name}-{{rank}}.sock")
        flags = [*vllm_flags(self._model, block, socket, "fail"), "--data-parallel-size", str(REPLICAS), *more]
        flags += [] if "--headless" in more else ["--api-server-count", "1"]
        server = HostServer(host, f"{host.name}-{name}", self.folder, flags)
        stack.callback(server.kill)
        return server


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    if reason := why_not():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        yield Sides(tmp_path_factory.mktemp("hosts"), stack)


def test_every_replica_takes_from_every_other(sides: Sides) -> None:
    for replicas in (sides.prefill, sides.decode):
        assert_numbered(replicas)
    assert_all_to_all(sides.folder, sides.prefill, sides.decode, seed=110)
    assert_all_to_all(sides.folder, sides.decode, sides.prefill, seed=120)


def test_the_page_spreads_prompts_over_replicas_of_two_hosts(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    alone = "for first in 1 2 3 4 5 6; do HERE=$A ask 8100 $first; done\n"
    write_pair(tmp_path / "key")
    with contextlib.ExitStack() as stack:
        a, b, _ = stack.enter_context(two_hosts(tmp_path))
        script_of(a, a, b, block(PAGE, "# on A") + "wait\n")
        script_of(b, a, b, block(PAGE, "# on B") + alone)
        stack.enter_context(running(a))
        second = stack.enter_context(running(b))
        assert second.wait(START_S) == 0, (tmp_path / "b" / "told").read_text()
        assert_spread((b.folder / "told").read_text())


def script_of(host: Host, a: Host, b: Host, own: str) -> None:
    """The page's commands in the host's folder, as in a checkout."""
    for name, place in (
        environments() | {"demo": str(ROOT / "demo"), "fleet.key": str(host.folder.parent / "key")}
    ).items():
        (host.folder / name).symlink_to(place)
    said = f"A={a.address} B={b.address} NET={DEVICE}\n"
    (host.folder / "run").write_text(said + block(PAGE, CPUS) + block(PAGE, COMMON) + own)


@contextlib.contextmanager
def running(host: Host) -> Iterator[subprocess.Popen[bytes]]:
    with (host.folder / "told").open("wb") as out:
        command = host.within("sh", "-c", 'cd "$0" && exec bash run', str(host.folder))
        process = subprocess.Popen(
            command, env=os.environ | OFFLINE, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
