"""If slots stay in quarantine, other slots replace them, and late writes to them have no effect."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvbridge_proto.engine import Done, Failed
from kvbridge_proto.status import SlotCounts

from kvbridge.agent.metrics import Metrics
from kvbridge.agent.rebuild import FEW_TIMES, PAUSE_S, REBUILD_AGAIN_S, Rebuilder
from kvbridge.dataplane.orders import SendSlots
from kvbridge.device.driver import CudaError
from kvbridge.errors import FabricError
from kvbridge.exchange.actions import Send
from kvbridge.routes.slots.receive_slots import ReceiveSlots
from testing.agents import OracleEngine, agent, attached
from testing.oracle import Shape
from testing.pairs import Benches, carry
from testing.waiting import wait_for
from tests.integration.agent.disturbed import pair_of, stands_still
from tests.integration.agent.test_abandon import SCALE
from tests.unit.exchange.world import World

HALF, LESS, ALL, BUSY, NONE = (
    SlotCounts(free=free, lent=busy, landed=busy, quarantined=quarantined)
    for free, busy, quarantined in ((2, 0, 2), (3, 0, 1), (0, 0, 4), (0, 1, 2), (0, 0, 0))
)


@pytest.mark.proves("G6", "G16")
def test_an_agent_that_stands_still_costs_others_their_slots_for_a_while_only(tmp_path: Path) -> None:
    scale = replace(SCALE, more={"silence_s": "1", "rebuild_s": "1"})
    with pair_of(tmp_path, scale) as pair:
        for seed in (1, 2):  # the second time it is the new slots that are left behind
            stands_still(pair, seed)


@pytest.mark.parametrize(
    "looks",
    [
        ((HALF, 100.0, False), (BUSY, 109.9, False), (BUSY, 110.0, True), (HALF, 111.0, True)),
        ((HALF, 0.0, False), (LESS, 9.0, False), (HALF, 11.0, False), (HALF, 20.9, False), (HALF, 21.0, True)),
        ((ALL, 0.0, False), (ALL, 10.0, True)),
        ((NONE, 0.0, False), (NONE, 50.0, False)),
    ],
    ids=["however busy the others are", "anew once fewer are", "all", "without slots"],
)
def test_patience_begins_when_half_are_quarantined(
    looks: Sequence[tuple[SlotCounts, float, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(is_quiet=False, rebuild_s=10.0)
    for counts, now, is_over in looks:
        monkeypatch.setattr(played.slots, "counts", lambda counts=counts: counts)
        played.look(now)
        assert played.rebuilder.is_pausing is is_over


class Played:
    """Engines and data plane of a rebuilder, and the clock: what is under way ends when `is_quiet`."""

    def __init__(
        self,
        failures: Sequence[Exception] = (),
        is_quiet: bool = True,
        slots: int = 2,
        memory: str = "dram",
        rebuild_s: float = 1.0,
    ) -> None:
        self.now, self.is_quiet, self.paused, self.tried = 0.0, is_quiet, 0, 0
        self.attempt_s = 0.0
        self.site = SimpleNamespace(fabric=SimpleNamespace(memory=memory))
        self.resumed = self.discarded = 0
        self.rebuilt: list[float] = []
        self.renewed: list[float] = []
        self.reasons: list[str] = []
        self.receiver = self
        self.slots = ReceiveSlots(slots)
        self.slots.lend(2, "t", "peer")
        self.slots.quarantine("t")
        self._failures = deque(failures)
        self.local = SendSlots(2)
        self.send_failures = deque[Exception]()
        self.replaced: list[float] = []
        self.far: set[str] = set()  # transfers
        self.rebuilder = Rebuilder(
            self.slots,
            lambda: self.slots.quarantined(self.far),
            self.local,
            self,
            self,
            Metrics(),
            rebuild_s,
            lambda: self.now,
        )

    async def prepare_endpoints(self) -> object:
        self.tried += 1
        self.now += self.attempt_s
        if self._failures:
            raise self._failures.popleft()
        return object()

    async def replace_send_slots(self) -> None:
        self.now += self.attempt_s
        if self.send_failures:
            raise self.send_failures.popleft()
        self.replaced.append(self.now)
        self.local.make(2)

    async def renew_fabrics(self) -> None:
        self.tried += 1
        self.now += self.attempt_s
        if self._failures:
            raise self._failures.popleft()

    def renew_fabric(self, site: object, reason: str) -> None:
        self.renewed.append(self.now)
        self.reasons.append(reason)
        for transfer in self.far:
            self.slots.drain(transfer)

    def pause_wants(self) -> bool:
        return self.pause()

    def pause(self) -> bool:
        self.paused += 1
        return self.is_quiet

    def resume(self) -> None:
        self.resumed += 1

    def discard(self, endpoints: object) -> None:
        self.discarded += 1

    def rebuild(self, endpoints: object, reason: str) -> None:
        self.rebuilt.append(self.now)
        self.reasons.append(reason)
        self.slots.rebuilt()
        self.local.make(2)

    def look(self, *times: float) -> None:
        async def story() -> None:
            for self.now in times:
                await self.rebuilder.check()

        asyncio.run(story())


def test_a_rebuild_that_finds_no_memory_leaves_all_as_it_was_and_is_tried_again_later() -> None:
    full = CudaError("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
    played = Played([full, OSError("no memory"), FabricError("rebuild_refused", "")])
    played.look(0.0, 1.0, 1.5, 11.5, 12.0, 22.0)
    assert played.tried == 3 and not played.paused and played.slots.counts().quarantined == 2
    assert played.rebuilder.refused == "rebuild_refused"
    played.look(33.0)
    assert not played.rebuilder.refused and played.rebuilt == [33.0] and not played.slots.counts().quarantined


@pytest.mark.parametrize(("what", "due"), [("receive slots", 1.0), ("send slots", 0.0), ("fabric", FEW_TIMES)])
def test_the_next_attempt_is_due_after_the_end_of_one_that_failed(
    what: str, due: float, caplog: pytest.LogCaptureFixture
) -> None:
    failure = FabricError("fabric_unavailable", "")
    played = Played([failure], slots=8 if what == "fabric" else 2)
    played.attempt_s = 5.0
    if what == "fabric":
        played.far = {"t"}
    elif what == "send slots":
        played.slots.drain("t")
        slot = played.local.take("b")
        played.local.quarantine(slot)
        played.send_failures.append(failure)
    again_at = due + played.attempt_s + REBUILD_AGAIN_S
    played.look(0.0, due, again_at - 0.1)
    assert played.rebuilder.refused and f"the {what} cannot be replaced: code=fabric_unavailable" in caplog.text
    played.look(again_at)
    assert not played.rebuilder.refused and (played.rebuilt or played.replaced or played.renewed)


def test_that_a_rebuild_is_refused_is_over_once_none_is_needed() -> None:
    played = Played([FabricError("rebuild_refused", "")])
    played.look(0.0, 1.0)
    assert played.rebuilder.refused
    played.slots.drain("t")
    played.look(1.5)
    assert not played.rebuilder.refused and played.tried == 1


def test_what_is_under_way_may_end_before_a_rebuild_but_not_for_ever() -> None:
    played = Played(is_quiet=False)
    played.look(0.0, 1.0, 1.5)
    assert played.rebuilder.is_pausing and not played.rebuilt
    played.is_quiet = True
    played.look(1.6)
    assert played.rebuilt == [1.6] and played.tried == 1 and not played.rebuilder.is_pausing
    played = Played(is_quiet=False)
    played.look(0.0, 1.0, 1.0 + PAUSE_S - 0.1, 1.0 + PAUSE_S)
    assert played.rebuilt == [1.0 + PAUSE_S]


@pytest.mark.proves("G6")
def test_a_few_slots_are_replaced_later_and_at_no_requests_cost() -> None:
    due = FEW_TIMES * 1.0
    played = Played(slots=8)
    played.look(0.0, due - 0.1)
    assert not played.rebuilt and not played.paused
    played.look(due)
    assert played.rebuilt == [due] and played.slots.counts().free == 8
    assert played.reasons == ["rebuild_s: 2 of 8 receive slots in quarantine for 10 s"]
    played = Played(slots=8, is_quiet=False)
    played.look(0.0, due, due + PAUSE_S)
    assert not played.rebuilt and played.resumed == played.discarded == 1 and not played.rebuilder.is_pausing
    played.look(due + PAUSE_S + 1.0, 2 * due)
    assert played.tried == 1, "requests are paused again too soon"
    played.is_quiet = True
    played.look(2 * due + PAUSE_S + 1.0)
    assert len(played.rebuilt) == 1 and played.tried == 2


def test_slots_that_come_and_go_are_no_reason_to_replace_any() -> None:
    """A busy agent always has some transfer that was aborted a moment ago."""
    played = Played(slots=8)
    for number in range(100):
        played.slots.lend(2, f"next {number}", "peer")
        played.slots.quarantine(f"next {number}")
        played.slots.drain(f"next {number - 1}" if number else "t")
        played.look(float(number))
    assert not played.tried and not played.paused
    played.look(99.0 + FEW_TIMES)
    assert played.rebuilt == [99.0 + FEW_TIMES]


def test_a_few_slots_on_a_gpu_are_not_replaced_as_their_memory_would_not_come_back() -> None:
    played = Played(slots=8, memory="vram")
    played.look(0.0, 100 * FEW_TIMES, 200 * FEW_TIMES)
    assert not played.tried and not played.rebuilder.refused


@pytest.mark.proves("G6")
@pytest.mark.parametrize("memory", ["dram", "vram"])
def test_a_few_slots_that_only_the_fabric_reaches_are_freed_by_another_fabric(memory: str) -> None:
    played, due = Played(slots=8, memory=memory), FEW_TIMES * 1.0
    played.far = {"t"}
    played.look(0.0, due - 0.1)
    assert not played.paused
    played.look(due)
    assert played.renewed == [due] and not played.rebuilt and played.slots.counts().free == 8
    assert played.reasons == ["2 of 8 receive slots in quarantine for senders of other machines or pods"]
    played = Played([FabricError("fabric_unavailable", "")], slots=8, memory=memory, is_quiet=False)
    played.far = {"t"}
    played.look(0.0, due, due + 1.0)
    assert played.rebuilder.is_pausing and not played.tried
    played.look(due + PAUSE_S)
    assert played.resumed == 1 and not played.rebuilder.is_pausing and not played.tried, "requests go first"
    played.is_quiet = True
    tried_at = 2 * due + PAUSE_S + 1.0
    played.look(due + PAUSE_S + 1.0, tried_at)
    assert played.tried == 1 and played.rebuilder.refused == "fabric_unavailable" and played.resumed == 2
    played.look(tried_at + 0.5, tried_at + REBUILD_AGAIN_S - 0.1)
    assert played.tried == 1 and played.rebuilder.refused == "fabric_unavailable", "nobody can see it any more"
    played.look(tried_at + REBUILD_AGAIN_S)
    assert played.renewed == [tried_at + REBUILD_AGAIN_S] and not played.rebuilt and not played.rebuilder.refused


def test_a_fabric_that_could_not_be_renewed_is_refused_no_more_once_proof_has_come() -> None:
    played, due = Played([FabricError("fabric_unavailable", "")], slots=8), FEW_TIMES * 1.0
    played.far = {"t"}
    played.look(0.0, due, due + 1.0)
    assert played.rebuilder.refused == "fabric_unavailable"
    played.slots.drain("t")
    played.look(due + 2.0, due + REBUILD_AGAIN_S)
    assert played.tried == 1 and not played.rebuilder.refused and not played.rebuilder.is_pausing


def test_proof_that_comes_at_last_makes_a_rebuild_needless() -> None:
    played = Played(is_quiet=False)
    played.look(0.0, 1.0)
    assert played.rebuilder.is_pausing
    played.slots.drain("t")
    played.look(1.1)
    assert not played.rebuilt and played.resumed == played.discarded == 1 and not played.rebuilder.is_pausing
    played.rebuilder.close()
    assert played.discarded == 1


def test_what_was_prepared_is_closed_when_the_agent_ends_before_it_is_used() -> None:
    played = Played(is_quiet=False)
    played.look(0.0, 1.0)
    played.rebuilder.close()
    assert played.discarded == 1 and not played.rebuilder.is_pausing


@pytest.mark.proves("G6")
def test_requests_that_come_before_a_rebuild_wait_for_it_and_those_under_way_end() -> None:
    world = World(slots=4)
    receiving = world.receivers[0].receiving
    for request in ("early", "late"):
        world.offer(request, 16, 4)
    world.hold.add("write")
    world.fetch("early", 16)
    assert not receiving.pause()
    world.want("late", 16)
    world.go_on()
    assert list(world.answers()) == ["early"] and isinstance(world.answers()["early"], Done)
    assert receiving.pause() and not world.senders[0].sending.outgoing_transfers
    world.do(world.receivers[0], receiving.rebuilt(world.receivers[0].engine, world.now))
    world.run()
    world.check_done("late")


def test_who_makes_his_slots_anew_fails_what_flows_out_and_leaves_what_waits_to_its_session(world: World) -> None:
    world.hold.add("write")
    for request in ("flows", "waits"):
        world.want(request, 16)
    world.serve("flows", 16, 4)
    sending = world.senders[0].sending
    states = {out.claim.want: out.state.name for out in sending.outgoing_transfers.values()}
    assert sorted(states.values()) == ["FLOWING", "WAITING"] and not sending.pause(is_alone=True)
    told = [action.body for action in sending.rebuilt("test") if isinstance(action, Send)]
    assert [type(body).__name__ for body in told] == ["Failing"]


@pytest.mark.proves("G6")
def test_what_is_claimed_before_a_rebuild_waits_for_it(world: World) -> None:
    """Claims that nothing was begun of go with their sessions, and come again; a pause that ends lets them go on."""
    sending = world.sender.sending
    assert sending.pause(is_alone=True)
    for request in ("early", "late"):
        world.offer(request, 16, 4)
        world.want(request, 16)
    world.run()
    assert sending.pause(is_alone=True) and {out.state.name for out in sending.outgoing_transfers.values()} == {
        "WAITING"
    }
    world.do(world.sender, sending.resume())
    world.run()
    assert [type(answer) for answer in world.answers().values()] == [Done, Done]
    sending.pause(is_alone=True)
    world.do(world.sender, sending.rebuilt("test"))
    world.begin("after", 16)
    world.check_done("after")


def test_a_claim_that_takes_nothing_waits_for_no_rebuild(world: World) -> None:
    """Its receiver has forgotten it already, and would not make it again: the blocks would be held for nobody."""
    world.sender.sending.pause(is_alone=True)
    world.offer("r", 16, 4)
    world.fetch("r", 16, first=16)
    assert isinstance(world.answers()["r"], Done) and world.released()["r"].code == ""


def test_one_of_several_ranks_goes_on_before_its_rebuild() -> None:
    """What its twin has given cannot be claimed again: the want would fail."""
    world = World(senders=2)
    assert world.sender.sending.pause(is_alone=False)
    world.begin("r", 16)
    world.check_done("r")


def test_slots_that_we_send_from_are_replaced_at_once_and_no_session_ends() -> None:
    played = Played()
    played.slots.drain("t")
    slot = played.local.take("b")
    played.look(0.0, 2.0)
    assert not played.replaced
    played.local.quarantine(slot)
    played.look(3.0, 3.5, 60.0)
    assert played.replaced == [3.0] and not played.rebuilt and not played.paused
    assert played.local.counts() == SlotCounts(free=2, lent=0, landed=0, quarantined=0)
    assert played.local.is_used(slot.era)
    played.local.give_back(slot)  # the late write has ended: that slot is nobody's any more
    assert played.local.free == 2 and not played.local.is_used(slot.era)


def test_send_slots_for_which_there_is_no_memory_are_tried_again_later() -> None:
    played = Played()
    played.slots.drain("t")
    slots = [played.local.take("b") for _ in range(2)]
    for slot in slots:
        played.local.quarantine(slot)
    played.send_failures.append(CudaError("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"))
    played.look(0.0, 1.0, REBUILD_AGAIN_S - 0.1)
    assert not played.replaced and played.rebuilder.refused and played.local.counts().quarantined == 2
    played.look(REBUILD_AGAIN_S, REBUILD_AGAIN_S + 1.0)
    assert played.replaced == [REBUILD_AGAIN_S] and not played.rebuilder.refused


@pytest.mark.proves("G6")
def test_a_receiver_that_stands_still_costs_others_the_slots_that_we_send_from_for_a_moment_only(
    bench_of: Benches, stack: ExitStack, tmp_path: Path
) -> None:
    """Its writes stay under way as long as it stands still: nothing ends them, and nothing else may use their slots."""
    options: dict[str, Any] = {
        "routes": "nixl",
        "send_slots": 2,
        "receive_slots": 8,
        "slot_bytes": 65536,
        "silence_s": 4,
        "write_timeout_s": 1,
        "rebuild_s": 3600,
    }
    shape = Shape("nhd", block_tokens=16, blocks=64)
    bench = bench_of(shape, shape, **options)
    running = stack.enter_context(agent(tmp_path, "other", **options))
    other = stack.enter_context(attached(running, shape))
    sender, still, prefill = bench.sender, bench.receiver, bench.sender.agent
    table = list(range(64))

    def carried(receiver: OracleEngine, name: str, **want: float) -> Done | Failed:
        return carry(sender, receiver, name, table, table, 1024, **want)

    assert isinstance(carried(still, "a"), Done) and isinstance(carried(other, "b"), Done)
    wait_for(lambda: not prefill.status.transfers)  # a receiver may hear first that one is over
    still.want("stuck", prefill.address, table, range(1024))
    wait_for(lambda: len(prefill.status.transfers) == 1)
    os.kill(still.agent.process.pid, signal.SIGSTOP)
    try:
        sender.offer("stuck", table, 1024, hold_s=5.0)
        wait_for(lambda: "replaced the send slots: late writes go on" in prefill.text())
        assert isinstance(carried(other, "c"), Done)
    finally:
        os.kill(still.agent.process.pid, signal.SIGCONT)
    assert isinstance(still.answer("stuck"), Failed)
    assert isinstance(carried(still, "e"), Done) and isinstance(carried(other, "f"), Done)
    wait_for(lambda: prefill.status.send_slots.free == 2)
