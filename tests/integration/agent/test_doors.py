"""Bad input at every entrance of an agent: the right side gets a clear error, and everything else goes on."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from kvbridge_proto.common import VersionRange
from kvbridge_proto.engine import Attached, Decline, Detached, Done, Failed, Refused, Rescale, Rescaled, Scales
from msgspec.structs import replace

from tests.integration.agent.harness import Client, SyntheticEngine, agent, is_at_rest, wait_for
from tests.support.oracle import Shape, build, fill, mismatch


class Pair:
    """One sender, one receiver, attached; `works` proves that they still serve."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.sender_agent = stack.enter_context(agent(folder, "p", connect_s=3, silence_s=2))
        self.receiver_agent = stack.enter_context(agent(folder, "d", connect_s=3, silence_s=2))
        self.sender = stack.enter_context(closing(SyntheticEngine(self.sender_agent, build(Shape("nhd")))))
        self.receiver = stack.enter_context(closing(SyntheticEngine(self.receiver_agent, build(Shape("hnd")))))
        self.sender.attach()
        self.receiver.attach()

    def works(self, request: str = "proof") -> None:
        before = self.receiver.held.copy()
        fill(self.sender.held, [5], range(16))
        self.sender.offer(request, [5], 16)
        self.receiver.want(request, self.sender_agent.address, [6], range(16))
        answer = self.receiver.answer(request)
        assert isinstance(answer, Done), answer
        assert not mismatch(self.receiver.held, before, [6], range(16))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(tmp_path, stack)


def _frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (_frame(msgspec.msgpack.encode({"type": "nonsense"})), "message_invalid"),
        (_frame(b"\xc1garbage"), "frame_malformed"),
        (struct.pack(">I", 1 << 31), "frame_too_large"),
        (_frame(msgspec.msgpack.encode({"type": "want", "request": 7})), "message_invalid"),
    ],
)
def test_a_client_that_talks_nonsense_is_told_and_closed(pair: Pair, raw: bytes, code: str) -> None:
    with closing(Client(pair.receiver_agent.socket)) as client:
        client.socket.sendall(raw)
        assert client.wait(Refused).code == code
        client.wait_closed()
    assert f"kvbridge_rejected_messages_total{{code={code}}}" in pair.receiver_agent.status.counters
    pair.works()


def test_a_truncated_frame_ends_with_its_connection(pair: Pair) -> None:
    with closing(Client(pair.receiver_agent.socket)) as client:
        client.socket.sendall(struct.pack(">I", 1000) + b"half")
    pair.works()


def test_garbage_on_the_control_port_is_dropped(pair: Pair) -> None:
    host, port = pair.sender_agent.address.removeprefix("tcp://").split(":")
    for noise in (os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64):
        with socket.create_connection((host, int(port)), timeout=5) as raw:
            raw.sendall(noise)
    pair.works()


def test_a_second_engine_is_refused_by_name(pair: Pair) -> None:
    with closing(SyntheticEngine(pair.receiver_agent, build(Shape("hnd")))) as second:
        refused = second.attach()
        assert isinstance(refused, Refused) and refused.code == "engine_present"
        assert f"pid {os.getpid()}" in refused.reasons[0]
        second.want("r", pair.sender_agent.address, [1], range(4))
        assert second.client.wait(Refused, request="r").code == "not_attached"
    pair.works()


def test_a_plane_outside_its_region_is_refused_by_name(tmp_path: Path) -> None:
    with agent(tmp_path, "a") as running, closing(SyntheticEngine(running, build(Shape("nhd")))) as engine:
        planes = (replace(engine.pool.planes[0], offset=engine.pool.regions[0].size_bytes), *engine.pool.planes[1:])
        refused = engine.attach(pool=replace(engine.pool, planes=planes))
        assert isinstance(refused, Refused), refused
        assert str(engine.pool.regions[0].size_bytes) in str(refused.reasons)
        short = replace(
            engine.pool, regions=tuple(replace(r, size_bytes=r.size_bytes * 2) for r in engine.pool.regions)
        )
        refused = engine.attach(pool=short)
        assert isinstance(refused, Refused) and refused.code == "region_too_small", refused
        refused = engine.attach(versions=VersionRange(9, 9))
        assert isinstance(refused, Refused) and refused.code == "version_mismatch"
        assert engine.attach().epoch == 1


def test_blocks_that_cannot_be_fail_the_request_alone(pair: Pair) -> None:
    address = pair.sender_agent.address
    pair.receiver.want("range", address, [999], range(16))
    failed = pair.receiver.answer("range")
    assert isinstance(failed, Failed) and failed.code == "block_out_of_range" and "999" in failed.reason
    pair.receiver.want("few", address, [1], range(16), end_token=100)
    failed = pair.receiver.answer("few")
    assert isinstance(failed, Failed) and failed.code == "blocks_too_few" and "100" in failed.reason
    pair.sender.offer("range", [999], 16)
    released = pair.sender.released("range")
    assert released.code == "block_out_of_range" and "999" in released.reason
    pair.sender.offer("few", [1], 100)
    assert pair.sender.released("few").code == "blocks_too_few"
    pair.works()


def refusal(engine: SyntheticEngine, message: Rescale | Decline) -> tuple[str, str]:
    about = f"{'rescale' if isinstance(message, Rescale) else 'decline'} {message.revision}"
    engine.client.send(message)
    refused = engine.client.wait(Refused, request=about)
    return refused.code, " ".join(refused.reasons)


def test_rescale_of_an_unknown_plane_is_refused(pair: Pair) -> None:
    code, reason = refusal(pair.receiver, Rescale(revision=3, scales=(Scales(99, "k", (0.5,)),)))
    assert code == "scales_unknown_plane" and "layer 99 k" in reason
    pair.works()


def test_scales_that_cannot_be_are_refused_with_their_value(pair: Pair) -> None:
    code, reason = refusal(pair.receiver, Rescale(revision=3, scales=(Scales(0, "k", (-0.5,)),)))
    assert code == "bad_pool" and "-0.5" in reason
    pair.works()


def test_a_decline_of_what_nobody_asked_is_refused(pair: Pair) -> None:
    code, reason = refusal(pair.receiver, Decline(revision=2, reason="no"))
    assert code == "stale_revision" and "2" in reason
    pair.works()


def test_rows_after_new_scales_are_converted_under_them(tmp_path: Path) -> None:
    """The sender's numbers are fp8 under one scale, then under another; the receiver's bf16 shows which was used."""
    with ExitStack() as stack:
        agents = [stack.enter_context(agent(tmp_path, name)) for name in ("p", "d")]
        narrow = build(Shape("nhd", codec="fp8_e4m3"))
        sender = stack.enter_context(closing(SyntheticEngine(agents[0], narrow)))
        receiver = stack.enter_context(closing(SyntheticEngine(agents[1], build(Shape("nhd")))))
        assert [engine.attach().epoch for engine in (sender, receiver)] == [1, 1]
        for memory in sender.held.memory:
            memory[:] = 0x38  # 1.0
        for revision, scale in enumerate((0.5, 4.0), 1):
            planes = {(plane.layer, plane.part) for plane in sender.pool.planes}
            sender.client.send(
                Rescale(revision=revision, scales=tuple(Scales(layer, part, (scale,)) for layer, part in planes))
            )
            assert sender.client.wait(Rescaled) == Rescaled(revision=revision, epoch=1 + revision)
            sender.offer(f"r{revision}", [1], 16)
            receiver.want(f"r{revision}", agents[0].address, [1], range(16))
            answer = receiver.answer(f"r{revision}")
            assert isinstance(answer, Done), answer
            assert sender.released(f"r{revision}").code == ""
            values = np.concatenate([memory.view(np.uint16) for memory in receiver.held.memory]).astype(np.uint32) << 16
            written = 2 * 2 * 4 * 16 * 8  # layers, parts, heads, tokens, width
            assert np.count_nonzero(values.view(np.float32) == scale) == written
        assert refusal(sender, Rescale(revision=2, scales=()))[0] == "stale_revision"


def test_a_peer_of_another_model_is_refused_with_both_values(tmp_path: Path) -> None:
    with ExitStack() as stack:
        agents = [stack.enter_context(agent(tmp_path, name)) for name in ("p", "d")]
        sender = stack.enter_context(closing(SyntheticEngine(agents[0], build(Shape("nhd", key_width=64)))))
        receiver = stack.enter_context(closing(SyntheticEngine(agents[1], build(Shape("nhd", key_width=96)))))
        sender.attach()
        receiver.attach()
        receiver.want("r", agents[0].address, [1], range(16))
        failed = receiver.answer("r")
        assert isinstance(failed, Failed) and failed.code == "incompatible"
        assert "64" in failed.reason and "96" in failed.reason


def test_an_agent_that_is_not_there_fails_the_want_soon(pair: Pair) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = time.monotonic()
    pair.receiver.want("r", f"tcp://127.0.0.1:{port}", [1], range(16))
    failed = pair.receiver.answer("r")
    assert isinstance(failed, Failed) and failed.code == "peer_unreachable" and str(port) in failed.reason
    assert time.monotonic() - started < 6
    pair.receiver.want("s", "tcp://not an address", [1], range(16))
    failed = pair.receiver.answer("s")
    assert isinstance(failed, Failed), failed
    pair.works()


def test_a_sender_that_dies_fails_the_want_and_comes_back_as_another(pair: Pair, tmp_path: Path) -> None:
    pair.works("first")
    address = pair.sender_agent.address
    pair.receiver.want("r", address, [1], range(16))
    time.sleep(0.3)
    pair.sender_agent.kill()
    failed = pair.receiver.answer("r")
    assert isinstance(failed, Failed) and failed.code == "peer_lost", failed
    with agent(tmp_path, "p", listen=address) as again, closing(SyntheticEngine(again, build(Shape("nhd")))) as engine:
        engine.attach()
        pair.sender_agent, pair.sender = again, engine
        pair.works("second")
        assert is_at_rest(pair.receiver_agent.status)


def test_a_stalled_sender_is_noticed(pair: Pair) -> None:
    pair.works("first")
    pair.receiver.want("r", pair.sender_agent.address, [1], range(16))
    time.sleep(0.3)
    os.kill(pair.sender_agent.process.pid, 19)
    failed = pair.receiver.answer("r", seconds=12)
    assert isinstance(failed, Failed) and failed.code == "peer_lost", failed
    os.kill(pair.sender_agent.process.pid, 18)
    time.sleep(1.0)
    pair.works("again")
    assert is_at_rest(pair.receiver_agent.status)


def test_while_an_agent_stands_still_its_peers_are_not_late(pair: Pair) -> None:
    """The answer came while it did: by its clock alone that was too late."""
    sender, receiver, address = pair.sender_agent.process, pair.receiver_agent.process, pair.sender_agent.address
    fill(pair.sender.held, [5], range(16))
    pair.sender.offer("r", [5], 16)
    sender.send_signal(signal.SIGSTOP)
    pair.receiver.want("r", address, [6], range(16))
    time.sleep(0.5)  # it has said Hello
    receiver.send_signal(signal.SIGSTOP)
    sender.send_signal(signal.SIGCONT)
    time.sleep(4.0)  # longer than connect_s and silence_s
    receiver.send_signal(signal.SIGCONT)
    answer = pair.receiver.answer("r")
    assert isinstance(answer, Done), answer


def test_an_engine_that_dies_frees_its_memory_and_another_may_come(pair: Pair) -> None:
    pair.works("first")
    pid = pair.receiver_agent.process.pid
    mapped = _mapped(pid)
    assert mapped > 0
    pair.receiver.want("r", pair.sender_agent.address, [1], range(16))
    pair.receiver.close()
    deadline = time.monotonic() + 1.0
    while _mapped(pid):
        assert time.monotonic() < deadline, "the dead engine's memory is still mapped after a second"
        time.sleep(0.02)
    with closing(SyntheticEngine(pair.receiver_agent, build(Shape("hnd")))) as engine:
        assert engine.attach().epoch == 2
        pair.receiver = engine
        pair.works("second")


def _mapped(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("kvbridge-test-pool")


def scraped(port: int) -> str:
    return str(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode())


def test_metrics_are_served_on_loopback(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with agent(tmp_path, "a", metrics=f"127.0.0.1:{port}", routes="nixl") as running:
        with closing(SyntheticEngine(running, build(Shape("nhd")))) as engine:
            engine.attach()
            text = scraped(port)
            info = {line.split()[0] for line in text.splitlines() if line.startswith("kvbridge_engine_info{")}
        assert "kvbridge_engine_attached 1.0" in text and 'kvbridge_receive_slots{state="free"} 8.0' in text
        (said,) = info
        assert all(part in said for part in ('block_tokens="16"', 'dtype="bf16"', 'tp_size="1"', 'model_key="'))
        wait_for(lambda: "kvbridge_engine_info{" not in scraped(port))  # what is shown is kept for a moment


def test_an_idle_agent_sleeps(pair: Pair) -> None:
    pair.works()
    time.sleep(0.5)
    pids = [pair.sender_agent.process.pid, pair.receiver_agent.process.pid]
    before = [_cpu_s(pid) for pid in pids]
    time.sleep(3)
    used = [after - b for after, b in zip([_cpu_s(pid) for pid in pids], before, strict=True)]
    assert max(used) < 0.15, f"CPU seconds in 3 s of idling: {used}"


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("how", ["the agent stops", "the engine hangs up", "the engine talks nonsense"])
def test_an_agent_that_ends_in_order_says_that_it_has_let_go(tmp_path: Path, how: str) -> None:
    """It is the last that it says. Without that word its engine waits for the end of its process."""
    with agent(tmp_path, "a") as running, closing(SyntheticEngine(running, build(Shape()))) as engine:
        attached = engine.attach()
        assert isinstance(attached, Attached)
        if how == "the agent stops":
            running.process.terminate()
        elif how == "the engine hangs up":
            engine.client.socket.shutdown(socket.SHUT_WR)
        else:
            engine.client.socket.send(b"\xff" * 4)
        engine.client.wait_closed()
        assert engine.client.heard[-1] == Detached(epoch=attached.epoch)


def test_a_killed_agent_says_nothing(tmp_path: Path) -> None:
    with agent(tmp_path, "a") as running, closing(SyntheticEngine(running, build(Shape()))) as engine:
        engine.attach()
        running.kill()
        engine.client.wait_closed()
        assert not engine.client.heard
