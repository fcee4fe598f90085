"""What routes through slots have in common: the receiver lends slots of its staging, the sender writes them."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field

from kvbridge_proto.peer import FabricCard, Route, SlotLease

from ...device.staging import Span
from ...errors import PeerError
from ...exchange.route import Site
from ..awaits import Wait, WaitWrite
from ..resources import Resources, StagingEndpoint
from ..slots import LocalSlot


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a receiver may be written to, as its Hello said."""

    incarnation: str
    site: Site
    lane: int


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A receiver's slots by one route. `name` is what `endpoint`'s fabric calls the peer, `serial` which connect it is
    of."""

    serial: int
    route: Route
    name: str
    base: int
    slot_bytes: int
    slots: int
    equipment: Resources = field(repr=False)
    endpoint: StagingEndpoint

    def slot(self, lease: SlotLease, size_bytes: int) -> Span:
        """The slot lent under this lease."""
        return Span(self.base + lease.slot * self.slot_bytes, size_bytes)

    def places(self, local: LocalSlot, lease: SlotLease, size_bytes: int) -> tuple[Span, Span | None]:
        """Where a chunk is gathered to, and where it is copied to in host memory after that, if it is."""
        return self.endpoint.send_slots.span(local.index, size_bytes), None

    def push(self, local: LocalSlot, lease: SlotLease, size_bytes: int, notice: bytes, deadline: float) -> Wait | None:
        """Write our slot to the peer's, notice with it; what to wait for, if that is not over. Raises FabricError."""
        ours, theirs = self.endpoint.send_slots.address(local.index), self.slot(lease, size_bytes).address
        return self.write(ours, theirs, size_bytes, notice, deadline)

    def probe(self, ours: Span, lane: Span, deadline: float) -> Wait:
        """Write a lane of ours to one of the peer's. Raises FabricError."""
        return self.write(ours.address, lane.address, lane.size_bytes, b"", deadline)

    def write(self, ours: int, theirs: int, size_bytes: int, notice: bytes, deadline: float) -> Wait:
        fabric = self.endpoint.fabric
        return WaitWrite(fabric, fabric.write(self.name, ours, theirs, size_bytes, notice, deadline))

    def close(self) -> None:
        """Nothing is written to these slots by this route any more."""
        self.equipment.leave(self.endpoint, self.name)


class SlotRoute(abc.ABC):
    """A route through slots."""

    name: Route

    @abc.abstractmethod
    def against(self, ours: Site, theirs: Site) -> str:
        """What stands against it, as far as two cards can tell; nothing if it may be."""

    @abc.abstractmethod
    def open(self, equipment: Resources, landing: Landing, serial: int) -> Target:
        """Connect. Raises KVBridgeError."""

    def endpoint(self, equipment: Resources) -> StagingEndpoint:
        """Whose slots of ours it leaves from and lands in."""
        return equipment.endpoint

    def join(self, equipment: Resources, landing: Landing, card: FabricCard) -> StagingEndpoint:
        """Let our fabric know the peer's. Raises KVBridgeError; else `Resources.leave` is owed."""
        incarnation, endpoint = landing.incarnation, self.endpoint(equipment)
        if card.name != incarnation and not card.name.startswith(
            f"{incarnation}."
        ):  # another agent's is not this one's to give
            raise PeerError("bad_card", f"name: {card.name}, of {incarnation}")
        equipment.join(endpoint, card.name, card.descriptor)
        return endpoint


def memories(ours: Site, theirs: Site) -> str:
    """In which memory two agents have their slots, for people."""
    return f"slots: ours {ours.fabric.memory}, theirs {theirs.fabric.memory}"
