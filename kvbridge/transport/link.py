"""A connection to one incarnation of another agent: its numbers, state and outbox, and what is reported of it. No IO.

And the settings of what carries it (control.py).
"""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from kvbridge_proto.common import OURS
from kvbridge_proto.peer import LINK_OVER, Body, Envelope, Goodbye

from ..state_machines import PEER_LINK_TABLE, PeerLinkEvent, PeerLinkState
from ..values import Value
from .framed import Connection

PING_S = 1.0


class Numbered:
    """Numbers a connection's envelopes from 0 in each direction, all between the same two incarnations."""

    def __init__(self) -> None:
        self.peer_incarnation = ""
        self.version = OURS.oldest
        self.expected = 0  # the number that the next envelope from there must have
        self._sent = 0

    def number(self, sender: str, body: Body) -> Envelope:
        """The next envelope."""
        number, self._sent = self._sent, self._sent + 1
        return Envelope(version=self.version, sender=sender, receiver=self.peer_incarnation, number=number, body=body)

    def check(self, envelope: Envelope) -> tuple[str, str] | None:
        """Count an envelope in. Returns code and reason if it ends the link instead."""
        if envelope.number == LINK_OVER and isinstance(envelope.body, Goodbye):
            return "link_over", f"the other agent has ended this link: {envelope.body.reason}"
        if self.peer_incarnation and envelope.sender != self.peer_incarnation:
            return "peer_restarted", f"incarnation: was {self.peer_incarnation}, now {envelope.sender}"
        if envelope.number != self.expected:
            return "messages_lost", self._gap(envelope.number)
        self.peer_incarnation = envelope.sender
        self.expected += 1
        return None

    def _gap(self, number: int) -> str:
        if self.expected == 0:
            return f"number: message {number} begins no link (0 does): the agent that got it had given the link up"
        what = "those between are lost" if number > self.expected else "it came twice"
        return f"number: message {number} came after message {self.expected - 1}: {what}"


class LinkCarrier(Protocol):
    """Carries the messages of links: Control."""

    def send(self, link: Link, body: Body) -> bool: ...
    def carry_by(self, link: Link, pipe: socket.socket) -> None: ...
    def close_link(self, link: Link) -> None: ...


class Link(Numbered):
    """Made by Control, for an address that was dialled or for a stranger's first envelope.

    `address` is what was dialled, or where the peer called from. `peer_incarnation` is empty until the peer's first
    envelope. `key` is the public key that the peer proved, empty without keys. `version` goes into our envelopes; set
    it once agreed.
    """

    def __init__(self, carrier: LinkCarrier, address: str, identity: bytes | None, now: float, key: str = "") -> None:
        super().__init__()
        self.address = address
        self.key = key
        self.identity = identity
        self.is_dialled = identity is None
        self._become(PeerLinkState.QUEUED if self.is_dialled else PeerLinkState.UP)
        self.failures = 0  # handshakes that failed before it was up
        self.is_refused = False  # a try to connect found nobody; ZeroMQ tries again
        self.outbox: deque[bytes] = deque()
        self.waiting_bytes = 0
        self.pipe: Connection[Envelope, Envelope] | None = None  # to a peer on this host, which has the other end
        self.sends_by_pipe = False
        self.early: dict[int, Envelope] = {}  # came by the pipe before earlier ones by the connection
        self.early_bytes = 0
        self.made_at = now
        self.heard_at = now
        self.pinged_at = now
        self.look_at = now  # when something is due, at the earliest
        self._carrier = carrier

    def __repr__(self) -> str:
        way, incarnation = "to" if self.is_dialled else "from", self.peer_incarnation or "?"
        return f"<Link {way} {self.address} incarnation={incarnation} {self.state.name.lower()}>"

    def step(self, event: PeerLinkEvent) -> None:
        self._become(PEER_LINK_TABLE[self.state, event])

    def _become(self, state: PeerLinkState) -> None:
        self.state = state
        self.is_tried = state is not PeerLinkState.QUEUED  # it no longer waits for its turn to be connected
        self.is_up = state is PeerLinkState.UP  # it is connected, as far as we know
        self.is_lost = state is PeerLinkState.LOST

    def send(self, body: Body) -> bool:
        """Queue a message, which waits until the link is up. False if the link is lost and the message dropped."""
        return self._carrier.send(self, body)

    def carry_by(self, pipe: socket.socket) -> None:
        """Use a pipe to the same peer, see `Control.carry_by`. The link owns it from here on."""
        self._carrier.carry_by(self, pipe)

    def close(self) -> None:
        """End the link from our side, without a Lost. What was sent may still leave."""
        self._carrier.close_link(self)


@dataclass(frozen=True, slots=True)
class Settings:
    """Times in seconds. A peer that sends nothing for `silence_s`, pings included, is lost.

    That only matters for a stalled peer or a broken path: a dead peer's connection ends at once. Engines that spin on
    `sched_yield` have kept an agent beside them off the processor for 4 s (2 cores, Linux 6.18, 2026-11-21).
    """

    connect_s: float = 5.0
    silence_s: float = 15.0
    frame_bytes: int = 4 << 20
    queue_bytes: int = 64 << 20
    max_links: int = 1024  # dialled and up, and as many accepted
    max_unreached: int = 256  # dialled and tried, but not answered yet
    max_waiting: int = 4096  # dialled, but not tried yet
    grace_s: float = 0.1  # to answer in, while other links wait to be tried
    max_links_of_one: int = 256  # links of one key at one IP address
    handshakes_per_s: float = 20.0  # of one caller
    handshakes_at_once: int = 100

    @property
    def ping_s(self) -> float:
        """The time between pings. A link survives three that are late or lost."""
        return min(PING_S, self.silence_s / 4)


class Reached(Value):
    """A dialled link is up: what is sent now leaves at once."""

    link: Link


class Retried(Value):
    """A dialled link found nobody. It is tried again; `Control.look_if_refused` says more."""

    link: Link


class Arrived(Value):
    """A message for us from the link's incarnation. Control handles pings and pongs without an event."""

    link: Link
    envelope: Envelope


class Lost(Value):
    """A link ended. Reported once: nothing more comes from it, and what is sent on it is dropped.

    `code` is one of bad_address, peer_unreachable, too_many_links, peer_disconnected, peer_silent, peer_restarted,
    peer_not_reading, messages_lost, link_over, frame_too_large, key_refused, key_revoked.
    """

    link: Link
    code: str
    reason: str


class Rejected(Value):
    """Input that was dropped because it is no message for us. `link` is None if it belongs to none."""

    link: Link | None
    code: str
    text: str


Event = Reached | Retried | Arrived | Lost | Rejected
