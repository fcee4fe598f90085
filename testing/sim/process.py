"""One start of an agent in a simulated process: the real agent on simulated memory, fabric and links."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

from kvbridge_proto.common import AgentCard
from kvbridge_proto.door import Ticket
from kvbridge_proto.engine import Attach
from kvbridge_proto.peer import FabricCard

from kvbridge.agent.daemon import IDLE_TICK_S, TICK_S, Agent
from kvbridge.agent.doors import Doors
from kvbridge.agent.metrics import Metrics
from kvbridge.dataplane.attached import AttachedMemory, EngineLiveness, WaitEngineHeard, WaitFence, WaitLease
from kvbridge.dataplane.data_plane import IDLE_S, DataPlane
from kvbridge.dataplane.orders import LandedChunk, OrderedSend
from kvbridge.dataplane.resources import Resources, StagingEndpoint, StagingEndpoints
from kvbridge.device.copier import BlockCopier
from kvbridge.device.fence import FencePage
from kvbridge.device.memory import AttachedPool
from kvbridge.device.staging import Staging
from kvbridge.errors import FabricError, PeerError
from kvbridge.exchange.actions import Compared
from kvbridge.exchange.containers import Deadlines
from kvbridge.exchange.orders import Digested
from kvbridge.exchange.route import Rate, Site
from kvbridge.exchange.session import Session
from kvbridge.geometry.plan import Plan
from kvbridge.options import AgentConfig
from kvbridge.routes.slots.receive_slots import ReceiveSlots
from kvbridge.state_machines import OfferState, TransferState, WantState
from kvbridge.transport.control import Control
from kvbridge.transport.door import Importer
from kvbridge.transport.local import LocalConnection

from .fabric import SlotFabric
from .links import AgentLinks
from .local import EngineSocket, Hearer
from .loop import ProcessLoop, Thread
from .matter import SLOT_BYTES, Fence, SimAttached, SimCopier

if TYPE_CHECKING:
    from .world import World

SENDING = 1 << 30  # from the first receive slot to the first send slot


class NoMetrics(Metrics):
    """Counts nothing, but reports what must not happen."""

    kinds = (Compared, Digested)

    def __init__(self, foul: Callable[[str], None], differ: Callable[[str], None]) -> None:
        self._foul = foul
        self._differ = differ  # called for each pulled chunk that differed between its two sides

    def watch(self, gauges: object, sessions: object) -> None: ...
    def see(self, event: Any, role: str, at: float) -> None:
        match event:
            case Compared(differing=differing) if differing:
                self._differ(role)
            case Digested(found=found, read=read, failure=None) if found != read:
                self._differ(role)

    def spans(self, outcome: str, count: int) -> None: ...
    def handshake(self, role: str, outcome: str) -> None: ...
    def refused(self, code: str) -> None: ...

    def rebuilt(self, replaced: str) -> None: ...
    def attached(self, model_key: str, traits: Any, tokens: int) -> None: ...
    def left(self) -> None: ...
    def carry_took(self, seconds: float) -> None: ...

    def rejected(self, code: str) -> None:
        if code == "internal_error":
            self._foul("an agent met an error of its own")

    def values(self) -> dict[str, float]:
        return {}


class SteppedDataPlane(DataPlane):
    """The real data plane. Its thread takes a turn whenever something may have changed."""

    def __init__(self, process: Process, make_resources: Callable[[], Resources]) -> None:
        timeout_s = process.config.write_timeout_s
        super().__init__(make_resources, process.incarnation, process, timeout_s, clock=process.clock_s, end=_stuck)
        os.close(self._wake)
        self._thread = cast(Any, _Alive())
        self._loop = process.loop.asyncio_s
        self._process = process
        self._open()

    def _nap_exactly(self) -> None: ...

    def _may_begin_here(self, plan: Plan, chunks: int) -> bool:
        return False  # a turn of the thread that comes at once is the same

    def _starting_threads(self) -> AbstractContextManager[None]:
        return nullcontext()

    def turn(self) -> None:
        """What the thread does between two naps."""
        self._do_tasks()
        self._process.look_at_waits()
        assert self._resources is not None
        self._poll(self._resources)
        self._flush_reports()

    @property
    def is_looking(self) -> bool:
        """Whether the thread polls, instead of sleeping until it is woken."""
        return bool(self._writing or self._moving or self._fenced or self.receive_orders.lent)

    def next_look(self) -> float | None:
        """When to look at the waits if nothing rouses us before: after a tick, which listens, or at a deadline."""
        tick = self._clock() + TICK_S
        ticking = (WaitEngineHeard, WaitLease)
        return min((tick if isinstance(wait, ticking) else wait.deadline for wait, _ in self._fenced), default=None)

    def _scatter(self, landed: LandedChunk) -> None:
        self._process.world.on_landed(self._process, landed.notice)
        super()._scatter(landed)

    def _put(self, task: Callable[[], None]) -> None:
        if not self._process.is_dead:
            self._tasks.append(task)
            self._process.rouse()

    def open(self, attach: Attach, fds: list[int], epoch: int, heard_at: float) -> AttachedMemory:
        """Map memory by asking the world for it."""
        blocks = self._process.world.blocks_of(attach.pool)
        fence = None if attach.fence_fd is None else cast(FencePage, Fence(blocks))
        memory = SimAttached(blocks)
        self._process.mapped.append(memory)
        return AttachedMemory(epoch, cast(AttachedPool, memory), fence, EngineLiveness(heard_at))

    async def _may_use(self, attached: AttachedMemory) -> bool:
        return False if self._process.is_dead else await super()._may_use(attached)


class SimResources(Resources):
    """The real ones. They may refuse other slots only while writes go on out of two earlier sets of them (G6)."""

    foul: Callable[[str], None]

    def prepare(self) -> StagingEndpoints:
        try:
            return super().prepare()
        except FabricError:
            self._count("receive slots", sum(each.endpoint.fabric.is_busy for each in self.retired))
            raise

    def add_sources(self) -> None:
        try:
            super().add_sources()
        except FabricError:
            earlier, fabric = self.endpoint.sources[:-1], self.endpoint.fabric
            self._count("send slots", sum(not fabric.unregister(each.staging.base) for each in earlier))
            raise

    def _count(self, what: str, held: int) -> None:
        if held < 2:
            self.foul(f"other {what} were refused, though writes go on out of only {held} earlier sets")


def _stuck(reason: str) -> NoReturn:
    raise AssertionError(f"the data plane was stuck: {reason}")


class _Alive:
    """Stands for a thread that never ends."""

    def is_alive(self) -> bool:
        return True


class Process(Agent):
    """One start of one agent. `ram` has the cells of its slots, `lanes` the contents of its probe lanes, by address."""

    def __init__(self, world: World, name: str, config: AgentConfig, slots: int, local: int, digest: str) -> None:
        self.world = world
        self.name = name
        self.loop = ProcessLoop(world.clock, lambda text: world.foul(f"{name}: {text}"))
        self.thread = Thread(world.clock)  # the data plane's
        self.died_at = 0.0
        self.on_gather: Callable[[], None] | None = None  # called once, in the middle of a gather
        self.fabrics: dict[str, SlotFabric] = {}  # the open ones, by name
        self.ram: dict[int, list[int]] = {}
        self.lanes: dict[int, bytes] = {}
        self.clock_s: Callable[[], float] = partial(getattr, world.clock, "now")
        self.mapped: list[SimAttached] = []  # everything that was ever mapped
        self._sockets: list[EngineSocket] = []
        self._is_roused = self._is_looking = False
        self._tick_at = float("inf")
        asyncio._set_running_loop(self.loop.asyncio_s)
        try:
            super().__init__(config, self.clock_s, world.entropy, NoMetrics(world.foul, world.on_difference))
            self._put_together(slots, local, digest)
        finally:
            asyncio._set_running_loop(None)
        self.loop.after_run = self._plan_tick

    def _put_together(self, slots: int, local: int, digest: str) -> None:
        world, name = self.world, self.name
        self.copier = SimCopier(self, digest)
        copier = cast(BlockCopier, self.copier)

        def site(card: FabricCard) -> Site:
            return Site(card, None, None, self.config.routes, "one", shares_memory="pull" in self.config.routes)

        def endpoints(number: int) -> StagingEndpoints:
            called = f"{self.incarnation}.{number}" if number else self.incarnation
            base, fabric = world.next_base(), SlotFabric(self, called)
            receiving = SimStaging(SLOT_BYTES, slots, "dram", base, _nothing)

            def sending() -> SimStaging:
                return SimStaging(SLOT_BYTES, local, "dram", world.next_base() + SENDING, _nothing)

            endpoint = StagingEndpoint(called, receiving, fabric, copier, sending)
            endpoint.add_source()
            self.fabrics[called] = fabric
            return StagingEndpoints(endpoint, None, site(endpoint.card()), ExitStack())

        def make_resources() -> Resources:
            card = FabricCard(
                kind=SlotFabric.kind, name=self.incarnation, descriptor=b"", base=0, slot_bytes=SLOT_BYTES, slots=0
            )
            resources = SimResources(copier, site(card), endpoints, ExitStack())
            resources.foul = lambda text: world.foul(f"{name}: {text}")
            if not resources.bare.shares_memory:
                resources.stage()
            return resources

        self.stepped = SteppedDataPlane(self, make_resources)
        self.data_plane = self.stepped
        self.slots = ReceiveSlots(self.data_plane.site.fabric.slots)
        self.doors = SimDoors(self)
        self.links = AgentLinks(self, world.address_of(name), self.config.connect_s)
        self.control = cast(Control, self.links)
        self.before = frozenset(each.incarnation for each in world.by_incarnation.values() if each.name == name)
        self.card = AgentCard(name=name, incarnation=self.incarnation, address=self.links.address, version="1")
        self._assemble()
        half, other, peers = self.receiving, self.sending, self.peers.outgoing
        self._due: tuple[Deadlines[Any], ...] = (
            half._deadlines,
            other._deadlines,
            peers._deadlines,
            half._want_deadlines,
            other._holds,
        )
        self.loop.create_task(self.peers.serve())

    # What the world calls:

    def accept(self, engine: Hearer) -> EngineSocket:
        """An engine rank connects."""
        socket = EngineSocket(self, engine)
        self._sockets = [each for each in self._sockets if not each.is_closed]
        self._sockets.append(socket)
        self.loop.create_task(self.clients.serve(cast(LocalConnection, socket)))
        return socket

    def stop_gently(self, then: Callable[[], None]) -> None:
        """SIGTERM: take no new requests, let those under way end, then say goodbye."""

        async def drain() -> None:
            await self._drain()
            self.loop.call_soon(then)

        self.loop.create_task(drain())

    @property
    def is_dead(self) -> bool:
        return self.loop.is_dead

    def die(self) -> None:
        """SIGKILL. Its last messages are lost. What it posted to the fabric stays under way."""
        self.died_at = self.world.clock.now
        self.loop.is_dead = True
        self.thread.kill()
        self.copier.outlive()
        self.links.die()
        for socket in self._sockets:
            if not socket.is_closed:
                socket.end()
        self.loop.kill()

    def freeze(self, *threads: Thread) -> None:
        """Freeze these threads."""
        self.listen()
        for thread in threads:
            thread.freeze()

    def thaw(self) -> None:
        """Let both threads go on, one of them first."""
        first, second = self.world.pick(((self.loop, self.thread), (self.thread, self.loop)))
        self._go_on(first)
        self.world.clock.after(self.world.quick(), lambda: self._go_on(second))

    def thaw_data_plane(self) -> None:
        """Let only the data plane's thread go on."""
        if not self.is_dead:
            self._go_on(self.thread)

    def _go_on(self, thread: Thread) -> None:
        """Let a thread go on. The loop's overdue tick comes before the messages that wait."""
        thread.is_frozen = False
        self.listen()
        thread.thaw()

    @property
    def is_frozen(self) -> bool:
        return self.loop.is_frozen or self.thread.is_frozen

    def slot_at(self, address: int) -> int:
        return address % SENDING // SLOT_BYTES

    def is_current(self, address: int) -> bool:
        """Whether this address is in the slots that are lent now, not in slots that a rebuild left behind.

        This is what the loop knows. The data plane's thread hears of new slots a little later.
        """
        return address >> 32 == self.data_plane.site.fabric.base >> 32

    # The data plane's thread and the ticks:

    def rouse(self) -> None:
        """Something may have changed: give the data plane's thread a turn."""
        if not self._is_roused and not self.is_dead:
            self._is_roused = True
            self.thread.post(self.world.jitter(), self._turn)

    def rouse_if_looking(self) -> None:
        """A notice came. A sleeping thread sees it only when it wakes by itself."""
        if self.stepped.is_looking:
            self.rouse()
        else:
            self.thread.post(self.world.uniform(0.0, IDLE_S), self.rouse)

    def _turn(self) -> None:
        self._is_roused = False
        self.listen()
        self.stepped.turn()
        self._plan_look()
        if self.stepped._fenced and (at := self.stepped.next_look()) is not None:
            self.thread.post(max(at - self.world.clock.now, 0.0) + 1e-3, self.rouse)

    def listen(self) -> None:
        """What every tick does. Ticks that would do no more are left out: see `_plan_tick`."""
        if not self.loop.is_frozen:
            self.current.note_if_silent()

    def _plan_look(self) -> None:
        """While some slots are in quarantine, or a rebuild is about to begin, look whether to rebuild them."""
        if self._is_looking:
            return
        slots, late = self.slots, self.data_plane.send_orders.slots._late
        if late or len(slots) > slots.free + slots.lent or self.rebuilder.is_pausing:
            self._is_looking = True
            self.loop.post(self.rebuilder.check_in_s, self._look)

    def look_at_waits(self) -> None:
        """Fail if a chunk of a transfer or of zeros that is over waits for a fence: its engine waits for its end."""
        for wait, _ in self.data_plane._fenced:
            if not isinstance(wait, WaitFence) or wait.what is None or wait.is_over:
                continue
            transfer = wait.what.transfer
            if isinstance(wait.what, OrderedSend):
                out = self.sending.outgoing_transfers.get(transfer)
                offered = None if out is None else out.offered
                is_over = (
                    out is None
                    or out.state is TransferState.STOPPING
                    or (offered and offered.state is not OfferState.OPEN)
                )
            else:
                incoming = self.receiving.incoming_transfers.get(transfer)
                wanted = incoming.wanted if incoming is not None else self.receiving._filled_by.get(transfer)
                is_over = wanted is None or wanted.state is not WantState.FLOWING
            if is_over:
                self.world.foul(f"{self.name}: a chunk of {transfer}, which is over, waits for a fence")

    def _look(self) -> None:
        self.loop.create_task(self._check())

    async def _check(self) -> None:
        try:
            await self.rebuilder.check()  # a frozen data plane makes no slots: until it does, no other check begins
        finally:
            self._is_looking = False
            self._plan_look()

    def _plan_tick(self) -> None:
        """Plan the next tick that has something to do. Real agents tick many times a second."""
        self._plan_look()
        first = float("inf")
        for deadlines in self._due:
            if len(deadlines) and (at := deadlines.next()) is not None and at < first:
                first = at
        if self._tick_at <= first + IDLE_TICK_S:
            return
        is_busy = self.receiving.wants or self.sending.outgoing_transfers or self.sending.offers
        at = first + self.world.uniform(0.0, TICK_S if is_busy else IDLE_TICK_S)
        self._tick_at = at
        self.loop.post(at - self.world.clock.now, lambda: self._do_tick(at))

    def _do_tick(self, at: float) -> None:
        if self._tick_at != at:
            return
        self._tick_at = float("inf")
        self.loop.call_soon(lambda: self.tick(self.world.clock.now - at))


class SimDoors(Doors):
    """The local door: whoever knows the token gets the memory, if it is still there."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._shared: dict[bytes, tuple[str, SimAttached]] = {}  # by token, with the receiver's incarnation

    async def serve(self) -> None: ...

    def admit(self, session: Session, link: object) -> Ticket:
        token, epoch, incarnation = self._process.world.entropy(32), session.our_epoch, session.peer.incarnation
        self._shared[token] = incarnation, cast(Any, self._process.current.memory).memory
        return Ticket(machine="one", path=self._process.name, session=incarnation, epoch=epoch, token=token)

    def revoke(self, session: Session) -> None:
        for token in [token for token, (of, _) in self._shared.items() if of == session.peer.incarnation]:
            del self._shared[token]

    def share(self, attached: AttachedMemory) -> None: ...  # `admit` shares what is attached then

    def withdraw(self, attached: AttachedMemory, reason: str) -> None: ...  # `enter` sees that it is closed

    def importers(self) -> list[Importer]:
        return []

    async def enter(self, session: Session, door: Ticket, link: object, ended: object) -> Rate | None:
        process, world = self._process, self._process.world
        await asyncio.sleep(world.quick())
        peer = world.processes[door.path]
        _, memory = cast(SimDoors, peer.doors)._shared.get(door.token, ("", None))
        if peer.is_dead or memory is None or not memory.is_open or world.chance(0.02):
            raise PeerError("no_door", f"{door.path}: there is nobody, or not any more")
        read = SimAttached(memory.blocks, peer)
        process.mapped.append(read)
        pulling = process.data_plane._pulling
        fence = cast(FencePage, Fence(memory.blocks)) if world.has_fences else None
        mapped = lambda: (cast(AttachedPool, read), fence)  # noqa: E731
        await process.data_plane._job(lambda settle: pulling.open(session.memory_id, mapped, _nothing, settle))
        return None


class SimStaging(Staging):
    """Slots without memory. Their cells are in `Process.ram`, by address."""

    def seal(self) -> int:
        return 0


def _nothing() -> None: ...
