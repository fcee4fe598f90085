"""Log lines: one an event, for people or programs, and no flood of the same."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kvbridge_proto.engine import Failed

from kvbridge.agent.logs import JsonFormatter, RateLimit
from tests.integration.agent.harness import SyntheticEngine, agent
from tests.support.oracle import Shape, build


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
    with (
        agent(tmp_path, "a", log_format="json", connect_s=2) as running,
        closing(SyntheticEngine(running, build(Shape("nhd")))) as engine,
    ):
        engine.attach()
        for number in range(200):
            engine.want(f"r{number}", "tcp://not an address", [1], range(16))
        for number in range(200):
            assert isinstance(engine.answer(f"r{number}"), Failed)
        lines = [json.loads(line) for line in running.text().splitlines()]
    failed = [line for line in lines if line["message"].startswith("failed: ")]
    assert len(failed) == 50 and failed[0]["request"] == "r0" and failed[0]["code"] == "bad_address"
    assert any(line["logger"] == "kvbridge.engine" for line in lines)
