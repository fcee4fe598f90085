"""Agents that are met before a request needs them, with real agents."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from kvbridge_proto.engine import Done
from kvbridge_proto.peer import Goodbye, Hello, Refuse

from demo.processes import free_port
from kvbridge.agent.meeting import Meetings
from kvbridge.errors import OperatorError
from kvbridge.transport.listed import ServiceName, read_entry, read_list
from testing.agents import AgentProcess, OracleEngine, agent, attached
from testing.hosts import why_not
from testing.name_server import NameServer, name_server
from testing.nursery import Place
from testing.oracle import Shape, build_all, fill
from testing.pairs import carry
from testing.waiting import wait_for
from tests.integration.agent.player import Player, Whole, Wire, hello_from
from tests.integration.agent.test_scraping import scraped
from tests.unit.exchange.world import World

NAME = "prefill.example"
Start = Callable[..., OracleEngine]


@pytest.fixture
def start(tmp_path: Path, stack: ExitStack) -> Start:
    def start(name: str, shape: Shape = Shape("nhd"), **options: Any) -> OracleEngine:  # noqa: B008 - it is frozen
        return stack.enter_context(attached(stack.enter_context(agent(tmp_path, name, **options)), shape))

    return start


@pytest.fixture
def named(tmp_path: Path) -> Iterator[tuple[NameServer, Place]]:
    if reason := why_not():
        pytest.skip(reason)
    with name_server(tmp_path, NAME) as found:
        yield found


def met(agent: AgentProcess) -> list[str]:
    """The addresses of open sessions with senders."""
    return [each.address for each in agent.status.peers if each.state == "sender open"]


def handshakes(agent: AgentProcess) -> dict[str, float]:
    return {name: count for name, count in agent.status.counters.items() if "handshakes" in name}


def meets(receiver: OracleEngine, *addresses: str) -> None:
    wait_for(lambda: sorted(met(receiver.agent)) == sorted(addresses), why=receiver.agent.text)


async def test_whoever_was_refused_for_lack_of_an_engine_comes_again_once_one_is_attached(world: World) -> None:
    """Not only when its next attempt is due: an engine may take minutes to start."""
    receiver = Whole(world.receivers[0].engine)
    meetings = Meetings(["P0"], receiver.receiver, "own", lambda: receiver.engine, lambda: receiver.now)
    meetings._note_addresses()
    meetings.turn(0.0)
    wire = receiver.wires["P0"]
    sender, link = Player(world.senders[0].engine), Wire("D0", "", "D")
    engine, sender.engine = sender.engine, None
    while len(wire.said(Hello)) < 6:
        await sender.takes(link, hello_from(world, "D"))
        receiver.peers._on_message(wire, "P", link.last(Refuse))
        while len(wire.said(Hello)) == len(link.said(Refuse)):
            receiver.now += 0.25
            meetings.turn(receiver.now)
    receiver.peers._on_message(wire, "P", link.last(Refuse))
    meetings.turn(receiver.now)
    assert receiver.now > 4.0 and len(wire.said(Hello)) == 6 and not link.said(Goodbye)
    sender.engine = engine
    sender.peers.incoming.engine_came()
    receiver.peers._on_message(wire, "P", link.last(Goodbye))
    meetings.turn(receiver.now)
    assert len(wire.said(Hello)) == 7
    sender.peers.incoming.engine_came()
    assert len(link.said(Goodbye)) == 1, "once"


async def test_a_link_that_is_lost_is_not_told_of_an_engine(world: World) -> None:
    sender, link = Player(world.senders[0].engine), Wire("D0", "", "D")
    engine, sender.engine = sender.engine, None
    await sender.takes(link, hello_from(world, "D"))
    sender.peers.incoming.lose(link, "test")
    sender.engine = engine
    sender.peers.incoming.engine_came()
    assert not link.said(Goodbye)


def needs_no_handshake(sender: OracleEngine, receiver: OracleEngine) -> None:
    """The first request of this pair costs as many handshakes as the second: none."""
    before = handshakes(receiver.agent), handshakes(sender.agent)
    for request in ("first", "second"):
        assert isinstance(answer := carry(sender, receiver, request), Done), answer
        assert (handshakes(receiver.agent), handshakes(sender.agent)) == before


def test_the_first_request_of_a_pair_that_met_needs_no_handshake(start: Start) -> None:
    sender = start("p")
    receiver = start("d", meet=sender.agent.address)
    meets(receiver, sender.agent.address)
    needs_no_handshake(sender, receiver)


def test_all_ranks_of_an_engine_are_met_by_the_address_of_one(start: Start, tmp_path: Path, stack: ExitStack) -> None:
    senders = []
    for rank, held in enumerate(build_all(Shape("nhd", tp_size=2))):
        running = stack.enter_context(agent(tmp_path, f"p{rank}"))
        senders.append(stack.enter_context(closing(OracleEngine(running, held))))
        senders[-1].attach()
    addresses = [each.agent.address for each in senders]
    receiver = start("d", Shape("hnd"), meet=addresses[0])
    wait_for(lambda: met(receiver.agent) == addresses[:1], why=receiver.agent.text)
    for each in senders:  # the engine says only now who its other ranks are
        each.directory(*(other.agent for other in senders))
    meets(receiver, *addresses)
    before = handshakes(receiver.agent)
    for each in senders:
        fill(each.held, [5], range(16))
        each.offer("first", [5], 16)
    receiver.want("first", addresses[0], [6], range(16))
    receiver.done("first")
    assert handshakes(receiver.agent) == before


def test_an_agent_that_comes_later_is_met_and_one_that_comes_back_again(start: Start) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    receiver = start("d", meet=address, connect_s=1)
    wait_for(lambda: handshakes(receiver.agent) or "peer_unreachable" in receiver.agent.text())
    sender = start("p", listen=address)
    meets(receiver, address)
    needs_no_handshake(sender, receiver)
    sender.agent.kill()
    sender.close()
    meets(receiver)
    again = start("p", listen=address)
    meets(receiver, address)
    needs_no_handshake(again, receiver)


def test_one_that_refuses_is_named_once_and_not_asked_in_a_storm(start: Start) -> None:
    other, sender = start("other", Shape("nhd", key_width=24, value_width=24)), start("p")
    addresses = other.agent.address, sender.agent.address
    receiver = start("d", meet=",".join(addresses))
    meets(receiver, sender.agent.address)
    wait_for(lambda: "not met" in receiver.agent.text(), why=receiver.agent.text)
    time.sleep(3.0)  # a storm would be seen by then
    assert receiver.agent.text().count("not met") == 1
    assert f"not met: peer={other.agent.address} code=incompatible" in receiver.agent.text()
    assert other.agent.text().count("refused a peer") == 1
    needs_no_handshake(sender, receiver)


def test_who_may_not_be_dialled_is_not_met_and_it_is_said(start: Start) -> None:
    sender = start("p")
    receiver = start("d", meet=sender.agent.address, dial="127.0.0.1:1")
    wait_for(lambda: f"not met: peer={sender.agent.address} code=peer_not_allowed" in receiver.agent.text())
    assert not receiver.agent.status.peers


def test_a_file_is_read_again_when_it_changes(start: Start, tmp_path: Path) -> None:
    first, second, named = start("p0"), start("p1"), tmp_path / "agents"
    named.write_text(f"# of the fleet\n\n{first.agent.address}\n")
    receiver = start("d", meet=f"file://{named}")
    meets(receiver, first.agent.address)
    named.write_text("nonsense\n")
    wait_for(lambda: "nobody new can be met" in receiver.agent.text(), why=receiver.agent.text)
    meets(receiver, first.agent.address)
    (new := tmp_path / "new").write_text(f"{first.agent.address}\n{second.agent.address}\n")
    os.replace(new, named)
    meets(receiver, first.agent.address, second.agent.address)
    needs_no_handshake(second, receiver)


def test_every_address_of_a_name_is_met_as_it_appears_and_forgotten_when_it_is_gone(
    start: Start, named: tuple[NameServer, Place]
) -> None:
    """As a headless Service has them: one port, an address for each pod. Our own may be among them."""
    (server, place), port = named, free_port()
    places = [f"127.0.{os.getpid() % 250}.{number}" for number in (2, 3, 4)]
    addresses = [f"tcp://{each}:{port}" for each in places]
    first = start("p0", listen=addresses[0])
    server.addresses = [places[0], places[2]]
    metrics = f"127.0.0.1:{free_port()}"
    receiver = start("d", listen=addresses[2], meet=f"dns://{NAME}:{port}", place=place, connect_s=1, metrics=metrics)
    meets(receiver, addresses[0])
    needs_no_handshake(first, receiver)
    second = start("p1", listen=addresses[1])
    server.addresses = places
    meets(receiver, *addresses[:2])
    needs_no_handshake(second, receiver)
    server.addresses = places[1:]

    def is_forgotten() -> bool:
        """Not only lost for a while."""
        page = scraped(("127.0.0.1", int(metrics[10:])))
        counts = ('{state="met"} 1.0', '{state="waiting"} 0.0')
        return all(f"kvbridge_meet_agents{each}" in page for each in counts)

    wait_for(is_forgotten, why=receiver.agent.text)
    first.agent.kill()
    meets(receiver, addresses[1])
    before = len(receiver.agent.text())
    asked = server.asked
    wait_for(lambda: server.asked >= asked + 3)
    assert addresses[0] not in receiver.agent.text()[before:], "it goes on about one that is gone"
    server.addresses, asked = [], server.asked
    wait_for(lambda: server.asked >= asked + 2)
    assert met(receiver.agent) == [addresses[1]]


def test_nobody_is_met_without_an_engine_and_all_are_once_it_attaches(start: Start, tmp_path: Path) -> None:
    sender = start("p")
    with agent(tmp_path, "d", meet=sender.agent.address) as running:
        time.sleep(1.0)
        assert not running.status.peers
        for number in (1, 2):
            with attached(running) as receiver:
                meets(receiver, sender.agent.address)
                needs_no_handshake(sender, receiver)
            wait_for(lambda: running.text().count("engine left") == number, why=running.text)  # noqa: B023
            assert not running.status.peers


def test_entries_are_addresses_names_and_files() -> None:
    assert read_entry("tcp://LOCALHOST:07700#KEY", "meet") == "tcp://localhost:7700#KEY"
    assert read_entry("dns://prefill.default.svc:7700", "meet") == ServiceName("prefill.default.svc", "7700", "")
    assert ServiceName("p", "7700", "#KEY").at("10.0.0.1") == "tcp://10.0.0.1:7700#KEY"
    assert read_entry("file:///etc/agents", "meet") == Path("/etc/agents")
    assert read_list("# one\n tcp://a:1 \n\ndns://b:2\n", "meet") == ["tcp://a:1", ServiceName("b", "2", "")]


@pytest.mark.parametrize(
    "entry", ["", "prefill:7700", "tcp://a", "tcp://a:0", "tcp://*:7700", "dns://a:70000", "dns://a", "file://agents"]
)
def test_another_entry_is_refused_with_what_is_needed(entry: str) -> None:
    with pytest.raises(OperatorError, match=r"meet: got .*, need tcp://HOST:PORT, dns://NAME:PORT or file:///PATH"):
        read_entry(entry, "meet")


def test_kernels_are_compiled_for_equal_pools_at_attach_and_for_others_as_they_are_met(start: Start) -> None:
    """Before any request."""
    sender = start("p", Shape("nhd"))
    receiver = start("d", Shape("hnd"), module="tests.integration.agent.warming_agent")
    warmed = lambda own, digest: f"warm pull: own={own} digest={digest}" in receiver.agent.text()  # noqa: E731
    wait_for(lambda: warmed(True, True) and warmed(True, False), why=receiver.agent.text)
    assert not warmed(False, True) and not receiver.agent.status.peers
    again = start("d2", Shape("hnd"), module="tests.integration.agent.warming_agent", meet=sender.agent.address)
    wait_for(lambda: "own=False digest=True" in again.agent.text(), why=again.agent.text)
    wait_for(lambda: "own=False digest=False" in again.agent.text(), why=again.agent.text)
