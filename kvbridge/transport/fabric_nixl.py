"""The fabric over NIXL: UCX writes between agents' staging, polled to their end by one thread.

It uses NIXL's bindings, not its Python agent: that one fixes pthrDelay at 0, which spins a core while idle, and
pickles what we never use.
"""

from __future__ import annotations

import logging
import math
import os
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import FabricError
from .fabric import FabricEvent, Noticed, WriteFailed, WriteLate, Wrote, not_registered

log = logging.getLogger("kvbridge.fabric")

# How often NIXL's progress thread polls by itself; events wake it in between. With 0, NIXL's default, it spins.
PROGRESS_DELAY_US = 10_000
DESCRIPTOR_BYTES = 1 << 16
# Disconnected peers that are kept, as they may come back. Removing one and loading it again leaves a TCP connection of
# UCX open on both sides while both live (nixl 1.5.1, tests/system/faults): every restart of an engine would cost one.
IDLE_PEERS = 32
# Between two tries to reconnect to a peer. A try that finds nobody leaks an ended socket (nixl 1.5.1), and when a peer
# dies, everything gathered for it would try in turn.
HEAL_S = 0.2
MOST_WRITERS = 4  # NIXL agents that write: one more than connections to one peer on which nothing moves
# Between two that are made for links that were lost while nothing was under way: making one stops the thread (_Writer).
WRITER_S = 10.0
# A descriptor is the number of the device that the memory is on, then NIXL's metadata.
DEVICE = struct.Struct("<I")


@dataclass(slots=True, eq=False)
class _Writer:
    """A NIXL agent that our memory is written from. It takes about 70 ms, 13 descriptors and a thread (2-core EPYC)."""

    agent: Any
    backend: int
    regions: list[Any] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection of one writer to a remote agent."""

    incarnation: str
    descriptor: bytes
    writer: _Writer
    device: int = 0  # of its memory, in its own numbering: part of every address
    writes: int = 0
    is_known: bool = True  # to NIXL
    is_failed: bool = False
    is_distrusted: bool = False  # nothing may move on this connection, for as long as the path was down
    heals_at: float = 0.0  # when it may be reconnected
    is_leaving: bool = False


@dataclass(slots=True)
class _NixlWrite:
    peer: _Peer
    handle: int
    local_address: int
    deadline: float
    ended: FabricEvent | None = None
    is_late: bool = False


class NixlFabric:
    """Keeps the contract of `fabric.Fabric`. Our incarnation names the NIXL agent: it is unique among all agents, ever.

    That agent is written to. Others write: one at first. After an outage a connection waits for its next retransmission
    for as long as the outage was, and NIXL can neither cancel what is under way on it nor tell, once the peer has been
    loaded anew, when that has ended. So a peer whose connection is distrusted moves to another writer. What is under
    way on the old connection is polled to its end as before. If nothing is, a link that is lost again and again makes
    one writer in WRITER_S.

    `net_devices` restricts UCX to these network devices, e.g. `lo`; otherwise its tcp listens on every interface.
    """

    kind = "nixl"

    def __init__(
        self,
        incarnation: str,
        *,
        memory: Literal["DRAM", "VRAM"] = "DRAM",
        device: int = 0,
        net_devices: str | None = None,
        idle_peers: int = IDLE_PEERS,
    ) -> None:
        # Neither library has another switch. We get their errors as exceptions anyway.
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
        os.environ["UCX_DEBUG_SIGNO"] = "0"  # else UCX would take SIGHUP, our reload, and log everything it does
        os.environ.setdefault("UCX_TCP_CONN_NB", "y")  # else connecting over a dead path blocks for two minutes
        import nixl._bindings as nixl

        self._nixl: Any = nixl
        self._incarnation = incarnation
        self._memory = nixl.DRAM_SEG if memory == "DRAM" else nixl.VRAM_SEG
        self._device = device
        self._idle_peers = idle_peers
        self._regions: list[tuple[int, int, bool]] = []
        self._registered: list[Any] = []
        self._peers: dict[str, _Peer] = {}
        self._given_up: list[_Peer] = []  # connections that were replaced; their writes are under way
        self._writes: dict[int, _NixlWrite] = {}
        self._count = self._writers_made = 0
        self._writer_at = -math.inf  # when the last one was made for a lost link
        self._net_devices = net_devices
        self._agent, self._backend = self._open(incarnation)
        self._writers = [self._new_writer()]  # the newest last

    def _open(self, name: str) -> tuple[Any, int]:
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True  # without it a target that does not poll would stall its writers
        config.useListenThread = False  # it binds 0.0.0.0 and trusts everybody
        config.pthrDelay = PROGRESS_DELAY_US
        if self._net_devices:  # with NIXL's own option only the first of several would count
            os.environ["UCX_NET_DEVICES"] = self._net_devices
        try:
            agent = self._nixl.nixlAgent(name, config)
            return agent, agent.createBackend("UCX", {})
        except _errors(self._nixl) as error:
            reason = f"NIXL's UCX backend did not start with net_devices {self._net_devices}: {_text(error)}"
            raise FabricError("fabric_unavailable", reason) from error

    def _new_writer(self) -> _Writer:
        """Raises FabricError."""
        self._writers_made += 1
        writer = _Writer(*self._open(f"{self._incarnation}~{self._writers_made}"))
        for begin, end, _ in self._regions:
            writer.regions.append(self._register(writer.agent, writer.backend, begin, end - begin))
        return writer

    def register(self, address: int, size: int, *, is_target: bool = True) -> None:
        # NIXL would accept an overlap and then fail to find the larger region.
        if size < 1 or any(address < end and begin < address + size for begin, end, _ in self._regions):
            raise FabricError("region_overlaps", f"region: {size} bytes are empty or overlap another")
        takers = [(writer.agent, writer.backend, writer.regions) for writer in self._writers]
        if is_target:
            takers.append((self._agent, self._backend, self._registered))
        made: list[Any] = []
        with ExitStack() as undoing:
            for agent, backend, _ in takers:
                made.append(self._register(agent, backend, address, size))
                undoing.callback(self._deregister, agent, backend, made[-1:])
            undoing.pop_all()
        for (_, _, regions), region in zip(takers, made, strict=True):
            regions.append(region)
        self._regions.append((address, address + size, is_target))

    @property
    def name(self) -> str:
        return self._incarnation

    def successor(self, name: str) -> tuple[bytes, Callable[[], None]]:
        agent, backend = self._open(name)
        targets = [(begin, end) for begin, end, is_target in self._regions if is_target]
        registered = [self._register(agent, backend, begin, end - begin) for begin, end in targets]
        descriptor = self._described(agent, backend, name)

        def become() -> None:
            self._deregister(self._agent, self._backend, self._registered)
            # This ends the agent before: its connections, its listeners and its progress thread.
            self._agent, self._backend, self._registered, self._incarnation = agent, backend, registered, name

        return descriptor, become

    def unregister(self, address: int) -> bool:
        number = [begin for begin, _, _ in self._regions].index(address)
        begin, end, is_target = self._regions[number]
        assert not is_target, "peers may write there"
        if any(begin <= write.local_address < end for write in self._writes.values()):
            return False
        del self._regions[number]
        for writer in self._writers:  # each has all regions, in our order
            self._deregister(writer.agent, writer.backend, [writer.regions.pop(number)])
        return True

    def _register(self, agent: Any, backend: int, address: int, size: int) -> Any:
        region = self._nixl.nixlRegDList(self._memory, [(address, size, self._device, "")])
        try:
            agent.registerMem(region, [backend])
        except _errors(self._nixl) as error:
            raise FabricError("registration_failed", f"region: {size} bytes: {_text(error)}") from error
        return region

    def descriptor(self) -> bytes:
        return self._described(self._agent, self._backend, self._incarnation)

    def _described(self, agent: Any, backend: int, name: str) -> bytes:
        """The descriptor of our targets, by the NIXL agent of this name. Raises FabricError."""
        targets = [(begin, end - begin, self._device, "") for begin, end, is_target in self._regions if is_target]
        if not targets:
            raise FabricError("descriptor_failed", "descriptor: no memory was registered for peers to write")
        described = self._nixl.nixlRegDList(self._memory, targets)
        try:
            found: bytes = agent.getLocalPartialMD(described, True, [backend])
        except _errors(self._nixl) as error:
            raise FabricError("descriptor_failed", f"descriptor: {_text(error)}") from error
        if not found.startswith(_header(name)):
            raise FabricError("descriptor_failed", f"this NIXL writes descriptors we cannot check: {len(found)} bytes")
        return DEVICE.pack(self._device) + found

    def connect(self, incarnation: str, descriptor: bytes) -> None:
        # NIXL adds what it loads to whichever agent the descriptor names: check the name first.
        if len(descriptor) > DESCRIPTOR_BYTES:
            raise FabricError(
                "descriptor_malformed", f"descriptor_bytes: got {len(descriptor)}, limit {DESCRIPTOR_BYTES}"
            )
        metadata = descriptor[DEVICE.size :]
        if not metadata.startswith(_header(incarnation)):
            raise FabricError(
                "descriptor_of_another_incarnation", f"incarnation: peer says {incarnation}, {_named(metadata)}"
            )
        if incarnation == self._incarnation:
            raise FabricError("descriptor_of_another_incarnation", f"incarnation: {incarnation} is our own")
        peer = self._peers.get(incarnation)
        if peer is not None:
            if peer.descriptor == descriptor:
                peer.is_leaving = False
                peer.heals_at = 0.0  # a Hello in its name came: it is there
                return
            if peer.writes:
                raise FabricError("peer_busy", f"peer: {peer.writes} writes to {incarnation} are still under way")
            self._forget(incarnation)
        try:
            self._peers[incarnation] = self._loaded(incarnation, descriptor, self._writer_for(incarnation))
        except _errors(self._nixl) as error:
            raise FabricError("descriptor_malformed", f"descriptor of {incarnation}: {_text(error)}") from error

    def _loaded(self, incarnation: str, descriptor: bytes, writer: _Writer) -> _Peer:
        """A new connection, which is made when it is first needed. Raises NIXL's errors."""
        writer.agent.loadRemoteMD(descriptor[DEVICE.size :])
        return _Peer(incarnation, descriptor, writer, *DEVICE.unpack_from(descriptor))

    def _writer_for(self, incarnation: str) -> _Writer:
        """The newest writer, or another if that has a connection to this peer already. Raises FabricError."""
        taken = [each.writer for each in self._given_up if each.incarnation == incarnation]
        if (peer := self._peers.get(incarnation)) is not None:
            taken.append(peer.writer)
        if free := [writer for writer in self._writers if writer not in taken]:
            return free[-1]
        if len(self._writers) == MOST_WRITERS:
            raise FabricError("peer_lost", f"peer: nothing moves on {MOST_WRITERS} connections to {incarnation}")
        self._writers.append(self._new_writer())
        self._writer_at = time.monotonic()
        return self._writers[-1]

    def distrust(self, incarnation: str) -> None:
        if (peer := self._peers.get(incarnation)) is not None:
            peer.is_distrusted = True
            for write in self._writes.values():
                if write.peer is peer:
                    write.deadline = -math.inf

    def disconnect(self, incarnation: str) -> None:
        peer = self._peers.get(incarnation)
        if peer is not None:
            peer.is_leaving = True
            self._leave(peer)

    def write(
        self, incarnation: str, local_address: int, remote_address: int, size: int, notice: bytes, deadline: float
    ) -> int:
        peer = self._writable(incarnation)
        if size < 1:
            raise FabricError("memory_not_registered", f"write: {size} bytes")
        nixl = self._nixl
        try:
            # 2 us for one descriptor (Xeon, 2 vCPU, 2026-11); a prepared slot grid would save nothing.
            handle = peer.writer.agent.createXferReq(
                nixl.NIXL_WRITE,
                nixl.nixlXferDList(self._memory, [(local_address, size, self._device)]),
                nixl.nixlXferDList(self._memory, [(remote_address, size, peer.device)]),
                incarnation,
                notice,
                [peer.writer.backend],
            )
        except nixl.nixlNotFoundError as error:
            raise not_registered(self._regions, local_address, size, incarnation) from error
        except _errors(nixl) as error:
            raise FabricError("write_refused", f"write to {incarnation}: {_text(error)}") from error
        self._count += 1
        write = self._writes[self._count] = _NixlWrite(peer, handle, local_address, deadline)
        peer.writes += 1
        try:
            if peer.writer.agent.postXferReq(handle, notice) == nixl.NIXL_SUCCESS:
                write.ended = Wrote(self._count)
        except _errors(nixl) as error:
            # Some bytes may have left: this write failed, it was not refused.
            write.ended = WriteFailed(self._count, _text(error))
        return self._count

    def notify(self, incarnation: str, notice: bytes) -> None:
        peer = self._writable(incarnation)
        try:
            peer.writer.agent.genNotif(incarnation, notice, [peer.writer.backend])
        except _errors(self._nixl) as error:
            peer.is_failed = True
            raise FabricError("peer_lost", f"notice to {incarnation}: {_text(error)}") from error

    def poll(self, now: float) -> list[FabricEvent]:
        events: list[FabricEvent] = []
        for number, write in list(self._writes.items()):
            if event := self._advance(number, write, now):
                events.append(event)
        events.extend(Noticed(payload) for payload in self._notices())
        return events

    @property
    def plugins(self) -> list[str]:
        """The plugins that NIXL could load."""
        return list(self._agent.getAvailPlugins())

    @property
    def known(self) -> list[str]:
        """The incarnations of our peers. Idle ones are in the order in which they were disconnected."""
        return list(self._peers)

    @property
    def is_busy(self) -> bool:
        return bool(self._writes)

    def close(self) -> None:
        """Destroy the NIXL agent: nothing else is certain to stop writes under way."""
        if self._agent is None:
            return
        for write in self._writes.values():
            self._release(write)
        for peer in [*self._peers.values(), *self._given_up]:
            self._unload(peer)
        for writer in self._writers:
            self._deregister(writer.agent, writer.backend, writer.regions)
        self._deregister(self._agent, self._backend, self._registered)
        self._writes.clear()
        self._peers.clear()
        self._given_up.clear()
        self._writers.clear()
        self._agent = None

    def _deregister(self, agent: Any, backend: int, regions: list[Any]) -> None:
        for region in regions:
            try:
                agent.deregisterMem(region, [backend])
            except _errors(self._nixl) as error:
                log.warning("a region was not deregistered: %s", _text(error))
        regions.clear()

    def _advance(self, number: int, write: _NixlWrite, now: float) -> FabricEvent | None:
        peer, event = write.peer, write.ended or self._state(number, write)
        if event is None:
            if now < write.deadline or write.is_late:
                return None
            write.is_late = peer.is_distrusted = True
            return WriteLate(number)
        del self._writes[number]
        self._release(write)
        peer.writes -= 1
        peer.is_failed = peer.is_failed or isinstance(event, WriteFailed)
        peer.is_distrusted = peer.is_distrusted and peer.writes > 0  # it moves again, or has failed
        if peer not in self._given_up:
            self._leave(peer)
        elif not peer.writes:
            self._given_up.remove(peer)
            self._unload(peer)
            self._close_unused()
        return event

    def _state(self, number: int, write: _NixlWrite) -> FabricEvent | None:
        try:
            if write.peer.writer.agent.getXferStatus(write.handle) == self._nixl.NIXL_IN_PROG:
                return None
        except _errors(self._nixl) as error:
            return WriteFailed(number, _text(error))
        return Wrote(number)

    def _notices(self) -> list[bytes]:
        try:
            arrived = self._agent.getNotifs({}, [self._backend])
        except Exception as error:  # the sender's name is whatever it claims, so any error may come
            log.warning("notices were dropped: %s", _text(error))
            return []
        return [payload for payloads in arrived.values() for payload in payloads]

    def _writable(self, incarnation: str) -> _Peer:
        """The peer, by a connection that is not known to be broken. Raises FabricError if nothing can be posted."""
        peer = self._peers.get(incarnation)
        if peer is None or peer.is_leaving:
            raise FabricError("peer_not_connected", f"peer: {incarnation} is not connected")
        if peer.is_distrusted and not self._may_wait(peer):
            peer = self._moved(peer)
        if peer.is_failed:
            self._heal(peer)
        return peer

    def _may_wait(self, peer: _Peer) -> bool:
        """Whether its connection must do for now: nothing is under way on it, and another writer was made just now."""
        is_soon = time.monotonic() < self._writer_at + WRITER_S
        return is_soon and not peer.writes and self._writers == [peer.writer]

    def _moved(self, peer: _Peer) -> _Peer:
        """The same peer by another writer. What is under way to it goes on by the old one."""
        try:
            moved = self._loaded(peer.incarnation, peer.descriptor, self._writer_for(peer.incarnation))
        except _errors(self._nixl) as error:
            raise FabricError("peer_lost", f"peer: {peer.incarnation} cannot be loaded anew: {_text(error)}") from error
        self._peers[peer.incarnation] = moved
        if peer.writes:
            self._given_up.append(peer)
        else:
            self._unload(peer)
        self._close_unused()
        return moved

    def _close_unused(self) -> None:
        """Close the writers that no peer needs, but the newest: their sockets are closed on both sides.

        A peer that has left is kept loaded on the newest one only, in case it comes back.
        """
        newest = self._writers[-1]
        for peer in [each for each in self._peers.values() if each.is_leaving and not each.writes]:
            if peer.writer is not newest:
                self._forget(peer.incarnation)
        used = {id(peer.writer) for peer in [*self._peers.values(), *self._given_up]}
        for writer in [each for each in self._writers[:-1] if id(each) not in used]:
            self._writers.remove(writer)
            self._deregister(writer.agent, writer.backend, writer.regions)
            del writer.agent

    def _heal(self, peer: _Peer) -> None:
        """Reconnect: NIXL's connection stays broken after one error, even if the peer is well."""
        incarnation = peer.incarnation
        if peer.writes:
            raise FabricError("peer_lost", f"peer: {peer.writes} writes to {incarnation} are still to fail")
        if (now := time.monotonic()) < peer.heals_at:
            raise FabricError("peer_lost", f"peer: {incarnation} was not there when it was last tried")
        peer.heals_at = now + HEAL_S
        self._unload(peer)
        try:
            peer.writer.agent.loadRemoteMD(peer.descriptor[DEVICE.size :])
        except _errors(self._nixl) as error:
            raise FabricError("peer_lost", f"peer: {incarnation} is not there any more: {_text(error)}") from error
        peer.is_known, peer.is_failed = True, False

    def _leave(self, peer: _Peer) -> None:
        if not peer.is_leaving or peer.writes:
            return
        self._peers[peer.incarnation] = self._peers.pop(peer.incarnation)  # the most recently disconnected is last
        idle = [name for name, other in self._peers.items() if other.is_leaving and not other.writes]
        for name in idle[: len(idle) - min(len(idle), self._idle_peers)]:
            self._forget(name)
        self._close_unused()

    def _forget(self, incarnation: str) -> None:
        self._unload(self._peers.pop(incarnation))

    def _unload(self, peer: _Peer) -> None:
        if not peer.is_known:
            return
        peer.is_known = False
        try:
            peer.writer.agent.invalidateRemoteMD(peer.incarnation)
        except _errors(self._nixl) as error:
            log.warning("peer %s was not removed: %s", peer.incarnation, _text(error))

    def _release(self, write: _NixlWrite) -> None:
        try:
            write.peer.writer.agent.releaseXferReq(write.handle)
        except _errors(self._nixl) as error:
            log.warning("a write's handle was not released: %s", _text(error))


def _header(incarnation: str) -> bytes:
    """How a NIXL 1.5 descriptor of an agent with this name begins."""
    name = incarnation.encode()
    return b"nixlSerDes|Agent" + struct.pack("<q", len(name)) + name + b"|"


def _named(descriptor: bytes) -> str:
    prefix = b"nixlSerDes|Agent"
    if not descriptor.startswith(prefix) or len(descriptor) < len(prefix) + 8:
        return "its descriptor names nobody"
    (size,) = struct.unpack_from("<q", descriptor, len(prefix))
    name = descriptor[len(prefix) + 8 :][: max(0, min(size, 64))]
    return f"its descriptor {name.decode(errors='replace')}"


def _errors(nixl: Any) -> tuple[type[Exception], ...]:
    """All exceptions that NIXL's bindings raise; they have no base class of their own."""
    return tuple(each for each in vars(nixl).values() if isinstance(each, type) and issubclass(each, Exception))


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
