"""A chunk that waits for its engine's stream has touched nothing, so a transfer that ends need not wait with it.

The fence pages never advance, so nothing that waits for them ever begins.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from kvbridge_proto.engine import Abandon, Failed, Withdraw

from kvbridge.device.fence import EngineFence
from tests.integration.agent.harness import SyntheticEngine, agent, wait_for
from tests.support.oracle import Shape, build_all, table_of

TOKENS = 64
AT_ONCE_S, DEADLINE_S = 5.0, 60.0  # who waits for a stream waits 30 s at least, as long as for a write
READ_S = 0.2  # in which what can be read is


class Pair:
    """A sender and a receiver, each with an agent and a fence that no stream drives."""

    def __init__(self, route: str, sender: SyntheticEngine, receiver: SyntheticEngine) -> None:
        self.route = route
        self.sender, self.receiver = sender, receiver
        self._table = list(table_of(sender.pool, TOKENS))
        self._began = 0

    def begin(self, sender_fence: int = 0, receiver_fence: int = 0) -> None:
        """Both sides of one request, which has come to the fence that it has to wait for when this returns."""
        wait_for(lambda: not self.sender.agent.status.send_slots.lent, AT_ONCE_S)
        wait_for(lambda: not self.receiver.agent.status.receive_slots.landed, AT_ONCE_S)
        self._began += 1
        self.request = f"r{self._began}"
        address, tokens = self.sender.agent.address, range(TOKENS)
        self.sender.offer(self.request, self._table, TOKENS, fence=sender_fence)
        self.receiver.want(self.request, address, self._table, tokens, fence=receiver_fence, deadline_s=DEADLINE_S)
        if self.route == "pull":
            wait_for(lambda: [each.state for each in self.sender.agent.status.transfers] == ["flowing"])
            time.sleep(READ_S)
        elif receiver_fence:
            wait_for(lambda: self.receiver.agent.status.receive_slots.landed)
        else:
            wait_for(lambda: self.sender.agent.status.send_slots.lent)


@pytest.fixture(scope="module", params=["nixl", "pull"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One for all: what has ended leaves nothing behind, though its streams never move."""
    tmp_path = tmp_path_factory.mktemp("fenced")
    with ExitStack() as stack:
        engines = []
        for name in ("p", "d"):
            (held,) = build_all(Shape("nhd"))
            running = stack.enter_context(agent(tmp_path, name, routes=request.param))
            engine = stack.enter_context(closing(SyntheticEngine(running, held)))
            fence = stack.enter_context(EngineFence("cpu"))
            engine.fds.append(os.dup(fence.fd))
            engine.attach(fence_fd=len(engine.fds) - 1)
            engine.directory(running)
            engines.append(engine)
        yield Pair(request.param, *engines)


def test_a_withdrawn_offer_is_released_though_its_stream_stands_still(pair: Pair) -> None:
    pair.begin(sender_fence=1)
    pair.sender.client.send(Withdraw(request=pair.request, reason="preempted"))
    assert pair.sender.released(pair.request, AT_ONCE_S).code == "withdrawn"
    assert isinstance(answer := pair.receiver.answer(pair.request, AT_ONCE_S), Failed) and answer.code == "withdrawn"
    wait_for(lambda: pair.sender.agent.status.send_slots.lent == 0, AT_ONCE_S)


def test_an_offer_of_which_nobody_wants_the_rest_is_released_though_its_stream_stands_still(pair: Pair) -> None:
    pair.begin(sender_fence=1)
    pair.receiver.client.send(Abandon(request=pair.request))
    assert isinstance(pair.receiver.answer(pair.request, AT_ONCE_S), Failed)
    pair.sender.released(pair.request, AT_ONCE_S)


def test_an_abandoned_want_has_failed_though_its_stream_stands_still(pair: Pair) -> None:
    pair.begin(receiver_fence=1)
    pair.receiver.client.send(Abandon(request=pair.request))
    assert isinstance(answer := pair.receiver.answer(pair.request, AT_ONCE_S), Failed) and answer.code == "aborted"
    wait_for(lambda: pair.receiver.agent.status.receive_slots.landed == 0, AT_ONCE_S)
