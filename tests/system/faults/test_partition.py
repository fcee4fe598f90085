"""In the middle of a transfer all packets between two agents are dropped. Later they flow again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.nursery import Nursery
from tests.system.faults.namespaces import Cable, cable, why_not
from tests.system.faults.world import ROLES, Role, World

# Longer than every limit in force: sessions are lost and writes are late.
CUT_S = 4.0
SHORT_S = 0.5  # shorter than any
# TCP tries again after pauses that double; what hung at the heal may need as long as the cut was.
BACKOFF_S = 6.0


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, Cable]]:
    if reason := why_not():
        pytest.skip(f"no packets were dropped: {reason}")
    folder = tmp_path_factory.mktemp("partition")
    with ExitStack() as stack:
        between = stack.enter_context(cable())
        dial = ",".join(f"{address}:*" for address in between.addresses)
        apart: dict[Role, tuple[Nursery, dict[str, str]]] = {}
        for role, name, address in zip(ROLES, between.names, between.addresses, strict=True):
            # By shared memory, which UCX would take on one machine, no packet is dropped.
            nursery = Nursery(within=("ip", "netns", "exec", name), environment={"UCX_TLS": "tcp"})
            stack.callback(nursery.close)
            apart[role] = (
                nursery,
                {
                    "listen": f"tcp://{address}:0",
                    "net_devices": between.device,
                    "allow_unauthenticated": "true",
                    "dial": dial,
                },
            )
        world = World(folder, apart=apart)
        stack.callback(world.close)
        world.meet()
        yield world, between


@pytest.mark.parametrize("seconds", [SHORT_S, CUT_S])
def test_dropped_packets_cost_requests_and_nothing_else(joined: tuple[World, Cable], seconds: float) -> None:
    world, between = joined
    world.receiver.ends.clear()
    world.begin(24, abandon=0.2)
    end = time.monotonic() + 10
    while not world.receiver.ends:
        world.receiver.hear(0.001)
        assert time.monotonic() < end, "nothing ends"
    between.cut()
    time.sleep(seconds)
    between.heal()
    for side in world.sides.values():
        side.stuck_s = seconds + BACKOFF_S
    world.finish()
    world.serves()
    world.is_clean()
    world.holds_no_more()
