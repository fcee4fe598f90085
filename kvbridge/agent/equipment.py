"""What the mover works with: a porter, slots, fabrics. Made and closed on the mover's thread, which owns all of it."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kvbridge_proto.peer import DeviceCard, FabricCard

from ..config import AgentConfig
from ..device import driver
from ..device.porter import Porter
from ..device.porter_cpu import CpuPorter
from ..device.staging import Staging
from ..errors import OperatorError
from ..exchange.route import Site
from ..transport.fabric import Fabric
from ..transport.fabric_nixl import NixlFabric

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Dock:
    """Slots in one kind of memory, the fabric that knows them and the porter that reaches them.

    `name` is what the fabric is called among all fabrics.
    """

    name: str
    inbound: Staging
    outbound: Staging
    fabric: Fabric
    porter: Porter

    def card(self) -> FabricCard:
        return FabricCard(
            kind=self.fabric.kind,
            memory=self.inbound.memory,
            descriptor=self.fabric.descriptor(),
            base=self.inbound.base,
            slot_bytes=self.inbound.slot_bytes,
            slots=self.inbound.slots,
        )


@dataclass(frozen=True, slots=True)
class Equipment:
    """`dock` holds the slots that rows are moved to and from; `host` their twins in host memory, on a GPU's agent."""

    porter: Porter
    dock: Dock
    host: Dock | None
    site: Site
    _closing: ExitStack
    _joined: Counter[tuple[str, str]] = field(default_factory=Counter)

    def join(self, dock: Dock, name: str, descriptor: bytes) -> None:
        """Let a peer's slots be written by this dock's fabric; leave as often. Raises FabricError."""
        dock.fabric.connect(name, descriptor)
        self._joined[dock.name, name] += 1

    def leave(self, dock: Dock, name: str) -> None:
        """The last one that leaves disconnects the peer."""
        self._joined[dock.name, name] -= 1
        if not self._joined[dock.name, name]:
            del self._joined[dock.name, name]
            dock.fabric.disconnect(name)

    @property
    def docks(self) -> tuple[Dock, ...]:
        return (self.dock,) if self.host is None else (self.dock, self.host)

    def close(self) -> None:
        """Fabrics first, then the memory they knew."""
        self._closing.close()


def host_name(boot: str) -> str:
    """What the fabric of an agent's host slots is called."""
    return f"{boot}.host"


@dataclass(frozen=True, slots=True)
class Room:
    """How much staging memory: (inbound + outbound + 2) * slot_bytes, a probe slot each."""

    slot_bytes: int
    inbound: int
    outbound: int


# A chunk costs either agent about half a millisecond of Python, whatever its size: large ones for fast links.
ROOM_ON_GPU = Room(128 << 20, 6, 2)
ROOM_IN_HOST = Room(4 << 20, 32, 16)


def room(config: AgentConfig, is_gpu: bool) -> Room:
    """What the operator said, and the rest as it suits the device."""
    usual = ROOM_ON_GPU if is_gpu else ROOM_IN_HOST
    return Room(
        config.slot_bytes or usual.slot_bytes,
        config.inbound_slots or usual.inbound,
        config.outbound_slots or usual.outbound,
    )


def equip(config: AgentConfig, boot: str) -> Equipment:
    """For the device that the operator chose. Raises OperatorError or FabricError."""
    with ExitStack() as closing:
        gpu = chosen_gpu(config.device)
        size = room(config, gpu is not None)
        porter = _porter(gpu, size)
        closing.callback(porter.close)  # should one of the next lines fail
        dock = _dock(boot, config, size, gpu, porter, closing)
        host = None
        if gpu is not None and "host" in config.routes:
            host = _host_dock(host_name(boot), config, size, closing)
        device = _device_card(gpu, dock) if gpu is not None and "direct" in config.routes else None
        closing.callback(porter.close)  # before anything that its streams may work on
        site = Site(dock.card(), host.card() if host is not None else None, device, config.routes)
        return Equipment(porter, dock, host, site, closing.pop_all())


def chosen_gpu(device: str) -> driver.Gpu | None:
    """The GPU that `device` names, None for the CPU. OperatorError if there is no such GPU."""
    if device == "cpu":
        return None
    try:
        return driver.Gpu.open("cuda" if device == "auto" else device)
    except OperatorError as error:
        if device == "auto" and error.code == "cuda_unavailable":
            return None
        raise


def _porter(gpu: driver.Gpu | None, size: Room) -> Porter:
    if gpu is None:
        return CpuPorter()
    from ..device.porter_gpu import GpuPorter

    return GpuPorter(gpu, size.inbound + size.outbound + 1, max(1 << 20, size.slot_bytes // 16))


def _dock(
    name: str, config: AgentConfig, size: Room, gpu: driver.Gpu | None, porter: Porter, closing: ExitStack
) -> Dock:
    inbound = porter.staging(size.slot_bytes, size.inbound)
    closing.callback(inbound.close)
    outbound = porter.staging(size.slot_bytes, size.outbound)
    closing.callback(outbound.close)
    if gpu is None:
        fabric = NixlFabric(name, net_devices=config.net_devices)
    else:
        fabric = NixlFabric(name, memory="VRAM", device=gpu.ordinal, net_devices=config.net_devices)
    return _registered(Dock(name, inbound, outbound, fabric, porter), closing)


def _host_dock(name: str, config: AgentConfig, size: Room, closing: ExitStack) -> Dock:
    inbound = Staging.pinned(size.slot_bytes, size.inbound)
    closing.callback(inbound.close)
    outbound = Staging.pinned(size.slot_bytes, size.outbound)
    closing.callback(outbound.close)
    fabric = NixlFabric(name, net_devices=config.net_devices)
    return _registered(Dock(name, inbound, outbound, fabric, CpuPorter()), closing)


def _registered(dock: Dock, closing: ExitStack) -> Dock:
    closing.callback(dock.fabric.close)
    dock.fabric.register(dock.inbound.base, dock.inbound.size_bytes)
    dock.fabric.register(dock.outbound.base, dock.outbound.size_bytes, is_target=False)
    return dock


def _device_card(gpu: driver.Gpu, dock: Dock) -> DeviceCard:
    machine = BOOT_ID.read_text().strip()
    return DeviceCard(machine=machine, uuid=gpu.uuid, payload=driver.ipc_export(dock.inbound.base))
