"""Data parallelism on both sides, from one engine to the other: every replica to every replica."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from demo.model import QWEN3, write_model
from demo.processes import SETTINGS, free_port
from demo.pythonpath import of_checkout
from demo.servers import vllm_flags
from kvbridge.adapters.vllm.on_cpu import VLLM_SERVER
from testing.agents import agent
from testing.http_server import HttpServer
from tests.system.cross.fleet import decode_body, fetch_params, prefill_body
from tests.system.engines.replicas import REPLICAS, Replica, assert_numbered, moved, status_of
from tests.system.sglang import fleet as sglang
from tests.system.sglang import rows
from tests.system.sglang.fleet import assert_idle, prompt

pytestmark = [pytest.mark.cross, pytest.mark.timeout(660)]

START_S, TOKENS = 600.0, sglang.TOKENS


class Sides:
    """vLLM replicas that its own server balances, and servers of SGLang with some each."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, port = folder, free_port()
        model = str(write_model(folder / "model", **QWEN3))
        its_agents = [stack.enter_context(agent(folder, f"v-{rank}", slot_bytes=1 << 20)) for rank in range(REPLICAS)]
        command = [
            *(os.environ["KVBRIDGE_TEST_VLLM_PYTHON"], "-m", "demo.vllm_rows"),
            *vllm_flags(model, 32, str(folder / "v-{rank}.sock"), "fail"),
            *("--data-parallel-size", str(REPLICAS), "--api-server-count", "1"),
            *("--host", "127.0.0.1", "--port", str(port)),
        ]
        server = HttpServer(command, port, folder / "v.log", SETTINGS | VLLM_SERVER | of_checkout())
        stack.callback(server.kill)
        write = partial(write_model, **QWEN3)
        self.sglang = sglang.Fleet(folder / "sglang", stack, write=write, start=("p16",))
        server.wait_up(seconds=START_S)
        self.vllm = [Replica(server, rank, status_of(each)) for rank, each in enumerate(its_agents)]

    def room(self, replica: int) -> int:
        """It chooses SGLang's replica of prefill."""
        return REPLICAS * self.sglang.room() + replica

    def kept(self, side: str, room: int, is_vllm: bool) -> rows.SavedRows:
        return rows.load(self.folder if is_vllm else self.sglang.kept, side, room, 1)

    def alone(self, tokens: list[int]) -> tuple[int, ...]:
        """What one replica of vLLM says by itself."""
        return tuple(self.vllm[0].ask(tokens, TOKENS)["choices"][0]["token_ids"])


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    with ExitStack() as stack:
        yield Sides(tmp_path_factory.mktemp("replicas"), stack)


@pytest.mark.parametrize(("sender", "count"), [("p16", 1), ("p16-replicas", REPLICAS)])
def test_sglang_prefills_and_vllm_decodes(sides: Sides, sender: str, count: int) -> None:
    """The room says which replica prefills. vLLM asks that one's agent."""
    sides.sglang.start(sender)
    assert_numbered(sides.vllm)
    for replica in range(count):
        for number, receiver in enumerate(sides.vllm):
            tokens = prompt(300 + 31 * number, seed=300 + 50 * count + REPLICAS * replica + number)
            room = sides.room(replica)
            begun = sides.sglang[sender].begin(prefill_body(tokens, room))
            with moved([each.statuses[0] for each in sides.vllm]) as received:
                found = receiver.ask(tokens, TOKENS, **fetch_params(sides.sglang.agents[sender][replica], room))
            assert begun.getresponse().status == 200
            begun.close()
            assert [bool(each) for each in received] == [each is receiver for each in sides.vllm]
            given = sides.kept("prefill", room, False).first(len(tokens) - 1)
            rows.assert_carried(given, sides.kept("decode", room, True).first(len(tokens) - 1))
            assert tuple(found["choices"][0]["token_ids"]) == sides.alone(tokens)
    assert_idle(sides.sglang, sender)
    sides.sglang.kill(sender)


@pytest.mark.parametrize(("receiver", "count"), [("d16", 1), ("d32-replicas", REPLICAS)])
def test_vllm_prefills_and_sglang_decodes(sides: Sides, receiver: str, count: int) -> None:
    """vLLM's replica is named in a header, SGLang's in the body."""
    sides.sglang.start(receiver)
    agents = list(map(status_of, sides.sglang.agents[receiver]))
    assert [said.engine and said.engine.shard for said in (each() for each in agents)] == ["dp 0", "dp 1"][:count]
    for sender in range(REPLICAS):
        for replica in range(count):
            number = sender * count + replica
            tokens, room = prompt(300 + 31 * number, seed=200 + number + 50 * count), sides.room(0)
            answer = sides.vllm[sender].ask(tokens, 1, do_remote_decode=True, bootstrap_room=room)
            prefilled = SimpleNamespace(params=answer["kv_transfer_params"], tokens=answer["choices"][0]["token_ids"])
            body = decode_body(tokens, room, prefilled)
            with moved(agents) as received:
                status, said = sides.sglang[receiver].generate(body | {"routed_dp_rank": replica})
            assert status == 200, said
            assert [bool(each) for each in received] == [each == replica for each in range(count)]
            rows.assert_carried(sides.kept("prefill", room, True), sides.kept("decode", room, False))
            assert tuple(said["output_ids"]) == sides.alone(tokens)
    assert_idle(sides.sglang, receiver)
    sides.sglang.kill(receiver)  # replicas of SGLang turn without rest, and leave little to a server that starts
