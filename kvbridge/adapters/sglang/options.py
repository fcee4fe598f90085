"""Options of the SGLang adapter, read once from the environment of SGLang's processes. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ...errors import OperatorError

PREFIX = "KVBRIDGE_ENGINE_"
# Variables that Kubernetes sets in every pod for services whose names begin with kvbridge-engine.
SERVICE = re.compile(rf"{PREFIX}(\w+_)?(SERVICE_(HOST|PORT)|PORT)(_\w+)?")


@dataclass(frozen=True, slots=True)
class SGLangOptions:
    """In the environment: `KVBRIDGE_ENGINE_` and the name in capitals. All other timeouts are SGLang's own.

    socket       the agent's unix socket, an absolute path; `{rank}` is the rank's number among this engine's ranks on
                 this host, `{gpu}` the number of its GPU
    agent_uids   user ids whose agents get this engine's memory, besides our own and root; separated by commas
    allow_unwatched  1 or 0: attach also to an agent whose end cannot be seen (before Linux 6.5, one in another PID
                 namespace). When it dies, pages count as free a second later, although its kernels may still write them
    hold_s       how long a prefilled prompt is kept for a decode engine that does not come
    connect_s    how long start-up waits for the agent; then the engine starts without one
    model_name   the model's name, the same on both engines; default: the last part of the model's path
    draft_name   the same for the draft model; modules of the model itself (MTP) are called as the model is
    """

    socket: str = "/run/kvbridge/agent-{rank}.sock"
    agent_uids: tuple[int, ...] = ()
    allow_unwatched: bool = False
    hold_s: float = 30.0
    connect_s: float = 30.0
    model_name: str = ""
    draft_name: str = ""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> SGLangOptions:
        """Raises OperatorError for an unknown name or a bad value."""
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
        case bool():
            if text not in ("0", "1"):
                raise ValueError("must be 0 or 1")
            return text == "1"
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
