"""vLLM's real scheduler with the connector: an answer's KV is kept, and the next turn's prefill fetches it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from kvbridge_proto.common import MOST_PREFIXES, PREFIX_TOKENS
from kvbridge_proto.engine import (
    Abandon,
    Computed,
    Done,
    Expect,
    Failed,
    KeptBy,
    Offer,
    Reclaim,
    Released,
    Want,
    Withdraw,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.request import RequestStatus

from kvbridge.adapters.engine.prompts import PromptDigest
from testing.waiting import wait_for
from tests.integration.adapters.fake_agent import FakeAgent
from tests.integration.adapters.test_vllm_decode_side import done
from tests.integration.adapters.world import BLOCK, World

pytestmark = pytest.mark.vllm
KEEPS = {"kvbridge_return_s": 60.0}
THEIRS = "tcp://10.0.0.2:7700"


@pytest.fixture
def keeping(hooks: str, tmp_path: Path) -> World:
    return World(tmp_path, hooks=hooks, extra=KEEPS).ready()


def answered(world: World, tokens: int = 200, answer: int = 4, **more: Any) -> Any:
    """A request of the decode side that came by the bridge, up to the end of its answer."""
    request = world.decode(tokens, max_tokens=answer, **more)
    world.steps(2)
    if wants := world.agent.take(Want):
        world.agent.say(Done(number=wants[0].number, request="r", moved_bytes=1, seconds=0.1))
    for _ in range(answer + 4):
        world.step()
    world.agent.pump()
    return request


def prefixes(tokens: list[int]) -> tuple[bytes, ...]:
    return PromptDigest(()).prefixes(tokens, PREFIX_TOKENS, MOST_PREFIXES)


def kept_of(tokens: list[int], name: str = "kept-1") -> KeptBy:
    return KeptBy(sender=THEIRS, rendezvous=name, prefixes=prefixes(tokens))


# Decode:


def test_an_answer_is_offered_with_its_prompt_and_its_blocks_stay(keeping: World) -> None:
    agent = keeping.agent
    request = answered(keeping, 200, answer=70)
    offer = agent.one(Offer)
    tokens = list(request.all_token_ids)
    assert len(tokens) == 270
    assert (offer.tokens, offer.is_last, offer.is_more, offer.hold_s) == (269, True, False, 60.0)  # the last has no KV
    assert offer.prefixes == prefixes(tokens[:269]) and len(offer.prefixes) == 4
    assert [(piece.group, piece.first, len(piece.ids)) for piece in offer.blocks] == [(0, 0, 17)]
    assert keeping.connector.scheduler.held
    assert keeping.free_blocks < keeping.cache.num_blocks - 1
    agent.say(Released(number=offer.number, request="r"))
    keeping.finish()


def test_two_answers_are_kept_under_different_names(keeping: World) -> None:
    for _ in range(2):
        answered(keeping)
    first, second = keeping.agent.take(Offer)
    assert first.rendezvous != second.rendezvous and first.number != second.number
    for offer in (first, second):
        keeping.agent.say(Released(number=offer.number, request="r"))
    keeping.finish()


def test_without_the_option_nothing_is_kept(world: World, agent: FakeAgent) -> None:
    answered(world)
    assert not agent.take(Offer)
    world.finish()


@pytest.mark.parametrize("tokens", [1, 3])
def test_what_came_by_no_bridge_is_kept_too(keeping: World, tokens: int) -> None:
    request = keeping.request(200, max_tokens=tokens)
    for _ in range(20):
        keeping.step()
    offer = keeping.agent.one(Offer)
    assert offer.tokens == 199 + tokens and offer.prefixes == prefixes(list(request.all_token_ids)[: 199 + tokens])
    keeping.agent.say(Released(number=offer.number, request="r"))
    keeping.finish()


def test_nothing_is_kept_while_the_weights_have_no_name(keeping: World) -> None:
    keeping.connector.scheduler.cache_is_reset()
    keeping.request(200)
    keeping.steps(12)
    assert not keeping.agent.take(Offer)
    keeping.finish()


@pytest.mark.parametrize("first", ["prompt", "kept"])
def test_a_prompt_is_offered_for_decode_and_kept_for_others_in_the_same_blocks(keeping: World, first: str) -> None:
    """They are free once both offers are over, whichever ends first."""
    request = keeping.prefill(200)
    keeping.steps(8)
    *pieces, kept = keeping.agent.take(Offer)
    prompt = pieces[-1]
    assert (prompt.is_last, prompt.tokens, prompt.prefixes) == (True, 200, ())
    assert (kept.is_last, kept.tokens, kept.prefixes) == (True, 200, prefixes(list(request.prompt_token_ids)))
    assert kept.number != prompt.number and kept.rendezvous != prompt.rendezvous and kept.most_kept
    ids = [block for piece in pieces for each in piece.blocks for block in each.ids]
    assert list(kept.blocks[0].ids) == ids
    free = keeping.free_blocks
    ends = [prompt, kept] if first == "prompt" else [kept, prompt]
    keeping.agent.say(Released(number=ends[0].number, request="r"))
    keeping.steps(3)
    assert keeping.free_blocks == free and keeping.connector.scheduler.held
    keeping.agent.say(Released(number=ends[1].number, request="r"))
    keeping.finish()


def test_a_prompt_that_is_not_offered_whole_is_not_kept(keeping: World) -> None:
    request = keeping.prefill(200)
    keeping.steps(2)
    keeping.abort(request)
    keeping.agent.is_answering_withdrawals = True
    keeping.steps(4)
    assert not [each for each in keeping.agent.take(Offer) if each.prefixes]
    keeping.finish()


@pytest.mark.parametrize("lost", [False, True])
def test_without_an_agent_the_blocks_of_both_are_free(keeping: World, lost: bool) -> None:
    keeping.prefill(200)
    keeping.steps(3)
    if lost:
        keeping.agent.let_go()
    keeping.steps(8)
    keeping.agent.let_go()
    for _ in range(5):
        keeping.step()
        keeping.clock.now += 1
    keeping.finish()


def running(world: World, sampled: int = 4) -> Any:
    """A request of the decode side that came by the bridge, after so many tokens of its answer."""
    request = world.decode(200, max_tokens=500)
    world.steps(2)
    world.agent.say(done(world.agent.one(Want)))
    for _ in range(200):
        if request.num_output_tokens == sampled:
            return request
        world.step()
    raise AssertionError(request)


@pytest.mark.parametrize("moment", ["between two steps", "in a step"])
def test_an_answer_that_its_client_ends_is_kept_so_that_another_engine_can_go_on(keeping: World, moment: str) -> None:
    request = running(keeping, 60)
    begun = keeping.begin_step() if moment == "in a step" else None
    keeping.abort(request)
    if begun is not None:
        keeping.end_step(*begun)
    keeping.steps(2)
    offer, tokens = keeping.agent.one(Offer), list(request.all_token_ids)
    assert (offer.tokens, offer.is_last, len(tokens)) == (259, True, 260)
    assert offer.prefixes == prefixes(tokens[:259]) and len(offer.prefixes) == 4
    keeping.agent.say(Released(number=offer.number, request="r"))
    keeping.finish()


def test_what_a_preemption_took_is_not_kept(keeping: World) -> None:
    request = running(keeping)
    keeping.scheduler.running.remove(request)
    keeping.scheduler._preempt_request(request, 0.0)
    keeping.abort(request)
    keeping.steps(2)
    assert not keeping.agent.take(Offer)
    keeping.finish()


def test_what_is_still_being_fetched_is_not_kept(keeping: World) -> None:
    """vLLM counts a preempted request's tokens as computed while they are fetched from one that keeps them."""
    request = keeping.request(200, max_tokens=500)
    for _ in range(10):
        keeping.step()
    hear(keeping, kept_of(list(request.prompt_token_ids)))
    assert request.num_output_tokens > 4
    keeping.scheduler.running.remove(request)
    keeping.scheduler._preempt_request(request, 0.0)
    assert keeping.scheduler.kv_cache_manager.block_pool.reset_prefix_cache()
    keeping.steps(3)
    want = keeping.agent.one(Want)
    assert request.num_computed_tokens >= 64
    keeping.abort(request)
    keeping.steps(2)
    keeping.agent.say(done(want))
    keeping.steps(3)
    assert not [each for each in keeping.agent.take(Offer) if each.prefixes]
    keeping.finish()


@pytest.mark.parametrize("end", ["aborted before its prompt came", "short", "paused", "salted", "of two weights"])
def test_which_answers_are_kept(keeping: World, end: str) -> None:
    if end == "aborted before its prompt came":
        request = keeping.decode(200, max_tokens=50)
        keeping.steps(2)
        want = keeping.agent.one(Want)
        keeping.abort(request)
        keeping.steps(2)
        keeping.agent.say(done(want))
        keeping.steps(2)
    elif end == "of two weights":  # a pause may keep running requests, with their rows
        keeping.decode(200, max_tokens=20)
        keeping.steps(2)
        keeping.agent.say(done(keeping.agent.one(Want)))
        keeping.steps(4)
        keeping.connector.scheduler.weights_are("next")
        keeping.run(100)
    elif end == "short":
        answered(keeping, 40)
    elif end == "paused":
        keeping.connector.scheduler.pauses()
        answered(keeping)
    else:
        request = answered(keeping, kv={"cache_salt": "mine"})
        offer = keeping.agent.one(Offer)
        assert offer.prefixes[0] != prefixes(list(request.all_token_ids))[0]
        keeping.agent.say(Released(number=offer.number, request="r"))
    assert not keeping.agent.take(Offer)
    keeping.finish()


def test_no_more_than_half_of_the_blocks_is_kept_but_the_latest_answers(hooks: str, tmp_path: Path) -> None:
    keeping = World(tmp_path, hooks=hooks, blocks=60, extra=KEEPS).ready()
    answered(keeping, 500)  # 32 blocks, which is more than half
    assert not keeping.agent.take(Offer)
    for _ in range(3):
        answered(keeping, 200)  # 13 blocks each
    offers = keeping.agent.take(Offer)
    assert [offer.most_kept for offer in offers] == [30] * 3, "the agent knows which of them are being released"
    assert not keeping.agent.take(Reclaim), "this could take prompts, too"
    for offer in offers:
        keeping.agent.say(Released(number=offer.number, request="r"))
    keeping.finish()


def test_other_requests_get_the_blocks_of_what_is_kept(hooks: str, tmp_path: Path) -> None:
    keeping = World(tmp_path, hooks=hooks, blocks=40, caching=False, extra=KEEPS).ready()
    answered(keeping, 200)
    offer = keeping.agent.one(Offer)
    keeping.request(500, max_tokens=1)  # 32 blocks of 26 that are free
    keeping.clock.now += 1
    keeping.steps(9)
    assert keeping.agent.take(Reclaim)
    keeping.agent.say(Released(number=offer.number, request="r", code="reclaimed"))
    keeping.finish()


def test_windows_are_not_kept(hooks: str, tmp_path: Path) -> None:
    full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    window = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=64)
    keeping = World(tmp_path, hooks=hooks, specs=(full, window), extra=KEEPS).ready()
    answered(keeping)
    assert not keeping.agent.take(Offer)
    keeping.finish()


# Prefill:


def test_a_prompt_that_goes_on_from_another_engine_waits_until_that_is_kept(world: World, agent: FakeAgent) -> None:
    said, prompt = turns(world, before=260, more=5)
    hear(world, kept_of(said[:100], "kept-of-an-earlier-turn"))
    request = world.prefill(prompt=prompt, awaits_kept=True)
    world.steps(5)
    assert not agent.take(Want) and request.num_computed_tokens == 0
    hear(world, kept_of(said))
    world.steps(3)
    want = agent.one(Want)
    assert (want.rendezvous, want.first_token, want.end_token) == ("kept-1", 0, 256)
    agent.say(done(want))
    world.steps(4)
    assert agent.one(Offer).tokens == len(prompt)
    agent.say(Released(number=1, request="r"))


@pytest.mark.parametrize("why", ["nobody keeps it", "it is short", "it is cached here"])
def test_such_a_prompt_waits_no_longer_than_it_may_and_only_for_what_it_needs(world: World, why: str) -> None:
    _, prompt = turns(world, before=60 if why == "it is short" else 260, more=3)
    if why == "it is cached here":
        world.request(prompt=prompt, max_tokens=1)
        world.run()
    request = world.prefill(prompt=prompt, awaits_kept=True)
    if why == "nobody keeps it":
        world.steps(5)
        assert request.num_computed_tokens == 0
        world.clock.now += 1.0
    world.steps(8)
    assert request.num_computed_tokens >= len(prompt) and not world.agent.take(Want)


def hear(world: World, kept: KeptBy) -> None:
    world.agents[0].say(kept)
    world.step()


def fetching(world: World) -> tuple[Any, Want]:
    """The next turn's prompt at prefill, and what it wants of the answer that is kept."""
    said, prompt = turns(world)
    hear(world, kept_of(said))
    request = world.prefill(prompt=prompt)
    world.steps(3)
    return request, world.agent.one(Want)


def turns(world: World, before: int = 150, more: int = 80) -> tuple[list[int], list[int]]:
    """The tokens of a turn with its answer, and the prompt of the next."""
    said = [5000 + i for i in range(before)]
    return said, said + [9000 + i for i in range(more)]


def test_the_next_turns_prefill_fetches_what_is_kept_and_offers_the_whole(world: World, agent: FakeAgent) -> None:
    assert agent.attaches[0].takes_kept
    request, want = fetching(world)
    assert (want.sender, want.rendezvous, want.is_offered) == (THEIRS, "kept-1", True)
    assert (want.first_token, want.end_token) == (0, 128)  # two prefixes of 64
    assert [(piece.first, len(piece.ids)) for piece in want.blocks] == [(0, 8)]
    assert not agent.take(Offer)
    agent.say(done(want))
    world.steps(4)
    offers = agent.take(Offer)
    assert offers[0].tokens == 128 + 64 and offers[-1].is_last and offers[-1].tokens == 230  # 64 tokens a step
    ids = [block for offer in offers for piece in offer.blocks for block in piece.ids]
    assert len(ids) == len(set(ids)) == 15 and tuple(ids[:8]) == want.blocks[0].ids
    agent.say(Released(number=offers[-1].number, request="r"))
    world.finish()
    assert request.num_prompt_tokens == 230


def test_if_it_does_not_come_the_prompt_is_computed(world: World, agent: FakeAgent) -> None:
    said, prompt = turns(world)
    hear(world, kept_of(said))
    world.prefill(prompt=prompt)
    world.steps(3)
    want = agent.one(Want)
    assert want.deadline_s <= 5
    agent.say(Failed(number=want.number, request="r", code="unknown_offer", reason="it is gone"))
    world.steps(6)
    offers = agent.take(Offer)
    assert offers[0].tokens == 64 and offers[-1].is_last
    assert agent.one(Computed).tokens == 128
    agent.say(Released(number=offers[-1].number, request="r"))
    world.finish()


def end_all(world: World) -> None:
    """All prompts were fetched."""
    for offer in [each for each in world.agent.take(Offer) if each.is_last]:
        world.agent.say(Released(number=offer.number, request="r"))
    world.finish()


@pytest.mark.parametrize("is_good", [True, False])
def test_two_prompts_that_begin_so_fetch_it_once(world: World, agent: FakeAgent, is_good: bool) -> None:
    said, prompt = turns(world)
    hear(world, kept_of(said))
    first, second = world.prefill(prompt=prompt), world.prefill(prompt=[*said, *range(90)])
    world.steps(3)
    (want,) = agent.take(Want)
    assert not agent.take(Offer)
    end = done(want) if is_good else Failed(number=want.number, request="r", code="kept_no_longer", reason="gone")
    agent.say(end)
    world.steps(12)
    assert not agent.take(Want)
    offers = agent.take(Offer)
    for request in (first, second):
        pieces = [each for each in offers if each.request == request.request_id]
        assert pieces[0].tokens > 128 or not is_good, "steps compute 64 tokens at most"
        agent.say(Released(number=pieces[-1].number, request="r"))
    world.finish()


def test_without_a_prefix_cache_each_fetches_it(hooks: str, tmp_path: Path) -> None:
    world = World(tmp_path, hooks=hooks, caching=False).ready()
    said, prompt = turns(world)
    hear(world, kept_of(said))
    for last in (1, 2):
        world.prefill(prompt=[*prompt, last])
    world.steps(3)
    wants = world.agent.take(Want)
    assert [(each.rendezvous, each.end_token) for each in wants] == [("kept-1", 128)] * 2
    assert not set(wants[0].blocks[0].ids) & set(wants[1].blocks[0].ids)
    for want in wants:
        world.agent.say(done(want))
    world.steps(12)
    end_all(world)


def test_if_the_first_is_gone_the_second_fetches_it(world: World, agent: FakeAgent) -> None:
    said, prompt = turns(world)
    hear(world, kept_of(said))
    first = world.prefill(prompt=prompt)
    world.prefill(prompt=[*prompt, 1])
    world.steps(3)
    want = agent.one(Want)
    world.abort(first)
    world.steps(2)
    agent.say(done(want))
    world.steps(3)
    for again in agent.take(Want):
        agent.say(done(again))
    world.steps(12)
    end_all(world)


def test_it_is_fetched_again_once_our_own_cache_has_lost_it_unless_that_failed(world: World, agent: FakeAgent) -> None:
    said, prompt = turns(world)
    hear(world, kept_of(said))
    for turn, comes in enumerate((True, False, False)):
        world.prefill(prompt=[*prompt, turn])
        world.steps(3)
        wants = agent.take(Want)
        assert len(wants) == (turn < 2), "what failed once is not waited for again"
        for want in wants:
            bad = Failed(number=want.number, request="r", code="deadline", reason="late")
            agent.say(done(want) if comes else bad)
        world.steps(10)
        end_all(world)
        assert world.scheduler.reset_prefix_cache() or True
        world.connector.scheduler.weights_are("default")


def test_a_request_that_nobody_tagged_fetches_what_is_kept(world: World, agent: FakeAgent) -> None:
    """Engines that do both fetch from each other; so does decode where a router has no prompt prefilled."""
    said, prompt = turns(world)
    hear(world, kept_of(said))
    request = world.request(prompt=prompt, max_tokens=3)
    world.steps(3)
    want = agent.one(Want)
    assert (want.first_token, want.end_token, want.rendezvous) == (0, 128, "kept-1")
    agent.say(done(want))
    world.run()
    assert [each.tokens for each in agent.take(Computed)] == [230 - 1 - 128]
    assert request.num_output_tokens == 3
    world.finish()


@pytest.mark.parametrize("comes", [True, False])
def test_a_request_that_does_not_get_what_it_was_offered_fetches_what_is_kept(
    world: World, agent: FakeAgent, comes: bool
) -> None:
    """Such as another answer to one prompt at another engine: the first has taken the offer."""
    said, prompt = turns(world)
    hear(world, kept_of(said))
    hear(world, kept_of(said, "kept-2"))
    request = world.decode(prompt=prompt, max_tokens=2)
    world.steps(3)
    want = agent.one(Want)
    assert want.rendezvous not in ("kept-1", "kept-2") and want.end_token == 229
    agent.say(Failed(number=want.number, request="r", code="already_fetched", reason="taken"))
    world.steps(3)
    kept = agent.one(Want)
    assert (kept.rendezvous, kept.first_token, kept.end_token) == ("kept-2", 0, 128)
    agent.say(done(kept) if comes else Failed(number=kept.number, request="r", code="unknown_offer", reason="none"))
    world.run()
    assert not agent.take(Want), "of what is kept it asks once"
    assert request.num_output_tokens == 2
    world.finish()


@pytest.mark.parametrize("why", ["gone", "other tokens", "salt", "cached", "short", "logprobs", "no weights"])
def test_what_is_not_fetched(world: World, agent: FakeAgent, why: str) -> None:
    said, prompt = turns(world)
    more: dict[str, Any] = {}
    if why == "cached":
        world.request(prompt=prompt, max_tokens=1)
        world.run()
    hear(world, kept_of(said[:40] if why == "short" else said))
    if why == "gone":
        hear(world, KeptBy(sender=THEIRS, rendezvous="kept-1"))
    elif why == "other tokens":
        prompt = [1, *prompt[1:]]
    elif why == "salt":
        more["kv"] = {"cache_salt": "theirs"}
    elif why == "logprobs":
        more["prompt_logprobs"] = 1
    elif why == "no weights":
        world.connector.scheduler.cache_is_reset()
    world.prefill(prompt=prompt, **more)
    world.steps(8)
    assert not agent.take(Want)
    for offer in [each for each in agent.take(Offer) if each.is_last]:
        agent.say(Released(number=offer.number, request="r"))
    world.step()
    world.finish()
    if why == "cached":  # nothing was taken: it is there for a prompt that needs it
        assert agent.take(Abandon) and "kept-1" in world.connector.scheduler._kept


def test_an_engine_at_rest_asks_what_it_was_told_meanwhile(world: World, agent: FakeAgent) -> None:
    """An agent's word is read in steps, and an idle engine makes none."""
    said, prompt = turns(world)
    hear(world, kept_of([1] * 64, "other"))
    world.clock.now += 0.02
    agent.say(kept_of(said))
    world.prefill(prompt=prompt)
    world.steps(3)
    want = agent.one(Want)
    agent.say(done(want))
    world.steps(4)
    agent.say(Released(number=agent.take(Offer)[-1].number, request="r"))
    world.finish()


@pytest.mark.parametrize("rests_s", [0.0, 1.0], ids=["at once", "after the workers were asked"])
def test_a_prompt_that_queues_holds_what_is_kept(hooks: str, tmp_path: Path, rests_s: float) -> None:
    world = World(tmp_path, hooks=hooks, blocks=20, caching=False).ready()
    agent = world.agent
    said, prompt = turns(world)
    hear(world, kept_of(said))
    running = world.request(200, max_tokens=20)
    world.steps(4)
    world.clock.now += rests_s
    queued = world.prefill(prompt=prompt)
    world.steps(3)
    expected = agent.one(Expect)
    assert (expected.rendezvous, expected.sender) == ("kept-1", THEIRS)
    agent.is_answering_withdrawals = True
    world.abort(queued)
    world.abort(running)
    world.steps(2)  # until the agent has answered the withdrawal
    world.finish()
    assert expected.number in {each.number for each in agent.take(Abandon)} and not agent.take(Want)


def test_a_new_agent_tells_again(world: World, agent: FakeAgent) -> None:
    said, _ = turns(world)
    hear(world, kept_of(said))
    agent.let_go()
    for _ in range(3):
        world.step()
        world.clock.now += 1
    assert not world.connector.scheduler._kept
    world.finish()


def test_an_engine_that_may_fail_its_requests_wants_to_hear_nothing(hooks: str, tmp_path: Path) -> None:
    world = World(tmp_path, hooks=hooks, on_failure="fail").ready()
    assert not world.agent.attaches[0].takes_kept


def test_only_the_first_rank_hears(hooks: str, tmp_path: Path) -> None:
    world = World(tmp_path, hooks=hooks, tp=2).ready()
    assert [agent.attaches[0].takes_kept for agent in world.agents] == [True, False]
    said, prompt = turns(world)
    hear(world, kept_of(said))
    world.prefill(prompt=prompt)
    world.steps(3)
    wants = [agent.one(Want) for agent in world.agents]
    assert wants[0].common == wants[1].common and {each.end_token for each in wants} == {128}
    for agent, want in zip(world.agents, wants, strict=True):
        agent.say(done(want))
    world.steps(4)
    for agent in world.agents:
        agent.say(Released(number=agent.take(Offer)[-1].number, request="r"))
    world.finish()


def test_a_preempted_prompt_computes_what_it_had_fetched(world: World, agent: FakeAgent) -> None:
    request, want = fetching(world)
    agent.say(done(want))
    world.steps(2)
    agent.is_answering_withdrawals = True
    with agent.alive():
        world.scheduler.reset_prefix_cache(reset_running_requests=True)
        world.steps(8)
    assert request.num_prompt_tokens == 230
    for offer in [each for each in agent.take(Offer) if each.is_last]:
        agent.say(Released(number=offer.number, request="r"))
    agent.take(Withdraw)
    world.finish()


def test_rows_fetched_under_old_weights_are_not_offered_under_new(world: World, agent: FakeAgent) -> None:
    request, want = fetching(world)
    agent.say(done(want))
    for _ in range(9):  # until vLLM has been told of its rows, and has not scheduled it yet
        scheduled, result = world.begin_step()
        world.end_step(scheduled, result)
        if (
            request.request_id in world.scheduler.finished_recving_kv_req_ids
            or request.status != RequestStatus.WAITING_FOR_REMOTE_KVS
        ):
            break
    assert request.num_computed_tokens in (0, 128) and not agent.take(Offer), request
    assert not world.connector.scheduler._sending[request.request_id].tables
    world.connector.scheduler.weights_are("new")
    world.steps(6)
    offers = agent.take(Offer)
    for offer in [each for each in offers if each.is_last]:
        agent.say(Released(number=offer.number, request="r"))
    assert not [each for each in offers if each.tokens], offers
    world.step()
    world.finish()


def test_a_prompt_is_asked_for_once(world: World, agent: FakeAgent) -> None:
    hear(world, kept_of([1] * 64))
    world.prefill(100)
    for _ in range(60):
        world.clock.now += 0.006
        world.step()
    offers = agent.take(Offer)
    assert offers
    agent.say(Released(number=offers[-1].number, request="r"))
    world.finish()


def test_an_idle_engine_holds_no_more_than_is_kept(world: World, agent: FakeAgent) -> None:
    """The link's own thread reads what comes while the engine makes no step."""
    link = world.workers[0].worker._conversation._link
    for number in range(100):
        agent.say(kept_of([1] * 64, f"k{number}"))
        agent.say(KeptBy(sender=THEIRS, rendezvous=f"k{number}"))
    agent.say(kept_of([1] * 64, "last"))
    wait_for(lambda: "last" in link._kept)
    assert list(link._kept) == ["last"] and not link._heard


assert PREFIX_TOKENS % BLOCK == 0
