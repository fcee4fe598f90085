"""Two agents and their engines: the receiver's engine is asked to take the sender's scales, and does or does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kvbridge_proto.engine import Adopt, Decline, Rescale, Rescaled

from testing.agents import OracleEngine
from testing.oracle import Shape
from testing.pairs import Bench, Benches

THEIRS, OURS = {"k": (0.5,), "v": (0.25,)}, {"k": (2.0,), "v": (2.0,)}


class Adopting(OracleEngine):
    def attach(self, **changes: Any) -> Any:
        return super().attach(policy="adopt", **changes)


@pytest.fixture
def pair(bench_of: Benches) -> Bench:
    """Two fp8 engines of other layouts, under other scales; the receiver would take the sender's."""
    shapes = (Shape("nhd", codec="fp8_e4m3", scales=THEIRS), Shape("hnd", codec="fp8_e4m3", scales=OURS))
    bench = bench_of(*shapes, engine=Adopting)
    for memory in bench.sender.held.memory:
        memory[:] = 0x39
    return bench


def fetch(pair: Bench, request: str) -> None:
    pair.offer(request, [1], 16)
    pair.want(request, [1], range(16))


def test_rows_arrive_as_they_are_once_the_engine_has_taken_the_scales(pair: Bench) -> None:
    fetch(pair, "first")
    question = pair.receiver.told(Adopt)
    assert {(each.layer, each.part): each.scales for each in question.scales} == {
        (layer, part): scales for layer in range(2) for part, scales in THEIRS.items()
    }
    pair.receiver.client.send(Rescale(revision=question.revision, scales=question.scales))
    assert pair.receiver.told(Rescaled) == Rescaled(revision=question.revision, epoch=2)
    pair.receiver.done("first")
    fetch(pair, "second")
    pair.receiver.done("second")
    assert not [message for message in pair.receiver.heard if isinstance(message, Adopt)]
    written = 2 * 2 * 4 * 16 * 8  # layers, parts, heads, tokens, width
    assert np.count_nonzero(np.concatenate(pair.receiver.held.memory) == 0x39) == written


def test_an_engine_that_keeps_its_own_gets_nothing_and_is_told_why(pair: Bench) -> None:
    before = [memory.copy() for memory in pair.receiver.held.memory]
    fetch(pair, "first")
    question = pair.receiver.told(Adopt)
    pair.receiver.client.send(Decline(revision=question.revision, reason="requests have been computed"))
    reason = pair.receiver.failed("first", "adopt_refused")
    assert "sender 0.5, receiver 2 (layer 0 k); needs scales=requantize" in reason
    assert "requests have been computed" in reason
    fetch(pair, "second")
    pair.receiver.failed("second", "adopt_refused")
    assert not [message for message in pair.receiver.heard if isinstance(message, Adopt)]
    assert all((now == then).all() for now, then in zip(pair.receiver.held.memory, before, strict=True))
    assert pair.sender.released("first").code == ""
