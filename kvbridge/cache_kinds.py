"""The kinds of cache: which tokens of a request each keeps, so what of it is offered, wanted and moved. Pure.

The one rule, for adapters and agents: a row of CACHE_KINDS, and the functions below it; `needed` says what travels. All
else asks these. An engine may keep more of a window: vLLM whole blocks (`TableGroup` in adapters/vllm/block_tables.py),
SGLang what its prefix cache has locked (`first_held` in adapters/sglang/windows.py). What two pools must have in common
to carry a window, such as blocks that fit: `_other_tokens` in geometry/compat.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbridge_proto.pool import Group, GroupKind, Shard


@dataclass(frozen=True, slots=True)
class CacheKind:
    """`first(window, end_token)`: the first token to hold of a request, whose next query is at `end_token`.

    `has_window`: a pool says how long. `begins_at_multiple` of the window: on the border of any block that divides it.
    `is_one_row`: there is one row for all tokens, of exactly these; every context-parallel rank has it, and its place
    is the last token's entry.
    """

    first: Callable[[int, int], int]
    has_window: bool = False
    begins_at_multiple: bool = False
    is_one_row: bool = False


# In the order in which their chunks travel. The names are on the wire.
CACHE_KINDS: dict[GroupKind, CacheKind] = {
    "full": CacheKind(lambda window, end: 0),
    "sliding": CacheKind(lambda window, end: max(0, end + 1 - window), has_window=True),
    "chunked": CacheKind(lambda window, end: end // window * window, has_window=True, begins_at_multiple=True),
    "state": CacheKind(lambda window, end: max(0, end - 1), is_one_row=True),
}
ONE_ROW = {name for name, kind in CACHE_KINDS.items() if kind.is_one_row}


def has_window(kind: GroupKind) -> bool:
    """True if it keeps the last tokens only, as many as a pool says."""
    return CACHE_KINDS[kind].has_window


def is_one_row(kind: str) -> bool:
    """True if a request has one row, not one for each token. Of a layer's kind, too, which may be none of these."""
    return kind in ONE_ROW


def comes_last(kind: GroupKind) -> bool:
    """True if nothing of it may be read before all tokens are computed: the last one decides what is kept."""
    return CACHE_KINDS[kind].has_window or CACHE_KINDS[kind].is_one_row


def window_start(kind: GroupKind, window: int, end_token: int, block_tokens: int) -> int:
    """The first token that a cache must hold of a request of `end_token` tokens, whose next query is at `end_token`.

    `block_tokens` are those of one entry of the block table. The token begins an entry: an engine that keeps a block
    may reuse it, whole, for another request with the same prefix. (For one that does not they are 1.)
    """
    return CACHE_KINDS[kind].first(window, end_token) // block_tokens * block_tokens


def whole_block(group: Group, shard: Shard) -> int:
    """Tokens in one entry of a group's block table, on all context-parallel ranks together."""
    return group.block_tokens * shard.cp_size


def border(group: Group, shard: Shard) -> int:
    """What this group holds of a window begins at a multiple of so many tokens."""
    return 1 if group.begins_inside or group.never_cached else whole_block(group, shard)


def start_of(group: Group, end_token: int, shard: Shard) -> int:
    """The first token that this group must hold of a request of `end_token` tokens."""
    if not comes_last(group.kind):
        return 0
    border_tokens = group.block_tokens if is_one_row(group.kind) else border(group, shard)
    return window_start(group.kind, group.window, end_token, border_tokens)


def needed(group: Group, first_token: int, end_token: int, shard: Shard) -> int:
    """The first token of this group that a receiver needs, if it has the rows before `first_token` already."""
    first_held = start_of(group, end_token, shard)
    return first_held if group.never_cached else max(first_token, first_held)


# Parts, by their names (Plane in kvbridge_proto/pool.py says what the rows are):

ROTATED = "rotated_"  # so SGLang keeps index keys of some models: it multiplies queries too
INDEX_KEY = "index_key"
ROTATED_INDEX_KEY = ROTATED + INDEX_KEY
# Parts of such a name are what DeepSeek V4's next rows will be made of: kv and score of each token.
COMPRESSOR = "compressor"
# The window of what DeepSeek V4's rows of 4 tokens will be made of, in blocks of 4: of the row that is not whole, and
# of the one before. (A row is made of 8 tokens, its own last. So nothing is read of a row that is whole but the last.)
OPEN_4 = 5
RAW = "raw_"  # so SGLang keeps scores; vLLM adds the weight (`ape`) first. DeepSeek V4.1 has no such weight
