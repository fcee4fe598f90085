"""`python -m demo --cross`, as a newcomer runs it. tests/system/test_demo.py tests what makes it exit with 1."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cross, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
PROMPTS, PAIRS = 3, 5


def test_both_directions() -> None:
    command = [os.environ["KVBRIDGE_TEST_AGENT_PYTHON"], "-m", "demo", "--cross"]
    wide = {**os.environ, "COLUMNS": "120"}
    told = subprocess.run(command, capture_output=True, text=True, timeout=580, env=wide, cwd=ROOT)
    assert told.returncode == 0, told.stdout + told.stderr
    rows = [line for line in told.stdout.splitlines() if "TP" in line]
    assert len(rows) == PROMPTS * PAIRS, told.stdout
    assert all(row.count("equal") == 2 for row in rows), told.stdout
