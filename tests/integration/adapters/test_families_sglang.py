"""Each family of docs/models.md against SGLang's real pools: the adapter says what `kvbridge plan --model` says."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvbridge_proto.pool import Layer, Shard

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not in this environment (make test-sglang)", allow_module_level=True)

from kvbridge.adapters.sglang.pool import describe
from kvbridge.errors import KVBridgeError
from kvbridge.models.config import read
from kvbridge.models.described import pools_of
from kvbridge.models.engine_command import parse
from testing.planned import told
from tests.integration.adapters.sglang_v4 import Engine
from tests.integration.adapters.test_sglang_block_scales import four_bits
from tests.integration.adapters.test_sglang_pool import (
    Indexer,
    RadixAttention,
    drafting,
    latent,
    on_a_cpu,
    plain,
    plain_index,
    pool_class,
    queue_of,
    sparse,
)
from tests.integration.adapters.test_sglang_states import Kind
from tests.integration.adapters.test_sglang_states import Side as States
from tests.integration.adapters.test_sglang_windows import Side, conv_states
from tests.support.families import FAMILIES, Family, is_run

pytestmark = pytest.mark.sglang
__all__ = ["on_a_cpu"]  # a fixture

PAGE = 16
PAGES = {"DSATokenToKVPool": 64, "DeepSeekV4TokenToKVPool": 256}  # the only ones they take


def queue_for(family: Family, tp: int) -> Any:
    """A scheduler's queue with the pool that SGLang makes for this family on one of `tp` ranks."""
    model = read(family.config)
    layers = [layer for layer in model.layers if layer is not None]
    first = layers[0] if layers else Layer(kind="full", kv_heads=1, key_width=1, value_width=1)
    common: dict[str, Any] = {"layer_num": len(model.layers), "dtype": torch.bfloat16}
    if family.pool == "MHATokenToKVPool":
        common |= four_bits(len(model.layers)) if "nvfp4" in family.sides.get("sglang", ("",))[0] else {}
        heads = max(1, first.kv_heads // tp)
        pool = plain(PAGE, heads=heads, **common, head_dim=first.key_width, v_head_dim=first.value_width)
    elif family.pool == "MLATokenToKVPool":
        pool = latent(PAGE, **common, kv_lora_rank=512, qk_rope_head_dim=64)
    elif family.models == "Inkling":
        side = Side()
        side.tokens = conv_states()
        return side.queue
    elif family.models.startswith("DeepSeek V4"):
        return compressed(model.ratios[: len(model.layers)])
    elif family.pool == "SWAKVPool":
        return windowed(family, tp)
    elif family.pool == "HybridLinearKVPool":
        return beside_states(family, tp)
    elif family.pool == "DSATokenToKVPool":
        skipped = [layer not in model.index for layer in range(len(model.layers))]
        pool = sparse(layer_num=len(model.layers), skip_topk_layers=skipped)
    elif family.pool == "MiniMaxSparseKVPool":
        heads, sparse_layers, depth = max(1, first.kv_heads // tp), sorted(model.index), len(model.layers)
        chosen = {"sparse_layer_ids": sparse_layers, "disable_value_sparse_layer_ids": sparse_layers}
        dense = {"dense_layer_ids": sorted(set(range(depth)) - model.index), "end_layer": depth}
        pool = plain_index(PAGE, heads=heads, head_dim=first.key_width, **chosen, **dense)
    else:
        pool = object.__new__(pool_class(family.pool))
    queue = queue_of(pool, heads=first.kv_heads, layers=len(model.layers))
    modules: list[torch.nn.Module] = [
        RadixAttention(i, window=layer.window - 1 if layer and layer.window else -1)
        for i, layer in enumerate(model.layers)
    ]
    modules += [Indexer(layer, is_fused=model.has_interleaved_index) for layer in sorted(model.index)]
    queue.scheduler.tp_worker.model_runner.model = torch.nn.ModuleList(modules)
    if "speculative" in family.sides.get("sglang", ("", ""))[1]:  # MTP: the model's own
        return drafting(
            queue, latent(PAGE, **common | {"layer_num": 1}, kv_lora_rank=512, qk_rope_head_dim=64), path=""
        )
    return queue


def compressed(ratios: tuple[int, ...]) -> Any:
    """Every rank has all of it, and the draft's layer, which V4.1 has of its own kind only (DSPARK)."""
    sources = [layer for layer, ratio in enumerate(ratios) if ratio in (1, 2)]
    queue = Engine(ratios=[*ratios], has_drafter=not sources, pages=2, kv_source_layers=sources).queue
    queue.scheduler.server_args = SimpleNamespace(model_path="/models/llama", speculative_draft_model_path="")
    return queue


def beside_states(family: Family, tp: int) -> Any:
    """What GLM-5-Next is refused for is its own (glm5_next.py)."""
    model = read(family.config)
    if model.state is None:
        side = States(tp=tp)
        side.queue.scheduler.tp_worker.model_runner.model = torch.nn.ModuleList()
        side.pool.full_kv_pool = sparse(page_size=256, index_kpool=4)
        return side.queue
    state, layers = model.state, list(enumerate(model.layers))
    name = "kda" if "kimi" in model.family else "gated" if "qwen3" in model.family else "mamba2"
    name = "lightning" if not state.conv else name if state.heads else "short conv"
    conv = tuple((each.heads, each.channels) for each in state.conv)
    kind = Kind(name, conv, state.heads, state.values, state.keys, state.rows)
    attention = next(layer for _, layer in layers if layer and layer.kind != "state")
    size = {"head_num": max(1, attention.kv_heads // tp), "head_dim": attention.key_width}
    if attention.kind == "mla":
        size = {"head_num": 1, "use_mla": True, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    rows = [i for i, layer in layers if layer and layer.kind != "state"]
    states = rows if model.has_states_beside else [i for i, layer in layers if layer and layer.kind == "state"]
    drafts = int("speculative" in family.sides.get("sglang", ("", ""))[1])  # MTP: the model's own
    side = States(kind, tp, tp - 1, layers=(states, rows), attention=size, drafts=drafts, mamba_spec_state_size=1)
    if drafts:
        drafting(side.queue, side.draft, heads=attention.kv_heads, path="", algorithm="NEXTN")
    config = side.queue.scheduler.model_config
    config.get_total_num_kv_heads = lambda: attention.kv_heads
    config.hf_text_config.num_hidden_layers = len(layers)
    if family.sides:
        side.queue.draft_token_to_kv_pool = object()
    return side.queue


def windowed(family: Family, tp: int) -> Any:
    """Its windows have memory of their own. The modules say what SGLang's models say (mimo_v2.py, step3p5.py, ...)."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    layers = [layer for layer in read(family.config).layers if layer is not None]
    window = next(layer for layer in layers if layer.window)
    full = next(layer for layer in layers if not layer.window)
    held = [max(1, layer.kv_heads // tp) for layer in (full, window)]
    pool = SWAKVPool(
        size=PAGE,
        size_swa=PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=held[0],
        head_dim=full.key_width,
        v_head_dim=full.value_width,
        swa_head_num=held[1],
        swa_head_dim=window.key_width,
        swa_v_head_dim=window.value_width,
        swa_attention_layer_ids=[index for index, layer in enumerate(layers) if layer.window],
        full_attention_layer_ids=[index for index, layer in enumerate(layers) if not layer.window],
        device="cpu",
    )
    pool.register_mapping(torch.zeros(3 * PAGE, dtype=torch.int64))
    queue = queue_of(pool, heads=full.kv_heads, layers=len(layers))
    is_chunked, is_longer = window.kind == "chunked", family.models.startswith(("MiMo", "Step"))
    before = window.window - (not is_chunked and not is_longer)
    queue.scheduler.sliding_window_size = before
    config = queue.scheduler.model_config
    config.attention_chunk_size = before if is_chunked else None
    config.is_hybrid_swa_compress = family.models.startswith(("MiMo", "Gemma"))
    config.hf_text_config.swa_num_key_value_heads = window.kv_heads
    queue.scheduler.tp_worker.model_runner.model = torch.nn.ModuleList(
        RadixAttention(i, window=before if layer.window and not is_chunked else -1) for i, layer in enumerate(layers)
    )
    return queue


@pytest.mark.parametrize("is_decoder", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if is_run(family, "sglang")], ids=lambda family: family.name
)
def test_plan_says_of_a_config_what_the_adapter_says_of_the_pool(family: Family, tp: int, is_decoder: bool) -> None:
    _, options = family.sides.get("sglang", ("", ""))
    shard, page = Shard(tp_rank=tp - 1, tp_size=tp), PAGES.get(family.pool, PAGE)
    command = parse(f"sglang --tp {tp} --page-size {page} {options}")
    names: dict[str, Any] = {"model_name": "m", "engine_id": "e", "is_decoder": is_decoder}
    try:
        planned = pools_of(read(family.config), command, "m", "e", is_decoder)
    except KVBridgeError as error:
        with pytest.raises(KVBridgeError) as refused:
            describe(queue_for(family, tp), shard, **names)
        missing = str(refused.value).partition("kvbridge cannot carry ")[2]
        assert missing and missing in str(error)
        return
    assert told(planned[tp - 1]) == told(describe(queue_for(family, tp), shard, **names).pool)
