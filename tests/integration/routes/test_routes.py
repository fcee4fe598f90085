"""Choosing and proving a route, and who may use it for how long: with real slots, and a fabric that can fail."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from itertools import chain, count
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from kvbridge_proto.peer import DeviceCard, Probe, SlotLease, Sum
from msgspec.structs import replace as replace_struct

from kvbridge.dataplane.attached import (
    KEPT_WITHDRAWALS,
    AttachedMemory,
    EngineLiveness,
    Job,
    WaitEngineHeard,
    WaitFence,
    WaitMove,
    WaitWrite,
    taken_back,
)
from kvbridge.dataplane.data_plane import GATHERING_S, DataPlane
from kvbridge.dataplane.orders import ReceiveOrders, SendOrders, SendSlots
from kvbridge.dataplane.resources import Resources, StagingEndpoint, StagingEndpoints
from kvbridge.device.copier import Compiling, CpuBlockCopier, DeviceLost, Moved
from kvbridge.device.staging import Staging
from kvbridge.errors import FabricError, KVBridgeError
from kvbridge.exchange.orders import Credit, Digest, Digested, Progress, Pull, SendOrder, Warm
from kvbridge.exchange.route import Routed, Site
from kvbridge.geometry.plan import Planner
from kvbridge.geometry.shard import assign
from kvbridge.routes.choice import Connected, pattern, prove
from kvbridge.routes.pull.halves import ReadLease
from kvbridge.routes.pull.job import PullRoute
from kvbridge.routes.slots.jobs import Jobs
from kvbridge.routes.slots.slot_routes import Landing, Target
from kvbridge.transport.fabric import WriteFailed, WriteLate, Wrote
from testing.fabric import LoopbackFabric, LoopbackNetwork
from testing.oracle import Shape, block_table, build, tables_of
from testing.proc import mapped
from testing.refusals import refused
from tests.integration.device.attached import attached, engine_of

SLOT_BYTES = 1 << 20


class Busy(CpuBlockCopier):
    """A GPU that never finishes."""

    def is_using(self, pool: object) -> bool:
        return True


class Agents:
    """Two agents' resources on one loopback network. With `vram` their cards say that the slots are on GPUs."""

    def __init__(self, stack: ExitStack, vram: bool = False) -> None:
        self.network = LoopbackNetwork()
        self.stack = stack
        self.sender, self.receiver = self.resources("a", vram), self.resources("b", vram)

    def resources(self, incarnation: str, vram: bool = False) -> Resources:
        endpoints = [self.endpoint(incarnation)] + ([self.endpoint(f"{incarnation}.host")] if vram else [])
        cards = [endpoint.card() for endpoint in endpoints]
        device = None
        if vram:
            cards[0] = replace_struct(cards[0], memory="vram")
            device = DeviceCard(machine="m", uuid="GPU-none", payload=bytes(64))
        site = Site(cards[0], cards[1] if vram else None, device)
        ours = StagingEndpoints(endpoints[0], endpoints[1] if vram else None, site, ExitStack())
        return Resources(CpuBlockCopier(), site, lambda _: ours, ExitStack(), ours)

    def endpoint(self, name: str) -> StagingEndpoint:
        fabric = LoopbackFabric(self.network, name)
        receive_slots = self.stack.enter_context(closing(Staging.pageable(SLOT_BYTES, 2)))
        sending = partial(Staging.pageable, SLOT_BYTES, 2)
        endpoint = StagingEndpoint(name, receive_slots, fabric, CpuBlockCopier(), sending)
        self.stack.callback(endpoint.close_sources)
        self.stack.callback(fabric.close)
        fabric.register(receive_slots.base, receive_slots.size_bytes)
        endpoint.add_source()
        return endpoint

    def landing(self, lane: int = 3) -> Landing:
        return Landing("b", self.receiver.site, lane)


def run(resources: Resources, job: Any) -> Any:
    """Drive a generator as the data plane does; what it returns."""
    answer = None
    while True:
        try:
            wait = job.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(wait, WaitMove):
            (answer,) = resources.copier.poll()
        else:
            assert isinstance(wait, WaitWrite)
            events: list[Any] = []
            while not events:
                events = [each for each in wait.fabric.poll(0.0) if isinstance(each, Wrote | WriteFailed | WriteLate)]
            (answer,) = events


def proved(agents: Agents, clock: Callable[[], float] = time.monotonic, **site: Any) -> tuple[Target, Routed]:
    landing = agents.landing()
    return run(agents.sender, prove(agents.sender, replace(landing, site=replace(landing.site, **site)), 5, clock))


def is_there(agents: Agents, routed: Routed) -> bool:
    jobs = Jobs(agents.receiver, "b", SendOrders(0), ReceiveOrders(), 1.0)
    assert routed.probe is not None
    return jobs.is_proved(routed.route, routed.probe.lane, routed.probe)


def test_the_pattern_lands_in_the_lane_and_nowhere_else(stack: ExitStack) -> None:
    agents = Agents(stack)
    target, routed = proved(agents)
    assert (routed.route, target.route, target.serial, routed.probe.lane) == ("nixl", "nixl", 5, 3)
    assert is_there(agents, routed)
    assert not is_there(agents, replace(routed, probe=Probe(lane=4, seed=1, size_bytes=64, bytes_per_s=1.0)))
    memory = agents.receiver.endpoint.receive_slots
    assert not any(agents.receiver.endpoint.copier.read(memory.span(i)).strip(b"\0") for i in range(2))


@pytest.mark.parametrize("size_bytes", [0, 1 << 40, SLOT_BYTES])
def test_a_probe_of_an_impossible_size_proves_nothing(stack: ExitStack, size_bytes: int) -> None:
    agents = Agents(stack)
    probe = Probe(lane=0, seed=1, size_bytes=size_bytes, bytes_per_s=1e9)
    assert not is_there(agents, Routed("nixl", "", probe))


def test_one_wrong_byte_proves_nothing(stack: ExitStack) -> None:
    agents = Agents(stack)
    _, routed = proved(agents)
    lane = agents.receiver.endpoint.receive_slots.lane(3)
    agents.receiver.endpoint.copier.fill(lane, bytes([pattern(routed.probe.seed, 1)[0] ^ 1]))
    assert not is_there(agents, routed)


def test_goes_on_to_the_next_route_and_says_why(stack: ExitStack) -> None:
    agents = Agents(stack, vram=True)
    agents.network.fail("b", "cable out")  # the fabric of the GPU's slots; that of the host's is another
    target, routed = proved(agents)
    assert routed.route == "host" and target.name == "b.host"
    assert "direct: " in routed.why and "nixl: cable out" in routed.why
    assert is_there(agents, routed)
    with pytest.raises(FabricError, match="not connected"):
        agents.sender.endpoint.fabric.notify("b", b"x")  # what does not work is let go


def test_a_slow_route_is_taken_only_when_there_is_no_other(stack: ExitStack) -> None:
    agents = Agents(stack, vram=True)
    _, routed = proved(agents, clock=_clock())
    assert routed.route == "host" and "too slow to be right" in routed.why and routed.probe.bytes_per_s > 1e9


def _clock() -> Callable[[], float]:
    """A clock whose first readings, those of the rounds of one route, are half a second apart, and then a moment."""
    readings = chain((i * 0.5 for i in range(6)), (100 + i * 1e-6 for i in count()))
    return lambda: next(readings)


def test_says_what_stood_against_every_route(stack: ExitStack) -> None:
    agents = Agents(stack, vram=True)
    agents.network.fail("b", "cable out")
    agents.network.fail("b.host", "cable out")
    with refused(FabricError, "no_route") as caught:
        proved(agents)
    assert [reason.partition(":")[0] for reason in caught.value.reasons] == ["direct", "nixl", "host"]


def test_an_old_target_that_ends_late_does_not_cut_the_new_one(stack: ExitStack) -> None:
    agents = Agents(stack)
    jobs = Jobs(agents.sender, "a", SendOrders(0), ReceiveOrders(), 1.0)
    heard: list[Any] = []

    def connected() -> Connected:
        run(agents.sender, jobs.connect(agents.landing(), lambda found, error: heard.append(found or error)))
        assert isinstance(heard[-1], Connected), heard[-1]
        return heard[-1]

    first = connected()
    old = jobs._targets["b"]
    jobs._users[old] += 1  # a write of it is under way
    second = connected()
    assert second.serial != first.serial and old in jobs._leaving
    jobs._users[old] -= 1
    jobs._close_unused(old)
    agents.sender.endpoint.fabric.notify("b", b"still connected")
    jobs.disconnect("b", first.serial)  # what is gone already: the new one stays
    agents.sender.endpoint.fabric.notify("b", b"still connected")
    jobs.disconnect("b", second.serial)
    with pytest.raises(FabricError):
        agents.sender.endpoint.fabric.notify("b", b"x")


class Ears:
    """Nobody is told anything."""


@asynccontextmanager
async def serving(resources: Resources, ears: Any = None, **more: Any) -> AsyncIterator[tuple[DataPlane, Any]]:
    """A data plane with its thread, and an engine's memory."""
    data_plane = DataPlane(lambda: resources, "a", ears or Ears(), 1.0, **more)
    await data_plane.start()
    with attached(build(Shape())) as (_, pool):
        yield data_plane, pool
    await data_plane.stop()


class Ended(Exception):
    """The process would have ended here."""


def ended(reason: str) -> NoReturn:
    raise Ended(reason)


@pytest.mark.proves("G19")
async def test_memory_is_not_let_go_of_while_a_kernel_may_run(stack: ExitStack) -> None:
    busy = replace(Agents(stack).sender, copier=Busy())
    async with serving(busy, stuck_s=0.05, end=ended) as (data_plane, pool):
        with pytest.raises(Ended, match="has not finished"):
            await data_plane.let_go(AttachedMemory(1, pool, None))


class Reading(CpuBlockCopier):
    """A pull that ends when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.sender: object = None
        self.go_on = threading.Event()

    def pull(self, sender: object, *_: Any) -> int:
        self.sender = sender
        return self._over(0)

    def poll(self) -> list[Moved]:
        if self.sender is None:
            return super().poll()
        if not self.go_on.is_set():
            return []
        self.sender = None
        return super().poll()

    def is_using(self, pool: object) -> bool:
        return pool is self.sender


async def test_a_peers_memory_is_unmapped_once_no_pull_reads_it_any_more(stack: ExitStack) -> None:
    class Deaf(Ears):
        def on_receive_orders(self, reports: object) -> None: ...

    copier, closed, name = Reading(), asyncio.Event(), ("b", 1, "")
    lent = stack.enter_context(engine_of(build(Shape())))
    inode = str(os.fstat(lent.fds[0]).st_ino)
    async with serving(replace(Agents(stack).sender, copier=copier), Deaf()) as (data_plane, pool):
        (takes,) = assign([lent.held.pool], pool.pool)
        plan = Planner(lent.held.pool, pool.pool).plan(takes, 0, 16, SLOT_BYTES)
        before = mapped(os.getpid(), inode)
        await data_plane.open_peer(name, lent.held.pool, lent.handles, lent.fds, closed.set)
        data_plane.give(Pull("t", "r", name, plan, {}, {}, 0, 1, ReadLease(0.0), 0), AttachedMemory(1, pool, None))
        data_plane.close_peer(name)
        await data_plane._call(lambda: None)  # the thread is through with what came before
        assert copier.sender is not None and not closed.is_set() and mapped(os.getpid(), inode) > before
        copier.go_on.set()
        await asyncio.wait_for(closed.wait(), 60)
        assert mapped(os.getpid(), inode) == before


@pytest.mark.proves("G8")
async def test_a_data_plane_that_has_died_proves_nothing(stack: ExitStack) -> None:
    """What it has left to a GPU may still run: the engine waits for the end of our process."""
    died = threading.Event()

    class Broken(Ears):
        def on_data_plane_died(self, error: BaseException) -> None:
            died.set()

    def fail() -> None:
        raise RuntimeError("broken on purpose")

    async with serving(Agents(stack).sender, Broken()) as (data_plane, pool):
        assert await data_plane.let_go(AttachedMemory(1, pool, None))
        data_plane._put(fail)
        await asyncio.to_thread(data_plane._thread.join)
        assert not await data_plane.let_go(AttachedMemory(2, pool, None))
    assert died.is_set()


class Slow(CpuBlockCopier):
    """Getting ready takes as long as a test likes."""

    def __init__(self) -> None:
        super().__init__()
        self.warmed: list[object] = []
        self.go_on = threading.Event()

    def warm(self, pool: object, part: object, slot: object) -> None:
        self.warmed.append(pool)
        assert self.go_on.wait(60)


@pytest.mark.proves("G19")
async def test_nothing_more_is_made_ready_for_an_engine_that_leaves(stack: ExitStack) -> None:
    slow = Slow()
    _, next_pool = stack.enter_context(attached(build(Shape())))
    async with serving(replace(Agents(stack).sender, copier=slow)) as (data_plane, pool):
        parts = Planner(pool.pool, pool.pool).samples(SLOT_BYTES, is_sender=True)
        before = AttachedMemory(1, pool, None)
        data_plane.give(Warm(parts * 3), before)
        now = replace(before, epoch=2)  # its scales changed
        data_plane.give(Warm(parts * 3), now)
        while not slow.warmed:  # noqa: ASYNC110 - the data plane's thread begins it
            await asyncio.sleep(0.001)
        leaving = asyncio.create_task(data_plane.let_go(now))
        await asyncio.sleep(0.05)
        assert not leaving.done(), "one is under way, in this engine's memory"
        slow.go_on.set()
        await leaving
        assert slow.warmed == [pool]
        data_plane.give(Warm(parts), AttachedMemory(3, next_pool, None))
        for _ in ("the order", "what it has put behind itself"):
            await data_plane._call(lambda: None)  # the thread is through with what came before
        assert slow.warmed == [pool] + [next_pool] * len(parts)


class Lengthy(CpuBlockCopier):
    """Each gather takes longer than the data plane gathers for at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.done: list[str] = []

    def gather(self, *args: Any, **more: Any) -> int:
        self.now += 2 * GATHERING_S
        self.done.append("gathered")
        return self._over(0)


def polled(agents: Agents, copier: CpuBlockCopier, target: Target, clock: Callable[[], float]) -> DataPlane:
    """A sender's data plane that has no thread: a test polls it. It tells nobody anything."""
    data_plane = DataPlane(lambda: replace(agents.sender, copier=copier), "a", Ears(), 1.0, clock=clock)
    data_plane._nap_exactly = lambda: None  # the thread is pytest's, and agents that it starts would inherit it
    data_plane._open()
    data_plane._flush_reports = lambda: None
    data_plane._jobs._targets["b"] = target
    return data_plane


def order(data_plane: DataPlane, transfer: str, memory: Any, *slots: int) -> None:
    """A chunk of this engine's memory for each of the receiver's slots."""
    plan: Any = SimpleNamespace(chunks=len(slots), chunk=lambda index: SimpleNamespace(size_bytes=SLOT_BYTES))
    attachment: Any = SimpleNamespace(
        epoch=1, memory=memory, liveness=EngineLiveness(0.0), has_reached=lambda count: True
    )
    data_plane.give(SendOrder(transfer, 1, "r", "b", plan, b"", 1, "xxh3"), attachment)
    data_plane.give(Progress(transfer, {}, len(slots), 0), attachment)
    data_plane.give(Credit(transfer, tuple(SlotLease(slot, 1) for slot in slots)), attachment)


def test_a_chunk_leaves_before_the_next_one_is_gathered(stack: ExitStack) -> None:
    """On a CPU to begin a gather is to do it: with slots for all of a transfer nothing else would have its turn."""
    agents, copier = Agents(stack), Lengthy()
    target, _ = proved(agents)
    data_plane = polled(agents, copier, target, lambda: copier.now)
    post = target.endpoint.fabric.write

    def write(*args: Any) -> int:
        copier.done.append("posted")
        return post(*args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(target.endpoint.fabric, "write", write)
        order(data_plane, "t", None, 0, 1)
        data_plane._do_tasks()
        for _ in range(3):
            data_plane._poll(data_plane._at_work)
    assert copier.done == ["gathered", "posted", "gathered", "posted"]
    os.close(data_plane._wake)


class New(CpuBlockCopier):
    """The kernels of one engine's gathers are compiled for as long as a test likes."""

    def __init__(self, engine: object) -> None:
        super().__init__()
        self.engine, self.is_compiled = engine, False
        self.gathered: list[object] = []

    def gather(self, pool: object, *args: Any, **more: Any) -> int:
        if pool is self.engine and not self.is_compiled:
            raise Compiling(lambda: self.is_compiled)
        self.gathered.append(pool)
        return self._over(0)


def test_what_needs_new_kernels_keeps_nobody_else_waiting(stack: ExitStack) -> None:
    agents, copier = Agents(stack), New("new")
    target, _ = proved(agents)
    data_plane = polled(agents, copier, target, lambda: 0.0)
    for slot, engine in enumerate(("new", "known")):
        order(data_plane, engine, engine, slot)
    data_plane._do_tasks()
    data_plane._poll(data_plane._at_work)
    assert copier.gathered == ["known"]
    copier.is_compiled = True
    data_plane._poll(data_plane._at_work)
    assert copier.gathered == ["known", "new"]
    os.close(data_plane._wake)


async def test_a_fence_that_never_comes_ends_the_job(stack: ExitStack) -> None:
    class Never:
        def reached(self, count: int) -> bool:
            return False

        def close(self) -> None: ...

    ended: list[str] = []
    chunk: Any = None

    def job(attachment: AttachedMemory, deadline: float) -> Job:
        try:
            yield WaitFence(attachment, deadline, 7, chunk)
        except KVBridgeError as error:
            ended.append(error.code)

    async with serving(Agents(stack).sender) as (data_plane, pool):
        attachment = AttachedMemory(1, pool, Never())
        data_plane._put(lambda: data_plane._resume(job(attachment, 0.0), None))
        data_plane._put(lambda: data_plane._resume(job(attachment, 1e12), None))
        while not ended:  # noqa: ASYNC110 - the data plane's thread ends it
            await asyncio.sleep(0.01)
        await data_plane.let_go(attachment)
    assert ended == ["fence_late", "engine_left"]


@pytest.mark.proves("G6")
def test_endpoints_of_before_are_kept_while_they_write_and_refused_when_they_are_too_many(stack: ExitStack) -> None:
    agents = Agents(stack)
    before = agents.sender.current
    made: list[StagingEndpoints] = []

    def make(number: int) -> StagingEndpoints:
        endpoint = agents.endpoint(f"a.{number}")
        made.append(StagingEndpoints(endpoint, None, Site(endpoint.card()), ExitStack()))
        return made[-1]

    resources = Resources(CpuBlockCopier(), before.site, make, ExitStack(), before)
    resources.join(before.endpoint, "b", agents.receiver.endpoint.fabric.descriptor())
    address = before.endpoint.send_slots.address(0), agents.receiver.endpoint.receive_slots.address(0)
    before.endpoint.fabric.write("b", *address, 64, b"", deadline=1e9)
    resources.switch(resources.prepare())
    assert resources.endpoint is made[0].endpoint and resources.endpoints == (made[0].endpoint, before.endpoint)
    resources.close_retired()
    assert resources.retired, "a write was under way"
    resources.switch(resources.prepare())
    with pytest.raises(FabricError, match="keep, or wait for writes out of, 6291456 bytes"):
        resources.prepare()
    while before.endpoint.fabric.is_busy:
        before.endpoint.fabric.poll(0.0)
    resources.close_retired()
    assert not resources.retired and resources.endpoints == (made[1].endpoint,)
    assert resources.prepare().endpoint.name == "a.3"


@pytest.mark.proves("G6")
def test_send_slots_of_before_are_kept_while_a_write_or_a_proof_reads_them(stack: ExitStack) -> None:
    agents, slots = Agents(stack, vram=True), SendSlots(0)
    sender, endpoint = agents.sender, agents.sender.endpoint
    sender.begin_era(slots.make(2))
    sender.join(endpoint, "b", agents.receiver.endpoint.fabric.descriptor())
    local, source, before = slots.take("b"), endpoint.source, endpoint.send_slots
    endpoint.copier.fill(before.span(local.index), b"kept" * (SLOT_BYTES // 4))
    agents.network.stall("b")
    endpoint.fabric.write("b", before.address(local.index), agents.receiver.endpoint.receive_slots.base, 64, b"", 1e9)

    def replaced() -> int:
        """How many replaced sources are left."""
        sender.close_unused_sources(slots.is_used)
        return len(endpoint.sources) - 1

    later = []
    for _ in range(2):
        sender.add_sources()
        sender.begin_era(slots.make(2))
        assert slots.free == 2 and [len(each.sources) for each in sender.current.all] == [len(endpoint.sources)] * 2
        later.append(slots.take("b"))
    assert endpoint.staging_of(local) is before and endpoint.staging_of(later[1]) is endpoint.send_slots
    with pytest.raises(FabricError, match="late writes go on out of all send slots that were made, 3 times"):
        sender.add_sources()
    assert replaced() == 2, "slots of both are in use"
    slots.give_back(later[0])
    assert replaced() == 1
    slots.give_back(local)
    source.lanes.popleft()
    assert replaced() == 1, "a write that nobody waits for reads it, and a proof"
    agents.network.resume("b")
    endpoint.fabric.poll(0.0)
    assert replaced() == 1, "a proof reads it"
    source.lanes.append(0)
    assert replaced() == 0
    with pytest.raises(FabricError, match="not all is registered"):
        endpoint.fabric.write("b", before.base, agents.receiver.endpoint.receive_slots.base, 64, b"", 1e9)


@pytest.mark.parametrize(
    ("heard_at", "withdrawn_at", "said_after", "expected"),
    [
        (99.9, 0.0, 0.0, None),
        (99.9, 99.8, 99.7, None),
        (99.9, 99.2, 99.1, "blocks_taken_back"),
        (99.9, 98.9, 98.8, None),
        (99.4, 0.0, 0.0, None),
        (99.4, 100.2, 99.4, "blocks_taken_back"),
        (99.4, 99.3, 99.2, "blocks_taken_back"),
    ],
    ids=[
        "nothing",
        "just now",
        "while the data plane was slow",
        "before it was asked",
        "unheard",
        "heard late",
        "unheard, early",
    ],
)
def test_a_gather_over_which_nobody_listened_counts_once_it_was_heard_that_nothing_was_taken_back(
    stack: ExitStack, heard_at: float, withdrawn_at: float, said_after: float, expected: str | None
) -> None:
    def withdraw() -> None:
        if withdrawn_at:
            heard, attachment.liveness.heard_at = attachment.liveness.heard_at, said_after
            attachment.liveness.withdrew(1, withdrawn_at)
            attachment.liveness.heard_at = heard

    _, pool = stack.enter_context(attached(build(Shape())))
    attachment = AttachedMemory(1, pool, None, EngineLiveness(heard_at))
    story = taken_back(attachment, 1, 99.0, 1.0, lambda: 100.0)
    if withdrawn_at < 100:
        withdraw()
    try:
        wait = next(story)
        assert isinstance(wait, WaitEngineHeard) and heard_at < 99.5 and not wait.is_over
        attachment.liveness.heard_at = 99.99
        assert not wait.is_over
        if withdrawn_at > 100:
            withdraw()
        attachment.liveness.heard_at = 100.0
        assert wait.is_over
        story.send(None)
    except StopIteration as end:
        found = end.value
    assert found == expected or found[0] == expected


@pytest.mark.parametrize("what", ["gather", "digest"])
@pytest.mark.parametrize(("withdrawn_at", "code"), [(98.9, None), (99.2, "blocks_taken_back")])
def test_what_is_read_of_blocks_that_were_withdrawn_meanwhile_does_not_count(
    stack: ExitStack, what: str, withdrawn_at: float, code: str | None
) -> None:
    """A digest of what another request put there would fail a transfer that is right."""
    agents, send_orders = Agents(stack), SendOrders(0)
    agents.sender.begin_era(send_orders.slots.make(2))
    jobs = Jobs(agents.sender, "a", send_orders, ReceiveOrders(), 1.0, lambda: 100.0)
    _, pool = stack.enter_context(attached(build(Shape())))
    attachment = AttachedMemory(1, pool, None, EngineLiveness(withdrawn_at))
    attachment.liveness.withdrew(1, withdrawn_at)
    attachment.liveness.heard_at = 99.9
    (takes,), tables = assign([pool.pool], pool.pool), block_table(pool.pool, tables_of(pool.pool, 16))
    plan = Planner(pool.pool, pool.pool).plan(takes, 0, 16, SLOT_BYTES)
    if what == "digest":
        pulling = PullRoute(agents.sender, lambda *args: None, send_orders, ReceiveOrders(), 1.0, lambda: 100.0)
        run(agents.sender, pulling.digest(Digest("t", 1, "r", plan, tables, Sum(0, 7)), attachment, 99.0))
        (report,) = send_orders.take_reports()
        assert isinstance(report, Digested)
        failure = report.failure
    else:
        send_orders.order(SendOrder("t", 1, "r", "b", plan, b"", 1, "xxh3"), attachment, 99.0)
        send_orders.progress(Progress("t", tables, 1, 0), 99.0)
        send_orders.credit(Credit("t", (SlotLease(0, 1),)), 99.0)
        *_, failure = run(agents.sender, jobs._gathered(send_orders.begin(), proved(agents)[0]))
    assert (failure and failure[0]) == code


@pytest.mark.proves("G13")
def test_a_withdrawal_of_another_request_changes_nothing() -> None:
    word = EngineLiveness(99.1)
    word.withdrew(2, 99.2)
    assert not word.has_withdrawn(1, since=99.0, before=99.5)
    word.withdrew(1, 99.3)
    assert word.has_withdrawn(1, since=99.0, before=99.5)
    assert not word.has_withdrawn(1, since=99.31, before=99.5), "what was asked for since then is offered anew"


def test_withdrawals_that_are_not_kept_may_have_been_any() -> None:
    word = EngineLiveness(99.1)
    word.withdrew(1, 99.2)
    for i in range(KEPT_WITHDRAWALS):
        word.withdrew(100 + i, 99.3)
    assert len(word.withdrawals) == KEPT_WITHDRAWALS and 1 not in word.withdrawals
    assert word.has_withdrawn(1, since=99.0, before=99.5) and word.has_withdrawn(3, since=99.2, before=99.5)
    assert not word.has_withdrawn(3, since=99.25, before=99.5)


def test_the_same_request_withdrawn_twice_may_have_been_taken_back_by_the_first() -> None:
    word = EngineLiveness(99.1)
    word.withdrew(1, 99.2)
    word.heard_at = 99.8
    word.withdrew(1, 99.9)
    assert word.has_withdrawn(1, since=99.0, before=99.5)


def test_who_has_left_is_not_waited_for(stack: ExitStack) -> None:
    """What was being read when it died may end after everybody has let go of it: its receiver waits for that end."""
    _, pool = stack.enter_context(attached(build(Shape())))
    left = AttachedMemory(1, pool, None, EngineLiveness(99.9, has_left=True))
    with pytest.raises(StopIteration) as ended:
        next(taken_back(left, 1, 99.0, 1.0, lambda: 100.0))
    assert ended.value.value[0] == "engine_left"


def test_what_can_fail_of_another_fabric_is_done_before_it_is_become(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else our site, and with it every greeting, would name a fabric that is gone."""
    resources = Agents(stack, vram=True).receiver

    def fails(*_: object) -> bytes:
        raise FabricError("descriptor_failed", "")

    def names() -> list[tuple[str, str]]:
        site = resources.site
        assert site.host is not None
        ends = zip((site.fabric, site.host), resources.endpoints, strict=True)
        return [(card.name, end.fabric.name) for card, end in ends]

    with monkeypatch.context() as patch:
        patch.setattr(resources.host.fabric, "successor", fails)
        with refused(FabricError, "descriptor_failed"):
            resources.renew_fabrics()
        assert names() == [("b", "b"), ("b.host", "b.host")]
    with monkeypatch.context() as patch:
        patch.setattr(LoopbackFabric, "descriptor", fails)
        resources.renew_fabrics()
    assert names() == [("b.2", "b.2"), ("b.2.host", "b.2.host")]
    assert resources.site.fabric == replace_struct(resources.endpoint.card(), memory=resources.site.fabric.memory)


def test_a_copier_that_cannot_be_closed_keeps_no_fabric_open() -> None:
    closed: list[str] = []

    def endpoints(name: str) -> StagingEndpoints:
        closing = ExitStack()
        closing.callback(closed.append, name)
        return StagingEndpoints(None, None, None, closing)

    def lost() -> None:
        raise DeviceLost("the GPU is gone")

    closing = ExitStack()
    closing.callback(lost)
    resources = Resources(CpuBlockCopier(), None, lambda _: endpoints("second"), closing, endpoints("first"))
    resources.switch(endpoints("second"))
    with pytest.raises(DeviceLost):
        resources.close()
    assert sorted(closed) == ["first", "second"]
