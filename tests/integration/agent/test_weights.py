"""Weights that change while a prompt is held, with real agents: rows of one set are never used with another."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from kvbridge_proto.engine import (
    Adopt,
    Decline,
    Done,
    Expect,
    Failed,
    Held,
    NewEpoch,
    Release,
    ReleasedAll,
    Rescale,
    Rescaled,
    Weights,
)

from demo.processes import free_port
from kvbridge.loopback.messages import number_of
from testing.agents import Client, OracleEngine
from testing.oracle import Shape
from testing.pairs import Bench, Benches
from testing.waiting import wait_for

AT_ONCE_S = 50.0  # wants and offers of these tests have a minute


def reweigh(engine: OracleEngine, version: str) -> int:
    engine.client.send(Weights(version=version))
    return engine.told(NewEpoch).epoch


@pytest.fixture(params=["pull", "nixl"])
def bench(request: pytest.FixtureRequest, bench_of: Benches) -> Bench:
    return bench_of(routes=request.param)


@pytest.mark.proves("G10")
@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("name", ["", "B"])
def test_an_offer_of_the_weights_of_before_is_over_whichever_side_changes_first(
    bench: Bench, first: str, name: str
) -> None:
    """One side has changed, then both have; the same rendezvous id is wanted each time, as of an untagged prompt."""
    bench.works()
    one, other = (bench.sender, bench.receiver) if first == "prefill" else (bench.receiver, bench.sender)
    bench.offer("r", [1], 16, hold_s=60)
    assert reweigh(one, name) == 2
    if first == "prefill":
        assert bench.sender.released("r", seconds=AT_ONCE_S).code == "other_weights"
    bench.want("w1", [1], range(16), rendezvous="r")
    said = bench.receiver.failed("w1", "other_weights", seconds=AT_ONCE_S)
    assert "weights: sender" in said and (name or "without a name") in said and "default" in said
    reweigh(other, name)
    if first == "decode":
        assert bench.sender.released("r", seconds=AT_ONCE_S).code == "other_weights"
    answer = bench.carry("again")
    assert isinstance(answer, Done if name else Failed), answer
    if isinstance(answer, Failed):
        assert answer.code == "other_weights" and "needs the same weights" in answer.reason
    for engine in (one, other):
        reweigh(engine, "C")
    bench.works()


@pytest.mark.proves("G10")
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_want_that_waits_ends_when_either_engine_has_other_weights(bench: Bench, side: str) -> None:
    bench.works()
    bench.want("w", [1], range(16), deadline_s=60)
    wait_for(lambda: bench.sender.agent.status.transfers)
    reweigh(bench.sender if side == "prefill" else bench.receiver, "B")
    assert "now B, before default" in bench.receiver.failed("w", "other_weights", seconds=AT_ONCE_S)


def test_a_want_whose_sender_is_not_reached_yet_does_not_wait_for_rows_of_other_weights(bench_of: Benches) -> None:
    receiver = bench_of().receiver
    receiver.want("w", f"tcp://127.0.0.1:{free_port()}", [1], range(16), deadline_s=60)
    reweigh(receiver, "B")
    assert "now B" in receiver.failed("w", "other_weights", seconds=AT_ONCE_S)


def test_a_command_releases_what_nobody_has_claimed(bench_of: Benches) -> None:
    """However young it is, and although a request waits for it."""
    bench = bench_of()
    for request in ("young", "awaited"):
        bench.offer(request, [1], 16, hold_s=60)
    bench.receiver.client.send(Expect(number=number_of("awaited"), rendezvous="awaited", sender=bench.address))
    bench.sender.told(Held)
    command = [sys.executable, "-m", "kvbridge.cli", "release", "--socket", str(bench.sender.agent.socket)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "2 prompts" in done.stdout
    for request in ("young", "awaited"):
        assert bench.sender.released(request, seconds=AT_ONCE_S).code == "reclaimed"
    bench.works()


def test_an_engine_that_pauses_gets_back_what_nobody_has_claimed_and_no_other_answer(bench_of: Benches) -> None:
    bench = bench_of()
    bench.offer("r", [1], 16, hold_s=60)
    bench.sender.client.send(Release())
    assert bench.sender.released("r", seconds=AT_ONCE_S).code == "reclaimed"
    client = Client(bench.sender.agent.socket)
    client.send(Release())
    assert client.wait(ReleasedAll).offers == 0
    client.close()
    bench.works()
    assert not [each for each in bench.sender.heard if isinstance(each, ReleasedAll)]


# Scales that the receiver's engine is asked to take:


THEIRS, OURS = {"k": (0.5,), "v": (0.25,)}, {"k": (2.0,), "v": (2.0,)}


class Adopting(OracleEngine):
    def attach(self, **changes: Any) -> Any:
        return super().attach(policy="adopt", **changes)


@pytest.fixture
def pair(bench_of: Benches) -> Bench:
    """Two fp8 engines of other layouts, under other scales; the receiver would take the sender's."""
    shapes = (Shape("nhd", codec="fp8_e4m3", scales=THEIRS), Shape("hnd", codec="fp8_e4m3", scales=OURS))
    bench = bench_of(*shapes, engine=Adopting)
    for memory in bench.sender.held.memory:
        memory[:] = 0x39
    return bench


def fetch(pair: Bench, request: str) -> None:
    pair.offer(request, [1], 16)
    pair.want(request, [1], range(16))


def test_rows_arrive_as_they_are_once_the_engine_has_taken_the_scales(pair: Bench) -> None:
    fetch(pair, "first")
    question = pair.receiver.told(Adopt)
    assert {(each.layer, each.part): each.scales for each in question.scales} == {
        (layer, part): scales for layer in range(2) for part, scales in THEIRS.items()
    }
    pair.receiver.client.send(Rescale(revision=question.revision, scales=question.scales))
    assert pair.receiver.told(Rescaled) == Rescaled(revision=question.revision, epoch=2)
    pair.receiver.done("first")
    fetch(pair, "second")
    pair.receiver.done("second")
    assert not [message for message in pair.receiver.heard if isinstance(message, Adopt)]
    written = 2 * 2 * 4 * 16 * 8  # layers, parts, heads, tokens, width
    assert np.count_nonzero(np.concatenate(pair.receiver.held.memory) == 0x39) == written


def test_an_engine_that_keeps_its_own_gets_nothing_and_is_told_why(pair: Bench) -> None:
    before = [memory.copy() for memory in pair.receiver.held.memory]
    fetch(pair, "first")
    question = pair.receiver.told(Adopt)
    pair.receiver.client.send(Decline(revision=question.revision, reason="requests have been computed"))
    reason = pair.receiver.failed("first", "adopt_refused")
    assert "sender 0.5, receiver 2 (layer 0 k); needs scales=requantize" in reason
    assert "requests have been computed" in reason
    fetch(pair, "second")
    pair.receiver.failed("second", "adopt_refused")
    assert not [message for message in pair.receiver.heard if isinstance(message, Adopt)]
    assert all((now == then).all() for now, then in zip(pair.receiver.held.memory, before, strict=True))
    assert pair.sender.released("first").code == ""
