"""Who may speak to a control over real sockets: those that prove a key on its list, and only as long as it is there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
import zmq
from kvbridge_proto.peer import Drained, Goodbye

from kvbridge.errors import PeerError
from kvbridge.transport.control import Control
from kvbridge.transport.endpoint import with_key
from kvbridge.transport.events import Arrived, Lost, Rejected, Settings
from kvbridge.transport.keys import Keys
from kvbridge.transport.trust import Trust
from kvbridge.transport.zap import MOST_CALLERS, Buckets
from tests.integration.transport.ears import LOOPBACK, QUICK, Ear, Run, cancel, envelope

Pair = tuple[bytes, bytes]
FLOOD_S = 3.0
FLOOD_BYTES = 192 << 20


def trust(own: Pair, **known: Pair) -> Trust:
    public, secret = (half.decode() for half in own)
    return Trust(Keys(public, secret, {pair[0].decode(): name for name, pair in known.items()}))


def pairs(count: int) -> list[Pair]:
    return [zmq.curve_keypair() for _ in range(count)]


@contextlib.asynccontextmanager
async def two(
    sink: Trust, source: Trust, settings: Settings | None = None
) -> AsyncIterator[tuple[Control, Ear, Control, Ear]]:
    async with (
        Control("sink", settings=settings, trust=sink) as dialling,
        Control("source", LOOPBACK, settings=settings, trust=source) as listening,
    ):
        yield dialling, Ear(dialling), listening, Ear(listening)


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


def test_agents_that_know_each_other_speak_and_know_by_which_key(run: Run) -> None:
    async def story() -> None:
        decode, prefill = pairs(2)
        async with two(trust(decode, prefill=prefill), trust(prefill, decode=decode)) as (sink, heard, source, ear):
            link = sink.dial(with_key(source.address, prefill[0].decode()))
            link.send(cancel("t"))
            arrived = await ear.hear(Arrived)
            assert arrived.link.key == decode[0].decode() and source.trust.name_of(arrived.link.key) == "decode"
            assert link.key == prefill[0].decode() and sink.trust.name_of(link.key) == "prefill"
            arrived.link.send(Drained(transfer="t"))
            assert (await heard.hear(Arrived)).envelope.body == Drained(transfer="t")

    run(story())


def test_one_pair_for_the_whole_fleet_needs_no_list(run: Run) -> None:
    async def story() -> None:
        (own,) = pairs(1)
        fleet = trust(own, fleet=own)
        async with two(fleet, fleet) as (sink, _, source, ear):
            sink.dial(source.address).send(cancel("t"))
            assert (await ear.hear(Arrived)).link.key == own[0].decode()

    run(story())


def test_who_is_not_on_the_list_is_told_so_and_heard_of_by_its_public_key_alone(run: Run) -> None:
    async def story() -> None:
        known, stranger, server = pairs(3)
        async with two(trust(stranger, source=server), trust(server, known=known)) as (sink, heard, source, ear):
            sink.dial(source.address).send(cancel("t"))
            rejected = await ear.hear(Rejected)
            assert rejected.code == "key_not_allowed" and stranger[0].decode() in rejected.text
            assert stranger[1].decode() not in rejected.text
            lost = await heard.hear(Lost)
            assert lost.code == "key_refused" and source.links == [] == sink.links

    run(story())


def test_a_server_that_has_another_key_than_it_should_hears_nothing(run: Run) -> None:
    """Somebody has taken the address: what we would have said stays with us."""

    async def story() -> None:
        ours, server, impostor = pairs(3)
        async with two(trust(ours, source=server), trust(impostor, anybody=ours), QUICK) as (sink, heard, source, ear):
            sink.dial(with_key(source.address, server[0].decode())).send(cancel("secret"))
            lost = await heard.hear(Lost)
            assert lost.code == "peer_unreachable" and "handshakes failed" in lost.reason
            await ear.silence(0.2)

    run(story())


@pytest.mark.parametrize("side", ["dialling", "listening"])
def test_an_agent_with_a_key_and_one_without_do_not_speak(run: Run, side: str) -> None:
    async def story() -> None:
        (own,) = pairs(1)
        keyed, bare = trust(own, fleet=own), Trust()
        sides = (keyed, bare) if side == "dialling" else (bare, keyed)
        async with two(*sides, QUICK) as (sink, heard, source, ear):
            sink.dial(source.address).send(cancel("t"))
            assert (await heard.hear(Lost)).code in ("peer_unreachable", "peer_disconnected")
            await ear.silence(0.2)
            assert source.links == []

    run(story())


def test_raw_and_plain_callers_get_nowhere_and_stop_nobody(run: Run) -> None:
    async def story() -> None:
        own, stranger = pairs(2)
        fleet = trust(own, fleet=own)
        async with two(fleet, fleet) as (sink, _, source, ear):
            host, port = source.address.removeprefix("tcp://").split(":")
            with (
                caller(source.address, None) as plain,
                caller(source.address, stranger, stranger[0]) as wrong,
                socket.create_connection((host, int(port))) as raw,
            ):
                raw.sendall(os.urandom(4096))
                for turned_away in (plain, wrong):
                    with contextlib.suppress(zmq.Again):  # it knows already
                        turned_away.send(envelope(), zmq.NOBLOCK)
                await ear.silence(0.5)
                sink.dial(source.address).send(cancel("t"))
                assert (await ear.hear(Arrived)).envelope.sender == "sink"
                assert source.rejected == {}

    run(story())


# A list that changes:


def test_a_key_that_is_added_is_let_in_without_a_restart(run: Run) -> None:
    async def story() -> None:
        server, old, new = pairs(3)
        async with two(trust(new, source=server), trust(server, decode=old)) as (sink, heard, source, ear):
            sink.dial(source.address)
            assert (await heard.hear(Lost)).code == "key_refused"
            assert (await ear.hear(Rejected)).code == "key_not_allowed"
            names = {old[0].decode(): "decode", new[0].decode(): "decode"}
            assert source.trust.keys is not None
            source.trusts(replace(source.trust, keys=replace(source.trust.keys, names=names)))
            sink.dial(source.address).send(cancel("t"))
            assert (await ear.hear(Arrived)).link.key == new[0].decode()

    run(story())


def test_a_key_that_is_taken_off_the_list_is_cut_off_at_once_and_stays_so(run: Run) -> None:
    """Even on the connection that it proved itself on before: what it says there counts for nothing any more."""

    async def story() -> None:
        server, good, bad = pairs(3)
        async with Control("source", LOOPBACK, trust=trust(server, good=good, bad=bad)) as source:
            ear = Ear(source)
            with caller(source.address, bad, server[0]) as dealer, caller(source.address, good, server[0]) as other:
                dealer.send(envelope(0))
                first = (await ear.hear(Arrived)).link
                other.send(envelope(0, sender="good"))
                kept = (await ear.hear(Arrived)).link
                source.trusts(trust(server, good=good))
                lost = await ear.hear(Lost)
                assert (lost.link, lost.code) == (first, "key_revoked") and source.links == [kept]
                dealer.send(envelope(1))
                assert (await ear.hear(Rejected)).code == "key_not_allowed"
                dealer.send(envelope(0, sender="another boot"))
                assert (await ear.hear(Rejected)).code == "key_not_allowed"
                other.send(envelope(1, sender="good"))
                assert (await ear.hear(Arrived)).link is kept

    run(story())


def test_a_dialled_server_whose_key_is_taken_off_the_list_is_lost_too(run: Run) -> None:
    async def story() -> None:
        ours, server, other = pairs(3)
        async with two(trust(ours, source=server), trust(server, sink=ours)) as (sink, heard, source, ear):
            address = with_key(source.address, server[0].decode())
            link = sink.dial(address)
            link.send(cancel("t"))
            await ear.hear(Arrived)
            sink.trusts(trust(ours, other=other))
            assert (await heard.hear(Lost)).code == "key_revoked"
            with pytest.raises(PeerError) as caught:
                sink.dial(address)
            assert caught.value.code == "peer_not_allowed" and not link.send(Goodbye())

    run(story())


# Floods:


def test_a_caller_that_connects_too_often_waits_and_nobody_else_does(run: Run) -> None:
    async def story() -> None:
        server, good, loud = pairs(3)
        settings = Settings(handshakes_per_s=1, handshakes_at_once=3)
        known = trust(server, good=good, loud=loud)
        async with Control("source", LOOPBACK, settings=settings, trust=known) as source:
            ear, arrived = Ear(source), 0
            for number in range(8):
                with caller(source.address, loud, server[0]) as dealer:
                    dealer.send(envelope(sender=f"loud{number}"))
                    event = await ear.next()
                    while isinstance(event, Lost):
                        event = await ear.next()
                    arrived += isinstance(event, Arrived)
                    assert isinstance(event, Arrived) or event.code == "handshakes_too_many"
            assert 3 <= arrived < 8
            with caller(source.address, good, server[0]) as dealer:
                dealer.send(envelope(sender="good"))
                while not isinstance(event := await ear.next(), Arrived) or event.envelope.sender != "good":
                    pass

    run(story())


def test_one_caller_has_not_all_the_links(run: Run) -> None:
    async def story() -> None:
        server, good, loud = pairs(3)
        settings = Settings(max_links=8, max_links_of_one=3)
        known = trust(server, good=good, loud=loud)
        async with Control("source", LOOPBACK, settings=settings, trust=known) as source:
            ear = Ear(source)
            with contextlib.ExitStack() as callers:
                for number in range(5):
                    callers.enter_context(caller(source.address, loud, server[0])).send(envelope(sender=f"l{number}"))
                    event = await ear.next()
                    assert isinstance(event, Arrived) == (number < 3), event
                assert isinstance(event, Rejected) and event.code == "too_many_links"
                callers.enter_context(caller(source.address, good, server[0])).send(envelope(sender="good"))
                assert (await ear.hear(Arrived)).link.key == good[0].decode()

    run(story())


@pytest.mark.parametrize("kind", ["allowed", "not allowed", "no curve"])
def test_memory_is_bounded_under_a_flood(kind: str) -> None:
    """4 MiB frames of nonsense as fast as loopback takes them; and an honest agent is served meanwhile."""

    async def story() -> None:
        server, good, loud = pairs(3)
        known = trust(server, good=good, loud=loud) if kind == "allowed" else trust(server, good=good)
        async with two(trust(good, source=server), known, Settings()) as (sink, heard, source, ear):
            flood = caller(source.address, None if kind == "no curve" else loud, server[0])
            link = sink.dial(source.address)
            with flood as dealer:
                before, most, answered, sent = resident_bytes(), 0, 0, 0
                end = time.monotonic() + FLOOD_S
                frame = b"\x91" * (4 << 20)
                link.send(cancel("t"))
                while time.monotonic() < end or not answered:
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
                    assert sink.links == [link]
                    most = max(most, resident_bytes() - before)
                assert answered > 3
                assert (source.rejected["frame_too_deep"] + source.rejected["frame_malformed"] > 0) == (
                    kind == "allowed"
                )
                assert most < FLOOD_BYTES, f"{most >> 20} MiB more after {sent} frames"

    asyncio.run(asyncio.wait_for(story(), 60))


def test_memory_is_bounded_while_the_agent_is_too_busy_to_read() -> None:
    async def story() -> None:
        server, loud = pairs(2)
        async with Control("source", LOOPBACK, trust=trust(server, loud=loud)) as source:
            with caller(source.address, loud, server[0]) as dealer:
                dealer.send(envelope())
                assert isinstance(await Ear(source).next(), Arrived)
                before = resident_bytes()
                frame = bytes(1 << 20)
                for _ in range(900):
                    dealer.send(frame, copy=False)
                time.sleep(2)  # noqa: ASYNC251  the loop is held up on purpose
                more = resident_bytes() - before
                assert (8 << 20) < more < (160 << 20), f"{more >> 20} MiB more"

    asyncio.run(asyncio.wait_for(story(), 60))


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_buckets_fill_again_and_forget_the_oldest() -> None:
    buckets = Buckets(per_s=2.0, burst=3)
    assert [buckets.take("a", 0.0) for _ in range(4)] == [True, True, True, False]
    assert [buckets.take("a", 0.5), buckets.take("a", 0.5)] == [True, False]
    assert [buckets.take("a", 1e9) for _ in range(4)] == [True, True, True, False]
    assert buckets.take("b", 0.0)
    for number in range(2 * MOST_CALLERS):
        buckets.take(f"c{number}", 1e9)
    assert len(buckets) == MOST_CALLERS
