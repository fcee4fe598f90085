"""Clients of the metrics port that say nothing, little or nonsense cost the agent little, and not for long."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import Metric

from kvbridge.agent import scraping
from kvbridge.agent.metrics import Metrics
from kvbridge.agent.outgoing_peers import OutgoingPeer
from kvbridge.agent.scraping import ALL_OPEN, KEPT_S, serve
from kvbridge.errors import OperatorError
from kvbridge.state_machines import SessionState
from testing.proc import Stopwatch, descriptors
from testing.refusals import refused
from testing.waiting import soon, wait_for
from tests.integration.agent.player import Player, Wire
from tests.unit.exchange.world import World

REQUEST_S = 2.0


@contextlib.contextmanager
def serving(
    host: str = "127.0.0.1",
    family: socket.AddressFamily = socket.AF_INET,
    registry: CollectorRegistry | None = None,
    why_ill: str = "",
    pages: Mapping[str, Callable[[], bytes]] | None = None,
) -> Iterator[tuple[str, int]]:
    bare = host.strip("[]")
    with socket.create_server((bare, 0), family=family) as free:
        port = free.getsockname()[1]
    stop = serve(registry or Metrics().registry, lambda: why_ill, f"{host}:{port}", pages or {}, REQUEST_S)
    try:
        yield bare, port
    finally:
        stop()


def scraped(place: tuple[str, int]) -> str:
    host = f"[{place[0]}]" if ":" in place[0] else place[0]
    text: bytes = urllib.request.urlopen(f"http://{host}:{place[1]}/metrics", timeout=60).read()
    return text.decode()


def is_answered(place: tuple[str, int]) -> bool:
    try:
        return 'kvbridge_rebuilds_total{replaced="slots"} 0.0' in scraped(place)
    except OSError:
        return False


def asked(place: tuple[str, int], path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{place[0]}:{place[1]}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("path", ["/", "/metric", "/metrics/", "/healthz/", "/readyz", "/..%2fmetrics"])
def test_a_page_that_is_none_is_not_found(path: str) -> None:
    with serving() as place:
        assert asked(place, path) == (404, "here are /metrics, /healthz\n")
        assert asked(place, "/metrics?name[]=up")[0] == 200


def test_health_is_told_without_making_the_page_of_metrics() -> None:
    registry = Counted()
    with serving(registry=registry) as place:
        assert asked(place, "/healthz") == (200, "ok\n") and registry.reads == 0
    with serving(registry=registry, why_ill="it hangs") as place:
        assert asked(place, "/healthz") == (503, "it hangs\n") and registry.reads == 0


@pytest.mark.proves("T28")
def test_who_connects_and_says_nothing_costs_few_threads_and_keeps_nobody_out() -> None:
    """A probe that is not answered would have the agent restarted."""
    with serving() as place, contextlib.ExitStack() as stack:
        threads, before = threading.active_count(), descriptors()
        silent = [stack.enter_context(socket.create_connection(place)) for _ in range(100)]
        assert asked(place, "/healthz") == (200, "ok\n")
        assert threading.active_count() - threads <= 2 * ALL_OPEN
        assert descriptors() - before - len(silent) <= 2 * ALL_OPEN
        assert is_answered(place)
        soon(lambda: threading.active_count() <= threads and descriptors() <= before + len(silent), 2 * REQUEST_S)


@pytest.mark.proves("T28")
def test_who_says_little_now_and_then_is_cut_off_as_well() -> None:
    with serving() as place, socket.create_connection(place) as slow:
        watch = Stopwatch()
        with pytest.raises(ConnectionError):
            while watch.seconds() < 2 * REQUEST_S:
                slow.sendall(b"G")
                time.sleep(0.1)


def test_nonsense_and_resets_harm_nobody_and_fill_no_log(capfd: pytest.CaptureFixture[str]) -> None:
    with serving() as place:
        for said in (b"\r\n" * 100, b"GET", b"\x16\x03\x01" * 50, b"GET /metrics HTTP/1.1\r\n" + b"a" * 70_000):
            with socket.create_connection(place) as odd:
                odd.sendall(said)
                odd.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # its close is a reset
        assert is_answered(place)
    assert capfd.readouterr().err == ""


class Counted(CollectorRegistry):
    """Counts how often it is read; `may_go` holds up who does."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.may_go = threading.Event()
        self.may_go.set()
        Counter("kvbridge_test", "Of this test", registry=self)
        Counter("kvbridge_last", "Of this test", registry=self)
        self.reads = 0  # a counter reads it as well when it is made

    def collect(self) -> Iterator[Metric]:
        self.reads += 1
        self.may_go.wait(60)
        return iter(super().collect())


@pytest.mark.proves("T28")
def test_busy_scrapers_have_it_made_once_a_second_and_all_get_all_of_it() -> None:
    registry, texts, begun = Counted(), list[str](), time.monotonic()

    def scrape() -> None:
        while time.monotonic() < begun + 2.5 * KEPT_S:
            with contextlib.suppress(OSError):  # its place at the door may not be free yet
                texts.append(scraped(place))

    scrapers = [threading.Thread(target=scrape) for _ in range(ALL_OPEN)]
    with serving(registry=registry) as place:
        for scraper in scrapers:
            scraper.start()
        for scraper in scrapers:
            scraper.join()
    assert 2 <= registry.reads <= (time.monotonic() - begun) / KEPT_S + 1 and len(texts) > ALL_OPEN
    assert all("kvbridge_test_total 0.0" in text and "kvbridge_last_total 0.0" in text for text in texts)


def test_who_asks_while_it_is_being_made_gets_that_very_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none of before, which may be as old as the last scrape."""
    monkeypatch.setattr(scraping, "KEPT_S", 0.0)
    registry = Counted()
    page = scraping.KeptPage("", lambda: generate_latest(registry))
    old = page.text()
    monkeypatch.setattr(scraping, "KEPT_S", 60.0)
    registry.may_go.clear()
    texts: list[bytes] = []
    askers = [threading.Thread(target=lambda: texts.append(page.text())) for _ in range(4)]
    for asker in askers:
        asker.start()
    wait_for(lambda: registry.reads == 2)
    assert not texts
    registry.may_go.set()
    for asker in askers:
        asker.join()
    assert len(texts) == 4 and len(set(texts)) == 1 and registry.reads == 2 and old


def test_sessions_may_come_and_go_while_they_are_counted() -> None:
    peers = Player(World().receivers[0].engine).peers
    sessions, ends = peers.outgoing.sessions, time.monotonic() + 0.5
    dialled = [OutgoingPeer(str(number), Wire(str(number), is_dialled=True)) for number in range(300)]

    def come_and_go() -> None:
        while time.monotonic() < ends:
            for each in dialled:
                sessions[each.address] = each
            sessions.clear()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    coming = threading.Thread(target=come_and_go)
    coming.start()
    try:
        while time.monotonic() < ends:
            assert not peers.count_dialled(SessionState.OPEN) and not peers.open_dialled()
    finally:
        coming.join()
        sys.setswitchinterval(before)
    for number, state in enumerate(SessionState):
        sessions[str(number)] = OutgoingPeer(str(number), Wire(str(number)), state=state)
    assert [peers.count_dialled(state) for state in SessionState] == [1] * len(SessionState)


ADDRESSES = [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6), ("[::1]", socket.AF_INET6)]


@pytest.mark.parametrize(("host", "family"), ADDRESSES)
def test_answers_on_the_address_that_was_named_until_it_is_stopped(host: str, family: socket.AddressFamily) -> None:
    bare = host.strip("[]")
    try:
        socket.create_server((bare, 0), family=family).close()
    except OSError:
        pytest.skip(f"this host has no {host}")
    with serving(host, family) as place:
        silent = socket.create_connection(place)
        assert is_answered(place)
    with silent:
        silent.settimeout(5)
        assert silent.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place)
    assert not [thread for thread in threading.enumerate() if thread.name == "kvbridge-metrics"]


@pytest.mark.parametrize("place", ["no such host:0", "127.0.0.1:x", "127.0.0.1:{}"])
def test_says_which_address_it_cannot_have(place: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, refused(OperatorError, "metrics_address"):
        Metrics().serve(place.format(taken.getsockname()[1]), str)
