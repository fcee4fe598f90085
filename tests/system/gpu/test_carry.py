"""Whole transfers on GPUs, with engines and agents as processes. Every element of the receiver's memory is checked.

Engines offer and want while a long kernel delays their stream's writes. So reading or writing before the fence shows as
wrong bytes. `test_who_does_not_wait_is_found_out` proves this by not waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvbridge_proto.peer import ROUTES
from rich.progress import Progress

from demo.run import PAIRS
from kvbridge.loopback.pools import Shape
from kvbridge.loopback.processes import agents
from testing.job_engine import DemoRequest, Job
from testing.jobs import PairOutcome, carry
from testing.late_job import LateJob

REQUESTS = [
    DemoRequest(name="short", tokens=17, seed=1),
    DemoRequest(name="long", tokens=4096, seed=2),
    DemoRequest(name="prefix there", tokens=1777, first_token=1000, seed=3),
]
# They end with a block of every size in PAIRS: rows behind the last token of a block become zeros as well.
WHOLE = [
    DemoRequest(name="short", tokens=192, seed=1),
    DemoRequest(name="long", tokens=4032, seed=2),
    DemoRequest(name="prefix there", tokens=1728, first_token=1000, seed=3),
]
LATE_CYCLES = 40_000_000  # about 20 ms on an H200
TOO_LATE_CYCLES = 3_000_000_000  # 1.5 s: a first transfer compiles, and others start processes meanwhile


def carried(
    folder: Path,
    devices: Sequence[str],
    sender: Shape,
    receiver: Shape,
    late_cycles: int = 0,
    unfenced: str = "",
    requests: Sequence[DemoRequest] = REQUESTS,
    **options: Any,
) -> tuple[PairOutcome, list[str]]:
    """How the transfers of one pair went, and what the agents logged when their sessions opened.

    With `late_cycles` both sides are late. If `unfenced` names a side, only that side is late, and it sends no fence:
    its lateness must outlast the transfer.
    """

    def late(job: Job) -> Job:
        cycles = late_cycles if unfenced in ("", job.role) else 0
        return LateJob(**msgspec.structs.asdict(job), late_cycles=cycles, is_fenced=job.role != unfenced)

    with ExitStack() as stack:
        count = sender.tp_size + receiver.tp_size
        running = stack.enter_context(agents(folder, [f"agent{i}" for i in range(count)], devices, **options))
        outcome = carry(
            folder, running, sender, receiver, list(requests), Progress(disable=True), "testing.late_job", late
        )
        logs = "\n".join(agent.log.read_text() for agent in running)
    assert "Traceback" not in logs, logs
    return outcome, [line.partition("session open: ")[2] for line in logs.splitlines() if "session open" in line]


def drafting(receiver: Shape, drafts: int = 2) -> Shape:
    """With layers of a draft model after its own."""
    return msgspec.structs.replace(receiver, layers=receiver.layers + drafts, drafts=drafts)


def assert_exact(outcome: PairOutcome, routes: Sequence[str], route: str) -> None:
    assert outcome.wrong == ""
    assert routes and all(f" {route} " in said.replace(",", " ,") for said in routes), routes


@pytest.mark.gpu
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("sender", "receiver"), PAIRS, ids=[f"{a.name} to {b.name}" for a, b in PAIRS])
def test_one_gpu(tmp_path: Path, sender: Shape, receiver: Shape, route: str) -> None:
    assert_exact(*carried(tmp_path, ["cuda:0"], sender, receiver, routes=route, verify="always"), route)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("sender", "receiver"), PAIRS, ids=[f"{a.name} to {b.name}" for a, b in PAIRS])
def test_two_gpus(tmp_path: Path, sender: Shape, receiver: Shape, route: str) -> None:
    devices = ["cuda:0"] * sender.tp_size + ["cuda:1"] * receiver.tp_size
    assert_exact(*carried(tmp_path, devices, sender, receiver, routes=route), route)


@pytest.mark.proves("G15")
@pytest.mark.gpu
@pytest.mark.parametrize("route", ROUTES)
def test_waits_for_both_engines_streams(tmp_path: Path, route: str) -> None:
    sender, receiver = PAIRS[2]
    outcome, routes = carried(tmp_path, ["cuda:0"], sender, receiver, LATE_CYCLES, routes=route)
    assert_exact(outcome, routes, route)


@pytest.mark.proves("G15")
@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("unfenced", ["sender", "receiver"])
def test_who_does_not_wait_is_found_out(tmp_path: Path, unfenced: str, drafts: int) -> None:
    sender, receiver = PAIRS[2]
    outcome, _ = carried(tmp_path, ["cuda:0"], sender, drafting(receiver, drafts), TOO_LATE_CYCLES, unfenced)
    assert outcome.wrong


@pytest.mark.proves("G7", "G15")
@pytest.mark.gpu
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("sender", "receiver"), PAIRS, ids=[f"{a.name} to {b.name}" for a, b in PAIRS])
def test_layers_that_only_the_receiver_has_are_zeros(
    tmp_path: Path, sender: Shape, receiver: Shape, route: str
) -> None:
    """Behind the fence: the former owner of the blocks writes all layers. Nothing else is written."""
    outcome, routes = carried(
        tmp_path, ["cuda:0"], sender, drafting(receiver), LATE_CYCLES, requests=WHOLE, routes=route, verify="always"
    )
    assert_exact(outcome, routes, route)


@pytest.mark.gpu
def test_reads_the_other_engine_by_itself(tmp_path: Path) -> None:
    sender, receiver = PAIRS[2]
    assert_exact(*carried(tmp_path, ["cuda:0"], sender, receiver), "pull")


@pytest.mark.gpu
def test_a_gpu_gives_to_a_cpu_through_the_host(tmp_path: Path) -> None:
    sender, receiver = PAIRS[2]
    outcome, routes = carried(tmp_path, ["cuda:0", "cpu"], sender, receiver)
    assert_exact(outcome, routes, "host")
