"""DeepSeek V4 between a real vLLM engine and SGLang's pool, allocator, and halves of a request, with real agents.

SGLang's forward runs on no CPU. So its rows are what vLLM has computed, kept as SGLang keeps them: in other places,
with raw scores and rotated index keys. What vLLM decodes from them is what one vLLM engine says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

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
        ratio = int(cache[1].rpartition(" ")[2]) if cache[1].startswith(("rows", "keys")) else 1
        last = self.end // ratio
        return np.arange(last - len(self.rows[cache]), last)

    def value(self, cache: tuple[int, str], numbers: np.ndarray, width: int) -> np.ndarray:
        return self.rows[cache][numbers - self.numbers(cache)[0]] if len(numbers) else np.zeros((0, width), np.uint8)


class Sides:
    """vLLM's engines, and a rank of an SGLang server of each role, which drafts or not."""

    def __init__(self, folder: Path, stack: ExitStack, drafts: tuple[int, int]) -> None:
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
        self.engines, self.managers = {}, {}
        for role, length in zip(("prefill", "decode"), drafts, strict=True):
            self.engines[role] = engine = Engine(role == "decode", length)
            each: Any
            for each in engine.model.children():
                name = "index " * each.is_in_indexer
                each.load_ape_weight(each.ape, self.ape[each.layer_id, f"{name}state of {each.ratio}"])
            (of,) = stack.enter_context(attached(folder, role, [engine]))
            of.queue.scheduler.model_config.vocab_size = VOCABULARY
            of.digest = lambda req: prompt_digest(req, ("", ""))
            self.managers[role] = of

    def rows(self, name: str, request: str, tokens: int) -> Rows:
        """What a vLLM engine has of a request after so many tokens, or what has come."""
        (found,) = self.vllm[name].states(request, tokens, self.vllm.folder / "rows.npz")
        named = {}
        for name, rows in found.items():
            layer, cache = name.removeprefix("model.layers.").split(".", 1)
            named[int(layer), CACHES[cache].format(RATIOS[int(layer)])] = rows
        return named

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


@pytest.fixture(scope="module", params=[(0, 0), (4, 4)], ids=["", "longer rings"])
def sides(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Sides]:
    with ExitStack() as stack:
        yield Sides(tmp_path_factory.mktemp("v4"), stack, request.param)


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


def to_sglang(sides: Sides, tokens: list[int]) -> None:
    """vLLM prefills, SGLang takes: it has what vLLM has computed, as SGLang keeps it, and nothing else was written."""
    from kvbridge.adapters.sglang.manager import PrefillServers
    from kvbridge.adapters.sglang.receiver import KVBridgeReceiver

    of, engine, room = sides.managers["decode"], sides.engines["decode"], next(ROOMS)
    name = sides.vllm.name("p")
    params = vllm.PREFILL | {"bootstrap_room": room, "fetched_by": "sglang"}
    prefilled = sides.vllm["large"].run(name, tokens, 1, params)
    assert prefilled.params, "nothing was offered"
    rows = sides.rows("large", name, len(tokens))
    host, port, id = (prefilled.params[key] for key in ("remote_host", "remote_port", "remote_request_id"))
    request = Given(engine, 0, engine.request(0).kv)
    states = request.preallocate(len(tokens))
    of.prefill_info_table, of.addr_to_rooms_tracker = PrefillServers(), {FOREIGN: set()}
    of.queue.metadata_buffers = SimpleNamespace(
        output_ids=np.zeros((2, 16)),
        output_token_logprobs_val=np.zeros((2, 16)),
        output_token_logprobs_idx=np.zeros((2, 16)),
        cached_tokens=[SimpleNamespace(zero_=lambda: None)] * 2,
        bootstrap_room=np.zeros((2, 8), np.uint64),
    )
    made = KVBridgeReceiver(of, FOREIGN, room)
    made._setup_bootstrap_infos()
    said = {"sender": f"tcp://{host}:{port}", "first_token": prefilled.tokens[0], "rendezvous": id}
    made.bind(told(request, tokens, room, said), len(tokens))
    of.update_status(room, WAITING)
    before = [each.clone() for each in engine.tensors()]
    made.send_metadata(np.array(pages(request, 0, len(tokens)).ids, np.int32), 1, states, 0)
    assert poll(made) == SUCCESS, of.failure_records
    made.clear()
    request.rows, request.end = sides.at_sglang(rows, len(tokens)), len(tokens)
    assert_rows(request)
    assert_others_are_untouched(request, before)
    engine.free(request)


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


def to_vllm(sides: Sides, tokens: list[int]) -> tuple[list[int], int]:
    """SGLang has computed all but the last token, vLLM decodes: the tokens, and how many it did not compute."""
    from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin as Scheduler

    from kvbridge.adapters.sglang.sender import KVBridgeSender

    name = sides.vllm.name("p")
    sides.vllm["large"].run(name, tokens, 1, dict(vllm.PREFILL))
    end = len(tokens) - 1
    of, engine, room = sides.managers["prefill"], sides.engines["prefill"], next(ROOMS)
    request = Given(engine, 0, engine.request(0).kv)
    rows = sides.rows("large", name, end)
    request.rows, request.end = sides.at_sglang(rows, end, computed), end
    engine.extend(request, end)
    for cache in request.rows:
        request.put(cache, request.numbers(cache))
    request.tokens = end
    made = request.disagg_kv_sender = KVBridgeSender(of, FOREIGN, room)
    made.bind(told(request, tokens, room, {"fetched_by": "vllm"}))
    assert len(request.origin_input_ids) == end, "vLLM computes the last token"
    assert made.poll() == WAITING, of.failure_records
    request.disagg_decode_prefix_len = request.start_send_idx = made.pop_decode_prefix_len()
    made.init(-(-end // PAGE), 1)
    request.extend_end = end
    Scheduler._send_kv_chunk(scheduler_of(of), request, last_chunk=True)
    host, _, port = of.talk.address.removeprefix("tcp://").partition(":")
    params = {"do_remote_prefill": True, "do_remote_decode": False, "bootstrap_room": room}
    params |= {"remote_host": host, "remote_port": int(port)}
    wanted = sides.vllm.name("d")
    answer = sides.vllm["small"].run(wanted, tokens, TOKENS, params)
    for cache, each in sides.rows("small", wanted, end).items():
        assert np.array_equal(each, rows[cache]) or cache[1].startswith("keys"), cache
    assert poll(made) == SUCCESS, of.failure_records
    assert_rows(request)  # what was offered is as it was
    made.clear()
    engine.free(request)
    return list(answer.tokens), answer.cached


@pytest.mark.parametrize("length", LENGTHS)
def test_vllm_goes_on_from_sglangs_rows(sides: Sides, length: int) -> None:
    tokens = prompt(length, next(SEEDS))
    found, cached = to_vllm(sides, tokens)
    assert cached == length - 1, "the prompt did not travel, it was computed again"
    assert found == alone(sides.vllm, tokens, TOKENS)


@pytest.mark.parametrize("length", LENGTHS)
def test_sglang_has_what_vllm_has_computed(sides: Sides, length: int) -> None:
    to_sglang(sides, prompt(length, next(SEEDS)))
