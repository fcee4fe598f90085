"""The data plane's resources: a copier, slots, fabrics. The data plane's thread makes, owns and closes them.

Slots and fabrics are made at the start if every peer needs them, or if peers may be on other hosts: to make them takes
seconds. Otherwise they are made when the first peer needs them. `pull` needs none.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from kvbridge_proto.peer import PROBE_LANES, DeviceCard, FabricCard

from ..device import driver
from ..device.copier import BlockCopier, CpuBlockCopier
from ..device.staging import Span, Staging, check_slots
from ..errors import FabricError, OperatorError
from ..exchange.route import READ_ROUTE_NAMES, SLOT_ROUTE_NAMES, Site
from ..options import AgentConfig
from ..transport.endpoint import beyond_loopback
from ..transport.fabric import Fabric
from ..transport.fabric_nixl import NixlFabric
from ..transport.lock import KERNEL
from ..transport.processes import own_process
from .orders import SendSlot

log = logging.getLogger("kvbridge.data_plane")

SCRATCH_BYTES = 4 << 20
MOST_KEPT = 2  # old stagings that rebuilds may keep: GPU memory for good, host memory until writes out of it have ended


@dataclass(slots=True, eq=False)
class Source:
    """Memory that we send from. `era` is that of the slots in it; `lanes` are the probe lanes that no proof uses."""

    staging: Staging
    era: int = 0
    lanes: deque[int] = field(default_factory=lambda: deque(range(PROBE_LANES)))


@dataclass(frozen=True, slots=True, eq=False)
class StagingEndpoint:
    """Slots in one kind of memory, the fabric that knows them and the copier that reaches them.

    `name` is what its fabric was called first. `sources` has the memory that we send from, the newest last. What
    comes before that is read by late writes.
    """

    name: str
    receive_slots: Staging
    fabric: Fabric
    copier: BlockCopier
    new_staging: Callable[[], Staging]
    sources: list[Source] = field(default_factory=list)

    @property
    def source(self) -> Source:
        return self.sources[-1]

    @property
    def send_slots(self) -> Staging:
        return self.source.staging

    def staging_of(self, local: SendSlot) -> Staging:
        """The memory that this slot is in."""
        return next(source.staging for source in self.sources if source.era == local.era)

    def add_source(self) -> None:
        """Allocate more memory to send from. Raises OperatorError or FabricError, with nothing added."""
        staging = self.new_staging()
        try:
            self.fabric.register(staging.base, staging.size_bytes, is_target=False)
        except BaseException:
            staging.close()
            raise
        self.sources.append(Source(staging))

    def drop_source(self, source: Source) -> None:
        """Give this memory back, unless a write or a proof still reads it."""
        if len(source.lanes) == PROBE_LANES and self.fabric.unregister(source.staging.base):
            self.sources.remove(source)
            source.staging.close()

    def close_sources(self) -> None:
        """The fabric is closed: nothing reads this memory any more."""
        for source in self.sources:
            source.staging.close()

    def card(self) -> FabricCard:
        return self._card(self.fabric.name, self.fabric.descriptor())

    def successor(self, name: str) -> tuple[FabricCard, Callable[[], None]]:
        """Prepare another fabric for peers: its card, and what to call to become it. Raises FabricError."""
        descriptor, become = self.fabric.successor(name)
        return self._card(name, descriptor), become

    def _card(self, name: str, descriptor: bytes) -> FabricCard:
        return FabricCard(
            kind=self.fabric.kind,
            name=name,
            memory=self.receive_slots.memory,
            descriptor=descriptor,
            base=self.receive_slots.base,
            slot_bytes=self.receive_slots.slot_bytes,
            slots=self.receive_slots.slots,
        )


@dataclass(frozen=True, slots=True)
class StagingEndpoints:
    """`endpoint` has the slots that rows are moved to and from. On a GPU, `host` may have twins in host memory."""

    endpoint: StagingEndpoint
    host: StagingEndpoint | None
    site: Site
    closing: ExitStack

    @property
    def all(self) -> tuple[StagingEndpoint, ...]:
        return (self.endpoint,) if self.host is None else (self.endpoint, self.host)

    def retire(self) -> int:
        """Close them, although frozen peers may still write to them. Returns how many bytes stay allocated."""
        for endpoint in self.all:
            endpoint.fabric.close()
        kept = sum(endpoint.receive_slots.seal() for endpoint in self.all)
        self.closing.close()
        return kept


@dataclass(slots=True)
class Resources:
    """A copier, and endpoints that can be replaced. Replaced ones stay until their writes have ended.

    `bare` is our site while there are no endpoints.
    """

    copier: BlockCopier
    bare: Site
    _make: Callable[[int], StagingEndpoints]  # makes the n-th endpoints
    _closing: ExitStack
    current: StagingEndpoints | None = None
    retired: list[StagingEndpoints] = field(default_factory=list)  # replaced, and perhaps written to
    _made: int = 0
    _kept_bytes: int = 0
    _joined: Counter[tuple[str, str]] = field(default_factory=Counter)
    _scratch: Staging | None = None

    @property
    def endpoint(self) -> StagingEndpoint:
        assert self.current is not None, "no slots were made"
        return self.current.endpoint

    @property
    def host(self) -> StagingEndpoint | None:
        return None if self.current is None else self.current.host

    @property
    def site(self) -> Site:
        return self.bare if self.current is None else self.current.site

    @property
    def scratch(self) -> Span:
        """SCRATCH_BYTES that several may write to at once, since nobody reads them.

        Raises OperatorError if there is no room.
        """
        if self._scratch is None:
            self._scratch = self.copier.staging(SCRATCH_BYTES, 1)
        return self._scratch.span(0)

    def stage(self) -> None:
        """Make endpoints, if there are none. Raises OperatorError or FabricError."""
        if self.current is not None:
            return
        began = time.monotonic()
        endpoints = self._make(0)
        receive_slots, send_slots = endpoints.endpoint.receive_slots, endpoints.endpoint.send_slots
        self.copier.make_room(receive_slots.slots + send_slots.slots)
        self.current = endpoints
        log.info(
            "made slots: receive_slots=%d send_slots=%d slot_bytes=%d memory=%s s=%.3f",
            receive_slots.slots,
            send_slots.slots,
            receive_slots.slot_bytes,
            receive_slots.memory,
            time.monotonic() - began,
        )

    def prepare(self) -> StagingEndpoints:
        """Make new endpoints, for `switch`. Raises FabricError, `rebuild_refused` if old ones keep too much memory."""
        staging_bytes = self.endpoint.receive_slots.size_bytes
        kept_bytes = self._kept_bytes + len(self.retired) * staging_bytes
        if kept_bytes >= MOST_KEPT * staging_bytes:
            reason = f"staging: rebuilds before this one keep, or wait for writes out of, {kept_bytes} bytes"
            raise FabricError("rebuild_refused", reason)
        self._made += 1
        return self._make(self._made)

    def switch(self, endpoints: StagingEndpoints) -> None:
        """Use these endpoints from now on."""
        if self.current is not None:
            self.retired.append(self.current)
        self.current = endpoints

    def renew_fabrics(self) -> Site:
        """Be another fabric for peers, with the same slots. Returns our new site. Raises FabricError."""
        assert self.current is not None
        self._made += 1
        name = f"{self.bare.fabric.name}.{self._made}"
        card, become = self.current.endpoint.successor(name)
        becoming, host_card = [become], None
        if self.current.host is not None:
            host_card, become = self.current.host.successor(f"{name}.host")
            becoming.append(become)
        for become in becoming:  # nothing fails from here on
            become()
        site = replace(self.current.site, fabric=card, host=host_card)
        self.current = replace(self.current, site=site)
        return site

    def close_retired(self) -> None:
        """Close replaced endpoints that have no write under way. No job may be moving rows."""
        for endpoints in [
            endpoints for endpoints in self.retired if not any(endpoint.fabric.is_busy for endpoint in endpoints.all)
        ]:
            self.retired.remove(endpoints)
            self._kept_bytes += endpoints.retire()

    def begin_era(self, era: int) -> None:
        """The newest send slots are those of this era from now on."""
        assert self.current is not None
        for endpoint in self.current.all:
            endpoint.source.era = era

    def add_sources(self) -> None:
        """Allocate other memory to send from, for `begin_era`.

        Raises OperatorError or FabricError: `rebuild_refused` if writes out of too much earlier memory go on.
        """
        assert self.current is not None
        if len(self.endpoint.sources) > MOST_KEPT:
            reason = (
                f"staging: late writes go on out of all send slots that were made, {len(self.endpoint.sources)} times"
            )
            raise FabricError("rebuild_refused", reason)
        with ExitStack() as undoing:
            for endpoint in self.current.all:
                endpoint.add_source()
                undoing.callback(endpoint.drop_source, endpoint.source)
            undoing.pop_all()

    def close_unused_sources(self, is_used: Callable[[int], bool]) -> None:
        """Give replaced memory back that no write reads any more. `is_used`: whether slots of this era are."""
        for endpoint in self.endpoints:
            for source in endpoint.sources[:-1]:
                if not is_used(source.era):
                    endpoint.drop_source(source)

    def join(self, endpoint: StagingEndpoint, name: str, descriptor: bytes) -> None:
        """Connect this endpoint's fabric to a peer's slots. Each join needs one `leave`. Raises FabricError."""
        endpoint.fabric.connect(name, descriptor)
        self._joined[endpoint.name, name] += 1

    def leave(self, endpoint: StagingEndpoint, name: str) -> None:
        """Undo one `join`. The last one disconnects the peer."""
        self._joined[endpoint.name, name] -= 1
        if not self._joined[endpoint.name, name]:
            del self._joined[endpoint.name, name]
            endpoint.fabric.disconnect(name)

    @property
    def endpoints(self) -> tuple[StagingEndpoint, ...]:
        """All endpoints whose fabrics must be polled."""
        return tuple(endpoint for endpoints in self._all for endpoint in endpoints.all)

    @property
    def _all(self) -> list[StagingEndpoints]:
        return self.retired if self.current is None else [self.current, *self.retired]

    def close(self) -> None:
        """Close the copier, then fabrics, then their memory. If one fails, the others are still closed."""
        with ExitStack() as last_first:
            if self._scratch is not None:
                last_first.callback(self._scratch.close)
            for endpoints in self._all:
                last_first.push(endpoints.closing)
            last_first.push(self._closing)


@dataclass(frozen=True, slots=True)
class StagingSize:
    """The size of staging: (receive_slots + send_slots + 2) * slot_bytes, with a probe slot for each direction."""

    slot_bytes: int
    receive_slots: int
    send_slots: int


READS = 4  # launches at once, of all transfers: while one reads the next are launched
# A chunk costs each agent about half a millisecond of Python, whatever its size. So fast links get large chunks.
# Three are the fewest of which one peer leaves any to the others (Shares).
ROOM_ON_GPU = StagingSize(128 << 20, 6, 3)
ROOM_IN_HOST = StagingSize(4 << 20, 32, 16)


def staging_size(config: AgentConfig, is_gpu: bool) -> StagingSize:
    """What the operator set, with defaults that suit the device."""
    usual = ROOM_ON_GPU if is_gpu else ROOM_IN_HOST
    return StagingSize(
        config.slot_bytes or usual.slot_bytes,
        config.receive_slots or usual.receive_slots,
        config.send_slots or usual.send_slots,
    )


def open_resources(config: AgentConfig, incarnation: str) -> Resources:
    """Resources on the device that the operator chose. Raises OperatorError or FabricError."""
    gpu = chosen_gpu(config.device)
    size = staging_size(config, gpu is not None)
    check_slots(size.slot_bytes, min(size.receive_slots, size.send_slots))
    with ExitStack() as closing:
        copier = _copier(gpu, size, config)
        closing.callback(copier.close)  # closed before any memory that its streams may use
        make = partial(_endpoints, incarnation, config, size, gpu, copier)
        resources = Resources(copier, _bare(incarnation, config, size, copier), make, closing.pop_all())
    if _needs_slots(config):
        try:
            resources.stage()
        except BaseException:
            resources.close()
            raise
    return resources


def reads_memory(config: AgentConfig) -> bool:
    """Whether a route is allowed by which agents of this host read each other's engine's memory."""
    return any(route in READ_ROUTE_NAMES for route in config.routes)


def _needs_slots(config: AgentConfig) -> bool:
    """Whether every peer will need slots, or agents of other hosts may."""
    by_slots = [route for route in config.routes if route in SLOT_ROUTE_NAMES]
    if config.routes[0] in by_slots or not config.share_memory:
        return True
    return bool(by_slots) and bool(beyond_loopback(config.listen, config.advertise, config.dial))


def _bare(incarnation: str, config: AgentConfig, size: StagingSize, copier: BlockCopier) -> Site:
    """Our site while there are no slots."""
    kind, memory = NixlFabric.kind, copier.memory
    card = FabricCard(
        kind=kind, name=incarnation, memory=memory, descriptor=b"", base=0, slot_bytes=size.slot_bytes, slots=0
    )
    return _site(config, card)


def _site(
    config: AgentConfig, card: FabricCard, host: FabricCard | None = None, device: DeviceCard | None = None
) -> Site:
    shares_memory = reads_memory(config) and config.share_memory
    try:
        machine = KERNEL.read_text().strip()
    except OSError:  # hidden, as by systemd's ProcSubset=pid
        if shares_memory:
            raise
        machine = ""
    return Site(card, host, device, config.routes, machine, shares_memory, _namespaces(), own_process())


def _namespaces() -> tuple[int, ...]:
    try:
        return tuple(os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "ipc"))
    except OSError:
        return ()


def _endpoints(
    incarnation: str, config: AgentConfig, size: StagingSize, gpu: driver.Gpu | None, copier: BlockCopier, number: int
) -> StagingEndpoints:
    name = f"{incarnation}.{number}" if number else incarnation
    with ExitStack() as closing:
        endpoint = _endpoint(name, config, size, gpu, copier, closing)
        host = None
        if gpu is not None and "host" in config.routes:
            host = _host_endpoint(f"{name}.host", config, size, closing)
        device = _device_card(gpu, endpoint) if gpu is not None and "direct" in config.routes else None
        site = _site(config, endpoint.card(), host.card() if host is not None else None, device)
        return StagingEndpoints(endpoint, host, site, closing.pop_all())


def chosen_gpu(device: str) -> driver.Gpu | None:
    """The GPU that `device` names, None for the CPU. Raises OperatorError if there is no such GPU."""
    if device == "cpu":
        return None
    try:
        return driver.Gpu.open("cuda" if device == "auto" else device)
    except OperatorError as error:
        if device == "auto" and error.code == "cuda_unavailable":
            return None
        raise


def _copier(gpu: driver.Gpu | None, size: StagingSize, config: AgentConfig) -> BlockCopier:
    if gpu is None:
        return CpuBlockCopier()
    from ..device.copier_gpu import GpuBlockCopier

    reads = reads_memory(config)
    at_once = READS if reads else 1  # a fill is a read too, whatever the routes
    return GpuBlockCopier(gpu, 1, size.slot_bytes, at_once, config.pull_ctas, only_fills=not reads, aside=True)


def _endpoint(
    name: str, config: AgentConfig, size: StagingSize, gpu: driver.Gpu | None, copier: BlockCopier, closing: ExitStack
) -> StagingEndpoint:
    receive_slots = copier.staging(size.slot_bytes, size.receive_slots)
    closing.callback(receive_slots.close)
    if gpu is None:
        fabric = NixlFabric(name, net_devices=config.net_devices)
    else:
        fabric = NixlFabric(name, memory="VRAM", device=gpu.ordinal, net_devices=config.net_devices)
    new_staging = partial(copier.staging, size.slot_bytes, size.send_slots)
    return _registered(StagingEndpoint(name, receive_slots, fabric, copier, new_staging), closing)


def _host_endpoint(name: str, config: AgentConfig, size: StagingSize, closing: ExitStack) -> StagingEndpoint:
    receive_slots = Staging.pinned(size.slot_bytes, size.receive_slots)
    closing.callback(receive_slots.close)
    fabric = NixlFabric(name, net_devices=config.net_devices)
    new_staging = partial(Staging.pinned, size.slot_bytes, size.send_slots)
    return _registered(StagingEndpoint(name, receive_slots, fabric, CpuBlockCopier(), new_staging), closing)


def _registered(endpoint: StagingEndpoint, closing: ExitStack) -> StagingEndpoint:
    closing.callback(endpoint.close_sources)
    closing.callback(endpoint.fabric.close)
    endpoint.fabric.register(endpoint.receive_slots.base, endpoint.receive_slots.size_bytes)
    endpoint.add_source()
    return endpoint


def _device_card(gpu: driver.Gpu, endpoint: StagingEndpoint) -> DeviceCard:
    machine = KERNEL.read_text().strip()
    return DeviceCard(machine=machine, uuid=gpu.uuid, payload=driver.ipc_export(endpoint.receive_slots.base))
