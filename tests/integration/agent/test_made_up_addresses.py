"""Thousands of requests name addresses where nobody listens: they fail, and nothing else suffers."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, closing
from pathlib import Path

from kvbridge_proto.engine import Done, Failed

from tests.integration.agent.harness import AgentProcess, SyntheticEngine, agent
from tests.support.oracle import Shape, build_all, fill

MADE_UP = 3000
LIMITS = (256, 1024)  # of descriptors, soft and hard
PATIENCE_S = 12.0  # a slow machine tries 200 addresses a second
CODES = {"peer_unreachable", "too_many_links", "deadline"}


def descriptors(running: AgentProcess) -> int:
    return len(os.listdir(f"/proc/{running.process.pid}/fd"))


def test_made_up_addresses_neither_detach_the_engine_nor_keep_a_real_sender_out(tmp_path: Path) -> None:
    shape = Shape("nhd", blocks=8)
    with ExitStack() as stack:
        sender, receiver = (
            stack.enter_context(
                closing(
                    SyntheticEngine(
                        stack.enter_context(agent(tmp_path, name, nofile=LIMITS, connect_s=PATIENCE_S)),
                        build_all(shape)[0],
                    )
                )
            )
            for name in ("p", "d")
        )
        sender.attach()
        receiver.attach()
        sender.directory(sender.agent)
        address, table = sender.agent.address, [1, 2]
        fill(sender.held, table, range(32))
        sender.offer("real", table, 32)
        before, most = descriptors(receiver.agent), 0
        for number in range(MADE_UP):
            receiver.want(f"made up {number}", f"tcp://127.0.7.7:{2000 + number}", table, range(32))
            if number == MADE_UP // 2:
                receiver.want("real", address, table, range(32))
            if number % 100 == 0:
                most = max(most, descriptors(receiver.agent))
        assert isinstance(receiver.answer("real"), Done)
        failed = [receiver.answer(f"made up {number}") for number in range(MADE_UP)]
        assert all(isinstance(each, Failed) for each in failed)
        assert {each.code for each in failed} <= CODES
        assert most < LIMITS[1] * 3 // 4, f"{most} descriptors, {before} before"
        status = receiver.agent.status
        assert status.engine is not None and status.engine.epoch == 1, "the engine was detached"
        assert sender.released("real").code == ""
        assert "Traceback" not in receiver.agent.text()
        until = time.monotonic() + 10
        while (
            descriptors(receiver.agent) > before + 12
        ):  # its link to the sender, the data side's, and the sender's door
            assert time.monotonic() < until, f"{descriptors(receiver.agent)} descriptors, {before} before"
            time.sleep(0.1)


def test_an_agent_raises_its_soft_limit_to_the_hard_one(tmp_path: Path) -> None:
    with agent(tmp_path, "a", nofile=LIMITS) as running:
        limits = Path(f"/proc/{running.process.pid}/limits").read_text()
        (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
        assert line.split()[3:5] == ["1024", "1024"]
        assert "enough for 48 peers each way" in running.text()
        print(descriptors(running))
