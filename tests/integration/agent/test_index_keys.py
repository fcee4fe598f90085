"""Latents and index keys between real agents: a request ends while its rows travel, or both sides keep other keys."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from kvbridge_proto.engine import Abandon, Done

from kvbridge.failpoints import VARIABLE
from kvbridge.loopback.messages import number_of
from testing.agents import is_at_rest
from testing.oracle import More, mla
from testing.pairs import Bench, Benches
from testing.waiting import wait_for

INDEX = More("index_key", width=128, codec="fp8_row_scale", page_tokens=64, layers=(0, 2))
SENDER = mla(layers=3, block_tokens=64, blocks=24, more=(INDEX,))
RECEIVER = mla(layers=3, block_tokens=128, blocks=12, tp_size=2, more=(INDEX,))
PLACES = {"pull": "receiver.read_begun", "nixl": "receiver.scatter_begun"}
TOKENS = range(500)
GIVEN, WANTED = list(range(23, 15, -1)), [11, 10, 9, 8]
NEXT_GIVEN, NEXT_WANTED = list(range(8)), [0, 1, 2, 3]
ENDED_S = 60.0
SLOTS = {"slot_bytes": 1 << 20, "send_slots": 16}  # enough for one receiver beside another that stands still


@pytest.fixture(params=PLACES)
def bench(request: pytest.FixtureRequest, bench_of: Benches, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A request whose receivers' agents stand still, about to write its first rows."""
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, f"{PLACES[request.param]}=stop")
        bench = bench_of(SENDER, RECEIVER, routes=request.param, **SLOTS)
    bench.fill(GIVEN, TOKENS)
    bench.offer("r", GIVEN, TOKENS.stop)
    bench.want("r", WANTED, TOKENS, deadline_s=2 * ENDED_S)
    for engine in bench.receivers:
        stat = Path(f"/proc/{engine.agent.process.pid}/stat")
        wait_for(
            lambda stat=stat: stat.read_text().rpartition(")")[2].split()[0] == "T",
            ENDED_S,
            lambda: "\n".join(each.agent.text() for each in bench.engines),
        )
    return bench


def go_on(bench: Bench) -> None:
    for engine in bench.receivers:
        os.kill(engine.agent.process.pid, signal.SIGCONT)


def assert_next_is_right(bench: Bench) -> None:
    """Of all that is written from now on."""
    bench.before = [each.held.copy() for each in bench.receivers]
    time.sleep(0.3)  # for whoever would still write
    bench.carries("next", NEXT_GIVEN, NEXT_WANTED, TOKENS)
    for engine in bench.engines:
        wait_for(lambda engine=engine: is_at_rest(engine.agent.status), ENDED_S)


def test_an_abort_while_rows_travel_gives_every_block_back_and_nobody_writes_after_it(bench: Bench) -> None:
    for engine in bench.receivers:
        engine.client.send(Abandon(number=number_of("r")))
    go_on(bench)
    for engine in bench.receivers:
        engine.answer("r", ENDED_S)  # whichever: it may have been done before
    bench.sender.released("r", ENDED_S)
    assert_next_is_right(bench)


def test_the_senders_agent_is_killed_while_it_is_read(bench: Bench) -> None:
    """What counts is right, and nothing is written after the end of what does not."""
    bench.sender.agent.kill()
    go_on(bench)
    answers = [engine.answer("r", ENDED_S) for engine in bench.receivers]
    bench.sender.wait_closed(ENDED_S)
    if all(isinstance(answer, Done) for answer in answers):
        bench.check(WANTED, TOKENS)
    else:
        after = [each.held.copy() for each in bench.receivers]
        time.sleep(0.5)
        for engine, before in zip(bench.receivers, after, strict=True):
            assert all((ours == theirs).all() for ours, theirs in zip(engine.held.memory, before.memory, strict=True))


def test_the_receivers_agents_are_killed_while_they_write(bench: Bench) -> None:
    """The sender's engine has its blocks again, and serves the next receiver."""
    for engine in bench.receivers:
        engine.agent.kill()
        engine.wait_closed(ENDED_S)
    bench.sender.released("r", ENDED_S)
    wait_for(lambda: not bench.sender.agent.status.transfers, ENDED_S)
    bench.receivers = bench._started("e", RECEIVER, {"routes": "pull,nixl", **SLOTS})
    assert_next_is_right(bench)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ((replace(INDEX, width=64),), "width: sender 128, receiver 64 (layer 0 index_key"),
        ((replace(INDEX, layers=(0, 1, 2)),), "parts: sender latent, receiver index_key latent (layer 1)"),
    ],
    ids=["of another width", "in a layer more"],
)
def test_other_index_keys_are_refused_by_name(more: tuple[More, ...], reason: str, bench_of: Benches) -> None:
    bench = bench_of(SENDER, replace(RECEIVER, tp_size=1, more=more))
    bench.offer("r", GIVEN, TOKENS.stop)
    bench.want("r", WANTED, TOKENS)
    said = bench.receiver.failed("r", "incompatible")
    assert reason in said and "; needs " in said
