"""How long one rank takes to plan: 1 M tokens, 128 layers x K and V, 64 sender ranks to 64 receiver ranks.

Milliseconds for each pair of layouts; the goal is 10. The receiver assigns and plans, the sender only plans.
"""

from __future__ import annotations

import statistics
from typing import Any

from bench.scenario import Bench
from bench.timing import seconds_of
from kvbridge.geometry.plan import plan
from kvbridge.geometry.shard import assign
from testing.oracle import Shape, describe

GOAL_MS = 10.0
TOKENS = 1 << 20
ROUNDS = 9
SLOT_BYTES = 4 << 20
CASES = (
    ("nhd", 16, 64, "nhd", 16, 64),
    ("nhd", 16, 64, "hnd", 128, 64),
    ("cpu_vec", 128, 64, "cpu_vec", 128, 64),
    ("cross_layer", 16, 64, "block_first", 32, 8),
    ("nhd", 16, 8, "cross_layer", 64, 64),
)


def times(sender_shape: Shape, receiver_shape: Shape) -> tuple[float, float, int]:
    """Milliseconds of the receiver, of the sender, and the chunks of the receiver's first plan."""
    senders = [describe(sender_shape, tp) for tp in range(sender_shape.tp_size)]
    receiver = describe(receiver_shape, receiver_shape.tp_size // 2)

    def receiver_side() -> int:
        takes = assign(senders, receiver)
        plans = [plan(pool, receiver, taken, 0, TOKENS, SLOT_BYTES) for pool, taken in zip(senders, takes, strict=True)]
        return max(planned.chunks for planned in plans)

    taken, sender = next((each, pool) for each, pool in zip(assign(senders, receiver), senders, strict=True) if each)
    sides = (lambda _: receiver_side(), lambda _: plan(sender, receiver, taken, 0, TOKENS, SLOT_BYTES))
    receiver_ms, sender_ms = (statistics.median(seconds_of(side, ROUNDS)) * 1e3 for side in sides)
    return receiver_ms, sender_ms, receiver_side()


def measure(bench: Bench) -> dict[str, Any]:
    rows = []
    for case in CASES:
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
            for layout, block, tp in (case[:3], case[3:])
        ]
        receiver_ms, sender_ms, chunks = times(*shapes)
        pair = " -> ".join(f"{shape.layout} block {shape.block_tokens} tp {shape.tp_size}" for shape in shapes)
        rows.append(
            {"pair": pair, "receiver_ms": round(receiver_ms, 2), "sender_ms": round(sender_ms, 2), "chunks": chunks}
        )
        bench.show(rows[-1])
    return {"tokens": TOKENS, "goal_ms": GOAL_MS, "rows": rows}
