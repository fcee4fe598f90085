"""What one worker owes its scheduler: each awaited receive and each held send is reported once, and nothing else. Pure.

vLLM asserts on a report that it does not expect, and such an assertion ends the engine. So everything that ends is
looked up here first, and what nobody waits for is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Receive:
    """A request that waits for `tokens` tokens of its prompt, and the blocks that they go into."""

    request_id: str
    blocks: tuple[int, ...]
    tokens: int


@dataclass(slots=True)
class Reports:
    """What to tell the scheduler now. A failed receive is in `received` as well."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)


class Pending:
    """Receives and sends that the scheduler waits for, by the number of their want or offer."""

    def __init__(self) -> None:
        self.receives: dict[int, Receive] = {}
        self.sends: dict[int, str] = {}  # request ids
        self._reports = Reports()

    @property
    def has_news(self) -> bool:
        """Whether there are reports that let a request go on or free its blocks."""
        return bool(self._reports.sent or self._reports.received)

    def take(self) -> Reports:
        """What has come since the last call."""
        reports, self._reports = self._reports, Reports()
        return reports

    def awaited(self, number: int, receive: Receive) -> None:
        self.receives[number] = receive

    def refused(self, receive: Receive) -> None:
        """Report a receive as failed. It need not be awaited here."""
        self._reports.received.add(receive.request_id)
        self._reports.failed.add(receive.request_id)
        self._reports.failed_blocks.update(receive.blocks)

    def received(self, number: int) -> None:
        if (receive := self.receives.pop(number, None)) is not None:
            self._reports.received.add(receive.request_id)

    def failed(self, number: int) -> None:
        if (receive := self.receives.pop(number, None)) is not None:
            self.refused(receive)

    def held(self, number: int, request_id: str, is_open: bool) -> None:
        """The scheduler keeps this offer's blocks until the offer ends. One that is not open has already ended."""
        if is_open:
            self.sends[number] = request_id
        else:
            self._reports.sent.add(request_id)

    def sent(self, number: int) -> None:
        if (request_id := self.sends.pop(number, None)) is not None:
            self._reports.sent.add(request_id)
