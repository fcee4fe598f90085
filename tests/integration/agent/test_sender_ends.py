"""A sender on our host is killed while it writes, and another takes its place elsewhere: it has no proof to give."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
from kvbridge_proto.engine import Done

from kvbridge.failpoints import VARIABLE
from testing.agents import agent, attached
from testing.oracle import Shape
from testing.pairs import carry
from testing.waiting import wait_for

LARGE = Shape(key_width=128, value_width=128)  # a block fills a slot
REBUILT = "kvbridge_rebuilds_total{{replaced={}}}"


@pytest.mark.proves("G5", "G6")
@pytest.mark.parametrize(
    ("is_watched", "rebuild_s"), [(True, 86400), (False, 0.3)], ids=["its end is seen", "its end cannot be seen"]
)
def test_slots_of_a_sender_that_was_killed_and_comes_back_elsewhere_are_free_again(
    is_watched: bool, rebuild_s: float, tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once its process has ended, without a rebuild. Where that cannot be seen, by a rebuild as before."""
    (here := tmp_path / "here").mkdir()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    begin = lambda folder, name, **more: stack.enter_context(  # noqa: E731
        attached(stack.enter_context(agent(folder, name, routes="nixl", **more)), LARGE)
    )
    receiver = begin(here, "d", rebuild_s=rebuild_s, receive_slots=16, is_watching=is_watched)
    receiving = receiver.agent
    monkeypatch.setenv(VARIABLE, "sender.write_posted=kill")
    sender = begin(here, "p")
    monkeypatch.delenv(VARIABLE)
    sender.offer("lost", [1, 2, 3, 4], 64)
    receiver.want("lost", sender.agent.address, [1, 2, 3, 4], range(64), deadline_s=60.0)
    receiver.failed("lost", "peer_lost")
    assert sender.agent.process.is_dead(10.0)
    successor = begin(elsewhere, "q")
    names = map("after-{}".format, count())
    first = lambda: carry(successor, receiver, next(names), deadline_s=60.0)  # noqa: E731
    if is_watched:
        assert isinstance(answer := first(), Done), answer
    else:  # a rebuild ends what it meets
        wait_for(lambda: isinstance(first(), Done), 60.0, receiving.text)
    wait_for(lambda: receiving.status.receive_slots.free == 16, 60.0, receiving.text)
    counters = receiving.status.counters
    assert counters[REBUILT.format("slots")] == (not is_watched) and not counters[REBUILT.format("fabric")]
    assert ("process has ended: " in receiving.text()) == is_watched
    assert ("no pidfd of a sender" in receiving.text()) == (not is_watched)
    assert isinstance(answer := carry(successor, receiver, "again", deadline_s=60.0), Done), answer
