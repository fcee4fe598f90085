"""Reads what `kv_transfer_params` says about the prefill side. A proxy or any client may have written it. Pure.

Everything returned can be put into a message: it is valid UTF-8 text, no longer than the wire allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import EngineError
from ...oneline import INTEGER_BITS, SHOWN, shown
from ..engine.prompts import ROOMS

WIRE_TEXT = 256  # characters that a `RendezvousId`, an `Address` or an `AttachmentName` may have
WEIGHTS = "remote_weights"
FETCHED_BY = "fetched_by"  # which engine decodes what is prefilled in a room: vLLM unless it says GOES_ON
GOES_ON = "sglang"  # continues after the whole prompt; vLLM computes the prompt's last token again
ANSWERED = "answered"  # how many tokens of an answer other engines gave before: they are at the prompt's end
HAS_LIMIT = "has_limit"  # beside that: its client named the most tokens
AWAITS_KEPT = "awaits_kept"  # whether another engine is about to keep what this prompt begins with


@dataclass(frozen=True, slots=True)
class Remote:
    """What a decode request was told about the prefill side.

    `sender` is the address of one of that side's agents, `room` a number that a router gave to both sides. Without a
    room (0), `request` is that side's name for the request, or its rendezvous id. `attachment` names the one that took
    its offer, "" if that was not told. `weights` names the weights that the prompt was computed with, or
    is "" if they have no name; None if nothing is said.
    """

    request: str
    sender: str
    room: int = 0
    attachment: str = ""
    weights: str | None = None


def read_remote(params: Mapping[str, Any]) -> Remote:
    """Raises EngineError `bad_params`, with a reason that is safe to log."""
    room = read_room(params)
    request, host, port = (_text(params, name) for name in ("remote_request_id", "remote_host", "remote_port"))
    if not ((request or room) and host and port):
        raise EngineError("bad_params", "kv_transfer_params without request, host or port")
    key, attachment = _text(params, "remote_key"), _text(params, "remote_attachment")
    sender = f"tcp://{f'[{host}]' if ':' in host else host}:{port}" + (f"#{key}" if key else "")
    if (longest := max(len(sender), len(request), len(attachment))) > WIRE_TEXT:
        reason = f"kv_transfer_params longer than the wire allows: {longest} characters, limit {WIRE_TEXT}"
        raise EngineError("bad_params", reason)
    return Remote(request, sender, room, attachment, _text(params, WEIGHTS) if WEIGHTS in params else None)


def read_room(params: Mapping[str, Any]) -> int:
    """The `bootstrap_room` that a router gives to both sides of a request; 0 if there is none. Raises EngineError."""
    room = params.get("bootstrap_room")
    if room is None:
        return 0
    if type(room) is not int or room not in ROOMS:
        raise EngineError("bad_params", f"bootstrap_room: {shown(room)}, must be a number in [1, 2^63)")
    return room


def _text(params: Mapping[str, Any], name: str) -> str:
    """The value as text; "" if it is missing."""
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
        raise EngineError("bad_params", f"{name}: {value[:SHOWN]!a}, must be valid UTF-8 text") from None
    return value
