"""What `kvbridge up` plans: which engine gets which GPUs, port and flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbridge.commands.up import PlannedEngine, PlannedSide, planned, run
from kvbridge.errors import OperatorError

LOGS = Path("logs")


def engines(gpus: str = "", is_cpu: bool = False, prefill: str = "vllm", decode: str = "vllm") -> list[PlannedEngine]:
    sides = PlannedSide("prefill", prefill, 1, 2, ""), PlannedSide("decode", decode, 2, 1, "--kv-cache-dtype fp8")
    return planned(sides, gpus, is_cpu, 8100)


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
    prefill, decode, _ = (each.command("python", "model", LOGS) for each in engines())
    assert prefill[prefill.index("--tensor-parallel-size") + 1] == "2" and "--kv-cache-dtype" not in prefill
    assert decode[-2:] == ["--kv-cache-dtype", "fp8"] and "--tensor-parallel-size" not in decode
    assert '"logs/decode-0-{rank}.sock"' in decode[-3]


def test_sglang_gets_its_role_its_agents_and_a_bootstrap_port_behind_the_engines() -> None:
    prefill, decode, other = engines(prefill="sglang", decode="sglang")
    assert [each.place for each in (prefill, decode)] == [
        "sglang=http://127.0.0.1:8100,bootstrap=8103",
        "sglang=http://127.0.0.1:8101",
    ]
    command = prefill.command("python", "model", LOGS)
    assert command[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "model"]
    for flag, value in {
        "--tp-size": "2",
        "--disaggregation-mode": "prefill",
        "--disaggregation-bootstrap-port": "8103",
    }.items():
        assert command[command.index(flag) + 1] == value
    assert decode.command("python", "model", LOGS)[-2:] == ["--kv-cache-dtype", "fp8"] and not decode.bootstraps
    assert other.environment([], LOGS) == {
        "KVBRIDGE_ENGINE_SOCKET": "logs/decode-1-{rank}.sock",
        "CUDA_VISIBLE_DEVICES": "3",
    }


def test_flags_for_all_are_refused_where_engines_take_different_ones(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="--prefill-flags and --decode-flags"):
        run("model", engines(decode="sglang"), {}, "127.0.0.1:0", tmp_path / "logs", ["--dtype", "half"])
    assert not (tmp_path / "logs").exists()


def test_an_engine_sees_the_gpus_of_its_agents_also_if_we_do_not_see_all() -> None:
    prefill = engines("1,0,2,3")[0]
    assert prefill.environment([], LOGS)["CUDA_VISIBLE_DEVICES"] == "1,0"
    assert prefill.environment(["4", "GPU-5"], LOGS)["CUDA_VISIBLE_DEVICES"] == "GPU-5,4"


@pytest.mark.parametrize("gpus", ["0,1,2", "0,1,2,3,4", "0,1,2,x", "0,1,2,"])
def test_gpus_that_are_not_one_a_rank_are_refused(gpus: str) -> None:
    with pytest.raises(OperatorError, match="need 4 numbers"):
        engines(gpus)
