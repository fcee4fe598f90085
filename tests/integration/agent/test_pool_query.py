"""`kvbridge status --pool` and `kvbridge plan` ask running agents for their engines' pools."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import msgspec
from kvbridge_proto.pool import Pool

from testing.agents import OracleEngine, agent
from testing.nursery import kvbridge
from testing.oracle import Shape, build_all


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
