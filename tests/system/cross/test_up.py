"""`kvbridge up` with an engine of each kind, on CPUs: one command carries tokens between them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testing.waiting import wait_for
from tests.system.engines.test_up import MOST_S, Up, ended, said, up

__all__ = ["up"]
pytestmark = [pytest.mark.cross, pytest.mark.timeout(1800)]
FLAGS = {
    "vllm": "--block-size 64 --enforce-eager --max-model-len 2048 --num-gpu-blocks-override 256",
    "sglang": "--page-size 16",
}


@pytest.mark.parametrize(("prefill", "decode"), [("sglang", "vllm"), ("vllm", "sglang"), ("sglang", "sglang")])
def test_one_command_carries_tokens_between_engines(up: Up, tmp_path: Path, prefill: str, decode: str) -> None:
    pythons = ["--vllm-python", os.environ["KVBRIDGE_TEST_VLLM_PYTHON"], "--sglang-python", sys.executable]
    engines = ["--prefill-engine", prefill, "--decode-engine", decode]
    process = up(*engines, *pythons, "--prefill-flags", FLAGS[prefill], "--decode-flags", FLAGS[decode])
    wait_for(lambda: "Ctrl-C ends all" in said(tmp_path) or process.poll() is not None, MOST_S)
    (example,) = re.findall(r"^  (curl .*)$", said(tmp_path), re.MULTILINE)
    answer = subprocess.run(["bash", "-c", example], capture_output=True, text=True, timeout=MOST_S)
    assert json.loads(answer.stdout)["usage"]["prompt_tokens"] == 300, (answer, said(tmp_path))
    wait_for(lambda: "carried so far: " in said(tmp_path), MOST_S, why=lambda: said(tmp_path))
    process.send_signal(signal.SIGINT)
    code, text = ended(tmp_path, process)
    carried = [int(each) for each in re.findall(r"carried so far: (\d+) prompt tokens\n", text)]
    assert code == 0 and carried[-1] in (299, 300), text
