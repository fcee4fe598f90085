"""Whether the engine is short of blocks while prompts that nobody has fetched hold some. Pure.

vLLM keeps a prompt's blocks until its agent has released them. While other requests wait for blocks, agents are asked
to release the oldest prompts that nobody has asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from .block_tables import GroupTables
from .kept_blocks import KeptBlocks

RECLAIM_AGAIN_S = 0.05  # before the agents are asked again: an answer takes a step or two
EASES_WITHIN_S = 0.2  # how long a running request may wait for blocks before it is preempted after all
EASE_PAUSE_S = 1.0  # from the start of one such wait to the next


class Pressure:
    """Requests that have no blocks yet, and whether others' blocks are `kept` that could be theirs.

    `free_blocks` asks vLLM's pool. `limits` has its scheduler's `max_num_batched_tokens` and `max_num_seqs`.
    """

    def __init__(self, tables: GroupTables, limits: Any, kept: KeptBlocks) -> None:
        self.free_blocks: Callable[[], int] | None = None
        self._tables = tables
        self._limits = limits
        self._tokens: dict[str, int] = {}  # prompts of all requests that are not over
        self._queue: dict[str, int] = {}  # prompts of those without blocks
        self._kept = kept
        self._is_tight = False
        self._asked_at = self._eased_at = float("-inf")

    def came(self, request_id: str, tokens: int) -> None:
        self._tokens[request_id] = self._queue[request_id] = tokens

    def preempted(self, request_id: str) -> None:
        if request_id in self._tokens:
            self._queue[request_id] = self._tokens[request_id]

    def has_blocks(self, request_id: str) -> None:
        self._queue.pop(request_id, None)

    def ended(self, request_id: str) -> None:
        self._tokens.pop(request_id, None)
        self._queue.pop(request_id, None)

    def should_wait(self, now: float) -> bool:
        """Whether a running request that gets no block should wait: for EASES_WITHIN_S, at most every EASE_PAUSE_S."""
        if not self._kept:
            return False
        self._is_tight = True
        if now - self._eased_at > EASE_PAUSE_S:
            self._eased_at = now
        return now - self._eased_at < EASES_WITHIN_S

    def short_of(self, now: float) -> int:
        """How many blocks to ask the agents for in this step; 0 if enough are free, or they were asked just now."""
        is_tight, self._is_tight = self._is_tight, False
        if not self._kept or self.free_blocks is None or now - self._asked_at < RECLAIM_AGAIN_S:
            return 0
        short = self._needed() + is_tight - self.free_blocks()
        if short <= 0:
            return 0
        self._asked_at = now
        return short

    def _needed(self) -> int:
        """Blocks for what the next step could compute: at least the whole first request, if one more may run."""
        needed, left = 0, self._limits.max_num_batched_tokens
        may_run = max(0, self._limits.max_num_seqs - (len(self._tokens) - len(self._queue)))
        for tokens in islice(self._queue.values(), may_run):
            needed += self._tables.count(tokens)
            left -= tokens
            if left <= 0:
                break
        return needed
