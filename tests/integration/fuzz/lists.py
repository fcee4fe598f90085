"""Targets that are lists in files: the public keys that may connect, and the incarnations that held an agent's lock."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

from zmq.utils import z85

from kvbridge.errors import OperatorError
from kvbridge.transport.keys import MOST_KEYS, OWNER_NAME, is_key, load_peers
from kvbridge.transport.lock import INCARNATION, KEPT_INCARNATIONS, KERNEL, LINE_BYTES, Lock
from tests.integration.fuzz.target import Target

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
