"""Agents do not believe what a peer says about another, and no peer can make `kvbridge status` unreadable."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from kvbridge_proto.engine import Refused
from kvbridge_proto.framing import decode, encode
from kvbridge_proto.peer import Cancel, Claim, Drained, Refuse
from kvbridge_proto.status import PeerStatus, TransferStatus

from kvbridge.agent.logs import PlainFormatter
from kvbridge.agent.peers import peer_status
from kvbridge.agent.status import transfers
from kvbridge.dataplane.data_plane import DataPlane
from kvbridge.exchange.orders import Dropped, Malformed
from kvbridge.exchange.session import Session
from kvbridge.geometry.compat import Convertible
from kvbridge.transport.link import Link
from kvbridge.transport.local import MAX_CONNECTIONS
from testing.agents import Client, agent, attached
from testing.halves import by_slots
from testing.nursery import kvbridge
from tests.integration.agent.player import welcomed
from tests.integration.agent.test_outgoing_peers import Fetching
from tests.integration.fuzz.agents import Besieged
from tests.unit.exchange.world import World
from tests.unit.proto.samples import NOTICE

pytestmark = pytest.mark.proves("G25")


def test_a_peer_that_differs_in_all_things_can_be_shown(world: World) -> None:
    world.fetch("r", end=16)
    (session,) = world.senders[0].accepted.values()
    assert isinstance(session, Session)
    long = replace(session, verdict=Convertible(("x" * 1024,) * 33))
    link = SimpleNamespace(key="", address="a" * 256, sends_by_pipe=False)
    status = peer_status(long, session.peer.address, "receiver open", cast(Link, link), {}.get)
    assert decode(encode(status), PeerStatus) == status and len(status.verdict) == 4096


def test_a_claim_of_all_tokens_there_could_be_can_be_shown(world: World) -> None:
    world.fetch("r", end=16)
    (out,) = world.sender.sending.outgoing_transfers.values()
    session = world.sender.accepted[out.incarnation]
    out.plan = session.planner.plan(out.claim.takes, 0, 1 << 40, 64)
    assert out.plan.chunks > 1 << 40
    shown = transfers(world.sender.receiving, world.sender.sending, 1e9)
    assert decode(encode(shown), tuple[TransferStatus, ...]) == shown


def test_a_name_that_is_a_line_of_its_own_forges_no_line() -> None:
    forged = "x\n2026-11-21 00:00:00 INFO kvbridge.agent: stopped\x1b[2J"
    record = logging.LogRecord("kvbridge.peers", logging.WARNING, "", 0, "refused a peer: peer=%s", (forged,), None)
    line = PlainFormatter("%(levelname)s %(message)s").format(record)
    assert line.startswith("WARNING refused a peer: peer=x\\x0a2026") and line.isprintable()
    try:
        raise ValueError("cause")
    except ValueError:
        fault = logging.LogRecord("kvbridge", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    assert len(PlainFormatter().format(fault).splitlines()) > 3


@pytest.mark.proves("T31")
def test_connections_that_say_nothing_keep_neither_an_engine_nor_a_probe_out(tmp_path: Path) -> None:
    def crowd() -> list[Client]:
        return [stack.enter_context(contextlib.closing(Client(running.socket))) for _ in range(2 * MAX_CONNECTIONS)]

    with agent(tmp_path, "a") as running, contextlib.ExitStack() as stack:
        first = crowd()
        with attached(running):
            crowd()
            probed = kvbridge("status", "--probe", "--socket", running.socket)
            assert probed.returncode == 0, probed.stderr
            assert running.status.engine is not None
        assert first[0].wait(Refused).code == "too_many_connections"


def test_a_notice_that_is_larger_than_any_is_not_unpacked() -> None:
    data_plane = DataPlane(lambda: pytest.fail("not started"), "us", None, 1.0)
    try:
        data_plane._notice(encode(NOTICE))
        assert data_plane.receive_orders.take_reports() == [Dropped(NOTICE.transfer, NOTICE.slot)]
        data_plane._notice(encode([0] * 100_000))
        assert data_plane.receive_orders.take_reports() == [Malformed("frame_too_large")]
    finally:
        os.close(data_plane._wake)


def test_writes_that_count_for_nothing_are_counted_each_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    ours = Besieged()
    odd = msgspec.structs.replace(NOTICE, transfer="x\nanother line")
    with caplog.at_level(logging.WARNING, "kvbridge.receiver"):
        for _ in range(100):
            assert not ours.land(odd)
        assert len(caplog.records) == 1 and "\n" not in caplog.records[0].getMessage()
        ours.now += 61
        assert not ours.land(odd)
    assert len(caplog.records) == 2
    assert ours.metrics.values()["kvbridge_late_writes_total"] == 101


@pytest.mark.proves("T18")
@pytest.mark.parametrize("is_welcome", [True, False])
async def test_another_key_frees_no_slot_by_saying_the_incarnation_of_a_sender_that_stands_still(
    is_welcome: bool, world: World
) -> None:
    player, sender = Fetching(world.receivers[0].engine), world.senders[0].engine
    slots, wires = by_slots(player.receiving).slots, player.wires
    player.want("P0")
    wires["P0"].key = "of P0"
    await player.peers._welcome(wires["P0"], welcomed(world, wires["P0"]))
    (claim,) = wires["P0"].said(Claim)
    player.peers._lose(wires["P0"], "it stands still")
    player.report()
    assert slots.counts().quarantined > 0
    player.want("M")
    wires["M"].key = "of M"
    if is_welcome:
        await player.peers._welcome(wires["M"], welcomed(world, wires["M"]))
        assert player.peers.outgoing.sessions["M"].session is not None
    else:
        player.peers._on_message(wires["M"], sender.agent.incarnation, Refuse(code="no_engine", reasons=()))
    assert not wires["M"].said(Cancel)
    for said in (Drained(transfer=claim.transfer), Refuse(code="bad_claim", reasons=(), about=claim.transfer)):
        player.peers._on_message(wires["M"], sender.agent.incarnation, said)
        assert slots.counts().quarantined > 0
    player.want("P0")
    player.peers._on_message(wires["P0"], sender.agent.incarnation, Refuse(code="no_engine", reasons=()))
    assert [cancel.transfer for cancel in wires["P0"].said(Cancel)] == [claim.transfer]
    player.peers._on_message(wires["P0"], sender.agent.incarnation, Drained(transfer=claim.transfer))
    assert not slots.counts().quarantined
