"""Targets that an operator uses: the config file, environment and flags, pool files, answers, lists in files."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from random import Random

import msgpack
import msgspec
from kvbridge_proto.framing import encode
from kvbridge_proto.pool import Pool
from kvbridge_proto.status import Status
from rich.console import Console
from zmq.utils import z85

from kvbridge import config, options
from kvbridge.commands import plan
from kvbridge.commands.status import rendered
from kvbridge.errors import OperatorError
from kvbridge.transport.keys import MOST_KEYS, OWNER_NAME, is_key, load_peers
from kvbridge.transport.lock import INCARNATION, KEPT_INCARNATIONS, KERNEL, LINE_BYTES, Lock
from testing.pools import Shape, describe
from tests.integration.fuzz.mutate import Mutator
from tests.integration.fuzz.target import Target
from tests.integration.fuzz.typed import drawer
from tests.unit.proto.samples import POOL, TO_ENGINE

ROOT = Path(__file__).parents[3]
VALUES = (
    *("", "1", "-1", "true", "auto", "cuda:0", "9" * 5000, "1e400", "nan", "\udcff", "/run/\udcff", "a:٣"),
    *("h:" + "9" * 5000,),
)
TOML = (
    *("[" * 3000, "a.b.c = 1", "= 1", '"\\u0000"', "9" * 5000, "1979-05-27", "[[x]]", "'''", "\ufeff", "inf"),
    *("0x", "{" * 200),
)


class ConfigText(Target):
    """`load` gives options or OperatorError, whatever the file, the environment and the flags say."""

    name = "config"

    def __init__(self) -> None:
        self._path = self.folder / "c.toml"
        self._names = list(options.options())
        sample = (ROOT / "deploy" / "kvbridge.toml").read_text()
        self._lines = [line.lstrip("# ") for line in sample.splitlines() if "=" in line]

    def frame(self, random: Random) -> bytes:
        """What the environment says, NUL, what the flags say, NUL, the file."""
        said = [self._said(random) for _ in range(2)]
        lines = [random.choice(self._lines) for _ in range(random.randrange(6))]
        text = bytearray("\n".join(lines).encode())
        for _ in range(random.randrange(4)):
            at = random.randrange(len(text) + 1)
            text[at : at + random.randrange(3)] = (
                random.choice(TOML).encode() if random.random() < 0.5 else random.randbytes(2)
            )
        return b"\x00".join([*(each.encode("utf-8", "surrogateescape") for each in said), bytes(text)])

    def _said(self, random: Random) -> str:
        count = random.choice((0, 0, 1, 2))
        return "\n".join(f"{random.choice(self._names)}={random.choice(VALUES)}" for _ in range(count))

    def run(self, frame: bytes) -> int:
        environment, flags, text = [*frame.split(b"\x00", 2), b"", b""][:3]
        self._path.write_bytes(text)
        named = {options.ENVIRONMENT_PREFIX + name.upper(): value for name, value in _pairs(environment).items()}
        with contextlib.suppress(OperatorError):
            loaded = config.load(str(self._path), _pairs(flags), named)
            assert isinstance(loaded, options.AgentConfig)
            msgspec.json.encode(loaded)  # what is text can be said, in logs and to peers
        return 1


def _pairs(said: bytes) -> dict[str, str]:
    lines = said.decode("utf-8", "surrogateescape").split("\n")
    return {line.partition("=")[0]: line.partition("=")[2] for line in lines if "=" in line}


class PoolFile(Target):
    """`kvbridge plan` says what it thinks of two files, or OperatorError."""

    name = "poolfile"

    def __init__(self) -> None:
        self._paths = [self.folder / name for name in ("sender.json", "receiver.json")]
        shapes = [Shape(), Shape("hnd", block_tokens=32), Shape("cross_layer", codec="fp8_e4m3")]
        good = [describe(shape) for shape in shapes]
        self._good = [msgspec.json.encode(pool) for pool in (POOL, *good)]
        self._mutator = Mutator([encode(pool) for pool in (POOL, *good)], Pool)

    def frame(self, random: Random) -> bytes:
        """Two files with a NUL between them."""
        return (
            self._text(random) + b"\x00" + (random.choice(self._good) if random.random() < 0.7 else self._text(random))
        )

    def _text(self, random: Random) -> bytes:
        choice = random.random()
        if choice < 0.02:
            return b"[" * random.choice((10, 2000, 100_000))
        if choice < 0.4:
            return self._mutator.changed_bytes(random, random.choice(self._good)).replace(b"\x00", b"0")
        try:
            value = msgpack.unpackb(self._mutator.changed_value(random), strict_map_key=False, timestamp=0)
            return json.dumps(value if choice < 0.9 else [value, value], default=str).encode()
        except (ValueError, RecursionError, TypeError):
            return b'{"engine":' * 1000

    def run(self, frame: bytes) -> int:
        sender, _, receiver = frame.partition(b"\x00")
        ours, theirs = self._paths
        ours.write_bytes(sender)
        theirs.write_bytes(receiver)
        for as_json, tokens in ((True, 1 << 40), (False, 33)):
            with contextlib.suppress(OperatorError), contextlib.redirect_stdout(io.StringIO()):
                plan.show(str(ours), str(theirs), tokens, 4 << 20, 0, as_json)
        return 1


class StatusText(Target):
    """What an agent says of itself, and of peers that chose their own names, can be shown to people."""

    name, kind = "status", Status

    def __init__(self) -> None:
        self._draw = drawer(Status)
        self._mutator = Mutator([encode(message) for message in TO_ENGINE if isinstance(message, Status)], Status)

    def frame(self, random: Random) -> bytes:
        return self._mutator.typed(random) if random.random() < 0.7 else self._mutator.frame(random)

    def judge(self, status: Status) -> None:
        out = io.StringIO()
        Console(file=out, width=100, force_terminal=False).print(rendered(status))
        shown = out.getvalue()
        assert all(letter.isprintable() or letter == "\n" for letter in shown), "control characters reach the terminal"


# Lists: the public keys that may connect, and the incarnations that held an agent's lock:


ODD = (
    *(b"", b"\r", b"#", b" ", b"\t", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\xd9\xa3"),
    *(b"\x1b[2J", b"../..", b"%" * 40, b"a" * 65, b"0" * 16, b"f" * 17),
)


class KeyList(Target):
    """`load_peers` gives names of keys that are keys, or OperatorError `bad_peers`; a list or a folder of lists."""

    name = "keylist"

    def __init__(self) -> None:
        self._path = self.folder / "a.pub"
        random = Random("keys")
        self._keys = [z85.encode(random.randbytes(32)) for _ in range(8)]

    def frame(self, random: Random) -> bytes:
        if random.random() < 0.002:  # too many
            return b"".join(b"n %s\n" % z85.encode(random.randbytes(32)) for _ in range(MOST_KEYS + 1))
        return b"\n".join(_spoiled(random, self._line(random)) for _ in range(random.choice((0, 1, 1, 2, 5))))

    def _line(self, random: Random) -> bytes:
        name = random.choice((b"fleet", b"prefill-3", b"a.b_c", b"x" * 64))
        return name + random.choice((b" ", b"  ", b"\t")) + random.choice(self._keys)

    def run(self, frame: bytes) -> int:
        self._path.write_bytes(frame)
        found = self._loaded(self._path)
        assert self._loaded(self._path.parent) == found
        if found is not None:
            assert 0 < len(found) <= MOST_KEYS
            assert all(is_key(key) and OWNER_NAME.fullmatch(name) for key, name in found.items())
            self._path.write_text("".join(f"{name} {key}\n" for key, name in found.items()))
            assert self._loaded(self._path) == found
        return 1

    def _loaded(self, path: Path) -> dict[str, str] | None:
        try:
            return load_peers(str(path))
        except OperatorError as error:
            assert error.code == "bad_peers" and str(error), error.code
            return None


class IncarnationList(Target):
    """Whatever the lock's file holds, the lock is had; the next one knows its holder, and nobody who was not there."""

    name = "bootlist"

    def __init__(self) -> None:
        self._socket = self.folder / "a.sock"
        self._file = Path(f"{self._socket}.lock")
        self._file.touch(0o600)

    def frame(self, random: Random) -> bytes:
        under = (KERNEL.read_bytes().strip(),) * 3 + (b"another",)
        count = random.choice((0, 1, 2, 63, 64, 65, 200))
        incarnations = [random.randbytes(8).hex().encode() + b" " + random.choice(under) for _ in range(count)]
        lines = [
            incarnation if random.random() < 0.9 else _spoiled(random, incarnation) for incarnation in incarnations
        ]
        return _spoiled(random, b"\n".join(lines) + b"\n")

    def run(self, frame: bytes) -> int:
        self._file.write_bytes(frame)
        kernel = KERNEL.read_bytes().strip()
        lines = set(frame.splitlines())
        before: frozenset[str] = frozenset()
        for number in range(3):
            incarnation = f"{number:016x}"
            found = self._before(incarnation)
            assert len(found) <= KEPT_INCARNATIONS and all(INCARNATION.fullmatch(each.encode()) for each in found)
            assert found <= before if number else {each.encode() + b" " + kernel for each in found} <= lines
            assert not number or f"{number - 1:016x}" in found
            before = found | {incarnation}
        assert os.stat(self._file).st_size <= KEPT_INCARNATIONS * LINE_BYTES
        return 1

    def _before(self, incarnation: str) -> frozenset[str]:
        lock = Lock(self._socket, incarnation)
        lock.close()
        return lock.before


def _spoiled(random: Random, text: bytes) -> bytes:
    """Now and then something is put in, or in the place of what was there."""
    while random.random() < 0.4:
        at = random.randrange(len(text) + 1)
        odd = random.choice(ODD) if random.random() < 0.7 else random.randbytes(random.randrange(4))
        text = text[:at] + odd + text[at + random.choice((0, 0, 1, 3)) :]
    return text
