"""Slots in host memory on both sides. An agent on a GPU copies between these and its slots on the GPU.

NIXL would move VRAM to DRAM at half a GB/s.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge_proto.peer import FabricCard, Route, SlotLease

from ...dataplane.resources import Resources, StagingEndpoint
from ...dataplane.slots import SendSlot
from ...device.staging import Span
from ...exchange.route import Site
from .slot_route import SlotRoute, Target, memories


@dataclass(frozen=True, slots=True, eq=False)
class HostTarget(Target):
    def places(self, local: SendSlot, lease: SlotLease, size_bytes: int) -> tuple[Span, Span | None]:
        host = self.endpoint.staging_of(local).span(local.index, size_bytes)
        gathered = self.resources.endpoint
        if gathered is self.endpoint:
            return host, None
        return gathered.staging_of(local).span(local.index, size_bytes), host


class HostRoute(SlotRoute):
    name: Route = "host"
    target = HostTarget

    def why_not(self, sender: Site, receiver: Site) -> str:
        if sender.dram is None or receiver.dram is None:
            return "no slots in host memory at the " + ("sender" if sender.dram is None else "receiver")
        is_on_gpu = "vram" in (sender.fabric.memory, receiver.fabric.memory)
        return "" if is_on_gpu else f"{memories(sender, receiver)}; that is nixl"

    def card(self, receiver: Site) -> FabricCard:
        assert receiver.dram is not None
        return receiver.dram

    def endpoint(self, resources: Resources) -> StagingEndpoint:
        return resources.host or resources.endpoint
