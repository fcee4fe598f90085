"""SGLang's release of memory while our agent stands still: it is refused, nothing is freed, and the server goes on."""

from __future__ import annotations

import asyncio
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not in this environment (make test-sglang)", allow_module_level=True)

from kvbridge.adapters.sglang import release
from kvbridge.errors import EngineError
from testing.serving import serving
from tests.integration.adapters.test_sglang_life import Talk, begun, manager, one_rank, pages
from tests.support.pages import run_block

__all__ = ["one_rank"]
pytestmark = pytest.mark.sglang


class Standing(Talk):
    """`lets_go` decides whether its agent does."""

    lets_go = False

    def detach(self, within_s: float, why: str) -> None:
        if not self.lets_go:
            raise EngineError("not_let_go", f"the agent lives, {within_s:g} s")


class Released:
    """SGLang's updater beside a scheduler of our manager's; `freed` is what it has freed or taken again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, group: Any) -> None:
        from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

        self.manager, self.freed = manager("prefill"), []
        self.manager.talk, self.manager._attach = Standing(), lambda: self.freed.append("attached")
        queue: Any = object.__new__(PrefillBootstrapQueue)
        queue.kv_manager, queue.queue = self.manager, []
        self.held: list[Any] = []
        self.scheduler = SimpleNamespace(
            disagg_prefill_bootstrap_queue=queue, disagg_prefill_inflight_queue=self.held, _engine_paused=False,
            disaggregation_mode=self.manager.disaggregation_mode, process_disagg_prefill_inflight_queue=self.end_held,
        )  # fmt: skip
        self.updater: Any = object.__new__(SchedulerWeightUpdaterManager)
        self.updater.scheduler, self.updater.offload_tags, self.updater.tp_cpu_group = self.scheduler, set(), group
        self.updater.is_fully_idle = lambda ignore_waiting: not self.held
        self.updater.flush_cache = lambda: self.freed.append("flushed")
        self.updater.memory_saver_adapter = SimpleNamespace(
            pause=lambda tag: self.freed.append(f"freed {tag}"), resume=lambda tag: self.freed.append(f"back {tag}")
        )
        self.original = SchedulerWeightUpdaterManager
        self.hooks = {name.rpartition(".")[2]: hook for name, hook in release.hooks().items() if "Updater" in name}
        monkeypatch.setattr(release, "of_all_ranks", lambda scheduler, reason: [reason])

    def end_held(self) -> None:
        self.held[:] = [each for each in self.held if each.poll() != 0]

    def ask(self, what: str) -> Any:
        from sglang.srt.managers import io_struct

        name = f"{what}_memory_occupation"
        asked = getattr(io_struct, f"{what.title()}MemoryOccupationReqInput")(tags=["kv_cache"])
        return self.hooks[name](getattr(self.original, name), self.updater, asked)


@pytest.fixture
def released(sglang: None, monkeypatch: pytest.MonkeyPatch) -> Released:
    return Released(monkeypatch, None)


def told(answer: Any) -> Any:
    """What the tokenizer's process makes of the scheduler's answer, sent as SGLang sends it."""
    from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

    async def ask(_: Any) -> list[Any]:
        return [msgpack_decode(msgpack_encode(answer))]

    tokenizer = SimpleNamespace(auto_create_handle_loop=lambda: None, release_memory_occupation_communicator=ask)
    return asyncio.run(release._ask_release(lambda *_: pytest.fail("SGLang drops answers"), tokenizer, None))


@pytest.fixture(autouse=True)
def ours(sglang: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context

    monkeypatch.setattr(
        runtime_context, "get_disagg", lambda: SimpleNamespace(disaggregation_transfer_backend="kvbridge")
    )


def test_a_release_is_refused_while_the_agent_stands_still_and_the_server_goes_on(released: Released) -> None:
    """It ended the server: SGLang has no answer that fails."""
    answer = released.ask("release")
    assert released.freed == [] and released.manager.talk is not None
    with pytest.raises(EngineError, match="not_let_go: the agent lives, 10 s") as caught:
        told(answer)
    assert caught.value.code == "not_let_go"
    released.ask("resume")  # SGLang ends over what it has not released
    assert released.freed == []
    released.manager.talk.lets_go = True
    told(released.ask("release"))
    assert released.freed == ["freed kv_cache", "flushed"] and released.manager.talk is None
    released.ask("resume")
    assert released.freed[2:] == ["back kv_cache", "attached"]


def test_ranks_release_together_or_not_at_all(released: Released, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "of_all_ranks", lambda scheduler, reason: [reason, "not_let_go: of another rank"])
    released.manager.talk.lets_go = True
    with pytest.raises(EngineError, match="of another rank"):
        told(released.ask("release"))
    assert released.freed == ["attached"]


def test_prompts_that_nobody_fetches_are_given_up_before_a_release(released: Released) -> None:
    """SGLang asserts that it is idle, and ends."""
    made = begun(released.manager)
    made.send(pages(3, 4, 9), [], 40)
    released.held.append(made)
    released.manager.talk.lets_go = True
    told(released.ask("release"))
    assert released.freed == ["freed kv_cache", "flushed"]


def test_a_release_while_requests_run_is_refused(released: Released) -> None:
    released.held.append(SimpleNamespace(poll=lambda: 3))
    with pytest.raises(EngineError, match="not_idle"):
        told(released.ask("release"))
    assert released.freed == []


def test_the_pages_commands_change_the_weights_through_sglangs_own_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server that is not there: only what it is told."""
    from sglang.srt.entrypoints import http_server

    heard: list[Any] = []

    class Tokenizer:
        async def pause_generation(self, asked: Any) -> None:
            heard.append(("pause", asked.mode))

        async def update_weights_from_disk(self, asked: Any, _: Any) -> tuple[bool, str, int]:
            heard.append(("load", asked.model_path, asked.weight_version, asked.flush_cache))
            return True, "", 0

        async def continue_generation(self, asked: Any) -> None:
            heard.append(("continue",))

    monkeypatch.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=Tokenizer()))
    with serving(http_server.app) as url:
        run_block("docs/operations.md", "# SGLang", {"ENGINE": url, "CHECKPOINT": "/models/7", "STEP": "7"})
    assert heard == [("pause", "abort"), ("load", "/models/7", "7", True), ("continue",)]


def test_what_each_rank_says_is_told_to_all_ranks() -> None:
    said, store = ["", "not_let_go: ä" + 600 * "x"], torch.distributed.HashStore()  # type: ignore[attr-defined]

    def of(rank: int) -> list[str]:
        group = torch.distributed.ProcessGroupGloo(store, rank, len(said), timedelta(seconds=30))
        return release.gathered(group, said[rank])

    with ThreadPoolExecutor(len(said)) as threads:
        told = list(threads.map(of, range(len(said))))
    assert told == [["", said[1].encode()[:512].decode()]] * 2
