"""What one transfer costs does not depend on how many others are open."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import pytest
from kvbridge_proto.peer import Cancel, Claim, Ready
from msgspec import structs

from kvbridge.exchange.actions import Send
from tests.unit.exchange.network import want_of
from tests.unit.exchange.world import World

FEW, MANY = 64, 4096
MOST = 8  # times as long with 64 times as many: looking at each would take some 64 times as long


class Crowd:
    """So many wants of a receiver, and as many claims of a sender's that wait for offers."""

    def __init__(self, others: int) -> None:
        world = World()
        world.fetch("first", 16)
        (self.receiver,), (self.sender,) = world.receivers, world.senders
        self.receiver.receiving._new_id = map("t{}".format, count()).__next__
        self.session = self.sender.accepted[self.receiver.engine.agent.incarnation]
        self.sending, self.receiving = self.sender.sending, self.receiver.receiving
        self.numbers = count()
        for _ in range(others):
            self.claim()

    def claim(self) -> Claim:
        """One more want, claimed of its sender."""
        number = next(self.numbers)
        *_, send = self.receiving.want(want_of(f"r{number}", 16, deadline=100.0), self.receiver.engine, 0.0)
        assert isinstance(send, Send) and isinstance(send.body, Claim)
        peer = structs.replace(self.session.peer, incarnation=f"receiver {number % 8}")
        self.sending.claim(send.body, replace(self.session, peer=peer), self.sender.engine, 0.0)
        return send.body

    def cancelled(self) -> Iterator[Callable[[], object]]:
        """What makes the sender forget a transfer."""
        for number, transfer in enumerate(list(self.sending.outgoing_transfers)):
            incarnation = self.sending.outgoing_transfers[transfer].incarnation
            yield lambda b=incarnation, t=transfer: self.sending.cancel(b, Cancel(transfer=t, code="cancelled"), 0.0)
            if number == 20:
                return

    def ready(self) -> Iterator[Callable[[], object]]:
        """What makes the receiver look for slots."""
        incarnation = self.sender.engine.agent.incarnation
        for transfer in list(self.receiving.incoming_transfers)[:20]:
            yield lambda t=transfer: self.receiving.on_message(incarnation, Ready(transfer=t, chunks=4), 0.0)


def seconds(events: Iterator[Callable[[], object]]) -> float:
    """What the quickest of them takes."""
    found = []
    for event in events:
        began = time.perf_counter()
        event()
        found.append(time.perf_counter() - began)
    return min(found)


@pytest.mark.parametrize(
    "events",
    [lambda crowd: (crowd.claim for _ in range(20)), Crowd.cancelled, Crowd.ready],
    ids=["a claim", "a cancel", "ready"],
)
def test_what_one_costs_does_not_grow_with_the_others(
    events: Callable[[Crowd], Iterator[Callable[[], object]]],
) -> None:
    few, many = (seconds(events(Crowd(others))) for others in (FEW, MANY))
    assert many < MOST * few
