"""A transfer's life, told once for both sides and all routes: it waits, is bound, flows, stops, is quiet, ends. Pure.

The sender's side waits for its offer, the receiver's until it is claimed. Once bound, rows flow as its route says. If
it ends before all of them are there, it stops: nothing new begins, and what is under way goes on until it is quiet.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field

from ..geometry.plan import Plan
from ..states import TRANSFER_TABLE, TransferEvent, TransferState
from .orders import Failure
from .session import Session


@dataclass(slots=True, eq=False)
class Transfer(abc.ABC):
    """What one sender gives to one want, as one of the two sees it. Each side and route has a kind of its own."""

    transfer: str
    session: Session
    plan: Plan
    state: TransferState = field(default=TransferState.WAITING, init=False)
    is_ordered: bool = field(default=False, init=False)  # the data plane has an order for it and has not finished
    is_lost: bool = field(default=False, init=False)  # its session ended before it did
    failure: Failure = field(default=None, init=False)  # set by its route: why it is to be stopped

    @property
    def is_open(self) -> bool:
        return self.state in (TransferState.WAITING, TransferState.FLOWING)

    def bind(self) -> None:
        """It is claimed, and has met its offer: rows flow from now on."""
        self.state = TRANSFER_TABLE[self.state, TransferEvent.BIND]

    def finish(self) -> None:
        """All its rows are there."""
        self.state = TRANSFER_TABLE[self.state, TransferEvent.FINISH]

    def stop(self) -> None:
        """It is over early, but not quiet: something of it is under way. `end` follows."""
        self.state = TRANSFER_TABLE[self.state, TransferEvent.STOP]

    def end(self) -> None:
        """It is over early, and quiet."""
        self.state = TRANSFER_TABLE[self.state, TransferEvent.QUIET]
