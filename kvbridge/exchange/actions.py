"""What the exchange asks its caller to do. Records only; the caller carries them out in order. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge_proto.engine import ToEngine
from kvbridge_proto.peer import Body, ProcessCard

from .orders import ReceivingOrder, SendingOrder
from .session import Session


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
    """Send to the peer: an address we dialled (receiver), or the incarnation of one that dialled us (sender).

    `number` is that of the want whose rows the body claims; 0 of anything else.
    """

    peer: str
    body: Body
    number: int = 0


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
class Carried:
    """This much came to the receiver's engine or slots, or was read by it, over this session."""

    session: Session
    chunks: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Compared:
    """This many chunks were compared with the sender's, and so many differ."""

    chunks: int
    differing: int


@dataclass(frozen=True, slots=True)
class WatchProcess:
    """See when this process of the sender ends (`Receiver.cannot_write`)."""

    process: ProcessCard
    incarnation: str


@dataclass(frozen=True, slots=True)
class Uncompared:
    """The sender sent no digests of this many sampled chunks in time."""

    transfer: str
    chunks: int


# Nothing is to be done: the caller logs, counts or remembers it.
Notable = Met | Unconfirmed | Carried | Compared | Uncompared
Action = Reach | Ask | Send | Tell | WatchProcess | Notable | SendingOrder | ReceivingOrder
