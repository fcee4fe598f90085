"""DeepSeek V4 between SGLang servers: what the model will read is there, byte for byte, and no other byte changed."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import time
from array import array
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvbridge_proto.common import Blocks, Rank
from kvbridge_proto.pool import Pool, Shard
from msgspec.structs import replace

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not in this environment (make test-sglang)", allow_module_level=True)

from kvbridge.adapters.engine.client import EngineClient
from kvbridge.adapters.engine.conversation import Conversation
from kvbridge.adapters.sglang.compressed import beside
from kvbridge.adapters.sglang.pool import describe, moved
from kvbridge.adapters.sglang.windows import offered, wanted
from kvbridge.errors import OperatorError
from kvbridge.geometry.compat import Incompatible, verdict
from testing.agents import agent
from testing.pools import Held
from testing.refusals import refused
from tests.integration.adapters.sglang_v4 import BEFORE, CHUNK, PAGE, RATIOS, SHARED, Engine, Request
from tests.integration.adapters.small import held
from tests.integration.adapters.test_sglang_life import ADDRESS, FAILED, SUCCESS, WAITING, asked, manager, one_rank  # noqa: F401
from tests.integration.adapters.test_sglang_pool import on_a_cpu, renew  # noqa: F401  # a fixture
from tests.integration.adapters.test_sglang_windows import carry

pytestmark = pytest.mark.sglang

ANSWER_S = 60.0
SMALL = {"kv_layout": "v41", "compressed_kv_layout": "fp4", "has_small_keys": True}
# Of each, options of the prefill and the decode side: `SGLANG_DSV4_KV_LAYOUT` and models.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "v4": ({}, {}),
    "v41": ({"kv_layout": "v41"}, {"kv_layout": "v41_new"}),
    "four bits": (SMALL, SMALL | {"kv_layout": "v41_new"}),
    "V4.1": (SHARED | {"kv_layout": "v41_new"}, SHARED | {"kv_layout": "v41"}),
    "V4.1 on Hopper": (SHARED, SHARED),
}
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257, 258, 260, 300, 384, 512, 513, 700, 4000)


def pages(request: Request, first: int, end: int) -> Blocks:
    slots = request.engine.places.req_to_token[request.kv.req_pool_idx, first:end][::PAGE] // PAGE
    return Blocks(0, first // PAGE, tuple(slots.tolist()))


def given(request: Request) -> tuple[Blocks, ...]:
    """What a sender offers of all computed tokens."""
    engine, tokens = request.engine, request.tokens
    window = offered(engine.queue, request, tokens)
    states = request.state_indices(tokens)
    return pages(request, 0, tokens), *window, *beside(engine.pool, window, engine.args, states, tokens, False)


def taken(request: Request, tokens: int, prefix: int, states: list[Any]) -> tuple[Blocks, ...]:
    engine = request.engine
    window = wanted(engine.args, states, tokens)
    return pages(request, prefix, tokens), *window, *beside(engine.pool, window, engine.args, states, tokens, True)


def crossed(prefill: Engine, decode: Engine, tokens: int, seed: int, prefix: int = 0) -> Request:
    """A prompt that is computed by one and goes on at the other. Its slots at the first are free again."""
    request, other = prefill.request(seed), decode.request(seed)
    request.prefill(tokens)
    states = other.preallocate(tokens, prefix)
    before = [each.clone() for each in decode.tensors()]
    blocks = given(request), taken(other, tokens, prefix, states)
    carry(held_of(prefill), blocks[0], tokens, held_of(decode), blocks[1], prefix, tokens)
    other.assert_came(before, prefix, tokens)
    prefill.free(request)
    return other


def held_of(engine: Engine) -> Held:
    return held(engine.memory)


@pytest.mark.parametrize(
    ("ours", "theirs", "lengths"), [(0, 0, LENGTHS), (4, 0, (5, 127, 257, 300)), (0, 4, (9, 129, 258, 385))]
)
def test_every_length_comes_and_goes_on(ours: int, theirs: int, lengths: Sequence[int]) -> None:
    """Chunks of 300 end inside rows, groups and pages. A side that drafts has longer rings."""
    prefill, decode = Engine(drafts=ours), Engine(is_decoder=True, drafts=theirs)
    for seed, tokens in enumerate(lengths):
        request = crossed(prefill, decode, tokens, seed)
        request.decode(150 if tokens in (3, 257, 258, 300) else 9)
        decode.free(request)


@pytest.mark.parametrize(
    ("ours", "theirs", "lengths"),
    [(0, 0, (1, 2, 3, 128, 129, 255, 256, 257, 300, 701)), (4, 0, (3, 257, 300)), (0, 4, (3, 257, 300))],
)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "v4"])
def test_rows_come_in_other_forms_and_of_other_models(
    kind: str, ours: int, theirs: int, lengths: Sequence[int]
) -> None:
    given, taken = KINDS[kind]
    prefill, decode = Engine(drafts=ours, **given), Engine(is_decoder=True, drafts=theirs, **taken)
    for seed, tokens in enumerate(lengths):
        request = crossed(prefill, decode, tokens, seed)
        request.decode(9)
        decode.free(request)
    crossed(prefill, decode, 1101, seed=50, prefix=768).decode(130)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [({}, {"kv_layout": "v41"}), ({"kv_layout": "v41"}, SMALL), ({"has_small_keys": True}, {})],
)
def test_forms_with_other_rows_do_not_fit(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for given, taken in ((ours, theirs), (theirs, ours)):
        found = verdict(Engine(**given).memory.pool, Engine(is_decoder=True, **taken).memory.pool)
        assert isinstance(found, Incompatible) and "codec: " in str(found.reasons), found


def test_index_keys_in_mxfp4_are_not_turned_on_the_way() -> None:
    """SGLang turns those of V4 (`rotated_index_key`), vLLM does not."""
    pool = Engine(has_small_keys=True).memory.pool
    planes = tuple(replace(plane, part=plane.part.removeprefix("rotated_")) for plane in pool.planes)
    found = verdict(pool, replace(pool, planes=planes))
    assert isinstance(found, Incompatible), found


@pytest.mark.parametrize("tokens", [385, 1100])
def test_the_decode_side_has_a_prefix_and_another_request(tokens: int) -> None:
    prefill, decode = Engine(), Engine(is_decoder=True)
    other = crossed(prefill, decode, 301, seed=7)
    request = crossed(prefill, decode, tokens, seed=8, prefix=max(0, tokens - 128) // PAGE * PAGE)
    for each in (request, other):
        each.decode(140)


# The classes that SGLang calls, with its own transfer of chunks, between agents:


@contextlib.contextmanager
def attached(folder: Path, role: str, engines: Sequence[Engine]) -> Iterator[list[Any]]:
    """A manager for each rank, whose conversation is with an agent that has the rank's memory."""
    with contextlib.ExitStack() as stack:
        managers = []
        for engine in engines:
            made = manager(role)
            running = stack.enter_context(agent(folder, f"{role}{len(managers)}", 90.0, slot_bytes=1 << 20))
            memory = engine.memory
            talk = Conversation(EngineClient(running.socket), memory, logging.getLogger(role))
            made.scores = memory.scores
            made.talk = stack.enter_context(contextlib.closing(talk))
            moved(engine.pool)
            assert talk.start(60.0), running.text()
            made.queue, made._dcp_pack_max_tokens = engine.queue, None
            vars(made.kv_args).update(vars(engine.args))
            managers.append(made)
        for made in managers:
            made.talk.share(
                Rank(tp_rank=rank, pp_rank=0, address=each.talk.address) for rank, each in enumerate(managers)
            )
        yield managers


class Pair:
    """Ranks of a prefill server and of a decode server, each with its agent."""

    def __init__(self, prefill: list[tuple[Engine, Any]], decode: list[tuple[Engine, Any]]) -> None:
        self.prefill, self.decode, self.rooms = prefill, decode, count(100)

    def begin(self, prompt: int, tokens: int, prefix: int = 0, is_late: bool = False) -> Crossing:
        return Crossing(self, next(self.rooms), prompt, tokens, prefix, is_late)


class Crossing:
    """One request of both servers. If it `is_late` the decode side has not come yet."""

    def __init__(self, pair: Pair, room: int, prompt: int, tokens: int, prefix: int, is_late: bool) -> None:
        self.tokens, self.prefix, self.pair, self.room = tokens, prefix, pair, room
        self.why: list[Any] = []  # each half has failed
        self.prompt, self.taken = prompt, [] if is_late else self.fetched(prompt)
        self.given = [self._sender(engine, of, prompt) for engine, of in pair.prefill]

    def fetched(self, prompt: int) -> list[tuple[Request, Any, list[torch.Tensor]]]:
        return [self._receiver(engine, of, prompt) for engine, of in self.pair.decode]

    def _receiver(self, engine: Engine, of: Any, prompt: int) -> tuple[Request, Any, list[torch.Tensor]]:
        request = engine.request(prompt)
        states = request.preallocate(self.tokens, self.prefix)
        from kvbridge.adapters.sglang.receiver import KVBridgeReceiver

        made = KVBridgeReceiver(of, ADDRESS, self.room)
        address = self.pair.prefill[0][1].talk.address
        made.bootstrap_infos = [{"rank_ip": "10.0.0.1", "rank_port": 1, "tp_rank": 0, "pp_rank": 0, "agent": address}]
        made.prefill_info, made.target_tp_ranks = SimpleNamespace(attn_tp_size=len(self.pair.prefill)), [0]
        made._send_bootstrap_message = lambda **said: True
        made._send_abort_notification = lambda **said: None
        made.bind(told(request, self), self.tokens - self.prefix)
        of.update_status(self.room, WAITING)
        before = [each.clone() for each in engine.tensors()]
        numbers = pages(request, self.prefix, self.tokens).ids
        made.send_metadata(np.array(numbers, np.int32), 0, states, self.prefix)
        return request, made, before

    def _sender(self, engine: Engine, of: Any, prompt: int) -> tuple[Request, Any]:
        from kvbridge.adapters.sglang.sender import KVBridgeSender

        request = told(engine.request(prompt), self)
        made = request.disagg_kv_sender = KVBridgeSender(of, ADDRESS, self.room)
        made.bind(request)
        of._hear_asked(asked(f"{prompt}", room=self.room, first_token=self.prefix))
        assert made.poll() == WAITING
        request.disagg_decode_prefix_len = request.start_send_idx = made.pop_decode_prefix_len()
        made.init(-(-(self.tokens - self.prefix) // PAGE), 1)
        return request, made

    def prefill(self, tokens: int, chunk: int = CHUNK, tree: Any = None) -> None:
        """All ranks compute, in chunks, and SGLang sends each. Beside a `tree` (of one rank) that has each, too."""
        from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin as Scheduler

        for request, made in self.given:

            def sent(end: int, request: Any = request, made: Any = made) -> None:
                request.extend_end = end
                Scheduler._send_kv_chunk(scheduler_of(made.kv_mgr), request, last_chunk=end == self.tokens)

            request.prefill(tokens, chunk, sent, tree)

    def ended(self) -> tuple[set[int], set[int]]:
        """What SGLang hears at the end, of all ranks."""
        limit, said = time.monotonic() + ANSWER_S, {}
        for _, made in self.given:
            for row in [row for row in made.kv_mgr.told if getattr(row, "room", None) == self.room]:
                for _, of in self.pair.decode:
                    of.rooms.put(row)
        halves = [made for _, made, *_ in (*self.given, *self.taken)]
        while len(said) < len(halves):
            assert time.monotonic() < limit, said
            for place, made in enumerate(halves):
                made.kv_mgr._look_at = 0.0
                if place not in said and (status := int(made.poll())) in (FAILED, SUCCESS):
                    said[place] = status
            time.sleep(0.001)
        self.why = [made.kv_mgr.failure_records.get(self.room) for made in halves]
        for made in halves:
            made.clear()
        for request, _ in self.given:
            request.engine.free(request)
        return {said[i] for i in range(len(self.given))}, {said[i] for i in range(len(self.given), len(said))}

    def assert_crossed(self) -> list[Request]:
        assert self.ended() == ({SUCCESS}, {SUCCESS}), self.why
        for request, _, before in self.taken:
            request.assert_came(before, self.prefix, self.tokens)
        return [request for request, *_ in self.taken]


def told(request: Any, crossing: Crossing) -> Any:
    """With what SGLang's own request has."""
    request.origin_input_ids, request.input_embeds = [0] * crossing.tokens, None
    request.sampling_params = SimpleNamespace(custom_params=None)
    request.bootstrap_room = crossing.room
    return request


def scheduler_of(of: Any) -> Any:
    """As much of SGLang's as its `send_kv_chunk` takes."""
    scheduler = of.queue.scheduler
    return SimpleNamespace(
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        req_to_token_pool=scheduler.req_to_token_pool,
        sliding_window_size=scheduler.sliding_window_size,
        enable_staging=False,
        disagg_metadata_buffers=SimpleNamespace(set_buf=lambda req: None),
        disagg_prefill_bootstrap_queue=SimpleNamespace(kv_manager=of),
        disagg_prefill_pending_chunk_rids=set(),
    )


@contextlib.contextmanager
def pair(
    folder: Path, ours: int = 1, theirs: int = 1, drafts: tuple[int, int] = (0, 0), kinds: Any = ({}, {})
) -> Iterator[Pair]:
    """A side that drafts does so with a model of its own, and gets zeros where the other has none."""
    sides = [
        [
            Engine(
                side == 1,
                drafts[side],
                shard=Shard(tp_rank=rank, tp_size=size),
                has_drafter=bool(drafts[side]),
                gets_drafts=all(drafts),
                **kinds[side],
            )
            for rank in range(size)
        ]
        for side, size in enumerate((ours, theirs))
    ]
    prefill, decode = sides
    with attached(folder, "prefill", prefill) as given, attached(folder, "decode", decode) as taken:
        yield Pair(list(zip(prefill, given, strict=True)), list(zip(decode, taken, strict=True)))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("ours", "theirs", "drafts", "lengths", "kind"),
    [
        (1, 1, (0, 0), (1, 3, 4, 127, 128, 129, 256, 257, 300, 700), "v4"),
        (2, 1, (0, 4), (5, 300), "v4"),
        (1, 2, (4, 0), (9, 385), "v4"),
        (1, 1, (3, 4), (258,), "v41"),
        *((ours, theirs, (0, 0), (1, 257, 385), kind) for ours, theirs, kind in ((2, 1, "four bits"), (1, 2, "V4.1"))),
    ],
)
def test_agents_carry_what_sglang_sends_in_chunks(
    tmp_path: Path, ours: int, theirs: int, drafts: tuple[int, int], lengths: Sequence[int], kind: str
) -> None:
    with pair(tmp_path, ours, theirs, drafts, KINDS[kind]) as both:
        for prompt, tokens in enumerate(lengths):
            crossing = both.begin(prompt, tokens)
            crossing.prefill(tokens)
            for request in crossing.assert_crossed():
                request.decode(90 if tokens == 300 else 5)
                request.engine.free(request)


@pytest.mark.timeout(240)
def test_two_requests_at_once_of_which_one_has_a_prefix_and_another_is_aborted(tmp_path: Path) -> None:
    """The slots of the one that is given up are another request's afterwards."""
    with pair(tmp_path) as both:
        first, second = both.begin(1, 700, prefix=512), both.begin(2, 130)
        first.prefill(300)
        second.prefill(130, chunk=64)
        others = second.assert_crossed()
        for _, made in first.given:
            made.abort()
        for _, made, _ in first.taken:
            made.abort()
        assert first.ended() == ({FAILED}, {FAILED})
        for request, *_ in first.taken:
            request.tokens = first.tokens
            request.engine.free(request)
        again = both.begin(1, 700, prefix=512)
        again.prefill(700)
        for request in (*again.assert_crossed(), *others):
            request.decode(140)


@pytest.mark.timeout(240)
@pytest.mark.proves("G13")
def test_what_the_next_row_is_made_of_stays_the_requests_until_its_sender_is_over(tmp_path: Path) -> None:
    """SGLang gives a request's rings, window and pages to another as soon as its sender is over, or it is aborted."""
    with pair(tmp_path) as both:
        ((engine, _),) = both.prefill
        held, aborted = both.begin(1, 300, is_late=True), both.begin(2, 385, is_late=True)
        for each in (held, aborted):
            each.prefill(each.tokens)
            ((request, made),) = each.given
            for seed in range(4):
                made.kv_mgr._look_at = 0.0
                if made.poll() in (FAILED, SUCCESS) and request.tokens:
                    engine.free(request)
                    request.tokens = 0
                other = engine.request(10 + seed)
                other.prefill(300 + 29 * seed)
                engine.free(other)
        held.taken = held.fetched(1)
        held.assert_crossed()
        aborted.taken = aborted.fetched(2)
        ((request, made),) = aborted.given
        made.abort()
        engine.free(request)
        request.tokens = 0
        other = engine.request(20)
        other.prefill(385)
        ((request, receiver, before),) = aborted.taken
        limit = time.monotonic() + ANSWER_S
        while (said := int(receiver.poll())) not in (FAILED, SUCCESS):
            assert time.monotonic() < limit
            receiver.kv_mgr._look_at = 0.0
            time.sleep(0.001)
        if said == SUCCESS:
            request.assert_came(before, 0, 385)


class Tree:
    """SGLang's prefix cache of a prefill engine, as its builder makes it for V4 (`create_unified_radix_cache`)."""

    def __init__(self, engine: Engine) -> None:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.engine = engine
        self.cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=engine.places,
                token_to_kv_pool_allocator=engine.allocator,
                page_size=PAGE,
                sliding_window_size=BEFORE,
                tree_components=(ComponentType.FULL, ComponentType.SWA),
            )
        )

    def found(self, request: Request, tokens: int) -> Any:
        """SGLang's own record of a prompt, which has what the cache has of it. Its seed stands for its tokens."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.sampling.sampling_params import SamplingParams

        ids = array("q", (request.seed * 10000 + each for each in range(tokens)))
        req = Req(request.rid, "", ids, SamplingParams())
        req.full_untruncated_fill_ids, req.kv = ids, request.kv
        hit = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(ids[:-1])))
        request.tokens = req.kv.cache_protected_len = req.kv.kv_allocated_len = int(hit.device_prefix_len)
        slots = self.cache.path_device_indices(hit.last_device_node)[: request.tokens]
        self.engine.places.req_to_token[req.kv.req_pool_idx, : request.tokens] = slots.int()
        req.lock = self.cache.lock(hit.last_device_node)
        return req

    def over(self, request: Request, req: Any) -> None:
        """Its slots are the cache's now, or free."""
        self.cache.unlock(req.lock)
        self.cache.free_kv_row(req.kv, [(req.kv.cache_protected_len, request.tokens)])
        self.engine.places.free_slots.insert(0, req.kv.req_pool_idx)


@pytest.mark.timeout(600)
def test_the_prefill_side_goes_on_from_what_its_own_prefix_cache_has(tmp_path: Path) -> None:
    """Rows, a window and its rings of another request. (V4's decode side has no such cache: SGLang refuses it.)"""
    hits = []
    with pair(tmp_path) as both:
        ((engine, _),) = both.prefill
        tree = Tree(engine)
        for tokens in (300, 700, 515):
            crossing = both.begin(1, tokens)
            ((request, _),) = crossing.given
            req = tree.found(request, tokens)
            hits.append(request.tokens)
            engine.free = lambda request, req=req: tree.over(request, req)
            crossing.prefill(tokens, tree=(tree.cache, req))
            for other in crossing.assert_crossed():
                other.decode(9)
                other.engine.free(other)
    assert hits == [0, 256, 512]


def described(pool: Pool) -> dict[int, dict[str, tuple[Any, ...]]]:
    found: dict[int, dict[str, tuple[Any, ...]]] = {}
    for plane in pool.planes:
        rows = plane.codec.name, plane.codec.row_bytes, plane.row_tokens
        found.setdefault(plane.layer, {})[plane.part] = *rows, plane.group
    return found


def test_each_part_is_described() -> None:
    engine = Engine(is_decoder=True)
    pool, rows = engine.memory.pool, {name: len(form.tensor) for (_, name), form in engine.forms().items()}
    window = {"latent": ("fp8_ds_v4", 576, 1, 1), "latent_scale": ("opaque", 8, 1, 1)}
    of = {ratio: {f"compressed_{part}": (*row[:2], ratio, 0) for part, row in window.items()} for ratio in (4, 128)}
    keys = {"rotated_index_key": ("fp8_row_scale", 128, 4, 0), "rotated_index_key_scale": ("pow2_fp32", 4, 4, 0)}
    states = {"raw_compressor": ("fp32", 8192, 1, 2), "raw_index_compressor": ("fp32", 2048, 1, 2)}
    fours = window | of[4] | keys | states
    whole = window | of[128] | {"raw_compressor": ("fp32", 4096, 1, 3)}
    assert described(pool) == {0: window, 1: fours, 2: whole, 3: fours}
    kept = [(group.kind, group.window, group.block_tokens, group.begins_inside) for group in pool.groups]
    assert kept[:2] == [("full", 0, 256, False), ("sliding", 128, 256, True)]
    assert [group.blocks for group in pool.groups] == [
        *(rows[name] for name in ("rows of 4", "window")),
        *(rows[f"state of {ratio}"] // ratio for ratio in (4, 128)),
    ]
    assert kept[2:] == [("sliding", 5, 4, False), ("chunked", 128, 128, False)]
    layer = pool.model.layers[3]
    assert layer is not None
    assert (layer.kind, layer.key_width, layer.rope_width, layer.window) == ("mla", 512, 64, 128)


def test_a_stage_without_rows_of_4_has_one_group_less() -> None:
    """Pipeline stages keep what their layers need, and say it under the model's numbers."""
    assert [group.kind for group in Engine(ratios=[0, 128]).memory.pool.groups] == ["full", "sliding", "chunked"]
    stage = Engine(start_layer=2, end_layer=4, shard=Shard(pp_rank=1, pp_size=2)).memory.pool
    assert set(described(stage)) == {2, 3} and len(stage.groups) == 4


def test_a_draft_models_windows_are_layers_more() -> None:
    pool = Engine(has_drafter=True).memory.pool
    assert (pool.model.depth, pool.model.drafts) == (4, (4,))
    assert set(described(pool)[4]) == {"latent", "latent_scale"}


def test_states_in_bf16_become_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLANG_DSV4_COMPRESS_STATE_DTYPE on one side."""
    halves = {"c4_state_dtype": torch.bfloat16, "c128_state_dtype": torch.bfloat16}
    prefill, decode = Engine(**halves), Engine(is_decoder=True)
    request, other = prefill.request(1), decode.request(1)
    numbers, states = np.arange(256, 300), other.preallocate(300)
    request.prefill(300)
    for layer, name in ((1, "state of 4"), (1, "index state of 4"), (2, "state of 128")):
        rows = prefill.forms()[layer, name].tensor
        rows[request.places((layer, name), numbers)] = torch.randn(44, rows.shape[1]).to(torch.bfloat16)
    carry(held(prefill.memory), given(request), 300, held(decode.memory), taken(other, 300, 0, states), 0, 300)
    for layer, name, first in ((1, "state of 4", 296), (1, "index state of 4", 296), (2, "state of 128", 256)):
        ours, theirs = (
            each.engine.forms()[layer, name].tensor[each.places((layer, name), np.arange(first, 300))]
            for each in (request, other)
        )
        assert torch.equal(ours.float(), theirs)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda pool: pool.compression_ratios.append(8), r"of \[8\]: .+ a row stands for several tokens"),
        (
            lambda pool: setattr(pool, "swa_req_ring_size", 128),
            "a ring of the window's rows .+; needs none",
        ),
        (lambda pool: setattr(pool, "swa_kv_pool", None), "a ring of the window's rows for each request"),
        (lambda pool: setattr(pool, "uniform_fp8", True), "rows of 512 fp8 numbers .--dsv4-attn-backend trtllm"),
        (
            lambda pool: setattr(pool, "kv_layout", type(pool.kv_layout).UNIFORM_FP8),
            "in the form uniform_fp8 .SGLANG_D",
        ),
        (lambda pool: delattr(pool, "kv_layout"), "in the form unknown"),
        (
            lambda pool: setattr(pool.compress_state_pools[2], "online", True),
            "sums in place of rows .SGLANG_OPT_",
        ),
        (lambda pool: setattr(pool.c4_indexer_kv_pool, "uses_aiter_fp4_layout", True), "index keys in AITER's order"),
        (lambda pool: renew(pool.swa_kv_pool), "of DeepSeekV4SingleKVPoolOfItsOwn: .+ a row stands for several"),
        (lambda pool: renew(pool.c4_indexer_kv_pool), "of DeepSeekV4IndexerPoolOfItsOwn: .+ a row stands for several"),
        (lambda pool: renew(pool.compress_state_pools[2]), "of CompressStatePoolOfItsOwn: .+ a row stands for several"),
        (lambda pool: setattr(pool, "full_to_swa_index_mapping", None), "whose window is not in pages"),
    ],
)
def test_other_forms_are_refused_by_name(change: Any, text: str) -> None:
    engine = Engine(ratios=[*RATIOS])
    change(engine.pool)
    with refused(OperatorError, "cache_unsupported", text):
        describe(engine.queue, Shard(), model_name="m", engine_id="e")


def test_a_draft_model_with_slots_of_its_own_is_refused() -> None:
    engine = Engine(has_drafter=True)
    assert engine.drafter is not None
    engine.drafter.register_mapping(torch.zeros(1))
    with refused(OperatorError, "cache_unsupported", "must have the model's windows only"):
        describe(engine.queue, Shard(), model_name="m", engine_id="e")
    (runner,) = engine.queue.scheduler.draft_worker._draft_model_runners()
    runner.token_to_kv_pool = SimpleNamespace()
    with refused(OperatorError, "cache_unsupported", "draft model's KV pool: SimpleNamespace, supported are Deep"):
        describe(engine.queue, Shard(), model_name="m", engine_id="e")
