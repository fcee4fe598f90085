"""Hundreds of requests name addresses where nobody listens: they fail, and nothing else suffers."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvbridge_proto.engine import Done, Failed

from testing.agents import agent
from testing.oracle import Shape, fill
from testing.pairs import Benches
from testing.proc import descriptors
from testing.waiting import wait_for

LIMITS = (128, 512)  # of descriptors, soft and hard
MADE_UP = 600  # more links than that
PATIENCE_S = 20.0  # a slow machine tries 200 addresses a second, a busy one fewer than 100
CODES = {"peer_unreachable", "too_many_links", "deadline"}


@pytest.mark.proves("T5")
def test_made_up_addresses_neither_detach_the_engine_nor_keep_a_real_sender_out(bench_of: Benches) -> None:
    shape = Shape("nhd", blocks=8)
    bench = bench_of(shape, shape, nofile=LIMITS, connect_s=PATIENCE_S)
    sender, receiver = bench.sender, bench.receiver
    address, table = sender.agent.address, [1, 2]
    fill(sender.held, table, range(32))
    sender.offer("real", table, 32)
    before, most = descriptors(receiver.agent.process.pid), 0
    for number in range(MADE_UP):
        receiver.want(f"made up {number}", f"tcp://127.0.7.7:{2000 + number}", table, range(32), deadline_s=5.0)
        if number == MADE_UP // 2:
            receiver.want("real", address, table, range(32), deadline_s=2 * PATIENCE_S)
        if number % 100 == 0:
            most = max(most, descriptors(receiver.agent.process.pid))
    assert isinstance(receiver.answer("real", 3 * PATIENCE_S), Done)
    failed = [receiver.answer(f"made up {number}", 3 * PATIENCE_S) for number in range(MADE_UP)]
    assert all(isinstance(each, Failed) for each in failed)
    assert {each.code for each in failed} <= CODES
    assert most < LIMITS[1] * 3 // 4, f"{most} descriptors, {before} before"
    status = receiver.agent.status
    assert status.engine is not None and status.engine.epoch == 1, "the engine was detached"
    assert sender.released("real").code == ""
    assert "Traceback" not in receiver.agent.text()
    # Its link to the sender, the data side's, and the sender's door stay.
    wait_for(lambda: descriptors(receiver.agent.process.pid) <= before + 12, 120)


def test_an_agent_raises_its_soft_limit_to_the_hard_one(tmp_path: Path) -> None:
    with agent(tmp_path, "a", nofile=LIMITS) as running:
        limits = Path(f"/proc/{running.process.pid}/limits").read_text()
        (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
        assert line.split()[3:5] == ["512", "512"]
        assert "enough for 16 peers each way" in running.text()
