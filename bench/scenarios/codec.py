"""Encodes and decodes a want with 4096 blocks, as sent over the engine's socket. Goal: 150 us for both (p50)."""

from __future__ import annotations

import random
import statistics
from typing import Any

import msgpack
import msgspec
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import ToAgent, Want
from kvbridge_proto.framing import decode, encode

from bench.scenario import Bench
from bench.timing import seconds_of

BLOCKS = 4096
ROUNDS = 3000


def want() -> Want:
    ids = tuple(random.Random(0).sample(range(100_000), BLOCKS))
    return Want(
        number=1,
        request="cmpl-0123456789abcdef-0",
        rendezvous="cmpl-0123456789abcdef",
        sender="tcp://10.0.0.1:7700",
        first_token=0,
        end_token=BLOCKS * 16,
        blocks=(Blocks(0, 0, ids),),
        deadline_s=60.0,
    )


def measure(bench: Bench) -> dict[str, Any]:
    message = want()
    frame = encode(message)
    assert decode(frame, ToAgent) == message
    calls = {"encode": lambda: encode(message), "decode": lambda: decode(frame, ToAgent)}
    calls["both"] = lambda: decode(encode(message), ToAgent)
    times = {name: seconds_of(lambda _, act=act: act(), ROUNDS) for name, act in calls.items()}  # type: ignore[misc]
    found: dict[str, Any] = {f"{name}_us_p50": statistics.median(each) * 1e6 for name, each in times.items()}
    found["both_us_p99"] = statistics.quantiles(times["both"], n=100)[98] * 1e6
    bench.show(found)
    sizes = {"blocks": BLOCKS, "frame_bytes": len(frame), "goal_us": 150.0}
    return {**sizes, **found, "msgspec": msgspec.__version__, "msgpack": ".".join(map(str, msgpack.version))}
