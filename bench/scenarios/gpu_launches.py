"""The longest launch for every kind of chunk in a slot of an agent's size: alone, and under MPS beside a busy engine.

Under MPS, an agent that is killed inside a kernel of 2 ms may take its engine with it. So launches are bounded
(kvbridge_kernels/tiling.py). A launch is timed from one event to the next, with the whole chunk enqueued while the
stream sleeps. A round is dropped, and the sleep doubled, if the host took longer than that: its pauses would count. The
time of a launch includes waiting for another tenant's kernels. Fails if a launch takes longer than LIMITS_US, alone or
beside a decode-like engine. Beside 8192^3 products, which take 1.4 ms each, times are only shown. Takes one GPU and
about four minutes, half of them for compiling; `--kinds 3` measures the first three kinds of chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from bench.gpu.processes import Child, mps, serve
from bench.scenario import Bench, Problem
from bench.scenarios.convert import CONVERSIONS, GQA, LATENT, SLOT_BYTES, Pair, Side, over
from kvbridge.geometry.plan import plan
from kvbridge.geometry.shard import assign
from kvbridge.geometry.wire import PLAIN, ROW_SCALED
from testing.oracle import Shape, describe
from testing.pools import EIGHT_BITS, LAYOUTS, ranks_of

TOKENS = 4096
AHEAD_CYCLES = 3_000_000  # 1.5 ms, in which a chunk's launches are enqueued, at first
LONGEST_AHEAD = AHEAD_CYCLES << 8
LIMITS_US = {"alone": 500.0, "decode": 1000.0}
# Rows that are aligned to few bytes.
NARROW = (("bf16", 80), ("bf16", 36), ("bf16", 33), ("fp8_e4m3", 100), ("fp8_e4m3", 90), ("fp8_e4m3", 33))
CODECS: tuple[str, ...] = tuple(name for name in (*PLAIN, *ROW_SCALED) if name != "bf16")
OTHERS = (("fp8_e4m3", "fp8_e5m2"), ("int8", "fp8_row_scale"), ("fp8_row_scale", "int8_row_scale"))


def pairs() -> Iterator[Pair]:
    yield from CONVERSIONS
    for layout in LAYOUTS:
        for ours, theirs in ((layout, "nhd"), ("hnd", layout)):
            yield _pair(f"{ours} -> {theirs}", replace(GQA, layout=ours), replace(GQA, layout=theirs))
    for codec in CODECS:
        for ours, theirs in (("bf16", codec), (codec, "bf16")):
            yield _pair(f"{ours} -> {theirs}", _of(ours, 0.05), _of(theirs, 0.05))
    for ours, theirs in OTHERS:
        yield _pair(f"{ours} -> {theirs}", _of(ours, 0.05), _of(theirs, 0.07))
    yield _pair("fp8_e4m3 -> other scales", _of("fp8_e4m3", 0.05), _of("fp8_e4m3", 0.07))
    for codec, width in NARROW:
        shape = replace(_of(codec, 0.05), key_width=width, value_width=width)
        yield _pair(f"{codec} of {width}, nhd -> hnd", shape, replace(shape, layout="hnd"))
        yield _pair(f"{codec} of {width}, nhd -> cpu_vec", shape, replace(shape, layout="cpu_vec"))
    yield _pair("one head of 16, nhd -> hnd", _small("nhd"), _small("hnd"))
    yield _pair("latent fp8_ds_v4", *(replace(LATENT, codec="fp8_ds_v4", tp_size=size) for size in (8, 1)))


def _pair(name: str, sender: Shape, receiver: Shape) -> Pair:
    return Pair(name, sender, receiver, "")


def _of(codec: Any, scale: float) -> Shape:
    scales = {"k": (scale,), "v": (scale,)} if codec in EIGHT_BITS else None
    return replace(GQA, codec=codec, scales=scales)


def _small(layout: str) -> Shape:
    return replace(GQA, kv_heads=1, key_width=16, value_width=16, layout=layout)


class Stopwatch:
    """Replaces the last step of launching, and records an event before and after every launch."""

    def __init__(self) -> None:
        from kvbridge_kernels import launch

        self._start = launch.start
        self.events: list[tuple[Any, Any]] = []
        self.dropped = 0  # rounds that the host was too slow for
        self._cycles = AHEAD_CYCLES
        self._woken: Any = None
        self._was_late = False
        launch.start = self._timed

    def _timed(
        self, launch: Any, work: Any, first: int, end: int, stream: int | None = None, most_programs: int | None = None
    ) -> None:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        current = torch.cuda.current_stream() if stream is None else torch.cuda.ExternalStream(stream)
        before.record(current)
        self._start(launch, work, first, end, stream, most_programs)
        after.record(current)
        self.events.append((before, after))
        self._was_late = self._woken is not None and self._woken.query()

    def enqueued_ahead(self, move: Callable[[], None], stream: Any) -> list[float]:
        """Microseconds of each launch of `move` that were all enqueued while the stream slept. Raises Problem."""
        while self._cycles <= LONGEST_AHEAD:
            self._woken = torch.cuda.Event()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(self._cycles)
                self._woken.record()
            move()
            taken = self.taken()
            if not self._was_late:
                return taken
            self.dropped += 1
            self._cycles *= 2
        raise Problem(f"the host never enqueued a chunk's launches within {LONGEST_AHEAD} cycles")

    def taken(self) -> list[float]:
        """Microseconds of each launch since the last call. All must be over."""
        found = [begin.elapsed_time(end) * 1e3 for begin, end in self.events]
        self.events.clear()
        return found


def launches(pair: Pair, copier: Any, slots: Any, watch: Stopwatch, rounds: int) -> dict[str, Any]:
    """The launches of the plan's fullest chunk, in its gather and its scatter: how many, the median, the longest."""
    device = copier.device
    tokens = max(TOKENS, _tokens_of(pair))
    sender = Side(pair.sender, ranks_of(pair.sender)[0], tokens, device, 1)
    receiver = Side(pair.receiver, ranks_of(pair.receiver)[0], tokens, device, 2)
    takes = assign([describe(pair.sender, *ranks) for ranks in ranks_of(pair.sender)], receiver.pool)[0]
    planned = plan(sender.pool, receiver.pool, takes, 0, tokens, SLOT_BYTES["cuda"])
    fullest = max(range(planned.chunks), key=lambda index: planned.chunk(index).size_bytes)
    ours, theirs = sender.parts(planned, True)[fullest], receiver.parts(planned, False)[fullest]
    slot, kind = slots.span(0, ours.chunk.size_bytes), copier.digests[0]
    found: dict[str, Any] = {"pair": pair.name, "slot_mib": round(slot.size_bytes / 2**20, 1)}
    digest = 0

    def gather() -> None:
        nonlocal digest
        copier.gather(sender.mapped, ours, slot, kind)
        digest = over(copier).digest

    def scatter() -> None:
        copier.scatter(receiver.mapped, theirs, slot, kind, digest)
        over(copier)

    for move, stream in ((gather, copier._out), (scatter, copier._in)):
        name = move.__name__
        move()  # compiles
        found[f"{name}_launches"] = len(watch.taken())
        ordered = sorted(taken for _ in range(rounds) for taken in watch.enqueued_ahead(move, stream))
        found |= {f"{name}_p50_us": round(ordered[len(ordered) // 2], 1), f"{name}_max_us": round(ordered[-1], 1)}
    found["dropped"] = watch.dropped
    copier.forget(sender.mapped)
    copier.forget(receiver.mapped)
    return found


def _tokens_of(pair: Pair) -> int:
    """About as many tokens as fill a slot."""
    pool = describe(pair.receiver, *ranks_of(pair.receiver)[0])
    row = sum(plane.heads * plane.codec.row_bytes for plane in pool.planes)
    wanted = 2 * SLOT_BYTES["cuda"] // row * pair.receiver.cp_size
    return -(-wanted // 1024) * 1024


class Launches:
    """Measures in a process of its own, which may be a client of MPS. Every public method is a command."""

    def __init__(self, stack: ExitStack) -> None:
        from kvbridge.device.copier_gpu import GpuBlockCopier
        from kvbridge.device.driver import Gpu

        self._copier = GpuBlockCopier(Gpu.open("cuda:0"), 4, SLOT_BYTES["cuda"])
        stack.callback(self._copier.close)
        self._slots = self._copier.staging(SLOT_BYTES["cuda"], 1)
        stack.callback(self._slots.close)
        self._watch = Stopwatch()
        self._pairs = list(pairs())

    def of_pair(self, number: int, rounds: int) -> dict[str, Any]:
        pair = self._pairs[number]
        try:
            found = launches(pair, self._copier, self._slots, self._watch, rounds)
        except Exception as error:  # the other kinds are worth their time
            found = {"pair": pair.name, "failure": f"{type(error).__name__}: {error}"}
        torch.cuda.empty_cache()
        return found


def rows(bench: Bench, where: str, rounds: int, kinds: int, env: Mapping[str, str]) -> list[dict[str, Any]]:
    """The launches of every kind of chunk, of which those that take too long are problems. Raises Problem."""
    child, found = Child("bench.scenarios.gpu_launches", bench.logs / f"launches-{where}.log", env), []
    try:
        for number in range(len(list(pairs())[:kinds])):
            row = child.ask("of_pair", seconds=150.0, number=number, rounds=rounds)
            bench.show({"where": where, **row})
            found.append(row)
            if "failure" in row:
                bench.problem(f"{where}: {row['pair']}", row["failure"])
                continue
            for name in ("gather", "scatter"):
                if row[f"{name}_max_us"] > LIMITS_US.get(where, float("inf")):
                    bench.problem(f"{where}: {row['pair']}", f"a {name} took {row[f'{name}_max_us']:.0f} us")
    finally:
        child.end()
    return found


def measure(bench: Bench, *, rounds: int = 10, kinds: int = 1000) -> dict[str, Any]:
    found: dict[str, Any] = {"alone": rows(bench, "alone", rounds, kinds, {})}
    with mps() as env:
        load = Child("bench.gpu.load", bench.logs / "load.log", env)
        try:
            for kind in ("decode", "gemm"):
                load.ask("start", kind=kind, device="cuda:0")
                found[kind] = rows(bench, kind, rounds, kinds, env)
                load.ask("stop")
        finally:
            load.end()
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "limits_us": LIMITS_US}
    return {**about, **found}


if __name__ == "__main__":
    with ExitStack() as closing:
        serve(Launches(closing))
