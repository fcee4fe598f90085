"""docs/adapters.md: its commands run as written, and the code that it quotes is the code that runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvbridge.adapters.engine.conversation import Conversation

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/adapters.md").read_text()
TOY = (ROOT / "docs/toy_engine.py").read_text()
QUOTES = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
RUN_S = 60  # seven seconds on two idle cores


@pytest.mark.timeout(RUN_S + 30)
def test_the_toy_engines_run_as_the_page_says(tmp_path: Path) -> None:
    (commands,) = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (promised,) = re.findall(r"^It prints\n\n```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    running = subprocess.Popen(
        ["bash", "-c", commands],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, errors = running.communicate(timeout=RUN_S)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
    logs = "".join(log.read_text() for log in tmp_path.glob("*.log"))
    assert (said, running.returncode) == (promised, 0), errors + logs


def test_the_toy_is_short() -> None:
    assert len(TOY.splitlines()) < 150


@pytest.mark.parametrize("quote", QUOTES)
def test_what_is_quoted_is_what_runs(quote: str) -> None:
    whole = any(textwrap.indent(quote, " " * depth) in TOY for depth in range(0, 20, 4))
    assert whole, f"not in toy_engine.py:\n{quote}"


def test_every_call_that_the_table_names_is_one() -> None:
    assert len(QUOTES) >= 5
    rows = [line.split("|")[2] for line in PAGE.splitlines() if line.startswith("| ") and line.count("|") == 4]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert {"offer", "want", "turn", "wait_for_readers"} <= named
    assert [name for name in named if not hasattr(Conversation, name)] == ["with"]
    public = {name for name in vars(Conversation) if not name.startswith("_")}
    assert [name for name in sorted(public) if f"`{name}`" not in PAGE] == []
