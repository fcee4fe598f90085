"""Whether our engine adopts a sender's scales: asked once per set of scales, then remembered. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvbridge_proto.engine import Adopt, Scales
from kvbridge_proto.pool import Pool

from ..errors import EngineError
from ..geometry.scales import other_scales, sender_scales
from .actions import Action, Tell
from .session import AttachedEngine, Session, are_same

MOST_ANSWERS = 64  # refusals kept; a sender that calibrates at each start brings new scales each time


class Adoption:
    """What our engine was asked about scales, and what it answered. The policy is the engine's (Attach)."""

    def __init__(self) -> None:
        self._asked: dict[tuple[Scales, ...], int] = {}  # -> the revision that answers it
        self._refusals: dict[int, str] = {}
        self._last = 0
        self._agreed: dict[str, tuple[list[Session], Pool]] = {}

    def question(self, sender: str, sessions: Sequence[Session], engine: AttachedEngine) -> list[Action] | None:
        """What to ask the engine before rows are taken from these sessions. None if the scales agree.

        Empty while an answer is awaited: the want waits for it. Raises EngineError if the engine keeps other scales.
        """
        if engine.policy != "adopt" or self._is_known(sender, sessions, engine):
            return None
        scales = sender_scales([session.peer_pool for session in sessions], engine.pool)
        difference = other_scales(scales, engine.pool)
        if difference is None:
            self._agreed[sender] = list(sessions), engine.pool
            return None
        revision = self._asked.get(scales)
        if revision is None:
            self._last = revision = max(self._last, engine.revision) + 1
            self._forget_old()
            self._asked[scales] = revision
            return [Tell(Adopt(revision=revision, scales=scales))]
        if revision not in self._refusals and revision > engine.revision:
            return []
        raise EngineError("adopt_refused", f"{difference} ({self._refusals.get(revision, 'the engine took others')})")

    def declined(self, revision: int, reason: str) -> bool:
        """The engine keeps its scales. False if it was not asked."""
        if revision not in self._asked.values():
            return False
        self._refusals[revision] = reason
        return True

    def forget(self) -> None:
        """Drop all agreements: a session is over."""
        self._agreed.clear()

    def _is_known(self, sender: str, sessions: Sequence[Session], engine: AttachedEngine) -> bool:
        """Whether these are the same session and pool objects. Comparing scales costs more than the rest of a want."""
        before, pool = self._agreed.get(sender, ([], engine.pool))
        return pool is engine.pool and are_same(before, sessions)

    def _forget_old(self) -> None:
        if len(self._refusals) >= MOST_ANSWERS:
            self._asked = {scales: r for scales, r in self._asked.items() if r not in self._refusals}
            self._refusals.clear()
