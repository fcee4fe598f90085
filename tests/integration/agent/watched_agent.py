"""`kvbridge agent`, but it may not pickle, and writes its secrets to a file.

`SECRETS=FILE python -m tests.integration.agent.watched_agent`. Each line of the file is a name and bytes in hex, which
no log may contain. With `OVERLAP=1` the fabric refuses its memory.
"""

from __future__ import annotations

import _pickle
import os
import pickle
import secrets
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvbridge import cli
from kvbridge.agent import daemon  # torch and NIXL may do what they like while they are imported
from kvbridge.transport.fabric_nixl import NixlFabric

PICKLING = ("dump", "dumps", "load", "loads", "Pickler", "Unpickler")


def forbid_pickle() -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        sys.stderr.write("PICKLED\n")
        raise RuntimeError("this process may not pickle")

    for module in (pickle, _pickle):
        for name in PICKLING:
            setattr(module, name, refuse)


def write_down(file: Path, name: str, call: Callable[..., bytes]) -> Callable[..., bytes]:
    def recorded(*args: Any) -> bytes:
        found = call(*args)
        with file.open("a") as out:
            out.write(f"{name} {found.hex()}\n")
        return found

    return recorded


def watched_register(file: Path, register: Callable[..., None]) -> Callable[..., None]:
    """A region is its address and size, eight bytes each."""

    def recorded(fabric: NixlFabric, address: int, size: int, **options: Any) -> None:
        with file.open("a") as out:
            out.write(f"region {struct.pack('>QQ', address, size).hex()}\n")
        for _ in range(2 if os.environ.get("OVERLAP") else 1):
            register(fabric, address, size, **options)

    return recorded


def main() -> None:
    file = Path(os.environ["SECRETS"])
    parts = daemon.Agent.__init__  # the agent's entropy is one of its parts
    recorded = write_down(file, "token", secrets.token_bytes)
    assert parts.__defaults__ and secrets.token_bytes in parts.__defaults__
    parts.__defaults__ = tuple(recorded if part is secrets.token_bytes else part for part in parts.__defaults__)
    NixlFabric.register = watched_register(file, NixlFabric.register)
    NixlFabric.descriptor = write_down(file, "descriptor", NixlFabric.descriptor)
    forbid_pickle()
    cli.main()


if __name__ == "__main__":
    main()
