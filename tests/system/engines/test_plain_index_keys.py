"""MiniMax M3 in vLLM itself: plain index keys lie beside K and V, in the layers that choose blocks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.engines.kinds import write_plain_sparse

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(500)]

PLUGIN = Path(__file__).parent / "minimax_plugin"
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("block_tokens", [128, 256])
def test_vllms_model_runner_writes_rows_where_the_planes_say(tmp_path: Path, block_tokens: int) -> None:
    write_plain_sparse(tmp_path)
    command = [sys.executable, "-m", "tests.system.engines.minimax_runner", str(tmp_path), str(block_tokens)]
    environment = {**os.environ, "PYTHONPATH": f"{PLUGIN}{os.pathsep}{ROOT}"}
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
