"""Encodes and decodes a want with 4096 blocks, as sent over the engine's socket. Goal: 150 us for both (p50).

Run from the repository: `python bench/codec.py`. Prints the figures and writes bench/results/codec.json.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import msgpack
import msgspec
from kvbridge_proto.codec import decode, encode
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import ToAgent, Want
from record import write

BLOCKS = 4096
ROUNDS = 3000
GOAL_US = 150.0


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


def measure() -> dict[str, Any]:
    message = want()
    frame = encode(message)
    assert decode(frame, ToAgent) == message
    encode_us, decode_us, both_us = [], [], []
    for _ in range(ROUNDS):
        began = time.perf_counter_ns()
        sent = encode(message)
        between = time.perf_counter_ns()
        decode(sent, ToAgent)
        ended = time.perf_counter_ns()
        encode_us.append((between - began) / 1e3)
        decode_us.append((ended - between) / 1e3)
        both_us.append((ended - began) / 1e3)
    return {
        "blocks": BLOCKS,
        "frame_bytes": len(frame),
        "encode_us_p50": statistics.median(encode_us),
        "decode_us_p50": statistics.median(decode_us),
        "both_us_p50": statistics.median(both_us),
        "both_us_p99": statistics.quantiles(both_us, n=100)[98],
        "goal_us": GOAL_US,
        "msgspec": msgspec.__version__,
        "msgpack": ".".join(map(str, msgpack.version)),
    }


def main() -> None:
    found = measure()
    write("codec", found)
    print(
        f"want of {BLOCKS} blocks, {found['frame_bytes']} bytes: encode {found['encode_us_p50']:.1f} us,"
        f" decode {found['decode_us_p50']:.1f} us, both {found['both_us_p50']:.1f} us p50,"
        f" {found['both_us_p99']:.1f} us p99 (goal {GOAL_US:.0f} us p50)"
    )


if __name__ == "__main__":
    main()
