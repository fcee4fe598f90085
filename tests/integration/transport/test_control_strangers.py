"""What a control does with frames that are no messages for it, and where it may listen and dial."""

from __future__ import annotations

import asyncio
import contextlib
import os

import pytest
import zmq
from kvbridge_proto.codec import encode
from kvbridge_proto.engine import Detach
from kvbridge_proto.peer import Body, Drained, Goodbye, Hold, Ping, Refuse

from kvbridge.errors import OperatorError
from kvbridge.transport.control import Control
from kvbridge.transport.events import Arrived, Rejected, Settings
from kvbridge.transport.link import Link
from testing.proc import descriptors
from tests.integration.transport.ears import LOOPBACK, Ear, cancel, envelope, stranger, two

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
        ([envelope(version=7, body=Hold(rendezvous_ids=("r",)))], "version_unknown"),
        ([envelope(receiver="an old incarnation")], "other_receiver"),
        ([envelope(sender="")], "other_receiver"),
        ([envelope(number=3)], "messages_lost"),
    ],
)
async def test_nonsense_is_counted_and_dropped_and_stops_nobody(frames: list[bytes], code: str) -> None:
    async with two() as (receiver, receiver_ear, sender, sender_ear):
        receiver.dial(sender.address).send(cancel("before"))
        honest = (await sender_ear.hear(Arrived)).link
        with stranger(sender.address) as say:
            say(*frames)
            rejected = await sender_ear.hear(Rejected)
            assert (rejected.link, rejected.code) == (None, code) and sender.rejected == {code: 1}
        assert honest.send(Drained(transfer="before"))
        await receiver_ear.hear(Arrived)


@pytest.mark.parametrize("body", [cancel("t"), Drained(transfer="t"), Refuse(code="c", reasons=()), Goodbye()])
async def test_what_needs_no_session_is_heard_in_any_version(body: Body) -> None:
    """An agent of another version is refused by name, and confirms what its predecessor was asked."""
    async with Control("sender", LOOPBACK) as sender:
        with stranger(sender.address) as say:
            say(envelope(version=7, body=body))
            assert (await Ear(sender).hear(Arrived)).envelope.body == body


async def test_a_huge_frame_costs_the_stranger_its_connection_only() -> None:
    async with two() as (receiver, _, sender, sender_ear):
        with stranger(sender.address) as say:
            say(b"\0" * (5 << 20))
            await sender_ear.silence(0.5)
        receiver.dial(sender.address).send(cancel("t"))
        await sender_ear.hear(Arrived)


async def test_a_gap_or_another_incarnation_on_one_connection_ends_its_link() -> None:
    async with Control("sender", LOOPBACK) as sender:
        ear = Ear(sender)
        with stranger(sender.address) as say:
            say(envelope(0))
            first = (await ear.hear(Arrived)).link
            say(envelope(0, sender="restarted"))
            await ear.loses("peer_restarted", first)
            second = (await ear.hear(Arrived)).link
            assert second.peer_incarnation == "restarted" and sender.links == [second]
            say(envelope(2, sender="restarted"))
            lost = await ear.loses("messages_lost", second)
            assert "number: message 2 came after message 0: those between are lost" in lost.reason
            say(envelope(3, sender="restarted"))
            assert (await ear.hear(Rejected)).code == "messages_lost"


async def test_bounds_how_many_strangers_have_links() -> None:
    async with Control("sender", LOOPBACK, settings=Settings(max_links=2)) as sender:
        ear = Ear(sender)
        with contextlib.ExitStack() as strangers:
            for number in range(3):
                strangers.enter_context(stranger(sender.address))(envelope(sender=f"{number}"))
                event = await ear.next()
                assert isinstance(event, Arrived) == (number < 2)
            assert isinstance(event, Rejected) and event.code == "too_many_links"


async def test_a_strangers_ping_is_answered() -> None:
    async with Control("sender", LOOPBACK) as sender:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(sender.address)
            dealer.send(envelope(body=Ping(number=7)))
            for _ in range(200):
                if dealer.poll(0):
                    break
                await asyncio.sleep(0.01)
            assert b"pong" in dealer.recv(zmq.NOBLOCK)


# Where it listens and dials:


@pytest.mark.parametrize(
    ("listen", "code"),
    [
        *(("tcp://*:7700", "wildcard_listen"), ("tcp://192.0.2.1:7700", "unauthenticated_listen")),
        *((address, "bad_address") for address in ("tcp://127.0.0.1", "tcp://127.0.0.1:99999", "ipc:///tmp/x", "")),
    ],
)
async def test_refuses_to_listen_where_it_should_not(listen: str, code: str) -> None:
    with pytest.raises(OperatorError) as raised:
        async with Control("sender", listen):
            pass
    assert raised.value.code == code


async def test_names_a_port_that_is_taken_and_knows_the_one_it_got() -> None:
    async with Control("first", LOOPBACK) as first:
        assert first.address.startswith("tcp://127.0.0.1:") and not first.address.endswith(":0")
        with pytest.raises(OperatorError, match="in use"):
            async with Control("second", first.address):
                pass


async def test_leaves_no_descriptors_behind() -> None:
    before = descriptors()
    for _ in range(3):
        async with two() as (receiver, _, sender, sender_ear):
            link: Link = receiver.dial(sender.address)
            link.send(cancel("t"))
            await sender_ear.hear(Arrived)
    assert descriptors() <= before
