"""What one worker owes its scheduler: each awaited receive and each held send is reported once, and nothing else. Pure.

vLLM asserts on a report it does not expect, and such an assertion ends the engine. So every answer of the agent is
looked up here first; names that nobody waits for are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Receive:
    """`late_at` is when the agent's silence becomes suspicious; `is_nudged` once it was asked to stop."""

    request_id: str
    late_at: float
    blocks: tuple[int, ...] = ()
    is_nudged: bool = False


@dataclass(slots=True)
class Send:
    """`request_id` is "" until the scheduler keeps the blocks for us; the agent may be done with them before."""

    late_at: float
    request_id: str = ""
    is_released: bool = False
    is_nudged: bool = False


@dataclass(slots=True)
class Reports:
    """What to tell the scheduler now. A failed receive is in `received` as well."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)


class Ledger:
    """Receives and sends under way, by the names that messages give them."""

    def __init__(self) -> None:
        self.receives: dict[str, Receive] = {}
        self.sends: dict[str, Send] = {}
        self._reports = Reports()

    @property
    def is_waiting(self) -> bool:
        """Whether the engine may be stepping only for an answer of the agent."""
        return bool(self.receives or self.sends) and not self._reports.sent and not self._reports.received

    def take(self) -> Reports:
        """What came since the last time."""
        reports, self._reports = self._reports, Reports()
        return reports

    def wanted(self, name: str, receive: Receive) -> None:
        self.receives[name] = receive

    def received(self, name: str) -> None:
        receive = self.receives.pop(name, None)
        if receive is not None:
            self._reports.received.add(receive.request_id)

    def failed(self, name: str) -> None:
        receive = self.receives.pop(name, None)
        if receive is not None:
            self._reports.received.add(receive.request_id)
            self._reports.failed.add(receive.request_id)
            self._reports.failed_blocks.update(receive.blocks)

    def offered(self, name: str, late_at: float) -> None:
        send = self.sends.setdefault(name, Send(late_at))
        send.late_at = late_at

    def awaited(self, name: str, late_at: float) -> None:
        """Somebody waits for this offer: its agent may keep it for longer."""
        if (send := self.sends.get(name)) is not None and not send.is_nudged:
            send.late_at = max(send.late_at, late_at)

    def held(self, name: str, request_id: str, late_at: float) -> None:
        """The scheduler waits for this one. One we do not know was never offered here, or is over already."""
        send = self.sends.get(name)
        if send is None or send.is_released:
            self.sends.pop(name, None)
            self._reports.sent.add(request_id)
        else:
            send.request_id = request_id
            send.late_at = min(send.late_at, late_at)

    def released(self, name: str) -> None:
        send = self.sends.get(name)
        if send is None:
            return
        if send.request_id:
            del self.sends[name]
            self._reports.sent.add(send.request_id)
        else:
            send.is_released = True

    def is_read(self, name: str) -> bool:
        """Whether the agent may still read these blocks."""
        return name in self.sends and not self.sends[name].is_released

    def forgotten(self, name: str) -> None:
        """An offer whose blocks the scheduler has taken back (preemption): nobody waits for it."""
        self.sends.pop(name, None)

    def over(self) -> None:
        """The agent is gone and touches nothing any more: receives have failed, sends are done."""
        for name in list(self.receives):
            self.failed(name)
        self.unread()

    def unread(self) -> None:
        """What the agent reads from here on counts no more: sends are done."""
        for name in list(self.sends):
            self.released(name)
        # What is not held yet is unknown from here on, and `held` reports it at once.
        self.sends.clear()

    def next_late(self, now: float) -> list[tuple[str, Receive | Send]]:
        """Everything the agent should have answered by now."""
        late: list[tuple[str, Receive | Send]] = [(name, r) for name, r in self.receives.items() if now > r.late_at]
        late += [(name, s) for name, s in self.sends.items() if now > s.late_at and not s.is_released]
        return late
