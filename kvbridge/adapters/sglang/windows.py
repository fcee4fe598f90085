"""Which slots of the window half of a `SWAKVPool`, or of DeepSeek V4's pool, an offer or a want names.

SGLang gives a token a slot in both halves. The one in the window half is `full_to_swa_index_mapping[slot in the full
half]`; 0, the padding page, once it has been given up. While a prompt is computed in chunks, slots that no later token
sees are given to others. So the window comes with the last offer, and only the slots that are then the request's: it
holds them, by a lock of the prefix cache or by itself, until its sender is over.

Both halves are allocated in step, so a page of tokens is a page in both.
"""

from __future__ import annotations

from typing import Any

from kvbridge_proto.common import Blocks

from ...errors import EngineError
from .compressed import is_compressed
from .pool import WINDOW_GROUP, has_windows


def offered(queue: Any, req: Any, tokens: int) -> tuple[Blocks, ...]:
    """The window's blocks of a prompt of `tokens` computed tokens. Raises EngineError."""
    pool = queue.token_to_kv_pool
    if not (has_windows(pool) or is_compressed(pool)) or not tokens:
        return ()
    allocator = queue.scheduler.token_to_kv_pool_allocator
    page = int(allocator.page_size)
    first = first_held(tokens, int(queue.scheduler.sliding_window_size), page)
    slots = queue.scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, first:tokens:page]
    pages = (allocator.translate_swa_indices_for_transfer(slots) // page).tolist()
    _check(pages, first, page)
    return (Blocks(WINDOW_GROUP, first // page, tuple(pages)),)


def first_held(tokens: int, before: int, page: int) -> int:
    """The first token of the window that SGLang holds for a prompt of `tokens` tokens. It begins a page.

    A window has `before` tokens before the current one. The next token needs those before `tokens`, and that is what
    SGLang's prefix cache locks: whole pages that end with the last whole page of the prompt. An engine that computes
    the prompt's last token again needs one token more, which is mostly in the same page.
    """
    locked = tokens // page * page - -(-before // page) * page
    return max(0, (tokens - 1 - before) // page * page, locked)


def wanted(args: Any, state_indices: list[Any] | None, tokens: int) -> tuple[Blocks, ...]:
    """The window's blocks that SGLang has allocated for a prompt of `tokens` tokens: they end with its last page.

    `args` and `state_indices` are SGLang's. Raises EngineError.
    """
    from sglang.srt.disaggregation.base.conn import StateType

    if StateType.SWA not in args.state_types or state_indices is None or not tokens:
        return ()
    page = int(args.page_size)
    pages = state_indices[args.state_types.index(StateType.SWA)].tolist()
    first = -(-tokens // page) - len(pages)
    _check(pages, first * page, page)
    return (Blocks(WINDOW_GROUP, first, tuple(pages)),)


def _check(pages: list[int], first: int, page: int) -> None:
    if pages and min(pages) <= 0:
        at = first + page * next(index for index, each in enumerate(pages) if each <= 0)
        raise EngineError("blocks_too_few", f"tokens: {at} is in the window, and has no slot in swa_kv_pool")
