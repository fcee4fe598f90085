"""The command line, by real processes: what is printed, where, and the exit code."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from kvbridge_proto.codec import encode
from kvbridge_proto.engine import ToAgent
from kvbridge_proto.status import StatusQuery
from kvbridge_proto.stream import HEADER, StreamReader, pack

from kvbridge.transport.keys import load_keys

from .oracle import Shape, build_all
from .proto.samples import TO_ENGINE

STATUS = TO_ENGINE[-1]
START_S = 30


def kvbridge(*arguments: str | Path, timeout_s: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvbridge.cli", *map(str, arguments)]
    wide = {**os.environ, "COLUMNS": "160", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=wide)


def test_version() -> None:
    for told in (kvbridge("--version"), kvbridge("--version", PYTHONPATH="/nowhere")):
        assert (told.returncode, told.stdout) == (0, "kvbridge 0.1.0\n")


def test_wrong_command_line_is_exit_code_2() -> None:
    told = kvbridge("statsu")
    assert told.returncode == 2
    assert "statsu" in told.stderr


@pytest.mark.parametrize(
    ("package", "command"), [("typer", ("status",)), ("rich", ("status",)), ("torch", ("agent", "--metrics", ""))]
)
def test_base_install_says_what_a_command_needs(package: str, command: tuple[str, ...], tmp_path: Path) -> None:
    """As in an engine's environment, where the package is not there: a finder that does not find it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {package!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    told = kvbridge(*command, PYTHONPATH=str(tmp_path))
    assert told.returncode == 1
    assert told.stderr == (
        f"kvbridge: this needs the packages of the agent: pip install 'kvbridge[agent]' (missing: {package})\n"
    )


def test_agent_refuses_a_bad_option_naming_it() -> None:
    told = kvbridge("agent", "--slot-bytes", "much")
    assert told.returncode == 1
    assert "bad_option: slot_bytes: got 'much' from --slot-bytes" in told.stderr
    told = kvbridge("agent", KVBRIDGE_LOG_LEVEL="loud")
    assert "bad_option: log_level: got 'loud' from KVBRIDGE_LOG_LEVEL" in told.stderr


def test_status_without_an_agent_says_so(tmp_path: Path) -> None:
    told = kvbridge("status", "--socket", tmp_path / "none.sock")
    assert told.returncode == 1
    assert told.stderr == (f"kvbridge status: no_agent: no agent at {tmp_path}/none.sock: No such file or directory\n")


def test_status_of_a_stale_socket_says_that_nobody_listens(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "stale.sock"))
    told = kvbridge("status", "--socket", tmp_path / "stale.sock")
    assert told.returncode == 1
    assert "no_agent" in told.stderr
    assert "Connection refused" in told.stderr


class Scripted:
    """Something that listens, reads one StatusQuery and answers with fixed bytes."""

    def __init__(self, path: Path, answer: bytes) -> None:
        self.path = path
        self._answer = answer
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen(1)
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Scripted:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._listening.close()

    def _serve(self) -> None:
        connection, _ = self._listening.accept()
        with connection:
            reader: StreamReader[ToAgent] = StreamReader(ToAgent)
            while not any(message == StatusQuery() for message in reader.feed(connection.recv(4096))):
                pass
            connection.sendall(self._answer)


def test_status_prints_what_the_agent_says(tmp_path: Path) -> None:
    with Scripted(tmp_path / "a.sock", pack(STATUS)) as agent:
        told = kvbridge("status", "--socket", agent.path)
    assert told.returncode == 0, told.stderr
    for words in (
        "prefill-0",
        "serving",
        "vllm 0.32.0",
        "pid 4242",
        "decode-0",
        "flowing",
        "quarantined",
        "cmpl-1-a",
        "cannot be made anew",
    ):
        assert words in told.stdout


def test_status_shows_names_that_are_markup_or_commands_as_they_are(tmp_path: Path) -> None:
    odd = msgspec.structs.replace(STATUS.peers[0], name="[/x] [red]\x1b[2J")
    with Scripted(tmp_path / "a.sock", pack(msgspec.structs.replace(STATUS, peers=(odd,)))) as agent:
        told = kvbridge("status", "--socket", agent.path)
    assert told.returncode == 0, told.stderr
    assert "[/x]" in told.stdout and "\x1b" not in told.stdout


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_status_shows_no_terminal_what_others_would_command_it(flags: tuple[str, ...], tmp_path: Path) -> None:
    forged = "x\x1b[2J\x9b2J\nkvbridge: all is well\u202e"
    odd = msgspec.structs.replace(STATUS.peers[0], name=forged)
    said = msgspec.structs.replace(STATUS, peers=(odd,), counters={f"kvbridge_failpoints_total{{armed={forged}}}": 1.0})
    with Scripted(tmp_path / "a.sock", pack(said)) as agent:
        told = kvbridge("status", "--socket", agent.path, *flags)
    assert told.returncode == 0, told.stderr
    assert all(line.isprintable() for line in told.stdout.split("\n"))
    assert not any(line.startswith("kvbridge: all is well") for line in told.stdout.split("\n"))
    if flags:
        assert msgspec.json.decode(told.stdout, type=type(STATUS)) == said


def test_an_error_that_quotes_others_is_plain(tmp_path: Path) -> None:
    refused = msgspec.structs.replace(TO_ENGINE[2], reasons=("x\x1b[2J\nkvbridge: all is well",))
    with Scripted(tmp_path / "a.sock", pack(refused)) as agent:
        told = kvbridge("status", "--socket", agent.path)
    assert told.returncode == 1
    assert told.stderr.split("\n")[1] == "  kvbridge: all is well" and "\x1b" not in told.stderr


def test_plan_of_a_file_nested_too_deep_says_so(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text('{"x":' * 100_000)
    told = kvbridge("plan", tmp_path / "deep.json", tmp_path / "deep.json")
    assert told.returncode == 1 and "bad_pool_file" in told.stderr


def test_status_shows_a_key_as_it_is(tmp_path: Path) -> None:
    """Z85 has brackets and colons, which would be markup and smileys to the library that prints."""
    key = "[red]x[/]:smile:#0123456789012345678901234"
    told_of = msgspec.structs.replace(STATUS, security=f"curve, own key {key}")
    with Scripted(tmp_path / "a.sock", pack(told_of)) as agent:
        told = kvbridge("status", "--socket", agent.path)
    assert key in told.stdout and "loopback only" not in told.stdout


def test_keygen_writes_a_secret_and_prints_the_line_for_others(tmp_path: Path) -> None:
    told = kvbridge("keygen", tmp_path / "a.key", "--name", "prefill-0")
    assert told.returncode == 0, told.stderr
    (secret,) = (line for line in (tmp_path / "a.key").read_text().splitlines() if not line.startswith("#"))
    assert (tmp_path / "a.key").stat().st_mode & 0o777 == 0o600
    (tmp_path / "peers").write_text(told.stdout)
    (tmp_path / "peers").chmod(0o600)
    keys = load_keys(str(tmp_path / "a.key"), str(tmp_path / "peers"))
    assert keys.secret == secret and keys.names == {keys.public: "prefill-0"}
    assert secret not in told.stdout + told.stderr
    assert "copy it to every host" in told.stderr and "name them in `dial`" in told.stderr
    assert "one agent's own key: let it not leave" in told.stderr


@pytest.mark.parametrize("option", ["key", "peers"])
def test_a_key_set_in_the_place_of_its_files_name_is_not_printed(option: str, tmp_path: Path) -> None:
    """A common slip: KVBRIDGE_KEY="$(cat agent.key)", or only the key of it."""
    kvbridge("keygen", tmp_path / "a.key")
    content = (tmp_path / "a.key").read_text()
    secret = content.splitlines()[-1]
    key = {"KVBRIDGE_KEY": str(tmp_path / "a.key")} if option == "peers" else {}
    config = tmp_path / "kvbridge.toml"
    config.write_text(f"{option} = '{secret}'\n")
    places = ("--socket", tmp_path / "a.sock", "--metrics", "", "--listen", "tcp://127.0.0.1:0")
    for said in (secret, f'"{secret}"', content.strip(), " ".join(content.split())):
        for told in (
            kvbridge("agent", *places, **{**key, f"KVBRIDGE_{option.upper()}": said}),
            kvbridge("agent", *places, f"--{option}={said}", **key),
        ):
            assert told.returncode == 1 and f"{option}: " in told.stderr
            assert not any(secret[at : at + 8] in told.stdout + told.stderr for at in range(33))
    told = kvbridge("agent", *places, "--config", config, **key)
    assert told.returncode == 1 and f"bad_{option}: {option}: names a file" in told.stderr
    assert not any(secret[at : at + 8] in told.stdout + told.stderr for at in range(33))


def test_keygen_refuses_to_write_over_a_key_and_a_name_that_no_list_can_have(tmp_path: Path) -> None:
    kvbridge("keygen", tmp_path / "a.key")
    before = (tmp_path / "a.key").read_text()
    told = kvbridge("keygen", tmp_path / "a.key")
    assert told.returncode == 1 and "key_exists" in told.stderr and not told.stdout
    assert (tmp_path / "a.key").read_text() == before
    told = kvbridge("keygen", tmp_path / "b.key", "--name", "two words")
    assert told.returncode == 1 and "bad_name" in told.stderr and not (tmp_path / "b.key").exists()


def test_status_as_json_is_the_message(tmp_path: Path) -> None:
    with Scripted(tmp_path / "a.sock", pack(STATUS)) as agent:
        told = kvbridge("status", "--socket", agent.path, "--json")
    assert msgspec.json.decode(told.stdout, type=type(STATUS)) == STATUS


ANSWERS = {
    "closed": (b"", "closed without an answer"),
    "garbage": (HEADER.pack(3) + b"\xc1\xc1\xc1", "is no agent"),
    "another message": (HEADER.pack(1) + encode({}), "is no agent"),
    "refused": (pack(TO_ENGINE[2]), "agent_refused: version_mismatch: versions: ours 1-1, theirs 2-3"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_status_of_something_else_says_what_it_is(case: str, tmp_path: Path) -> None:
    answer, words = ANSWERS[case]
    with Scripted(tmp_path / "a.sock", answer) as agent:
        told = kvbridge("status", "--socket", agent.path)
    assert told.returncode == 1
    assert words in told.stderr


def write_pools(folder: Path, name: str, shape: Shape) -> Path:
    pools = [held.pool for held in build_all(shape)]
    path = folder / f"{name}.json"
    path.write_bytes(msgspec.json.encode(pools if len(pools) > 1 else pools[0]))
    return path


def test_plan_shows_verdict_takes_and_chunks(tmp_path: Path) -> None:
    source = write_pools(tmp_path, "source", Shape(layout="nhd", tp_size=2, block_tokens=16))
    sink = write_pools(tmp_path, "sink", Shape(layout="hnd", block_tokens=64, codec="fp8_e4m3"))
    told = kvbridge("plan", source, sink, "--tokens", "1000")
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("Convertible\n")
    assert "bf16" in told.stdout
    assert "fp8_e4m3" in told.stdout
    assert "tp 1/2" in told.stdout
    found = json.loads(kvbridge("plan", source, sink, "--tokens", "1000", "--json").stdout)
    assert found["verdict"] == "Convertible"
    assert [part["takes"][0]["end_head"] for part in found["sources"]] == [2, 4]
    assert all(part["chunks"] > 0 and part["bytes"] > 0 for part in found["sources"])


def test_plan_says_what_each_change_means(tmp_path: Path) -> None:
    source = write_pools(tmp_path, "source", Shape(codec="bf16", key_width=32, value_width=32))
    sink = write_pools(tmp_path, "sink", Shape(codec="fp8_e4m3", key_width=32, value_width=32, tp_size=2))
    told = kvbridge("plan", source, sink, "--rank", "1")
    assert told.returncode == 0, told.stderr
    assert "rows are quantized at the source; 32 bytes of a row cross, 64 there and 32 here" in told.stdout
    assert "to nhd tp 1/2" in told.stdout
    found = json.loads(kvbridge("plan", source, sink, "--json").stdout)
    assert found["sink"] == "nhd tp 0/2 pp 0/1"
    assert [(each["field"], each["source"], each["sink"]) for each in found["changes"][:2]] == [
        ("tp_size", "1", "2"),
        ("codec", "bf16", "fp8_e4m3"),
    ]
    assert all(each["words"] for each in found["changes"])
    told = kvbridge("plan", source, sink, "--rank", "2")
    assert told.returncode == 1 and "bad_option: rank: 2" in told.stderr


def test_plan_of_equal_pools_is_same(tmp_path: Path) -> None:
    pool = write_pools(tmp_path, "pool", Shape())
    assert json.loads(kvbridge("plan", pool, pool, "--json").stdout)["verdict"] == "Same"


def test_plan_refuses_another_model_with_the_reasons(tmp_path: Path) -> None:
    source = write_pools(tmp_path, "source", Shape(key_width=64))
    sink = write_pools(tmp_path, "sink", Shape(key_width=96))
    told = kvbridge("plan", source, sink)
    assert told.returncode == 1
    assert "incompatible" in told.stderr
    assert "key_width: source 64, sink 96 (layer 0 and 1 more); needs the same model on both sides" in told.stderr
    (change,) = json.loads(kvbridge("plan", source, sink, "--json").stdout)["changes"]
    assert (change["needs"], change["words"]) == ("the same model on both sides", "")


def test_plan_judges_every_rank_of_the_source(tmp_path: Path) -> None:
    sink = write_pools(tmp_path, "sink", Shape())
    pools = [held.pool for held in build_all(Shape(tp_size=2))]
    odd = msgspec.structs.replace(pools[1], shard=msgspec.structs.replace(pools[1].shard, cp_size=1 << 20))
    (tmp_path / "source.json").write_bytes(msgspec.json.encode([pools[0], odd]))
    told = kvbridge("plan", tmp_path / "source.json", sink)
    assert told.returncode == 1 and "incompatible" in told.stderr and "a period of 1048576 tokens" in told.stderr


def test_plan_of_half_an_engine_says_that_rows_are_missing(tmp_path: Path) -> None:
    held = build_all(Shape(tp_size=2))[0]
    (tmp_path / "half.json").write_bytes(msgspec.json.encode(held.pool))
    sink = write_pools(tmp_path, "sink", Shape())
    told = kvbridge("plan", tmp_path / "half.json", sink)
    assert told.returncode == 1
    assert "rows_not_held" in told.stderr
    assert "every rank" in told.stderr


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"engine": 5}', "\xff"])
def test_plan_refuses_a_file_that_is_no_pool(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    told = kvbridge("plan", tmp_path / "bad.json", tmp_path / "bad.json")
    assert told.returncode == 1
    assert "bad_pool_file" in told.stderr
    assert "bad.json" in told.stderr


def test_agent_starts_answers_status_and_stops(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    (tmp_path / "kvbridge.toml").write_text('name = "from-file"\nmetrics = ""\nlisten = "tcp://127.0.0.1:0"\n')
    flags = ("--config", tmp_path / "kvbridge.toml", "--socket", path, "--inbound-slots", "2", "--outbound-slots", "2")
    command = [sys.executable, "-m", "kvbridge.cli", "agent", *map(str, flags)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as agent:
        try:
            end = time.monotonic() + START_S
            while (told := kvbridge("status", "--socket", path, "--json")).returncode and time.monotonic() < end:
                assert agent.poll() is None, agent.communicate()[1]
                time.sleep(0.1)
            status = json.loads(told.stdout)
            assert (status["agent"]["name"], status["state"], status["fabric"]) == ("from-file", "serving", "nixl")
            agent.send_signal(signal.SIGTERM)
            assert agent.wait(20) == 0
        finally:
            agent.kill()
    assert not path.exists()
