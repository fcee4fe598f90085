"""What a session costs an agent that has many: a receiver that meets many senders, and a sender met by many, on CPUs.

All are real agents of this machine, each with an engine. Every one of the many has a session with both hubs. At each
count the hubs rest, and their memory, descriptors, threads and processor time (by the kernel's clock of 10 ms) are
read. What a session costs is the difference from the first count, which is 0, divided. In the end the receiver alone is
killed and started again, and it meets all senders anew.

The model on paper, before the first run: a session holds a link, which is three descriptors of ZeroMQ at the side that
dialled and one more for its connection, and on one host a pipe; queues grow only with messages. So 100 KiB at the side
that dialled and half of that at the other, no thread, 7 descriptors at most. At rest the side that dialled looks at its
socket ten times a second (10 us each) and pings once (200 us with the answer): 0.03 % of a core, 0.02 % at the other.
Measured: the processor takes less, and the side that dialled holds twice as much memory and 10 descriptors.
"""

from __future__ import annotations

import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.scenario import Bench, Problem
from testing.agents import AgentProcess, OracleEngine, agent, attached
from testing.proc import cpu_s, descriptors, resident_bytes

MOST_MIB, MOST_CORE_PERCENT, MOST_UP_S = 1.0, 0.02, 2.0  # a session, a session, 64 sessions
OPTIONS: dict[str, Any] = {"receive_slots": 2, "send_slots": 2, "log_level": "warning"}
SETTLE_S = 3.0


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
        self.listed = folder / "senders"
        self.listed.write_text("")
        self.many: list[OracleEngine] = []
        self.sender = self._start("sender")
        self.receiver = self._start("receiver", meet=f"file://{self.listed}")

    def _start(self, name: str, **options: Any) -> OracleEngine:
        running = self._stack.enter_context(agent(self._folder, name, **(OPTIONS | options)))
        return self._stack.enter_context(attached(running))

    def grow(self, count: int) -> None:
        meet = self.sender.agent.address
        self.many += [self._start(f"peer{number}", meet=meet) for number in range(len(self.many), count)]
        self.listed.write_text("".join(f"{each.agent.address}\n" for each in self.many))
        for hub in (self.sender, self.receiver):
            wait_open(hub.agent, count, 60.0)

    def restart_receiver(self) -> float:
        """Seconds from its engine's attach until the receiver has a session with each of the many."""
        self.receiver.agent.process.send_signal(signal.SIGKILL)
        self.receiver.agent.process.wait(10)
        self.receiver = self._start("receiver-again", meet=f"file://{self.listed}")
        began = time.monotonic()
        wait_open(self.receiver.agent, len(self.many), 60.0)
        return time.monotonic() - began


def measure(bench: Bench, *, counts: tuple[int, ...] = (16, 64), seconds: float = 20.0) -> dict[str, Any]:
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
        up_s = hubs.restart_receiver()
        bench.say(f"{counts[-1]} sessions up {up_s:.2f} s after the receiver's engine attached again")
    return {"goals": goals(rows, up_s), "rest_s": seconds, "rows": rows, "receiver_restarted_up_s": round(up_s, 3)}


def goals(rows: list[dict[str, Any]], up_s: float) -> list[dict[str, Any]]:
    """Lines of goals (goals.py), for the largest count."""
    last = rows[-2:]
    found = [
        (f"{row['hub']}, {what} a session", row[f"{name}_a_session"], most)
        for row in last
        for what, name, most in (("MiB", "mib", MOST_MIB), ("percent of a core", "core_percent", MOST_CORE_PERCENT))
    ]
    found.append((f"{last[0]['sessions']} sessions up after the receiver's restart, s", round(up_s, 2), MOST_UP_S))
    return [
        {"goal": goal, "measured": f"{value:g}", "against": f"{most:g} at most", "met": value <= most}
        for goal, value, most in found
    ]
