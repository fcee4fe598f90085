"""Every state machine as a table: the next state, by (state, event). Pure.

Who owns a machine reads `TABLE[state, event]`. What is not in the table is a bug of ours: IllegalEvent, and the state
stays. What catches it depends on who brought the event: docs/architecture.md#state-machines.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TypeVar

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class IllegalEvent(Exception):
    """This event cannot happen in this state; nothing was changed."""

    def __init__(self, state: Enum, event: Enum) -> None:
        super().__init__(f"{event.name} in state {state.name}")
        self.state = state
        self.event = event


class StateTable(dict[tuple[S, E], S]):
    """The next state, by (state, event); IllegalEvent if there is none. Read it as the picture of the machine."""

    def __missing__(self, key: tuple[S, E]) -> S:
        raise IllegalEvent(*key)


# An engine's link to its agent:


class LinkState(Enum):
    DETACHED = auto()  # no connection, and nobody touches the engine's memory
    ASKING = auto()  # attach sent
    ATTACHED = auto()  # attached
    ENDING = auto()  # lost, and the agent may still touch memory


class LinkEvent(Enum):
    ASK = auto()
    ATTACH = auto()
    LOSE = auto()
    LET_GO = auto()  # the agent has let go of the memory, or is gone
    CLOSE = auto()  # the engine is leaving, or this is a fork of it


LINK_TABLE = StateTable(
    {
        (LinkState.DETACHED, LinkEvent.ASK): LinkState.ASKING,
        (LinkState.ASKING, LinkEvent.ATTACH): LinkState.ATTACHED,
        (LinkState.ASKING, LinkEvent.LOSE): LinkState.ENDING,
        (LinkState.ATTACHED, LinkEvent.LOSE): LinkState.ENDING,
        (LinkState.ENDING, LinkEvent.LET_GO): LinkState.DETACHED,
        **{(state, LinkEvent.CLOSE): LinkState.DETACHED for state in LinkState},
    }
)


# A connection to one incarnation of another agent:


class PeerLinkState(Enum):
    QUEUED = auto()  # dialled, but too many others are being tried: it waits for its turn
    CONNECTING = auto()
    UP = auto()
    LOST = auto()


class PeerLinkEvent(Enum):
    TRY = auto()
    CONNECT = auto()
    LOSE = auto()  # by either side, or by silence


PEER_LINK_TABLE = StateTable(
    {
        (PeerLinkState.QUEUED, PeerLinkEvent.TRY): PeerLinkState.CONNECTING,
        (PeerLinkState.QUEUED, PeerLinkEvent.LOSE): PeerLinkState.LOST,
        (PeerLinkState.CONNECTING, PeerLinkEvent.CONNECT): PeerLinkState.UP,
        (PeerLinkState.CONNECTING, PeerLinkEvent.LOSE): PeerLinkState.LOST,
        (PeerLinkState.UP, PeerLinkEvent.LOSE): PeerLinkState.LOST,
    }
)


# Sessions:


class SessionState(Enum):
    NEW = auto()
    HANDSHAKE = auto()
    OPEN = auto()
    ENDED = auto()


class SessionEvent(Enum):
    HELLO = auto()
    WELCOME = auto()
    LOSE = auto()


SESSION_TABLE = StateTable(
    {
        (SessionState.NEW, SessionEvent.HELLO): SessionState.HANDSHAKE,
        (SessionState.NEW, SessionEvent.LOSE): SessionState.ENDED,
        (SessionState.HANDSHAKE, SessionEvent.WELCOME): SessionState.OPEN,
        (SessionState.HANDSHAKE, SessionEvent.LOSE): SessionState.ENDED,
        (SessionState.OPEN, SessionEvent.HELLO): SessionState.HANDSHAKE,  # asked again, for the missing ranks
        (SessionState.OPEN, SessionEvent.LOSE): SessionState.ENDED,
    }
)


# A want of our engine:


class WantState(Enum):
    REACHING = auto()  # sessions with all ranks of the sender engine are being opened
    FLOWING = auto()  # claimed; the data plane has its orders
    RETURNING = auto()  # its session ended; it reaches again once the data plane is quiet
    ENDING = auto()  # failed, but the data plane is not quiet
    ENDED = auto()


class WantEvent(Enum):
    CLAIM = auto()
    FINISH = auto()
    FAIL_BUSY = auto()  # failed while the data plane had orders
    FAIL = auto()
    QUIET = auto()  # nothing of it is moved any more
    AGAIN = auto()  # its session ended before anything came, and the peer goes on
    AGAIN_BUSY = auto()  # the same, while the data plane had orders


WANT_TABLE = StateTable(
    {
        (WantState.REACHING, WantEvent.CLAIM): WantState.FLOWING,
        (WantState.REACHING, WantEvent.FAIL): WantState.ENDED,
        (WantState.FLOWING, WantEvent.AGAIN): WantState.REACHING,
        (WantState.FLOWING, WantEvent.AGAIN_BUSY): WantState.RETURNING,
        (WantState.RETURNING, WantEvent.QUIET): WantState.REACHING,
        (WantState.RETURNING, WantEvent.FAIL): WantState.ENDED,
        (WantState.RETURNING, WantEvent.FAIL_BUSY): WantState.ENDING,
        (WantState.FLOWING, WantEvent.FINISH): WantState.ENDED,
        (WantState.FLOWING, WantEvent.FAIL): WantState.ENDED,
        (WantState.FLOWING, WantEvent.FAIL_BUSY): WantState.ENDING,
        (WantState.ENDING, WantEvent.QUIET): WantState.ENDED,
    }
)


# An offer of our engine:


class OfferState(Enum):
    OPEN = auto()
    ENDING = auto()  # withdrawn, expired or failed: no new reads, and somebody may still be reading
    RELEASED = auto()  # its blocks are the engine's again


class OfferEvent(Enum):
    END = auto()
    RELEASE = auto()  # nobody reads or will read it


OFFER_TABLE = StateTable(
    {
        (OfferState.OPEN, OfferEvent.END): OfferState.ENDING,
        (OfferState.OPEN, OfferEvent.RELEASE): OfferState.RELEASED,  # all receivers were served
        (OfferState.ENDING, OfferEvent.RELEASE): OfferState.RELEASED,
    }
)


# What one sender gives to one want, on either side (exchange/transfer.py):


class TransferState(Enum):
    WAITING = auto()  # for its offer; at the receiver, until it is claimed
    FLOWING = auto()
    STOPPING = auto()  # over, but the data plane, its receiver or its sender still uses it
    ENDED = auto()


class TransferEvent(Enum):
    BIND = auto()
    FINISH = auto()  # all its rows are there
    STOP = auto()  # it is over early, and something of it is under way
    QUIET = auto()  # nothing of it is under way any more, or its session is lost; it may not have been stopped


TRANSFER_TABLE = StateTable(
    {
        (TransferState.WAITING, TransferEvent.BIND): TransferState.FLOWING,
        (TransferState.WAITING, TransferEvent.QUIET): TransferState.ENDED,
        (TransferState.FLOWING, TransferEvent.FINISH): TransferState.ENDED,
        (TransferState.FLOWING, TransferEvent.STOP): TransferState.STOPPING,
        (TransferState.FLOWING, TransferEvent.QUIET): TransferState.ENDED,
        (TransferState.STOPPING, TransferEvent.QUIET): TransferState.ENDED,
    }
)


# A slot of our staging that others write to:


class SlotState(Enum):
    FREE = auto()
    LENT = auto()
    QUARANTINED = auto()


class SlotEvent(Enum):
    LEND = auto()
    LAND = auto()  # the one write of this lease has arrived whole, and its rows are in the blocks or thrown away
    QUARANTINE = auto()  # the transfer ended while the lease was out
    DRAIN = auto()  # the sender confirms that it writes no more under this lease, or its successor that it is dead
    REBUILD = auto()  # our side of the fabric was torn down


# A chunk may land before its transfer is stopped, and be reported after that. A lease is written only once, so the
# report is proof enough to free a slot that was quarantined meanwhile.
SLOT_TABLE = StateTable(
    {
        (SlotState.FREE, SlotEvent.LEND): SlotState.LENT,
        (SlotState.LENT, SlotEvent.LAND): SlotState.FREE,
        (SlotState.LENT, SlotEvent.DRAIN): SlotState.FREE,
        (SlotState.LENT, SlotEvent.QUARANTINE): SlotState.QUARANTINED,
        (SlotState.QUARANTINED, SlotEvent.LAND): SlotState.FREE,
        (SlotState.QUARANTINED, SlotEvent.DRAIN): SlotState.FREE,
        (SlotState.QUARANTINED, SlotEvent.REBUILD): SlotState.FREE,
    }
)
