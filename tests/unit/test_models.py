"""What a model's config.json and two commands say of a cache, before anything is started."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvbridge.errors import KVBridgeError, OperatorError
from kvbridge.geometry import compat
from kvbridge.geometry.check import check_pool
from kvbridge.geometry.overlap import overlaps
from kvbridge.models.config import FAMILIES as READERS
from kvbridge.models.config import read
from kvbridge.models.described import pools_of
from kvbridge.models.engine_command import parse
from tests.support.families import FAMILIES, GEMMA4, LLAMA, MIMO, Family, carried_recipes, config, latents
from tests.support.refusals import refused
from tests.support.write_models import PAGE, RECIPES, page

README = Path(__file__).parents[2] / "README.md"
COMMANDS = ("vllm", "vllm -tp 2 -pp 3", "vllm -tp 8 -dcp 2", "sglang --page-size 64", "sglang --tp 8 --pp 2")


def test_the_page_is_what_the_table_says() -> None:
    assert PAGE.read_text() == page(), "make golden"


def test_the_readme_has_the_number_of_recipes_that_are_carried() -> None:
    assert re.findall(r"(\d+) of (\d+) public recipes", README.read_text()) == [(str(carried_recipes()), str(RECIPES))]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_is_described_is_valid_on_every_rank(family: Family, command: str) -> None:
    model, engine = read(family.config), parse(command)
    try:
        pools = pools_of(model, engine, "m", "e")
    except KVBridgeError as error:
        assert error.reasons and all(re.search("needs|no setting|must", reason) for reason in error.reasons)
        return
    assert len(pools) == engine.tp * engine.pp
    for pool in pools:
        assert not check_pool(pool) and not overlaps(pool)
    held = {plane.layer for pool in pools for plane in pool.planes}
    assert held == {index for index, layer in enumerate(model.layers) if layer is not None}


def layer_of(config: dict[str, Any], layer: int) -> tuple[Any, ...]:
    found = read(config).layers[layer]
    assert found is not None
    return found.kind, found.kv_heads, found.key_width, found.value_width, found.window


WINDOWED = {"sliding_window": 4096}
LAYERS: list[tuple[dict[str, Any], int, tuple[Any, ...]]] = [
    (LLAMA, 31, ("full", 8, 128, 128, 0)),
    (
        {"model_type": "opt", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64},
        0,
        ("full", 4, 16, 16, 0),
    ),
    (config("mistral", 4, 8, 2, 64, **WINDOWED), 3, ("sliding", 2, 64, 64, 4096)),
    (config("mistral", 4, 8, 2, 64, sliding_window=None), 3, ("full", 2, 64, 64, 0)),
    (config("qwen2", 4, 8, 2, 64, **WINDOWED, use_sliding_window=False), 3, ("full", 2, 64, 64, 0)),
    (config("qwen2", 4, 8, 2, 64, **WINDOWED, use_sliding_window=True, max_window_layers=3), 2, ("full", 2, 64, 64, 0)),
    (
        config("qwen2", 4, 8, 2, 64, **WINDOWED, use_sliding_window=True, max_window_layers=3),
        3,
        ("sliding", 2, 64, 64, 4096),
    ),
    (config("gemma3_text", 12, 8, 4, 256, sliding_window=1024), 5, ("full", 4, 256, 256, 0)),
    (config("gemma3_text", 12, 8, 4, 256, sliding_window=1024), 6, ("sliding", 4, 256, 256, 1024)),
    (config("gpt_oss", 4, 64, 8, 64, sliding_window=128), 0, ("sliding", 8, 64, 64, 128)),
    (config("gpt_oss", 4, 64, 8, 64, sliding_window=128), 1, ("full", 8, 64, 64, 0)),
    ({"text_config": GEMMA4}, 0, ("sliding", 8, 256, 256, 1024)),
    ({"model_type": "gemma4", "text_config": GEMMA4}, 5, ("full", 2, 512, 512, 0)),
    (MIMO, 0, ("full", 4, 192, 128, 0)),
    (MIMO, 1, ("sliding", 8, 192, 128, 128)),
    (config("llama4_text", 8, 40, 8, 128, attention_chunk_size=8192), 2, ("chunked", 8, 128, 128, 8192)),
    (config("llama4_text", 8, 40, 8, 128, attention_chunk_size=8192), 3, ("full", 8, 128, 128, 0)),
    (latents("kimi_k2", 61), 60, ("mla", 1, 576, 0, 0)),
]


@pytest.mark.parametrize(("config", "layer", "expected"), LAYERS)
def test_a_layer_is_what_the_config_says(config: dict[str, Any], layer: int, expected: tuple[Any, ...]) -> None:
    assert layer_of(config, layer) == expected


GEMMA4_31B = GEMMA4 | {"num_key_value_heads": 16, "num_global_key_value_heads": 4, "num_attention_heads": 32}


@pytest.mark.parametrize("text", [GEMMA4, GEMMA4_31B], ids=["26B", "31B"])
@pytest.mark.parametrize("block", ["", "--block-size 32"])
def test_gemma_4_goes_from_any_parallel_size_to_any(text: dict[str, Any], block: str) -> None:
    """vLLM makes all pages equal: so blocks of windows are twice as large where both kinds of layers have one head.

    From smaller blocks of windows to those nothing is carried, unless the prefill side has twice as many tokens in all.
    """
    refused = {(tp, to) for tp in SIZES for to in SIZES if obstacles(text, f"vllm -tp {tp} {block}", f"vllm -tp {to}")}
    alone = 8 if text is GEMMA4 else 16  # from here on there is a head of a window for each rank, or less
    assert refused == (set() if block else {(tp, to) for tp in SIZES for to in SIZES if tp < alone <= to})


SIZES = (1, 2, 4, 8, 16)


def obstacles(text: dict[str, Any], prefill: str, decode: str) -> set[str]:
    """The fields in which some ranks of two engines for this model do not fit."""
    sides = [pools_of(read({"text_config": text}), parse(side), "m", "e") for side in (prefill, decode)]
    return {each.field for sender in sides[0] for receiver in sides[1] for each in compat.obstacles(sender, receiver)}


def test_layers_that_read_anothers_kv_have_none() -> None:
    shared = read({"text_config": GEMMA4 | {"num_kv_shared_layers": 10}}).layers
    assert [index for index, layer in enumerate(shared) if layer is None] == list(range(20, 30))


def test_hybrids_keep_rows_in_their_attention_layers_only() -> None:
    kimi = latents("kimi_linear", 6, linear_attn_config={"full_attn_layers": [4, 6]})
    nemotron = config("nemotron_h", 6, 8, 2, 64, hybrid_override_pattern="M-M*M*")
    for hybrid, held in ((kimi, [3, 5]), (nemotron, [3, 5])):
        model = read(hybrid)
        assert [index for index, layer in enumerate(model.layers) if layer] == held and "state" in model.kinds


def test_a_checkpoint_with_scales_has_an_fp8_cache() -> None:
    for said in ({"kv_cache_scheme": {"num_bits": 8}}, {"kv_cache_quant_algo": "FP8"}):
        (pool,) = pools_of(read(LLAMA | {"quantization_config": said}), parse("vllm"), "m", "e")
        assert {plane.codec.name for plane in pool.planes} == {"fp8_e4m3"}
        (pool,) = pools_of(
            read(LLAMA | {"quantization_config": said}), parse("vllm --kv-cache-dtype bfloat16"), "m", "e"
        )
        assert {plane.codec.name for plane in pool.planes} == {"bf16"}


def test_a_family_that_is_not_known_is_refused_and_never_guessed() -> None:
    with refused(OperatorError, "model_unknown", "did you mean llama.+kvbridge status --pool"):
        read(LLAMA | {"model_type": "llama9"})
    with refused(OperatorError, "bad_model_config", "kv_lora_rank"):
        read({"model_type": "deepseek_v3", "num_hidden_layers": 2})
    assert all(reader.layers for reader in READERS.values())


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("vllm serve M --tensor_parallel_size 4 --block-size=32 --enforce-eager", {"tp": 4, "block_tokens": 32}),
        ("CUDA_VISIBLE_DEVICES=0 vllm serve M -tp 4 -pp 2 -dp 8", {"tp": 4, "pp": 2, "block_tokens": 16}),
        ("python3 -m sglang.launch_server --model M --tp 8 --dp 4 --enable-dp-attention", {"tp": 2, "block_tokens": 1}),
        ("sglang --tp-size 8 --dp-size 2", {"tp": 8}),
        ("vllm --disable-hybrid-kv-cache-manager --kv-cache-dtype fp8", {"keeps_all": True, "kv_cache_dtype": "fp8"}),
        ("""vllm --speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'""", {"drafts": "mtp"}),
        ("""vllm --speculative-config '{"method": "ngram"}'""", {"drafts": ""}),
        ("sglang --speculative-algorithm NGRAM", {"drafts": ""}),
        ("sglang --speculative-algorithm EAGLE3", {"drafts": "eagle3"}),
    ],
)
def test_of_a_command_counts_what_decides_the_cache(command: str, expected: dict[str, Any]) -> None:
    found = parse(command)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("trtllm-serve M", "names neither vllm nor sglang"),
        ("vllm -tp two", "two"),
        ("vllm -tp 0", "0"),
        ("vllm --speculative-config {method", "speculative-config"),
        ("vllm 'half", "quotation"),
        ("sglang --tp 4 --dp 3 --enable-dp-attention", "multiple"),
        ("vllm -tp 4 -dcp 3", "must divide"),
    ],
)
def test_a_command_that_is_none_is_refused(command: str, text: str) -> None:
    with refused(OperatorError, "bad_option", text):
        parse(command)


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    with refused(OperatorError, "bad_option", "tp size 3: 8 KV heads"):
        pools_of(read(LLAMA), parse("vllm -tp 3"), "m", "e")


def test_drafts_of_another_model_are_not_guessed() -> None:
    with refused(OperatorError, "model_unknown", "drafts by eagle3"):
        pools_of(read(LLAMA), parse("""vllm --speculative-config '{"method": "eagle3", "model": "E"}'"""), "m", "e")
