"""The options of an engine's command line that decide its KV cache. Pure."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from ..errors import OperatorError

# vLLM's is 16 unless the backend prefers another, SGLang's 1; which one matters to windows only.
USUAL_BLOCK = {"vllm": 16, "sglang": 1}
# These predict tokens without a model of their own.
MODEL_FREE = ("", "ngram", "ngram_gpu", "suffix", "uno")
FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        "tp": ("--tensor-parallel-size", "-tp"),
        "pp": ("--pipeline-parallel-size", "-pp"),
        "dp": ("--data-parallel-size", "-dp"),
        "pcp": ("--prefill-context-parallel-size", "-pcp"),
        "cp": ("--decode-context-parallel-size", "-dcp"),
        "cp_interleave": ("--cp-kv-cache-interleave-size", "--dcp-kv-cache-interleave-size"),
        "block_tokens": ("--block-size",),
        "kv_cache_dtype": ("--kv-cache-dtype",),
        "dtype": ("--dtype",),
        "backend": ("--attention-backend",),
        "drafts": ("--speculative-config", "-sc"),
        "method": ("--spec-method",),
        "draft_model": ("--spec-model",),
        "attention": ("--attention-config", "-ac"),
        "conv_dtype": ("--mamba-cache-dtype",),
        "state_dtype": ("--mamba-ssm-cache-dtype",),
        "state_mode": ("--mamba-cache-mode",),
    },
    "sglang": {
        "tp": ("--tensor-parallel-size", "--tp-size", "--tp"),
        "pp": ("--pipeline-parallel-size", "--pp-size"),
        "dp": ("--data-parallel-size", "--dp-size", "--dp"),
        "attn_dp": ("--attn-dp-size", "--attention-data-parallel-size"),
        "attn_cp": ("--attn-cp-size", "--attention-context-parallel-size"),
        "attn_dcp": ("--dcp-size", "--decode-context-parallel-size"),
        "block_tokens": ("--page-size",),
        "kv_cache_dtype": ("--kv-cache-dtype",),
        "dtype": ("--dtype",),
        "backend": ("--attention-backend",),
        "prefill_backend": ("--dsa-prefill-backend",),
        "decode_backend": ("--dsa-decode-backend",),
        "v4_backend": ("--dsv4-attn-backend",),
        "drafts": ("--speculative-algorithm",),
        "draft_model": ("--speculative-draft-model-path", "--speculative-draft-model"),
        "model": ("--model-path", "--model"),
        "state_dtype": ("--mamba-ssm-dtype",),
        "quantization": ("--quantization",),
    },
}
SWITCHES: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        "keeps_all": ("--disable-hybrid-kv-cache-manager",),
        "has_private_blocks": ("--no-enable-prefix-caching",),
        "can_sleep": ("--enable-sleep-mode",),
        "replays_states": ("--use-replayssm",),
        "spreads_experts": ("--enable-expert-parallel", "-ep"),
    },
    "sglang": {
        "keeps_all": ("--disable-hybrid-swa-memory",),
        "is_dp_attention": ("--enable-dp-attention",),
        "has_decode_cache": ("--disaggregation-decode-enable-radix-cache",),
        "has_host_cache": ("--enable-hierarchical-cache",),
        "is_hisparse": ("--enable-hisparse",),
        "is_sharded": ("--enable-kv-cache-sharding",),
        "is_layer_split": ("--enable-dsa-cache-layer-split",),
        "has_small_index_keys": ("--enable-deepseek-v4-fp4-indexer",),
        "shares_groups": ("--enable-cp-tp-group-sharing",),
        "is_unified": ("--enable-unified-memory",),
        "replays_states": ("--enable-linear-replayssm", "--enable-linear-replayssm-spec"),
    },
}
BACKENDS = ("backend", "prefill_backend", "decode_backend", "v4_backend")
DTYPES = ("kv_cache_dtype", "dtype", "index_dtype", "conv_dtype", "state_dtype", "quantization")
TEXTS = (*DTYPES, *BACKENDS, "state_mode", "drafts", "method", "draft_model", "model", "attention")


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """One engine as its command line makes it. Sizes count ranks of a replica; `tp` is that of attention.

    replicas     how many it has (data parallelism)
    copies       of its weights: one for each replica, or one if replicas share the GPUs of all
    backend, prefill_backend, decode_backend, v4_backend    of attention, where the command names one
    keeps_all    layers with windows keep all tokens
    has_private_blocks    vLLM gives no block to another request
    drafts       the method that predicts further tokens with a model or layers of its own, "" for none
    index_dtype    that of index keys beside K and V, "" if vLLM is not told
    conv_dtype, state_dtype    of recurrent states: of the convolution, and of the rest
    state_mode    which of them vLLM's prefix cache keeps, "" for its choice
    quantization    of the weights, "" if SGLang is not told
    has_own_drafts    these layers are the model's (MTP), and so in its config.json
    is_drafting    tokens are predicted, by whatever method
    attn_cp, attn_dcp, has_decode_cache, has_host_cache    SGLang's, refused where they matter
    is_sharded, is_layer_split, has_small_index_keys, shares_groups, is_unified    the same
    pcp, can_sleep    vLLM's: ranks of prefill context parallelism for each of tensor parallelism, and sleep mode
    is_hisparse, replays_states    of both, refused where they matter
    """

    engine: str
    replicas: int = 1
    copies: int = 1
    tp: int = 1
    pp: int = 1
    pcp: int = 1
    cp: int = 1
    cp_interleave: int = 1
    block_tokens: int = 0
    kv_cache_dtype: str = "auto"
    index_dtype: str = ""
    conv_dtype: str = "auto"
    state_dtype: str = "auto"
    state_mode: str = ""
    quantization: str = ""
    dtype: str = "auto"
    backend: str = ""
    prefill_backend: str = ""
    decode_backend: str = ""
    v4_backend: str = ""
    keeps_all: bool = False
    has_private_blocks: bool = False
    drafts: str = ""
    has_own_drafts: bool = False
    is_drafting: bool = False
    attn_cp: int = 1
    attn_dcp: int = 1
    has_decode_cache: bool = False
    has_host_cache: bool = False
    is_hisparse: bool = False
    is_sharded: bool = False
    is_layer_split: bool = False
    has_small_index_keys: bool = False
    shares_groups: bool = False
    is_unified: bool = False
    can_sleep: bool = False
    replays_states: bool = False


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OperatorError("bad_option", message)


def parse(command: str) -> EngineCommand:
    """An engine from `vllm serve ...` or `python -m sglang.launch_server ...`. Other options do not decide its cache.

    Raises OperatorError (`bad_option`) for another program or two of them, and for a value that is none.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise OperatorError("bad_option", f"{command}: {error}") from error
    engine = _engine(command, words)
    parser = Parser(prog=engine, allow_abbrev=False, add_help=False)
    for name, flags in FLAGS[engine].items():
        parser.add_argument(*flags, dest=name, type=str if name in TEXTS else _positive, default=None)
    for name, flags in SWITCHES[engine].items():
        parser.add_argument(*flags, dest=name, action="store_true")
    words = [_dashed(word) for word in words]
    known, _ = parser.parse_known_args(_folded(words) if engine == "vllm" else words)
    given = {name: value for name, value in vars(known).items() if value is not None}
    return _made(engine, given)


def _engine(command: str, words: list[str]) -> str:
    """The program, by its own name or that of the module after -m. An option's value or a model's path is none."""
    found: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        name = word.partition(".")[0] if before == "-m" else word.rpartition("/")[2] if "=" not in word else ""
        is_value = found and before != "-m" and (before.startswith("-") or before == "serve")
        if name in FLAGS and name not in found and not is_value:
            found.append(name)
    if len(found) != 1:
        why = f"names both {' and '.join(found)}" if found else "names neither vllm nor sglang"
        raise OperatorError("bad_option", f"{command}: {why}")
    return found[0]


def _positive(text: str) -> int:
    value = int(text)
    if not 0 < value <= 4096:
        raise ValueError(text)
    return value


def _dashed(word: str) -> str:
    """vLLM takes --block_size for --block-size."""
    name, equals, value = word.partition("=")
    return (name.replace("_", "-") if name.startswith("--") else name) + equals + value


def _folded(words: list[str]) -> list[str]:
    """vLLM takes `--attention-config.backend X` for a part of that option's JSON. Raises OperatorError."""
    kept, parts = list[str](), dict[str, dict[str, Any]]()
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        option, *keys = name.split(".")
        keys = [key.replace("-", "_") for key in keys]
        if not (keys and option.startswith("-") and option.lstrip("-")[:1].isalpha()):
            kept.append(word)
            continue
        place, value = parts.setdefault(option, {}), value if equals else next(left, "")
        for key in keys[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise OperatorError("bad_option", f"{name}: {key} has a value already")
        try:
            place[keys[-1]] = json.loads(value)
        except ValueError:
            place[keys[-1]] = value
    return [*kept, *(f"{option}={json.dumps(each)}" for option, each in parts.items())]


def _made(engine: str, given: dict[str, Any]) -> EngineCommand:
    replicas = int(given.pop("dp", 1))
    in_attention = int(given.pop("attn_dp", replicas if given.pop("is_dp_attention", False) else 1))
    is_shared = given.pop("spreads_experts", False) or in_attention > 1
    given |= {"replicas": max(replicas, in_attention), "copies": 1 if is_shared else replicas}
    is_drafting = any(given.get(name) for name in ("drafts", "method", "draft_model"))
    drafts, has_own_drafts = _drafts(engine, given)
    attention = _json("--attention-config", str(given.pop("attention", "")))
    given["index_dtype"] = str(attention.get("indexer_kv_dtype") or "")
    given.setdefault("backend", str(attention.get("backend") or ""))
    if engine == "vllm":
        given["is_hisparse"] = attention.get("hisparse_config") is not None
    found = replace(EngineCommand(engine, block_tokens=USUAL_BLOCK[engine]), **given)
    for option, parts in (("--dp-size", in_attention), ("--attn-cp-size", found.attn_cp)):
        if found.tp % parts:
            raise OperatorError("bad_option", f"{option} {parts}: --tp-size {found.tp}, must be a multiple of it")
        found = replace(found, tp=found.tp // parts)
    if found.tp % found.cp:
        raise OperatorError("bad_option", f"--decode-context-parallel-size {found.cp}: must divide tp size {found.tp}")
    return replace(found, drafts=drafts, has_own_drafts=has_own_drafts, is_drafting=is_drafting)


def _drafts(engine: str, given: dict[str, Any]) -> tuple[str, bool]:
    """What predicts tokens, "" for nothing with layers of its own, and whether they are the model's own."""
    said, model = str(given.pop("drafts", "")), given.pop("model", "")
    config = _json("--speculative-config", said) if engine == "vllm" else {"method": said}
    method = str(given.pop("method", config.get("method")) or "").lower()
    draft_model = str(given.pop("draft_model", config.get("model")) or "")
    if method in MODEL_FREE and (method or not draft_model or draft_model in MODEL_FREE or engine == "sglang"):
        return "", False
    if engine == "vllm":
        return method or draft_model, method == "mtp" or method.endswith("_mtp")
    return method, method in ("eagle", "nextn") and draft_model in ("", model)


def _json(option: str, text: str) -> Mapping[str, Any]:
    try:
        config = json.loads(text or "{}")
    except ValueError as error:
        raise OperatorError("bad_option", f"{option} {text}: {error}") from error
    if not isinstance(config, dict):
        raise OperatorError("bad_option", f"{option} {text}: must be an object")
    return config
