"""What an agent takes of a core while its engine is attached, a session is open, and nothing is to be done; on CPUs.

One pair for each route, each alone, both agents on this machine. The kernel's own count of nanoseconds, of all threads,
and how often these wait for something: waking costs more than what is then done.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.scenario import Bench
from testing.agents import AgentProcess, agent, attached
from testing.waiting import wait_for
from tests.system.faults.processes import free_address

MOST_PERCENT = 0.3
OPTIONS: dict[str, Any] = {"receive_slots": 2, "send_slots": 2, "log_level": "warning"}
SETTLE_S = 5.0


def spent(running: AgentProcess) -> tuple[int, int]:
    """Nanoseconds on a processor, and sleeps, so far, of all its threads."""
    threads = list(Path(f"/proc/{running.process.pid}/task").iterdir())
    sleeps = [(each / "status").read_text().split("\nvoluntary_ctxt_switches:")[1].split()[0] for each in threads]
    return sum(int((each / "schedstat").read_text().split()[0]) for each in threads), sum(map(int, sleeps))


def measure(bench: Bench, *, routes: tuple[str, ...] = ("pull", "nixl"), seconds: float = 60.0) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for route in routes:
        with tempfile.TemporaryDirectory(prefix="kvbridge-idle-") as folder, ExitStack() as stack:
            told = OPTIONS | {"routes": route}
            sender = stack.enter_context(agent(Path(folder), "sender", listen=free_address(), **told))
            stack.enter_context(attached(sender))
            receiver = stack.enter_context(agent(Path(folder), "receiver", meet=sender.address, **told))
            stack.enter_context(attached(receiver))
            wait_for(lambda: any(each.state == "sender open" for each in receiver.status.peers), 60)  # noqa: B023
            time.sleep(SETTLE_S)
            both = {"sender": sender, "receiver": receiver}
            began, before = time.monotonic(), {name: spent(each) for name, each in both.items()}
            time.sleep(seconds)
            passed = time.monotonic() - began
            for name, each in both.items():
                ran_ns, sleeps = (now - was for now, was in zip(spent(each), before[name], strict=True))
                row = {"by": route, "agent": name, "core_percent": round(ran_ns / passed / 1e7, 3)}
                rows.append(row | {"wakes_per_s": round(sleeps / passed, 1)})
                bench.show(rows[-1])
    goals = [
        {
            "goal": f"by {row['by']}, {row['agent']}, percent of a core",
            "measured": f"{row['core_percent']:g}",
            "against": f"{MOST_PERCENT:g} at most",
            "met": row["core_percent"] <= MOST_PERCENT,
        }
        for row in rows
    ]
    return {"goals": goals, "seconds": seconds, "rows": rows}
