"""What agents remember of requests, and what `kvbridge trace` makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kvbridge_proto.engine import Failed

from kvbridge.agent.journal import Journal
from tests.integration.agent.test_carry import Bench
from tests.support.oracle import Shape

TOKENS = range(1000)
TABLE, WANTED = list(range(100, 163)), list(range(5, 21))


def journal(kept: int = 100) -> tuple[Journal, list[float]]:
    now = [5.0]
    return Journal(lambda: now[0], kept), now


def test_a_request_is_found_by_each_of_its_names_with_all_that_belongs_to_it() -> None:
    remembered, now = journal()
    remembered.note("wanted", request="d1", room="r")
    remembered.note("claimed", request="d1", room="r", transfer="t1")
    remembered.note("wanted", request="d2", room="other")
    now[0] = 5.25
    remembered.note("read", "4 chunks", transfer="t1")
    remembered.note("done", request="d1", seconds=0.25)
    for name in ("d1", "r", "t1"):
        found = remembered.about({name})
        assert [each.what for each in found] == ["wanted", "claimed", "read", "done"], name
        assert found[2].at_s - found[0].at_s == pytest.approx(0.25)
    assert remembered.about({"nobody"}) == ()


def test_without_a_name_it_is_the_want_that_took_longest() -> None:
    remembered, _ = journal()
    assert remembered.about(()) == ()
    for request, seconds in (("quick", 0.1), ("slow", 0.3), ("usual", 0.2)):
        remembered.note("wanted", request=request, room=request)
        remembered.note("done", request=request, seconds=seconds)
    remembered.note("failed", "deadline", request="never")
    assert [(each.what, each.request) for each in remembered.about(())] == [("wanted", "slow"), ("done", "slow")]


def test_only_so_much_is_kept() -> None:
    remembered, _ = journal(kept=10)
    for number in range(100):
        remembered.note("wanted", "x" * 5000, request=f"r{number}")
    assert remembered.about({"r89"}) == () and len(remembered.about({"r90"})[0].text) == 1024


# Real agents, and the command:


def traced(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvbridge.cli", "trace", *map(str, arguments)]
    wide = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, timeout=30, env=wide)


@pytest.fixture(params=["nixl", "pull"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    shapes = Shape("nhd", blocks=200), Shape("hnd", block_tokens=64, blocks=60)
    with ExitStack() as stack:
        made = Bench(tmp_path, stack, *shapes, routes=request.param, slot_bytes=1 << 20)
        made.route = request.param  # type: ignore[attr-defined]
        made.fill(TABLE, TOKENS)
        yield made


def carried(bench: Bench, source: str, sink: str) -> None:
    """Under a request name of its own on each side."""
    for engine in bench.sources:
        engine.offer(source, TABLE, len(TOKENS), room="room")
    for engine in bench.sinks:
        engine.want(sink, bench.address, WANTED, TOKENS, room="room")
        engine.answer(sink)
    for engine in bench.sources:
        engine.released(source)


EXPECTED = {
    "nixl": (
        ["offered", "claimed", "ordered", "written", "released"],
        ["wanted", "claimed", "landed", "done"],
    ),
    "pull": (
        ["offered", "claimed", "readable", "settled", "released"],
        ["wanted", "claimed", "readable", "reading", "read", "done"],
    ),
}


def test_both_sides_of_a_request_are_told_in_order(bench: Bench, tmp_path: Path) -> None:
    carried(bench, "prefill-1", "decode-1")
    agents = [engine.agent for engine in (*bench.sources, *bench.sinks)]
    sockets = [part for each in agents for part in ("--socket", each.socket)]
    chrome = tmp_path / "trace.json"
    for name in ("prefill-1", "decode-1"):
        told = traced(name, *sockets, "--json", "--chrome", chrome)
        assert told.returncode == 0, told.stderr
        answers: list[dict[str, Any]] = json.loads(told.stdout)
        whats = {each["agent"]["name"]: [entry["what"] for entry in each["entries"]] for each in answers}
        sender, receiver = EXPECTED[bench.route]  # type: ignore[attr-defined]
        assert [what for what in dict.fromkeys(whats["d0"]) if what != "ready"] == receiver  # where slots were short
        by_sender = list(dict.fromkeys(whats["p0"]))  # it may give its blocks back before it hears of the last write
        assert by_sender[:3] == sender[:3] and set(by_sender) - {"settled"} == set(sender) - {"settled"}
        times = [entry["at_s"] for each in answers for entry in each["entries"]]
        assert max(times) - min(times) < 30
    events = json.loads(chrome.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "i"}
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"p0", "d0"}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    shown = traced("decode-1", *sockets)
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("decode-1: ") and " ms from " in lines[0]
    at = [float(line.split()[0]) for line in lines[2:]]
    assert at == sorted(at) and len(at) == len(times)


def test_what_other_hosts_have_saved_is_joined(bench: Bench, tmp_path: Path) -> None:
    carried(bench, "prefill-1", "decode-1")
    (source,), (sink,) = bench.sources, bench.sinks
    saved = tmp_path / "prefill.json"
    saved.write_text(traced("prefill-1", "--socket", source.agent.socket, "--json").stdout)
    told = traced("decode-1", "--socket", sink.agent.socket, "--with", saved, "--json")
    assert {each["agent"]["name"] for each in json.loads(told.stdout)} == {"p0", "d0"}
    saved.write_text("{}")
    told = traced("decode-1", "--with", saved)
    assert told.returncode == 1 and "bad_trace_file" in told.stderr


def test_the_slowest_fetch_is_shown_and_why_one_failed(bench: Bench) -> None:
    (source,), (sink,) = bench.sources, bench.sinks
    carried(bench, "p1", "quick")
    sink.want("slow", bench.address, WANTED, TOKENS, room="late")
    time.sleep(0.5)
    source.offer("p2", TABLE, len(TOKENS), room="late")
    sink.answer("slow")
    shown = traced("--socket", sink.agent.socket)
    assert shown.returncode == 0 and shown.stdout.startswith("slow: "), shown
    sink.want("never", bench.address, WANTED, TOKENS, room="nowhere", deadline_s=0.3)
    assert isinstance(sink.answer("never"), Failed)
    shown = traced("never", "--socket", sink.agent.socket)
    assert "failed" in shown.stdout and "deadline" in shown.stdout
    told = traced("unheard", "--socket", sink.agent.socket)
    assert told.returncode == 1 and "no_such_request" in told.stderr and not told.stdout
