"""Two agents on two hosts, with NIXL over TCP: what a long, lossy or broken path costs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import why_not
from tests.system.faults.two_hosts import HostPair, host_pair

FIRST_S = 0.5  # what a first want may take
TRIES = 3


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[HostPair]:
    if reason := why_not():
        pytest.skip(reason)
    with host_pair(tmp_path, deadline_s=15.0) as made:
        yield made


def test_a_first_want_finds_staging_made(pair: HostPair) -> None:
    for agent, status in zip(pair.agents, pair.at_start, strict=True):
        assert (status.receive_slots.free, status.send_slots.free) == (32, 16), "an agent served before it had slots"
        assert agent.log.read_text().index("made slots") < agent.log.read_text().index("serving")
    first = pair.request()
    assert first["code"] == ""
    made_s = [
        float(s) for agent in pair.agents for s in re.findall(r"made slots: .* s=([\d.]+)", agent.log.read_text())
    ]
    # A busy machine makes slots as slowly as it carries: a want that waits for either side's takes longer than one.
    assert first["seconds"] < max(FIRST_S, min(made_s)), made_s


@pytest.mark.parametrize(("round_trip_s", "loss"), [(0.16, 0.0), (0.05, 0.05)])
def test_a_long_or_lossy_path_gets_a_route(pair: HostPair, round_trip_s: float, loss: float) -> None:
    pair.path.becomes(round_trip_s=round_trip_s, loss=loss)
    for _ in range(TRIES):  # what is lost is up to chance
        if not (ended := pair.request())["code"]:
            break
    assert ended["code"] == "", f"{ended}\n{pair.agents[0].tail()}"
    (peer,) = pair.agents[1].wait_serving().peers
    assert peer.route_name == "nixl" and 0 < peer.bytes_per_s < 1e7, "the best write that finished counts"
