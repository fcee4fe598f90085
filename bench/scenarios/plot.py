"""Draws the plots of docs/benchmarks.md from results, beside them or to `--folder`.

From gpu_1 and gpu_2: GB/s by size, with ceilings and the per-block baseline; and transfers beside a busy engine. From
vllm_pairs: the decode engine's time to first token. From serving: requests answered, time to first token and time
between tokens, by load.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from bench.goals import BLOCK_BYTES, MISMATCHED
from bench.scenario import Bench

MIB = 1 << 20
COLORS = {"pull": "#7a3b8f", "direct": "#0b6e99", "nixl": "#c4620a", "host": "#5b8c2a"}
INK, FAINT, BASELINE = "#333333", "#9a9a9a", "#b02a37"
SERVING = (
    (
        "vLLM",
        (
            ("both", "two engines that do both", FAINT, "o-"),
            ("nixl", "NixlConnector", BASELINE, "o-"),
            ("kvbridge", "kvbridge", COLORS["direct"], "o-"),
            ("nixl-16-64", "NixlConnector, block 16 to 64", BASELINE, "o:"),
            ("kvbridge-16-64", "kvbridge, block 16 to 64", COLORS["host"], "o-"),
            ("kvbridge-bf16-fp8", "kvbridge, bf16 to fp8", COLORS["pull"], "o-"),
        ),
    ),
    (
        "vLLM",
        (
            ("vllm-alone", "one engine, one core", FAINT, "o-"),
            ("vllm-alone-two-cores", "one engine, both cores", INK, "o-"),
            ("vllm-nixl", "NixlConnector", BASELINE, "o-"),
            ("vllm-kvbridge", "kvbridge", COLORS["direct"], "o-"),
            ("vllm-kvbridge-32-64", "kvbridge, block 32 to 64", COLORS["host"], "o-"),
            ("vllm-kvbridge-proxy", "kvbridge, by its proxy", COLORS["direct"], "o:"),
        ),
    ),
    (
        "SGLang",
        (
            ("sglang-alone", "one engine, one core", FAINT, "o-"),
            ("sglang-alone-two-cores", "one engine, both cores", INK, "o-"),
            ("sglang-nixl", "its NIXL backend", BASELINE, "o-"),
            ("sglang-kvbridge", "kvbridge", COLORS["direct"], "o-"),
        ),
    ),
    (
        "across",
        (
            ("vllm-alone-two-cores", "vLLM, both cores", INK, "o-"),
            ("sglang-alone-two-cores", "SGLang, both cores", INK, "o:"),
            ("vllm-sglang", "vLLM to SGLang", COLORS["direct"], "o-"),
            ("sglang-vllm", "SGLang to vLLM", COLORS["nixl"], "o-"),
        ),
    ),
)  # for each panel: setup, its label, color, line
LOADS = (
    ("idle", "none", False),
    ("decode loop", "decode", False),
    ("GEMM loop", "gemm", False),
    ("decode loop, MPS", "decode", True),
    ("GEMM loop, MPS", "gemm", True),
)


def rates(found: Mapping[str, Any], path: Path) -> None:
    """GB/s end to end, mismatched pools, one request, on logarithmic axes."""
    figure, axes = pyplot.subplots(figsize=(8.4, 4.8))
    where = {"sender": found["sender"], "receiver": found["receiver"]}
    for route, color in COLORS.items():
        rows = _rows(found.get("transfers", ()), route=route, pair=MISMATCHED, requests=1, gap_s=0.0, **where)
        _line(
            axes,
            [row for row in rows if row["tokens"] != 16],
            f"kvbridge, {route}",
            color=color,
            marker="o",
            linewidth=2,
        )
    copy = "between" if found["sender"] != found["receiver"] else "inside"
    title = f"copy {found['sender']} to {found['receiver']}" if copy == "between" else "copy inside the GPU"
    _line(axes, _rows(found.get("copies", ()), path=copy), title, color=INK, linestyle="--")
    _line(
        axes, _rows(found.get("copies", ()), path="to host"), "copy to pinned host memory", color=FAINT, linestyle="--"
    )
    nixl = _rows(found.get("nixl", ()), **where)
    single = [row for row in nixl if row["piece_bytes"] == row["bytes"]]
    _line(axes, single, "NIXL, one descriptor", color=INK, linestyle=":")
    for sgl, style in (("on", "-."), ("off", "-")):
        blocks = [row for row in nixl if row["piece_bytes"] == BLOCK_BYTES and row["sgl"] == sgl]
        name = f"NIXL, a descriptor per 32 KiB block (SGL {sgl})"
        _line(axes, blocks, name, color=BASELINE, linestyle=style, marker="." if sgl == "off" else "")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = [row["bytes"] for row in found.get("copies", ())]
    ticks = [size for size in (MIB << shift for shift in range(0, 14, 2)) if min(sizes) <= size <= max(sizes)]
    axes.set_xticks(ticks or sizes, [_size(size) for size in ticks or sizes])
    axes.set_xlabel("KV cache of one request")
    axes.set_yticks(rungs := [1, 3, 10, 30, 100, 300, 1000, 3000], [str(rung) for rung in rungs])
    axes.set_ylim(bottom=max(0.5, axes.dataLim.ymin / 1.5), top=axes.dataLim.ymax * 1.5)
    axes.minorticks_off()
    axes.set_ylabel("GB/s")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    _finish(figure, [axes], found, "One request, NHD block 16 to HND block 64", path)


def beside(found: Mapping[str, Any], path: Path) -> None:
    """Bars show p50 of a paced 128 MiB transfer, whiskers p99. The text above: how much slower the engine became."""
    rows = found.get("busy", ())
    routes = [route for route in COLORS if _rows(rows, route=route)]
    kept = [(name, load, mps) for name, load, mps in LOADS if _rows(rows, load=load, mps=mps)]
    if not kept:
        return
    figure, axes = pyplot.subplots(figsize=(8.4, 3.8))
    width = 0.8 / len(routes)
    for number, route in enumerate(routes):
        for place, (_, load, mps) in enumerate(kept):
            for row in _rows(rows, route=route, load=load, mps=mps)[:1]:
                x = place + (number - (len(routes) - 1) / 2) * width
                p50, p99 = row["paced"]["p50_s"] * 1e3, row["paced"]["p99_s"] * 1e3
                axes.bar(
                    x, p50, width * 0.9, color=COLORS[route], label=f"{route}: p50, line to p99" if not place else None
                )
                axes.plot([x, x], [p50, p99], color=INK, linewidth=1)
                axes.plot([x - width / 4, x + width / 4], [p99, p99], color=INK, linewidth=1)
                if row["engines"]:
                    slower = max(engine["paced_slower"] for engine in row["engines"])
                    axes.text(x, p99, f"{slower * 100:+.1f}%", ha="center", va="bottom", fontsize=7, color=INK)
    axes.set_xticks(range(len(kept)), [name for name, _, _ in kept])
    axes.set_ylabel("ms for 128 MiB")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    _finish(figure, [axes], found, "Beside a busy engine (percent: how much slower its steps became)", path)


def first_tokens(found: Mapping[str, Any], path: Path) -> None:
    """The decode engine's median time to first token, by prompt length and pair. A tick marks that engine's floor."""
    pairs = [pair for pair in found["pairs"] if pair["rows"]]
    lengths = sorted({row["tokens"] for pair in pairs for row in pair["rows"]})
    figure, panels = pyplot.subplots(
        1, len(lengths), figsize=(8.4, 0.9 + 0.32 * len(pairs)), sharey=True, squeeze=False
    )
    for axes, tokens in zip(panels[0], lengths, strict=True):
        for place, pair in enumerate(pairs):
            for row in _rows(pair["rows"], tokens=tokens):
                axes.barh(place, row["ttft_ms"], 0.7, color=_shade(pair["name"]))
                axes.plot([row["floor_ms"]] * 2, [place - 0.35, place + 0.35], color=INK, linewidth=1.5)
                axes.text(row["ttft_ms"], place, f" {row['ttft_ms']:.1f}", va="center", fontsize=7, color=INK)
        axes.set_xlabel(f"{tokens} tokens: ms to first token (tick: floor)")
        axes.margins(x=0.12)
    panels[0][0].set_yticks(range(len(pairs)), [_pair_name(pair["name"]) for pair in pairs])
    panels[0][0].invert_yaxis()
    _finish(figure, panels[0], found, "vLLM, prompt prefilled on another GPU", path)


def served(found: Mapping[str, Any], path: Path) -> None:
    """A row for each kind of pair: requests answered, and median times (p99 faint), by the rate of requests."""
    shown = [(title, _measured(found, setups)) for title, setups in SERVING]
    shown = [(title, lines) for title, lines in shown if lines]
    figure, panels = pyplot.subplots(len(shown), 3, figsize=(9.6, 0.6 + 2.5 * len(shown)), squeeze=False, sharex=True)
    for (title, lines), row in zip(shown, panels, strict=True):
        for label, color, line, points in lines:
            rates = [rate for rate, _ in points]
            style = {"color": color, "markersize": 3}
            row[0].plot(rates, [each["answered_per_s"] for _, each in points], line, label=label, **style)
            for axes, name in zip(row[1:], ("ttft", "tbt"), strict=True):
                axes.plot(rates, [each[f"{name}_p50_ms"] for _, each in points], line, **style)
                axes.plot(rates, [each[f"{name}_p99_ms"] for _, each in points], line, alpha=0.35, **style)
                axes.set_yscale("log")
        for axes in row[1:]:
            low, high = axes.get_ylim()
            ticks = [tick for power in (1, 10, 100, 1000, 10000) for tick in (power, 2 * power, 5 * power)]
            axes.set_yticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
            axes.set_ylim(low, high)
        row[0].set_ylabel(f"{title}: answered a second")
        row[0].legend(frameon=False, fontsize=6, loc="upper left")
        row[1].set_ylabel("ms to the first token")
        row[2].set_ylabel("ms between tokens")
    for axes in panels[-1]:
        axes.set_xlabel("requests a second")
    where = "on two GPUs, Llama-8B's shape" if found.get("gpus") else "on two cores, a small model"
    title = f"Serving {where}: p50, and faint p99"
    _finish(figure, [axes for row in panels for axes in row], found, title, path)


def _measured(
    found: Mapping[str, Any], setups: Sequence[tuple[str, str, str, str]]
) -> list[tuple[str, str, str, list[tuple[float, Mapping[str, float]]]]]:
    """For each measured setup: how it is drawn, and the medians over its rounds at each rate."""
    lines: list[tuple[str, str, str, list[tuple[float, Mapping[str, float]]]]] = []
    for setup, label, color, line in setups:
        points = [point for row in _rows(found["rows"], setup=setup) for point in row["points"]]
        if points:
            known = [rate for rate in found["rates"] if _rows(points, rate=rate)]
            lines.append((label, color, line, [(rate, _medians(_rows(points, rate=rate))) for rate in known]))
    return lines


def _medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = [name for name, value in rounds[0].items() if isinstance(value, float)]
    return {name: statistics.median(each[name] for each in rounds) for name in names}


def _pair_name(name: str) -> str:
    return "NixlConnector, equal" if name == "nixl" else f"kvbridge, {name}"


def _shade(name: str) -> str:
    return BASELINE if name == "nixl" else COLORS["direct"]


def _line(axes: Axes, rows: Sequence[Mapping[str, Any]], label: str, **style: Any) -> None:
    rows = sorted(rows, key=lambda row: row["bytes"])
    if rows:
        axes.plot([row["bytes"] for row in rows], [row["gb_s"] for row in rows], label=label, **style)


def _rows(rows: Sequence[Mapping[str, Any]], **wanted: Any) -> list[Mapping[str, Any]]:
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def _size(size_bytes: int) -> str:
    return f"{size_bytes // MIB} MiB" if size_bytes < 1 << 30 else f"{size_bytes >> 30} GiB"


def _finish(figure: Any, panels: Sequence[Axes], found: Mapping[str, Any], title: str, path: Path) -> None:
    gpus = [gpu["name"] if isinstance(gpu, dict) else gpu for gpu in found.get("gpus", ())]
    about = [f"{len(gpus)} x {gpus[0]}" if gpus else found.get("cpu", "")]
    about += [f"commit {found['commit']}", found["day"]] if "commit" in found else []
    panels[0].set_title(title, loc="left", fontsize=11, color=INK)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, which="major", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.text(0.01, 0.01, ", ".join(about), fontsize=7, color=FAINT)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    print(f"drawn {path}")


def measure(bench: Bench, results: list[Path], *, folder: str = "") -> None:
    pyplot.rcParams.update({"svg.hashsalt": "kvbridge", "font.size": 9, "axes.edgecolor": FAINT})
    for path in results:
        found = json.loads(path.read_text())
        to = Path(folder or path.parent)
        to.mkdir(parents=True, exist_ok=True)
        if "copies" in found and "transfers" in found:
            rates(found, to / f"{path.stem}_rates.svg")
        if "busy" in found:
            beside(found, to / f"{path.stem}_busy.svg")
        if "pairs" in found:
            first_tokens(found, to / f"{path.stem}_ttft.svg")
        if "answer_tokens" in found:
            served(found, to / f"{path.stem}.svg")
