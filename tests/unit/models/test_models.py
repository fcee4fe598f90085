"""What a model's config.json and two commands say of a cache, before anything is started."""

from __future__ import annotations

import re
from itertools import product
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
from testing.refusals import refused
from tests.support.families import (
    DEEPSEEK_V4,
    FAMILIES,
    GEMMA4,
    INDEX,
    KDA,
    LLAMA,
    MIMO,
    NVFP4_EXPERTS,
    STATES,
    V41,
    Family,
    config,
    latents,
    windows,
)
from tests.support.write_models import PAGE, RECIPES, page

README = Path(__file__).parents[3] / "README.md"
COMMANDS = ("vllm", "vllm -tp 2 -pp 3", "vllm -tp 8 -dcp 2", "sglang --page-size 64", "sglang --tp 8 --pp 2")


def test_the_page_is_what_the_table_says() -> None:
    assert PAGE.read_text() == page(), "make golden"


def test_the_readme_has_the_number_of_recipes_that_are_carried() -> None:
    (carried,) = re.findall(r"\*\*(\d+)\*\* are\s+carried", PAGE.read_text())
    assert re.findall(r"(\d+) of (\d+) public recipes", README.read_text()) == [(carried, str(RECIPES))]


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
    described = {index for index, layer in enumerate(model.layers) if layer is not None}
    beside = {len(model.layers) + index for index in described if model.has_states_beside}
    assert held == described | beside


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
    *(
        (config(name, 4, 64, 8, 64, sliding_window=128, layer_types=windows(4, 4)), layer, kept)
        for name in ("beam", "muse_spark_text", "laguna")
        for layer, kept in ((2, ("sliding", 8, 64, 64, 128)), (3, ("full", 8, 64, 64, 0)))
    ),
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


def test_hy_v4_chooses_in_its_sparse_layers_only() -> None:
    kinds = ["full_attention", "sparse", *["deepseek_sparse_attention"] * 6]
    for said, expected in (({}, {1, 5}), ({"indexer_types": ["full"] * 4 + ["shared"] * 4}, {1, 2, 3})):
        assert read(latents("hy_v4", 8, layer_types=kinds, **INDEX, **said)).index == expected
    assert not read(latents("hy_v4", 8, **INDEX)).index


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
    sides = [
        pools_of(read({"text_config": text}), parse(side), "m", "e", is_decoder=number == 1)
        for number, side in enumerate((prefill, decode))
    ]
    return {each.field for sender in sides[0] for receiver in sides[1] for each in compat.obstacles(sender, receiver)}


def test_layers_that_read_anothers_kv_have_none() -> None:
    shared = read({"text_config": GEMMA4 | {"num_kv_shared_layers": 10}}).layers
    assert [index for index, layer in enumerate(shared) if layer is None] == list(range(20, 30))


@pytest.mark.parametrize("engine", ["vllm -tp", "sglang --tp"])
def test_deepseek_v4_goes_from_any_parallel_size_to_any(engine: str) -> None:
    stages = "-pp 2" if "vllm" in engine else "--pp-size 2"
    sizes = product(SIZES, SIZES)
    assert not any(obstacles(DEEPSEEK_V4, f"{engine} {tp}", f"{engine} {to} {stages}") for tp, to in sizes)


def test_deepseek_v4_needs_rows_that_are_alike() -> None:
    plain = "vllm -tp 2 --attention-backend FLASHINFER_MLA_SPARSE_DSV4"
    assert obstacles(DEEPSEEK_V4, plain, plain) == set()
    assert obstacles(DEEPSEEK_V4, plain, "vllm") == {"codec"}
    small = "vllm -tp 2 --attention-config.indexer_kv_dtype mxfp4"
    assert obstacles(DEEPSEEK_V4, small, small) == set() and "codec" in obstacles(DEEPSEEK_V4, small, "vllm")
    with refused(OperatorError, "codec_unknown", "nvfp4: kvbridge carries index keys in fp8 and mxfp4"):
        pools_of(read(DEEPSEEK_V4), parse("vllm --attention-config.indexer_kv_dtype nvfp4"), "m", "e")
    everything = "vllm --disable-hybrid-kv-cache-manager"
    assert obstacles(DEEPSEEK_V4, everything, "vllm") == set()
    assert obstacles(DEEPSEEK_V4, "vllm", everything) == {"kind"}
    assert obstacles(DEEPSEEK_V4, "vllm", "sglang") == obstacles(DEEPSEEK_V4, "sglang", "vllm") == set()
    with refused(OperatorError, "context_parallel_unsupported", "rows of several tokens, decode_context_p"):
        pools_of(read(DEEPSEEK_V4), parse("vllm -tp 2 -dcp 2"), "m", "e")


@pytest.mark.parametrize(
    ("command", "is_refused"),
    [
        ("vllm --kv-cache-dtype fp8", False),
        ("vllm --kv-cache-dtype bfloat16", True),
        ("vllm --kv-cache-dtype bfloat16 --attention-backend FLASHINFER_MLA_SPARSE_DSV4", False),
        ("sglang --kv-cache-dtype fp8_e4m3", False),
        ("sglang --kv-cache-dtype bfloat16", True),
    ],
)
def test_a_dtype_that_the_engine_refuses_for_deepseek_v4_is_refused(command: str, is_refused: bool) -> None:
    if not is_refused:
        assert pools_of(read(DEEPSEEK_V4), parse(command), "m", "e")
        return
    with refused(OperatorError, "codec_unknown", "--kv-cache-dtype bfloat16, which (vllm|sglang) refuses for rows of"):
        pools_of(read(DEEPSEEK_V4), parse(command), "m", "e")


def test_other_forms_of_deepseek_v4_are_refused_as_by_sglangs_adapter() -> None:
    with refused(OperatorError, "cache_unsupported", "deepseek_v4: --dsv4-attn-backend trtllm; needs another"):
        pools_of(read(DEEPSEEK_V4), parse("sglang --dsv4-attn-backend trtllm"), "m", "e")
    small = "sglang --tp 2 --enable-deepseek-v4-fp4-indexer"
    assert obstacles(DEEPSEEK_V4, small, small) == set() and "codec" in obstacles(DEEPSEEK_V4, small, "sglang")


def test_deepseek_v41_is_carried_between_engines_of_vllm() -> None:
    model = DEEPSEEK_V4 | V41
    assert not obstacles(model, "vllm -tp 2", "vllm -tp 4 -pp 2")
    kinds = {(plane.layer, plane.part): plane for plane in pools_of(read(model), parse("vllm"), "m", "e")[0].planes}
    assert {part for layer, part in kinds if layer == 3} == {"latent", "latent_scale"}, "no source of rows"
    assert "compressor" in {part for layer, part in kinds if layer == 2}
    assert obstacles(model, "vllm", "sglang") == obstacles(model, "sglang", "vllm") == {"codec", "scale_codec"}
    small = "vllm --attention-config.indexer_kv_dtype mxfp4"
    assert obstacles(model, small, "sglang") == obstacles(model, "sglang", small) == set()
    plain = "vllm --attention-backend FLASHINFER_MLA_SPARSE_DSV41"
    assert obstacles(model, plain, plain) == set() and obstacles(model, plain, "vllm") == {"codec"}


@pytest.mark.parametrize("ratios", [[0, 8], [4], [0, 4, 128] * 14])
def test_rows_of_which_we_do_not_know_what_is_beside_them_are_refused(ratios: list[int]) -> None:
    with refused(OperatorError, "bad_model_config", "compress_ratios: .+ known are 0, 1, 4 and 128 for each layer"):
        read(DEEPSEEK_V4 | {"compress_ratios": ratios})


M3 = next(family.config for family in FAMILIES if family.models == "MiniMax M3")


@pytest.mark.parametrize(
    ("command", "latent", "index"),
    [
        ("vllm", "bf16", "bf16"),
        ("vllm --kv-cache-dtype fp8", "fp8_e4m3", "bf16"),
        ("vllm --attention-config.indexer_kv_dtype fp8", "bf16", "fp8_e4m3"),
        ("""vllm -ac '{"indexer_kv_dtype": "fp8_e4m3"}'""", "bf16", "fp8_e4m3"),
        ("sglang", "bf16", "bf16"),
        ("sglang --kv-cache-dtype fp8_e4m3", "fp8_e4m3", "fp8_e4m3"),
        ("sglang --kv-cache-dtype fp8_e5m2", "fp8_e5m2", "bf16"),
        ("sglang --dtype float16", "fp16", "fp16"),
    ],
)
def test_plain_index_keys_have_a_dtype_of_their_own(command: str, latent: str, index: str) -> None:
    for pool in pools_of(read(M3), parse(f"{command} --tp 8" if "sglang" in command else f"{command} -tp 8"), "m", "e"):
        codecs = {(plane.layer, plane.part): plane.codec for plane in pool.planes}
        assert (codecs[3, "k"].name, codecs[3, "index_key"].name) == (latent, index)
        assert {layer for layer, part in codecs if part == "index_key"} == set(range(3, 60))
        assert {plane.total_heads for plane in pool.planes if plane.part == "index_key"} == {1}


def test_of_minimax_m3_what_is_not_carried_is_refused_and_what_is_unknown_not_guessed() -> None:
    sparse = M3["text_config"]["sparse_attention_config"]
    named = {"model_type": "minimax_m2", "sparse_attention_config": sparse}
    assert read(M3["text_config"] | named).index == read(M3).index, "M3's checkpoint names its language model so"
    assert not read(
        {name: value for name, value in M3["text_config"].items() if "sparse" not in name}
        | {"model_type": "minimax_m2"}
    ).index
    for change in ({"sparse_disable_index_value": [0] * 60}, {"sparse_disable_index_value": None}):
        with refused(OperatorError, "cache_unsupported", "index values"):
            pools_of(read(M3["text_config"] | {"sparse_attention_config": sparse | change}), parse("sglang"), "m", "e")
    with refused(OperatorError, "bad_model_config", "sparse_attention_freq"):
        read({name: value for name, value in M3["text_config"].items() if "sparse" not in name})
    with refused(OperatorError, "codec_unknown", "indexer_kv_dtype nvfp4: .+ needs one of these"):
        pools_of(read(M3), parse("vllm --attention-config.indexer_kv_dtype nvfp4"), "m", "e")
    sides = (pools_of(read(M3), parse(side), "m", "e") for side in ("vllm -tp 2", "sglang --tp 4 --page-size 128"))
    senders, receivers = sides
    assert not [each for ours in senders for theirs in receivers for each in compat.obstacles(ours, theirs)]


@pytest.mark.parametrize(
    ("checkpoint", "command", "is_refused"),
    [
        ({}, "sglang --quantization minimax_m3_nvfp4", True),
        (NVFP4_EXPERTS, "sglang --page-size 128 --attention-backend trtllm_mha", True),
        (NVFP4_EXPERTS, "sglang --page-size 128 --attention-backend fa3", False),
        (NVFP4_EXPERTS | {"moe_quant_format": ""}, "sglang", False),
        (NVFP4_EXPERTS, "vllm --block-size 128", False),
    ],
)
def test_of_minimax_m3_what_sglang_packs_on_blackwell_is_refused(
    checkpoint: dict[str, Any], command: str, is_refused: bool
) -> None:
    model = read(M3 | {"quantization_config": checkpoint})
    if not is_refused:
        assert pools_of(model, parse(command), "m", "e")
        return
    with refused(
        OperatorError, "cache_unsupported", "MiniMaxM3Nvfp4KVPool.+Blackwell; needs .+--attention-backend fa3"
    ):
        pools_of(model, parse(command), "m", "e")


def test_hybrids_keep_rows_in_their_attention_layers_only() -> None:
    kimi = latents("kimi_linear", 6, linear_attn_config=KDA | {"full_attn_layers": [4, 6]})
    kinds = [layer and layer.kind for layer in read(kimi).layers]
    assert kinds == ["state", "state", "state", "mla", "state", "mla"]
    ring = latents("bailing_hybrid", 7, num_attention_heads=8, head_dim=4, layer_group_size=3)
    for more, last in (({}, "state"), ({"short_conv_kernel_size": 4}, "mla")):  # version 3 has KDA, and ends with MLA
        model = read(ring | more)
        assert [layer and layer.kind for layer in model.layers] == ["state", "state", "mla"] * 2 + [last]
        assert model.state is not None and len(model.state.conv) == (3 if more else 0)


def test_ranks_that_split_tokens_keep_their_heads_of_a_state_whole() -> None:
    """As Kimi K3's public recipes for vLLM do, on both sides."""
    kimi = latents("kimi_linear", 6, linear_attn_config=KDA | {"full_attn_layers": [4, 6]})
    for pool in pools_of(read(kimi), parse("vllm -tp 8 -dcp 8"), "m", "e"):
        assert check_pool(pool) == () and (pool.shard.cp_rank, pool.shard.cp_size) == (pool.shard.tp_rank, 8)
        held = {plane.part: (plane.first_head, plane.heads) for plane in pool.planes}
        assert held["latent"] == (0, 1) and held["state"] == (4 * pool.shard.tp_rank, 4)
    for ours, theirs in (("vllm -tp 8 -dcp 8", "vllm -tp 8 -dcp 8"), ("vllm -tp 2", "vllm -tp 8 -dcp 4")):
        assert not obstacles(kimi, ours, theirs)


def test_a_state_beside_attention_has_a_number_after_the_models_layers() -> None:
    falcon = next(family for family in FAMILIES if family.models == "Falcon-H1")
    first, second = pools_of(read(falcon.config), parse("vllm -pp 2"), "m", "e")
    for pool, held in ((first, range(22)), (second, range(22, 44))):
        assert pool.model.depth == 44 and check_pool(pool) == () == overlaps(pool)
        kinds = {layer: found.kind for layer, found in enumerate(pool.model.layers) if found is not None}
        assert kinds == dict.fromkeys(held, "full") | {44 + layer: "state" for layer in held}
    for ours, theirs in (("vllm -pp 2", "vllm -tp 2"), ("vllm -pp 4 -tp 2", "sglang --pp 2"), ("vllm", "vllm -pp 2")):
        assert not obstacles(falcon.config, ours, theirs)


def test_sglang_keeps_states_in_fp32_unless_it_is_told_otherwise() -> None:
    model = read(latents("kimi_linear", 6, linear_attn_config=KDA | {"full_attn_layers": [4, 6]}))
    for command, expected in (("sglang", "fp32"), ("sglang --mamba-ssm-dtype bfloat16", "bf16")):
        (pool,) = pools_of(model, parse(command), "m", "e")
        codecs = {plane.part: (plane.codec.name, plane.codec.width, plane.total_heads) for plane in pool.planes}
        assert codecs == {
            **{f"conv_{piece}": ("bf16", 3 * 128, 32) for piece in "qkv"},
            **{"state": (expected, 128 * 128, 32), "latent": ("bf16", 576, 1)},
        }


@pytest.mark.parametrize("named", [{"hybrid_override_pattern": "M-M*M*"}, {"layers_block_type": list("M-M*M*")}])
def test_a_state_is_a_layer_of_its_own(named: dict[str, Any]) -> None:
    sizes = {"mamba_num_heads": 8, "mamba_head_dim": 4, "ssm_state_size": 16, "n_groups": 1, "conv_kernel": 4}
    model = read(config("nemotron_h", 6, 8, 2, 64, **sizes, **named))
    assert [layer and layer.kind for layer in model.layers] == ["state", None, "state", "full", "state", "full"]
    first, second = pools_of(model, parse("vllm -tp 2 --no-enable-prefix-caching --mamba-cache-dtype fp16"), "m", "e")
    planes = {plane.part: plane for plane in second.planes if plane.layer == 0}
    held = {part: (plane.first_head, plane.heads, plane.total_heads) for part, plane in planes.items()}
    assert held == {"conv_x": (4, 4, 8), "conv_b": (0, 1, 1), "conv_c": (0, 1, 1), "state": (4, 4, 8)}
    assert {part: plane.codec.width for part, plane in planes.items()} == {
        **{"conv_x": 12, "conv_b": 48, "conv_c": 48, "state": 64}
    }
    assert [planes[part].codec.name for part in ("conv_x", "state")] == ["fp16", "fp32"]
    assert check_pool(first) == () == overlaps(first)


def test_states_that_are_not_carried_are_refused_before_anything_starts() -> None:
    states = next(family for family in FAMILIES if family.name == "states and full attention")
    text = "mamba_cache_mode all.+of every block; needs --mamba-cache-mode align"
    with pytest.raises(OperatorError, match=text):
        pools_of(read(states.config), parse("vllm --mamba-cache-mode all"), "m", "e")


def test_sglang_drafts_beside_any_state() -> None:
    for name, algorithm, drafts in (
        ("states and full attention", "NEXTN", 1),
        ("states and full attention", "NGRAM", 0),
        ("Mamba 2 states and full attention", "NGRAM", 0),
    ):
        model = read(next(each.config for each in FAMILIES if each.name == name))
        (pool,) = pools_of(model, parse(f"sglang --speculative-algorithm {algorithm}"), "m", "e")
        assert pool.model.drafts == tuple(range(len(model.layers), len(model.layers) + drafts))


@pytest.mark.parametrize(
    ("family", "drafts"),
    [
        ("states and full attention", 1),
        ("Mamba 2 states and full attention", 0),
        ("convolution states and full attention", 0),
        ("Mamba 1 states and full attention", None),
        ("lightning states and latents", None),
    ],
)
def test_vllm_drafts_beside_states_that_it_can_take_back(family: str, drafts: int | None) -> None:
    """With MTP where the model has some; `drafts` are the layers of its own that have rows."""
    model = read(next(each.config for each in FAMILIES if each.name == family))
    command = parse(f"vllm --spec-method {'mtp' if drafts else 'ngram'}")
    if drafts is None:
        with refused(OperatorError, "layer_unsupported", "beside drafts yet; needs no --speculative-config"):
            pools_of(model, command, "m", "e")
        return
    (pool,) = pools_of(model, command, "m", "e")
    assert pool.model.drafts == tuple(range(len(model.layers), len(model.layers) + drafts))


def test_layers_of_a_module_without_attention_have_no_rows() -> None:
    nemotron = next(each.config for each in FAMILIES if each.name == "Mamba 2 states and full attention")
    said = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    assert len(read({**nemotron, **said}).drafts) == 1
    assert not read({**nemotron, "num_nextn_predict_layers": 0}).drafts


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
        ("sglang --speculative-algorithm EAGLE3", {"drafts": "eagle3", "has_own_drafts": False}),
        ("sglang --speculative-algorithm NEXTN", {"drafts": "nextn", "has_own_drafts": True}),
        ("sglang --speculative-algorithm EAGLE --model M --speculative-draft-model-path D", {"has_own_drafts": False}),
        ("sglang --speculative-algorithm EAGLE --model M --speculative-draft-model-path M", {"has_own_drafts": True}),
        ("vllm --speculative-config.method deepseek_mtp", {"drafts": "deepseek_mtp", "has_own_drafts": True}),
        (
            "vllm --speculative_config.method=mtp --speculative-config.num_speculative_tokens 1",
            {"has_own_drafts": True},
        ),
        ("vllm --spec-method eagle --spec-model E", {"drafts": "eagle", "has_own_drafts": False}),
        ("""vllm -sc '{"model": "a_mtp"}'""", {"drafts": "a_mtp", "has_own_drafts": False}),
        ("vllm --speculative-config.model ngram", {"drafts": "", "is_drafting": True}),
        ("vllm --attention-config.hisparse_config.top_k 2048 -tp 2", {"is_hisparse": True, "tp": 2}),
        ("vllm -ac.hisparse-config.top_k=2048 -ac.backend=FLASHMLA", {"is_hisparse": True, "backend": "FLASHMLA"}),
        ("vllm -ac.hisparse_config.top_k=2048 --attention-config.backend X", {"is_hisparse": False}),  # the last counts
        ("vllm serve ./a.b/M --temperature -0.5 -tp 2", {"is_hisparse": False, "tp": 2}),
        ("vllm serve M", {"is_drafting": False}),
        ("sglang --tp 8 --attn-dp-size 4", {"tp": 2}),
        ("sglang --tp 8 --attn-cp-size 2", {"tp": 4}),
        ("/opt/vllm/bin/python -m sglang.launch_server --model-path /models/vllm", {"engine": "sglang"}),
        ("HF_HOME=/vllm python3 -u -m sglang.launch_server --model vllm", {"engine": "sglang"}),
        ("/srv/sglang/bin/vllm serve /models/sglang", {"engine": "vllm"}),
        ("uv run --no-sync vllm serve M", {"engine": "vllm"}),
        ("python -m vllm.entrypoints.openai.api_server --model M", {"engine": "vllm"}),
    ],
)
def test_of_a_command_counts_what_decides_the_cache(command: str, expected: dict[str, Any]) -> None:
    found = parse(command)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("trtllm-serve M", "names neither vllm nor sglang"),
        ("my-vllm serve M", "names neither vllm nor sglang"),
        ("docker run --name sglang vllm serve M", "names both sglang and vllm"),
        ("vllm --speculative-config 5", "object"),
        ("vllm -ac.backend X -ac.backend.more Y", "backend has a value already"),
        ("vllm -ac {indexer", "--attention-config {indexer"),
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


EAGLE, NEXTN = "sglang --speculative-algorithm EAGLE", "sglang --speculative-algorithm NEXTN"
STEP = config("step3p5", 8, 64, 8, 128, sliding_window=512, layer_types=windows(8, 4)[::-1], num_nextn_predict_layers=1)
GPT_OSS = config("gpt_oss", 4, 64, 8, 64, sliding_window=128)


@pytest.mark.parametrize("text", [STEP, MIMO | {"num_nextn_predict_layers": 3}], ids=["step", "mimo"])
def test_drafts_beside_windows_are_refused_on_sglang_as_its_adapter_refuses_them(text: dict[str, Any]) -> None:
    for command in (EAGLE, NEXTN):
        with refused(OperatorError, "cache_unsupported", "draft model's KV pool: SWAKVPool"):
            pools_of(read(text), parse(command), "m", "e")
    assert pools_of(read(text), parse("vllm --speculative-config.method mtp"), "m", "e")


def test_a_drafts_window_is_as_long_as_sglangs_others() -> None:
    (pool,) = pools_of(read(STEP), parse(f"{EAGLE} --disable-hybrid-swa-memory"), "m", "e")
    windowed = [layer.window for layer in pool.model.layers if layer and layer.window]
    assert set(windowed) == {513} and len(windowed) == 7 and pool.model.drafts == (8,)


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        (f"{EAGLE} --speculative-draft-model-path D", "model_unknown", "drafts by eagle"),
        ("sglang --speculative-algorithm EAGLE3", "model_unknown", "drafts by eagle3"),
        ("sglang --speculative-algorithm DFLASH", "cache_unsupported", "DFLASH.+needs EAGLE"),
        ("sglang --speculative-algorithm DSPARK", "cache_unsupported", "DSPARK.+needs EAGLE"),
        ("vllm --speculative-config.method eagle3 --speculative-config.model E", "model_unknown", "drafts by eagle3"),
        ("""vllm --speculative-config '{"method": "dflash", "model": "E"}'""", "model_unknown", "drafts by dflash"),
    ],
)
def test_only_a_models_own_drafts_are_known_from_its_config(command: str, code: str, text: str) -> None:
    with refused(OperatorError, code, text):
        pools_of(read(latents("deepseek_v3", 61)), parse(command), "m", "e")


RADIX = "--disaggregation-decode-enable-radix-cache"


def test_a_hierarchical_cache_on_the_decode_side_is_refused_beside_states() -> None:
    model = read(config("qwen3_next", 48, 16, 2, 256, **STATES))
    both, alone = f"sglang --enable-hierarchical-cache {RADIX}", "sglang --enable-hierarchical-cache"
    for command, is_decoder in ((both, False), (alone, True), (f"sglang {RADIX}", True)):
        assert pools_of(model, parse(command), "m", "e", is_decoder)
    with refused(OperatorError, "cache_unsupported", "qwen3_next: --enable-hierarchical-cache: kvbridge cannot carry"):
        pools_of(model, parse(both), "m", "e", True)


@pytest.mark.parametrize(
    ("command", "is_decoder", "text"),
    [
        ("sglang --enable-hisparse", False, "hisparse.+without --enable-hisparse"),
        (f"sglang --page-size 1 {RADIX}", True, "page_size: 1, must be larger"),
        (f"sglang --page-size 1 {RADIX}", False, ""),
        (f"sglang --page-size 16 {RADIX}", True, ""),
        (f"sglang --page-size 1 {RADIX} --disable-hybrid-swa-memory", True, ""),
        ("sglang --tp 4 --dcp-size 2", False, "attn_dcp_size: 2, must be 1"),
        ("sglang --tp 4 --attn-cp-size 2", True, "attn_cp_size: 2, must be 1"),
        ("sglang --tp 4 --attn-cp-size 2", False, ""),
        ("sglang --enable-kv-cache-sharding", False, "enable_kv_cache_sharding: on, must be off"),
        ("sglang --enable-dsa-cache-layer-split", False, "enable_dsa_cache_layer_split: on, must be off"),
    ],
)
def test_an_option_that_sglangs_adapter_refuses_is_refused_beforehand(
    command: str, is_decoder: bool, text: str
) -> None:
    codes = "context_parallel_unsupported|cache_unsupported"
    if not text:
        assert pools_of(read(GPT_OSS), parse(command), "m", "e", is_decoder)
        return
    with pytest.raises(OperatorError, match=text) as error:
        pools_of(read(GPT_OSS), parse(command), "m", "e", is_decoder)
    assert re.fullmatch(codes, error.value.code)


def test_sglang_has_no_memory_for_windows_of_families_that_it_runs_in_one_pool() -> None:
    for text in (
        config("mistral", 4, 8, 2, 64, **WINDOWED),
        config("qwen2", 4, 8, 2, 64, **WINDOWED, use_sliding_window=True, max_window_layers=3),
        config("qwen3", 4, 8, 2, 64, **WINDOWED, layer_types=windows(4, 2)),
    ):
        (pool,) = pools_of(read(text), parse("sglang"), "m", "e")
        assert [(group.kind, group.window) for group in pool.groups] == [("full", 0)]


@pytest.mark.parametrize("text", [LLAMA, GEMMA4, GPT_OSS])
def test_a_layer_of_an_unknown_type_is_refused_and_never_dropped(text: dict[str, Any]) -> None:
    depth = text["num_hidden_layers"]
    with refused(OperatorError, "bad_model_config", "'linear_attention', known are full_attention"):
        read(text | {"layer_types": ["linear_attention", *["full_attention"] * (depth - 1)]})


@pytest.mark.parametrize(
    ("command", "role", "codec"),
    [
        ("vllm", "prefill", "bf16"),
        ("vllm --kv-cache-dtype fp8", "prefill", "fp8_ds_mla"),
        ("vllm --kv-cache-dtype fp8_ds_mla", "prefill", "fp8_ds_mla"),
        ("vllm --kv-cache-dtype fp8_e4m3", "prefill", "fp8_e4m3"),
        ("vllm --kv-cache-dtype fp8_e4m3 --attention-backend FLASHMLA_SPARSE", "prefill", "fp8_ds_mla"),
        ("vllm --kv-cache-dtype fp8 --attention-backend FLASHINFER_MLA_SPARSE", "prefill", "fp8_e4m3"),
        ("vllm --kv-cache-dtype fp8 -ac.backend flashinfer_mla_sparse_sm90", "prefill", "fp8_e4m3"),
        ("""vllm --kv-cache-dtype fp8 -ac '{"backend": "FLASHINFER_MLA_SPARSE"}'""", "prefill", "fp8_e4m3"),
        ("sglang", "prefill", "bf16"),
        ("sglang --kv-cache-dtype fp8_e4m3", "prefill", "fp8_ds_mla"),
        ("sglang --kv-cache-dtype fp8_e4m3 --dsa-prefill-backend trtllm", "prefill", "fp8_e4m3"),
        ("sglang --kv-cache-dtype fp8_e4m3 --dsa-prefill-backend trtllm", "decode", "fp8_ds_mla"),
        ("sglang --kv-cache-dtype fp8_e4m3 --dsa-decode-backend trtllm", "decode", "fp8_e4m3"),
        ("sglang --kv-cache-dtype fp8_e4m3 --dsa-decode-backend tilelang", "decode", "fp8_ds_mla"),
        (
            "sglang --kv-cache-dtype fp8_e4m3 --dsa-prefill-backend tilelang --dsa-decode-backend tilelang",
            "decode",
            "fp8_e4m3",
        ),
    ],
)
def test_what_an_engine_makes_of_fp8_for_sparse_attention_depends_on_its_backend(
    command: str, role: str, codec: str
) -> None:
    model = read(latents("deepseek_v32", 2, **INDEX))
    (pool,) = pools_of(model, parse(command), "m", "e", role == "decode")
    assert {plane.codec.name for plane in pool.planes if plane.part == "latent"} == {codec}


def test_a_checkpoint_with_scales_for_fp8_is_no_fp8_ds_mla() -> None:
    """vLLM takes it for fp8_e4m3, which FLASHMLA_SPARSE does not; SGLang's sparse attention does not look at it."""
    model = read(latents("deepseek_v32", 2, **INDEX, quantization_config={"kv_cache_quant_algo": "FP8"}))
    for command, codec in (("vllm", "fp8_e4m3"), ("sglang", "bf16")):
        (pool,) = pools_of(model, parse(command), "m", "e")
        assert {plane.codec.name for plane in pool.planes if plane.part == "latent"} == {codec}
