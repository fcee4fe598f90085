"""Agents that an operator names: by address, by a DNS name of which each address counts, or in a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ..errors import OperatorError, PeerError
from .endpoint import canonical, check_dialled

_NAME = re.compile(r"dns://(?P<host>[A-Za-z0-9._-]+):(?P<port>\d{1,5})(?P<key>#.*)?", re.ASCII)


class ServiceName(NamedTuple):
    """A name that stands for all its addresses: `port` and `key` ("" or #PUBLICKEY) are those of each."""

    host: str
    port: str
    key: str

    def at(self, address: str) -> str:
        return canonical(f"tcp://{address}:{self.port}{self.key}")


def read_entry(entry: str, option: str) -> str | ServiceName | Path:
    """An address, a name or a file, as an entry of this option says. Raises OperatorError."""
    if entry.startswith("file:///"):
        return Path(entry.removeprefix("file://"))
    read: str | ServiceName = canonical(entry)
    if (named := _NAME.fullmatch(entry)) is not None:
        read = ServiceName(named["host"], named["port"], named["key"] or "")
    try:
        check_dialled((read if isinstance(read, str) else read.at("192.0.2.1")).partition("#")[0])
    except PeerError:
        need = "tcp://HOST:PORT, dns://NAME:PORT or file:///PATH"
        raise OperatorError("bad_option", f"{option}: got {entry!r}, need {need}") from None
    return read


def read_list(text: str, option: str) -> list[str | ServiceName]:
    """The lines of a file of agents; those that are empty or begin with # do not count. Raises OperatorError."""
    lines = [line.strip() for line in text.splitlines()]
    entries = [read_entry(line, option) for line in lines if line and not line.startswith("#")]
    if files := [entry for entry in entries if isinstance(entry, Path)]:
        raise OperatorError("bad_option", f"{option}: got file://{files[0]} within a file")
    return [entry for entry in entries if not isinstance(entry, Path)]
