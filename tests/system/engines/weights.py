"""Weights for a model that is only a config.json, equal in any engine however it shards them; and their digests."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from demo.model import GAINS, model_shapes, write_config

SEED = 7
# In a net of 32 layers, more than that for what is added to its stream lets bf16 in another order end in other tokens.
ADDED = {"o_proj": 0.35, "down_proj": 0.35}
CHUNK = 1 << 22  # numbers that are summed at a time
PLACES = 65521


def seeded(config: dict[str, Any], like: Any, seed: int = SEED) -> Iterator[tuple[str, Any]]:
    """Each tensor of the model by its name in a checkpoint, with the device and the dtype of `like`."""
    import torch

    for number, (name, shape) in enumerate(model_shapes(config).items()):
        if name.endswith("norm.weight"):
            yield name, torch.ones(shape, dtype=like.dtype, device=like.device)
            continue
        generator = torch.Generator(like.device).manual_seed(seed + number)
        values = torch.randn(shape, dtype=like.dtype, device=like.device, generator=generator)
        if "embed_tokens" not in name:
            gain = next((gain for part, gain in (GAINS | ADDED).items() if part in name), 1.0)
            values *= gain / math.sqrt(shape[1])
        yield name, values


def load_seeded(worker: Any, seed: int = SEED) -> None:
    """On a worker of vLLM: weights that any sharding of this model shares, through vLLM's own loader."""
    import torch

    model = worker.get_model()
    like = torch.empty(0, dtype=torch.bfloat16, device=worker.device)
    with torch.no_grad():
        model.load_weights(seeded(worker.vllm_config.model_config.hf_config.to_dict(), like, seed))
    torch.cuda.empty_cache()


class Seeding:
    """What vLLM's workers are extended by (--worker-extension-cls), for a server that is told over HTTP."""

    def seed_weights(self) -> None:
        load_seeded(self)


def write(folder: Path) -> Path:
    """The demo's shape with these weights in bf16, for an engine that has to read them."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((write_config(folder) / "config.json").read_text())
    weights = dict(seeded(config, torch.empty(0, dtype=torch.bfloat16)))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def digests(model: Any) -> dict[str, int]:
    """Of each weight that the engine holds, by its name there: the sum of its 16-bit words, each times its place."""
    import torch

    found = {}
    for name, weight in model.named_parameters():
        if not name.endswith(".weight") or not weight.numel():
            continue
        words = weight.detach().contiguous().view(-1).view(torch.int16)
        found[name] = 0
        for start in range(0, len(words), CHUNK):
            part = words[start : start + CHUNK].long()
            places = torch.arange(start, start + len(part), device=part.device) % PLACES + 1
            found[name] += int((part * places).sum())
    return found


def digest(found: dict[str, int]) -> str:
    """One for all of them."""
    return blake2b(json.dumps(found, sort_keys=True).encode(), digest_size=8).hexdigest()
