"""The data plane: the one thread that moves bytes, and owns the copier and the fabrics.

The loop gives it orders, one or a few per transfer, and gets reports in the order of events (orders.py). The thread
itself decides which chunk is sent next and whether one that lands counts (orders.py), so rows
do not wait for the loop. A job is a generator (attached.py): it reads from top to bottom, and many are under way at
once. While nothing is in flight the thread sleeps on an eventfd. Otherwise it polls, with naps between: a thread that
spins keeps the interpreter from the loop.

To wake the thread, and to be told by it, takes longer than to begin one small read. So while the thread sleeps with
nothing under way but such reads the loop may take its turn (`_turn`): it begins the read, and looks a few times whether
it is over.
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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

from kvbridge_proto.engine import Attach
from kvbridge_proto.framing import BadFrame, Decoder, Limits
from kvbridge_proto.peer import Notice, Probe, Route
from kvbridge_proto.pool import Handle, Pool

from ..device.copier import DeviceLost, Moved
from ..device.fence import FencePage
from ..device.memory import AttachedPool
from ..errors import EngineError, FabricError
from ..exchange.orders import (
    AwaitedPull,
    Credit,
    Digest,
    Fill,
    Lend,
    Malformed,
    Order,
    Progress,
    Pull,
    ReceiveOrder,
    ReceivingOrder,
    ReceivingReport,
    SendingOrder,
    SendingReport,
    SendOrder,
    StopReceiving,
    StopSending,
    Warm,
    WarmPull,
    Watch,
)
from ..exchange.route import Rate, Site
from ..exchange.session import EngineMemoryId
from ..failpoints import armed, failpoint
from ..geometry.plan import Plan
from ..routes.choice import Connected
from ..routes.pull.job import PullRoute
from ..routes.slots.jobs import Jobs
from ..routes.slots.slot_routes import Landing
from ..transport.fabric import Noticed
from ..unix_socket import close_fds
from .attached import (
    AttachedMemory,
    Event,
    Job,
    Settle,
    Wait,
    WaitMove,
    WaitOnLoop,
    WaitWrite,
)
from .orders import LandedChunk, ReceiveOrders, SendOrders
from .resources import Resources, StagingEndpoints
from .threads import (
    LINGER_NAP_S,
    STUCK_S,
    WATCHDOG_LOOK_S,
    Linger,
    Watchdog,
    end_process,
    nap_exactly,
    usual_naps,
)

log = logging.getLogger("kvbridge.data_plane")
T = TypeVar("T")

IDLE_S = 1.0
ALIVE_S = 1.0
# With `nap_exactly` a nap lasts about 7 us longer than asked (H200 machine, 2026-11); without, up to 50.
POLL_NAP_S = 2e-6
POLL_NAPS_S = 0.002
LONGEST_NAP_S = 0.001
LINGER_ON_GPU_S = 0.03
# What the loop begins itself: reads of rows and states, from two senders. More small ones share launches on the thread.
MOST_CHUNKS_HERE = 2
MOST_READS_HERE = 2
LOOKING_S = 1e-3  # in which the loop looks for the end of what it has begun; then the thread is woken to do so
GATHERING_S = 1e-4  # a large gather takes longer to begin, and what has been gathered leaves only at the next poll
NOTICE = Limits(frame_bytes=4096)  # the fabric itself allows notices of 16 MiB


class DataPlaneListener(Protocol):
    """Takes the data plane's reports, on the loop."""

    def on_send_orders(self, reports: Sequence[SendingReport]) -> None: ...
    def on_receive_orders(self, reports: Sequence[ReceivingReport]) -> None: ...
    def on_staged(self, site: Site) -> None: ...
    def on_data_plane_died(self, error: BaseException) -> None: ...


class DataPlane:
    """Begin with `start`, end with `stop`. In between, the loop may call everything else at any time."""

    def __init__(
        self,
        make_resources: Callable[[], Resources],
        incarnation: str,
        listener: DataPlaneListener,
        write_timeout_s: float,
        stuck_s: float = STUCK_S,
        linger_s: float | None = 0.0,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[str], NoReturn] = end_process,
    ) -> None:
        self._clock = clock
        self.site: Site  # from `start` on
        self.digests: tuple[str, ...] = ()
        self.device = self.description = ""
        self._make_resources = make_resources
        self._incarnation = incarnation
        self._listener = listener
        self._write_timeout_s = write_timeout_s
        self._linger_s = linger_s  # None until the device is known
        self.linger: Linger  # from `start` on
        self.send_orders = SendOrders(0)  # knows its slots from `start` on
        self.receive_orders = ReceiveOrders()
        self._tasks: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._moving: dict[int, Job] = {}  # by ticket
        self._moved: dict[int, Moved] = {}  # moves that are over, which no job waits for yet
        self._writing: dict[tuple[int, int], Job] = {}
        self._fenced: list[tuple[WaitOnLoop, Job]] = []
        self._telling: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        # For the loop, in the order of events: it may be called for the thread's before it is for its own turn's.
        self._told: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self._notices: Decoder[Notice] = Decoder(Notice, NOTICE)
        self._turn = threading.Lock()  # whoever holds it may touch everything that is the thread's
        self._looking_until = 0.0  # the loop, at what it has begun
        self._begun_here: set[int] = set()  # by ticket
        self._failure: BaseException | None = None  # that the loop met in the thread's place
        self._stopping = False
        self._is_idle = False  # it naps or sleeps, and waits for nothing but an order
        self._thread = threading.Thread(target=self._run, name="kvbridge-data_plane", daemon=True)
        self.watchdog = Watchdog(self._thread, stuck_s, end, clock)
        self._resources: Resources | None = None
        self._jobs: Jobs
        self._pulling: PullRoute
        self._loop: asyncio.AbstractEventLoop

    # On the loop:

    async def start(self) -> None:
        """Start the thread and open its resources. Raises OperatorError or FabricError."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await self._call(self._open)
        self._at_work.copier.use_here()

    async def stop(self) -> None:
        """End the thread and the fabrics. Jobs that have not begun are dropped."""

        def last() -> None:
            self._stopping = True

        self._put(last)
        await self.watchdog.until(asyncio.to_thread(self._thread.join))
        os.close(self._wake)

    def open(self, attach: Attach, fds: list[int], epoch: int, heard_at: float) -> AttachedMemory:
        """Map what an engine sent. Raises KVBridgeError, with nothing left mapped. Close it after `let_go`."""
        return AttachedMemory.open(attach, fds, epoch, heard_at, self.device, self.site.shares_memory)

    async def stage(self) -> None:
        """Make slots, if there are none. Raises FabricError `no_staging`; a later call may succeed.

        The data plane does nothing else while memory and fabric are made.
        """
        if self.site.has_slots:
            return
        site = await self._made(self._stage)
        if not self.site.has_slots:
            self.site = site
            self._listener.on_staged(site)

    async def connect(self, landing: Landing) -> Connected:
        """Choose and prove a route to a receiver's slots, which replaces the one before. Raises FabricError.

        Call `stage` first, unless none of these routes needs slots.
        """
        connected: Connected = await self._job(lambda settle: self._jobs.connect(landing, settle))
        return connected

    def disconnect(self, incarnation: str, serial: int, is_lost: bool = False) -> None:
        """Give up the route that `connect` made under this serial. A later one stays.

        `is_lost`: the link to the peer was lost, perhaps because the path is down.
        """
        self._put(lambda: self._jobs.disconnect(incarnation, serial, is_lost))

    def give(self, order: SendingOrder | ReceivingOrder, attached: AttachedMemory | None) -> None:
        """Give an order; they are taken up one after the other. `attached` is our engine's, None once it has left."""
        if isinstance(order, AwaitedPull):
            if attached is not None and self._may_begin_here(order.plan, order.plan.chunks):
                self._await_here(order, attached)
            return
        if (
            isinstance(order, Pull)
            and attached is not None
            and self._may_begin_here(order.plan, order.end_chunk - order.first_chunk)
        ):
            return self._begin_here(order, attached)
        self._put(partial(self._take_up, order, attached, self._clock()))

    def _may_begin_here(self, plan: Plan, chunks: int) -> bool:
        """Whether the loop may begin a read of so many chunks. If so it has the turn, and must end it."""
        is_brief = chunks <= MOST_CHUNKS_HERE
        is_brief &= plan.total_bytes <= self._at_work.copier.brief_bytes
        if not is_brief or not self._turn.acquire(blocking=False):
            return False
        is_busy = self._tasks or self._fenced or len(self._moving) >= MOST_READS_HERE
        is_busy = is_busy or not self._moving.keys() <= self._begun_here  # the thread's come first
        if is_busy or self._pulling.closing or self._stopping or armed():  # a failpoint may hold up who passes it
            self._turn.release()
            return False
        return True

    def _begin_here(self, pull: Pull, attached: AttachedMemory) -> None:
        self._looking_until = self._clock() + LOOKING_S
        self._take_turn_here(lambda: self._resume(self._pulling.pull(pull, attached), None))

    def _await_here(self, awaited: AwaitedPull, attached: AttachedMemory) -> None:
        """Prepare a read that will probably begin here."""
        try:
            self._pulling.await_tables(awaited, attached)
        except Exception:
            log.debug("a read was not prepared", exc_info=True)  # it will say so itself
        finally:
            self._turn.release()

    def _look(self) -> None:
        """Look on the loop whether what it has begun is over, unless the thread does so.

        What the thread has begun since, it goes on with itself: to post a write or to unmap memory may block.
        """
        if not self._turn.acquire(blocking=False):
            return
        if self._moving.keys() == self._begun_here and not (self._fenced or self._pulling.closing):
            self._take_turn_here(lambda: None)
        else:
            self._turn.release()

    def _take_turn_here(self, begin: Callable[[], None]) -> None:
        """What the thread would do between two naps. Ends the turn, and sees to it that somebody takes the next."""
        try:
            try:
                begin()
                self._poll_moves(self._at_work)
                self._flush_reports(self._soon)
            except (Exception, DeviceLost) as error:  # the thread ends with it
                self._failure = error
            self._begun_here = set(self._moving)
            has_waits = bool(self._fenced or self._failure)  # it looks at no fence or lease
            is_looking = bool(self._moving) and not has_waits and self._clock() < self._looking_until
            is_left = bool(self._moving) or has_waits
        finally:
            self._turn.release()
        if is_looking:
            self.linger.keep_awake()
            self._soon(self._look)
        elif is_left:
            os.eventfd_write(self._wake, 1)

    def _soon(self, call: Callable[..., object], *args: object) -> None:
        """Call it on the loop after what waits there: another sender's answer, whose read is begun while ours runs."""
        self._loop.call_soon(self._loop.call_soon, call, *args)

    async def open_peer(
        self,
        memory_id: EngineMemoryId,
        pool: Pool,
        handles: Sequence[Handle],
        fds: Sequence[int],
        closed: Callable[[], None],
        fence_fd: int | None = None,
    ) -> Rate | None:
        """Map the memory of a peer's engine, for `pull`. Returns its read rate, None if that could not be measured.

        `fence_fd` is that of the fence's page, if the peer gave it: only then its engine's offers are read ahead.
        `closed` is called once the memory is unmapped again, but not if this raises KVBridgeError. The fds stay the
        caller's. A cancelled call leaves the memory mapped: that happens when the agent ends.
        """
        kept = [os.dup(fd) for fd in fds]
        kept_fence = [] if fence_fd is None else [os.dup(fence_fd)]

        def mapped() -> tuple[AttachedPool, FencePage | None]:
            try:
                memory = AttachedPool.open(pool, handles, kept, self.device, is_peers=True)
                return memory, next(map(_fence_page, kept_fence), None)
            finally:
                close_fds([*kept, *kept_fence])

        rate: Rate | None = await self._job(lambda settle: self._pulling.open(memory_id, mapped, closed, settle))
        return rate

    def close_peer(self, memory_id: EngineMemoryId) -> None:
        """Undo one `open_peer`: after the last, the memory is unmapped once nothing reads it."""
        self._put(lambda: self._pulling.close(memory_id))

    async def is_proved(self, route: Route, lane: int, probe: Probe) -> bool:
        """Whether our lane holds what the sender says it wrote."""
        return bool(await self._call(lambda: self._jobs.is_proved(route, lane, probe)))

    async def prepare_endpoints(self) -> StagingEndpoints:
        """Make slots, and a fabric that no peer knows yet, for `switch`. Raises FabricError."""
        endpoints: StagingEndpoints = await self._made(lambda: self._at_work.prepare())
        return endpoints

    async def renew_fabrics(self) -> None:
        """Let peers reach our slots by another fabric only. Their sessions name the one before. Raises FabricError."""
        self.site = await self._made(lambda: self._at_work.renew_fabrics())

    async def replace_send_slots(self) -> None:
        """Send from new slots. The old ones, and their memory, are left to the writes out of them.

        Raises OperatorError, FabricError or CudaError, with nothing replaced.
        """
        await self._made(self._replace_send_slots)

    def switch(self, endpoints: StagingEndpoints) -> None:
        """Use these slots from now on. Work begun with the old ones goes on; no peer may be connected to those."""
        self.site = endpoints.site
        self._put(lambda: self._switch(endpoints))

    def _stage(self) -> Site:
        resources = self._at_work
        if resources.current is None:
            card = resources.bare.fabric
            try:
                resources.stage()
            except Exception as error:  # no memory or no fabric: nothing of it is kept
                reason = f"staging: slots of {card.slot_bytes} bytes in {card.memory} cannot be made: {error}"
                raise FabricError("no_staging", reason) from error
            self._new_send_slots(resources)
        return resources.site

    def _switch(self, endpoints: StagingEndpoints) -> None:
        self._at_work.switch(endpoints)
        self._new_send_slots(self._at_work)

    def _new_send_slots(self, resources: Resources) -> None:
        resources.begin_era(self.send_orders.slots.make(resources.endpoint.send_slots.slots))

    def _replace_send_slots(self) -> None:
        self._at_work.add_sources()
        self._new_send_slots(self._at_work)

    def discard(self, endpoints: StagingEndpoints) -> None:
        """Close endpoints that were prepared and will not be used."""
        self._put(endpoints.closing.close)

    async def let_go(self, attached: AttachedMemory) -> bool:
        """Wait until no job given before touches this memory, or will. Writes out of slots may still be under way.

        Returns False if that is not known: the thread has died, and the GPU may still run what it enqueued. Ends the
        process if the wait takes too long: to unmap memory under a running kernel would be worse.
        """
        attached.liveness.has_left = True
        await self.watchdog.until(self._unused(attached))
        return self._thread.is_alive()

    async def _unused(self, attached: AttachedMemory) -> None:
        ends = self._loop.time() + self.watchdog.stuck_s
        while True:
            is_late = self._loop.time() > ends  # taken before the check: if this process was stopped, the GPU was not
            if not await self._may_use(attached):
                return
            if is_late:
                self.watchdog.end(f"the GPU has not finished a move in {self.watchdog.stuck_s:g} s")
            await asyncio.sleep(0.001)

    @property
    def _at_work(self) -> Resources:
        assert self._resources is not None
        return self._resources

    async def _may_use(self, attached: AttachedMemory) -> bool:
        try:
            return bool(await self._call(lambda: self._is_using(attached)))
        except FabricError:  # a dead data plane begins nothing more
            return False

    def _put(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        os.eventfd_write(self._wake, 1)

    async def _made(self, make: Callable[[], Any]) -> Any:
        """Run `make`, which may start threads, on the thread. Returns or raises what it does."""

        def run() -> Any:
            with self._starting_threads():
                return make()

        return await self._call(run)

    async def _job(self, job: Callable[[Settle], Job]) -> Any:
        """Run a job on the thread. Returns what it settles with, or raises that."""
        done: asyncio.Future[Any] = self._loop.create_future()
        settle = lambda found, error: self._tell(_settle, done, found, error)  # noqa: E731
        self._put(lambda: self._resume(job(settle), None))
        while not (await asyncio.wait({done}, timeout=ALIVE_S))[0]:
            if not self._thread.is_alive():
                raise FabricError("data_plane_died", "the data plane's thread has ended")
        return await done

    async def _call(self, task: Callable[[], Any]) -> Any:
        """Run `task` on the thread. Returns or raises what it does."""

        def job(settle: Settle) -> Job:
            try:
                found = task()
            except Exception as error:
                settle(None, error)
            else:
                settle(found, None)
            yield from ()

        return await self._job(job)

    # On the thread:

    def _run(self) -> None:
        self._take_turn()  # and keep it at the end: the loop begins nothing after us
        try:
            self._serve()
        except (Exception, DeviceLost) as error:  # nobody else can move anything: the agent must end
            log.exception("the data plane died")
            self._tell(self._listener.on_data_plane_died, error)
        finally:
            self._flush_reports()
            if self._resources is not None:
                self._resources.close()
                self._pulling.close_all()

    def _serve(self) -> None:
        last_move = 0.0
        while not self._stopping:
            if self._failure is not None:
                raise self._failure
            self.watchdog.beat()
            moved = self._do_tasks()
            if self._resources is None:
                self._sleep(IDLE_S)
                continue
            moved = self._poll(self._resources) or moved
            has_told = self._flush_reports()
            now = self._clock()
            if moved:
                last_move = now
                if not has_told:
                    continue
            waits = self._writing or self._moving or self._fenced or self.receive_orders.lent
            still_s = now - last_move
            if waits or has_told:  # whom we told needs the interpreter
                pause_s = _pause(still_s)
            else:
                lingers = self._resources.current is not None and still_s < (self._linger_s or 0.0)
                pause_s = LINGER_NAP_S if lingers else IDLE_S
            self._is_idle = not waits
            if self._sleep(pause_s):
                last_move = now
            self._is_idle = False

    def _sleep(self, seconds: float) -> bool:
        """True if the loop woke us: there is a task, or one will come soon. Meanwhile the loop may take our turn."""
        self._turn.release()
        try:
            is_woken = bool(select.select([self._wake], [], [], seconds)[0])
        finally:
            self._take_turn()
        if is_woken:
            os.eventfd_read(self._wake)
        return is_woken

    def _take_turn(self) -> None:
        """Take the turn when the loop has ended its own. Ends the process if it hangs there: nobody else would."""
        looks = 0
        while not self._turn.acquire(timeout=WATCHDOG_LOOK_S):
            looks += 1  # looks and not seconds are counted: while this process was stopped, the loop was too
            if looks * WATCHDOG_LOOK_S >= self.watchdog.stuck_s:
                self.watchdog.end(f"the loop has not ended the thread's turn in {self.watchdog.stuck_s:g} s")

    def _do_tasks(self) -> bool:
        moved = bool(self._tasks)
        while self._tasks and not self._stopping:
            self._tasks.popleft()()
            self.watchdog.beat()
            self._flush_reports()
        if self.send_orders.open:
            self._send()  # after the tasks: one may have stopped a transfer
        return moved

    @property
    def compiling(self) -> int:
        """How many kernels are being compiled or wait for it. Callable from any thread."""
        return 0 if self._resources is None else self._resources.copier.compiling

    def _take_up(self, order: SendingOrder | ReceivingOrder, attached: AttachedMemory | None, asked_at: float) -> None:
        match order:
            case Pull():  # the first, as it is what small requests wait for
                assert attached is not None
                self._resume(self._pulling.pull(order, attached), None)
            case Progress():
                self.send_orders.progress(order, asked_at)
            case Credit():
                self.send_orders.credit(order, asked_at)
            case StopSending():
                self.send_orders.stop(order)
            case Lend():
                self.receive_orders.lend(order)
            case StopReceiving():
                self.receive_orders.stop(order)
            case Warm() | WarmPull() if attached is None:
                pass
            case _:
                assert attached is not None
                self._begin(order, attached, asked_at)

    def _begin(self, order: Order, attached: AttachedMemory, asked_at: float) -> None:
        """Take up an order that needs our engine's memory."""
        match order:
            case SendOrder():
                self.send_orders.order(order, attached, asked_at)
            case Digest():
                self._resume(self._pulling.digest(order, attached, asked_at), None)
            case Watch(fence=fence):
                self._resume(self._pulling.watch(attached, fence), None)
            case ReceiveOrder():
                self.receive_orders.order(order, attached)
            case Fill():
                self._resume(self._pulling.fill(order, attached), None)
            case Warm(parts=parts):
                for part in parts:
                    self._put(partial(self._warm, attached, partial(self._jobs.warm, attached, part)))
            case WarmPull(memory_id=memory_id, pairs=pairs, kinds=kinds):
                for theirs, ours in pairs:
                    for has_digest in kinds:
                        begin = partial(self._pulling.warm, attached, memory_id, theirs, ours, has_digest)
                        self._put(partial(self._warm, attached, begin))

    def _warm(self, attached: AttachedMemory, begin: Callable[[], None]) -> None:
        """Begin to compile, unless the engine leaves. Errors are only logged."""
        if attached.liveness.has_left:
            return
        try:
            begin()
        except Exception:
            log.exception("could not get ready for a peer")

    def _send(self) -> bool:
        """Gather ready chunks while there are slots, for about GATHERING_S. Returns whether anything was begun."""
        ends, has_begun = self._clock() + GATHERING_S, False
        while (not has_begun or self._clock() < ends) and (leaving := self.send_orders.begin()) is not None:
            self._resume(self._jobs.send(leaving), None)
            has_begun = True
        return has_begun

    def _open(self) -> None:
        resources = self._make_resources()
        self.site, self.digests = resources.site, resources.copier.digests
        self.device, self.description = resources.copier.device, resources.copier.description
        if resources.current is not None:
            self._new_send_slots(resources)
        wait_s, clock = self._write_timeout_s, self._clock
        orders = self.send_orders, self.receive_orders
        self._jobs = Jobs(resources, self._incarnation, *orders, wait_s, clock)
        self._pulling = PullRoute(resources, self._tell, *orders, wait_s, clock, lambda: bool(self._tasks))
        self._resources = resources
        if self._linger_s is None:
            self._linger_s = LINGER_ON_GPU_S if resources.copier.memory == "vram" else 0.0
        self.linger = Linger(self._linger_s, is_needed=lambda: bool(self._tasks) or not self._is_idle)
        self._nap_exactly()

    def _nap_exactly(self) -> None:
        nap_exactly()

    def _starting_threads(self) -> AbstractContextManager[None]:
        """NIXL's threads would inherit our timer slack."""
        return usual_naps()

    def _poll(self, resources: Resources) -> bool:
        """Resume the jobs whose wait is over. Returns whether anything has moved."""
        is_moving = self._poll_moves(resources)
        return (resources.current is not None and self._poll_slots(resources)) or is_moving

    def _poll_moves(self, resources: Resources) -> bool:
        """The same of all that do not wait for a write."""
        fenced, self._fenced = self._fenced, []
        now = self._clock()
        for wait, job in fenced:
            if wait.is_over:
                self._resume(job, None)
            elif now > wait.deadline:
                self._fail(job, wait.late())
            else:
                self._fenced.append((wait, job))
        moves = resources.copier.poll()
        for moved in moves:
            if moved.ticket in self._moving:
                self._resume(self._moving.pop(moved.ticket), moved)
            else:  # its job has begun several, and waits for another
                self._moved[moved.ticket] = moved
        if moves and self._pulling.closing:
            self._pulling.close_unread()
        return bool(moves) or len(self._fenced) < len(fenced)

    def _poll_slots(self, resources: Resources) -> bool:
        """Take what landed in our slots, and send what is ready. Returns whether anything has moved."""
        self._flush_reports()  # slots that can be lent again, before the next are scattered
        is_moving = False
        for endpoint in resources.endpoints:
            if not (events := endpoint.fabric.poll(self._clock())):
                continue
            is_moving = True
            if any(isinstance(event, Noticed) for event in events):
                self._do_tasks()  # an order is given before its notices can come, but perhaps after we last took orders
            for event in events:
                if isinstance(event, Noticed):
                    self._notice(event.payload)
                elif (id(endpoint.fabric), event.id) in self._writing:  # else it is from a probe that was given up
                    self._resume(self._writing.pop((id(endpoint.fabric), event.id)), event)
        is_moving = (bool(self.send_orders.open) and self._send()) or is_moving
        if resources.retired and not self._moving and not self._fenced:
            resources.close_retired()
        resources.close_unused_sources(self.send_orders.slots.is_used)
        return is_moving

    def _resume(self, job: Job, event: Event) -> None:
        """Run a job up to its next wait, or its end."""
        self._go_on(job, job.send, event)

    def _go_on(self, job: Job, step: Callable[[T], Wait], sent: T) -> None:
        try:
            wait = step(sent)
        except StopIteration:
            return
        match wait:
            case WaitOnLoop():
                if wait.is_over:
                    self._resume(job, None)
                else:
                    self._fenced.append((wait, job))
            case WaitMove(ticket=ticket) if ticket in self._moved:
                self._resume(job, self._moved.pop(ticket))
            case WaitMove(ticket=ticket):
                self._moving[ticket] = job
            case WaitWrite(fabric=fabric, id=number):
                self._writing[id(fabric), number] = job

    def _notice(self, payload: bytes) -> None:
        try:
            notice = self._notices.decode(payload)
        except BadFrame as error:
            return self.receive_orders.report(Malformed(error.code))
        if (landed := self.receive_orders.landed(notice)) is not None:
            self.receive_orders.note_landed(landed, self._clock())
            failpoint("receiver.notice_landed")
            self._scatter(landed)

    def _scatter(self, landed: LandedChunk) -> None:
        self._resume(self._jobs.scatter(landed), None)
        self._flush_reports()

    def _fail(self, job: Job, error: EngineError) -> None:
        """Throw into a job whose wait is in vain. It reports the error itself, once what it has begun is over."""
        self._go_on(job, job.throw, error)

    def _is_using(self, attached: AttachedMemory) -> bool:
        """Whether a move uses this memory. Also ends the jobs that wait for this engine: its fence may never come."""
        memory = attached.memory  # the same in all its epochs: scales may have changed since a job began
        error = EngineError("engine_left", "the engine left before its forward had finished")
        self._end_waits(lambda wait: wait.attached.memory is memory, error)
        copier = self._at_work.copier
        if copier.is_using(memory):
            return True
        copier.forget(memory)
        return False

    def _end_waits(self, is_over: Callable[[WaitOnLoop], bool], error: EngineError) -> None:
        left = [job for wait, job in self._fenced if is_over(wait)]
        self._fenced = [(wait, job) for wait, job in self._fenced if not is_over(wait)]
        for job in left:
            self._fail(job, error)

    def _tell(self, hear: Callable[..., None], *args: object) -> None:
        self._telling.append((hear, args))

    def _flush_reports(self, post: Callable[..., object] | None = None) -> bool:
        """Send the loop all reports at once: waking it costs more than the reports. Returns whether there were any."""
        if self.send_orders.has_reports:
            sent = self.send_orders.take_reports()
            self._tell(self._listener.on_send_orders, [*self.send_orders.take_reached(), *sent])
        if self.receive_orders.has_reports:
            received = self.receive_orders.take_reports()
            self._tell(self._listener.on_receive_orders, [*self.receive_orders.take_reached(), *received])
        if not self._telling:
            return False
        telling, self._telling = self._telling, []
        self._told.extend(telling)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear
            (post or self._loop.call_soon_threadsafe)(_call_all, self._told)
        return True


def _call_all(calls: deque[tuple[Callable[..., None], tuple[object, ...]]]) -> None:
    """Call everything in order. If one call fails, the others still happen."""
    while calls:
        hear, args = calls.popleft()
        try:
            hear(*args)
        except Exception as error:
            context = {"message": f"{hear.__qualname__} failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)


def _pause(still_s: float) -> float:
    """How long to nap when nothing has moved for `still_s`: briefly at first, then longer and longer."""
    return POLL_NAP_S if still_s < POLL_NAPS_S else min(still_s / 20, LONGEST_NAP_S)


def _settle(done: asyncio.Future[Any], found: Any, error: Exception | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(found)
    else:
        done.set_exception(error)


def _fence_page(fd: int) -> FencePage | None:
    """A peer's page. None if it is no such page: then nothing is read ahead."""
    try:
        return FencePage(fd)
    except EngineError as error:
        log.info("a peer's fence cannot be mapped: %s", error)
        return None
