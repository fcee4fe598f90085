"""Transfers that are over here but whose source has not said that it writes no more: who could say so. Pure."""

from __future__ import annotations

from collections.abc import Mapping


class Doubts:
    """By transfer: the address it was claimed at, and which start of the agent there has not drained it."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, str]] = {}

    def add(self, transfer: str, address: str, boot: str) -> None:
        self._of[transfer] = address, boot

    def settle(self, transfer: str) -> None:
        self._of.pop(transfer, None)

    def clear(self) -> None:
        """What they could have written is nothing any more."""
        self._of.clear()

    def is_any(self, address: str) -> bool:
        return any(at == address for at, _ in self._of.values())

    def at(self, address: str, boot: str) -> list[tuple[str, str]]:
        """The transfers that this start, who answers at the address, could settle: its own, and those of another start
        that was claimed of there, if it knows that one to be dead. With each whose it was."""
        return [(transfer, of) for transfer, (at, of) in self._of.items() if of == boot or at == address]

    def can_settle(self, transfer: str, boot: str, boots: Mapping[str, str]) -> bool:
        """Whether this start could settle that one; `boots` says who answers at an address, by whatever link."""
        at, of = self._of.get(transfer, ("", ""))
        return bool(of) and boot in (of, boots.get(at))
