"""What the mover works with: a porter, slots, fabrics. Made and closed on the mover's thread, which owns all of it.

Slots and fabrics are made when a peer needs them, at the start where every peer will: who reads and is read needs none.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from kvbridge_proto.peer import PROBE_LANES, DeviceCard, FabricCard, Route

from ..device import driver
from ..device.copier import BlockCopier
from ..device.copier_cpu import CpuBlockCopier
from ..device.staging import Span, Staging, check_slots
from ..errors import FabricError, OperatorError
from ..exchange.route import Site
from ..options import AgentConfig
from ..transport.fabric import Fabric
from ..transport.fabric_nixl import NixlFabric
from ..transport.lock import KERNEL

PULL: Route = "pull"
SCRATCH_BYTES = 4 << 20
MOST_KEPT = 2  # stagings that rebuilds may keep: of a GPU for good, host memory while something is written out of it


@dataclass(frozen=True, slots=True)
class StagingEndpoint:
    """Slots in one kind of memory, the fabric that knows them and the porter that reaches them.

    `name` is what the fabric is called among all fabrics. `lanes` are those of `outbound` that no proof writes out of.
    """

    name: str
    inbound: Staging
    outbound: Staging
    fabric: Fabric
    porter: BlockCopier
    lanes: deque[int] = field(default_factory=lambda: deque(range(PROBE_LANES)), compare=False)

    def card(self) -> FabricCard:
        return FabricCard(
            kind=self.fabric.kind,
            name=self.name,
            memory=self.inbound.memory,
            descriptor=self.fabric.descriptor(),
            base=self.inbound.base,
            slot_bytes=self.inbound.slot_bytes,
            slots=self.inbound.slots,
        )


@dataclass(frozen=True, slots=True)
class StagingEndpoints:
    """`dock` holds the slots that rows are moved to and from; `host` their twins in host memory, on a GPU's agent."""

    dock: StagingEndpoint
    host: StagingEndpoint | None
    site: Site
    closing: ExitStack

    @property
    def all(self) -> tuple[StagingEndpoint, ...]:
        return (self.dock,) if self.host is None else (self.dock, self.host)

    def retire(self) -> int:
        """End them although peers that stand still may write to them yet. Returns how many bytes that keeps."""
        for dock in self.all:
            dock.fabric.close()
        kept = sum(dock.inbound.seal() for dock in self.all)
        self.closing.close()
        return kept


@dataclass(slots=True)
class Resources:
    """A porter, and docks that can be made anew; those of before stay until what they write has ended.

    `bare` is our site while there are no docks.
    """

    porter: BlockCopier
    bare: Site
    _make: Callable[[int], StagingEndpoints]  # the n-th
    _closing: ExitStack
    current: StagingEndpoints | None = None
    _retired: list[StagingEndpoints] = field(default_factory=list)
    _made: int = 0
    _kept_bytes: int = 0
    _joined: Counter[tuple[str, str]] = field(default_factory=Counter)
    _scratch: Staging | None = None

    @property
    def dock(self) -> StagingEndpoint:
        assert self.current is not None, "no slots were made"
        return self.current.dock

    @property
    def host(self) -> StagingEndpoint | None:
        return None if self.current is None else self.current.host

    @property
    def site(self) -> Site:
        return self.bare if self.current is None else self.current.site

    @property
    def scratch(self) -> Span:
        """SCRATCH_BYTES that anything may be written to, by several at once: nobody reads them.

        OperatorError if there is no room.
        """
        if self._scratch is None:
            self._scratch = self.porter.staging(SCRATCH_BYTES, 1)
        return self._scratch.span(0)

    def stage(self) -> None:
        """See to it that there are docks. Raises OperatorError or FabricError."""
        if self.current is None:
            docks = self._make(0)
            self.porter.make_room(docks.dock.inbound.slots + docks.dock.outbound.slots)
            self.current = docks

    def prepare(self) -> StagingEndpoints:
        """Other docks, which nobody knows yet. Raises FabricError, `rebuild_refused` where it would keep too much."""
        staging_bytes = self.dock.inbound.size_bytes
        kept_bytes = self._kept_bytes + len(self._retired) * staging_bytes
        if kept_bytes >= MOST_KEPT * staging_bytes:
            reason = f"staging: rebuilds before this one keep, or wait for writes out of, {kept_bytes} bytes"
            raise FabricError("rebuild_refused", reason)
        self._made += 1
        return self._make(self._made)

    def switch(self, docks: StagingEndpoints) -> None:
        """Work with these from here on."""
        if self.current is not None:
            self._retired.append(self.current)
        self.current = docks

    def close_retired(self) -> None:
        """Close the docks of before that nothing is written from any more. No job may be at work in memory."""
        for docks in [docks for docks in self._retired if not any(dock.fabric.is_busy for dock in docks.all)]:
            self._retired.remove(docks)
            self._kept_bytes += docks.retire()

    def join(self, dock: StagingEndpoint, name: str, descriptor: bytes) -> None:
        """Let a peer's slots be written by this dock's fabric; leave as often. Raises FabricError."""
        dock.fabric.connect(name, descriptor)
        self._joined[dock.name, name] += 1

    def leave(self, dock: StagingEndpoint, name: str) -> None:
        """The last one that leaves disconnects the peer."""
        self._joined[dock.name, name] -= 1
        if not self._joined[dock.name, name]:
            del self._joined[dock.name, name]
            dock.fabric.disconnect(name)

    @property
    def has_retired(self) -> bool:
        return bool(self._retired)

    @property
    def docks(self) -> tuple[StagingEndpoint, ...]:
        """All whose fabrics want to be polled."""
        return tuple(dock for docks in self._all for dock in docks.all)

    @property
    def _all(self) -> list[StagingEndpoints]:
        return self._retired if self.current is None else [self.current, *self._retired]

    def close(self) -> None:
        """The porter, then fabrics, then the memory they knew: all of it, whatever goes wrong with one."""
        with ExitStack() as last_first:
            if self._scratch is not None:
                last_first.callback(self._scratch.close)
            for docks in self._all:
                last_first.push(docks.closing)
            last_first.push(self._closing)


@dataclass(frozen=True, slots=True)
class StagingSize:
    """How much staging memory: (inbound + outbound + 2) * slot_bytes, a probe slot each."""

    slot_bytes: int
    inbound: int
    outbound: int


# A chunk costs either agent about half a millisecond of Python, whatever its size: large ones for fast links.
PULLS = 4  # at once: while one is read the next are launched
ROOM_ON_GPU = StagingSize(128 << 20, 6, 2)
ROOM_IN_HOST = StagingSize(4 << 20, 32, 16)


def room(config: AgentConfig, is_gpu: bool) -> StagingSize:
    """What the operator said, and the rest as it suits the device."""
    usual = ROOM_ON_GPU if is_gpu else ROOM_IN_HOST
    return StagingSize(
        config.slot_bytes or usual.slot_bytes,
        config.inbound_slots or usual.inbound,
        config.outbound_slots or usual.outbound,
    )


def equip(config: AgentConfig, incarnation: str) -> Resources:
    """For the device that the operator chose. Raises OperatorError or FabricError."""
    gpu = chosen_gpu(config.device)
    size = room(config, gpu is not None)
    check_slots(size.slot_bytes, min(size.inbound, size.outbound))
    with ExitStack() as closing:
        porter = _porter(gpu, size, config)
        closing.callback(porter.close)  # before anything that its streams may work on
        make = partial(_docks, incarnation, config, size, gpu, porter)
        equipment = Resources(porter, _bare(incarnation, config, size, porter), make, closing.pop_all())
    if config.routes[0] != PULL or not config.share_memory:  # every peer will need slots
        try:
            equipment.stage()
        except BaseException:
            equipment.close()
            raise
    return equipment


def _bare(incarnation: str, config: AgentConfig, size: StagingSize, porter: BlockCopier) -> Site:
    """As long as there are no slots."""
    kind, memory = NixlFabric.kind, porter.memory
    card = FabricCard(
        kind=kind, name=incarnation, memory=memory, descriptor=b"", base=0, slot_bytes=size.slot_bytes, slots=0
    )
    return Site(card, routes=config.routes, machine=_machine(config))


def _machine(config: AgentConfig) -> str:
    return KERNEL.read_text().strip() if PULL in config.routes and config.share_memory else ""


def _docks(
    incarnation: str, config: AgentConfig, size: StagingSize, gpu: driver.Gpu | None, porter: BlockCopier, number: int
) -> StagingEndpoints:
    name = f"{incarnation}.{number}" if number else incarnation
    with ExitStack() as closing:
        dock = _dock(name, config, size, gpu, porter, closing)
        host = None
        if gpu is not None and "host" in config.routes:
            host = _host_dock(f"{name}.host", config, size, closing)
        device = _device_card(gpu, dock) if gpu is not None and "direct" in config.routes else None
        site = Site(dock.card(), host.card() if host is not None else None, device, config.routes, _machine(config))
        return StagingEndpoints(dock, host, site, closing.pop_all())


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


def _porter(gpu: driver.Gpu | None, size: StagingSize, config: AgentConfig) -> BlockCopier:
    if gpu is None:
        return CpuBlockCopier()
    from ..device.copier_gpu import GpuBlockCopier

    pulls, table_bytes = PULLS if PULL in config.routes else 0, max(1 << 20, size.slot_bytes // 16)
    return GpuBlockCopier(gpu, 1, table_bytes, pulls, config.pull_ctas, aside=True)


def _dock(
    name: str, config: AgentConfig, size: StagingSize, gpu: driver.Gpu | None, porter: BlockCopier, closing: ExitStack
) -> StagingEndpoint:
    inbound = porter.staging(size.slot_bytes, size.inbound)
    closing.callback(inbound.close)
    outbound = porter.staging(size.slot_bytes, size.outbound)
    closing.callback(outbound.close)
    if gpu is None:
        fabric = NixlFabric(name, net_devices=config.net_devices)
    else:
        fabric = NixlFabric(name, memory="VRAM", device=gpu.ordinal, net_devices=config.net_devices)
    return _registered(StagingEndpoint(name, inbound, outbound, fabric, porter), closing)


def _host_dock(name: str, config: AgentConfig, size: StagingSize, closing: ExitStack) -> StagingEndpoint:
    inbound = Staging.pinned(size.slot_bytes, size.inbound)
    closing.callback(inbound.close)
    outbound = Staging.pinned(size.slot_bytes, size.outbound)
    closing.callback(outbound.close)
    fabric = NixlFabric(name, net_devices=config.net_devices)
    return _registered(StagingEndpoint(name, inbound, outbound, fabric, CpuBlockCopier()), closing)


def _registered(dock: StagingEndpoint, closing: ExitStack) -> StagingEndpoint:
    closing.callback(dock.fabric.close)
    dock.fabric.register(dock.inbound.base, dock.inbound.size_bytes)
    dock.fabric.register(dock.outbound.base, dock.outbound.size_bytes, is_target=False)
    return dock


def _device_card(gpu: driver.Gpu, dock: StagingEndpoint) -> DeviceCard:
    machine = KERNEL.read_text().strip()
    return DeviceCard(machine=machine, uuid=gpu.uuid, payload=driver.ipc_export(dock.inbound.base))
