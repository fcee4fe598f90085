"""`kvbridge bench` with real agents, for a moment each: it reports what is slow, wrong or gone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvbridge.commands.bench import BenchOutcome, _sentence, _verdict
from kvbridge.doctor.pace import RECEIVERS, USUAL_BYTES, Bench, Pace
from kvbridge.errors import OperatorError
from testing.nursery import kvbridge
from testing.waiting import wait_for

QUICK = ("--device", "cpu", "--seconds", "0.1", "--most-mib", "128")


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return kvbridge("bench", *arguments, timeout_s=240, COLUMNS="80")


def test_each_size_of_both_kinds_of_pools_is_measured_beside_a_copy() -> None:
    told = bench(*QUICK, "--only", "pull", "--only", "direct", "--json")
    assert told.returncode == 0, told.stderr
    *rows, direct = json.loads(told.stdout)
    assert (direct["route"], direct["outcome"]) == ("direct", "not here")
    assert [(each["pools"], each["size_bytes"]) for each in rows] == [
        (pools, size) for pools in RECEIVERS for size in (2 << 20, USUAL_BYTES)
    ]
    for each in rows:
        assert each["route"] == "pull" and each["outcome"] == "ok" and each["times"] >= 3
        assert 0 < each["p50_s"] <= each["p99_s"] < 60
        assert each["bytes_per_s"] == pytest.approx(each["size_bytes"] / each["p50_s"])
        assert each["share"] == pytest.approx(each["bytes_per_s"] / each["copy_bytes_per_s"]) and each["share"] < 5


def test_what_the_machine_lacks_is_no_failure_and_no_route_is_named_wrongly() -> None:
    told = bench(*QUICK, "--only", "host")
    assert told.returncode == 0 and "host: not here: only GPUs have this route" in told.stdout
    told = bench("--only", "pul")
    assert told.returncode == 2 and "did you mean pull?" in told.stderr
    told = bench("--device", "cpu", "--to", "cuda:1")
    assert told.returncode == 2 and "bad_option: to: cuda:1" in told.stderr


def test_bytes_that_are_wrong_and_an_agent_that_is_gone_are_told() -> None:
    measured = Bench(("cpu", "cpu"), USUAL_BYTES)
    with measured.agents(["pull"], "lo") as running:
        with pytest.raises(OperatorError, match=r"equal pools: layer \d+ [kv]: rows are not those that were sent"):
            for pace in measured.measure("pull", running["pull"], 0.0, lambda pools, size: None):
                if pace.size_bytes == USUAL_BYTES:  # the last before they are looked at
                    measured._memory[1][0][-(1 << 20) :] += 1
        with pytest.raises(OperatorError, match="equal pools: ") as failure:
            for _ in measured.measure("pull", running["pull"], 0.0, lambda pools, size: None):
                running["pull"][1].process.kill()
    assert failure.value.code == "demo_engine"


def pace(share: float, floor: float) -> Pace:
    return Pace("nixl", "equal", USUAL_BYTES, (0.5, 0.25, 0.25), USUAL_BYTES / 0.25 / share, floor)


def test_a_route_is_slow_whose_largest_requests_are_below_the_floor() -> None:
    small, good, bad = pace(0.001, 0.0), pace(0.5, 0.05), pace(0.04, 0.05)
    assert [_verdict(each) for each in (small, good, bad)] == ["", "ok", "SLOW"]
    assert (bad.p50_s, bad.p99_s) == (0.25, 0.5)
    assert not BenchOutcome("nixl", (small, good)).is_bad
    assert (
        _sentence(BenchOutcome("nixl", (small, good)))
        == "nixl: ok: 128 MiB at 0.500 of a copy or more, should be 0.05 or more"
    )
    slow = BenchOutcome("nixl", (small, good, bad))
    assert slow.is_bad and _sentence(slow).startswith("nixl: SLOW: 128 MiB at 0.040")
    assert BenchOutcome("nixl", (good,), error="demo_engine: gone").is_bad


def test_a_bench_that_is_killed_leaves_no_agent_behind(tmp_path: Path) -> None:
    """Nor does `kvbridge doctor`, which starts its agents in the same way."""
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom kvbridge.loopback.processes import agents\n"
        "with agents(Path(sys.argv[1]), ['p', 'd']) as running:\n"
        "    print(*(each.process.pid for each in running), flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        process.kill()
    assert len(pids) == 2
    wait_for(lambda: not any(is_running(pid) for pid in pids))


def is_running(pid: int) -> bool:
    """Whether it is there and not a zombie, which whoever reaps orphans here may leave for a while."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
