"""Layers with a window that have memory of their own: SGLang's real pool, allocator and eviction, without a server.

The oracle is SGLang's mapping of slots: rows are written and read through it, by the test itself. What travels is what
the adapter names, checked and planned as agents do.
"""

from __future__ import annotations

import importlib.util
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvbridge_proto.common import Blocks
from kvbridge_proto.pool import Pool, Shard

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not in this environment (make test-sglang)", allow_module_level=True)

from kvbridge.adapters.sglang.pool import describe, moved
from kvbridge.adapters.sglang.windows import first_held, offered, wanted
from kvbridge.adapters.vllm.block_tables import GroupTables, TableGroup
from kvbridge.device.handles import export_all
from kvbridge.errors import EngineError, OperatorError
from kvbridge.exchange.block_tables import check_last, extended, tables_of
from kvbridge.exchange.session import AttachedEngine
from kvbridge.geometry.check import check_pool
from kvbridge.geometry.compat import Incompatible, verdict
from kvbridge.geometry.plan import Part, plan
from kvbridge.geometry.shard import assign
from testing.carried import OnCpu
from testing.oracle import put_rows, take_rows
from testing.pools import Held, Shape, build
from testing.refusals import refused
from tests.integration.adapters.small import held
from tests.integration.adapters.test_sglang_life import FAILED, begun, manager, one_rank, pages, raises, receiver  # noqa: F401
from tests.integration.adapters.test_sglang_pool import RadixAttention, on_a_cpu  # noqa: F401  # a fixture

pytestmark = pytest.mark.sglang

FULL, WINDOWED = [0, 3], [1, 2]  # layers
BEFORE = 48  # tokens before the current one that a window has: a multiple of some pages
CHUNK = 64
SLOTS, WINDOW_SLOTS = 1024, 512
LAYERS = len(FULL + WINDOWED)
LENGTHS = (1, 15, 16, BEFORE, BEFORE + 1, 63, 64, 65, 200, 207, 208, 256, 257)
Rows = dict[tuple[int, str], torch.Tensor]  # by layer and part: [tokens or slots, heads, bytes]


def halves(page: int = 16, **more: Any) -> Any:
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    own: dict[str, Any] = {"page_size": page, "dtype": torch.bfloat16, "head_num": 2, "head_dim": 8, "v_head_dim": 4}
    own |= {"swa_head_num": 4, "swa_head_dim": 8, "swa_v_head_dim": 4, "device": "cpu"}
    layers = {"swa_attention_layer_ids": WINDOWED, "full_attention_layer_ids": FULL}
    return SWAKVPool(**{"size": SLOTS, "size_swa": WINDOW_SLOTS, **layers, **own, **more})


class Side:
    """A pool with its allocator, as much of a scheduler as the adapter takes, and one request."""

    def __init__(self, page: int = 16, is_decoder: bool = False, before: int = BEFORE, **more: Any) -> None:
        from sglang.srt.managers.schedule_batch import ReqKvInfo
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

        self.page, self.is_decoder, self.before, self.row = page, is_decoder, before, 1
        self.pool = halves(page, **more)
        sizes = (SLOTS, WINDOW_SLOTS, page, self.pool.dtype, "cpu", self.pool)
        self.allocator = SWATokenToKVPoolAllocator(*sizes, need_sort=False)
        self.tokens = SimpleNamespace(req_to_token=torch.zeros(2, SLOTS, dtype=torch.int32))
        self.req = SimpleNamespace(kv=ReqKvInfo(req_pool_idx=1), bootstrap_room=1)
        self.attentions = [RadixAttention(layer, window=before if layer in WINDOWED else -1) for layer in range(LAYERS)]
        self.config = SimpleNamespace(
            get_total_num_kv_heads=lambda: self.pool.full_kv_pool.head_num,
            is_hybrid_swa_compress=True,
            hf_text_config=SimpleNamespace(
                num_hidden_layers=LAYERS, swa_num_key_value_heads=self.pool.swa_kv_pool.head_num
            ),
        )
        self.caches_prefixes = False

    @property
    def queue(self) -> Any:
        runner = SimpleNamespace(model=torch.nn.ModuleList(self.attentions))
        scheduler = SimpleNamespace(
            model_config=self.config,
            tp_worker=SimpleNamespace(model_runner=runner),
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.tokens,
            sliding_window_size=self.before,
            server_args=SimpleNamespace(disaggregation_decode_enable_radix_cache=self.caches_prefixes),
        )
        return SimpleNamespace(
            token_to_kv_pool=self.pool,
            draft_token_to_kv_pool=None,
            metadata_buffers=SimpleNamespace(output_ids=torch.zeros(1)),
            scheduler=scheduler,
        )

    @property
    def memory(self) -> Any:
        memory = describe(self.queue, Shard(), model_name="m", engine_id="e", is_decoder=self.is_decoder)
        assert not check_pool(memory.pool)
        return memory

    def extend(self, first: int, end: int) -> None:
        """Slots for tokens [first, end) of the request, in both halves."""
        last = self.tokens.req_to_token[self.row, first - 1 : first].long() if first else torch.tensor([-1])
        if self.page == 1:
            slots = self.allocator.alloc(end - first)
        else:
            lengths = [torch.tensor([each]) for each in (first, first, end, end)]
            slots = self.allocator.alloc_extend(*lengths, last, end - first)
        assert slots is not None
        self.tokens.req_to_token[self.row, first:end] = slots.int()

    def prefill(self, tokens: int) -> None:
        """In chunks, as SGLang does without a prefix cache: it keeps least. What is given up becomes another's."""
        from sglang.srt.mem_cache.common import free_swa_out_of_window_slots

        for first in range(0, tokens, CHUNK):
            free_swa_out_of_window_slots(
                self.req,
                first,
                sliding_window_size=self.before,
                page_size=self.page,
                req_to_token_pool=self.tokens,
                token_to_kv_pool_allocator=self.allocator,
                supports_prefix_sharing=False,
            )
            self.extend(first, min(first + CHUNK, tokens))

    def preallocate(self, tokens: int, prefix: int = 0) -> list[Any]:
        """The decode side's slots, beside a prefix of full layers that it has. Returns SGLang's `state_indices`."""
        from sglang.srt.disaggregation.decode import alloc_for_decode_prealloc
        from sglang.srt.mem_cache.common import kv_to_page_indices

        first = max(0, tokens - self.before) // self.page * self.page
        indices = None
        if prefix:
            self.extend(0, prefix)
            indices = self.tokens.req_to_token[self.row, :prefix].long()
            self.allocator.free_swa(indices)
        slots = alloc_for_decode_prealloc(
            self.allocator,
            req=self.req,
            fill_len=tokens,
            delta_len=tokens - prefix,
            prefix_len=prefix,
            total_prefix_len=prefix,
            prefix_indices=indices,
            uses_swa_tail=self.page > 1,
            swa_tail_len=tokens - first,
        )
        self.tokens.req_to_token[self.row, prefix:tokens] = slots.int()
        found = self.allocator.translate_swa_indices_for_transfer(self.tokens.req_to_token[self.row, first:tokens])
        return [kv_to_page_indices(found, self.page)]

    def pages(self, first: int, end: int) -> Blocks:
        found = self.tokens.req_to_token[self.row, first:end][:: self.page] // self.page
        return Blocks(0, first // self.page, tuple(found.tolist()))

    def wanted(self, state_indices: list[Any], first: int, end: int) -> tuple[Blocks, ...]:
        from sglang.srt.disaggregation.base.conn import StateType

        args = SimpleNamespace(page_size=self.page, state_types=[StateType.SWA])
        return self.pages(first, end), *wanted(args, state_indices, end)

    def offered(self, tokens: int) -> tuple[Blocks, ...]:
        return self.pages(0, tokens), *offered(self.queue, self.req, tokens)

    def buffers(self) -> list[tuple[int, str, torch.Tensor]]:
        """Every tensor as [slots, heads, bytes], by the model's number of its layer."""
        found = []
        for layer, (at, has_window) in self.pool.layers_mapping.items():
            half = self.pool.swa_kv_pool if has_window else self.pool.full_kv_pool
            for part, each in (("k", half.k_buffer), ("v", half.v_buffer)):
                found.append((layer, part, each[at].view(torch.uint8)))
        return found

    def slots(self, layer: int, first: int, end: int) -> torch.Tensor:
        """Where SGLang has tokens [first, end) of the request in this layer."""
        slots = self.tokens.req_to_token[self.row, first:end].long()
        return self.allocator.full_to_swa_index_mapping[slots] if layer in WINDOWED else slots


def truth(side: Side, tokens: int) -> Rows:
    """Rows that no two tokens, heads, parts or layers share."""
    generator = torch.Generator().manual_seed(tokens)
    return {
        (layer, part): torch.randint(0, 256, (tokens, *each.shape[1:]), dtype=torch.uint8, generator=generator)
        for layer, part, each in side.buffers()
    }


def prefilled(side: Side, tokens: int, first: int) -> Rows:
    """A computed prompt whose windows hold the tokens from `first` on. All other slots hold anything."""
    for _, _, each in side.buffers():
        each.random_(256)
    side.prefill(tokens)
    expected = truth(side, tokens)
    for layer, part, each in side.buffers():
        begin = first if layer in WINDOWED else 0
        each[side.slots(layer, begin, tokens)] = expected[layer, part][begin:]
    return expected


def engine(pool: Pool) -> AttachedEngine:
    return AttachedEngine(None, 1, pool, None, ())  # its tables need only the pool


def carry(
    sender: Held, given: Sequence[Blocks], tokens: int, receiver: Held, taken: Sequence[Blocks], first: int, end: int
) -> None:
    """As agents do: both sides' blocks are checked, one plan is made, and its rows are moved."""
    ours = extended({}, engine(sender.pool), given, 0, tokens, True)
    theirs = tables_of(engine(receiver.pool), taken, first, end)
    (takes,) = assign([sender.pool], receiver.pool)
    planned, carrier = plan(sender.pool, receiver.pool, takes, first, end, 1 << 14), OnCpu()
    check_last(planned, ours, tokens)
    for index in range(planned.chunks):
        chunk = planned.chunk(index)
        parts = Part(planned, chunk, ours, True), Part(planned, chunk, theirs, False)
        carrier.carry(sender, parts[0], receiver, parts[1], chunk.size_bytes)


def assert_came(receiver: Side, before: Rows, expected: Rows, prefix: int, tokens: int) -> None:
    """The rows are there from the prefix on, those of windows from the window on, and nothing else was written."""
    for layer, part, each in receiver.buffers():
        begin = max(0, tokens - receiver.before) if layer in WINDOWED else prefix
        wanted = before[layer, part].clone()
        wanted[receiver.slots(layer, begin, tokens)] = expected[layer, part][begin:tokens]
        end = int(receiver.slots(layer, tokens - 1, tokens)) + 1  # the rest of the last page may hold anything
        rest = slice(end, -(-end // receiver.page) * receiver.page)
        wanted[rest] = each[rest]
        assert torch.equal(each, wanted), (tokens, layer, part)


@pytest.mark.parametrize(("theirs", "ours"), [(1, 1), (16, 16), (16, 64), (64, 16), (1, 16), (16, 1)])
def test_a_window_is_carried_between_pages_of_any_size(theirs: int, ours: int) -> None:
    """It is computed in chunks and partly given up, and the decode side may have a prefix of the full layers."""
    for tokens in LENGTHS:
        sender, receiver = Side(theirs), Side(ours, is_decoder=True)
        first = max(0, tokens - BEFORE)
        expected = prefilled(sender, tokens, first)
        prefix = first // 64 * 64 if ours > 1 else 0
        state = receiver.preallocate(tokens, prefix)
        before = {(layer, part): each.random_(256).clone() for layer, part, each in receiver.buffers()}
        taken = receiver.wanted(state, prefix, tokens)
        carry(held(sender.memory), sender.offered(tokens), tokens, held(receiver.memory), taken, prefix, tokens)
        assert_came(receiver, before, expected, prefix, tokens)


BLOCK, WINDOW = 16, BEFORE  # vLLM counts the current token: SGLang has one less before it
VLLM = GroupTables((TableGroup(BLOCK, "full", 0), TableGroup(BLOCK, "sliding", WINDOW)))
SHAPE = Shape(
    layers=LAYERS,
    kinds=("full", "sliding", "sliding", "full"),
    kv_heads=2,
    value_width=4,
    window=WINDOW,
    block_tokens=BLOCK,
    blocks=64,
    model="m",
)
SAME: dict[str, Any] = {"swa_head_num": 2, "before": WINDOW - 1}


def vllm(tokens: int) -> tuple[Held, list[list[int]]]:
    """An engine with vLLM's groups, and a prompt's blocks in each. Those before the window are vLLM's null block."""
    made = build(SHAPE)
    tables = [list(range(1, -(-tokens // BLOCK) + 1)), list(range(40, 40 - -(-tokens // BLOCK), -1))]
    for entry in range(VLLM.groups[1].first(tokens) // BLOCK):
        tables[1][entry] = 0
    return made, tables


def places(table: list[int], first: int, end: int) -> np.ndarray:
    token = np.arange(first, end)
    return np.array(table)[token // BLOCK] * BLOCK + token % BLOCK


@pytest.mark.parametrize("page", [16, 64])
def test_vllm_gets_the_window_of_the_token_that_it_computes_again(page: int) -> None:
    """It wants all but the prompt's last token, so its window begins one token earlier than SGLang's next one."""
    for tokens in LENGTHS[1:]:
        sender, end = Side(page, **SAME), tokens - 1
        expected = prefilled(sender, tokens, max(0, tokens - WINDOW))
        receiver, tables = vllm(end)
        before = receiver.copy()
        carry(held(sender.memory), sender.offered(tokens), tokens, receiver, VLLM.wanted(tables, 0, end), 0, end)
        for plane in receiver.pool.planes:
            begin = max(0, tokens - WINDOW) if plane.layer in WINDOWED else 0
            found = take_rows(receiver, plane, places(tables[plane.group], begin, end))
            assert np.array_equal(found, expected[plane.layer, plane.part][begin:end].numpy()), (tokens, plane.name)
            if plane.group:
                null = np.arange(BLOCK)
                assert np.array_equal(take_rows(receiver, plane, null), take_rows(before, plane, null))


@pytest.mark.parametrize("page", [1, 16, 64])
def test_a_window_of_vllm_comes_to_pages_of_any_size(page: int) -> None:
    for tokens in LENGTHS[1:]:
        sender, tables = vllm(tokens)
        receiver = Side(page, is_decoder=True, **SAME)
        expected = truth(receiver, tokens)
        for plane in sender.pool.planes:
            begin = VLLM.groups[plane.group].first(tokens)
            put_rows(
                sender,
                plane,
                places(tables[plane.group], begin, tokens),
                expected[plane.layer, plane.part][begin:].numpy(),
            )
        given = VLLM.offered(tables, [0, 0], tokens, tokens)
        state = receiver.preallocate(tokens)
        before = {(layer, part): each.random_(256).clone() for layer, part, each in receiver.buffers()}
        carry(sender, given, tokens, held(receiver.memory), receiver.wanted(state, 0, tokens), 0, tokens)
        assert_came(receiver, before, expected, 0, tokens)


@pytest.mark.proves("G13")
@pytest.mark.parametrize("page", [1, 16, 64])
def test_what_is_offered_is_what_the_prefix_cache_holds(page: int) -> None:
    """However short of slots SGLang is, a slot that is offered is no other request's until its sender is over."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    for tokens in LENGTHS:
        side = Side(page)
        tree = cached(side, tokens)
        tree.evict_for_alloc(EvictParams(num_tokens=SLOTS, swa_num_tokens=SLOTS))
        _, window = side.offered(tokens)
        first = window.first * page
        assert first == first_held(tokens, BEFORE, page) <= max(0, tokens - BEFORE)
        mapped = side.slots(WINDOWED[0], 0, tokens)
        assert [int(each) // page for each in mapped[first::page]] == list(window.ids)
        others = side.allocator.swa_attn_allocator.alloc(side.allocator.swa_attn_allocator.available_size())
        assert not set(mapped[first:].tolist()) & set(others.tolist())
        assert tokens < 200 or not mapped[0], "nothing was given up"


def cached(side: Side, tokens: int) -> Any:
    """SGLang's prefix cache, and in it a request of the side's that has been computed in chunks."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.sampling.sampling_params import SamplingParams

    side.tokens = ReqToTokenPool(size=4, max_context_len=SLOTS, device="cpu", enable_memory_saver=False)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=side.tokens,
        token_to_kv_pool_allocator=side.allocator,
        page_size=side.page,
        sliding_window_size=BEFORE,
        tree_components=(ComponentType.FULL, ComponentType.SWA),
    )
    tree = UnifiedRadixCache(params)
    side.req = req = Req("r", "", array("q", range(tokens)), SamplingParams())
    req.full_untruncated_fill_ids = req.origin_input_ids
    side.tokens.alloc([req])
    side.row = req.kv.req_pool_idx
    for first in range(0, tokens, CHUNK):
        req.kv.kv_allocated_len = end = min(first + CHUNK, tokens)
        side.extend(first, end)
        tree.checkpoint(req, up_to=end)
    return tree


def test_each_half_is_a_group_of_its_own() -> None:
    """And every number lies where its plane says, in both."""
    for page, is_decoder in ((1, False), (16, False), (16, True)):
        side = Side(page, is_decoder)
        memory = side.memory
        said = [
            (each.kind, each.block_tokens, each.blocks, each.window, each.begins_inside) for each in memory.pool.groups
        ]
        slots = side.pool.swa_kv_pool.k_buffer[0].shape[0]
        full = side.pool.full_kv_pool.k_buffer[0].shape[0] // page
        assert said == [("full", page, full, 0, False), ("sliding", page, slots // page, BEFORE + 1, is_decoder)]
        assert {plane.layer for plane in memory.pool.planes if plane.group} == set(WINDOWED)
        records = memory.pool.model.layers
        assert [(each.kind, each.kv_heads, each.window) for each in records if each] == [
            ("full", 2, 0),
            *[("sliding", 4, BEFORE + 1)] * 2,
            ("full", 2, 0),
        ]
        for _, _, each in side.buffers():
            each.random_(256)
        for plane in memory.pool.planes:
            (each,) = [each for layer, part, each in side.buffers() if (layer, part) == (plane.layer, plane.part)]
            assert np.array_equal(take_rows(held(memory), plane, np.arange(len(each))), each.numpy())


def test_each_rank_holds_its_heads_of_each_half() -> None:
    side = Side(head_num=1, swa_head_num=2)
    side.config.get_total_num_kv_heads = lambda: 2
    side.config.hf_text_config.swa_num_key_value_heads = 4
    memory = describe(side.queue, Shard(tp_rank=1, tp_size=2), model_name="m", engine_id="e")
    found = {(plane.group, plane.first_head, plane.heads, plane.total_heads) for plane in memory.pool.planes}
    assert found == {(0, 1, 1, 2), (1, 2, 2, 4)}


def test_a_stage_knows_its_own_layers_only() -> None:
    side = Side(swa_attention_layer_ids=[2], full_attention_layer_ids=[3])
    memory = describe(side.queue, Shard(pp_rank=1, pp_size=2), model_name="m", engine_id="e")
    assert {(plane.layer, plane.group) for plane in memory.pool.planes} == {(2, 1), (3, 0)}
    assert [layer is None for layer in memory.pool.model.layers] == [True, True, False, False]


def test_heads_before_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLANG_USE_HND_KVCACHE."""
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    side = Side(is_decoder=True)
    assert side.pool.swa_kv_pool.use_hnd
    assert [(each.block_tokens, each.blocks) for each in side.memory.pool.groups] == [
        (16, SLOTS // 16 + 1),
        (16, WINDOW_SLOTS // 16 + 1),
    ]
    assert side.wanted(side.preallocate(200), 0, 200)[1].first == (200 - BEFORE) // 16


def test_chunked_attention_is_said_as_such() -> None:
    """Llama 4: SGLang keeps a chunk's length of tokens, and its layers name no window."""
    side = Side(before=-1)
    side.before = side.config.attention_chunk_size = BEFORE
    groups, layers = side.memory.pool.groups, side.memory.pool.model.layers
    assert (groups[1].kind, groups[1].window) == ("chunked", BEFORE)
    assert [(each.kind, each.window) for each in layers if each][1] == ("chunked", BEFORE)


def test_both_halves_are_found_again_in_shared_memory() -> None:
    side = Side()
    handles, fds = export_all(side.memory.storages)
    assert len(handles) == len(fds) == 2 * LAYERS
    moved(side.pool)
    for half in (side.pool.full_kv_pool, side.pool.swa_kv_pool):
        assert half.data_ptrs.tolist() == [each.data_ptr() for each in (*half.k_buffer, *half.v_buffer)]


def test_a_window_of_another_size_is_refused_by_name() -> None:
    found = verdict(Side().memory.pool, Side(before=BEFORE - 1, is_decoder=True).memory.pool)
    assert isinstance(found, Incompatible)
    assert any(each.startswith(f"window: sender {BEFORE + 1}, receiver {BEFORE} (layer 1") for each in found.reasons)


def spoiled(what: str) -> Side:
    side = Side()
    match what:
        case "swa_kv_pool is none":
            side.pool.swa_kv_pool = None
        case "swa_kv_pool is MHATokenToKVPoolOfItsOwn":
            half = side.pool.swa_kv_pool
            half.__class__ = type("MHATokenToKVPoolOfItsOwn", (type(half),), {})
        case "full_kv_pool is MHATokenToKVPool of 0 layers":
            side.pool.full_layer_nums = 0
        case "nothing maps slots to it":
            side.pool.full_to_swa_index_mapping = None
        case "a ring":
            side.pool.swa_req_ring_size = 64
        case "layers see [47, 48] tokens":
            side.attentions[1].sliding_window_size = 47
        case "SGLang keeps 40":
            side.before = 40
        case "page_size: 1":
            side = Side(1, is_decoder=True)
            side.caches_prefixes = True
        case "expected 4":
            side.config.hf_text_config.swa_num_key_value_heads = 4
            side.pool.swa_kv_pool.head_num = 3
        case _:
            raise AssertionError(what)
    return side


@pytest.mark.parametrize(
    "what",
    [
        "swa_kv_pool is none",
        "swa_kv_pool is MHATokenToKVPoolOfItsOwn",
        "full_kv_pool is MHATokenToKVPool of 0 layers",
        "nothing maps slots to it",
        "a ring",
        "layers see [47, 48] tokens",
        "SGLang keeps 40",
        "page_size: 1",
        "expected 4",
    ],
)
def test_what_cannot_be_described_is_refused_by_name(what: str) -> None:
    with pytest.raises(OperatorError) as caught:
        _ = spoiled(what).memory
    assert what in str(caught.value)


def conv_states() -> Any:
    """What SGLang makes for Inkling beside its two halves: convolution states of every layer, by request."""
    from sglang.srt.configs.inkling import InklingConvCacheParams, InklingConvStateShape
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    shape = InklingConvStateShape(conv=[(3, 16)] * 4 + [(3, 64)] * 2, temporal=(0, 0, 0))
    layers = list(range(LAYERS))
    return HybridReqToTokenPool(
        size=2,
        mamba_size=2,
        mamba_spec_state_size=2,
        max_context_len=SLOTS,
        device="cpu",
        enable_memory_saver=False,
        cache_params=InklingConvCacheParams(shape=shape, layers=layers),
        mamba_layer_ids=layers,
        enable_mamba_extra_buffer=False,
    )


def test_windows_beside_convolution_states_are_refused_by_name() -> None:
    """Inkling: its rows are carried by the two halves, and its states would be left behind."""
    side = Side()
    _ = side.memory
    side.tokens = conv_states()
    with refused(OperatorError, "cache_unsupported") as caught:
        _ = side.memory
    said = "KV pool: SWAKVPool beside HybridReqToTokenPool: kvbridge cannot carry recurrent or convolution states of"
    assert str(caught.value).startswith(said)


def test_a_token_of_the_window_without_a_slot_is_refused() -> None:
    """The padding page is nobody's: it is neither read nor written."""
    sender, receiver = Side(), Side(is_decoder=True)
    sender.prefill(200)
    state = receiver.preallocate(200)
    assert len(sender.offered(200)) == len(receiver.wanted(state, 0, 200)) == 2
    sender.allocator.clear_full_to_swa_mapping(sender.tokens.req_to_token[1, 160:176])
    state[0][1] = 0
    for names in (lambda: sender.offered(200), lambda: receiver.wanted(state, 0, 200)):
        with pytest.raises(EngineError, match=r"tokens: 160 is in the window, and has no slot in swa_kv_pool"):
            names()


def test_sglang_does_not_compare_whole_pages() -> None:
    """The page in which a window begins has rows before it, which do not travel."""
    from kvbridge.adapters.sglang.manager import KVBridgeManager

    assert not KVBridgeManager.should_verify_kv_checksum(object.__new__(KVBridgeManager), "127.0.0.1:1")


def windowed(role: str) -> tuple[Any, Side]:
    """A manager of a server whose pool has two halves."""
    from sglang.srt.disaggregation.base.conn import StateType

    made, side = manager(role), Side(is_decoder=role == "decode")
    made.queue, made.talk.memory.pool = side.queue, side.memory.pool
    made.queue.scheduler._sched_idled = False
    made.kv_args.state_types = [StateType.SWA]
    return made, side


def test_the_window_comes_with_the_last_chunk_and_a_prompt_without_it_fails() -> None:
    made, side = windowed("prefill")
    side.prefill(40)
    sends = begun(made)
    sends.send(pages(3, 4), None, 32)
    sends.send(pages(9), [], 8)
    first, last = made.talk.said
    assert [each.group for each in first.blocks] == [0]
    found = tuple(int(each) // 16 for each in side.slots(1, 0, 40)[::16])
    assert [(each.group, each.first, each.ids) for each in last.blocks] == [(0, 2, (9,)), (1, 0, found)]
    sends.abort()
    sends = begun(made)
    sends.send(pages(3, 4), None, 32)
    side.allocator.clear_full_to_swa_mapping(side.tokens.req_to_token[1, 16:32])
    sends.send(pages(9), [], 8)
    assert sends.poll() == FAILED
    raises(sends, "blocks_too_few: tokens: 16 is in the window, and has no slot in swa_kv_pool")
    assert ("withdraw", 2) in made.talk.said and not made.talk.open


def test_the_window_is_wanted_where_it_has_been_allocated_and_never_in_the_padding() -> None:
    made, side = windowed("decode")
    state = side.preallocate(40)
    takes = receiver(made)
    takes.send_metadata(pages(5, 6, 7), 1, state, 0)
    want = made.talk.said[-1]
    found = tuple(int(each) // 16 for each in side.slots(1, 0, 40)[::16])
    assert [(each.group, each.first, each.ids) for each in want.blocks] == [(0, 0, (5, 6, 7)), (1, 0, found)]
    made.talk.end("want", "gone")
    made, side = windowed("decode")
    talk, made.talk, takes = made.talk, None, receiver(made)
    takes.send_metadata(pages(5, 6, 7), 1, side.preallocate(40), 0)
    made.talk = talk
    assert takes.poll() != FAILED
    assert [each.group for each in talk.said[-1].blocks] == [0, 1], "its memory was not attached when they were given"
    made, side = windowed("decode")
    state = side.preallocate(40)
    state[0][1] = 0
    takes = receiver(made)
    takes.send_metadata(pages(5, 6, 7), 1, state, 0)
    assert takes.poll() == FAILED and not made.talk.said
    raises(takes, "blocks_too_few: tokens: 16 is in the window, and has no slot in swa_kv_pool")
