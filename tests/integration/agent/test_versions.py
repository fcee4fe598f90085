"""Agents of different releases: ranges of protocol versions that meet carry by the newest common one, others refuse."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from kvbridge_proto.common import OURS, VersionRange
from kvbridge_proto.engine import Attached, Done, Failed, Refused

from testing.agents import PATIENT_S, OracleEngine, agent, is_at_rest
from testing.nursery import kvbridge
from testing.oracle import Shape, build_all
from testing.pairs import carry
from testing.waiting import wait_for

RANGED = "tests.integration.agent.ranged_agent"
TOKENS = 90
TABLES = {16: list(range(6)), 64: [3, 1]}  # of blocks that hold so many tokens
SHAPES = {16: Shape("nhd"), 64: Shape("hnd", block_tokens=64, blocks=8)}
NAMES = map("r{}".format, itertools.count())

Rank = Callable[..., OracleEngine]


@pytest.fixture
def rank(tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Rank:
    """Starts an agent that speaks these versions, with an engine that speaks all of them."""

    def start(name: str, oldest: int, newest: int, block_tokens: int, **options: object) -> OracleEngine:
        monkeypatch.setenv("VERSIONS", f"{oldest}-{newest}")
        running = stack.enter_context(agent(tmp_path, name, module=RANGED, **options))
        (held,) = build_all(SHAPES[block_tokens])
        engine = stack.enter_context(closing(OracleEngine(running, held)))
        attached = engine.attach(versions=VersionRange(1, 2))
        assert isinstance(attached, Attached) and attached.version == newest
        return engine

    return start


def carried(sender: OracleEngine, receiver: OracleEngine) -> Done | Failed:
    given, wanted = (TABLES[each.pool.groups[0].block_tokens] for each in (sender, receiver))
    return carry(sender, receiver, next(NAMES), given, wanted, TOKENS)


def agreed(engine: OracleEngine) -> set[int]:
    return {peer.protocol for peer in engine.agent.status.peers}


@pytest.mark.parametrize("routes", ["pull,host", "nixl,host"])
@pytest.mark.parametrize(
    ("first", "second", "version"),
    [((1, 2), (1, 1), 1), ((1, 2), (1, 2), 2), ((1, 2), (2, 2), 2)],
    ids=["newer and older", "both newer", "newer and newest"],
)
def test_ranges_that_meet_carry_both_ways(
    rank: Rank, routes: str, first: tuple[int, int], second: tuple[int, int], version: int
) -> None:
    one, other = rank("one", *first, 16, routes=routes), rank("other", *second, 64, routes=routes)
    assert isinstance(carried(one, other), Done)
    assert isinstance(carried(other, one), Done)
    for engine, newest in ((one, first[1]), (other, second[1])):
        assert agreed(engine) == {version}
        status = engine.agent.status
        assert status.engine is not None and status.engine.protocol == newest
        shown = [line.split() for line in kvbridge("status", "--socket", engine.agent.socket).stdout.splitlines()]
        assert [line[-2:] for line in shown if line[:1] == ["engine"]] == [["protocol", str(newest)]]
        assert shown.count(["protocol", str(version)]) == len(status.peers) == 2


@pytest.mark.parametrize("is_newer_asked", [True, False], ids=["of the newer", "of the older"])
def test_ranges_that_do_not_meet_are_refused_at_once(rank: Rank, is_newer_asked: bool) -> None:
    """Every time, and the older goes on with those that it can read."""
    newer, older = rank("newer", 2, 2, 16), rank("older", 1, 1, 64)
    sender, receiver = (newer, older) if is_newer_asked else (older, newer)
    theirs, ours = (2, 1) if is_newer_asked else (1, 2)
    for _ in range(3):
        began = time.monotonic()
        answer = carried(sender, receiver)
        assert isinstance(answer, Failed) and answer.code == "version_mismatch", answer
        assert time.monotonic() - began < PATIENT_S / 2, "it waited for connect_s"
        assert answer.reason.endswith(f"versions: sender {theirs}-{theirs}, receiver {ours}-{ours}"), answer
    wait_for(lambda: is_at_rest(receiver.agent.status))
    assert agreed(receiver) <= {0} and agreed(sender) == set()
    both = rank("both", 1, 2, 16)
    assert isinstance(carried(both, older), Done)
    assert isinstance(carried(older, both), Done)


def test_an_engine_that_no_version_is_common_with_is_refused(tmp_path: Path) -> None:
    (held,) = build_all(SHAPES[16])
    newer = VersionRange(OURS.newest + 1, OURS.newest + 2)
    with agent(tmp_path, "a") as running, closing(OracleEngine(running, held)) as engine:
        refused = engine.attach(versions=newer)
        assert isinstance(refused, Refused) and refused.code == "version_mismatch"
        ranges = f"agent {OURS.oldest}-{OURS.newest}, engine {newer.oldest}-{newer.newest}"
        assert refused.reasons == (f"versions: {ranges}",)
