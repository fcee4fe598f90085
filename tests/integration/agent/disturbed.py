"""Large transfers between real agents and engines, disturbed at random moments: stories that test the safety rule.

tests/integration/agent/test_abandon.py runs them on CPUs, tests/system/gpu/test_abandon.py on GPUs over every route.
Only devices, sizes and routes differ.
"""

from __future__ import annotations

import random
import re
import signal
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvbridge_proto.engine import READERS_S
from kvbridge_proto.status import Status

from kvbridge.failpoints import Way
from kvbridge.routes.pull.halves import LEASE_S
from testing.agents import is_at_rest
from testing.waiting import wait_for
from tests.system.faults.world import Side, World

DEADLINE_S = 60.0
DEATH_HOLD_S = 3.0  # of offers that a receiver may not live to claim
UNDISTURBED = 5
MOST_UNHEARD = 20  # transfers in a row for which a busy machine keeps the sender silent too long
SPARE_TIMES = 10  # where a busy machine disturbs too late
CALM_S, KILLED_CALM_S = 0.1, 0.2  # how long nobody may have written when the engine looks
REBUILT_S = 60.0
GONE = "agent_gone"
ENDED = r"a sender's process has ended: pid=\d+, (\d+) receive slots"
READ_ENDED = f"receiver.read_ended=pause:{1.5 * LEASE_S}@2"  # an agent that takes long over its second transfer
LONG_PAUSE_S = 2 * READERS_S + LEASE_S  # the sender is stopped meanwhile, and its blocks are used again
MOST_PAUSE_S = 40.0  # the same on the busiest machine

# What a sender's engine may be told of an offer whose receiver's agent died. Nothing, if all was gathered.
RELEASED_BY_DEATH = {"", "peer_lost", "write_failed", "offer_expired"}


@dataclass(frozen=True, slots=True)
class Scale:
    """What differs between the machines that the stories are told on. Slots for the agents, a prompt of many slots."""

    devices: tuple[str, str]
    route: str
    tokens: int
    slot_bytes: int
    receive_slots: int
    send_slots: int
    more: Mapping[str, str] = field(default_factory=dict)  # options of both agents

    @property
    def options(self) -> dict[str, str]:
        names = ("slot_bytes", "receive_slots", "send_slots")
        told = {name: str(getattr(self, name)) for name in names} | {"routes": self.route, "silence_s": "60"}
        return told | {"write_timeout_s": "30", "connect_s": "60"} | dict(self.more)


class Pair:
    """A sender and a receiver that have met."""

    def __init__(self, folder: Path, scale: Scale) -> None:
        self.scale = scale
        self._took: list[float] = []
        way: Way = "pull" if scale.route == "pull" else "slots"
        job = {"tokens": scale.tokens, "prompts": 1, "contents": 2, "layers": 8, "heads": 8, "width": 128}
        job |= {"deadline_s": DEADLINE_S, "look_s": 3600.0, "is_hasty": True}
        self.world = World(folder, options=scale.options, way=way, devices=scale.devices, **job)
        self.sender, self.receiver = self.world.sender, self.world.receiver

    def meet(self) -> None:
        self.exact()
        self._took.clear()
        for _ in range(UNDISTURBED):
            self.exact()
        (peer,) = self.receiver.becomes(lambda status: bool(status.peers), REBUILT_S).peers
        assert peer.route_name == self.scale.route, peer

    @property
    def usual_s(self) -> float:
        """How long transfers take, lately, that nobody disturbs."""
        return statistics.median(self._took[-UNDISTURBED:])

    @property
    def fastest_s(self) -> float:
        return min(self._took)

    def codes(self, number: int) -> tuple[str, str]:
        """How it ended for the receiver's and for the sender's engine; "" is well."""
        self.world.finish(DEADLINE_S)
        return self.receiver.ends[number]["code"], self.sender.ends[number]["code"]

    def exact(self) -> float:
        """A transfer that nobody disturbs: every byte of both memories is right. Returns its seconds.

        Where the receiver may not wait for a silent sender, a busy machine may need several tries.
        """
        for _ in range(MOST_UNHEARD if "silence_s" in self.scale.more else 1):
            self.world.calm()
            (number,) = self.world.begin(1, is_offered_first=True)
            if self.codes(number)[0] not in ("peer_lost", "peer_unreachable"):
                break
        assert self.codes(number) == ("", ""), (self.receiver.ends[number], self.receiver.agent.tail())
        self.audited()
        self._took.append(self.receiver.ends[number]["seconds"])
        return self._took[-1]

    def audited(self, calm_s: float = 0.0) -> None:
        """Nobody has written, until now, what is somebody else's."""
        time.sleep(calm_s)
        for side in self.world.sides.values():
            side.engine.tell("audit")
            side.engine.wait_for("audited")
            side.hear()

    def disturbed(self, after_s: float, victim: Side | None = None, number: int = signal.SIGKILL) -> tuple[str, str]:
        """A transfer disturbed after so long: abandoned, or its victim's agent signalled. The codes as in `codes`.

        Done before the disturbance it is right in every byte; else nobody has written after its end.
        """
        self.world.calm()
        told = {"after_s": after_s}
        if victim is not None:
            self.world.hurts(victim)
            told |= {"strike": victim.agent.pid, "number": number}
        hold_s = DEATH_HOLD_S if victim is self.receiver else DEADLINE_S
        (rendezvous,) = self.world.begin(1, is_offered_first=True, hold_s=hold_s, **told)
        codes = self.codes(rendezvous)
        if not codes[0]:
            self._took.append(self.receiver.ends[rendezvous]["seconds"])
        print(f"disturbed after {after_s * 1e3:.1f} of some {self.usual_s * 1e3:.1f} ms: {codes}")
        self.audited(CALM_S if victim is None else KILLED_CALM_S)
        return codes

    def is_sound(self) -> None:
        """All is free, the next transfer is exact, all is free again."""
        self.world.wait_attached()
        self.exact()
        self.world.is_clean()


@contextmanager
def pair_of(folder: Path, scale: Scale) -> Iterator[Pair]:
    pair = Pair(folder, scale)
    try:
        pair.meet()
        yield pair
    finally:
        pair.world.close()


def stands_still_over_a_withdrawal(pair: Pair, seed: int, rounds: int) -> None:
    """The sender's agent is stopped under way, and its engine, that must compute on, uses the blocks again.

    What was read of them meanwhile never counts.
    """
    chance, done, told = random.Random(seed), 0, 0
    while told < rounds or done == told:
        assert told < SPARE_TIMES * rounds, "no agent was stopped in time"
        told += 1
        pair.world.calm()
        pair.world.hurts(pair.sender)
        after_s = chance.uniform(0.2, 1.1) * pair.fastest_s
        (rendezvous,) = pair.world.begin(
            1, is_offered_first=True, after_s=after_s, strike=pair.sender.agent.pid, number=signal.SIGSTOP
        )
        assert pair.sender.agent.is_stopped(DEADLINE_S)
        pair.sender.engine.tell("take_back")
        time.sleep(READERS_S)
        pair.sender.engine.tell("reuse")
        pair.sender.engine.wait_for("reused")
        pair.sender.agent.send_signal(signal.SIGCONT)
        codes = pair.codes(rendezvous)
        print(f"taken back after {after_s * 1e3:.1f} ms: {codes}")
        done += not codes[0]
        pair.audited()
        pair.is_sound()


def reads_past_the_lease(pair: Pair) -> None:
    """The receiver's agent pauses as its read begins, or has ended; meanwhile the sender's is stopped.

    The lease ends, the blocks are used again, and the pause is over: what is read are rows of somebody else, or rows of
    which nobody knows until when they were there. They never count. `verify` must be never, or Done waits for the
    sender in any case.
    """
    for place in ("receiver.read_begun", "receiver.read_ended"):
        pause_s = LONG_PAUSE_S
        while not _is_past_its_lease(pair, place, pause_s):
            pause_s *= 2
            assert pause_s < MOST_PAUSE_S, "the sender's agent was never stopped during the pause"


def _is_past_its_lease(pair: Pair, place: str, pause_s: float) -> bool:
    """False if the sender's agent was stopped too late for this pause: then the read may count."""
    pair.world.calm()
    pair.world.hurts(pair.sender)
    pair.world.restarts_agent(pair.receiver, f"{place}=pause:{pause_s}")
    pair.world.wait_attached()
    paused = pair.receiver.agent.log.read_text().count(mark := f"failpoint {place}: pause")
    began = time.monotonic()
    (rendezvous,) = pair.world.begin(1, is_offered_first=True)  # whole, so it is one read
    is_paused = lambda: pair.receiver.agent.log.read_text().count(mark) > paused  # noqa: E731
    wait_for(is_paused, DEADLINE_S, pair.receiver.agent.tail)
    ends = time.monotonic() + pause_s
    pair.sender.agent.send_signal(signal.SIGSTOP)
    assert pair.sender.agent.is_stopped(DEADLINE_S)
    is_in_time = time.monotonic() < began + pause_s - READERS_S
    pair.sender.engine.tell("take_back")
    time.sleep(READERS_S)
    pair.sender.engine.tell("reuse")
    pair.sender.engine.wait_for("reused")
    time.sleep(max(0.0, ends + LEASE_S - time.monotonic()))  # it has read, and nobody has told it anything
    pair.sender.agent.send_signal(signal.SIGCONT)
    failed, _ = pair.codes(rendezvous)
    assert failed or not is_in_time, f"{place}: a read counted that ended after its lease"
    pair.audited()
    pair.is_sound()
    return is_in_time


def stands_still_for_a_while(pair: Pair) -> None:
    """The sender's agent is stopped while it is read, past the lease, and goes on: that costs time, and no transfer.

    The receiver's agent takes long over its second transfer, so that the lease of the claim is over when it has read;
    in the first they meet.
    """
    took = [0.0]
    while took[-1] <= 3 * LEASE_S:
        assert len(took) < SPARE_TIMES, f"none of these waited for the agent that stood still: {took}"
        pair.world.restarts_agent(pair.receiver, READ_ENDED)
        pair.world.wait_attached()
        pair.exact()
        pair.world.calm()
        (rendezvous,) = pair.world.begin(1, is_offered_first=True)
        time.sleep(LEASE_S / 3)
        pair.sender.agent.send_signal(signal.SIGSTOP)
        time.sleep(3 * LEASE_S)
        pair.sender.agent.send_signal(signal.SIGCONT)
        assert pair.codes(rendezvous) == ("", ""), (pair.receiver.ends, pair.receiver.agent.tail())
        took.append(pair.receiver.ends[rendezvous]["seconds"])
    pair.is_sound()


def stands_still(pair: Pair, seed: int) -> int:
    """The sender's agent is stopped under way: the receiver's slots, in quarantine for too long, are made anew.

    Its engine is left alone. When the sender's agent goes on, what it still writes goes where nothing is any more, and
    all is well again.
    Returns how many slots were in quarantine.
    """
    chance, receiver = random.Random(seed), pair.receiver
    for _ in range(2 * SPARE_TIMES):
        pair.world.calm()
        pair.world.hurts(pair.sender)
        before = _rebuilds(receiver.becomes(is_at_rest, REBUILT_S))
        after_s = chance.uniform(0.1, 0.6) * pair.fastest_s
        (rendezvous,) = pair.world.begin(
            1, is_offered_first=True, after_s=after_s, strike=pair.sender.agent.pid, number=signal.SIGSTOP
        )
        end = time.monotonic() + DEADLINE_S
        while rendezvous not in receiver.ends:
            receiver.hear(0.02)
            assert time.monotonic() < end, receiver.agent.tail()
        code = receiver.ends[rendezvous]["code"]
        assert code in ("", "peer_lost"), receiver.ends
        slots = receiver.becomes(lambda status: True, REBUILT_S).receive_slots
        print(f"stopped: {code or 'done'}, {slots}")
        is_enough = bool(code) and slots.quarantined * 2 >= pair.scale.receive_slots
        if is_enough:
            status = receiver.becomes(lambda status, before=before: _rebuilds(status) > before, REBUILT_S)
            assert status.engine is not None and status.engine.epoch == 1, "its engine was not left alone"
            assert status.receive_slots.free == pair.scale.receive_slots
        pair.sender.agent.send_signal(signal.SIGCONT)
        pair.codes(rendezvous)
        pair.is_sound()
        if is_enough:
            return slots.quarantined
    raise AssertionError("the sender's agent was never stopped while half of the slots were lent")


def _rebuilds(status: Status) -> float:
    return status.counters["kvbridge_rebuilds_total{replaced=slots}"]


def abandons(pair: Pair, seed: int, rounds: int) -> None:
    """The receiver's engine abandons at random moments; what comes next may find slots that are still quarantined."""
    chance, codes = random.Random(seed), list[str]()
    while len(codes) < rounds or codes.count("aborted") < rounds // 2:
        assert len(codes) < 8 * rounds, f"most transfers were over before they were abandoned: {codes}"
        share = (len(codes) % rounds + chance.random()) / rounds  # of how long one takes, which a busy machine changes
        failed, released = pair.disturbed(share * pair.usual_s)
        assert (failed, released) in {("", ""), ("aborted", "aborted"), ("aborted", "")}
        codes.append(failed)
    pair.is_sound()


def receivers_agent_dies(pair: Pair, seed: int, times: int) -> None:
    """The receiver's agent is killed: its engine hears that, the sender gets its blocks back and serves the next
    one."""
    for failed, released in _kills(pair, pair.receiver, seed, times):
        assert failed in ("", GONE)
        assert released in (RELEASED_BY_DEATH if failed else {""})
        assert not pair.sender.agent.is_dead()
        pair.sender.becomes(is_at_rest, REBUILT_S)


def senders_agent_dies(pair: Pair, seed: int, times: int) -> None:
    """The sender's agent is killed: the want fails by name, and no slot is free again before there is proof.

    That the connection is gone is not enough, nor is time: the receiver's agent has to see the end of the process.
    Where the receiver pulls, nobody else writes and no slot is lent.
    """
    quarantined = 0
    for more in range(SPARE_TIMES):
        for failed, released in _kills(pair, pair.sender, seed + more, times):
            assert failed in ("", "peer_lost") and released in ("", GONE)
            pair.receiver.becomes(is_at_rest, REBUILT_S)
            proved = sum(map(int, re.findall(ENDED, pair.receiver.agent.log.read_text()))) - quarantined
            print(f"{proved} slots were quarantined until the process of the sender's agent had ended")
            quarantined += proved
        if quarantined or pair.scale.route == "pull":
            break
    if pair.scale.route == "pull":
        assert not quarantined
    else:
        assert quarantined, "no agent died while slots were lent to it"


def _kills(pair: Pair, victim: Side, seed: int, times: int) -> Iterator[tuple[str, str]]:
    """So many transfers whose victim's agent is killed under way, and those that were over too soon.

    After each the agent comes back, and all is well again.
    """
    chance = random.Random(seed)
    may_outlive = victim is pair.sender and pair.scale.route == "pull"  # what is read under a lease needs no sender
    for _ in range(times + times // 4 + SPARE_TIMES):
        codes = pair.disturbed(chance.uniform(0, 0.7) * pair.fastest_s, victim)
        assert victim.agent.is_dead(REBUILT_S)
        yield codes
        pair.world.restarts_agent(victim)
        pair.world.wait_attached()
        pair.receiver.becomes(_is_without_handshake, REBUILT_S)  # what began before may be given up in a moment
        pair.is_sound()
        times -= bool(codes[0]) or may_outlive
        if not times:
            return
    raise AssertionError("transfers were over before the agent was killed")


def _is_without_handshake(status: Status) -> bool:
    return not any("handshake" in peer.state for peer in status.peers)
