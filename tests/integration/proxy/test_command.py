"""`kvbridge proxy` as a process."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.proxy.standins import world

pytestmark = pytest.mark.timeout(60)
COMMAND = [sys.executable, "-m", "kvbridge.cli", "proxy"]


async def test_serves_until_it_is_told_to_stop_and_reads_its_engines_again_when_told_to(tmp_path: Path) -> None:
    listed = tmp_path / "engines"
    async with world("vllm", "vllm,vllm") as w:
        one, other = (f"decode vllm={each.url}" for each in w.all("decode"))
        prefill = f"prefill vllm={w.prefill.url}  # the only one"
        listed.write_text("\n".join((prefill, "", one)))
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "--engines", str(listed), "--listen", "127.0.0.1:0", stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        try:
            async with asyncio.timeout(30):
                while b"serving" not in (line := await process.stderr.readline()):
                    assert line
                w.url = re.search(r"http://\S+", line.decode())[0]
                for engines, said in ((["prefill"], b"not reloaded"), ([prefill, other], b"reloaded: ")):
                    listed.write_text("\n".join(engines))
                    process.send_signal(signal.SIGHUP)
                    while said not in (line := await process.stderr.readline()):
                        assert line
                while b"is healthy" not in (line := await process.stderr.readline()) or b"decode" not in line:
                    assert line
            assert (await w.ask("/v1/completions", {"prompt": "a", "max_tokens": 3}))[0] == 200
            first, second = w.all("decode")
            assert (len(first.got), len(second.got)) == (0, 1)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 10) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--prefill", "tgi=http://h:1", "--decode", "vllm=http://h:2"), "prefill: got 'tgi=http://h:1'"),
        (("--prefill", "vllm=http://h:1", "--decode", "sglang=http://h:2,bootstrap=1"), "decode: got 'bootstrap=1'"),
        (("--prefill", "vllm=http://h:1", "--decode", "vllm=http://h:2", "--listen", "8080"), "listen: got '8080'"),
        (
            ("--prefill", "vllm=http://h:1", "--prefill", "vllm=http://h:1", "--decode", "vllm=http://h:2"),
            "named twice",
        ),
        (("--prefill", "vllm=http://h:1"), "decode: no engine is named"),
        (("--engines", "/nowhere", "--prefill", "vllm=http://h:1"), "not both"),
        (("--engines", "/nowhere"), "engines: cannot read /nowhere"),
    ],
)
def test_a_command_line_that_cannot_be_is_exit_code_2(flags: tuple[str, ...], said: str) -> None:
    told = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=40)
    assert told.returncode == 2 and "kvbridge proxy: bad_option: " in told.stderr and said in told.stderr


def test_too_few_descriptors_are_told_and_more_are_taken_if_they_may_be() -> None:
    engines = "--prefill vllm=http://127.0.0.1:1 --decode vllm=http://127.0.0.1:2 --listen 127.0.0.1:0"
    command = f"{' '.join(COMMAND)} {engines}"
    told = subprocess.run(["sh", "-c", f"ulimit -n 128; {command}"], capture_output=True, text=True, timeout=40)
    assert told.returncode == 2 and "open files: the limit is 128, need at least" in told.stderr
    process = subprocess.Popen(["sh", "-c", f"ulimit -Sn 128; exec {command}"], stderr=subprocess.PIPE, text=True)
    try:
        assert "serving" in process.stderr.readline()
        (limit,) = re.findall(r"^Max open files +(\d+)", Path(f"/proc/{process.pid}/limits").read_text(), re.MULTILINE)
        assert int(limit) > 128
    finally:
        process.kill()
        process.wait()
