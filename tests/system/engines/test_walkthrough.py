"""README's quickstart, run as written with what two pages add to it, on CPUs; and what its lines for GPUs say."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from demo.model import HEAD_WIDTH, KV_HEADS, LAYERS
from kvbridge.adapters.vllm.options import VLLMOptions
from tests.integration.agent.harness import PYTHON

ROOT = Path(__file__).parents[3]
TOLD = {"README.md": "Quickstart", "docs/vllm.md": "Without a GPU", "docs/operations.md": "Stop"}
TEXT = "".join((ROOT / page).read_text().split(f"\n## {name}\n")[1].split("\n## ")[0] for page, name in TOLD.items())
BLOCKS = re.findall(r"^```bash\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
PROMPT_TOKENS, ROW_BYTES = 500, LAYERS * KV_HEADS * 2 * HEAD_WIDTH * 2
RUN_S = 600  # at most: 76 s of processor time, for which other work may leave little
MARK = "=== next ==="


def block(begins: str) -> str:
    (found,) = [text for text in BLOCKS if text.startswith(begins)]
    return found


def namespace(*command: str) -> list[str]:
    """Ports are fixed in that text: loopback of its own, and no other network."""
    return ["unshare", "--net", "bash", "-c", 'ip link set lo up && exec "$@"', "-", *command]


def why_not() -> str:
    missing = [tool for tool in ("unshare", "ip", "curl") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)}"
    tried = subprocess.run(namespace("true"), capture_output=True, text=True, timeout=10)
    return f"no network namespace can be made: {tried.stderr.strip()}" if tried.returncode else ""


@pytest.mark.vllm
@pytest.mark.timeout(RUN_S + 30)
def test_the_quickstart_carries_a_prompt_through_its_router(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    (tmp_path / ".venv").symlink_to(Path(PYTHON).parents[1])
    (tmp_path / ".venv-vllm").symlink_to(sys.prefix)
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    (tmp_path / "run").write_text(script())
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    with (tmp_path / "told").open("wb") as out:
        running = subprocess.Popen(
            namespace("bash", "run"), cwd=tmp_path, env=os.environ | offline,
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        ended = running.wait(RUN_S)
        assert is_gone(running.pid), "something that it started goes on"
    except subprocess.TimeoutExpired:
        logs = {log.name: log.read_text(errors="replace")[-3000:] for log in sorted(tmp_path.glob("*.log"))}
        pytest.fail("\n".join(f"--- {name}\n{text}" for name, text in logs.items()))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    told = (tmp_path / "told").read_text()
    assert ended == 0, told
    start, killed, drained, alone = told.split(MARK)
    (carried, of_prefill), of_alone = texts(start), texts(alone)
    assert len(set(carried.split())) > 6 and carried == of_prefill
    assert "tcp://127.0.0.1:7701" in start, "status says nothing"
    assert "route pull: " in start and not re.search("^failed", start, re.MULTILINE), f"doctor: {start}"
    assert moved(start) == (PROMPT_TOKENS - 1) * ROW_BYTES, told
    assert texts(killed) == of_alone[:2] and len(set(of_alone)) > 4, told
    assert moved(killed) == (PROMPT_TOKENS - 3) * ROW_BYTES, told  # by the new agent: [3, 500] but for the last
    assert sorted(texts(drained)) == sorted(of_alone[2:]), told
    for agent, event in ("prefill", "offered"), ("decode", "wanted"), ("decode", "done"):
        assert re.search(rf" {agent} +{event} ", drained), f"trace: {drained}"
    assert (tmp_path / "decode-agent.log").read_text().count("draining: ") == 2  # and when the quickstart ends all


def script() -> str:
    """The pages' commands for CPUs, in order. Between its paragraphs a mark, and what else shows that they worked."""
    killed, drained = block("back()").split("\n\n")
    count = f"\nsleep 1.5  # a page of metrics is kept for a second\n{block('agent()').splitlines()[-1]}\necho {MARK}\n"
    alone = f"echo {MARK}\nfor first in 2 3 4 5 6 7 8; do ask 8100 $first; done\n"
    return f"{block('# CPUs')}{block('agent()')}echo {MARK}\n{killed}{count}{drained}{alone}{block('kill $(jobs')}"


def texts(told: str) -> list[str]:
    return re.findall(r'^"text": *"(.+)"$', told, re.MULTILINE)


def moved(told: str) -> float:
    (found,) = re.findall(r'^kvbridge_wire_bytes_total\{role="receiver"\} (\S+)$', told, re.MULTILINE)
    return float(found)


def is_gone(group: int) -> bool:
    """Python's own little helpers of spawned processes may take a moment. Orphans are ours to bury (nursery.py)."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-group, os.WNOHANG)[0]:
                    pass
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("begins", ["# CPUs", "# GPUs"])
def test_either_kind_of_machine_sets_what_both_kinds_run(begins: str) -> None:
    """What is common stands there once; only its names are filled in."""
    told = subprocess.run(["bash", "-nc", block(begins) + block("agent()")], capture_output=True, text=True, timeout=10)
    assert (told.returncode, told.stderr) == (0, "")
    names = set(re.findall(r"^([A-Z]+)=", block(begins), re.MULTILINE))
    asked = set(re.findall(r"\$\{?([A-Z]+)\b", block("agent()"))) - {"PWD"}
    assert names == asked
    said = re.search(r"^DEVICES=\((\S+) (\S+)\)$", block(begins), re.MULTILINE)
    assert said and all(device == "cpu" or device.startswith("cuda:") for device in said.groups())


@pytest.mark.parametrize("page", ["README.md", "docs/vllm.md", "docs/routers.md"])
def test_the_engines_are_given_options_that_exist(page: str) -> None:
    shown = re.findall(r"--kv-transfer-config '(\{.*?\}\})'\s", (ROOT / page).read_text(), re.DOTALL)
    assert shown
    for text in shown:
        config = json.loads(re.sub(r"'\$PWD/\$1\.sock'", "/run/agent.sock", text))
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
        assert said == (str(default) if isinstance(default, str) else f"{default:g}" if default else "none"), option
