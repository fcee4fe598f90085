"""What an agent keeps of its own log for `kvbridge status`."""

from __future__ import annotations

import logging
from pathlib import Path

from kvbridge_proto.status import MAX_ERROR_TEXT, MAX_ERRORS

from kvbridge.agent.logs import LastErrors
from testing.agents import OracleEngine, agent
from testing.oracle import Shape, build
from testing.waiting import wait_for


def test_the_last_warnings_are_kept_cut_short_and_in_order() -> None:
    now = [0.0]
    kept = LastErrors(lambda: now[0])
    log = logging.Logger("kvbridge.test")
    log.addHandler(kept)
    log.info("nothing")
    for number in range(MAX_ERRORS + 3):
        now[0] += 1
        log.warning("number %d of\n%s", number, "x" * 10_000)
    log.error("the end")
    found = kept.statuses()
    assert len(found) == MAX_ERRORS and (found[-1].level, found[-1].text) == ("error", "the end")
    assert found[-2].text.startswith(f"number {MAX_ERRORS + 2} of\\x0ax")
    assert len(found[-2].text) == MAX_ERROR_TEXT and found[-2].age_s == 0 and found[0].age_s == MAX_ERRORS - 2


def test_a_want_that_failed_is_among_an_agents_last_errors(tmp_path: Path) -> None:
    with agent(tmp_path, "receiver") as receiver:
        engine = OracleEngine(receiver, build(Shape()))
        engine.attach()
        engine.want("lost", "tcp://127.0.0.1:1", [0], range(16))
        engine.answer("lost")
        wait_for(lambda: any("request=lost code=peer_" in error.text for error in receiver.status.errors))
        engine.close()
