"""Choosing and proving a route, and who may use it how long: with real slots, and a fabric that can be told to fail."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, count
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from kvbridge_proto.peer import DeviceCard, Lease, Probe

from kvbridge.dataplane.attachment import KEPT, Attachment, Word
from kvbridge.dataplane.equipment import Dock, Docks, Equipment
from kvbridge.dataplane.jobs import Jobs
from kvbridge.dataplane.mover import SEND_S, Mover
from kvbridge.dataplane.receiving import Receiving
from kvbridge.dataplane.routes.choice import Connected, pattern, prove
from kvbridge.dataplane.routes.staged import Landing, Target
from kvbridge.dataplane.sending import Sending
from kvbridge.dataplane.waiting import Job, WaitFence, WaitMove, WaitWord, WaitWrite
from kvbridge.device.porter import Compiling, DeviceLost
from kvbridge.device.porter_cpu import CpuPorter
from kvbridge.device.staging import Staging
from kvbridge.errors import FabricError
from kvbridge.exchange.orders import Credit, Progress, SendOrder
from kvbridge.exchange.route import Routed, Site
from kvbridge.geometry.plan import Planner
from kvbridge.transport.fabric import WriteFailed, WriteLate, Wrote
from kvbridge.transport.fabric_loopback import LoopbackFabric, LoopbackNetwork
from tests.integration.device.attached import attached
from tests.support.oracle import Shape, build

SLOT_BYTES = 1 << 20


class Busy(CpuPorter):
    """A GPU that never finishes."""

    def is_using(self, pool: object) -> bool:
        return True


class Agents:
    """Two agents' equipment on one loopback network. With `vram` their cards say that the slots are on GPUs."""

    def __init__(self, stack: ExitStack, vram: bool = False) -> None:
        self.network = LoopbackNetwork()
        self.stack = stack
        self.source, self.sink = self.equipment("a", vram), self.equipment("b", vram)

    def equipment(self, boot: str, vram: bool) -> Equipment:
        docks = [self.dock(boot)] + ([self.dock(f"{boot}.host")] if vram else [])
        cards = [dock.card() for dock in docks]
        device = None
        if vram:
            cards[0] = _vram(cards[0])
            device = DeviceCard(machine="m", uuid="GPU-none", payload=bytes(64))
        site = Site(cards[0], cards[1] if vram else None, device)
        ours = Docks(docks[0], docks[1] if vram else None, site, ExitStack())
        return Equipment(CpuPorter(), site, lambda _: ours, ExitStack(), ours)

    def dock(self, name: str) -> Dock:
        fabric = LoopbackFabric(self.network, name)
        staging = [self.stack.enter_context(Staging.pageable(SLOT_BYTES, 2)) for _ in range(2)]
        self.stack.callback(fabric.close)
        fabric.register(staging[0].base, staging[0].size_bytes)
        fabric.register(staging[1].base, staging[1].size_bytes, is_target=False)
        return Dock(name, staging[0], staging[1], fabric, CpuPorter())

    def landing(self, lane: int = 3) -> Landing:
        return Landing("b", self.sink.site, lane)


def _vram(card: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(card, memory="vram")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def run(equipment: Equipment, job: Any) -> Any:
    """Drive a generator as the mover does; what it returns."""
    answer = None
    while True:
        try:
            wait = job.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(wait, WaitMove):
            (answer,) = equipment.porter.poll()
        else:
            assert isinstance(wait, WaitWrite)
            events: list[Any] = []
            while not events:
                events = [each for each in wait.fabric.poll(0.0) if isinstance(each, Wrote | WriteFailed | WriteLate)]
            (answer,) = events


def proved(agents: Agents, clock: Callable[[], float] = time.monotonic, **site: Any) -> tuple[Target, Routed]:
    landing = agents.landing()
    return run(agents.source, prove(agents.source, replace(landing, site=replace(landing.site, **site)), 5, clock))


def is_there(agents: Agents, routed: Routed) -> bool:
    jobs = Jobs(agents.sink, "b", Sending(0), Receiving(), 1.0)
    assert routed.probe is not None
    return jobs.is_proved(routed.route, routed.probe.lane, routed.probe)


def test_the_pattern_lands_in_the_lane_and_nowhere_else(stack: ExitStack) -> None:
    agents = Agents(stack)
    target, routed = proved(agents)
    assert (routed.route, target.route, target.serial, routed.probe.lane) == ("nixl", "nixl", 5, 3)
    assert is_there(agents, routed)
    assert not is_there(agents, replace(routed, probe=Probe(lane=4, seed=1, size_bytes=64, bytes_per_s=1.0)))
    memory = agents.sink.dock.inbound
    assert not any(agents.sink.dock.porter.read(memory.span(i)).strip(b"\0") for i in range(2))


@pytest.mark.parametrize("size_bytes", [0, 1 << 40, SLOT_BYTES])
def test_a_probe_of_an_impossible_size_proves_nothing(stack: ExitStack, size_bytes: int) -> None:
    agents = Agents(stack)
    probe = Probe(lane=0, seed=1, size_bytes=size_bytes, bytes_per_s=1e9)
    assert not is_there(agents, Routed("nixl", "", probe))


def test_one_wrong_byte_proves_nothing(stack: ExitStack) -> None:
    agents = Agents(stack)
    _, routed = proved(agents)
    lane = agents.sink.dock.inbound.lane(3)
    agents.sink.dock.porter.fill(lane, bytes([pattern(routed.probe.seed, 1)[0] ^ 1]))
    assert not is_there(agents, routed)


def test_goes_on_to_the_next_route_and_says_why(stack: ExitStack) -> None:
    agents = Agents(stack, vram=True)
    agents.network.fail("b", "cable out")  # the fabric of the GPU's slots; that of the host's is another
    target, routed = proved(agents)
    assert routed.route == "host" and target.name == "b.host"
    assert "direct: " in routed.why and "nixl: cable out" in routed.why
    assert is_there(agents, routed)
    with pytest.raises(FabricError, match="not connected"):
        agents.source.dock.fabric.notify("b", b"x")  # what does not work is let go


def test_a_slow_route_is_taken_only_when_there_is_no_other(stack: ExitStack) -> None:
    agents = Agents(stack, vram=True)
    _, routed = proved(agents, clock=_clock())
    assert routed.route == "host" and "too slow to be right" in routed.why and routed.probe.bytes_per_s > 1e9


def _clock() -> Callable[[], float]:
    """A clock whose first readings, those of the rounds of one route, are half a second apart, and then a moment."""
    readings = chain((i * 0.5 for i in range(7)), (100 + i * 1e-6 for i in count()))
    return lambda: next(readings)


def test_says_what_stood_against_every_route(stack: ExitStack) -> None:
    agents = Agents(stack, vram=True)
    agents.network.fail("b", "cable out")
    agents.network.fail("b.host", "cable out")
    with pytest.raises(FabricError) as caught:
        proved(agents)
    assert caught.value.code == "no_route"
    assert [reason.partition(":")[0] for reason in caught.value.reasons] == ["direct", "nixl", "host"]


def test_an_old_target_that_ends_late_does_not_cut_the_new_one(stack: ExitStack) -> None:
    agents = Agents(stack)
    jobs = Jobs(agents.source, "a", Sending(0), Receiving(), 1.0)
    heard: list[Any] = []

    def connected() -> Connected:
        run(agents.source, jobs.connect(agents.landing(), lambda found, error: heard.append(found or error)))
        assert isinstance(heard[-1], Connected), heard[-1]
        return heard[-1]

    first = connected()
    old = jobs._targets["b"]
    jobs._users[old] += 1  # a write of it is under way
    second = connected()
    assert second.serial != first.serial and old in jobs._leaving
    jobs._users[old] -= 1
    jobs._close_unused(old)
    agents.source.dock.fabric.notify("b", b"still connected")
    jobs.disconnect("b", first.serial)  # what is gone already: the new one stays
    agents.source.dock.fabric.notify("b", b"still connected")
    jobs.disconnect("b", second.serial)
    with pytest.raises(FabricError):
        agents.source.dock.fabric.notify("b", b"x")


class Ears:
    """Nobody is told anything."""


class Ended(Exception):
    """The process would have ended here."""


def ended(reason: str) -> NoReturn:
    raise Ended(reason)


def test_memory_is_not_let_go_of_while_a_kernel_may_run(stack: ExitStack) -> None:
    agents = Agents(stack)
    busy = replace(agents.source, porter=Busy())

    async def story() -> None:
        mover = Mover(lambda: busy, "a", Ears(), 1.0, stuck_s=0.05, end=ended)
        await mover.start()
        with attached(build(Shape())) as (_, pool), pytest.raises(Ended, match="has not finished"):
            await mover.let_go(Attachment(1, pool, None))
        await mover.stop()

    asyncio.run(story())


def test_a_mover_that_has_died_proves_nothing(stack: ExitStack) -> None:
    """What it has left to a GPU may still run: the engine waits for the end of our process."""
    agents, died = Agents(stack), threading.Event()

    class Broken(Ears):
        def on_mover_died(self, error: BaseException) -> None:
            died.set()

    def fail() -> None:
        raise RuntimeError("broken on purpose")

    async def story() -> None:
        mover = Mover(lambda: agents.source, "a", Broken(), 1.0)
        await mover.start()
        with attached(build(Shape())) as (_, pool):
            assert await mover.let_go(Attachment(1, pool, None))
            mover._put(fail)
            await asyncio.to_thread(mover._thread.join)
            assert not await mover.let_go(Attachment(2, pool, None))
        await mover.stop()

    asyncio.run(asyncio.wait_for(story(), 20))
    assert died.is_set()


class Slow(CpuPorter):
    """Getting ready takes as long as a test likes."""

    def __init__(self) -> None:
        super().__init__()
        self.warmed: list[object] = []
        self.go_on = threading.Event()

    def warm(self, pool: object, part: object, slot: object) -> None:
        self.warmed.append(pool)
        assert self.go_on.wait(10)


def test_nothing_more_is_made_ready_for_an_engine_that_leaves(stack: ExitStack) -> None:
    agents, slow = Agents(stack), Slow()

    async def story() -> None:
        mover = Mover(lambda: replace(agents.source, porter=slow), "a", Ears(), 1.0)
        await mover.start()
        with attached(build(Shape())) as (_, pool), attached(build(Shape())) as (_, next_pool):
            parts = Planner(pool.pool, pool.pool).samples(SLOT_BYTES, is_source=True)
            before = Attachment(1, pool, None)
            mover.warm(before, parts * 3)
            now = replace(before, epoch=2)  # its scales changed
            mover.warm(now, parts * 3)
            while not slow.warmed:  # noqa: ASYNC110 - the mover's thread begins it
                await asyncio.sleep(0.001)
            leaving = asyncio.create_task(mover.let_go(now))
            await asyncio.sleep(0.05)
            assert not leaving.done(), "one is under way, in this engine's memory"
            slow.go_on.set()
            await leaving
            assert slow.warmed == [pool]
            mover.warm(Attachment(3, next_pool, None), parts)
            await mover._call(lambda: None)  # the thread is through with what came before
            assert slow.warmed == [pool] + [next_pool] * len(parts)
        await mover.stop()

    asyncio.run(asyncio.wait_for(story(), 20))


class Lengthy(CpuPorter):
    """Each gather takes longer than the mover gathers for at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.done: list[str] = []

    def gather(self, *args: Any, **more: Any) -> int:
        self.now += 2 * SEND_S
        self.done.append("gathered")
        return self._over(0)


def test_a_chunk_leaves_before_the_next_one_is_gathered(stack: ExitStack) -> None:
    """On a CPU to begin a gather is to do it: with slots for all of a transfer nothing else would have its turn."""
    agents, porter = Agents(stack), Lengthy()
    target, _ = proved(agents)
    mover = Mover(lambda: replace(agents.source, porter=porter), "a", Ears(), 1.0, clock=lambda: porter.now)
    mover._open()
    mover._say = lambda: None  # type: ignore[method-assign]
    post = target.dock.fabric.write

    def write(*args: Any) -> int:
        porter.done.append("posted")
        return post(*args)

    plan: Any = SimpleNamespace(chunks=2, chunk=lambda index: SimpleNamespace(size_bytes=SLOT_BYTES))
    attachment: Any = SimpleNamespace(epoch=1, memory=None, word=Word(0.0), has_reached=lambda count: True)
    mover._jobs._targets["b"] = target
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(target.dock.fabric, "write", write)
        mover.give(SendOrder("t", "r", "b", plan, b"", 1, "xxh3"), attachment)
        mover.give(Progress("t", {}, 2, 0), attachment)
        mover.give(Credit("t", (Lease(0, 1), Lease(1, 1))), attachment)
        mover._do_tasks()
        for _ in range(3):
            mover._poll(mover._at_work)
    assert porter.done == ["gathered", "posted", "gathered", "posted"]
    os.close(mover._wake)


class New(CpuPorter):
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
    agents, porter = Agents(stack), New("new")
    target, _ = proved(agents)
    mover = Mover(lambda: replace(agents.source, porter=porter), "a", Ears(), 1.0, clock=lambda: 0.0)
    mover._open()
    mover._say = lambda: None  # type: ignore[method-assign]
    mover._jobs._targets["b"] = target
    plan: Any = SimpleNamespace(chunks=1, chunk=lambda index: SimpleNamespace(size_bytes=SLOT_BYTES))
    for slot, engine in enumerate(("new", "known")):
        attachment: Any = SimpleNamespace(epoch=1, memory=engine, word=Word(0.0), has_reached=lambda count: True)
        mover.give(SendOrder(engine, "r", "b", plan, b"", 1, "xxh3"), attachment)
        mover.give(Progress(engine, {}, 1, 0), attachment)
        mover.give(Credit(engine, (Lease(slot, 1),)), attachment)
    mover._do_tasks()
    mover._poll(mover._at_work)
    assert porter.gathered == ["known"]
    porter.is_compiled = True
    mover._poll(mover._at_work)
    assert porter.gathered == ["known", "new"]
    os.close(mover._wake)


def test_a_fence_that_never_comes_ends_the_job(stack: ExitStack) -> None:
    agents = Agents(stack)

    class Never:
        def reached(self, count: int) -> bool:
            return False

        def close(self) -> None: ...

    ended: list[str] = []
    chunk: Any = None

    def job(attachment: Attachment, deadline: float) -> Job:
        try:
            yield WaitFence(attachment, 7, deadline, chunk)
        except Exception as error:
            ended.append(error.code)

    async def story() -> None:
        mover = Mover(lambda: agents.source, "a", Ears(), 1.0)
        await mover.start()
        with attached(build(Shape())) as (_, pool):
            attachment = Attachment(1, pool, Never())
            mover._put(lambda: mover._resume(job(attachment, 0.0), None))
            mover._put(lambda: mover._resume(job(attachment, 1e12), None))
            while not ended:  # noqa: ASYNC110 - the mover's thread ends it
                await asyncio.sleep(0.01)
            await mover.let_go(attachment)
        await mover.stop()

    asyncio.run(asyncio.wait_for(story(), 10))
    assert ended == ["fence_late", "engine_left"]


def test_docks_of_before_are_kept_while_they_write_and_refused_when_they_are_too_many(stack: ExitStack) -> None:
    agents = Agents(stack)
    before = agents.source.current
    made: list[Docks] = []

    def make(number: int) -> Docks:
        dock = agents.dock(f"a.{number}")
        made.append(Docks(dock, None, Site(dock.card()), ExitStack()))
        return made[-1]

    equipment = Equipment(CpuPorter(), before.site, make, ExitStack(), before)
    equipment.join(before.dock, "b", agents.sink.dock.fabric.descriptor())
    address = before.dock.outbound.address(0), agents.sink.dock.inbound.address(0)
    before.dock.fabric.write("b", *address, 64, b"", deadline=1e9)
    equipment.switch(equipment.prepare())
    assert equipment.dock is made[0].dock and equipment.docks == (made[0].dock, before.dock)
    equipment.close_retired()
    assert equipment.has_retired, "a write was under way"
    equipment.switch(equipment.prepare())
    with pytest.raises(FabricError, match="keep, or wait for writes out of, 6291456 bytes"):
        equipment.prepare()
    while before.dock.fabric.is_busy:
        before.dock.fabric.poll(0.0)
    equipment.close_retired()
    assert not equipment.has_retired and equipment.docks == (made[1].dock,)
    assert equipment.prepare().dock.name == "a.3"


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
        "while the mover was slow",
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
            heard, attachment.word.heard_at = attachment.word.heard_at, said_after
            attachment.word.withdrew("r", withdrawn_at)
            attachment.word.heard_at = heard

    jobs = Jobs(Agents(stack).source, "a", Sending(0), Receiving(), 1.0, lambda: 100.0)
    _, pool = stack.enter_context(attached(build(Shape())))
    attachment = Attachment(1, pool, None, Word(heard_at))
    story = jobs._taken_back(attachment, "r", asked_at=99.0)
    if withdrawn_at < 100:
        withdraw()
    try:
        wait = next(story)
        assert isinstance(wait, WaitWord) and heard_at < 99.5 and not wait.is_over
        attachment.word.heard_at = 99.99
        assert not wait.is_over
        if withdrawn_at > 100:
            withdraw()
        attachment.word.heard_at = 100.0
        assert wait.is_over
        story.send(None)
    except StopIteration as end:
        found = end.value
    assert found == expected or found[0] == expected


def test_a_withdrawal_of_another_request_changes_nothing() -> None:
    word = Word(99.1)
    word.withdrew("other", 99.2)
    assert not word.has_withdrawn("r", since=99.0, before=99.5)
    word.withdrew("r", 99.3)
    assert word.has_withdrawn("r", since=99.0, before=99.5)
    assert not word.has_withdrawn("r", since=99.31, before=99.5), "what was asked for since then is offered anew"


def test_withdrawals_that_are_not_kept_may_have_been_any() -> None:
    word = Word(99.1)
    word.withdrew("r", 99.2)
    for i in range(KEPT):
        word.withdrew(f"other{i}", 99.3)
    assert len(word.withdrawals) == KEPT and "r" not in word.withdrawals
    assert word.has_withdrawn("r", since=99.0, before=99.5) and word.has_withdrawn("s", since=99.2, before=99.5)
    assert not word.has_withdrawn("s", since=99.25, before=99.5)


def test_the_same_request_withdrawn_twice_may_have_been_taken_back_by_the_first() -> None:
    word = Word(99.1)
    word.withdrew("r", 99.2)
    word.heard_at = 99.8
    word.withdrew("r", 99.9)
    assert word.has_withdrawn("r", since=99.0, before=99.5)


def test_who_has_left_is_not_waited_for(stack: ExitStack) -> None:
    """What was being read when it died may end after everybody has let go of it: its sink waits for that end."""
    jobs = Jobs(Agents(stack).source, "a", Sending(0), Receiving(), 1.0, lambda: 100.0)
    _, pool = stack.enter_context(attached(build(Shape())))
    with pytest.raises(StopIteration) as ended:
        next(jobs._taken_back(Attachment(1, pool, None, Word(99.9, has_left=True)), "r", asked_at=99.0))
    assert ended.value.value[0] == "engine_left"


def test_a_porter_that_cannot_be_closed_keeps_no_fabric_open() -> None:
    closed: list[str] = []

    def docks(name: str) -> Docks:
        closing = ExitStack()
        closing.callback(closed.append, name)
        return Docks(None, None, None, closing)  # type: ignore[arg-type]

    def lost() -> None:
        raise DeviceLost("the GPU is gone")

    closing = ExitStack()
    closing.callback(lost)
    equipment = Equipment(CpuPorter(), None, lambda _: docks("second"), closing, docks("first"))  # type: ignore[arg-type]
    equipment.switch(docks("second"))
    with pytest.raises(DeviceLost):
        equipment.close()
    assert sorted(closed) == ["first", "second"]
