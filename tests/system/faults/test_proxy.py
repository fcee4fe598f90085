"""What a hostile network can do to the control channel under load: requests may fail, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.system.faults.proxy import Proxy
from tests.system.faults.world import PATIENT_S, SLACK_S, World

HALF_OPEN_S = 3.0  # longer than silence_s


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    proxy = Proxy()
    yield proxy
    proxy.close()


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "keyed"])
def world(tmp_path_factory: pytest.TempPathFactory, proxy: Proxy, request: pytest.FixtureRequest) -> Iterator[World]:
    """CURVE goes through the proxy as it is, end to end."""
    world = World(tmp_path_factory.mktemp("proxy"), through=proxy.through, is_keyed=request.param)
    try:
        world.meet()
        yield world
    finally:
        world.close()


def spoil(world: World, proxy: Proxy, how: Callable[[], object]) -> None:
    """Under load, this; then it is healed, and all is well."""
    passed = proxy.pieces
    world.begin(24, abandon=0.2)
    end = time.monotonic() + SLACK_S
    while proxy.pieces < passed + 12:  # in the middle of it
        assert time.monotonic() < end, "nothing passes the proxy"
        time.sleep(0.001)
    how()
    for side in world.sides.values():
        side.stuck_s = HALF_OPEN_S
    world.finish()
    proxy.heal()
    world.serves()
    world.is_clean()
    world.holds_no_more()


@pytest.mark.parametrize("is_reset", [False, True], ids=["FIN", "RST"])
def test_a_cut_connection(world: World, proxy: Proxy, is_reset: bool) -> None:
    def cut() -> None:
        assert proxy.cut(is_reset=is_reset)

    spoil(world, proxy, cut)


def test_a_half_open_connection(world: World, proxy: Proxy) -> None:
    """Everything is taken and nothing arrives, for longer than a peer may be silent."""

    def swallow() -> None:
        proxy.is_swallowing = True
        time.sleep(HALF_OPEN_S)
        proxy.is_swallowing = False

    before = proxy.spoilt
    spoil(world, proxy, swallow)
    assert proxy.spoilt > before


@pytest.mark.parametrize("kind", ["duplicates", "truncates"])
def test_spoilt_bytes(world: World, proxy: Proxy, kind: str) -> None:
    before = proxy.spoilt
    spoil(world, proxy, lambda: setattr(proxy, kind, 3))
    assert proxy.spoilt > before


def test_a_slow_connection_loses_nothing(world: World, proxy: Proxy) -> None:
    """Late is not lost: requests that have time for it succeed."""
    proxy.delay_s = 0.05
    codes = world.codes(PATIENT_S)
    assert not any(codes["sender"] + codes["receiver"]), codes
    proxy.heal()
    world.is_clean()
