"""A data plane that moves nothing. It keeps orders, and says that it is quiet when it is told to stop."""

from __future__ import annotations

from typing import Any

from kvbridge.agent.receiver_runner import ReceiverRunner
from kvbridge.agent.sender_runner import SenderRunner
from kvbridge.dataplane.receive_orders import ReceiveOrders
from kvbridge.dataplane.send_orders import SendOrders
from kvbridge.exchange.orders import ReceivingOrder, SendingOrder
from tests.unit.exchange.world import take_up


class OrderTaker:
    """The part of `DataPlane` that a receiver and a sender call. `report` lets them hear what there is to say."""

    receiver: ReceiverRunner
    sender: SenderRunner

    def __init__(self) -> None:
        self.send_orders, self.receive_orders = SendOrders(2), ReceiveOrders()

    def wake(self) -> None: ...
    def keep_awake(self) -> None: ...
    def warm(self, attachment: Any, parts: Any) -> None: ...

    def give(self, order: SendingOrder | ReceivingOrder, attachment: Any) -> None:
        take_up(order, self.send_orders, self.receive_orders)

    def report(self) -> None:
        while received := self.receive_orders.take_reports():
            self.receiver.hear(received)
        while sent := self.send_orders.take_reports():
            self.sender.hear(sent)
