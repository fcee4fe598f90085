"""Records of other agents, senders and receivers, and the interfaces that hear of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from kvbridge_proto.peer import (
    PROBE_LANES,
    BlockTables,
    Cancel,
    Check,
    Checked,
    Claim,
    Drained,
    Failing,
    Grant,
    Hello,
    Hold,
    Ready,
    Refuse,
    Renew,
    Settled,
)

from ..exchange.session import EngineMemoryId, Session
from ..routes.choice import Connected
from ..states import SESSION_TABLE, SessionEvent, SessionState
from ..transport.link import Link


class ReceiverEvents(Protocol):
    """What the receiver hears of sessions and senders."""

    def met(self, session: Session) -> None: ...
    def opened(self, address: str, session: Session) -> None: ...
    def is_wanted(self, address: str) -> bool: ...
    def refused(self, address: str, incarnation: str, key: str) -> None: ...
    def unreachable(self, address: str, code: str, reason: str) -> None: ...
    def from_sender(
        self, incarnation: str, key: str, body: BlockTables | Checked | Ready | Failing | Drained | Refuse
    ) -> None: ...


class SenderEvents(Protocol):
    """What the sender hears of sessions and receivers."""

    def met(self, session: Session) -> None: ...
    def from_receiver(
        self, session: Session, body: Claim | Grant | Renew | Check | Cancel | Hold | Settled
    ) -> None: ...
    def renounce(self, incarnation: str, cancel: Cancel) -> bool: ...
    def lost(self, incarnation: str) -> None: ...
    def will_never_be_offered(self, claim: Claim) -> bool: ...


@dataclass(slots=True)
class OutgoingPeer:
    """An agent we fetch from."""

    address: str
    link: Link
    serial: int = 0  # among all that we dialled
    state: SessionState = SessionState.NEW
    session: Session | None = None
    lane: int = 0  # of our probe slot, where the sender proves its route
    has_lane: bool = False  # it is lent to this peer now
    names_slots: bool = False  # our last Hello named slots
    is_checked: bool = False  # a Welcome is being checked, or was
    known_incarnation: str = ""  # the agent there says it is this one, and has another session with us
    has_insisted: bool = False  # we have answered that there is no other
    opened: EngineMemoryId | None = None  # names its engine's memory while we have it mapped
    against_pull: str = ""  # why we cannot read its engine's memory ourselves

    def step(self, event: SessionEvent) -> None:
        self.state = SESSION_TABLE[self.state, event]


@dataclass(slots=True)
class IncomingPeer:
    """An agent that fetches from us."""

    link: Link
    session: Session
    connected: Connected
    greeting: Hello

    @property
    def address(self) -> str:
        """The address by which it reached us."""
        return self.greeting.address

    @property
    def serial(self) -> int:
        return self.greeting.serial

    def is_like(self, greeting: Hello) -> bool:
        """Whether the proved route serves this Hello as well."""
        return (greeting.probe_lane, greeting.routes) == (self.greeting.probe_lane, self.greeting.routes)


class ProbeLanes:
    """The lanes of our probe slot. Simultaneous proofs never share one. The one unused for longest is lent first."""

    def __init__(self) -> None:
        self._free = deque(range(PROBE_LANES))

    def __len__(self) -> int:
        """How many are free."""
        return len(self._free)

    def lend(self, dialled: OutgoingPeer) -> bool:
        """Lend a lane if one is free. Returns whether this peer has one now."""
        if not dialled.has_lane and self._free:
            dialled.lane, dialled.has_lane = self._free.popleft(), True
        return dialled.has_lane

    def take_back(self, dialled: OutgoingPeer) -> None:
        """Take its lane back: its proof was checked, or no longer matters."""
        if dialled.has_lane:
            dialled.has_lane = False
            self._free.append(dialled.lane)
