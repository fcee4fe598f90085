"""DeepSeek V4 between a real vLLM engine and SGLang's pool, allocator, and halves of a request, with real agents.

SGLang's forward runs on no CPU. So its rows are what vLLM has computed, kept as SGLang keeps them: in other places,
with raw scores and rotated index keys. What vLLM decodes from them is what one vLLM engine says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvbridge_proto.pool import Shard

from demo.model import VOCABULARY
from kvbridge.adapters.sglang.prompts import prompt_digest
from tests.integration.adapters.conftest import sglang  # noqa: F401  # a fixture
from tests.integration.adapters.sglang_v4 import PAGE, RATIOS, Engine, Request
from tests.integration.adapters.test_sglang_compressed import ANSWER_S, attached, pages, scheduler_of
from tests.integration.adapters.test_sglang_life import FAILED, FOREIGN, SUCCESS, WAITING
from tests.integration.adapters.test_sglang_pool import on_a_cpu  # noqa: F401  # a fixture
from tests.support.index_keys import numbers, received
from tests.system.engines import fleet as vllm
from tests.system.engines.compressed import write_v4
from tests.system.engines.fleet import prompt
from tests.system.engines.halfway import BACK_S, STANDS, go_on, start_agents, wait_standing
from tests.system.engines.test_states import alone
from tests.system.sglang.fleet import TOKENS

pytestmark = [
    pytest.mark.cross,
    pytest.mark.timeout(500),
    pytest.mark.skipif("amx_tile" not in Path("/proc/cpuinfo").read_text(), reason="DeepSeek V4 on a CPU needs AMX"),
]

PLUGIN = Path(vllm.__file__).parent / "v4_plugin"
# Around where rows of 4 and of 128 tokens end, and pages: what is read again begins in the page before.
LENGTHS = [2, 3, 4, 5, 6, 7, 8, 9, 10, 127, 128, 129, 130, 255, 256, 257, 258, 260, 261, 262, 263, 264, 300]
ROOMS, SEEDS = count(1000), count(9000)
CACHES = {  # vLLM's names, and SGLang's in sglang_v4.py
    "attn.swa_cache": "window",
    "attn": "rows of {}",
    "attn.indexer.k_cache": "keys of {}",
    "attn.compressor.state_cache": "state of {}",
    "attn.indexer.compressor.state_cache": "index state of {}",
}
Rows = dict[tuple[int, str], np.ndarray]  # bytes [rows, bytes] of the last rows of each cache


class Given(Request):
    """A request whose rows are these, of `end` tokens."""

    rows: Rows
    end: int
    # What SGLang's scheduler reads and sets of a request:
    disagg_kv_sender: Any
    origin_input_ids: Any
    disagg_decode_prefix_len: int
    start_send_idx: int
    extend_end: int

    def numbers(self, cache: tuple[int, str]) -> np.ndarray:
        return numbers_of(cache, self.rows[cache], self.end)

    def value(self, cache: tuple[int, str], numbers: np.ndarray, width: int) -> np.ndarray:
        return self.rows[cache][numbers - self.numbers(cache)[0]] if len(numbers) else np.zeros((0, width), np.uint8)


def numbers_of(cache: tuple[int, str], rows: np.ndarray, end: int) -> np.ndarray:
    ratio = int(cache[1].rpartition(" ")[2]) if cache[1].startswith(("rows", "keys")) else 1
    return np.arange(end // ratio - len(rows), end // ratio)


class Sides:
    """vLLM's engines, and an SGLang server of each role, of so many ranks, which drafts or not."""

    def __init__(self, folder: Path, stack: ExitStack, drafts: tuple[int, int], ranks: int) -> None:
        from safetensors.torch import load_file  # which an agent's environment lacks

        self.vllm = vllm.Fleet(
            folder,
            stack,
            write=write_v4,
            python=os.environ["KVBRIDGE_TEST_VLLM_PYTHON"],
            more={"num_gpu_blocks_override": 1200, "block_size": 256, "max_model_len": 4096},
            options={"kvbridge_model_name": "v4"},
            environment={"PYTHONPATH": str(PLUGIN)},
            start=("small", "large", "alone"),
        )
        weights = load_file(folder / "model" / "model.safetensors")
        self.ape = {
            (layer, f"{name}state of {ratio}"): weights[f"layers.{layer}.attn.{of}compressor.ape"]
            for layer, ratio in enumerate(RATIOS)
            for name, of in [("", "")] * (ratio > 0) + [("index ", "indexer.")] * (ratio == 4)
        }
        self.ranks: dict[str, list[tuple[Engine, Any]]] = {}  # by role: each with its manager
        for role, length in zip(("prefill", "decode"), drafts, strict=True):
            shards = [Shard(tp_rank=rank, tp_size=ranks) for rank in range(ranks)]
            engines = [Engine(role == "decode", length, shard=shard) for shard in shards]
            each: Any
            for each in chain.from_iterable(engine.model.children() for engine in engines):
                name = "index " * each.is_in_indexer
                each.load_ape_weight(each.ape, self.ape[each.layer_id, f"{name}state of {each.ratio}"])
            managers = stack.enter_context(attached(folder, role, engines))
            for of in managers:
                of.queue.scheduler.model_config.vocab_size = VOCABULARY
                of.digest = lambda req: prompt_digest(req, ("", ""))
            self.ranks[role] = list(zip(engines, managers, strict=True))

    def rows(self, name: str, request: str, tokens: int) -> Rows:
        """What a vLLM engine has of a request after so many tokens."""
        (found,) = self.of_ranks(name, request, tokens)
        return found

    def of_ranks(self, name: str, request: str, tokens: int) -> Iterator[Rows]:
        """The same, or what has come, on each rank."""
        for found in self.vllm[name].states(request, tokens, self.vllm.folder / "rows.npz"):
            named = {}
            for cache, rows in found.items():
                layer, part = cache.removeprefix("model.layers.").split(".", 1)
                named[int(layer), CACHES[part].format(RATIOS[int(layer)])] = rows
            yield named

    def at_sglang(self, rows: Rows, end: int, take: Any = np.subtract) -> Rows:
        """The same as SGLang keeps it. `take` says how it takes weights off scores."""
        found = {}
        for cache, each in rows.items():
            if cache[1].startswith("keys"):
                keys = received(each[:, :128], each[:, 128:], "pow2_fp32", "pow2_fp32", rotates=True)
                each = np.concatenate(keys, axis=1)
            elif "state" in cache[1]:
                kv, scores = np.split(np.ascontiguousarray(each).view("<f4"), 2, axis=1)
                ape = self.ape[cache].numpy()
                places = np.arange(end - len(each), end) % len(ape)
                each = np.concatenate([kv, take(scores, ape[places])], axis=1).view(np.uint8)
            found[cache] = each
        return found


@pytest.fixture(scope="module", params=[((0, 0), 1), ((4, 4), 2)], ids=["", "longer rings of two ranks"])
def sides(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Sides]:
    with ExitStack() as stack:
        yield Sides(tmp_path_factory.mktemp("v4"), stack, *request.param)


def computed(sums: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Scores of which these are the sums, in fp32, as a model has computed them."""
    found = sums - weights
    for other in (np.nextafter(found, np.float32(np.inf)), np.nextafter(found, np.float32(-np.inf))):
        found = np.where(found + weights == sums, found, other)
    assert np.array_equal(found + weights, sums)
    return found


def told(request: Any, tokens: list[int], room: int, said: dict[str, Any]) -> Any:
    """With what SGLang's own request has."""
    request.origin_input_ids, request.bootstrap_room, request.lora_id = tokens, room, None
    request.sampling_params = SimpleNamespace(custom_params={"kvbridge": said})
    request.extra_key = request.cache_salt = request.input_embeds = None
    request.return_logprob, request.logprob_start_len = False, -1
    return request


def poll(made: Any) -> int:
    limit = time.monotonic() + ANSWER_S
    while (status := int(made.poll())) not in (FAILED, SUCCESS):
        assert time.monotonic() < limit, status
        made.kv_mgr._look_at = 0.0
        time.sleep(0.001)
    return status


def receiver_of(of: Any, request: Any, tokens: int) -> Any:
    """SGLang's half of a request that another engine has prefilled, which has pages for so many tokens."""
    from kvbridge.adapters.sglang.manager import PrefillServers
    from kvbridge.adapters.sglang.receiver import KVBridgeReceiver

    of.prefill_info_table, of.addr_to_rooms_tracker = PrefillServers(), {FOREIGN: set()}
    of.queue.metadata_buffers = SimpleNamespace(
        output_ids=np.zeros((2, 16)),
        output_token_logprobs_val=np.zeros((2, 16)),
        output_token_logprobs_idx=np.zeros((2, 16)),
        cached_tokens=[SimpleNamespace(zero_=lambda: None)] * 2,
        bootstrap_room=np.zeros((2, 8), np.uint64),
    )
    made = KVBridgeReceiver(of, FOREIGN, request.bootstrap_room)
    made._setup_bootstrap_infos()
    made.bind(request, tokens)
    of.update_status(request.bootstrap_room, WAITING)
    return made


class ToSGLang:
    """vLLM has prefilled a prompt, each rank of SGLang's server fetches what it lacks: all but a prefix."""

    def __init__(self, sides: Sides, tokens: list[int], prefix: int = 0) -> None:
        name, room = sides.vllm.name("p"), next(ROOMS)
        params = vllm.PREFILL | {"bootstrap_room": room, "fetched_by": "sglang"}
        prefilled = sides.vllm["large"].run(name, tokens, 1, params)
        assert prefilled.params, "nothing was offered"
        host, port, id = (prefilled.params[key] for key in ("remote_host", "remote_port", "remote_request_id"))
        said = {"sender": f"tcp://{host}:{port}", "first_token": prefilled.tokens[0], "rendezvous": id}
        rows = sides.at_sglang(sides.rows("large", name, len(tokens)), len(tokens))
        self.ranks = []
        for engine, of in sides.ranks["decode"]:
            request = Given(engine, 0, engine.request(0).kv)
            request.rows, request.end = rows, len(tokens)
            states = request.preallocate(len(tokens), prefix)
            before = [each.clone() for each in engine.tensors()]
            made = receiver_of(of, told(request, tokens, room, said), len(tokens) - prefix)
            made.send_metadata(np.array(pages(request, prefix, len(tokens)).ids, np.int32), 1, states, prefix)
            self.ranks.append((request, made, before))

    def come(self) -> None:
        """It has what vLLM has computed, as SGLang keeps it, and nothing else was written."""
        for request, made, before in self.ranks:
            assert poll(made) == SUCCESS, made.kv_mgr.failure_records
            made.clear()
            assert_rows(request)
            assert_others_are_untouched(request, before)
            request.engine.free(request)

    def come_to_nobody(self) -> None:
        """The rows have come, and the request is aborted before SGLang hears of it: its pages are another's then."""
        for request, made, before in self.ranks:
            limit = time.monotonic() + ANSWER_S
            while made.ended is None:
                assert time.monotonic() < limit
                made.kv_mgr._look_at = 0.0
                made.kv_mgr.look()
                time.sleep(0.001)
            assert made.ended.is_good and made.ended.other_scores
            made.abort()
            for each in request.engine.tensors():
                each.random_(256)
            before = [each.clone() for each in request.engine.tensors()]
            assert poll(made) == FAILED
            made.clear()
            assert all(map(torch.equal, before, request.engine.tensors()))
            request.tokens = request.end
            request.engine.free(request)


def assert_rows(request: Given) -> None:
    """All that the model reads is there: byte for byte, but for index keys, which were rounded twice."""
    request.tokens = request.end
    for cache in request.rows:
        if cache[1].startswith("keys"):
            pieces = request.pieces(cache, request.numbers(cache))
            keys, scales = (memory[where].numpy() for memory, where, _ in pieces)
            own = request.rows[cache]
            ours, theirs = numbers(own[:, :128], own[:, 128:], "pow2_fp32"), numbers(keys, scales, "pow2_fp32")
            assert np.array_equal(ours, theirs), cache
        else:
            request.compare(cache, request.numbers(cache))


def assert_others_are_untouched(request: Given, before: list[torch.Tensor]) -> None:
    """No other state's row was written: a weight is taken off what came, and once."""
    was = {now.data_ptr(): each for now, each in zip(request.engine.tensors(), before, strict=True)}
    for cache in request.engine.forms():
        if "state" in cache[1]:
            first = max(0, request.end - 7) if "of 4" in cache[1] else request.end // 128 * 128
            places = request.places(cache, np.arange(first, request.end))
            rows = request.engine.forms()[cache].tensor.view(torch.uint8)
            kept = was[rows.data_ptr()].view(rows.shape)
            kept[places] = rows[places]
            assert torch.equal(rows, kept), cache


def send(of: Any, request: Any, made: Any, end: int) -> None:
    """SGLang has computed a prompt of so many tokens, and sends it in one chunk."""
    from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin as Scheduler

    request.disagg_decode_prefix_len = request.start_send_idx = made.pop_decode_prefix_len()
    made.init(-(-end // PAGE), 1)
    request.extend_end = end
    Scheduler._send_kv_chunk(scheduler_of(of), request, last_chunk=True)


class ToVLLM:
    """Each rank of SGLang's server has computed all but a prompt's last token, and offers it. `first` begins alike."""

    def __init__(self, sides: Sides, tokens: list[int], first: ToVLLM | None = None) -> None:
        from kvbridge.adapters.sglang.sender import KVBridgeSender

        name, room, self.tokens, self.sides, self.wanted = sides.vllm.name("p"), next(ROOMS), tokens, sides, ""
        sides.vllm["large"].run(name, tokens, 1, dict(vllm.PREFILL))
        end = len(tokens) - 1
        self.rows = sides.rows("large", name, end)
        if first is not None:
            self._take_from(first)
        self.ranks = []
        for engine, of in sides.ranks["prefill"]:
            request = Given(engine, 0, engine.request(0).kv)
            request.rows, request.end = sides.at_sglang(self.rows, end, computed), end
            engine.extend(request, end)
            for cache in request.rows:
                request.put(cache, request.numbers(cache))
            request.tokens = end
            made = request.disagg_kv_sender = KVBridgeSender(of, FOREIGN, room)
            made.bind(told(request, tokens, room, {"fetched_by": "vllm"}))
            assert len(request.origin_input_ids) == end, "vLLM computes the last token"
            assert made.poll() == WAITING, of.failure_records
            send(of, request, made, end)
            self.ranks.append((request, made))
        host, _, port = sides.ranks["prefill"][0][1].talk.address.removeprefix("tcp://").partition(":")
        self.params = {"do_remote_prefill": True, "do_remote_decode": False, "bootstrap_room": room}
        self.params |= {"remote_host": host, "remote_port": int(port)}

    def _take_from(self, first: ToVLLM) -> None:
        """The rows that both have: computed in another batch they are rounded otherwise."""
        for cache, rows in first.rows.items():
            own = self.rows[cache]
            ours, theirs = numbers_of(cache, own, len(self.tokens) - 1), numbers_of(cache, rows, len(first.tokens) - 1)
            own[np.isin(ours, theirs)] = rows[np.isin(theirs, ours)]

    def submit(self, name: str = "small") -> None:
        self.wanted, self.name = self.sides.vllm.name("d"), name
        self.sides.vllm[name].submit(self.wanted, self.tokens, TOKENS, self.params)

    def decoded(self) -> list[int]:
        """What vLLM says, which has all rows, as another vLLM has computed them."""
        answer = self.sides.vllm[self.name].result(self.wanted)
        assert answer.cached == len(self.tokens) - 1, "the prompt did not travel, it was computed again"
        for held in self.sides.of_ranks(self.name, self.wanted, len(self.tokens) - 1):
            for cache, each in held.items():
                assert np.array_equal(each, self.rows[cache]) or cache[1].startswith("keys"), cache
        self.end(SUCCESS)
        return list(answer.tokens)

    def end(self, *statuses: int) -> None:
        for request, made in self.ranks:
            assert poll(made) in statuses, made.kv_mgr.failure_records
            assert_rows(request)  # what was offered is as it was
            made.clear()
            request.engine.free(request)


def to_vllm(sides: Sides, tokens: list[int], name: str = "small", first: ToVLLM | None = None) -> list[int]:
    crossing = ToVLLM(sides, tokens, first)
    crossing.submit(name)
    return crossing.decoded()


@pytest.mark.parametrize("length", LENGTHS)
def test_vllm_goes_on_from_sglangs_rows(sides: Sides, length: int) -> None:
    tokens = fresh(length)
    assert to_vllm(sides, tokens) == alone(sides.vllm, tokens, TOKENS)


@pytest.mark.parametrize("length", LENGTHS)
def test_sglang_has_what_vllm_has_computed(sides: Sides, length: int) -> None:
    ToSGLang(sides, fresh(length)).come()


@pytest.mark.parametrize("more", [2, 3, 4, 5, 8, 130])
def test_a_prefix_that_vllm_has_keeps_its_weights(sides: Sides, more: int) -> None:
    """Its cache has the first block, which came from SGLang; the next rows are made of that one's last tokens, too."""
    first = ToVLLM(sides, fresh(PAGE + 1))
    first.submit()
    first.decoded()
    local = sides.vllm["small"].run(sides.vllm.name("local"), [*first.tokens[:PAGE], *fresh(2)], 1)
    assert local.cached == PAGE
    to_vllm(sides, [*first.tokens[:PAGE], *fresh(more)], first=first)


@pytest.mark.parametrize("length", [384, 387, 640])
def test_a_prefix_that_sglang_has_is_left_alone(sides: Sides, length: int) -> None:
    ToSGLang(sides, fresh(length), prefix=PAGE).come()


def test_several_at_once_begin_alike(sides: Sides) -> None:
    begin = fresh(PAGE)
    for number in range(2):
        crossings = [ToVLLM(sides, [*begin, *fresh(more)]) for more in (3, 8 + number)]
        for each in crossings:
            each.submit()
        for each in crossings:
            each.decoded()


def test_every_rank_of_vllm_finishes_its_own(sides: Sides) -> None:
    """Ranks add in another order, so that tokens are compared with nothing."""
    sides.vllm.start("two")
    for length in (7, 130, 262):
        to_vllm(sides, fresh(length), "two")


def test_what_came_for_an_aborted_request_is_left_alone_by_sglang(sides: Sides) -> None:
    ToSGLang(sides, fresh(262)).come_to_nobody()
    ToSGLang(sides, fresh(262)).come()


def test_vllm_aborts_a_request_while_its_rows_travel(sides: Sides) -> None:
    start_agents(sides.vllm, "small", STANDS)
    crossing = ToVLLM(sides, fresh(300))
    crossing.submit()
    wait_standing(sides.vllm, "small")
    sides.vllm["small"].abort(crossing.wanted)
    go_on(sides.vllm, "small")
    crossing.end(SUCCESS, FAILED)
    sides.vllm["small"].wait_empty(BACK_S)
    tokens = fresh(300)
    assert to_vllm(sides, tokens) == alone(sides.vllm, tokens, TOKENS)


def fresh(length: int) -> list[int]:
    return prompt(length, next(SEEDS))
