"""The agents that prefill for our engine, by address: the sessions that are open with them. Pure."""

from __future__ import annotations

from .session import Session, engine_ranks, rank_index


class SenderSessions:
    """Open sessions, by each address that wants have named."""

    def __init__(self) -> None:
        self.open: dict[str, Session] = {}

    def needed(self, sender: str) -> list[str]:
        """Addresses of all ranks of the engine that is reached at `sender`, as far as they are known."""
        first = self.open.get(sender)
        if first is None:
            return [sender]
        own = rank_index(first.peer_pool)
        size = first.peer_pool.shard.tp_size
        others = [rank.address for rank in first.ranks if rank.pp_rank * size + rank.tp_rank != own]
        return [sender, *others]

    def missing(self, sender: str) -> list[str]:
        """Those of them that there is no session with."""
        return [address for address in self.needed(sender) if address not in self.open]

    def lacks(self, sender: str) -> str:
        """Who is missing for a claim, in words; nothing if nobody is."""
        if missing := self.missing(sender):
            return ", ".join(missing)
        if self.is_whole(sender):
            return ""
        known, of = len(self.needed(sender)), engine_ranks(self.open[sender].peer_pool)
        return f"{of - known} of {of} ranks, for its engine has told {sender} of {known} only"

    def reached(self, sender: str) -> dict[str, Session]:
        """The sessions with those that there is one with."""
        return {address: self.open[address] for address in self.needed(sender) if address in self.open}

    def is_whole(self, sender: str) -> bool:
        """Whether the addresses of all its engine's ranks are known."""
        first = self.open.get(sender)
        return first is not None and len(self.needed(sender)) >= engine_ranks(first.peer_pool)
