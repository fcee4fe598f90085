"""Goals, figures, and whether they are met: `python bench/gpu_table.py RESULTS.json...`

Ratios are to the ceiling of the same run. `met` is None if a line has no goal, or its goal does not apply here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MIB, GIB = 1 << 20, 1 << 30
MISMATCHED = "NHD -> HND, block 16 -> 64"
BLOCK_BYTES = 32 << 10
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Line:
    goal: str
    measured: str
    against: str
    met: bool | None


def lines(results: Mapping[str, Any]) -> list[Line]:
    """Lines in the order of the goals. Leaves out what a run did not measure."""
    kept = _Kept(results)
    return [*_transfers(kept), *_wants(kept), *_baseline(kept), *_busy(kept), *_idle(results.get("idle", ()))]


def printed(found: Sequence[Line]) -> str:
    """The lines as columns for a terminal."""
    cells = [("goal", "measured", "against", "met")]
    cells += [
        (line.goal, line.measured, line.against, {True: "yes", False: "NO", None: "-"}[line.met]) for line in found
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def as_rows(found: Sequence[Line]) -> list[dict[str, Any]]:
    return [asdict(line) for line in found]


class _Kept:
    """The results, looked up one figure at a time."""

    def __init__(self, results: Mapping[str, Any]) -> None:
        self.sender, self.receiver = results["sender"], results["receiver"]
        self.copies: Rows = results.get("copies", ())
        self.nixl: Rows = results.get("nixl", ())
        self.carried: Rows = results.get("transfers", ())
        self.beside: Rows = results.get("busy", ())

    @property
    def has_two(self) -> bool:
        return bool(self.sender != self.receiver)

    def copy(self, path: str, size_bytes: int) -> Mapping[str, Any] | None:
        return _first(self.copies, path=path, bytes=size_bytes)

    def between(self, size_bytes: int) -> Mapping[str, Any] | None:
        """The copy engine's figure between two GPUs, or inside a single one."""
        return self.copy("between" if self.has_two else "inside", size_bytes)

    def transfer(self, route: str, pair: str, size_bytes: int) -> Mapping[str, Any] | None:
        where = {"sender": self.sender, "receiver": self.receiver, "requests": 1}
        return _first(self.carried, route=route, pair=pair, bytes=size_bytes, **where)

    def descriptors(self, sgl: str, size_bytes: int, piece_bytes: int) -> Mapping[str, Any] | None:
        where = {"sender": self.sender, "receiver": self.receiver}
        return _first(self.nixl, sgl=sgl, bytes=size_bytes, piece_bytes=piece_bytes, **where)


def _transfers(kept: _Kept) -> Iterator[Line]:
    large, small = 2 * GIB, 128 * MIB
    if (ours := kept.transfer("direct", MISMATCHED, large)) and (copy := kept.between(large)):
        yield _ratio("direct, mismatched, 2 GiB: >= 0.93 of a copy", ours, copy, "copy", 0.93, kept.has_two)
    if ours := kept.transfer("direct", MISMATCHED, small):
        met = ours["p50_s"] <= 0.45e-3 if kept.has_two else None
        yield Line("direct, mismatched, 128 MiB: <= 0.45 ms", f"{ours['p50_s'] * 1e3:.3f} ms p50", _rate(ours), met)
    if (ours := kept.transfer("nixl", MISMATCHED, large)) and (one := kept.descriptors("off", large, large)):
        yield _ratio("nixl, mismatched, 2 GiB: >= 0.90 of one descriptor", ours, one, "descriptor", 0.90, kept.has_two)
    ours = kept.transfer("host", MISMATCHED, large)
    for path, least in (("to host", 0.97), ("from host", 0.96)):
        if ours and (copy := kept.copy(path, GIB)):
            yield _ratio(f"host, mismatched, 2 GiB: >= {least} of a copy {path}", ours, copy, "copy", least, True)


def _wants(kept: _Kept) -> Iterator[Line]:
    wanted = {"tokens": 16, "requests": 1, "sender": kept.sender, "receiver": kept.receiver}
    for route in ("direct", "nixl", "host"):
        for pair in ("equal", MISMATCHED):
            row = _first([row for row in kept.carried if row["n"] >= 100], route=route, pair=pair, **wanted)
            if row is None:
                continue
            is_goal = route == "direct" and pair == "equal"
            limit = ": p50 <= 200 us, p99 <= 1 ms" if is_goal else ""
            figures = f"{row['p50_s'] * 1e6:.0f} us p50, {row['p99_s'] * 1e6:.0f} us p99"
            met = row["p50_s"] <= 200e-6 and row["p99_s"] <= 1e-3 if is_goal else None
            yield Line(f"one-block want, {route}, {_short(pair)}{limit}", figures, f"{row['n']} wants", met)


def _baseline(kept: _Kept) -> Iterator[Line]:
    size = 128 * MIB
    ours = kept.transfer("direct", MISMATCHED, size)
    for sgl, least in (("off", 60), ("on", 10)):
        theirs = kept.descriptors(sgl, size, BLOCK_BYTES)
        if ours and theirs:
            times = theirs["p50_s"] / ours["p50_s"]
            goal = f"128 MiB against 4096 descriptors, SGL {sgl}: >= {least} x"
            against = f"{theirs['p50_s'] * 1e3:.2f} ms, {theirs['gb_s']:.1f} GB/s"
            yield Line(goal, f"{times:.1f} x", against, times >= least if kept.has_two else None)


def _busy(kept: _Kept) -> Iterator[Line]:
    for row in kept.beside:
        if row["load"] == "none":
            continue
        idle = _first(kept.beside, route=row["route"], mps=row["mps"], load="none")
        paced, is_goal = row["paced"], row["route"] == "direct" and row["load"] == "decode"
        name = f"{row['bytes'] / MIB:g} MiB, {row['route']}, beside {row['load']}, {'MPS' if row['mps'] else 'no MPS'}"
        slower = max((engine["paced_slower"] for engine in row["engines"]), default=0.0)
        against = f"idle p99 {idle['paced']['p99_s'] * 1e3:.3f} ms" if idle else ""
        figures = f"p50 {paced['p50_s'] * 1e3:.3f}, p99 {paced['p99_s'] * 1e3:.3f} ms, engine {slower * 100:+.1f} %"
        limit, met = "", None
        if is_goal and row["mps"] and idle:
            limit = ": p99 <= 1.5 x idle, engine <= 3 %"
            met = paced["p99_s"] <= 1.5 * idle["paced"]["p99_s"] and slower <= 0.03
        elif is_goal and not row["mps"]:
            limit, met = ": p99 <= 6 ms", paced["p99_s"] <= 6e-3
        yield Line(name + limit, figures, against, met)


def _idle(rows: Rows) -> Iterator[Line]:
    if rows:
        most = max(row["core_share"] for row in rows)
        yield Line("idle agent: < 1 % of a core", f"{most * 100:.2f} %", f"{len(rows)} agents", most < 0.01)


def vllm_lines(results: Mapping[str, Any]) -> list[Line]:
    """Lines from the results of tests/system/gpu/vllm_pairs.py. Equal pools are compared with its NixlConnector."""
    rows = [(pair, row) for pair in results["pairs"] for row in pair["rows"]]
    theirs = {row["tokens"]: row for pair, row in rows if pair["name"] == "nixl"}
    found = []
    for pair, row in rows:
        if pair["name"] == "nixl":
            continue
        is_goal = pair["name"] == "equal" and row["tokens"] == 8192
        above_ms = row["above_ms"]
        limit = ": transfer <= 5 ms, TTFT <= floor + 15 ms" if is_goal else ""
        against = f"floor {row['floor_ms']:.1f} ms"
        if row["tokens"] in theirs:
            its = theirs[row["tokens"]]
            against += f"; NixlConnector, equal: {its['transfer_ms']:.2f}, {its['above_ms']:+.1f} ms"
        met = row["transfer_ms"] <= 5 and above_ms <= 15 if is_goal else None
        figures = f"transfer {row['transfer_ms']:.2f} ms, TTFT {above_ms:+.1f} ms; tokens {row.get('decoded', '-')}"
        found.append(Line(f"vLLM, {row['tokens']} tokens, {pair['name']}{limit}", figures, against, met))
    failed = [pair for pair in results["pairs"] if pair["failure"]]
    return found + [
        Line(f"vLLM, {pair['name']}", "FAILED", " ".join(pair["failure"].split())[:60], False) for pair in failed
    ]


def sglang_lines(results: Mapping[str, Any]) -> list[Line]:
    """Lines from the results of tests/system/gpu/sglang_pairs.py. Ratios are of medians from the same seconds."""
    found = []
    for pair in results["pairs"]:
        by_length = {row["tokens"]: row for row in pair["rows"]}
        for ratio in pair["ratios"]:
            is_peer = pair["name"] == "nixl"
            most, of = (1.2, "SGLang's NIXL backend") if is_peer else (1.3, "equal pools")
            row = by_length[ratio["tokens"]]
            name = "equal pools" if is_peer else pair["name"]
            figures = f"{ratio['transfer_ms']:.2f} (minima {ratio['transfer_min_ms']:.2f})"
            if not is_peer:
                figures += f"; {row['transfer_ms']:.2f} ms, rows {pair['kv_rows']}, tokens {row.get('decoded', '-')}"
            against = f"{of}" + (f": {row['transfer_ms']:.2f} ms" if is_peer else "")
            goal = f"SGLang, {ratio['tokens']} tokens, {name}: <= {most}"
            found.append(Line(goal, figures, against, ratio["transfer_ms"] <= most))
    failed = [pair for pair in results["pairs"] if pair["failure"]]
    return found + [
        Line(f"SGLang, {pair['name']}", "FAILED", " ".join(pair["failure"].split())[:60], False) for pair in failed
    ]


def cross_lines(results: Mapping[str, Any]) -> list[Line]:
    """Lines from the results of tests/system/gpu/cross_pairs.py. The goal is for the worse of the ratios to either
    engine's equal pair."""
    same = results["weights"]["same"]
    found = [Line("weights of all engines: the same", same, "", same.startswith("yes"))]
    for pair in results["pairs"]:
        for place, ratio in enumerate(pair["ratios"]):
            row = pair["rows"][place]
            for what, key in (("transfer", "transfer_ms"), ("TTFT", "ttft_ms"), ("TTFT - prefill", "handover_ms")):
                is_goal = key != "handover_ms"
                name = f"{pair['name']}, {row['tokens']} tokens, {what}" + ": <= 1.3" * is_goal
                equal = ", ".join(f"{kind} {rows[place][key]:.2f}" for kind, rows in pair["against"].items())
                of = ", ".join(f"{kind} {ratio[key][kind]:.2f}" for kind in pair["against"])
                met = ratio[key]["worse"] <= 1.3 if is_goal else None
                found.append(Line(name, f"{of}; {row[key]:.2f} ms", f"equal: {equal} ms", met))
        for tokens, verdict in pair["tokens"].items():
            figures = f"rows {pair['kv_rows']}; tokens {verdict}"
            found.append(Line(f"{pair['name']}, {tokens} tokens", figures, "", "NO" not in figures))
    failed = [pair for pair in results["pairs"] if pair["failure"]]
    return found + [Line(pair["name"], "FAILED", " ".join(pair["failure"].split())[:60], False) for pair in failed]


def kernel_lines(results: Mapping[str, Any]) -> list[Line]:
    """Lines for the sizes of bench/kernels.py that have a goal."""
    copies = results["copy_payload_gb_s"]
    return [
        Line(
            f"{move['case']}, {move['mib']} MiB: >= {move['goal']:.2f} of a device copy",
            f"{move['of_copy']:.3f} ({move['us']:.0f} us)",
            f"copy {copies[str(move['mib'])]:.0f} GB/s",
            move["of_copy"] >= move["goal"],
        )
        for move in results["moves"]
        if move["goal"]
    ]


def _ratio(
    goal: str, ours: Mapping[str, Any], ceiling: Mapping[str, Any], name: str, least: float, is_goal: bool
) -> Line:
    ratio = ours["gb_s"] / ceiling["gb_s"]
    measured = f"{ratio:.3f} ({ours['gb_s']:.1f} GB/s, {ours['p50_s'] * 1e3:.2f} ms)"
    return Line(goal, measured, f"{name} {ceiling['gb_s']:.1f} GB/s", ratio >= least if is_goal else None)


def _rate(row: Mapping[str, Any]) -> str:
    return f"{row['gb_s']:.1f} GB/s"


def _short(pair: str) -> str:
    return "mismatched" if pair == MISMATCHED else pair


def _first(rows: Rows, **wanted: Any) -> Mapping[str, Any] | None:
    return next((row for row in rows if all(row.get(name) == value for name, value in wanted.items())), None)


def main() -> None:
    for path in sys.argv[1:]:
        found = json.loads(Path(path).read_text())
        about = [str(found[name]) for name in ("commit", "day") if name in found]
        gpus = [gpu["name"] if isinstance(gpu, dict) else gpu for gpu in found.get("gpus", ())]
        print(", ".join([Path(path).name, f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU", *about]))
        print(printed(_lines_of(found)))
        for problem in found.get("problems", ()):
            print(f"PROBLEM {problem}")


def _lines_of(found: Mapping[str, Any]) -> list[Line]:
    """Lines of any results: a GPU bench, pairs of engines, the kernels, or a bench that lists its goals as lines."""
    if "pairs" in found and "weights" in found:
        return cross_lines(found)
    if "pairs" in found:
        return sglang_lines(found) if "sglang" in found["versions"] else vllm_lines(found)
    if "moves" in found:
        return kernel_lines(found)
    return lines(found) if "sender" in found else [Line(**each) for each in found["goals"]]


if __name__ == "__main__":
    main()
