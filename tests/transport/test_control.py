"""Links between agents over real ZeroMQ: in order or lost, whoever dies, stops, restarts or talks nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq
from kvbridge_proto.codec import encode
from kvbridge_proto.engine import Detach
from kvbridge_proto.peer import Body, Cancel, Drained, Envelope, Goodbye, Ping

from kvbridge.errors import OperatorError, PeerError
from kvbridge.transport.control import Arrived, Control, Event, Link, Lost, Rejected, Settings

ROOT = Path(__file__).parents[2]
LOOPBACK = "tcp://127.0.0.1:0"
QUICK = Settings(connect_s=0.6, ping_s=0.2, silence_s=0.8)
Run = Callable[[Coroutine[Any, Any, None]], None]
E = TypeVar("E", bound=Event)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    runner = asyncio.run if request.param == "asyncio" else pytest.importorskip("uvloop").run

    def bounded(story: Coroutine[Any, Any, None]) -> None:
        runner(asyncio.wait_for(story, 60))

    return bounded


class Ear:
    """Reads one control's events."""

    def __init__(self, control: Control) -> None:
        self._control = control

    async def next(self, within_s: float = 10.0) -> Event:
        async with asyncio.timeout(within_s):
            async for event in self._control.events():
                return event
        raise AssertionError("the control closed")

    async def hear(self, kind: type[E], within_s: float = 10.0) -> E:
        """The next event, which must be of this kind."""
        event = await self.next(within_s)
        assert isinstance(event, kind), event
        return event

    async def silence(self, for_s: float) -> None:
        with pytest.raises(TimeoutError):
            raise AssertionError(await self.next(for_s))


@contextlib.asynccontextmanager
async def two(settings: Settings | None = None) -> AsyncIterator[tuple[Control, Ear, Control, Ear]]:
    async with Control("sink", settings=settings) as sink, Control("source", LOOPBACK, settings=settings) as source:
        yield sink, Ear(sink), source, Ear(source)


@contextlib.contextmanager
def remote(boot: str, listen: str = LOOPBACK, dial: str = "") -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A `control_peer.py`; ended, stopped or not, on leaving."""
    command = [sys.executable, "-m", "tests.transport.control_peer", boot, listen, *([dial] if dial else [])]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        yield child, child.stdout.readline().decode().strip()
    finally:
        child.kill()
        child.wait(10)


@contextlib.contextmanager
def stranger(address: str) -> Iterator[Callable[..., None]]:
    """A socket that can say anything to a control."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 1000
        dealer.connect(address)
        yield lambda *frames: dealer.send_multipart(frames)


def envelope(number: int = 0, body: Body | None = None, **other: Any) -> bytes:
    fields = {"version": 1, "sender": "stranger", "receiver": "", "number": number, "body": body or cancel("t")}
    return encode(Envelope(**{**fields, **other}))


def cancel(transfer: str) -> Cancel:
    return Cancel(transfer=transfer, code="c")


# What a link delivers:


def test_carries_messages_both_ways_in_order(run: Run) -> None:
    async def story() -> None:
        async with two() as (sink, sink_ear, source, source_ear):
            link = sink.dial(source.address)
            assert sink.dial(source.address) is link
            for number in range(100):
                assert link.send(cancel(f"{number}"))
            for number in range(100):
                arrived = await source_ear.hear(Arrived)
                assert arrived.envelope.body == cancel(f"{number}") and arrived.link.peer_boot == "sink"
                assert arrived.link.send(Drained(transfer=f"{number}"))
            for number in range(100):
                answer = await sink_ear.hear(Arrived)
                assert answer.link is link and answer.envelope.body == Drained(transfer=f"{number}")
            assert answer.envelope.receiver == "sink" and link.peer_boot == "source"

    run(story())


def test_a_burst_larger_than_every_queue_waits_for_the_reader(run: Run) -> None:
    async def story() -> None:
        async with two() as (sink, _, source, source_ear):
            link = sink.dial(source.address)
            for number in range(20_000):
                assert link.send(cancel(f"{number}"))
            await asyncio.sleep(0.5)  # nobody reads
            for number in range(20_000):
                assert (await source_ear.hear(Arrived)).envelope.body == cancel(f"{number}")

    run(story())


def test_an_idle_link_stays_up_by_its_pings_alone(run: Run) -> None:
    async def story() -> None:
        async with two(Settings(ping_s=0.2, silence_s=1.5)) as (sink, sink_ear, source, source_ear):
            link = sink.dial(source.address)
            await asyncio.gather(sink_ear.silence(3), source_ear.silence(3))
            assert link.is_up and link.peer_boot == "source" and len(source.links) == 1

    run(story())


def test_messages_wait_for_an_agent_that_starts_later(run: Run) -> None:
    async def story() -> None:
        address = f"tcp://127.0.0.1:{free_port()}"
        async with Control("sink") as sink:
            sink.dial(address).send(cancel("early"))
            await asyncio.sleep(0.3)
            async with Control("source", address) as source:
                assert (await Ear(source).hear(Arrived)).envelope.body == cancel("early")

    run(story())


def test_a_goodbye_arrives_before_the_end_of_a_closed_link(run: Run) -> None:
    async def story() -> None:
        async with two() as (sink, sink_ear, source, source_ear):
            link = sink.dial(source.address)
            link.send(cancel("t"))
            accepted = (await source_ear.hear(Arrived)).link
            link.send(Goodbye(reason="done"))
            link.close()
            assert (await source_ear.hear(Arrived)).envelope.body == Goodbye(reason="done")
            lost = await source_ear.hear(Lost)
            assert lost.link is accepted and lost.code == "peer_disconnected"
            await sink_ear.silence(0.3)
            assert not link.send(cancel("late")) and sink.dial(source.address) is not link

    run(story())


# How a link is lost:


def test_nobody_at_the_address_is_unreachable_within_the_deadline(run: Run) -> None:
    async def story() -> None:
        async with Control("sink", settings=QUICK) as sink:
            link, begin = sink.dial(f"tcp://127.0.0.1:{free_port()}"), time.monotonic()
            assert link.send(cancel("t"))
            lost = await Ear(sink).hear(Lost)
            assert (lost.link, lost.code) == (
                link,
                "peer_unreachable",
            ) and time.monotonic() - begin < Settings().connect_s
            assert not link.send(cancel("dropped")) and sink.links == []

    run(story())


def test_a_server_of_another_kind_is_unreachable(run: Run) -> None:
    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            async with Control("sink", settings=QUICK) as sink:
                sink.dial(f"tcp://127.0.0.1:{mute.getsockname()[1]}").send(cancel("t"))
                assert (await Ear(sink).hear(Lost)).code == "peer_unreachable"

    run(story())


def test_a_killed_peer_is_lost_at_once_on_the_dialling_side(run: Run) -> None:
    async def story() -> None:
        with remote("source") as (child, address):
            async with Control("sink") as sink:
                ear, link = Ear(sink), sink.dial(address)
                link.send(cancel("t"))
                assert (await ear.hear(Arrived)).envelope.body == Drained(transfer="t")
                child.kill()
                lost = await ear.hear(Lost)
                assert (lost.link, lost.code) == (link, "peer_disconnected")

    run(story())


def test_a_killed_peer_is_lost_soon_on_the_listening_side_and_no_other_link_with_it(run: Run) -> None:
    async def story() -> None:
        async with two() as (sink, sink_ear, source, source_ear):
            sink.dial(source.address).send(cancel("bystander"))
            bystander = (await source_ear.hear(Arrived)).link
            with remote("doomed", dial=source.address) as (child, _):
                arrived = await source_ear.hear(Arrived)
                assert arrived.link.peer_boot == "doomed"
                child.kill()
                lost = await source_ear.hear(Lost)
                assert (lost.link, lost.code) == (arrived.link, "peer_disconnected")
            assert bystander.send(Drained(transfer="bystander")) and source.links == [bystander]
            await sink_ear.hear(Arrived)

    run(story())


def test_a_peer_restarted_on_its_address_is_a_new_link_with_a_new_boot(run: Run) -> None:
    async def story() -> None:
        address = f"tcp://127.0.0.1:{free_port()}"
        async with Control("sink") as sink:
            ear = Ear(sink)
            with remote("first", address):
                old = sink.dial(address)
                old.send(cancel("t"))
                assert (await ear.hear(Arrived)).envelope.sender == "first"
            with remote("second", address):
                assert (await ear.hear(Lost)).link is old
                assert not old.send(cancel("ghost"))
                new = sink.dial(address)
                assert new is not old and new.send(cancel("u"))
                arrived = await ear.hear(Arrived)
                assert (arrived.link, arrived.envelope.sender) == (new, "second")
                assert arrived.envelope.body == Drained(transfer="u")
                await ear.silence(0.3)

    run(story())


@pytest.mark.parametrize("stopped_side", ["listening", "dialling"])
def test_a_stopped_peer_is_lost_by_its_silence(run: Run, stopped_side: str) -> None:
    async def story() -> None:
        async with Control("ours", LOOPBACK, settings=QUICK) as ours:
            ear = Ear(ours)
            dial = ours.address if stopped_side == "dialling" else ""
            with remote("theirs", dial=dial) as (child, address):
                if stopped_side == "listening":
                    ours.dial(address).send(cancel("t"))
                link = (await ear.hear(Arrived)).link
                os.kill(child.pid, signal.SIGSTOP)
                begin = time.monotonic()
                lost = await ear.hear(Lost)
                assert (lost.link, lost.code) == (
                    link,
                    "peer_silent",
                ) and time.monotonic() - begin < Settings().silence_s
                os.kill(child.pid, signal.SIGCONT)  # its late messages are of a link that ended
                assert not link.send(cancel("late"))

    run(story())


def test_our_own_absence_is_not_taken_for_the_peers_silence(run: Run) -> None:
    async def story() -> None:
        async with two(QUICK) as (sink, sink_ear, source, source_ear):
            sink.dial(source.address).send(cancel("t"))
            await source_ear.hear(Arrived)
            time.sleep(1.5)  # noqa: ASYNC251  the loop is held up on purpose
            await asyncio.gather(sink_ear.silence(0.7), source_ear.silence(0.7))

    run(story())


def test_a_peer_that_does_not_read_is_lost_when_the_queue_is_full(run: Run) -> None:
    async def story() -> None:
        settings = Settings(queue_bytes=1 << 20, silence_s=60)
        with remote("source") as (child, address):
            async with Control("sink", settings=settings) as sink:
                ear, link = Ear(sink), sink.dial(address)
                link.send(cancel("t"))
                await ear.hear(Arrived)
                os.kill(child.pid, signal.SIGSTOP)
                large = Cancel(transfer="t", code="c", reason="x" * 1000)
                while link.send(large):  # noqa: ASYNC110
                    await asyncio.sleep(0)
                assert (await ear.hear(Lost)).code == "peer_not_reading"

    run(story())


def test_a_message_too_large_to_be_taken_ends_the_link(run: Run) -> None:
    async def story() -> None:
        async with two(Settings(frame_bytes=500)) as (sink, sink_ear, source, _):
            link = sink.dial(source.address)
            assert not link.send(Cancel(transfer="t", code="c", reason="x" * 1000))
            lost = await sink_ear.hear(Lost)
            assert lost.code == "frame_too_large" and "limit 500" in lost.reason

    run(story())


# What is not a message for us:


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([os.urandom(4096)], "frame_malformed"),
        ([b""], "frame_malformed"),
        ([b"\x91" * 2000], "frame_too_deep"),
        ([encode(Detach())], "message_invalid"),
        ([envelope()[:-3]], "frame_malformed"),
        ([envelope(), envelope()], "frame_malformed"),
        ([b"x" * 1000] * 5000, "frame_malformed"),
        ([envelope(version=7)], "version_unknown"),
        ([envelope(receiver="an old boot")], "other_receiver"),
        ([envelope(sender="")], "other_receiver"),
        ([envelope(number=3)], "messages_lost"),
    ],
)
def test_nonsense_is_counted_and_dropped_and_stops_nobody(run: Run, frames: list[bytes], code: str) -> None:
    async def story() -> None:
        async with two() as (sink, sink_ear, source, source_ear):
            sink.dial(source.address).send(cancel("before"))
            honest = (await source_ear.hear(Arrived)).link
            with stranger(source.address) as say:
                say(*frames)
                rejected = await source_ear.hear(Rejected)
                assert (rejected.link, rejected.code) == (None, code) and source.rejected == {code: 1}
            assert honest.send(Drained(transfer="before"))
            await sink_ear.hear(Arrived)

    run(story())


def test_a_huge_frame_costs_the_stranger_its_connection_only(run: Run) -> None:
    async def story() -> None:
        async with two() as (sink, _, source, source_ear):
            with stranger(source.address) as say:
                say(b"\0" * (5 << 20))
                await source_ear.silence(0.5)
            sink.dial(source.address).send(cancel("t"))
            await source_ear.hear(Arrived)

    run(story())


@pytest.mark.parametrize("seed", range(5))
def test_raw_bytes_on_the_port_are_at_most_counted(run: Run, seed: int) -> None:
    async def story() -> None:
        async with two() as (sink, _, source, source_ear):
            host, port = source.address.removeprefix("tcp://").split(":")
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(random.Random(seed).randbytes(4096))  # ZeroMQ reads some of it as its version 1
                await asyncio.sleep(0.2)
            sink.dial(source.address).send(cancel("t"))
            while isinstance(event := await source_ear.next(), Rejected):
                pass
            assert isinstance(event, Arrived) and event.link.peer_boot == "sink"

    run(story())


def test_a_gap_or_another_boot_on_one_connection_ends_its_link(run: Run) -> None:
    async def story() -> None:
        async with Control("source", LOOPBACK) as source:
            ear = Ear(source)
            with stranger(source.address) as say:
                say(envelope(0))
                first = (await ear.hear(Arrived)).link
                say(envelope(0, sender="restarted"))
                lost = await ear.hear(Lost)
                assert (lost.link, lost.code) == (first, "peer_restarted")
                second = (await ear.hear(Arrived)).link
                assert second.peer_boot == "restarted" and source.links == [second]
                say(envelope(2, sender="restarted"))
                lost = await ear.hear(Lost)
                assert (lost.link, lost.code) == (second, "messages_lost")
                assert "number: got 2, expected 1" in lost.reason
                say(envelope(3, sender="restarted"))
                assert (await ear.hear(Rejected)).code == "messages_lost"

    run(story())


def test_bounds_how_many_strangers_have_links(run: Run) -> None:
    async def story() -> None:
        async with Control("source", LOOPBACK, settings=Settings(max_links=2)) as source:
            ear = Ear(source)
            with contextlib.ExitStack() as strangers:
                for number in range(3):
                    strangers.enter_context(stranger(source.address))(envelope(sender=f"{number}"))
                    event = await ear.next()
                    assert isinstance(event, Arrived) == (number < 2)
                assert isinstance(event, Rejected) and event.code == "too_many_links"

    run(story())


def test_a_strangers_ping_is_answered(run: Run) -> None:
    async def story() -> None:
        async with Control("source", LOOPBACK) as source:
            with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                dealer.connect(source.address)
                dealer.send(envelope(body=Ping(number=7)))
                for _ in range(200):
                    if dealer.poll(0):
                        break
                    await asyncio.sleep(0.01)
                assert b"pong" in dealer.recv(zmq.NOBLOCK)

    run(story())


# Where it listens and dials:


@pytest.mark.parametrize(
    ("listen", "code"),
    [
        ("tcp://*:7700", "wildcard_listen"),
        ("tcp://0.0.0.0:7700", "wildcard_listen"),
        ("tcp://0:7700", "wildcard_listen"),
        ("tcp://[::]:7700", "wildcard_listen"),
        ("tcp://127.0.0.1", "bad_address"),
        ("tcp://127.0.0.1:99999", "bad_address"),
        ("ipc:///tmp/x", "bad_address"),
        ("", "bad_address"),
        ("tcp://192.0.2.1:7700", "unauthenticated_listen"),
        ("tcp://127.0.0.77.example:7700", "unauthenticated_listen"),
    ],
)
def test_refuses_to_listen_where_it_should_not(run: Run, listen: str, code: str) -> None:
    async def story() -> None:
        async with Control("source", listen):
            raise AssertionError("it listens")

    with pytest.raises(OperatorError) as raised:
        run(story())
    assert raised.value.code == code


def test_names_a_port_that_is_taken_and_knows_the_one_it_got(run: Run) -> None:
    async def story() -> None:
        async with Control("first", LOOPBACK) as first:
            assert first.address.startswith("tcp://127.0.0.1:") and not first.address.endswith(":0")
            with pytest.raises(OperatorError, match="in use"):
                async with Control("second", first.address):
                    pass

    run(story())


@pytest.mark.parametrize(
    "address",
    [
        "tcp://*:1",
        "tcp://0.0.0.0:1",
        "tcp://h:0",
        "tcp://h",
        "ipc:///x",
        "tcp://a:1;b:2",
        "tcp://h:1\n",
        "inproc://x",
        "",
    ],
)
def test_dials_nothing_but_one_hosts_port(run: Run, address: str) -> None:
    async def story() -> None:
        async with Control("sink") as sink:
            with pytest.raises(PeerError) as raised:
                sink.dial(address)
            assert raised.value.code == "bad_address" and sink.links == []

    run(story())


def test_leaves_no_descriptors_behind(run: Run) -> None:
    async def story() -> None:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            async with two() as (sink, _, source, source_ear):
                link: Link = sink.dial(source.address)
                link.send(cancel("t"))
                await source_ear.hear(Arrived)
        assert len(os.listdir("/proc/self/fd")) <= before

    run(story())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port
