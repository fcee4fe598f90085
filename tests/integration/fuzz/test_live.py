"""A live agent under attack at both its sockets: it serves on, its memory stays flat, its descriptors come back."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random

import pytest
from kvbridge_proto.engine import Directory, Offer, Refused, ToAgent, Want
from kvbridge_proto.framing import encode, pack
from kvbridge_proto.peer import Envelope, Ping

from testing.agents import AgentProcess
from testing.pairs import Bench
from testing.proc import descriptors, resident_bytes
from tests.integration.fuzz.codecs import streamed
from tests.integration.fuzz.mutate import Mutator
from tests.integration.fuzz.typed import drawer
from tests.integration.fuzz.zmtp import COMMAND, MORE, frame, greeting, ready
from tests.unit.proto.samples import BODIES, TO_AGENT, enveloped

pytestmark = pytest.mark.proves("G25")

WARM, ROUNDS = 500, 6000  # connections at each door
GROWN_BYTES = 24 << 20  # libzmq alone lost 37 MiB in so many before it was told what sockets.py tells it
OPEN = 200  # at once
ABSURD = 450  # messages of each engine


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(tmp_path_factory.mktemp("live"), stack, connect_s=10, silence_s=10)


class Attacker:
    """What is sent is drawn from the seed."""

    def __init__(self, agent: AgentProcess, seed: int) -> None:
        self.agent, self.random = agent, Random(seed)
        host, _, port = agent.address.removeprefix("tcp://").partition(":")
        self.port = host, int(port)
        self.incarnation = agent.status.agent.incarnation
        self.envelopes = Mutator([encode(enveloped(body)) for body in BODIES], Envelope)
        self.messages = Mutator([encode(message) for message in TO_AGENT], ToAgent)
        self.good = [pack(message) for message in TO_AGENT if type(message).__name__ in ("StatusQuery", "Withdraw")]

    def to_port(self) -> tuple[bytes, bytes]:
        """Garbage before, in, or after ZeroMQ's handshake: what is sent first, and once its greeting has come."""
        random, noise = self.random, self.random.randbytes(self.random.choice((0, 1, 9, 64, 4096)))
        shake = ready(identity=random.choice((b"", b"\0abcd", b"same", b"x" * 255)))
        match random.randrange(8):
            case 0:
                return noise, b""
            case 1:
                return greeting()[: random.randrange(64)], b""
            case 2:
                return greeting(random.choice((b"PLAIN", b"CURVE", b"\xff" * 20)), random.choice((0, 1, 3, 255))), noise
            case 3:
                return greeting(), frame(noise, COMMAND, random.choice((None, 0, 1 << 31, (1 << 63) - 1)))
            case 4:
                announced = random.choice((None, 5 << 20, 1 << 62))
                return greeting(), shake + frame(noise, random.choice((0, MORE, 8, 0xFF)), announced)
            case 5:
                return greeting(), shake + frame(b"", MORE) * random.randrange(200) + frame(noise)
        return greeting(), shake + b"".join(frame(self.envelope()) for _ in range(random.randrange(1, 6)))

    def envelope(self) -> bytes:
        random = self.random
        if random.random() < 0.5:
            return self.envelopes.frame(random)
        body = random.choice(BODIES) if random.random() < 0.8 else Ping(number=1)
        incarnation = random.choice(("", self.incarnation, "other"))
        return encode(Envelope(version=1, sender=f"b{random.randrange(9)}", receiver=incarnation, number=0, body=body))

    def fire_at_port(self, connections: int) -> None:
        held: list[socket.socket] = []
        for _ in range(connections):
            link = socket.create_connection(self.port, timeout=60)
            held.append(link)
            with contextlib.suppress(OSError):
                self._say(link, *self.to_port())
            if len(held) > OPEN or self.random.random() < 0.5:
                held.pop(self.random.randrange(len(held))).close()
        for link in held:
            link.close()

    def _say(self, link: socket.socket, first: bytes, then: bytes) -> None:
        link.sendall(first)
        if then:
            link.recv(64, socket.MSG_WAITALL)
            link.sendall(then)
        if self.random.random() < 0.7:  # one that hangs up at once takes back what it sent
            link.shutdown(socket.SHUT_WR)
            while link.recv(1 << 12):
                pass

    def fire_at_socket(self, connections: int) -> None:
        for _ in range(connections):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
                link.settimeout(60)
                link.connect(str(self.agent.socket))
                stream = streamed(self.random, self.good, self.messages)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    if self.random.random() < 0.3:
                        fds = [0] * self.random.choice((1, 3, 64))
                        sent = socket.send_fds(link, [stream], fds)
                        stream = stream[sent:]
                    link.sendall(stream)
                    link.shutdown(socket.SHUT_WR)
                    while link.recv(1 << 16):
                        pass


def at_rest(agent: AgentProcess, most: int, seconds: float = 20) -> int:
    """How many descriptors are open once it is no more than so many, or time is up."""
    end = time.monotonic() + seconds
    while descriptors(agent.process.pid) > most and time.monotonic() < end:
        time.sleep(0.1)
    return descriptors(agent.process.pid)


@pytest.mark.parametrize("door", ["port", "socket"])
def test_thousands_of_hostile_connections_leave_nothing_behind(pair: Bench, door: str) -> None:
    pair.works(f"before {door}")
    attacker = Attacker(pair.sender.agent, 7)
    fire = attacker.fire_at_port if door == "port" else attacker.fire_at_socket
    before = descriptors(pair.sender.agent.process.pid)
    fire(WARM)
    at_rest(pair.sender.agent, before)
    warm = resident_bytes(pair.sender.agent.process.pid)
    fire(ROUNDS)
    assert at_rest(pair.sender.agent, before, 100) <= before
    grown = resident_bytes(pair.sender.agent.process.pid) - warm
    assert grown < GROWN_BYTES, f"{grown} bytes more after {ROUNDS} connections"
    pair.works(f"after {door}")
    text, counters = pair.sender.agent.text(), pair.sender.agent.status.counters
    rejected = {name: count for name, count in counters.items() if "rejected" in name}
    assert sum(rejected.values()) > ROUNDS / 10, rejected  # it was read, not only connected to
    print(door, rejected, f"RSS +{grown} bytes")
    assert "Traceback" not in text and "internal_error" not in str(counters), text[-3000:]


def test_an_attached_engine_that_says_absurd_things_costs_itself_only(pair: Bench) -> None:
    """Typed and within every bound, from the very engine that the agent serves."""
    draw, random = drawer(Offer | Want | Directory), Random(7)
    for _ in range(ABSURD):
        for engine in pair.engines:
            engine.client.send(draw(random))
    for engine in pair.engines:
        engine.directory(engine.agent)
        assert "Traceback" not in engine.agent.text(), engine.agent.text()[-3000:]
    assert not [message for message in pair.sender.heard if isinstance(message, Refused) and not message.about]
    pair.works("after all")
