"""Names and reasons that others chose, wherever they are shown."""

from __future__ import annotations

import logging

import pytest

from kvbridge.agent import logs
from kvbridge.oneline import MOST_CHARACTERS, MOST_LINES, SHOWN, OneLine, plain, plain_lines, shown

FORGED = "left\nINFO 11-21 kvbridge: all is well\r\x1b[2J\x9b1m\u2028\u202e"


@pytest.mark.proves("T40")
def test_is_one_line_without_commands_and_not_longer_than_it_may_be() -> None:
    shown = plain(FORGED)
    assert shown.isprintable() and shown.startswith("left\\x0aINFO") and "\\x1b[2J\\x9b1m\\x2028\\x202e" in shown
    assert plain("größer 块") == "größer 块"
    assert plain("x" * MOST_CHARACTERS) == "x" * MOST_CHARACTERS
    assert len(plain("x" * (1 << 20))) < MOST_CHARACTERS + 100 and "(1048576 characters)" in plain("x" * (1 << 20))
    assert len(plain("\x1b" * MOST_CHARACTERS)) < MOST_CHARACTERS + 100 and plain("\x1b" * MOST_CHARACTERS).endswith(
        "... (4096 characters)"
    )
    assert len(plain("\U000e0001" * (1 << 20), 80)) < 80 + 100


def test_what_a_logger_of_another_program_is_told_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("test_oneline")
    log.addFilter(OneLine())
    log.warning("%s: KV not received: %s: %s", "request 100%s", "peer_lost", FORGED)
    log.warning("without arguments, 100 %")
    assert [record.getMessage() for record in caplog.records] == [
        f"request 100%s: KV not received: peer_lost: {plain(FORGED)}",
        "without arguments, 100 %",
    ]


@pytest.mark.proves("T40")
def test_a_traceback_in_another_programs_log_is_plain_whatever_its_formatter_does() -> None:
    log, heard = logging.getLogger("test_oneline"), list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = heard.append
    log.addFilter(OneLine())
    log.addHandler(handler)
    try:
        raise ValueError(FORGED * 2)
    except ValueError:
        log.exception("failed: %s", FORGED)
    finally:
        log.removeHandler(handler)
    (record,) = heard
    assert record.exc_info is None, "a formatter that shows it would show its text as it is"
    first, *more = logging.Formatter().format(record).split("\n")
    assert first == f"failed: {plain(FORGED)}"
    assert all(line.isprintable() and line.startswith("  ") for line in more)


@pytest.mark.parametrize("value", [FORGED, "x" * 1000, 10**5000, 7, None, [FORGED]], ids=range(6))
def test_any_value_can_be_shown_in_a_reason(value: object) -> None:
    assert shown(value).isprintable() and len(shown(value)) <= SHOWN


@pytest.mark.proves("T40")
def test_an_exception_that_quotes_others_forges_no_line_of_ours() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        record = logging.LogRecord("kvbridge", logging.ERROR, "", 0, "failed", (), (type(error), error, None))
    first, *more = logs.PlainFormatter("%(levelname)s %(message)s").format(record).split("\n")
    assert first == "ERROR failed" and all(line.startswith("  ") and line.isprintable() for line in more)
    assert plain_lines("one\ntwo\x1b[2J") == "one\n  two\\x1b[2J"


@pytest.mark.proves("T40")
def test_what_has_too_many_lines_loses_those_in_the_middle() -> None:
    lines = plain_lines("\n".join(map(str, range(10_000)))).split("\n  ")
    assert len(lines) == MOST_LINES + 1 and lines[MOST_LINES // 2] == f"... ({10_000 - MOST_LINES} lines)"
    assert (lines[0], lines[-1]) == ("0", "9999")
    assert len(plain_lines("x\n" * MOST_LINES).split("\n")) == MOST_LINES
