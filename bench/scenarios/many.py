"""What a session costs an agent that has many: a receiver that meets many senders, and a sender met by many, on CPUs.

All are real agents of this machine, each with an engine. Every one of the many has a session with both hubs. At each
count the hubs rest, and their memory, descriptors, threads and processor time (by the kernel's clock of 10 ms) are
read. What a session costs is the difference from the first count, which is 0, divided.

In the end the receiver is killed and started again, and meets all senders anew; then the sender, whose engine comes
back `late_s` after it, as one that loads a model does; then all agents at once. Times count from the last attach of an
engine. Two cores need longer than a session does to start so many agents: when all are killed, what is measured is how
long the last of them wait for each other.

The model on paper, before the first run: a session holds a link, which is three descriptors of ZeroMQ at the side that
dialled and one more for its connection, and on one host a pipe; queues grow only with messages. So 100 KiB at the side
that dialled and half of that at the other, no thread, 7 descriptors at most. At rest the side that dialled looks at its
socket ten times a second (10 us each) and pings once (200 us with the answer): 0.03 % of a core, 0.02 % at the other.
Measured: the processor takes less, and the side that dialled holds twice as much memory and 10 descriptors.
"""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.scenario import Bench, Problem
from testing.agents import AgentProcess, OracleEngine, agent, attached
from testing.proc import cpu_s, descriptors, resident_bytes
from tests.system.faults.processes import free_address

MOST_MIB, MOST_CORE_PERCENT, MOST_UP_S = 1.0, 0.02, 2.0  # a session, a session, 64 sessions
OPTIONS: dict[str, Any] = {"receive_slots": 2, "send_slots": 2, "log_level": "warning"}
SETTLE_S = 3.0
STEADY_S = 12.0  # a session that has lasted so long counts as no failure (agent/meeting.py)
AT_ONCE = 16


def sessions(hub: AgentProcess) -> int:
    return sum(each.state in ("sender open", "receiver open") for each in hub.status.peers)


def wait_open(hub: AgentProcess, count: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (found := sessions(hub)) < count:
        if time.monotonic() > end:
            raise Problem(f"{found} of {count} sessions are open after {seconds} s:\n{hub.text()[-2000:]}")
        time.sleep(0.05)


def rest(hub: AgentProcess, seconds: float) -> dict[str, float]:
    """What the hub holds, and takes of a core (in percent) while nothing happens for so long."""
    time.sleep(SETTLE_S)
    began, before = time.monotonic(), cpu_s(hub.process.pid)
    time.sleep(seconds)
    percent = 100 * (cpu_s(hub.process.pid) - before) / (time.monotonic() - began)
    return {
        "mib": resident_bytes(hub.process.pid) / 2**20,
        "descriptors": descriptors(hub.process.pid),
        "threads": len(list(Path(f"/proc/{hub.process.pid}/task").iterdir())),
        "core_percent": percent,
    }


def per_session(first: dict[str, float], now: dict[str, float], count: int) -> dict[str, float]:
    return {f"{name}_a_session": round((now[name] - first[name]) / count, 4) for name in first}


class Hubs:
    """The two hubs and the many. `listed` is the file in which the receiver finds its senders."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._listen: dict[str, str] = {}
        self.listed = folder / "senders"
        self.listed.write_text("")
        self.many: list[OracleEngine] = []
        self.sender = self._start("sender")
        self.receiver = self._start("receiver", meet=f"file://{self.listed}")

    def _start(self, name: str, late_s: float = 0.0, **options: Any) -> OracleEngine:
        """An agent, and its engine so much later. Started again under this name, it is where it was."""
        listen = self._listen.setdefault(name, free_address())
        running = self._stack.enter_context(agent(self._folder, name, **(OPTIONS | {"listen": listen} | options)))
        time.sleep(late_s)
        return self._stack.enter_context(attached(running))

    def _end(self, *ended: OracleEngine) -> None:
        for each in ended:
            each.close()
            each.agent.kill()

    def grow(self, count: int) -> None:
        meet = self.sender.agent.address
        self.many += [self._start(f"peer{number}", meet=meet) for number in range(len(self.many), count)]
        self.listed.write_text("".join(f"{each.agent.address}\n" for each in self.many))
        for hub in (self.sender, self.receiver):
            wait_open(hub.agent, count, 60.0)

    def _up_s(self, since: float) -> float:
        """Seconds until either hub has a session with each of the many."""
        for hub in (self.receiver, self.sender):
            wait_open(hub.agent, len(self.many), 120.0)
        return time.monotonic() - since

    def restart_receiver(self) -> float:
        self._end(self.receiver)
        self.receiver = self._start("receiver", meet=f"file://{self.listed}")
        return self._up_s(time.monotonic())

    def restart_sender(self, late_s: float) -> float:
        self._end(self.sender)
        self.sender = self._start("sender", late_s)
        return self._up_s(time.monotonic())

    def restart_all(self) -> float:
        meet, count = self.sender.agent.address, len(self.many)
        self._end(self.receiver, self.sender, *self.many)
        names = ["sender", "receiver", *(f"peer{number}" for number in range(count))]
        met = [{}, {"meet": f"file://{self.listed}"}, *[{"meet": meet}] * count]
        with ThreadPoolExecutor(AT_ONCE) as starting:
            self.sender, self.receiver, *self.many = starting.map(lambda n, o: self._start(n, **o), names, met)
        return self._up_s(time.monotonic())


def measure(
    bench: Bench, *, counts: tuple[int, ...] = (16, 64), seconds: float = 20.0, late_s: float = 15.0
) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvbridge-many-") as folder, ExitStack() as stack:
        hubs = Hubs(Path(folder), stack)
        firsts: dict[str, dict[str, float]] = {}
        for count in (0, *counts):
            hubs.grow(count)
            for name, hub in (("receiver", hubs.receiver), ("sender", hubs.sender)):
                now = rest(hub.agent, seconds)
                first = firsts.setdefault(name, now)
                costs = per_session(first, now, count) if count else {}
                rows.append({"hub": name, "sessions": count, **{key: round(now[key], 3) for key in now}, **costs})
                bench.show(rows[-1])
        ups = {"receiver": hubs.restart_receiver()}
        time.sleep(STEADY_S)
        ups["sender"] = hubs.restart_sender(late_s)
        time.sleep(STEADY_S)
        ups["all agents"] = hubs.restart_all()
        for who, up_s in ups.items():
            bench.say(f"{counts[-1]} sessions up {up_s:.2f} s after the last attach; restarted: {who}")
    ups = {who: round(up_s, 3) for who, up_s in ups.items()}
    return {"goals": goals(rows, ups), "rest_s": seconds, "rows": rows, "late_s": late_s, "restarted_up_s": ups}


def goals(rows: list[dict[str, Any]], ups: dict[str, float]) -> list[dict[str, Any]]:
    """Lines of goals (goals.py), for the largest count."""
    last = rows[-2:]
    found = [
        (f"{row['hub']}, {what} a session", row[f"{name}_a_session"], most)
        for row in last
        for what, name, most in (("MiB", "mib", MOST_MIB), ("percent of a core", "core_percent", MOST_CORE_PERCENT))
    ]
    found += [(f"{last[0]['sessions']} sessions up, restarted: {who}, s", ups[who], MOST_UP_S) for who in ups]
    return [
        {"goal": goal, "measured": f"{value:g}", "against": f"{most:g} at most", "met": value <= most}
        for goal, value, most in found
    ]
