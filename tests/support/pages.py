"""The commands of the pages: their blocks of code, and running them as they stand in a network of their own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
OFFLINE |= {"SGLANG_HOST_IP": "127.0.0.1"}  # it looks for another, and there is none


def blocks(page: str) -> list[str]:
    """What stands in a page between fences, except code of a named language other than bash."""
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(text) for language, text in found if language in ("", "bash")]


def block(page: str, begins: str) -> str:
    """The only block of a page's commands that begins so."""
    (found,) = [text for text in blocks(page) if text.startswith(begins)]
    return found


def run_block(page: str, begins: str, environment: Mapping[str, str]) -> None:
    """Run a block of commands that asks servers, with the variables that it leaves to its reader. Each must succeed."""
    ran = subprocess.run(
        ["bash", "-euc", block(page, begins)],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | dict(environment),
    )
    assert ran.returncode == 0, (ran.stdout, ran.stderr)


def why_not() -> str:
    """Why this machine cannot run them. Empty if it can."""
    missing = [tool for tool in ("unshare", "ip", "curl") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)}"
    tried = subprocess.run(_alone("true"), capture_output=True, text=True, timeout=10)
    return f"no network namespace can be made: {tried.stderr.strip()}" if tried.returncode else ""


def told(script: str, folder: Path, environments: Mapping[str, str], seconds: float) -> str:
    """What a script says, run in `folder` as in a checkout that has these environments. It must succeed, and end all.

    Ports are fixed in pages, so it has a loopback of its own, and no other network.
    """
    for name, place in environments.items():
        (folder / name).symlink_to(place)
    (folder / "demo").symlink_to(ROOT / "demo")
    (folder / "run").write_text(script)
    with (folder / "told").open("wb") as out:
        running = subprocess.Popen(
            _alone("bash", "run"), cwd=folder, env=os.environ | OFFLINE,
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        ended = running.wait(seconds)
        assert _is_gone(running.pid), "something that it started goes on"
    except subprocess.TimeoutExpired:
        logs = {log.name: log.read_text(errors="replace")[-3000:] for log in sorted(folder.glob("*.log"))}
        raise AssertionError("\n".join(f"--- {name}\n{text}" for name, text in logs.items())) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    text = (folder / "told").read_text()
    assert ended == 0, text
    return text


def _alone(*command: str) -> list[str]:
    return ["unshare", "--net", "bash", "-c", 'ip link set lo up && exec "$@"', "-", *command]


def _is_gone(group: int) -> bool:
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
