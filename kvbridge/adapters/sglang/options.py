"""What an operator may set for SGLang's ranks, in the environment of its processes; read once, at the door. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ...errors import OperatorError

PREFIX = "KVBRIDGE_ENGINE_"
# What Kubernetes tells every pod of a service that is called kvbridge-engine.
SERVICE = re.compile(rf"{PREFIX}(\w+_)?(SERVICE_(HOST|PORT)|PORT)(_\w+)?")


@dataclass(frozen=True, slots=True)
class SGLangOptions:
    """Spelled in capitals, with `KVBRIDGE_ENGINE_` in front. SGLang's own timeouts hold for all else.

    socket       the agent's unix socket, an absolute path; `{rank}` is the rank's number among this engine's ranks on
                 this host, `{gpu}` the number of its GPU
    agent_uids   users whose agents are given this engine's memory, besides our own and root; numbers, with commas
    hold_s       how long a prefilled prompt is kept for a decoding engine that does not come
    connect_s    how long start-up waits for the agent; without one the engine starts all the same
    model_name   what both engines call the model; the last part of the model's path if not set
    """

    socket: str = "/run/kvbridge/agent-{rank}.sock"
    agent_uids: tuple[int, ...] = ()
    hold_s: float = 30.0
    connect_s: float = 30.0
    model_name: str = ""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> SGLangOptions:
        """Raises OperatorError for a name nobody knows or a value that makes no sense."""
        known = {PREFIX + field.name.upper(): field for field in fields(cls)}
        given: dict[str, Any] = {}
        for variable, text in environment.items():
            if not variable.startswith(PREFIX) or SERVICE.fullmatch(variable):
                continue
            if variable not in known:
                raise OperatorError("option_unknown", f"{variable}: not an option, known are {', '.join(known)}")
            field = known[variable]
            try:
                given[field.name] = _read(text, field.default)
            except ValueError as error:
                raise OperatorError("option_invalid", f"{variable}: {text!r}, {error}") from error
        options = cls(**given)
        if not options.socket.startswith("/"):
            raise OperatorError("option_invalid", f"{PREFIX}SOCKET: {options.socket!r}, must be an absolute path")
        return options

    def socket_of(self, rank: int, gpu: int) -> str:
        """The socket of one rank's agent."""
        return self.socket.replace("{rank}", str(rank)).replace("{gpu}", str(gpu))


def _read(text: str, default: object) -> object:
    match default:
        case float():
            value = float(text)
            if not 0 < value <= 86400:
                raise ValueError("must be in (0, 86400]")
            return value
        case tuple():
            uids = [part.strip() for part in text.split(",") if part.strip()]
            if not all(uid.isdecimal() for uid in uids):
                raise ValueError("must be numbers of users, with commas between them")
            return tuple(map(int, uids))
        case _:
            return text
