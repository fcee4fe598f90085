"""Messages and their descriptors come out whole, however the bytes are cut, whoever is at the other end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbridge_proto import engine
from kvbridge_proto.engine import Descriptors, Withdraw
from kvbridge_proto.framing import (
    FRAME_FDS,
    HEADER,
    MESSAGE_FDS,
    BadFrame,
    FrameReader,
    FrameWriter,
    Limits,
    encode,
    framed,
    pack,
)

from testing.refusals import refused
from tests.unit.proto.samples import TO_AGENT, TO_ENGINE

THREE = (TO_AGENT[1], TO_AGENT[4], TO_AGENT[6])
BYTES = b"".join(pack(message) for message in THREE)
SMALL = Limits(frame_bytes=200)
Send = tuple[bytes, list[int]]  # what one call sent: the descriptors travel with the first byte


def reader(limits: Limits = SMALL, most_fds: int = MESSAGE_FDS) -> FrameReader[engine.ToAgent]:
    return FrameReader(engine.ToAgent, limits, most_fds)


def taken(frames: FrameReader[Any]) -> Iterator[tuple[Any, list[int]]]:
    while found := frames.next():
        yield found


def sends(writer: FrameWriter, size: Callable[[int], int]) -> Iterator[Send]:
    """All that is queued, as a socket takes it that has room for `size(of what is offered)` bytes at each call."""
    while writer.unsent_bytes:
        piece, _ = writer.head()
        sent = bytes(piece[: size(len(piece))])
        yield sent, writer.sent(len(sent))


def receives(sent: list[Send], size: Callable[[], int]) -> Iterator[Send]:
    """What calls with room for `size()` bytes receive of it.

    As Linux does it: a call takes bytes of several sends, but none after the first byte that has descriptors, and the
    send that this byte belongs to.
    """
    left = [(data, list(fds)) for data, fds in sent]
    while left:
        room, got, beside = size(), b"", list[int]()
        while left and room and not beside:
            (data, beside), left = left[0], left[1:]
            if data[room:]:
                left = [(data[room:], []), *left]
            got, room = got + data[:room], room - len(data[:room])
        yield got, beside


def read(frames: FrameReader[Any], chunks: Iterator[Send]) -> tuple[list[tuple[Any, list[int]]], str]:
    """The messages, and the code of what ended them."""
    heard: list[tuple[Any, list[int]]] = []
    try:
        for data, fds in chunks:
            frames.feed(data, fds)
            for each in taken(frames):
                heard.append(each)
    except BadFrame as error:
        with refused(BadFrame, error.code):  # and nothing more
            frames.feed(BYTES)
            frames.next()
        return heard, error.code
    return heard, ""


# An honest sender:


def test_one_byte_at_a_time() -> None:
    frames: FrameReader[engine.ToEngine] = FrameReader(engine.ToEngine)
    stream = b"".join(pack(message) for message in TO_ENGINE)
    assert [m for byte in stream for m in frames.messages(bytes([byte]))] == list(TO_ENGINE)
    assert not frames.is_midway and frames.unclaimed() == []


@pytest.mark.parametrize("with_fds", range(8))
def test_descriptors_find_their_message_wherever_two_calls_part(with_fds: int) -> None:
    """Of three messages each with descriptors or none: what the first call sends and receives ends anywhere."""
    said = [(Withdraw(number=n + 1), [n] if with_fds >> n & 1 else []) for n in range(3)]
    whole = sum(len(pack(message)) for message, _ in said)
    for cut in range(1, whole + 1):
        for room in range(1, whole + 1):
            writer = FrameWriter()
            for message, fds in said:
                writer.put(pack(message), fds)
            sizes, rooms = iter([cut]), iter([room])
            sent = list(sends(writer, lambda size, sizes=sizes: min(size, next(sizes, whole))))
            chunks = receives(sent, lambda rooms=rooms: next(rooms, whole))
            assert read(reader(), chunks) == (said, "")


@settings(deadline=None)
@given(st.data())
def test_any_messages_by_any_calls(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.tuples(st.integers(0, 90), st.sampled_from([0, 0, 1, 64, 65, 200]))))
    fd = iter(range(1 << 30))
    said = [(Withdraw(number=1, reason="x" * size), [next(fd) for _ in range(count)]) for size, count in shapes]
    writer, queued, sent = FrameWriter(), 0, list[Send]()
    step = st.integers(1, 250)
    for message, fds in said:
        writer.put(pack(message), fds)
        queued += len(pack(message)) + len(pack(Descriptors())) * ((len(fds) - 1) // FRAME_FDS if fds else 0)
        if data.draw(st.booleans()):
            sent += sends(writer, lambda size: min(size, data.draw(step)))
    sent += sends(writer, lambda size: min(size, data.draw(step)))
    assert sum(len(each) for each, _ in sent) == queued and all(len(fds) <= FRAME_FDS for _, fds in sent)
    frames = reader()
    assert read(frames, receives(sent, lambda: data.draw(step))) == (said, "")
    assert frames.unclaimed() == [] and not frames.is_midway


def test_what_has_not_left_is_given_back() -> None:
    writer = FrameWriter()
    writer.put(pack(Withdraw(number=1)), range(70))
    assert writer.sent(1) == list(range(64)) and writer.sent(len(pack(Descriptors())) - 1) == []
    assert writer.clear() == list(range(64, 70)) and writer.unsent_bytes == 0


# Anybody else:


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_any_bytes_and_descriptors_give_messages_or_the_codes_of_the_page(data: st.DataObject) -> None:
    """Each descriptor is given out once, with a message or as unclaimed, and few are held."""
    good = st.sampled_from([*map(pack, THREE), pack(Descriptors())])
    bad = st.one_of(st.binary(max_size=12), st.binary(max_size=40).map(framed), good.map(lambda frame: frame[:-1]))
    stream = b"".join(data.draw(st.lists(st.one_of(good, good, bad), max_size=8)))
    frames, most = reader(most_fds=70), 70 + 2 * FRAME_FDS
    given_out, got, at, code = 0, list[int](), 0, ""
    while at < len(stream) and not code:
        size, count = data.draw(st.integers(1, 60)), data.draw(st.sampled_from([0, 0, 0, 1, 64]))
        is_cut = data.draw(st.integers(0, 30)) == 30
        frames.feed(stream[at : at + size], range(given_out, given_out + count), is_cut=is_cut)
        given_out, at = given_out + count, at + size
        try:
            for _, fds in taken(frames):
                got += fds
        except BadFrame as error:
            code = error.code
        assert given_out - len(got) <= most
    assert code in {"", *("frame_too_large", "frame_malformed", "message_invalid", "stray_fds", "too_many_fds")}
    assert sorted(got + frames.unclaimed()) == list(range(given_out)) and frames.unclaimed() == []


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(1, 50))
def test_how_it_is_cut_changes_nothing_about_garbage(garbage: bytes, step: int) -> None:
    stream = BYTES + garbage
    whole = read(reader(Limits()), iter([(stream, [])]))
    parts = [(stream[at : at + step], list[int]()) for at in range(0, len(stream), step)]
    assert read(reader(Limits()), iter(parts)) == whole and len(whole[0]) >= 3


def test_refuses_a_long_frame_on_its_length_alone() -> None:
    frames = reader(Limits(frame_bytes=100))
    frames.feed(HEADER.pack(101)[:3])
    assert frames.next() is None
    with refused(BadFrame, "frame_too_large") as caught:
        list(frames.messages(HEADER.pack(101)[3:]))
    assert "got 101, limit 100" in str(caught.value)


@pytest.mark.parametrize(
    ("body", "code"), [(b"", "frame_malformed"), (b"\xc1", "frame_malformed"), (b"\x80", "message_invalid")]
)
def test_a_bad_frame_ends_the_stream_after_the_good_ones(body: bytes, code: str) -> None:
    messages = reader(Limits()).messages(BYTES + framed(body))
    assert (next(messages), next(messages), next(messages)) == THREE
    with refused(BadFrame, code):
        next(messages)


def test_something_else_may_take_the_place_of_a_bad_frame() -> None:
    def unfit(frame: bytes | bytearray, error: BadFrame) -> str | None:
        return f"{error.code} {len(frame)}" if frame.startswith(b"\x80") else None

    frames: FrameReader[Any] = FrameReader(engine.ToAgent, Limits(), MESSAGE_FDS, unfit)
    stream = framed(b"\x80") + framed(encode(THREE[0])) + framed(b"\xc1")
    frames.feed(stream[:5], [7])
    frames.feed(stream[5:])
    assert frames.next() == ("message_invalid 1", [7]) and frames.next() == (THREE[0], [])
    with refused(BadFrame, "frame_malformed"):
        frames.next()


@pytest.mark.parametrize(
    ("chunks", "code"),
    [
        ([(2, 1), (3, 1)], "stray_fds"),  # twice with one frame
        ([(2, 0), (3, 1)], "stray_fds"),  # where none begins, though none has ended
        ([(5, 0), (100, 1)], "stray_fds"),
        ([(100, 65)], "too_many_fds"),  # with one message
        ([(0, 1)], "stray_fds"),  # with no bytes
    ],
)
def test_refuses_descriptors_that_belong_to_no_frame_or_are_too_many(chunks: list[tuple[int, int]], code: str) -> None:
    frames, stream = reader(most_fds=64), pack(Withdraw(number=1))
    with refused(BadFrame, code):
        for size, count in chunks:
            frames.feed(stream[:size], [1] * count)
            stream = stream[size:]
            list(taken(frames))
    assert len(frames.unclaimed()) == sum(count for _, count in chunks)


def test_descriptors_that_the_kernel_dropped_end_the_stream() -> None:
    frames = reader()
    frames.feed(BYTES, [1, 2], is_cut=True)
    with refused(BadFrame, "too_many_fds"):
        frames.next()
    assert frames.unclaimed() == [1, 2]
