"""Every state machine as a table: the next state, by (state, event). Pure.

Who owns a machine calls `after`. An event that is not in the table is a bug of ours: IllegalEvent, and the state stays.
What catches it depends on who brought the event: docs/architecture.md#state-machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Generic, TypeVar

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class IllegalEvent(Exception):
    """This event cannot happen in this state; nothing was changed."""

    def __init__(self, state: Enum, event: Enum) -> None:
        super().__init__(f"{event.name} in state {state.name}")
        self.state = state
        self.event = event


class StateTable(Generic[S, E]):
    """The next state, by (state, event). Read it as the picture of the machine."""

    def __init__(self, rows: Mapping[tuple[S, E], S]) -> None:
        self._rows = dict(rows)

    def after(self, state: S, event: E) -> S:
        """The next state. Raises IllegalEvent."""
        try:
            return self._rows[state, event]
        except KeyError:
            raise IllegalEvent(state, event) from None

    def allows(self, state: S, event: E) -> bool:
        return (state, event) in self._rows


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
    GREETING = auto()
    OPEN = auto()
    ENDED = auto()


class SessionEvent(Enum):
    HELLO = auto()
    WELCOME = auto()
    LOSE = auto()


SESSION_TABLE = StateTable(
    {
        (SessionState.NEW, SessionEvent.HELLO): SessionState.GREETING,
        (SessionState.NEW, SessionEvent.LOSE): SessionState.ENDED,
        (SessionState.GREETING, SessionEvent.WELCOME): SessionState.OPEN,
        (SessionState.GREETING, SessionEvent.LOSE): SessionState.ENDED,
        (SessionState.OPEN, SessionEvent.HELLO): SessionState.GREETING,  # asked again, for the missing ranks
        (SessionState.OPEN, SessionEvent.LOSE): SessionState.ENDED,
    }
)


# A want of our engine, and the transfers that satisfy it:


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


class IncomingState(Enum):
    CLAIMED = auto()
    STOPPING = auto()  # cancelled; the sender has not said Drained yet
    ENDED = auto()


class IncomingEvent(Enum):
    FINISH = auto()
    STOP = auto()
    DRAIN = auto()
    LOSE = auto()  # the sender is gone; what it may still write stays quarantined


INCOMING_TABLE = StateTable(
    {
        (IncomingState.CLAIMED, IncomingEvent.FINISH): IncomingState.ENDED,
        (IncomingState.CLAIMED, IncomingEvent.STOP): IncomingState.STOPPING,
        (IncomingState.CLAIMED, IncomingEvent.DRAIN): IncomingState.ENDED,
        (IncomingState.CLAIMED, IncomingEvent.LOSE): IncomingState.ENDED,
        (IncomingState.STOPPING, IncomingEvent.DRAIN): IncomingState.ENDED,
        (IncomingState.STOPPING, IncomingEvent.LOSE): IncomingState.ENDED,
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


# A transfer that another engine's want takes from ours:


class OutgoingState(Enum):
    WAITING = auto()  # claimed; nothing offered under that rendezvous id yet
    FLOWING = auto()
    STOPPING = auto()  # over, but the data plane or its receiver still uses it
    ENDED = auto()


class OutgoingEvent(Enum):
    BIND = auto()
    FINISH = auto()  # the last chunk is written
    STOP_BUSY = auto()
    STOP = auto()
    QUIET = auto()  # nothing of it is under way any more


OUTGOING_TABLE = StateTable(
    {
        (OutgoingState.WAITING, OutgoingEvent.BIND): OutgoingState.FLOWING,
        (OutgoingState.WAITING, OutgoingEvent.STOP): OutgoingState.ENDED,
        (OutgoingState.FLOWING, OutgoingEvent.FINISH): OutgoingState.ENDED,
        (OutgoingState.FLOWING, OutgoingEvent.STOP): OutgoingState.ENDED,
        (OutgoingState.FLOWING, OutgoingEvent.STOP_BUSY): OutgoingState.STOPPING,
        (OutgoingState.STOPPING, OutgoingEvent.QUIET): OutgoingState.ENDED,
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
    DOUBT = auto()  # the transfer ended while the lease was out
    DRAIN = auto()  # the sender confirms that it writes no more under this lease, or its successor that it is dead
    REBUILD = auto()  # our side of the fabric was torn down


# A chunk may land before its transfer is stopped, and be reported after that. A lease is written only once, so the
# report is proof enough to free a slot that was quarantined meanwhile.
SLOT_TABLE = StateTable(
    {
        (SlotState.FREE, SlotEvent.LEND): SlotState.LENT,
        (SlotState.LENT, SlotEvent.LAND): SlotState.FREE,
        (SlotState.LENT, SlotEvent.DRAIN): SlotState.FREE,
        (SlotState.LENT, SlotEvent.DOUBT): SlotState.QUARANTINED,
        (SlotState.QUARANTINED, SlotEvent.LAND): SlotState.FREE,
        (SlotState.QUARANTINED, SlotEvent.DRAIN): SlotState.FREE,
        (SlotState.QUARANTINED, SlotEvent.REBUILD): SlotState.FREE,
    }
)
