"""Routes' halves as tests make them and look into them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from kvbridge.exchange.receiver import Receiver
from kvbridge.routes.registry import receiving_routes
from kvbridge.routes.slots.halves import SlotReceiving
from kvbridge.routes.slots.receive_slots import ReceiveSlots


def make_receiver(
    slots: int, new_id: Callable[[], str], new_token: Callable[[], bytes], check_every: int = 0
) -> Receiver:
    """A receiver with all routes and so many slots."""
    routes = partial(receiving_routes, slots=ReceiveSlots(slots), check_every=check_every)
    return Receiver(routes, new_id, new_token)


def by_slots(receiving: Receiver) -> SlotReceiving:
    """Its half of the routes through slots."""
    return cast(SlotReceiving, receiving._route_of["nixl"])
