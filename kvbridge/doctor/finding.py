"""What a check is about, and what it finds. Pure."""

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
    NOT_HERE = "not here"  # what this machine lacks, or nobody asked for; never "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    """`text` is what was seen, with its values; `remedy` what to do about a warning or a failure."""

    outcome: CheckOutcome
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Subject:
    """`config` is the agent's that is meant, `status` what the agent at its socket says, None if there is none.

    `environment` holds the variables that the libraries beneath us read, `peer` the address of --peer or "".
    """

    config: AgentConfig
    status: Status | None
    environment: dict[str, str]
    peer: str = ""


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """`name` is its anchor in docs/troubleshooting.md too. `look` may raise KVBridgeError or OSError: it failed."""

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
