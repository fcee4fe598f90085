"""A sink's mover that moves nothing: it keeps receive orders, and says that it is quiet when it is told to stop."""

from __future__ import annotations

from typing import Any

from kvbridge.agent.receiving import Receiving
from kvbridge.agent.sink import Sink
from kvbridge.exchange.orders import Lend, ReceiveOrder, Stop


class Receiver:
    """The part of `Mover` that a sink calls. `report` lets the sink hear what there is to say."""

    sink: Sink

    def __init__(self) -> None:
        self.receiving = Receiving()

    def get_up(self) -> None: ...
    def stir(self) -> None: ...
    def warm(self, attachment: Any, parts: Any) -> None: ...

    def receive(self, order: ReceiveOrder, attachment: Any) -> None:
        self.receiving.order(order, attachment)

    def lend(self, lend: Lend) -> None:
        self.receiving.lend(lend)

    def stop_transfer(self, stop: Stop) -> None:
        self.receiving.stop(stop)

    def report(self) -> None:
        while reports := self.receiving.take_reports():
            self.sink.hear(reports)
