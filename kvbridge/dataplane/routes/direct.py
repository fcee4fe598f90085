"""The peer's slots mapped into our GPU's address space by CUDA IPC: the gather is the write. NIXL brings the notice."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvbridge_proto.peer import Route, SlotLease

from ...device import driver
from ...device.mapping import open_ipc
from ...device.staging import Span
from ...errors import PeerError
from ...exchange.route import Site
from ..awaits import Wait, WaitMove
from ..resources import Resources
from ..slots import LocalSlot
from .staged import Landing, SlotRoute, Target, memories

log = logging.getLogger("kvbridge.routes")


@dataclass(frozen=True, slots=True, eq=False)
class DirectTarget(Target):
    """`base` is where the peer's allocation is mapped here."""

    def places(self, local: LocalSlot, lease: SlotLease, size_bytes: int) -> tuple[Span, Span | None]:
        return self.slot(lease, size_bytes), None

    def push(self, local: LocalSlot, lease: SlotLease, size_bytes: int, notice: bytes, deadline: float) -> None:
        self.endpoint.fabric.notify(self.name, notice)

    def probe(self, ours: Span, lane: Span, deadline: float) -> Wait:
        return WaitMove(self.equipment.copier.copy(Span(ours.address, lane.size_bytes), lane))

    def close(self) -> None:
        Target.close(self)
        try:
            driver.ipc_close(self.base)
        except driver.CudaError as error:
            log.warning("a peer's memory stays mapped: peer=%s %s", self.name, error)


class DirectRoute(SlotRoute):
    name: Route = "direct"

    def against(self, ours: Site, theirs: Site) -> str:
        if ours.device is None or theirs.device is None:
            return memories(ours, theirs)
        if ours.device.machine != theirs.device.machine:
            return f"machine: ours {ours.device.machine}, theirs {theirs.device.machine}"
        return ""

    def open(self, equipment: Resources, landing: Landing, serial: int) -> Target:
        card = landing.site.fabric
        endpoint = self.join(equipment, landing, card)
        try:
            base = _map(equipment, landing.site)
        except BaseException:
            equipment.leave(endpoint, card.name)
            raise
        return DirectTarget(serial, self.name, card.name, base, card.slot_bytes, card.slots, equipment, endpoint)


def _map(equipment: Resources, site: Site) -> int:
    """The peer's slots in our address space. Raises KVBridgeError if they are out of reach, or not all there."""
    ours, theirs = equipment.site.device, site.device
    assert ours is not None and theirs is not None
    mapped = open_ipc(driver.Gpu.open(ours.uuid), theirs.payload, "the peer's slots", theirs.uuid)
    base, size_bytes = driver.range_of(mapped)
    needed = site.fabric.slot_bytes * (site.fabric.slots + 1)
    if base != mapped or size_bytes < needed:
        driver.ipc_close(mapped)
        raise PeerError("bad_card", f"slots: the card says {needed} bytes, the peer's allocation has {size_bytes}")
    return mapped
