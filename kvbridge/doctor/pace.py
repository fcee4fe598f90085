"""How fast each route of this machine is, beside a copy of the same bytes on the same devices in the same run.

It starts agents of its own, as the checks of routes do: one that sends, and for each route one that receives. Both
engines are in this process.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from kvbridge_proto.peer import Route
from msgspec import structs

from ..device.handles import SHM
from ..errors import OperatorError
from ..loopback.engine import RequestRejected
from ..loopback.pair import EnginePair, attached, zeros
from ..loopback.pools import Shape
from ..loopback.processes import AgentProcess, agents

Agents = tuple[AgentProcess, AgentProcess]  # the sender's, the receiver's
Pools = Literal["equal", "mismatched"]

# A model of 8 billion parameters: 128 KiB per token, so 1024 tokens are 128 MiB.
SENDER = Shape(name="sender", axes="LPBTHE", block_tokens=16, blocks=0, layers=32)
RECEIVERS: dict[Pools, Shape] = {
    "equal": structs.replace(SENDER, name="receiver"),
    "mismatched": structs.replace(SENDER, name="receiver", axes="LPBHTE", block_tokens=64),
}
USUAL_BYTES = 128 << 20
MOST_PACE_BYTES = {"cpu": 256 << 20, "cuda": 8 << 30}  # more takes longer, and is not faster
SHARE_OF_MEMORY = 8  # a request needs four times its size if both engines are on one device
LOOKED_AT = 256  # tokens that are compared
LEAST_CARRIES, MOST_CARRIES = 3, 1000
# The share of the copy's rate that the largest request should reach; less means that something is wrong with a route.
# Between two H200s 2 GiB reached 0.74 by pull, 0.59 by direct, 0.44 by nixl and 0.014 by host
# (bench/results/gpu_2*.json); UCX that falls back reaches 0.001. On one H200, whose copies run at 2 TB/s, 8 GiB reached
# 0.28, 0.13, 0.11 and 0.002 (721f084). On a CPU it was 0.07 to 0.22, beside other work (2 cores, AMD EPYC, Linux 6.18,
# 2026-11-23).
FLOORS: dict[Route, float] = {"pull": 0.1, "host": 0.001}
USUAL_FLOOR = 0.05
FLOOR_ON_CPU = 0.02


@dataclass(frozen=True, slots=True)
class Pace:
    """Requests of `size_bytes`, one after the other, and the seconds each took.

    `ceiling` is the best of as many copies, in bytes per second. `floor` is the share of it that should be reached. It
    is 0 for all but the largest requests: for the smaller ones the time counts, not the rate.
    """

    route: Route
    pools: Pools
    size_bytes: int
    seconds: tuple[float, ...]
    ceiling: float
    floor: float

    @property
    def p50_s(self) -> float:
        return median(self.seconds)

    @property
    def p99_s(self) -> float:
        """The slowest, if there are fewer than a hundred."""
        return sorted(self.seconds)[int(0.99 * len(self.seconds))]

    @property
    def bytes_per_s(self) -> float:
        return self.size_bytes / self.p50_s

    @property
    def share(self) -> float:
        """The rate, as a share of the ceiling."""
        return self.bytes_per_s / self.ceiling

    @property
    def is_slow(self) -> bool:
        """Whether the rate is below the floor."""
        return self.share < self.floor


class Bench:
    """The memory to measure with: that of two engines, and of a copy between the same `devices`.

    Requests have at most `most_bytes` (0: a default for the device), and no more than fit. Raises OperatorError
    (`no_staging`) if not even the usual ones fit.
    """

    def __init__(self, devices: tuple[str, str], most_bytes: int = 0) -> None:
        torch.set_num_threads(1)  # as in agents; more threads slow small copies down if a core is busy
        kind = torch.device(devices[0]).type
        fits = min(map(free_bytes, devices)) // SHARE_OF_MEMORY
        largest = min(most_bytes or MOST_PACE_BYTES[kind], fits) // USUAL_BYTES * USUAL_BYTES
        if not largest:
            needed, found = USUAL_BYTES * SHARE_OF_MEMORY, min(map(free_bytes, devices))
            raise OperatorError("no_staging", f"memory: {found >> 20} MiB free, needed {needed >> 20}")
        self.sizes = tuple(dict.fromkeys((SENDER.block_tokens * SENDER.token_bytes, USUAL_BYTES, largest)))
        self._devices = devices
        self._tokens = largest // SENDER.token_bytes
        regions = SENDER.layers if kind == "cuda" else 1
        self._memory = [zeros(largest, regions, device) for device in devices]
        self._copied = [zeros(largest, 1, device)[0] for device in devices]
        for region in self._memory[0]:
            region.view(torch.int64).random_()

    @contextmanager
    def agents(self, routes: Sequence[Route], net_devices: str) -> Iterator[dict[Route, Agents]]:
        """Start one sender for all routes, and for each route a receiver that allows no other.

        Raises OperatorError (`agent_start`).
        """
        names = ["sender", *routes]
        devices = [self._devices[0], *[self._devices[1]] * len(routes)]
        routes_of: dict[str, str] = {"sender": ",".join(routes), **{route: route for route in routes}}
        with (
            tempfile.TemporaryDirectory(prefix="kvbridge-bench-") as folder,
            agents(Path(folder), names, devices, routes_of=routes_of, net_devices=net_devices) as (sender, *receivers),
        ):
            yield {route: (sender, receiver) for route, receiver in zip(routes, receivers, strict=True)}

    def measure(
        self, route: Route, between: Agents, seconds: float, begun: Callable[[Pools, int], None]
    ) -> Iterator[Pace]:
        """Measure each pair of pools and each size, for `seconds` each. `begun` is called before each.

        Raises OperatorError (`demo_engine`) with what an agent said, or with the place of wrong bytes.
        """
        for pools, shape in RECEIVERS.items():
            for region in self._memory[1]:
                region.zero_()  # remove what an earlier route brought
            shapes = [structs.replace(each, blocks=self._tokens // each.block_tokens) for each in (SENDER, shape)]
            try:
                with attached(between, shapes, self._memory) as pair:
                    for size_bytes in self.sizes:
                        begun(pools, size_bytes)
                        yield self._pace(route, pools, size_bytes, pair, seconds)
                    # only the largest request has the last tokens
                    if wrong := pair.difference(range(self._tokens - LOOKED_AT, self._tokens)):
                        raise RequestRejected(wrong)
            except RequestRejected as error:
                raise OperatorError("demo_engine", f"{pools} pools: {error}") from None

    def _pace(self, route: Route, pools: Pools, size_bytes: int, pair: EnginePair, seconds: float) -> Pace:
        tokens = size_bytes // SENDER.token_bytes
        for _ in range(2):  # sessions open, memory is registered, kernels are compiled, with and without a digest
            pair.carry(tokens)
        took, copies = list[float](), list[float]()
        ends = time.monotonic() + seconds
        while len(took) < LEAST_CARRIES or (time.monotonic() < ends and len(took) < MOST_CARRIES):
            took.append(pair.carry(tokens)[0])
            copies.append(self._copy(size_bytes))
        floor = FLOOR_ON_CPU if self._devices[0] == "cpu" else FLOORS.get(route, USUAL_FLOOR)
        floor = floor if size_bytes == max(self.sizes) else 0.0
        return Pace(route, pools, size_bytes, tuple(took), size_bytes / min(copies), floor)

    def _copy(self, size_bytes: int) -> float:
        sender, target = (memory[:size_bytes] for memory in self._copied)
        _wait(self._devices)
        began = time.perf_counter()
        target.copy_(sender)
        _wait(self._devices)
        return time.perf_counter() - began


def free_bytes(device: str) -> int:
    """The free memory of a device; for a CPU, what can be shared between processes."""
    if device != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    shared, page_bytes = os.statvfs(SHM), os.sysconf("SC_PAGE_SIZE")
    return min(shared.f_bavail * shared.f_frsize, os.sysconf("SC_AVPHYS_PAGES") * page_bytes)


def _wait(devices: Sequence[str]) -> None:
    for device in devices:
        if device != "cpu":
            torch.cuda.synchronize(device)
