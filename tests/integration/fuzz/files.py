"""Targets that an operator uses: the config file, environment and flags, pool files, answers of an agent."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from random import Random

import msgpack
import msgspec
from kvbridge_proto.codec import encode
from kvbridge_proto.pool import Pool
from kvbridge_proto.status import Status
from rich.console import Console

from kvbridge import config, options
from kvbridge.commands import plan
from kvbridge.commands.status import rendered
from kvbridge.errors import OperatorError
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
