"""One connection to one incarnation of another agent: what it numbers, expects and still has to send. No IO."""

from __future__ import annotations

import socket
from collections import deque
from typing import TYPE_CHECKING

from kvbridge_proto.codec import encode
from kvbridge_proto.common import OURS
from kvbridge_proto.peer import Body, Envelope

from ..states import PEER_LINK_TABLE, PeerLinkEvent, PeerLinkState

if TYPE_CHECKING:
    from .control import Control
    from .framed import Connection


class Numbered:
    """The order of a connection's envelopes: numbered from 0 in each direction, all between the same two
    incarnations."""

    def __init__(self) -> None:
        self.peer_incarnation = ""
        self.version = OURS.oldest
        self._sent = 0
        self._expected = 0

    def number(self, sender: str, body: Body) -> Envelope:
        """The next envelope."""
        number, self._sent = self._sent, self._sent + 1
        return Envelope(version=self.version, sender=sender, receiver=self.peer_incarnation, number=number, body=body)

    def check(self, envelope: Envelope) -> tuple[str, str] | None:
        """Count an envelope in; or why it ends the link, as code and reason."""
        if self.peer_incarnation and envelope.sender != self.peer_incarnation:
            return "peer_restarted", f"incarnation: was {self.peer_incarnation}, now {envelope.sender}"
        if envelope.number != self._expected:
            return "messages_lost", f"number: got {envelope.number}, expected {self._expected}"
        self.peer_incarnation = envelope.sender
        self._expected += 1
        return None

    def is_early(self, envelope: Envelope) -> bool:
        """Whether others come before it."""
        return envelope.number > self._expected

    @property
    def expected(self) -> int:
        """The number of the next one that counts."""
        return self._expected


class Link(Numbered):
    """Made by Control: `dial` makes one, a stranger's first envelope another.

    `address` is what was dialled, or where the peer called from. `peer_incarnation` is empty until its first envelope
    came. `key` is the public key that the peer proved, empty without keys. `version` goes into our envelopes; set it
    once agreed.
    """

    def __init__(self, control: Control, address: str, identity: bytes | None, now: float, key: str = "") -> None:
        super().__init__()
        self.address = address
        self.key = key
        self.state = PeerLinkState.QUEUED if identity is None else PeerLinkState.UP
        self.failures = 0  # handshakes that failed before it was up
        self.is_refused = False  # a try to connect found nobody; others follow
        self.identity = identity
        self.outbox: deque[bytes] = deque()
        self.waiting_bytes = 0
        self.pipe: Connection[Envelope, Envelope] | None = None  # to a peer on this host, which has its other end
        self.says_by_pipe = False
        self.early: dict[int, Envelope] = {}  # heard by the pipe, while those before them come by the connection
        self.early_bytes = 0
        self.made_at = now
        self.heard_at = now
        self.pinged_at = now
        self._control = control

    def __repr__(self) -> str:
        way, incarnation = "to" if self.is_dialled else "from", self.peer_incarnation or "?"
        return f"<Link {way} {self.address} incarnation={incarnation} {self.state.name.lower()}>"

    def step(self, event: PeerLinkEvent) -> None:
        self.state = PEER_LINK_TABLE.after(self.state, event)

    @property
    def is_up(self) -> bool:
        """Whether it was connected, and is not known to be lost."""
        return self.state is PeerLinkState.UP

    @property
    def is_tried(self) -> bool:
        """Whether it had its turn to be connected."""
        return self.state is not PeerLinkState.QUEUED

    @property
    def is_lost(self) -> bool:
        return self.state is PeerLinkState.LOST

    @property
    def is_dialled(self) -> bool:
        return self.identity is None

    def send(self, body: Body) -> bool:
        """Queue a message; waits for the connection if it is not up yet. False if the link is lost: it was dropped."""
        return self._control.send(self, body)

    def carry_by(self, pipe: socket.socket) -> None:
        """Take a pipe to the same peer, see `Control.carry_by`; it is the link's from here on."""
        self._control.carry_by(self, pipe)

    def close(self) -> None:
        """End the link from our side, without a Lost; what was sent still leaves."""
        self._control.close_link(self)

    def seal(self, sender: str, body: Body) -> bytes:
        """The next envelope, as a frame."""
        return encode(self.number(sender, body))
