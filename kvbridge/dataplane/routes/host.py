"""Slots in host memory on both sides, of which a GPU's agent has twins: NIXL moves VRAM to DRAM at half a GB/s, so each
side makes the hop between its GPU and its host memory itself."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge_proto.peer import Route, SlotLease

from ...device.staging import Span
from ...exchange.route import Site
from ..resources import Resources, StagingEndpoint
from ..slots import LocalSlot
from .staged import Landing, SlotRoute, Target, memories


@dataclass(frozen=True, slots=True, eq=False)
class HostTarget(Target):
    def places(self, local: LocalSlot, lease: SlotLease, size_bytes: int) -> tuple[Span, Span | None]:
        host = self.endpoint.send_slots.span(local.index, size_bytes)
        gathered = self.equipment.endpoint
        return (host, None) if gathered is self.endpoint else (gathered.send_slots.span(local.index, size_bytes), host)


class HostRoute(SlotRoute):
    name: Route = "host"

    def against(self, ours: Site, theirs: Site) -> str:
        if ours.dram is None or theirs.dram is None:
            return "no slots in host memory on " + ("our side" if ours.dram is None else "the peer's side")
        return "" if "vram" in (ours.fabric.memory, theirs.fabric.memory) else f"{memories(ours, theirs)}; that is nixl"

    def open(self, equipment: Resources, landing: Landing, serial: int) -> Target:
        card = landing.site.dram
        assert card is not None
        endpoint = self.join(equipment, landing, card)
        return HostTarget(serial, self.name, card.name, card.base, card.slot_bytes, card.slots, equipment, endpoint)

    def endpoint(self, equipment: Resources) -> StagingEndpoint:
        return equipment.host or equipment.endpoint
