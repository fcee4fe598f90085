"""Agents of two hosts, or of two containers of one, and those that take the place of one that was killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from kvbridge_proto.engine import Done, Failed

from kvbridge.failpoints import VARIABLE
from testing.agents import OracleEngine, agent, attached
from testing.hosts import DEVICE, two_hosts, why_not
from testing.nursery import Place
from testing.oracle import Shape
from testing.pairs import carry
from testing.waiting import wait_for
from tests.integration.agent.test_security import keygen, write_peers

Start = Callable[..., OracleEngine]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[Place, dict[str, Any]]]]:
    """Where the sender's and the receiver's agents start, and with which options."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("hosts")
    keys = [keygen(folder, side) for side in ("prefill", "decode")]
    peers = write_peers(folder, *(line for _, line in keys))
    with ExitStack() as stack:
        first, second, _ = stack.enter_context(two_hosts(folder))
        found = []
        for host, other, (key, _) in ((first, second, keys[0]), (second, first, keys[1])):
            options = {"listen": f"tcp://{host.address}:0", "dial": f"{other.address}:*", "net_devices": DEVICE}
            found.append((host.beside, options | {"key": key, "peers": peers, "routes": "nixl"}))
        yield found


@pytest.fixture
def starts(places: list[tuple[Place, dict[str, Any]]], tmp_path: Path, stack: ExitStack) -> list[Start]:
    """Start an engine and its agent, with the prefilling side's key and host, and with the decoding side's."""

    def start(place: Place, options: dict[str, Any], name: str, **more: Any) -> OracleEngine:
        running = stack.enter_context(agent(tmp_path, name, place=place, **options | more))
        return stack.enter_context(attached(running))

    return [partial(start, *place) for place in places]


def test_a_receiver_that_was_given_up_while_it_stood_still_dials_anew_as_soon_as_it_goes_on(
    starts: list[Start],
) -> None:
    """It would find out by the silence, in a minute. The sender has waited for a second only."""
    prefill, decode = starts
    sender, receiver = prefill("p", silence_s=1), decode("d", silence_s=60)
    assert isinstance(answer := carry(sender, receiver, "before", deadline_s=60.0), Done), answer
    os.kill(receiver.agent.process.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: not sender.agent.status.peers, why=sender.agent.text)
    finally:
        os.kill(receiver.agent.process.pid, signal.SIGCONT)
    wait_for(lambda: not receiver.agent.status.peers, why=receiver.agent.text)
    assert "link_over" in receiver.agent.text()
    assert isinstance(answer := carry(sender, receiver, "after"), Done), answer


@pytest.mark.proves("G6")
def test_slots_of_a_sender_that_comes_back_under_another_address_are_free_again(starts: list[Start]) -> None:
    """Its successor knows that it is dead, by its lock.

    Both are in our PID namespace, so the receiver's agent must not see the end of its process.
    """
    prefill, decode = starts
    sender, receiver = prefill("p"), decode("d", rebuild_s=86400, is_watching=False)
    slots = lambda: receiver.agent.status.receive_slots  # noqa: E731
    assert isinstance(answer := carry(sender, receiver, "before", deadline_s=60.0), Done), answer
    receiver.want("lost", before := sender.agent.address, [1], range(16), deadline_s=60.0)
    wait_for(lambda: slots().lent == 1)
    sender.agent.kill()
    sender.close()
    assert isinstance(receiver.answer("lost"), Failed) and slots().quarantined == 1
    sender = prefill("p")
    assert sender.agent.address != before
    assert isinstance(answer := carry(sender, receiver, "after", deadline_s=60.0), Done), answer
    wait_for(lambda: slots().free == 8, why=receiver.agent.text)
    assert "replaced the slots" not in receiver.agent.text()
    assert isinstance(answer := carry(sender, receiver, "again", deadline_s=60.0), Done), answer


# On our host, a successor that has no proof to give:


LARGE = Shape(key_width=128, value_width=128)  # a block fills a slot
REBUILT = "kvbridge_rebuilds_total{{replaced={}}}"


@pytest.mark.proves("G5", "G6")
@pytest.mark.parametrize(
    ("is_watched", "rebuild_s"), [(True, 86400), (False, 0.3)], ids=["its end is seen", "its end cannot be seen"]
)
def test_slots_of_a_sender_that_was_killed_and_comes_back_elsewhere_are_free_again(
    is_watched: bool, rebuild_s: float, tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once its process has ended, without a rebuild. Where that cannot be seen, by a rebuild as before."""
    (here := tmp_path / "here").mkdir()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    begin = lambda folder, name, **more: stack.enter_context(  # noqa: E731
        attached(stack.enter_context(agent(folder, name, routes="nixl", **more)), LARGE)
    )
    receiver = begin(here, "d", rebuild_s=rebuild_s, receive_slots=16, is_watching=is_watched)
    receiving = receiver.agent
    monkeypatch.setenv(VARIABLE, "sender.write_posted=kill")
    sender = begin(here, "p")
    monkeypatch.delenv(VARIABLE)
    sender.offer("lost", [1, 2, 3, 4], 64)
    receiver.want("lost", sender.agent.address, [1, 2, 3, 4], range(64), deadline_s=60.0)
    receiver.failed("lost", "peer_lost")
    assert sender.agent.process.is_dead(60.0)
    successor = begin(elsewhere, "q")
    names = map("after-{}".format, count())
    first = lambda: carry(successor, receiver, next(names), deadline_s=60.0)  # noqa: E731
    if is_watched:
        assert isinstance(answer := first(), Done), answer
    else:  # a rebuild ends what it meets
        wait_for(lambda: isinstance(first(), Done), why=receiving.text)
    wait_for(lambda: receiving.status.receive_slots.free == 16, why=receiving.text)
    counters = receiving.status.counters
    assert counters[REBUILT.format("slots")] == (not is_watched) and not counters[REBUILT.format("fabric")]
    assert ("process has ended: " in receiving.text()) == is_watched
    assert ("no pidfd of a sender" in receiving.text()) == (not is_watched)
    assert isinstance(answer := carry(successor, receiver, "again", deadline_s=60.0), Done), answer


# Containers: the same kernel, each with a mount namespace of its own:


SHARED = "/mnt"  # each container has a folder of its own there
Container = tuple[Place, Path]


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> list[Container]:
    """Two, each with the folder that it has at SHARED."""
    if reason := why_not():
        pytest.skip(reason)
    folders = [tmp_path_factory.mktemp(side) for side in ("prefill", "decode")]
    return [(Place(mounts=((str(folder), SHARED, ""),)), folder) for folder in folders]


@pytest.mark.parametrize("sockets", [("agent", "agent"), ("prefill", "decode")], ids=["one path", "two paths"])
def test_containers_of_one_host_do_not_call_at_each_others_doors(
    sockets: tuple[str, str], containers: list[Container], stack: ExitStack
) -> None:
    """At the path of the sender's door is the receiver's own, or none."""
    engines = []
    for (place, folder), name in zip(containers, sockets, strict=True):
        options = {"socket": f"{SHARED}/{name}.sock", "log_level": "debug"}
        running = stack.enter_context(agent(folder, name, place=place, **options))
        engines.append(stack.enter_context(attached(running)))
    sender, receiver = engines
    assert isinstance(answer := carry(sender, receiver, "r"), Done), answer
    (peer,) = receiver.agent.status.peers
    assert peer.route_name == "nixl" and f"door {SHARED}/{sockets[0]}.sock.door: " in peer.route, peer.route
    assert "the peer is in another container" in peer.route
    for side in engines:
        lines = [line for line in side.agent.text().splitlines() if " DEBUG " not in line]
        assert not [line for line in lines if "kvbridge.door" in line or " WARNING " in line], side.agent.text()
        assert not [line for line in lines if "route does not work" in line], side.agent.text()
