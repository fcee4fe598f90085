"""Messages on a byte stream come out whole, however the bytes were cut."""

from __future__ import annotations

import struct

import pytest
from kvbridge_proto import engine
from kvbridge_proto.codec import BadFrame, Limits
from kvbridge_proto.stream import HEADER, StreamReader, pack

from tests.support.refusals import refused
from tests.unit.proto.samples import TO_AGENT, TO_ENGINE

THREE = (TO_AGENT[1], TO_AGENT[4], TO_AGENT[6])
BYTES = b"".join(pack(message) for message in THREE)


def test_every_split_in_two_gives_the_same_messages() -> None:
    for cut in range(len(BYTES) + 1):
        reader: StreamReader[engine.ToAgent] = StreamReader(engine.ToAgent)
        assert (*reader.feed(BYTES[:cut]), *reader.feed(BYTES[cut:])) == THREE


def test_one_byte_at_a_time() -> None:
    reader: StreamReader[engine.ToEngine] = StreamReader(engine.ToEngine)
    stream = b"".join(pack(message) for message in TO_ENGINE)
    assert [m for byte in stream for m in reader.feed(bytes([byte]))] == list(TO_ENGINE)


def test_a_message_stays_when_the_caller_does_not_look_at_once() -> None:
    reader: StreamReader[engine.ToAgent] = StreamReader(engine.ToAgent)
    reader.feed(BYTES)
    assert tuple(reader.feed(b"")) == THREE


def test_refuses_a_long_frame_on_its_length_alone() -> None:
    reader: StreamReader[engine.ToAgent] = StreamReader(engine.ToAgent, Limits(frame_bytes=100))
    with refused(BadFrame, "frame_too_large") as caught:
        list(reader.feed(HEADER.pack(101)))
    assert "got 101, limit 100" in str(caught.value)


@pytest.mark.parametrize(
    ("body", "code"), [(b"", "frame_malformed"), (b"\xc1", "frame_malformed"), (b"\x80", "message_invalid")]
)
def test_a_bad_frame_ends_the_stream_after_the_good_ones(body: bytes, code: str) -> None:
    reader: StreamReader[engine.ToAgent] = StreamReader(engine.ToAgent)
    messages = reader.feed(BYTES + struct.pack(">I", len(body)) + body)
    assert (next(messages), next(messages), next(messages)) == THREE
    with refused(BadFrame, code):
        next(messages)
