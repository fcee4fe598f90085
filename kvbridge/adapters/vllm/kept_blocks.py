"""The blocks that vLLM keeps for others to fetch, and how it can reset its prefix cache meanwhile. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .block_tables import NULL_BLOCK

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class KeptBlocks:
    """The blocks of requests that are over, kept for others to fetch, by request."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._of: dict[str, tuple[int, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def __str__(self) -> str:
        blocks = sum(len(ids) - ids.count(NULL_BLOCK) for ids in self._of.values())
        return f"{len(self._of)} prompts hold {blocks} blocks for others to fetch"

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    def hold(self, request_id: str, ids: Iterable[int]) -> None:
        self._of[request_id] = tuple(ids)

    def free(self, request_id: str) -> None:
        self._of.pop(request_id, None)

    @contextmanager
    def counted_as_free(self) -> Iterator[None]:
        """While vLLM resets its prefix cache: it refuses that while a block is used by anybody.

        Our blocks do not stand in the way: nothing computes with them any more, and without their hashes nobody finds
        them. A block that a live request shares is not counted.
        """
        pool = self._pool
        if pool is None or not self._of:
            yield
            return
        users = Counter(block for ids in self._of.values() for block in set(ids) if block != pool.null_block.block_id)
        free = pool.get_num_free_blocks

        def ours() -> int:  # counted when vLLM asks: before, it may preempt requests that share blocks with ours
            return sum(pool.blocks[block].ref_cnt == count for block, count in users.items())

        pool.get_num_free_blocks = lambda: free() + ours()
        try:
            yield
        finally:
            del pool.get_num_free_blocks
