"""The commands of docs/upgrades.md that take an engine off the proxy, as they stand, with a real proxy."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest

from demo.processes import free_port
from testing.nursery import Child, nursery
from testing.serving import listening
from testing.waiting import wait_for
from tests.support.pages import block
from tests.system.test_prometheus import EngineOfProxy, complete

START_S = 60.0


class SlowEngine(EngineOfProxy):
    """Answers the prompt "slow" once it may."""

    may = Event()

    def do_POST(self) -> None:
        if self.may.wait(START_S):
            super().do_POST()


@pytest.fixture
def listed(tmp_path: Path) -> Iterator[tuple[str, str, Path, int]]:
    """The proxy's place, the decode engine to be upgraded, the file of engines and the proxy's process."""
    SlowEngine.may.clear()
    place, file = f"127.0.0.1:{free_port()}", tmp_path / "engines"
    with listening(EngineOfProxy) as prefill, listening(SlowEngine) as decode, (tmp_path / "log").open("wb") as log:
        file.write_text(f"prefill vllm=http://{prefill}\ndecode vllm=http://{decode}\n")
        arguments = ["proxy", "--listen", place, "--engines", str(file)]
        process = Child(nursery().fork("kvbridge.cli", arguments, (None, log.fileno(), log.fileno())))
        try:
            yield place, decode, file, process.pid
        finally:
            process.end()


def upgrading(place: str, decode: str, file: Path, proxy: int) -> subprocess.Popen[str]:
    """The page's commands. Where they would restart the engine they say so."""
    script = block("docs/upgrades.md", "sed -i")
    for said, here in (("10.0.0.2:8000", decode), ("127.0.0.1:8080", place), ("/etc/kvbridge/engines", str(file))):
        assert said in script
        script = script.replace(said, here)
    script = "systemctl() { echo $*; }\n" + script
    command = ["timeout", str(START_S), "bash", "-euc", script]
    environment = {"PROXY": str(proxy), "PATH": "/usr/bin:/bin"}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE)


def is_healthy(place: str) -> bool:
    return subprocess.run(["curl", "-sfo", "/dev/null", f"{place}/health"]).returncode == 0


def test_an_engine_that_was_never_asked_or_is_not_known_is_drained_at_once(listed: tuple[str, str, Path, int]) -> None:
    place, decode, file, proxy = listed
    wait_for(lambda: is_healthy(place), START_S)
    for each in (decode, "127.0.0.1:1"):
        out, _ = upgrading(place, each, file, proxy).communicate(timeout=30)
        assert out == "restart my-vllm\n"
        assert file.read_text().endswith(f"decode vllm=http://{each}\n")


def test_an_engine_at_work_is_waited_for(listed: tuple[str, str, Path, int]) -> None:
    place = listed[0]
    wait_for(lambda: is_healthy(place), START_S)
    codes: list[int] = []
    asking = Thread(target=lambda: codes.append(complete(place, "slow")))
    asking.start()
    busy = f"curl -s {place}/metrics | grep outstanding | grep {listed[1]} | grep -q ' 1.0'"
    wait_for(lambda: subprocess.run(["bash", "-c", busy]).returncode == 0, START_S)
    running = upgrading(*listed)
    time.sleep(3)
    assert running.poll() is None and not codes
    SlowEngine.may.set()
    out, _ = running.communicate(timeout=30)
    asking.join()
    assert "restart my-vllm" in out and codes == [200]
