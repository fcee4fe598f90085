"""What the exchange asks its shell to do. Records only; the shell does them in order. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge_proto.engine import ToEngine
from kvbridge_proto.peer import Body

from .orders import ReceivingOrder, SendingOrder


@dataclass(frozen=True, slots=True)
class Reach:
    """Open a session with the agent at this address, or say at once that there is one."""

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


Action = Reach | Ask | Send | Tell | SendingOrder | ReceivingOrder
