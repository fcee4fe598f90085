"""Ceilings and baselines of a GPU bench: copies, one NIXL descriptor, one descriptor per block with SGL off and on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from bench.gpu.place import MIB, Place
from bench.gpu.processes import Child, ask_all
from bench.scenario import Problem
from bench.timing import spread

BLOCK_BYTES = 32 << 10  # a block of 16 tokens x 8 heads x 128 in bf16, of one layer's K or V
OTHER_BLOCK_BYTES = (16 << 10, 64 << 10)
BASELINE_BYTES = 128 * MIB
LARGEST_BASELINE = 1 << 30  # 32768 descriptors; more would take longer and show nothing new
SGL = {"off": {}, "on": {"NIXL_UCX_SGL_ENABLE": "1"}}
COPIES_S = 90.0


def copies(place: Place) -> list[dict[str, Any]]:
    """GB/s of copies inside a GPU, between the two, to and from pinned host memory."""
    sizes = sorted({*place.sizes, *((1 << 30, 8 << 30) if place.is_gpu else (16 * MIB,))})
    child = Child("bench.gpu.copies", place.bench.logs / "copies.log")
    try:
        found: list[dict[str, Any]] = child.ask(
            "measured", seconds=COPIES_S, sender=place.sender, receiver=place.receiver, sizes=sizes
        )["copies"]
    finally:
        child.end()
    for each in found:
        each["gb_s"] = each["bytes"] / each["together_s"] / 1e9
        place.bench.say(f"  copy {each['path']:10} {each['bytes'] / MIB:7.0f} MiB: {each['gb_s']:7.1f} GB/s")
    return found


def nixl(place: Place) -> list[dict[str, Any]]:
    """One descriptor, and a descriptor per block, for each pair of devices."""
    found = []
    pairs = [("off", place.sender, place.receiver), ("on", place.sender, place.receiver)]
    if place.receiver != place.sender:
        pairs.append(("off", place.sender, place.sender))
    with ExitStack() as stack:
        ends = [_start(place, stack, number, *pair) for number, pair in enumerate(pairs)]
        opened = _open(place, ends, pairs)
        for pair, (ours, theirs), target in zip(pairs, ends, opened, strict=True):
            what = f"NIXL {pair[1]} -> {pair[2]}, SGL {pair[0]}"
            try:
                found += list(_pair(place, *pair, ours, theirs, target))
            except Problem as problem:
                place.bench.problem(what, problem)
    return found


def _start(place: Place, stack: ExitStack, number: int, sgl: str, *_: str) -> tuple[Child, Child]:
    sender, receiver = (
        Child("bench.gpu.nixl", place.bench.logs / f"nixl-{role}-{number}.log", SGL[sgl])
        for role in ("sender", "receiver")
    )
    for child in (sender, receiver):
        stack.callback(child.end)
    return sender, receiver


def _open(
    place: Place, ends: Sequence[tuple[Child, Child]], pairs: Sequence[tuple[str, str, str]]
) -> list[dict[str, Any]]:
    """Open both ends of all pairs at once. Returns how each receiver is reached."""
    size = max(place.sizes)
    children = [child for pair in ends for child in pair]
    asked = [
        {"name": f"{role}-{number}", "device": device, "size_bytes": size, "is_sender": role == "sender"}
        for number, (_, sender, receiver) in enumerate(pairs)
        for role, device in (("sender", sender), ("receiver", receiver))
    ]
    told = ask_all(children, "open", asked)
    return [{"peer": asked[at]["name"], **told[at]} for at in range(1, len(told), 2)]


def _pair(
    place: Place, sgl: str, sender: str, receiver: str, ours: Child, theirs: Child, target: dict[str, Any]
) -> list[dict[str, Any]]:
    found = []
    for total, piece in _cases(place, sgl, is_same=sender == receiver != place.receiver):
        theirs.ask("wipe")
        repeats = max(3, min(30, (2 << 30) // total)) if place.is_gpu else 3
        seconds = ours.ask("write", total_bytes=total, piece_bytes=piece, repeats=repeats + 1, **target)["seconds"]
        if not theirs.ask("check", total_bytes=total)["is_right"]:
            raise Problem(f"{total} bytes in pieces of {piece}: what arrived is not what was sent")
        row: dict[str, Any] = {"sender": sender, "receiver": receiver, "sgl": sgl, "bytes": total, "piece_bytes": piece}
        row |= {"first_s": seconds[0], **spread(seconds[1:])}
        row["gb_s"] = total / row["p50_s"] / 1e9
        shape = f"{total // piece} x {piece / 1024:.0f} KiB"
        place.bench.say(
            f"  NIXL {sender} -> {receiver}, SGL {sgl:3} {shape:>18}: "
            f"{row['p50_s'] * 1e3:8.3f} ms {row['gb_s']:7.1f} GB/s"
        )
        found.append(row)
    return found


def _cases(place: Place, sgl: str, is_same: bool) -> list[tuple[int, int]]:
    """(bytes, bytes per descriptor) of each case. The bytes are whole blocks."""
    single = [(size, size) for size in place.sizes]
    if is_same:
        return single
    baseline = BASELINE_BYTES if place.is_gpu else MIB
    blocks = [(size, BLOCK_BYTES) for size in sorted({*place.sizes, baseline}) if size <= LARGEST_BASELINE]
    blocks += [(baseline, piece) for piece in OTHER_BLOCK_BYTES]
    return (single if sgl == "off" else []) + blocks
