"""What an agent tells systemd: that it serves, and that it is well as long as its data thread runs."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from kvbridge_proto.status import STILL_S

from demo.processes import free_port
from kvbridge.agent.supervisor import BEATS_A_WATCHDOG
from kvbridge.config import supervision
from kvbridge.options import Supervision
from testing.agents import ANSWER_S, AgentProcess, OracleEngine, agent
from testing.nursery import kvbridge
from testing.oracle import Shape, build
from testing.waiting import wait_for
from tests.integration.agent.impatient_agent import goes_on
from tests.integration.dataplane.test_stuck import IMPATIENT, LONGER_S, paused

WATCHDOG_S = 2.0
CREDENTIALS = struct.Struct("3i")


class Systemd:
    """The socket that it listens on. Whose words they are, the kernel says."""

    def __init__(self, path: Path) -> None:
        self._end = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._end.bind(str(path))
        self.close = self._end.close

    def hears(self, pid: int, seconds: float) -> str:
        """The next that this process says, "" if it says nothing for so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._end.settimeout(left)
            try:
                said, ((_, _, sender),), _, _ = self._end.recvmsg(4096, socket.CMSG_SPACE(CREDENTIALS.size))
            except TimeoutError:
                break
            if CREDENTIALS.unpack(sender)[0] == pid:
                return said.decode()
        return ""

    def hears_nothing(self, seconds: float) -> bool:
        """Whether nobody has said a word, nor does for so long."""
        return not select.select([self._end], [], [], seconds)[0]


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Systemd]:
    """It started the agents of this test, and watches them."""
    path = tmp_path / "notify"
    monkeypatch.setenv("NOTIFY_SOCKET", str(path))
    monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_S * 1e6)))
    with closing(Systemd(path)) as found:
        yield found


def test_says_that_it_serves_that_it_is_well_and_that_it_drains(tmp_path: Path, systemd: Systemd) -> None:
    with agent(tmp_path, "a") as running:
        pid = running.process.pid
        said = [systemd.hears(pid, ANSWER_S) for _ in range(4)]
        assert said.count("READY=1\nSTATUS=serving") == 1 and said.count("WATCHDOG=1") == 3
        began = time.monotonic()
        while systemd.hears(pid, 0.001):  # what waits because we were slow
            pass
        for _ in range(3):
            assert systemd.hears(pid, ANSWER_S) == "WATCHDOG=1"
        assert time.monotonic() - began > WATCHDOG_S / BEATS_A_WATCHDOG  # not as fast as it can
        running.process.send_signal(signal.SIGTERM)
        while (last := systemd.hears(pid, ANSWER_S)) == "WATCHDOG=1":
            pass
        assert last == "STOPPING=1\nSTATUS=draining"


def test_is_not_ready_where_it_cannot_serve(tmp_path: Path, systemd: Systemd) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        begun = agent(tmp_path, "a", listen=f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(AssertionError):
            begun.__enter__()
    assert systemd.hears_nothing(0.2)


def test_says_nothing_while_its_data_thread_stands_still(
    tmp_path: Path, stack: ExitStack, systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender: AgentProcess = paused(tmp_path, stack, monkeypatch, LONGER_S).agent
    pid, began = sender.process.pid, time.monotonic()
    while systemd.hears(pid, 2 * WATCHDOG_S):
        assert time.monotonic() - began < LONGER_S / 2, "fed though the thread stands still"
    assert sender.status.state == "serving"  # its loop is well


def healthz(place: str) -> tuple[int, str]:
    """What a probe of Kubernetes is answered."""
    try:
        with urllib.request.urlopen(f"http://{place}/healthz", timeout=ANSWER_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_probes_fail_while_the_data_thread_stands_still_and_pass_after(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"127.0.0.1:{free_port()}"
    running = paused(tmp_path, stack, monkeypatch, LONGER_S, metrics=place).agent
    asked = lambda: kvbridge("status", "--probe", "--socket", running.socket)  # noqa: E731
    is_early = healthz(place) == (200, "ok\n") and asked().returncode == 0
    assert is_early or running.status.still_s > STILL_S, "a busy machine asks late"
    while running.status.still_s <= STILL_S:
        time.sleep(0.1)
    code, said = healthz(place)
    assert code == 503 and said.startswith("the data thread has not come round for ")
    told = asked()
    assert told.returncode == 1 and told.stderr.startswith(
        f"kvbridge status: data_plane_stuck: {running.socket}: the data thread has not come round for "
    )
    goes_on(tmp_path)
    wait_for(lambda: healthz(place)[0] == 200)
    assert (asked().returncode, running.status.state) == (0, "serving")


def test_the_probe_fails_while_the_event_loop_stands_still_and_passes_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBRIDGE_FAILPOINTS", f"sender.offer_heard=pause:{LONGER_S}")
    place = f"127.0.0.1:{free_port()}"
    with (
        agent(tmp_path, "a", module=IMPATIENT, metrics=place) as running,
        closing(OracleEngine(running, build(Shape("nhd")))) as engine,
    ):
        engine.attach()
        assert healthz(place) == (200, "ok\n")
        engine.offer("r", [5], 16)
        wait_for(lambda: healthz(place)[0] == 503)
        assert healthz(place)[1].startswith("the event loop has not come round for ")
        goes_on(tmp_path)
        wait_for(lambda: healthz(place)[0] == 200)
        assert running.status.state == "serving"


def test_ends_with_where_each_thread_stood(tmp_path: Path, systemd: Systemd) -> None:
    """As the watchdog ends it."""
    with agent(tmp_path, "a") as running:
        running.process.send_signal(signal.SIGABRT)
        running.process.wait(ANSWER_S)
        assert "Fatal Python error: Aborted" in running.text() and "data_plane.py" in running.text()


def test_knows_who_listens() -> None:
    said = {"NOTIFY_SOCKET": "/run/systemd/notify", "WATCHDOG_USEC": "60000000"}
    assert supervision({}) is supervision({"WATCHDOG_USEC": "60000000"}) is None
    assert supervision(said) == Supervision("/run/systemd/notify", 60.0)
    assert supervision(said | {"WATCHDOG_PID": str(os.getpid())}) == Supervision("/run/systemd/notify", 60.0)
    assert supervision(said | {"WATCHDOG_PID": "1"}) == Supervision("/run/systemd/notify", 0.0)  # of who started us
    assert supervision({"NOTIFY_SOCKET": "@abstract"}) == Supervision("@abstract", 0.0)
