"""Wants whose offer was made before, with real agents: if it is not there any more, they hear at once why.

A want without `is_offered` would wait for its deadline, a minute. Those here must end long before that.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from kvbridge_proto.common import attachment_name
from kvbridge_proto.engine import Attached, Done, Failed, NoOffer

from kvbridge.failpoints import VARIABLE
from kvbridge.loopback.engine import RequestRejected
from testing.agents import OracleEngine, agent, attached
from testing.oracle import Shape, build
from testing.pairs import Bench, Benches
from testing.waiting import wait_for
from tests.integration.adapters import test_vllm_middleware as vllm
from tests.system.faults.processes import free_address

pytestmark = pytest.mark.proves("G16")

DEADLINE_S = 60.0
SOON_S = 50.0
TOLD: dict[str, Any] = {"is_offered": True, "deadline_s": DEADLINE_S}


@pytest.fixture
def bench(bench_of: Benches) -> Bench:
    """The sender's agent comes back at its address."""
    return bench_of(p={"listen": free_address()})


def offered(bench: Bench, rendezvous: str = "call/0") -> None:
    bench.fill([5], range(16))
    bench.offer(f"p-{rendezvous}", [5], 16, rendezvous=rendezvous)


def want(bench: Bench, name: str, block: int, at: OracleEngine | None = None, **more: Any) -> None:
    (at or bench.receiver).want(name, bench.address, [block], range(16), **TOLD | {"rendezvous": "call/0"} | more)


def is_fetched_once(bench: Bench, wants: list[tuple[OracleEngine, str]]) -> None:
    """One of them gets the rows, the others hear at once that it did."""
    answers = [engine.answer(name, SOON_S) for engine, name in wants]
    failed = [answer for answer in answers if isinstance(answer, Failed)]
    assert sum(isinstance(answer, Done) for answer in answers) == 1, answers
    assert {answer.code for answer in failed} == {"already_fetched"}, answers
    assert bench.sender.released("p-call/0").code == ""


def test_a_later_request_here_or_elsewhere_hears_that_its_prompt_was_fetched(bench: Bench, tmp_path: Path) -> None:
    with agent(tmp_path, "other") as beside, attached(beside) as other:
        other.directory(beside)
        offered(bench)
        want(bench, "first", 1)
        bench.receiver.done("first")
        want(bench, "retry", 2, other)
        other.failed("retry", "already_fetched", SOON_S)
        want(bench, "again", 3)
        assert "an offer serves one" in bench.receiver.failed("again", "already_fetched", SOON_S)
        want(bench, "never offered", 4, rendezvous="call/1")
        bench.receiver.failed("never offered", "unknown_offer", SOON_S)


def test_of_four_equal_requests_at_once_one_fetches_and_three_hear_it(bench: Bench, tmp_path: Path) -> None:
    with agent(tmp_path, "other") as beside, attached(beside) as other:
        other.directory(beside)
        offered(bench)
        wants = [(each, f"{number}") for number, each in enumerate([bench.receiver, other] * 2)]
        for number, (each, name) in enumerate(wants):
            want(bench, name, 1 + number, each)
        is_fetched_once(bench, wants)


def engine_replaced(bench: Bench, stack: ExitStack, _: Path) -> None:
    bench.sender.client.close()
    engine = stack.enter_context(closing(OracleEngine(bench.sender.agent, build(Shape("nhd")))))
    while not isinstance(engine.attach(), Attached):  # the one before is still being detached
        pass
    engine.directory(bench.sender.agent)


def agent_replaced(number: signal.Signals) -> Callable[[Bench, ExitStack, Path], None]:
    def replaced(bench: Bench, stack: ExitStack, folder: Path) -> None:
        before, address = bench.sender.agent, bench.address
        before.process.send_signal(number)
        before.process.wait(60)
        after = stack.enter_context(agent(folder, "p0", listen=address))
        engine = stack.enter_context(closing(OracleEngine(after, build(Shape("nhd")))))
        assert isinstance(engine.attach(), Attached)
        engine.directory(after)

    return replaced


REPLACED = {
    "engine": engine_replaced,
    "agent, killed": agent_replaced(signal.SIGKILL),
    "agent, stopped": agent_replaced(signal.SIGTERM),
}


@pytest.mark.parametrize("is_met", [True, False], ids=["with a session", "without"])
@pytest.mark.parametrize("what", REPLACED)
def test_a_prefill_side_that_was_replaced_is_said_to_have_started_later(
    what: str, is_met: bool, bench: Bench, stack: ExitStack, tmp_path: Path
) -> None:
    if is_met:
        bench.works()
    address, epoch = bench.address, bench.sender.agent.status.engine
    assert epoch is not None
    offered(bench)
    told = {"offered_to": attachment_name(bench.sender.agent.status.agent, epoch.epoch)}
    REPLACED[what](bench, stack, tmp_path)
    bench.receiver.want("late", address, [1], range(16), rendezvous="call/0", **TOLD | told)
    reason = bench.receiver.failed("late", "started_after_it_was_offered", SOON_S)
    assert told["offered_to"] in reason and address in reason


@pytest.mark.parametrize("is_met", [True, False], ids=["with a session", "without"])
def test_what_a_dead_agent_had_offered_is_not_waited_for_and_what_its_successor_may_offer_is(
    is_met: bool, bench_of: Benches
) -> None:
    bench = bench_of(p={"listen": (address := free_address())}, d={"connect_s": 600})
    if is_met:
        bench.works()
    offered(bench)
    bench.sender.agent.kill()
    bench.sender.agent.process.wait(60)
    wait_for(lambda: not bench.receiver.agent.status.peers)
    waits: dict[str, Any] = {"rendezvous": "call/1", "deadline_s": DEADLINE_S}
    bench.receiver.want("to come", address, [1], range(16), **waits)
    for block, name in ((2, "offered"), (3, "while its address is tried")):
        bench.receiver.want(name, address, [block], range(16), rendezvous="call/0", **TOLD)
        assert "refuses" in bench.receiver.failed(name, "peer_unreachable", SOON_S)
    with pytest.raises(RequestRejected, match="no answer"):
        bench.receiver.answer("to come", 0.5)


@pytest.mark.parametrize("is_first", [True, False], ids=["the want came before", "the want comes after"])
def test_a_call_that_prefill_has_refused_is_not_waited_for(is_first: bool, bench: Bench) -> None:
    """Of a want that nobody told whether anything is offered."""
    bench.works()
    rendezvous = [f"room/{room}/{'a' * 40}" for room in (7, 77)]
    waits: dict[str, Any] = {"is_offered": False, "rendezvous": rendezvous[0]}
    if is_first:
        want(bench, "r", 1, **waits)
        wait_for(lambda: bench.sender.agent.status.transfers, why=bench.sender.agent.text)
    bench.sender.client.send(NoOffer(call="room/7", code="prefill_refused", reason="it said 404"))
    if not is_first:
        want(bench, "r", 1, **waits)
    assert bench.receiver.failed("r", "prefill_refused", SOON_S) == "it said 404"
    want(bench, "of another call", 2, **waits | {"rendezvous": rendezvous[1]})
    bench.fill([5], range(16))
    bench.offer("p", [5], 16, rendezvous=rendezvous[1])
    bench.receiver.done("of another call")


class Balanced:
    """vLLM's client of two replicas, one beside each of these agents: a call that names none goes to the first."""

    def __init__(self, *replicas: OracleEngine) -> None:
        self._replicas = replicas

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, params: Any, *, data_parallel_rank: int | None = None
    ) -> None:
        said = NoOffer(call=f"room/{params['bootstrap_room']}", code="prefill_refused", reason="it was refused")
        self._replicas[data_parallel_rank or 0].client.send(said)


@pytest.mark.parametrize(("rank", "status"), [(b"0", 404), (b"", 400)], ids=["names a replica", "names none"])
def test_a_refused_call_is_not_waited_for_at_any_replica(
    rank: bytes, status: int, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode side asks the second one's agent, before and after."""
    monkeypatch.setattr(vllm, "Application", vllm.Behind)  # answers 404 to what it gets
    with agent(tmp_path, "p1") as beside, attached(beside) as second:
        second.directory(beside)
        waits: dict[str, Any] = {
            "is_offered": False,
            "rendezvous": f"room/{vllm.ROOM}/{'a' * 40}",
            "deadline_s": DEADLINE_S,
        }
        bench.receiver.want("before", beside.address, [1], range(16), **waits)
        wait_for(lambda: beside.status.transfers, why=beside.text)
        headers = [*vllm.JSON, (b"x-data-parallel-rank", rank)]
        both = Balanced(bench.sender, second)
        answer = vllm.call({"prompt": "1"} | vllm.HOST, engine=both, replicas=2, headers=headers)[1][0]
        assert answer["status"] == status
        bench.receiver.failed("before", "prefill_refused", SOON_S)
        bench.receiver.want("after", beside.address, [2], range(16), **waits)
        bench.receiver.failed("after", "prefill_refused", SOON_S)


def test_an_offer_that_its_agent_has_not_read_yet_is_not_missed(
    bench_of: Benches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent takes the claim first, as it may with whatever came meanwhile."""
    monkeypatch.setenv(VARIABLE, "sender.claim_received=stop@2")
    bench = bench_of()
    bench.works()
    agent = bench.sender.agent
    want(bench, "r", 1)
    assert agent.process.is_stopped(SOON_S), "it has the claim"
    offered(bench)
    os.kill(agent.process.pid, signal.SIGCONT)
    bench.receiver.done("r")
