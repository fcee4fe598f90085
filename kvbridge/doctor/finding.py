"""What a check looks at, and what it finds. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvbridge_proto.status import Status

from ..options import AgentConfig


class CheckOutcome(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_HERE = "not here"  # the machine lacks it, or nobody asked for it; never "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    """`text` says what was seen, with its values; `remedy` what to do about a warning or a failure."""

    outcome: CheckOutcome
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Subject:
    """The options of an agent, and the status of the agent at its socket (None if there is none).

    `environment` holds the variables that the libraries beneath us read, `peer` the address of --peer or "".
    `prove_route`: that agent may be made to write to us, for which it takes staging memory.
    """

    config: AgentConfig
    status: Status | None
    environment: dict[str, str]
    peer: str = ""
    prove_route: bool = False


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """`name` is also its heading in docs/troubleshooting.md. If `look` raises KVBridgeError or OSError, it failed."""

    name: str
    title: str
    look: Callable[[Subject], Finding]


def ok(text: str) -> Finding:
    return Finding(CheckOutcome.OK, text)


def warning(text: str, remedy: str) -> Finding:
    return Finding(CheckOutcome.WARNING, text, remedy)


def failed(text: str, remedy: str) -> Finding:
    return Finding(CheckOutcome.FAILED, text, remedy)


def not_here(text: str) -> Finding:
    return Finding(CheckOutcome.NOT_HERE, text)
