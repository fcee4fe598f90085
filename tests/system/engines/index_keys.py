"""Index keys as their engine's kernels find them: the tests' own reading, which knows nothing of planes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

WIDTH, SCALE = 128, 4
HEADS_CUT = (".k", ".v")


def read_index_keys(worker: Any, ids: Sequence[int], first: int, end: int) -> dict[str, np.ndarray]:
    """On a worker: "LAYER.PART" -> rows [1, tokens, bytes] of the tokens of a request whose blocks are `ids`.

    Token t is in page t // PAGE of the kernel, which has all its keys, then their scales.
    """
    found = {}
    layers = worker.vllm_config.compilation_config.static_forward_context
    block_tokens = int(worker.vllm_config.cache_config.block_size)
    for name, layer in layers.items():
        if not name.endswith(".indexer.k_cache"):
            continue
        cache = layer.kv_cache.reshape(layer.kv_cache.shape[0], -1).cpu().numpy()  # [pages, bytes]
        page = layer.kv_cache.shape[-2]
        keys, scales = [], []
        for token in range(first, end):
            at, place = ids[token // block_tokens] * (block_tokens // page) + token % block_tokens // page, token % page
            keys.append(cache[at, place * WIDTH : (place + 1) * WIDTH].copy())
            scales.append(cache[at, page * WIDTH + place * SCALE : page * WIDTH + (place + 1) * SCALE].copy())
        number = next(int(part) for part in name.split(".") if part.isdigit())
        found[f"{number}.index_key"], found[f"{number}.index_key_scale"] = np.stack(keys)[None], np.stack(scales)[None]
    return found


def read_plain_index_keys(worker: Any, ids: Sequence[int], first: int, end: int) -> dict[str, np.ndarray]:
    """The same of MiniMax M3, whose index keys are rows one after another, and of the K and V beside them.

    A cell of K and V is [head, token] of a page, K and then V.
    """
    found = {}
    layers = worker.vllm_config.compilation_config.static_forward_context
    block_tokens = int(worker.vllm_config.cache_config.block_size)
    for name, layer in layers.items():
        if not name.endswith(".attn.index_cache"):
            continue
        number = next(int(part) for part in name.split(".") if part.isdigit())
        slots = [ids[token // block_tokens] * block_tokens + token % block_tokens for token in range(first, end)]
        rows = layer.kv_cache.cpu().contiguous().view(-1, WIDTH)[slots]
        found[f"{number}.index_key"] = _bytes(rows)[None]
        cache = layers[name.removesuffix(".index_cache")].kv_cache.cpu()
        cells = [cache[slot // cache.shape[2], :, slot % cache.shape[2]] for slot in slots]
        for part, numbers in (("k", slice(None, WIDTH)), ("v", slice(WIDTH, None))):
            rows = [_bytes(cell[:, numbers]) for cell in cells]
            found[f"{number}.{part}"] = np.stack(rows, 1)
    return found


def _bytes(rows: Any) -> np.ndarray:
    """[rows, bytes]"""
    import torch

    return np.asarray(rows.contiguous().view(torch.uint8).numpy())


def of_all_ranks(found: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """What every rank has, and all heads of K and V. Raises ValueError if a rank has other bytes than another."""
    whole = dict(found[0])
    for key in whole:
        if key.endswith(HEADS_CUT):
            whole[key] = np.concatenate([rank[key] for rank in found])
        elif any(rank.keys() != whole.keys() or not np.array_equal(rank[key], whole[key]) for rank in found):
            raise ValueError("ranks have other index keys")
    return whole
