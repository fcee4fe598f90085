"""The fence page between engine and agent: nothing is read or written before the count is reached.

With a real engine a GPU's stream writes the count (tests/system/gpu/test_carry.py). The code that waits is the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvbridge_proto.common import OURS
from kvbridge_proto.engine import Attach, Attached, Done, Failed
from kvbridge_proto.pool import Handle

from kvbridge.device.fence import EngineFence
from tests.integration.agent.harness import AgentProcess, SyntheticEngine, agent
from tests.support.oracle import Shape, build, fill, mismatch

TOKENS = range(90)
TABLE, RECEIVER_TABLE = [9, 4, 7, 2, 6, 1], [3, 5]
WAIT_S, GONE_S = 0.5, 10.0  # without a close they stay mapped for ever


class FencedEngine(SyntheticEngine):
    """It says counts before its page has them."""

    def attach(self, **changes: Any) -> Any:
        self.fence = EngineFence("cpu")
        handles = tuple(Handle(region=i, kind="shm_fd", fd=i) for i in range(len(self.fds)))
        message = Attach(versions=OURS, pool=self.pool, handles=handles, fence_fd=len(self.fds), **changes)
        self.marked = 0
        self.client.send(message, (*self.fds, self.fence.fd))
        return self.client.wait(Attached)

    def mark(self) -> None:
        self.marked = self.fence.mark()

    def close(self) -> None:
        super().close()
        self.fence.close()


class Pair:
    """An engine that offers and one that wants, each with a fence."""

    def __init__(self, folder: Path, stack: ExitStack, module: str = "kvbridge.cli") -> None:
        self.agents: list[AgentProcess] = [stack.enter_context(agent(folder, name, module=module)) for name in "pd"]
        shapes = Shape("nhd"), Shape("hnd", block_tokens=64, blocks=8)
        self.sender, self.receiver = (
            stack.enter_context(closing(FencedEngine(each, build(shape))))
            for each, shape in zip(self.agents, shapes, strict=True)
        )
        for engine in (self.sender, self.receiver):
            engine.attach()
            engine.directory(engine.agent)
        self.fresh = self.sender.held.copy(), self.receiver.held.copy()
        self.renew("r")

    def renew(self, request: str) -> None:
        """Another request by the same blocks, behind the next count of either engine."""
        self.request, self.before = request, self.fresh[1]
        self.counts = self.sender.marked + 1, self.receiver.marked + 1
        for engine, fresh in zip((self.sender, self.receiver), self.fresh, strict=True):
            for memory, was in zip(engine.held.memory, fresh.memory, strict=True):
                memory[:] = was

    def begin(self) -> None:
        """Offer and want, both behind their count."""
        sender, receiver = self.counts
        self.sender.offer(self.request, TABLE, len(TOKENS), fence=sender)
        self.receiver.want(self.request, self.agents[0].address, RECEIVER_TABLE, TOKENS, fence=receiver)

    def is_over(self) -> bool:
        self.receiver.client.hear(WAIT_S)
        heard = self.receiver.client.heard
        return any(isinstance(each, Done | Failed) and each.request == self.request for each in heard)

    def ends_right(self) -> None:
        answer = self.receiver.answer(self.request)
        assert isinstance(answer, Done), answer
        tail = range(TOKENS.stop, 2 * 64)
        assert not (wrong := mismatch(self.receiver.held, self.before, RECEIVER_TABLE, TOKENS, tail)), wrong


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(tmp_path_factory.mktemp("fence"), stack)


@pytest.fixture
def pair(lasting: Pair, request: pytest.FixtureRequest) -> Pair:
    lasting.renew(request.node.name)
    return lasting


def test_nothing_is_read_before_the_sender_engine_has_computed_it(pair: Pair) -> None:
    """Its rows are there only when the count is; before that, its blocks hold what was there last."""
    pair.begin()
    pair.receiver.mark()
    assert not pair.is_over()
    fill(pair.sender.held, TABLE, TOKENS)
    pair.sender.mark()
    pair.ends_right()


def test_nothing_is_written_before_the_receiver_engine_is_through_with_its_blocks(pair: Pair) -> None:
    """Until the count is there, a forward before it may still write: what it writes must not stay."""
    fill(pair.sender.held, TABLE, TOKENS)
    pair.begin()
    pair.sender.mark()
    assert not pair.is_over()
    for ours, before in zip(pair.receiver.held.memory, pair.before.memory, strict=True):
        assert np.array_equal(ours, before)
    for plane in pair.receiver.pool.planes:
        for block in RECEIVER_TABLE:
            start = plane.offset + block * plane.block_stride
            pair.receiver.held.memory[plane.region][start : start + plane.codec.row_bytes] = 77
    pair.receiver.mark()
    pair.ends_right()


def test_a_count_stands_for_those_before_it(pair: Pair) -> None:
    fill(pair.sender.held, TABLE, TOKENS)
    for engine in (pair.sender, pair.receiver):
        engine.mark()
        engine.mark()
    pair.begin()
    pair.ends_right()


def test_memory_and_fence_of_an_engine_that_left_are_unmapped_by_a_close(tmp_path: Path) -> None:
    """Not because nobody knows of them any more: on a GPU nothing else unmaps."""
    with ExitStack() as stack:
        pair = Pair(tmp_path, stack, module="tests.integration.agent.holding_agent")
        maps = Path(f"/proc/{pair.agents[1].process.pid}/maps")
        names = ("kvbridge-test-pool", "kvbridge-fence")
        assert all(name in maps.read_text() for name in names)
        pair.receiver.close()
        deadline = time.monotonic() + GONE_S
        while found := [name for name in names if name in maps.read_text()]:
            assert time.monotonic() < deadline, f"{found} still mapped {GONE_S} s after the engine left"
            time.sleep(0.02)
