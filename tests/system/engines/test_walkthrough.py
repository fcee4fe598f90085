"""README's quickstart, run as written with what two pages add to it, on CPUs; and the options that pages show."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from demo.model import HEAD_WIDTH, KV_HEADS, LAYERS
from kvbridge.adapters.vllm.options import VLLMOptions
from testing.agents import PYTHON
from tests.support.pages import ROOT, block, told, why_not

PROMPT_TOKENS, ROW_BYTES = 500, LAYERS * KV_HEADS * 2 * HEAD_WIDTH * 2
UNIT_TOKENS = 32  # divide both engines' blocks, and may move as one, the last beyond the prompt's end
RUN_S = 600  # at most: 76 s of processor time, for which other work may leave little
MARK = "=== next ==="


CPUS, COMMON = ("docs/vllm.md", "# CPUs"), ("README.md", "agent()")


@pytest.mark.vllm
@pytest.mark.timeout(RUN_S + 30)
def test_the_quickstart_carries_a_prompt_through_its_router(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    environments = {".venv": str(Path(PYTHON).parents[1]), ".venv-vllm": sys.prefix}
    said = told(script(), tmp_path, environments, RUN_S)
    start, killed, drained, alone = said.split(MARK)
    (carried, of_prefill), of_alone = texts(start), texts(alone)
    assert len(set(carried.split())) > 6 and carried == of_prefill
    assert "tcp://127.0.0.1:7701" in start, "status says nothing"
    assert "the agent decode serves at 127.0.0.1:9401" in start
    assert "route pull: " in start and not re.search("^failed", start, re.MULTILINE), f"doctor: {start}"
    assert 0 <= moved(start) / ROW_BYTES - (PROMPT_TOKENS - 1) < UNIT_TOKENS, said
    assert texts(killed) == of_alone[:2] and len(set(of_alone)) > 4, said
    # By the new agent: [3, 500] but for the last.
    assert 0 <= moved(killed) / ROW_BYTES - (PROMPT_TOKENS - 3) < UNIT_TOKENS, said
    assert sorted(texts(drained)) == sorted(of_alone[2:]), said
    for agent, event in ("prefill", "offered"), ("decode", "wanted"), ("decode", "done"):
        assert re.search(rf" {agent} +{event} ", drained), f"trace: {drained}"
    assert (tmp_path / "decode-agent.log").read_text().count("draining: ") == 2  # and when the quickstart ends all


def script() -> str:
    """The pages' commands for CPUs, in order. Between its paragraphs a mark, and what else shows that they worked."""
    killed, drained = block("docs/operations.md", "back()").split("\n\n")
    count = f"\nsleep 1.5  # a page of metrics is kept for a second\n{block(*COMMON).splitlines()[-1]}\necho {MARK}\n"
    alone = f"echo {MARK}\nfor first in 2 3 4 5 6 7 8; do ask 8100 $first; done\n"
    end = block("README.md", "kill $(jobs")
    return f"{block(*CPUS)}{block(*COMMON)}echo {MARK}\n{killed}{count}{drained}{alone}{end}"


def texts(told: str) -> list[str]:
    return re.findall(r'^"text": *"(.+)"$', told, re.MULTILINE)


def moved(told: str) -> float:
    (found,) = re.findall(r'^kvbridge_wire_bytes_total\{role="receiver"\} (\S+)$', told, re.MULTILINE)
    return float(found)


@pytest.mark.parametrize("page", ["README.md", "docs/vllm.md", "docs/routers.md", "docs/proxy.md"])
def test_the_engines_are_given_options_that_exist(page: str) -> None:
    shown = re.findall(r"--kv-transfer-config '(\{.*?\}\})'\s", (ROOT / page).read_text(), re.DOTALL)
    assert shown
    for text in shown:
        config = json.loads(re.sub(r"'\$PWD/\S+?\.sock'", "/run/agent.sock", text))
        assert config["kv_connector"] == "KVBridgeConnector" and config["kv_role"] in (
            "kv_both",
            "kv_producer",
            "kv_consumer",
        )
        assert VLLMOptions.read(config["kv_connector_extra_config"]).socket.endswith(".sock")


def test_the_defaults_that_are_said_are_the_options() -> None:
    rows = re.findall(r"^\| `kvbridge_(\w+)` \| `?(.+?)`? \|", (ROOT / "docs/vllm.md").read_text(), re.MULTILINE)
    assert len(rows) >= 5
    for option, said in rows:
        default = getattr(VLLMOptions(), option)
        if isinstance(default, bool):
            default = str(default).lower()
        shown = default if isinstance(default, str) else f"{default:g}" if default else ""
        assert said == (shown or "none"), option
