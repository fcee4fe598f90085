"""Key files and lists of keys: what is read, and what is refused by name."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from kvbridge.errors import OperatorError
from kvbridge.transport.keys import MOST_KEYS, is_key, load_keys, load_peers, write_pair
from testing.refusals import refused

OF_ANY = "DKrUP&&CJWfmbg(miCLm-c!(7PbGS9N4E8Nzm6H8"  # the same in any run: parametrized tests are named by it


def public_key() -> str:
    return zmq.curve_keypair()[0].decode()


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def refusal(key: Path, peers: Path | str = "") -> OperatorError:
    with pytest.raises(OperatorError) as caught:
        load_keys(str(key), str(peers))
    return caught.value


def test_a_pair_that_was_written_is_read_back_and_is_a_fleet_of_its_own(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        public = write_pair(tmp_path / "key")
    finally:
        os.umask(before)
    keys = load_keys(str(tmp_path / "key"), "")
    assert keys.public == public and keys.names == {public: "fleet"} and keys.one == public
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_a_key_is_never_written_over(tmp_path: Path) -> None:
    write_pair(tmp_path / "key")
    before = (tmp_path / "key").read_text()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name, code in (("key", "key_exists"), ("link", "key_exists"), ("no/key", "key_not_written")):
        with refused(OperatorError, code):
            write_pair(tmp_path / name)
    assert (tmp_path / "key").read_text() == before and not (tmp_path / "elsewhere").exists()


def test_the_secret_is_in_no_text_of_its_record(tmp_path: Path) -> None:
    write_pair(tmp_path / "key")
    keys = load_keys(str(tmp_path / "key"), "")
    assert keys.secret in (tmp_path / "key").read_text()
    assert keys.secret not in repr(keys) + str(keys)


@pytest.mark.proves("T27")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o666, 0o601])
def test_a_secret_that_others_may_read_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    write_pair(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    error = refusal(tmp_path / "key")
    assert error.code == "bad_key" and f"{mode:04o}" in str(error) and "chmod 600" in str(error)


@pytest.mark.skipif(os.getuid() != 0, reason="gives files away, which only root may")
@pytest.mark.parametrize(
    ("owner", "mode", "reader", "code"),
    [
        (65534, 0o600, 0, "bad_key"),  # somebody else's
        (0, 0o440, 65534, ""),  # lent by root to our group: a systemd credential, a mounted Secret
        (0, 0o640, 65534, ""),
        (0, 0o444, 65534, "bad_key"),
        (0, 0o460, 65534, "bad_key"),
        (65534, 0o440, 65534, "bad_key"),
    ],
)
def test_whose_the_secret_is(tmp_path: Path, owner: int, mode: int, reader: int, code: str) -> None:
    write_pair(tmp_path / "key")
    os.chown(tmp_path / "key", owner, 65534)
    (tmp_path / "key").chmod(mode)
    for folder in (tmp_path, *tmp_path.parents):
        folder.chmod(0o755)
        if folder.name.startswith("pytest-of-"):
            break
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, sys\n"
            "from kvbridge.errors import OperatorError\n"
            "from kvbridge.transport.keys import load_keys\n"
            f"os.setgid({65534 if reader else 0}); os.setuid({reader})\n"
            "try: load_keys(sys.argv[1], '')\n"
            "except OperatorError as error: print(error.code)",
            str(tmp_path / "key"),
        ],
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.strip() == code


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "short\n", "x" * 41, "~" * 40, "%" * 40, "\xff" * 40, f"{OF_ANY}\n{OF_ANY}\n"]
)
def test_a_file_that_is_no_key_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    error = refusal(write(tmp_path / "key", text))
    assert error.code == "bad_key"
    assert not text.strip() or text.strip() not in str(error)


@pytest.mark.parametrize("said", ["{}", " {}\n", "'{}'", "# Its public half: no {}"])
def test_a_key_where_a_files_name_belongs_is_not_shown(tmp_path: Path, said: str) -> None:
    secret = zmq.curve_keypair()[1].decode()
    write_pair(tmp_path / "key")
    for key, peers in ((said.format(secret), ""), (str(tmp_path / "key"), said.format(secret))):
        with pytest.raises(OperatorError, match="must name a file") as caught:
            load_keys(key, peers)
        assert caught.value.code == "bad_option" and not shared(secret, str(caught.value))


def test_a_file_whose_name_looks_like_a_key_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "agent-0.key".rjust(40, "a")
    public = write_pair(Path(name))
    assert is_key(name) and load_keys(name, "").public == public


def shared(secret: str, text: str) -> bool:
    """Whether eight characters of it are there."""
    return any(secret[at : at + 8] in text for at in range(len(secret) - 7))


def test_what_is_not_a_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("pipe", "", "nowhere"):
        assert refusal(tmp_path / name).code == "bad_key"


def test_a_list_has_several_keys_of_a_name(tmp_path: Path) -> None:
    old, new, other = public_key(), public_key(), public_key()
    path = write(tmp_path / "peers", f"# our fleet\n\nprefill {old}\nprefill\t {new}\n decode   {other}\n")
    assert load_peers(str(path)) == {old: "prefill", new: "prefill", other: "decode"}


def test_a_folder_of_lists_is_one_list(tmp_path: Path) -> None:
    folder = tmp_path / "peers"
    folder.mkdir(0o755)
    first, second = public_key(), public_key()
    write(folder / "a.pub", f"a {first}\n", 0o644)
    write(folder / "b.pub", f"b {second}\n", 0o644)
    write(folder / "b.pub~", "an editor's left-over")
    assert load_peers(str(folder)) == {first: "a", second: "b"}
    folder.chmod(0o777)
    with pytest.raises(OperatorError, match="0777"):
        load_peers(str(folder))


def test_the_own_key_is_let_in_only_if_the_list_says_so(tmp_path: Path) -> None:
    own = write_pair(tmp_path / "key")
    other = public_key()
    keys = load_keys(str(tmp_path / "key"), str(write(tmp_path / "peers", f"other {other}\n")))
    assert own not in keys.names and keys.one == other


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no key in it"),
        ("prefill\n", "peers:1"),
        ("prefill tooshort\n", "peers:1"),
        ("{key}\n", "peers:1"),
        ("pre/fill {key}\n", "peers:1"),
        ("prefill {key} more\n", "peers:1"),
        ("a {key}\nb {key}\n", "the key of a again"),
        ("\x00", "peers:1"),
    ],
)
def test_a_list_that_is_none_is_refused_with_the_line(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path / "peers", text.format(key=public_key()))
    with refused(OperatorError, "bad_peers", said):
        load_peers(str(path))


@pytest.mark.proves("T27")
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_list_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "peers", f"a {public_key()}\n", mode)
    with pytest.raises(OperatorError, match="chmod go-w"):
        load_peers(str(path))


def test_a_list_has_a_bound(tmp_path: Path) -> None:
    lines = [f"a {public_key()}\n" for _ in range(MOST_KEYS + 1)]
    assert len(load_peers(str(write(tmp_path / "peers", "".join(lines[:-1]))))) == MOST_KEYS
    with pytest.raises(OperatorError, match=f"more than {MOST_KEYS}"):
        load_peers(str(write(tmp_path / "peers", "".join(lines))))


def test_every_key_that_zeromq_makes_is_a_key_and_hardly_anything_else() -> None:
    assert all(is_key(half.decode()) for _ in range(200) for half in zmq.curve_keypair())
    assert not any(is_key(text) for text in ("", "a" * 39, "a" * 41, "a" * 39 + " ", "a" * 39 + "\n", "ü" * 40))
