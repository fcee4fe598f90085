"""Groups that keep only a window: which blocks are offered and wanted, with vLLM's real scheduler and managers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from kvbridge_proto.engine import Done, Offer, Released, Want
from kvbridge_proto.pool import Pool
from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

from kvbridge.adapters.vllm.block_tables import GroupTables, TableGroup
from kvbridge.adapters.vllm.layers import kind_of, window_of
from kvbridge.adapters.vllm.prompt_trim import can_be_short
from kvbridge.errors import EngineError
from kvbridge.exchange.block_tables import extended, tables_of
from kvbridge.geometry.plan import Planner
from kvbridge.geometry.shard import assign
from kvbridge.geometry.tokens import ALL
from testing.pools import Shape, describe
from tests.integration.adapters.world import BLOCK, World

pytestmark = pytest.mark.vllm

COMMON: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
FULL = FullAttentionSpec(**COMMON)
SLIDING = SlidingWindowSpec(**COMMON, sliding_window=2 * BLOCK)
CHUNKED = ChunkedLocalAttentionSpec(**COMMON, attention_chunk_size=2 * BLOCK)
WINDOWS = pytest.mark.parametrize("window", [SLIDING, CHUNKED], ids=["sliding", "chunked"])
DRAFTS: dict[str, Any] = {"extra_retained_tokens": 5} if hasattr(SlidingWindowSpec, "extra_retained_tokens") else {}
ODD = [
    SLIDING,
    CHUNKED,
    SlidingWindowSpec(**COMMON, sliding_window=2 * BLOCK, **DRAFTS),
    SlidingWindowSpec(**COMMON, sliding_window=21),
    ChunkedLocalAttentionSpec(**COMMON, attention_chunk_size=24),
]
ODD_WINDOWS = pytest.mark.parametrize("window", ODD, ids=["sliding", "chunked", "drafts", "sliding 21", "chunked 24"])


def kept(window: Any) -> TableGroup:
    return TableGroup(BLOCK, kind_of(window), window_of(window))


def pool_of(window: Any, blocks: int) -> Pool:
    """A layer in each of two groups, one full and one with this window."""
    shape = Shape(kinds=("full", kind_of(window)), window=window_of(window), block_tokens=BLOCK, blocks=blocks)
    return describe(replace(shape, kv_heads=1, key_width=1, value_width=1, codec="fp32"))


class Travels:
    """Which tokens of each group travel for a want, as the agents plan it."""

    def __init__(self, window: Any, blocks: int = 100) -> None:
        pool = pool_of(window, blocks)
        self.planner, (self.takes,) = Planner(pool, pool), assign([pool], pool)

    def first(self, end: int) -> tuple[int, int]:
        """The first token of either group; `end` where there is none."""
        group_plans = {
            group_plan.pairs[0].receiver.group: group_plan
            for group_plan in self.planner.plan(self.takes, 0, end, 1 << 12).group_plans
        }
        full, late = (
            group_plans[group].token_shard.token(group_plans[group].first) if group in group_plans else end
            for group in (0, 1)
        )
        return full, late


@pytest.mark.parametrize(
    ("manager", "spec"), [(SlidingWindowManager, SLIDING), (ChunkedLocalAttentionManager, CHUNKED)]
)
def test_keeps_what_vllms_own_manager_keeps(manager: Any, spec: Any) -> None:
    one = manager.__new__(manager)
    one.sliding_window = one.attention_chunk_size = 2 * BLOCK
    one.extra_retained_tokens = 0
    for tokens in range(6 * BLOCK):
        assert kept(spec).first(tokens) == one.get_num_skipped_tokens(tokens) // BLOCK * BLOCK


@ODD_WINDOWS
def test_agents_refuse_the_blocks_of_a_table_that_lacks_entries(window: Any) -> None:
    """A piece of a table is no longer than the table: what is not there is neither read nor written."""
    engine: Any = SimpleNamespace(pool=pool_of(window, 100), token_shard=ALL)
    groups = GroupTables((TableGroup(BLOCK, "full", 0), kept(window)))
    for tokens in range(1, 5 * BLOCK):
        whole = list(range(1, -(-tokens // BLOCK) + 1))
        for full in range(len(whole) + 1):
            for late in range(len(whole) + 1):
                tables, has_window = (whole[:full], whole[:late]), kept(window).first(tokens) < tokens
                is_short = full < len(whole) or (has_window and late < len(whole))
                offered, wanted = groups.offered(tables, [0, 0], tokens, tokens), groups.wanted(tables, 0, tokens)
                for check in (
                    partial(extended, {}, engine, offered, 0, tokens, True),
                    partial(tables_of, engine, wanted, 0, tokens),
                ):
                    if not is_short:
                        check()
                        continue
                    with pytest.raises(EngineError) as refusal:
                        check()
                    assert refusal.value.code in ("blocks_too_few", "missing_group")


@pytest.mark.proves("G13")
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@ODD_WINDOWS
def test_whatever_is_offered_is_held_until_it_is_released(tmp_path: Path, window: Any, is_async: bool) -> None:
    """For every length of a prompt: vLLM gives blocks of a window up just before it asks us what to keep."""
    world = World(tmp_path, specs=[FULL, window], async_scheduling=is_async).ready()
    blocks = world.scheduler.kv_cache_manager.block_pool.blocks
    for tokens in range(1, 201):
        request = world.prefill(tokens)
        params: list[Any] = []
        for _ in range(9):
            result = world.step()
            params += [one.kv_transfer_params for one in (result.outputs if result else ()) if one.finished]
        assert request.is_finished() and len(params) == 1
        offers = world.agent.take(Offer)
        for offer in offers:
            for piece in offer.blocks:
                assert 0 not in piece.ids and all(blocks[entry].ref_cnt == 1 for entry in piece.ids), tokens
        *parts, last = offers
        assert last.is_last and not any(part.is_last or part.blocks[1:] for part in parts)
        assert last.tokens == params[0]["remote_num_tokens"] == max(1, tokens - 1)
        if tokens > 1:
            assert {piece.group: piece.first * BLOCK for piece in last.blocks}[1] == kept(window).first(tokens - 1)
        world.agent.say(Released(number=last.number, request="r"))
        world.run()
        world.assert_empty()


@WINDOWS
def test_a_prompt_that_was_cut_short_fills_no_block_of_the_prefix_cache_with_its_last_token(
    tmp_path: Path, window: Any
) -> None:
    world = World(tmp_path, specs=[FULL, window]).ready()
    tokens = list(range(7000, 7000 + 4 * BLOCK))
    world.prefill(prompt=tokens)
    world.steps(6)
    world.agent.say(Released(number=world.agent.take(Offer)[-1].number, request="r"))
    world.run()
    hits: list[int] = []
    world.on_forward = lambda: hits.extend(new.num_computed_tokens for new in world.scheduled.scheduled_new_reqs)
    world.request(prompt=[*tokens, 1, 2, 3], max_tokens=1)
    world.run()
    assert hits == [3 * BLOCK]


@WINDOWS
def test_a_prompt_whose_logits_are_asked_for_keeps_its_last_token(tmp_path: Path, window: Any) -> None:
    world = World(tmp_path, specs=[FULL, window]).ready()
    gives_up = 47 if window is SLIDING else 64
    for tokens, offered in ((gives_up, 0), (gives_up - 1, gives_up - 1)):
        request = world.prefill(tokens, prompt_logprobs=1)
        world.steps(6)
        assert request.num_prompt_tokens == tokens
        assert [offer.tokens for offer in world.agents[0].take(Offer) if offer.is_last] == [offered]


@WINDOWS
def test_a_prompt_in_a_routers_room_keeps_its_last_token(tmp_path: Path, window: Any) -> None:
    """Another engine may decode it, and goes on with the token that follows the whole prompt.

    It is offered even if vLLM gives up a block of the window with the last token: such an engine needs none of it.
    """
    world = World(tmp_path, specs=[FULL, window]).ready()
    for room, tokens in enumerate((40, 47 if window is SLIDING else 64), start=7):
        request = world.prefill(tokens, bootstrap_room=room)
        world.steps(8)
        assert request.num_prompt_tokens == tokens
        last = world.agents[0].take(Offer)[-1]
        assert (last.tokens, last.is_last) == (tokens, True)
        windows = [piece for piece in last.blocks if piece.group == 1]
        assert [piece.first * BLOCK for piece in windows] == [kept(window).first(tokens - (room == 7))]
        assert all(0 not in piece.ids for piece in windows)
        world.agent.say(Released(number=last.number, request="r"))
        world.run()
    world.assert_empty()


def test_a_prompts_own_list_is_left_alone_and_one_with_embeddings_whole(tmp_path: Path) -> None:
    world = World(tmp_path, specs=[FULL, SLIDING]).ready()
    given = list(range(500, 540))
    request = world.prefill(prompt=given)
    assert request.num_prompt_tokens == len(request.all_token_ids) == len(request.prompt_token_ids or ()) == 39
    assert len(given) == 40
    request.prompt_embeds = torch.zeros(39, 4)
    assert not can_be_short(request)


@WINDOWS
def test_who_waits_for_what_vllm_gives_up_hears_that_nothing_comes(tmp_path: Path, window: Any) -> None:
    world = World(tmp_path, specs=[FULL, window], role="kv_producer").ready()
    world.request(47 if window is SLIDING else 64, max_tokens=1)
    world.run()
    offer = world.agent.one(Offer)
    assert (offer.tokens, offer.blocks, offer.is_last) == (0, (), True) and offer.rendezvous.startswith("prompt-")
    world.agent.say(Released(number=offer.number, request="r"))
    world.steps(2)
    world.assert_empty()


@ODD_WINDOWS
def test_agents_move_what_the_adapter_takes_for_kept(window: Any) -> None:
    travels = Travels(window)
    for tokens in range(1, 201):
        assert travels.first(tokens) == (0, kept(window).first(tokens)), tokens


@ODD_WINDOWS
def test_a_prompt_that_comes_again_is_computed_from_rows_that_were_written(tmp_path: Path, window: Any) -> None:
    """vLLM's prefix cache takes a received window for whole blocks of it: all their rows must have come."""
    world = World(tmp_path, specs=[FULL, window], blocks=3000, budget=512).ready()
    travels, (agent,) = Travels(window, 3000), world.agents
    written: set[tuple[int, int, int]] = set()  # group, block, row
    running: list[Any] = []

    def entries() -> Any:
        return world.scheduler.kv_cache_manager.get_block_ids(running[0].request_id)

    def write(group: int, ids: Any, first: int, end: int) -> None:
        written.update((group, ids[token // BLOCK], token % BLOCK) for token in range(first, end))

    def on_decode() -> None:
        for group, ids in enumerate(entries()):
            write(group, ids, running[0].num_prompt_tokens - 1, running[0].num_prompt_tokens)

    def on_second() -> None:
        (new,) = world.scheduled.scheduled_new_reqs
        hits.append(hit := new.num_computed_tokens)
        size = window.sliding_window if kind_of(window) == "sliding" else window.attention_chunk_size
        begin = max(0, hit + 1 - size) if kind_of(window) == "sliding" else hit // size * size
        for group, (ids, first) in enumerate(zip(entries(), (0, begin), strict=True)):
            for token in range(first, hit):
                assert (group, ids[token // BLOCK], token % BLOCK) in written, (tokens, hit, group, token)

    hits: list[int] = []
    for tokens in (*range(18, 140, 3), 123):
        prompt = [tokens * 1000 + len(hits) * 200_000 + place for place in range(tokens)]
        world.on_forward = lambda: None
        running[:] = [world.decode(prompt=prompt, max_tokens=1)]
        world.steps(2)
        want = agent.one(Want)
        for piece, first in zip(want.blocks, travels.first(want.end_token), strict=True):
            assert piece.first == first // BLOCK and 0 not in piece.ids
            ids = dict(enumerate(piece.ids, piece.first))
            written -= {(piece.group, block, row) for block in piece.ids for row in range(BLOCK)}
            write(piece.group, ids, first, want.end_token)
        world.on_forward = on_decode
        agent.say(Done(number=want.number, request="r", moved_bytes=1, seconds=0.1))
        world.run()
        world.on_forward = on_second
        running[:] = [world.request(prompt=prompt, max_tokens=1)]
        world.run()
    assert max(hits) == 128 and len(set(hits)) > 5


def test_a_request_that_goes_on_is_not_offered_from_a_window(tmp_path: Path) -> None:
    world = World(tmp_path, specs=[FULL, SLIDING]).ready()
    world.agents[0].is_answering_withdrawals = True
    world.request(40, max_tokens=4, do_remote_decode=True, do_remote_prefill=False)
    world.run()
    (offer,) = world.agents[0].take(Offer)
    assert (offer.tokens, offer.blocks, offer.is_last) == (0, (), True)
    world.step()
    world.assert_empty()
