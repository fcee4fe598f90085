"""A real agent that stands still holds no more than its share of the others' slots, and nobody waits for it.

The limits of time are so long that nothing but the share lets the others go on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from kvbridge_proto.engine import Done

from testing.agents import OracleEngine, agent, attached
from testing.oracle import Shape
from testing.pairs import Benches, carry
from testing.waiting import wait_for

pytestmark = pytest.mark.proves("G18")

SLOTS = 6
SHAPE = Shape("nhd", block_tokens=16, blocks=128)
TABLE, TOKENS = list(range(128)), 2048  # eight chunks
OPTIONS: dict[str, Any] = {
    "routes": "nixl",
    "receive_slots": SLOTS,
    "send_slots": SLOTS,
    "slot_bytes": 65536,
    "silence_s": 600,
    "write_timeout_s": 600,
    "rebuild_s": 3600,
}


def carried(sender: OracleEngine, receiver: OracleEngine, name: str) -> bool:
    return isinstance(carry(sender, receiver, name, TABLE, TABLE, TOKENS, deadline_s=60.0), Done)


@contextmanager
def standing_still(engine: OracleEngine) -> Iterator[None]:
    """The agent of this engine is stopped."""
    os.kill(pid := engine.agent.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_sender_that_stands_still_leaves_slots_to_the_others(
    bench_of: Benches, stack: ExitStack, tmp_path: Path
) -> None:
    """It has said that all is computed, and so was lent what it may have."""
    bench = bench_of(SHAPE, SHAPE, **OPTIONS)
    other = stack.enter_context(attached(stack.enter_context(agent(tmp_path, "other", **OPTIONS)), SHAPE))
    still, receiver = bench.sender, bench.receiver
    assert carried(still, receiver, "a") and carried(other, receiver, "b")
    still.offer("stuck", TABLE, TOKENS, fence=still.fence._count + 1, hold_s=60.0)  # its stream does not come so far
    receiver.want("stuck", still.agent.address, TABLE, range(TOKENS), deadline_s=600.0)
    wait_for(lambda: receiver.agent.status.receive_slots.lent == SLOTS * 2 // 3)
    with standing_still(still):
        assert carried(other, receiver, "c") and carried(other, receiver, "d")
        assert receiver.agent.status.receive_slots.lent == SLOTS * 2 // 3


def test_a_receiver_that_stands_still_leaves_slots_to_the_others(
    bench_of: Benches, stack: ExitStack, tmp_path: Path
) -> None:
    """What is written to it does not land, and the slots that are sent from are read until it does."""
    bench = bench_of(SHAPE, SHAPE, **{**OPTIONS, "receive_slots": 16})
    other = stack.enter_context(attached(stack.enter_context(agent(tmp_path, "other", **OPTIONS)), SHAPE))
    sender, still = bench.sender, bench.receiver
    assert carried(sender, still, "a") and carried(sender, other, "b")
    still.want("stuck", sender.agent.address, TABLE, range(TOKENS), deadline_s=600.0)
    wait_for(lambda: len(sender.agent.status.transfers) == 1)
    with standing_still(still):
        sender.offer("stuck", TABLE, TOKENS, hold_s=60.0)
        wait_for(lambda: sender.agent.status.send_slots.lent == SLOTS * 2 // 3)
        assert carried(sender, other, "c") and carried(sender, other, "d")
    still.done("stuck")
