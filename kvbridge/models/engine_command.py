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
        "cp": ("--decode-context-parallel-size", "-dcp"),
        "cp_interleave": ("--cp-kv-cache-interleave-size", "--dcp-kv-cache-interleave-size"),
        "block_tokens": ("--block-size",),
        "kv_cache_dtype": ("--kv-cache-dtype",),
        "dtype": ("--dtype",),
        "drafts": ("--speculative-config",),
    },
    "sglang": {
        "tp": ("--tensor-parallel-size", "--tp-size", "--tp"),
        "pp": ("--pipeline-parallel-size", "--pp-size"),
        "dp": ("--data-parallel-size", "--dp-size", "--dp"),
        "block_tokens": ("--page-size",),
        "kv_cache_dtype": ("--kv-cache-dtype",),
        "dtype": ("--dtype",),
        "drafts": ("--speculative-algorithm",),
    },
}
SWITCHES: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {"keeps_all": ("--disable-hybrid-kv-cache-manager",)},
    "sglang": {"keeps_all": ("--disable-hybrid-swa-memory",), "is_dp_attention": ("--enable-dp-attention",)},
}


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """One engine as its command line makes it. Sizes count ranks; `tp` is that of attention.

    keeps_all    layers with windows keep all tokens
    drafts       the method that predicts further tokens with a model or layers of its own, "" for none
    """

    engine: str
    tp: int = 1
    pp: int = 1
    cp: int = 1
    cp_interleave: int = 1
    block_tokens: int = 0
    kv_cache_dtype: str = "auto"
    dtype: str = "auto"
    keeps_all: bool = False
    drafts: str = ""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OperatorError("bad_option", message)


def parse(command: str) -> EngineCommand:
    """An engine from `vllm serve ...` or `python -m sglang.launch_server ...`. Other options do not decide its cache.

    Raises OperatorError (`bad_option`) for another program, and for a value that is none.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise OperatorError("bad_option", f"{command}: {error}") from error
    engine = next((each for word in words[:8] for each in FLAGS if each in word), None)
    if engine is None:
        raise OperatorError("bad_option", f"{command}: names neither vllm nor sglang")
    parser = Parser(prog=engine, allow_abbrev=False, add_help=False)
    for name, flags in FLAGS[engine].items():
        is_text = name in ("kv_cache_dtype", "dtype", "drafts")
        parser.add_argument(*flags, dest=name, type=str if is_text else _positive, default=None)
    for name, flags in SWITCHES[engine].items():
        parser.add_argument(*flags, dest=name, action="store_true")
    known, _ = parser.parse_known_args([_dashed(word) for word in words])
    given = {name: value for name, value in vars(known).items() if value is not None}
    return _made(engine, given)


def _positive(text: str) -> int:
    value = int(text)
    if not 0 < value <= 4096:
        raise ValueError(text)
    return value


def _dashed(word: str) -> str:
    """vLLM takes --block_size for --block-size."""
    name, equals, value = word.partition("=")
    return (name.replace("_", "-") if name.startswith("--") else name) + equals + value


def _made(engine: str, given: dict[str, Any]) -> EngineCommand:
    replicas = int(given.pop("dp", 1))
    is_dp_attention = given.pop("is_dp_attention", False)
    drafts = _method(given.pop("drafts", ""))
    found = replace(EngineCommand(engine, block_tokens=USUAL_BLOCK[engine]), **given)
    if is_dp_attention:
        if found.tp % replicas:
            raise OperatorError("bad_option", f"--dp-size {replicas}: --tp-size {found.tp}, must be a multiple of it")
        found = replace(found, tp=found.tp // replicas)
    if found.tp % found.cp:
        raise OperatorError("bad_option", f"--decode-context-parallel-size {found.cp}: must divide tp size {found.tp}")
    return replace(found, drafts="" if drafts in MODEL_FREE else drafts)


def _method(text: str) -> str:
    """What predicts tokens: SGLang's algorithm, or the method in vLLM's JSON."""
    if not text.lstrip().startswith("{"):
        return text.lower()
    try:
        config: Mapping[str, Any] = json.loads(text)
    except ValueError as error:
        raise OperatorError("bad_option", f"--speculative-config {text}: {error}") from error
    return str(config.get("method") or config.get("model") or "").lower()
