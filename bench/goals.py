"""Goals, figures, and whether they are met.

Ratios are to the ceiling of the same run. `met` is None if a line has no goal, or its goal does not apply here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MIB, GIB = 1 << 20, 1 << 30
MISMATCHED = "NHD -> HND, block 16 -> 64"
BLOCK_BYTES = 32 << 10
Rows = Sequence[Mapping[str, Any]]
Limits = tuple[float | None, float | None]  # of a median and a p99, in ms


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

    def transfer(
        self, route: str, pair: str, size_bytes: int, gap_s: float = 0.0, requests: int = 1
    ) -> Mapping[str, Any] | None:
        """Transfers of so many bytes of the sender's rows."""
        where = {"sender": self.sender, "receiver": self.receiver, "requests": requests, "gap_s": gap_s}
        return _first(self.carried, route=route, pair=pair, engine_bytes=size_bytes * requests, **where)

    def descriptors(self, sgl: str, size_bytes: int, piece_bytes: int) -> Mapping[str, Any] | None:
        where = {"sender": self.sender, "receiver": self.receiver}
        return _first(self.nixl, sgl=sgl, bytes=size_bytes, piece_bytes=piece_bytes, **where)


def _transfers(kept: _Kept) -> Iterator[Line]:
    large, has_two = 2 * GIB, kept.has_two
    equal = kept.transfer("pull", "equal", large)
    for pair, size, least in (
        (MISMATCHED, large, 0.87),
        (MISMATCHED, 8 * GIB, 0.93),
        ("TP 2 -> 1", large, 0.85),
        ("equal", large, 0.87),
    ):
        if (ours := kept.transfer("pull", pair, size)) and (copy := kept.between(size)):
            yield _ratio(f"pull, {_short(pair)}, {size / GIB:g} GiB", ours, copy, "copy", least, has_two)
    for route in ("pull", "direct", "nixl"):
        if equal and (ours := kept.transfer(route, "bf16 -> fp8", large)):
            times, most = ours["p50_s"] / equal["p50_s"], 0.65
            is_goal = has_two and route == "pull"
            name = f"{route}, bf16 -> fp8, 2 GiB of bf16" + f": <= {most} of equal pools' time" * is_goal
            yield Line(name, f"{times:.2f} ({_ms(ours)})", _ms(equal), times <= most if is_goal else None)
    if (ours := kept.transfer("direct", MISMATCHED, large)) and (copy := kept.between(large)):
        yield _ratio("direct, mismatched, 2 GiB", ours, copy, "copy", None, False)
    if (ours := kept.transfer("nixl", MISMATCHED, large)) and (one := kept.descriptors("off", large, large)):
        yield _ratio("nixl, mismatched, 2 GiB", ours, one, "descriptor", 0.75, has_two)
    ours = kept.transfer("host", MISMATCHED, large)
    for path in ("to host", "from host"):
        if ours and (copy := kept.copy(path, GIB)):
            yield _ratio(f"host, mismatched, 2 GiB, of a copy {path}", ours, copy, "copy", None, False)


def _wants(kept: _Kept) -> Iterator[Line]:
    """The time of one want, and of 64 at once. Limits in ms: (median, p99)."""
    small, block = 128 * MIB, 2 * MIB
    goals: Sequence[tuple[str, int, float, Limits]] = (
        (MISMATCHED, small, 0.020, (1.3, None)),
        (MISMATCHED, small, 0.0, (0.9, None)),
        ("equal", block, 0.020, (1.0, 2.0)),
        ("equal", block, 0.001, (0.45, None)),
        ("equal", block, 0.0, (None, None)),
    )
    for pair, size, gap_s, limits in goals:
        if (row := kept.transfer("pull", pair, size, gap_s)) is not None:
            pause = f"{gap_s * 1e3:g} ms apart" if gap_s else "back to back"
            yield _timed(f"pull, {_short(pair)}, {size / MIB:g} MiB, {pause}", row, limits, kept.has_two)
    for route, pair in (("pull", MISMATCHED), ("pull", "equal"), ("nixl", "equal")):
        if (row := kept.transfer(route, pair, small, requests=64)) is not None:
            is_goal = (route, pair) == ("pull", MISMATCHED)
            limits = (26.0 if is_goal else None, None)
            yield _timed(f"{route}, {_short(pair)}, 64 x 128 MiB at once", row, limits, kept.has_two)
    for route in ("direct", "nixl", "host"):
        if (row := kept.transfer(route, MISMATCHED, block)) is not None:
            yield _timed(f"{route}, mismatched, 2 MiB, back to back", row, (None, None), False)


def _timed(name: str, row: Mapping[str, Any], limits: Limits, is_goal: bool) -> Line:
    """Median and p99 of a row, with their limits in ms."""
    found = row["p50_s"] * 1e3, row["p99_s"] * 1e3
    said = [
        f"{which} <= {limit:g} ms" for which, limit in zip(("p50", "p99"), limits, strict=True) if limit is not None
    ]
    met = all(limit is None or value <= limit for value, limit in zip(found, limits, strict=True))
    name += f": {', '.join(said)}" if said else ""
    return Line(name, f"{found[0]:.3f}, p99 {found[1]:.3f} ms", f"{row['n']} times", met if said and is_goal else None)


def _baseline(kept: _Kept) -> Iterator[Line]:
    size = 128 * MIB
    ours = kept.transfer("pull", MISMATCHED, size)
    for sgl, least in (("off", 30), ("on", 5)):
        theirs = kept.descriptors(sgl, size, BLOCK_BYTES)
        if ours and theirs:
            times = theirs["p50_s"] / ours["p50_s"]
            goal = f"pull, 128 MiB against 4096 descriptors, SGL {sgl}: >= {least} x"
            against = f"{theirs['p50_s'] * 1e3:.2f} ms, {theirs['gb_s']:.1f} GB/s"
            yield Line(goal, f"{times:.1f} x", against, times >= least if kept.has_two else None)


def _busy(kept: _Kept) -> Iterator[Line]:
    for row in kept.beside:
        if row["load"] == "none":
            continue
        idle = _first(kept.beside, route=row["route"], mps=row["mps"], load="none")
        way = "MPS" if row["mps"] else "no MPS"
        if row["load"] == "prefill":
            slower = row["engines"][0]["packed_slower"]
            name = f"GPU of a prefilling engine, pulled from without a pause, {way}: <= 6 % slower"
            yield Line(name, f"{slower * 100:+.1f} %", _ms(row["packed"]), slower <= 0.06 if kept.has_two else None)
            continue
        paced, is_goal = row["paced"], row["route"] == "pull" and row["load"] == "decode"
        slower = max((engine["paced_slower"] for engine in row["engines"]), default=0.0)
        limit, met = "", None
        if is_goal and kept.has_two:
            most_ms, most_slower = (1.2, 0.02) if row["mps"] else (3.0, 0.04)
            limit = f": p99 <= {most_ms:g} ms, engine <= {most_slower * 100:g} % slower"
            met = paced["p99_s"] <= most_ms / 1e3 and slower <= most_slower
        pace = f"{row['bytes'] / MIB:g} MiB every {row['gap_s'] * 1e3:g} ms"
        name = f"{pace}, {row['route']}, beside {row['load']}, {way}"
        figures = f"p50 {paced['p50_s'] * 1e3:.3f}, p99 {paced['p99_s'] * 1e3:.3f} ms, engine {slower * 100:+.1f} %"
        yield Line(name + limit, figures, f"idle p99 {idle['paced']['p99_s'] * 1e3:.3f} ms" if idle else "", met)


def _idle(rows: Rows) -> Iterator[Line]:
    if not rows:
        return
    most = max(row["core_share"] for row in rows)
    yield Line("idle agent: < 0.5 % of a core", f"{most * 100:.2f} %", f"{len(rows)} agents", most < 0.005)
    taken = [row["gpu_mib"] for row in rows if row.get("gpu_mib") and "-pull-" in row["agent"]]
    if taken:
        name = "GPU memory of an agent that only pulls or is pulled from: <= 600 MiB"
        yield Line(name, f"{max(taken)} MiB", f"{len(taken)} agents", max(taken) <= 600)


def pull_lines(results: Mapping[str, Any]) -> list[Line]:
    """Lines for the pull kernel by itself (scenario gpu_pull)."""
    rows = [row for row in results["pulls"] if row["mib"] == 2048 and not row["digest"] and row["programs"] is None]
    is_goal = len(results["gpus"]) > 1
    found = [
        Line(
            f"the kernel itself, {row['case']}, 2 GiB: >= 0.94 of a copy",
            f"{row['of_copy']:.3f} ({row['gb_s']:.1f} GB/s)",
            f"copy {results['copy_gb_s']['2048']:.1f} GB/s",
            row["of_copy"] >= 0.94 if is_goal else None,
        )
        for row in rows
    ]
    calls = [row for row in results["pulls"] if row["mib"] == 2 and not row["digest"] and row["programs"] is None]
    for row in calls[:1]:
        name = "a launch from Python, warm: < 60 us"
        found.append(Line(name, f"{row['call_us']:.0f} us", row["case"], row["call_us"] < 60))
    return found


def vllm_lines(results: Mapping[str, Any]) -> list[Line]:
    """Lines from the results of tests/system/gpu/vllm_pairs.py. Equal pools are compared with its NixlConnector."""
    rows = [(pair, row) for pair in results["pairs"] for row in pair["rows"]]
    theirs = {row["tokens"]: row for pair, row in rows if pair["name"] == "nixl"}
    found = []
    for pair, row in rows:
        if pair["name"] == "nixl":
            continue
        is_goal, is_long = pair["name"] == "equal", row["tokens"] == 8192
        above_ms = row["above_ms"]
        most_ms = 4.0 if is_long else 1.5
        limit = f": transfer <= {most_ms:g} ms" + ", TTFT <= floor + 10 ms" * is_long if is_goal else ""
        against = f"floor {row['floor_ms']:.1f} ms"
        if row["tokens"] in theirs:
            its = theirs[row["tokens"]]
            against += f"; NixlConnector, equal: {its['transfer_ms']:.2f}, {its['above_ms']:+.1f} ms"
        met = row["transfer_ms"] <= most_ms and (above_ms <= 10 or not is_long) if is_goal else None
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
        if pair["name"] == "equal":
            for tokens, most_ms in ((1024, 1.5), (8192, 4.0)):
                if (row := by_length.get(tokens)) is not None:
                    goal, met = (
                        f"SGLang, {tokens} tokens, equal pools: <= {most_ms:g} ms",
                        row["transfer_ms"] <= most_ms,
                    )
                    found.append(Line(goal, f"{row['transfer_ms']:.2f} ms", f"rows {pair['kv_rows']}", met))
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
    """Lines for the sizes of the scenario `kernels` that have a goal."""
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
    what: str, ours: Mapping[str, Any], ceiling: Mapping[str, Any], name: str, least: float | None, is_goal: bool
) -> Line:
    ratio = ours["gb_s"] / ceiling["gb_s"]
    goal = what if least is None else f"{what}: >= {least:g} of a {name}"
    measured = f"{ratio:.3f} ({ours['gb_s']:.1f} GB/s, {_ms(ours)})"
    met = ratio >= least if is_goal and least is not None else None
    return Line(goal, measured, f"{name} {ceiling['gb_s']:.1f} GB/s", met)


def _ms(row: Mapping[str, Any]) -> str:
    return f"{row['p50_s'] * 1e3:.2f} ms"


def _short(pair: str) -> str:
    return "mismatched" if pair == MISMATCHED else pair


def _first(rows: Rows, **wanted: Any) -> Mapping[str, Any] | None:
    return next((row for row in rows if all(row.get(name) == value for name, value in wanted.items())), None)


def of_results(found: Mapping[str, Any]) -> list[Line]:
    """Lines of any results: a GPU bench, pairs of engines, the kernels, or a bench that lists its goals as lines."""
    if "pairs" in found and "weights" in found:
        return cross_lines(found)
    if "pairs" in found:
        return sglang_lines(found) if "sglang" in found["versions"] else vllm_lines(found)
    if "moves" in found:
        return kernel_lines(found)
    if "pulls" in found:
        return pull_lines(found)
    return lines(found) if "sender" in found else [Line(**each) for each in found.get("goals", ())]
