"""Caches of several kinds in vLLM without a model, DeepSeek V4's first: real layers, specs, planner, views, scheduler
and workers.

Where a forward would run, `Engine` compares every byte of the rows that the model would read for the step's tokens, and
writes those that the model would write. A row is a hash of its cache and of the prompt up to the row's last token.

This file says independently of kvbridge's code where vLLM's kernels read and write (models/deepseek_v4/common/ops):
`quantize_and_insert_k_cache`, `_fused_kv_compress_norm_rope_insert_sparse_attn` and `_indexer_attn`, and
`_save_partial_states_kernel`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from kvbridge_proto.pool import Shard
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import CompressorStateCache
from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLABackend
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.utils import allocate_kv_cache

from kvbridge.adapters.engine.memory import Memory
from kvbridge.adapters.vllm.pool import describe
from kvbridge.geometry.check import check_pool
from kvbridge.geometry.overlap import overlaps
from testing.agents import AgentProcess
from tests.integration.adapters.world import World

RATIOS = (0, 4, 128, 4)  # how many tokens a row of each layer stands for; 0: it has a window only
BLOCK, WINDOW, HEAD, INDEX, ROPE = 256, 128, 512, 128, 64
FP8_KEY, MXFP4_KEY = (INDEX, 4), (INDEX // 2, INDEX // 32)  # bytes of an index key, and of its scale or scales
MEMORY = 64 << 20
HASHED = 4  # the common divisor of all blocks: as `resolve_kv_cache_block_sizes` has it
Row = tuple[np.ndarray, ...]  # its pieces


@dataclass(frozen=True)
class Cache:
    """One of a layer's caches, which `keeps` the last tokens only, or all if 0.

    A page has all rows' pieces of the first width, then those of the next; or each row has all its pieces, if these are
    `together`. A row stands for `ratio` tokens. A ring has a row for each token, in one block, for the next row of
    `keeps` tokens. `is_replayed`: the window is computed again after a prefix hit.
    """

    name: str
    kind: str
    widths: tuple[int, ...]
    ratio: int = 1
    keeps: int = 0
    together: bool = False
    is_ring: bool = False
    is_replayed: bool = False

    def row(self, prompt: tuple[int, ...], number: int) -> Row:
        return _hashed(_prefix(prompt, (number + 1) * self.ratio) + self.name.encode(), self.widths)

    def read(self, first: int, end: int) -> range:
        """The rows from before token `first` that the model reads to compute tokens [first, end)."""
        if self.is_ring:
            begin = first // self.keeps * self.keeps
            return range(begin, first) if begin + self.keeps <= end else range(0)
        if self.kind in ("compressor", "index_compressor"):
            group = self.keeps if self.keeps > 8 else 4  # of tokens; of 4, the group before is read too
            boundary = (first + group) // group * group  # the first group that may be whole now ends there
            return range(max(0, boundary - self.keeps), first) if boundary <= end else range(0)
        return range(max(0, first + 1 - self.keeps) if self.keeps else 0, first // self.ratio)


@lru_cache(4096)
def _hashed(said: bytes, widths: tuple[int, ...]) -> Row:
    whole = np.frombuffer(hashlib.shake_128(said).digest(sum(widths)), np.uint8)
    return tuple(np.split(whole, np.cumsum(widths)[:-1]))


@cache
def _prefix(prompt: tuple[int, ...], tokens: int) -> bytes:
    assert tokens <= len(prompt)
    return hashlib.blake2b(repr(prompt[:tokens]).encode()).digest()


def caches(config: VllmConfig, index: tuple[int, int] = FP8_KEY) -> Iterator[tuple[Cache, Any]]:
    """Each cache with vLLM's layer that owns it, as DeepseekV4Attention makes them, which needs a whole model."""
    dtype = config.cache_config.cache_dtype
    is_packed = dtype == "fp8_ds_mla"
    number, row = (torch.uint8, (576, 8)) if is_packed else (torch.bfloat16, (2 * HEAD,))
    for layer, ratio in enumerate(RATIOS):
        name = f"model.layers.{layer}.attn"
        window = DeepseekV4SWACache(HEAD, WINDOW, number, f"{name}.swa_cache", config.cache_config)
        yield Cache(window.prefix, "window", row, keeps=WINDOW), window
        if not ratio:
            continue
        said = {"compress_ratio": ratio, "head_dim": HEAD, "kv_cache_dtype": dtype, "kv_cache_torch_dtype": number}
        attention: Any = SimpleNamespace(**said, attn_backend=DeepseekV4FlashMLABackend)
        attention.get_kv_cache_spec = lambda config, own=attention: DeepseekV4Attention.get_kv_cache_spec(own, config)
        config.compilation_config.static_forward_context[name] = attention
        yield Cache(name, f"compressed {ratio}", row, ratio), attention
        keeps = 8 if ratio == 4 else 128
        states = [("compressor", f"{name}.compressor", HEAD)]
        if ratio == 4:
            key = f"{name}.indexer.k_cache"
            keys = DeepseekV4IndexerCache(sum(index), torch.uint8, key, config.cache_config, compress_ratio=4)
            yield Cache(key, "index_key", index, 4), keys
            states.append(("index_compressor", f"{name}.indexer.compressor", INDEX))
        for kind, owner, width in states:
            numbers = 2 * width * (2 if ratio == 4 else 1)  # kv and score, of this group and of the one before
            state = CompressorStateCache(numbers, torch.float32, ratio, f"{owner}.state_cache")
            yield Cache(state.prefix, kind, (4 * numbers,), keeps=keeps), state


class Engine(World):
    """`agents` are processes, one beside each rank. `dtype` is vLLM's kv_cache_dtype."""

    def __init__(self, folder: Path, agents: Sequence[AgentProcess], dtype: str = "fp8_ds_mla", **more: Any) -> None:
        self._dtype, self._processes, self._bytes = dtype, agents, more.pop("memory", MEMORY)
        self._made, self._block = more.pop("caches", None) or caches, more.pop("block", BLOCK)
        self._more = {"index": more.pop("index")} if "index" in more else {}
        self._last: Any = None  # the step whose forward has run
        self.compared = Counter[str]()  # rows, by the kind of their cache
        self.computed = Counter[str]()  # tokens, by request
        folder.mkdir()
        super().__init__(
            folder,
            tp=len(agents) or 1,
            cache=self._planned,
            hashed=more.pop("hashed", HASHED),
            on_forward=self._forward,
            **more,
        )
        groups = self.of_workers.kv_cache_groups
        sizes = [group.kv_cache_spec.block_size for group in groups]
        layout = self.config.cache_config.get_resolved_kv_cache_layout()
        self.where = {name: (i, sizes[i]) for i, group in enumerate(groups) for name in group.layer_names}
        self.views = [allocate_kv_cache(self.of_workers, torch.device("cpu"), layout, sizes) for _ in self.workers]
        self.memory_of = self._memory
        self.layers = self.config.compilation_config.static_forward_context
        if agents:
            self.attach()
            self.meet_agents()

    def path(self, rank: int) -> Path:
        return self._processes[rank].socket

    def _planned(self, config: VllmConfig) -> KVCacheConfig:
        cache, text = config.cache_config, SimpleNamespace(num_hidden_layers=len(RATIOS), qk_rope_head_dim=ROPE)
        cache.block_size, cache.cache_dtype, cache.kv_cache_layout = self._block, self._dtype, "BLHNC"
        config.model_config.hf_text_config = text
        with set_current_vllm_config(config):
            made = list(self._made(config, **self._more))
        self.kept = [kept for kept, _ in made]
        groups = get_kv_cache_groups(config, {kept.name: layer.get_kv_cache_spec(config) for kept, layer in made})
        return get_kv_cache_config_from_groups(config, groups, self._bytes)

    def _memory(self, rank: int, tp: int) -> Memory:
        said: dict[str, Any] = {"model_name": "v4", "engine_id": str(self.folder)}
        memory = describe(self.views[rank], self.config, self.of_workers, Shard(tp_rank=rank, tp_size=tp), **said)
        assert check_pool(memory.pool) == () == overlaps(memory.pool)
        return memory

    def _work(self, worker: Any, scheduled: Any) -> Any:
        """New blocks are cleared first, as vLLM's workers do it."""
        if worker is self.workers[0]:
            for block, views in product(scheduled.new_block_ids_to_zero or (), self.views):
                for view in views.values():
                    view[block].zero_()
        return super()._work(worker, scheduled)

    def _forward(self) -> None:
        if self._last is self.scheduled:
            return  # another rank of the same step
        self._last = self.scheduled
        for name, count in self.scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            self.computed[name] += count
            end, tables = request.num_computed_tokens, self.scheduler.kv_cache_manager.get_block_ids(name)
            held = getattr(request, "replay_start", 0)  # a window's rows from there on
            for kept in self.kept:
                self._compute(kept, tables, tuple(request.all_token_ids), end - count, end, held)

    def _compute(self, kept: Cache, tables: Any, prompt: tuple[int, ...], first: int, end: int, held: int) -> None:
        for number in kept.read(first, end):
            if kept.is_replayed and number < held:
                continue
            block, place = self._block_of(kept, tables, number), f"{kept.name} row {number}"
            assert block, f"{place}: its block was given up, and tokens {first} to {end} are computed"
            for piece, expected in self._pieces(kept, block, number, prompt):
                assert np.array_equal(piece, expected), f"{place}: tokens {first} to {end} of {len(prompt)}"
            self.compared[kept.kind] += 1
        if held and not (kept.is_replayed or kept.is_ring):
            first = max(first, held + WINDOW)  # what is cached is not written again
        for number in range(first // kept.ratio, end // kept.ratio):
            if block := self._block_of(kept, tables, number):
                for piece, value in self._pieces(kept, block, number, prompt):
                    piece[:] = value

    def _block_of(self, kept: Cache, tables: Any, number: int) -> int:
        group, block_tokens = self.where[kept.name]
        return int(tables[group][0 if kept.is_ring else number * kept.ratio // block_tokens])

    def _pieces(
        self, kept: Cache, block: int, number: int, prompt: tuple[int, ...]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each piece of a row in each rank's memory, and what it must be."""
        rows = self.where[kept.name][1] // kept.ratio  # of a page
        row = kept.row(prompt, number)
        for views in self.views:
            view = views[kept.name]
            size = view.element_size()
            at = (view.storage_offset() + block * view.stride(0)) * size
            memory = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage()).numpy()
            for width, value in zip(kept.widths, row, strict=True):
                start = at + number % rows * (sum(kept.widths) if kept.together else width)
                yield memory[start : start + width], value
                at += width if kept.together else rows * width
