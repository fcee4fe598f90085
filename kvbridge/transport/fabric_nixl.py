"""The fabric over NIXL: UCX writes between agents' staging, polled to their end by one thread.

Speaks to NIXL's bindings, not to its Python agent: that one fixes pthrDelay at 0, which spins a core while idle,
and wraps in pickle what we never use.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import FabricError
from .fabric import FabricEvent, Noticed, WriteFailed, WriteLate, Wrote, not_registered

log = logging.getLogger("kvbridge.fabric")

# How often NIXL's progress thread looks by itself; events wake it in between. 0, NIXL's default, means "spin".
PROGRESS_DELAY_US = 10_000
DESCRIPTOR_BYTES = 1 << 16
# Peers that were left and may come back. To remove one and to load it again leaves a TCP connection of UCX open on
# both sides for as long as both live (nixl 1.5.1, tests/system/faults): an engine's every restart would cost one.
IDLE_PEERS = 32
# Between two tries to connect to a peer anew. Each that finds nobody leaves an ended socket open, for good
# (nixl 1.5.1), and when a peer dies all that was gathered for it would try, one after the other.
HEAL_S = 0.2
# A descriptor is NIXL's metadata behind the number of the device that the memory is on.
DEVICE = struct.Struct("<I")


@dataclass(slots=True)
class _Peer:
    """A remote agent that NIXL knows."""

    descriptor: bytes
    device: int = 0  # that its memory is on, by its own count: part of every address
    writes: int = 0
    is_known: bool = True  # to NIXL
    is_failed: bool = False
    heals_at: float = 0.0  # when it may be connected to anew
    is_leaving: bool = False


@dataclass(slots=True)
class _Write:
    boot: str
    handle: int
    deadline: float
    ended: FabricEvent | None = None
    is_late: bool = False


class NixlFabric:
    """Keeps the contract of `fabric.Fabric`. The NIXL agent is named by our boot: unique among all agents, ever.

    `net_devices` restricts UCX to these network devices, e.g. `lo`; its tcp otherwise listens on every interface.
    """

    kind = "nixl"

    def __init__(
        self,
        boot: str,
        *,
        memory: Literal["DRAM", "VRAM"] = "DRAM",
        device: int = 0,
        net_devices: str | None = None,
        idle_peers: int = IDLE_PEERS,
    ) -> None:
        # Neither library has another switch; what they would print comes back to us as exceptions anyway.
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
        os.environ["UCX_DEBUG_SIGNO"] = "0"  # else SIGHUP, our reload, is UCX's: it would log everything it does
        import nixl._bindings as nixl

        self._nixl: Any = nixl
        self._boot = boot
        self._memory = nixl.DRAM_SEG if memory == "DRAM" else nixl.VRAM_SEG
        self._device = device
        self._idle_peers = idle_peers
        self._regions: list[tuple[int, int, bool]] = []
        self._registered: list[Any] = []
        self._peers: dict[str, _Peer] = {}
        self._writes: dict[int, _Write] = {}
        self._count = 0
        self._agent, self._backend = self._open(net_devices)

    def _open(self, net_devices: str | None) -> tuple[Any, int]:
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True  # without it a target that does not poll would stall its writers
        config.useListenThread = False  # it binds 0.0.0.0 and trusts everybody
        config.pthrDelay = PROGRESS_DELAY_US
        if net_devices:  # by NIXL's own option only the first of several would count
            os.environ["UCX_NET_DEVICES"] = net_devices
        try:
            agent = self._nixl.nixlAgent(self._boot, config)
            return agent, agent.createBackend("UCX", {})
        except _errors(self._nixl) as error:
            reason = f"NIXL's UCX backend did not start with net_devices {net_devices}: {_text(error)}"
            raise FabricError("fabric_unavailable", reason) from error

    def register(self, address: int, size: int, *, is_target: bool = True) -> None:
        # NIXL would take an overlap and then fail to find the larger region.
        if size < 1 or any(address < end and begin < address + size for begin, end, _ in self._regions):
            raise FabricError("region_overlaps", f"region: {size} bytes are empty or overlap another")
        region = self._nixl.nixlRegDList(self._memory, [(address, size, self._device, "")])
        try:
            self._agent.registerMem(region, [self._backend])
        except _errors(self._nixl) as error:
            raise FabricError("registration_failed", f"region: {size} bytes: {_text(error)}") from error
        self._registered.append(region)
        self._regions.append((address, address + size, is_target))

    def descriptor(self) -> bytes:
        targets = [(begin, end - begin, self._device, "") for begin, end, is_target in self._regions if is_target]
        if not targets:
            raise FabricError("descriptor_failed", "descriptor: no memory was registered for peers to write")
        described = self._nixl.nixlRegDList(self._memory, targets)
        try:
            found: bytes = self._agent.getLocalPartialMD(described, True, [self._backend])
        except _errors(self._nixl) as error:
            raise FabricError("descriptor_failed", f"descriptor: {_text(error)}") from error
        if not found.startswith(_header(self._boot)):
            raise FabricError("descriptor_failed", f"this NIXL writes descriptors we cannot check: {len(found)} bytes")
        return DEVICE.pack(self._device) + found

    def connect(self, boot: str, descriptor: bytes) -> None:
        # NIXL adds what it loads to whatever agent the descriptor names: look at the name before.
        if len(descriptor) > DESCRIPTOR_BYTES:
            raise FabricError(
                "descriptor_malformed", f"descriptor_bytes: got {len(descriptor)}, limit {DESCRIPTOR_BYTES}"
            )
        metadata = descriptor[DEVICE.size :]
        if not metadata.startswith(_header(boot)):
            raise FabricError("descriptor_of_another_boot", f"boot: peer says {boot}, {_named(metadata)}")
        if boot == self._boot:
            raise FabricError("descriptor_of_another_boot", f"boot: {boot} is our own")
        peer = self._peers.get(boot)
        if peer is not None:
            if peer.descriptor == descriptor:
                peer.is_leaving = False
                peer.heals_at = 0.0  # somebody greets us in its name: it is there
                return
            if peer.writes:
                raise FabricError("peer_busy", f"peer: {peer.writes} writes to {boot} are still under way")
            self._forget(boot)
        try:
            self._agent.loadRemoteMD(metadata)
        except _errors(self._nixl) as error:
            raise FabricError("descriptor_malformed", f"descriptor of {boot}: {_text(error)}") from error
        self._peers[boot] = _Peer(descriptor, *DEVICE.unpack_from(descriptor))

    def disconnect(self, boot: str) -> None:
        peer = self._peers.get(boot)
        if peer is not None:
            peer.is_leaving = True
            self._leave(boot, peer)

    def write(
        self, boot: str, local_address: int, remote_address: int, size: int, notice: bytes, deadline: float
    ) -> int:
        peer = self._writable(boot)
        if size < 1:
            raise FabricError("memory_not_registered", f"write: {size} bytes")
        nixl = self._nixl
        try:
            # 2 us for one descriptor (Xeon, 2 vCPU, 2026-11); a prepared slot grid would save nothing.
            handle = self._agent.createXferReq(
                nixl.NIXL_WRITE,
                nixl.nixlXferDList(self._memory, [(local_address, size, self._device)]),
                nixl.nixlXferDList(self._memory, [(remote_address, size, peer.device)]),
                boot,
                notice,
                [self._backend],
            )
        except nixl.nixlNotFoundError as error:
            raise not_registered(self._regions, local_address, size, boot) from error
        except _errors(nixl) as error:
            raise FabricError("write_refused", f"write to {boot}: {_text(error)}") from error
        self._count += 1
        write = self._writes[self._count] = _Write(boot, handle, deadline)
        peer.writes += 1
        try:
            if self._agent.postXferReq(handle, notice) == nixl.NIXL_SUCCESS:
                write.ended = Wrote(self._count)
        except _errors(nixl) as error:
            # Some of it may have left: it is a write that failed, not one that was never posted.
            write.ended = WriteFailed(self._count, _text(error))
        return self._count

    def notify(self, boot: str, notice: bytes) -> None:
        self._writable(boot)
        try:
            self._agent.genNotif(boot, notice, [self._backend])
        except _errors(self._nixl) as error:
            self._peers[boot].is_failed = True
            raise FabricError("peer_lost", f"notice to {boot}: {_text(error)}") from error

    def poll(self, now: float) -> list[FabricEvent]:
        events: list[FabricEvent] = []
        for number, write in list(self._writes.items()):
            if event := self._advance(number, write, now):
                events.append(event)
        events.extend(Noticed(payload) for payload in self._notices())
        return events

    @property
    def plugins(self) -> list[str]:
        """What NIXL could load besides UCX."""
        return list(self._agent.getAvailPlugins())

    @property
    def known(self) -> list[str]:
        """The boots that NIXL knows, those that were left longest ago first."""
        return list(self._peers)

    @property
    def is_busy(self) -> bool:
        return bool(self._writes)

    def close(self) -> None:
        """Destroying the agent is the only thing that stops writes under way for certain."""
        if self._agent is None:
            return
        for write in self._writes.values():
            self._release(write.handle)
        for boot in list(self._peers):
            self._forget(boot)
        for region in self._registered:
            try:
                self._agent.deregisterMem(region, [self._backend])
            except _errors(self._nixl) as error:
                log.warning("a region was not deregistered: %s", _text(error))
        self._writes.clear()
        self._registered.clear()
        self._agent = None

    def _advance(self, number: int, write: _Write, now: float) -> FabricEvent | None:
        event = write.ended or self._state(number, write.handle)
        if event is None:
            if now < write.deadline or write.is_late:
                return None
            write.is_late = True
            return WriteLate(number)
        del self._writes[number]
        self._release(write.handle)
        peer = self._peers[write.boot]
        peer.writes -= 1
        peer.is_failed = peer.is_failed or isinstance(event, WriteFailed)
        self._leave(write.boot, peer)
        return event

    def _state(self, number: int, handle: int) -> FabricEvent | None:
        try:
            if self._agent.getXferStatus(handle) == self._nixl.NIXL_IN_PROG:
                return None
        except _errors(self._nixl) as error:
            return WriteFailed(number, _text(error))
        return Wrote(number)

    def _notices(self) -> list[bytes]:
        try:
            arrived = self._agent.getNotifs({}, [self._backend])
        except Exception as error:  # the sender's name is whatever it claims
            log.warning("notices were dropped: %s", _text(error))
            return []
        return [payload for payloads in arrived.values() for payload in payloads]

    def _writable(self, boot: str) -> _Peer:
        """The peer, connected anew if its last write failed. Raises FabricError if nothing can be posted."""
        peer = self._peers.get(boot)
        if peer is None or peer.is_leaving:
            raise FabricError("peer_not_connected", f"peer: {boot} is not connected")
        if peer.is_failed:
            self._heal(boot, peer)
        return peer

    def _heal(self, boot: str, peer: _Peer) -> None:
        """NIXL's connection stays broken after one error, even if the peer is well; only a new one helps."""
        if peer.writes:
            raise FabricError("peer_lost", f"peer: {peer.writes} writes to {boot} are still to fail")
        if (now := time.monotonic()) < peer.heals_at:
            raise FabricError("peer_lost", f"peer: {boot} was not there when it was last tried")
        peer.heals_at = now + HEAL_S
        self._unload(boot, peer)
        try:
            self._agent.loadRemoteMD(peer.descriptor[DEVICE.size :])
        except _errors(self._nixl) as error:
            raise FabricError("peer_lost", f"peer: {boot} is not there any more: {_text(error)}") from error
        peer.is_known, peer.is_failed = True, False

    def _leave(self, boot: str, peer: _Peer) -> None:
        if not peer.is_leaving or peer.writes:
            return
        self._peers[boot] = self._peers.pop(boot)  # the last of those that were left
        idle = [name for name, other in self._peers.items() if other.is_leaving and not other.writes]
        for name in idle[: len(idle) - min(len(idle), self._idle_peers)]:
            self._forget(name)

    def _forget(self, boot: str) -> None:
        self._unload(boot, self._peers.pop(boot))

    def _unload(self, boot: str, peer: _Peer) -> None:
        if not peer.is_known:
            return
        peer.is_known = False
        try:
            self._agent.invalidateRemoteMD(boot)
        except _errors(self._nixl) as error:
            log.warning("peer %s was not removed: %s", boot, _text(error))

    def _release(self, handle: int) -> None:
        try:
            self._agent.releaseXferReq(handle)
        except _errors(self._nixl) as error:
            log.warning("a write's handle was not released: %s", _text(error))


def _header(boot: str) -> bytes:
    """How NIXL 1.5 begins the descriptor of an agent of this name."""
    name = boot.encode()
    return b"nixlSerDes|Agent" + struct.pack("<q", len(name)) + name + b"|"


def _named(descriptor: bytes) -> str:
    prefix = b"nixlSerDes|Agent"
    if not descriptor.startswith(prefix) or len(descriptor) < len(prefix) + 8:
        return "its descriptor names nobody"
    (size,) = struct.unpack_from("<q", descriptor, len(prefix))
    name = descriptor[len(prefix) + 8 :][: max(0, min(size, 64))]
    return f"its descriptor {name.decode(errors='replace')}"


def _errors(nixl: Any) -> tuple[type[Exception], ...]:
    """All that NIXL's bindings raise; they share no base of their own."""
    return (
        nixl.nixlBackendError,
        nixl.nixlCancelledError,
        nixl.nixlInvalidParamError,
        nixl.nixlMismatchError,
        nixl.nixlNotAllowedError,
        nixl.nixlNotFoundError,
        nixl.nixlNotPostedError,
        nixl.nixlNotSupportedError,
        nixl.nixlRemoteDisconnectError,
        nixl.nixlRepostActiveError,
        nixl.nixlUnknownError,
    )


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
