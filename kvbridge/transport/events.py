"""The settings of a Control, and the events it reports: messages, links up or lost, dropped input."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge_proto.peer import Envelope

from .link import Link

PING_S = 1.0


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


@dataclass(frozen=True, slots=True)
class Reached:
    """A dialled link is up: what is sent now leaves at once."""

    link: Link


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message for us from the link's incarnation. Control handles pings and pongs without an event."""

    link: Link
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Lost:
    """A link ended. Reported once: nothing more comes from it, and what is sent on it is dropped.

    `code` is one of bad_address, peer_unreachable, too_many_links, peer_disconnected, peer_silent, peer_restarted,
    peer_not_reading, messages_lost, link_over, frame_too_large, key_refused, key_revoked.
    """

    link: Link
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """Input that was dropped because it is no message for us. `link` is None if it belongs to none."""

    link: Link | None
    code: str
    text: str


Event = Reached | Arrived | Lost | Rejected
