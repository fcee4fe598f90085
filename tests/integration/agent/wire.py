"""One end of a link to another agent, for tests that play that agent."""

from __future__ import annotations

from typing import Any


class Wire:
    """A link that keeps what was sent."""

    version, is_lost, is_up, sends_by_pipe = 1, False, True, False

    def __init__(self, address: str, key: str = "", peer_incarnation: str = "", *, is_dialled: bool = False) -> None:
        self.address, self.key, self.peer_incarnation, self.is_dialled = address, key, peer_incarnation, is_dialled
        self.sent: list[Any] = []

    def send(self, body: Any) -> bool:
        self.sent.append(body)
        return True

    def close(self) -> None:
        self.is_lost = True

    def said(self, kind: type) -> list[Any]:
        return [body for body in self.sent if isinstance(body, kind)]
