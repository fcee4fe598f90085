"""Counts what becomes of our engine's prompts, wanted and offered, and logs it once a minute.

Each rank's agent counts for itself: an engine of two ranks counts every prompt twice.
"""

from __future__ import annotations

import logging

from kvbridge_proto.engine import Computed, Done, Offer, Released, ToEngine

from ..fetch_outcomes import EVERY_S, FetchOutcomes, Reminder
from .metrics import Metrics

log = logging.getLogger("kvbridge.prompts")

UNFETCHED = ("offer_expired", "reclaimed")
SOME_FETCHED = "others were: decode engines are slow to ask, or their clients left"
NONE_FETCHED = "none was: does the router hand on what this engine answers, does the decode engine run with kvbridge?"


class Prompts:
    """Runs on the loop."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._share = FetchOutcomes()
        self._unfetched = 0
        self._fetched_at = float("-inf")
        self._last = ""
        self._reminder = Reminder()

    def offered(self, offer: Offer, now: float) -> None:
        if offer.is_last and offer.tokens:
            self._share.offer(now)

    def computed(self, message: Computed, now: float) -> None:
        reason = self._metrics.prompt_computed(message.reason, message.tokens)
        self._share.compute(reason, message.tokens, now)

    def count(self, message: ToEngine, now: float) -> None:
        match message:
            case Done(tokens=tokens):
                self._metrics.prompt_fetched(tokens)
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
        cause = SOME_FETCHED if now - self._fetched_at < EVERY_S else NONE_FETCHED
        log.warning("prompts that nobody fetched: %d, the last: %s; %s", self._unfetched, self._last, cause)
        self._unfetched = 0
