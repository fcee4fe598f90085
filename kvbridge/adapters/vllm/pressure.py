"""The blocks of prompts that are kept for others to fetch, and whether the engine is short of blocks meanwhile. Pure.

vLLM keeps a prompt's blocks until its agent has released them. It must not keep vLLM from resetting its prefix cache.
While other requests wait for blocks, agents are asked to release the oldest prompts that nobody has asked for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from kvbridge_proto.common import Blocks

from .block_tables import NULL_BLOCK, GroupTables

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

RECLAIM_AGAIN_S = 0.05  # before the agents are asked again: an answer takes a step or two
EASES_WITHIN_S = 0.2  # how long a running request may wait for blocks before it is preempted after all
EASE_PAUSE_S = 1.0  # from the start of one such wait to the next


class OfferedBlocks:
    """The blocks of requests that are over, kept for others to fetch, by request; and those that are pinned.

    Where vLLM clears blocks that a request gets, it does so before we can wait for who still reads them. So blocks that
    are read meanwhile are pinned (`pins`): they stay used, even if their request is preempted.
    """

    def __init__(self, pins: bool = False) -> None:
        self.pins = pins
        self._unpins: deque[list[int]] = deque()  # offers withdrawn in each step that is not over, oldest first
        self._pool: BlockPool | None = None
        self._of: dict[str, tuple[int, ...]] = {}
        self._pinned: dict[int, list[KVCacheBlock]] = {}  # by the number of their offer

    def __bool__(self) -> bool:
        return bool(self._of)

    def __str__(self) -> str:
        blocks = sum(len(ids) - ids.count(NULL_BLOCK) for ids in self._of.values())
        return f"{len(self._of)} prompts hold {blocks} blocks for others to fetch"

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    def hold(self, request_id: str, ids: Iterable[int]) -> None:
        self._of[request_id] = tuple(ids)

    def most(self, share: float) -> int:
        """So many blocks are this share of all."""
        return 0 if self._pool is None else int(share * self._pool.num_gpu_blocks)

    def free(self, request_id: str) -> None:
        self._of.pop(request_id, None)

    def pin(self, number: int, pieces: Iterable[Blocks]) -> None:
        assert self._pool is not None, "vLLM binds its pool before the first step"
        ids = set(chain.from_iterable(piece.ids for piece in pieces)) - {NULL_BLOCK}
        self._pinned[number] = blocks = [self._pool.blocks[block] for block in ids]
        for block in blocks:  # they are used: nobody else's, and not among the free ones
            block.ref_cnt += 1

    def unpin(self, number: int) -> None:
        if (blocks := self._pinned.pop(number, None)) is not None and self._pool is not None:
            self._pool.free_blocks(blocks)

    @property
    def is_unpinning(self) -> bool:
        """Whether blocks will be free in a step or two."""
        return any(self._unpins)

    def step_begins(self) -> None:
        self._unpins.append([])

    def withdrawn(self, number: int) -> None:
        """This offer, in the step that began last."""
        self._unpins[-1].append(number)

    def step_is_over(self) -> None:
        """The workers have waited for who read them."""
        for number in self._unpins.popleft() if self._unpins else ():
            self.unpin(number)

    @contextmanager
    def counted_as_free(self) -> Iterator[None]:
        """While vLLM resets its prefix cache: it refuses that while a block is used by anybody.

        Our blocks do not stand in the way: nothing computes with them any more, and without their hashes nobody finds
        them. A block that a live request shares is not counted.
        """
        pool = self._pool
        if pool is None or not (self._of or self._pinned):
            yield
            return
        users = Counter(block for ids in self._of.values() for block in set(ids) if block != pool.null_block.block_id)
        users.update(block.block_id for blocks in self._pinned.values() for block in blocks)
        free = pool.get_num_free_blocks

        def ours() -> int:  # counted when vLLM asks: before, it may preempt requests that share blocks with ours
            return sum(pool.blocks[block].ref_cnt == count for block, count in users.items())

        pool.get_num_free_blocks = lambda: free() + ours()
        try:
            yield
        finally:
            del pool.get_num_free_blocks


class Pressure:
    """Requests that have no blocks yet, and whether others' blocks are `kept` that could be theirs.

    `free_blocks` asks vLLM's pool. `limits` has its scheduler's `max_num_batched_tokens` and `max_num_seqs`.
    """

    def __init__(self, tables: GroupTables, limits: Any, kept: OfferedBlocks) -> None:
        self.free_blocks: Callable[[], int] | None = None
        self._tables = tables
        self._limits = limits
        self._tokens: dict[str, int] = {}  # prompts of all requests that are not over
        self._queue: dict[str, int] = {}  # prompts of those without blocks
        self._kept = kept
        self._is_tight = False
        self._asked_at = self._eased_at = float("-inf")

    @property
    def requests(self) -> set[str]:
        """All that are not over."""
        return set(self._tokens)

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
