"""Agents of two hosts, each with a key: one stands still, one comes back under another address."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kvbridge_proto.engine import Done, Failed

from testing.agents import OracleEngine, agent, attached
from testing.hosts import DEVICE, two_hosts, why_not
from testing.nursery import Nursery
from testing.pairs import carry
from testing.waiting import wait_for
from tests.integration.agent.test_security import keygen, write_peers

Start = Callable[..., OracleEngine]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[Nursery, dict[str, Any]]]]:
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
            nursery = Nursery(within=host.beside, environment={"UCX_TLS": "tcp"})
            stack.callback(nursery.close)
            options = {"listen": f"tcp://{host.address}:0", "dial": f"{other.address}:*", "net_devices": DEVICE}
            found.append((nursery, options | {"key": key, "peers": peers, "routes": "nixl"}))
        yield found


@pytest.fixture
def starts(places: list[tuple[Nursery, dict[str, Any]]], tmp_path: Path, stack: ExitStack) -> list[Start]:
    """Start an engine and its agent, with the prefilling side's key and host, and with the decoding side's."""

    def start(nursery: Nursery, options: dict[str, Any], name: str, **more: Any) -> OracleEngine:
        running = stack.enter_context(agent(tmp_path, name, born_in=nursery, **options | more))
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
@pytest.mark.parametrize(
    ("name", "rebuild_s"), [("p", 86400), ("new", 0.3)], ids=["with the lock of the one before", "as a new pod"]
)
def test_slots_of_a_sender_that_comes_back_under_another_address_are_free_again(
    name: str, rebuild_s: float, starts: list[Start]
) -> None:
    """Its successor knows that it is dead. Nobody knows it of a pod that was replaced: the slots are replaced then.

    Both are in our PID namespace, so the receiver's agent must not see the end of its process.
    """
    prefill, decode = starts
    sender, receiver = prefill("p"), decode("d", rebuild_s=rebuild_s, is_watching=False)
    slots = lambda: receiver.agent.status.receive_slots  # noqa: E731
    assert isinstance(answer := carry(sender, receiver, "before", deadline_s=60.0), Done), answer
    receiver.want("lost", before := sender.agent.address, [1], range(16), deadline_s=60.0)
    wait_for(lambda: slots().lent == 1)
    sender.agent.kill()
    sender.close()
    assert isinstance(receiver.answer("lost"), Failed) and slots().quarantined == 1
    sender = prefill(name)
    assert sender.agent.address != before
    assert isinstance(answer := carry(sender, receiver, "after", deadline_s=60.0), Done), answer
    wait_for(lambda: slots().free == 8, 60.0, receiver.agent.text)
    assert ("replaced the slots: rebuild_s: 1 of 8 receive slots" in receiver.agent.text()) == (name == "new")
    assert isinstance(answer := carry(sender, receiver, "again", deadline_s=60.0), Done), answer
