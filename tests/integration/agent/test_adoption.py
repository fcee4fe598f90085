"""Two agents and their engines: the sink's is asked for the source's scales, and takes them or does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from kvbridge_proto.engine import Adopt, Attached, Decline, Done, Failed, Rescale, Rescaled

from tests.integration.agent.harness import SyntheticEngine, agent
from tests.support.oracle import Shape, build

THEIRS, OURS = {"k": (0.5,), "v": (0.25,)}, {"k": (2.0,), "v": (2.0,)}


class Pair:
    """Two fp8 engines of other layouts, under other scales; the sink would take the source's."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.agents = [stack.enter_context(agent(folder, name)) for name in ("p", "d")]
        shapes = (Shape("nhd", codec="fp8_e4m3", scales=THEIRS), Shape("hnd", codec="fp8_e4m3", scales=OURS))
        self.source, self.sink = (
            stack.enter_context(closing(SyntheticEngine(running, build(shape))))
            for running, shape in zip(self.agents, shapes, strict=True)
        )
        assert isinstance(self.source.attach(), Attached)
        assert isinstance(self.sink.attach(policy="adopt"), Attached)
        for memory in self.source.held.memory:
            memory[:] = 0x39

    def fetch(self, request: str) -> None:
        self.source.offer(request, [1], 16)
        self.sink.want(request, self.agents[0].address, [1], range(16))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(tmp_path, stack)


def test_rows_arrive_as_they_are_once_the_engine_has_taken_the_scales(pair: Pair) -> None:
    pair.fetch("first")
    question = pair.sink.client.wait(Adopt)
    assert {(each.layer, each.part): each.scales for each in question.scales} == {
        (layer, part): scales for layer in range(2) for part, scales in THEIRS.items()
    }
    pair.sink.client.send(Rescale(revision=question.revision, scales=question.scales))
    assert pair.sink.client.wait(Rescaled) == Rescaled(revision=question.revision, epoch=2)
    assert isinstance(answer := pair.sink.answer("first"), Done), answer
    pair.fetch("second")
    assert isinstance(answer := pair.sink.answer("second"), Done), answer
    assert not [message for message in pair.sink.client.heard if isinstance(message, Adopt)]
    written = 2 * 2 * 4 * 16 * 8  # layers, parts, heads, tokens, width
    assert np.count_nonzero(np.concatenate(pair.sink.held.memory) == 0x39) == written


def test_an_engine_that_keeps_its_own_gets_nothing_and_is_told_why(pair: Pair) -> None:
    before = [memory.copy() for memory in pair.sink.held.memory]
    pair.fetch("first")
    question = pair.sink.client.wait(Adopt)
    pair.sink.client.send(Decline(revision=question.revision, reason="requests have been computed"))
    failed = pair.sink.answer("first")
    assert isinstance(failed, Failed) and failed.code == "adopt_refused"
    assert "source 0.5, sink 2 (layer 0 k); needs scales=requantize" in failed.reason
    assert "requests have been computed" in failed.reason
    pair.fetch("second")
    assert isinstance(failed := pair.sink.answer("second"), Failed) and failed.code == "adopt_refused"
    assert not [message for message in pair.sink.client.heard if isinstance(message, Adopt)]
    assert all((now == then).all() for now, then in zip(pair.sink.held.memory, before, strict=True))
    assert pair.source.released("first").code == ""
