"""How long one rank takes to plan: 1 M tokens, 128 layers x K and V, 64 source ranks to 64 sink ranks.

python bench/plan.py prints milliseconds beside the goal of 10 for each pair of layouts; the sink assigns and plans, the
source only plans.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from record import write

from kvbridge.geometry.plan import plan
from kvbridge.geometry.shard import assign
from tests.support.oracle import Shape, describe

GOAL_MS = 10.0
TOKENS = 1 << 20
RANKS = 64
SLOT_BYTES = 4 << 20
CASES = (
    ("nhd", 16, 64, "nhd", 16, 64),
    ("nhd", 16, 64, "hnd", 128, 64),
    ("cpu_vec", 128, 64, "cpu_vec", 128, 64),
    ("cross_layer", 16, 64, "block_first", 32, 8),
    ("nhd", 16, 8, "cross_layer", 64, 64),
)


def milliseconds(act: Callable[[], object], rounds: int = 9) -> float:
    """The median time of a call."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        act()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def measure(source_shape: Shape, sink_shape: Shape) -> tuple[float, float, int]:
    """Milliseconds of the sink, of the source, and the chunks of the sink's first plan."""
    sources = [describe(source_shape, tp) for tp in range(source_shape.tp_size)]
    sink = describe(sink_shape, sink_shape.tp_size // 2)

    def sink_side() -> int:
        takes = assign(sources, sink)
        plans = [plan(pool, sink, taken, 0, TOKENS, SLOT_BYTES) for pool, taken in zip(sources, takes, strict=True)]
        return max(planned.chunks for planned in plans)

    taken, source = next((each, pool) for each, pool in zip(assign(sources, sink), sources, strict=True) if each)
    return milliseconds(sink_side), milliseconds(lambda: plan(source, sink, taken, 0, TOKENS, SLOT_BYTES)), sink_side()


def main() -> None:
    rows = []
    print(f"{TOKENS} tokens, 128 layers x 2 parts, goal {GOAL_MS:.0f} ms a rank")
    for source_layout, source_block, source_tp, sink_layout, sink_block, sink_tp in CASES:
        shapes = [
            Shape(
                layout=layout,
                layers=128,
                kv_heads=64,
                key_width=128,
                value_width=128,
                block_tokens=block,
                blocks=1 << 17,
                tp_size=tp,
            )
            for layout, block, tp in (
                (source_layout, source_block, source_tp),
                (sink_layout, sink_block, sink_tp),
            )
        ]
        sink_ms, source_ms, chunks = measure(*shapes)
        pair = f"{source_layout} block {source_block} tp {source_tp} -> {sink_layout} block {sink_block} tp {sink_tp}"
        print(f"{pair}: sink {sink_ms:.2f} ms, source {source_ms:.2f} ms, {chunks} chunks")
        rows.append({"pair": pair, "sink_ms": round(sink_ms, 2), "source_ms": round(source_ms, 2), "chunks": chunks})
    write("plan", {"tokens": TOKENS, "goal_ms": GOAL_MS, "rows": rows})


if __name__ == "__main__":
    main()
