"""Slots in the same kind of memory on both sides, written by NIXL: host to host, or GPU to GPU."""

from __future__ import annotations

from kvbridge_proto.peer import Route

from ...exchange.route import Site
from .slot_route import SlotRoute, memories


class NixlRoute(SlotRoute):
    name: Route = "nixl"

    def why_not(self, sender: Site, receiver: Site) -> str:
        return "" if sender.fabric.memory == receiver.fabric.memory else memories(sender, receiver)
