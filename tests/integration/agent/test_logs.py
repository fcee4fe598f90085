"""Log lines: one per event, for people or for programs, without floods of the same line."""

from __future__ import annotations

import ast
import json
import logging
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kvbridge_proto.engine import Abandon, Failed, Offer, Released, Withdraw
from kvbridge_proto.status import Trace, TraceQuery

from kvbridge.agent.journal import Journal
from kvbridge.agent.logs import JsonFormatter, RateLimit
from kvbridge.agent.record import MOST_TRANSFERS, Record
from kvbridge.exchange.actions import Met
from kvbridge.loopback.messages import number_of
from testing.agents import Client, OracleEngine, agent, attached
from testing.oracle import Shape
from testing.pairs import Bench, Benches
from testing.waiting import wait_for
from tests.support.cited import ROOT


def record(text: str, *args: Any, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("kvbridge.test", level, "here.py", 1, text, args, None)


def test_each_value_that_a_message_names_is_a_field() -> None:
    said = json.loads(
        JsonFormatter().format(record("failed: request=%s code=%s after %.2f ms, n=%d %s", "r1", "x", 2.5, 7, "why"))
    )
    assert said["message"] == "failed: request=r1 code=x after 2.50 ms, n=7 why"
    assert (said["request"], said["code"], said["n"]) == ("r1", "x", 7)
    assert said["level"] == "warning" and said["logger"] == "kvbridge.test" and said["time"].endswith("+00:00")
    assert "after" not in said and "ms" not in said


def test_whoever_chose_the_words_it_is_one_line_and_no_other_field() -> None:
    line = JsonFormatter().format(record("100%% of peer=%s message=%s", "a\n\x1b[2J", "forged"))
    assert line.isascii() and line.isprintable()
    said = json.loads(line)
    assert said["peer"] == "a\\x0a\\x1b[2J" and said["message"].startswith("100% of peer=a")
    try:
        raise ValueError("line\nanother")
    except ValueError:
        fault = logging.LogRecord("kvbridge.test", logging.ERROR, "here.py", 1, "failed", None, sys.exc_info())
    assert "ValueError" in json.loads(JsonFormatter().format(fault))["exception"]


def test_lines_alike_are_left_out_and_counted() -> None:
    now = [0.0]
    limit = RateLimit(burst=3, window_s=10.0, clock=lambda: now[0])
    assert [limit.filter(record("failed: request=%s", i)) for i in range(8)] == [True] * 3 + [False] * 5
    assert limit.filter(record("another: request=%s", 1)) and limit.filter(record("failed: request=%s", 1, level=10))
    now[0] = 10.0
    after = record("failed: request=%s", 9)
    assert limit.filter(after) and after.getMessage() == "failed: request=9 (5 more like this were left out)"
    again = record("failed: request=%s", 10)
    assert limit.filter(again) and again.getMessage() == "failed: request=10"


def test_kinds_of_lines_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbridge.agent.logs.MOST_KINDS", 4)
    limit = RateLimit(clock=lambda: 0.0)
    for number in range(100):
        assert limit.filter(record(f"kind {number}"))
    assert len(limit._kinds) == 4


def test_an_agent_logs_json_and_no_flood(tmp_path: Path) -> None:
    with agent(tmp_path, "a", log_format="json", connect_s=2) as running, attached(running) as engine:
        for number in range(200):
            engine.want(f"r{number}", "tcp://not an address", [1], range(16))
        for number in range(200):
            assert isinstance(engine.answer(f"r{number}"), Failed)
        lines = [json.loads(line) for line in running.text().splitlines()]
    failed = [line for line in lines if line["message"].startswith("failed: ")]
    assert len(failed) == 50 and failed[0]["request"] == "r0" and failed[0]["code"] == "bad_address"
    assert any(line["logger"] == "kvbridge.engine" for line in lines)


# Both names on each line:

TOKENS = range(200)
TABLE, WANTED = list(range(100, 113)), list(range(5, 9))
FAILED = ("d-short", "d-gone")
# Nobody has claimed anything yet; or the claim has not met its offer yet, so that its request has no name here.
BEFORE_BOTH = ("wanted: request=", "offered: request=", "claimed: transfer=")


def ended_in_every_way(made: Bench) -> dict[str, str]:
    """The prefill engine's name of each request by the decode engine's: fetched, wanted too early, failed, aborted."""
    sender, receiver = made.sender, made.receiver
    for name in ("one", "two"):
        made.fetch(TABLE, WANTED, TOKENS, p=f"p-{name}", d=f"d-{name}", rendezvous=name)
    receiver.want("d-early", made.address, WANTED, TOKENS, rendezvous="early")
    wait_for(lambda: any(each.rendezvous == "early" for each in sender.agent.status.transfers))
    sender.offer("p-early", TABLE, len(TOKENS), rendezvous="early")
    receiver.done("d-early")
    sender.offer("p-short", TABLE[:5], 80, rendezvous="short")
    receiver.want("d-short", made.address, WANTED, TOKENS, rendezvous="short")
    assert isinstance(receiver.answer("d-short"), Failed)
    sender.offer("p-gone", TABLE[:5], 80, rendezvous="gone", is_last=False)
    receiver.want("d-gone", made.address, WANTED, TOKENS, rendezvous="gone")
    wait_for(lambda: any(each.request == "p-gone" for each in sender.agent.status.transfers))
    receiver.client.send(Abandon(number=number_of("d-gone")))
    assert isinstance(receiver.answer("d-gone"), Failed)
    sender.client.send(Withdraw(number=number_of("p-gone")))
    for name in ("early", "short", "gone"):
        sender.released(f"p-{name}")
    return {f"d-{name}": f"p-{name}" for name in ("one", "two", "early", "short", "gone")}


def transfers_of(engine: OracleEngine, request: str) -> set[str]:
    """By the agent's journal, which does not go through the log."""
    with closing(Client(engine.agent.socket)) as client:
        client.send(TraceQuery(names=(request,)))
        return {entry.transfer for entry in client.wait(Trace).entries if entry.transfer}


@pytest.mark.parametrize("route", ["nixl", "pull"])
def test_each_line_about_a_transfer_names_it_and_its_request(route: str, bench_of: Benches) -> None:
    shapes = Shape("nhd", blocks=200), Shape("hnd", block_tokens=64, blocks=60)
    options = {"routes": f"{route},host", "log_format": "json", "log_level": "debug"}
    made = bench_of(*shapes, **options)
    made.fill(TABLE, TOKENS)
    requests = ended_in_every_way(made)
    for engine, names in ((made.sender, requests.values()), (made.receiver, requests)):
        transfer_of = {name: transfers_of(engine, name) for name in names}
        assert all(len(each) == 1 for each in transfer_of.values()), transfer_of
        request_of = {transfer: name for name, (transfer,) in transfer_of.items()}
        said, early = {name: set[str]() for name in names}, 0
        for line in map(json.loads, engine.agent.text().splitlines()):
            spoken = {name for name in (*said, *request_of) if name in line["message"]}
            if not spoken or line["message"].startswith(BEFORE_BOTH):
                early += line["message"].startswith("claimed: transfer=")
                continue
            request, transfer = line.get("request"), line.get("transfer")
            assert request in said and request_of.get(transfer) == request, line
            assert f"request={request} transfer={transfer}" in line["message"], line
            said[request].add(line["message"].split(":")[0])
        is_sender = engine is made.sender
        for name, events in said.items():
            ended = {"met", "released"} if is_sender else {"failed" if name in FAILED else "done"}
            assert ended <= events, (name, events)
        assert early == len(requests) * is_sender, "a claim is told before it meets its offer"


def test_a_request_with_several_transfers_names_them_all_and_one_without_names_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = Record("sender", Journal(), lambda: 1.0, most=3)
    caplog.set_level(logging.INFO)
    made.note(offer(1, "r"))
    for transfer in ("t1", "t2", "t2"):
        made.note(Met(transfer, "D", 1, 1, 1))
    made.warn("failed", "code=%s %s", "x", "why", number=1)
    made.warn("failed", "code=%s", "x", number=7)
    made.warn("dropped", transfer="t1")
    made.note(Released(number=1, request="r"))
    made.note(offer(2, "r"))  # another of the same name
    made.note(Met("t3", "D", 2, 1, 1))
    made.warn("dropped", transfer="t2")
    made.warn("failed", number=2)
    assert [record.getMessage() for record in caplog.records] == [
        "failed: request=r transfer=t1,t2 code=x why",
        "failed: code=x",
        "dropped: request=r transfer=t1",
        "dropped: request=r transfer=t2",
        "failed: request=r transfer=t3",
    ]
    for number in range(3, 13):
        made.note(offer(number, f"r{number}"))
        made.note(Met(f"other{number}", "D", number, 1, 1))
    assert len(made._of_number) == len(made._of_transfer) == 3
    made.warn("dropped", transfer="t3")
    assert caplog.records[-1].getMessage() == "dropped: transfer=t3", "it is forgotten of which request"


def offer(number: int, request: str) -> Offer:
    return Offer(number=number, request=request, rendezvous="", tokens=1, blocks=(), is_last=True, hold_s=1.0)


def test_a_request_that_is_claimed_again_and_again_keeps_the_last_transfers_only() -> None:
    """By a peer that claims no rows at all, which leaves the offer open."""
    made = Record("sender", Journal(), lambda: 1.0)
    made.note(offer(1, "r"))
    for number in range(10 * MOST_TRANSFERS):
        made.note(Met(f"t{number}", "D", 1, 0, 0))
    assert list(made._of_number[1].transfers) == [
        f"t{number}" for number in range(9 * MOST_TRANSFERS, 10 * MOST_TRANSFERS)
    ]


def test_what_was_forgotten_of_an_open_request_is_not_kept_once_it_has_ended() -> None:
    made = Record("sender", Journal(), lambda: 1.0, most=4)
    for number in range(40):
        made.note(offer(number, f"r{number}"))
        for other in range(8):
            made.note(Met(f"t{number}-{other}", "D", number, 0, 0))
        made.note(Released(number=number, request=f"r{number}"))
    assert len(made._of_transfer) == 4


def test_no_line_names_a_request_or_a_transfer_by_hand_without_the_other() -> None:
    """The record adds both. Where it is out of reach, on the data plane's thread, a line has both in its text."""
    found = []
    for path in sorted(path for part in ("agent", "dataplane") for path in (ROOT / "kvbridge" / part).rglob("*.py")):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            whose = call.func.value if isinstance(call.func, ast.Attribute) else None
            if not isinstance(whose, ast.Name) or whose.id != "log" or not call.args:
                continue
            named = [name for name in ("request=%", "transfer=%") if name in ast.unparse(call.args[0])]
            found += [f"{path.name}:{call.lineno}"] * (len(named) == 1)
    assert not found
