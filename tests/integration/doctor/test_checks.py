"""`kvbridge doctor`: each test breaks one thing, and the doctor says so."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvbridge_proto.peer import Goodbye, Hello
from kvbridge_proto.status import Status

from kvbridge.commands.doctor import CHECKS, looked
from kvbridge.config import load
from kvbridge.dataplane.resources import chosen_gpu
from kvbridge.doctor import entries, machine, neighbour, peer, settings
from kvbridge.doctor.finding import CheckOutcome, Finding, Subject
from kvbridge.doctor.routes import carried, written_by
from kvbridge.errors import OperatorError
from kvbridge.transport.control import Control
from kvbridge.transport.keys import write_pair
from kvbridge.transport.link import Arrived
from testing.agents import AgentProcess, OracleEngine, agent
from testing.nursery import kvbridge
from testing.oracle import Shape, build
from tests.integration.transport.ears import LOOPBACK, Ear
from tests.support.write_entries import COPY
from tests.unit.proto.samples import TO_ENGINE

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()


def subject(folder: Path, address: str = "", prove_route: bool = False, **options: Any) -> Subject:
    said = {"socket": str(folder / "ours.sock"), "device": "cpu"} | {
        name: str(value) for name, value in options.items()
    }
    return Subject(load(flags=said, environment={}), None, {}, address, prove_route)


def doctor(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return kvbridge("doctor", *arguments, timeout_s=240, **environment)


def test_every_check_has_its_anchor_and_every_anchor_its_check() -> None:
    checks = PAGE.partition("\n## Checks\n")[2].partition("\n## ")[0]
    assert re.findall(r"^### (.*)$", checks, re.M) == [check.name for check in CHECKS]


def test_doctor_has_the_page_of_today_with_an_entry_for_every_check_and_code() -> None:
    assert COPY.read_text() == PAGE, "python -m tests.support.write_entries"
    for check in CHECKS:
        entry = entries.of_check(check.name)
        assert entry and not re.search(r"^#|\]\(|\*\*", entry, re.M), entry
    assert entries.of_check("clock").splitlines() == [entries.of_check("clock")], "a paragraph is one line"
    codes = set(
        re.findall(r"`([a-z_]+)`", "".join(re.findall(r"^\| (`[^|]*)", PAGE.partition("\n## Error codes\n")[2], re.M)))
    )
    rows = entries.of_check("peer").splitlines()
    assert "|" not in "".join(rows) and "---" not in "".join(rows), rows
    assert any(row.startswith("`key_refused`: it does not know our key") for row in rows), rows
    assert len(codes) > 200
    for code in codes:
        assert "does not know" not in entries.of_code(code) and "|" not in entries.of_code(code), code
    assert entries.of_code("untagged") == "the router names nothing to fetch: routers"
    assert "does not know of_tomorrow" in entries.of_code("of_tomorrow")


def test_too_little_shared_memory_fails(tmp_path: Path) -> None:
    assert machine.shm(subject(tmp_path), str(tmp_path), 1).outcome is CheckOutcome.OK
    found = machine.shm(subject(tmp_path), str(tmp_path), 1 << 60)
    assert found.outcome is CheckOutcome.FAILED and "--shm-size" in found.remedy


def is_unshared() -> bool:
    return shutil.which("unshare") is not None and subprocess.run(["unshare", "-rm", "true"]).returncode == 0


@pytest.mark.skipif(not is_unshared(), reason="no user namespaces here")
def test_a_container_with_the_shared_memory_that_docker_gives_is_told_to_take_more() -> None:
    script = f"mount -t tmpfs -o size=64m none /dev/shm && exec {sys.executable} -m kvbridge.cli doctor --only shm"
    told = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True)
    assert told.returncode == 1 and "docker gives a container 64 MiB" in " ".join(told.stdout.split()), told.stderr
    assert "check_failed: 1 of 1 checks: shm" in told.stderr


def test_a_driver_without_a_gpu_is_no_machine_without_gpus(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("NVRM version: 1\n")
    any_device = subject(tmp_path, device="auto")
    if chosen_gpu("auto") is None:
        assert machine.gpu(any_device, tmp_path / "version").outcome is CheckOutcome.FAILED
        assert machine.gpu(any_device, tmp_path / "none").outcome is CheckOutcome.NOT_HERE
    assert machine.gpu(subject(tmp_path)).outcome is CheckOutcome.NOT_HERE


def test_expandable_segments_are_seen(tmp_path: Path) -> None:
    said = Subject(subject(tmp_path).config, None, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments: True"})
    assert machine.allocator(said).outcome is CheckOutcome.WARNING


def beside(engine_pid: int, folder: Path) -> Subject:
    """With an agent that has an engine of this PID."""
    (status,) = (each for each in TO_ENGINE if isinstance(each, Status))
    assert status.engine is not None
    engine = msgspec.structs.replace(status.engine, pid=engine_pid)
    return Subject(subject(folder).config, msgspec.structs.replace(status, engine=engine), {})


@pytest.mark.skipif(not is_unshared(), reason="no user namespaces here")
def test_an_engine_in_another_container_is_seen_and_so_is_its_allocator(tmp_path: Path) -> None:
    assert machine.namespaces(beside(os.getpid(), tmp_path)).outcome is CheckOutcome.OK
    settings_of_engine = {**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    # It waits in the shell: a program that was just started by exec has its name before it has its environment.
    command = ["unshare", "-r", "--ipc", "sh", "-c", "echo; read line"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=settings_of_engine) as engine:
        assert engine.stdout is not None and engine.stdout.readline()
        there = beside(engine.pid, tmp_path)
        found = machine.namespaces(there)
        assert found.outcome is CheckOutcome.WARNING and "other namespaces than this one: ipc" in found.text
        assert "of the engine" in machine.allocator(there).text
        engine.kill()
    assert machine.namespaces(there).outcome is CheckOutcome.WARNING, "it is gone"


def test_memory_of_another_process_is_read_and_one_that_is_gone_fails(tmp_path: Path) -> None:
    assert machine.ptrace(subject(tmp_path)).outcome is CheckOutcome.OK
    with neighbour.exporter("lend") as (pid, address):
        pass
    with pytest.raises(OperatorError, match="No such process"):
        neighbour.told("read", str(pid), address)


def test_a_key_that_others_may_read_fails_and_one_that_is_ours_does_not(tmp_path: Path) -> None:
    key = tmp_path / "a.key"
    write_pair(key)
    assert settings.keys(subject(tmp_path, key=key)).outcome is CheckOutcome.OK
    key.chmod(0o644)
    found = settings.keys(subject(tmp_path, key=key))
    assert found.outcome is CheckOutcome.FAILED and "mode 0644" in found.text and "chmod 600" in found.text


def test_modes_of_the_socket_and_its_folder(tmp_path: Path) -> None:
    ours = subject(tmp_path)
    assert settings.sockets(ours).outcome is CheckOutcome.OK
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(ours.config.socket)
        made.listen()
        os.chmod(ours.config.socket, 0o600)
        assert settings.sockets(ours).outcome is CheckOutcome.OK
    os.chmod(ours.config.socket, 0o666)
    assert "mode 0666, should be 0600" in settings.sockets(ours).text
    tmp_path.chmod(0o777)
    assert settings.sockets(ours).outcome is CheckOutcome.FAILED
    tmp_path.chmod(0o700)
    assert "No such file" in settings.sockets(subject(tmp_path / "none")).text


def test_a_socket_that_a_killed_agent_has_left_is_named(tmp_path: Path) -> None:
    ours = subject(tmp_path)
    with socket.socket(socket.AF_UNIX) as alive, socket.socket(socket.AF_UNIX) as killed:
        for listener, path in ((alive, Path(ours.config.socket)), (killed, tmp_path / "b.sock")):
            listener.bind(str(path))
            listener.listen()
            path.chmod(0o600)
        assert settings.sockets(ours).outcome is CheckOutcome.OK
        killed.close()
        found = settings.sockets(ours)
    assert found.outcome is CheckOutcome.WARNING and "nobody listens at b.sock" in found.text, found
    assert f"rm {tmp_path}/b.sock" in found.remedy


@pytest.mark.skipif(Path("/run/kvbridge").exists(), reason="agents of the default socket run here")
def test_a_machine_without_the_default_folder_is_not_broken() -> None:
    """It is where no agent is meant to have the default socket."""
    found = settings.sockets(Subject(load(environment={}), None, {}))
    assert found.outcome is CheckOutcome.WARNING and "/run/kvbridge is not there" in found.text


def test_a_port_that_is_taken_fails(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        ours = subject(tmp_path, listen=f"tcp://{place}", metrics=place)
        for look in (settings.listen, settings.metrics):
            assert look(ours).outcome is CheckOutcome.FAILED and "Address already in use" in look(ours).text
    assert settings.listen(ours).outcome is settings.metrics(ours).outcome is CheckOutcome.OK


def test_a_port_of_another_agent_is_told_from_a_port_that_is_taken(tmp_path: Path) -> None:
    """Who asks the doctor about a host where agents run has nothing to mend."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        metrics = f"127.0.0.1:{free.getsockname()[1]}"
    with agent(tmp_path, "decode", metrics=metrics, routes="nixl") as running:
        ours = subject(tmp_path, listen=running.address, metrics=metrics)
        listened, served = settings.listen(ours), settings.metrics(ours)
    assert listened.outcome is served.outcome is CheckOutcome.WARNING
    assert "the agent decode has it" in listened.text and "an agent has it" in served.text


def test_the_addresses_of_an_agent_that_runs_are_those_in_use(tmp_path: Path) -> None:
    """The command line of the doctor names its socket, and not all that it was started with."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    for metrics, said in ((place, f"the agent decode serves at {place}"), ("", "metrics: off")):
        with agent(tmp_path, "decode", metrics=metrics, routes="nixl") as running:
            asked = Subject(load(environment={"KVBRIDGE_SOCKET": str(running.socket)}), running.status, {})
            assert settings.metrics(asked).text == said
            assert settings.listen(asked).text == f"the agent decode listens at {running.address}"


def test_a_check_that_cannot_look_has_failed(tmp_path: Path) -> None:
    ours = subject(tmp_path, device="cuda:0")
    if chosen_gpu("auto") is None:
        ((_, found),) = looked([check for check in CHECKS if check.name == "gpu"], ours)
        assert found.outcome is CheckOutcome.FAILED and "cuda_unavailable" in found.text


TABLE = """\
[1.2] [vm:3:0]   | 051d intra-node cfg#1                    |
[1.2] [vm:3:0]   | remote memory write by ucp_put*(multi) from {where} |
[1.2] [vm:3:0]   +--------+-------------+------------------+
[1.2] [vm:3:0]   | Range  | Description |      Config      |
[1.2] [vm:3:0]   |  0..99 | short       | {small} |
[1.2] [vm:3:0]   | 100..inf | zero-copy   | {large} |
[1.2] [vm:3:0]   | active message by ucp_am_send* from host memory |
[1.2] [vm:3:0]   |      0 | short              | tcp/lo        |
"""


def test_what_ucx_writes_with_is_read_off_its_tables_and_what_it_speaks_with_is_not() -> None:
    def found(small: str, large: str, where: str = "host memory to host") -> set[str]:
        return set(written_by(TABLE.format(small=small, large=large, where=where)))

    assert found("cma/memory", "cma/memory") == {"cma/memory"}
    assert found("tcp/lo", "cma/memory") == {"cma/memory"}
    assert found("cma/memory", "tcp/lo") == {"tcp/lo"}
    assert found("cuda_ipc/cuda", "cuda_ipc/cuda", "cuda/GPU0 to cuda/dev[1]") == {"cuda_ipc/cuda"}
    assert found("tcp/lo", "tcp/lo", "host memory to cuda/dev[1]") == set()
    assert written_by("") == frozenset()


def test_ucx_that_falls_back_to_tcp_fails_and_is_ok_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = carried("nixl", subject(tmp_path))
    assert found.outcome is CheckOutcome.OK and "by cma/memory" in found.text, found
    monkeypatch.setenv("UCX_TLS", "tcp")
    found = carried("nixl", replace(subject(tmp_path), environment={"UCX_TLS": "tcp"}))
    assert found.outcome is CheckOutcome.FAILED, found
    assert "by tcp/lo" in found.text and "UCX_TLS=tcp is set" in found.text


def test_what_failed_is_the_exit_code_and_json_names_every_check(tmp_path: Path) -> None:
    only = ("--only", "route-host", "--only", "sockets", "--device", "cpu", "--json")
    told = doctor(*only, "--socket", tmp_path / "none" / "a.sock")
    assert told.returncode == 1 and "check_failed: 1 of 2 checks: sockets" in told.stderr
    assert [(each["check"], each["outcome"], each["entry"][:33]) for each in json.loads(told.stdout)] == [
        ("route-host", "not here", ""),
        ("sockets", "failed", "The folder of the unix socket must"[:33]),
    ]
    assert doctor(*only, "--socket", tmp_path / "a.sock").returncode == 0


def test_a_terminal_shows_which_check_is_at_work_and_what_is_none_does_not() -> None:
    only = ("--only", "shm", "--only", "clock")
    command = [sys.executable, "-m", "kvbridge.cli", "doctor", *only]
    terminal, end = os.openpty()
    seen = b""
    with subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env={**os.environ, "TERM": "xterm"}):
        os.close(end)
        with contextlib.suppress(OSError):  # of a terminal nobody has open any more
            while said := os.read(terminal, 65536):
                seen += said
    os.close(terminal)
    at_work = [seen.index(f"{number} of 2: {title}".encode()) for number, title in ((1, "shared memory"), (2, "clock"))]
    assert at_work[0] < seen.index(b"shared memory: /dev/shm") < at_work[1]
    assert " of 2: " not in doctor(*only).stdout


def test_what_is_no_check_is_refused_with_the_nearest_name() -> None:
    told = doctor("--only", "root-nixl")
    assert told.returncode == 2 and "did you mean route-nixl?" in told.stderr


def test_a_neighbour_without_an_answer_is_told_so_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbour, "NEIGHBOUR_ANSWER_S", 0.01)
    with pytest.raises(OperatorError, match="nixl: no answer"):
        neighbour.told("nixl", "lo")
    with pytest.raises(OperatorError, match="lend: no answer"), neighbour.exporter("lend"):
        pass


# Another agent:

PATIENT_S = 200.0  # with whoever will answer, however busy the machine is


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbour, "NEIGHBOUR_ANSWER_S", PATIENT_S)
    monkeypatch.setattr(peer, "PEER_ANSWER_S", PATIENT_S)


@pytest.mark.usefixtures("patient")
def test_a_peer_is_reached_and_judged_and_one_that_is_stopped_or_gone_is_told_apart(tmp_path: Path) -> None:
    key = tmp_path / "fleet.key"
    write_pair(key)
    with agent(tmp_path, "other", key=key) as other:
        address = other.address
        found = look(tmp_path, address, key)
        assert found.outcome is CheckOutcome.FAILED and "refuses: no_engine" in found.text
        engine = OracleEngine(other, build(Shape()))
        engine.attach()
        found = look(tmp_path, address, key)
        assert found.outcome is CheckOutcome.WARNING and "its engine is attached; no engine of ours" in found.text
        with agent(tmp_path, "ours", key=key) as ours:
            same = OracleEngine(ours, build(Shape(layout="hnd", block_tokens=64)))
            same.attach()
            found = look(tmp_path, address, key)
            assert found.outcome is CheckOutcome.OK and "no byte was moved; --prove-route moves" in found.text, found
            assert free_slots(other) == (0, 0) and "made slots" not in other.text(), "it keeps its memory"
            found = look(tmp_path, address, key, prove_route=True)
            assert found.outcome is CheckOutcome.OK, found
            route = r"; nixl [\d.]+ GB/s in 1 KiB \(direct: .*\), too small to judge its rate, and its bytes are here; "
            assert re.search(route, found.text), found
            assert free_slots(other) == (8, 4), "it has taken it"
            assert "pull, which reads an engine's memory, was not looked at" in found.text, found
            assert re.search(r"session open: receiver=doctor .* nixl [\d.]+ GB/s", other.text()), "it has written"
            found = look(tmp_path, address, key, prove_route=True, routes="host")
            assert found.outcome is CheckOutcome.FAILED and "refuses: no_route" in found.text, found
            found = look(tmp_path, address, key, routes="pull")
            assert found.outcome is CheckOutcome.OK and "its engine's pool fits ours" in found.text, found
            assert "no route was tried: pull is the only one" in found.text, found
            found = look(tmp_path, address, key, prove_route=True, net_devices="none0")
            assert found.outcome is CheckOutcome.FAILED and "net_devices: got none0, this host has " in found.text, (
                found
            )
            same.close()
        stranger, known = tmp_path / "stranger.key", tmp_path / "known"
        known.write_text(f"other {address.partition('#')[2]}\nus {write_pair(stranger)}\n")
        assert "key_refused" in look(tmp_path, address, stranger, peers=known).text
        other_key = look(tmp_path, address.partition("#")[0], stranger, connect_s=1)
        assert "peer_unreachable" in other_key.text and "another key than the address says" in other_key.remedy
        other.process.send_signal(signal.SIGSTOP)
        stopped = look(tmp_path, address, key, connect_s=1)
        assert "its port takes connections" in stopped.text and "may be stopped" in stopped.remedy, stopped
        other.process.send_signal(signal.SIGCONT)
        engine.close()
    gone = look(tmp_path, address, key, connect_s=1)
    assert gone.outcome is CheckOutcome.FAILED and "peer_unreachable" in gone.text and "takes" not in gone.text
    assert "peer_not_allowed" in look(tmp_path, "tcp://192.0.2.1:7700", key).text


def look(folder: Path, address: str, key: Path, prove_route: bool = False, **options: object) -> Finding:
    return peer.peer(subject(folder, address, prove_route, **{"key": key, "connect_s": PATIENT_S} | options))


def free_slots(running: AgentProcess) -> tuple[int, int]:
    return running.status.receive_slots.free, running.status.send_slots.free


@pytest.mark.usefixtures("patient")
def test_a_peer_that_allows_only_pull_has_not_failed_and_makes_no_slots(tmp_path: Path) -> None:
    key = tmp_path / "fleet.key"
    write_pair(key)
    with agent(tmp_path, "other", key=key, routes="pull") as other, agent(tmp_path, "ours", key=key) as ours:
        engines = [OracleEngine(running, build(Shape())) for running in (other, ours)]
        for engine in engines:
            engine.attach()
        for prove_route in (False, True):
            found = look(tmp_path, other.address, key, prove_route)
            assert found.outcome is CheckOutcome.OK and "it allows pull alone; pull, which reads" in found.text, found
        assert free_slots(other) == (0, 0)
        found = look(tmp_path, other.address, key, routes="nixl")
        assert found.outcome is CheckOutcome.FAILED and "refuses: no_route" in found.text, "then we cannot have it"
        for engine in engines:
            engine.close()


async def test_a_peer_that_does_not_answer_is_told_goodbye(tmp_path: Path) -> None:
    """It may be about to write: a Goodbye has it stop."""
    async with Control("silent", LOOPBACK) as silent:
        ear = Ear(silent)
        looking = asyncio.create_task(asyncio.to_thread(peer.peer, subject(tmp_path, silent.address, connect_s=1)))
        assert isinstance((await ear.hear(Arrived)).envelope.body, Hello)
        assert isinstance((await ear.hear(Arrived, peer.PEER_ANSWER_S + 5)).envelope.body, Goodbye)
        found = await looking
    assert found.outcome is CheckOutcome.FAILED and "peer_silent" in found.text, found


def test_no_peer_is_not_here(tmp_path: Path) -> None:
    assert peer.peer(subject(tmp_path)).outcome is CheckOutcome.NOT_HERE
