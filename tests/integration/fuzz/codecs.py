"""Targets that read frames: the codec for every kind of message, the engine's stream, the adapter's client."""

from __future__ import annotations

import contextlib
import socket
from random import Random
from typing import Any

from kvbridge_proto import door, engine, framing, peer
from kvbridge_proto.framing import FRAME_FDS, HEADER, MESSAGE_FDS, BadFrame, FrameReader, decode, encode

from kvbridge.adapters.engine.client import EngineClient
from tests.integration.fuzz.mutate import Mutator
from tests.integration.fuzz.target import Target
from tests.unit.proto.samples import BODIES, FROM_DOOR, NOTICE, TO_AGENT, TO_DOOR, TO_ENGINE, enveloped

CODES = {"frame_too_large", "frame_malformed", "frame_too_deep", "message_invalid"}
STREAM_CODES = CODES | {"stray_fds", "too_many_fds"}
KINDS: dict[str, tuple[Any, list[Any]]] = {
    "envelope": (peer.Envelope, [enveloped(body) for body in BODIES]),
    "notice": (peer.Notice, [NOTICE]),
    "probe": (peer.Probe, [peer.Probe(lane=7, seed=99, size_bytes=65536, bytes_per_s=5.1e9)]),
    "engine": (engine.ToAgent, list(TO_AGENT)),
    "answer": (engine.ToEngine, list(TO_ENGINE)),
    "door": (door.ToDoor, list(TO_DOOR)),
    "memory": (door.FromDoor, list(FROM_DOOR)),
}


class Decoding(Target):
    """`decode` gives BadFrame, or a message that goes over the wire again unchanged; both of its ways agree."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._kind, messages = KINDS[name]
        self._mutator = Mutator([encode(message) for message in messages], self._kind)

    def frame(self, random: Random) -> bytes:
        return self._mutator.frame(random)

    def run(self, frame: bytes) -> int:
        try:
            message = decode(frame, self._kind)
        except BadFrame as bad:
            assert bad.code in CODES and str(bad), bad.code
            return 1
        again = encode(message)
        assert encode(decode(again, self._kind)) == again
        with contextlib.suppress(BadFrame):  # fields that nobody knows are looked at this way only
            assert encode(framing.typed(framing.unpack(frame), self._kind)) == again
        return 1


class Stream(Target):
    """The engine's stream: cut anywhere it gives the same messages and the same end."""

    name = "stream"

    def __init__(self) -> None:
        self._mutator = Mutator([encode(message) for message in TO_AGENT], engine.ToAgent)
        self._good = [_framed(encode(message)) for message in TO_AGENT]

    def frame(self, random: Random) -> bytes:
        return streamed(random, self._good, self._mutator)

    def run(self, frame: bytes) -> int:
        whole = self._read(frame, len(frame) or 1)
        for step in (1 + len(frame) % 7, 64):
            assert self._read(frame, step) == whole
        return max(1, len(whole[0]))

    def _read(self, frame: bytes, step: int) -> tuple[list[bytes], str]:
        reader: FrameReader[Any] = FrameReader(engine.ToAgent)
        found: list[bytes] = []
        try:
            for at in range(0, len(frame), step):
                found += map(encode, reader.messages(frame[at : at + step]))
        except BadFrame as bad:
            assert bad.code in CODES
            return found, bad.code
        assert len(reader._buffer) <= len(frame)
        return found, ""


class Descriptors(Target):
    """The same stream with descriptors beside it: each is handed out once, with a message or at the end."""

    name = "fds"

    def __init__(self) -> None:
        self._stream = Stream()

    def frame(self, random: Random) -> bytes:
        """The first byte says how it is cut and where descriptors come."""
        return random.randbytes(1) + self._stream.frame(random)

    def run(self, frame: bytes) -> int:
        random, stream = Random(frame[:1]), frame[1:]
        reader: FrameReader[Any] = FrameReader(engine.ToAgent, most_fds=MESSAGE_FDS)
        given, got, count, at = 0, list[int](), 0, 0
        try:
            while at < len(stream):
                size = random.choice((1, 3, 4, 5, 16, 100, 1000, 1 << 18))
                more = random.choice((0, 0, 1, 2, FRAME_FDS))
                reader.feed(stream[at : at + size], range(given, given + more), is_cut=random.random() < 0.01)
                given, at = given + more, at + size
                while found := reader.next():
                    count += 1
                    got += found[1]
        except BadFrame as bad:
            assert bad.code in STREAM_CODES
        assert sorted(got + reader.unclaimed()) == list(range(given))
        return max(1, count)


class Client(Target):
    """The adapter's end of the unix socket: whatever an agent says, `poll` raises nothing and the end is said."""

    name = "client"

    def __init__(self) -> None:
        path = self.folder / "a.sock"
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen(8)
        self._client = EngineClient(path)
        self._mutator = Mutator([encode(message) for message in TO_ENGINE], engine.ToEngine)
        self._good = [_framed(encode(message)) for message in TO_ENGINE]

    def frame(self, random: Random) -> bytes:
        return streamed(random, self._good, self._mutator)

    def run(self, frame: bytes) -> int:
        assert self._client.reconnect(), self._client.why
        agent, _ = self._server.accept()
        with agent:
            agent.settimeout(5)
            messages: list[Any] = []
            for at in range(0, len(frame), 1 << 16):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    agent.sendall(frame[at : at + (1 << 16)])
                messages += self._client.poll()
        while self._client.is_connected:
            messages += self._client.poll()
        assert self._client.why
        return max(1, len(messages))

    def close(self) -> None:
        self._client.close()
        self._server.close()
        super().close()


def streamed(random: Random, good: list[bytes], mutator: Mutator) -> bytes:
    """Some good frames, then a bad one; now and then a bad length."""
    parts = [random.choice(good) for _ in range(random.choice((0, 1, 1, 2, 3)))]
    parts.append(_framed(mutator.frame(random)) if random.random() < 0.8 else random.choice(good))
    stream = b"".join(parts)
    if random.random() < 0.3:
        at = random.randrange(len(stream))
        stream = stream[:at] + random.randbytes(random.randrange(5)) + stream[at + random.randrange(5) :]
    return stream


def _framed(body: bytes) -> bytes:
    return HEADER.pack(len(body)) + body
