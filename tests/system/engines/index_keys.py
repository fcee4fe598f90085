"""Index keys as their engine's kernels find them: the tests' own reading, which knows nothing of planes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

WIDTH, SCALE = 128, 4


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


def of_all_ranks(found: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """What every rank has. Raises ValueError if one has other bytes than another."""
    for rank in found[1:]:
        if rank.keys() != found[0].keys() or any(not np.array_equal(rank[key], found[0][key]) for key in rank):
            raise ValueError("ranks have other index keys")
    return found[0]
