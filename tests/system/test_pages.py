"""Commands of pages that need no engine, run as they stand, and what those for other machines name."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest
import yaml

from demo.processes import free_port
from kvbridge.config import load
from kvbridge.transport.keys import load_keys, load_peers
from testing.nursery import Child, nursery
from testing.serving import listening
from testing.waiting import wait_for
from tests.support.families import FAMILIES, config
from tests.support.pages import ROOT, block, told, why_not
from tests.system.test_prometheus import EngineOfProxy, complete

BIN = Path(sys.executable).parent
IN_PATH = f"PATH={BIN}:$PATH\n"
CONFIGURATION = "/etc/kvbridge"
RUN_S = 180
PAIRS = {  # a page with commands for GPUs, and the one that says what to set on CPUs
    "README.md": "docs/vllm.md",
    "docs/sglang.md": "docs/sglang.md",
    "docs/proxy.md": "docs/proxy.md",
}
WITHOUT_CLUSTER = """kubectl() {
  case "$*" in
    "apply -k "*) command kubectl kustomize "$3" ;;
    *) command kubectl "$@" --dry-run=client -o yaml ;;
  esac && echo ---
}
kvbridge() { command kvbridge "$@" >&2; }
"""


@pytest.mark.parametrize("machine", ["# CPUs", "# GPUs"])
@pytest.mark.parametrize("page", PAIRS)
def test_either_kind_of_machine_sets_what_both_kinds_run(page: str, machine: str) -> None:
    """What is common stands there once; only its names are filled in."""
    own, both = block(PAIRS[page] if machine == "# CPUs" else page, machine), block(page, "agent()")
    checked = subprocess.run(["bash", "-nc", own + both], capture_output=True, text=True, timeout=10)
    assert (checked.returncode, checked.stderr) == (0, "")
    names = set(re.findall(r"^([A-Z]+)=", own, re.MULTILINE))
    assert names == set(re.findall(r"\$\{?([A-Z]+)\b", both)) - {"PWD"}
    devices = re.search(r"^DEVICES=\((\S+) (\S+)\)$", own, re.MULTILINE)
    assert devices and all(each == "cpu" or each.startswith("cuda:") for each in devices.groups())


@pytest.mark.parametrize("begins", ["kvbridge agent --name p0", "kvbridge agent --name r1"])
def test_an_agent_takes_the_options_that_are_shown(begins: str) -> None:
    line = block("docs/vllm.md", begins).replace("\\\n", "").splitlines()[0]
    program, command, *flags = shlex.split(line, comments=True)
    assert (program, command) == ("kvbridge", "agent")
    shown = subprocess.run([BIN / "kvbridge", "config", "show", *flags], capture_output=True, text=True, timeout=RUN_S)
    assert shown.returncode == 0, shown.stderr


def test_keys_are_made_and_agents_take_them_as_shown(tmp_path: Path) -> None:
    """The lines of a block that are not commands are those of a configuration."""

    def done(page: str, begins: str) -> tuple[str, Path]:
        """What the commands print, and a file with the other lines."""
        lines = block(page, begins).replace(CONFIGURATION, str(tmp_path)).splitlines()
        commands = IN_PATH + "\n".join(each for each in lines if each.startswith("kvbridge "))
        run = subprocess.run(["bash", "-euc", commands], capture_output=True, text=True, timeout=RUN_S)
        assert run.returncode == 0, run.stderr
        (tmp_path / "agent.toml").write_text("\n".join(each for each in lines if not each.startswith("kvbridge ")))
        return run.stdout, tmp_path / "agent.toml"

    done("docs/vllm.md", "kvbridge keygen")
    (tmp_path / "fleet.key").unlink()  # it is that of SECURITY.md, too
    fleet = load(str(done("SECURITY.md", "kvbridge keygen /etc/kvbridge/fleet.key")[1]))
    assert load_keys(fleet.key, fleet.peers)
    line, configuration = done("SECURITY.md", "kvbridge keygen /etc/kvbridge/agent.key")
    (tmp_path / "peers").write_text(line)
    own = load(str(configuration))
    assert set(load_peers(own.peers).values()) == {"prefill-3"} and load_keys(own.key, own.peers)
    assert load(str(done("SECURITY.md", "dial = ")[1])).dial == ("10.0.0.0/24:7700",)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_takes_the_commands_without_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    script = f"{IN_PATH}{WITHOUT_CLUSTER}{block('docs/kubernetes.md', 'kubectl create')}"
    run = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True, timeout=RUN_S)
    assert run.returncode == 0, run.stderr
    made = [each for each in yaml.safe_load_all(run.stdout) if each]
    (namespace,) = (each["metadata"]["name"] for each in made if each["kind"] == "Namespace")
    secrets = {each["metadata"]["name"]: set(each["data"]) for each in made if each["kind"] == "Secret"}
    (agent,) = (tomllib.loads(each["data"]["agent.toml"]) for each in made if "agent.toml" in each.get("data", {}))
    assert {each["metadata"].get("namespace", namespace) for each in made} == {namespace}
    pods = [each["spec"]["template"]["spec"] for each in made if each["kind"] == "StatefulSet"]
    mounted = {
        volume["secret"]["secretName"] for pod in pods for volume in pod.get("volumes", []) if "secret" in volume
    }
    named = [entry["valueFrom"].get("secretKeyRef") for pod in pods for entry in pod["containers"][0]["env"]
             if "valueFrom" in entry]  # fmt: skip
    assert mounted == {"kvbridge-key"} and secrets["kvbridge-key"] == {Path(agent["key"]).name}
    assert secrets.keys() == {*mounted, *(each["name"] for each in named if each)}
    assert all(each["key"] in secrets[each["name"]] for each in named if each)


def planned(page: str, begins: str, place: Path) -> subprocess.CompletedProcess[str]:
    script = IN_PATH + block(page, begins)
    return subprocess.run(["bash", "-euc", script], cwd=place, capture_output=True, text=True, timeout=RUN_S)


def test_a_fleet_is_planned_as_the_page_shows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("llama", 32, 32, 8, 128)))
    told = planned("docs/operations.md", "kvbridge plan", tmp_path)
    assert told.returncode == 0 and re.search(r"prefill.*decode", told.stdout, re.DOTALL), told


def test_plan_says_of_models_what_the_page_says(tmp_path: Path) -> None:
    gpt_oss = next(each.config for each in FAMILIES if each.config["model_type"] == "gpt_oss")
    for name, of_model in ("Qwen3-32B", config("qwen3", 64, 64, 8, 128)), ("gpt-oss-120b", gpt_oss):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(of_model))

    fits = planned("docs/models.md", "kvbridge plan --model Qwen3", tmp_path)
    assert fits.returncode == 0, fits.stderr
    refused = planned("docs/models.md", "kvbridge plan --model gpt-oss", tmp_path)
    (answer,) = re.findall(r"^```text\n(.*?)^```", (ROOT / "docs/models.md").read_text(), re.MULTILINE | re.DOTALL)
    assert refused.returncode == 1 and (refused.stdout + refused.stderr).split() == answer.split()


@pytest.mark.timeout(RUN_S + 30)
def test_the_proxy_serves_with_the_engines_that_are_shown(tmp_path: Path) -> None:
    """None of them is there: it says so."""
    if reason := why_not():
        pytest.skip(reason)
    install, command = block("docs/proxy.md", "pip install").split("\n", 1)
    assert install.startswith("pip install '.[proxy]'")
    asks = "until curl -so health 127.0.0.1:8080/health; do sleep 0.2; done; cat health\n"
    script = f"{IN_PATH}{command.rstrip()} 2>proxy.log &\n{asks}kill %1 && wait\n"
    assert told(script, tmp_path, {}, RUN_S) == '{"healthy": {"prefill": [], "decode": []}}'
    (serving,) = re.findall(r"serving: .*", (tmp_path / "proxy.log").read_text())
    assert set(re.findall(r"http://10\S+?(?=,|$| )", command)) <= set(re.findall(r"http://10[^\s,]+", serving))


# An engine that is taken off the proxy, with a real one:


START_S = 180.0


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
        out, _ = upgrading(place, each, file, proxy).communicate(timeout=200)
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
    out, _ = running.communicate(timeout=200)
    asking.join()
    assert "restart my-vllm" in out and codes == [200]
