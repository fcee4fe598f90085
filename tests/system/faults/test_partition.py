"""In the middle of a transfer all packets between two agents are dropped. Later they flow again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from testing.hosts import DEVICE, NetworkPath, two_hosts, why_not
from testing.nursery import Place
from tests.system.faults.world import ROLES, SLACK_S, Role, World

# Longer than every limit in force: sessions are lost and writes are late.
CUT_S = 4.0
SHORT_S = 0.5  # shorter than any
# TCP tries again after pauses that double; what hung at the heal may need as long as the cut was.
BACKOFF_S = 6.0


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, NetworkPath]]:
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("partition")
    with ExitStack() as stack:
        first, second, path = stack.enter_context(two_hosts(folder))
        dial = ",".join(f"{host.address}:*" for host in (first, second))
        apart: dict[Role, tuple[Place, dict[str, str | bool]]] = {}
        for role, host in zip(ROLES, (first, second), strict=True):
            options: dict[str, str | bool] = {"listen": f"tcp://{host.address}:0", "net_devices": DEVICE, "dial": dial}
            apart[role] = (host.beside, options | {"allow_unauthenticated": True})
        world = World(folder, apart=apart)
        stack.callback(world.close)
        world.meet()
        yield world, path


@pytest.mark.parametrize("seconds", [SHORT_S, CUT_S])
def test_dropped_packets_cost_requests_and_nothing_else(joined: tuple[World, NetworkPath], seconds: float) -> None:
    world, path = joined
    world.receiver.ends.clear()
    world.begin(24, abandon=0.2)
    end = time.monotonic() + SLACK_S
    while not world.receiver.ends:
        world.receiver.hear(0.001)
        assert time.monotonic() < end, "nothing ends"
    path.cut()
    time.sleep(seconds)
    path.heal()
    for side in world.sides.values():
        side.stuck_s = seconds + BACKOFF_S
    world.finish()
    world.serves()
    world.is_clean()
    world.holds_no_more()
