"""What running agents tell of themselves: their engines' pools, and the last errors of their logs."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from pathlib import Path

import msgspec
from kvbridge_proto.pool import Pool
from kvbridge_proto.status import MAX_ERROR_TEXT, MAX_ERRORS

from kvbridge.agent.logs import LastErrors
from testing.agents import OracleEngine, agent
from testing.nursery import kvbridge
from testing.oracle import Shape, build, build_all
from testing.waiting import wait_for


def test_status_says_which_rank_of_which_replica_is_attached(tmp_path: Path) -> None:
    held = build_all(Shape("nhd", tp_size=2))[1]
    of_replica = msgspec.structs.replace(held.pool, engine=msgspec.structs.replace(held.pool.engine, replica=3))
    with agent(tmp_path, "p") as p, closing(OracleEngine(p, held)) as engine:
        engine.attach(pool=of_replica)
        line = kvbridge("status", "--socket", p.socket).stdout.splitlines()[1]
        assert "healthy  oracle 0 dp 3 tp 1/2  " in line


def test_plan_asks_the_agents_of_two_engines(tmp_path: Path) -> None:
    (sender,), (receiver,) = build_all(Shape("nhd")), build_all(Shape("hnd", block_tokens=64))
    with agent(tmp_path, "p") as p, agent(tmp_path, "d") as d, closing(OracleEngine(p, sender)) as engine:
        engine.attach()
        told = kvbridge("plan", p.socket, d.socket, "--json")
        assert told.returncode == 1 and json.loads(told.stdout)["code"] == "agent_refused"
        assert f"{d.socket}: no_engine: no engine is attached" in told.stderr
        with closing(OracleEngine(d, receiver)) as other:
            other.attach()
            told = kvbridge("plan", p.socket, d.socket, "--json")
            assert told.returncode == 0, told.stderr
            found = json.loads(told.stdout)
            assert found["verdict"] == "Convertible" and found["senders"][0]["chunks"] > 1  # of their slots, 64 KiB
            file = tmp_path / "p.json"
            file.write_text(kvbridge("status", "--pool", "--socket", p.socket).stdout)
            assert msgspec.json.decode(file.read_bytes(), type=Pool) == sender.pool
            by_file = json.loads(kvbridge("plan", file, d.socket, "--json", "--slot-bytes", "65536").stdout)
            assert by_file == found
            told = kvbridge("status", "--pool", "--socket", p.socket, "--socket", d.socket)
            both = {sender.pool.engine.id, receiver.pool.engine.id}
            assert len(both) == 1 or (told.returncode == 2 and "name the sockets of one" in told.stderr)
            for each in (engine, other):
                each.hear(0.0)
                assert not each.heard  # it is no engine that asks


# The last errors:


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
    with agent(tmp_path, "receiver", connect_s=0.5) as receiver:
        engine = OracleEngine(receiver, build(Shape()))
        engine.attach()
        engine.want("lost", "tcp://127.0.0.1:1", [0], range(16))
        engine.answer("lost")
        wait_for(lambda: any("request=lost code=peer_" in error.text for error in receiver.status.errors))
        engine.close()
