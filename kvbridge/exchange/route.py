"""What agents tell each other of where their slots are, and by which route one reaches the other. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge_proto.peer import DeviceCard, FabricCard, Hello, Probe, Route

ROUTES: tuple[Route, ...] = ("direct", "nixl", "host")


@dataclass(frozen=True, slots=True)
class Site:
    """Where an agent's slots are. `host` is their twin in host memory, `routes` what its operator allows, in order.

    `machine` is the boot id of its kernel, "" where its engine's memory is not shared. While all its peers are read, or
    read it, an agent has no slots.
    """

    fabric: FabricCard
    host: FabricCard | None = None
    device: DeviceCard | None = None
    routes: tuple[Route, ...] = ROUTES
    machine: str = ""

    @classmethod
    def of(cls, hello: Hello) -> Site:
        return cls(hello.fabric, hello.host, hello.device, hello.routes, hello.machine)

    @property
    def has_slots(self) -> bool:
        return self.fabric.slots > 0

    def routes_to(self, can_pull: bool) -> tuple[Route, ...]:
        """What is allowed towards a peer that we may read ourselves, or may not."""
        return tuple(route for route in self.routes if can_pull or not Routed(route).is_pulled)

    @property
    def dram(self) -> FabricCard | None:
        """The slots in host memory."""
        return self.fabric if self.fabric.memory == "dram" else self.host


@dataclass(frozen=True, slots=True)
class Rate:
    """What was measured: so many bytes at once, at best."""

    size_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Routed:
    """The way that was proved. `why` says what stood against the better ones.

    `probe` is what its sender wrote by it, `read` what its receiver measured where it reads itself.
    """

    route: Route
    why: str = ""
    probe: Probe | None = None
    read: Rate | None = None

    @property
    def is_pulled(self) -> bool:
        """Whether the receiver reads the sender's blocks itself: no slots are lent."""
        return self.route == "pull"

    @property
    def rate(self) -> Rate | None:
        if self.probe is not None:
            return Rate(self.probe.size_bytes, self.probe.bytes_per_s)
        return self.read


UNPROVED = Routed("nixl")
