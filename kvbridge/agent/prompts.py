"""Counts what becomes of our engine's prompts: which part of their tokens came by the bridge, and why the rest did not.

Nothing fails if a router names nothing to fetch: the engine computes every prompt itself, and only time is lost. So a
warning says it once a minute, with the likely cause. Each rank's agent counts for itself: an engine of two ranks counts
every prompt twice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from kvbridge_proto.engine import Computed, Done, Offer, Released

from .record import Role

log = logging.getLogger("kvbridge.prompts")

WARN_SOON_S = 5.0  # from the first such prompt to the first warning
WARN_EVERY_S = 60.0

UNTAGGED = "untagged"
UNFETCHED = ("offer_expired", "reclaimed")
SOME_FETCHED = "others were: decode engines are slow to ask, or their clients left"
NONE_FETCHED = "none was: does the router hand on what this engine answers, does the decode engine run with kvbridge?"

# By reason. The first are known before anything is asked for. All others are codes of failed wants.
CAUSES = {
    UNTAGGED: "they name nothing to fetch: does the router tag what it sends to this engine (docs/routers.md)?",
    "bad_params": "their kv_transfer_params cannot be read: the engine's log has each",
    "other_prompt": "what they name was prefilled for other tokens, another adapter, other media or another salt",
    "other_weights": "the engines' weights have other names, or none since a reset (docs/operations.md, New weights)",
    "reads_all": "they need every prompt token computed here: prompt_logprobs, echo with logprobs, some pooling",
    "does_not_travel": "embeddings, prompts that go on to grow, and media without hashes do not travel",
    "agent_missing": "not every rank of this engine has its agent",
    "deadline": "nobody offered what they name in time: does prefill run with kvbridge, and for the same prompts?",
    "peer_unreachable": "the agent that they name does not answer: its address, the network between",
    "offer_expired": "they came when what they name was held no longer: kvbridge_hold_s on prefill",
    "already_fetched": "an offer serves one request: another had it (a retry, another answer to the prompt)",
    "already_declined": "an offer serves one request: another had it, and needed none of it",
    "started_after_it_was_offered": "the prefill engine or its agent was replaced between prefill and decode",
    "unknown_offer": "the prefill side knows of no such offer: does the router name what that engine has answered?",
    "offer_over": "what they name was over when they came: the prefill engine's log has each",
    "prefill_refused": "the prefill engine refused its half of the call, or was hung up on: its log has each",
    "reclaimed": "they came when the prefill engine had needed its blocks: its pool is small for its load",
    "incompatible": "the two engines' KV cannot be converted: `kvbridge plan` says why",
    "not_sent": "this engine's agent was not there",
    "agent_lost": "this engine's agent ended meanwhile",
}


@dataclass(slots=True)
class Tally:
    prompts: int = 0
    tokens: int = 0


class Reminder:
    """When to warn of what keeps happening: soon after it began, then once a minute. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._due_at = float("inf")  # nothing to say
        self._said_at = float("-inf")

    def happened(self, now: float) -> None:
        if self._due_at == float("inf"):
            self._due_at = max(now + WARN_SOON_S, self._said_at + WARN_EVERY_S)

    def take(self, now: float) -> bool:
        """Whether to warn now: true once, until it happens again."""
        if now < self._due_at:
            return False
        self._due_at, self._said_at = float("inf"), now
        return True


class FetchOutcomes:
    """The counts of one engine in the last minute or two."""

    def __init__(self) -> None:
        self._computed: dict[str, Tally] = {}
        self._fetched = 0  # tokens
        self._since = float("-inf")
        self._offered_at = float("-inf")
        self._reminder = Reminder()

    def fetch(self, tokens: int, now: float) -> None:
        """Count tokens that came."""
        self._forget(now)
        self._fetched += tokens

    def compute(self, reason: str, tokens: int, now: float) -> None:
        """Count a prompt, and those of its tokens that are computed here and another engine could have sent."""
        self._forget(now)
        self._reminder.happened(now)
        found = self._computed.setdefault(reason, Tally())
        found.prompts += 1
        found.tokens += tokens

    def offer(self, now: float) -> None:
        """A prompt is offered to others."""
        self._offered_at = now

    def due(self, now: float) -> str:
        """The warning that is due now, mostly "". Counts start again when it was due.

        Untagged prompts do not matter if the engine fetches none and offers some: it is there to prefill.
        """
        if not self._reminder.take(now):
            return ""
        is_offering = now - self._offered_at < WARN_EVERY_S
        is_prefill = is_offering and not self._fetched and set(self._computed) == {UNTAGGED}
        said = "" if is_prefill else self._sentence()
        self._fetched, self._computed, self._since = 0, {}, now
        return said

    def _forget(self, now: float) -> None:
        """Drop what came long before anything was computed."""
        if not self._computed and now - self._since >= WARN_EVERY_S:
            self._fetched, self._since = 0, now

    def _sentence(self) -> str:
        prompts = sum(each.prompts for each in self._computed.values())
        tokens = sum(each.tokens for each in self._computed.values())
        most_first = sorted(self._computed.items(), key=lambda each: -each[1].tokens)
        causes = "; ".join(
            f"{each.prompts} {reason}" + (f" ({cause})" if (cause := CAUSES.get(reason)) else "")
            for reason, each in most_first
        )
        share = f"; {self._fetched / (self._fetched + tokens):.0%} of prompt tokens came by the bridge"
        return f"computed here lately, not fetched: {prompts} prompts of {tokens} tokens{share}: {causes}"


class Prompts:
    """Runs on the loop. `count` counts a prompt and its tokens in the metrics, and says under which reason."""

    kinds: Collection[type] = (Offer, Done, Released)

    def __init__(self, count: Callable[[str, int], str]) -> None:
        self._count = count
        self._share = FetchOutcomes()
        self._unfetched = 0
        self._fetched_at = float("-inf")
        self._last = ""
        self._reminder = Reminder()

    def computed(self, message: Computed, now: float) -> None:
        reason = self._count(message.reason, message.tokens)
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
