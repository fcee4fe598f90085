"""`kvbridge drain`: has `kvbridge proxy` take an engine out, and shows what it still has until that is gone."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..errors import OperatorError
from ..oneline import plain
from ..unix_socket import credentials_of
from .console import stdout

PROXY_ANSWER_S = 10.0
DRAIN_LOOK_S = 0.5

State = dict[str, Any]


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("kvbridge.proxy", timeout=PROXY_ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
        if os.getuid() and (user := credentials_of(self.sock)[1]) not in (0, os.getuid()):
            raise PermissionError(f"user {user} listens there")


def drain(engine: str, control: Path, timeout_s: float) -> None:
    """Drain it, and return once it has nothing left. Raises OperatorError, also if that takes longer."""
    name, ends, before = _name(engine), time.monotonic() + timeout_s, ""
    states = _asked(control, name, {"engine": name, "undo": False})
    while True:
        if not all(each["is_draining"] for each in states):
            raise OperatorError("taken_back", f"{name} was taken back meanwhile")
        if (line := _shown(states)) != before:
            stdout().print(line, soft_wrap=True)
        before = line
        if not any(each["under_way"] for each in states):
            return stdout().print(f"{name} has nothing left: it can be stopped", soft_wrap=True)
        if time.monotonic() > ends:
            raise OperatorError("not_drained", f"after {timeout_s:g} s {name} is not drained: {line}")
        time.sleep(DRAIN_LOOK_S)
        states = _asked(control, name)


def undo(engine: str, control: Path) -> None:
    """Give it new requests again. Raises OperatorError."""
    name = _name(engine)
    _asked(control, name, {"engine": name, "undo": True})
    stdout().print(plain(f"{name} gets new requests again"), soft_wrap=True)


def _name(engine: str) -> str:
    return plain(engine.partition(",")[0].rstrip("/"))


def _shown(states: Sequence[State]) -> str:
    return plain("; ".join(map(_of_one, states)))


def _of_one(state: State) -> str:
    told = f"{state['role']}: {state['under_way']} under way"
    if state["role"] == "decode":
        why = ", ".join(f"{count} {reason}" for reason, count in state["stays"].items())
        told += (f" ({why})" if why else "") + f", {state['moved']} moved"
        told += f", {state['returned']} taken by no other engine" if state["returned"] else ""
    return told


def _asked(control: Path, name: str, change: State | None = None) -> list[State]:
    connection = _UnixConnection(control)
    try:
        if change is None:
            connection.request("GET", f"/drain?engine={quote(name)}")
        else:
            connection.request("POST", "/drain", json.dumps(change))
        reply = connection.getresponse()
        told = json.loads(reply.read())
    except (OSError, HTTPException, ValueError) as error:
        raise OperatorError("no_proxy", f"no proxy answers at {control}: {error}") from None
    finally:
        connection.close()
    if reply.status != 200:
        raise OperatorError(str(told["code"]), str(told["reason"]))
    return list(told)
