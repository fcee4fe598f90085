"""vLLM's real scheduler with the connector, on the prefill side."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvbridge_proto.common import Rank
from kvbridge_proto.engine import Directory, Offer, Released, Want, Withdraw

from kvbridge.adapters.engine.conversation import COMPUTING_S
from kvbridge.adapters.vllm import roll_call
from kvbridge.adapters.vllm.rendezvous import prompt_digest
from testing.waiting import wait_for
from tests.integration.adapters.fake_agent import FakeAgent
from tests.integration.adapters.world import World

pytestmark = pytest.mark.vllm


def test_offers_the_prompt_as_it_is_computed(world: World, agent: FakeAgent) -> None:
    request = world.prefill(150)  # 64 tokens a step

    world.step()
    first = agent.one(Offer)
    ids = world.block_ids(request)
    assert (first.tokens, first.is_last, first.hold_s) == (64, False, COMPUTING_S)
    assert [(piece.group, piece.first, list(piece.ids)) for piece in first.blocks] == [(0, 0, ids[:4])]

    world.step()
    second = agent.one(Offer)
    assert second.tokens == 128 and second.number == first.number and (first.is_more, second.is_more) == (False, True)
    assert [(piece.first, list(piece.ids)) for piece in second.blocks] == [(4, world.block_ids(request)[4:8])]

    world.step()
    last = agent.one(Offer)
    assert (last.tokens, last.is_last, last.hold_s) == (150, True, 30.0)
    assert [piece.first for piece in last.blocks] == [8]
    assert last.rendezvous == f"name1/0/{prompt_digest(request)}"


def test_blocks_for_drafts_to_come_are_not_offered(world: World, agent: FakeAgent) -> None:
    """vLLM allocates them with those of computed tokens (lookahead). Nobody has written them."""
    world.scheduler.num_lookahead_tokens = 40
    request = world.prefill(100)
    world.step()
    first, ids = agent.one(Offer), world.block_ids(request)
    assert (first.tokens, len(ids)) == (64, 7)
    assert [list(piece.ids) for piece in first.blocks] == [ids[:4]]
    world.step()
    last = agent.one(Offer)
    assert (last.tokens, last.is_last) == (100, True)
    assert [(piece.first, len(piece.ids)) for piece in last.blocks] == [(4, 3)]
    agent.say(Released(number=last.number, request="r"))
    world.finish()


@pytest.mark.proves("G13")
def test_keeps_the_blocks_until_the_agent_released_them(world: World, agent: FakeAgent) -> None:
    request = world.prefill(40)
    output = world.step().outputs[0]
    params = output.kv_transfer_params
    expected = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "engine-under-test",
        "remote_request_id": f"name1/0/{prompt_digest(request)}",
        "remote_host": "127.0.0.1",
        "remote_port": 7700,
        "remote_block_ids": [],
        "remote_num_tokens": 40,
        "tp_size": 1,
        "pp_size": 1,
    }
    assert {name: params[name] for name in expected} == expected  # vLLM adds some of its own
    world.steps(5)
    assert world.free_blocks == 99 - 3
    agent.say(Released(number=agent.one(Offer).number, request="r"))
    world.finish()


def test_frees_at_once_what_was_released_before_the_request_ended(world: World, agent: FakeAgent) -> None:
    world.prefill(40)
    scheduled = world.scheduler.schedule()
    (worker,) = world.workers
    worker.bind_connector_metadata(scheduled.kv_connector_metadata)
    worker.wait_for_save()
    agent.say(Released(number=agent.one(Offer).number, request="r"))  # all are served, and the engine still samples
    assert not world.said(worker, scheduled).finished_sending
    worker.clear_connector_metadata()
    held = world.scheduler.requests.copy()
    (request,) = held.values()
    world.scheduler.finish_requests(request.request_id, request.status.FINISHED_LENGTH_CAPPED)
    world.finish()


def test_an_abort_withdraws_and_keeps_the_blocks_until_no_read_is_under_way(world: World, agent: FakeAgent) -> None:
    request = world.prefill(150)
    world.step()
    world.abort(request)
    world.steps(3)
    withdrawn = agent.one(Withdraw)
    assert withdrawn.number == agent.take(Offer)[0].number
    assert withdrawn.reason == "finished_aborted"
    assert world.free_blocks < 99
    agent.say(Released(number=withdrawn.number, request="r", code="withdrawn"))
    world.finish()


@pytest.mark.parametrize("room", [{}, {"bootstrap_room": 7}], ids=["named", "in a room"])
def test_a_prompt_that_ends_before_anything_was_computed_is_not_waited_for(
    world: World, agent: FakeAgent, room: dict[str, Any]
) -> None:
    """The decode side may have been asked at the same time."""
    agent.is_answering_withdrawals = True
    request = world.prefill(150, **room)
    digest = prompt_digest(request)
    world.abort(request)
    world.run()
    offer, withdrawn = agent.one(Offer), agent.one(Withdraw)
    assert offer.rendezvous == (f"room/7/{digest}" if room else f"name1/0/{digest}")
    assert (offer.tokens, offer.is_last, withdrawn.number) == (0, True, offer.number)
    world.step()
    world.assert_empty()
    untagged = world.request(40, max_tokens=1)
    world.abort(untagged)
    world.run()
    assert not agent.take(Offer), "its id is that of equal prompts too"


@pytest.mark.proves("G13")
def test_a_preempted_prompt_is_withdrawn_before_the_forward_and_offered_anew(tmp_path: Path) -> None:
    # 12 blocks for two prompts of 8 that grow side by side: the later one gives way.
    world = World(tmp_path, blocks=13, scheduler_reserve_full_isl=False, long_prefill_token_threshold=32).ready()
    (agent,) = world.agents
    agent.is_answering_withdrawals = True
    first, second = world.prefill(128), world.prefill(128)
    heard = []
    readers: list[bool] = []  # where a forward may write into blocks of the preempted prompt
    conversation = world.workers[0].worker._conversation
    world.on_forward = lambda: readers.extend(
        conversation.is_open(m.number) for m in agent.heard if type(m) is Withdraw
    )
    for _ in range(12):
        world.agents = []  # it pumps itself
        with agent.alive():
            world.step()
        agent.pump()
        new = [message for message in agent.heard if isinstance(message, Offer | Withdraw)]
        heard += new
        agent.heard.clear()
        for message in new:
            if isinstance(message, Offer) and message.is_last:
                agent.say(Released(number=message.number, request="r"))
    assert second.num_preemptions == 1 and first.num_preemptions == 0
    assert readers == [False], "the step waits until nobody reads what its forward writes"
    (withdrawn,) = [message for message in heard if isinstance(message, Withdraw)]
    assert withdrawn.reason == "preempted" and withdrawn.comes_again
    after = heard[heard.index(withdrawn) + 1 :]
    anew = [m for m in after if isinstance(m, Offer) and m.rendezvous.startswith("name2/")]
    assert {message.number for message in anew} == {anew[0].number} != {withdrawn.number} and not anew[0].is_more
    assert anew[0].blocks[0].first == 0 and anew[-1].is_last
    agent.say(Released(number=withdrawn.number, request="r"))  # the first attempt's; nobody waits for it
    world.finish()


@pytest.mark.proves("G13")
def test_nothing_is_wanted_before_nobody_reads_what_a_reset_has_preempted(tmp_path: Path) -> None:
    """It preempts between steps, so its blocks may belong to what is wanted in the next one."""
    kept = {"kvbridge_resets_keep_weights": True}
    world = World(tmp_path, budget=128, long_prefill_token_threshold=64, extra=kept).ready()
    (agent,) = world.agents
    agent.is_answering_withdrawals = True
    world.prefill(192)
    world.step()
    assert world.scheduler.reset_prefix_cache(reset_running_requests=True)
    world.decode(40)
    world.agents = []
    with agent.alive():
        world.step()
    agent.pump()
    assert [type(each) for each in agent.heard if isinstance(each, Want | Withdraw)] == [Withdraw, Want]


def test_a_preempted_prompt_that_is_aborted_is_not_waited_for(tmp_path: Path) -> None:
    world = World(tmp_path, blocks=13, scheduler_reserve_full_isl=False, long_prefill_token_threshold=32).ready()
    (agent,) = world.agents
    agent.is_answering_withdrawals = True
    world.prefill(128)
    second = world.prefill(128)
    world.agents = []
    while not second.num_preemptions:
        with agent.alive():
            world.step()
    world.abort(second)
    agent.pump()
    (preempted,) = agent.take(Withdraw)
    agent.take(Offer)
    world.step()
    agent.pump()
    said = [message for message in agent.heard if isinstance(message, Offer | Withdraw)][-2:]
    assert [type(message) for message in said] == [Offer, Withdraw]
    nothing, withdrawn = said
    assert isinstance(nothing, Offer) and (nothing.tokens, nothing.blocks, nothing.is_last) == (0, (), True)
    assert nothing.rendezvous.startswith("name2/") and nothing.number != preempted.number
    assert isinstance(withdrawn, Withdraw) and withdrawn.number == nothing.number and not withdrawn.comes_again
    agent.die()
    world.finish()


def test_the_first_request_after_a_loss_asks_whether_the_agent_has_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the workers said last was that it is gone. That may be old at once, however long they are believed else."""
    monkeypatch.setattr(roll_call, "KNOWN_S", 1000.0)
    world = World(tmp_path).ready()
    (agent,) = world.agents
    agent.die()
    world.prefill(40)
    world.run()
    world.start_agents()
    (agent,) = world.agents
    with agent.alive():
        link = world.workers[0].worker._conversation._link
        assert link is not None
        while link.state.name != "ATTACHED":
            time.sleep(0.01)
    world.prefill(40)
    world.steps(2)
    assert agent.one(Offer).is_last
    agent.say(Released(number=1, request="whatever"))


def test_the_first_request_after_a_rest_waits_one_step_and_its_answer_names_the_agent_that_is_there(
    tmp_path: Path,
) -> None:
    """vLLM hears of a step's agents after the step's requests have finished."""
    world = World(tmp_path).ready()
    (before,) = world.agents
    before.die()
    world.agents = [FakeAgent(world.path(0), "tcp://127.0.0.1:7800", "incarnation-2")]
    with world.agent.alive():
        link = world.workers[0].worker._conversation._link
        assert link is not None
        wait_for(lambda: link.address == world.agent.address)
    world.clock.now += 60  # the engine makes no step meanwhile
    request = world.prefill(40)
    world.step()
    assert not world.scheduler.running and not request.num_computed_tokens
    (output,) = world.step().outputs
    assert output.kv_transfer_params["remote_port"] == 7800
    world.prefill(40)
    (output,) = world.step().outputs  # at once: the workers have just reported
    assert output.kv_transfer_params["remote_port"] == 7800


def test_a_scheduler_without_workers_runs_a_request_in_its_first_step(tmp_path: Path) -> None:
    """As in vLLM's own tests of the life of a remote decode and a remote prefill: there is nobody to ask."""
    world = World(tmp_path)
    world.clock.now += 60
    request = world.prefill(40)
    scheduled = world.scheduler.schedule()
    assert world.scheduler.running == [request] and len(scheduled.scheduled_new_reqs) == 1


def test_workers_that_do_not_say_it_in_time_are_not_waited_for(tmp_path: Path) -> None:
    world = World(tmp_path).ready()
    world.clock.now += 60
    for worker in world.workers:
        worker.worker.changed_address = lambda: None
    request = world.prefill(40)
    world.steps(3)
    assert not world.agent.take(Offer)
    world.clock.now += 1
    world.step()
    assert world.agent.one(Offer).is_last and request.is_finished()


def test_a_dead_agent_releases_everything(world: World, agent: FakeAgent) -> None:
    world.prefill(40)
    half = world.prefill(150)
    world.steps(2)
    agent.die()
    world.steps(2)
    assert half.request_id in world.scheduler.requests or half.is_finished()
    world.finish()


def test_without_an_agent_nothing_is_offered_or_kept(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.attach()
    world.prefill(40)
    (output,) = world.run()
    assert output.kv_transfer_params is None
    world.finish()


def test_a_send_is_done_when_every_rank_has_released_it(tmp_path: Path) -> None:
    world = World(tmp_path, tp=2).ready()
    ranks = tuple(Rank(tp_rank=i, pp_rank=0, address=f"tcp://127.0.0.1:{7700 + i}") for i in range(2))
    assert [agent.take(Directory)[-1].ranks for agent in world.agents] == [ranks] * 2
    world.prefill(40)
    world.step()
    (number,) = {agent.one(Offer).number for agent in world.agents}
    world.agents[0].say(Released(number=number, request="r"))
    world.steps(3)
    assert world.free_blocks == 99 - 3
    world.agents[1].die()
    world.finish()


@pytest.mark.parametrize("is_told", [True, False])
def test_an_untagged_prefill_is_answered_with_what_a_router_may_hand_on(tmp_path: Path, is_told: bool) -> None:
    extra = {} if is_told else {"kvbridge_untagged_params": False}
    key = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"  # Z85 has all that means something in a URL
    world = World(tmp_path, role="kv_producer", extra=extra).ready(f"#{key}")
    request = world.request(40, max_tokens=1)
    params = world.step().outputs[0].kv_transfer_params
    offer = world.agent.one(Offer)
    if is_told:
        assert params["do_remote_prefill"] and params["remote_request_id"] == offer.rendezvous
        assert offer.rendezvous == f"prompt-{prompt_digest(request)}"
        assert (params["remote_host"], params["remote_port"], params["remote_key"]) == ("127.0.0.1", 7700, key)
    else:
        assert params is None
    world.agent.say(Released(number=offer.number, request="r"))
    world.request(40, max_tokens=2)
    assert all(output.kv_transfer_params is None for _ in range(2) for output in world.step().outputs)
    world.finish()


def test_an_engine_that_only_holds_blocks_rests_and_one_that_computes_does_not(world: World, agent: FakeAgent) -> None:
    rests = []

    def steps(number: int) -> None:
        for _ in range(number):
            world.step()
            rests.append(world.workers[0].worker._rest_s)

    world.prefill(40)
    steps(20)
    assert rests[:4] == [0.0] * 4 and rests[-1] > 0.0
    world.request(40, max_tokens=5)
    rests.clear()
    steps(5)
    assert rests == [0.0] * 5
    agent.say(Released(number=agent.one(Offer).number, request="r"))
    world.finish()


def test_a_room_that_a_router_gave_both_sides_is_where_they_meet(world: World) -> None:
    number = 2**63 - 1
    request = world.prefill(40, bootstrap_room=number)
    output = [each for _ in range(4) if (step := world.step()) for each in step.outputs][-1]
    room = f"room/{number}/{prompt_digest(request)}"
    assert world.agents[0].one(Offer).rendezvous == room
    told = output.kv_transfer_params
    assert (told["bootstrap_room"], told["remote_request_id"]) == (number, room)


@pytest.mark.parametrize("number", [0, -1, 2**63, 10**5000, "7", True, 7.0, [7]], ids=range(8))
def test_what_is_no_room_is_refused_by_name_and_not_offered(
    world: World, number: Any, vllms_log: pytest.LogCaptureFixture
) -> None:
    world.prefill(40, bootstrap_room=number)
    world.steps(4)
    assert not world.agents[0].take(Offer)
    (told,) = [record.getMessage() for record in vllms_log.records if "not offered" in record.getMessage()]
    assert "bootstrap_room: " in told and "must be a number in [1, 2^63)" in told and len(told) < 300
    world.assert_empty()
