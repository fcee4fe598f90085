"""Links between agents over real ZeroMQ: in order or lost, whoever dies, stops or restarts."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time

import pytest
from kvbridge_proto.peer import Cancel, Drained, Goodbye

from kvbridge.transport.control import Arrived, Control, Lost, Settings
from tests.integration.transport.ears import LOOPBACK, QUICK, Ear, Run, cancel, remote, two

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


@pytest.mark.parametrize(("sink_s", "source_s"), [(1, 1), (15, 1), (1, 15)])  # 1 s: the least that may be set
def test_an_idle_link_stays_up_by_its_pings_alone(run: Run, sink_s: float, source_s: float) -> None:
    async def story() -> None:
        settings = Settings(silence_s=sink_s), Settings(silence_s=source_s)
        async with two(settings[0], of_source=settings[1]) as (sink, sink_ear, source, source_ear):
            link = sink.dial(source.address)
            await asyncio.gather(sink_ear.silence(4), source_ear.silence(4))
            assert link.is_up and link.peer_boot == "source" and len(source.links) == 1

    run(story())


@pytest.mark.parametrize("silence_s", [0.1, 1, 4, 15, 600])
def test_several_pings_fit_into_every_silence(silence_s: float) -> None:
    assert 4 * Settings(silence_s=silence_s).ping_s <= silence_s and Settings(silence_s=silence_s).ping_s <= 1


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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port
