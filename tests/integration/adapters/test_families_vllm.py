"""Each family of docs/models.md against real spec objects of vLLM: the adapter says what `kvbridge plan --model` says.

The specs are written here, as vLLM's models make them (notes on each), and vLLM's own code makes pages of one size of
them. Heads, widths, windows and block sizes then come out of the adapter, and of the config.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from kvbridge_proto.pool import Pool, Shard
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.core.kv_cache_utils import unify_kv_cache_spec_page_size
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from kvbridge.adapters.engine.unsupported import UNSUPPORTED
from kvbridge.errors import KVBridgeError
from kvbridge.models.config import read
from kvbridge.models.described import pools_of
from kvbridge.models.engine_command import parse
from testing.planned import told
from tests.integration.adapters.test_vllm_pool import build, draft
from tests.support.families import FAMILIES, KDA, MAMBA2, V41, Family

pytestmark = pytest.mark.vllm

BLOCK, BLOCKS = 16, 2
PATTERN = MAMBA2["hybrid_override_pattern"]
Specs = dict[str, tuple[str, Any]]  # by layer: the backend and the spec
COMMON: dict[str, Any] = {"block_size": BLOCK, "dtype": torch.bfloat16}
STATE = MambaSpec(block_size=BLOCK, shapes=((2,),), dtypes=(torch.bfloat16,))
RING = CircularBufferSpec(**COMMON, num_kv_heads=1, head_size=128)
LATENT = MLAAttentionSpec(**COMMON, num_kv_heads=1, head_size=576)
INDEX = MLAAttentionSpec(
    block_size=BLOCK, dtype=torch.uint8, num_kv_heads=1, head_size=132, cache_role=SparseCacheRole.INDEXER
)
INDEXER = "MINIMAX_M3_SPARSE_INDEXER"


def heads(total: int, tp: int) -> int:
    return max(1, total // tp)


def full(total: int, width: int, tp: int, value: int = 0) -> FullAttentionSpec:
    more = {"head_size_v": value} if value else {}
    return FullAttentionSpec(**COMMON, num_kv_heads=heads(total, tp), head_size=width, **more)


def sliding(total: int, width: int, tp: int, window: int, value: int = 0) -> SlidingWindowSpec:
    more = {"head_size_v": value} if value else {}
    return SlidingWindowSpec(**COMMON, num_kv_heads=heads(total, tp), head_size=width, sliding_window=window, **more)


def each(count: int, of: Callable[[int], Any], backend: str = "FLASH_ATTN") -> Specs:
    return {f"model.layers.{layer}.self_attn.attn": (backend, of(layer)) for layer in range(count)}


def beside(specs: Specs, spec: Any, backend: str) -> Specs:
    return specs | {"model.layers.0.other": (backend, spec)}


def gemma3(tp: int) -> Specs:
    return each(62, lambda i: sliding(16, 128, tp, 1024) if (i + 1) % 6 else full(16, 128, tp))


def gemma4(tp: int) -> Specs:
    return each(30, lambda i: sliding(8, 256, tp, 1024) if (i + 1) % 6 else full(2, 512, tp))


def gpt_oss(tp: int) -> Specs:
    return each(36, lambda i: sliding(8, 64, tp, 128) if (i + 1) % 2 else full(8, 64, tp))


def flint(tp: int) -> Specs:
    return each(49, lambda i: sliding(4, 128, tp, 513) if (i + 1) % 4 else full(4, 128, tp))


def hy(tp: int) -> Specs:
    """Layers 0 and 1 attend to all tokens, and each fourth of the others chooses for those after it."""
    keys = {f"model.layers.{i}.self_attn.indexer.k_cache": ("DEEPSEEK_V32_INDEXER", INDEX) for i in range(5, 34, 4)}
    return latents(34) | keys


def dots(tp: int) -> Specs:
    """`Dots3NotePaddedMLAAttention`, beside windows of latents that are as wide."""
    windowed = SlidingWindowMLASpec(**COMMON, num_kv_heads=1, head_size=1088, sliding_window=512)
    padded = each(2, lambda i: replace(LATENT, head_size=1088), "DOTS3_NOTE_PADDED_MLA_SPARSE")
    return beside(padded, windowed, "TRITON_MLA")


def step(tp: int) -> Specs:
    return each(45, lambda i: sliding(8, 128, tp, 512) if (i + 1) % 4 else full(8, 128, tp))


def llama4(tp: int) -> Specs:
    chunk = ChunkedLocalAttentionSpec(**COMMON, num_kv_heads=heads(8, tp), head_size=128, attention_chunk_size=8192)
    return each(48, lambda i: chunk if (i + 1) % 4 else full(8, 128, tp))


def mimo(tp: int) -> Specs:
    return each(48, lambda i: sliding(8, 192, tp, 128, 128) if i % 6 else full(4, 192, tp, 128), "FLASH_ATTN_DIFFKV")


def minimax(tp: int) -> Specs:
    """Layers 0 to 2 are vLLM's ordinary ones."""
    own = MLAAttentionSpec(**COMMON, num_kv_heads=1, head_size=128, cache_role=SparseCacheRole.INDEXER)
    keys = {f"model.layers.{layer}.self_attn.attn.index_cache": (INDEXER, own) for layer in range(3, 60)}
    return each(60, lambda i: full(4, 128, tp), "MINIMAX_M3_SPARSE") | each(3, lambda i: full(4, 128, tp)) | keys


def nvfp4(tp: int) -> Specs:
    """As `FlashInferBackend.customize_spec` makes them."""
    more = {"num_head_slots": 2 * heads(8, tp), "state_content_bytes": 64 + 8, "kv_quant_mode": KVQuantMode.NVFP4}
    return each(32, lambda i: replace(full(8, 128, tp), dtype=torch.uint8, **more), "FLASHINFER")


def latents(count: int) -> Specs:
    return each(count, lambda i: LATENT, "FLASHMLA")


def indexed(count: int) -> Specs:
    keys = {
        f"model.layers.{layer}.self_attn.indexer.k_cache": ("DEEPSEEK_V32_INDEXER", INDEX) for layer in range(count)
    }
    return latents(count) | keys


def deepseek_v4() -> Specs:
    """As tests/integration/adapters/compressed.py has them of vLLM's own layers. The last layer is the draft's."""
    packed: dict[str, Any] = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8, "state_content_bytes": 584}
    one: dict[str, Any] = {"num_kv_heads": 1}
    found: Specs = {}
    for layer, ratio in enumerate([0, 0, *[4, 128] * 20, 4, 0]):
        name = f"model.layers.{layer}.attn"
        window = SlidingWindowMLASpec(**packed, block_size=64, sliding_window=128)
        found[f"{name}.swa_cache"] = "DEEPSEEK_SPARSE_SWA", window
        if not ratio:
            continue
        block, keeps, numbers = (4, 8, 2048) if ratio == 4 else (8, 128, 1024)
        states = {"block_size": block, "sliding_window": keeps, "dtype": torch.float32, **one}
        whole = MLAAttentionSpec(**packed, block_size=256, tokens_per_state=ratio)
        found[name] = "FLASHMLA_SPARSE_DSV4", whole
        found[f"{name}.compressor.state_cache"] = (
            "CompressorBackend",
            SlidingWindowMLASpec(**states, head_size=numbers),
        )
        if ratio == 4:
            keys = MLAAttentionSpec(**one, block_size=256, head_size=132, dtype=torch.uint8, tokens_per_state=4)
            found[f"{name}.indexer.k_cache"] = "DEEPSEEK_V4_INDEXER", keys
            found[f"{name}.indexer.compressor.state_cache"] = (
                "CompressorBackend",
                SlidingWindowMLASpec(**states, head_size=512),
            )
    return found


def deepseek_v41(tp: int) -> Specs:
    """As tests/integration/adapters/rings.py has them. The last layer is the draft's."""
    packed: dict[str, Any] = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8, "state_content_bytes": 584}
    one: dict[str, Any] = {"num_kv_heads": 1, "block_size": 64}
    found: Specs = {}
    for layer, ratio in enumerate(V41["compress_ratios"]):
        name = f"model.layers.{layer}.attn"
        window = SlidingWindowMLASpec(**packed, block_size=32, sliding_window=128, bounded_replay=True)
        found[f"{name}.swa_cache"] = "DEEPSEEK_SPARSE_SWA", window
        if layer not in V41["kv_source_layer_ids"]:
            continue
        found[name] = "FLASHMLA_SPARSE_DSV41", MLAAttentionSpec(**packed, block_size=64, tokens_per_state=ratio)
        keys = MLAAttentionSpec(**one, head_size=132, dtype=torch.uint8, tokens_per_state=ratio)
        found[f"{name}.indexer.k_cache"] = "DEEPSEEK_V41_INDEXER", keys
        if ratio == 2:
            ring = CircularBufferSpec(num_kv_heads=1, block_size=8, head_size=1024, head_size_v=0, dtype=torch.float32)
            found[f"{name}.compressor.state_cache"] = "CompressorBackend", ring
    return found


def states(tp: int) -> Specs:
    return beside(each(4, lambda i: full(2, 256, tp)), STATE, "PLE_SHORT_CONV_ATTN")


def among(
    full_layers: set[int], attention: Any, state_layers: set[int], shapes: Any, backend: str, last: Any = torch.bfloat16
) -> Specs:
    """States in these layers; the `last` of their dtypes is the state proper's."""
    dtypes = (torch.bfloat16, last)[-len(shapes) :]
    state = MambaSpec(block_size=1 << 15, shapes=tuple(shapes), dtypes=dtypes)
    reader = "FLASHMLA" if isinstance(attention, MLAAttentionSpec) else "FLASH_ATTN"
    specs: Specs = {f"model.layers.{layer}.self_attn.attn": (reader, attention) for layer in full_layers}
    return specs | {f"model.layers.{layer}.mixer": (backend, state) for layer in state_layers}


def qwen3_next(tp: int) -> Specs:
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(tp, 16, 32, 128, 128, 4)
    layers = {layer for layer in range(48) if layer % 4 == 3}
    return among(layers, full(2, 256, tp), set(range(48)) - layers, shapes, "GDN_ATTN")


def qwen3_next_mtp(tp: int) -> Specs:
    """The module counts from 0 again."""
    return qwen3_next(tp) | {"mtp.layers.0.self_attn.attn": ("FLASH_ATTN", full(2, 256, tp))}


def nemotron(tp: int) -> Specs:
    shapes = MambaStateShapeCalculator.mamba2_state_shape(tp, 128 * 64, 8, 128, 64, 128, 4)
    attention, states = ({at for at, each in enumerate(PATTERN) if each == kind} for kind in "*M")
    return among(attention, full(8, 128, tp), states, shapes, "MAMBA2_ATTN", torch.float32)


def kimi(tp: int) -> Specs:
    layers = {layer - 1 for layer in KDA["full_attn_layers"]}
    shapes = MambaStateShapeCalculator.kda_state_shape(tp, 32, 128)
    return among(layers, LATENT, set(range(27)) - layers, shapes, "GDN_ATTN", torch.float32)


def falcon(tp: int) -> Specs:
    shapes = MambaStateShapeCalculator.mamba2_state_shape(tp, 32 * 128, 1, 32, 128, 256, 4)
    return among(set(range(44)), full(2, 128, tp), set(range(44)), shapes, "MAMBA2_ATTN")


def jamba(tp: int) -> Specs:
    layers = set(range(4, 32, 8))
    shapes = MambaStateShapeCalculator.mamba1_state_shape(tp, 8192, 16, 4)
    return among(layers, full(8, 128, tp), set(range(32)) - layers, shapes, "MAMBA1_ATTN")


def lfm2(tp: int) -> Specs:
    layers = set(range(2, 16, 4))
    shapes = MambaStateShapeCalculator.short_conv_state_shape(tp, 2048, 3)
    return among(layers, full(8, 64, tp), set(range(16)) - layers, shapes, "SHORT_CONV_ATTN")


def ring(tp: int) -> Specs:
    layers = set(range(7, 32, 8))
    shapes = MambaStateShapeCalculator.linear_attention_state_shape(64, tp, 128)
    return among(layers, LATENT, set(range(32)) - layers, shapes, "LINEAR_ATTN")


# vLLM's layers, as far as the adapter asks them.
GATED_LAYER = {"num_k_heads": 16, "num_v_heads": 32, "head_k_dim": 128, "head_v_dim": 128, "conv_kernel_size": 4}
MAMBA2_LAYER: dict[str, Any] = {"num_heads": 128, "head_dim": 64, "ssm_state_size": 128, "conv_kernel_size": 4}
MAMBA2_LAYER["norm"] = SimpleNamespace(n_groups=8)
LAYERS_OF = {
    **dict.fromkeys((qwen3_next, qwen3_next_mtp), GATED_LAYER),
    nemotron: MAMBA2_LAYER,
    kimi: {"num_heads": 32, "head_dim": 128, "conv_size": 4},
    falcon: MAMBA2_LAYER
    | {"num_heads": 32, "head_dim": 128, "ssm_state_size": 256, "norm": SimpleNamespace(n_groups=1)},
    nvfp4: {"impl": SimpleNamespace(nvfp4_fa2=True)},
    jamba: {"intermediate_size": 8192, "ssm_state_size": 16, "conv_kernel_size": 4},
    lfm2: {"conv_dim": 2048, "L_cache": 3},
    ring: {"num_heads": 64, "head_dim": 128},
    deepseek_v41: {"compress_ratio": 2},
}


SPECS: dict[str, Callable[[int], Specs]] = {
    "full attention": lambda tp: each(32, lambda i: full(8, 128, tp)),
    "windows, in SGLang without memory of their own": gemma3,
    "windows": gpt_oss,
    "windows, in vLLM alone": flint,
    "latents, of some layers index keys": hy,
    "padded latents": dots,
    "windows that are one token longer in SGLang": step,
    "chunks": llama4,
    "windows with heads and widths of their own": gemma4,
    "values narrower than keys": mimo,
    "latents": lambda tp: latents(61),
    "latents with drafts on both sides": lambda tp: latents(62),
    "latents with drafts on the decode side": lambda tp: latents(62),
    "latents and index keys": lambda tp: indexed(78),
    "latents and index keys that SGLang rotates": lambda tp: indexed(61),
    **dict.fromkeys(
        ("full attention and index keys", "full attention and index keys, both packed by SGLang on Blackwell"), minimax
    ),
    "compressed latents": lambda tp: deepseek_v4(),
    "compressed latents with windows that are computed again": deepseek_v41,
    "states and full attention": qwen3_next,
    "states and full attention with drafts on both sides": qwen3_next_mtp,
    "states and latents": kimi,
    "Mamba 2 states and full attention": nemotron,
    "Mamba 2 states and full attention in one layer": falcon,
    "Mamba 1 states and full attention": jamba,
    "convolution states and full attention": lfm2,
    "lightning states and latents": ring,
    "states, latents, index keys and rings": lambda tp: beside(
        beside(latents(2), INDEX, "DEEPSEEK_V32_INDEXER"), RING, "KPOOL_TAIL"
    ),
    "states, sparse attention and rings": lambda tp: beside(states(tp), RING, "QWEN4_EXP_EXP_QSA_STATE"),
    "summaries and rings": lambda tp: each(1, lambda i: RING, "STEP5_CSA_TAIL_RING"),
    "windows with convolution states": lambda tp: each(1, lambda i: sliding(8, 128, tp, 128), "INKLING_SCONV_SWA"),
    "cross attention": lambda tp: each(1, lambda i: CrossAttentionSpec(**COMMON, num_kv_heads=2, head_size=64)),
    "rows of 4 bits": nvfp4,
    "packed rows": lambda tp: each(32, lambda i: full(8, 128, tp)),
}


def tensor_of(spec: Any, dtype: torch.dtype) -> torch.Tensor:
    """As vLLM 0.32 shapes it: [B, H, N, C]."""
    if isinstance(spec, MambaSpec):
        return torch.zeros(BLOCKS, 1, 1, spec.page_size_bytes, dtype=torch.int8)
    if hasattr(spec, "tokens_per_state") and isinstance(spec, (MLAAttentionSpec, SlidingWindowMLASpec)):
        width = spec.state_content_size_bytes // spec.dtype.itemsize
        return torch.zeros(BLOCKS, 1, spec.num_states, width, dtype=dtype)
    if getattr(spec, "num_head_slots", None):
        return torch.zeros(BLOCKS, spec.num_head_slots, spec.block_size, spec.state_content_bytes, dtype=dtype)
    value = spec.head_size if (own := getattr(spec, "head_size_v", None)) is None else own
    width = spec.head_size if isinstance(spec, MLAAttentionSpec) else spec.head_size + value
    return torch.zeros(BLOCKS, spec.num_kv_heads, spec.block_size, width, dtype=dtype)


def adapted(family: Family, tp: int, rank: int, dtype: str) -> Pool:
    """What the adapter makes of this rank's specs, once vLLM has made their pages of one size."""
    specs = SPECS[family.name](tp)
    made = {name: spec for name, (_, spec) in specs.items()}
    has_pages = all(hasattr(spec, "head_size") for spec in made.values())
    is_one_type = has_pages and UniformTypeKVCacheSpecs.from_specs(made) is not None
    has_own_pages = any(getattr(spec, "tokens_per_state", 1) > 1 for spec in made.values())  # side by side in a block
    if has_pages and not is_one_type and not has_own_pages and len({type(spec) for spec in made.values()}) > 1:
        made = unify_kv_cache_spec_page_size(made)
    text = SimpleNamespace(num_hidden_layers=len(read(family.config).layers), qk_rope_head_dim=64)
    if "swa_num_key_value_heads" in family.config:
        text.swa_num_key_value_heads = family.config["swa_num_key_value_heads"]
    return build(
        {
            name: tensor_of(
                spec, torch.uint8 if dtype.startswith("turboquant") else getattr(spec, "dtype", torch.bfloat16)
            )
            for name, spec in made.items()
        },
        specs=made,
        backends={name: backend for name, (backend, _) in specs.items()},
        kv_cache_dtype="fp8_ds_mla" if has_own_pages else dtype,  # which DeepSeek V4 makes of auto
        shard=Shard(tp_rank=rank, tp_size=tp),
        blocks=BLOCKS,
        model={"hf_text_config": text, "model_arch_config": Arch(family), "model": "/models/m"},
        layer=LAYERS_OF.get(SPECS[family.name]),
        drafts=draft(2, "/models/m") if "speculative" in family.sides.get("vllm", ("", ""))[1] else None,
    )


class Arch:
    """vLLM's record of the layers, of which the adapter asks the heads (vLLM's own is in test_vllm_backends.py)."""

    def __init__(self, family: Family) -> None:
        self.totals: dict[int, int] = {}
        for name, (_, spec) in SPECS[family.name](1).items():
            layer, heads = int(name.split(".")[2]), getattr(spec, "num_kv_heads", 1)
            self.totals[layer] = max(heads, self.totals.get(layer, 1))  # index keys are in a layer, too
        self.per_layer_overrides, self.total_num_hidden_layers = None, max(self.totals) + 1

    def __getitem__(self, layer: int) -> Any:
        return SimpleNamespace(total_num_kv_heads=self.totals[layer])


def missing_in(error: KVBridgeError) -> str:
    """The first kind that the adapter or plan found, by what is missing."""
    return next(each.missing for each in UNSUPPORTED.values() if each.missing in str(error))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_plan_says_of_a_config_what_the_adapter_says_of_the_specs(family: Family, tp: int) -> None:
    _, options = family.sides.get("vllm", ("", ""))
    command = parse(f"vllm -tp {tp} --block-size {BLOCK} {options}")
    try:
        planned = pools_of(read(family.config), command, "m", "e")
    except KVBridgeError as error:
        with pytest.raises(KVBridgeError) as refused:
            adapted(family, tp, 0, command.kv_cache_dtype)
        assert refused.value.code == error.code
        assert missing_in(refused.value) in str(error)
        return
    for rank in {0, tp // 2, tp - 1}:
        assert told(planned[rank]) == told(adapted(family, tp, rank, command.kv_cache_dtype))


def test_each_family_has_specs() -> None:
    assert set(SPECS) == {family.name for family in FAMILIES}
