"""A pipe beside a link's connection, between agents of one host: one order and one end for both ways."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from kvbridge_proto.framing import encode, framed
from kvbridge_proto.peer import Body, Cancel, Drained, Envelope, Goodbye, Hold, Ping

from kvbridge.errors import PeerError
from kvbridge.transport import control as control_module
from kvbridge.transport.control import Control
from kvbridge.transport.door import open_memory
from kvbridge.transport.link import Arrived, Link, Lost, Rejected, Settings
from kvbridge.transport.sockets import DRAIN_MESSAGES, Port
from tests.integration.transport.ears import Ear, cancel, two, until
from tests.integration.transport.test_door import opened, ticket_of

Joined = tuple[Link, Ear, Link, Ear, socket.socket, socket.socket]


@asynccontextmanager
async def joined(
    settings: Settings | None = None, is_piped: bool = False, of_sender: Settings | None = None
) -> AsyncIterator[Joined]:
    """Two agents with a link, each end and its ear, and the ends of a pipe that both have taken, or neither yet."""
    async with two(settings=settings, of_sender=of_sender) as (receiver, receiver_ear, sender, sender_ear):
        dialled = receiver.dial(sender.address)
        dialled.send(cancel("first"))
        await sender_ear.hear(Arrived)
        ours, theirs = socket.socketpair()
        (link,) = sender.links
        if is_piped:
            link.carry_by(theirs)
            dialled.carry_by(ours)
            await until(lambda: link.sends_by_pipe)
        yield dialled, receiver_ear, link, sender_ear, ours, theirs


def named(ear_heard: list[Arrived]) -> list[str]:
    return [transfer for each in ear_heard for transfer in transfers(each.envelope.body)]


def transfers(body: Body) -> list[str]:
    return [body.transfer] if isinstance(body, Cancel | Drained) else []


@pytest.mark.parametrize("is_sender_first", [True, False])
@pytest.mark.parametrize("before", [0, 1, 300])
async def test_what_is_said_while_the_pipe_comes_keeps_its_order(before: int, is_sender_first: bool) -> None:
    async with joined() as (dialled, receiver_ear, link, sender_ear, ours, theirs):
        count = 2 * before + 50
        for number in range(count):
            if number == before:
                both = [lambda: link.carry_by(theirs), lambda: dialled.carry_by(ours)]
                for take in both if is_sender_first else reversed(both):
                    take()
            dialled.send(cancel(f"{number}"))
            link.send(Drained(transfer=f"{number}"))
            if number % 7 == 0:
                await asyncio.sleep(0)
        there = [await sender_ear.hear(Arrived) for _ in range(count)]
        back = [await receiver_ear.hear(Arrived) for _ in range(count)]
        assert named(there) == named(back) == [f"{number}" for number in range(count)]
        await until(lambda: link.sends_by_pipe)
        assert dialled.sends_by_pipe and not link.outbox and not dialled.outbox


async def test_by_the_pipe_no_message_takes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with joined(is_piped=True) as (dialled, receiver_ear, link, sender_ear, *_):
        monkeypatch.setattr(Port, "send", lambda *_: pytest.fail("the connection was used"))
        for number in range(20):
            dialled.send(cancel(f"{number}"))
            assert named([await sender_ear.hear(Arrived)]) == [f"{number}"]
            link.send(Drained(transfer=f"{number}"))
            assert named([await receiver_ear.hear(Arrived)]) == [f"{number}"]


async def test_who_was_called_speaks_by_a_pipe_only_once_the_peer_has_it() -> None:
    async with joined() as (dialled, receiver_ear, link, sender_ear, ours, theirs):
        link.carry_by(theirs)
        link.send(Drained(transfer="a"))
        assert named([await receiver_ear.hear(Arrived)]) == ["a"]
        ours.close()  # the peer did not take it
        await until(lambda: link.pipe is None)
        assert not link.is_lost
        dialled.send(cancel("b"))
        assert named([await sender_ear.hear(Arrived)]) == ["b"]
        other, another = socket.socketpair()  # so it may be given another one
        link.carry_by(another)
        dialled.carry_by(other)
        await until(lambda: link.sends_by_pipe)


@pytest.mark.parametrize("who", ["dialled", "accepted"])
async def test_the_end_of_a_pipe_that_was_used_is_the_links(who: str) -> None:
    async with joined(is_piped=True) as (dialled, receiver_ear, link, sender_ear, ours, theirs):
        (ours if who == "dialled" else theirs).shutdown(socket.SHUT_RDWR)
        for ear in (receiver_ear, sender_ear):
            await ear.loses("peer_disconnected")
        assert dialled.is_lost and link.is_lost and not dialled.send(cancel("late"))


async def test_last_words_leave_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "LINGER_MS", 10_000)  # however busy the machine is
    async with joined(is_piped=True) as (dialled, _, _, sender_ear, *_):
        for number in range(500):
            dialled.send(cancel(f"{number}"))
        dialled.send(Goodbye(reason="enough"))
        dialled.close()
        heard = [await sender_ear.hear(Arrived) for _ in range(501)]
        assert named(heard) == [f"{number}" for number in range(500)]
        assert heard[-1].envelope.body == Goodbye(reason="enough")
        await sender_ear.loses("peer_disconnected")


def garbage(link: Link) -> dict[str, tuple[bytes, str]]:
    """What a peer must not say by a pipe, and why its link ends, if it does."""
    end = Envelope(version=1, sender="receiver", receiver="sender", number=1, body=Ping(number=0))
    twice = framed(encode(end)) * 2
    return {
        "no message": (framed(b"\x00"), ""),
        "too long a frame": (b"\xff\xff\xff\xff", ""),
        "a number twice": (twice, "messages_lost"),
    }


@pytest.mark.parametrize("what", ["no message", "too long a frame", "a number twice"])
async def test_what_is_no_envelope_costs_the_link_or_the_pipe_and_nobody_else(what: str) -> None:
    async with joined() as (dialled, _, link, sender_ear, ours, theirs):
        link.carry_by(theirs)
        said, code = garbage(link)[what]
        ours.sendall(said)
        event = await sender_ear.hear(Rejected if not code else Lost)
        assert not code or event.code == code
        if not code:  # nothing was heard by it: the link goes on without
            await until(lambda: link.pipe is None)
            dialled.send(cancel("on"))
            assert named([await sender_ear.hear(Arrived)]) == ["on"]
        ours.close()


async def test_numbers_that_never_come_end_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "MOST_EVENTS", 10)
    async with joined() as (_, _, link, sender_ear, ours, theirs):
        link.carry_by(theirs)
        for number in range(3, 20):
            body = Envelope(version=1, sender="receiver", receiver="sender", number=number, body=cancel("x"))
            ours.sendall(framed(encode(body)))
        await sender_ear.loses("messages_lost")
        assert not link.early
        ours.close()


async def test_a_number_that_never_comes_ends_the_link_though_pings_do() -> None:
    async with joined(Settings(silence_s=600.0), of_sender=Settings(silence_s=0.5)) as (
        dialled,
        _,
        link,
        sender_ear,
        ours,
        theirs,
    ):
        dialled.pinged_at = link.pinged_at = float("inf")  # they say nothing themselves
        link.carry_by(theirs)
        pings = (
            Envelope(version=1, sender="receiver", receiver="sender", number=number, body=Ping(number=0))
            for number in itertools.count(dialled._sent + 1)
        )
        began = time.monotonic()
        while not link.is_lost and time.monotonic() - began < 60:
            ours.sendall(framed(encode(next(pings))))
            await asyncio.sleep(0.05)
        await sender_ear.loses("peer_silent")
        ours.close()


async def test_a_second_pipe_is_closed() -> None:
    async with joined() as (dialled, _, link, _, ours, theirs):
        link.carry_by(theirs)
        dialled.carry_by(ours)
        first = link.pipe
        one, other = socket.socketpair()
        link.carry_by(other)
        assert link.pipe is first and one.recv(1) == b""
        one.close()


async def test_what_came_early_is_bounded_by_its_bytes() -> None:
    bound = Settings(queue_bytes=1 << 20)
    async with joined(bound) as (dialled, _, link, sender_ear, ours, theirs):
        link.carry_by(theirs)
        ours.setblocking(False)
        rooms = Hold(rendezvous_ids=tuple(f"{number:0200}" for number in range(300)))
        for number in range(dialled._sent + 1, dialled._sent + 40):
            body = Envelope(version=1, sender="receiver", receiver="", number=number, body=rooms)
            with contextlib.suppress(OSError):  # it is lost on the way
                await asyncio.get_running_loop().sock_sendall(ours, framed(encode(body)))
        await sender_ear.loses("messages_lost")
        assert not link.early
        ours.close()


async def test_a_flood_by_the_pipe_leaves_the_loop_its_turns() -> None:
    """Of what is no event, so that no backlog slows it. The peer need not even read our pongs."""
    async with joined() as (dialled, _, link, _, ours, theirs):
        dialled.pinged_at = float("inf")  # it says nothing itself: the numbers would be the same
        link.carry_by(theirs)
        numbers = range(dialled._sent, dialled._sent + 20_000)
        pings = b"".join(
            framed(encode(Envelope(version=1, sender="receiver", receiver="", number=number, body=Ping(number=0))))
            for number in numbers
        )
        flood = threading.Thread(target=_say, args=(ours, pings))
        flood.start()
        most = 0
        while (before := link.expected) < numbers.stop and not link.is_lost:
            await asyncio.sleep(0)
            most = max(most, link.expected - before)
        assert most <= DRAIN_MESSAGES and not link.is_lost
        flood.join()
        ours.close()


def _say(to: socket.socket, all_of_it: bytes) -> None:
    with contextlib.suppress(OSError):
        to.sendall(all_of_it)


async def test_who_gave_a_pipe_cannot_make_its_other_end_block() -> None:
    """O_NONBLOCK is the socket's, and who made both ends may have kept one."""
    async with joined() as (dialled, _, _, _, ours, theirs):
        kept = ours.dup()
        dialled.carry_by(ours)
        await asyncio.sleep(0.05)
        fcntl.fcntl(kept, fcntl.F_SETFL, fcntl.fcntl(kept, fcntl.F_GETFL) & ~os.O_NONBLOCK)
        rescue = threading.Timer(60.0, theirs.shutdown, [socket.SHUT_RDWR])  # else it would block for ever
        rescue.start()
        theirs.send(b"\0")
        await asyncio.sleep(0.5)
        for number in range(20_000):
            dialled.send(Drained(transfer=f"{number}"))
        await asyncio.sleep(0.3)
        assert rescue.is_alive()
        rescue.cancel()
        kept.close()
        theirs.close()


async def test_a_pipe_that_nobody_reads_ends_with_its_link() -> None:
    async with joined() as (dialled, ear, _, _, ours, theirs):
        dialled.carry_by(ours)
        for number in range(20_000):
            dialled.send(Drained(transfer=f"{number}"))
        dialled.close()
        assert ear._control._pipes
        await until(lambda: not ear._control._pipes)
        theirs.close()


def test_any_two_ways_make_one_order() -> None:
    """The first so many by the connection, the others by the pipe, in any order of the two."""
    count = 6
    for split in range(count + 1):
        for places in itertools.combinations(range(count), split):
            by_connection, by_pipe = iter(range(split)), iter(range(split, count))
            heard: list[int] = []

            class Hearing(Control):
                def _heard(self, link: Link, envelope: Envelope, *, by_pipe: bool = False) -> None:
                    heard.append(envelope.number)  # noqa: B023

                def _lose(self, link: Link, code: str, reason: str) -> None:
                    raise AssertionError(f"{code}: {reason}")

            control = Hearing("us")
            link = Link(control, "there", b"id", 0.0)
            for at in range(count):
                number = next(by_connection if at in places else by_pipe)
                body = Envelope(version=1, sender="them", receiver="us", number=number, body=Ping(number=0))
                if at in places:
                    assert control._count_in(link, body)
                else:
                    control._take_from_pipe(link, body)
            assert heard == list(range(count)), (split, places)


async def test_what_comes_by_a_pipe_is_given_at_once_but_never_before_an_event_that_waits() -> None:
    at_once: list[str] = []
    by_event: list[str] = []

    def message(number: int) -> Envelope:
        return Envelope(version=1, sender="them", receiver="us", number=number, body=cancel(f"{number}"))

    async with Control("us") as control:
        link = Link(control, "there", b"id", 0.0)

        async def read() -> None:
            async for event in control.events(lambda _, sender, body: at_once.extend(transfers(body))):
                assert isinstance(event, Arrived)
                by_event.extend(transfers(event.envelope.body))

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        control._take_from_pipe(link, message(0))
        control._count_in(link, message(1))  # by the connection
        control._take_from_pipe(link, message(2))
        assert (at_once, by_event) == (["0"], [])
        await until(lambda: len(by_event) == 2)
        control._take_from_pipe(link, message(3))
        assert (at_once, by_event) == (["0", "3"], ["1", "2"])
        reader.cancel()
        await asyncio.wait([reader])
        control._take_from_pipe(link, message(4))
        assert at_once == ["0", "3"], "nobody listens any more"


async def test_an_error_that_nobody_expects_ends_the_link_and_reaches_the_reader() -> None:
    ours, theirs = socket.socketpair()
    async with Control("us") as control:
        link = control._accepted[b"id"] = Link(control, "there", b"id", 0.0)
        link.carry_by(ours)
        theirs.sendall(framed(encode(Envelope(version=1, sender="them", receiver="us", number=0, body=cancel("a")))))
        events = control.events(lambda *_: print(1 // 0))
        assert isinstance(await anext(events), Lost) and link.is_lost
        with pytest.raises(ZeroDivisionError):
            await anext(events)
    theirs.close()


async def test_the_door_gives_one_end_of_a_pipe_to_who_may_open(path: Path) -> None:
    ends: list[socket.socket] = []
    async with opened(path) as door:
        ticket = door.admit("decode-0", ends.append)
        assert ticket is not None
        with closing(await open_memory(ticket, "decode-0")) as handover:
            pipe = handover.take_pipe()
            assert pipe is not None and len(ends) == 1
            ends[0].sendall(b"hello")
            assert pipe.recv(5) == b"hello"
            pipe.close()
        assert ends[0].recv(1) == b""
        ends[0].close()
        with closing(await open_memory(ticket_of(door, "decode-0"), "decode-0")) as without:
            assert without.take_pipe() is None


async def test_another_descriptor_is_no_pipe(path: Path) -> None:
    async with opened(path) as door:
        ticket = door.admit("decode-0", lambda end: end.close())
        assert ticket is not None
        with closing(await open_memory(ticket, "decode-0")) as handover:
            null = os.open("/dev/null", os.O_RDONLY)
            os.dup2(null, handover.fds[-1])
            os.close(null)
            with pytest.raises(PeerError, match="pipe"):
                handover.take_pipe()
