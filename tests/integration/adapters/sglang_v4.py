"""DeepSeek V4's caches in SGLang without its model: the real pool, allocator, places of requests, and their transfer.

Where a forward would run, `Engine` writes the bytes that the kernels write for the step's tokens, and compares those
that they read. A row is a hash of its cache, its prompt and its number. This file says independently of kvbridge's code
where SGLang's kernels read and write: which tokens by c_plan.cuh in sglang/kernels/jit/csrc/deepseek_v4, slots by the
pool's own translations, and pages by `KVLayout` and `_set_k_and_s_triton` of dsa_index_k_cache.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from kvbridge_proto.pool import Shard

from kvbridge.adapters.sglang.pool import describe
from kvbridge.geometry.check import check_pool
from kvbridge.geometry.overlap import overlaps

RATIOS = [0, 4, 128, 4]
# DeepSeek V4.1: rows of layers 1, 2 and 6 are read by those after them, too.
SHARED: dict[str, Any] = {"ratios": [0, 1, 2, 1, 0, 2, 2], "kv_source_layers": [1, 2, 6]}
PAGE, WIDTH, INDEX, ROPE = 256, 512, 128, 64
BEFORE = 128  # how many tokens before the current one SGLang keeps; the kernels read one less
REQUESTS, PAGES, WINDOW_PAGES = 3, 24, 8
CHUNK = 300
KERNELS_WINDOW = 128  # `SWA_WINDOW`, with the current token
INDEX_PAGE = 64  # rows of V4.1's index keys
# A latent's numbers and its scales, and whether the scales of a row are right behind its numbers: `KVLayout`.
LATENTS = {
    "v4": ((WIDTH - ROPE + 2 * ROPE, 8), False),
    "v41": ((WIDTH, WIDTH // 32), False),
    "v41_new": ((WIDTH, WIDTH // 32), True),
    "v41_fp4": ((WIDTH // 2, WIDTH // 16), False),
    "v41_fp4_new": ((WIDTH // 2, WIDTH // 16), True),
}
Cache = tuple[int, str]


@dataclass(frozen=True)
class Form:
    """A cache's memory, [pages, bytes]: the rows of a page, and the bytes of a row's pieces, which have a part each."""

    tensor: torch.Tensor
    rows: int
    widths: tuple[int, ...]
    is_by_row: bool = False

    def pieces(self, places: torch.Tensor) -> Iterator[tuple[tuple[torch.Tensor, torch.Tensor], int]]:
        """Where in the memory each piece of these rows is, and its bytes."""
        at, stride = 0, sum(self.widths)
        for width in self.widths:
            step = stride if self.is_by_row else width
            columns = at + (places % self.rows)[:, None] * step + torch.arange(width)
            yield ((places // self.rows)[:, None], columns), width
            at += width if self.is_by_row else self.rows * width


def pool_of(ratios: list[int], drafts: int = 0, pages: int = PAGES, has_small_keys: bool = False, **more: Any) -> Any:
    """`drafts`: how many tokens a step of the engine guesses; its rings are longer then."""
    from sglang.srt.mem_cache import deepseek_v4_memory_pool as module

    rings = {ratio: module.get_compress_state_ring_size(ratio, drafts) for ratio in (2, 4, 128)}
    own: dict[str, Any] = {"page_size": PAGE, "swa_page_size": PAGE, "dtype": torch.float8_e4m3fn, "device": "cpu"}
    own |= {"max_num_reqs": REQUESTS, "num_req_slots": REQUESTS + 1, "enable_memory_saver": False}
    windows = min(WINDOW_PAGES, pages)
    own |= {"swa_size": windows * PAGE, "c4_size": pages * PAGE // 4, "c128_size": pages * PAGE // 128}
    own |= {"c4_state_pool_size": (windows + 1) * rings[4], "c128_state_pool_size": (REQUESTS + 1) * rings[128]}
    own |= {"c4_state_dtype": torch.float32, "c128_state_dtype": torch.float32, "sliding_window": KERNELS_WINDOW}
    own |= {"qk_nope_head_dim": WIDTH - ROPE, "qk_rope_head_dim": ROPE, "indexer_head_dim": INDEX}
    own |= {"layer_num": len(ratios), "compression_ratios": ratios, "full_size": pages * PAGE}

    class DeepSeekV4TokenToKVPool(module.DeepSeekV4TokenToKVPool):
        """SGLang asks the server's options, which are one process's, of rings' lengths and index keys in MXFP4."""

        def get_ring_size(self, compress_ratio: int) -> int:
            return rings[compress_ratio]

        def _make_indexer_pool(self, *args: Any, **said: Any) -> Any:
            return super()._make_indexer_pool(*args, **{"force_fp4": has_small_keys} | said)

    return DeepSeekV4TokenToKVPool(**own | more)


def model_of(ratios: list[int]) -> torch.nn.Module:
    """SGLang's own compressors with weights, as a checkpoint has them, each at its layer's number."""
    from sglang.srt.layers.attention.dsv4.compressor import Compressor

    made = torch.nn.ModuleList()
    for layer, ratio in enumerate(ratios):
        for is_in_indexer, width in [(False, WIDTH)] * (ratio > 2) + [(True, INDEX)] * (ratio == 4):
            own = object.__new__(Compressor)
            torch.nn.Module.__init__(own)
            own.layer_id, own.is_in_indexer, own.head_dim = layer, is_in_indexer, width
            own.ratio, own.overlap = ratio, ratio == 4
            own.ape = torch.nn.Parameter(torch.empty(ratio, width * (1 + own.overlap)), requires_grad=False)
            own.load_ape_weight(own.ape, ape_of(layer, ratio, width))
            made.append(own)
    return made


def ape_of(layer: int, ratio: int, width: int) -> torch.Tensor:
    """A compressor's weight, as a checkpoint has it: for each place, of a group of 4 twice, once for the next group."""
    seed = torch.Generator().manual_seed(1000 * layer + width)
    return torch.randn(ratio, width * (2 if ratio == 4 else 1), generator=seed)


class Engine:
    """A rank's pools, as much of a scheduler as the adapter takes, and requests.

    `drafts`: how many tokens a step guesses, which makes rings longer. `has_drafter`: by a model with a pool of its
    own, whose rows come from another engine if it `gets_drafts`.
    """

    def __init__(
        self,
        is_decoder: bool = False,
        drafts: int = 0,
        ratios: list[int] = RATIOS,
        shard: Shard | None = None,
        has_drafter: bool = False,
        gets_drafts: bool = True,
        pages: int = PAGES,
        **more: Any,
    ) -> None:
        from sglang.srt.disaggregation.utils import setup_state_kv_args
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        self.is_decoder, self.shard, self.drafts = is_decoder, shard or Shard(), drafts
        self.pool, self.gets_drafts = pool_of(ratios, drafts, pages, **more), gets_drafts
        self.places = ReqToTokenPool(REQUESTS, pages * PAGE, "cpu", False)
        form = {"kv_layout": more["kv_layout"]} if "kv_layout" in more else {}
        self.drafter = pool_of([0], drafts, pages, **form) if has_drafter else None
        sizes = (pages * PAGE, self.pool.swa_size, PAGE, self.pool.dtype, "cpu", self.pool)
        self.allocator = SWATokenToKVPoolAllocator(*sizes, need_sort=False, req_to_token_pool=self.places)
        if self.drafter is not None:
            self.drafter.register_mapping(self.allocator.full_to_swa_index_mapping)
        self.args: Any = SimpleNamespace(page_size=PAGE)
        setup_state_kv_args(self.args, self.pool, self.drafter)
        self.model = model_of(ratios)
        self.queue = self._queue()
        for each in self.tensors():
            each.random_(256)

    def _queue(self) -> Any:
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        text = SimpleNamespace(num_hidden_layers=len(self.pool.compression_ratios))
        runner = SimpleNamespace(token_to_kv_pool=self.drafter)
        scheduler = SimpleNamespace(
            model_config=SimpleNamespace(hf_text_config=text),
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.places,
            sliding_window_size=BEFORE,
            server_args=SimpleNamespace(model_path="/models/v4", speculative_draft_model_path=None),
            draft_worker=SimpleNamespace(_draft_model_runners=lambda: (runner,)),
            spec_algorithm=SpeculativeAlgorithm.from_string("EAGLE"),
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=self.model)),
            _sched_idled=False,
        )
        return SimpleNamespace(
            token_to_kv_pool=self.pool,
            draft_token_to_kv_pool=self.drafter,
            metadata_buffers=SimpleNamespace(output_ids=torch.zeros(1)),
            scheduler=scheduler,
        )

    def tensors(self) -> list[torch.Tensor]:
        """All memory, as bytes."""
        return [
            tensor.view(torch.uint8)
            for tensor in {id(form.tensor): form.tensor for form in self.forms().values()}.values()
        ]

    def forms(self) -> dict[Cache, Form]:
        found: dict[Cache, Form] = {}
        form = str(self.pool.kv_layout.value)
        layers = [layer for layer, held in enumerate(self.pool.layer_mapping) if held is not None]
        for layer, window in zip(layers, self.pool.swa_kv_pool.kv_buffer, strict=True):
            ratio, place, rows = self.pool.layer_mapping[layer]
            found[layer, "window"] = Form(window, PAGE, *LATENTS[form])
            if not ratio or (ratio < 4 and layer not in self.pool.kv_source_layers):
                continue
            packed = LATENTS[str(rows.kv_layout.value)]
            found[layer, f"rows of {ratio}"] = Form(rows.kv_buffer[place], PAGE // ratio, *packed)
            if ratio != 128:
                keys = self.pool.get_index_k_with_scale_buffer(layer)
                is_small = ratio < 4 or self.pool.index_pools[4].use_fp4_indexer
                own = (64, 4) if is_small else (INDEX, 4)
                found[layer, f"keys of {ratio}"] = Form(keys, PAGE // 4 if ratio == 4 else INDEX_PAGE, own)
            for name, pools in (
                ("", self.pool.compress_state_pools),
                ("index ", self.pool.indexer_compress_state_pools),
            ):
                if pools[layer] is not None:
                    state = pools[layer].kv_score_buffer.kv_score
                    own = (state.shape[1] * state.element_size(),)
                    found[layer, f"{name}state of {ratio}"] = Form(state, 1, own)
        if self.drafter is not None:
            window = self.drafter.swa_kv_pool.kv_buffer[0]
            found[len(self.pool.layer_mapping), "window"] = Form(window, PAGE, *LATENTS[form])
        return found

    @property
    def memory(self) -> Any:
        names = {"model_name": "v4", "engine_id": f"decodes: {self.is_decoder}"}
        memory = describe(self.queue, self.shard, **names, is_decoder=self.is_decoder)
        assert check_pool(memory.pool) == () == overlaps(memory.pool)
        return memory

    # Slots, as SGLang gives them:

    def request(self, seed: int) -> Request:
        from sglang.srt.managers.schedule_batch import ReqKvInfo

        return Request(self, seed, ReqKvInfo(req_pool_idx=self.places.free_slots.pop(0)))

    def extend(self, request: Request, end: int) -> None:
        """Slots for all tokens before `end`, of which the request has some."""
        first, row = request.tokens, request.kv.req_pool_idx
        last = self.places.req_to_token[row, first - 1 : first].long() if first else torch.tensor([-1])
        lengths = [torch.tensor([each]) for each in (first, first, end, end)]
        slots = self.allocator.alloc_extend(*lengths, last, end - first)
        assert slots is not None
        self.places.req_to_token[row, first:end] = slots.int()

    def free(self, request: Request) -> None:
        row = request.kv.req_pool_idx
        self.allocator.free(self.places.req_to_token[row, : request.tokens].long())
        self.places.free_slots.insert(0, row)


class Request:
    """`tokens` of the prompt that `seed` stands for are computed."""

    def __init__(self, engine: Engine, seed: int, kv: Any) -> None:
        self.engine, self.seed, self.kv, self.tokens = engine, seed, kv, 0
        self.rid, self.bootstrap_room, self.prompt = f"prompt {seed}", 100 + seed, f"{seed}"

    # Where rows are:

    def places(self, cache: Cache, numbers: np.ndarray) -> torch.Tensor:
        """The rows of a cache with these numbers: of tokens, or of so many tokens each."""
        layer, name = cache
        pool, tokens = self.engine.pool, self.engine.places.req_to_token[self.kv.req_pool_idx].long()
        index = torch.from_numpy(numbers)
        if name.startswith(("rows", "keys")):
            ratio = int(name.rpartition(" ")[2])
            return tokens[index * ratio + ratio - 1] // ratio
        if name in ("state of 2", "state of 128"):
            state = pool.get_attention_compress_states(layer)
            return state.translate_from_req_position_to_state_loc(torch.tensor(self.kv.req_pool_idx), index)
        slots = pool.translate_loc_from_full_to_swa(tokens[index])
        assert (slots >= PAGE).all(), f"{cache}: {numbers[(slots < PAGE).numpy()]} have been given up"
        if name == "window":
            return slots
        pools = pool.indexer_compress_state_pools if name.startswith("index") else pool.compress_state_pools
        return pools[layer].translate_from_swa_loc_to_state_loc(slots.clone())

    def pieces(self, cache: Cache, numbers: np.ndarray) -> Iterator[tuple[torch.Tensor, Any, np.ndarray]]:
        """Each piece of these rows: its tensor, where in it, and the bytes that must be there."""
        form = self.engine.forms()[cache]
        value, done = self.value(cache, numbers, sum(form.widths)), 0
        for where, width in form.pieces(self.places(cache, numbers)):
            yield form.tensor.view(torch.uint8).flatten(1), where, value[:, done : done + width]
            done += width

    def value(self, cache: Cache, numbers: np.ndarray, width: int) -> np.ndarray:
        if cache[0] == len(self.engine.pool.layer_mapping) and not self.engine.gets_drafts:
            return np.zeros((len(numbers), width), np.uint8)  # nobody has drafted
        name = np.uint64(zlib.crc32(f"{self.seed} {cache}".encode()) << 20)
        mixed = (numbers.astype(np.uint64) + name)[:, None] * np.uint64(0x9E3779B97F4A7C15)
        mixed = mixed + np.arange(width, dtype=np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xD6E8FEB86659FD93)
        return (mixed >> np.uint64(40)).astype(np.uint8)

    def put(self, cache: Cache, numbers: np.ndarray) -> None:
        for memory, where, value in self.pieces(cache, numbers):
            memory[where] = torch.from_numpy(value)

    def compare(self, cache: Cache, numbers: np.ndarray) -> None:
        for memory, where, value in self.pieces(cache, numbers):
            same = (memory[where].numpy() == value).all(1)
            assert same.all(), f"{cache}: {numbers[~same]} differ, {self.tokens} tokens are computed"

    # What the kernels do:

    def compute(self, end: int) -> None:
        """A step of the model for all tokens before `end` that are not computed yet."""
        first, self.tokens = self.tokens, end
        for cache in self.engine.forms():
            ratio = int(name.rpartition(" ")[2]) if (name := cache[1]) != "window" else 1
            if "state" in name:
                read, written = self._state(ratio, first, end)
            elif name != "window":
                read, written = np.arange(0, first // ratio), np.arange(first // ratio, end // ratio)
            else:
                read, written = np.arange(max(0, first + 1 - KERNELS_WINDOW), first), np.arange(first, end)
            self.compare(cache, read)
            self.put(cache, written)

    def _state(self, ratio: int, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens whose kv and scores are read, and those whose are written: `plan_compress_prefill_kernel0`."""
        if ratio == 2:  # `Two positions are one pair`: the first one waits for the second
            return np.arange(first - first % 2, first), np.arange(end - end % 2, end)
        group = 2 * ratio if ratio == 4 else ratio
        boundary = (first // ratio + 1) * ratio
        read = np.arange(max(0, boundary - group), first) if boundary <= end else np.arange(0)
        tokens = np.arange(first, end)
        kept = end // ratio * ratio - (ratio if ratio == 4 else 0)
        ring = self.engine.pool.get_ring_size(ratio)
        written = tokens >= min(kept, end - (ring - group + 2 if ring > group else 0))
        if ratio == 4:
            written |= tokens % PAGE >= PAGE - ratio
        return read, tokens[written]

    def prefill(self, tokens: int, chunk: int = CHUNK, sent: Any = None, tree: Any = None) -> None:
        """In chunks, as SGLang does without a prefix cache: it keeps least. What is given up becomes another's.

        `tree`: SGLang's prefix cache and its own record of the request.
        """
        from sglang.srt.mem_cache.common import free_swa_out_of_window_slots

        for first in range(self.tokens, tokens, chunk):
            free_swa_out_of_window_slots(
                self,
                first,
                sliding_window_size=BEFORE,
                page_size=PAGE,
                req_to_token_pool=self.engine.places,
                token_to_kv_pool_allocator=self.engine.allocator,
                supports_prefix_sharing=tree is not None,
            )
            end = min(first + chunk, tokens)
            self.engine.extend(self, end)
            self.compute(end)
            if tree is not None:
                self.kv.kv_allocated_len = end
                tree[0].checkpoint(tree[1], up_to=end)
            if sent is not None:
                sent(end)

    def decode(self, count: int) -> None:
        """One token a step."""
        for _ in range(count):
            self.engine.extend(self, self.tokens + 1)
            self.compute(self.tokens + 1)

    # What SGLang tells a backend:

    def state_indices(self, tokens: int, prefix: int = 0) -> list[Any]:
        """`_swa_payload` and `_request_state_payload`, both sides'."""
        from sglang.srt.disaggregation.base.conn import StateType
        from sglang.srt.mem_cache.common import kv_to_page_indices

        first = max(prefix, tokens - BEFORE) // PAGE * PAGE
        slots = self.engine.places.req_to_token[self.kv.req_pool_idx, first:tokens]
        pages = kv_to_page_indices(self.engine.allocator.translate_swa_indices_for_transfer(slots), PAGE)
        of = {StateType.SWA: pages}
        if StateType.DSV4_REQUEST_STATE in self.engine.args.state_types:
            row = self.engine.pool.request_state_transfer_indices
            of[StateType.DSV4_REQUEST_STATE] = row(self.kv.req_pool_idx, tokens)
        return [of[kind] for kind in self.engine.args.state_types]

    def preallocate(self, tokens: int, prefix: int = 0) -> list[Any]:
        """The decode side's slots, beside a prefix of all tokens' rows that its cache has: as `pop_preallocated`."""
        from sglang.srt.disaggregation.decode import alloc_for_decode_prealloc

        engine, row = self.engine, self.kv.req_pool_idx
        indices, first = None, max(0, tokens - BEFORE) // PAGE * PAGE
        if prefix:
            engine.extend(self, prefix)
            indices = engine.places.req_to_token[row, :prefix].long()
            engine.allocator.free_swa(indices)
        slots = alloc_for_decode_prealloc(
            engine.allocator,
            req=self,
            fill_len=tokens,
            delta_len=tokens - prefix,
            prefix_len=prefix,
            total_prefix_len=prefix,
            prefix_indices=indices,
            uses_swa_tail=True,
            swa_tail_len=tokens - first,
        )
        engine.places.req_to_token[row, prefix:tokens] = slots.int()
        engine.pool.clear_request_scoped_state(row)
        if prefix:
            for cache in engine.forms():
                if (name := cache[1]).startswith(("rows", "keys")):
                    self.put(cache, np.arange(prefix // int(name.rpartition(" ")[2])))
        return self.state_indices(tokens, prefix)

    def assert_came(self, before: list[torch.Tensor], prefix: int, tokens: int) -> None:
        """What the next tokens will need is there, and of the rest no byte was written but in a prompt's last page."""
        self.tokens = tokens
        was = {now.data_ptr(): each for now, each in zip(self.engine.tensors(), before, strict=True)}
        last = self.engine.places.req_to_token[self.kv.req_pool_idx, tokens - 1].item() // PAGE
        for cache, form in self.engine.forms().items():
            name, tensor = cache[1], form.tensor
            ratio = int(name.rpartition(" ")[2]) if name != "window" else 1
            if name == "window":
                numbers = np.arange(max(0, tokens + 1 - KERNELS_WINDOW), tokens)
            elif "state" in name:
                numbers = np.arange(max(0, tokens // ratio * ratio - (ratio if ratio == 4 else 0)), tokens)
            else:
                numbers = np.arange(prefix // ratio, tokens // ratio)
                pages = slice(last * (many := PAGE // ratio // form.rows), (last + 1) * many)
                was[tensor.data_ptr()][pages] = tensor.view(torch.uint8)[pages]
            self.compare(cache, numbers)
            if "state of 4" in name and tokens % 4:  # they travel by fours, and those of later tokens are not read
                rest = self.places(cache, np.array([tokens // 4 * 4])) + torch.arange(4)
                for where, _ in form.pieces(rest):
                    memory = tensor.view(torch.uint8).flatten(1)
                    was[memory.data_ptr()].view(memory.shape)[where] = memory[where]
            for memory, where, _ in self.pieces(cache, numbers):
                was[memory.data_ptr()].view(memory.shape)[where] = memory[where]
        for each in self.engine.tensors():
            assert torch.equal(each, was[each.data_ptr()]), "bytes of nobody's were written"
