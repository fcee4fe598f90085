"""What index keys cost beside latents: 2 GiB of both by `pull` through real agents, in turns with as many plain bytes.

From GPU 0 to GPU 1, or on the only one; `--smoke`: tiny, on the processor. `--only rotated`: the groups that have a
pair with this in its name.

A token of DeepSeek V3.2 has 61 latents of 576 bf16 and 61 index keys of 128 fp8 with a scale each. Of 68 layers of
latents alone it has as many bytes. The keys also go to an engine that rotates them, and to one that keeps their scales
in another form. All pairs of a group have agents of their own and are asked in turns. Every block of both pools is
carried each time. A time is what the receiving engine waits, from its Want until it reads Done. Ratios are of times per
byte: of a row as many as the side with fewer keeps. Before that each pair is checked: all rows that are not converted,
bit for bit.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from kvbridge_proto.engine import Done, Released
from kvbridge_proto.pool import Plane
from kvbridge_proto.status import Status, StatusQuery

from bench.gpu.place import gpus
from bench.gpu.processes import BenchAgent, end
from bench.scenario import Bench, Problem
from kvbridge.geometry.wire import base_part
from kvbridge.loopback.engine import SyntheticEngine
from kvbridge.loopback.messages import offer_of, want_of
from testing.pools import More, Shape, describe, mla

GOAL = 1.1
SIZE_BYTES = 2 << 30
LAYERS, AS_MANY = 61, 68  # with index keys; of as many bytes without
INDEX = More("index_key", width=128, codec="fp8_row_scale", page_tokens=64, scale_codec="pow2_fp32")
ROTATED = replace(INDEX, part="rotated_index_key")
PACKED = replace(INDEX, scale_codec="ue8m0_x4")


@dataclass(frozen=True, slots=True)
class Pair:
    """`like` is the pair of the same group that it is compared with; "" if it is that one."""

    name: str
    sender: Shape
    receiver: Shape
    like: str = ""


def groups(layers: int, as_many: int) -> list[list[Pair]]:
    plain, indexed = mla(layers=as_many, block_tokens=64), mla(layers=layers, block_tokens=64, more=(INDEX,))
    gqa = Shape(layers=layers // 2, kv_heads=8, key_width=128, value_width=128, block_tokens=64)
    found = []
    for what, changes in (
        ("", {}),
        (", block 64 to 128", {"block_tokens": 128}),
        (", bf16 to fp8_ds_mla", {"codec": "fp8_ds_mla"}),
    ):
        alone = f"latents alone{what}"
        with_keys = Pair(f"with index keys{what}", indexed, replace(indexed, **changes), alone)
        found.append([Pair(alone, plain, replace(plain, **changes)), with_keys])
    beside = Pair("with index keys, beside K and V", indexed, indexed, "K and V")
    changed = [
        Pair(f"with index keys, {what}", indexed, replace(indexed, more=(keys,)), "with index keys")
        for what, keys in (("rotated", ROTATED), ("of other scales", PACKED))
    ]
    return [found[0] + [Pair("K and V", gqa, gqa), beside], found[0] + changed, *found[1:]]


class Side:
    """One engine's memory, all of which is one prompt, in blocks in no order; its agent, and its connection."""

    def __init__(self, shape: Shape, tokens: int, device: str, seed: int, agent: BenchAgent) -> None:
        shape = replace(shape, blocks=-(-tokens // shape.block_tokens) + 1)
        self.tokens, self.block_tokens, self.agent = tokens, shape.block_tokens, agent
        self.pool = describe(shape)
        torch.manual_seed(seed)
        self.regions = [
            torch.randint(0, 100, (region.size_bytes,), dtype=torch.uint8, device=device)
            for region in self.pool.regions
        ]
        self.ids = torch.randperm(shape.blocks)[: -(-tokens // shape.block_tokens)]
        self.engine = SyntheticEngine(agent.socket, self.pool, self.regions, is_spinning=device != "cpu")
        self.engine.join([agent.address])

    @property
    def row_bytes(self) -> dict[tuple[int, str], int]:
        """Of one token, by layer and part, rotated or not."""
        return {(plane.layer, base_part(plane.part)): plane.heads * plane.codec.row_bytes for plane in self.pool.planes}

    def rows(self, plane: Plane) -> torch.Tensor:
        """All rows of a plane in the order of the prompt: [heads, tokens, row bytes]."""
        memory = self.regions[plane.region]
        within = torch.zeros(1, dtype=torch.int64)
        for step in plane.token_axis:
            within = (within[:, None] + torch.arange(step.count) * step.stride).flatten()
        token, size = torch.arange(self.tokens), self.block_tokens
        at = plane.offset + self.ids[token // size] * plane.block_stride + within[token % size]
        row = torch.arange(plane.codec.row_bytes, device=memory.device)
        heads = [at + head * plane.head_stride for head in range(plane.heads)]
        return torch.stack([memory[each.to(memory.device)[:, None] + row] for each in heads])


class Joined:
    """A pair that is up."""

    def __init__(self, pair: Pair, sender: Side, receiver: Side) -> None:
        self.pair, self.sender, self.receiver = pair, sender, receiver
        theirs, ours = sender.row_bytes, receiver.row_bytes
        self.wire_bytes = sender.tokens * sum(min(theirs[key], ours[key]) for key in ours)

    def carry(self) -> float:
        """Seconds that the receiver waited."""
        name = f"{time.monotonic_ns():x}"
        sender, receiver = self.sender.engine, self.receiver.engine
        fence = sender.fence.mark()
        sender.client.send(offer_of(name, self.sender.tokens, self.sender.ids.tolist(), fence=fence))
        sender.client.send(StatusQuery())
        sender.told(Status)  # so it has read the offer
        address, tokens, ids = self.sender.agent.address, range(self.receiver.tokens), self.receiver.ids.tolist()
        want = want_of(name, address, tokens, ids, self.receiver.block_tokens, fence=receiver.fence.mark())
        began = time.perf_counter()
        receiver.client.send(want)
        receiver.ended(Done, (name,))
        seconds = time.perf_counter() - began
        sender.ended(Released, (name,))
        return seconds

    def check(self) -> None:
        """Raises Problem if a row that is not converted came wrong."""
        for region in self.receiver.regions:
            region.fill_(0xA5)
        self.carry()
        theirs = {(plane.layer, plane.part): plane for plane in self.sender.pool.planes}
        for plane in self.receiver.pool.planes:
            given = theirs.get((plane.layer, plane.part))
            if given is not None and given.codec == plane.codec:
                came = self.receiver.rows(plane).cpu()
                if not torch.equal(self.sender.rows(given).cpu(), came):
                    raise Problem(f"WRONG DATA: {self.pair.name}, layer {plane.layer} {plane.part}")


def in_turns(group: Sequence[Pair], devices: tuple[str, str], size_bytes: int, rounds: int, logs: Path) -> list[Any]:
    """A row for each pair of the group, in turns."""
    with ExitStack() as stack:
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbridge-")))
        agents: list[BenchAgent] = []
        stack.callback(lambda: end([agent.process for agent in agents]))
        for number in range(2 * len(group)):
            options = {"device": devices[number % 2], "routes": "pull"}
            agents.append(BenchAgent(sockets, logs, f"index-{number}", options, {}))
        for agent in agents:
            agent.wait_serving()
        joined = []
        for number, pair in enumerate(group):
            tokens = tokens_of(pair.sender, size_bytes)
            sender = Side(pair.sender, tokens, devices[0], 1, agents[2 * number])
            stack.callback(sender.engine.close)
            receiver = Side(pair.receiver, tokens, devices[1], 2, agents[2 * number + 1])
            stack.callback(receiver.engine.close)
            joined.append(Joined(pair, sender, receiver))
        for each in joined:
            each.check()
        taken: list[list[float]] = [[] for _ in joined]
        for _ in range(rounds):
            for each, seconds in zip(joined, taken, strict=True):
                seconds.append(each.carry())
        return [_row(each, seconds) for each, seconds in zip(joined, taken, strict=True)]


def tokens_of(shape: Shape, size_bytes: int) -> int:
    """As many whole pages as come nearest to so many bytes."""
    planes = describe(replace(shape, blocks=1)).planes
    return max(1, round(size_bytes / (64 * sum(plane.heads * plane.codec.row_bytes for plane in planes)))) * 64


def _row(joined: Joined, seconds: list[float]) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {
        "pair": joined.pair.name,
        "like": joined.pair.like,
        "bytes": joined.wire_bytes,
        "tokens": joined.sender.tokens,
        "ms": round(median * 1e3, 3),
        "min_ms": round(min(seconds) * 1e3, 3),
        "all_ms": [round(each * 1e3, 3) for each in seconds],
        "gb_per_s": round(joined.wire_bytes / median / 1e9, 1),
    }


def goals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    known = {row["pair"]: row for row in rows}
    found = []
    for row in rows:
        if row["like"]:
            like = known[row["like"]]
            row["ratio"] = round(row["ms"] / row["bytes"] / (like["ms"] / like["bytes"]), 3)
            row["min_ratio"] = round(row["min_ms"] / row["bytes"] / (like["min_ms"] / like["bytes"]), 3)
            measured = f"{row['ratio']:.3f} (least {row['min_ratio']:.3f}; {row['gb_per_s']:.0f} GB/s)"
            against = f"{like['pair']}: {like['ms']:.2f} ms, {like['gb_per_s']:.0f} GB/s"
            goal = f"{row['pair']}, {row['bytes'] / 2**30:.2f} GiB: time per byte at most {GOAL}"
            found.append({"goal": goal, "measured": measured, "against": against, "met": row["ratio"] <= GOAL})
    return found


def measure(bench: Bench, *, smoke: bool = False, rounds: int = 12, only: str = "") -> dict[str, Any]:
    if smoke:
        bench.name += "_smoke"
        devices, size_bytes, layers = ("cpu", "cpu"), 1 << 20, (6, 7)
    else:
        devices = "cuda:0", f"cuda:{min(1, torch.cuda.device_count() - 1)}"
        size_bytes, layers = SIZE_BYTES, (LAYERS, AS_MANY)
    found: dict[str, Any] = {"devices": devices, "gpus": gpus(), "rows": []}
    for group in groups(*layers):
        if not any(only in pair.name for pair in group):
            continue
        try:
            rows = in_turns(group, devices, size_bytes, rounds, bench.logs)
        except Exception as error:  # the other groups are worth their time
            bench.problem(group[0].name, f"{type(error).__name__}: {error}")
            continue
        found["rows"] += rows
        for row in rows:
            bench.show(row)
        found["goals"] = goals(found["rows"])
        bench.write(found)
    return found
