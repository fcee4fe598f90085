"""Bad input at every entrance of an agent: the right side gets a clear error, and everything else goes on."""

from __future__ import annotations

import logging
import os
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from kvbridge_proto.common import OURS
from kvbridge_proto.engine import Attach, Decline, Detached, Failed, Refused, Rescale, Rescaled, Scales
from kvbridge_proto.framing import encode
from kvbridge_proto.pool import Handle
from msgspec.structs import replace

from demo.processes import free_port
from kvbridge.adapters.engine.client import EngineClient
from kvbridge.adapters.engine.link import AgentLink
from kvbridge.loopback.messages import number_of
from testing.agents import Client, OracleEngine, agent, attached
from testing.oracle import Shape, build, fill
from testing.pairs import Bench, Benches
from testing.proc import Stopwatch, cpu_s, mapped
from testing.waiting import soon, wait_for
from tests.integration.agent.test_scraping import scraped


@pytest.fixture
def pair(bench_of: Benches) -> Bench:
    return bench_of()


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One for all tests that leave it whole."""
    with ExitStack() as stack:
        yield Bench(tmp_path_factory.mktemp("doors"), stack, connect_s=3)


def test_a_client_that_talks_nonsense_is_told_and_closed(lasting: Bench) -> None:
    with closing(Client(lasting.receiver.agent.socket)) as client:
        client.socket.sendall(struct.pack(">I", 7) + b"\xc1garbage"[:7])
        assert client.wait(Refused).code == "frame_malformed"
        client.wait_closed()
    assert "kvbridge_rejected_messages_total{code=frame_malformed}" in lasting.receiver.agent.status.counters
    lasting.works()


@pytest.mark.proves("T37")
def test_a_want_or_an_offer_with_a_field_out_of_bounds_fails_alone(pair: Bench) -> None:
    """Its engine was detached for a minute, and all its requests failed."""
    receiver, sender, number = pair.receiver, pair.sender, number_of("open")
    long = "tcp://" + "x" * 300
    for each in pair.engines:
        each.client._checked = encode  # ours would not send what is to follow
    receiver.want("unfit", long, [1], range(4))
    refused = receiver.told(Refused)
    assert (refused.code, refused.about, refused.number) == ("message_invalid", "", number_of("unfit"))
    assert "sender" in refused.reasons[0]
    receiver.want("open", sender.agent.address, [2], range(4))
    receiver.want("open", long, [2], range(4))
    assert receiver.told(Refused).about == f"want {number}", "the first goes on"
    sender.offer("open", [3], 4, is_last=False)
    sender.offer("open", [], 8, is_more=True, hold_s=1e9)
    assert "hold_s" in sender.released("open").reason, "its blocks were lent"
    assert isinstance(receiver.answer("open"), Failed)
    sender.offer("never", [3], 4, hold_s=1e9)
    assert sender.told(Refused).number == number_of("never")
    pair.works()


def test_a_second_engine_is_refused_by_name(lasting: Bench) -> None:
    with closing(OracleEngine(lasting.receiver.agent, build(Shape("hnd")))) as second:
        refused = second.attach()
        assert isinstance(refused, Refused) and refused.code == "engine_present"
        assert f"pid {os.getpid()}" in refused.reasons[0] and "kvbridge_socket" in refused.reasons[1]
        second.want("r", lasting.sender.agent.address, [1], range(4))
        assert second.told(Refused).code == "not_attached"
    lasting.works()


def test_a_second_server_of_a_host_logs_that_it_needs_another_socket(
    lasting: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind an external load balancer each server counts its ranks from 0, so two ask for agent-0.sock."""
    path, pool = lasting.receiver.agent.socket, lasting.receiver.pool
    hello = Attach(versions=OURS, pool=pool, handles=(Handle(region=0, kind="shm_fd", fd=0),))
    with open(os.devnull) as memory:
        link = AgentLink(EngineClient(path), hello, [memory.fileno()], logging.getLogger("second"))
        assert not link.start(1.0)
        link.close()
    at_once, *more, at_last = [record.getMessage() for record in caplog.records if record.name == "second"]
    assert len(more) < 5, "it tries once a second"
    assert f"not attached to an agent at {path} within 1.0 s" in at_last
    for said in (at_once, at_last):
        assert "engine_present" in said and f"pid {os.getpid()}" in said and "kvbridge_socket" in said
    lasting.works()


@pytest.mark.proves("T37")
def test_a_plane_outside_its_region_is_refused_by_name(tmp_path: Path) -> None:
    with agent(tmp_path, "a") as running, closing(OracleEngine(running, build(Shape("nhd")))) as engine:
        planes = (replace(engine.pool.planes[0], offset=engine.pool.regions[0].size_bytes), *engine.pool.planes[1:])
        refused = engine.attach(pool=replace(engine.pool, planes=planes))
        assert isinstance(refused, Refused), refused
        assert str(engine.pool.regions[0].size_bytes) in str(refused.reasons)
        short = replace(
            engine.pool, regions=tuple(replace(r, size_bytes=r.size_bytes * 2) for r in engine.pool.regions)
        )
        refused = engine.attach(pool=short)
        assert isinstance(refused, Refused) and refused.code == "region_too_small", refused
        assert engine.attach().epoch == 1


def refusal(engine: OracleEngine, message: Rescale | Decline) -> tuple[str, str]:
    about = f"{'rescale' if isinstance(message, Rescale) else 'decline'} {message.revision}"
    engine.client.send(message)
    refused = engine.told(Refused, request=about)
    return refused.code, " ".join(refused.reasons)


@pytest.mark.parametrize(
    ("message", "code", "said"),
    [
        (Rescale(revision=3, scales=(Scales(99, "k", (0.5,)),)), "scales_unknown_plane", "layer 99 k"),
        (Rescale(revision=3, scales=(Scales(0, "k", (-0.5,)),)), "bad_pool", "-0.5"),
        (Decline(revision=2, reason="no"), "stale_revision", "2"),
    ],
)
def test_scales_that_cannot_be_are_refused_by_name(
    lasting: Bench, message: Rescale | Decline, code: str, said: str
) -> None:
    refused, reason = refusal(lasting.receiver, message)
    assert refused == code and said in reason
    lasting.works()


def test_rows_after_new_scales_are_converted_under_them(bench_of: Benches) -> None:
    """The sender's numbers are fp8 under one scale, then under another; the receiver's bf16 shows which was used."""
    bench = bench_of(Shape("nhd", codec="fp8_e4m3"), Shape("nhd"))
    sender, receiver = bench.sender, bench.receiver
    for memory in sender.held.memory:
        memory[:] = 0x38  # 1.0
    for revision, scale in enumerate((0.5, 4.0), 1):
        planes = {(plane.layer, plane.part) for plane in sender.pool.planes}
        sender.client.send(
            Rescale(revision=revision, scales=tuple(Scales(layer, part, (scale,)) for layer, part in planes))
        )
        assert sender.told(Rescaled) == Rescaled(revision=revision, epoch=1 + revision)
        sender.offer(f"r{revision}", [1], 16)
        receiver.want(f"r{revision}", bench.address, [1], range(16))
        receiver.done(f"r{revision}")
        assert sender.released(f"r{revision}").code == ""
        values = np.concatenate([memory.view(np.uint16) for memory in receiver.held.memory]).astype(np.uint32) << 16
        written = 2 * 2 * 4 * 16 * 8  # layers, parts, heads, tokens, width
        assert np.count_nonzero(values.view(np.float32) == scale) == written
    assert refusal(sender, Rescale(revision=2, scales=()))[0] == "stale_revision"


@pytest.mark.proves("G22")
def test_a_peer_of_another_model_is_refused_with_both_values(bench_of: Benches) -> None:
    failed = bench_of(Shape("nhd", key_width=64), Shape("nhd", key_width=96)).carry("r")
    assert isinstance(failed, Failed) and failed.code == "incompatible"
    assert "64" in failed.reason and "96" in failed.reason


@pytest.mark.proves("G16")
def test_an_agent_that_is_not_there_fails_the_want_soon(lasting: Bench) -> None:
    port = free_port()
    watch = Stopwatch()
    lasting.receiver.want("r", f"tcp://127.0.0.1:{port}", [1], range(16))
    assert str(port) in lasting.receiver.failed("r", "peer_unreachable")
    assert watch.seconds() < 6, "connect_s is 3"
    lasting.receiver.want("s", "tcp://not an address", [1], range(16))
    lasting.receiver.failed("s", "bad_address")
    lasting.works()


def test_while_an_agent_stands_still_its_peers_are_not_late(bench_of: Benches) -> None:
    """The answer came while it did: by its clock alone that was too late."""
    pair = bench_of(connect_s=8, silence_s=8)  # what is left of them must be enough on a busy machine
    sender, receiver, address = pair.sender.agent.process, pair.receiver.agent.process, pair.sender.agent.address
    fill(pair.sender.held, [5], range(16))
    pair.sender.offer("r", [5], 16)
    sender.send_signal(signal.SIGSTOP)
    pair.receiver.want("r", address, [6], range(16))
    time.sleep(0.5)  # it has said Hello
    receiver.send_signal(signal.SIGSTOP)
    sender.send_signal(signal.SIGCONT)
    time.sleep(9.0)  # longer than connect_s and silence_s
    receiver.send_signal(signal.SIGCONT)
    pair.receiver.done("r")


@pytest.mark.proves("G19")
def test_an_engine_that_dies_frees_its_memory_and_another_may_come(pair: Bench) -> None:
    pair.works("first")
    pid, pool = pair.receiver.agent.process.pid, pair.receiver.inode
    assert mapped(pid, pool)
    pair.receiver.want("r", pair.sender.agent.address, [1], range(16))
    pair.receiver.close()
    soon(lambda: not mapped(pid, pool), 1.0, lambda: "the dead engine's memory is still mapped")
    with attached(pair.receiver.agent, Shape("hnd")) as engine:
        assert pair.receiver.agent.status.engine.epoch == 2
        pair.receivers = [engine]
        pair.works("second")


def test_metrics_are_served_on_loopback(tmp_path: Path) -> None:
    port = free_port()
    with agent(tmp_path, "a", metrics=f"127.0.0.1:{port}", routes="nixl") as running:
        with attached(running):
            text = scraped(("127.0.0.1", port))
            info = {line.split()[0] for line in text.splitlines() if line.startswith("kvbridge_engine_info{")}
        assert "kvbridge_engine_attached 1.0" in text and 'kvbridge_receive_slots{state="free"} 8.0' in text
        (said,) = info
        assert all(part in said for part in ('block_tokens="16"', 'dtype="bf16"', 'tp_size="1"', 'model_key="'))
        # What is shown is kept for a moment.
        wait_for(lambda: "kvbridge_engine_info{" not in scraped(("127.0.0.1", port)))


def test_an_idle_agent_sleeps(pair: Bench) -> None:
    pair.works()
    time.sleep(0.5)
    pids = [pair.sender.agent.process.pid, pair.receiver.agent.process.pid]
    before = [cpu_s(pid) for pid in pids]
    began = time.monotonic()
    time.sleep(3)
    used = [after - b for after, b in zip([cpu_s(pid) for pid in pids], before, strict=True)]
    idled = time.monotonic() - began
    assert max(used) < 0.05 * idled, f"CPU seconds in {idled:.1f} s of idling: {used}"


@pytest.mark.proves("G8")
@pytest.mark.parametrize("how", ["the agent stops", "the engine hangs up", "the engine talks nonsense"])
def test_an_agent_that_ends_in_order_says_that_it_has_let_go(tmp_path: Path, how: str) -> None:
    """It is the last that it says. Without that word its engine waits for the end of its process."""
    with agent(tmp_path, "a") as running, attached(running) as engine:
        if how == "the agent stops":
            running.process.terminate()
        elif how == "the engine hangs up":
            engine.client.hang_up("as the test says")
        else:
            os.write(engine.client.fileno(), b"\xff" * 4)
        engine.wait_closed()
        assert engine.heard[-1] == Detached(epoch=1)


def test_a_killed_agent_says_nothing(tmp_path: Path) -> None:
    with agent(tmp_path, "a") as running, attached(running) as engine:
        running.kill()
        engine.wait_closed()
        assert not engine.heard
