"""What the exchange asks its caller to do. Records only; the caller carries them out in order. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge_proto.engine import ToEngine
from kvbridge_proto.peer import Body

from .orders import ReceivingOrder, SendingOrder


@dataclass(frozen=True, slots=True)
class Reach:
    """Open a session with the agent at this address, or report at once the one that is open."""

    address: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Send Hello again to a peer whose engine had not yet named all its ranks."""

    address: str


@dataclass(frozen=True, slots=True)
class Send:
    """Send to the peer: an address we dialled (receiver), or the incarnation of one that dialled us (sender)."""

    peer: str
    body: Body


@dataclass(frozen=True, slots=True)
class Tell:
    """Send to our engine."""

    message: ToEngine


@dataclass(frozen=True, slots=True)
class Met:
    """A claim has met its offer: this transfer takes so much of the offer of this number."""

    transfer: str
    number: int
    chunks: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """The receiver never said that it had finished, so blocks were kept until its read lease ended."""

    transfer: str


@dataclass(frozen=True, slots=True)
class Uncompared:
    """The sender sent no digests of this many sampled chunks in time."""

    transfer: str
    chunks: int


Notable = Met | Unconfirmed | Uncompared  # nothing is to be done: the caller logs, counts or remembers it
Action = Reach | Ask | Send | Tell | Notable | SendingOrder | ReceivingOrder
