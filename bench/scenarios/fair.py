"""What a receiver that stands still costs the others of one sender, by slots and by pull, on CPUs.

All are real agents of this machine, each with an engine. In a round every receiver but the first wants a prompt of its
own at once; a wait is from the want to its last row, as the receiver's agent counts it. Rounds come in pairs of turns:
in the first all agents run; in the second the first receiver's agent was stopped (SIGSTOP) while the sender wrote to it
or kept blocks for it to read. Nothing gives it up: all limits of time are longer than the run.

The model on paper, before the first run. By slots, a peer that stands still holds two of the sender's slots for each
that is free (G18): of six, four. The others' chunks go through the two that are left. So their waits are three times
as long where slots are what they wait for, and the same where they wait for a processor, as many do on two cores:
goal 3. By pull it holds blocks, which nobody else needs, and a lease, of which the sender thinks once in 0.4 s: goal
1.25, which leaves room for this machine's noise.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvbridge_proto.engine import Done

from bench.scenario import Bench, Problem
from testing.agents import OracleEngine, agent, attached
from testing.oracle import Shape
from testing.waiting import wait_for

LONGER_S = 600
SLOTS = 6
MOST = {"nixl": 3.0, "pull": 1.25}  # times the wait without, in the median and in the worst of a hundred
OPTIONS: dict[str, Any] = {
    "receive_slots": 16,
    "send_slots": SLOTS,
    "slot_bytes": 65536,
    "silence_s": LONGER_S,
    "write_timeout_s": LONGER_S,
    "rebuild_s": 3600,
    "log_level": "warning",
}
SHAPE = Shape("nhd", block_tokens=16, blocks=128)
TABLE, TOKENS = list(range(128)), 2048  # eight chunks


class Side:
    """A sender and its receivers, the first of which is stopped now and then."""

    def __init__(self, folder: Path, stack: ExitStack, route: str, count: int) -> None:
        def start(name: str) -> OracleEngine:
            running = stack.enter_context(agent(folder, name, routes=route, **OPTIONS))
            return stack.enter_context(attached(running, SHAPE))

        self._route = route
        self._sender = start("sender")
        self._address = self._sender.agent.address
        self._still, *self._others = [start(f"receiver{number}") for number in range(count)]
        self._wanted = self.bytes_a_want = 0

    def round(self) -> list[float]:
        """Seconds that each of the others waits, all at once."""
        names = [f"r{self._wanted + number}" for number, _ in enumerate(self._others)]
        self._wanted += len(names)
        for name in names:
            self._sender.offer(name, TABLE, TOKENS, hold_s=LONGER_S)
        for each, name in zip(self._others, names, strict=True):
            each.want(name, self._address, TABLE, range(TOKENS), deadline_s=LONGER_S)
        answers = [each.answer(name) for each, name in zip(self._others, names, strict=True)]
        done = [answer for answer in answers if isinstance(answer, Done)]
        if len(done) < len(answers):
            raise Problem(f"{len(answers) - len(done)} of {len(answers)} wants failed: {answers}"[:2000])
        self.bytes_a_want = done[0].moved_bytes
        return [answer.seconds for answer in done]

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """The first receiver's agent has claimed a prompt and is stopped; the sender has begun to give it."""
        self._wanted += 1
        stuck, agents = f"stuck{self._wanted}", (self._sender.agent, self._still.agent)
        self._still.want(stuck, self._address, TABLE, range(TOKENS), deadline_s=LONGER_S)
        wait_for(lambda: agents[0].status.transfers)
        os.kill(agents[1].process.pid, signal.SIGSTOP)
        try:
            self._sender.offer(stuck, TABLE, TOKENS, hold_s=LONGER_S)
            if self._route != "pull":
                wait_for(lambda: agents[0].status.send_slots.lent == SLOTS * 2 // 3)
            yield
        finally:
            os.kill(agents[1].process.pid, signal.SIGCONT)
        self._still.done(stuck)


def measure(bench: Bench, *, receivers: int = 64, turns: int = 5, rounds: int = 4) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for route in MOST:
        with tempfile.TemporaryDirectory(prefix="kvbridge-fair-") as folder, ExitStack() as stack:
            side = Side(Path(folder), stack, route, receivers)
            side.round()  # which opens the sessions
            with side.standing_still():
                side.round()
            waits: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(turns):
                waits[False] += [wait for _ in range(rounds) for wait in side.round()]
                with side.standing_still():
                    waits[True] += [wait for _ in range(rounds) for wait in side.round()]
            rows += [{"by": route, "one": "stands still" if still else "runs", **told(waits[still])} for still in waits]
            for row in rows[-2:]:
                bench.show(row)
    return {"goals": goals(rows), "receivers": receivers, "kib_a_want": side.bytes_a_want >> 10, "rows": rows}


def told(waits: list[float]) -> dict[str, float]:
    ordered = sorted(waits)
    return {
        "wants": len(ordered),
        "p50_ms": round(1e3 * statistics.median(ordered), 1),
        "p99_ms": round(1e3 * ordered[len(ordered) * 99 // 100], 1),
        "most_ms": round(1e3 * ordered[-1], 1),
    }


def goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of goals (goals.py)."""
    found = []
    for without, beside in zip(rows[::2], rows[1::2], strict=True):
        for name in ("p50", "p99"):
            ratio = beside[f"{name}_ms"] / without[f"{name}_ms"]
            found.append((f"by {beside['by']}, {name} of the others, times that without", ratio, MOST[beside["by"]]))
    return [
        {"goal": goal, "measured": f"{ratio:.2f}", "against": f"{most:g} at most", "met": ratio <= most}
        for goal, ratio, most in found
    ]
