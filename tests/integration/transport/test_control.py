"""Links between agents over real ZeroMQ: delivered in order or lost, whoever dies, stops or restarts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from functools import partial

import pytest
import zmq
from kvbridge_proto.engine import Detach
from kvbridge_proto.framing import encode
from kvbridge_proto.peer import Body, Cancel, Drained, Goodbye, Hold, Ping, Refuse

from demo.processes import free_port
from kvbridge.errors import OperatorError
from kvbridge.transport import sockets
from kvbridge.transport.control import LINK_TICK_S, Control
from kvbridge.transport.link import Arrived, Link, Lost, Rejected, Retried, Settings
from testing.proc import descriptors
from tests.integration.transport.ears import HASTY, LOOPBACK, QUICK, Ear, cancel, envelope, remote, stranger, two, until

# What a link delivers:


async def test_carries_messages_both_ways_in_order() -> None:
    async with two() as (receiver, receiver_ear, sender, sender_ear):
        link = receiver.dial(sender.address)
        assert receiver.dial(sender.address) is link
        for number in range(100):
            assert link.send(cancel(f"{number}"))
        for number in range(100):
            arrived = await sender_ear.hear(Arrived)
            assert arrived.envelope.body == cancel(f"{number}") and arrived.link.peer_incarnation == "receiver"
            assert arrived.link.send(Drained(transfer=f"{number}"))
        for number in range(100):
            answer = await receiver_ear.hear(Arrived)
            assert answer.link is link and answer.envelope.body == Drained(transfer=f"{number}")
        assert answer.envelope.receiver == "receiver" and link.peer_incarnation == "sender"


async def test_a_burst_larger_than_every_queue_waits_for_the_reader() -> None:
    async with two() as (receiver, _, sender, sender_ear):
        link = receiver.dial(sender.address)
        for number in range(20_000):
            assert link.send(cancel(f"{number}"))
        await asyncio.sleep(0.5)  # nobody reads
        for number in range(20_000):
            assert (await sender_ear.hear(Arrived)).envelope.body == cancel(f"{number}")


@pytest.mark.parametrize(("receiver_s", "sender_s"), [(1, 1), (15, 1), (1, 15)])  # 1 s: the least that may be set
async def test_an_idle_link_stays_up_by_its_pings_alone(receiver_s: float, sender_s: float) -> None:
    settings = Settings(silence_s=receiver_s), Settings(silence_s=sender_s)
    async with two(settings=settings[0], of_sender=settings[1]) as (receiver, receiver_ear, sender, sender_ear):
        link = receiver.dial(sender.address)
        await asyncio.gather(receiver_ear.silence(4), sender_ear.silence(4))
        assert link.is_up and link.peer_incarnation == "sender" and len(sender.links) == 1


async def test_a_link_that_rests_is_looked_at_only_when_something_is_due() -> None:
    """Of 64 links that each tick looked at, ticks took three times as much of the processor as pings."""
    async with two() as (receiver, receiver_ear, sender, sender_ear):
        receiver.dial(sender.address).send(cancel("first"))
        await sender_ear.hear(Arrived)
        looks: list[Link] = []
        for control in (receiver, sender):
            judge = control._judge
            control._judge = lambda link, now, judge=judge: (looks.append(link), judge(link, now))
        await receiver_ear.silence(3)
        assert 1 <= len(looks) <= 8  # ticks: 60


async def test_ticks_are_few_while_links_rest_and_none_is_later_than_what_is_due() -> None:
    async with two() as (receiver, _, sender, sender_ear):
        receiver.dial(sender.address).send(cancel("first"))
        await sender_ear.hear(Arrived)
        for control in (receiver, sender):
            ticks: list[float] = []
            look = control._look
            control._look = lambda now, away_s, look=look, ticks=ticks: (ticks.append(now), look(now, away_s))
            for _ in range(3):
                await asyncio.sleep(1)
                due = min(link.look_at for link in control.links)
                assert control._tick_at <= max(due, ticks[-1] + LINK_TICK_S)
            assert 3 <= len(ticks) <= 15  # of 30


async def test_what_cannot_wait_for_the_end_of_a_rest_hastens_the_next_tick() -> None:
    async with two() as (receiver, _, sender, sender_ear):
        receiver.dial(sender.address).send(cancel("first"))
        (accepted,) = [(await sender_ear.hear(Arrived)).link]

        def fill_the_queue() -> None:
            while not accepted.outbox:
                accepted.send(cancel("t"))

        def fill_the_events() -> None:
            while not sender._is_full:
                sender._reject(None, "frame_malformed", "")

        dial = partial(sender.dial, f"tcp://127.0.0.1:{free_port()}")
        for hasten in (partial(sender._watched_router, sockets.GONE), fill_the_queue, fill_the_events, dial):
            await until(lambda: sender._tick_at > sender._loop.time() + LINK_TICK_S)
            hasten()
            assert sender._tick_at <= sender._loop.time() + LINK_TICK_S, hasten
            sender._events.clear()


@pytest.mark.parametrize("silence_s", [0.1, 1, 4, 15, 600])
def test_several_pings_fit_into_every_silence(silence_s: float) -> None:
    assert 4 * Settings(silence_s=silence_s).ping_s <= silence_s and Settings(silence_s=silence_s).ping_s <= 1


async def test_messages_wait_for_an_agent_that_starts_later() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    async with Control("receiver") as receiver:
        receiver.dial(address).send(cancel("early"))
        await asyncio.sleep(0.3)
        async with Control("sender", address) as sender:
            assert (await Ear(sender).hear(Arrived)).envelope.body == cancel("early")


async def test_a_goodbye_arrives_before_the_end_of_a_closed_link() -> None:
    async with two() as (receiver, receiver_ear, sender, sender_ear):
        link = receiver.dial(sender.address)
        link.send(cancel("t"))
        accepted = (await sender_ear.hear(Arrived)).link
        link.send(Goodbye(reason="done"))
        link.close()
        assert (await sender_ear.hear(Arrived)).envelope.body == Goodbye(reason="done")
        await sender_ear.loses("peer_disconnected", accepted)
        await receiver_ear.silence(0.3)
        assert not link.send(cancel("late")) and receiver.dial(sender.address) is not link


# How a link is lost:


async def test_nobody_at_the_address_is_unreachable_within_the_deadline() -> None:
    async with Control("receiver", settings=QUICK) as receiver:
        link = receiver.dial(f"tcp://127.0.0.1:{free_port()}")
        assert link.send(cancel("t"))
        await Ear(receiver).loses("peer_unreachable", link)
        assert not link.send(cancel("dropped")) and receiver.links == []


async def refusals_seen(control: Control, address: str, looks: int) -> int:
    """How many of so many looks, each after a try that found nobody, say that this address refuses connections."""
    refusals: list[Link] = []
    link = control.dial(address)
    async with asyncio.timeout(60):
        async for event in control.events():
            assert isinstance(event, Retried)
            if event.link is not link:
                continue
            while control._ports[link]._end_look is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if not looks:
                break
            control.look_if_refused(link, lambda: refusals.append(link))
            looks -= 1
    return len(refusals)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
async def test_a_host_that_refuses_is_told_from_one_that_is_silent(host: str) -> None:
    """As is that whose packets are lost: a listener that takes no more connections drops those that come."""
    before = descriptors()
    async with Control("receiver", settings=Settings(connect_s=600.0)) as receiver:
        assert await refusals_seen(receiver, f"tcp://{host}:{free_port()}", 2) == 2
        with contextlib.ExitStack() as stack:
            family = socket.AF_INET6 if host == "[::1]" else socket.AF_INET
            listening = stack.enter_context(socket.socket(family))
            listening.bind((host.strip("[]"), 0))
            listening.listen(0)
            for _ in range(4):
                calling = stack.enter_context(socket.socket(family))
                calling.setblocking(False)
                calling.connect_ex(listening.getsockname())
            assert await refusals_seen(receiver, f"tcp://{host}:{listening.getsockname()[1]}", 1) == 0
        for link in receiver.links:
            receiver.look_if_refused(link, lambda: None)
    assert descriptors() == before


async def test_an_address_that_nobody_can_connect_to_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a link-local one whose interface is gone."""
    before = descriptors()
    async with Control("receiver", settings=Settings(connect_s=600.0)) as receiver:
        monkeypatch.setattr(sockets, "numeric", lambda endpoint: ("fe80::1%gone", 1))
        assert await refusals_seen(receiver, f"tcp://[::1]:{free_port()}", 1) == 0
    assert descriptors() == before


async def test_a_killed_peer_is_lost_soon_on_the_listening_side_and_no_other_link_with_it() -> None:
    async with two() as (receiver, receiver_ear, sender, sender_ear):
        receiver.dial(sender.address).send(cancel("bystander"))
        bystander = (await sender_ear.hear(Arrived)).link
        with remote("doomed", dial=sender.address) as (child, _):
            arrived = await sender_ear.hear(Arrived)
            assert arrived.link.peer_incarnation == "doomed"
            child.kill()
            await sender_ear.loses("peer_disconnected", arrived.link)
        assert bystander.send(Drained(transfer="bystander")) and sender.links == [bystander]
        await receiver_ear.hear(Arrived)


@pytest.mark.proves("G21")
async def test_a_peer_restarted_on_its_address_is_a_new_link_with_a_new_incarnation() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    async with Control("receiver") as receiver:
        ear = Ear(receiver)
        with remote("first", address):
            old = receiver.dial(address)
            old.send(cancel("t"))
            assert (await ear.hear(Arrived)).envelope.sender == "first"
        with remote("second", address):
            await ear.loses("peer_disconnected", old)
            assert not old.send(cancel("ghost"))
            new = receiver.dial(address)
            assert new is not old and new.send(cancel("u"))
            arrived = await ear.hear(Arrived)
            assert (arrived.link, arrived.envelope.sender) == (new, "second")
            assert arrived.envelope.body == Drained(transfer="u")
            await ear.silence(0.3)


@pytest.mark.parametrize("stopped_side", ["listening", "dialling"])
async def test_a_stopped_peer_is_lost_by_its_silence(stopped_side: str) -> None:
    async with Control("ours", LOOPBACK, settings=HASTY) as ours:
        ear = Ear(ours)
        dial = ours.address if stopped_side == "dialling" else ""
        with remote("theirs", dial=dial) as (child, address):
            if stopped_side == "listening":
                ours.dial(address).send(cancel("t"))
            link = (await ear.hear(Arrived)).link
            os.kill(child.pid, signal.SIGSTOP)
            await ear.loses("peer_silent", link)
            os.kill(child.pid, signal.SIGCONT)  # its late messages are of a link that ended
            assert not link.send(cancel("late"))


async def test_a_link_is_lost_once_silence_s_or_connect_s_has_passed_and_is_looked_at_then() -> None:
    """By the loop's clock: here nobody waits so long."""
    settings = Settings(connect_s=500.0, silence_s=600.0)
    async with two(settings=settings) as (receiver, receiver_ear, sender, sender_ear):
        silent = receiver.dial(sender.address)
        silent.send(cancel("t"))
        await sender_ear.hear(Arrived)
        away = receiver.dial(f"tcp://127.0.0.1:{free_port()}")
        await until(lambda: silent.is_up and away.is_tried)
        limits = [(silent, silent.heard_at + 600.0, "peer_silent"), (away, away.made_at + 500.0, "peer_unreachable")]
        for link, limit, code in limits:
            assert receiver._next_look(link) <= limit
            receiver._judge(link, limit - 1.0)
            assert not link.is_lost
            receiver._judge(link, limit + 0.1)
            await receiver_ear.loses(code, link)


async def test_who_was_given_up_learns_it_from_the_answer_to_its_next_message() -> None:
    """The listening side cannot close one connection. By silence the dialling side would learn it in a minute."""
    async with two(settings=Settings(silence_s=60.0)) as (receiver, receiver_ear, sender, sender_ear):
        link = receiver.dial(sender.address)
        link.send(cancel("t"))
        (await sender_ear.hear(Arrived)).link.close()
        link.send(cancel("u"))
        lost = await receiver_ear.loses("link_over", link)
        assert "number: message 1 begins no link (0 does): the agent that got it had given the link up" in lost.reason
        receiver.dial(sender.address).send(cancel("v"))
        assert (await sender_ear.hear(Rejected)).code == "messages_lost"
        assert (await sender_ear.hear(Arrived)).envelope.body == cancel("v")
        assert len(sender.links) == len(receiver.links) == 1


async def test_who_is_one_too_many_is_told_so_at_once() -> None:
    few, patient = Settings(max_links=1), Settings(silence_s=60.0, connect_s=60.0)
    async with two(settings=patient, of_sender=few) as (receiver, _, sender, sender_ear):
        receiver.dial(sender.address).send(cancel("t"))
        await sender_ear.hear(Arrived)
        async with Control("another", settings=patient) as another:
            link = another.dial(sender.address)
            link.send(cancel("t"))
            assert "too_many_links: links: limit 1" in (await Ear(another).loses("link_over", link)).reason


async def test_our_own_absence_is_not_taken_for_the_peers_silence() -> None:
    async with two(settings=Settings(connect_s=60.0, silence_s=3.0)) as (receiver, receiver_ear, sender, sender_ear):
        receiver.dial(sender.address).send(cancel("t"))
        await sender_ear.hear(Arrived)
        time.sleep(4.0)  # noqa: ASYNC251  the loop is held up on purpose
        await asyncio.gather(receiver_ear.silence(0.7), sender_ear.silence(0.7))


async def test_a_peer_that_does_not_read_is_lost_when_the_queue_is_full() -> None:
    settings = Settings(queue_bytes=1 << 20, silence_s=60)
    with remote("sender") as (child, address):
        async with Control("receiver", settings=settings) as receiver:
            ear, link = Ear(receiver), receiver.dial(address)
            link.send(cancel("t"))
            await ear.hear(Arrived)
            os.kill(child.pid, signal.SIGSTOP)
            large = Cancel(transfer="t", code="c", reason="x" * 1000)
            while link.send(large):  # noqa: ASYNC110
                await asyncio.sleep(0)
            await ear.loses("peer_not_reading")


async def test_a_message_too_large_to_be_taken_ends_the_link() -> None:
    async with two(settings=Settings(frame_bytes=500)) as (receiver, receiver_ear, sender, _):
        link = receiver.dial(sender.address)
        assert not link.send(Cancel(transfer="t", code="c", reason="x" * 1000))
        lost = await receiver_ear.hear(Lost)
        assert lost.code == "frame_too_large" and "limit 500" in lost.reason


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
