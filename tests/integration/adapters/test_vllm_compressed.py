"""DeepSeek V4 between engines of vLLM: all that the model will read is there, byte for byte, whatever the lengths."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from kvbridge_proto.pool import Pool, Shard
from vllm.v1.kv_cache_interface import SlidingWindowMLASpec
from vllm.v1.request import Request

from kvbridge.adapters.vllm.layers import kind_of, window_of
from kvbridge.adapters.vllm.pool import describe
from kvbridge.errors import OperatorError
from kvbridge.geometry.compat import Incompatible, Same, verdict
from testing.agents import agent
from testing.refusals import refused
from tests.integration.adapters.compressed import MXFP4_KEY, Engine
from tests.integration.adapters.test_vllm_pool import draft

pytestmark = pytest.mark.vllm

LONG_S = 90.0
# The decode side fetches all but the last: around where rows of 4 and of 128 end, blocks, and the window.
LENGTHS = (2, 3, 4, 5, 6, 9, 128, 129, 130, 256, 257, 258, 300, 385, 513)


@contextlib.contextmanager
def pair(
    folder: Path, ours: int = 1, theirs: int = 1, of_theirs: dict[str, Any] | None = None, **more: Any
) -> Iterator[tuple[Engine, Engine]]:
    """A prefill engine and a decode engine of so many ranks, each with its agents. `of_theirs` is the latter's."""
    with contextlib.ExitStack() as stack:
        agents = [
            [stack.enter_context(agent(folder, f"{name}{rank}", slot_bytes=1 << 20)) for rank in range(size)]
            for name, size in (("p", ours), ("d", theirs))
        ]
        roles = ("kv_producer", "kv_consumer")
        prefill = Engine(folder / roles[0], agents[0], role=roles[0], **more)
        decode = Engine(folder / roles[1], agents[1], role=roles[1], **(more | (of_theirs or {})))
        yield prefill, decode
        for each in (prefill, decode):
            each.assert_empty()


def run(engines: Sequence[Engine], is_over: Any) -> None:
    """Both engines step until it is over."""
    end = time.monotonic() + LONG_S
    while not is_over():
        assert time.monotonic() < end, [engine.scheduler.requests for engine in engines]
        for engine in engines:
            engine.step()
        time.sleep(0.001)


def settle(*engines: Engine) -> None:
    run(engines, lambda: not any(engine.scheduler.has_requests() for engine in engines))


def handed_over(prefill: Engine, decode: Engine, prompt: list[int], max_tokens: int = 6) -> Request:
    """The prompt goes through both, as a proxy sends it. It is computed when this returns, and asked for."""
    prefill.prefill(prompt=prompt)
    said: list[Any] = []

    def is_told() -> bool:
        outputs = prefill.step()
        said.extend(each.kv_transfer_params for each in (outputs.outputs if outputs else ()))
        return bool(said)

    run([decode], is_told)
    assert said[0]["do_remote_prefill"]
    return decode.request(prompt=prompt, max_tokens=max_tokens, **said[0])


def fetches_every_length(prefill: Engine, decode: Engine, lengths: Sequence[int]) -> None:
    """More tokens than one read all that was kept open."""
    for number, length in enumerate(lengths):
        more = {3: 130, 300: 90}.get(length, 5)
        request = handed_over(prefill, decode, prompt_of(length, number), more)
        settle(prefill, decode)
        assert decode.computed[request.request_id] == more, f"{length}: only the last was computed, and new ones"


def preempts_all(prefill: Engine, decode: Engine, lengths: Sequence[int]) -> None:
    """Of requests at once what was fetched goes with the blocks, and is computed again."""
    requests = [handed_over(prefill, decode, prompt_of(length, i), 12) for i, length in enumerate(lengths)]
    run([prefill, decode], lambda: min(decode.computed[each.request_id] for each in requests) > 2)
    assert max(decode.computed.values()) < 20, "all were fetched"
    assert decode.scheduler.reset_prefix_cache(reset_running_requests=True)
    settle(prefill, decode)
    assert all(each.is_finished() and each.num_preemptions == 1 for each in requests)


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    return [(i * 7919 + seed * 104729 + 13) % 50021 for i in range(tokens)]


@pytest.mark.parametrize(
    ("ours", "theirs", "budget", "lengths"), [(1, 1, 100, LENGTHS), (2, 1, 2048, (130, 300)), (1, 2, 64, (9, 385))]
)
def test_every_length_is_fetched_and_goes_on(
    tmp_path: Path, ours: int, theirs: int, budget: int, lengths: Sequence[int]
) -> None:
    """Chunks of 100 and 64 tokens end inside rows, groups and blocks."""
    with pair(tmp_path, ours, theirs, budget=budget) as (prefill, decode):
        fetches_every_length(prefill, decode, lengths)
        assert len(decode.compared) == 6, decode.compared


def test_index_keys_in_mxfp4(tmp_path: Path) -> None:
    """`indexer_kv_dtype` mxfp4: 64 bytes of a key, and four exponents behind all keys of a page."""
    with pair(tmp_path, 1, 2, budget=100, index=MXFP4_KEY) as (prefill, decode):
        for number, length in enumerate((5, 129, 300)):
            request = handed_over(prefill, decode, prompt_of(length, number), 9)
            settle(prefill, decode)
            assert decode.computed[request.request_id] == 9
        assert decode.compared["index_key"]


def test_prefixes_that_either_side_has(tmp_path: Path) -> None:
    """Of 256 tokens, and of all but the last: what was fetched serves others, and what was computed."""
    with pair(tmp_path, budget=512, async_scheduling=True) as (prefill, decode):
        prompt = prompt_of(900)
        first = handed_over(prefill, decode, prompt[:300])
        settle(prefill, decode)
        for length in (513, 514, 640, 900):
            request = handed_over(prefill, decode, [*prompt[:length], length])
            settle(prefill, decode)
            assert decode.computed[request.request_id] == 6
        local = decode.request(prompt=[*prompt[:600], 1], max_tokens=6)  # nobody prefills this one
        again = handed_over(prefill, decode, prompt[:300])
        settle(prefill, decode)
        assert decode.computed[local.request_id] == 601 - 512 + 5, "from the fetched blocks"
        assert decode.computed[again.request_id] == decode.computed[first.request_id] == 6
        assert max(prefill.computed.values()) < 600, "the prefill side had prefixes, too"


def test_requests_at_once_of_which_all_are_preempted(tmp_path: Path) -> None:
    with pair(tmp_path, budget=256) as (prefill, decode):
        preempts_all(prefill, decode, range(124, 154, 5))


def pool_of(engine: Engine, tp_rank: int = 0) -> Pool:
    return engine.memory_of(tp_rank, 1).pool


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    """Without agents, by the dtype of their caches."""
    folder = tmp_path_factory.mktemp("v4")
    return {dtype: Engine(folder / dtype, [], dtype) for dtype in ("fp8_ds_mla", "auto")}


def test_each_part_is_described(engines: dict[str, Engine]) -> None:
    found = {
        (plane.layer, plane.part): (
            plane.codec.name,
            plane.codec.row_bytes,
            plane.row_tokens,
            plane.token_axis[0].count,
        )
        for plane in pool_of(engines["fp8_ds_mla"]).planes
    }
    window = {"latent": ("fp8_ds_v4", 576, 1, 64), "latent_scale": ("opaque", 8, 1, 64)}
    assert {part: row for (layer, part), row in found.items() if layer == 0} == window
    assert {part: row for (layer, part), row in found.items() if layer == 2} == window | {
        "compressed_latent": ("fp8_ds_v4", 576, 128, 2),
        "compressed_latent_scale": ("opaque", 8, 128, 2),
        "compressor": ("fp32", 4096, 1, 8),
    }
    assert {part: row for (layer, part), row in found.items() if layer == 3} == window | {
        "compressed_latent": ("fp8_ds_v4", 576, 4, 64),
        "compressed_latent_scale": ("opaque", 8, 4, 64),
        "index_key": ("fp8_row_scale", 128, 4, 64),
        "index_key_scale": ("pow2_fp32", 4, 4, 64),
        "compressor": ("fp32", 8192, 1, 4),
        "index_compressor": ("fp32", 2048, 1, 4),
    }
    layer = pool_of(engines["fp8_ds_mla"]).model.layers[3]
    assert layer is not None
    assert (layer.kind, layer.key_width, layer.rope_width, layer.window) == ("mla", 512, 64, 128)


def test_plain_rows_fit_plain_rows_only(engines: dict[str, Engine]) -> None:
    packed, plain = pool_of(engines["fp8_ds_mla"]), pool_of(engines["auto"])
    assert {plane.codec.name for plane in plain.planes} == {"bf16", "fp32", "fp8_row_scale", "pow2_fp32"}
    assert isinstance(verdict(packed, packed), Same) and isinstance(verdict(plain, plain), Same)
    judged = verdict(plain, packed)
    assert isinstance(judged, Incompatible)
    assert judged.reasons[0].startswith(
        "codec: sender bf16, receiver fp8_ds_v4 of 576 bytes (layer 0 latent and 6 more)"
    )


def test_index_keys_in_mxfp4_are_not_those_in_fp8(engines: dict[str, Engine], tmp_path: Path) -> None:
    small = pool_of(Engine(tmp_path / "mxfp4", [], index=MXFP4_KEY))
    found = {
        plane.part: plane.codec for plane in small.planes if plane.layer == 3 and plane.part.startswith("index_key")
    }
    assert {part: (codec.name, codec.width, codec.row_bytes) for part, codec in found.items()} == {
        "index_key": ("mxfp4", 128, 64),
        "index_key_scale": ("opaque", 4, 4),
    }
    assert isinstance(verdict(small, small), Same)
    judged = verdict(small, pool_of(engines["fp8_ds_mla"]))
    assert isinstance(judged, Incompatible)
    assert judged.reasons[0].startswith("codec: sender mxfp4 of 64 bytes, receiver fp8_row_scale (layer 1 index_key")


def test_a_drafts_layer_is_one_more_with_a_window(engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines["fp8_ds_mla"]
    monkeypatch.setattr(engine.config, "speculative_config", draft(1, "/models/m"))
    monkeypatch.setattr(engine.config.model_config.hf_text_config, "num_hidden_layers", 3)
    model = pool_of(engine).model
    assert (model.drafts, model.depth) == ((3,), 3)


def test_a_window_of_latents_in_fp32_is_not_taken_for_what_rows_of_128_are_made_of(engines: dict[str, Engine]) -> None:
    specs = [group.kv_cache_spec for group in engines["auto"].cache.kv_cache_groups]
    made_of = next(spec for spec in specs if window_of(spec) == 128 and spec.dtype == torch.float32)
    latents = SlidingWindowMLASpec(
        block_size=64, num_kv_heads=1, head_size=512, dtype=torch.float32, sliding_window=128, cache_dtype_str="auto"
    )
    assert kind_of(made_of) == "chunked" and (kind_of(latents), window_of(latents)) == ("sliding", 128)


def test_context_parallel_ranks_are_refused_by_name(engines: dict[str, Engine]) -> None:
    engine = engines["fp8_ds_mla"]
    with refused(OperatorError, "context_parallel_unsupported", "needs --decode-context-parallel-size 1"):
        shard = Shard(tp_size=2, cp_size=2)
        describe(engine.views[0], engine.config, engine.of_workers, shard, model_name="m", engine_id="e")
