"""Wants fail while no packet reaches the sender's agent. Later packets flow again: it hears of them, and gives back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from kvbridge_proto.engine import Abandon, Attached, Done, Failed

from kvbridge.loopback.messages import number_of
from testing.agents import AgentProcess, OracleEngine
from testing.hosts import DEVICE, NetworkPath, two_hosts, why_not
from testing.oracle import Shape, build
from testing.waiting import wait_for
from tests.system.faults.processes import Agent
from tests.system.faults.world import FEW, LIMITS

pytestmark = pytest.mark.proves("G16")

HOLD_S = 600.0  # nobody waits so long here
TOLD_S = 60.0  # from the heal: TCP tries again after pauses that double
OFFERS = 8
Pair = tuple[OracleEngine, OracleEngine, NetworkPath, str]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        first, second, path = stack.enter_context(two_hosts(tmp_path))
        engines = []
        for host, shape in zip((first, second), (Shape("nhd", blocks=64), Shape("hnd", blocks=64)), strict=True):
            options = {"listen": f"tcp://{host.address}:7700", "dial": "10.231.77.0/24:7700", "net_devices": DEVICE}
            options |= {"routes": "nixl"}
            agent = Agent(
                tmp_path, host.name, {**LIMITS, **FEW, **options, "allow_unauthenticated": True}, place=host.beside
            )
            stack.callback(agent.end)
            agent.wait_serving()
            running = AgentProcess(agent, Path(agent.socket), agent.log)
            engines.append(stack.enter_context(closing(OracleEngine(running, build(shape)))))
            assert isinstance(engines[-1].attach(), Attached)
            engines[-1].directory(running)
        yield engines[0], engines[1], path, f"tcp://{first.address}:7700"


def want(receiver: OracleEngine, address: str, number: int, name: str = "") -> None:
    receiver.want(name or f"r{number}", address, [number], range(16), rendezvous=f"r{number}", deadline_s=30.0)


def test_a_sender_that_could_not_be_reached_hears_of_failed_wants_afterwards(pair: Pair) -> None:
    sender, receiver, path, address = pair
    sender.offer("r0", [0], 16)
    want(receiver, address, 0)
    receiver.done("r0")
    sender.released("r0")
    path.cut()
    for number in range(1, OFFERS + 1):
        sender.offer(f"r{number}", [number], 16, hold_s=HOLD_S)
    half = OFFERS // 2
    for number in range(1, half + 1):  # into a session that is not known to be over
        want(receiver, address, number)
    receiver.client.send(Abandon(number=number_of("r1")))
    assert all(isinstance(receiver.answer(f"r{number}"), Failed) for number in range(1, half + 1))
    for number in range(half + 1, OFFERS + 1):  # there is none any more
        want(receiver, address, number)
    assert all(isinstance(receiver.answer(f"r{number}"), Failed) for number in range(half + 1, OFFERS + 1))
    assert len(sender.agent.status.offers) == OFFERS
    path.heal()
    for number in range(1, OFFERS + 1):
        assert sender.released(f"r{number}", TOLD_S).is_declined
    sender.offer("after", [0], 16)
    wait_for(lambda: _carries(sender, receiver, address), TOLD_S)


def _carries(sender: OracleEngine, receiver: OracleEngine, address: str) -> bool:
    receiver.want("after", address, [1], range(16), rendezvous="after")
    return isinstance(receiver.answer("after"), Done)
