"""Peers that have mapped an engine's memory for the route `pull`: shown while they read, and if they stay too long."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvbridge_proto.common import OURS
from kvbridge_proto.engine import READERS_S, Attach, Detach

from kvbridge.adapters.engine.client import EngineClient
from kvbridge.adapters.engine.link import AgentLink, Over
from kvbridge.agent.doors import LocalDoors
from kvbridge.dataplane.attached import AttachedMemory
from kvbridge.device.handles import export_all
from kvbridge.device.mapping import SharedHandles
from kvbridge.transport.door import open_memory
from testing.agents import OracleEngine, agent
from testing.oracle import Shape, build
from testing.pairs import Bench, Benches
from testing.proc import mapped
from testing.waiting import soon, wait_for
from tests.integration.agent.test_holding import shown
from tests.integration.transport.test_door import opened, refused, ticket_of

TABLE, TOKENS = [3, 1, 2], range(40)
WIDE = {"key_width": 64, "value_width": 64}


@pytest.fixture
def bench(bench_of: Benches) -> Bench:
    bench = bench_of(receiver=Shape("hnd", block_tokens=64, blocks=8), routes="pull,host")
    bench.carries("r", TABLE, [5], TOKENS)
    return bench


def test_status_and_metrics_show_who_reads_and_how_much(bench: Bench) -> None:
    sender, receiver = bench.sender.agent, bench.receiver.agent
    (reader,) = sender.status.readers
    assert (reader.agent, reader.pid, reader.uid) == ("d0", receiver.process.pid, os.getuid())
    assert reader.over_s is None and receiver.status.readers == ()
    (peer,) = receiver.status.peers
    assert re.match(r"pull [0-9.e+]+ GB/s in \d+ KiB", peer.route), peer.route
    assert f"{receiver.process.pid} d0 (uid {os.getuid()})" in shown(sender)
    wait_for(lambda: "kvbridge_chunks_total{role=sender}" in sender.status.counters)
    for name in ("chunks", "wire_bytes"):
        sent = sender.status.counters[f"kvbridge_{name}_total{{role=sender}}"]
        assert sent == receiver.status.counters[f"kvbridge_{name}_total{{role=receiver}}"] > 0


def test_a_sender_cannot_say_how_much_its_receiver_has_read(bench_of: Benches) -> None:
    shapes = (Shape("nhd", blocks=80, **WIDE), Shape("hnd", block_tokens=64, blocks=20, **WIDE))
    bench = bench_of(*shapes, routes="pull,host")
    given, tokens = list(range(63)), range(1000)
    bench.offer("r", given[:40], 640, is_last=False)
    bench.want("r", list(range(16)), tokens)
    wait_for(lambda: [bool(each.chunks_done) for each in bench.receiver.agent.status.transfers] == [True])
    (read,), (given_away,) = bench.receiver.agent.status.transfers, bench.sender.agent.status.transfers
    assert (given_away.chunks_done, given_away.chunks) == (None, read.chunks) and 0 < read.chunks_done < read.chunks
    assert f"sender flowing {read.chunks} being read" in shown(bench.sender.agent)
    assert f"receiver flowing {read.chunks_done}/{read.chunks}" in shown(bench.receiver.agent)
    bench.offer("r", given[40:], 1000, first=40, is_more=True)
    bench.done("r")


async def test_memory_is_handed_over_while_its_engine_is_attached_and_its_session_open(tmp_path: Path) -> None:
    async with opened(tmp_path / "agent.sock") as door, asyncio.timeout(60):
        nothing: Any = None
        doors, attached = LocalDoors(door, nothing, "prefill", ()), AttachedMemory(7, nothing, None)
        doors.share(replace(attached, shared=SharedHandles((), ())))
        tickets = [ticket_of(door, session) for session in ("one", "other", "late")]
        one, other = [await open_memory(ticket, "decode") for ticket in tickets[:2]]
        assert one.epoch == other.epoch == 7
        session: Any = SimpleNamespace(peer=SimpleNamespace(incarnation="one"))
        doors.revoke(session)
        assert await one.ending() == "the session is over"
        doors.withdraw(attached, "the engine left")
        assert await other.ending() == "the engine left"
        assert await refused(tickets[2]) == "stale_epoch" and door.admit("later") is None
        one.close()
        other.close()


@pytest.mark.parametrize("is_shared", [True, False])
def test_blocks_are_free_late_when_an_agent_is_killed_that_may_have_let_others_read_them(
    tmp_path: Path, is_shared: bool
) -> None:
    """Its receivers read on until their leases end."""
    with (
        agent(tmp_path, "a", routes="pull,host" if is_shared else "host") as running,
        closing(OracleEngine(running, build(Shape("nhd")))) as engine,
    ):
        handles, fds = export_all(region.untyped_storage() for region in engine.regions)
        attach = Attach(versions=OURS, pool=engine.pool, handles=handles)
        link = AgentLink(EngineClient(running.socket), attach, fds, logging.getLogger("test"))
        assert link.start(60.0) and link.attached is not None and link.attached.is_shared == is_shared
        began, heard = time.monotonic(), list[object]()
        running.kill()
        wait_for(lambda: bool(heard.extend(link.turn())) or any(isinstance(each, Over) for each in heard))
        assert not is_shared or time.monotonic() - began >= READERS_S
        link.close()


def test_memory_of_an_engine_that_left_is_closed_or_its_reader_is_named(bench: Bench) -> None:
    engine, sender, receiver = bench.sender, bench.sender.agent, bench.receiver.agent
    inode = engine.inode
    assert mapped(receiver.process.pid, inode)
    receiver.process.send_signal(signal.SIGSTOP)
    engine.client.send(Detach())
    wait_for(lambda: sender.status.engine is None)
    assert mapped(receiver.process.pid, inode)
    wait_for(lambda: [reader.over_s is not None for reader in sender.status.readers] == [True])
    assert "to be closed for" in shown(sender)
    receiver.process.send_signal(signal.SIGCONT)
    soon(lambda: sender.status.readers == (), 1.0, sender.text)
    assert not mapped(receiver.process.pid, inode)
    assert bench.receiver.agent.status.engine is not None
