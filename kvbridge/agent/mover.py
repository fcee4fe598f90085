"""The one thread that touches memory: it gathers, pushes, scatters, and owns the fabric.

The loop hands it jobs; it answers through callbacks that run on the loop, in the order in which things happened. It
sleeps on an eventfd while nothing is in flight, and polls while something is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvbridge_proto.codec import BadFrame, decode, encode
from kvbridge_proto.peer import Notice

from ..device import mover as moving
from ..device.memory import AttachedPool
from ..device.staging import Staging
from ..errors import FabricError
from ..exchange.actions import Scatter, Ship
from ..transport.fabric import Fabric, Noticed, WriteFailed, WriteLate, Wrote

log = logging.getLogger("kvbridge.mover")

IDLE_S = 1.0
ALIVE_S = 1.0
SHORTEST_S = 0.00005
LONGEST_S = 0.001


@dataclass(frozen=True, slots=True)
class Target:
    """What a Ship needs to know of the peer: where its slots are and who it is."""

    base: int
    slot_bytes: int
    slots: int


class Listener(Protocol):
    """Who hears what the mover did; every call is made on the loop."""

    def on_gathered(self, ship: Ship, size_bytes: int, seconds: float) -> None: ...
    def on_shipped(self, ship: Ship, size_bytes: int, failure: tuple[str, str] | None) -> None: ...
    def on_late(self, ship: Ship, reason: str) -> None: ...
    def on_landed(self, notice: Notice) -> None: ...
    def on_foreign_notice(self, code: str) -> None: ...
    def on_scattered(self, scatter: Scatter, size_bytes: int, failure: tuple[str, str] | None) -> None: ...
    def on_mover_died(self, error: Exception) -> None: ...


class Mover:
    """Start with `start`, end with `stop`; everything else may be called from the loop at any time between."""

    def __init__(
        self,
        fabric: Callable[[], Fabric],
        inbound: Staging,
        outbound: Staging,
        boot: str,
        listener: Listener,
        write_timeout_s: float,
    ) -> None:
        self._expecting = 0
        self.kind = ""
        self.descriptor = b""
        self._make_fabric = fabric
        self._inbound = inbound
        self._outbound = outbound
        self._boot = boot
        self._listener = listener
        self._write_timeout_s = write_timeout_s
        self._jobs: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._writes: dict[int, tuple[Ship, int]] = {}
        self._targets: dict[str, Target] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvbridge-mover", daemon=True)
        self._fabric: Fabric | None = None
        self._loop: asyncio.AbstractEventLoop

    # On the loop:

    async def start(self) -> None:
        """Start the thread and the fabric. Raises FabricError."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await self._call(self._open)

    async def stop(self) -> None:
        """End the thread and the fabric; jobs that were not begun are dropped."""

        def last() -> None:
            self._stopping = True

        self._put(last)
        await asyncio.to_thread(self._thread.join)
        os.close(self._wake)

    async def connect(self, boot: str, descriptor: bytes, target: Target) -> None:
        """Make the peer's staging writable. Raises FabricError."""

        def job() -> None:
            assert self._fabric is not None
            self._fabric.connect(boot, descriptor)
            self._targets[boot] = target

        await self._call(job)

    def expect(self, slots: int) -> None:
        """So many slots are lent out: while there are any, notices may come and must be looked for."""
        was, self._expecting = self._expecting, slots
        if slots and not was:
            os.eventfd_write(self._wake, 1)

    def disconnect(self, boot: str) -> None:
        def job() -> None:
            self._targets.pop(boot, None)
            if self._fabric is not None:
                self._fabric.disconnect(boot)

        self._put(job)

    def ship(self, ship: Ship, memory: AttachedPool, epoch: int) -> None:
        """Gather and write; heard of by on_gathered and, later, on_shipped."""
        self._put(lambda: self._ship(ship, memory, epoch))

    def scatter(self, scatter: Scatter, memory: AttachedPool) -> None:
        """Check and scatter; heard of by on_scattered."""
        self._put(lambda: self._scatter(scatter, memory))

    async def flush(self) -> None:
        """Return when no job given before is or will be under way (writes may still be)."""
        with contextlib.suppress(FabricError):  # a mover that has died does nothing more either
            await self._call(lambda: None)

    def _put(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        os.eventfd_write(self._wake, 1)

    async def _call(self, job: Callable[[], None]) -> None:
        done: asyncio.Future[None] = self._loop.create_future()

        def settle(error: Exception | None) -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def run() -> None:
            try:
                job()
            except Exception as error:
                self._tell(settle, error)
            else:
                self._tell(settle, None)

        self._put(run)
        while not (await asyncio.wait({done}, timeout=ALIVE_S))[0]:
            if not self._thread.is_alive():
                raise FabricError("mover_died", "the mover's thread has ended")
        await done

    # On the thread:

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # nobody else can move anything: the agent must end
            log.exception("the mover died")
            self._tell(self._listener.on_mover_died, error)
        finally:
            if self._fabric is not None:
                self._fabric.close()

    def _serve(self) -> None:
        last_move = 0.0
        while not self._stopping:
            moved = self._do_jobs()
            if self._fabric is None:
                self._sleep(IDLE_S)
                continue
            moved = self._poll(self._fabric) or moved
            now = time.monotonic()
            if moved:
                last_move = now
                continue
            waits = self._writes or self._expecting  # the longer nothing comes, the longer until we look again
            if self._sleep(min(max((now - last_move) / 10, SHORTEST_S), LONGEST_S) if waits else IDLE_S):
                last_move = now

    def _sleep(self, seconds: float) -> bool:
        """True if the loop woke us: there is a job, or something to expect."""
        if not select.select([self._wake], [], [], seconds)[0]:
            return False
        os.eventfd_read(self._wake)
        return True

    def _do_jobs(self) -> bool:
        moved = bool(self._jobs)
        while self._jobs and not self._stopping:
            self._jobs.popleft()()
        return moved

    def _open(self) -> None:
        fabric = self._make_fabric()
        fabric.register(self._inbound.base, self._inbound.size_bytes)
        fabric.register(self._outbound.base, self._outbound.size_bytes, is_target=False)
        self.kind, self.descriptor = fabric.kind, fabric.descriptor()
        self._fabric = fabric

    def _poll(self, fabric: Fabric) -> bool:
        events = fabric.poll(time.monotonic())
        for event in events:
            match event:
                case Wrote(id=number):
                    ship, size = self._writes.pop(number)
                    self._tell(self._listener.on_shipped, ship, size, None)
                case WriteFailed(id=number, reason=reason):
                    ship, size = self._writes.pop(number)
                    self._tell(self._listener.on_shipped, ship, size, ("write_failed", reason))
                case WriteLate(id=number):
                    reason = f"write_timeout_s: {self._write_timeout_s} passed"
                    self._tell(self._listener.on_late, self._writes[number][0], reason)
                case Noticed(payload=payload):
                    self._notice(payload)
        return bool(events)

    def _notice(self, payload: bytes) -> None:
        try:
            notice: Notice = decode(payload, Notice)
        except BadFrame as error:
            self._tell(self._listener.on_foreign_notice, error.code)
        else:
            self._tell(self._listener.on_landed, notice)

    def _ship(self, ship: Ship, memory: AttachedPool, epoch: int) -> None:
        started = time.monotonic()
        chunk = ship.plan.chunk(ship.chunk)
        slot = self._outbound.slot(ship.local)[: chunk.size_bytes]
        failure: tuple[str, str] | None = None
        try:
            digest = moving.gather(memory, ship.plan.source_moves(chunk, ship.tables), slot)
        except Exception as error:
            log.exception("gather failed: transfer=%s chunk=%d", ship.transfer, ship.chunk)
            failure = ("gather_failed", f"{type(error).__name__}: {error}")
        self._tell(self._listener.on_gathered, ship, chunk.size_bytes, time.monotonic() - started)
        if failure is None:
            failure = self._write(ship, chunk.size_bytes, digest, epoch)
        if failure is not None:
            self._tell(self._listener.on_shipped, ship, chunk.size_bytes, failure)

    def _write(self, ship: Ship, size: int, digest: int, epoch: int) -> tuple[str, str] | None:
        """Post the write, or say why it could not be."""
        target = self._targets.get(ship.boot)
        if target is None:
            return "peer_lost", f"peer: {ship.boot} is not connected"
        if ship.lease.slot >= target.slots or size > target.slot_bytes:
            return (
                "bad_lease",
                f"lease: slot {ship.lease.slot} of {target.slots}, {size} of {target.slot_bytes} bytes",
            )
        notice = Notice(
            transfer=ship.transfer,
            token=ship.token,
            source_boot=self._boot,
            sink_boot=ship.boot,
            source_epoch=epoch,
            sink_epoch=ship.sink_epoch,
            slot=ship.lease.slot,
            generation=ship.lease.generation,
            chunk=ship.chunk,
            chunk_bytes=size,
            digest=digest,
        )
        remote = target.base + ship.lease.slot * target.slot_bytes
        local = self._outbound.address(ship.local)
        deadline = time.monotonic() + self._write_timeout_s
        assert self._fabric is not None
        try:
            number = self._fabric.write(ship.boot, local, remote, size, encode(notice), deadline)
        except FabricError as error:
            return error.code, str(error)
        self._writes[number] = (ship, size)
        return None

    def _scatter(self, scatter: Scatter, memory: AttachedPool) -> None:
        chunk = scatter.plan.chunk(scatter.chunk)
        slot = self._inbound.slot(scatter.slot)[: chunk.size_bytes]
        failure: tuple[str, str] | None = None
        try:
            found = moving.digest(slot)
            if found == scatter.digest:
                moving.scatter(memory, scatter.plan.sink_moves(chunk, scatter.tables), slot)
            else:
                failure = ("digest_mismatch", f"digest: sent {scatter.digest:016x}, landed {found:016x}")
        except Exception as error:
            log.exception("scatter failed: transfer=%s chunk=%d", scatter.transfer, scatter.chunk)
            failure = ("scatter_failed", f"{type(error).__name__}: {error}")
        self._tell(self._listener.on_scattered, scatter, chunk.size_bytes, failure)

    def _tell(self, hear: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear
            self._loop.call_soon_threadsafe(hear, *args)
