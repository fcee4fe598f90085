"""SGLang changes a server's role: our manager ends, and another is made, beside the same agent, in the same process.

Managers, sockets, the bootstrap server, prefix caches, agents and SGLang's own way of changing are real. What is played
is the scheduler.
"""

from __future__ import annotations

import importlib.util
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not in this environment (make test-sglang)", allow_module_level=True)

from kvbridge.adapters.sglang.building import building
from kvbridge.adapters.sglang.held_pages import HELD
from kvbridge.adapters.sglang.messages import STATUS_TAG, pack
from testing.agents import AgentProcess, agent
from testing.proc import descriptors
from testing.serving import serving
from testing.waiting import wait_for
from tests.integration.adapters.test_sglang_kept import CHAT, PAGE, POOL, TREES, Side
from tests.integration.adapters.test_sglang_kept import options as of_requests
from tests.integration.adapters.test_sglang_life import asked, one_rank
from tests.integration.adapters.test_sglang_outside import served
from tests.integration.adapters.test_sglang_pool import on_a_cpu, plain, queue_of
from tests.support.pages import run_block

__all__ = ["of_requests", "on_a_cpu", "one_rank", "served"]
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(180)]
CHANGES = 6
HANDED = "kvbridge_handed"
OTHER = {"prefill": "decode", "decode": "prefill"}
SIZES = {f"{kind}_size": 1 for kind in ("attn_tp", "attn_cp", "attn_dp", "attn_dcp", "pp", "dp", "tp")}
RANKS = {f"{kind}_rank": 0 for kind in ("attn_tp", "attn_cp", "attn_dp", "attn_dcp", "pp", "dp", "tp")}


class Server:
    """A scheduler, as far as SGLang's `role_switch` knows it, beside an agent."""

    def __init__(self, folder: Path, stack: ExitStack, has_tree: bool = True) -> None:
        from sglang.srt.disaggregation.utils import DisaggregationMode

        self.folder, self.stack, self.is_idle = folder, stack, True
        self.args = SimpleNamespace(model_path="/m", enable_pd_role_switch=True)
        self.args.disaggregation_decode_enable_radix_cache = has_tree
        self.side = Side("decode", has_tree=has_tree, keeps=False)
        self.queue = queue_of(plain(PAGE, size=POOL))
        self.scheduler = self.queue.scheduler
        vars(self.scheduler).update(vars(self.side.queue.scheduler) | vars(self.scheduler))
        vars(self.scheduler).update(
            server_args=self.args, device="cpu", is_hybrid_swa=False,
            disaggregation_mode=DisaggregationMode.PREFILL, disable_radix_cache=not has_tree,
            req_to_token_pool=self.side.places, token_to_kv_pool_allocator=self.side.pool,
            _pd_role_switch_in_progress=False, _pd_role_switch_unhealthy=False,
            is_fully_idle=lambda: self.is_idle, init_disaggregation=self.begin,
            _sync_disaggregation_mode_to_subcomponents=lambda: None,
        )  # fmt: skip
        graphs = {"get_decode_cuda_graph_bs": lambda: [1], "ensure_decode_cuda_graphs": lambda sizes: None}
        vars(self.scheduler.tp_worker).update(graphs)
        self.queue.transfer_queue = SimpleNamespace()
        self.agent = self.start_agent()
        self.begin()

    def start_agent(self) -> AgentProcess:
        return self.stack.enter_context(agent(self.folder, "a"))

    def begin(self) -> None:
        """Make the manager of the role that SGLang has now."""
        from sglang.srt.disaggregation.utils import DisaggregationMode
        from sglang.srt.runtime_context import get_disagg

        from kvbridge.adapters.sglang.manager import KVBridgeManager

        args: Any = SimpleNamespace(
            page_size=PAGE, system_dp_rank=0, pp_rank=0, kv_item_lens=[], state_types=[], state_item_lens=[],
            kv_cache_dtype_str="torch.bfloat16", kv_layout="nhd", kv_data_ptrs=[],
        )  # fmt: skip
        mode = self.scheduler.disaggregation_mode = DisaggregationMode(get_disagg().disaggregation_mode)
        token = building.set(self.queue)
        try:
            self.queue.kv_manager = self.manager = KVBridgeManager(args, mode, self.scheduler.server_args)
        finally:
            building.reset(token)
        self.scheduler.disagg_prefill_bootstrap_queue = self.queue if mode.value == "prefill" else None
        self.scheduler.disagg_decode_prealloc_queue = self.queue if mode.value == "decode" else None

    def end(self) -> None:
        self.manager.teardown()
        getattr(self.scheduler, HANDED).context.destroy(linger=0)  # or it waits for its sockets when it is collected

    @property
    def role(self) -> str:
        return str(self.scheduler.disaggregation_mode.value)

    def change(self) -> str:
        """To the other role. What SGLang says."""
        from sglang.srt.disaggregation.role_switch import handle_pd_role_switch
        from sglang.srt.managers.io_struct import PdRoleSwitchReqInput

        return str(handle_pd_role_switch(self.scheduler, PdRoleSwitchReqInput(new_role=OTHER[self.role])).message)

    def is_known(self) -> bool:
        """Whether the agent has the memory of this role's manager."""
        engine = self.agent.status.engine
        return engine is not None and self.manager.engine_id in engine.engine


@pytest.fixture
def parts(tmp_path: Path, served: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, ExitStack]]:
    from sglang.srt.runtime_context import get_context, get_parallel
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    port = int(served.rpartition(":")[2])
    told = ServerArgs(model_path="dummy", device="cpu", host="127.0.0.1", disaggregation_bootstrap_port=port)
    set_global_server_args_for_scheduler(told)
    get_context().override("test", disaggregation_mode="prefill")
    for name, value in {"SOCKET": str(tmp_path / "a.sock"), "RETURN_S": "600", "CONNECT_S": "20"}.items():
        monkeypatch.setenv(f"KVBRIDGE_ENGINE_{name}", value)
    group = SimpleNamespace(broadcast_object=lambda value, src: value, is_last_rank=True)
    groups = {"world_group": group, "pp_group": group, "num_dp_ranks": 1}
    with get_parallel().override(**SIZES, **RANKS, **groups), ExitStack() as stack:
        yield tmp_path, stack


@pytest.fixture
def server(parts: tuple[Path, ExitStack]) -> Iterator[Server]:
    made = Server(*parts)
    yield made
    made.end()


@TREES
def test_nothing_stays_of_a_role_that_is_over(parts: tuple[Path, ExitStack], has_tree: bool) -> None:
    server, counts = Server(*parts, has_tree), list[tuple[int, int]]()
    whole = server.side.pool.available_size()
    for _ in range(CHANGES):
        assert server.is_known()
        server.side.run(CHAT, 100, changes=0)
        wait_for(lambda: len(server.agent.status.offers) == 1, 20)
        assert server.side.pool.available_size() < whole and getattr(server.side.tree, HELD) is server.manager.held
        before = set(threading.enumerate())
        if len(counts) >= 2:
            wait_for(lambda: threading.active_count() <= counts[-2][0] and descriptors() <= counts[-2][1], 20)
        counts.append((threading.active_count(), descriptors()))
        assert server.change() == "ok"
        assert server.side.pool.available_size() == whole and not server.agent.status.offers
        ours = {each for each in before if each.name.startswith(("kvbridge", "Heartbeat"))}
        wait_for(lambda ours=ours: not any(each.is_alive() for each in ours), 20)
    assert server.is_known()
    server.end()


def test_the_control_socket_stays_where_others_know_it(server: Server) -> None:
    """Who asks a server for a prefill that it does not do any more is told so at once, and who has asked before."""
    port, context = server.manager.rank_port, zmq.Context()
    there, back = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    there.connect(f"tcp://{server.manager.local_ip}:{port}")
    mine = back.bind_to_random_port("tcp://127.0.0.1")
    try:
        for number in range(1, 4):
            assert server.change() == "ok" and server.manager.rank_port == port
            there.send_multipart(pack(asked(room=number, endpoint="127.0.0.1", dst_port=mine)))
            if server.role == "decode":
                told = {number: b"prefills nothing"} | ({number - 1: b"role changes"} if number > 1 else {})
                for _ in range(len(told)):
                    assert back.poll(20000)
                    tag, room, *_, reason = back.recv_multipart()
                    assert tag == STATUS_TAG and told.pop(int(room)) in reason
            else:
                wait_for(lambda number=number: number in server.manager.rooms._rooms, 20)
    finally:
        context.destroy(linger=0)


def test_who_waits_for_a_prompt_is_told_when_the_role_changes(server: Server) -> None:
    context = zmq.Context()
    back = context.socket(zmq.PULL)
    mine = back.bind_to_random_port("tcp://127.0.0.1")
    try:
        server.manager._hear_asked(asked(room=7, endpoint="127.0.0.1", dst_port=mine))
        assert server.change() == "ok" and back.poll(20000)
        tag, room, *_, reason = back.recv_multipart()
        assert (tag, int(room)) == (STATUS_TAG, 7) and b"role changes" in reason
    finally:
        context.destroy(linger=0)


def test_no_rank_changes_its_role_if_another_may_still_be_written(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbridge.adapters.sglang import manager

    with monkeypatch.context() as other:
        other.setattr(manager, "of_all_ranks", lambda scheduler, reason: [reason, "not_let_go: the other's"])
        assert "the other's" in server.change() and server.scheduler._pd_role_switch_unhealthy


def test_whatever_fails_in_the_question_is_a_no(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbridge.adapters.sglang import manager

    def describe(*_: Any, **__: Any) -> Any:
        raise AttributeError("of a pool that nobody has seen in this role")

    monkeypatch.setattr(manager, "describe", describe)
    assert "does not support runtime role switch" in server.change() and server.manager.is_attached


def test_the_weights_keep_their_name(server: Server) -> None:
    """SGLang's own says what they were called before an update without a version."""
    for version in ("B", ""):
        server.manager.weights_are(version)
        server.manager.next_weights = "C"
        assert server.change() == "ok"
        assert (server.manager.weights, server.manager.next_weights) == (version, "C")
        assert server.manager.talk.memory.pool.model.weights == version


def test_a_server_with_requests_keeps_its_role(server: Server) -> None:
    server.is_idle, before = False, server.manager
    assert "not idle" in server.change()
    assert server.manager is before and server.manager.is_attached and server.role == "prefill"


def test_a_role_in_which_the_cache_is_not_carried_is_refused_first(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(attn_cp_size=2, tp_size=2, moe_tp_size=2), caplog.at_level(logging.ERROR):
        assert "does not support runtime role switch" in server.change()
    assert "attn_cp_size: 2" in caplog.text and server.manager.is_attached and server.change() == "ok"


def test_a_prefix_cache_that_is_not_used_in_the_other_role_is_refused_first(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """In the second case SGLang itself would refuse such a decode server when it starts."""
    flag = "disaggregation_decode_enable_radix_cache"
    for is_on, changes in ((False, {}), (True, {"is_hybrid_swa": True, "enable_hierarchical_cache": True})):
        setattr(server.args, flag, is_on)
        vars(server.scheduler).update(changes)
        with caplog.at_level(logging.ERROR):
            caplog.clear()
            assert "does not support runtime role switch" in server.change()
        assert f"--{flag.replace('_', '-')}" in caplog.text
    assert server.manager.is_attached and server.role == "prefill"


def test_a_role_changes_while_the_agent_is_gone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBRIDGE_ENGINE_CONNECT_S", "0.1")
    server.agent.kill()
    server.agent.process.wait(20)
    assert server.change() == "ok" and not server.manager.is_attached
    server.agent = server.start_agent()
    wait_for(lambda: server.manager.is_attached and server.is_known(), 20)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("is_open", [False, True], ids=["nothing is open", "something is open"])
def test_an_agent_that_stands_still_must_let_go_only_of_what_it_may_write(
    server: Server, monkeypatch: pytest.MonkeyPatch, is_open: bool, role: str
) -> None:
    """Of wants, as a decode server has them. It writes nothing that is offered."""
    from kvbridge.adapters.sglang import manager

    monkeypatch.setattr(manager, "LET_GO_S", 1.5)
    monkeypatch.setenv("KVBRIDGE_ENGINE_CONNECT_S", "0.1")
    assert server.role == role or server.change() == "ok"
    wait_for(server.is_known, 20)
    server.side.run(CHAT, 100, changes=0)
    server.agent.process.send_signal(signal.SIGSTOP)
    if is_open:
        server.manager.owners[1] = object()
    said, may_write = server.change(), is_open and role == "decode"
    assert "restart required" in said and "has not let go" in said if may_write else said == "ok"
    assert server.scheduler._pd_role_switch_unhealthy == may_write
    server.agent.process.send_signal(signal.SIGCONT)
    wait_for(lambda: may_write or (server.manager.is_attached and server.is_known()), 20)
    server.manager.owners.clear()


def test_the_pages_command_is_sglangs_own_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server that is not there: only what it is told."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.io_struct import PdRoleSwitchReqOutput

    heard: list[Any] = []

    class Tokenizer:
        async def pd_role_switch(self, asked: Any, _: Any) -> Any:
            heard.append((asked.new_role, asked.decode_cuda_graph_memory_gb))
            return PdRoleSwitchReqOutput(success=True)

    monkeypatch.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=Tokenizer()))
    with serving(http_server.app) as url:
        run_block("docs/sglang.md", "# ROLE", {"SERVER": url, "ROLE": "decode"})
    assert heard == [("decode", 0)]
