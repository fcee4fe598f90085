"""Real processes where the kernel gives no pidfd: an agent's death cannot be told from a closed socket."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from testing.agents import agent as real_agent

ROOT = Path(__file__).parents[3]


@pytest.mark.proves("G8")
@pytest.mark.parametrize("is_allowed", [False, True], ids=["refused", "allowed"])
def test_an_engine_that_cannot_watch_an_agent_attaches_only_if_it_is_told_to(tmp_path: Path, is_allowed: bool) -> None:
    """Its kernels may write for longer than the second after which it would count as gone."""
    engine = ["-m", "tests.integration.adapters.unwatching_engine"]
    with real_agent(tmp_path, "a", device="cpu") as running:
        command = [sys.executable, "-m", "testing.unwatched", *engine, str(running.socket)]
        with subprocess.Popen(
            [*command, "allowed" if is_allowed else "refused"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            found = json.loads(process.stdout.readline())
            attached = running.status.engine
            process.stdin.close()
    assert not found["has_pidfd"] and found["is_attached"] == is_allowed == (attached is not None)
    warnings = [line for line in found["said"] if "no pidfd" in line or "agent_unwatched" in line]
    if is_allowed:
        assert len(warnings) == 1 and warnings[0].startswith("WARNING") and "may still write" in warnings[0]
    else:
        assert warnings and all(line.startswith("ERROR") for line in warnings)
        assert all(line != after for line, after in pairwise(found["said"])), "said once while the reason is the same"
