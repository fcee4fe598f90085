"""Small models that draft, and engines that draft with them: how many of their drafts are accepted.

Each draft is the model's first layer, and the other layers add little. So most guesses that see the prompt are right,
and not all. A draft with weights of its own would guess nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from demo.model import HIDDEN, LAYERS, write_model
from tests.system.engines.engine_process import EngineProcess
from tests.system.engines.fleet import Fleet
from tests.system.engines.kinds import write_latent

DRAFTED = 3  # tokens in a step
FAINT = 0.35  # of what the layers after the first would add
GPU_WIDTH = 128  # of heads without their rotated part, as the kernels of GPUs want it
SGLANG_EAGLE = "LlamaForCausalLMEagle"  # what SGLang calls it; there its first matrix has a bias
DRAFT_LAYERS = {"mtp": 1, "eagle": 1, "draft_model": 1, "ngram": 0}  # that have rows
PLAIN = "strict"  # an engine that drafts nothing
NGRAMS = {"prompt_lookup_max": 4, "prompt_lookup_min": 1}
MORE = 16  # tokens that each prompt goes on for
MORE_FOR_NGRAMS = 48  # with 16, and n-grams of two tokens, half of all sets of 24 prompts draft nothing


class Drafting(Fleet):
    """All of its engines draft by this method, but for PLAIN."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        method: str,
        *,
        at_once: int = 8,
        start: Sequence[str] = ("small", "large", "alone"),
        engine_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.layers = LAYERS + DRAFT_LAYERS[method]
        model = (write_mtp if method == "mtp" else write_drafted)(folder / "model")
        self._at_once = at_once
        self._named: dict[str, list[str]] = {}  # of each engine: the requests of its last answers
        self.more = MORE_FOR_NGRAMS if method == "ngram" else MORE
        self._engine_options = dict(engine_options or {})
        self._drafts = speculative_config(method, folder, model)
        super().__init__(folder, stack, write=lambda at: at, start=start, **options)

    def _begin(self, name: str) -> EngineProcess:
        drafts = {} if name == PLAIN else {"speculative_config": self._drafts}
        self._more = self._engine_options | drafts
        return super()._begin(name)

    def answers(self, receiver: str, sender: str, prompts: Sequence[list[int]]) -> list[list[int]]:
        """What is decoded; with a `sender`, from what it has prefilled."""
        found, named = [], self._named[receiver] = list[list[int]](), list[str]()
        for at in range(0, len(prompts), self._at_once):
            some = {self.name(f"many-{receiver}"): tokens for tokens in prompts[at : at + self._at_once]}
            for name, tokens in some.items():
                params = self.prefill(sender, tokens)[1].params if sender else None
                self[receiver].submit(name, tokens, self.more, params)
            results = self[receiver].results(list(some))
            for name, tokens in some.items():
                assert not sender or results[name].cached == len(tokens) - 1, "computed, not fetched"
                found.append(list(results[name].tokens))
            named += some
        return found

    def gap(self, tokens: list[int], ours: list[int], theirs: list[int]) -> float:
        """Where these part: by how much the engine alone finds its own token likelier, in nats."""
        place = next(i for i in range(self.more) if ours[i] != theirs[i])
        said = self["alone"].ask("likely", 60.0, request=self.name("likely"), tokens=tokens, amount=place + 1)
        likely = said["places"][place]
        return float(likely[str(ours[place])] - likely.get(str(theirs[place]), float("-inf")))

    def per_step(self, name: str, counts: Sequence[bool] = ()) -> float:
        """Tokens accepted in a step with drafts, since the last time; or of those of the last answers that count."""
        told = self[name].ask("drafted", 30.0)["steps"]
        named = (
            [request for request, is_one in zip(self._named[name], counts, strict=True) if is_one] if counts else told
        )
        steps = [step for request in named for step in told.get(request, ())]
        assert steps, "nothing was drafted"
        return float(sum(accepted for _, accepted in steps) / len(steps))


def repetitive(length: int, seed: int) -> list[int]:
    """Phrases that come again: n-grams of the prompt go on as they did before. Any draft guesses some of them."""
    dice = random.Random(seed)
    phrases = [[dice.randrange(3, 1000) for _ in range(12)] for _ in range(3)]
    words: list[int] = []
    while len(words) < length:
        words += dice.choice(phrases)
    return words[:length]


def write_drafted(folder: Path) -> Path:
    """A llama whose first layer says most."""
    write_model(folder)
    _edit(folder, _with_faint_layers)
    return folder


def write_draft(folder: Path, model: Path) -> Path:
    """Its first layer alone, as a model of its own."""
    weights = _weights(model)
    kept = {name: weight for name, weight in weights.items() if ".layers." not in name or ".layers.0." in name}
    return _write(folder, _config(model) | {"num_hidden_layers": 1}, kept)


def write_eagle(folder: Path, model: Path, **changes: object) -> Path:
    """Its first layer as an EAGLE head. It takes the token's embedding and nothing of the model's hidden state."""
    import torch

    first = "model.layers.0."
    weights = {
        name.replace(first, "layers.0."): weight for name, weight in _weights(model).items() if name.startswith(first)
    }
    del weights["layers.0.input_layernorm.weight"]  # EAGLE's first layer has none
    weights["fc.weight"] = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1).to(torch.bfloat16)
    if changes.get("architectures") == [SGLANG_EAGLE]:
        weights["fc.bias"] = torch.zeros(HIDDEN, dtype=torch.bfloat16)
    return _write(folder, _config(model) | {"num_hidden_layers": 1} | changes, weights)


def write_mtp(folder: Path) -> Path:
    """DeepSeek V3 without experts, whose module for a further token (MTP) is its first layer."""
    write_latent(
        folder,
        architectures=["DeepseekV3ForCausalLM"],
        model_type="deepseek_v3",
        qk_nope_head_dim=GPU_WIDTH,
        v_head_dim=GPU_WIDTH,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        norm_topk_prob=True,
        first_k_dense_replace=LAYERS + 1,
        num_nextn_predict_layers=1,
    )
    _edit(folder, _with_faint_layers)
    _edit(folder, _with_module)
    return folder


def speculative_config(method: str, folder: Path, model: Path) -> dict[str, Any]:
    """What vLLM is told in order to draft by this method; writes the draft to `folder` if it is a model of its own."""
    said: dict[str, Any] = {"method": method, "num_speculative_tokens": DRAFTED}
    if method == "ngram":
        said |= NGRAMS
    elif method != "mtp":
        write = {"draft_model": write_draft, "eagle": write_eagle}[method]
        said["model"] = str(write(folder / method, model))
    return said


def _with_faint_layers(weights: dict[str, Any]) -> dict[str, Any]:
    def is_faint(name: str) -> bool:
        return ".layers." in name and ".layers.0." not in name and ("o_proj" in name or "down_proj" in name)

    return {name: weight * FAINT if is_faint(name) else weight for name, weight in weights.items()}


def _with_module(weights: dict[str, Any]) -> dict[str, Any]:
    import torch

    first, module = "model.layers.0.", f"model.layers.{LAYERS}."
    made = {name.replace(first, module): weight.clone() for name, weight in weights.items() if name.startswith(first)}
    made[f"{module}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    made[f"{module}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    made[f"{module}eh_proj.weight"] = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1).bfloat16()
    made |= {f"{module}{name}.weight": torch.ones(HIDDEN).bfloat16() for name in ("enorm", "hnorm", "shared_head.norm")}
    return weights | made


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def _weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = load_file(folder / "model.safetensors")
    return found


def _edit(folder: Path, change: Any) -> None:
    from safetensors.torch import save_file

    save_file(change(_weights(folder)), folder / "model.safetensors", metadata={"format": "pt"})


def _write(folder: Path, config: dict[str, Any], weights: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
