"""The routes through slots: the receiver lends slots of its staging, and the sender writes them."""

from __future__ import annotations

import abc
import logging
from dataclasses import dataclass, field

from kvbridge_proto.peer import FabricCard, Route, SlotLease

from ...dataplane.attached import Wait, WaitMove, WaitWrite
from ...dataplane.orders import SendSlot
from ...dataplane.resources import Resources, StagingEndpoint
from ...device import driver
from ...device.mapping import open_ipc
from ...device.staging import Span
from ...errors import PeerError
from ...exchange.route import Site

log = logging.getLogger("kvbridge.routes")


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a receiver may be written to, as its Hello said."""

    incarnation: str
    site: Site
    lane: int


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A receiver's slots over one route. `name` is the peer's in `endpoint`'s fabric, `serial` counts connections."""

    serial: int
    route: Route
    name: str
    base: int
    slot_bytes: int
    slots: int
    resources: Resources = field(repr=False)
    endpoint: StagingEndpoint

    def slot(self, lease: SlotLease, size_bytes: int) -> Span:
        """The slot lent under this lease."""
        return Span(self.base + lease.slot * self.slot_bytes, size_bytes)

    def places(self, local: SendSlot, lease: SlotLease, size_bytes: int) -> tuple[Span, Span | None]:
        """Where a chunk is gathered to, and where in host memory it is copied after that, or None."""
        return self.endpoint.staging_of(local).span(local.index, size_bytes), None

    def push(self, local: SendSlot, lease: SlotLease, size_bytes: int, notice: bytes, deadline: float) -> Wait | None:
        """Write our slot and the notice to the peer. Returns the wait for its end, if any. Raises FabricError."""
        ours, theirs = self.endpoint.staging_of(local).address(local.index), self.slot(lease, size_bytes).address
        return self.write(ours, theirs, size_bytes, notice, deadline)

    def probe(self, ours: Span, lane: Span, deadline: float) -> Wait:
        """Write a probe lane of ours to one of the peer's. Raises FabricError."""
        return self.write(ours.address, lane.address, lane.size_bytes, b"", deadline)

    def write(self, ours: int, theirs: int, size_bytes: int, notice: bytes, deadline: float) -> Wait:
        fabric = self.endpoint.fabric
        return WaitWrite(fabric, fabric.write(self.name, ours, theirs, size_bytes, notice, deadline))

    def close(self) -> None:
        """Give these slots up. No write to them over this route may be under way."""
        self.resources.leave(self.endpoint, self.name)


class SlotRoute(abc.ABC):
    """A route through slots."""

    name: Route
    target: type[Target] = Target
    is_on_gpus = False  # without a GPU on either side another route does the same
    is_by_fabric = True  # the fabric carries the chunk itself: doctor looks by which of its transports

    @abc.abstractmethod
    def why_not(self, sender: Site, receiver: Site) -> str:
        """The reason against this route, as far as two cards tell, "" if there is none."""

    def open(self, resources: Resources, landing: Landing, serial: int) -> Target:
        """Connect to the receiver's slots. Raises KVBridgeError."""
        card = self.card(landing.site)
        endpoint = self.join(resources, landing, card)
        return self.target(serial, self.name, card.name, card.base, card.slot_bytes, card.slots, resources, endpoint)

    def card(self, receiver: Site) -> FabricCard:
        """The card of the receiver's slots for this route."""
        return receiver.fabric

    def endpoint(self, resources: Resources) -> StagingEndpoint:
        """Our endpoint for this route: its slots are sent from and received into."""
        return resources.endpoint

    def join(self, resources: Resources, landing: Landing, card: FabricCard) -> StagingEndpoint:
        """Connect our fabric to the peer's. Raises KVBridgeError; otherwise the caller owes a `Resources.leave`."""
        incarnation, endpoint = landing.incarnation, self.endpoint(resources)
        if card.name != incarnation and not card.name.startswith(
            f"{incarnation}."
        ):  # a peer may not hand out another agent's card
            raise PeerError("bad_card", f"name: {card.name}, of {incarnation}")
        resources.join(endpoint, card.name, card.descriptor)
        return endpoint


def memories(sender: Site, receiver: Site) -> str:
    """Which memory two agents have their slots in, for messages."""
    return f"slots: sender {sender.fabric.memory}, receiver {receiver.fabric.memory}"


def machines(sender: str, receiver: str) -> str:
    """That two agents are on different hosts, by their kernels' boot ids, for messages."""
    return f"hosts: sender {sender}, receiver {receiver}"


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
    """The peer's slots, mapped by CUDA IPC for our GPU: the gather itself writes them. NIXL carries the notice."""

    name: Route = "direct"
    is_on_gpus, is_by_fabric = True, False

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


class NixlRoute(SlotRoute):
    """Slots in the same kind of memory on both sides, written by NIXL: host to host, or GPU to GPU."""

    name: Route = "nixl"

    def why_not(self, sender: Site, receiver: Site) -> str:
        return "" if sender.fabric.memory == receiver.fabric.memory else memories(sender, receiver)


@dataclass(frozen=True, slots=True, eq=False)
class HostTarget(Target):
    def places(self, local: SendSlot, lease: SlotLease, size_bytes: int) -> tuple[Span, Span | None]:
        host = self.endpoint.staging_of(local).span(local.index, size_bytes)
        gathered = self.resources.endpoint
        if gathered is self.endpoint:
            return host, None
        return gathered.staging_of(local).span(local.index, size_bytes), host


class HostRoute(SlotRoute):
    """Slots in host memory on both sides. An agent on a GPU copies between these and its slots on the GPU.

    NIXL would move VRAM to DRAM at half a GB/s.
    """

    name: Route = "host"
    is_on_gpus = True
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
