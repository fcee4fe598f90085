"""A mover that moves nothing: it keeps orders, and says that it is quiet when it is told to stop."""

from __future__ import annotations

from typing import Any

from kvbridge.agent.sink import Sink
from kvbridge.agent.source import Source
from kvbridge.dataplane.receiving import Receiving
from kvbridge.dataplane.sending import Sending
from kvbridge.exchange.orders import ReceivingOrder, SendingOrder
from tests.unit.exchange.world import take_up


class Receiver:
    """The part of `Mover` that a sink and a source call. `report` lets them hear what there is to say."""

    sink: Sink
    source: Source

    def __init__(self) -> None:
        self.sending, self.receiving = Sending(2), Receiving()

    def get_up(self) -> None: ...
    def stir(self) -> None: ...
    def warm(self, attachment: Any, parts: Any) -> None: ...

    def give(self, order: SendingOrder | ReceivingOrder, attachment: Any) -> None:
        take_up(order, self.sending, self.receiving)

    def report(self) -> None:
        while received := self.receiving.take_reports():
            self.sink.hear(received)
        while sent := self.sending.take_reports():
            self.source.hear(sent)
