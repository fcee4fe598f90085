"""vLLM's backends: what kvbridge's table says of each is so in the installed vLLM; what is refused is refused truly."""

from __future__ import annotations

import ast
import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch
import vllm
from kvbridge_proto.pool import Shard
from vllm.config import ModelConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvbridge.adapters.engine.memory import Memory
from kvbridge.adapters.engine.unsupported import UNSUPPORTED
from kvbridge.adapters.vllm.backends import BACKENDS, MLA, V1
from kvbridge.adapters.vllm.layers import KINDS
from kvbridge.errors import OperatorError
from testing.oracle import take_rows
from testing.refusals import refused
from tests.integration.adapters.small import held
from tests.integration.adapters.test_vllm_pool import BLOCKS, TOKENS, build

pytestmark = pytest.mark.vllm

SOURCE = Path(vllm.__file__).parent
FLASH = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION")
COMPOSITES = {"TRITON_FLASH_ATTN": "triton_flash_attn.py", "TRITON_FLASHINFER": "triton_flashinfer.py"}
DIFFERENT_WIDTHS = ("FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV")
LATENT = [name for name, backend in BACKENDS.items() if backend.source.startswith(MLA) and backend.rows == "latent"]
OLDER = {"FLASH_ATTN_MLA_SPARSE_FA4"}  # came with 0.33
NAME = "model.layers.0.self_attn.attn"


def functions(source: str) -> dict[str, str]:
    """Every function of a file with its text; of several of a name, the last."""
    text = (SOURCE / source.partition(":")[0]).read_text()
    found = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    return {node.name: ast.unparse(node) for node in found}


def names_in(source: str) -> set[str]:
    """The names that the backends of a file give themselves."""
    text = (SOURCE / source.partition(":")[0]).read_text()
    found = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    return {
        statement.value.value
        for node in found
        if node.name == "get_name"
        for statement in ast.walk(node)
        if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Constant)
    }


@pytest.mark.parametrize("name", [*FLASH, *DIFFERENT_WIDTHS, *LATENT])
def test_a_backend_that_is_listed_is_in_the_file_that_is_named(name: str) -> None:
    if name not in OLDER:
        assert name in names_in(BACKENDS[name].source)


@pytest.mark.parametrize("name", [*FLASH, *DIFFERENT_WIDTHS])
def test_keys_and_values_are_written_by_the_writer_that_the_table_names(name: str) -> None:
    writer = functions(BACKENDS[name].source)["do_kv_cache_update"]
    expected = "triton_reshape_and_cache_flash_diffkv(" if name in DIFFERENT_WIDTHS else "reshape_and_cache_flash("
    assert expected in writer


@pytest.mark.parametrize("name", COMPOSITES)
def test_the_first_of_two_backends_in_one_writes_for_both(name: str) -> None:
    """What vLLM takes by itself for Gemma 4 on Hopper and Blackwell, as its images see each other."""
    calls = (node for node in ast.walk(ast.parse((SOURCE / V1 / COMPOSITES[name]).read_text())))
    (made,) = [
        each
        for each in calls
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "create_composite_attention_backend"
    ]
    assert f"backend_name='{name}'" in ast.unparse(made)
    both = functions(f"{V1}composite.py")
    for writes in ("do_kv_cache_update", "do_rope_and_kv_cache_update", "do_qk_norm_rope_kvcache_update"):
        assert f"self.general_impl.{writes}" in both[writes]
    assert ast.unparse(made.args[0]) == "TritonAttentionBackend"
    assert BACKENDS[name] == BACKENDS["TRITON_ATTN"]
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
    cache = {NAME: torch.zeros(BLOCKS, 2, TOKENS, 16, dtype=torch.bfloat16)}
    pools = [build(cache, backend=each, kv_spec=spec) for each in (name, "TRITON_ATTN")]
    assert pools[0].planes == pools[1].planes


@pytest.mark.parametrize("name", LATENT)
def test_latents_have_one_writer_unless_the_table_names_a_line(name: str) -> None:
    """`MLAAttentionImpl.do_kv_cache_update`; CPU backends have their own, for the same rows."""
    own = "do_kv_cache_update" in functions(BACKENDS[name].source)
    assert own == (":" in BACKENDS[name].source)
    assert "concat_and_cache_mla(" in functions("v1/attention/backend.py")["do_kv_cache_update"]


@pytest.mark.parametrize("backend", DIFFERENT_WIDTHS)
@pytest.mark.parametrize("order", ["LBHN", "LBNH", "BLHN"])
def test_values_narrower_than_keys_lie_behind_them_in_each_cell(backend: str, order: str) -> None:
    """As `reshape_and_cache_kernel_flash_diffkv` stores them: K at 0, V at head_size_k, of K 192 and V 128."""
    key, value, heads = 192, 128, 4
    sizes = {"L": 1, "B": BLOCKS, "H": heads, "N": TOKENS}
    buffer = torch.zeros(*(sizes[axis] for axis in order), key + value, dtype=torch.bfloat16)
    cache = buffer.permute(*(order.index(axis) for axis in "LBHN"), 4)[0]
    k = torch.arange(BLOCKS * TOKENS * heads * key, dtype=torch.int16).view(-1, heads, key)
    v = (-1 - torch.arange(BLOCKS * TOKENS * heads * value, dtype=torch.int16)).view(-1, heads, value)
    written = cache.view(torch.int16).transpose(1, 2)
    for slot in range(BLOCKS * TOKENS):
        for head in range(heads):
            written[slot // TOKENS, slot % TOKENS, head, :key] = k[slot, head]
            written[slot // TOKENS, slot % TOKENS, head, key : key + value] = v[slot, head]
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=heads, head_size=key, head_size_v=value, dtype=torch.bfloat16
    )
    pool = build({NAME: cache}, backend=backend, kv_spec=spec, total_heads=heads)
    layer = pool.model.layers[0]
    assert layer is not None and (layer.key_width, layer.value_width) == (key, value)
    for plane, rows in zip(pool.planes, (k, v), strict=True):
        found = take_rows(held(Memory(pool, (cache.untyped_storage(),))), plane, np.arange(len(rows)))
        assert np.array_equal(found, rows.view(torch.uint8).numpy())


@pytest.mark.parametrize("name", [name for name in LATENT if "CPU" not in name])
@pytest.mark.parametrize(("said", "dtype", "width"), [("auto", torch.bfloat16, 576), ("fp8_ds_mla", torch.uint8, 656)])
def test_a_latent_is_the_same_plane_whichever_backend_wrote_it(
    name: str, said: str, dtype: torch.dtype, width: int
) -> None:
    spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=576, dtype=dtype)
    cache = {NAME: torch.zeros(BLOCKS, 1, TOKENS, width, dtype=dtype)}
    (plane,) = build(cache, backend=name, kv_spec=spec, kv_cache_dtype=said).planes
    assert (plane.part, plane.codec.row_bytes) == ("latent", width * dtype.itemsize)


def gemma4(folder: Path, kv_heads: int, full_heads: int) -> ModelConfig:
    """vLLM's own reading of a config with the heads of Gemma 4 and narrow rows: five windows, then a full layer."""
    config = {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        **{"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6},
        **{"num_attention_heads": 32, "num_key_value_heads": kv_heads, "num_global_key_value_heads": full_heads},
        **{"head_dim": 8, "global_head_dim": 16, "attention_k_eq_v": True, "sliding_window": 128},
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512)


@pytest.mark.parametrize(("kv_heads", "full_heads"), [(8, 2), (16, 4)], ids=["26B", "31B"])
def test_each_layer_of_gemma_4_has_its_own_heads_at_every_parallel_size(
    tmp_path: Path, kv_heads: int, full_heads: int
) -> None:
    model = gemma4(tmp_path, kv_heads, full_heads)
    for tp_size in (1, 2, 4, 8, 16):
        held_by: dict[int, list[range]] = {0: [], 5: []}
        parallel = SimpleNamespace(tensor_parallel_size=tp_size)
        for rank in range(tp_size):
            specs, caches = {}, {}
            for layer in (0, 5):
                heads = model.get_num_kv_heads(parallel, model.model_arch_config[layer])
                width = model.model_arch_config[layer].head_size
                kind: Any = SlidingWindowSpec if layer == 0 else FullAttentionSpec
                more = {"sliding_window": 128} if layer == 0 else {}
                name = f"model.layers.{layer}.self_attn.attn"
                specs[name] = kind(block_size=TOKENS, num_kv_heads=heads, head_size=width, dtype=torch.bfloat16, **more)
                caches[name] = torch.zeros(BLOCKS, heads, TOKENS, 2 * width, dtype=torch.bfloat16)
            pool = build(
                caches,
                specs=specs,
                shard=Shard(tp_rank=rank, tp_size=tp_size),
                total_heads=int(model.get_total_num_kv_heads()),
                model={"model_arch_config": model.model_arch_config},
            )
            for plane in pool.planes[::2]:
                held_by[plane.layer].append(range(plane.first_head, plane.first_head + plane.heads))
                assert plane.total_heads == (kv_heads if plane.layer == 0 else full_heads)
        for layer, total in ((0, kv_heads), (5, full_heads)):
            copies = max(1, tp_size // total)
            each = total // tp_size or 1
            assert held_by[layer] == [range(r // copies * each, r // copies * each + each) for r in range(tp_size)]


def test_the_heads_of_windows_that_a_config_names_apart_are_theirs() -> None:
    """MiMo V2: 4 heads in full layers, 8 in those with windows, at TP 8 one each on every rank."""
    common: dict[str, Any] = {"block_size": TOKENS, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
    specs = {
        "model.layers.0.attn": FullAttentionSpec(**common),
        "model.layers.1.attn": SlidingWindowSpec(**common, sliding_window=128),
    }
    caches = {name: torch.zeros(BLOCKS, 1, TOKENS, 16, dtype=torch.bfloat16) for name in specs}
    text = SimpleNamespace(num_hidden_layers=2, swa_num_key_value_heads=8)
    pool = build(caches, specs=specs, shard=Shard(tp_rank=3, tp_size=8), total_heads=4, model={"hf_text_config": text})
    assert [(plane.first_head, plane.total_heads) for plane in pool.planes[::2]] == [(1, 4), (3, 8)]


COMMON: dict[str, Any] = {"block_size": 64, "num_kv_heads": 1, "dtype": torch.uint8}
GQA: dict[str, Any] = {"block_size": TOKENS, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
REFUSED = [
    (MLAAttentionSpec(**COMMON, head_size=584, tokens_per_state=4), "FLASHMLA_SPARSE", "compressed"),
    (MLAAttentionSpec(**COMMON, head_size=584, tokens_per_state=4), "STEP5_CSA_SUMMARY", "compressed"),
    (FullAttentionSpec(**GQA, tokens_per_state=Fraction(1, 4)), "FLASH_ATTN", "compressed"),
    (FullAttentionSpec(**GQA), "TURBOQUANT", "packed"),
    (MambaSpec(block_size=16, shapes=((2,),), dtypes=(torch.bfloat16,)), "MAMBA1_ATTN", "state"),
    (CircularBufferSpec(**GQA), "KPOOL_TAIL", "ring"),
    (CircularBufferSpec(**GQA), "QWEN4_EXP_EXP_QSA_STATE", "ring"),
    (CircularBufferSpec(**GQA), "STEP5_CSA_TAIL_RING", "ring"),
    (CrossAttentionSpec(**GQA), "FLASH_ATTN", "cross"),
    (SinkFullAttentionSpec(**GQA, sink_len=4), "FLASH_ATTN", "sink"),
]


@pytest.mark.parametrize("said", ["auto", "fp8"])
@pytest.mark.parametrize(("spec", "backend", "kind"), REFUSED, ids=[f"{kind} {name}" for _, name, kind in REFUSED])
def test_a_refusal_names_what_is_missing_and_what_would_help_whatever_the_dtype(
    spec: Any, backend: str, kind: str, said: str
) -> None:
    expected = UNSUPPORTED[kind]
    with refused(OperatorError, "layer_unsupported") as caught:
        build({NAME: torch.zeros(6, 1, 64, 132, dtype=torch.uint8)}, backend=backend, kv_spec=spec, kv_cache_dtype=said)
    assert NAME in str(caught.value) and f"kvbridge cannot carry {expected.missing}" in str(caught.value)
    helps = f"needs {expected.helps['vllm']}" if "vllm" in expected.helps else "no setting of the engine helps"
    assert str(caught.value).endswith(helps)


KNOWN = {
    FullAttentionSpec(**GQA): "FLASH_ATTN",
    MLAAttentionSpec(**COMMON, head_size=576): "FLASHMLA",
    SlidingWindowSpec(**GQA, sliding_window=8): "FLASH_ATTN",
    SlidingWindowMLASpec(**COMMON, head_size=576, sliding_window=8): "FLASHMLA",
    ChunkedLocalAttentionSpec(**GQA, attention_chunk_size=8): "FLASH_ATTN",
    MambaSpec(block_size=16, shapes=((2,),), dtypes=(torch.bfloat16,)): "MAMBA1_ATTN",
    CircularBufferSpec(**GQA): "CompressorBackend",
}


def test_a_spec_that_is_made_of_a_known_one_is_not_known() -> None:
    """What vLLM may have one day: rows of its own, and the fields that it inherits. Alone, or in a group."""
    assert {type(spec).__name__ for spec in KNOWN} == set(KINDS)
    cache = {name: torch.zeros(6, 1, 64, 576, dtype=torch.uint8) for name in (NAME, NAME.replace("0", "1"))}
    for spec, backend in KNOWN.items():
        name = f"{type(spec).__name__}OfItsOwn"
        made = object.__new__(type(name, (type(spec),), {}))
        vars(made).update(vars(spec))
        beside = dict(zip(cache, (spec, made), strict=True))
        both = UniformTypeKVCacheSpecs(block_size=spec.block_size, kv_cache_specs=beside)
        for specs in (dict.fromkeys(cache, made), beside):
            with refused(OperatorError, "layer_unsupported", f"{name}, of which kvbridge does not know which rows it"):
                build(cache, backend=backend, specs=specs)
        with refused(OperatorError, "layer_unsupported", f"{name}, of which kvbridge does not know which rows it"):
            build(cache, backend=backend, groups=[KVCacheGroupSpec(list(cache), both)])


def test_every_kind_that_the_table_names_is_one_we_know() -> None:
    assert {backend.rows for backend in BACKENDS.values()} - set(UNSUPPORTED) == {
        *("kv", "cpu", "latent", "compressed_latent", "compressor", "index_key", "plain_index_key"),
        *("gated_delta", "mamba2", "mamba1", "short_conv", "lightning"),
    }


@pytest.mark.parametrize("spec", [FullAttentionSpec(**GQA), MLAAttentionSpec(**COMMON, head_size=576)])
def test_a_backend_that_is_not_known_is_refused_with_those_that_any_model_may_choose(spec: Any) -> None:
    with refused(OperatorError, "backend_unsupported", "OF_ITS_OWN, .+ needs --attention-backend") as caught:
        build({NAME: torch.zeros(6, 1, 64, 576, dtype=torch.uint8)}, backend="OF_ITS_OWN", kv_spec=spec)
    chosen = str(caught.value).rpartition("--attention-backend ")[2].split(", ")
    own = {name for name, listed in BACKENDS.items() if listed.source.startswith("models/")}
    assert "FLASH_ATTN" in chosen or "FLASHMLA" in chosen
    assert not own & set(chosen)


def test_a_reader_of_scales_that_are_powers_of_two_is_refused() -> None:
    spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=576, dtype=torch.uint8)
    cache = {NAME: torch.zeros(BLOCKS, 1, TOKENS, 656, dtype=torch.uint8)}
    reader = {"impl": SimpleNamespace(kv_scale_format="pow2_fp32")}
    backend = "FLASHINFER_MLA_SPARSE_SM120"
    with refused(OperatorError, "scales_unknown", "powers of two"):
        build(cache, backend=backend, kv_spec=spec, kv_cache_dtype="fp8_ds_mla", layer=reader)
    reader["impl"].kv_scale_format = "arbitrary_fp32"
    assert build(cache, backend=backend, kv_spec=spec, kv_cache_dtype="fp8_ds_mla", layer=reader).planes
