"""SGLang's draft model (EAGLE, EAGLE3, MTP, STANDALONE): its pools, and what its decode side is told beside the rows.

A draft model has pools of its own over the same pages as the model's. With several modules (multi-layer EAGLE) each has
one; SGLang's own backends move the first only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..engine.unsupported import refusal

# In a metadata buffer: the drafts for the first step, their probabilities, and the hidden state that they are of.
TOKENS, PROBABILITIES = "output_topk_index", "output_topk_p"
HIDDEN, SEED = "output_hidden_states", "output_dsa_topk_indices"


def runners(queue: Any) -> list[Any]:
    """The runners of the draft model whose pools the pages are in, each pool once. Raises OperatorError."""
    if queue.draft_token_to_kv_pool is None:
        return []
    scheduler = queue.scheduler
    if scheduler.spec_algorithm.is_dflash_family():
        option = f"--speculative-algorithm {scheduler.spec_algorithm.name}"
        raise refusal("cache_unsupported", "sglang", "beside rows", option)
    found = {id(runner.token_to_kv_pool): runner for runner in scheduler.draft_worker._draft_model_runners()}
    return list(found.values())


def pools(queue: Any) -> list[Any]:
    """The draft model's pools. Raises as `runners`."""
    return [runner.token_to_kv_pool for runner in runners(queue)]


def fields(buffers: Any, addresses: Sequence[int]) -> dict[int, str]:
    """Which fields of the metadata buffer are about drafts, by their place in it. `addresses` are of all fields."""
    known = {
        tensor.data_ptr(): name
        for name in (TOKENS, PROBABILITIES, HIDDEN, SEED)
        if (tensor := getattr(buffers, name, None)) is not None
    }
    return {place: known[address] for place, address in enumerate(addresses) if address in known}


def unknown(buffers: Any, index: int) -> None:
    """Write that nobody has drafted for the first step: nothing is likely, and no token is guessed twice.

    Guesses that are the same, below one parent, would make their token likelier than it is where tokens are sampled.
    """
    tokens = getattr(buffers, TOKENS, None)
    if tokens is None:
        return
    tokens[index].copy_(torch.arange(tokens.shape[1]))
    for name in (PROBABILITIES, HIDDEN):
        getattr(buffers, name)[index].zero_()
    if (seed := getattr(buffers, SEED, None)) is not None:
        seed[index].fill_(-1)  # SGLang's own word for none
