"""Which ways there are between two agents' slots, the best first, and what stands against the others. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge_proto.peer import DeviceCard, FabricCard, Hello, Probe, Route

ROUTES: tuple[Route, ...] = ("direct", "nixl", "host")


@dataclass(frozen=True, slots=True)
class Site:
    """Where an agent's slots are. `host` is their twin in host memory, `routes` what its operator allows, in order.

    `machine` is the boot id of its kernel, "" where its engine's memory is not shared.
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
    def rate(self) -> Rate | None:
        if self.probe is not None:
            return Rate(self.probe.size_bytes, self.probe.bytes_per_s)
        return self.read


UNPROVED = Routed("nixl")


def options(ours: Site, theirs: Site) -> list[tuple[Route, str]]:
    """Every route in our order, with what stands against it as far as two cards can tell; nothing if it may be."""
    return [(route, _against(route, ours, theirs)) for route in ours.routes]


def is_pulled(ours: Site, theirs: Site) -> bool:
    """Whether the best way that two cards allow is that the receiver reads the sender's blocks itself."""
    return next((route for route, reason in options(ours, theirs) if not reason), None) == "pull"


def _against(route: Route, ours: Site, theirs: Site) -> str:
    if route not in theirs.routes:
        return f"{route}: the peer allows {', '.join(theirs.routes)}"
    memories = f"slots: ours {ours.fabric.memory}, theirs {theirs.fabric.memory}"
    if route == "pull":
        if not ours.machine or ours.machine != theirs.machine:
            return f"pull: machine: ours {ours.machine or 'not shared'}, theirs {theirs.machine or 'not shared'}"
        return "" if ours.fabric.memory == theirs.fabric.memory else f"pull: {memories}"
    if route == "nixl":
        return "" if ours.fabric.memory == theirs.fabric.memory else f"nixl: {memories}"
    if route == "host":
        if ours.dram is None or theirs.dram is None:
            return "host: no slots in host memory on " + ("our side" if ours.dram is None else "the peer's side")
        return "" if "vram" in (ours.fabric.memory, theirs.fabric.memory) else f"host: {memories}; that is nixl"
    if ours.device is None or theirs.device is None:
        return f"direct: {memories}"
    if ours.device.machine != theirs.device.machine:
        return f"direct: machine: ours {ours.device.machine}, theirs {theirs.device.machine}"
    return ""
