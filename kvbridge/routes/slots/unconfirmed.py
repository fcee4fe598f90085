"""Which transfers that have ended may still write to our slots. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict

from kvbridge_proto.peer import ProcessCard

MOST_ASKED = 4096  # agents that were asked; four times as many as can be dialled at once


class UnconfirmedTransfers:
    """Ended transfers whose sender has not confirmed yet that it stopped writing: their slots are quarantined.

    Each is kept with its sender's address, incarnation and key. Other incarnations are asked about it too: one may know
    that the sender is dead. Anybody can name any incarnation, so one counts only together with the key of the agent
    from which the transfer was claimed. A successor is asked wherever it is met, as an agent that moves gets another
    address. Without keys anybody could be the successor: only who answers at the address is asked.
    """

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, str, str, int]] = {}  # by transfer: (address, incarnation, key, number)
        self.far: set[str] = set()  # transfers whose sender writes through our fabric only
        self._processes: dict[str, ProcessCard] = {}  # by transfer: its sender's, where we can see it
        self._at: Counter[str] = Counter()  # how many, by address
        self._last = 0  # they are numbered as they come
        # By agent: the number of the last transfer when it was asked. It is asked about all there are.
        self._asked: OrderedDict[tuple[str, str, str], int] = OrderedDict()

    def add(
        self,
        transfer: str,
        address: str,
        incarnation: str,
        key: str,
        is_far: bool = False,
        process: ProcessCard | None = None,
    ) -> None:
        self.settle(transfer)
        self._last += 1
        self._of[transfer] = address, incarnation, key, self._last
        if is_far:
            self.far.add(transfer)
        if process is not None:
            self._processes[transfer] = process
        self._at[address] += 1

    def settle(self, transfer: str) -> None:
        if transfer not in self._of:
            return
        at, _, _, _ = self._of.pop(transfer)
        self._at[at] -= 1
        if not self._at[at]:
            del self._at[at]
        self.far.discard(transfer)
        self._processes.pop(transfer, None)
        if not self._of:
            self.clear()

    def clear(self) -> None:
        """Forget all: the slots they could write no longer exist."""
        self._of.clear()
        self._at.clear()
        self._asked.clear()
        self.far.clear()
        self._processes.clear()
        self._last = 0

    @property
    def processes(self) -> set[ProcessCard]:
        """Whose end would prove something."""
        return set(self._processes.values())

    def of(self, process: ProcessCard) -> list[str]:
        """The transfers that this process may still write."""
        return [transfer for transfer, its in self._processes.items() if its == process]

    def is_any(self, address: str) -> bool:
        return address in self._at

    def meet(self, address: str, incarnation: str, key: str) -> list[tuple[str, str]]:
        """This incarnation answers at the address: ask it about these, as (transfer, the sender's incarnation).

        These are its own transfers, and those of others that it may know to be dead.
        """
        found = [
            (transfer, of)
            for transfer, (at, of, its, _) in self._of.items()
            if its == key and (of == incarnation or at == address or key)
        ]
        if any(of != incarnation for _, of in found):
            self._asked[_asked_as(address, incarnation, key)] = self._last
            self._asked.move_to_end(_asked_as(address, incarnation, key))
            if len(self._asked) > MOST_ASKED:
                self._asked.popitem(last=False)
        return found

    def meet_again(self, address: str, incarnation: str, key: str) -> list[tuple[str, str]]:
        """The same for one with an open session: only what it has not been asked about, as it ended later."""
        asked = self._asked.get(_asked_as(address, incarnation, key), 0)
        met = self.meet(address, incarnation, key)
        return [(transfer, of) for transfer, of in met if self._of[transfer][3] > asked and of != incarnation]

    def can_settle(self, transfer: str, incarnation: str, key: str) -> bool:
        """Whether this incarnation, by any link, may settle the transfer: it is the sender, or was asked."""
        at, of, its, number = self._of.get(transfer, ("", "", "", 0))
        asked = self._asked.get(_asked_as(at, incarnation, key), 0)
        return bool(of) and key == its and (incarnation == of or number <= asked)


def _asked_as(address: str, incarnation: str, key: str) -> tuple[str, str, str]:
    """Who was asked. One with a key is asked wherever it is met, so its address does not matter."""
    return "" if key else address, incarnation, key
