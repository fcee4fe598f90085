"""The command line in real processes: what is printed, where, and the exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvbridge_proto.engine import ToAgent
from kvbridge_proto.framing import HEADER, FrameReader, encode, pack
from kvbridge_proto.status import PeerStatus, PoolQuery, StatusQuery, TransferStatus

from kvbridge import cli, local_agents
from kvbridge.commands import app
from kvbridge.commands.console import WIDE, stdout
from kvbridge.commands.keygen import run as keygen
from kvbridge.commands.release import release
from kvbridge.errors import OperatorError
from kvbridge.options import options
from kvbridge.transport.keys import load_keys
from testing.nursery import kvbridge
from testing.oracle import Shape, build_all
from testing.refusals import refused
from testing.waiting import wait_for
from tests.support.families import config, latents
from tests.unit.proto.samples import TO_ENGINE

STATUS, POOL_STATUS, TRACE = TO_ENGINE[-3:]
ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]


def started(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a Python that has imported nothing, as a user starts it."""
    command = [sys.executable, "-m", "kvbridge.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in this process, for a terminal of 160 columns."""
    out, errors, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        for name, value in {"COLUMNS": "160", **environment}.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["kvbridge", *map(str, arguments)])
        patch.setattr(sys, "excepthook", sys.excepthook)  # typer sets its own
        hangup = signal.getsignal(signal.SIGHUP)  # `agent` ignores it while it starts
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            signal.signal(signal.SIGHUP, hangup)
        return subprocess.CompletedProcess(sys.argv, code, out.getvalue(), errors.getvalue())


def fails(told: subprocess.CompletedProcess[str], exit_code: int, *words: str) -> None:
    """It ends like this, and says these words."""
    assert told.returncode == exit_code and all(word in told.stderr for word in words), told.stderr


def test_version() -> None:
    for told in (started("--version"), started("--version", PYTHONPATH="/nowhere")):
        assert (told.returncode, told.stdout) == (0, "kvbridge 0.1.0\n")


def test_the_command_line_is_there_at_once() -> None:
    before = os.times()
    assert started("--help").returncode == 0
    assert os.times().children_user - before.children_user < 1.5, "seconds of a processor, of which Python takes 0.3"


def test_wrong_command_line_is_exit_code_2() -> None:
    fails(run("statsu"), 2, "statsu")


def started_without(package: str, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """As in an engine's environment, where the package is not there: a finder that does not find it."""
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {package!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    return started(*command, PYTHONPATH=str(folder))


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [
        ("typer", ("status",), "agent"),
        ("rich", ("status",), "agent"),
        ("torch", ("agent", "--metrics", ""), "agent"),
        ("aiohttp", ("proxy", "--prefill", "vllm=http://h:1", "--decode", "vllm=http://h:2"), "proxy"),
        ("opentelemetry", ("agent", "--otlp-endpoint", "http://127.0.0.1:4318/v1/traces"), "otel"),
    ],
)
def test_base_install_says_what_a_command_needs(
    package: str, command: tuple[str, ...], extra: str, tmp_path: Path
) -> None:
    told = started_without(package, tmp_path, *command)
    assert told.returncode == 1
    assert told.stderr == (
        f"kvbridge: this needs the packages of the {extra}: pip install 'kvbridge[{extra}]' (missing: {package})\n"
    )


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_plan_as_json_says_which_package_it_lacks(package: str, tmp_path: Path) -> None:
    told = started_without(package, tmp_path, "plan", "a.json", "b.json", "--json")
    found = json.loads(told.stdout)
    assert (told.returncode, found["code"]) == (1, "missing_package")
    assert f"(missing: {package})" in found["reasons"][0] and found["reasons"][0] in told.stderr


def test_config_show_says_where_each_value_came_from(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("connect_s = 1\nsilence_s = 2\ndrain_s = 3\n")
    said = ("--config", tmp_path / "a.toml", "--drain-s", "6", "--no-share-memory")
    environment = {"KVBRIDGE_SILENCE_S": "4", "KVBRIDGE_DRAIN_S": "5"}
    told = run("config", "show", *said, **environment)
    assert told.returncode == 0, told.stderr
    rows = {line.split()[0]: line.split()[1:] for line in told.stdout.splitlines()}
    assert list(rows) == ["option", *options()]
    assert rows["connect_s"] == ["1.0", str(tmp_path / "a.toml")]
    assert rows["silence_s"] == ["4.0", "KVBRIDGE_SILENCE_S"]
    assert (rows["drain_s"], rows["share_memory"]) == (["6.0", "--drain-s"], ["false", "--no-share-memory"])
    assert (rows["slot_bytes"], rows["peers"]) == (["by", "device", "default"], ["empty", "default"])
    found = json.loads(run("config", "show", "--json", *said, **environment).stdout)
    assert (found["code"], found["reasons"], list(found["options"])) == ("", [], list(options()))
    assert found["options"]["drain_s"] == {"value": 6.0, "default": 10.0, "origin": "flag", "place": "--drain-s"}
    assert found["options"]["slot_bytes"] == {"value": None, "default": None, "origin": "default", "place": ""}


def test_config_show_refuses_what_the_agent_would_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("slot_byte = 4096\n")
    reason = f"slot_byte: no such option in {tmp_path}/a.toml; did you mean slot_bytes?"
    for command in (("agent",), ("config", "show"), ("config", "show", "--json")):
        told = run(*command, "--config", tmp_path / "a.toml")
        assert (told.returncode, told.stderr) == (2, f"kvbridge {' '.join(command[:2])}: bad_option: {reason}\n")
    assert json.loads(told.stdout) == {"code": "bad_option", "reasons": [reason], "options": {}}
    fails(run("agent", "--slot-byte", "4096"), 2, "--slot-bytes")


@pytest.mark.parametrize("option", ["key", "peers"])
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_config_show_shows_no_key_set_in_the_place_of_its_files_name(
    option: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    run("keygen", tmp_path / "a.key")
    secret = (tmp_path / "a.key").read_text().splitlines()[-1]
    key = {"KVBRIDGE_KEY": str(tmp_path / "a.key")}
    told = run("config", "show", *flags, **{**key, f"KVBRIDGE_{option.upper()}": secret})
    assert told.returncode == 0 and secret[:8] not in told.stdout + told.stderr and "not shown" in told.stdout
    assert str(tmp_path / "a.key") in run("config", "show", *flags, **key).stdout


def examples(command: str) -> list[list[str]]:
    """What `--help` of a command gives as examples, in words."""
    told = run(*command.split(), "--help")
    assert told.returncode == 0, told.stderr
    shown = told.stdout.partition("Examples:")[2].partition("╭")[0]
    lines = re.sub(r"\\\s*\n\s*", "", shown).splitlines()  # a line that goes on below
    return [shlex.split(line.partition(" >")[0]) for line in lines if line.strip()]


def test_release_says_what_each_agent_answers_before_it_asks_the_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []

    def ask(path: str) -> int:
        said.append(capsys.readouterr().out)
        if path == "b":
            raise OperatorError("no_agent", "no agent at b")
        return 3

    monkeypatch.setattr("kvbridge.commands.release.ask_release", ask)
    with refused(OperatorError, "no_agent"):
        release(["a", "b", "c"])
    assert [*said, capsys.readouterr().out] == ["", "a: 3 prompts released\n", "", "c: 3 prompts released\n"]


COMMANDS = (
    "agent",
    "status",
    "trace",
    "release",
    "doctor",
    "bench",
    "plan",
    "up",
    "keygen",
    "proxy",
    "drain",
    "config show",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_the_command_takes(command: str) -> None:
    shown = examples(command)
    assert shown and all(words[: 1 + len(command.split())] == ["kvbridge", *command.split()] for words in shown)
    for words in shown:
        parse(words[1:])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_readable_at_80_columns(command: str) -> None:
    """Paragraphs fill their lines, no flag is cut off, and each option has room for its words."""
    lines = run(*command.split(), "--help", COLUMNS="80").stdout.splitlines()
    assert lines and max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    prose = [line.strip() for line in lines[: next(i for i, line in enumerate(lines) if line.startswith("╭"))]]
    for line, below in pairwise(prose):
        is_example = line.startswith(("kvbridge ", "--")) or line.endswith(":")
        if line and below and not is_example:
            assert len(line) + len(below.split()[0]) >= 76, f"{line!r} ends early"
    rows = [line.strip("│ ").split("  ") for line in lines if line.startswith("│")]
    assert all(len(row[-1]) >= 3 for row in rows)


def commands_of(page: Path) -> Iterator[list[str]]:
    """The command lines of kvbridge in a page's blocks of shell, in words."""
    for block in re.findall(r"^ *```(?:bash)?\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if found := re.match(r"\s*(?:\S+/bin/)?(kvbridge [^#>&|]+)", line):
                words = shlex.split(found[1])
                yield [word for word in words if not re.fullmatch(r"\$\{\w+\[@\]\}", word)]  # an array of more options


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands_of(page))], ids=lambda page: page.name)
def test_commands_on_pages_are_those_that_kvbridge_takes(page: Path) -> None:
    for words in commands_of(page):
        parse(words[1:])


def parse(words: list[str]) -> None:
    """Raises for a command line that kvbridge would refuse; runs nothing."""
    command: Any = app.command()
    name, context = "kvbridge", None
    while True:
        context = command.make_context(name, words, parent=context)
        if not hasattr(command, "commands"):
            return
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])


def test_every_command_has_its_examples_looked_at() -> None:
    built: Any = app.command()
    assert {command.split()[0] for command in COMMANDS} == set(built.commands)


SOURCE = 'eval "$(_KVBRIDGE_COMPLETE=source_bash kvbridge)"'
COMPLETE = 'COMP_WORDS=({words}) COMP_CWORD={last}; _kvbridge_completion kvbridge; echo "${{COMPREPLY[@]}}"'
COMPLETED = {
    "kvbridge con": "config",
    "kvbridge config ''": "show",
    "kvbridge agent --sl": "--slot-bytes",
    "kvbridge agent --no-s": "--no-share-memory --no-status-page",
    "kvbridge agent --verify s": "sampled",
    "kvbridge config show --routes ''": "direct host nixl pull",
    "kvbridge doctor --only route-": "route-pull route-direct route-nixl route-host",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_flags_and_their_words(tmp_path: Path) -> None:
    (tmp_path / "kvbridge").write_text(f'#!/bin/sh\nexec {sys.executable} -m kvbridge.cli "$@"\n')
    (tmp_path / "kvbridge").chmod(0o755)
    asked = [COMPLETE.format(words=words, last=len(shlex.split(words)) - 1) for words in COMPLETED]
    paths = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    told = subprocess.run(["bash", "-c", "\n".join([SOURCE, *asked])], capture_output=True, text=True, env=paths)
    assert told.stdout.splitlines() == list(COMPLETED.values()), told.stderr


@pytest.mark.parametrize("pattern", ["10.0.0.0/24:7700", "*:7700", "prefill.internal:7700"])
def test_an_agent_that_is_to_dial_other_hosts_without_a_key_does_not_start(pattern: str, tmp_path: Path) -> None:
    places = ("--socket", tmp_path / "a.sock", "--metrics", "", "--listen", "tcp://127.0.0.1:0")
    told = kvbridge("agent", *places, "--dial", f"127.0.0.1:7700,{pattern}")
    assert told.returncode == 2 and not (tmp_path / "a.sock").exists()
    assert f"bad_option: dial: {pattern} reaches beyond loopback, and no key is set" in told.stderr


@pytest.mark.parametrize(
    ("code", "exit_code", "flags"),
    [
        ("wildcard_listen", 2, ("--listen", "tcp://0.0.0.0:0")),
        ("no_net_devices: .* this host has .*lo", 2, ("--listen", "tcp://192.0.2.1:0", "--key", "a.key")),
        ("bad_option: net_devices: got eth77, this host has .*lo", 2, ("--net-devices", "lo,eth77")),
        ("bad_key", 1, ("--key", "none.key")),
        ("socket_unavailable: .*/none is not there; .* mkdir -p -m 750 .*/none", 1, ("--socket", "none/a.sock")),
    ],
)
def test_an_agent_that_cannot_start_says_by_its_exit_code_whether_trying_again_helps(
    code: str, exit_code: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    if "a.key" in flags:
        keygen(tmp_path / "a.key", "ours")
    places = {"--socket": tmp_path / "a.sock", "--metrics": "", "--listen": "tcp://127.0.0.1:0"}
    said = dict(zip(flags[::2], flags[1::2], strict=True))
    said |= {flag: tmp_path / value for flag, value in said.items() if flag in ("--key", "--socket")}
    told = kvbridge("agent", *(part for pair in {**places, **said}.items() for part in pair))
    assert told.returncode == exit_code and re.search(f"kvbridge agent: {code}", told.stderr), told.stderr


@pytest.mark.skipif(Path("/proc/driver/nvidia/gpus").exists(), reason="this machine has GPUs")
def test_an_agent_for_a_gpu_on_a_machine_without_says_so(tmp_path: Path) -> None:
    told = kvbridge("agent", "--socket", tmp_path / "a.sock", "--metrics", "", "--device", "cuda:3")
    fails(told, 1, "cuda_unavailable: ", "this machine has no NVIDIA GPU", "set device to cpu")


def test_status_watches_through_an_agents_absence_until_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvbridge.cli", "status", "--watch", "--socket", str(tmp_path / "a.sock")]
    terminal, end = os.openpty()
    watching = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env={**os.environ, "TERM": "xterm"})
    os.close(end)
    seen = b""
    with watching, Scripted(tmp_path / "a.sock", pack(STATUS)):
        try:
            while b"prefill-0" not in seen:
                seen += os.read(terminal, 65536)
            while b"no agent at" not in seen:  # it answers once
                (tmp_path / "a.sock").unlink(missing_ok=True)
                seen += os.read(terminal, 65536)
            watching.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # of a terminal nobody has open any more; whom nobody reads must wait
                while said := os.read(terminal, 65536):
                    seen += said
            assert watching.wait(60) == 0
        finally:
            watching.kill()
            os.close(terminal)
    assert seen.index(b"\x1b[?1049h") < seen.index(b"prefill-0") < seen.index(b"\x1b[?1049l"), (
        "the screen is given back"
    )
    assert b"Traceback" not in seen


def test_status_takes_one_way_of_showing() -> None:
    fails(run("status", "--watch", "--json"), 2, "--watch, --pool, --labels, --probe and --json: one of them")


STATUS_QUERY = StatusQuery()


class Scripted:
    """Something that listens, reads one query and answers with fixed bytes."""

    def __init__(self, path: Path, answer: bytes, query: StatusQuery | PoolQuery = STATUS_QUERY) -> None:
        self.path = path
        self._answer, self._query = answer, query
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
            reader: FrameReader[ToAgent] = FrameReader(ToAgent)
            while not any(message == self._query for message in reader.messages(connection.recv(4096))):
                pass
            connection.sendall(self._answer)


def shown(folder: Path, answer: object, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What `kvbridge status` makes of an agent that answers this."""
    said = answer if isinstance(answer, bytes) else pack(answer)
    with Scripted(folder / "a.sock", said, PoolQuery() if "--pool" in flags else STATUS_QUERY) as agent:
        told = run("status", "--socket", agent.path, *flags, **environment)
    (folder / "a.sock").unlink()
    return told


def test_status_prints_what_the_agent_says(tmp_path: Path) -> None:
    told = shown(tmp_path, STATUS)
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
        "4 s ago",
        "warning kvbridge.receiver: failed: request=cmpl-1-b code=peer_lost",
        "3,000 of 4,000 prompt tokens (75.0%)",
        "3 prompts: 2 peer_lost, 1 untagged",
        "6 prompts: 5 fetched; 1 offer_expired",
    ):
        assert words in told.stdout


@pytest.mark.proves("T40")
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_status_shows_no_terminal_what_others_would_command_it(flags: tuple[str, ...], tmp_path: Path) -> None:
    forged = "[/x] [red]x\x1b[2J\x9b2J\nkvbridge: all is well\u202e"
    odd = msgspec.structs.replace(STATUS.peers[0], name=forged)
    said = msgspec.structs.replace(STATUS, peers=(odd,), failpoints=(forged,))
    told = shown(tmp_path, said, *flags)
    assert told.returncode == 0 and "[/x] [red]x" in told.stdout, told.stderr
    assert all(line.isprintable() for line in told.stdout.split("\n"))
    assert not any(line.startswith("kvbridge: all is well") for line in told.stdout.split("\n"))
    if not flags:
        assert "FAILPOINTS ARE ON, this agent fails on purpose: [/x]" in told.stdout
    if flags:
        assert msgspec.json.decode(told.stdout, type=type(STATUS)) == said


def test_an_error_that_quotes_others_is_plain(tmp_path: Path) -> None:
    refused = msgspec.structs.replace(TO_ENGINE[2], reasons=("x\x1b[2J\nkvbridge: all is well",))
    told = shown(tmp_path, refused)
    assert told.returncode == 1
    assert told.stderr.split("\n")[1] == "  kvbridge: all is well" and "\x1b" not in told.stderr


def test_status_shows_a_key_as_it_is(tmp_path: Path) -> None:
    """Z85 has brackets and colons, which would be markup and smileys to the library that prints."""
    key = "[red]x[/]:smile:#0123456789012345678901234"
    told_of = msgspec.structs.replace(STATUS, security=f"curve, own key {key}")
    told = shown(tmp_path, told_of)
    assert key in told.stdout and "loopback only" not in told.stdout


def test_keygen_writes_a_secret_and_prints_the_line_for_others(tmp_path: Path) -> None:
    told = run("keygen", tmp_path / "a.key", "--name", "prefill-0")
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
    run("keygen", tmp_path / "a.key")
    content = (tmp_path / "a.key").read_text()
    secret = content.splitlines()[-1]
    key = {"KVBRIDGE_KEY": str(tmp_path / "a.key")} if option == "peers" else {}
    config = tmp_path / "kvbridge.toml"
    config.write_text(f"{option} = '{secret}'\n")
    places = ("--socket", tmp_path / "a.sock", "--metrics", "", "--listen", "tcp://127.0.0.1:0")
    for told, said in (
        (kvbridge("agent", *places, **{**key, f"KVBRIDGE_{option.upper()}": content.strip()}), "got what is not shown"),
        (kvbridge("agent", *places, f'--{option}="{secret}"', **key), "must name a file"),
        (kvbridge("agent", *places, "--config", config, **key), "must name a file"),
    ):
        assert told.returncode == 2 and f"bad_option: {option}: {said}" in told.stderr
        assert not any(secret[at : at + 8] in told.stdout + told.stderr for at in range(33))


def test_keygen_refuses_a_name_that_no_list_can_have(tmp_path: Path) -> None:
    told = run("keygen", tmp_path / "b.key", "--name", "two words")
    assert told.returncode == 1 and "bad_name" in told.stderr and not (tmp_path / "b.key").exists()


def on_another_host(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command where no agent but those of KVBRIDGE_SOCKET's folder listens: other tests run at the same time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_agents, "LISTENING", Path("/dev/null"))
        return run(*arguments, **environment)


def test_status_finds_an_agent_wherever_its_socket_is(tmp_path: Path) -> None:
    """By the lock beside it, which is not another's."""
    with socket.socket(socket.AF_UNIX) as agent, socket.socket(socket.AF_UNIX) as other:
        for listener, name in ((agent, "agent"), (other, "other")):
            listener.bind(str(tmp_path / name))
            listener.listen()
        Path(f"{tmp_path}/agent.lock").write_text("0" * 54)
        assert f"{tmp_path}/agent" in local_agents.found() and f"{tmp_path}/other" not in local_agents.found()
        Path(f"{tmp_path}/other.lock").write_text("of something else")
        assert f"{tmp_path}/other" not in local_agents.found()
        Path(f"{tmp_path}/other.lock").write_text("0" * 54)
        assert f"{tmp_path}/other" in local_agents.found()
        if os.getuid() == 0:
            os.chown(f"{tmp_path}/other.lock", 65534, 65534)
            assert f"{tmp_path}/other" not in local_agents.found()
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(f"{tmp_path}/killed.sock")
        assert f"{tmp_path}/killed.sock" not in local_agents.found()
        Path(f"{tmp_path}/killed.sock.lock").write_text("0" * 54)
        assert f"{tmp_path}/killed.sock" in local_agents.found(), "beside one that lives"


def test_what_is_no_terminal_gets_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that grep finds them."""
    monkeypatch.delenv("COLUMNS", raising=False)
    assert stdout().width == WIDE
    monkeypatch.setenv("COLUMNS", "60")
    assert stdout().width == 60


def test_status_finds_the_agents_of_the_host_and_names_the_dead(tmp_path: Path) -> None:
    beside = {"KVBRIDGE_SOCKET": str(tmp_path / "agent-0.sock")}
    told = on_another_host("status", **beside)
    assert told.returncode == 1 and f"{tmp_path}, none of yours elsewhere; name it with --socket" in told.stderr
    other = msgspec.structs.replace(STATUS, agent=msgspec.structs.replace(STATUS.agent, name="decode-7"))
    for as_json in ((), ("--json",)):
        with Scripted(tmp_path / "agent-0.sock", pack(STATUS)), Scripted(tmp_path / "agent-1.sock", pack(other)):
            told = on_another_host("status", *as_json, **beside)
        assert told.returncode == 0, told.stderr
        assert "prefill-0" in told.stdout and "decode-7" in told.stdout
        assert all(f"{tmp_path}/agent-{number}.sock" in told.stdout for number in (0, 1))
        (tmp_path / "agent-0.sock").unlink()
        with Scripted(tmp_path / "agent-0.sock", pack(STATUS)):
            told = on_another_host("status", *as_json, **beside)
        assert told.returncode == 1 and "prefill-0" in told.stdout and "decode-7" not in told.stdout
        if not as_json:
            verdict, first, *others = told.stdout.splitlines()
            assert verdict.endswith("of 2 agents healthy") and "prefill-0" in first
            said = "".join("".join(others).split())  # a long path is folded
            assert f"NOTHEALTHY:noagentat{tmp_path}/agent-1.sock" in said
        assert f"no_agent: no agent at {tmp_path}/agent-1.sock: Connection refused" in told.stderr
        for path in tmp_path.glob("*.sock"):
            path.unlink()
    alive, dead = json.loads(told.stdout)
    assert msgspec.convert(alive["status"], type(STATUS)) == STATUS
    assert alive["status"]["engine"]["model_key"] == "0123456789abcdef", "where docs/routers.md says that it is"
    assert (dead["socket"], dead["code"]) == (f"{tmp_path}/agent-1.sock", "no_agent")


def test_status_has_a_line_for_an_agent_on_a_narrow_terminal_and_no_blanks_at_the_end(tmp_path: Path) -> None:
    engine = msgspec.structs.replace(STATUS.engine, engine="vllm 0.32.0 c3609f64-0dbd-48c8-88a1-c3c5a64680c4")
    healthy = {"rebuild_refused": "", "readers": (), "errors": (), "peers": (), "counters": {}}
    status = msgspec.structs.replace(STATUS, engine=engine, **healthy)
    told = shown(tmp_path, status, COLUMNS="80")
    _, line, after, *_ = map(str.rstrip, told.stdout.splitlines())
    assert "  healthy  vllm 0.32.0 tp 1/2  " in line and line.endswith("1 transfer") and after == "agent", told.stdout
    wide = shown(tmp_path, status, COLUMNS="500")
    assert engine.engine in wide.stdout and max(map(len, wide.stdout.splitlines())) < 300, wide.stdout


def test_status_of_several_named_agents_ends_with_1_if_one_is_gone(tmp_path: Path) -> None:
    told = shown(tmp_path, STATUS, "--socket", tmp_path / "b.sock")
    assert told.returncode == 1 and "prefill-0" in told.stdout and "b.sock: No such file" in told.stderr


NOBODY = "from pathlib import Path\nfrom kvbridge import local_agents\nlocal_agents.LISTENING = Path('/dev/null')\n"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody who may not look")
def test_status_says_that_it_may_not_look_for_agents() -> None:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:  # 0700
        os.chmod(other, 0o755)
        Path(other, "b.sock").touch()
        program = (
            f"{NOBODY}import os, sys\n"
            "os.setgid(65534), os.setuid(65534)\n"
            "for folders in (sys.argv[1:2], sys.argv[1:]):\n"
            "    local_agents.socket_folders = lambda: list(map(Path, folders))\n"
            "    try: print(local_agents.found())\n"
            "    except local_agents.OperatorError as error: print(error)"
        )
        told = subprocess.run([sys.executable, "-c", program, folder, other], capture_output=True, text=True)
    first, second = told.stdout.splitlines()
    who = "be root, or in the agent's group and named in its allowed_uids"
    assert first == f"may not look for agents in {folder}: Permission denied; {who}"
    assert second == str([f"{other}/b.sock"]), "one that may not be read hides the other"


KEY = "tcp://10.113.205.117:17700#" + "k" * 40
ROUTE = "nixl 12.3 GB/s in 512 KiB (direct: the GPU of the other agent is not visible to this process)"
LONG = msgspec.structs.replace(
    STATUS,
    agent=msgspec.structs.replace(STATUS.agent, address=KEY),
    peers=(
        PeerStatus(
            name="decode-host-17-rank-3",
            address=KEY,
            incarnation="f" * 16,
            state="sender open",
            route=ROUTE,
            verdict=ROUTE,
        ),
    ),
    transfers=(
        TransferStatus(
            role="receiver",
            request=f"cmpl-{'0123456789abcdef' * 2}-0",
            rendezvous="r",
            peer=KEY,
            state="flowing",
            chunks_done=1234,
            chunks=5678,
            age_s=12345.6,
        ),
    ),
    counters={"kvbridge_wants_failed_total{code=peer_unreachable_for_a_long_time_and_more}": 123456789.0},
)


def test_status_is_readable_at_80_columns(tmp_path: Path) -> None:
    told = shown(tmp_path, LONG, COLUMNS="80")
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(KEY in line for line in lines) == 2  # ours, the peer's: to be copied
    (first,) = (number for number, line in enumerate(lines) if "nixl 12.3 GB/s" in line and "route" in line)
    assert " ".join(" ".join(lines[first : first + 2]).split()) == f"route {ROUTE}"
    assert "1234/5678" in told.stdout and "12345.6 s" in told.stdout
    flat = "".join(told.stdout.split())
    assert LONG.transfers[0].request in flat and next(iter(LONG.counters)) in flat
    assert "…" not in told.stdout


def test_status_shows_people_no_more_rows_than_they_read(tmp_path: Path) -> None:
    transfers = tuple(msgspec.structs.replace(LONG.transfers[0], request=f"request-{n}") for n in range(1234))
    told = shown(tmp_path, msgspec.structs.replace(LONG, transfers=transfers))
    assert told.returncode == 0, told.stderr
    assert "request-99," in told.stdout and "request-100," not in told.stdout
    assert "and 1,134 more; --json has them all" in told.stdout


def test_status_prints_the_pool_that_plan_reads(tmp_path: Path) -> None:
    told = shown(tmp_path, POOL_STATUS, "--pool")
    assert told.returncode == 0, told.stderr
    assert msgspec.json.decode(told.stdout, type=type(POOL_STATUS.pool)) == POOL_STATUS.pool


def test_status_prints_labels_of_the_engine_for_schedulers(tmp_path: Path) -> None:
    told = shown(tmp_path, STATUS, "--labels")
    assert told.returncode == 0 and told.stdout.split() == [
        "kvbridge/model-key=0123456789abcdef",
        "kvbridge/engine=vllm",
        "kvbridge/tp-size=2",
        "kvbridge/pp-size=1",
        "kvbridge/cp-size=1",
        "kvbridge/block-tokens=16",
        "kvbridge/dtype=bf16",
    ]
    told = shown(tmp_path, msgspec.structs.replace(STATUS, engine=None), "--labels")
    assert told.returncode == 1 and "no engine is attached" in told.stderr and not told.stdout


ANSWERS = {
    "closed": (b"", "closed without an answer"),
    "garbage": (HEADER.pack(3) + b"\xc1\xc1\xc1", "is no agent"),
    "another message": (HEADER.pack(1) + encode({}), "is no agent"),
    "refused": (pack(TO_ENGINE[2]), "a.sock: version_mismatch: versions: agent 1-1, engine 2-3"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_status_of_something_else_says_what_it_is(case: str, tmp_path: Path) -> None:
    answer, words = ANSWERS[case]
    fails(shown(tmp_path, answer), 1, words)


def write_pools(folder: Path, name: str, shape: Shape) -> Path:
    pools = [held.pool for held in build_all(shape)]
    path = folder / f"{name}.json"
    path.write_bytes(msgspec.json.encode(pools if len(pools) > 1 else pools[0]))
    return path


def test_plan_shows_verdict_takes_and_chunks(tmp_path: Path) -> None:
    sender = write_pools(tmp_path, "sender", Shape(layout="nhd", tp_size=2, block_tokens=16))
    receiver = write_pools(tmp_path, "receiver", Shape(layout="hnd", block_tokens=64, codec="fp8_e4m3"))
    told = run("plan", sender, receiver, "--tokens", "1000")
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("Convertible\n")
    assert "bf16" in told.stdout
    assert "fp8_e4m3" in told.stdout
    assert "tp 1/2" in told.stdout
    found = json.loads(run("plan", sender, receiver, "--tokens", "1000", "--json").stdout)
    assert found["verdict"] == "Convertible"
    assert [part["takes"][0]["end_head"] for part in found["senders"]] == [2, 4]
    assert all(part["chunks"] > 0 and part["bytes"] > 0 for part in found["senders"])


def test_plan_says_what_each_change_means(tmp_path: Path) -> None:
    sender = write_pools(tmp_path, "sender", Shape(codec="bf16", key_width=32, value_width=32))
    receiver = write_pools(tmp_path, "receiver", Shape(codec="fp8_e4m3", key_width=32, value_width=32, tp_size=2))
    told = run("plan", sender, receiver, "--rank", "1")
    assert told.returncode == 0, told.stderr
    assert "rows are quantized at the sender; 32 bytes of a row cross, 64 there and 32 here" in told.stdout
    assert "to nhd tp 1/2" in told.stdout
    found = json.loads(run("plan", sender, receiver, "--json").stdout)
    assert found["receiver"] == "nhd tp 0/2 pp 0/1"
    assert [(each["field"], each["sender"], each["receiver"]) for each in found["changes"][:2]] == [
        ("tp_size", "1", "2"),
        ("codec", "bf16", "fp8_e4m3"),
    ]
    assert all(each["words"] for each in found["changes"])
    fails(run("plan", sender, receiver, "--rank", "2"), 2, "bad_option: rank: 2")


def test_plan_of_a_model_needs_no_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("llama", 4, 8, 4, 64)))
    sides = "vllm serve M -tp 2 --block-size 64", "sglang --tp 1 --page-size 16 --kv-cache-dtype fp8_e4m3"
    told = run("plan", "--model", tmp_path, *sides)
    assert told.returncode == 0 and "codec: sender bf16, receiver fp8_e4m3" in told.stdout
    found = json.loads(run("plan", "--model", tmp_path / "config.json", *sides, "--json").stdout)
    assert found["verdict"] == "Convertible" and found["code"] == ""
    assert [part["takes"][0]["end_head"] for part in found["senders"]] == [2, 4]


def test_plan_of_a_model_that_is_not_carried_says_what_is_missing_on_each_side(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(latents("glm5_next", 4)))
    told = run("plan", "--model", file, "vllm", "sglang")
    fails(told, 1, "layer_unsupported: sender: glm5_next: kvbridge cannot carry", "receiver: glm5_next", "needs")
    found = json.loads(run("plan", "--model", file, "vllm", "sglang", "--json").stdout)
    assert found["code"] == "layer_unsupported" and len(found["reasons"]) == 6  # three kinds of each side
    file.write_text("[]")
    fails(run("plan", "--model", file, "vllm", "sglang"), 1, "bad_model_config")
    file.write_text(json.dumps(config("llama", 4, 8, 4, 64)))
    fails(run("plan", "--model", file, "trtllm", "sglang"), 2, "bad_option: sender: trtllm")


def test_plan_judges_every_rank_of_the_sender(tmp_path: Path) -> None:
    receiver = write_pools(tmp_path, "receiver", Shape())
    pools = [held.pool for held in build_all(Shape(tp_size=2))]
    odd = msgspec.structs.replace(pools[1], shard=msgspec.structs.replace(pools[1].shard, cp_size=1 << 20))
    (tmp_path / "sender.json").write_bytes(msgspec.json.encode([pools[0], odd]))
    fails(run("plan", tmp_path / "sender.json", receiver), 1, "incompatible", "a period of 1048576 tokens")


def test_plan_of_half_an_engine_says_that_rows_are_missing(tmp_path: Path) -> None:
    held = build_all(Shape(tp_size=2))[0]
    (tmp_path / "half.json").write_bytes(msgspec.json.encode(held.pool))
    receiver = write_pools(tmp_path, "receiver", Shape())
    fails(run("plan", tmp_path / "half.json", receiver), 1, "rows_not_held", "every rank")
    told = run("plan", tmp_path / "half.json", receiver, "--json")
    assert told.returncode == 1 and "rows_not_held" in told.stderr
    found = json.loads(told.stdout)
    assert (found["verdict"], found["code"], found["senders"]) == ("Convertible", "rows_not_held", [])
    assert "every rank" in found["reasons"][0] and found["changes"]


WRONG_LINES = {  # options of plan, after two pools that fit: a part of the reason that all versions of typer say
    "--tokens x": "Invalid value for '--tokens'",
    "--tokens -1": "Invalid value for '--tokens'",
    "--slot-bytes 0": "Invalid value for '--slot-bytes'",
    "--rank -1": "Invalid value for '--rank'",
    "--rank 7": "rank: 7, ",
    "--rank": "'--rank'",
    "--token 5": "No such option: --token",
    "--json=no": "'--json' does not take a value",
    "more.json": "(more.json)",
}


def failed(code: str, reason: str, exit_code: int, *words: object) -> None:
    """`plan --json` ends like this, with one object on stdout and the reason on stderr as ever."""
    for arguments in (("--json", *words), (*words, "--json")):
        told = run("plan", *arguments)
        found = json.loads(told.stdout)
        assert (told.returncode, found["code"]) == (exit_code, code), told.stderr
        assert reason in "; ".join(found["reasons"]) and told.stderr.strip() and "Traceback" not in told.stderr
    assert not run("plan", *words).stdout, "for people, reasons are on stderr"


@pytest.mark.parametrize("words", WRONG_LINES)
def test_plan_as_json_says_what_is_wrong_with_its_command_line(words: str, tmp_path: Path) -> None:
    pool = write_pools(tmp_path, "pool", Shape())
    failed("bad_option", WRONG_LINES[words], 2, pool, pool, *words.split())


def test_plan_as_json_says_that_pools_are_not_named(tmp_path: Path) -> None:
    failed("bad_option", "Missing argument", 2)
    failed("bad_option", "Missing argument", 2, tmp_path / "a.json")


@pytest.mark.parametrize("text", [None, "", "{}", "[]", '{"engine": 5}', "\xff", '{"x":' * 100_000], ids=range(7))
def test_plan_as_json_says_that_a_file_is_no_pool(text: str | None, tmp_path: Path) -> None:
    pool, bad = write_pools(tmp_path, "pool", Shape()), tmp_path / "bad.json"
    if text is not None:
        bad.write_text(text)
    failed("bad_pool_file", str(bad), 1, bad, pool)
    failed("bad_pool_file", str(bad), 1, pool, bad)


def test_plan_as_json_says_that_an_agent_does_not_tell_its_pool(tmp_path: Path) -> None:
    pool = write_pools(tmp_path, "pool", Shape())
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        listener.bind(str(tmp_path / "dead.sock"))
    failed("no_agent", "Connection refused", 1, tmp_path / "dead.sock", pool)
    with Scripted(tmp_path / "a.sock", pack(TO_ENGINE[2]), PoolQuery()) as agent:
        found = json.loads(run("plan", pool, agent.path, "--json").stdout)
    assert found["code"] == "agent_refused" and "version_mismatch" in found["reasons"][0]


@pytest.mark.parametrize(
    ("code", "key_width", "flags", "reason"),
    [
        ("", 8, (), ""),
        ("incompatible", 96, (), "key_width: sender 8, receiver 96 (layer 0 and 1 more); needs the same model"),
        ("slot_too_small", 8, ("--slot-bytes", "1"), "slot_bytes: 1, a row of layer 0"),
    ],
)
def test_plan_says_that_nothing_can_be_moved(
    code: str, key_width: int, flags: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    pools = (write_pools(tmp_path, f"of-{width}", Shape(key_width=width)) for width in (8, key_width))
    told = run("plan", *pools, *flags, "--json")
    found = json.loads(told.stdout)
    assert (told.returncode, found["code"]) == (1 if code else 0, code)
    assert reason in "".join(found["reasons"]) and code in told.stderr and reason in told.stderr
    assert [each["needs"] for each in found["changes"]] == ["the same model on both sides"] * (code == "incompatible")
    assert (found["verdict"] == "Same") == (code != "incompatible")


def test_plan_takes_files_with_commas_between_as_the_ranks_of_one_engine(tmp_path: Path) -> None:
    for number, held in enumerate(build_all(Shape(tp_size=2))):
        (tmp_path / f"{number}.json").write_bytes(msgspec.json.encode(held.pool))
    receiver = write_pools(tmp_path, "receiver", Shape())
    told = run("plan", f"{tmp_path}/0.json,{tmp_path}/1.json", receiver, "--json")
    assert told.returncode == 0 and len(json.loads(told.stdout)["senders"]) == 2


def test_a_hangup_while_it_starts_ends_no_agent_and_one_later_reads_the_peers_again(tmp_path: Path) -> None:
    """`systemctl reload` sends it whenever it likes."""
    ours = run("keygen", tmp_path / "a.key", "--name", "ours").stdout
    (tmp_path / "peers").write_text(ours)
    (tmp_path / "peers").chmod(0o600)
    places = ("--socket", tmp_path / "a.sock", "--listen", "tcp://127.0.0.1:0", "--metrics", "")
    keys = ("--key", tmp_path / "a.key", "--peers", tmp_path / "peers")
    command = [sys.executable, "-m", "kvbridge.cli", "agent", *map(str, (*places, *keys))]
    log = tmp_path / "log"
    with log.open("wb") as written, subprocess.Popen(command, stderr=written) as agent:
        try:
            wait_for(lambda: takes_hangups(agent.pid))
            assert "libtorch" not in Path(f"/proc/{agent.pid}/maps").read_text()
            while "serving: " not in log.read_text():
                assert agent.poll() is None, log.read_text()
                agent.send_signal(signal.SIGHUP)
                time.sleep(0.005)
            theirs = run("keygen", tmp_path / "b.key", "--name", "theirs").stdout
            (tmp_path / "peers").write_text(ours + theirs)
            agent.send_signal(signal.SIGHUP)
            wait_for(lambda: "peers read again: curve" in log.read_text())
            wait_for(lambda: "2 keys allowed" in status_of(tmp_path / "a.sock"))
            agent.send_signal(signal.SIGTERM)
            assert agent.wait(60) == 0 and not (tmp_path / "a.sock").exists()
        finally:
            agent.kill()


def status_of(socket: Path) -> str:
    """As JSON; the log leaves out lines that repeat too often."""
    return run("status", "--json", "--socket", socket).stdout


def takes_hangups(pid: int) -> bool:
    """Whether SIGHUP is ignored or caught there."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigIgn:", "SigCgt:"))]
    return any(mask >> (signal.SIGHUP - 1) & 1 for mask in masks)
