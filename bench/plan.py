"""How long one rank takes to plan: 1 M tokens, 128 layers x K and V, 64 sender ranks to 64 receiver ranks.

`python bench/plan.py` prints milliseconds for each pair of layouts. The goal is 10. The receiver assigns and plans, the
sender only plans.
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


def measure(sender_shape: Shape, receiver_shape: Shape) -> tuple[float, float, int]:
    """Milliseconds of the receiver, of the sender, and the chunks of the receiver's first plan."""
    senders = [describe(sender_shape, tp) for tp in range(sender_shape.tp_size)]
    receiver = describe(receiver_shape, receiver_shape.tp_size // 2)

    def receiver_side() -> int:
        takes = assign(senders, receiver)
        plans = [plan(pool, receiver, taken, 0, TOKENS, SLOT_BYTES) for pool, taken in zip(senders, takes, strict=True)]
        return max(planned.chunks for planned in plans)

    taken, sender = next((each, pool) for each, pool in zip(assign(senders, receiver), senders, strict=True) if each)
    return (
        milliseconds(receiver_side),
        milliseconds(lambda: plan(sender, receiver, taken, 0, TOKENS, SLOT_BYTES)),
        receiver_side(),
    )


def main() -> None:
    rows = []
    print(f"{TOKENS} tokens, 128 layers x 2 parts, goal {GOAL_MS:.0f} ms a rank")
    for sender_layout, sender_block, sender_tp, receiver_layout, receiver_block, receiver_tp in CASES:
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
                (sender_layout, sender_block, sender_tp),
                (receiver_layout, receiver_block, receiver_tp),
            )
        ]
        receiver_ms, sender_ms, chunks = measure(*shapes)
        given = f"{sender_layout} block {sender_block} tp {sender_tp}"
        pair = f"{given} -> {receiver_layout} block {receiver_block} tp {receiver_tp}"
        print(f"{pair}: receiver {receiver_ms:.2f} ms, sender {sender_ms:.2f} ms, {chunks} chunks")
        rows.append(
            {"pair": pair, "receiver_ms": round(receiver_ms, 2), "sender_ms": round(sender_ms, 2), "chunks": chunks}
        )
    write("plan", {"tokens": TOKENS, "goal_ms": GOAL_MS, "rows": rows})


if __name__ == "__main__":
    main()
