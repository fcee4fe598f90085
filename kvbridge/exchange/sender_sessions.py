"""The receiver's state about its senders: open sessions, which rank holds which rows, which transfers may still write.

The sender has none of this. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvbridge_proto.peer import Take
from kvbridge_proto.pool import Pool

from ..errors import PeerError
from ..geometry.shard import assign
from .session import Session, are_same, engine_ranks, rank_index


class SenderSessions:
    """Open sessions, by address."""

    def __init__(self) -> None:
        self.open: dict[str, Session] = {}

    def needed(self, sender: str) -> list[str]:
        """Addresses of all known ranks of the engine at `sender`."""
        first = self.open.get(sender)
        if first is None:
            return [sender]
        own = rank_index(first.peer_pool)
        size = first.peer_pool.shard.tp_size
        others = [rank.address for rank in first.ranks if rank.pp_rank * size + rank.tp_rank != own]
        return [sender, *others]

    def missing(self, sender: str) -> list[str]:
        """The needed addresses without a session."""
        return [address for address in self.needed(sender) if address not in self.open]

    def lacks(self, sender: str) -> str:
        """Which ranks are missing for a claim, as text; "" if none."""
        if missing := self.missing(sender):
            return ", ".join(missing)
        if self.is_whole(sender):
            return ""
        known, of = len(self.needed(sender)), engine_ranks(self.open[sender].peer_pool)
        return f"{of - known} of {of} ranks, for its engine has told {sender} of {known} only"

    def reached(self, sender: str) -> dict[str, Session]:
        """The open sessions with the needed addresses."""
        return {address: self.open[address] for address in self.needed(sender) if address in self.open}

    def is_whole(self, sender: str) -> bool:
        """Whether the addresses of all ranks of the engine at `sender` are known."""
        first = self.open.get(sender)
        return first is not None and len(self.needed(sender)) >= engine_ranks(first.peer_pool)


Takes = tuple[tuple[Take, ...], ...]


class ShardAssignment:
    """The last assignment of rows to ranks, by the sender address in the wants."""

    def __init__(self) -> None:
        self._assigned: dict[str, tuple[list[Session], Pool, Takes]] = {}

    def takes(self, sender: str, sessions: Sequence[Session], pool: Pool) -> Takes:
        """What `pool` takes from each of these sessions with the ranks of the engine at `sender`.

        Raises PeerError unless they are all the ranks of one engine and hold every row.
        """
        known = self._assigned.get(sender)
        if known is None or known[1] is not pool or not are_same(known[0], sessions):
            _check_ranks(sessions)
            known = list(sessions), pool, assign([session.peer_pool for session in sessions], pool)
            self._assigned[sender] = known
        return known[2]

    def forget(self) -> None:
        """Drop all assignments: a session is over."""
        self._assigned.clear()


def _check_ranks(sessions: Sequence[Session]) -> None:
    """Raises PeerError unless these are all the ranks of one engine."""
    first = sessions[0].peer_pool
    for session in sessions:
        if session.peer_pool.engine.id != first.engine.id:
            reason = f"engine.id: {first.engine.id} at the first agent, {session.peer_pool.engine.id} at another"
            raise PeerError("sender_ranks_mismatch", reason)
    found = sorted(rank_index(session.peer_pool) for session in sessions)
    if found != list(range(engine_ranks(first))):
        raise PeerError("sender_ranks_mismatch", f"ranks: expected {engine_ranks(first)}, the agents hold {found}")


class UndrainedTransfers:
    """Ended transfers whose sender has not confirmed yet that it stopped writing: their slots are quarantined.

    Each is kept with its sender's address, incarnation and key. For each such address the last incarnation met there is
    remembered, until all its transfers are settled. Anybody can name any incarnation, so one counts only together with
    the key of the agent from which the transfer was claimed.
    """

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, str, str]] = {}  # by transfer: (address, incarnation, key)
        self._at: Counter[str] = Counter()  # how many, by address
        self._met: dict[str, tuple[str, str]] = {}  # by address: the last (incarnation, key) met there

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
        """Forget all: the slots they could write no longer exist."""
        self._of.clear()
        self._at.clear()
        self._met.clear()

    def is_any(self, address: str) -> bool:
        return address in self._at

    def meet(self, address: str, incarnation: str, key: str) -> list[tuple[str, str]]:
        """This incarnation answers at the address. Returns what it may settle, as (transfer, the sender's incarnation).

        These are its own transfers, and those claimed at this address from another incarnation, which it may know to be
        dead.
        """
        if self.is_any(address):
            self._met[address] = incarnation, key
        mine = [(transfer, at, of) for transfer, (at, of, its) in self._of.items() if its == key]
        return [(transfer, of) for transfer, at, of in mine if of == incarnation or at == address]

    def can_settle(self, transfer: str, incarnation: str, key: str) -> bool:
        """Whether this incarnation may settle the transfer: it is the sender, or was the last one met at its address.

        The link it uses does not matter.
        """
        at, of, its = self._of.get(transfer, ("", "", ""))
        return bool(of) and key == its and (incarnation == of or self._met.get(at) == (incarnation, key))
