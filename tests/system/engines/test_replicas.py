"""Data parallelism of vLLM: replicas with KV of their own and an agent each, which share a model's experts.

vLLM balances between them itself (one server for all), or something in front does (`--data-parallel-rank`: a server
each, and sockets of other names). It has the second for models with experts only.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from demo.model import LAYERS, prompt, write_tokenizer
from demo.processes import SETTINGS, free_port
from demo.pythonpath import of_checkout
from demo.servers import vllm_flags
from kvbridge.adapters.vllm.on_cpu import VLLM_SERVER
from testing.agents import agent
from testing.http_server import HttpServer
from testing.waiting import wait_for
from tests.support.pages import block, told, why_not
from tests.system.engines.kinds import write_experts, write_plain_sparse, write_sparse
from tests.system.engines.replicas import (
    COMMON,
    CPUS,
    PAGE,
    REPLICAS,
    TOKENS,
    Replica,
    assert_all_to_all,
    assert_numbered,
    assert_spread,
    body_of,
    environments,
    status_of,
)
from tests.system.engines.test_index_keys import INDEXED
from tests.system.engines.test_index_keys import PLUGIN as DSA
from tests.system.engines.test_latents import BACKEND
from tests.system.engines.test_plain_index_keys import CHOOSING
from tests.system.engines.test_plain_index_keys import PLUGIN as MINIMAX

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(660)]

START_S, SOON_S = 600.0, 15.0
BALANCED = ("--data-parallel-size", str(REPLICAS), "--api-server-count", "1")
REFUSED = "code=prefill_refused"


class Sides:
    """`inner`: vLLM chooses among its replicas. `outer`: somebody else does."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self._serve = partial(serve, folder, stack, str(write_experts(folder / "model")))
        names = ("i-0", "i-1", "o0-0", "o1-0", "t-0", "t-1")
        self.agents = {name: stack.enter_context(agent(folder, name, slot_bytes=1 << 20)) for name in names}
        outer = (*BALANCED, "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port()))
        rooms = ("--middleware", "kvbridge.adapters.vllm.middleware.BootstrapRooms")
        inner = self._serve("i", 32, [*BALANCED, *rooms], role="kv_producer")
        ranks = [self._serve(f"o{rank}", 64, [*outer, "--data-parallel-rank", str(rank)]) for rank in range(REPLICAS)]
        for server in (inner, *ranks):
            server.wait_up(seconds=START_S)
        self.inner = [Replica(inner, rank, status_of(self.agents[f"i-{rank}"])) for rank in range(REPLICAS)]
        self.outer = [Replica(ranks[rank], None, status_of(self.agents[f"o{rank}-0"])) for rank in range(REPLICAS)]

    def start_ranks(self) -> Replica:
        """Two ranks and no replicas."""
        server = self._serve("t", 64, ["--tensor-parallel-size", "2"])
        server.wait_up(seconds=START_S)
        return Replica(server, None, *(status_of(self.agents[f"t-{rank}"]) for rank in range(2)))


def serve(
    folder: Path,
    stack: contextlib.ExitStack,
    model: str,
    name: str,
    block_tokens: int,
    flags: Sequence[str],
    role: str = "kv_both",
    plugin: Path | None = None,
) -> HttpServer:
    port = free_port()
    command = [
        *("nice", "-n", "10", sys.executable, "-m", "tests.system.engines.replica_engine"),
        *vllm_flags(model, block_tokens, str(folder / f"{name}-{{rank}}.sock"), "fail", role),
        *("--host", "127.0.0.1", "--port", str(port), *flags),
    ]
    environment = SETTINGS | VLLM_SERVER | of_checkout()
    if plugin:
        environment["PYTHONPATH"] += f"{os.pathsep}{plugin}"
    server = HttpServer(command, port, folder / f"{name}.log", environment)
    stack.callback(server.kill)
    return server


class Sparse(NamedTuple):
    """A model whose replicas keep index keys. `planes`: of layers and parts; `flags` of vLLM."""

    write: Callable[[Path], Path]
    plugin: Path
    blocks: tuple[int, int]
    planes: int
    flags: tuple[str, ...] = ()
    is_like_alone: bool = True


SPARSE = {
    "dsa": Sparse(
        write_sparse,
        DSA,
        (16, 32),
        LAYERS + 2 * len(INDEXED),
        ("--attention-backend", BACKEND),
        is_like_alone=False,  # as in test_latents.py
    ),
    "minimax": Sparse(write_plain_sparse, MINIMAX, (128, 256), 2 * LAYERS + len(CHOOSING)),
}


# The first ones: they want the processors for servers of their own.
@pytest.mark.parametrize("kind", SPARSE)
def test_every_replica_gives_and_takes_index_keys(kind: str, tmp_path: Path) -> None:
    sparse, names = SPARSE[kind], ("p-0", "p-1", "d-0", "d-1")
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(agent(tmp_path, name, slot_bytes=1 << 20)) for name in names]
        model = str(write_tokenizer(sparse.write(tmp_path / "model")))
        flags = (*BALANCED, *sparse.flags)
        servers = [
            serve(tmp_path, stack, model, name, block, flags, plugin=sparse.plugin)
            for name, block in zip("pd", sparse.blocks, strict=True)
        ]
        for server in servers:
            server.wait_up(seconds=START_S)
        prefill, decode = (
            [Replica(server, rank, status_of(agents[2 * number + rank])) for rank in range(REPLICAS)]
            for number, server in enumerate(servers)
        )
        for seed, senders, receivers in ((50, prefill, decode), (60, decode, prefill)):
            assert_numbered(receivers)
            assert_all_to_all(tmp_path, senders, receivers, seed, sparse.planes, sparse.is_like_alone)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    with contextlib.ExitStack() as stack:
        yield Sides(tmp_path_factory.mktemp("replicas"), stack)


@pytest.mark.parametrize("way", ["inner to outer", "outer to inner"])
def test_every_replica_takes_from_every_other(sides: Sides, way: str) -> None:
    senders, receivers = (sides.inner, sides.outer) if way == "inner to outer" else (sides.outer, sides.inner)
    assert_numbered(receivers)
    assert_all_to_all(sides.folder, senders, receivers, seed=10 if senders is sides.inner else 20)


def test_two_ranks_give_to_every_replica_and_take_from_every_one(sides: Sides) -> None:
    """Prefill with tensor parallelism, decode with data parallelism, and the reverse."""
    ranks = sides.start_ranks()
    engines = [status().engine for status in ranks.statuses]
    assert [each and each.shard for each in engines] == ["dp 0 tp 0/2", "dp 0 tp 1/2"]
    assert_all_to_all(sides.folder, [ranks], sides.inner, seed=30)
    assert_all_to_all(sides.folder, sides.inner, [ranks], seed=35)
    ranks.server.kill()


@pytest.mark.parametrize("status", [404, 400], ids=["names a replica", "names none"])
def test_every_replica_is_told_of_a_call_in_a_room_that_is_refused(sides: Sides, status: int) -> None:
    """No replica has had such a call. Decode asks the agent of any of them, and would wait for a minute."""
    decode, headers = sides.outer[0], sides.inner[0].headers if status == 404 else {}
    for number, named in enumerate(sides.inner):
        tokens, place, room = prompt(200, seed=40 + number), urlsplit(named.address), status + number
        body = {"model": "nobody", "prompt": tokens, "bootstrap_host": place.hostname, "bootstrap_port": place.port}
        wants = {"do_remote_prefill": True, "remote_host": place.hostname, "remote_port": place.port}
        before, its_log = sides.agents["o0-0"].text().count(REFUSED), sides.agents["o0-0"].text
        with ThreadPoolExecutor(1) as pool:
            began = time.monotonic()
            body_there = body_of(tokens, TOKENS, bootstrap_room=room, **wants)
            asked = pool.submit(decode.server.ask, "/v1/completions", body_there)
            wait_for(lambda named=named: named.statuses[0]().transfers)
            refused = named.server.ask("/v1/completions", body | {"bootstrap_room": room}, headers=headers)
            assert refused[0] == status, refused
            assert asked.result()[0] == 500  # kv_load_failure_policy is "fail"
            assert time.monotonic() - began < SOON_S
        assert its_log().count(REFUSED) == before + 1


def test_the_page_spreads_prompts_over_replicas(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    ends = block("README.md", "kill $(jobs")
    alone = "for first in 1 2 3 4 5 6; do ask 8100 $first; done\n"
    script = "".join(block(PAGE, begins) for begins in (CPUS, COMMON, "# prefill: one replica")) + alone + ends
    assert_spread(told(script, tmp_path, environments(), START_S))
