"""Draws what README shows from the JSON of a GPU bench: `python bench/plots.py [--out FOLDER] RESULTS.json...`

Of gpu_1.json and gpu_2.json: GB/s against size with the ceilings and the per-block baseline, and what a transfer costs
beside a busy engine. Of a file with `ttft` rows (tokens, what, median_ms): the decode engine's time to first token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from gpu_table import BLOCK_BYTES, MISMATCHED
from matplotlib import pyplot
from matplotlib.axes import Axes

MIB = 1 << 20
COLORS = {"direct": "#0b6e99", "nixl": "#c4620a", "host": "#5b8c2a"}
INK, FAINT, BASELINE = "#333333", "#9a9a9a", "#b02a37"
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
    where = {"source": found["source"], "sink": found["sink"]}
    for route, color in COLORS.items():
        rows = _rows(found.get("transfers", ()), route=route, pair=MISMATCHED, requests=1, **where)
        _line(
            axes,
            [row for row in rows if row["tokens"] != 16],
            f"kvbridge, {route}",
            color=color,
            marker="o",
            linewidth=2,
        )
    copy = "between" if found["source"] != found["sink"] else "inside"
    title = f"copy {found['source']} to {found['sink']}" if copy == "between" else "copy inside the GPU"
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
    _finish(figure, axes, found, "One request, NHD block 16 to HND block 64", path)


def beside(found: Mapping[str, Any], path: Path) -> None:
    """Bars: p50 of a paced 128 MiB transfer; whiskers: p99. Over each, how much slower the engine became."""
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
    _finish(figure, axes, found, "Beside a busy engine (percent: how much slower its steps became)", path)


def first_tokens(found: Mapping[str, Any], path: Path) -> None:
    """The decode engine's median time to first token, by prompt length."""
    rows = found["ttft"]
    names = list(dict.fromkeys(row["what"] for row in rows))
    lengths = sorted({row["tokens"] for row in rows})
    figure, axes = pyplot.subplots(figsize=(8.4, 3.4))
    height = 0.8 / len(names)
    shades = {name: _shade(name) for name in names}
    for number, name in enumerate(names):
        for place, tokens in enumerate(lengths):
            for row in _rows(rows, what=name, tokens=tokens)[:1]:
                y = place + (number - (len(names) - 1) / 2) * height
                axes.barh(y, row["median_ms"], height * 0.9, color=shades[name], label=name if not place else None)
                axes.text(row["median_ms"], y, f" {row['median_ms']:.1f}", va="center", fontsize=7, color=INK)
    axes.set_yticks(range(len(lengths)), [f"{tokens} tokens" for tokens in lengths])
    axes.invert_yaxis()
    axes.set_xlabel("decode engine's time to first token, ms (median)")
    axes.legend(frameon=False, fontsize=8)
    _finish(figure, axes, found, "vLLM, prompt prefilled on another GPU", path)


def _shade(name: str) -> str:
    return COLORS["direct"] if "kvbridge" in name else BASELINE if "Nixl" in name else FAINT


def _line(axes: Axes, rows: Sequence[Mapping[str, Any]], label: str, **style: Any) -> None:
    rows = sorted(rows, key=lambda row: row["bytes"])
    if rows:
        axes.plot([row["bytes"] for row in rows], [row["gb_s"] for row in rows], label=label, **style)


def _rows(rows: Sequence[Mapping[str, Any]], **wanted: Any) -> list[Mapping[str, Any]]:
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def _size(size_bytes: int) -> str:
    return f"{size_bytes // MIB} MiB" if size_bytes < 1 << 30 else f"{size_bytes >> 30} GiB"


def _finish(figure: Any, axes: Axes, found: Mapping[str, Any], title: str, path: Path) -> None:
    gpus = [gpu["name"] for gpu in found.get("gpus", ())]
    machine = f"{len(gpus)} x {gpus[0]}" if gpus else found.get("cpu", "")
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.text(0.01, 0.01, f"{machine}, commit {found['commit']}, {found['day']}", fontsize=7, color=FAINT)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    print(f"drawn {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="folder for the plots; default: beside the results")
    options = parser.parse_args()
    pyplot.rcParams.update({"svg.hashsalt": "kvbridge", "font.size": 9, "axes.edgecolor": FAINT})
    for path in options.results:
        found = json.loads(path.read_text())
        folder = options.out or path.parent
        folder.mkdir(parents=True, exist_ok=True)
        if "copies" in found:
            rates(found, folder / f"{path.stem}_rates.svg")
        if "busy" in found:
            beside(found, folder / f"{path.stem}_busy.svg")
        if "ttft" in found:
            first_tokens(found, folder / f"{path.stem}_ttft.svg")


if __name__ == "__main__":
    main()
