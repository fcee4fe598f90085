"""What a control does with what is not a message for it, and where it listens and dials at all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket

import pytest
import zmq
from kvbridge_proto.codec import encode
from kvbridge_proto.engine import Detach
from kvbridge_proto.peer import Drained, Ping

from kvbridge.errors import OperatorError, PeerError
from kvbridge.transport.control import Arrived, Control, Link, Lost, Rejected, Settings
from tests.integration.transport.ears import LOOPBACK, Ear, Run, cancel, envelope, stranger, two

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
