"""The engine's standing connection to its agent, over a real unix socket."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from kvbridge_proto.common import OURS, Rank
from kvbridge_proto.engine import READERS_S, Attach, Directory, Done, Refused, Want
from kvbridge_proto.pool import Handle
from msgspec.structs import replace

from kvbridge.adapters.engine.client import EngineClient
from kvbridge.adapters.engine.link import ATTACH_RETRY_S, WATCH_S, AgentLink, Over, ReadsOver, WritesOver
from kvbridge.failpoints import VARIABLE, arm, armed
from kvbridge.state_machines import LinkState
from testing.waiting import soon, wait_for
from tests.integration.adapters.fake_agent import FakeAgent, fake_pidfd, squatter
from tests.integration.adapters.small import Clock, memory_of

POOL = memory_of().pool
ATTACH = Attach(versions=OURS, pool=POOL, handles=(Handle(region=0, kind="shm_fd", fd=0),))
WANT = Want(
    number=1, request="r", rendezvous="room", sender="tcp://x:1", first_token=0, end_token=0, blocks=(), deadline_s=1
)
DONE = Done(number=1, request="r", moved_bytes=0, seconds=0)


@pytest.fixture
def agent(tmp_path: Path) -> FakeAgent:
    return FakeAgent(tmp_path / "agent.sock")


@pytest.fixture
def clock() -> Clock:
    return Clock(is_still=True)


def link_to(path: Path, clock: Callable[[], float] = time.monotonic, fds: Sequence[int] = (), **more: Any) -> AgentLink:
    return AgentLink(EngineClient(path, pidfd_of=fake_pidfd), ATTACH, fds, logging.getLogger("test"), clock, **more)


@pytest.fixture
def link(tmp_path: Path, clock: Clock) -> Iterator[AgentLink]:
    fd = os.open("/dev/null", os.O_RDONLY)
    yield link_to(tmp_path / "agent.sock", clock, [fd])
    os.close(fd)


def attach(link: AgentLink, agent: FakeAgent) -> None:
    link.turn()
    agent.pump()
    link.turn()
    assert link.is_attached


def test_start_goes_on_without_an_agent_and_says_where_it_looked(
    link: AgentLink, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    assert not link.start(0.1)
    for _ in range(20):
        clock.now += 60
        link.turn()
    assert len(caplog.records) == 1, "once, not at every try"
    assert "agent.sock" in caplog.text and "0.1 s" in caplog.text
    assert "vLLM computes its prompts itself, SGLang fails its requests" in caplog.text


@pytest.mark.proves("T26")
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
def test_somebody_elses_socket_in_the_agents_place_is_no_agent_and_is_told_of(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        path = Path(folder) / "agent.sock"
        link = link_to(path, clock)
        agent = FakeAgent(path)
        attach(link, agent)
        agent.die()
        with squatter(path) as (_, heard):
            assert isinstance(link.turn()[0], Over)
            for _ in range(5):
                clock.now += 60
                assert link.turn() == [] and link.state is LinkState.DETACHED and heard() == b""
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
    [{"rendezvous": "\ud800"}, {"sender": "tcp://h\udfff:1"}, {"first_token": 1 << 70}, {"blocks": object()}],
    ids=["rendezvous", "address", "number", "object"],
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
    assert link.state is LinkState.DETACHED and link.address == ""


@pytest.mark.proves("G20")
def test_tries_again_every_second(link: AgentLink, agent: FakeAgent, clock: Clock) -> None:
    attach(link, agent)
    agent.is_answering_attach = False
    agent.let_go()
    link.turn()
    tries = []
    for _ in range(200):
        clock.now += 0.25
        link.turn()
        agent.pump()
        if len(agent.attaches) > 1 + len(tries):
            tries.append(clock.now)
            agent.let_go()
    pauses = [later - earlier for earlier, later in pairwise(tries)]
    assert len(pauses) > 20 and all(ATTACH_RETRY_S <= pause <= 2 for pause in pauses)


# When it is over:


@pytest.mark.proves("G13")
def test_reads_are_over_soon_after_a_loss_and_writes_when_the_agent_has_let_go(
    link: AgentLink, agent: FakeAgent, clock: Clock
) -> None:
    """It is stopped: what it reads counts no more, and what it writes may come at any time."""
    attach(link, agent)
    link.give_up("no answer")
    assert not link.send(WANT)
    clock.now += READERS_S - 0.001
    assert link.turn() == []
    clock.now += 0.001
    assert link.turn() == [ReadsOver("no answer")]
    for _ in range(5):
        clock.now += 100
        assert link.turn() == [] and link.state is LinkState.ENDING
    agent.pump()  # goes on, reads our end, lets go
    assert link.turn() == [Over("no answer")]
    clock.now += ATTACH_RETRY_S
    attach(link, agent)
    assert len(agent.attaches) == 2


@pytest.mark.parametrize("is_gone_first", [True, False])
def test_other_agents_that_read_on_the_word_of_a_dead_one_are_waited_for(
    link: AgentLink, agent: FakeAgent, clock: Clock, is_gone_first: bool
) -> None:
    """They read until their leases end, however dead it is. Nothing is written from when it is."""
    agent.is_shared = True
    attach(link, agent)
    agent.hang_up()
    if is_gone_first:
        agent.vanish()
    assert link.turn() == ([WritesOver("the agent is gone")] if is_gone_first else [])
    clock.now += READERS_S - 0.001
    assert link.turn() == [] and link.state is LinkState.ENDING
    clock.now += 0.001
    if not is_gone_first:
        assert link.turn() == [ReadsOver("the agent is gone")] and link.state is LinkState.ENDING
        agent.vanish()
    assert link.turn() == [Over("the agent is gone")]


def test_a_turn_sees_that_a_process_is_gone_whose_socket_is_open(agent: FakeAgent, link: AgentLink) -> None:
    """As if a child of it held the socket."""
    attach(link, agent)
    agent.vanish()
    assert link.turn() == [Over("the agent is gone")]


def test_turns_send_what_an_agent_did_not_read_at_once(agent: FakeAgent, link: AgentLink) -> None:
    attach(link, agent)
    message = Directory(ranks=tuple(Rank(tp_rank=i, pp_rank=0, address="tcp://10.0.0.1:7700") for i in range(64)))
    sent = 0
    while link.client.is_all_sent:
        assert link.send(message)
        sent += 1
    while not link.client.is_all_sent:
        agent.pump()
        before = len(agent.heard)
        assert link.turn() == []
        agent.pump()
        assert len(agent.heard) > before or link.client.is_all_sent
    assert agent.take(Directory) == [message] * sent


@pytest.mark.proves("G8")
def test_where_a_process_cannot_be_watched_its_end_is_waited_for_by_time(agent: FakeAgent, clock: Clock) -> None:
    """As in another PID namespace on an older kernel, if an operator accepts that."""
    client = EngineClient(agent.path, allow_unwatched=True, pidfd_of=lambda _: -1)
    link = AgentLink(client, ATTACH, (), logging.getLogger("test"), clock)
    attach(link, agent)
    clock.now += 100
    agent.hang_up()
    assert link.turn() == [ReadsOver("the agent is gone")]
    clock.now += 0.99
    assert link.turn() == []
    clock.now += 0.01
    assert link.turn() == [Over("the agent is gone")]


@pytest.mark.proves("G8")
@pytest.mark.parametrize("by", ["socket", "pid", "nothing"])
def test_knows_the_end_of_a_real_process(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper of ours keeps the listening socket, and nobody the connection."""
    if by != "socket":
        monkeypatch.setattr("kvbridge.adapters.engine.client.SO_PEERPIDFD", 9999)  # no kernel knows it
    if by == "nothing":
        monkeypatch.setattr("kvbridge.unix_socket._CREDENTIALS", NoPid())
    with tempfile.TemporaryDirectory() as folder, slow_to_die(Path(folder) / "agent.sock") as process:
        client = EngineClient(Path(folder) / "agent.sock", allow_unwatched=by == "nothing")
        assert client.connect(5)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"close\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"closed\n"
        assert client.poll() == [] and client.has_ended and not client.is_agent_gone
        if by == "nothing":
            assert client.pidfd == -1
            return
        readable = select.poll()
        readable.register(client.pidfd, select.POLLIN)
        assert not readable.poll(200)
        process.stdin.close()
        assert readable.poll(5000) and client.is_agent_gone
        client.close()


class NoPid:
    """Credentials of a process in a PID namespace that we do not see."""

    size = 12

    def unpack(self, _: bytes) -> tuple[int, int, int]:
        return 0, os.getuid(), os.getgid()


@contextlib.contextmanager
def slow_to_die(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An agent that closes the connection when it is told to, without a word, and lives on until stdin ends."""
    program = (
        "import socket, sys\n"
        "listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[1]); listener.listen()\n"
        "engine, _ = listener.accept(); sys.stdin.readline(); engine.close()\n"
        "print('closed', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_after_a_bad_frame_only_the_end_of_its_process_is_believed(link: AgentLink, agent: FakeAgent) -> None:
    """What it says behind that cannot be read."""
    attach(link, agent)
    assert agent._engine is not None
    agent._engine.sendall(b"\xff\xff\xff\xff")
    assert link.turn() == [] and link.state is LinkState.ENDING
    agent.pump()
    assert isinstance(link.turn()[0], ReadsOver) and link.state is LinkState.ENDING
    agent.vanish()
    assert isinstance(link.turn()[0], Over)


# Refusals:


@pytest.mark.parametrize("code", ["bad_pool", "wrong_device", "version_mismatch", "uid_not_allowed"])
def test_a_refusal_that_will_not_pass_ends_the_start_and_is_tried_rarely(
    link: AgentLink, agent: FakeAgent, clock: Clock, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    agent.refusal = Refused(code=code, reasons=("because",))
    begun = time.monotonic()
    with agent.alive():
        assert not link.start(200.0) and time.monotonic() - begun < 100
    for _ in range(300):
        clock.now += 1
        link.turn()
        agent.pump()
    link.close()
    assert 3 <= len(agent.attaches) <= 8
    (record,) = caplog.records
    assert f"{code}: because" in record.getMessage() and "within" not in record.getMessage()


def test_a_start_waits_for_an_agent_that_is_slow_to_come_and_for_a_refusal_to_pass(agent: FakeAgent) -> None:
    agent.refusal = Refused(code="engine_present", reasons=("the one before is still being detached",))
    link = link_to(agent.path)
    away = agent.path.rename(agent.path.with_suffix(".away"))

    def pass_by() -> None:
        time.sleep(0.2)
        away.rename(agent.path)
        wait_for(lambda: bool(agent.attaches))
        agent.refusal = None

    thread = threading.Thread(target=pass_by)
    with agent.alive():
        thread.start()
        assert link.start(120.0) and len(agent.attaches) > 1 and link.address == agent.address
    thread.join()
    link.close()


@pytest.mark.parametrize(
    ("fds", "reason"),
    [([0] * 1025, "fds: got 1025, limit 1024"), ([1 << 20], "Bad file descriptor")],
    ids=["too many", "not open"],
)
def test_what_keeps_attach_from_being_sent_is_said_at_once(
    agent: FakeAgent, clock: Clock, caplog: pytest.LogCaptureFixture, fds: list[int], reason: str
) -> None:
    link = link_to(agent.path, clock, fds)
    begun = time.monotonic()
    assert not link.start(200.0) and time.monotonic() - begun < 100
    link.close()
    (record,) = caplog.records
    assert "attach cannot be sent" in record.getMessage() and reason in record.getMessage()


# While the engine makes no step:


@pytest.mark.proves("G20")
def test_an_idle_engines_link_notices_the_end_at_once_and_attaches_again(
    agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody calls `turn`. What every agent is to hear first is said again."""
    directory = Directory(ranks=(Rank(tp_rank=0, pp_rank=0, address="tcp://x:1"),))
    link = link_to(agent.path, first=lambda: [directory])
    caplog.set_level(logging.INFO)
    with agent.alive():
        assert link.start(120.0)
    agent.die()
    soon(lambda: "lost the agent" in caplog.text, WATCH_S / 2)
    time.sleep(2.5)
    successor = FakeAgent(agent.path)
    with successor.alive():
        soon(lambda: successor.heard == [directory], 3 * ATTACH_RETRY_S)
    assert caplog.text.count("kvbridge: attached to") == 2
    assert isinstance(link.turn()[-1], Over) and link.is_attached
    link.close()


def test_an_idle_link_costs_next_to_nothing(link: AgentLink, agent: FakeAgent) -> None:
    with agent.alive():
        assert link.start(120.0)
    begun = time.process_time()
    time.sleep(2.0)
    attached_s, begun = time.process_time() - begun, time.process_time()
    agent.die()
    time.sleep(2.0)
    away_s = time.process_time() - begun
    link.close()
    assert max(attached_s, away_s) < 0.2, "who looks without end takes 2 s"


def test_an_error_that_nobody_expects_does_not_end_the_links_thread(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once, with its cause, and tried again a second later, not at once."""
    link = link_to(agent.path)
    with agent.alive():
        assert link.start(120.0)
    tries, reconnect = [0.0], link.client.reconnect

    def fail() -> bool:
        tries.append(time.monotonic())
        if len(tries) <= 3:
            raise ZeroDivisionError("nobody expects this")
        return reconnect()

    monkeypatch.setattr(link.client, "reconnect", fail)
    agent.die()
    successor = FakeAgent(agent.path)
    with successor.alive():
        wait_for(lambda: len(tries) > 3 and link.state is LinkState.ATTACHED)
    link.close()
    assert all(later - earlier > 0.9 for earlier, later in pairwise(tries))
    (record,) = [record for record in caplog.records if "nobody expects" in record.getMessage()]
    assert record.exc_info is not None


def test_an_error_while_attached_loses_the_agent_and_says_why(
    link: AgentLink, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(link, agent)

    def fail() -> None:
        raise ZeroDivisionError("nobody expects this")

    agent.say(DONE)
    with monkeypatch.context() as patch:
        patch.setattr(link.client, "poll", fail)
        assert link._look() > 0.5
    assert link.state is LinkState.ENDING and "nobody expects this" in link.why
    agent.pump()
    assert isinstance(link.turn()[-1], Over)


def test_what_the_links_thread_has_heard_keeps_no_step_waiting(link: AgentLink, agent: FakeAgent) -> None:
    attach(link, agent)
    agent.say(DONE)
    link._look()  # as the thread, between an engine's `turn` and its `rest`
    begun = time.monotonic()
    link.rest(100.0)
    assert time.monotonic() - begun < 50 and link.turn() == [DONE]


def test_the_links_thread_takes_nothing_that_an_engine_rests_for(
    link: AgentLink, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(link, agent)
    driven: list[None] = []
    engine = threading.Thread(target=link.rest, args=(120.0,))
    with monkeypatch.context() as patch:
        patch.setattr(link, "_drive", lambda: driven.append(None))
        engine.start()
        wait_for(lambda: link._is_resting)
        assert 0 < link._look() < 0.1
        agent.say(DONE)
        engine.join(60.0)
        assert not engine.is_alive() and not driven
        assert not link._look() and driven, "and looks again once the engine goes on"
    assert link.turn() == [DONE]


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


@pytest.mark.proves("G19")
def test_a_forked_child_does_not_hide_the_engines_end(link: AgentLink, agent: FakeAgent) -> None:
    attach(link, agent)
    with forked():
        agent.pump()
        assert agent._engine is not None, "the child said nothing"
        assert link.send(WANT) and agent.one(Want) == WANT, "the connection is the parent's as before"
        link.close()
        agent.pump()
        assert agent._engine is None, "the agent hears the end while the child lives"


@pytest.mark.proves("G19")
def test_the_links_of_a_killed_engine_end_while_its_child_lives(tmp_path: Path, agent: FakeAgent) -> None:
    """The engine is a process of its own, killed once it has a child."""
    ready, told = os.pipe()
    engine = os.fork()
    if engine == 0:
        try:
            link = link_to(agent.path)
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


def test_threads_that_fork_at_once_give_back_what_each_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second takes the lock in the very moment in which the first has given it back."""
    hooks: dict[str, Callable[[], None]] = {}
    monkeypatch.setattr(os, "register_at_fork", lambda **said: hooks.update(said))
    link = link_to(tmp_path / "agent.sock")
    is_held, may_go_on, failed = threading.Event(), threading.Event(), list[BaseException]()

    class Lock:
        """Whose first release lets the other thread fork before it returns."""

        def __init__(self) -> None:
            self.lock = threading.RLock()
            self.acquire = self.lock.acquire

        def release(self) -> None:
            self.lock.release()
            if not second.is_alive() and not is_held.is_set():
                second.start()
                assert is_held.wait(60.0)

    def fork() -> None:
        try:
            hooks["before"]()
            is_held.set()
            assert may_go_on.wait(60.0)
            hooks["after_in_parent"]()
        except BaseException as error:
            failed.append(error)

    second = threading.Thread(target=fork)
    link.lock = Lock()
    hooks["before"]()
    hooks["after_in_parent"]()
    may_go_on.set()
    second.join(120.0)
    assert not failed and link.lock.acquire(timeout=60.0), "nobody holds it any more"


def test_a_link_that_is_gone_is_not_kept_for_forks(tmp_path: Path) -> None:
    link = link_to(tmp_path / "agent.sock")
    gone = weakref.ref(link)
    del link
    gc.collect()
    assert gone() is None


@pytest.fixture
def disarmed() -> Iterator[None]:
    yield
    arm("")


@pytest.mark.parametrize(
    ("value", "level", "said", "points"),
    [
        ("engine.want_sent=pause:0.01", "WARNING", "engine.want_sent=pause@1", ("engine.want_sent",)),
        ("engine.wan_sent=kill", "ERROR", "no failpoint 'engine.wan_sent'", ()),
    ],
)
def test_says_that_the_engine_was_started_to_fail_and_does_without_failpoints_that_nobody_knows(
    disarmed: None, agent: FakeAgent, monkeypatch: Any, caplog: Any, value: str, level: str, said: str, points: Any
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    link = link_to(agent.path)
    (record,) = caplog.records
    assert record.levelname == level and said in record.getMessage() and armed() == points
    attach(link, agent)
    assert link.send(WANT)
