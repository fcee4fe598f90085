"""Groups that keep a window only: which blocks are offered and wanted, with vLLM's real scheduler and managers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from kvbridge_proto.engine import Done, Offer, Released, Want
from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

from kvbridge.adapters.vllm_pieces import Kept

from .world import BLOCK, World

pytestmark = pytest.mark.vllm

COMMON: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
FULL = FullAttentionSpec(**COMMON)
SLIDING = SlidingWindowSpec(**COMMON, sliding_window=2 * BLOCK)
CHUNKED = ChunkedLocalAttentionSpec(**COMMON, attention_chunk_size=2 * BLOCK)
WINDOWS = pytest.mark.parametrize("window", [SLIDING, CHUNKED], ids=["sliding", "chunked"])


def kept(window: Any) -> Kept:
    return Kept(BLOCK, "sliding", 2 * BLOCK) if window is SLIDING else Kept(BLOCK, "chunked", 2 * BLOCK)


@pytest.mark.parametrize(
    ("manager", "spec"), [(SlidingWindowManager, SLIDING), (ChunkedLocalAttentionManager, CHUNKED)]
)
def test_keeps_what_vllms_own_manager_keeps(manager: Any, spec: Any) -> None:
    one = manager.__new__(manager)
    one.sliding_window = one.attention_chunk_size = 2 * BLOCK
    one.extra_retained_tokens = 0
    for tokens in range(6 * BLOCK):
        assert kept(spec).first(tokens) == one.get_num_skipped_tokens(tokens) // BLOCK * BLOCK


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("window", "refused"), [(SLIDING, range(47, 201, 16)), (CHUNKED, range(32, 201, 32))], ids=["sliding", "chunked"]
)
def test_whatever_is_offered_is_held_until_it_is_released(
    tmp_path: Path, window: Any, refused: range, is_async: bool
) -> None:
    """For every length of a prompt: vLLM gives blocks of a window up just before it asks us what to keep."""
    world = World(tmp_path, specs=[FULL, window], async_scheduling=is_async).ready()
    (agent,) = world.agents
    blocks = world.scheduler.kv_cache_manager.block_pool.blocks
    not_served = []
    for tokens in range(1, 201):
        request = world.prefill(tokens)
        params: list[Any] = []
        for _ in range(9):
            result = world.step()
            params += [one.kv_transfer_params for one in (result.outputs if result else ()) if one.finished]
        assert request.is_finished() and len(params) == 1
        offers = agent.take(Offer)
        for offer in offers:
            for piece in offer.blocks:
                assert 0 not in piece.ids and all(blocks[entry].ref_cnt == 1 for entry in piece.ids), tokens
        assert [offer.tokens for offer in offers if offer.is_last] == ([tokens] if params[0] else [])
        if not params[0]:
            not_served.append(tokens)
            assert not offers
        for offer in offers[-1:]:
            agent.say(Released(request=offer.request))
        world.run()
        world.assert_empty()
    assert not_served == list(refused)


@WINDOWS
def test_who_waits_for_what_vllm_gives_up_hears_that_nothing_comes(tmp_path: Path, window: Any) -> None:
    world = World(tmp_path, specs=[FULL, window], role="kv_producer").ready()
    (agent,) = world.agents
    world.request(47 if window is SLIDING else 64, max_tokens=1)
    world.run()
    offer = agent.one(Offer)
    assert (offer.tokens, offer.blocks, offer.is_last) == (0, (), True) and offer.room.startswith("prompt-")
    agent.say(Released(request=offer.request))
    world.steps(2)
    world.assert_empty()


@WINDOWS
def test_a_window_comes_with_the_last_offer_and_is_in_no_block_that_was_given_up(tmp_path: Path, window: Any) -> None:
    world = World(tmp_path, specs=[FULL, window], budget=2 * BLOCK).ready()
    (agent,) = world.agents
    tokens = 7 * BLOCK + 3
    request = world.prefill(tokens)
    tables: list[Any] = []  # as vLLM has them when a forward runs; what it has given up by then is its null block
    world.on_forward = lambda: tables.append(world.scheduler.kv_cache_manager.get_block_ids(request.request_id))
    world.steps(8)
    offers = agent.take(Offer)
    assert len(offers) == 4 and offers[-1].is_last and offers[-1].tokens == tokens
    assert [piece.group for offer in offers[:-1] for piece in offer.blocks] == [0, 0, 0]
    full, late = offers[-1].blocks
    first = kept(window).first(tokens - 1) // BLOCK
    assert (full.group, late.group, late.first) == (0, 1, first)
    assert first > 0 and len(late.ids) == 8 - first
    assert 0 in tables[-1][1] and 0 not in late.ids
    assert list(late.ids) == tables[-1][1][first:] and list(offers[0].blocks[0].ids) == tables[-1][0][:2]


@WINDOWS
def test_wants_the_window_only(tmp_path: Path, window: Any) -> None:
    world = World(tmp_path, specs=[FULL, window]).ready()
    (agent,) = world.agents
    tokens = 7 * BLOCK + 3
    request = world.decode(tokens)
    world.steps(3)
    want = agent.one(Want)
    full, late = want.blocks
    tables = world.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    first = kept(window).first(tokens - 1) // BLOCK
    assert (want.first_token, want.end_token) == (0, tokens - 1)
    assert (full.group, full.first, list(full.ids)) == (0, 0, tables[0])
    assert (late.group, late.first, list(late.ids)) == (1, first, tables[1][first:])
    assert set(tables[1][:first]) == {0} and 0 not in late.ids
    agent.say(Done(request=want.request, moved_bytes=1, seconds=0.1))
    world.run()
    world.assert_empty()


def test_a_window_that_ends_with_the_tokens_wants_no_block_of_it(tmp_path: Path) -> None:
    world = World(tmp_path, specs=[FULL, CHUNKED]).ready()
    world.decode(6 * BLOCK + 1)
    world.steps(3)
    _, late = world.agents[0].one(Want).blocks
    assert (late.first, late.ids) == (6, ())


def test_a_request_that_goes_on_is_not_offered_from_a_window(tmp_path: Path) -> None:
    world = World(tmp_path, specs=[FULL, SLIDING]).ready()
    world.request(40, max_tokens=4, do_remote_decode=True, do_remote_prefill=False)
    world.run()
    assert world.agents[0].take(Offer) == []
    world.assert_empty()
