"""What the routes through slots share: the receiver lends slots of its staging, and the sender writes them."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field

from kvbridge_proto.peer import FabricCard, Route, SlotLease

from ...dataplane.attached import Wait, WaitWrite
from ...dataplane.resources import Resources, StagingEndpoint
from ...dataplane.slots import SendSlot
from ...device.staging import Span
from ...errors import PeerError
from ...exchange.route import Site


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
