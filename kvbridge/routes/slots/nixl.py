"""Slots in the same kind of memory on both sides, written by NIXL: host to host, or GPU to GPU."""

from __future__ import annotations

from kvbridge_proto.peer import Route

from ...dataplane.resources import Resources
from ...exchange.route import Site
from .slot_route import Landing, SlotRoute, Target, memories


class NixlRoute(SlotRoute):
    name: Route = "nixl"

    def why_not(self, sender: Site, receiver: Site) -> str:
        return "" if sender.fabric.memory == receiver.fabric.memory else memories(sender, receiver)

    def open(self, resources: Resources, landing: Landing, serial: int) -> Target:
        card = landing.site.fabric
        endpoint = self.join(resources, landing, card)
        return Target(serial, self.name, card.name, card.base, card.slot_bytes, card.slots, resources, endpoint)
