"""vLLM's real requests under the names that both engines derive, and how vLLM says that a call was refused."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from kvbridge_proto.engine import Abandon, Done, NoOffer, Offer, Want
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.renderers.base import BaseRenderer
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.request import Request

from kvbridge.adapters.vllm.rendezvous import has_media_hashes, prompt_digest
from tests.integration.adapters.fake_agent import FakeAgent
from tests.integration.adapters.world import World

pytestmark = pytest.mark.vllm

PROMPT = list(range(40))


def adapter(name: str = "sql", path: str = "/adapters/sql", number: int = 1) -> LoRARequest:
    return LoRARequest(name, number, path)


def image(identifier: str = "3f2a", offset: int = 4) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset=offset, length=9), identifier)


def embeddings(tokens: int) -> torch.Tensor:
    return torch.zeros(tokens, 8)


def told(digest: str, call: str = "call", index: int = 0) -> dict[str, Any]:
    """What a proxy hands over of a request that prefill offered."""
    return {
        "do_remote_prefill": True,
        "remote_request_id": f"{call}/{index}/{digest}",
        "remote_host": "10.0.0.1",
        "remote_port": 7700,
    }


def refuse(world: World, params: dict[str, Any], name: str = "made-by-the-server") -> None:
    """What vLLM does where a call with these params ends before its answer, as its server and its engine core do it."""
    sent: list[Any] = []

    async def add(request: Any) -> None:
        sent.append(request)

    server = SimpleNamespace(engine_core=SimpleNamespace(add_request_async=add))
    asyncio.run(AsyncLLM.notify_kv_transfer_request_rejected(server, name, params))
    request = Request.from_engine_core_request(*sent, None)
    assert request.abort_immediately and request.prompt_token_ids == [0]
    world.scheduler.add_request(request)
    world.abort(request)


class Seen:
    """An object that keeps which of its attributes were looked at: `mm_features.identifier` and so on."""

    def __init__(self, of: Any, looked: set[str], name: str = "") -> None:
        self._of, self._looked, self._name = of, looked, name

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._of, name)
        path = f"{self._name}.{name}".lstrip(".")
        if isinstance(value, list):
            self._looked.add(path)
            return [Seen(each, self._looked, path) for each in value]
        if isinstance(value, LoRARequest | PlaceholderRange):
            return Seen(value, self._looked, path)
        self._looked.add(path)
        return value


@pytest.mark.proves("G9")
def test_vllms_prefix_cache_goes_by_nothing_that_the_digest_leaves_out() -> None:
    """The law of what decides a prompt's KV. If this fails, vLLM knows something new: so must `prompt_digest`."""
    request = Request(
        "cmpl-a-0-11111111",
        PROMPT,
        SamplingParams(max_tokens=1),
        None,
        prompt_embeds=embeddings(40),
        mm_features=[image()],
        lora_request=adapter(),
        cache_salt="salt",
    )
    looked: set[str] = set()
    keys, _ = generate_block_hash_extra_keys(Seen(request, looked), 0, 16, 0)
    embeds = {"prompt_embeds", "_prompt_embeds_per_block_hashes"}
    adapters = {"lora_request.lora_name", "lora_request.lora_path"}
    media = {
        "mm_features",
        "mm_features.identifier",
        "mm_features.mm_position.offset",
        "mm_features.mm_position.length",
    }
    assert looked - embeds - adapters - media == {"cache_salt"}
    assert keys and len(keys) == 4, "embeddings, adapter, image and salt"


def test_media_that_vllm_only_counts_are_known_to_be_so() -> None:
    """With neither of its caches vLLM gives one identifier to two images of two engines."""
    items = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    for cache_gb, prefix_caching, is_counted in [(0, False, True), (4, False, False), (0, True, False)]:
        config = SimpleNamespace(
            model_config=SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=cache_gb)),
            cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        )
        renderer = SimpleNamespace(model_config=config.model_config, config=config, _validate_mm_uuids=lambda *_: None)
        identifiers = BaseRenderer._process_mm_uuids(renderer, {}, items, {}, "renderer0-mm-1")
        assert bool(identifiers) is is_counted is not has_media_hashes(config)


UNLIKE = [
    {},
    {"lora_request": adapter()},
    {"lora_request": adapter("law", "/adapters/law")},
    {"lora_request": adapter(path="/adapters/sql-v2")},
    {"cache_salt": "a"},
    {"cache_salt": "b"},
    {"mm_features": [image()]},
    {"mm_features": [image("3f2b")]},
    {"mm_features": [image(offset=5)]},
]


@pytest.mark.proves("G9")
def test_one_id_used_for_unlike_requests_wants_each_its_own_room(world: World, agent: FakeAgent) -> None:
    for number, kv in enumerate(UNLIKE):
        world.decode(prompt=PROMPT, name=f"chatcmpl-call-{number:08x}", remote_request_id="call", kv=kv)
    world.step()
    assert len({want.rendezvous for want in agent.take(Want)}) == len(UNLIKE)


@pytest.mark.proves("G9")
@pytest.mark.parametrize("has_tokens", [False, True], ids=["embeddings", "text and embeddings"])
def test_embeddings_neither_leave_nor_come(world: World, has_tokens: bool, vllms_log: pytest.LogCaptureFixture) -> None:
    vllms_log.set_level(logging.DEBUG, "vllm.kvbridge.scheduler")
    kv = {"prompt_token_ids": PROMPT if has_tokens else None, "prompt_embeds": embeddings(40)}
    world.prefill(kv=kv)
    world.decode(kv=kv, **told("0" * 40))
    world.request(kv=kv)
    world.run()
    assert not world.agent.take(Offer) and not world.agent.take(Want)
    assert [r.levelname for r in vllms_log.records if "embeddings do not travel" in r.getMessage()] == ["DEBUG"] * 2
    world.assert_empty()


@pytest.mark.proves("G11")
def test_no_prompt_of_a_batch_takes_its_siblings_offer(world: World, agent: FakeAgent) -> None:
    """Two engines that were sent no common id; the answer of prefill names the first prompt alone."""
    prompts = [PROMPT, list(range(100, 150)), list(range(200, 230))]
    digests = [prompt_digest(SimpleNamespace(**plain(prompt))) for prompt in prompts]
    for index in (2, 1, 0):
        name = f"cmpl-decode-{index}-{index:08x}"
        world.decode(prompt=prompts[index], name=name, **told(digests[0], "prefill"))
    world.steps(2)
    wants = agent.take(Want)
    assert sorted(want.rendezvous for want in wants) == [f"prefill/{i}/{digests[i]}" for i in range(3)]
    assert all(want.end_token for want in wants), "none is declined"


@pytest.mark.parametrize("call", ["call", "another"])
def test_a_prompt_prefilled_otherwise_is_computed_at_once_and_declined_only_if_it_is_its_own(
    world: World, agent: FakeAgent, call: str, vllms_log: pytest.LogCaptureFixture
) -> None:
    params = told("0" * 40, call)
    world.decode(prompt=PROMPT, name="chatcmpl-call-11111111", **params)
    world.run()
    declined = [(want.rendezvous, want.end_token) for want in agent.take(Want)]
    assert declined == ([(params["remote_request_id"], 0)] if call == "call" else [])
    assert len([r for r in vllms_log.records if "prefilled for another prompt" in r.getMessage()]) == 1
    refuse(world, params)
    world.run()
    assert not agent.take(Want), "it has spoken for itself"
    world.assert_empty()


@pytest.mark.parametrize(
    ("status", "reason"),
    [(404, "prefill answered the call with status 404"), (0, "prefill's call was given up")],
)
def test_a_prefill_that_is_refused_in_a_room_is_not_waited_for(
    world: World, agent: FakeAgent, status: int, reason: str
) -> None:
    """What the middleware has vLLM report."""
    refuse(world, {"do_remote_decode": True, "bootstrap_room": 7, "status": status})
    world.run()
    assert agent.one(NoOffer) == NoOffer(call="room/7", code="prefill_refused", reason=reason)
    refuse(world, {"do_remote_decode": True}, "in no room")
    refuse(world, {"do_remote_decode": True, "bootstrap_room": "7"}, "in none that there can be")
    world.run()
    assert not agent.take(NoOffer)
    world.assert_empty()


@pytest.mark.proves("G11")
def test_a_refused_call_lets_go_of_what_was_offered_for_it_and_is_no_prompt(
    world: World, agent: FakeAgent, vllms_log: pytest.LogCaptureFixture
) -> None:
    params = told("0" * 40)
    refuse(world, params)
    world.run()
    want = agent.one(Want)
    assert (want.rendezvous, want.sender) == (params["remote_request_id"], "tcp://10.0.0.1:7700")
    assert want.end_token == 0 and want.blocks == ()
    refuse(world, told("1" * 40), "")  # a client may choose this name, and no message holds an empty one
    world.run()
    assert agent.one(Want).rendezvous == told("1" * 40)["remote_request_id"]
    in_room = params | {"bootstrap_room": 7, "remote_request_id": f"room/7/{'a' * 40}"}
    refuse(world, in_room, "in a router's room")
    world.run()
    assert agent.one(Want).rendezvous == in_room["remote_request_id"]
    for number, name in enumerate((f"room/8/{'a' * 40}", "", "room/7/", in_room["remote_request_id"])):
        refuse(world, in_room | {"remote_request_id": name}, f"in no room of that number, or again {number}")
    refuse(world, params, "again")
    refuse(world, params | {"remote_request_id": "call"}, "both at once")  # no room: nothing can be named
    refuse(world, params | {"remote_host": ""}, "nowhere")
    refuse(world, params | {"do_remote_prefill": False}, "not from there")
    world.run()
    assert not agent.take(Want)
    assert not [r for r in vllms_log.records if r.levelno >= logging.INFO and "kvbridge" in r.name]
    world.assert_empty()


@pytest.mark.proves("G11")
def test_a_client_that_hangs_up_declines_no_more_than_its_request_did(world: World, agent: FakeAgent) -> None:
    digest = prompt_digest(SimpleNamespace(**plain(PROMPT)))
    params = told(digest)
    request = world.decode(prompt=PROMPT, name="chatcmpl-call-11111111", **params)
    again = world.decode(prompt=PROMPT, name="chatcmpl-call-22222222", **params)  # a sample, or a second try
    world.step()
    first = agent.one(Want)
    assert first.request == request.request_id, "the other waits for what comes"
    world.abort(request)
    refuse(world, params)
    world.steps(2)
    assert not agent.take(Abandon), "the other takes what comes"
    assert not agent.take(Want), "a decline would take the offer away from the other"
    assert again.request_id in world.scheduler.requests
    agent.say(Done(number=first.number, request="r", moved_bytes=1, seconds=0.1))
    world.finish()
    assert not [each for each in agent.take(Want) if each.end_token], "nothing comes a second time"


@pytest.mark.proves("G11")
def test_a_client_that_hangs_up_on_a_later_prompt_of_a_room_declines_not_the_first(
    world: World, agent: FakeAgent
) -> None:
    """Which another replica may fetch."""
    room = told("0" * 40) | {"bootstrap_room": 7, "remote_request_id": f"room/7/{'0' * 40}"}
    request = world.decode(prompt=PROMPT, name="cmpl-call-1-1a2b3c4d", **room)
    world.step()
    assert agent.one(Want).request == request.request_id
    world.abort(request)
    refuse(world, room, "the client has gone")
    world.steps(2)
    assert not agent.take(Want)


def plain(prompt: list[int]) -> dict[str, Any]:
    nothing = {"prompt_embeds": None, "mm_features": [], "lora_request": None, "cache_salt": None}
    return {"prompt_token_ids": prompt} | nothing
