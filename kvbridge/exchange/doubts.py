"""Transfers that are over here but whose source has not said that it writes no more: who could say so. Pure."""

from __future__ import annotations


class Doubts:
    """By transfer: the address it was claimed at, and which start of the agent there has not drained it."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, str]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def add(self, transfer: str, address: str, boot: str) -> None:
        self._of[transfer] = address, boot

    def boot(self, transfer: str) -> str | None:
        """Whose word would settle it; None if there is no doubt."""
        doubt = self._of.get(transfer)
        return None if doubt is None else doubt[1]

    def settle(self, transfer: str) -> None:
        self._of.pop(transfer, None)

    def clear(self) -> None:
        """What they could have written is nothing any more."""
        self._of.clear()

    def is_any(self, address: str) -> bool:
        return any(at == address for at, _ in self._of.values())

    def transfers(self, boot: str) -> list[str]:
        return [transfer for transfer, (_, doubted) in self._of.items() if doubted == boot]

    def replaced(self, address: str, boot: str) -> list[str]:
        """This start answers at the address: those before it are gone. Which they were; doubts about them are over."""
        gone = sorted({doubted for at, doubted in self._of.values() if at == address and doubted != boot})
        self._of = {transfer: doubt for transfer, doubt in self._of.items() if doubt[1] not in gone}
        return gone
