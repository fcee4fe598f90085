"""Agents killed inside their kernels, as processes beside engines whose memory they have mapped by CUDA IPC.

The engine reuses the blocks of an open want once its agent's process is gone, and nothing is written there after that.
Under MPS, where a fault hits all clients, the engines and another tenant of the GPU go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.gpu.processes import Child, mps
from bench.scenario import Problem
from tests.integration.agent.disturbed import Pair, Scale, pair_of, receivers_agent_dies, senders_agent_dies

KILLS = 20
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]


def scale(route: str) -> Scale:
    """A GiB in slots of 128 MiB, so that several scatters are queued at once."""
    return Scale(("cuda:0", "cuda:0"), route, tokens=32768, slot_bytes=128 << 20, receive_slots=6, send_slots=2)


@pytest.mark.proves("G20")
@pytest.mark.parametrize("route", ["direct", "pull"])
def test_nothing_is_written_once_a_killed_agents_process_is_gone(tmp_path: Path, route: str) -> None:
    with pair_of(tmp_path, scale(route)) as pair:
        receivers_agent_dies(pair, seed=5, times=KILLS)


@pytest.fixture
def under_mps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is started from here on is a client of a daemon of our own."""
    try:
        with mps() as environment:
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            yield
    except Problem as problem:
        pytest.skip(f"no MPS here: {problem}")


@pytest.mark.proves("G20")
@pytest.mark.usefixtures("under_mps")
@pytest.mark.parametrize("route", ["direct", "pull"])
def test_engines_under_mps_outlive_agents_that_are_killed_in_transfers(tmp_path: Path, route: str) -> None:
    """Beside another tenant that keeps the GPU full, which makes kernels longer. A fault would end them all."""
    load = Child("bench.gpu.load", tmp_path / "load.log")
    try:
        with pair_of(tmp_path, scale(route)) as pair:
            _is_under_mps(pair)
            for kind, seed in (("decode", 7), ("gemm", 8)):
                load.ask("start", kind=kind, device="cuda:0")
                receivers_agent_dies(pair, seed, times=7)
                senders_agent_dies(pair, seed, times=3)
                assert load.ask("stop")["steps"]
    finally:
        load.end()


def _is_under_mps(pair: Pair) -> None:
    for side in (pair.sender, pair.receiver):
        assert "(MPS)" in str(side.agent.status()), side.agent.status()
