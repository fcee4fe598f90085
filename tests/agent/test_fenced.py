"""A chunk that waits for its engine's stream has touched nothing: what has ended does not wait with it.

The streams are pages that stand still, so nothing that waits for them ever begins.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from kvbridge_proto.engine import READERS_S, Abandon, Failed, Withdraw

from kvbridge.device.fence import EngineFence

from ..oracle import Shape, build_all, table_of
from .harness import SyntheticEngine, agent, wait_for

TOKENS = 64
AT_ONCE_S = READERS_S / 2


class Pair:
    """A source and a sink, each with an agent and a fence that no stream drives."""

    def __init__(self, source: SyntheticEngine, sink: SyntheticEngine) -> None:
        self.source, self.sink = source, sink
        self._table = list(table_of(source.pool, TOKENS))

    def begin(self, source_fence: int = 0, sink_fence: int = 0) -> None:
        """Both sides of one request, which has come to the fence that it has to wait for when this returns."""
        self.source.offer("r", self._table, TOKENS, fence=source_fence)
        self.sink.want("r", self.source.agent.address, self._table, range(TOKENS), fence=sink_fence)
        if sink_fence:
            wait_for(lambda: self.sink.agent.status.inbound.landed)
        else:
            wait_for(lambda: self.source.agent.status.outbound.lent)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        engines = []
        for name in ("p", "d"):
            (held,) = build_all(Shape("nhd"))
            running = stack.enter_context(agent(tmp_path, name))
            engine = stack.enter_context(closing(SyntheticEngine(running, held)))
            fence = stack.enter_context(EngineFence("cpu"))
            engine.fds.append(os.dup(fence.fd))
            engine.attach(fence_fd=len(engine.fds) - 1)
            engine.directory(running)
            engines.append(engine)
        yield Pair(*engines)


def test_a_withdrawn_offer_is_released_though_its_stream_stands_still(pair: Pair) -> None:
    pair.begin(source_fence=1)
    pair.source.client.send(Withdraw(request="r", reason="preempted"))
    assert pair.source.released("r", AT_ONCE_S).code == "withdrawn"
    assert isinstance(answer := pair.sink.answer("r", AT_ONCE_S), Failed) and answer.code == "withdrawn"
    wait_for(lambda: pair.source.agent.status.outbound.lent == 0, AT_ONCE_S)


def test_an_offer_of_which_nobody_wants_the_rest_is_released_though_its_stream_stands_still(pair: Pair) -> None:
    pair.begin(source_fence=1)
    pair.sink.client.send(Abandon(request="r"))
    assert isinstance(pair.sink.answer("r", AT_ONCE_S), Failed)
    pair.source.released("r", AT_ONCE_S)


def test_an_abandoned_want_has_failed_though_its_stream_stands_still(pair: Pair) -> None:
    pair.begin(sink_fence=1)
    pair.sink.client.send(Abandon(request="r"))
    assert isinstance(answer := pair.sink.answer("r", AT_ONCE_S), Failed) and answer.code == "aborted"
    wait_for(lambda: pair.sink.agent.status.inbound.landed == 0, AT_ONCE_S)
