"""What a control is set to, and what it tells: messages, lost links, and what was dropped."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge_proto.peer import Envelope

from .link import Link

PING_S = 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Times in seconds. A peer that sends nothing for `silence_s`, pings included, is lost.

    That only matters for a stalled peer or a broken path: a dead one's connection ends at once. Engines that spin on
    `sched_yield` have kept an agent beside them off the processor for 4 s (2 cores, Linux 6.18, 2026-11-21).
    """

    connect_s: float = 5.0
    silence_s: float = 15.0
    frame_bytes: int = 4 << 20
    queue_bytes: int = 64 << 20
    max_links: int = 1024  # dialled and answered, and as many accepted
    max_unreached: int = 256  # dialled and tried, and nobody has answered yet
    max_waiting: int = 4096  # dialled, and not tried yet
    grace_s: float = 0.1  # to answer in, where others wait for their turn
    max_links_of_one: int = 256  # key at one IP address
    handshakes_per_s: float = 20.0  # of one caller
    handshakes_at_once: int = 100

    @property
    def ping_s(self) -> float:
        """Three pings may be late or lost before a link is."""
        return min(PING_S, self.silence_s / 4)


@dataclass(frozen=True, slots=True)
class Reached:
    """A link that we dialled is up: what is sent leaves at once."""

    link: Link


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message for us from the incarnation the link is with. Pings and pongs are answered here and do not show."""

    link: Link
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Lost:
    """The link's end, said once: nothing more comes from it, what is sent on it is dropped.

    `code` is one of peer_unreachable, too_many_links, peer_disconnected, peer_silent, peer_restarted,
    peer_not_reading, messages_lost, frame_too_large, key_refused, key_revoked.
    """

    link: Link
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """Something that is not a message for us, dropped. `link` is None if it came from nobody we know."""

    link: Link | None
    code: str
    text: str


Event = Reached | Arrived | Lost | Rejected
