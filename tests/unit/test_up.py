"""What `kvbridge up` plans: which engine gets which GPUs, port and flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbridge.commands.up import PlannedEngine, planned
from kvbridge.errors import OperatorError


def engines(gpus: str = "", is_cpu: bool = False) -> list[PlannedEngine]:
    flags = {"prefill": "", "decode": "--kv-cache-dtype fp8"}
    return planned({"prefill": 1, "decode": 2}, {"prefill": 2, "decode": 1}, flags, gpus, is_cpu, 8100)


def test_gpus_and_ports_are_dealt_in_order_prefill_first() -> None:
    dealt = [(each.name, each.port, each.devices) for each in engines("4,5,7,6")]
    assert dealt == [
        ("prefill-0", 8100, ("cuda:4", "cuda:5")),
        ("decode-0", 8101, ("cuda:7",)),
        ("decode-1", 8102, ("cuda:6",)),
    ]
    assert [each.devices for each in engines()] == [("cuda:0", "cuda:1"), ("cuda:2",), ("cuda:3",)]
    assert {device for each in engines(is_cpu=True) for device in each.devices} == {"cpu"}


def test_engines_get_their_ranks_and_their_own_flags_last() -> None:
    prefill, decode, _ = (each.command("python", "model", Path("logs")) for each in engines())
    assert prefill[prefill.index("--tensor-parallel-size") + 1] == "2" and "--kv-cache-dtype" not in prefill
    assert decode[-2:] == ["--kv-cache-dtype", "fp8"] and "--tensor-parallel-size" not in decode
    assert '"logs/decode-0-{rank}.sock"' in decode[-3]


def test_an_engine_sees_the_gpus_of_its_agents_also_if_we_do_not_see_all() -> None:
    prefill = engines("1,0,2,3")[0]
    assert prefill.environment([])["CUDA_VISIBLE_DEVICES"] == "1,0"
    assert prefill.environment(["4", "GPU-5"])["CUDA_VISIBLE_DEVICES"] == "GPU-5,4"


@pytest.mark.parametrize("gpus", ["0,1,2", "0,1,2,3,4", "0,1,2,x", "0,1,2,"])
def test_gpus_that_are_not_one_a_rank_are_refused(gpus: str) -> None:
    with pytest.raises(OperatorError, match="need 4 numbers"):
        engines(gpus)
