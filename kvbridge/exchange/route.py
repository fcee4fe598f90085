"""Where an agent's slots are, and the route between two agents. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge_proto.peer import ROUTES, DeviceCard, FabricCard, Hello, Probe, ProcessCard, Route

READ_ROUTE_NAMES: tuple[Route, ...] = ("pull",)  # by which a receiver's agent reads the sender's engine's memory
# Routes through slots, in the order of `Route`.
SLOT_ROUTE_NAMES: tuple[Route, ...] = tuple(route for route in ROUTES if route not in READ_ROUTE_NAMES)


@dataclass(frozen=True, slots=True)
class Site:
    """Where an agent's slots are. `host` are their counterparts in host memory; `routes` are the allowed routes.

    `machine` is the kernel's boot id, "" if it is not known. `namespaces` are the inodes of the agent's PID and IPC
    namespace, empty if not known. `process` is the agent's. `shares_memory`: agents of this machine may read the
    engine's memory. An agent has no slots until a route needs them: `pull` does not.
    """

    fabric: FabricCard
    host: FabricCard | None = None
    device: DeviceCard | None = None
    routes: tuple[Route, ...] = SLOT_ROUTE_NAMES
    machine: str = ""
    shares_memory: bool = False
    namespaces: tuple[int, ...] = ()
    process: ProcessCard | None = None

    @classmethod
    def of(cls, hello: Hello) -> Site:
        shares_memory = bool(hello.machine) and hello.shares_memory
        return cls(hello.fabric, hello.host, hello.device, hello.routes, hello.machine, shares_memory)

    @property
    def has_slots(self) -> bool:
        return self.fabric.slots > 0

    def routes_to(self, can_pull: bool) -> tuple[Route, ...]:
        """The allowed routes to a peer; `can_pull` says whether we may read its memory."""
        return tuple(route for route in self.routes if can_pull or route in SLOT_ROUTE_NAMES)

    @property
    def dram(self) -> FabricCard | None:
        """The slots in host memory."""
        return self.fabric if self.fabric.memory == "dram" else self.host


@dataclass(frozen=True, slots=True)
class Rate:
    """The best measured rate, for transfers of `size_bytes`."""

    size_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Routed:
    """The proved route. `why` says why better ones were rejected.

    `probe` is what the sender wrote over it. `read` is the rate the receiver measured, on `pull`.
    """

    route: Route
    why: str = ""
    probe: Probe | None = None
    read: Rate | None = None

    @property
    def is_read(self) -> bool:
        """Whether the receiver reads the sender's blocks itself: no slots are lent."""
        return self.route in READ_ROUTE_NAMES

    @property
    def rate(self) -> Rate | None:
        if self.probe is not None:
            return Rate(self.probe.size_bytes, self.probe.bytes_per_s)
        return self.read


UNPROVED = Routed("nixl")
