"""A sender and a receiver, each an agent and an engine, and the oracle: what must hold whatever happens to the four."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import msgspec
from kvbridge_proto.status import Status

from kvbridge.failpoints import Way
from kvbridge.transport.keys import write_pair
from testing.agents import is_at_rest
from testing.engine import LEFT, PATIENCE_S, Job
from testing.nursery import HERE, Place
from testing.proc import Stopwatch
from testing.waiting import wait_for
from tests.system.faults.processes import POOL, Agent, Engine, Held, free_address, maps_pool

Role = Literal["sender", "receiver"]
ROLES: tuple[Role, ...] = ("sender", "receiver")

# Short, so that what waits for them does not last; long enough for two busy cores.
LIMITS = {"silence_s": "1.5", "connect_s": "1.5", "write_timeout_s": "1.5", "drain_s": "1"}
# With "direct", which no CPU has, before "pull" an agent makes its slots at its start, and holds the same from then on.
ROUTES: dict[Way, str] = {"slots": "nixl", "pull": "direct,pull,nixl,host"}
# Of a row, in elements. Of the wider ones a chunk has half a prompt, which is read while the rest is computed.
WIDTHS: dict[Way, int] = {"slots": 32, "pull": 64}
FEW = {"slot_bytes": "65536", "receive_slots": "6", "send_slots": "2", "device": "cpu"}
DEADLINE_S = 2.0
SLACK_S = 60.0  # for what is awaited, on a busy machine
# Beyond its deadline, and what one of our threads waited for a processor, until a request has ended. Seen: 1.2 s; and
# 6.1 s for an offer that was being written to an agent which was killed, as its successor is asked every 5 s.
LATE_S: Mapping[Role, float] = {"receiver": 5.0, "sender": 20.0}
SERVES_S = 10.0  # and as long as such a thread waited, until requests succeed again: in 42 stories of 42 the first did
HASTY_S = 1.0  # patience with an agent that is stopped: shorter than it stands still, so that it is given up
QUIET_S = 60.0  # slots in quarantine are asked for every 5 s
UNMAP_S = 1.0
BACK_S = 180.0  # for an engine and its agent to find each other, also when they start
BATCH = 12
# Descriptors of ended connections that UCX does not close, at most, when a peer's process dies: one in ten times it is
# one or two, once in a thousand three (nixl 1.5.1, 2026-11-22). Nothing of ours can reach them.
UCX_KEEPS = 3
PATIENT_S = 30.0  # from the fifth try on: at a load of 18, two cores do not carry six at once in DEADLINE_S

_numbers = count(1)


@dataclass
class Side:
    """One agent and its engine. Both come back where they were, as new incarnations."""

    place: Place
    folder: Path
    role: Role
    options: Mapping[str, str | bool]
    job: Job
    stuck_s: float = 0.0  # how long any of the two has stood still, lately
    is_hurt: bool = False  # its agent was stopped or killed in this story: it need not answer in time
    survived: int = 0  # deaths of the other agent, since this one was started
    address: str = ""  # what it tells others: where it listens, and its key if it has one
    rendezvous_ids: set[int] = field(default_factory=set)  # told, and not ended
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)  # answers that the engine had to ask for, or to give up, lately
    foreign: list[int] = field(
        default_factory=list
    )  # rendezvous ids whose blocks held others' rows for a while, lately

    def start_agent(self, armed: str = "") -> None:
        options = {**self.options, **({"listen": self.address.partition("#")[0]} if self.address else {})}
        self.agent = Agent(self.folder, self.role, options, armed, self.place)
        self.agent.wait_serving()
        self.address = self.address or self.agent.address
        self.survived = 0

    def start_engine(self, armed: str = "") -> None:
        self.job = _renamed(self.job)
        self.engine = Engine(self.job, self.folder / f"{self.role}-engine.log", armed)
        self.rendezvous_ids.clear()  # whoever was told of them is dead
        self.ends.clear()

    def wait_attached(self) -> None:
        self.engine.wait_for("attached", BACK_S)

    def hear(self, seconds: float = 0.0) -> None:
        """Keep how rendezvous ids ended; anything wrong ends the story, and so does an answer that an agent owes."""
        self.engine.hear(seconds)
        said, self.engine.said = self.engine.said, []
        wrong = [each["what"] for each in said if each["event"] == "wrong" or is_owed(each, self)]
        for each in said:
            match each["event"]:
                case "ended":
                    self.rendezvous_ids.discard(each["rendezvous"])
                    self.ends[each["rendezvous"]] = each
                case "foreign":
                    self.foreign.append(each["rendezvous"])
                case "late":
                    self.late.append(each["what"])
                case _:
                    self.engine.said.append(each)
        assert not wrong, f"{self.role} engine: {wrong[:3]}"
        lost = {rendezvous: each["reason"] for rendezvous, each in self.ends.items() if each["code"] == "agent_gone"}
        lost = {rendezvous: reason for rendezvous, reason in lost.items() if reason != LEFT}
        assert self.is_hurt or not lost, f"{self.role}: the agent was neither stopped nor killed, and left {lost}"

    def becomes(self, is_so: Callable[[Status], bool], seconds: float) -> Status:
        end, status = time.monotonic() + seconds, None
        while time.monotonic() < end:
            assert not self.agent.is_dead(), f"{self.role} agent died:\n{self.agent.tail()}"
            status = self.agent.status()
            if status is not None and is_so(status):
                return status
            time.sleep(0.05)
        raise AssertionError(f"{self.role}: not so in {seconds} s: {status}\n{self.agent.tail()}")

    def close(self) -> None:
        self.engine.close()
        self.agent.end()


def _renamed(job: Job) -> Job:
    """Another engine process, whose memory has a name of its own."""
    number = next(_numbers)
    return msgspec.structs.replace(job, name=f"{POOL}-{number}-{time.time_ns()}", seed=job.seed + number)


def _keys(folder: Path) -> dict[Role, dict[str, str]]:
    """The options of two agents that know each other's key and no third."""
    public = {role: write_pair(folder / f"{role}.key") for role in ROLES}
    options: dict[Role, dict[str, str]] = {}
    for role, other in zip(ROLES, reversed(ROLES), strict=True):
        peers = folder / f"{role}.peers"
        peers.write_text(f"{other} {public[other]}\n")
        peers.chmod(0o600)  # whatever our umask is
        options[role] = {"key": str(folder / f"{role}.key"), "peers": str(peers)}
    return options


def is_owed(said: dict[str, Any], side: Side) -> bool:
    """Whether an engine says that it missed an answer which its agent was able to give."""
    return said["event"] == "late" and not side.is_hurt


class World:
    """`through` is what stands between the receiver and the sender's address, such as a proxy.

    `apart` has agents that are born elsewhere, with more options. `is_keyed` ones speak CURVE, each with a key of its
    own and a list that has the other's alone. On which routes they go is `way`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        options: dict[str, str] | None = None,
        through: Callable[[str], str] = lambda address: address,
        apart: dict[Role, tuple[Place, dict[str, str | bool]]] | None = None,
        is_keyed: bool = False,
        way: Way = "slots",
        devices: tuple[str, str] = ("cpu", "cpu"),
        **job: Any,
    ) -> None:
        self.folder, self.through, self.is_keyed, self.way = folder, through, is_keyed, way
        keys = _keys(folder) if is_keyed else {}
        self._rendezvous_ids = count(1)
        self._since, self._watch = 0, Stopwatch()  # the first of the rendezvous under way, and when it was told
        self.sides: dict[Role, Side] = {}
        self.base: dict[Role, Held] = {}  # of a fresh agent that has served
        self.slots: dict[Role, tuple[int, int]] = {}  # free to be lent, and to gather into
        for role, device in zip(ROLES, devices, strict=True):
            own, more = (apart or {}).get(role, (HERE, {}))
            its: dict[str, Any] = {"device": device, "deadline_s": DEADLINE_S, "may_be_foreign": way == "pull"}
            its |= {"width": WIDTHS[way], **job}
            told = Job(role=role, socket=str(folder / f"{role}.sock"), name="", **its)
            said: dict[str, str | bool] = {
                **LIMITS,
                **FEW,
                "device": device,
                "routes": ROUTES[way],
                "listen": free_address(),
            }
            said |= {**keys.get(role, {}), **(options or {}), **more}
            side = Side(own, folder, role, said, told)
            self.sides[role] = side
            side.start_agent()
            side.start_engine()
        for side in self.sides.values():
            side.wait_attached()
        self.sender, self.receiver = self.sides["sender"], self.sides["receiver"]

    def calm(self, patience_s: float = PATIENCE_S) -> None:
        """Another story begins: nobody has been hurt, and who is well answers within so long after the deadline."""
        for side in self.sides.values():
            side.stuck_s, side.is_hurt = 0.0, False
            side.ends.clear()
            side.late.clear()
            side.foreign.clear()
            side.engine.tell("bear", patience_s=patience_s)

    def hurts(self, side: Side) -> None:
        """This side's agent will be stopped or killed."""
        side.is_hurt = True
        side.engine.tell("bear", patience_s=HASTY_S)

    def restarts_agent(self, side: Side, armed: str = "") -> None:
        """Another incarnation, once the one before is dead."""
        side.agent.end()
        side.start_agent(armed)
        for other in self.sides.values():
            other.survived += other is not side

    def meet(self) -> None:
        """The first requests; what the agents hold from then on is what agents may hold, these and later ones."""
        for _ in range(2):
            self.begin(BATCH, abandon=0.3)
            self.finish()
        self.serves()
        self.is_clean()
        self.knows_its_peers()
        self.base, self.slots = self.held(), self.free_slots()

    def knows_its_peers(self) -> None:
        """Either agent has one, whose key is the other's by our list, or none has a key."""
        for role, other in zip(ROLES, reversed(ROLES), strict=True):
            self.sides[role].becomes(partial(_has_peer, other if self.is_keyed else ""), QUIET_S)

    def begin(
        self,
        rendezvous_ids: int = BATCH,
        abandon: float = 0.0,
        withdraw: float = 0.0,
        pace_s: float = 0.0,
        deadline_s: float = 0.0,
        hold_s: float = 0.0,
        is_offered_first: bool = False,
        **more: Any,
    ) -> list[int]:
        """Have both engines serve so many rendezvous ids. Without a deadline, by that of their jobs.

        With `is_offered_first`, the first one is whole at the sender's agent before it is wanted. More is for the
        receiver's engine, as in `testing.engine.Told`.
        """
        numbers = [next(self._rendezvous_ids) for _ in range(rendezvous_ids)]
        if not self.is_busy():
            self._since, self._watch = numbers[0], Stopwatch()
        place, mark, key = self.sender.address.partition("#")
        sender = self.through(place) + mark + key
        run = {"first": numbers[0], "count": rendezvous_ids, "deadline_s": deadline_s}
        self.sender.engine.tell("run", **run, abandon=withdraw, pace_s=pace_s, hold_s=hold_s)
        if is_offered_first:
            self.sender.becomes(_is_offered, QUIET_S)
        self.receiver.engine.tell("run", **run, sender=sender, abandon=abandon, **more)
        for side in self.sides.values():
            side.rendezvous_ids.update(numbers)
        return numbers

    def is_busy(self) -> bool:
        """Whether a rendezvous is under way, as far as a living engine was told of it."""
        return any(side.rendezvous_ids for side in self.sides.values())

    def finish(self, deadline_s: float = DEADLINE_S) -> None:
        """Wait until every rendezvous that a living engine knows has ended, each by its own deadline."""
        most_s = deadline_s * 3 + SLACK_S + max(side.stuck_s for side in self.sides.values())
        while self.is_busy():
            for side in self.sides.values():
                assert not side.engine.is_dead(), f"{side.role} engine died"
                side.hear(0.02)
            rendezvous_ids = {side.role: sorted(side.rendezvous_ids)[:8] for side in self.sides.values()}
            assert self._watch.seconds() < most_s, f"rendezvous_ids that do not end: {rendezvous_ids}"
        lost_s = self._watch.slowest_thread_waited_s()
        for side in self.sides.values():
            limit = max(side.job.deadline_s, deadline_s) + LATE_S[side.role] + side.stuck_s + lost_s
            ended = [each for number, each in side.ends.items() if number >= self._since]
            late = [each for each in ended if each["seconds"] > limit]
            assert not late, f"{side.role}: longer than {limit} s: {late[:3]}"

    def serves(self) -> None:
        """Requests succeed again, soon: one whole batch of them, element for element."""
        self.wait_attached()
        watch = Stopwatch()
        for number in count():
            codes = self.codes(DEADLINE_S if number < 4 else PATIENT_S)
            if not any(codes["sender"] + codes["receiver"]):
                break
            seconds = watch.whole_s() - watch.slowest_thread_waited_s()
            assert seconds < SERVES_S, f"requests do not succeed again: {codes}\n{self.receiver.agent.tail()}"
            time.sleep(0.3)
        for side in self.sides.values():  # or that it is unmapped later proves nothing
            is_seen = side.job.device != "cpu" or maps_pool(side.agent.pid, side.job.name)
            assert is_seen, f"{side.job.name} is not mapped"

    def codes(self, deadline_s: float) -> dict[Role, list[str]]:
        """How six requests end."""
        rendezvous_ids = self.begin(6, deadline_s=deadline_s)
        self.finish(deadline_s)
        return {
            side.role: [side.ends[rendezvous]["code"] for rendezvous in rendezvous_ids] for side in self.sides.values()
        }

    def is_clean(self) -> None:
        """Everything is free, in both agents, and every element of both pools its owner's."""
        for side in self.sides.values():
            side.becomes(is_at_rest, QUIET_S)
            side.engine.tell("audit")
            side.engine.wait_for("audited")
            side.hear()
            assert "Traceback" not in side.agent.log.read_text(errors="replace"), side.agent.tail(60)

    def held(self) -> dict[Role, Held]:
        return {role: Held.by(side.agent.pid) for role, side in self.sides.items()}

    def free_slots(self) -> dict[Role, tuple[int, int]]:
        free = {}
        for role, side in self.sides.items():
            status = side.becomes(is_at_rest, QUIET_S)
            free[role] = (status.receive_slots.free, status.send_slots.free)
        return free

    def wait_attached(self) -> None:
        """Until both engines are with their agents."""
        wait_for(lambda: all(map(self.is_attached, self.sides.values())), BACK_S, self.receiver.agent.tail)

    @staticmethod
    def is_attached(side: Side) -> bool:
        """Whether this engine, no former one, is with this agent."""
        status = None if side.agent.is_dead() or side.agent.is_stopped(0.0) else side.agent.status()
        return status is not None and status.engine is not None and status.engine.pid == side.engine.pid

    def holds_no_more(self) -> None:
        """Either agent, whatever happened to it, has no more descriptors, threads or mappings than a fresh one, nor
        fewer slots. UCX lets go of a dead peer's when it next looks."""
        end = time.monotonic() + QUIET_S
        while True:
            over = {
                role: (self.base[role], now)
                for role, now in self.held().items()
                if not now.is_within(self.base[role], UCX_KEEPS * self.sides[role].survived)
            }
            if not over:
                break
            assert time.monotonic() < end, f"held by a fresh agent, and now: {over}"
            time.sleep(0.1)
        slots = self.free_slots()
        assert slots == self.slots, f"free slots of fresh agents {self.slots}, now {slots}"

    def unmaps(self, name: str) -> float:
        """Seconds until no agent maps that dead engine's memory any more; fails at UNMAP_S."""
        began = time.monotonic()
        while holders := [role for role, side in self.sides.items() if maps_pool(side.agent.pid, name)]:
            assert time.monotonic() - began < UNMAP_S, f"{name} is still mapped after {UNMAP_S} s by {holders}"
            time.sleep(0.005)
        return time.monotonic() - began

    def wakes(self, process: Agent | Engine, seconds: float, since: float = 0.0) -> None:
        """It stands still already; it goes on so long after `since`, and requests may end later by that."""
        for each in self.sides.values():
            each.stuck_s = seconds
        time.sleep(max(0.0, since + seconds - time.monotonic()))
        process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        for side in self.sides.values():
            side.close()


def _is_offered(status: Status) -> bool:
    return any(offer.state != "computing" for offer in status.offers)


def _has_peer(key: str, status: Status) -> bool:
    return [peer.key for peer in status.peers] == [key]
