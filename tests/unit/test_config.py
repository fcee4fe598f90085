"""Options come from defaults, file, environment and flags, in that order, and bad ones are named with their value."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from kvbridge_kernels.launch import ENOUGH_PROGRAMS

from kvbridge.config import load
from kvbridge.dataplane.resources import ROOM_IN_HOST
from kvbridge.errors import OperatorError
from kvbridge.failpoints import VARIABLE
from kvbridge.options import SECTIONS, AgentConfig, LogLevel, choices, defaults, flag_of, options
from tests.support.write_configuration import DEPLOYED, PAGE, about, page, sample, toml


def write(folder: Path, text: str) -> str:
    path = folder / "kvbridge.toml"
    path.write_text(text)
    return str(path)


def test_nothing_said_gives_the_defaults() -> None:
    assert load(environment={}) == AgentConfig()


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = write(tmp_path, 'name = "file"\nreceive_slots = 3\nsend_slots = 4\ndrain_s = 1\n')
    environment = {"KVBRIDGE_NAME": "environment", "KVBRIDGE_SEND_SLOTS": "5", "OTHER": "x"}
    config = load(path, {"name": "flag", "socket": None}, environment)
    assert (config.name, config.receive_slots, config.send_slots, config.drain_s) == ("flag", 3, 5, 1.0)
    assert config.socket == AgentConfig().socket


def test_text_of_flags_and_environment_becomes_what_it_should_be() -> None:
    flags = {"slot_bytes": "1048576", "connect_s": "2.5", "allowed_uids": "0, 1000", "allow_wildcard": "true"}
    flags |= {"share_memory": "false", "share_memory_uids": "998"}
    config = load(None, flags | {"advertise": "tcp://10.0.0.1:7700"}, {})
    assert (config.share_memory, config.share_memory_uids) == (False, (998,))
    assert (config.slot_bytes, config.connect_s, config.allowed_uids) == (1 << 20, 2.5, (0, 1000))
    assert config.allow_wildcard is True


def test_every_option_can_be_given_in_every_way(tmp_path: Path) -> None:
    said = {name: value for name, value in defaults().items() if name != "allow_wildcard" and value is not None}
    text = {n: ",".join(map(str, v)) if isinstance(v, tuple) else str(v) for n, v in said.items()}
    assert load(None, text, {}) == AgentConfig()
    assert load(None, None, {f"KVBRIDGE_{name.upper()}": value for name, value in text.items()}) == AgentConfig()


BAD = [
    ("slot_bytes", "abc", "a whole number, at least 65536, at most 1073741824"),
    ("slot_bytes", "100", "a whole number, at least 65536, at most 1073741824"),
    ("slot_bytes", "70000", ""),
    ("receive_slots", "0", "a whole number, at least 1, at most 4096"),
    ("drain_s", "-1", ""),
    ("connect_s", "nan", "a number, more than 0, at most 600"),
    ("connect_s", "0", "a number, more than 0, at most 600"),
    ("log_level", "loud", "one of debug, error, info, warning"),
    ("routes", "nixl,tcp", "a list of 1 to 4, each one of direct, host, nixl, pull"),
    ("device", "gpu", "auto, cpu, cuda, cuda:N or a GPU's UUID"),
    ("name", "", "text of 1 to 64 characters"),
    ("socket", "/" + "x" * 120, ""),
    ("metrics", "127.0.0.1", ""),
    ("metrics", "127.0.0.1:70000", ""),
    ("metrics", "127.0.0.1:" + "9" * 5000, ""),
    ("allowed_uids", "root", "a list of 0 to 64, each a whole number, at least 0"),
    ("key", "true", ""),  # beside a hatch
    ("allow_wildcard", "maybe", "true or false"),
    ("allow_wildcard", "true", ""),  # without an address to tell
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD, ids=[f"{name} {value[:20]}" for name, value, _ in BAD])
def test_refuses_a_bad_value_naming_option_and_value_and_what_is_allowed(name: str, value: str, allowed: str) -> None:
    more = {"allow_unauthenticated": "true"} if name == "key" else {}
    with pytest.raises(OperatorError) as caught:
        load(None, {name: value, **more}, {})
    told = str(caught.value)
    assert caught.value.code == "bad_option" and (not allowed or told.endswith(f"must be {allowed}"))
    assert (name in told and (value[:20] in told or str(len(value)) in told)) or "allow_wildcard" in told


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in ("key", "peers") for value in ("S3cret" * 1000, "# a comment\nS3cret")]
    + [("peers", "S3cret")],
)
def test_what_may_be_a_key_is_never_shown(name: str, value: str) -> None:
    with pytest.raises(OperatorError, match=f"^{name}: ") as caught:
        load(None, {name: value}, {})
    assert caught.value.code == "bad_option" and "S3cret" not in str(caught.value)


@pytest.mark.parametrize("value", ["/run/\x00", "/run/\udcff", "/run/a\nb", "/run/\x1b[2J"])
def test_refuses_what_is_not_printable_text(value: str) -> None:
    for name in ("socket", "name", "listen"):
        with pytest.raises(OperatorError, match=f"{name}: got .* from --{name}: must be printable text"):
            load(None, {name: value}, {})


def test_says_where_the_bad_value_came_from(tmp_path: Path) -> None:
    path = write(tmp_path, 'receive_slots = "8"\n')
    whole = "a whole number, at least 1, at most 4096"
    with pytest.raises(OperatorError, match=rf"receive_slots: got '8' from .*kvbridge\.toml: must be {whole}"):
        load(path, None, {})
    with pytest.raises(OperatorError, match=r"drain_s: got 'x' from KVBRIDGE_DRAIN_S"):
        load(None, None, {"KVBRIDGE_DRAIN_S": "x"})
    with pytest.raises(OperatorError, match="drain_s: got 'x' from --drain-s"):
        load(None, {"drain_s": "x"}, {})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("slot_byte", "slot_bytes"), ("slot-bytes", "slot_bytes"), ("Devise", "device"), ("dial_patterns", "")],
)
def test_a_name_that_nobody_knows_is_refused_with_the_nearest_one(name: str, nearest: str, tmp_path: Path) -> None:
    """In the environment the prefix, which all share, makes no name near."""
    path, variable = write(tmp_path, f"{name} = 1\n"), f"KVBRIDGE_{name.upper()}"
    for where, place, file, environment, meant in (
        (name, path, path, {}, nearest),
        (variable, "the environment", None, {variable: "1"}, nearest and f"KVBRIDGE_{nearest.upper()}"),
    ):
        with pytest.raises(OperatorError) as caught:
            load(file, None, environment)
        told = f"did you mean {meant}?" if nearest else f"there are {'KVBRIDGE_NAME' if environment else 'name'}, "
        assert str(caught.value).startswith(f"{where}: no such option in {place}; {told}")
        assert caught.value.code == "bad_option"


def test_all_names_that_nobody_knows_are_said_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "slot_byte = 4096\nname = 'a'\n[agent]\nname = 'b'\n")
    with pytest.raises(OperatorError) as caught:
        load(path, None, {})
    assert [reason.partition(":")[0] for reason in caught.value.reasons] == ["slot_byte", "agent"]
    with pytest.raises(OperatorError) as caught:
        load(None, None, {"KVBRIDGE_PORT": "7700", "KVBRIDGE_NAMES": "x"})
    assert [reason.partition(":")[0] for reason in caught.value.reasons] == ["KVBRIDGE_PORT", "KVBRIDGE_NAMES"]


def test_variables_of_tests_and_of_kubernetes_are_nobodys_options() -> None:
    kubernetes = {"KVBRIDGE_PORT": "tcp://10.0.0.1:7700", "KVBRIDGE_AGENT_PORT": "tcp://10.0.0.1:7700"}
    names = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_METRICS", "PORT_7700_TCP", "PORT_7700_TCP_ADDR")
    kubernetes |= {f"KVBRIDGE_{service}{name}": "x" for name in names for service in ("", "AGENT_", "A_B_")}
    assert (
        load(
            None,
            None,
            {VARIABLE: "", "KVBRIDGE_TEST_AGENT_PYTHON": "python3", "KVBRIDGE_ENGINE_SOCKET": "/x", **kubernetes},
        )
        == AgentConfig()
    )


def test_a_relative_socket_is_relative_to_where_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As to every command. In a file or a variable it would be relative to wherever a daemon happens to run."""
    monkeypatch.chdir(tmp_path)
    assert load(None, {"socket": "run/a.sock"}, {}).socket == str(tmp_path / "run/a.sock")
    for file, said in ((None, {"KVBRIDGE_SOCKET": "a.sock"}), (write(tmp_path, 'socket = "a.sock"\n'), {})):
        with pytest.raises(OperatorError, match=r"socket: got 'a\.sock', must be an absolute path"):
            load(file, None, said)


@pytest.mark.parametrize(
    "text", ["name = \n", "\x00", 'name = "a"\nname = "b"\n', f"drain_s = {'9' * 5000}\n", f"name = {'[' * 5000}\n"]
)
def test_refuses_a_file_that_is_not_toml(tmp_path: Path, text: str) -> None:
    with pytest.raises(OperatorError, match="cannot read"):
        load(write(tmp_path, text), None, {})


def test_refuses_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"nowhere\.toml"):
        load(str(tmp_path / "nowhere.toml"), None, {})


def test_deployed_file_loads_and_names_every_option_with_its_default() -> None:
    text = DEPLOYED.read_text()
    assert load(str(DEPLOYED), None, {}) is not None
    shown = "\n".join(line.removeprefix("# ") for line in text.splitlines() if " = " in line)
    named = tomllib.loads(shown)
    assert list(named) == list(options())
    shown = {n: tuple(v) if isinstance(v, list) else v for n, v in named.items()}
    depends = {name for name, value in defaults().items() if value is None}
    assert depends == {"slot_bytes", "receive_slots", "send_slots", "linger_s", "pull_ctas"}
    usual = {"slot_bytes": ROOM_IN_HOST.slot_bytes, "receive_slots": ROOM_IN_HOST.receive_slots}
    usual |= {"send_slots": ROOM_IN_HOST.send_slots, "linger_s": 0, "pull_ctas": ENOUGH_PROGRAMS}
    assert shown == defaults() | usual


def test_the_ctas_that_are_said_are_the_kernels_own() -> None:
    said = options()["pull_ctas"] + about("pull_ctas")
    assert re.findall(r"(\d+) (?:under MPS|reach)", said) == [str(ENOUGH_PROGRAMS)] * 2
    assert sample("pull_ctas") == ENOUGH_PROGRAMS
    assert f"takes {ENOUGH_PROGRAMS} CTAs" in PAGE.with_name("operations.md").read_text()


def test_what_is_generated_is_fresh() -> None:
    assert DEPLOYED.read_text() == toml() and PAGE.read_text() == page(), "python -m tests.support.write_configuration"


def test_page_has_an_entry_for_every_option() -> None:
    assert re.findall(r"^### `(\w+)`$", PAGE.read_text(), re.MULTILINE) == list(options())


def test_every_section_begins_with_an_option() -> None:
    assert list(SECTIONS) == [name for name in options() if name in SECTIONS]


def test_words_of_an_option_are_those_of_its_type() -> None:
    assert set(choices("log_level")) == set(get_args(LogLevel))
    assert set(choices("routes")) == set(AgentConfig().routes)
    assert choices("pull_ctas") == choices("name") == ()


def test_every_option_says_what_it_is_for() -> None:
    assert all(len(text) > 10 for text in options().values())
    assert flag_of("slot_bytes") == "--slot-bytes"
