"""The fence page between engine and agent: nothing is read or written before the count is reached.

A chunk that waits for it has touched nothing, so a transfer that ends need not wait with it. With a real engine a GPU's
stream writes the count (tests/system/gpu/test_carry.py). The code that waits is the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvbridge_proto.engine import Abandon, Done, Failed, Withdraw

from kvbridge.loopback.messages import number_of
from testing.oracle import Shape, fill
from testing.pairs import Bench
from testing.proc import mapped
from testing.waiting import wait_for

TOKENS = range(90)
TABLE, RECEIVER_TABLE = [9, 4, 7, 2, 6, 1], [3, 5]
WAIT_S, GONE_S = 0.5, 60.0  # without a close they stay mapped for ever
AT_ONCE_S, READ_S, DEADLINE_S = 25.0, 0.2, 60.0  # who waits for a stream waits 30 s at least, as long as for a write
NUMBERS = count()


class Pair(Bench):
    """An engine that offers and one that wants, each with a fence."""

    def __init__(self, folder: Path, stack: ExitStack, **options: Any) -> None:
        shapes = Shape("nhd"), Shape("hnd", block_tokens=64, blocks=8)
        super().__init__(folder, stack, *shapes, **options)
        self.route = options.get("routes", "")
        self.fresh = [each.held.copy() for each in self.engines]
        self.renew("r")

    def renew(self, request: str) -> None:
        """Another request by the same blocks, behind the next count of either engine."""
        self.request, self.counts = (
            request,
            [each.fence._count + 1 for each in self.engines],  # said before its page has it,
        )
        for engine, fresh in zip(self.engines, self.fresh, strict=True):
            for memory, was in zip(engine.held.memory, fresh.memory, strict=True):
                memory[:] = was

    def begin(self) -> None:
        """Offer and want, both behind their count."""
        self.offer(self.request, TABLE, len(TOKENS), fence=self.counts[0])
        self.want(self.request, RECEIVER_TABLE, TOKENS, fence=self.counts[1])

    def is_over(self) -> bool:
        self.receiver.hear(WAIT_S)
        heard = self.receiver.heard
        return any(isinstance(each, Done | Failed) and each.request == self.request for each in heard)

    def ends_right(self) -> None:
        self.receiver.done(self.request)
        self.check(RECEIVER_TABLE, TOKENS)


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(tmp_path_factory.mktemp("fence"), stack)


@pytest.fixture
def pair(lasting: Pair, request: pytest.FixtureRequest) -> Pair:
    lasting.renew(request.node.name)
    return lasting


@pytest.mark.proves("G15")
def test_nothing_is_read_before_the_sender_engine_has_computed_it(pair: Pair) -> None:
    """Its rows are there only when the count is; before that, its blocks hold what was there last."""
    pair.begin()
    pair.receiver.fence.mark()
    assert not pair.is_over()
    fill(pair.sender.held, TABLE, TOKENS)
    pair.sender.fence.mark()
    pair.ends_right()


@pytest.mark.proves("G15")
def test_nothing_is_written_before_the_receiver_engine_is_through_with_its_blocks(pair: Pair) -> None:
    """Until the count is there, a forward before it may still write: what it writes must not stay."""
    fill(pair.sender.held, TABLE, TOKENS)
    pair.begin()
    pair.sender.fence.mark()
    assert not pair.is_over()
    for ours, before in zip(pair.receiver.held.memory, pair.fresh[1].memory, strict=True):
        assert np.array_equal(ours, before)
    for plane in pair.receiver.pool.planes:
        for block in RECEIVER_TABLE:
            start = plane.offset + block * plane.block_stride
            pair.receiver.held.memory[plane.region][start : start + plane.codec.row_bytes] = 77
    pair.receiver.fence.mark()
    pair.ends_right()


@pytest.mark.proves("G3")
@pytest.mark.parametrize("is_computed", [True, False])
def test_what_is_computed_is_read_ahead_of_the_answer_and_nothing_else(pair: Pair, is_computed: bool) -> None:
    """Once the receiver has claimed before. What was read too early is read again."""
    before, counted = read_ahead(pair), "yes" if is_computed else "no"
    for number in range(20):
        pair.renew(f"{pair.request}-{number}")
        if is_computed:
            fill(pair.sender.held, TABLE, TOKENS)
            pair.sender.fence.mark()
        pair.receiver.fence.mark()
        pair.offer(pair.request, TABLE, len(TOKENS), fence=pair.counts[0])
        time.sleep(READ_S)  # the receiver hears of it
        pair.want(pair.request, RECEIVER_TABLE, TOKENS, fence=pair.counts[1])
        if not is_computed:
            time.sleep(READ_S / 4)  # the read is over, and its lease is not asked for again
            fill(pair.sender.held, TABLE, TOKENS)
            pair.sender.fence.mark()
        pair.ends_right()
        if read_ahead(pair)[counted] > before[counted]:
            return
    raise AssertionError(f"nothing was read ahead: {read_ahead(pair)}")


def read_ahead(pair: Pair) -> dict[str, float]:
    counters = pair.receiver.agent.status.counters
    return {each: counters.get(f"kvbridge_reads_ahead_total{{counted={each}}}", 0) for each in ("yes", "no")}


def test_a_count_stands_for_those_before_it(pair: Pair) -> None:
    fill(pair.sender.held, TABLE, TOKENS)
    for engine in (pair.sender, pair.receiver):
        engine.fence.mark()
        engine.fence.mark()
    pair.begin()
    pair.ends_right()


@pytest.mark.proves("G19")
def test_memory_and_fence_of_an_engine_that_left_are_unmapped_by_a_close(tmp_path: Path, stack: ExitStack) -> None:
    """Not because nobody knows of them any more: on a GPU nothing else unmaps."""
    pair = Pair(tmp_path, stack, module="tests.integration.agent.holding_agent")
    pid, names = pair.receiver.agent.process.pid, (pair.receiver.inode, "kvbridge-fence")
    assert all(mapped(pid, name) for name in names)
    pair.receiver.close()
    wait_for(lambda: not any(mapped(pid, name) for name in names), GONE_S)


# Streams that stand still:


@pytest.fixture(scope="module", params=["nixl", "pull"])
def still(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One for all: what has ended leaves nothing behind, though its streams never move."""
    with ExitStack() as stack:
        yield Pair(tmp_path_factory.mktemp("still"), stack, routes=request.param)


def held_up(pair: Pair, sender: int = 0, receiver: int = 0) -> str:
    """Both sides of one request, which has come to the count that it has to wait for when this returns."""
    wait_for(lambda: not pair.sender.agent.status.send_slots.lent, AT_ONCE_S)
    wait_for(lambda: not pair.receiver.agent.status.receive_slots.landed, AT_ONCE_S)
    request = f"r{next(NUMBERS)}"
    pair.offer(request, TABLE, len(TOKENS), fence=sender)
    pair.want(request, RECEIVER_TABLE, TOKENS, fence=receiver, deadline_s=DEADLINE_S)
    if pair.route == "pull":
        wait_for(lambda: [each.state for each in pair.sender.agent.status.transfers] == ["flowing"])
        time.sleep(READ_S)
    elif receiver:
        wait_for(lambda: pair.receiver.agent.status.receive_slots.landed)
    else:
        wait_for(lambda: pair.sender.agent.status.send_slots.lent)
    return request


@pytest.mark.proves("G16")
def test_a_withdrawn_offer_is_released_though_its_stream_stands_still(still: Pair) -> None:
    request = held_up(still, sender=1)
    still.sender.client.send(Withdraw(number=number_of(request), reason="preempted"))
    assert still.sender.released(request, AT_ONCE_S).code == "withdrawn"
    still.receiver.failed(request, "withdrawn", AT_ONCE_S)
    wait_for(lambda: still.sender.agent.status.send_slots.lent == 0, AT_ONCE_S)


def test_an_offer_of_which_nobody_wants_the_rest_is_released_though_its_stream_stands_still(still: Pair) -> None:
    request = held_up(still, sender=1)
    still.receiver.client.send(Abandon(number=number_of(request)))
    assert isinstance(still.receiver.answer(request, AT_ONCE_S), Failed)
    still.sender.released(request, AT_ONCE_S)


@pytest.mark.proves("G16")
def test_an_abandoned_want_has_failed_though_its_stream_stands_still(still: Pair) -> None:
    request = held_up(still, receiver=1)
    still.receiver.client.send(Abandon(number=number_of(request)))
    still.receiver.failed(request, "aborted", AT_ONCE_S)
    wait_for(lambda: still.receiver.agent.status.receive_slots.landed == 0, AT_ONCE_S)
