"""The halves of all routes, for the exchange. Pure."""

from __future__ import annotations

from kvbridge_proto.peer import Route

from ..exchange.route import SLOT_ROUTE_NAMES
from ..exchange.transfer import OpenAnswers, OpenTransfers, ReceivingRoute, SendingRoute
from .pull.halves import PullReceiving, PullSending
from .slots.halves import SlotReceiving, SlotSending
from .slots.receive_slots import ReceiveSlots


def receiving_routes(opened: OpenTransfers, slots: ReceiveSlots, check_every: int = 0) -> dict[Route, ReceivingRoute]:
    """The receiving half of every route. One in `check_every` pulled chunks is compared; 0 compares none."""
    by_slots = SlotReceiving(opened, slots)
    return dict.fromkeys(SLOT_ROUTE_NAMES, by_slots) | {"pull": PullReceiving(opened, check_every)}


def sending_routes(opened: OpenAnswers) -> dict[Route, SendingRoute]:
    """The sending half of every route."""
    return dict.fromkeys(SLOT_ROUTE_NAMES, SlotSending()) | {"pull": PullSending(opened)}
