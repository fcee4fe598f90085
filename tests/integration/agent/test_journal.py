"""What agents remember of requests, and what `kvbridge trace` makes of it."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import Failed, Want
from kvbridge_proto.peer import Refuse
from kvbridge_proto.status import MAX_ENTRIES, TraceEntry

from kvbridge.agent.journal import KEPT, Journal
from kvbridge.agent.record import Record
from testing.agents import ANSWER_S, agent
from testing.nursery import kvbridge
from testing.oracle import Shape
from testing.pairs import Bench, Benches
from testing.waiting import wait_for
from tests.integration.agent.traced_agent import ROOT, traced

TOKENS = range(1000)
TABLE, WANTED = list(range(100, 163)), list(range(5, 21))


class Noted(Journal):
    """A journal, and the time on its agent's clock."""

    now = 5.0

    def note(self, what: str, **names: Any) -> None:
        self.entries.append(TraceEntry(at_s=self.began_at + self.now, what=what, **names))


def journal(kept: int = 100) -> Noted:
    return Noted(lambda: 5.0, kept)


def test_a_request_is_found_by_each_of_its_names_with_all_that_belongs_to_it() -> None:
    remembered = journal()
    remembered.note("wanted", request="d1", rendezvous="r")
    remembered.note("claimed", request="d1", rendezvous="r", transfer="t1")
    remembered.note("wanted", request="d2", rendezvous="other")
    remembered.now = 5.25
    remembered.note("read", transfer="t1")
    remembered.note("done", request="d1", seconds=0.25)
    for name in ("d1", "r", "t1"):
        found = remembered.about({name})
        assert [each.what for each in found] == ["wanted", "claimed", "read", "done"], name
        assert found[2].at_s - found[0].at_s == pytest.approx(0.25)
    assert remembered.about({"nobody"}) == ()


def test_without_a_name_it_is_the_want_that_took_longest() -> None:
    remembered = journal()
    assert remembered.about(()) == ()
    for request, seconds in (("quick", 0.1), ("slow", 0.3), ("usual", 0.2)):
        remembered.note("wanted", request=request, rendezvous=request)
        remembered.note("done", request=request, seconds=seconds)
    remembered.note("failed", request="never")
    assert [(each.what, each.request) for each in remembered.about(())] == [("wanted", "slow"), ("done", "slow")]


def test_only_so_much_is_kept() -> None:
    remembered = journal(kept=10)
    record = Record("sender", remembered, lambda: 5.0)
    for number in range(100):
        record.note(Refuse(code="c", reasons=("x" * 1024,) * 2, about=f"r{number}"))
    assert remembered.about({"r89"}) == () and len(remembered.about({"r90"})[0].text) == 1024


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("abc-1", {"cmpl-abc-1-0-0a1b2c3d", "0_cmpl-abc-1-1-4e5f6071"}),  # X-Request-Id
        ("cmpl-abc-1", {"cmpl-abc-1-0-0a1b2c3d", "0_cmpl-abc-1-1-4e5f6071"}),  # the answer's id
        ("cmpl-abc-1-0", {"cmpl-abc-1-0-0a1b2c3d"}),
        ("abc-12", {"chatcmpl-abc-12-0a1b2c3d"}),
        ("7", {"rid-of-sglang"}),  # its room
        ("cmpl-abc-12", set()),  # it was a chat
        ("bc-1", set()),
    ],
)
def test_a_request_is_found_by_the_id_that_its_client_knows(asked: str, found: set[str]) -> None:
    remembered = journal()
    remembered.note("wanted", request="cmpl-abc-1-0-0a1b2c3d", rendezvous="abc-1/0/f00d")
    remembered.note("wanted", request="0_cmpl-abc-1-1-4e5f6071", rendezvous="abc-1/1/beef")
    remembered.note("wanted", request="chatcmpl-abc-12-0a1b2c3d", rendezvous="abc-12/0/cafe")
    remembered.note("wanted", request="rid-of-sglang", rendezvous="room/7/f00d")
    remembered.note("done", request="cmpl-abc-1-0-0a1b2c3d", seconds=0.1)
    assert {each.request for each in remembered.about({asked})} == found


@pytest.mark.proves("T32")
def test_following_a_chain_of_names_costs_no_more_than_its_length() -> None:
    """Any user of the agent's socket may ask, and the agent's loop waits for the answer: 15 s of a core once."""
    remembered = journal(KEPT)
    for number in reversed(range(KEPT)):
        remembered.note("claimed", request=f"r{number + 1}", rendezvous=f"r{number}")
    before = time.thread_time()
    found = remembered.about({"r0"})
    assert len(found) == MAX_ENTRIES and time.thread_time() - before < 2


# Real agents, and the command:


def trace(*arguments: object) -> subprocess.CompletedProcess[str]:
    return kvbridge("trace", *arguments, COLUMNS="200")


def started(bench_of: Benches, route: str, slot_bytes: int, **wide: int) -> Bench:
    shapes = Shape("nhd", blocks=200, **wide), Shape("hnd", block_tokens=64, blocks=60, **wide)
    bench = bench_of(*shapes, routes=route, slot_bytes=slot_bytes)
    bench.fill(TABLE, TOKENS)
    return bench


@pytest.fixture(params=["nixl", "pull"])
def route(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def bench(route: str, bench_of: Benches) -> Bench:
    return started(bench_of, route, 1 << 20)  # one chunk


def sockets_of(bench: Bench) -> list[object]:
    return [part for each in bench.engines for part in ("--socket", each.agent.socket)]


def carried(bench: Bench, sender: str, receiver: str) -> None:
    bench.fetch(TABLE, WANTED, TOKENS, p=sender, d=receiver, rendezvous="rendezvous")


EXPECTED = {
    "nixl": (
        ["offered", "claimed", "met", "gathering", "computed", "gathered", "written", "released"],
        ["wanted", "claimed", "landed", "scattered", "done"],
    ),
    "pull": (
        ["offered", "claimed", "met", "readable", "settled", "released"],
        ["wanted", "claimed", "readable", "reading", "read", "done"],
    ),
}


def test_both_sides_of_a_request_are_told_in_order(bench: Bench, route: str, tmp_path: Path) -> None:
    carried(bench, "prefill-1", "decode-1")
    sockets, chrome = sockets_of(bench), tmp_path / "trace.json"
    for name in ("prefill-1", "decode-1"):
        told = trace(name, *sockets, "--json", "--chrome", chrome)
        assert told.returncode == 0, told.stderr
        answers: list[dict[str, Any]] = json.loads(told.stdout)
        whats = {each["agent"]["name"]: [entry["what"] for entry in each["entries"]] for each in answers}
        sender, receiver = EXPECTED[route]
        assert [what for what in dict.fromkeys(whats["d0"]) if what != "ready"] == receiver  # where slots were short
        by_sender = list(dict.fromkeys(whats["p0"]))
        early = len(sender) - 2  # after them come the writes, what the receiver says of them, and the release
        assert by_sender[:early] == sender[:early]
        assert set(by_sender) - {"settled"} == set(sender) - {"settled"}
        times = [entry["at_s"] for each in answers for entry in each["entries"]]
        assert max(times) - min(times) < ANSWER_S
    events = json.loads(chrome.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "i"}
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"p0", "d0"}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    shown = trace("decode-1", *sockets)
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("decode-1: ") and " ms from " in lines[0]
    at = [float(line.split()[0]) for line in lines[2:]]
    assert at == sorted(at) and len(at) == len(times)


def test_stages_of_many_chunks_are_told_apart_while_the_prompt_is_computed(route: str, bench_of: Benches) -> None:
    """The last rows are computed half a second after the first have been moved."""
    at: dict[str, list[float]] = {}
    made = started(bench_of, route, 1 << 16, key_width=64, value_width=64)
    sender, receiver = made.sender, made.receiver
    receiver.want("d", made.address, WANTED, TOKENS, rendezvous="r")
    sender.offer("p", TABLE[:32], 500, rendezvous="r", is_last=False)
    wait_for(lambda: receiver.agent.status.counters.get("kvbridge_chunks_total{role=receiver}"))
    time.sleep(0.5)
    sender.offer("p", TABLE[32:], len(TOKENS), first=32, is_more=True, rendezvous="r")
    receiver.answer("d")
    sender.released("p")
    for told in json.loads(trace("d", *sockets_of(made), "--json").stdout):
        for entry in told["entries"]:
            at.setdefault(f"{told['agent']['name'][0]} {entry['what']}", []).append(entry["at_s"])
    if route == "nixl":
        order = ("p claimed", "p gathering", "d landed", "d scattered", "p computed", "p gathered", "d done")
        (gathering,), (computed,), (gathered,) = at["p gathering"], at["p computed"], at["p gathered"]
        first, last = at["d landed"]
        assert computed - gathering > 0.5 and last - first > 0.5 and computed <= gathered
        assert gathering < first and computed < last <= max(at["d scattered"]) <= at["d done"][0]
    else:
        order = ("p claimed", "p readable", "d readable", "d reading", "d read", "d done")
        (first_begun, last_begun), (first_read, last_read) = at["d reading"], at["d read"]
        assert last_begun - first_read > 0.5 and last_begun <= last_read <= at["d done"][0]
        assert first_begun <= first_read
    firsts = [at[what][0] for what in order]
    assert firsts == sorted(firsts), at


def test_a_client_finds_its_request_by_its_own_id_or_is_told_which_have_it(bench: Bench, tmp_path: Path) -> None:
    """vLLM makes names like these of `X-Request-Id: abc`. Both its engines add digits of their own."""
    call = {"p": "cmpl-abc-0-11111111", "d": "cmpl-abc-0-22222222"}
    bench.fetch(TABLE, WANTED, TOKENS, **call, rendezvous="abc/0/f00d")
    bench.fetch(TABLE, WANTED, TOKENS, p="cmpl-abcd-0-33333333", d="cmpl-abcd-0-44444444", rendezvous="abcd/0/f00d")
    sockets, saved = sockets_of(bench), tmp_path / "both.json"
    for known in ("abc", "cmpl-abc"):
        told = trace(known, *sockets, "--json")
        saved.write_text(told.stdout)
        answers = json.loads(told.stdout)
        assert {each["agent"]["name"] for each in answers} == {"p0", "d0"}, known
        requests = {entry.get("request") for each in answers for entry in each["entries"]} - {None, ""}
        assert requests == set(call.values()), known
    bench.fetch(TABLE, WANTED, TOKENS, p="cmpl-abc-1-55555555", d="cmpl-abc-1-66666666", rendezvous="abc/1/f00d")
    told = trace("abc", *sockets)
    assert told.returncode == 1 and not told.stdout
    assert "several_requests" in told.stderr and "abc: 2 requests have it" in told.stderr
    named = re.findall(r"cmpl-abc-(\d)-\d+ \(", told.stderr)
    assert named == ["1", "0"], "the newest first"
    assert trace("cmpl-abc-1", *sockets).returncode == 0
    assert trace("abc", "--with", saved).returncode == 0, "what was saved has one of them"


def test_what_other_hosts_have_saved_is_joined(bench: Bench, tmp_path: Path) -> None:
    carried(bench, "prefill-1", "decode-1")
    sender, receiver = bench.sender, bench.receiver
    saved = tmp_path / "prefill.json"
    saved.write_text(trace("prefill-1", "--socket", sender.agent.socket, "--json").stdout)
    told = trace("decode-1", "--socket", receiver.agent.socket, "--with", saved, "--json")
    assert {each["agent"]["name"] for each in json.loads(told.stdout)} == {"p0", "d0"}
    saved.write_text("{}")
    told = trace("decode-1", "--with", saved)
    assert told.returncode == 1 and "bad_trace_file" in told.stderr


def test_the_slowest_fetch_is_shown_and_why_one_failed(bench: Bench) -> None:
    sender, receiver = bench.sender, bench.receiver
    began = time.monotonic()
    carried(bench, "p1", "quick")
    quick_s = time.monotonic() - began
    receiver.want("slow", bench.address, WANTED, TOKENS, rendezvous="late")
    wait_for(lambda: sender.agent.status.transfers, why=receiver.agent.text)  # from when on its time counts
    time.sleep(quick_s + 0.5)
    sender.offer("p2", TABLE, len(TOKENS), rendezvous="late")
    receiver.answer("slow")
    shown = trace("--socket", receiver.agent.socket)
    assert shown.returncode == 0 and shown.stdout.startswith("slow: "), shown.stdout + receiver.agent.text()
    receiver.want("never", bench.address, WANTED, TOKENS, rendezvous="nowhere", deadline_s=0.3)
    assert isinstance(receiver.answer("never"), Failed)
    shown = trace("never", "--socket", receiver.agent.socket)
    assert "failed" in shown.stdout and "deadline" in shown.stdout
    told = trace("unheard", "--socket", receiver.agent.socket)
    assert told.returncode == 1 and "no_such_request" in told.stderr and not told.stdout


# The functions of a pull that docs/architecture.md names:


PAGE = (ROOT / "docs/architecture.md").read_text().partition("### A pull, function by function")[2]
ROW = re.compile(r"^\| .+? \| \[.+?\]\(\.\./(kvbridge/[\w/]+\.py)\) \| (.+) \|$", re.MULTILINE)
TRACED = "tests.integration.agent.traced_agent"
WAIT_S = 100.0  # a profiler looks at every call meanwhile


def carry(toy: dict[str, Any], prefill: Path, decode: Path) -> None:
    """One prompt, wanted before it is offered, with deadlines that no busy machine meets."""
    sender = toy["ToyEngine"]("prefill", str(prefill), 16, torch.bfloat16, False)
    receiver = toy["ToyEngine"]("decode", str(decode), 24, torch.float32, True)
    with closing(sender.talk), closing(receiver.talk):
        sender.attach()
        receiver.attach()
        receiver.allocate("one", 99)
        blocks = (Blocks(0, 0, tuple(receiver.blocks["one"])),)
        names = {"number": receiver.talk.new_number(), "request": "one", "rendezvous": "one"}
        to = {"sender": sender.talk.address, "first_token": 0, "end_token": 99, "blocks": blocks}
        receiver.talk.want(Want(**names, **to, deadline_s=WAIT_S))
        sender.prefill("one", torch.arange(100))
        end = time.monotonic() + WAIT_S
        while not ("one" in sender.ended and "one" in receiver.ended):
            assert time.monotonic() < end
            sender.step()
            receiver.step()
            time.sleep(0.001)
        assert receiver.ended["one"].is_good, receiver.ended["one"]


@pytest.mark.timeout(3 * WAIT_S)
def test_a_pull_runs_through_the_functions_that_the_page_names(tmp_path: Path) -> None:
    rows = [(path, name) for path, names in ROW.findall(PAGE) for name in re.findall(r"`(\w+)`", names)]
    toy = runpy.run_path(str(ROOT / "docs/toy_engine.py"))
    options: dict[str, Any] = {"start_s": WAIT_S, "module": TRACED, "routes": "pull,host", "verify": "always"}
    options["connect_s"] = options["silence_s"] = WAIT_S
    with agent(tmp_path, "p", **options) as prefill, agent(tmp_path, "d", **options) as decode:
        with traced() as called:
            carry(toy, prefill.socket, decode.socket)
        assert prefill.stop(WAIT_S) == decode.stop(WAIT_S) == 0
    for name in ("p", "d"):
        called |= {(path, function) for path, function in json.loads((tmp_path / f"{name}.calls").read_text())}
    here = [each for each in rows if not each[0].startswith("kvbridge/device/")]  # those run on GPUs only
    assert len(here) > 30 and [each for each in here if each not in called] == []
