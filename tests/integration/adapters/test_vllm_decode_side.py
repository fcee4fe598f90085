"""vLLM's real scheduler with the connector, on the decode side."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from kvbridge_proto.engine import Abandon, Computed, Directory, Done, Failed, Offer, Refused, Released, Want
from msgspec.structs import replace
from vllm.config import VllmConfig
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.request import Request, RequestStatus

from kvbridge.adapters.engine.prompts import DIGEST_BYTES, PromptDigest, rendezvous
from kvbridge.adapters.vllm.rendezvous import prompt_digest
from kvbridge.adapters.vllm.token_limits import TokenLimits
from tests.integration.adapters.fake_agent import FakeAgent, squatter
from tests.integration.adapters.world import BLOCK, World

pytestmark = pytest.mark.vllm


def done(want: Want) -> Done:
    return Done(number=want.number, request="r", moved_bytes=1, seconds=0.1)


def failed(want: Want) -> Failed:
    return Failed(number=want.number, request="r", code="peer_gone", reason="it left")


@pytest.mark.proves("T40")
def test_a_reason_that_is_a_line_of_its_own_forges_no_line_in_the_engines_log(
    world: World, agent: FakeAgent, vllms_log: pytest.LogCaptureFixture
) -> None:
    forged = "it left\nINFO 11-21 00:00:00 [core.py:1] all is well\x1b[2J" + "x" * 900
    world.decode(40)
    world.steps(3)
    agent.say(Failed(number=agent.one(Want).number, request="r", code="peer_lost\n", reason=forged))
    world.finish()
    told = [record.getMessage() for record in vllms_log.records if "KV not received" in record.getMessage()]
    assert told and all(text.isprintable() and "peer_lost\\x0a: it left\\x0aINFO" in text for text in told)


TRACE, OTHER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "00-" + "1" * 32 + "-" + "2" * 16 + "-00"


@pytest.mark.parametrize(
    ("headers", "params", "traceparent"),
    [
        ({"traceparent": TRACE}, {"traceparent": OTHER}, TRACE),
        (None, {"traceparent": OTHER}, OTHER),
        ({"tracestate": "a=b"}, {}, ""),
        (None, {"traceparent": TRACE + "0" * 300}, ""),
        (None, {"traceparent": 7}, ""),
    ],
    ids=["vLLM's own", "the client's", "none", "too long", "a number"],
)
def test_both_sides_name_the_span_that_a_request_belongs_to(
    world: World, agent: FakeAgent, headers: dict[str, str] | None, params: dict[str, Any], traceparent: str
) -> None:
    world.decode(40, kv={"trace_headers": headers}, **params)
    world.prefill(40, kv={"trace_headers": headers}, **params)
    world.steps(3)
    assert agent.one(Want).traceparent == agent.one(Offer).traceparent == traceparent


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"remote_host": "h\ud800"}, "remote_host: 'h\\ud800', must be valid UTF-8 text"),
        ({"remote_request_id": "\udfff/0/0123456789abcdef0123456789abcdef01234567"}, "remote_request_id: "),
        ({"remote_key": "\ud800"}, "remote_key: "),
        ({"remote_port": [1]}, "remote_port: list, must be text or a number"),
        ({"remote_port": 10**5000}, "remote_port: int, must be"),
        ({"remote_host": "x" * 300}, "longer than the wire allows"),
        ({"remote_host": ""}, "without request, host or port"),
    ],
    ids=["host", "request", "key", "list", "number", "long", "none"],
)
def test_words_that_no_message_can_hold_are_refused_by_name_and_the_prompt_computed_here(
    world: World, said: dict[str, Any], reason: str, vllms_log: pytest.LogCaptureFixture
) -> None:
    request = world.decode(40, name="cmpl-\ud800-0-1a2b3c4d", **said)
    world.steps(3)
    assert request.num_computed_tokens >= 40 and not world.agents[0].take(Want)
    (told,) = [record.getMessage() for record in vllms_log.records if "computed here" in record.getMessage()]
    assert reason in told and told.isprintable()
    world.finish()


@pytest.mark.parametrize("is_async", [False, True], ids=["in-step", "async-scheduling"])
def test_wants_all_but_the_last_token_and_runs_when_they_are_there(tmp_path: Path, is_async: bool) -> None:
    world = World(tmp_path, async_scheduling=is_async).ready()
    request = world.decode(40)
    world.steps(3)
    want = world.agent.one(Want)
    assert (want.first_token, want.end_token, want.deadline_s) == (0, 39, 60.0)
    assert [(p.group, p.first, list(p.ids)) for p in want.blocks] == [(0, 0, world.block_ids(request))]
    assert (want.rendezvous, want.sender) == (f"theirs/0/{prompt_digest(request)}", "tcp://10.0.0.1:7700")
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS

    world.agent.say(done(want))
    world.steps(2)
    assert request.status == RequestStatus.RUNNING
    assert request.num_computed_tokens <= 40 + 1, "only the last prompt token was left to compute"
    world.finish()


@pytest.mark.parametrize("is_async", [False, True], ids=["in-step", "async-scheduling"])
def test_rests_for_rows_from_the_first_step_on_but_never_beside_a_batch(tmp_path: Path, is_async: bool) -> None:
    world = World(tmp_path, async_scheduling=is_async).ready()
    worker = world.workers[0].worker

    def rests(steps: int) -> list[bool]:
        return [worker._rest_s > 0.0 for _ in range(steps) if world.step() or True]

    world.decode(40)
    assert rests(3) == [True] * 3
    want = world.agent.one(Want)
    running = world.request(40, max_tokens=6)
    while running.status != RequestStatus.FINISHED_LENGTH_CAPPED:
        assert rests(1) == [False]
    assert rests(2) == [True] * 2
    world.agent.say(done(want))
    world.finish()


def test_blocks_for_drafts_to_come_are_not_fetched(world: World, agent: FakeAgent) -> None:
    """vLLM adds them once the rows are there (0.32); until then the request has the blocks of its computed tokens."""
    world.scheduler.num_lookahead_tokens = 40
    request = world.decode(40)
    world.steps(3)
    want = agent.one(Want)
    assert want.end_token == 39 and [len(piece.ids) for piece in want.blocks] == [3]
    agent.say(done(want))
    world.steps(2)
    assert len(world.block_ids(request)) > 3 and world.block_ids(request)[:3] == list(want.blocks[0].ids)
    world.finish()


@pytest.mark.parametrize(("modules", "windows", "left"), [(0, False, 1), (1, False, 1), (3, False, 3), (3, True, 1)])
def test_as_many_tokens_are_computed_again_as_a_draft_looks_ahead(
    tmp_path: Path, modules: int, windows: bool, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the prefill side the last modules' rows of these tokens come from guesses."""
    monkeypatch.setattr(VllmConfig, "num_prefill_lookahead_tokens", property(lambda config: modules))
    common = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    specs = [FullAttentionSpec(**common), SlidingWindowSpec(**common, sliding_window=32)] if windows else ()
    world = World(tmp_path, specs=specs).ready()
    world.decode(40)
    world.steps(3)
    want = world.agent.one(Want)
    assert (want.first_token, want.end_token) == (0, 40 - left)
    world.agent.say(done(want))
    world.finish()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
def test_memory_goes_to_no_agent_of_a_user_who_is_not_named(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        strangers, named = World(tmp_path), World(tmp_path, extra={"kvbridge_agent_uids": [65534]})
        strangers.folder = named.folder = Path(folder)
        with squatter(strangers.path(0)) as (_, heard):
            strangers.attach()
            strangers.decode(40)
            strangers.finish()  # as without an agent: it computes
            strangers.assert_empty()
            assert heard() == b""
            named.attach()
            assert heard() != b""


def test_fetches_only_what_the_prefix_cache_lacks(world: World, agent: FakeAgent) -> None:
    prompt = list(range(70))
    world.request(prompt=prompt[:40], max_tokens=1)
    world.run()
    request = world.decode(prompt=prompt)
    world.step()
    want = agent.one(Want)
    assert (want.first_token, want.end_token) == (32, 69)
    assert [(p.first, list(p.ids)) for p in want.blocks] == [(2, world.block_ids(request)[2:])]
    agent.say(done(want))
    world.finish()


def test_says_so_when_it_needs_nothing_and_reports_no_receive(world: World, agent: FakeAgent) -> None:
    prompt = list(range(4 * BLOCK + 1))
    world.request(prompt=prompt, max_tokens=1)
    world.run()
    request = world.decode(prompt=prompt)
    world.step()
    want = agent.one(Want)
    assert want.first_token == want.end_token and want.blocks == ()
    agent.say(done(want))  # nobody waits for it; vLLM would assert on a report
    assert request.status == RequestStatus.RUNNING
    world.finish()


def refused(want: Want) -> Refused:
    return Refused(code="not_attached", reasons=("attach first",), number=want.number)


@pytest.mark.parametrize("answer", [done, failed])
def test_an_abort_while_receiving_keeps_the_blocks_until_the_answer(
    world: World, agent: FakeAgent, answer: Any
) -> None:
    request = world.decode(40)
    world.step()
    want = agent.one(Want)
    world.abort(request)
    world.steps(3)
    assert agent.one(Abandon).number == want.number
    assert world.free_blocks == 99 - 3
    agent.say(answer(want))
    world.finish()


def test_an_abort_after_the_last_byte_frees_at_once(world: World, agent: FakeAgent) -> None:
    request = world.decode(40)
    world.step()
    agent.say(done(agent.one(Want)))
    scheduled = world.scheduler.schedule()
    world.scheduler.update_from_output(scheduled, world._work(world.workers[0], scheduled))
    world.abort(request)
    world.run()
    assert not agent.take(Abandon)
    world.assert_empty()


@pytest.mark.parametrize("why", ["", "aborted", "no memory", "short table", "unknown", "failed"])
def test_scores_are_finished_once_before_their_request_runs_and_only_if_its_rows_came(
    world: World, agent: FakeAgent, why: str
) -> None:
    finished: list[Want] = []

    def finish(want: Want) -> None:
        finished.append(want)
        if why == "no memory":
            raise RuntimeError("CUDA out of memory")
        if why == "short table":
            raise IndexError("index 3 is out of bounds")

    world.workers[0].worker._scores = None if why == "unknown" else SimpleNamespace(finish=finish)
    runs: list[tuple[int, int]] = []
    request = world.decode(40)
    world.on_forward = lambda: runs.append((len(finished), sum(world.scheduled.num_scheduled_tokens.values())))
    world.step()
    want = agent.one(Want)
    if why == "aborted":
        world.abort(request)
        world.step()
        assert world.free_blocks == 99 - 3, "they are still the request's"
    agent.say(replace(done(want), other_scores=True) if why != "failed" else failed(want))
    agent.say(replace(done(want), other_scores=True))
    world.finish()
    assert [each.number for each in finished] == [want.number] * (why not in ("failed", "unknown"))
    tokens = {"": [(1, 1)], "aborted": [], "failed": [(0, 40)], "unknown": [(0, 40)]}.get(why, [(1, 40)])
    assert runs[:1] == tokens, "the prompt's last token only, unless its rows did not come"


def test_a_request_that_never_ran_lets_the_other_side_free(tmp_path: Path) -> None:
    world = World(tmp_path, blocks=4).ready()
    running = world.request(30, max_tokens=10)
    world.step()
    waiting = world.decode(40)  # no room for it yet
    world.step()
    assert not world.agent.take(Want)
    world.abort(waiting)
    world.step()
    want = world.agent.one(Want)
    assert want.end_token == 0 and want.blocks == ()
    world.agent.say(done(want))
    world.abort(running)
    world.finish()


@pytest.mark.parametrize("answer", [done, failed])
def test_a_receive_is_over_when_every_rank_has_answered(tmp_path: Path, answer: Any) -> None:
    world = World(tmp_path, tp=2).ready()
    request = world.decode(40)
    world.step()
    wants = [agent.one(Want) for agent in world.agents]
    assert wants[0] == wants[1]
    world.agents[0].say(answer(wants[0]))
    world.steps(3)
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS, "the other rank's blocks are still written"
    world.agents[1].say(done(wants[1]))
    assert len(world.finish()) == 4


def test_an_agent_that_dies_fails_what_it_was_receiving(world: World, agent: FakeAgent) -> None:
    world.decode(40)
    world.decode(50)
    world.step()
    assert len(agent.take(Want)) == 2
    agent.die()
    assert len(world.finish()) == 8
    world.decode(40)
    assert len(world.finish()) == 4, "and without it everything is computed here"


@pytest.mark.proves("G20")
def test_a_new_agent_is_attached_to_and_told_everything_again(world: World, agent: FakeAgent) -> None:
    agent.die()
    world.steps(2)
    world.start_agents()
    (agent,) = world.agents
    agent.incarnation = "incarnation-2"
    world.clock.now += 1
    world.request(30)
    world.steps(3)
    assert len(agent.attaches) == 1 and agent.take(Directory)
    world.decode(40)
    world.step()
    agent.say(done(agent.one(Want)))
    world.finish()


def test_a_consumer_wants_unnamed_requests_by_their_prompt(tmp_path: Path) -> None:
    consumer = World(tmp_path, role="kv_consumer", extra={"kvbridge_prefill": "tcp://10.0.0.9:7700"}).ready()
    request = consumer.request(40)
    consumer.step()
    want = consumer.agents[0].one(Want)
    assert (want.rendezvous, want.sender) == (f"prompt-{prompt_digest(request)}", "tcp://10.0.0.9:7700")
    consumer.agents[0].say(done(want))
    consumer.finish()


@pytest.mark.parametrize("is_same", [True, False], ids=["its prompt", "another prompt"])
def test_what_an_untagged_prefill_answered_is_fetched_for_its_prompt_alone(tmp_path: Path, is_same: bool) -> None:
    """A router sends the prefill side a request as it came, but for one token, and hands on what that returns."""
    for name in "pd":
        (tmp_path / name).mkdir()
    producer = World(tmp_path / "p", role="kv_producer").ready("#KEY")
    consumer = World(tmp_path / "d", role="kv_consumer").ready()
    prompt = list(range(40))
    producer.request(prompt=prompt, max_tokens=1)
    params = producer.step().outputs[0].kv_transfer_params
    offer = producer.agents[0].one(Offer)
    consumer.request(prompt=prompt if is_same else prompt[::-1], max_tokens=4, **params)
    consumer.step()
    if is_same:
        want = consumer.agents[0].one(Want)
        assert (want.rendezvous, want.sender, want.end_token) == (offer.rendezvous, "tcp://127.0.0.1:7700#KEY", 39)
        consumer.agents[0].say(done(want))
    consumer.finish()
    assert not consumer.agents[0].take(Want)
    consumer.assert_empty()


def test_a_preempted_request_is_computed_again_and_not_fetched_again(tmp_path: Path) -> None:
    world = World(tmp_path, blocks=9, scheduler_reserve_full_isl=False).ready()
    first = world.request(60, max_tokens=40)
    world.step()
    second = world.decode(50, max_tokens=20)
    world.steps(3)
    want = world.agent.one(Want)
    world.agent.say(done(want))
    world.finish()
    assert second.num_preemptions + first.num_preemptions >= 1
    assert not world.agent.take(Want)
    world.assert_empty()


@pytest.mark.parametrize("has_waited", [False, True], ids=["at-once", "sequential"])
def test_wants_in_the_room_that_a_router_gave_both_sides(world: World, has_waited: bool) -> None:
    """At once nobody has said what prefill calls it; a proxy that waited hands over what prefill said."""
    prompt = list(range(5, 45))
    name = f"room/7/{PromptDigest(prompt).text()}" if has_waited else None
    request = world.decode(prompt=prompt, remote_request_id=name, bootstrap_room=7)
    world.steps(3)
    want = world.agents[0].one(Want)
    assert (want.rendezvous, want.sender) == (f"room/7/{prompt_digest(request)}", "tcp://10.0.0.1:7700")


def test_a_room_that_was_prefilled_for_another_prompt_is_not_waited_for(world: World) -> None:
    """And what was offered for that one is let go of."""
    request = world.decode(40, remote_request_id=f"room/7/{'0' * 40}", bootstrap_room=7)
    world.steps(3)
    assert request.num_computed_tokens >= 40
    declined = world.agents[0].one(Want)
    assert (declined.rendezvous, declined.first_token, declined.end_token) == (f"room/7/{'0' * 40}", 0, 0)
    world.finish()


def test_later_prompts_of_a_call_in_a_room_go_by_their_own_digests(world: World) -> None:
    """A prefill's answer names the first prompt's offer alone."""
    request = world.decode(40, name="cmpl-call-1-1a2b3c4d", remote_request_id=f"room/7/{'0' * 40}", bootstrap_room=7)
    world.steps(3)
    assert world.agents[0].one(Want).rendezvous == f"room/7/{prompt_digest(request)}"


# What could have come by the bridge and did not:


def computed(world: World) -> list[tuple[str, int]]:
    """As the agent heard it."""
    world.run()
    world.step()
    return [(each.reason, each.tokens) for each in world.agents[0].take(Computed)]


def test_what_the_prefix_cache_has_is_not_computed(world: World) -> None:
    prompt = list(range(40))
    world.request(prompt=prompt)
    world.request(prompt=prompt[:33])
    assert computed(world)[0] == ("untagged", 39)
    world.request(prompt=prompt)
    world.request(1)
    assert computed(world) == [("untagged", 39 - 39 // BLOCK * BLOCK)]


def test_a_prompt_that_is_fetched_or_offered_is_none_of_them(world: World, agent: FakeAgent) -> None:
    world.decode(40)
    world.step()
    agent.say(done(agent.one(Want)))
    world.prefill(40)
    world.steps(3)
    agent.say(Released(number=agent.one(Offer).number, request="r"))
    assert computed(world) == []


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"remote_host": ""}, "bad_params"),
        ({"remote_request_id": "theirs/0/" + "0" * 2 * DIGEST_BYTES}, "other_prompt"),
        ({"remote_request_id": rendezvous(5, "0" * 2 * DIGEST_BYTES), "bootstrap_room": 5}, "other_prompt"),
    ],
)
def test_a_prompt_that_names_what_cannot_be_fetched_is_counted(
    world: World, params: dict[str, Any], reason: str
) -> None:
    world.decode(40, **params)
    assert computed(world) == [(reason, 39)]
    world.assert_empty()


def test_a_prompt_that_does_not_travel_is_counted(world: World) -> None:
    world.decode(40, kv={"resumable": True})
    world.step()
    (said,) = world.agents[0].take(Computed)
    assert (said.reason, said.tokens) == ("does_not_travel", 39)


@pytest.mark.parametrize(("answer", "code"), [(failed, "peer_gone"), (refused, "not_attached")])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_failed_receive_is_computed_here_and_counted_or_fails_the_request_if_the_engine_is_told_so(
    tmp_path: Path, policy: str, answer: Any, code: str
) -> None:
    world = World(tmp_path, on_failure=policy).ready()
    request = world.decode(40)
    world.step()
    world.agent.say(answer(world.agent.one(Want)))
    (*_, last) = world.finish()
    assert not world.agent.take(Want), "fetched once, not again"
    is_computed = policy == "recompute"
    assert (last.finish_reason == FinishReason.ERROR) is not is_computed
    assert computed(world) == [(code, 39)] * is_computed and list(request.output_token_ids) == [7] * 4 * is_computed


@pytest.mark.parametrize("code", ["aborted", "deadline"])
def test_a_request_that_is_aborted_is_not_computed(world: World, agent: FakeAgent, code: str) -> None:
    waiting = world.decode(40)
    world.step()
    want = agent.one(Want)
    queued = world.request(50)
    world.abort(waiting)
    world.abort(queued)
    world.step()
    agent.say(Failed(number=want.number, request="r", code=code, reason="its last word"))
    world.request(20)
    assert computed(world) == [("untagged", 19)]
    assert not world.connector.scheduler._unfetched and not world.workers[0].worker._abandoned


def test_one_rank_without_its_agent_is_the_reason(tmp_path: Path) -> None:
    world = World(tmp_path, tp=2).ready()
    world.agents[1].die()
    world.clock.now += 2
    world.steps(3)
    world.decode(40)
    assert computed(world) == [("agent_missing", 39)]


def told_of_an_offer(prompt: list[int], **more: Any) -> dict[str, Any]:
    """What a proxy hands over that has waited for the prefill."""
    nothing = {"prompt_embeds": None, "mm_features": [], "lora_request": None, "cache_salt": None}
    digest = prompt_digest(SimpleNamespace(prompt_token_ids=prompt, **nothing))
    return {"remote_request_id": f"call/0/{digest}", "remote_attachment": "inc/3", **more}


def test_a_want_says_whether_its_prompt_was_offered_before_and_to_whom(world: World, agent: FakeAgent) -> None:
    """Only a prefill's answer tells that: a name that both sides were given before says nothing of an offer."""
    prompt = list(range(40))
    digest = told_of_an_offer(prompt)["remote_request_id"].rpartition("/")[2]
    cases = {
        "called": (told_of_an_offer(prompt), True, "inc/3"),
        "unnamed": ({"remote_request_id": f"prompt-{digest}"}, True, ""),
        "at once": ({"remote_request_id": "theirs", "remote_attachment": "inc/3"}, False, ""),
        "room": ({"remote_request_id": "", "bootstrap_room": 5}, False, ""),
        "in room": ({"remote_request_id": rendezvous(5, digest), "bootstrap_room": 5}, True, ""),
    }
    for name, (params, is_offered, offered_to) in cases.items():
        request = world.decode(prompt=prompt, name=name, **params)
        world.steps(2)
        want = agent.one(Want)
        assert (want.is_offered, want.offered_to) == (is_offered, offered_to), name
        world.abort(request)
        agent.say(failed(want))
        world.steps(2)
        assert agent.one(Abandon)


def test_the_prefill_side_tells_which_attachment_took_the_offer(world: World, agent: FakeAgent) -> None:
    world.prefill(40)
    outputs = [each for _ in range(3) for each in world.step().outputs if each.kv_transfer_params]
    agent.say(Released(number=agent.one(Offer).number, request="r"))
    world.finish()
    assert [each.kv_transfer_params["remote_attachment"] for each in outputs] == [f"{agent.incarnation}/1"]


@pytest.mark.parametrize("tokens", [40, 4 * BLOCK + 1])
def test_equal_requests_share_one_fetch(world: World, agent: FakeAgent, tokens: int) -> None:
    """The answers of a call (`n`), or retries. An offer serves one want; the prefix cache serves the others."""
    prompt = list(range(tokens))
    names = [f"{n}_cmpl-a-{n}a2b3c4d" for n in range(4)]
    requests = [world.decode(prompt=prompt, name=name, **told_of_an_offer(prompt)) for name in names]
    world.steps(3)
    first = agent.one(Want)
    assert (first.request, first.end_token) == (requests[0].request_id, tokens - 1)
    agent.say(done(first))
    world.steps(3)
    assert all(each.status == RequestStatus.RUNNING for each in requests)
    rest = agent.take(Want)
    assert [each.request for each in rest] == [each.request_id for each in requests[1:]]
    assert all(each.end_token == 0 and each.is_offered for each in rest), "each gives back what was offered for it"
    left = (tokens - 1) % BLOCK
    assert [each for each in agent.take(Computed)] == [Computed(tokens=left, reason="already_fetched")] * 3 * bool(left)
    for each in rest:
        agent.say(done(each))
    world.finish()
    world.assert_empty()


@pytest.mark.parametrize("is_aborted", [False, True])
def test_what_waited_for_an_equal_request_goes_on_at_once_if_that_one_fails(
    world: World, agent: FakeAgent, is_aborted: bool
) -> None:
    """It shares what that one computes instead; none waits for a second one. What was offered for it is given back."""
    prompt = list(range(40))
    requests = equal(world, prompt, 3)
    world.steps(2)
    first = agent.one(Want)
    if is_aborted:
        world.abort(requests[0])
        world.steps(1)
    agent.say(failed(first))
    world.steps(4)
    rest = agent.take(Want)
    assert {each.request for each in rest} == {each.request_id for each in requests[1:]}
    assert not any(each.end_token for each in rest)
    world.finish()


def equal(world: World, prompt: list[int], count: int) -> list[Request]:
    """The answers of a call, as vLLM names them."""
    names = [f"{n}_cmpl-a-{n}a2b3c4d" for n in range(count)]
    return [world.decode(prompt=prompt, name=name, **told_of_an_offer(prompt)) for name in names]


def bytes_of(world: World, ids: Sequence[int], rank: int = 0) -> list[torch.Tensor]:
    """Views of a rank's bytes of these blocks."""
    memory = world.workers[rank].worker._conversation.memory
    stride = memory.pool.planes[0].block_stride
    flat = torch.empty(0, dtype=torch.uint8).set_(memory.storages[0])
    return [flat[each * stride : (each + 1) * stride] for each in ids]


def fill(world: World, want: Want, rank: int = 0) -> None:
    """What the agent does: rows in all blocks of a want, other ones on each rank."""
    for number, each in enumerate(bytes_of(world, want.blocks[0].ids, rank)):
        each[:] = 10 * (rank + 1) + number


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_without_a_prefix_cache_equal_requests_get_copies_of_what_came_once(
    tmp_path: Path, is_async: bool, hooks: str
) -> None:
    """On every rank, whichever has its rows first; nobody computes more than the last token."""
    world = World(tmp_path, tp=2, caching=False, async_scheduling=is_async, hooks=hooks).ready()
    requests = equal(world, list(range(40)), 4)
    world.steps(3)
    firsts = [agent.one(Want) for agent in world.agents]
    late = world.decode(prompt=list(range(40)), name="4_cmpl-a-4a2b3c4d", **told_of_an_offer(list(range(40))))
    for rank, (agent, first) in enumerate(zip(world.agents, firsts, strict=True)):
        fill(world, first, rank)
        agent.say(done(first))
        world.steps(2)
    for rank, first in enumerate(firsts):
        assert first.request == requests[0].request_id
        found = [torch.stack(bytes_of(world, world.block_ids(each), rank)[:3]) for each in (*requests, late)]
        assert found[0].unique().tolist() == [10 * (rank + 1) + n for n in range(3)]
        assert all(each.equal(found[0]) for each in found)
    assert len({block for each in requests for block in world.block_ids(each)}) >= 3 * 4, "each has its own blocks"
    world.steps(2)
    assert all(each.status == RequestStatus.RUNNING for each in requests)
    returned = world.agents[0].take(Want)
    assert {each.request for each in returned} == {each.request_id for each in (*requests[1:], late)}
    assert not any(each.end_token for each in returned), "what was offered for them is given back"
    assert not world.agents[0].take(Computed)
    world.finish()


@pytest.mark.parametrize("caching", [False, True], ids=["copies", "cache"])
def test_whoever_of_equal_requests_is_aborted_the_others_get_the_rows(tmp_path: Path, caching: bool) -> None:
    """The first one's blocks stay until its rows have come; those of another are not written once it is gone."""
    for gone in range(3):
        (folder := tmp_path / str(gone)).mkdir()
        world = World(folder, caching=caching).ready()
        agent, requests = world.agent, equal(world, list(range(40)), 3)
        world.steps(2)
        first = agent.one(Want)
        rows = first.blocks[0].ids
        theirs = bytes_of(world, world.block_ids(requests[gone])) if gone and not caching else []
        world.abort(requests[gone])
        world.steps(3)
        assert gone == 0 or requests[gone].request_id not in world.scheduler.requests, "it need not wait for the rows"
        assert not agent.take(Abandon), "the others still want it"
        free = world.scheduler.kv_cache_manager.block_pool.blocks
        assert all(free[each].ref_cnt for each in rows)
        fill(world, first)
        agent.say(done(first))
        world.steps(3)
        left = [each for each in requests if each is not requests[gone]]
        assert all(each.status == RequestStatus.RUNNING for each in left)
        found = [torch.stack(bytes_of(world, world.block_ids(each)))[:2] for each in left]
        assert all(each.unique().tolist() == [10, 11] for each in found)
        assert not any(each.any() for each in theirs), "it was written after it was gone"
        assert sum(each.tokens for each in agent.take(Computed)) <= 7 * caching * len(left)
        world.finish()


@pytest.mark.parametrize("caching", [False, True], ids=["copies", "cache"])
def test_a_fetch_that_nobody_waits_for_any_more_is_abandoned_once(tmp_path: Path, caching: bool) -> None:
    for order in permutations(range(3)):
        (folder := tmp_path / "".join(map(str, order))).mkdir()
        world = World(folder, caching=caching).ready()
        agent, requests = world.agent, equal(world, list(range(40)), 3)
        world.steps(2)
        first = agent.one(Want)
        for number in order:
            assert not [each for each in agent.take(Abandon) if each.number == first.number]
            world.abort(requests[number])
            world.steps(2)
        assert [each.number for each in agent.take(Abandon) if each.number == first.number] == [first.number]
        agent.say(failed(first))
        world.finish()


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
def test_each_of_equal_requests_is_told_that_its_fetch_has_failed(tmp_path: Path, hooks: str, on_failure: str) -> None:
    world = World(tmp_path, caching=False, hooks=hooks, on_failure=on_failure).ready()
    equal(world, list(range(40)), 3)
    world.steps(2)
    world.agent.say(failed(world.agent.one(Want)))
    outputs = world.finish()
    errors = {each.request_id for each in outputs if each.finish_reason == FinishReason.ERROR}
    assert len(errors) == (0 if on_failure == "recompute" else 3)
    assert not any(each.end_token for each in world.agent.take(Want))


def test_an_equal_request_that_got_no_blocks_in_time_computes_and_is_not_failed(tmp_path: Path) -> None:
    world = World(tmp_path, caching=False, blocks=6, on_failure="fail").ready()
    agent, requests = world.agent, equal(world, list(range(40)), 2)
    world.steps(2)
    agent.say(done(agent.one(Want)))
    outputs = world.finish()
    assert not any(each.finish_reason == FinishReason.ERROR for each in outputs)
    assert agent.one(Computed) == Computed(tokens=39, reason="already_fetched")
    assert agent.one(Want).request == requests[1].request_id


def test_equal_requests_of_two_prefill_engines_fetch_each_from_its_own(world: World, agent: FakeAgent) -> None:
    prompt = list(range(40))
    for n in range(2):
        world.decode(prompt=prompt, name=f"cmpl-a-0-{n}a2b3c4d", remote_port=7700 + n, **told_of_an_offer(prompt))
    world.steps(2)
    assert len({each.sender for each in agent.take(Want)}) == 2


@pytest.mark.parametrize("told", [{}, {"remote_request_id": "", "bootstrap_room": 5}], ids=["name", "room"])
def test_answers_to_a_prompt_that_is_still_prefilled_share_one_fetch_and_give_back_the_others(
    world: World, agent: FakeAgent, told: dict[str, Any]
) -> None:
    """A router that asks both engines at once sends prefill the same `n`: it offers as many times."""
    requests = [world.decode(prompt=list(range(40)), name=f"{n}_cmpl-theirs-{n}a2b3c4d", **told) for n in range(3)]
    world.steps(2)
    first = agent.one(Want)
    agent.say(done(first))
    world.steps(2)
    rest = agent.take(Want)
    assert [each.request for each in rest] == [each.request_id for each in requests[1:]]
    assert {(each.rendezvous, each.end_token, each.is_offered) for each in rest} == {(first.rendezvous, 0, False)}
    world.finish()


@pytest.mark.parametrize(
    ("source", "file", "given", "has_limit", "most"),
    [
        ("auto", 50, None, False, 20),
        ("auto", 50, None, True, 1000),  # vLLM's API server heeds the model's own only if the client names none
        ("auto", 50, 40, False, 10),
        ("auto", None, 40, True, 10),
        ("vllm", 50, None, False, 1000),
        ("the model's", 50, None, True, 20),
        ("auto", 20, None, False, 1),
        ("auto", None, None, False, 1000),
    ],
)
def test_limits_of_the_model_count_what_other_engines_answered(
    world: World, source: str, file: int | None, given: int | None, has_limit: bool, most: int
) -> None:
    model = world.config.model_config
    model.generation_config = model.model if source == "the model's" else source
    model.override_generation_config = {"max_new_tokens": given} if given else {}
    written = {"max_new_tokens": file} if file else {}
    (Path(model.model) / "generation_config.json").write_text(json.dumps(written))
    world.connector.scheduler._limits = TokenLimits(model)
    request = world.decode(40, max_tokens=1000, answered=30, has_limit=has_limit)
    assert request.max_tokens == most
    assert not {"answered", "has_limit"} & request.kv_transfer_params.keys()
    world.abort(request)
    alone = world.request(40, max_tokens=1000, answered=30, has_limit=has_limit)
    assert alone.max_tokens == most and alone.kv_transfer_params is None
    for odd in (0, -3, True, "30", None, 1.5):
        assert world.request(40, max_tokens=1000, answered=odd).max_tokens == 1000


def test_a_generation_config_that_cannot_be_read_is_no_limit_and_is_not_read_again(world: World) -> None:
    """A hub may be away, and vLLM's scheduler must not wait for it."""
    tries: list[None] = []

    def away() -> None:
        tries.append(None)
        raise ConnectionError("the hub is away")

    model = SimpleNamespace(override_generation_config={}, generation_config="auto", try_get_generation_config=away)
    world.connector.scheduler._limits = TokenLimits(model)
    assert [world.request(40, max_tokens=1000, answered=30).max_tokens for _ in range(2)] == [1000, 1000]
    assert len(tries) == 1
