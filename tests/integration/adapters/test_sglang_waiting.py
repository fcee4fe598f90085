"""A prefill server that does not answer holds up the requests that name it, and no other: SGLang's own decode queue."""

from __future__ import annotations

import importlib.util
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not in this environment (make test-sglang)", allow_module_level=True)

from kvbridge.adapters.sglang import plugin, servers
from kvbridge.adapters.sglang.servers import MOST_QUESTIONS, BadAnswer, Questions
from testing.waiting import wait_for
from tests.integration.adapters.test_sglang_life import BOOTSTRAPPING, FAILED, WAITING, manager, one_rank
from tests.support.hostile_prefill import RANKS, SERVER, Prefill

__all__ = ["one_rank"]
pytestmark = pytest.mark.sglang

NAMED = "prefill.example"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a busy machine cannot make an answer late. A scheduler that waits for one fails a test by its order."""
    monkeypatch.setattr(servers, "SERVER_ANSWER_S", 20.0)
    monkeypatch.setattr(servers, "QUESTION_S", 20.0)


def prefill() -> Iterator[Prefill]:
    made = Prefill()
    made.body, made.ranks = SERVER | {"dp_size": 2, "follow_bootstrap_room": False}, RANKS
    yield made
    made.close()


mute, answers = pytest.fixture(prefill, name="mute"), pytest.fixture(prefill, name="answers")


class Queue:
    """SGLang's decode queue, with our hooks, as far as requests come to know their prefill server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from sglang.srt.disaggregation import decode
        from sglang.srt.disaggregation.common import conn
        from sglang.srt.disaggregation.common.conn import CommonKVReceiver
        from sglang.srt.disaggregation.decode import DecodePreallocQueue

        from kvbridge.adapters.sglang.manager import PrefillServers

        for module in (decode, conn):
            early = SimpleNamespace(disaggregation_decode_allocation_policy="early")
            monkeypatch.setattr(module, "get_disagg", lambda early=early: early)
        self.manager = manager("decode")
        self.manager.prefill_info_table = PrefillServers()
        self.manager.enable_staging = self.manager.is_mla_backend = False
        self.queue: Any = object.__new__(DecodePreallocQueue)
        vars(self.queue).update(
            kv_manager=self.manager, pending_reqs=[], _prefill_dp_rank_queries={}, _ensure_retry_count={},
            _ensure_last_attempt_time={}, _ensure_retry_interval=1.0, _max_ensure_retries=15,
        )  # fmt: skip
        hooks = {"_ensure_prefill_info": plugin._ensure_prefill_info}
        hooks["_resolve_pending_reqs"] = plugin._resolve_pending_reqs
        hooks["prefetch_prefill_dp_rank_queries"] = plugin._prefetch_prefill_dp_rank_queries
        for name, hook in hooks.items():
            setattr(self.queue, name, partial(hook, getattr(DecodePreallocQueue, name), self.queue))
        ask = partial(plugin._query_prefill_dp_ranks, CommonKVReceiver.query_prefill_dp_ranks)
        monkeypatch.setattr(CommonKVReceiver, "query_prefill_dp_ranks", staticmethod(ask))

    def add(self, address: str, room: int) -> Any:
        from kvbridge.adapters.sglang.receiver import KVBridgeReceiver

        host, _, port = address.rpartition(":")
        named = {"bootstrap_host": host, "bootstrap_port": int(port), "disagg_prefill_dp_rank": None}
        self.manager.addr_to_rooms_tracker.setdefault(address, set())
        made = KVBridgeReceiver(self.manager, address, room)
        req = SimpleNamespace(bootstrap_room=room, **named)
        self.queue.pending_reqs.append(SimpleNamespace(req=req, kv_receiver=made, is_rebootstrap=False))
        return made

    def turns_until(self, claim: Callable[[], Any]) -> None:
        def turn() -> bool:
            self.queue.prefetch_prefill_dp_rank_queries()
            self.queue._resolve_pending_reqs()
            return bool(claim())

        wait_for(turn, 60, every_s=0.002)


@pytest.fixture
def queue(sglang: None, monkeypatch: pytest.MonkeyPatch) -> Queue:
    return Queue(monkeypatch)


@pytest.fixture
def slow_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The name `NAMED` is found only after this."""
    go, find = threading.Event(), socket.getaddrinfo

    def slow(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host == NAMED:
            go.wait(60)
            host = "127.0.0.1"
        return find(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    yield go
    go.set()


@pytest.mark.proves("T14")
@pytest.mark.parametrize("held", ["/route", "/kvbridge/ranks", "/query_dp_ranks", NAMED])
def test_another_request_goes_on_while_one_waits_for_its_prefill_server(
    queue: Queue,
    mute: Prefill,
    answers: Prefill,
    slow_names: threading.Event,
    held: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """SGLang asked on its scheduler's thread: 5 s an address, and a name without bound, in which nothing else ran."""
    mute.held, port = held, mute.address.rpartition(":")[2]
    mute.body, answers.body = ({"7": 1}, {"8": 0}) if held == "/query_dp_ranks" else (mute.body, answers.body)
    for each in (mute, answers) if held == "/query_dp_ranks" else ():
        queue.manager.prefill_info_table[each.address] = info(queue, dp_size=2)
    stuck = queue.add(f"{NAMED}:{port}" if held == NAMED else mute.address, 7)
    healthy = queue.add(answers.address, 8)
    for each, room in ((stuck, 7), (healthy, 8)):
        replica = {"7": 1, "8": 0}[str(room)]
        if held != "/query_dp_ranks":
            queue.queue.pending_reqs[room - 7].req.disagg_prefill_dp_rank = replica
        assert each.poll() == BOOTSTRAPPING
    queue.turns_until(lambda: healthy.poll() != BOOTSTRAPPING)
    assert healthy.poll() == WAITING
    assert stuck.poll() == BOOTSTRAPPING and not caplog.records, "its question was not given up first"
    mute.go.set()
    slow_names.set()
    queue.turns_until(lambda: stuck.poll() != BOOTSTRAPPING)
    assert stuck.poll() == WAITING
    assert (stuck.prefill_dp_rank, healthy.prefill_dp_rank) == (1, 0)


def info(queue: Queue, **more: Any) -> Any:
    from sglang.srt.disaggregation.common.conn import PrefillServerInfo

    made = PrefillServerInfo(**(SERVER | {"follow_bootstrap_room": False} | more))
    queue.manager._resolve_rank_mapping(made)
    return made


def test_a_server_whose_name_is_not_found_in_time_is_a_server_that_gives_no_answer(
    queue: Queue, slow_names: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(servers, "QUESTION_S", 0.2)
    queue.queue._max_ensure_retries = 1
    made = queue.add(f"{NAMED}:8998", 7)
    made._send_abort_notification = lambda **said: None
    queue.turns_until(lambda: made.poll() == FAILED)
    assert "none within 0.2 s" in caplog.text and not slow_names.is_set()


def answer_of(questions: Questions, key: str, ask_it: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def is_there() -> bool:
        found.append(questions.answer(key, ask_it, is_known=True))
        return found[-1] is not None

    wait_for(is_there, 30)
    return found[-1]


def test_servers_that_never_answered_take_no_turn_from_one_that_has() -> None:
    questions, stop = Questions(), threading.Event()
    try:
        for number in range(3 * MOST_QUESTIONS):
            assert questions.answer(number, partial(stop.wait, 60), is_known=False) is None
        assert sum(thread.name == "kvbridge-question" for thread in threading.enumerate()) == MOST_QUESTIONS
        assert answer_of(questions, "known", lambda: 5) == 5
    finally:
        stop.set()
    for number in range(3 * MOST_QUESTIONS):
        wait_for(lambda number=number: questions.answer(number, partial(stop.wait, 60), is_known=False), 30)


class NoThread(threading.Thread):
    def start(self) -> None:
        raise RuntimeError("can't start new thread")


def test_a_thread_that_cannot_start_is_tried_again_until_the_questions_time_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the limit of processes Python raises, and this is the scheduler's thread."""
    questions = Questions()
    monkeypatch.setattr(servers, "Thread", NoThread)
    for _ in range(3):
        assert questions.answer("x", lambda: 5, is_known=True) is None
        assert questions.answer("late", lambda: 5, is_known=True) is None
    monkeypatch.setattr(servers, "Thread", threading.Thread)
    assert answer_of(questions, "x", lambda: 5) == 5
    questions._open["late"].since -= 100
    monkeypatch.setattr(servers, "Thread", NoThread)
    with pytest.raises(BadAnswer, match="none within"):
        questions.answer("late", lambda: 5, is_known=True)


def test_a_scheduler_that_stood_still_for_long_takes_an_answer_that_is_there_and_asks_again_what_it_has_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pause, for example. A forgotten question is one whose request has ended, unless nobody looked."""
    questions, go = Questions(), threading.Event()
    ask_it = partial(go.wait, 60)
    assert questions.answer("x", ask_it, is_known=True) is None
    question = questions._open["x"]
    go.set()
    wait_for(question.answer.done, 30)
    question.since, question.looked_at = question.since - 100, question.looked_at - 100
    assert questions.answer("x", lambda: pytest.fail("asked again"), is_known=True) is True
    go.clear()
    assert questions.answer("x", ask_it, is_known=True) is None
    questions._open["x"].looked_at -= 100
    assert questions.answer("y", ask_it, is_known=True) is None and "x" not in questions._open
    assert answer_of(questions, "x", lambda: 6) == 6
    go.set()


def test_an_error_that_nobody_foresaw_is_no_answer() -> None:
    questions = Questions()
    with pytest.raises(BadAnswer, match="ZeroDivisionError"):
        answer_of(questions, "x", lambda: 1 // 0)
