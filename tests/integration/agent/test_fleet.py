"""`kvbridge status --fleet` with real agents: healthy ones, a pair that refuses, dead and silent ones, and many."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kvbridge_proto.engine import Done
from msgspec import structs

from demo.processes import free_port
from kvbridge.agent import scraping
from kvbridge.agent.metrics import Metrics
from kvbridge.geometry.traits import prompt_size
from testing.agents import OracleEngine, agent, attached
from testing.hosts import why_not
from testing.name_server import name_server
from testing.nursery import kvbridge
from testing.oracle import Shape
from testing.pairs import carry
from testing.waiting import wait_for
from tests.integration.agent.test_scraping import asked
from tests.system.test_prometheus import Server

SECRET = "prompt-of-a-client"
NAME = "agents.example"
Start = Callable[..., tuple[OracleEngine, int]]


@pytest.fixture
def start(tmp_path: Path, stack: ExitStack) -> Start:
    def start(name: str, shape: Shape = Shape("nhd"), host: str = "127.0.0.1", **options: Any) -> tuple[Any, int]:  # noqa: B008 - frozen
        port = options.pop("port", None) or free_port()
        running = stack.enter_context(agent(tmp_path, name, metrics=f"{host}:{port}", **options))
        return stack.enter_context(attached(running, shape)), port

    return start


def fleet(verdict: str, *wheres: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, what --json says, and what people see, once both begin with this: busy agents may answer too late."""
    flags = [part for where in wheres for part in ("--fleet", where)]
    answers: list[subprocess.CompletedProcess[str]] = []

    def agree() -> bool:
        answers[:] = kvbridge("status", *flags, "--json"), kvbridge("status", *flags)
        return json.loads(answers[0].stdout)["verdict"].startswith(verdict) and verdict in answers[1].stdout

    wait_for(agree, why=lambda: f"{answers}")
    told, seen = answers
    assert told.returncode == seen.returncode, (told, seen)
    return told.returncode, json.loads(told.stdout), seen.stdout


def at(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def test_a_fleet_that_is_well_is_a_line_each_and_its_page_tells_no_request(start: Start) -> None:
    (sender, one), (receiver, two) = start("p", routes="nixl"), start("d", Shape("hnd"), routes="nixl")
    assert isinstance(carry(sender, receiver, SECRET), Done)
    sender.offer(f"{SECRET}-2", [1], 16)
    wait_for(lambda: sender.agent.status.offers)
    code, told, seen = fleet("2 of 2", at(one), at(two))
    assert (code, told["verdict"]) == (0, "2 of 2 agents healthy, 0 pairs without a session"), seen
    (slow,) = told["slowest"]
    assert (slow["receiver"], slow["sender"], slow["route"]) == ("d", "p", "nixl") and slow["bytes_per_s"] > 0
    lines = [line.split() for line in seen.splitlines()]
    assert [line[:2] for line in lines if line[:1] in (["d"], ["p"])][:2] == [["d", "healthy"], ["p", "healthy"]]
    time.sleep(scraping.KEPT_S)
    page = asked(("127.0.0.1", one), "/status")[1]
    assert SECRET not in page and sender.agent.status.agent.incarnation not in page
    told, (peer,) = json.loads(page), json.loads(page)["peers"]
    size = prompt_size(sender.pool)
    assert told["held"] == {"offers": 1, "unclaimed": 1, "tokens": 16}
    assert told["engine"]["size"] == structs.asdict(size) and size.token_bytes > 0
    assert (peer["carried"], peer["carried_bytes"]) == (1, 16 * size.token_bytes) and 0 < peer["carried_s"] < 60


def test_a_pair_that_refuses_is_named_with_the_reason_until_it_meets(start: Start) -> None:
    other, one = start("other", Shape("nhd", key_width=24, value_width=24))
    receiver, two = start("d", meet=other.agent.address)
    wait_for(lambda: receiver.agent.status.refusals, why=receiver.agent.text)
    code, told, seen = fleet("2 of 2", at(one), at(two))
    assert code == 1 and told["verdict"] == "2 of 2 agents healthy, 1 pairs without a session"
    (pair,) = told["refused"]
    assert (pair["receiver"], pair["sender"], pair["code"]) == ("d", "other", "incompatible"), pair
    assert "d from other" in seen and "24" in pair["reason"] and pair["reason"] in " ".join(seen.split())


def test_addresses_that_clients_make_up_make_no_fleet_ill_unless_an_agent_is_to_meet_them(start: Start) -> None:
    (sender, one), made_up, outside = start("p"), f"tcp://127.0.0.1:{free_port()}", "tcp://192.0.2.1:7700"
    receiver, two = start("d", connect_s=0.5, dial="127.0.0.0/8:*")
    for address, code in ((made_up, "peer_unreachable"), (outside, "peer_not_allowed")):
        receiver.want(address, address, [1], range(16))
        receiver.failed(address, code)
    code, told, seen = fleet("2 of 2", at(one), at(two))
    assert (code, told["verdict"]) == (0, "2 of 2 agents healthy, 0 pairs without a session"), seen
    assert {each["sender"]: each["code"] for each in told["in_vain"]} == {
        made_up: "peer_unreachable",
        outside: "peer_not_allowed",
    }
    assert "named by requests, and nobody is there" in seen and f"d from {made_up}" in seen
    told_to, three = start("m", connect_s=0.5, meet=made_up)
    wait_for(lambda: told_to.agent.status.refusals, why=told_to.agent.text)
    code, told, _ = fleet("2 of 2", at(one), at(three))
    assert code == 1 and [each["sender"] for each in told["refused"]] == [made_up] and not told["in_vain"], told
    frozen, four = start("f", connect_s=0.5, dial="127.0.0.1:1")
    frozen.want("r", sender.agent.address, [1], range(16))  # the address of an agent of the fleet
    frozen.failed("r", "peer_not_allowed")
    code, told, _ = fleet("2 of 2", at(one), at(four))
    assert code == 1 and told["verdict"].endswith("1 pairs without a session"), told


def test_a_refusal_is_forgotten_once_there_is_a_session(start: Start) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    receiver, _ = start("d", meet=address, connect_s=0.5)
    wait_for(lambda: [each.code for each in receiver.agent.status.refusals] == ["peer_unreachable"])
    start("p", listen=address)
    wait_for(lambda: receiver.agent.status.peers and not receiver.agent.status.refusals, why=receiver.agent.text)


def test_a_dead_agent_a_silent_one_one_without_an_engine_and_no_agent_are_lines_of_their_own(
    start: Start, tmp_path: Path, stack: ExitStack
) -> None:
    _, well = start("p")
    dead, none, off = (free_port() for _ in range(3))
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
    stack.enter_context(agent(tmp_path, "idle", metrics=f"127.0.0.1:{none}"))
    stack.enter_context(agent(tmp_path, "off", metrics=f"127.0.0.1:{off}", no_status_page=True))
    (listed := tmp_path / "agents").write_text("".join(f"{at(port)}\n" for port in (well, dead, silent, none, off)))
    code, told, seen = fleet("1 of 5 agents healthy", f"file://{listed}")
    agents = {each["at"].rpartition(":")[2]: each for each in told["agents"]}
    assert code == 1
    assert "cannot be reached: Connect" in agents[str(dead)]["error"]
    assert agents[str(silent)]["error"] == "does not answer within 1.5 s"
    assert agents[str(none)]["problems"] == ["no engine is attached"]
    assert "status_page" in agents[str(off)]["error"]
    assert seen.count("NOT HEALTHY") == 4


def test_every_address_of_a_name_is_asked(start: Start, tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    port, hosts = free_port(), [f"127.0.{os.getpid() % 250}.{number}" for number in (7, 8)]
    for number, host in enumerate(hosts):
        start(f"p{number}", host=host, port=port)
    with name_server(tmp_path, NAME) as (server, place):
        server.addresses = [*hosts, f"127.0.{os.getpid() % 250}.9"]
        told = kvbridge("status", "--fleet", f"dns://{NAME}:{port}", "--json", place=place)
        errors = [each.get("error", each.get("name")) for each in json.loads(told.stdout)["agents"]]
        assert errors[:2] == ["p0", "p1"] and errors[2].startswith("cannot be reached"), told
        server.addresses = []
        told = kvbridge("status", "--fleet", f"dns://{NAME}:{port}", place=place)
        assert told.returncode == 1 and "no address of this name" in told.stdout


def test_prometheus_names_the_agents_also_those_that_died(start: Start, tmp_path: Path, stack: ExitStack) -> None:
    (_, one), (dying, two), other = start("p"), start("d"), free_port()
    stack.callback(scraping.serve(Metrics().registry, str, f"127.0.0.1:{free_port()}", {}))
    jobs = [
        {"job_name": "kvbridge", "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in (one, two)]}]},
        {"job_name": "another", "static_configs": [{"targets": [f"127.0.0.1:{other}"]}]},
    ]
    server = Server(tmp_path, jobs)
    stack.callback(server.close)
    server.wait("count(kvbridge_build_info) == 2")
    where = f"prometheus={server.url}"
    code, told, _ = fleet("2 of 2", where)
    assert code == 0 and sorted(each["name"] for each in told["agents"]) == ["d", "p"], told
    dying.agent.kill()
    server.wait('up{job="kvbridge"} == 0')
    code, told, seen = fleet("1 of 2", where)
    assert code == 1 and f"127.0.0.1:{two}" in seen, told


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("nonsense", "need tcp://HOST:PORT"),
        ("file:///no/such", "No such file"),
        ("prometheus=ftp://x", "need prometheus=http://HOST:PORT"),
    ],
)
def test_who_cannot_be_meant_is_a_wrong_command_line(where: str, words: str) -> None:
    told = kvbridge("status", "--fleet", where)
    assert told.returncode == 2 and words in told.stderr, told


def test_no_prometheus_is_said() -> None:
    told = kvbridge("status", "--fleet", f"prometheus=http://127.0.0.1:{free_port()}")
    assert told.returncode == 1 and "no_prometheus" in told.stderr, told


@pytest.fixture
def hundred(start: Start) -> Iterator[list[str]]:
    """Addresses of a hundred servers of one real agent's page: a tenth never answer, the others when many are asked."""
    _, port = start("p")
    page = asked(("127.0.0.1", port), "/status")[1].encode()
    servers, places, waiting = list[socket.socket](), list[str](), Waiting()
    for number in range(100):
        servers.append(socket.create_server(("127.0.0.1", 0)))
        places.append(at(servers[-1].getsockname()[1]))
        if number % 10:
            threading.Thread(target=_serve, args=(servers[-1], page, waiting), daemon=True).start()
    yield places
    for each in servers:
        each.close()


class Waiting:
    """Connections whose clients wait for an answer, until so many do at once."""

    ENOUGH = 48  # a tenth of those that are asked at once never answer

    def __init__(self) -> None:
        self._asked = set[int]()
        self._are_enough = threading.Event()

    def wait(self, connection: socket.socket) -> bool:
        """False if this client has gone before."""
        self._asked.add(connection.fileno())
        if len(self._asked) >= self.ENOUGH:
            self._are_enough.set()
        while not self._are_enough.wait(0.02):
            if select.select([connection], [], [], 0)[0]:
                self._asked.discard(connection.fileno())
                return False
        return True


def _serve(server: socket.socket, page: bytes, waiting: Waiting) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError):  # a busy client has given up
            connection.recv(1 << 16)
            if waiting.wait(connection):
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + page)


def test_a_hundred_agents_are_asked_at_once(hundred: list[str], tmp_path: Path) -> None:
    """Most of them answer only when they all are asked."""
    (listed := tmp_path / "agents").write_text("\n".join(hundred))
    assert fleet("90 of 100 agents healthy", f"file://{listed}")[0] == 1
