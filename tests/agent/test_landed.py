"""What lands is decided on the mover's thread while the loop decides other things: never both at once."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from kvbridge_proto.engine import Failed
from kvbridge_proto.peer import Notice

from kvbridge.agent.metrics import Metrics
from kvbridge.agent.sink import Sink
from tests.exchange.world import World

WAIT_S = 0.2


def landing(told: list[Any]) -> tuple[World, Sink, Notice]:
    """A want of which the first chunk has landed, and nobody has looked yet."""
    world = World()
    world.offer("r", 64, 16)
    world.want("r", 64)
    world.hold = {"notice"}
    world.run()
    shell: Any = SimpleNamespace(send=lambda *_: None, expect=lambda _: None, recall=lambda *_: None)
    sink = Sink(world.sinks[0].inbound, shell, shell, Metrics(), told.append, lambda: world.now)
    sink.attached = SimpleNamespace()  # type: ignore[assignment]
    return world, sink, world.notices[0]


def test_what_lands_waits_for_the_loop_to_decide_and_then_counts_no_more() -> None:
    world, sink, notice = landing([])
    deciding, go, found = threading.Event(), threading.Event(), []

    def leave() -> list[Any]:
        deciding.set()
        assert go.wait(10)
        return world.sinks[0].inbound.engine_left(world.now)

    loop = threading.Thread(target=lambda: sink._do(leave))
    loop.start()
    assert deciding.wait(10)
    mover = threading.Thread(target=lambda: found.append(sink.landed(notice)))
    mover.start()
    mover.join(WAIT_S)
    assert mover.is_alive(), "decided while the loop was deciding"
    go.set()
    for thread in (mover, loop):
        thread.join(10)
    assert found == [None]


def test_a_want_given_up_while_a_chunk_is_scattered_fails_afterwards() -> None:
    told: list[Any] = []
    world, sink, notice = landing(told)
    landed = sink.landed(notice)
    assert landed is not None
    sink.abandon("r")
    assert told == [], "the engine may use its blocks, and a scatter runs"
    sink.on_scattered(landed[0], notice.chunk_bytes, None)
    assert [(type(message), message.code) for message in told] == [(Failed, "aborted")]
    assert sink.landed(world.notices[1]) is None
