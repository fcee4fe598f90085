"""Who may speak to a control over real sockets: those that prove a key on its list, for as long as it is listed."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import zmq
from kvbridge_proto.peer import Drained, Goodbye

from kvbridge.errors import PeerError
from kvbridge.transport.control import Control
from kvbridge.transport.endpoint import with_key
from kvbridge.transport.keys import Keys
from kvbridge.transport.link import Arrived, Lost, Rejected, Settings
from kvbridge.transport.trust import Trust
from kvbridge.transport.zap import MOST_CALLERS, Buckets
from testing.proc import resident_bytes
from testing.waiting import wait_for
from tests.integration.transport.ears import LOOPBACK, QUICK, Ear, cancel, envelope, two

pytestmark = pytest.mark.proves("G23")

Pair = tuple[bytes, bytes]
FLOOD_S = 3.0
FLOOD_BYTES = 192 << 20


def trust(own: Pair, **known: Pair) -> Trust:
    public, secret = (half.decode() for half in own)
    return Trust(Keys(public, secret, {pair[0].decode(): name for name, pair in known.items()}))


def pairs(count: int) -> list[Pair]:
    return [zmq.curve_keypair() for _ in range(count)]


@contextlib.contextmanager
def caller(address: str, own: Pair | None, server: bytes = b"") -> Iterator[zmq.Socket[bytes]]:
    """A DEALER that can say anything, with this key pair."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        if own is not None:
            dealer.curve_publickey, dealer.curve_secretkey = own
            dealer.curve_serverkey = server
        dealer.connect(address)
        yield dealer


async def test_agents_that_know_each_other_speak_and_know_by_which_key() -> None:
    decode, prefill = pairs(2)
    async with two(trust(decode, prefill=prefill), trust(prefill, decode=decode)) as (receiver, heard, sender, ear):
        link = receiver.dial(with_key(sender.address, prefill[0].decode()))
        link.send(cancel("t"))
        arrived = await ear.hear(Arrived)
        assert arrived.link.key == decode[0].decode() and sender.trust.name_of(arrived.link.key) == "decode"
        assert link.key == prefill[0].decode() and receiver.trust.name_of(link.key) == "prefill"
        arrived.link.send(Drained(transfer="t"))
        assert (await heard.hear(Arrived)).envelope.body == Drained(transfer="t")


@pytest.mark.proves("T1")
async def test_who_is_not_on_the_list_is_told_so_and_heard_of_by_its_public_key_alone() -> None:
    known, stranger, server = pairs(3)
    async with two(trust(stranger, sender=server), trust(server, known=known)) as (receiver, heard, sender, ear):
        receiver.dial(sender.address).send(cancel("t"))
        rejected = await ear.hear(Rejected)
        assert rejected.code == "key_not_allowed" and stranger[0].decode() in rejected.text
        assert stranger[1].decode() not in rejected.text
        lost = await heard.hear(Lost)
        assert lost.code == "key_refused" and sender.links == [] == receiver.links


@pytest.mark.proves("T2")
async def test_a_server_that_has_another_key_than_it_should_hears_nothing() -> None:
    """Somebody has taken the address: what we would have said stays with us."""
    ours, server, impostor = pairs(3)
    async with two(trust(ours, sender=server), trust(impostor, anybody=ours), settings=Settings(connect_s=3.0)) as (
        receiver,
        heard,
        sender,
        ear,
    ):
        receiver.dial(with_key(sender.address, server[0].decode())).send(cancel("secret"))
        lost = await heard.hear(Lost)
        assert lost.code == "peer_unreachable" and "handshakes failed" in lost.reason
        await ear.silence(0.2)


@pytest.mark.parametrize("side", ["dialling", "listening"])
async def test_an_agent_with_a_key_and_one_without_do_not_speak(side: str) -> None:
    (own,) = pairs(1)
    keyed, bare = trust(own, fleet=own), Trust()
    sides = (keyed, bare) if side == "dialling" else (bare, keyed)
    async with two(*sides, settings=QUICK) as (receiver, heard, sender, ear):
        receiver.dial(sender.address).send(cancel("t"))
        assert (await heard.hear(Lost)).code in ("peer_unreachable", "peer_disconnected")
        await ear.silence(0.2)
        assert sender.links == []


@pytest.mark.proves("T1")
async def test_raw_and_plain_callers_get_nowhere_and_stop_nobody() -> None:
    own, stranger = pairs(2)
    fleet = trust(own, fleet=own)
    async with two(fleet, fleet) as (receiver, _, sender, ear):
        host, port = sender.address.removeprefix("tcp://").split(":")
        with (
            caller(sender.address, None) as plain,
            caller(sender.address, stranger, stranger[0]) as wrong,
            socket.create_connection((host, int(port))) as raw,
        ):
            raw.sendall(os.urandom(4096))
            for turned_away in (plain, wrong):
                with contextlib.suppress(zmq.Again):  # it knows already
                    turned_away.send(envelope(), zmq.NOBLOCK)
            await ear.silence(0.5)
            receiver.dial(sender.address).send(cancel("t"))
            arrived = await ear.hear(Arrived)
            assert (arrived.envelope.sender, arrived.link.key) == ("receiver", own[0].decode())
            assert sender.rejected == {}


# A list that changes:


async def test_a_key_that_is_added_is_let_in_without_a_restart() -> None:
    server, old, new = pairs(3)
    async with two(trust(new, sender=server), trust(server, decode=old)) as (receiver, heard, sender, ear):
        receiver.dial(sender.address)
        await heard.loses("key_refused")
        assert (await ear.hear(Rejected)).code == "key_not_allowed"
        names = {old[0].decode(): "decode", new[0].decode(): "decode"}
        assert sender.trust.keys is not None
        sender.set_trust(replace(sender.trust, keys=replace(sender.trust.keys, names=names)))
        receiver.dial(sender.address).send(cancel("t"))
        assert (await ear.hear(Arrived)).link.key == new[0].decode()


@pytest.mark.proves("T17")
async def test_a_key_that_is_taken_off_the_list_is_cut_off_at_once_and_stays_so() -> None:
    """Even on the connection that it proved itself on before: what it says there counts for nothing any more."""
    server, good, bad = pairs(3)
    async with Control("sender", LOOPBACK, trust=trust(server, good=good, bad=bad)) as sender:
        ear = Ear(sender)
        with caller(sender.address, bad, server[0]) as dealer, caller(sender.address, good, server[0]) as other:
            dealer.send(envelope(0))
            first = (await ear.hear(Arrived)).link
            other.send(envelope(0, sender="good"))
            kept = (await ear.hear(Arrived)).link
            sender.set_trust(trust(server, good=good))
            await ear.loses("key_revoked", first)
            assert sender.links == [kept]
            dealer.send(envelope(1))
            assert (await ear.hear(Rejected)).code == "key_not_allowed"
            dealer.send(envelope(0, sender="another incarnation"))
            assert (await ear.hear(Rejected)).code == "key_not_allowed"
            other.send(envelope(1, sender="good"))
            assert (await ear.hear(Arrived)).link is kept


async def test_a_dialled_server_whose_key_is_taken_off_the_list_is_lost_too() -> None:
    ours, server, other = pairs(3)
    async with two(trust(ours, sender=server), trust(server, receiver=ours)) as (receiver, heard, sender, ear):
        address = with_key(sender.address, server[0].decode())
        link = receiver.dial(address)
        link.send(cancel("t"))
        await ear.hear(Arrived)
        receiver.set_trust(trust(ours, other=other))
        await heard.loses("key_revoked")
        with pytest.raises(PeerError) as caught:
            receiver.dial(address)
        assert caught.value.code == "peer_not_allowed" and not link.send(Goodbye())


# Floods:


@pytest.mark.proves("T22")
async def test_a_caller_that_connects_too_often_waits_and_nobody_else_does() -> None:
    server, good, loud = pairs(3)
    settings = Settings(handshakes_per_s=1, handshakes_at_once=3)
    known = trust(server, good=good, loud=loud)
    async with Control("sender", LOOPBACK, settings=settings, trust=known) as sender:
        ear, arrived = Ear(sender), 0
        for number in range(8):
            with caller(sender.address, loud, server[0]) as dealer:
                dealer.send(envelope(sender=f"loud{number}"))
                event = await ear.next()
                while isinstance(event, Lost):
                    event = await ear.next()
                arrived += isinstance(event, Arrived)
                assert isinstance(event, Arrived) or event.code == "handshakes_too_many"
        assert 3 <= arrived < 8
        with caller(sender.address, good, server[0]) as dealer:
            dealer.send(envelope(sender="good"))
            while not isinstance(event := await ear.next(), Arrived) or event.envelope.sender != "good":
                pass


async def test_one_caller_has_not_all_the_links() -> None:
    server, good, loud = pairs(3)
    settings = Settings(max_links=8, max_links_of_one=3)
    known = trust(server, good=good, loud=loud)
    async with Control("sender", LOOPBACK, settings=settings, trust=known) as sender:
        ear = Ear(sender)
        with contextlib.ExitStack() as callers:
            for number in range(5):
                callers.enter_context(caller(sender.address, loud, server[0])).send(envelope(sender=f"l{number}"))
                event = await ear.next()
                assert isinstance(event, Arrived) == (number < 3), event
            assert isinstance(event, Rejected) and event.code == "too_many_links"
            callers.enter_context(caller(sender.address, good, server[0])).send(envelope(sender="good"))
            assert (await ear.hear(Arrived)).link.key == good[0].decode()


@pytest.mark.proves("T3")
@pytest.mark.parametrize("kind", ["allowed", "not allowed", "no curve"])
async def test_memory_is_bounded_under_a_flood(kind: str) -> None:
    """4 MiB frames of nonsense as fast as loopback takes them; and an honest agent is served meanwhile."""
    server, good, loud = pairs(3)
    known = trust(server, good=good, loud=loud) if kind == "allowed" else trust(server, good=good)
    async with two(trust(good, sender=server), known) as (receiver, heard, sender, ear):
        flood = caller(sender.address, None if kind == "no curve" else loud, server[0])
        link = receiver.dial(sender.address)
        with flood as dealer:
            before, most, answered, sent = resident_bytes(), 0, 0, 0
            end = time.monotonic() + FLOOD_S
            frame = b"\x91" * (4 << 20)
            link.send(cancel("t"))
            while time.monotonic() < end or answered <= 3:
                with contextlib.suppress(zmq.Again):
                    dealer.send(frame, zmq.NOBLOCK, copy=False)
                    sent += 1
                with contextlib.suppress(AssertionError, TimeoutError):
                    if isinstance(event := await ear.next(0.01), Arrived):
                        event.link.send(Drained(transfer="t"))
                if any(isinstance(event, Arrived) for event in heard._control._events):
                    assert isinstance(await heard.next(), Arrived)
                    answered += 1
                    link.send(cancel("t"))
                assert receiver.links == [link]
                most = max(most, resident_bytes() - before)
            assert (sender.rejected["frame_too_deep"] + sender.rejected["frame_malformed"] > 0) == (kind == "allowed")
            assert most < FLOOD_BYTES, f"{most >> 20} MiB more after {sent} frames"


@pytest.mark.proves("T22")
async def test_memory_is_bounded_while_the_agent_is_too_busy_to_read() -> None:
    server, loud = pairs(2)
    async with Control("sender", LOOPBACK, trust=trust(server, loud=loud)) as sender:
        with caller(sender.address, loud, server[0]) as dealer:
            dealer.send(envelope())
            assert isinstance(await Ear(sender).next(), Arrived)
            before = resident_bytes()
            frame = bytes(1 << 20)
            for _ in range(900):
                dealer.send(frame, copy=False)
            wait_for(lambda: resident_bytes() - before > 8 << 20)  # the loop is held up on purpose
            time.sleep(2)  # noqa: ASYNC251
            more = resident_bytes() - before
            assert more < (160 << 20), f"{more >> 20} MiB more"


def test_buckets_fill_again_and_forget_the_oldest() -> None:
    buckets = Buckets(per_s=2.0, burst=3)
    assert [buckets.take("a", 0.0) for _ in range(4)] == [True, True, True, False]
    assert [buckets.take("a", 0.5), buckets.take("a", 0.5)] == [True, False]
    assert [buckets.take("a", 1e9) for _ in range(4)] == [True, True, True, False]
    assert buckets.take("b", 0.0)
    for number in range(2 * MOST_CALLERS):
        buckets.take(f"c{number}", 1e9)
    assert len(buckets) == MOST_CALLERS
