"""How a prefill server gets what others keep of a prompt's beginning, such as earlier turns, into SGLang's cache.

A request waits for its decode server in SGLang's bootstrap queue, before it has pages. There it also waits for rows
that are fetched for it: we allocate their pages, and when they have come, the prefix cache gets them, as if a request
had computed them. So the request finds them there when it is scheduled; if not, it computes them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from kvbridge_proto.common import PREFIX_TOKENS, Blocks
from kvbridge_proto.engine import READERS_S, Attached, KeptBy, Want

from ..engine.conversation import Ended
from ..engine.kept import KEPT_DEADLINE_S, KEPT_SHARE, KeptPrefix, KeptPrefixes
from ..engine.names import UNNAMED
from ..engine.prompts import short, traceparent
from . import foreign

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


@dataclass(slots=True)
class KeptFetch:
    """Rows that come into `slots`, behind the `before` that the prefix cache has. `lock` keeps those there."""

    rendezvous: str
    key: Any  # SGLang's, of both
    before: torch.Tensor
    slots: torch.Tensor
    lock: Any
    waiting: int = 1  # requests


class KeptFetches:
    """What others keep, and what is fetched of it. Used on the scheduler's thread."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._kept = KeptPrefixes()
        self._attached: Attached | None = None  # to which agent: a new one is told again what is kept
        self._open: dict[int, KeptFetch] = {}  # by the number of the want

    def __bool__(self) -> bool:
        """Whether pages are allocated to rows that are to come."""
        return bool(self._open)

    def attached_to(self, attached: Attached | None) -> None:
        if attached is not self._attached:
            self._attached = attached
            self._kept.told_by("" if attached is None else attached.agent.address)

    def heard(self, kept: KeptBy) -> None:
        self._kept.heard(kept)

    def is_open(self, number: int) -> bool:
        return number in self._open

    def begin(self, req: Any) -> int:
        """Fetch what others keep of this prompt and our prefix cache lacks. Returns the want's number, 0 if nothing."""
        manager, talk = self._manager, self._manager.talk
        manager.look_now()
        if not self._kept or talk is None or manager.weights == UNNAMED:
            return 0
        tree = manager.queue.scheduler.tree_cache
        prompt = len(req.origin_input_ids)
        found = self._kept.find(manager.prefixes(req, req._compute_max_prefix_len(prompt)))
        end = 0 if found is None else found.tokens - found.tokens % tree.page_size
        if found is None or end == 0:
            return 0
        if (number := self._join(found.rendezvous, end)) or (fetch := self._allocate(tree, req, end, found)) is None:
            return number
        number = int(talk.new_number())
        first, page = len(fetch.before), tree.page_size
        self._open[number] = fetch
        talk.want(
            Want(
                number=number,
                request=short(req.rid),
                rendezvous=found.rendezvous,
                sender=found.sender,
                first_token=first,
                end_token=end,
                blocks=(Blocks(0, first // page, tuple((fetch.slots[::page] // page).tolist())),),
                deadline_s=KEPT_DEADLINE_S,
                fence=manager.mark_free(),
                traceparent=traceparent(foreign.custom_params(req)),
                is_offered=True,
            )
        )
        return number

    def _join(self, rendezvous: str, end: int) -> int:
        """Wait for what another request fetches already, if that brings as much. Returns the want's number, or 0."""
        for number, fetch in self._open.items():
            if fetch.rendezvous == rendezvous and fetch.waiting > 0 and len(fetch.key) >= end:
                fetch.waiting += 1
                return number
        return 0

    def _allocate(self, tree: Any, req: Any, end: int, found: KeptPrefix) -> KeptFetch | None:
        """Pages up to token `end`, if the prefix cache lacks enough of it, and there is room beside other prompts.

        What is kept for others counts as room: it is given back when prompts need it.
        """
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.common import evict_from_tree_cache
        from sglang.srt.mem_cache.radix_cache import RadixKey

        pool = tree.token_to_kv_pool_allocator
        key = RadixKey(array("q", req.origin_input_ids[:end]), req.extra_key, cache_salt=req.cache_salt)
        match = tree.match_prefix(MatchPrefixParams(key=key))
        needed = end - match.device_prefix_len
        if needed < PREFIX_TOKENS or match.host_hit_length:
            return None
        before = tree.path_device_indices(match.last_device_node).clone()
        lock = tree.lock(match.last_device_node)
        slots, held = None, self._manager.held
        left = pool.available_size() + tree.evictable_size() - needed
        if left >= 0 and left + (0 if held is None else held.tokens) >= KEPT_SHARE * pool.size:
            evict_from_tree_cache(tree, needed)
            slots = pool.alloc(needed)
        if slots is None:
            tree.unlock(lock)
            return None
        return KeptFetch(found.rendezvous, key, before, slots, lock)

    def over(self, ended: Ended) -> None:
        """The agent writes these pages no more. If all rows have come, the prefix cache gets them."""
        if (fetch := self._open.pop(ended.number, None)) is None:
            return
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        tree = self._manager.queue.scheduler.tree_cache
        if ended.is_good:
            values = torch.cat([fetch.before, fetch.slots])
            tree.insert(InsertParams(key=fetch.key, value=values, prev_prefix_len=len(fetch.before)))
        else:
            tree.token_to_kv_pool_allocator.free(fetch.slots)
            if fetch.waiting > 0:
                self._kept.gone(fetch.rendezvous)  # the next request is not to wait for it, too
        tree.unlock(fetch.lock)

    def abandon(self, number: int) -> None:
        """A request is over. If no other waits, nothing more is fetched, but pages stay until the agent has let go."""
        if (fetch := self._open.get(number)) is None:
            return
        fetch.waiting -= 1
        if fetch.waiting == 0 and (talk := self._manager.talk) is not None:
            talk.abandon(number, "the request is over")

    def abandon_all(self) -> None:
        """Before a flush. Returns once all have ended, or after READERS_S: then SGLang finds itself busy."""
        manager = self._manager
        for number, fetch in list(self._open.items()):
            fetch.waiting = 1
            self.abandon(number)
        manager.look_until(lambda: not self._open, READERS_S)


def hooks() -> dict[str, Callable[..., Any]]:
    return {f"{SCHEDULER}.is_fully_idle": _is_fully_idle}


def _is_fully_idle(original: Callable[..., Any], scheduler: Any, for_health_check: bool = False, **kwargs: Any) -> Any:
    """A flush would clear pages that are still written, even if the request they are for is over."""
    is_idle = original(scheduler, for_health_check=for_health_check, **kwargs)
    queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    kept: KeptFetches | None = getattr(getattr(queue, "kv_manager", None), "kept", None)
    if for_health_check or not is_idle or not kept:
        return is_idle
    kept._manager.look_now()
    return not kept
