"""What converting index keys changes of the tokens that sparse attention chooses: on the CPU, without engines.

A query chooses the 2048 tokens with the largest sum over heads of weight * ReLU(query . key). Keys and queries are in
fp8 with a scale each, as the engines write them: in vLLM as they are, in SGLang times a Hadamard matrix. For each way
in which keys may come into a cache: how many of the tokens are those that the cache's own engine would choose, and
those that fp32 would. `plain` keys are normal numbers; `structured` ones lie near a subspace of 24 dimensions, change
slowly from token to token, and have four numbers that are ten times the others.
"""

from __future__ import annotations

from typing import Any

import torch
from kvbridge_kernels.codecs_ref import LEAST_IN_ROW, rotate
from kvbridge_kernels.field import Scratch

from bench.scenario import Bench

WIDTH, HEADS, CHOSEN = 128, 64, 2048


def turned(rows: torch.Tensor) -> torch.Tensor:
    """Rows times the Hadamard matrix."""
    found = rows.clone()
    rotate(found, Scratch())
    return found


def in_fp8(rows: torch.Tensor, is_power: bool = True) -> torch.Tensor:
    """What is left of rows in fp8 under a scale each, which is a power of two or not."""
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=LEAST_IN_ROW) / 448.0
    if is_power:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return (rows / scale).to(torch.float8_e4m3fn).float() * scale


def structured(count: int, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    basis = torch.randn(24, WIDTH, generator=made)
    steps = torch.randn(count, 24, generator=made)
    for token in range(1, count):
        steps[token] = 0.9 * steps[token - 1] + (1 - 0.9**2) ** 0.5 * steps[token]
    rows = steps @ basis / 24**0.5 + 0.3 * torch.randn(count, WIDTH, generator=made)
    rows = torch.nn.functional.layer_norm(rows, (WIDTH,))
    rows[:, [3, 17, 64, 101]] *= 10
    return rows.bfloat16().float()


def plain(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def choices(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> list[set[int]]:
    """Of each query [heads, width]."""
    found = []
    for query, weight in zip(queries, weights, strict=True):
        logits = weight @ (query @ keys.T).relu()
        found.append(set(logits.topk(CHOSEN).indices.tolist()))
    return found


def share(ours: list[set[int]], theirs: list[set[int]]) -> float:
    return round(sum(len(a & b) for a, b in zip(ours, theirs, strict=True)) / (CHOSEN * len(ours)), 5)


def measured(keys: torch.Tensor, queries: torch.Tensor) -> dict[str, dict[str, float]]:
    """For each cache and way into it: shares of the engine's own choice, and of that by fp32."""
    weights = torch.randn(len(queries), HEADS, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    exact = choices(queries, weights, keys)
    both = {}
    kept = {"vLLM": in_fp8(keys), "SGLang": in_fp8(turned(keys).bfloat16().float(), is_power=False)}
    asked = {"vLLM": in_fp8(queries), "SGLang": in_fp8(turned(queries).bfloat16().float())}
    for engine, other in (("vLLM", "SGLang"), ("SGLang", "vLLM")):
        own = choices(asked[engine], weights, kept[engine])
        ways = {"its own": kept[engine], "converted": in_fp8(turned(kept[other])), "not converted": kept[other]}
        for way, rows in ways.items():
            found = choices(asked[engine], weights, rows)
            both[f"{engine}, {way}"] = {"as its own": share(found, own), "as fp32": share(found, exact)}
    return both


def measure(bench: Bench, *, tokens: int = 16384, queries: int = 64) -> dict[str, Any]:
    found: dict[str, Any] = {"tokens": tokens, "queries": queries}
    for name, make in (("plain", plain), ("structured", structured)):
        keys, asked = make(tokens, 1), make(queries * HEADS, 2).view(queries, HEADS, WIDTH)
        found[name] = measured(keys, asked)
        for way, shares in found[name].items():
            bench.show({"keys": name, "way": way, **shares})
    return found
