"""Writes a small llama with random weights, for the demo and the tests that run real engines.

`<python with vLLM> -m demo.model FOLDER` writes it with a tokenizer, and `... FOLDER qwen3` a Qwen3 in its place.

Weights of N(0, 0.3) everywhere are chaotic in bf16: two correct engines diverge after one token. Embeddings of N(0, 1)
and matrices of g / sqrt(fan_in), with g = 1.7 for q and k and 4 for lm_head, give varied and stable tokens.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VOCABULARY = 1024
LAYERS = 4
QUERY_HEADS = 8
KV_HEADS = 4
HEAD_WIDTH = 32
HIDDEN = QUERY_HEADS * HEAD_WIDTH
UNKNOWN = "?"
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
MODELS: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": QWEN3}
GAINS = {"q_proj": 1.7, "k_proj": 1.7, "lm_head": 4.0}


def write_config(folder: Path, **changes: object) -> Path:
    """Write config.json only. That is enough for vLLM's scheduler, which never loads weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_WIDTH,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def write_model(folder: Path, seed: int = 0, **changes: object) -> Path:
    """Write config.json and model.safetensors. The same arguments give the same bytes."""
    write_config(folder, **changes)
    return write_weights(folder, model_shapes(json.loads((folder / "config.json").read_text())), GAINS, 1.0, seed)


def write_weights(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], gains: Mapping[str, float], usual: float, seed: int = 0
) -> Path:
    """Write model.safetensors with random weights. `gains` are by parts of names, `usual` is that of all others."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        if len(shape) == 1:  # of a norm
            weights[name] = torch.full(shape, float(name.rpartition(".")[2] == "weight"), dtype=torch.bfloat16)
            continue
        values = torch.randn(shape, generator=generator)
        if "embed_tokens" not in name:
            values *= next((gain for part, gain in gains.items() if part in name), usual) / math.sqrt(shape[1])
        weights[name] = values.to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tokenizer(folder: Path, vocabulary: int = VOCABULARY) -> Path:
    """Write a tokenizer for `vllm serve`, where prompts are text. Its words are the numbers below `vocabulary`."""
    words = {UNKNOWN: 0} | {str(number): number for number in range(1, vocabulary)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": UNKNOWN},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": UNKNOWN}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Varied token ids. Prompts of different seeds share no prefix."""
    return [(i * 37 + (i * i) % 101 + seed * 131) % 1000 + 3 for i in range(tokens)]


def model_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    has_norms = config["model_type"].startswith("qwen3")
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (q, hidden),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden),
                "self_attn.o_proj": (hidden, q),
                **({"self_attn.q_norm": (width,), "self_attn.k_norm": (width,)} if has_norms else {}),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }.items()
        }
    return shapes


def main() -> None:
    """Write the model and its tokenizer. Raises ValueError unless one folder is named, KeyError for other models."""
    folder, kind = sys.argv[1:] if len(sys.argv) > 2 else (*sys.argv[1:], "llama")
    write_tokenizer(write_model(Path(folder), **MODELS[kind]))


if __name__ == "__main__":
    main()
