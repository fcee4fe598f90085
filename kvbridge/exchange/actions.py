"""What the exchange asks its caller to do. Records only; the caller carries them out in order. Pure."""

from __future__ import annotations

from kvbridge_proto.engine import ToEngine
from kvbridge_proto.peer import Body, ProcessCard

from ..values import Value
from .orders import ReceivingOrder, SendingOrder
from .session import Session


class Reach(Value):
    """Open a session with the agent at this address, or report at once the one that is open."""

    address: str


class Ask(Value):
    """Send Hello again to a peer whose engine had not yet named all its ranks."""

    address: str


class Send(Value):
    """Send to the peer: an address we dialled (receiver), or the incarnation of one that dialled us (sender).

    `number` is that of the want whose rows the body claims; 0 of anything else.
    """

    peer: str
    body: Body
    number: int = 0


class Tell(Value):
    """Send to our engine."""

    message: ToEngine


class Met(Value):
    """A claim has met its offer: this transfer takes so much of the offer of this number to this incarnation."""

    transfer: str
    receiver: str
    number: int
    chunks: int
    size_bytes: int


class Unconfirmed(Value):
    """The receiver never said that it had finished, so blocks were kept until its read lease ended."""

    transfer: str


class Carried(Value):
    """This much came to the receiver's engine or slots, or was read by it, over this session."""

    session: Session
    chunks: int
    size_bytes: int


class Compared(Value):
    """This many chunks were compared with the sender's, and so many differ."""

    chunks: int
    differing: int


class WatchProcess(Value):
    """See when this process of the sender ends (`Receiver.cannot_write`)."""

    process: ProcessCard
    incarnation: str


class Uncompared(Value):
    """The sender sent no digests of this many sampled chunks in time, or still writes into their blocks."""

    transfer: str
    chunks: int


class ReadAhead(Value):
    """Rows of a transfer were read ahead of the sender's answer. Unless that `counts`, they are read again."""

    transfer: str
    counts: bool


# Nothing is to be done: the caller logs, counts or remembers it.
Notable = Met | Unconfirmed | Carried | Compared | Uncompared | ReadAhead
Action = Reach | Ask | Send | Tell | WatchProcess | Notable | SendingOrder | ReceivingOrder
