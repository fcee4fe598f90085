"""A small DeepSeek V4, and its caches as vLLM's kernels find them: the tests' own reading, without planes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from demo.model import VOCABULARY

RATIOS = (0, 4, 128, 4)  # how many tokens a row of each layer stands for; 0: it has a window only
WINDOW = 128
HEAD, INDEX, HIDDEN, HEADS, RANK, OUT, GROUPS = 512, 128, 512, 8, 128, 128, 2  # widths that its kernels have
EXPERTS, CHOSEN, INNER, INDEX_HEADS, STREAMS = 256, 6, 32, 4, 4
PIECES = {584: (576, 8), 132: (128, 4)}  # the bytes of a row, and of its scales behind the rows of its page


def write_v4(folder: Path) -> Path:
    """DeepSeek V4 in bf16, but for its caches. The first layer chooses experts by the token."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = dict(
        architectures=["DeepseekV4ForCausalLM"],
        model_type="deepseek_v4",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_hidden_layers=len(RATIOS),
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        head_dim=HEAD,
        qk_rope_head_dim=64,
        q_lora_rank=RANK,
        o_lora_rank=OUT,
        o_groups=GROUPS,
        compress_ratios=RATIOS,
        compress_rope_theta=160000.0,
        index_topk=512,
        index_head_dim=INDEX,
        index_n_heads=INDEX_HEADS,
        sliding_window=WINDOW,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        n_shared_experts=1,
        num_hash_layers=1,
        expert_dtype="bf16",
        hc_mult=STREAMS,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        scoring_func="sqrtsoftplus",
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        topk_method="noaux_tc",
        swiglu_limit=10.0,
        num_nextn_predict_layers=0,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        hidden_act="silu",
        max_position_embeddings=16384,
        rope_scaling=dict(type="yarn", factor=16.0, original_max_position_embeddings=65536, beta_fast=32, beta_slow=1),
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=2,
        attention_bias=False,
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name, shape in _shapes().items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("tid2eid"):
            values = torch.rand(shape[0], EXPERTS, generator=generator).topk(CHOSEN).indices.to(torch.int32)
        elif name.endswith("norm.weight"):
            values = torch.ones(shape)
        elif len(shape) == 1:
            values *= 0.1
        elif "embed" not in name and not name.endswith("ape"):
            values *= (4.0 if name.startswith("head") else 1.2) / shape[-1] ** 0.5
        is_whole = any(part in name for part in ("hc_", "ape", "sink", "bias", "tid2eid"))
        weights[name] = values if is_whole else values.to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _shapes() -> dict[str, tuple[int, ...]]:
    mix = 2 * STREAMS + STREAMS * STREAMS
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (VOCABULARY, HIDDEN),
        "head.weight": (VOCABULARY, HIDDEN),
        "norm.weight": (HIDDEN,),
        "hc_head_fn": (STREAMS, STREAMS * HIDDEN),
        "hc_head_base": (STREAMS,),
        "hc_head_scale": (1,),
    }
    for layer, ratio in enumerate(RATIOS):
        named: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (HIDDEN,),
            "ffn_norm.weight": (HIDDEN,),
            "attn.attn_sink": (HEADS,),
            "attn.wq_a.weight": (RANK, HIDDEN),
            "attn.q_norm.weight": (RANK,),
            "attn.wq_b.weight": (HEADS * HEAD, RANK),
            "attn.wkv.weight": (HEAD, HIDDEN),
            "attn.kv_norm.weight": (HEAD,),
            "attn.wo_a.weight": (GROUPS * OUT, HEADS * HEAD // GROUPS),
            "attn.wo_b.weight": (HIDDEN, GROUPS * OUT),
            "ffn.gate.weight": (EXPERTS, HIDDEN),
            "ffn.gate.bias" if layer else "ffn.gate.tid2eid": (EXPERTS,) if layer else (VOCABULARY, CHOSEN),
        }
        for part in ("attn", "ffn"):
            named |= {f"hc_{part}_fn": (mix, STREAMS * HIDDEN), f"hc_{part}_base": (mix,), f"hc_{part}_scale": (3,)}
        if ratio:
            named |= _compressor("attn.compressor", ratio, HEAD)
        if ratio == 4:
            named |= _compressor("attn.indexer.compressor", ratio, INDEX)
            named |= {"attn.indexer.wq_b.weight": (INDEX_HEADS * INDEX, RANK)}
            named |= {"attn.indexer.weights_proj.weight": (INDEX_HEADS, HIDDEN)}
        for owner in ("shared_experts", *(f"experts.{expert}" for expert in range(EXPERTS))):
            for part, shape in (("w1", (INNER, HIDDEN)), ("w2", (HIDDEN, INNER)), ("w3", (INNER, HIDDEN))):
                named[f"ffn.{owner}.{part}.weight"] = shape
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in named.items()}
    return shapes


def _compressor(at: str, ratio: int, width: int) -> dict[str, tuple[int, ...]]:
    both = width * (2 if ratio == 4 else 1)  # of a group of tokens, and of the one before
    shapes = {f"{at}.ape": (ratio, both), f"{at}.norm.weight": (width,)}
    return shapes | {f"{at}.{name}.weight": (both, HIDDEN) for name in ("wkv", "wgate")}


def read_compressed(worker: Any, tables: Sequence[Sequence[int]], tokens: int) -> dict[str, np.ndarray]:
    """On a worker: each cache's rows [rows, bytes] that the model reads for the token after `tokens`, by its name.

    `tables` are the request's blocks in each group. Cell t of a cache whose rows stand for r tokens is in the block of
    token r t; pages have all rows, and then their scales. A row in no block, as vLLM gave it up, is zeros.
    """
    found = {}
    layers = worker.vllm_config.compilation_config.static_forward_context
    groups = worker.model_runner.kv_cache_config.kv_cache_groups
    for (number, group), (name, layer) in product(enumerate(groups), layers.items()):
        if name not in group.layer_names or not layer.kv_cache.numel():
            continue
        block_tokens, rows = group.kv_cache_spec.block_size, layer.kv_cache.shape[1]
        ratio = block_tokens // rows
        first = 0
        if name.endswith("swa_cache"):
            first = max(0, tokens + 1 - WINDOW)
        elif name.endswith("state_cache"):  # the group that the next token may end; of 4, the one before is read too
            size = 4 if block_tokens == 4 else 128
            first = max(0, tokens // size * size - (4 if size == 4 else 0))
        width = layer.kv_cache.shape[2] * layer.kv_cache.element_size()
        pieces, cells = PIECES.get(width, (width,)), []
        for row in range(first, tokens // ratio):
            block = tables[number][row * ratio // block_tokens]
            page, at, cell = _bytes(layer.kv_cache[block]), 0, []
            for piece in pieces:
                start = at + row % rows * piece
                cell.append(page[start : start + piece])
                at += rows * piece
            cells.append(np.concatenate(cell) * bool(block))
        if cells:
            found[name] = np.stack(cells)
    return found


def _bytes(page: Any) -> np.ndarray:
    import torch

    bytes_of: np.ndarray = page.contiguous().view(-1).view(torch.uint8).numpy()
    return bytes_of
