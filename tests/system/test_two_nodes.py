"""docs/kubernetes.md on two nodes: its commands as they stand, from the nodes' labels to a prompt that was carried."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.cluster import cluster
from tests.support.pages import ROOT, block
from tests.support.pods import START_S, why_not

PAGE = "docs/kubernetes.md"
NETWORKS = {"gpu-a": "10.244.1.0/24", "gpu-b": "10.244.2.0/24"}
OPTIONS = Path("deploy/kubernetes/components/agent/agent.toml")
PROMPTS = 4  # after the page's own
PATH, BODY = "/v1/completions", json.dumps({"model": "Qwen/Qwen3-8B", "prompt": "to be", "max_tokens": 1})


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.timeout(6 * START_S)
def test_the_page_carries_a_prompt_from_one_node_to_the_other(tmp_path: Path) -> None:
    """Real agents and proxy; engines that stand in compare every byte that comes, and compute nothing."""
    if reason := why_not():
        pytest.skip(reason)
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    with (tmp_path / OPTIONS).open("a") as options:
        options.write("slot_bytes = 65536\n")
    with cluster(tmp_path, NETWORKS) as running:
        running.run(block(PAGE, "kubectl label"))
        told = running.run(block(PAGE, "kubectl -n kvbridge get pods"))
        places = dict(re.findall(r"^(\w+-\d) \S+ (gpu-.)$", told, re.MULTILINE))
        assert {name: places[name] for name in places if not name.startswith("router")} == {
            "prefill-0": "gpu-a", "prefill-1": "gpu-a", "decode-0": "gpu-b", "decode-1": "gpu-b",
        }  # fmt: skip
        assert json.loads(re.findall(r"^(\{.*?\})4 of 4 agents healthy, 0 pairs", told, re.MULTILINE)[0])["choices"], (
            told
        )
        assert len(re.findall(r"^(?:prefill|decode)-\d +healthy .* 2 by nixl", told, re.MULTILINE)) == 4, told
        for _ in range(PROMPTS):
            status, told = running.nodes["gpu-a"].asked(f"http://{running.pods['router-0'].ip}:30000{PATH}", 60, BODY)
            assert status == 200, told
        decoding = [f"http://{each.ip}:9400/metrics" for name, each in running.pods.items() if "decode" in name]
        counts = [running.nodes["gpu-b"].asked(each, 5)[1] for each in decoding]
        assert all(
            re.search(r"^kvbridge_wire_bytes_total.*role=\"receiver\".* [1-9]", each, re.MULTILINE) for each in counts
        )
