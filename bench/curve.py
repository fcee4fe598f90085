"""What CURVE costs: the time from `Want` sent to `Done` read, through real agents, with a key and without.

    python bench/curve.py [--sets 8] [--wants 150] [--tokens 16,2048]

Three pairs of agents run at the same time over the same network device, one pair with a key. Their transfers take turns
in random order, so that other load on the machine hits all alike. Sessions are open, and a request is offered before it
is wanted. Two pairs of processes differ for as long as they live, so the measurement is repeated with sets of new
agents. The figure of a set is the ratio of its medians. Beside it stands the ratio of the two pairs without a key.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from kvbridge_proto.engine import Done  # noqa: E402
from record import write  # noqa: E402

from kvbridge.transport.keys import write_pair  # noqa: E402
from tests.integration.agent.harness import OracleEngine, agent  # noqa: E402
from tests.support.oracle import Shape, build  # noqa: E402

WARM = 20
GOAL = 1.05


class Pair:
    """A sender and a receiver, which are idle between requests."""

    def __init__(self, stack: ExitStack, folder: Path, name: str, tokens: int, **options: Any) -> None:
        options |= {"slot_bytes": 4 << 20}
        agents = [stack.enter_context(agent(folder, f"{name}{side}", **options)) for side in "pd"]
        shapes = [build(Shape(layout, blocks=tokens // 4 + 8, block_tokens=16)) for layout in ("nhd", "hnd")]
        engines = [OracleEngine(each, held) for each, held in zip(agents, shapes, strict=True)]
        self.sender, self.receiver = (stack.enter_context(closing(engine)) for engine in engines)
        self.sender.attach()
        self.receiver.attach()
        self.address = agents[0].address
        self.tokens = tokens
        self.count = 0

    def once(self) -> float:
        """Carry one request. Returns the seconds that the receiver's engine waited."""
        self.count += 1
        request, table = f"r{self.count}", list(range(self.tokens // 16))
        self.sender.offer(request, table, self.tokens)
        time.sleep(0.002)
        began = time.perf_counter()
        self.receiver.want(request, self.address, table, range(self.tokens))
        answer = self.receiver.answer(request)
        seconds = time.perf_counter() - began
        assert isinstance(answer, Done), answer
        assert self.sender.released(request).code == ""
        return seconds


def measure(tokens: int, count: int, folder: Path, key: Path) -> dict[str, list[float]]:
    """The milliseconds of each want, by pair, for three new pairs of agents."""
    with ExitStack() as stack:
        pairs = {
            name: Pair(stack, folder, f"{name}{tokens}-", tokens, **options)
            for name, options in (("plain", {}), ("curve", {"key": key}), ("plain_again", {}))
        }
        for _ in range(WARM):
            for pair in pairs.values():
                pair.once()
        taken: dict[str, list[float]] = {name: [] for name in pairs}
        order = list(pairs)
        for _ in range(count):
            random.shuffle(order)
            for name in order:
                taken[name].append(pairs[name].once() * 1e3)
        return taken


def compare(tokens: int, sets: int, count: int, folder: Path, key: Path) -> dict[str, object]:
    found = []
    for number in range(sets):
        place = folder / f"{tokens}-{number}"
        place.mkdir()
        found.append(measure(tokens, count, place, key))
    result = {
        "tokens": tokens,
        "sets_of_agents": sets,
        "wants_each": count,
        "plain_ms": percentiles([each for taken in found for each in taken["plain"]]),
        "curve_ms": percentiles([each for taken in found for each in taken["curve"]]),
        "curve_to_plain": ratios(found, "curve"),
        "plain_again_to_plain": ratios(found, "plain_again"),
        "goal": GOAL,
    }
    print(result)
    return result


def ratios(found: list[dict[str, list[float]]], name: str) -> dict[str, float]:
    """The ratios of medians over all sets: the median, the smallest, the largest."""
    each = [statistics.median(taken[name]) / statistics.median(taken["plain"]) for taken in found]
    return {"median": round(statistics.median(each), 3), "least": round(min(each), 3), "most": round(max(each), 3)}


def percentiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=20)
    return {"p5": round(cuts[0], 3), "p50": round(cuts[9], 3), "p95": round(cuts[18], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=8, help="of agents")
    parser.add_argument("--wants", type=int, default=150, help="of each pair in a set")
    parser.add_argument("--tokens", default="16,2048")
    said = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_pair(folder / "key")
        found = [
            compare(int(tokens), said.sets, said.wants, folder, folder / "key") for tokens in said.tokens.split(",")
        ]
    write("curve", {"load_1m": round(os.getloadavg()[0], 2), "want_to_done": found})


if __name__ == "__main__":
    main()
