"""Which slot size suits which route: two transfers with agents of several slot sizes. `gpu.py --only tune`.

Not part of a usual run. The default slot sizes come from it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from gpu_fleet import MISMATCHED, Joined, fleet, pairs
from gpu_place import MIB, Place, spread
from gpu_processes import Problem

SLOT_MIB = (4, 8, 16, 32, 64, 128)
RECEIVE_BYTES, SEND_BYTES = 512 * MIB, 256 * MIB
ROUND_S = 20.0


def tune(place: Place) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for slot_mib in SLOT_MIB if place.is_gpu else (1, 4):
        slot_bytes = slot_mib * MIB
        slots = {
            "slot_bytes": str(slot_bytes),
            "receive_slots": str(max(4, RECEIVE_BYTES // slot_bytes if place.is_gpu else 8)),
            "send_slots": str(max(2, SEND_BYTES // slot_bytes if place.is_gpu else 4)),
        }
        if not place.is_time_for(f"slots of {slot_mib} MiB", ROUND_S):
            break
        chosen = replace(place, agent_options={**place.agent_options, **slots}, problems=place.problems)
        try:
            rows += _round(chosen, slot_mib)
        except Problem as problem:
            place.problem(f"slots of {slot_mib} MiB", problem)
    return rows


def _round(place: Place, slot_mib: int) -> list[dict[str, Any]]:
    pair, rows = pairs(place.shape)[MISMATCHED], []
    with ExitStack() as stack:
        fleets = [stack.enter_context(fleet(place, route, {}, f"-{slot_mib}")) for route in place.routes]
        for each in fleets:
            each.wait_serving()
            with Joined(place, each, pair, place.tokens[-1]) as joined:
                joined.poison()
                joined.carry(200)
                joined.verify()
                joined.check_route()
                for tokens in (16, 1024, 16384) if place.is_gpu else place.tokens:
                    figures = spread(joined.carry(tokens, repeats=12)["seconds"][2:])
                    size_bytes = tokens * pair.wire_token_bytes
                    rows.append({"route": each.route, "slot_mib": slot_mib, "bytes": size_bytes, **figures})
                    place.say(
                        f"  slots of {slot_mib:3} MiB, {each.route:6} {size_bytes / MIB:6g} MiB:"
                        f" p50 {figures['p50_s'] * 1e3:8.3f} ms, {size_bytes / figures['p50_s'] / 1e9:6.1f} GB/s"
                    )
    return rows
