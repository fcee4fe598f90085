"""KV that an SGLang server keeps for prefill servers, and what holds its pages.

A decode server keeps answers for the next turn of their conversation, a prefill server its prompts for others that
begin so. A prefix cache (on the decode side `--disaggregation-decode-enable-radix-cache`) has their pages, and we lock
them there. Without one we leave the whole pages of a request that is over allocated, and free them ourselves. They are
given back when the agent has let go of them; under pressure at once, when no read of them counts any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import Offer

from ..engine.kept import KEPT_SHARE
from ..engine.names import UNNAMED
from ..engine.prompts import short, traceparent
from . import foreign

HELD = "kvbridge_held"  # our attribute of the prefix cache, which our hooks find everywhere
CHANGES = "kvbridge_weights_changes"  # of a request: how often the weights had changed when it came
TREE = "UnifiedRadixCache"
NEEDED = "its engine needs the memory"
DECODER = "sglang.srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin"
PREFILLER = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"


def hooks() -> dict[str, Callable[..., Any]]:
    return {
        f"sglang.srt.mem_cache.unified_radix_cache.{TREE}.checkpoint": _checkpoint,
        "sglang.srt.managers.schedule_batch.ScheduleBatch.check_decode_mem": _check_decode_mem,
        "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker._check_full_pool": _count,
        f"{DECODER}.process_decode_queue": _take_turn_after,
        f"{PREFILLER}.get_next_disagg_prefill_batch_to_run": _take_turn_after,
    }


def why_none(queue: Any, groups: tuple[Any, ...], ranks: int) -> str:
    """Why this server keeps nothing, and prompts do not continue with what others keep. "" if they do."""
    scheduler = queue.scheduler
    tree = type(scheduler.tree_cache).__name__
    if ranks > 1:  # all must have equally many free pages at any time, or they would admit different requests
        return f"the server has {ranks} ranks, must be 1"
    if tree != TREE:
        return f"the prefix cache is {tree}, must be {TREE}"
    if scheduler.enable_hisparse or scheduler.enable_hierarchical_cache:
        return "KV goes to host memory (--enable-hisparse, --enable-hierarchical-cache)"
    if getattr(scheduler, "decode_offload_manager", None) is not None:
        return "KV goes to host memory (--disaggregation-decode-enable-offload-kvcache)"
    if len(groups) != 1 or groups[0].kind != "full":
        return "layers keep windows, states or other rows than those of all tokens"
    return "a draft model has rows of its own" if queue.draft_token_to_kv_pool is not None else ""


@dataclass(slots=True)
class KeptPages:
    """`tokens`: so many of the pool's. `free` gives them back; without a prefix cache nothing else has them."""

    tokens: int
    free: Callable[[], None]
    is_withdrawn: bool = False


class HeldPages:
    """All that this server keeps, oldest first. Used on the scheduler's thread."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._queue = manager.queue
        self._tree = manager.queue.scheduler.tree_cache
        self._pool = self._tree.token_to_kv_pool_allocator
        self._held: dict[int, KeptPages] = {}  # by the number of the offer
        self._names = count(1)

    @property
    def tokens(self) -> int:
        """Of the pool, at most."""
        return sum(each.tokens for each in self._held.values())

    @property
    def unseen_tokens(self) -> int:
        """Of the pool: those that SGLang finds neither free nor in its prefix cache."""
        return 0 if self._tree.supports_prefix_sharing() else self.tokens

    def keep(self, req: Any, committed: int) -> None:
        """Offer the KV of a request that is over, if it came by a router: of the first `committed` tokens.

        Called after the prefix cache has got them, and before SGLang frees what that does not have.
        """
        manager, talk, tree = self._manager, self._manager.talk, self._tree
        if talk is None or manager.weights == UNNAMED or getattr(req, CHANGES, None) != manager.weights_changes:
            return
        page, has_tree = tree.page_size, tree.supports_prefix_sharing()
        whole = int(req.kv.cache_protected_len) if has_tree else committed - committed % page
        tokens = min(whole, len(req.origin_input_ids) + len(req.output_ids) - 1)
        found = manager.prefixes(req, tokens)
        most_pages = int(KEPT_SHARE * self._pool.size) // page
        if not found or whole // page > most_pages:
            return
        slots = tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :whole].to(torch.int64, copy=True)
        if has_tree:
            free = partial(tree.unlock, tree.lock(req.last_node))
        else:
            free = partial(self._pool.free, slots)
            req.kv.cache_protected_len = whole  # SGLang frees what comes after
        number = talk.new_number()
        self._held[number] = KeptPages(whole, free)
        talk.offer(
            Offer(
                number=number,
                rendezvous=f"kept-{manager.engine_id}-{next(self._names)}",
                request=short(req.rid),
                tokens=tokens,
                blocks=(Blocks(0, 0, tuple((slots[:tokens:page] // page).tolist())),),
                is_last=True,
                hold_s=manager.options.return_s,
                prefixes=found,
                most_kept=most_pages,
                traceparent=traceparent(foreign.custom_params(req)),
            )
        )

    def turn(self) -> None:
        """Free what nobody reads any more, and withdraw what requests need that wait for pages."""
        if not self._held or (talk := self._manager.talk) is None:
            return
        self._manager.look()
        for number in [number for number in self._held if not talk.is_open(number)]:
            self._held.pop(number).free()
        if not self._held or (short_of := self._short_of()) <= 0:
            return
        for number, answer in self._held.items():  # the oldest, until as many are free or will be
            if short_of > 0 and not answer.is_withdrawn:
                answer.is_withdrawn = True
                talk.withdraw(number, NEEDED)
            short_of -= answer.tokens

    def give_back_oldest(self) -> bool:
        """At once: no read of it counts any more. False if nothing is kept."""
        if (number := next(iter(self._held), None)) is None:
            return False
        self._give_back([number])
        return True

    def give_back_all(self) -> None:
        """The same of all, before their memory is cleared."""
        self._give_back(list(self._held))

    def _give_back(self, numbers: list[int]) -> None:
        if (talk := self._manager.talk) is not None:
            for number in numbers:
                talk.withdraw(number, NEEDED)
            talk.wait_for_readers([number for number in numbers if talk.is_open(number)])
        for number in numbers:
            self._held.pop(number).free()

    def _short_of(self) -> int:
        """How many tokens' pages the next request lacks that waits for some."""
        return self._decode_is_short_of() if self._manager.is_decoder else self._prefill_is_short_of()

    def _prefill_is_short_of(self) -> int:
        """As `PrefillAdder` counts, and at most: what the prefix cache has of a prompt counts as missing.

        Called after prompts were admitted: those that still wait may wait for pages.
        """
        scheduler = self._queue.scheduler
        if (chunked := scheduler.chunked_req) is not None:
            needed = len(chunked.origin_input_ids) - chunked.prefix_len
        elif scheduler.waiting_queue:
            needed = len(scheduler.waiting_queue[0].origin_input_ids)
        else:
            return 0
        return int(needed + 2 * self._tree.page_size - self._pool.available_size() - self._tree.evictable_size())

    def _decode_is_short_of(self) -> int:
        """As `pop_preallocated` counts."""
        queue = self._queue
        running = queue.scheduler.running_batch.reqs
        retractable = sum(len(req.origin_input_ids) + len(req.output_ids) for req in running)
        if retracted := queue.retracted_queue:
            needed = queue._prealloc_required_tokens(retracted[0])[0]
            return int(needed - queue._allocatable_token_budgets(count_retracted=False))
        if (waiting := next((each for each in queue.queue if each.waiting_for_input), None)) is None:
            return 0
        fill = queue._required_alloc_tokens(fill_len=queue._pre_alloc_fill_len(waiting.req), prefix_len=0)
        needed = queue._required_admission_tokens(waiting.req, fill, 0, retractable)
        return int(needed - queue._allocatable_token_budgets(retractable_tokens=retractable, count_retracted=True))


def _checkpoint(original: Callable[..., Any], tree: Any, req: Any, *, up_to: int, **kwargs: Any) -> None:
    """SGLang calls this for a request that is over just before it frees its pages."""
    original(tree, req, up_to=up_to, **kwargs)
    held: HeldPages | None = getattr(tree, HELD, None)
    if held is None or not req.finished() or req.beam_group is not None:
        return
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if not isinstance(req.finished_reason, FINISH_ABORT):
        held.keep(req, up_to)


def _check_decode_mem(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Before SGLang retracts a request for want of pages, what is kept is given back."""
    held: HeldPages | None = getattr(batch.tree_cache, HELD, None)
    while not (fits := original(batch, *args, **kwargs)) and held is not None and held.give_back_oldest():
        pass
    return fits


def _count(original: Callable[..., Any], checker: Any, stats: Any, uncached: int = 0) -> Any:
    """SGLang would take the pages for lost."""
    held: HeldPages | None = getattr(checker.tree_cache, HELD, None)
    return original(checker, stats, uncached + (0 if held is None else held.unseen_tokens))


def _take_turn_after(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    answer = original(scheduler, *args, **kwargs)
    if (held := getattr(scheduler.tree_cache, HELD, None)) is not None:
        held.turn()
    return answer
