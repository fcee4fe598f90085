"""Transfers that are over here but whose sender has not said that it writes no more: who could say so. Pure."""

from __future__ import annotations

from collections import Counter


class UndrainedTransfers:
    """By transfer: the address it was claimed at, which start of the agent there has not drained it, its key.

    Who answers at such an address is kept as long as something is in doubt there, and of no other address. A
    incarnation is a word that anybody can say: it counts only with the key that the transfer was claimed of.
    """

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, str, str]] = {}
        self._at: Counter[str] = Counter()  # how many, by address
        self._met: dict[str, tuple[str, str]] = {}  # an address of those -> the start that was met there last, its key

    def add(self, transfer: str, address: str, incarnation: str, key: str) -> None:
        self.settle(transfer)
        self._of[transfer] = address, incarnation, key
        self._at[address] += 1

    def settle(self, transfer: str) -> None:
        if transfer not in self._of:
            return
        at, _, _ = self._of.pop(transfer)
        self._at[at] -= 1
        if not self._at[at]:
            del self._at[at]
            self._met.pop(at, None)

    def clear(self) -> None:
        """What they could have written is nothing any more."""
        self._of.clear()
        self._at.clear()
        self._met.clear()

    def is_any(self, address: str) -> bool:
        return address in self._at

    def meet(self, address: str, incarnation: str, key: str) -> list[tuple[str, str]]:
        """This start answers at the address. The transfers that it could settle: its own, and those of another start
        that was claimed of there, if it knows that one to be dead. With each whose it was."""
        if self.is_any(address):
            self._met[address] = incarnation, key
        mine = [(transfer, at, of) for transfer, (at, of, its) in self._of.items() if its == key]
        return [(transfer, of) for transfer, at, of in mine if of == incarnation or at == address]

    def can_settle(self, transfer: str, incarnation: str, key: str) -> bool:
        """Whether this start could settle that one: its own, or of where it was met, by whatever link it says so."""
        at, of, its = self._of.get(transfer, ("", "", ""))
        return bool(of) and key == its and (incarnation == of or self._met.get(at) == (incarnation, key))
