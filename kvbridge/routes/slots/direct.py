"""The peer's slots, mapped by CUDA IPC for our GPU: the gather itself writes them. NIXL carries the notice."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvbridge_proto.peer import Route, SlotLease

from ...dataplane.attached import Wait, WaitMove
from ...dataplane.resources import Resources
from ...dataplane.slots import SendSlot
from ...device import driver
from ...device.mapping import open_ipc
from ...device.staging import Span
from ...errors import PeerError
from ...exchange.route import Site
from .slot_route import Landing, SlotRoute, Target, machines, memories

log = logging.getLogger("kvbridge.routes")


@dataclass(frozen=True, slots=True, eq=False)
class DirectTarget(Target):
    """`base` is where the peer's allocation is mapped here."""

    def places(self, local: SendSlot, lease: SlotLease, size_bytes: int) -> tuple[Span, Span | None]:
        return self.slot(lease, size_bytes), None

    def push(self, local: SendSlot, lease: SlotLease, size_bytes: int, notice: bytes, deadline: float) -> None:
        self.endpoint.fabric.notify(self.name, notice)

    def probe(self, ours: Span, lane: Span, deadline: float) -> Wait:
        return WaitMove(self.resources.copier.copy(Span(ours.address, lane.size_bytes), lane))

    def close(self) -> None:
        Target.close(self)
        try:
            driver.ipc_close(self.base)
        except driver.CudaError as error:
            log.warning("a peer's memory stays mapped: peer=%s %s", self.name, error)


class DirectRoute(SlotRoute):
    name: Route = "direct"

    def why_not(self, sender: Site, receiver: Site) -> str:
        if sender.device is None or receiver.device is None:
            return memories(sender, receiver)
        if sender.device.machine != receiver.device.machine:
            return machines(sender.device.machine, receiver.device.machine)
        return ""

    def open(self, resources: Resources, landing: Landing, serial: int) -> Target:
        card = landing.site.fabric
        endpoint = self.join(resources, landing, card)
        try:
            base = _map(resources, landing.site)
        except BaseException:
            resources.leave(endpoint, card.name)
            raise
        return DirectTarget(serial, self.name, card.name, base, card.slot_bytes, card.slots, resources, endpoint)


def _map(resources: Resources, site: Site) -> int:
    """Map the peer's slots into our address space. Raises KVBridgeError if they are out of reach or incomplete."""
    ours, theirs = resources.site.device, site.device
    assert ours is not None and theirs is not None
    mapped = open_ipc(driver.Gpu.open(ours.uuid), theirs.payload, "the peer's slots", theirs.uuid)
    base, size_bytes = driver.range_of(mapped)
    needed = site.fabric.slot_bytes * (site.fabric.slots + 1)
    if base != mapped or size_bytes < needed:
        driver.ipc_close(mapped)
        raise PeerError("bad_card", f"slots: the card says {needed} bytes, the peer's allocation has {size_bytes}")
    return mapped
