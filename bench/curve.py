"""What CURVE costs: from `Want` sent to `Done` read, through real agents, with a key and without.

    python bench/curve.py [--pairs 400] [--tokens 16,2048]

Two pairs of agents run at the same time, one with a key; their transfers alternate, the order of each two by chance, so
that whatever else the machine does hits both alike. A request is offered before it is wanted; sessions are open. The
ratio is that of the medians, its spread the 2.5 and 97.5 percentiles of 2000 resamplings of the pairs.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from kvbridge_proto.engine import Done  # noqa: E402
from record import write  # noqa: E402

from kvbridge.transport.keys import write_pair  # noqa: E402
from tests.agent.harness import SyntheticEngine, agent  # noqa: E402
from tests.oracle import Shape, build  # noqa: E402

WARM = 20
RESAMPLINGS = 2000
GOAL = 1.05


class Pair:
    """A source and a sink, idle between requests."""

    def __init__(self, stack: ExitStack, folder: Path, name: str, tokens: int, **options: object) -> None:
        options |= {"slot_bytes": 4 << 20}
        agents = [stack.enter_context(agent(folder, f"{name}{side}", **options)) for side in "pd"]
        shapes = [build(Shape(layout, blocks=tokens // 4 + 8, block_tokens=16)) for layout in ("nhd", "hnd")]
        engines = [SyntheticEngine(each, held) for each, held in zip(agents, shapes, strict=True)]
        self.source, self.sink = (stack.enter_context(closing(engine)) for engine in engines)
        self.source.attach()
        self.sink.attach()
        self.address = agents[0].address
        self.tokens = tokens
        self.count = 0
        self.moved_bytes = 0

    def once(self) -> float:
        """Seconds that the sink's engine waited."""
        self.count += 1
        request, table = f"r{self.count}", list(range(self.tokens // 16))
        self.source.offer(request, table, self.tokens)
        time.sleep(0.002)
        began = time.perf_counter()
        self.sink.want(request, self.address, table, range(self.tokens))
        answer = self.sink.answer(request)
        seconds = time.perf_counter() - began
        assert isinstance(answer, Done), answer
        assert self.source.released(request).code == ""
        self.moved_bytes = answer.moved_bytes
        return seconds


def compare(tokens: int, pairs: int, folder: Path, key: Path) -> dict[str, object]:
    with ExitStack() as stack:
        plain = Pair(stack, folder, f"plain{tokens}-", tokens)
        curve = Pair(stack, folder, f"curve{tokens}-", tokens, key=key)
        for _ in range(WARM):
            plain.once()
            curve.once()
        chance, found = random.Random(1), []
        for _ in range(pairs):
            if chance.random() < 0.5:
                found.append((plain.once(), curve.once()))
            else:
                second = curve.once()
                found.append((plain.once(), second))
        moved = plain.moved_bytes
    ratios = sorted(ratio(chance.choices(found, k=pairs)) for _ in range(RESAMPLINGS))
    without, with_key = ([pair[i] * 1e3 for pair in found] for i in (0, 1))
    result = {
        "tokens": tokens,
        "moved_bytes": moved,
        "pairs": pairs,
        "without_ms": percentiles(without),
        "curve_ms": percentiles(with_key),
        "ratio": round(ratio(found), 4),
        "ratio_95": [round(ratios[RESAMPLINGS * 25 // 1000], 4), round(ratios[RESAMPLINGS * 975 // 1000], 4)],
        "goal": GOAL,
    }
    print(result)
    return result


def ratio(found: list[tuple[float, float]]) -> float:
    return statistics.median(curve for _, curve in found) / statistics.median(plain for plain, _ in found)


def percentiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=20)
    return {"p5": round(cuts[0], 3), "p50": round(cuts[9], 3), "p95": round(cuts[18], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--tokens", default="16,2048")
    said = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_pair(folder / "key")
        found = [compare(int(tokens), said.pairs, folder, folder / "key") for tokens in said.tokens.split(",")]
    write("curve", {"load_1m": round(os.getloadavg()[0], 2), "want_to_done": found})


if __name__ == "__main__":
    main()
