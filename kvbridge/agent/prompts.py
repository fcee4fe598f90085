"""Counts what becomes of our engine's prompts, wanted and offered, and logs it once a minute.

Each rank's agent counts for itself: an engine of two ranks counts every prompt twice.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from kvbridge_proto.engine import Computed, Done, Offer, Released

from ..fetch_outcomes import WARN_EVERY_S, FetchOutcomes, Reminder
from .metrics import Metrics
from .record import Role

log = logging.getLogger("kvbridge.prompts")

UNFETCHED = ("offer_expired", "reclaimed")
SOME_FETCHED = "others were: decode engines are slow to ask, or their clients left"
NONE_FETCHED = "none was: does the router hand on what this engine answers, does the decode engine run with kvbridge?"


class Prompts:
    """Runs on the loop."""

    kinds: Collection[type] = (Offer, Done, Released)

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._share = FetchOutcomes()
        self._unfetched = 0
        self._fetched_at = float("-inf")
        self._last = ""
        self._reminder = Reminder()

    def computed(self, message: Computed, now: float) -> None:
        reason = self._metrics.prompt_computed(message.reason, message.tokens)
        self._share.compute(reason, message.tokens, now)

    def see(self, event: Any, role: Role, now: float) -> None:
        match event:
            case Offer(is_last=is_last, tokens=tokens):
                if is_last and tokens:
                    self._share.offer(now)
            case Done(tokens=tokens):
                self._share.fetch(tokens, now)
            case Released(code="", is_declined=False):
                self._fetched_at = now
            case Released(code=code, reason=reason) if code in UNFETCHED:
                self._reminder.happened(now)
                self._unfetched += 1
                self._last = f"{code}: {reason}"

    def tick(self, now: float) -> None:
        if said := self._share.due(now):
            log.warning("%s", said)
        if self._reminder.take(now):
            self._say_unfetched(now)

    def _say_unfetched(self, now: float) -> None:
        """Warn of prompts that were computed for nothing: the cause is outside this agent."""
        cause = SOME_FETCHED if now - self._fetched_at < WARN_EVERY_S else NONE_FETCHED
        log.warning("prompts that nobody fetched: %d, the last: %s; %s", self._unfetched, self._last, cause)
        self._unfetched = 0
