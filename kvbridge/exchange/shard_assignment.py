"""Which session gives which rows: the same for every want, so worked out once while the sessions last. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvbridge_proto.peer import Take
from kvbridge_proto.pool import Pool

from ..errors import PeerError
from ..geometry.shard import assign
from .session import Session, are_same, engine_ranks, rank_index

Takes = tuple[tuple[Take, ...], ...]


class ShardAssignment:
    """What was assigned last, by the address that wants name."""

    def __init__(self) -> None:
        self._assigned: dict[str, tuple[list[Session], Pool, Takes]] = {}

    def takes(self, sender: str, sessions: Sequence[Session], pool: Pool) -> Takes:
        """What `pool` takes from each of these sessions, all with the engine that is reached at `sender`.

        Raises PeerError unless they are all the ranks of one engine and hold every row.
        """
        known = self._assigned.get(sender)
        if known is None or known[1] is not pool or not are_same(known[0], sessions):
            _check_ranks(sessions)
            known = list(sessions), pool, assign([session.peer_pool for session in sessions], pool)
            self._assigned[sender] = known
        return known[2]

    def forget(self) -> None:
        """A session is over: keep none of its engine's."""
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
