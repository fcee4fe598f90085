"""SGLang's own prefix cache, allocators and requests: what a server keeps of answers and prompts, and what is fetched.

The other side of the conversation with the agent is played by the test.
"""

from __future__ import annotations

import importlib.util
from array import array
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not in this environment (make test-sglang)", allow_module_level=True)

from kvbridge_proto.engine import KeptBy, Offer, Want

from kvbridge.adapters.sglang import held_pages, kept_fetches, weights
from kvbridge.adapters.sglang.held_pages import HeldPages
from tests.integration.adapters.test_sglang_life import Talk, attached, manager, one_rank

__all__ = ["one_rank"]
pytestmark = pytest.mark.sglang

PAGE, POOL = 16, 2048
CHAT = list(range(1000, 1300))


@pytest.fixture(autouse=True)
def options(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a server has them that neither drafts nor drops what a model thinks."""
    chosen = SimpleNamespace(speculative_algorithm=None, strip_thinking_cache=False, disaggregation_mode="decode")
    for module in ("mem_cache.common", "managers.schedule_batch", "mem_cache.unified_radix_cache"):
        for name in ("get_spec", "get_serving", "get_disagg"):
            monkeypatch.setattr(f"sglang.srt.{module}.{name}", lambda: chosen, raising=False)


class Side:
    """A server's scheduler, as far as it decides who has pages. `run` is one request's life in it."""

    def __init__(
        self, role: str, page: int = PAGE, has_tree: bool = True, pool: int = POOL, keeps: bool | None = None
    ) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        made: Any = torch.float32, "cpu", None, False
        self.page, self.total = page, pool
        self.pool = TokenToKVPoolAllocator(pool, *made) if page == 1 else PagedTokenToKVPoolAllocator(pool, page, *made)
        self.places = ReqToTokenPool(size=8, max_context_len=pool, device="cpu", enable_memory_saver=False)
        params = CacheInitParams(
            disable=not has_tree,
            req_to_token_pool=self.places,
            token_to_kv_pool_allocator=self.pool,
            page_size=page,
            tree_components=(ComponentType.FULL,),
        )
        self.tree: Any = UnifiedRadixCache(params)
        hooked = partial(held_pages._checkpoint, UnifiedRadixCache.checkpoint, self.tree)
        self.tree.checkpoint = hooked
        self.manager = manager(role)
        self.manager._engine_id, self.manager.options.return_s = "engine", 60.0
        self.manager.kv_args.page_size = page
        self.queue: Any = SimpleNamespace(
            tree_cache=self.tree, token_to_kv_pool_allocator=self.pool, queue=[], retracted_queue=[],
            kv_manager=self.manager, token_to_kv_pool=None, draft_token_to_kv_pool=None,
        )  # fmt: skip
        self.manager.queue = self.queue
        model = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=None))
        self.queue.scheduler = SimpleNamespace(
            tree_cache=self.tree, tp_worker=model, _sched_idled=False, running_batch=SimpleNamespace(reqs=[]),
            enable_hisparse=False, enable_hierarchical_cache=False, decode_offload_manager=None,
            waiting_queue=[], chunked_req=None,
        )  # fmt: skip
        if keeps or (keeps is None and role == "decode"):
            self.manager.held = HeldPages(self.manager)
            setattr(self.tree, held_pages.HELD, self.manager.held)

    @property
    def talk(self) -> Talk:
        talk: Talk = self.manager.talk
        return talk

    def request(self, prompt: list[int], **more: Any) -> Any:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        return Req("r", "", array("q", prompt), SamplingParams(), **more)

    def run(self, prompt: list[int], answer: int = 100, reason: Any = None, changes: int | None = 0) -> Any:
        """It is admitted, decodes `answer` tokens and ends. All but the last of them have KV.

        `changes`: how often weights had changed when its prompt was fetched, None if it was not.
        """
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH
        from sglang.srt.mem_cache.common import release_kv_cache

        req = self.request(prompt)
        setattr(req, held_pages.CHANGES, changes)  # as the receiver does
        req.output_ids = array("q", range(5000, 5000 + answer))
        tokens = len(prompt) + answer - 1
        slots = self.pool.alloc(-(-tokens // self.page) * self.page)
        self.places.alloc([req])
        self.places.req_to_token[req.kv.req_pool_idx, :tokens] = slots[:tokens].int()
        req.kv.kv_committed_len = req.kv.kv_allocated_len = tokens
        req.finished_reason = reason or FINISH_LENGTH(answer)
        req.slots = slots
        release_kv_cache(req, self.tree, checkpoint=True)
        return req

    def offers(self) -> list[Offer]:
        return [each for each in self.talk.said if isinstance(each, Offer)]

    def unaccounted(self) -> int:
        """Tokens of the pool that SGLang would take for lost."""
        seen = self.pool.available_size() + self.tree.evictable_size() + self.tree.protected_size()
        ours = 0 if self.manager.held is None else self.manager.held.unseen_tokens
        return self.total - seen - ours


TREES = pytest.mark.parametrize("has_tree", [True, False], ids=["prefix cache", "none"])
PAGES = pytest.mark.parametrize("page", [1, 16, 64])


@TREES
@PAGES
@pytest.mark.parametrize(("role", "answer"), [("decode", 100), ("prefill", 1)])
def test_what_is_kept_is_offered_whole_and_its_pages_stay_until_it_has_ended(
    role: str, answer: int, page: int, has_tree: bool
) -> None:
    side = Side(role, page, has_tree, keeps=True)
    req = side.run(CHAT, answer)
    (offer,) = side.offers()
    whole = (300 + answer - 1) // page * page
    assert (offer.tokens, len(offer.prefixes), offer.is_last, offer.hold_s) == (whole, whole // 64, True, 60.0)
    (blocks,) = offer.blocks
    assert blocks.first == 0 and list(blocks.ids) == [int(slot) // page for slot in req.slots[:whole:page]]
    assert side.unaccounted() == 0
    free = side.pool.available_size()
    assert free == side.total - whole, "what is beyond the last whole page is free"
    held = set(req.slots[:whole].tolist())
    assert not held & set(side.pool.alloc(free).tolist())
    side.tree.evict(evict(side.total))
    assert side.pool.available_size() == 0, "what is kept is not evicted"
    side.talk.end("offer")
    side.manager.held.turn()
    side.tree.evict(evict(side.total))
    assert side.pool.available_size() == whole


def evict(tokens: int) -> Any:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    return EvictParams(num_tokens=tokens)


def test_prefixes_are_vllms_bytes() -> None:
    """As `rendezvous.prefixes` of the vLLM adapter makes them of tokens, adapter and salt."""
    from kvbridge.adapters.vllm import rendezvous

    side, tokens = Side("decode"), CHAT + list(range(5000, 5020))
    for salt, adapter in ((None, None), ("salt", None), ("salt", ("sql", "/adapters/sql-1/"))):
        ours = side.request(CHAT, lora_id=None if adapter is None else "internal")
        ours.output_ids, ours.cache_salt = array("q", tokens[300:]), salt
        refs = {} if adapter is None else {"internal": SimpleNamespace(lora_name=adapter[0], lora_path=adapter[1])}
        side.queue.scheduler.tp_worker.model_runner.lora_manager = SimpleNamespace(lora_refs=refs)
        theirs = SimpleNamespace(
            mm_features=None, prompt_embeds=None, prompt_token_ids=CHAT, all_token_ids=tokens, cache_salt=salt,
            lora_request=None if adapter is None else SimpleNamespace(lora_name=adapter[0], lora_path="/other/sql-1"),
        )  # fmt: skip
        found = side.manager.prefixes(ours, 319)
        assert found == rendezvous.prefixes(theirs, 319) and len(found) == 4


@pytest.mark.parametrize("why", ["aborted", "weights changed", "weights without a name", "not fetched", "too large"])
def test_what_is_not_kept_is_freed_at_once(why: str) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    side = Side("decode", has_tree=False)
    if why == "weights without a name":
        side.manager.weights_are("")
    changes = {"weights changed": side.manager.weights_changes - 1, "not fetched": None}
    side.run(
        list(range(POOL // 2)) if why == "too large" else CHAT,
        reason=FINISH_ABORT() if why == "aborted" else None,
        changes=changes.get(why, side.manager.weights_changes),
    )
    assert not side.offers()
    assert side.pool.available_size() == side.total


@TREES
def test_half_of_the_pool_is_kept_and_the_agent_ends_the_oldest(has_tree: bool) -> None:
    """It knows which of them are claimed."""
    side = Side("decode", has_tree=has_tree)
    for start in range(4):  # 384 tokens each: half of the pool is 1024
        side.run([10_000 * (start + 1) + i for i in range(300)], 100)
    offers = side.offers()
    assert [offer.most_kept for offer in offers] == [1024 // PAGE] * 4
    side.manager.held.turn()
    assert not any(isinstance(each, tuple) for each in side.talk.said), "none is withdrawn"
    for offer in offers[:2]:
        side.talk.end("offer", "reclaimed", offer.number)
    side.manager.held.turn()
    assert side.unaccounted() == 0
    side.tree.evict(evict(side.total))
    assert side.pool.available_size() == side.total - 2 * 384


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"ranks": 2}, "2 ranks"),
        ({"tree_cache": object()}, "the prefix cache is object"),
        ({"enable_hisparse": True}, "host memory"),
        ({"enable_hierarchical_cache": True}, "host memory"),
        ({"decode_offload_manager": object()}, "host memory"),
        ({"groups": ("full", "window")}, "windows"),
        ({"groups": ("window",)}, "windows"),
        ({"draft": object()}, "draft model"),
    ],
)
def test_servers_that_keep_no_answers_say_why(change: dict[str, Any], reason: str) -> None:
    queue = Side("decode").queue
    change = dict(change)
    ranks, kinds = change.pop("ranks", 1), change.pop("groups", ("full",))
    queue.draft_token_to_kv_pool = change.pop("draft", None)
    vars(queue.scheduler).update(change)
    why = held_pages.why_none(queue, tuple(SimpleNamespace(kind=kind) for kind in kinds), ranks)
    assert reason in why and bool(reason) == bool(why)


@TREES
def test_a_running_request_gets_pages_before_sglang_retracts_it(has_tree: bool) -> None:
    """And no read of the answer counts any more by then."""
    side = Side("decode", has_tree=has_tree)
    side.run(CHAT, 100)
    others = side.pool.available_size()
    side.pool.alloc(others)
    batch = SimpleNamespace(tree_cache=side.tree)

    def fits(batch: Any) -> bool:
        side.tree.evict(evict(PAGE))
        return side.pool.available_size() >= PAGE

    assert held_pages._check_decode_mem(fits, batch)
    assert ("withdraw", side.offers()[0].number) in side.talk.said
    assert not side.talk.open and side.unaccounted() == others
    side.pool.alloc(side.pool.available_size())
    side.tree.evict(evict(side.total))
    side.pool.alloc(side.pool.available_size())
    assert not held_pages._check_decode_mem(fits, batch), "nothing is left to give back"


def test_a_request_that_waits_for_pages_gets_those_of_the_oldest() -> None:
    side = Side("decode", has_tree=False)
    for start in (1, 2):
        side.run([10_000 * start + i for i in range(300)], 100)
    first = side.offers()[0].number
    side.queue.queue = [SimpleNamespace(waiting_for_input=True, req=None)]
    side.queue._pre_alloc_fill_len = lambda req: 0
    side.queue._required_alloc_tokens = lambda fill_len, prefix_len: 1300
    side.queue._required_admission_tokens = lambda req, fill, prefix, retractable: fill
    side.queue._allocatable_token_budgets = lambda **_: side.pool.available_size()
    for _ in range(3):
        side.manager.held.turn()
    assert [each for each in side.talk.said if isinstance(each, tuple)] == [("withdraw", first)], "one is enough"
    side.talk.end("offer", "withdrawn", first)
    side.manager.held.turn()
    assert side.pool.available_size() == side.total - 384


@pytest.mark.parametrize("what", ["waits", "is computed in chunks", "fits"])
def test_a_prompt_gets_the_pages_of_what_is_kept(what: str) -> None:
    side = Side("prefill", keeps=True)
    for start in (1, 2):
        side.run([10_000 * start + i for i in range(400)], 1)
    assert side.pool.available_size() == 1248
    first, second = (offer.number for offer in side.offers())
    scheduler, prompt = side.queue.scheduler, SimpleNamespace(origin_input_ids=range(1300), prefix_len=0)
    if what == "is computed in chunks":
        scheduler.chunked_req = prompt
    else:
        scheduler.waiting_queue = [prompt] * 2
    if what == "fits":
        prompt.origin_input_ids = range(1200)
    for _ in range(3):
        assert held_pages._take_turn_after(lambda scheduler, batch: batch, scheduler, "batch") == "batch"
    withdrawn = [each for each in side.talk.said if isinstance(each, tuple)]
    assert withdrawn == ([] if what == "fits" else [("withdraw", first)]), "one is enough"
    side.talk.end("offer", "withdrawn", first)
    side.manager.held.turn()
    assert side.pool.available_size() + side.tree.evictable_size() == 1648
    if what == "is computed in chunks":  # pages that it has are not missing
        scheduler.chunked_req = SimpleNamespace(origin_input_ids=range(3000), prefix_len=1500)
        side.manager.held.turn()
        assert ("withdraw", second) not in side.talk.said


@TREES
@pytest.mark.parametrize("what", ["flush", "weights"])
def test_a_flush_and_new_weights_end_all_that_is_kept(what: str, has_tree: bool) -> None:
    side = Side("decode", has_tree=has_tree)
    side.run(CHAT, 100)
    scheduler = SimpleNamespace(disagg_decode_prealloc_queue=side.queue)
    if what == "flush":
        weights._flush(lambda scheduler: None, scheduler)
    else:
        side.manager.weights_are("next")
    assert not side.talk.open
    side.tree.evict(evict(side.total))
    assert side.pool.available_size() == side.total


# The prefill side:


def told(side: Side, tokens: list[int], name: str = "kept-1") -> None:
    """Another engine keeps an answer of so many tokens."""
    req = side.request(tokens)
    prefixes = side.manager.prefixes(req, len(tokens))
    side.talk.news.append(KeptBy(sender="tcp://10.0.0.9:7700", rendezvous=name, prefixes=prefixes))


def begin(side: Side, prompt: list[int], **more: Any) -> Any:
    req = side.request(prompt, **more)
    req.number = side.manager.kept.begin(req)
    return req


def wants(side: Side) -> list[Want]:
    return [each for each in side.talk.said if isinstance(each, Want)]


def matched(side: Side, prompt: list[int]) -> int:
    from sglang.srt.mem_cache.common import match_kv_cache

    return int(match_kv_cache(side.request(prompt), side.tree).device_prefix_len)


@PAGES
def test_what_others_keep_comes_into_the_prefix_cache(page: int) -> None:
    side = Side("prefill", page)
    side.run(CHAT[:100], 1)
    told(side, CHAT[:280])
    req = begin(side, CHAT)
    (want,) = wants(side)
    first, end = 100 // page * page, 256
    assert (want.first_token, want.end_token, want.rendezvous, want.is_offered) == (first, end, "kept-1", True)
    (blocks,) = want.blocks
    assert (blocks.first, len(blocks.ids)) == (first // page, (end - first) // page)
    assert side.manager.kept.is_open(req.number)
    free = set(side.pool.get_all_free_pages().tolist())
    assert not free & set(blocks.ids), "they are nobody else's"
    side.talk.end("want")
    side.manager.look_now()
    assert matched(side, CHAT) == end and side.unaccounted() == 0
    assert side.tree.protected_size() == 0
    slots = side.tree.path_device_indices(side.tree.match_prefix(key_of(CHAT[:end])).last_device_node)
    assert [int(slot) // page for slot in slots[first:end:page]] == list(blocks.ids)


def key_of(tokens: list[int]) -> Any:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return MatchPrefixParams(key=RadixKey(array("q", tokens)))


@pytest.mark.parametrize("end", ["fails", "weights", "aborted"])
def test_rows_that_do_not_come_are_computed(end: str) -> None:
    side = Side("prefill")
    told(side, CHAT)
    req = begin(side, CHAT)
    before = side.pool.available_size()
    if end == "aborted":
        side.manager.kept.abandon(req.number)
        assert ("abandon", req.number) in side.talk.said
        assert side.pool.available_size() == before, "they may still be written"
    side.talk.end("want", "other_weights" if end == "weights" else "offer_expired")
    side.manager.look_now()
    assert matched(side, CHAT) == 0 and side.pool.available_size() == side.total
    assert bool(begin(side, CHAT).number) == (end == "aborted"), "who comes next does not wait in vain, too"


def test_prompts_that_begin_so_share_a_fetch_and_later_ones_fetch_again() -> None:
    side = Side("prefill")
    told(side, CHAT)
    first, shorter = begin(side, CHAT), begin(side, CHAT[:200])
    assert first.number == shorter.number and len(wants(side)) == 1
    side.manager.kept.abandon(first.number)
    assert ("abandon", first.number) not in side.talk.said, "another waits for it"
    side.talk.end("want")
    side.manager.look_now()
    assert matched(side, CHAT) == 256 and side.unaccounted() == 0
    assert not begin(side, CHAT).number, "the prefix cache has it"
    side.tree.evict(evict(side.total))
    assert begin(side, CHAT[:200]).number, "it is kept still"
    longer = begin(side, CHAT)
    assert [want.end_token for want in wants(side)] == [256, 192, 256], "what is under way brings too little"
    for request in (longer, longer):  # the second time nobody is left who could give it up
        side.manager.kept.abandon(request.number)
    assert side.talk.said.count(("abandon", longer.number)) == 1
    assert begin(side, CHAT).number != longer.number, "nor is one joined that has been given up"
    while side.talk.open:
        side.talk.end("want")
    side.manager.look_now()
    side.tree.evict(evict(side.total))
    assert side.pool.available_size() == side.total


def test_what_is_kept_for_others_leaves_room_for_what_others_keep() -> None:
    side = Side("prefill", keeps=True)
    for start in (1, 2):
        side.run([10_000 * start + i for i in range(512)], 1)
    told(side, CHAT)
    assert side.pool.available_size() == POOL // 2, "half of the pool"
    assert begin(side, CHAT).number
    side.pool.alloc(side.pool.available_size() - 200)
    told(side, [7, *CHAT], "kept-2")
    assert not begin(side, [7, *CHAT]).number, "but it has no pages"


def test_what_was_computed_meanwhile_stays_and_the_rest_is_added() -> None:
    side = Side("prefill")
    told(side, CHAT)
    begin(side, CHAT)
    side.run(CHAT[:200], 1)
    side.talk.end("want")
    side.manager.look_now()
    assert matched(side, CHAT) == 256 and side.unaccounted() == 0
    side.tree.evict(evict(side.total))
    assert side.pool.available_size() == side.total


@pytest.mark.parametrize("why", ["too little more", "no room", "another salt", "no weights' name", "log probabilities"])
def test_what_is_not_worth_or_not_safe_to_fetch_is_computed(why: str) -> None:
    side = Side("prefill", pool=496 if why == "no room" else POOL)
    if why == "too little more":
        side.run(CHAT[:208], 1)
    elif why == "no weights' name":
        side.manager.weights_are("")
    told(side, CHAT[:299])
    more: dict[str, Any] = {"cache_salt": "other"} if why == "another salt" else {}
    if why == "log probabilities":
        more = {"return_logprob": True}
    req = side.request(CHAT, **more)
    req.logprob_start_len = 40 if why == "log probabilities" else -1
    assert side.manager.kept.begin(req) == 0
    assert not wants(side) and side.tree.protected_size() == 0 and side.unaccounted() == 0


def test_a_prompt_waits_for_its_earlier_turns_and_a_flush_for_the_agent() -> None:
    from kvbridge.adapters.sglang.sender import KVBridgeSender
    from tests.integration.adapters.test_sglang_life import ADDRESS, BOOTSTRAPPING, ROOM, WAITING, asked

    side = Side("prefill")
    told(side, CHAT)
    made: Any = KVBridgeSender(side.manager, ADDRESS, ROOM)
    req = side.request(CHAT)
    req.prompt, req.bootstrap_room = "ab", ROOM
    made.bind(req)
    assert getattr(req, held_pages.CHANGES) == side.manager.weights_changes, "or it would not be kept for others"
    side.manager._hear_asked(asked())
    assert made.poll() == BOOTSTRAPPING
    made.abort()
    scheduler = SimpleNamespace(disagg_prefill_bootstrap_queue=side.queue)
    idle = partial(kept_fetches._is_fully_idle, lambda scheduler, for_health_check: True, scheduler)
    assert not idle() and idle(for_health_check=True)
    (number,) = side.talk.open
    assert ("abandon", number) in side.talk.said
    side.talk.end("want")
    assert idle() and matched(side, CHAT) == 256
    told(side, CHAT, "kept-2")
    made = KVBridgeSender(side.manager, ADDRESS, ROOM)
    made.bind(req)
    side.manager._hear_asked(asked())
    assert made.poll() == WAITING, "the prefix cache has it"


def test_a_new_agent_is_told_again() -> None:
    side = Side("prefill")
    told(side, CHAT)
    side.manager.look_now()
    side.talk.attached = attached()
    assert not begin(side, CHAT).number
