"""What `kv_transfer_params` says of the side that prefilled. A proxy writes it, or any client: read at the door. Pure.

Nothing that leaves here can stop a message on its way: it is text that UTF-8 can say, no longer than the wire allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import EngineError
from ..engine.prompts import ROOMS

WIRE_TEXT = 256  # what `Room` and `Address` may hold
SHOWN = 40  # characters of a value in a reason
INTEGER_BITS = 64


@dataclass(frozen=True, slots=True)
class Remote:
    """`sender` is the address of one of the other side's agents, `room` a number that a router gave both sides.

    Without a room (0) `request` is the other side's name for the request, or its rendezvous id.
    """

    request: str
    sender: str
    room: int = 0


def read_remote(params: Mapping[str, Any]) -> Remote:
    """Raises EngineError `bad_params`, with a reason that any log can take."""
    room = read_room(params)
    request, host, port = (_text(params, name) for name in ("remote_request_id", "remote_host", "remote_port"))
    if not ((request or room) and host and port):
        raise EngineError("bad_params", "kv_transfer_params without request, host or port")
    key = _text(params, "remote_key")
    sender = f"tcp://{f'[{host}]' if ':' in host else host}:{port}" + (f"#{key}" if key else "")
    if (longest := max(len(sender), len(request))) > WIRE_TEXT:
        reason = f"kv_transfer_params longer than the wire allows: {longest} characters, limit {WIRE_TEXT}"
        raise EngineError("bad_params", reason)
    return Remote(request, sender, room)


def read_room(params: Mapping[str, Any]) -> int:
    """`bootstrap_room`, as routers give it to both sides of a request; 0 if there is none. Raises EngineError."""
    room = params.get("bootstrap_room")
    if room is None:
        return 0
    if type(room) is not int or room not in ROOMS:
        raise EngineError("bad_params", f"bootstrap_room: {_shown(room)}, must be a number in [1, 2^63)")
    return room


def _text(params: Mapping[str, Any], name: str) -> str:
    """ "" if it is not there."""
    value = params.get(name)
    if not value:
        return ""
    if type(value) is int and value.bit_length() <= INTEGER_BITS:
        return str(value)
    if not isinstance(value, str):
        raise EngineError("bad_params", f"{name}: {type(value).__name__}, must be text or a number")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise EngineError("bad_params", f"{name}: {value[:SHOWN]!a}, must be text that UTF-8 can say") from None
    return value


def _shown(value: Any) -> str:
    """Any value, as much of it as a log line should have. Numbers too large are not written out."""
    if type(value) is int and value.bit_length() > INTEGER_BITS:
        return f"a number of {value.bit_length()} bits"
    return f"{value!a:.{SHOWN}}" if isinstance(value, str | int) else type(value).__name__
