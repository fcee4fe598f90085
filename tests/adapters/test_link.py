"""The engine's standing connection to its agent, over a real unix socket."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import tempfile
import threading
import weakref
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from kvbridge_proto.engine import Attach, Done, Refused, Want
from kvbridge_proto.pool import (
    Codec,
    Engine,
    Group,
    Handle,
    Layer,
    Model,
    Plane,
    Pool,
    Region,
    Shard,
    Step,
)
from kvbridge_proto.words import OURS
from msgspec.structs import replace

from kvbridge.adapters.client import EngineClient
from kvbridge.adapters.link import AgentLink, Link, Over
from kvbridge.failpoints import VARIABLE, arm, armed

from .fake_agent import FakeAgent, squatter

POOL = Pool(
    engine=Engine(kind="test", version="1", id="e"),
    model=Model(name="m", layers=(Layer(kind="full", kv_heads=1, key_width=4, value_width=0),)),
    shard=Shard(),
    groups=(Group(kind="full", block_tokens=16, blocks=8),),
    regions=(Region(4096),),
    planes=(
        Plane(
            layer=0,
            part="k",
            offset=0,
            block_stride=128,
            token_axis=(Step(16, 8),),
            head_stride=8,
            element_axis=(Step(4, 2),),
            first_head=0,
            heads=1,
            total_heads=1,
            codec=Codec(name="bf16", width=4, element_bytes=2, row_bytes=8),
        ),
    ),
)
ATTACH = Attach(versions=OURS, pool=POOL, handles=(Handle(region=0, kind="shm_fd", fd=0),))
WANT = Want(request="r", room="room", source="tcp://x:1", first_token=0, end_token=0, blocks=(), deadline_s=1)
DONE = Done(request="r", moved_bytes=0, seconds=0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def agent(tmp_path: Path) -> FakeAgent:
    return FakeAgent(tmp_path / "agent.sock")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def link(tmp_path: Path, clock: Clock) -> AgentLink:
    def fds() -> list[int]:
        return [os.open("/dev/null", os.O_RDONLY)]

    return AgentLink(EngineClient(tmp_path / "agent.sock"), ATTACH, fds, logging.getLogger("test"), clock)


def attach(link: AgentLink, agent: FakeAgent) -> None:
    link.turn()
    agent.pump()
    link.turn()
    assert link.is_attached


def test_start_waits_for_an_agent_that_is_slow_to_come(link: AgentLink, tmp_path: Path, clock: Clock) -> None:
    stop = threading.Event()

    def come_late() -> None:
        stop.wait(0.2)
        agent = FakeAgent(tmp_path / "agent.sock")
        while not stop.wait(0.01):
            clock.now += 1
            agent.pump()

    thread = threading.Thread(target=come_late)
    thread.start()
    try:
        assert link.start(10.0)
        assert link.address == "tcp://127.0.0.1:7700"
    finally:
        stop.set()
        thread.join()


def test_start_goes_on_without_an_agent_and_says_where_it_looked(
    link: AgentLink, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    assert not link.start(0.1)
    for _ in range(20):
        clock.now += 60
        link.turn()
    assert len(caplog.records) == 1, "once, not at every try"
    assert "agent.sock" in caplog.text and "0.1 s" in caplog.text


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
def test_somebody_elses_socket_in_the_agents_place_is_no_agent_and_is_told_of(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        path = Path(folder) / "agent.sock"
        link = AgentLink(EngineClient(path), ATTACH, lambda: [], logging.getLogger("test"), clock)
        agent = FakeAgent(path)
        attach(link, agent)
        agent.die()
        with squatter(path) as (_, heard):
            assert isinstance(link.turn()[0], Over)
            for _ in range(5):
                clock.now += 60
                assert link.turn() == [] and link.state is Link.AWAY and heard() == b""
        told = [record.getMessage() for record in caplog.records if "uid_not_allowed" in record.getMessage()]
        assert len(told) == 1, "once, not at every try"
        path.unlink()
        clock.now += 60
        attach(link, FakeAgent(path))


def test_sends_nothing_before_it_is_attached(link: AgentLink, agent: FakeAgent) -> None:
    link.turn()
    assert not link.send(WANT)
    agent.pump()
    link.turn()
    assert link.send(WANT)
    assert agent.one(Want) == WANT and len(agent.attaches) == 1


@pytest.mark.parametrize(
    "change",
    [{"room": "\ud800"}, {"source": "tcp://h\udfff:1"}, {"first_token": 1 << 70}, {"blocks": object()}],
    ids=["room", "address", "number", "object"],
)
def test_what_cannot_be_encoded_is_not_sent_and_harms_nothing(
    link: AgentLink, agent: FakeAgent, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    attach(link, agent)
    assert not link.send(replace(WANT, **change))
    (record,) = caplog.records
    assert "not sent: message: Want cannot be encoded" in record.getMessage() and record.getMessage().isprintable()
    assert link.send(WANT) and agent.one(Want) == WANT and link.is_attached


def test_what_came_before_the_end_is_heard_before_it(link: AgentLink, agent: FakeAgent) -> None:
    attach(link, agent)
    agent.say(DONE)
    agent.die()
    heard = link.turn()
    assert heard[0] == DONE and isinstance(heard[1], Over) and len(heard) == 2
    assert link.state is Link.AWAY and link.address == ""


def test_tries_again_after_longer_and_longer_pauses(link: AgentLink, agent: FakeAgent, clock: Clock) -> None:
    attach(link, agent)
    agent.hang_up()
    agent.is_answering_attach = False
    link.turn()
    tries = []
    for _ in range(60):
        clock.now += 1
        link.turn()
        agent.pump()
        if len(agent.attaches) > 1 + len(tries):
            tries.append(clock.now)
            agent.hang_up()
    pauses = [later - earlier for earlier, later in pairwise(tries)]
    assert pauses == sorted(pauses) and pauses[-1] > 8


def test_is_over_only_when_the_agent_has_closed_its_end(link: AgentLink, agent: FakeAgent, clock: Clock) -> None:
    attach(link, agent)
    link.give_up("no answer")
    assert not link.send(WANT)
    for _ in range(5):
        clock.now += 100
        assert link.turn() == [] and link.state is Link.ENDING
    agent.pump()  # goes on, reads our end, lets go
    (over,) = link.turn()
    assert over == Over("no answer")
    clock.now += 1
    attach(link, agent)
    assert len(agent.attaches) == 2


def test_a_bad_frame_from_the_agent_ends_the_connection_but_not_the_wait(link: AgentLink, agent: FakeAgent) -> None:
    attach(link, agent)
    assert agent._engine is not None
    agent._engine.sendall(b"\xff\xff\xff\xff")
    assert link.turn() == [] and link.state is Link.ENDING
    agent.pump()
    assert isinstance(link.turn()[0], Over)


def test_a_refusal_is_told_with_its_reasons(
    link: AgentLink, agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    agent.is_answering_attach = False
    link.turn()
    agent.pump()
    agent.say(Refused(code="engine_present", reasons=("engine: vllm other (pid 12) is attached to this agent",)))
    link.turn()
    assert "engine_present" in caplog.text and "pid 12" in caplog.text


def test_leaves_no_descriptor_behind(link: AgentLink, agent: FakeAgent, clock: Clock) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(5):
        clock.now += 60
        attach(link, agent)
        agent.hang_up()
        assert isinstance(link.turn()[0], Over)
    assert count() == before
    clock.now += 60
    attach(link, agent)
    link.close()
    agent.pump()
    assert count() == before


@contextlib.contextmanager
def forked() -> Iterator[int]:
    """A child that lives on and does nothing, as one of a data loader."""
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(told, b"x")
            signal.pause()
        finally:
            os._exit(0)
    try:
        assert os.read(ready, 1) == b"x"
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(told)


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_forked_child_does_not_hide_the_engines_end(link: AgentLink, agent: FakeAgent, how: str) -> None:
    attach(link, agent)
    with forked():
        agent.pump()
        assert agent._engine is not None, "the child said nothing"
        assert link.send(WANT) and agent.one(Want) == WANT, "the connection is the parent's as before"
        if how == "closed":
            link.close()
        else:
            assert link._client._socket is not None and link._witness is not None
            link._client._socket.close()  # as a killed process: no word, no shutdown
            link._witness.close()
        agent.pump()
        assert agent._engine is None, "the agent hears the end while the child lives"


def test_the_links_of_a_killed_engine_end_while_its_child_lives(tmp_path: Path, agent: FakeAgent) -> None:
    """The engine is a process of its own, killed once it has a child."""
    ready, told = os.pipe()
    engine = os.fork()
    if engine == 0:
        try:
            link = AgentLink(EngineClient(agent.path), ATTACH, lambda: [], logging.getLogger("test"))
            link.start(10)
            with forked() as child:
                os.write(told, child.to_bytes(4, "little"))
                signal.pause()
        finally:
            os._exit(1)
    child = 0
    try:
        with agent.alive():
            child = int.from_bytes(os.read(ready, 4), "little")
        assert agent._engine is not None
        os.kill(engine, signal.SIGKILL)
        os.waitpid(engine, 0)
        agent.pump()
        assert agent._engine is None
        os.kill(child, 0)  # it lives
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
        os.close(ready)
        os.close(told)


def test_a_link_that_is_gone_is_not_kept_for_forks(tmp_path: Path) -> None:
    link = AgentLink(EngineClient(tmp_path / "agent.sock"), ATTACH, lambda: [], logging.getLogger("test"))
    gone = weakref.ref(link)
    del link
    gc.collect()
    assert gone() is None


@pytest.fixture
def disarmed() -> Iterator[None]:
    yield
    arm("")


def test_says_that_the_engine_was_started_to_fail(
    request: pytest.FixtureRequest, disarmed: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "engine.want_sent=pause:0.01")
    request.getfixturevalue("link")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "engine.want_sent=pause@1" in record.getMessage()
    assert armed() == ("engine.want_sent",)


def test_an_engine_does_without_failpoints_that_nobody_knows(
    request: pytest.FixtureRequest,
    disarmed: None,
    agent: FakeAgent,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(VARIABLE, "engine.wan_sent=kill")
    link = request.getfixturevalue("link")
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and "no failpoint 'engine.wan_sent'" in record.getMessage()
    attach(link, agent)
    assert link.send(WANT) and armed() == ()
