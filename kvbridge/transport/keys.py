"""Our CURVE key pair, and the public keys of other agents with their names.

A key is Z85 text, 40 characters, as ZeroMQ's own tools write it. Only the secret half is secret.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from ..errors import OperatorError

OWNER_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
AROUND_KEY = re.compile(r"[\s\"',]+")  # around a key that was set as an option by mistake
FILE_BYTES = 1 << 20
MOST_KEYS = 4096
MODE_OF_LISTS = 0o022  # whoever may write a list of keys decides who is let in
MODE_OF_SECRETS = 0o077
MODE_OF_LENT_SECRETS = 0o037  # root's, our group may read: systemd credential (its ACL shows as that) or mounted Secret


@dataclass(frozen=True, slots=True)
class Keys:
    """`public` and `secret` are ours; `names` maps every public key that may speak to us to its owner's name."""

    public: str
    secret: str = field(repr=False)
    names: Mapping[str, str]

    @property
    def one(self) -> str:
        """The key if we know just one, else empty: then an address has to say which key it means."""
        return next(iter(self.names)) if len(self.names) == 1 else ""


def load_keys(path: str, peers: str) -> Keys:
    """Our pair, and the keys we let in: those of `peers`, or if it is empty our own. Raises OperatorError."""
    secret = _only_line(_place(path, "key"))
    public = zmq.curve_public(secret.encode()).decode()
    return Keys(public, secret, load_peers(peers) if peers else {public: "fleet"})


def load_peers(path: str) -> dict[str, str]:
    """Public key -> name, from a file of lines `NAME KEY` or a folder of `*.pub` with such lines.

    A name may have several keys (while one replaces another); a key has one name. Raises OperatorError.
    """
    names: dict[str, str] = {}
    for where, line in _lines(_place(path, "peers")):
        name, _, key = line.partition(" ")
        key = key.strip()
        if not OWNER_NAME.fullmatch(name) or not is_key(key):
            raise OperatorError("bad_peers", f"peers: {where}: need `NAME PUBLICKEY`, the name of letters, digits, ._-")
        if names.setdefault(key, name) != name:
            raise OperatorError("bad_peers", f"peers: {where}: the key of {names[key]} again, as {name}'s")
        if len(names) > MOST_KEYS:
            raise OperatorError("bad_peers", f"peers: {path}: more than {MOST_KEYS} keys")
    if not names:
        raise OperatorError("bad_peers", f"peers: {path}: no key in it, so nobody could be let in")
    return names


def is_key(text: str) -> bool:
    """Whether this is a key as ZeroMQ writes it."""
    if not Z85.fullmatch(text):
        return False
    try:
        return bool(z85.encode(z85.decode(text.encode())) == text.encode())
    except Exception:  # five characters exceed 32 bits; what is raised depends on pyzmq
        return False


def write_pair(path: Path) -> str:
    """Make a pair: write the secret half to `path`, which must not exist, and return the public half."""
    public, secret = (half.decode() for half in zmq.curve_keypair())
    text = f"# kvbridge secret key. Its public half: {public}\n{secret}\n"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise OperatorError(
            "key_exists", f"key: {path} is there already; remove it yourself if it is not used"
        ) from None
    except OSError as error:
        raise OperatorError("key_not_written", f"key: {path}: {error.strerror}") from None
    with os.fdopen(fd, "w") as file:
        os.fchmod(fd, 0o600)
        file.write(text)
        file.flush()
        os.fsync(fd)
    return public


def _place(text: str, option: str) -> Path:
    """The path of the file. Raises OperatorError if a key was given instead, without showing it."""
    if any(is_key(word) for word in AROUND_KEY.split(text)) and not os.path.exists(text):
        reason = "must name a file, but its value looks like a key, so it is not shown"
        raise OperatorError("bad_option", f"{option}: {reason}: put a key into a file of mode 0600, and name that")
    return Path(text)


def _only_line(path: Path) -> str:
    found = [line for line in _read(path, "key").splitlines() if line.strip() and not line.startswith("#")]
    if len(found) != 1 or not is_key(found[0].strip()):  # the text may be a secret: do not show it
        raise OperatorError("bad_key", f"key: {path} is not a key of `kvbridge keygen`: one line of 40 characters")
    return found[0].strip()


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Every line of the list, with its file and number."""
    try:
        files = sorted(path.glob("*.pub")) if path.is_dir() else [path]
        if path.is_dir():
            _check_owner(path, path.stat(), "peers", MODE_OF_LISTS)
    except OSError as error:
        raise OperatorError("bad_peers", f"peers: {path}: {error.strerror}") from None
    for file in files:
        for number, line in enumerate(_read(file, "peers").splitlines(), 1):
            if line.strip() and not line.startswith("#"):
                yield f"{file}:{number}", " ".join(line.split())


def _read(path: Path, option: str) -> str:
    """The text of a file. Raises OperatorError if its owner or mode is not as it must be."""
    code = f"bad_{option}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a pipe must not block
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise OperatorError(code, f"{option}: {path} is not a file")
            is_lent = option == "key" and found.st_uid == 0 != os.geteuid()
            forbidden = MODE_OF_LISTS if option == "peers" else MODE_OF_LENT_SECRETS if is_lent else MODE_OF_SECRETS
            _check_owner(path, found, option, forbidden)
            return file.read(FILE_BYTES).decode()
    except OSError as error:
        raise OperatorError(code, f"{option}: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OperatorError(code, f"{option}: {path} is not text") from None


def _check_owner(path: Path, found: os.stat_result, option: str, forbidden: int) -> None:
    if found.st_uid not in (0, os.geteuid()):
        raise OperatorError(f"bad_{option}", f"{option}: {path} belongs to uid {found.st_uid}, not to us or root")
    if found.st_mode & forbidden:
        mode = stat.S_IMODE(found.st_mode)
        remedy = "chmod 600" if option == "key" else "chmod go-w"
        raise OperatorError(f"bad_{option}", f"{option}: {path} has mode {mode:04o}, too open: {remedy} {path}")
