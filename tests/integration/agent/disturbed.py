"""Large transfers between real agents and real engines, disturbed at random moments: stories that test the safety rule.

tests/integration/agent/test_abandon.py runs them on CPUs, tests/system/gpu/test_abandon.py on GPUs over every route.
Only devices, sizes and routes differ.
"""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from kvbridge_proto.engine import READERS_S
from kvbridge_proto.status import Status

from kvbridge.failpoints import VARIABLE
from kvbridge.loopback.engine import Job
from kvbridge.loopback.pools import DemoRequest, Shape
from kvbridge.routes.pull.halves import LEASE_S
from testing.agents import is_at_rest
from tests.integration.agent.rank import CALM_S, GONE, SEEDS
from tests.system.faults.processes import Agent, Engine

QUIET_S = 10.0
HOLD_S = 20.0
DEATH_HOLD_S = 3.0  # of offers that a receiver may not live to claim
UNDISTURBED = 5
SPARE_TIMES = 2
KILLED_CALM_S = 0.2
ENDED = r"a sender's process has ended: pid=\d+, (\d+) receive slots"

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
        return {name: str(getattr(self, name)) for name in names} | {"routes": self.route} | dict(self.more)

    def shape(self, axes: str, block_tokens: int) -> Shape:
        blocks = self.tokens // block_tokens + 3
        return Shape(name=f"{axes} {block_tokens}", axes=axes, block_tokens=block_tokens, blocks=blocks)


class Side:
    """An agent and the engine beside it; the agent may die and be started again, at the same address and socket."""

    def __init__(self, pair: Pair, role: Literal["sender", "receiver"], shape: Shape, device: str) -> None:
        self._stack, self._folder = pair.stack, pair.folder
        self._options = pair.scale.options | {"device": device}
        self.role = role
        job = Job(
            role=role,
            shape=shape,
            rank=0,
            socket=str(self._folder / f"{role}.sock"),
            ranks=("tcp://127.0.0.1:1",),  # nobody asks the only rank of an engine where it is
            requests=[DemoRequest(name="prompt", tokens=pair.scale.tokens)],
            device=device,
        )
        log = self._folder / f"{role}-engine.log"
        self.engine = Engine(job, log, os.environ.get(VARIABLE, ""), "tests.integration.agent.rank")
        self._stack.callback(self.engine.end)
        self._start_agent()

    def _start_agent(self) -> None:
        armed = os.environ.get(VARIABLE, "")
        self.agent = Agent(self._folder, self.role, self._options, armed)
        self._stack.callback(self.agent.end)

    def attach(self) -> None:
        self.agent.wait_serving()
        self._options["listen"] = self.agent.address
        self.tell("attach")

    def tell(self, verb: str, **more: Any) -> dict[str, Any]:
        """What the engine answers."""
        self.engine.tell(verb, **more)
        return self.engine.wait_for(verb)

    def offer(self, verb: str = "offer", **more: Any) -> None:
        """The engine offers; how that ended is its next word."""
        self.engine.tell(verb, **more)
        self.engine.wait_for("offered")

    def offer_ended(self, verb: str = "offer") -> str:
        """The code that the engine was told; none if all was gathered."""
        code: str = self.engine.wait_for(verb)["code"]
        return code

    def revive(self) -> None:
        """After a kill: the engine has heard of it, another agent takes the socket, the engine attaches to it."""
        assert self.agent.wait(10) < 0, "the agent should have been killed"
        told = self.tell("gone")
        assert told["is_gone"], told
        self._start_agent()
        self.attach()

    @property
    def log(self) -> str:
        """Of all agents that there were."""
        return self.agent.log.read_text()

    @property
    def status(self) -> Status:
        return self.becomes(lambda status: True)

    def becomes(self, is_so: Callable[[Status], bool]) -> Status:
        """The first status of which this is so. Fails by a deadline, with the last one."""
        deadline = time.monotonic() + QUIET_S
        while (status := self.agent.status()) is None or not is_so(status):
            assert time.monotonic() < deadline, f"{self.role}: not so in {QUIET_S} s: {status}"
            time.sleep(0.05)
        return status

    def is_quiet(self) -> None:
        """Wait until no transfer is left and every slot is free."""
        self.becomes(is_at_rest)


class Pair:
    """A sender and a receiver that have met."""

    def __init__(self, folder: Path, stack: ExitStack, scale: Scale) -> None:
        self.folder, self.stack, self.scale = folder, stack, scale
        self._rendezvous_ids = 0
        self._took: list[float] = []
        self.late: list[str] = []
        shapes = scale.shape("LPBTHE", 16), scale.shape("LPBHTE", 64)
        self.sender = Side(self, "sender", shapes[0], scale.devices[0])
        self.receiver = Side(self, "receiver", shapes[1], scale.devices[1])
        for side in (self.sender, self.receiver):
            side.engine.wait_for("ready")
            side.attach()
        self.exact()  # the agents meet
        self._took.clear()
        for _ in range(UNDISTURBED):
            self.exact()
        (peer,) = self.receiver.status.peers
        assert peer.route.startswith(scale.route), peer

    @property
    def usual_s(self) -> float:
        """How long transfers take, lately, that nobody disturbs."""
        return statistics.median(self._took[-UNDISTURBED:])

    @property
    def fastest_s(self) -> float:
        return min(self._took)

    def rendezvous(self) -> dict[str, Any]:
        self._rendezvous_ids += 1
        return {"seed": self._rendezvous_ids % SEEDS, "rendezvous": f"rendezvous {self._rendezvous_ids}"}

    def exact(self) -> None:
        """A transfer that nobody disturbs: every byte of the receiver's memory is right."""
        rendezvous = self.rendezvous()
        self.sender.offer(hold_s=HOLD_S, **rendezvous)
        told = self.receiver.tell("want", sender=self.sender.agent.address, **rendezvous)
        assert (told["code"], told["wrong"]) == ("", ""), told
        assert self.sender.offer_ended() == ""
        self._took.append(told["seconds"])

    def disturbed(self, after_s: float, kill: int = 0, is_patient: bool = True) -> tuple[str, str]:
        """A transfer disturbed after so long: the codes that the two engines, receiver and sender, were told.

        Done before the disturbance it is right in every byte; else nobody has written after its end. A receiver that is
        not patient does not wait until its agent's process is gone: what was written is told in `late`.
        """
        rendezvous = self.rendezvous()
        self.sender.offer(hold_s=DEATH_HOLD_S if kill else HOLD_S, **rendezvous)
        told = self.receiver.tell(
            "disturb",
            sender=self.sender.agent.address,
            after_s=after_s,
            kill=kill,
            pattern=16 + self._rendezvous_ids % 128,
            calm_s=KILLED_CALM_S if kill else CALM_S,
            is_patient=is_patient,
            **rendezvous,
        )
        if not told["code"]:
            self._took.append(told["seconds"])
        print(f"disturbed after {after_s * 1e3:.1f} of some {self.usual_s * 1e3:.1f} ms: {told['code'] or 'done'}")
        if is_patient:
            assert told["wrong"] == "", f"disturbed after {after_s * 1e3:.2f} ms: {told}"
        elif told["code"]:
            self.late.append(told["wrong"])
        return told["code"], self.sender.offer_ended()

    def is_sound(self) -> None:
        """All is free, the next transfer is exact, all is free again."""
        self.exact()
        self.sender.is_quiet()
        self.receiver.is_quiet()
        for side in (self.sender, self.receiver):
            assert "Traceback" not in side.log, side.log


def stands_still_over_a_withdrawal(pair: Pair, seed: int, rounds: int) -> int:
    """The sender's agent is stopped under way, and its engine, that must compute on, uses the blocks again.

    What was read of them meanwhile never counts. Returns how many transfers were done all the same.
    """
    chance, done = random.Random(seed), 0
    for _ in range(rounds):
        rendezvous, stop = pair.rendezvous(), pair.sender.agent.pid
        after_s = chance.uniform(0.2, 1.1) * pair.fastest_s
        halt = {"after_s": after_s, "stop": stop, "for_s": READERS_S, "is_withdrawn": True}
        pair.sender.offer("halt", hold_s=HOLD_S, **halt, **rendezvous)
        told = pair.receiver.tell("want", sender=pair.sender.agent.address, **rendezvous)
        print(f"taken back after {after_s * 1e3:.1f} ms: {told['code'] or 'done'} {told['wrong']}")
        if not told["code"]:
            assert told["wrong"] == "", f"taken back after {after_s * 1e3:.2f} ms: {told}"
            done += 1
        pair.sender.offer_ended("halt")
    pair.is_sound()
    return done


READ_ENDED = f"receiver.read_ended=pause:{1.5 * LEASE_S}@{UNDISTURBED + 3}"  # in the second of what follows


def stands_still_for_a_while(pair: Pair) -> None:
    """The sender's agent is stopped while it is read, past the lease, and goes on: that costs time, and no transfer.

    The receiver's agent takes long over the second of them, so that the lease of the claim is over when it has read.
    """
    halt = {"stop": pair.sender.agent.pid, "for_s": 3 * LEASE_S, "is_withdrawn": False}
    took = []
    for _ in range(3):
        rendezvous = pair.rendezvous()
        pair.sender.offer("halt", hold_s=HOLD_S, after_s=LEASE_S / 3, **halt, **rendezvous)
        told = pair.receiver.tell("want", sender=pair.sender.agent.address, **rendezvous)
        assert (told["code"], told["wrong"]) == ("", ""), told
        assert pair.sender.offer_ended("halt") == ""
        took.append(told["seconds"])
    assert max(took) > 3 * LEASE_S, f"none of these waited for the agent that stood still: {took}"
    pair.is_sound()


def stands_still(pair: Pair, seed: int) -> int:
    """The sender's agent is stopped under way: the receiver's slots, in quarantine for too long, are made anew.

    Its engine is left alone. When the sender's agent goes on, what it still writes goes where nothing is any more, and
    all is well again.
    Returns how many slots were in quarantine.
    """
    chance, sender = random.Random(seed), pair.sender.agent.pid
    for _ in range(SPARE_TIMES * 3):
        rendezvous, before = pair.rendezvous(), _rebuilds(pair.receiver.status)
        pair.sender.offer(hold_s=HOLD_S, **rendezvous)
        told = pair.receiver.tell(
            "disturb",
            sender=pair.sender.agent.address,
            after_s=chance.uniform(0.1, 0.6) * pair.fastest_s,
            kill=sender,
            number=signal.SIGSTOP,
            pattern=77,
            **rendezvous,
        )
        assert told["wrong"] == "" and told["code"] in ("", "peer_lost"), told
        slots = pair.receiver.status.receive_slots
        print(f"stopped: {told['code'] or 'done'}, {slots}")
        is_enough = bool(told["code"]) and slots.quarantined * 2 >= pair.scale.receive_slots
        if is_enough:
            status = pair.receiver.becomes(partial(_has_rebuilt, before=before))
            assert status.engine is not None and status.engine.epoch == 1, "its engine was not left alone"
            assert status.receive_slots.free == pair.scale.receive_slots
        os.kill(sender, signal.SIGCONT)
        pair.sender.offer_ended()
        pair.is_sound()
        if is_enough:
            return slots.quarantined
    raise AssertionError("the sender's agent was never stopped while half of the slots were lent")


def _is_greeting_nobody(status: Status) -> bool:
    return not any("greeting" in peer.state for peer in status.peers)


def _rebuilds(status: Status) -> float:
    return status.counters["kvbridge_rebuilds_total{replaced=slots}"]


def _has_rebuilt(status: Status, before: float) -> bool:
    return _rebuilds(status) > before


@contextmanager
def pair_of(folder: Path, scale: Scale) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(folder, stack, scale)


def abandons(pair: Pair, seed: int, rounds: int) -> None:
    """The receiver's engine abandons at random moments; what comes next may find slots that are still quarantined."""
    chance, codes = random.Random(seed), list[str]()
    while len(codes) < rounds or codes.count("aborted") < rounds // 2:
        assert len(codes) < 4 * rounds, f"most transfers were over before they were abandoned: {codes}"
        share = (len(codes) % rounds + chance.random()) / rounds  # of how long one takes, which a busy machine changes
        failed, released = pair.disturbed(share * pair.usual_s)
        assert (failed, released) in {("", ""), ("aborted", "aborted"), ("aborted", "")}
        codes.append(failed)
    pair.is_sound()


def receivers_agent_dies(pair: Pair, seed: int, times: int, is_patient: bool = True) -> None:
    """The receiver's agent is killed: its engine hears that, the sender gets its blocks back and serves the next
    one."""
    for failed, released in _kills(pair, pair.receiver, seed, times, is_patient):
        assert failed in ("", GONE)
        assert released in (RELEASED_BY_DEATH if failed else {""})
        assert not pair.sender.agent.is_dead()
        pair.sender.is_quiet()


def senders_agent_dies(pair: Pair, seed: int, times: int) -> None:
    """The sender's agent is killed: the want fails by name, and no slot is free again before there is proof.

    That the connection is gone is not enough, nor is time: the receiver's agent has to see the end of the process.
    Where the receiver pulls, nobody else writes and no slot is lent.
    """
    quarantined = 0
    for failed, released in _kills(pair, pair.sender, seed, times):
        assert failed in ("", "peer_lost") and released in ("", GONE)
        pair.receiver.is_quiet()
        proved = sum(map(int, re.findall(ENDED, pair.receiver.log))) - quarantined
        print(f"{proved} slots were quarantined until the process of the sender's agent had ended")
        quarantined += proved
    if pair.scale.route == "pull":
        assert not quarantined
    else:
        assert quarantined, "no agent died while slots were lent to it"


def _kills(pair: Pair, victim: Side, seed: int, times: int, is_patient: bool = True) -> Iterator[tuple[str, str]]:
    """So many transfers whose victim's agent is killed under way, and those that were over too soon.

    After each the agent comes back, and all is well again.
    """
    chance = random.Random(seed)
    may_outlive = victim is pair.sender and pair.scale.route == "pull"  # what is read under a lease needs no sender
    for _ in range(times + times // 4 + SPARE_TIMES):
        codes = pair.disturbed(chance.uniform(0, 0.7) * pair.fastest_s, victim.agent.pid, is_patient)
        print(f"the engines were told: receiver {codes[0] or 'done'}, sender {codes[1] or 'all gathered'}")
        yield codes
        victim.revive()
        pair.receiver.becomes(_is_greeting_nobody)  # what began before the agent was back may be given up in a moment
        pair.is_sound()
        times -= bool(codes[0]) or may_outlive
        if not times:
            return
    raise AssertionError("transfers were over before the agent was killed")
