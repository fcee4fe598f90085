"""Recurrent states in SGLang: its real pools of states and of slots, without a server or a model.

The oracle is numpy's: a model's whole state, and what each rank's slot has of it by SGLang's own shapes.
"""

from __future__ import annotations

import importlib.util
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvbridge_proto.common import Blocks
from kvbridge_proto.pool import Engine, Group, Model, Shard

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not in this environment (make test-sglang)", allow_module_level=True)

from kvbridge.adapters.engine.memory import Memory
from kvbridge.adapters.engine.records import State
from kvbridge.adapters.sglang.pool import describe, moved
from kvbridge.adapters.sglang.states import copy_prefix, slot
from kvbridge.adapters.vllm.states import planes_of
from kvbridge.device.handles import export_all
from kvbridge.errors import EngineError, OperatorError
from kvbridge.exchange.block_tables import check_last, extended
from kvbridge.exchange.session import AttachedEngine
from kvbridge.geometry.check import check_pool
from kvbridge.geometry.overlap import overlaps
from kvbridge.geometry.plan import plan
from kvbridge.geometry.shard import assign
from testing.carried import OnCpu, move
from testing.oracle import take_rows
from testing.pools import Held
from testing.refusals import refused
from tests.integration.adapters.small import conv_of_rank, held, whole_state
from tests.integration.adapters.test_sglang_life import begun, manager, one_rank, pages, receiver  # noqa: F401
from tests.integration.adapters.test_sglang_pool import (  # noqa: F401
    HEADS,
    TOKENS,
    WIDTH,
    RadixAttention,
    drafting,
    on_a_cpu,
    plain,
    queue_of,
    renew,
    sparse,
)

pytestmark = pytest.mark.sglang

ROWS, SLOTS, LAYERS, LENGTH, PAGE = 3, 6, 4, 300, 16
STATES, ATTENTION = [0, 1, 3], [2]  # layers
BF16, FP32 = torch.bfloat16, torch.float32


class RadixLinearAttention(torch.nn.Module):
    """By its name, as RadixAttention."""

    def __init__(self, **said: Any) -> None:
        super().__init__()
        for name, value in said.items():
            setattr(self, name, value)


class MambaMixer2(RadixLinearAttention):
    pass


class Lfm2ShortConv(RadixLinearAttention):
    pass


class BailingMoELinearAttention(RadixLinearAttention):
    pass


@dataclass(frozen=True)
class Kind:
    """A kind of state. `conv` are its pieces: heads in all, channels of each."""

    name: str
    conv: tuple[tuple[int, int], ...]
    heads: int
    values: int
    keys: int
    rows: int = ROWS

    @property
    def state(self) -> State:
        if self.name == "mamba2":
            return State.mamba2(self.heads, self.values, self.keys, self.conv[1][0], self.rows + 1)
        if self.name == "lightning":
            return State.lightning(self.heads, self.keys)
        if self.name == "short conv":
            return State.short_conv(self.channels, self.rows + 1)
        return State.gated_delta(self.conv[0][0], self.heads, self.keys, self.values, self.rows + 1)

    @property
    def channels(self) -> int:
        return sum(heads * channels for heads, channels in self.conv)

    def shape(self, tp: int) -> Any:
        """SGLang's own of one rank, as its configurations make it.

        Those of qwen3_next.py, nemotron_h.py, kimi_linear.py, bailing_hybrid.py and lfm2.py.
        """
        from sglang.srt.configs.mamba_utils import KimiLinearStateShape, Mamba2StateShape

        if self.name == "kda":
            own = {"num_heads": self.heads, "head_dim": self.values, "conv_kernel_size": self.rows + 1}
            return KimiLinearStateShape.create(tp_world_size=tp, **own)
        if self.name in ("lightning", "short conv"):
            is_conv = self.name == "short conv"
            own = {"num_heads": tp, "head_dim": self.channels} if is_conv else {"num_heads": self.heads}
            own = {"head_dim": self.values, "conv_kernel": self.rows + 1} | own
            own |= {"intermediate_size": self.channels, "n_groups": int(is_conv), "state_size": self.keys}
            return Mamba2StateShape.create(tp_world_size=tp, **own)
        inner, groups = self.heads * self.values, self.conv[1][0]
        keys = self.conv[0][0] * self.keys
        own = {"num_heads": self.heads, "head_dim": self.values, "state_size": self.keys, "conv_kernel": self.rows + 1}
        cut = {"conv_shard_groups": [keys, keys, inner]} if self.name == "gated" else {}
        return Mamba2StateShape.create(tp_world_size=tp, intermediate_size=inner, n_groups=groups, **own, **cut)

    def module(self, tp: int) -> Any:
        """SGLang's, as far as it is asked (models/qwen3_next.py and others; layers/attention/mamba/mamba.py)."""
        if self.name == "mamba2":
            groups = self.conv[1][0]
            heads = {"num_heads": self.heads, "head_dim": self.values, "ssm_state_size": self.keys}
            return MambaMixer2(**heads, n_groups=max(groups, tp), norm=SimpleNamespace(n_groups=groups))
        if self.name == "lightning":
            return BailingMoELinearAttention(total_num_heads=self.heads, head_dim=self.keys)
        if self.name == "short conv":
            return Lfm2ShortConv(hidden_size=self.channels)
        heads = {"num_k_heads": self.conv[0][0] // tp, "num_v_heads": self.heads // tp}
        return RadixLinearAttention(layer_id=0, **heads, head_k_dim=self.keys, head_v_dim=self.values)

    def params(self, tp: int, layers: list[int], dtypes: tuple[torch.dtype, torch.dtype]) -> Any:
        from sglang.srt.configs.mamba_utils import KimiLinearCacheParams, Mamba2CacheParams, Mamba2StateDType

        made = KimiLinearCacheParams if self.name == "kda" else Mamba2CacheParams
        return made(shape=self.shape(tp), layers=layers, dtype=Mamba2StateDType(conv=dtypes[0], temporal=dtypes[1]))

    def whole(self, layer: int) -> list[torch.Tensor]:
        """The model's: each piece [heads, channels, rows], then [heads, values, keys]."""
        sizes = [(heads, channels, self.rows) for heads, channels in self.conv]
        return whole_state([*sizes, (self.heads, self.values, self.keys)], layer)

    def rank(self, layer: int, tp: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a rank has of it: the convolution [channels, rows] and the state proper."""
        *pieces, state = self.whole(layer)
        share = self.heads // tp
        return torch.cat([torch.empty(0, self.rows), *conv_of_rank(pieces, tp, rank)]), state[
            rank * share : (rank + 1) * share
        ]


KINDS = {
    "gated": Kind("gated", ((4, 5), (4, 5), (8, 3)), 8, 3, 5),
    "groups": Kind("mamba2", ((8, 3), (4, 6), (4, 6)), 8, 3, 6),
    "one group": Kind("mamba2", ((8, 3), (1, 6), (1, 6)), 8, 3, 6),
    "kda": Kind("kda", ((8, 5), (8, 5), (8, 5)), 8, 5, 5),
    "lightning": Kind("lightning", (), 8, 5, 5, 0),
    "short conv": Kind("short conv", ((8, 3),), 0, 0, 0, 2),
}


class Side:
    """A rank's pools, and as much of a scheduler as the adapter takes."""

    def __init__(
        self,
        kind: str | Kind = "gated",
        tp: int = 1,
        rank: int = 0,
        dtypes: tuple[torch.dtype, torch.dtype] = (BF16, FP32),
        *,
        layers: tuple[list[int], list[int]] = (STATES, ATTENTION),
        attention: dict[str, Any] | None = None,
        drafts: int = 0,
        **more: Any,
    ) -> None:
        """With `drafts` tokens in a step, the model's own module drafts (MTP)."""
        from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool

        self.kind, self.tp, self.rank = KINDS[kind] if isinstance(kind, str) else kind, tp, rank
        self.drafts = drafts
        own = {"size": 4, "mamba_size": SLOTS, "mamba_spec_state_size": 4, "max_context_len": LENGTH}
        own |= {"device": "cpu", "enable_memory_saver": False, "enable_mamba_extra_buffer": False}
        own |= {"speculative_num_draft_tokens": drafts or None, "speculative_eagle_topk": 1 if drafts else None}
        params = self.kind.params(tp, layers[0], dtypes)
        self.places = HybridReqToTokenPool(**own | more, cache_params=params, mamba_layer_ids=layers[0])
        size = {"size": TOKENS, "dtype": BF16, "page_size": PAGE, "head_num": HEADS // tp, "head_dim": WIDTH}
        size |= {"full_attention_layer_ids": layers[1], "device": "cpu"} | (attention or {})
        self.pool = HybridLinearKVPool(**size, mamba_pool=self.places.mamba_pool)
        self.queue = queue_of(self.pool, heads=size["head_num"] * tp, layers=len({*layers[0], *layers[1]}))
        self.queue.scheduler.req_to_token_pool = self.places
        modules = [*map(RadixAttention, layers[1]), *(self.kind.module(tp) for _ in layers[0])]
        self.queue.scheduler.tp_worker.model_runner.model = torch.nn.ModuleList(modules)
        if drafts:  # as `_build_hybrid_linear_kv_pool` makes it: with the model's own states, which it does not use
            self.draft = HybridLinearKVPool(
                **size | {"full_attention_layer_ids": [0]}, mamba_pool=self.places.mamba_pool
            )
            drafting(self.queue, self.draft, heads=size["head_num"] * tp, path="", algorithm="NEXTN")

    @property
    def cache(self) -> Any:
        return self.places.mamba_pool.mamba_cache

    @property
    def memory(self) -> Memory:
        shard = Shard(tp_rank=self.rank, tp_size=self.tp)
        memory = describe(self.queue, shard, model_name="m", engine_id=f"{self.tp}")
        assert check_pool(memory.pool) == () == overlaps(memory.pool)
        return memory

    def put(self, number: int) -> None:
        """Write the state of this rank's layers into a slot, as SGLang's layers see it."""
        for place, layer in enumerate(STATES):
            conv, own = self.kind.rank(layer, self.tp, self.rank)
            if self.kind.conv:
                self.cache.conv[0][place, number] = conv.T if self.kind.name == "kda" else conv
            if self.kind.heads:
                self.cache.temporal[place, number] = own

    def buffers(self) -> list[torch.Tensor]:
        attention = self.pool.full_kv_pool
        rows = [*attention.kv_buffer] if self.pool.use_mla else [*attention.k_buffer, *attention.v_buffer]
        pool = self.places.mamba_pool
        scratch = [*pool._intermediate_conv_window_phys, self.cache.intermediate_ssm] if self.drafts else []
        return [*self.cache.conv, self.cache.temporal, *rows, *scratch]

    def copy(self) -> list[torch.Tensor]:
        return [each.clone() for each in self.buffers()]

    def fill(self) -> None:
        """All memory with bytes that are no state of ours."""
        for each in self.buffers():
            each.view(torch.uint8).fill_(0xEE)


LATENT = {"use_mla": True, "kv_lora_rank": 12, "qk_rope_head_dim": 4}
TPS = (1, 2, 4)
DTYPES = [(BF16, FP32), (BF16, BF16), (FP32, FP32)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_gets_its_heads_of_every_piece_and_no_other_byte(kind: str) -> None:
    """A slot is written whole, so what an earlier request has left in it does not matter."""
    for (ours, theirs), dtypes in product(product(TPS, TPS), [(DTYPES[0], DTYPES[0]), (DTYPES[0], DTYPES[1])]):
        senders = [Side(kind, ours, rank, dtypes[0]) for rank in range(ours)]
        for sender in senders:
            sender.fill()
            sender.put(1)
        for rank in range(theirs):
            side = Side(kind, theirs, rank, dtypes[1])
            side.fill()
            before, expected = side.copy(), Side(kind, theirs, rank, dtypes[1])
            expected.put(3)
            carry(senders, 1, side, 3)
            for found, was, whole in zip(side.buffers()[:2], before, expected.buffers(), strict=False):
                was[:, 3] = whole[:, 3]
                assert torch.equal(found.view(torch.uint8), was.view(torch.uint8)), (ours, theirs, rank, dtypes)


def carry(senders: Sequence[Side], given: int, side: Side, taken: int) -> None:
    """A prompt's state, without rows of attention: agents take those too, from pages that the slots do not decide."""
    memories = [states_only(held(sender.memory)) for sender in senders]
    move(memories, [given], states_only(held(side.memory)), [taken], range(0, 200), 1 << 10, OnCpu())


def states_only(whole: Held) -> Held:
    pool = whole.pool
    planes = tuple(
        msgspec_replaced(plane, group=0) for plane in pool.planes if pool.groups[plane.group].kind == "state"
    )
    layers = tuple(layer if layer and layer.kind == "state" else None for layer in pool.model.layers)
    (group,) = [group for group in pool.groups if group.kind == "state"]
    model = msgspec_replaced(pool.model, layers=layers)
    return Held(msgspec_replaced(pool, planes=planes, groups=(group,), model=model), whole.memory)


def msgspec_replaced(struct: Any, **more: Any) -> Any:
    from msgspec.structs import replace

    return replace(struct, **more)


@pytest.mark.parametrize(("kind", "is_turned"), [*((kind, False) for kind in KINDS), ("gated", True)])
@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_a_state_goes_to_a_vllm_engine_and_back(kind: str, is_turned: bool, layout: str) -> None:
    """Whose pages have the state in bf16, the convolution in one of two orders, and on a CPU keys before values."""
    one = KINDS[kind]
    for ours, theirs in ((1, 1), (1, 2), (2, 1), (4, 2)):
        senders = [Side(kind, ours, rank) for rank in range(ours)]
        for sender in senders:
            sender.put(2)
        pages = [vllm(one, theirs, rank, layout, is_turned) for rank in range(theirs)]
        for page in pages:
            move([states_only(held(each.memory)) for each in senders], [2], page, [1], range(0, 200), 1 << 10, OnCpu())
        for rank, page in enumerate(pages):
            blocks = page.memory[0].reshape(SLOTS, -1)
            assert (blocks[[0, *range(2, SLOTS)]] == 0xEE).all()
            assert bytes(blocks[1]) == vllm_bytes(one, theirs, rank, layout, is_turned)
        for rank in range(ours):
            side, expected = Side(kind, ours, rank), Side(kind, ours, rank)
            expected.put(4)
            move(pages, [1], states_only(held(side.memory)), [4], range(0, 200), 1 << 10, OnCpu())
            for found, whole in zip(side.buffers()[:2], expected.buffers(), strict=False):
                assert torch.equal(found, whole)


def vllm(kind: Kind, tp: int, rank: int, layout: str, is_turned: bool) -> Held:
    """A rank of vLLM's that keeps layer by layer what a slot keeps, in a page for each layer."""
    conv, own = kind.rank(0, tp, rank)
    size = (conv.numel() + own.numel()) * 2
    pages = torch.full((SLOTS, len(STATES) * size), 0xEE, dtype=torch.uint8).view(torch.int8)
    shapes = [tuple(each.shape) for each in (conv.T if layout == "SD" else conv, own) if each.numel()]
    spec = SimpleNamespace(shapes=shapes, dtypes=[BF16] * len(shapes))
    planes, state = [], replace(kind.state, is_turned=is_turned)
    for place, layer in enumerate(STATES):
        page = pages[:, place * size : (place + 1) * size].unsqueeze(1).unsqueeze(1)
        planes += [(page, plane) for plane in planes_of("l", page, spec, state, (layer, 0), SLOTS, (rank, tp))]
    layers = tuple(kind.state.record if layer in STATES else None for layer in range(LAYERS))
    memory = Memory.of(
        Engine(kind="vllm", version="", id=f"v{tp}"),
        Model(name="m", layers=layers, depth=LAYERS),
        Shard(tp_rank=rank, tp_size=tp),
        (Group(kind="state", block_tokens=1 << 12, blocks=SLOTS),),
        planes,
    )
    assert check_pool(memory.pool) == ()
    return held(memory)


def vllm_bytes(kind: Kind, tp: int, rank: int, layout: str, is_turned: bool) -> bytes:
    parts = []
    for layer in STATES:
        conv, own = kind.rank(layer, tp, rank)
        parts += [conv.T if layout == "SD" else conv, own.transpose(1, 2) if is_turned else own]
    return b"".join(part.to(BF16).contiguous().view(torch.int16).numpy().tobytes() for part in parts)


def test_sglangs_own_transfer_mixes_the_pieces_of_mamba_2() -> None:
    """Ranks of which each has x|B|C: it lays them side by side as if they were one piece (0.5.23)."""
    from sglang.srt.disaggregation.utils import compute_mamba_state_slice_blocks as own

    kind = KINDS["groups"]
    ranks = [kind.rank(0, 2, rank)[0] for rank in range(2)]
    size, whole = len(ranks[0]), torch.zeros(2 * len(ranks[0]), ROWS)
    for rank, conv in enumerate(ranks):
        for first, at, count in own(size, 2 * size, 2, 1, 0, rank):
            whole[at : at + count] = conv[first : first + count]
    assert not torch.equal(whole, kind.rank(0, 1, 0)[0])


@pytest.mark.parametrize("latent", [False, True], ids=["k and v", "latents"])
def test_attention_and_states_are_groups_of_one_pool(latent: bool) -> None:
    """A request's slot is one entry, however long it is. Tensors that move into shared memory stay the engine's."""
    side = Side("kda" if latent else "gated", attention=LATENT if latent else None)
    side.put(1)
    memory = side.memory
    rows, states = memory.pool.groups
    assert (rows.kind, rows.block_tokens, rows.blocks) == ("full", PAGE, TOKENS // PAGE + 1)
    assert (states.kind, states.block_tokens, states.blocks) == ("state", LENGTH, SLOTS + 1)
    assert {plane.layer for plane in memory.pool.planes if plane.group} == set(STATES)
    assert {plane.layer for plane in memory.pool.planes if not plane.group} == set(ATTENTION)
    kinds = [layer.kind for layer in memory.pool.model.layers if layer]
    assert kinds == ["state", "state", "mla" if latent else "full", "state"]
    before = side.copy()
    export_all(memory.storages)
    moved(side.pool)
    assert all(torch.equal(ours, was) for ours, was in zip(side.buffers(), before, strict=True))


def test_a_state_is_only_that_of_all_tokens_of_the_offer() -> None:
    """vLLM wants it without the prompt's last token. It gets none, and says why."""
    pool, tokens = Side().memory.pool, 200
    blocks = (Blocks(0, 0, tuple(range(13))[:4]), Blocks(1, 0, (1,)))
    (takes,) = assign([pool], pool)
    tables = extended({}, AttachedEngine(None, 1, pool, None, ()), blocks, 0, 64, True)
    check_last(plan(pool, pool, takes, 0, 64, 1 << 14), tables, 64)
    with refused(EngineError, "state_moved_on", "wanted 63, offered 64"):
        check_last(plan(pool, pool, takes, 0, 63, 1 << 14), tables, 64)
    assert tokens


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda side: setattr(side.places.mamba_pool, "enable_linear_replayssm", True), "in a ring; needs a"),
        (
            lambda side: setattr(side.places.mamba_pool, "enable_linear_replayssm_spec", True),
            "states whose last tokens are in a ring; needs a server without --enable-linear-replayssm",
        ),
        (lambda side: setattr(side.places.mamba_pool, "_slot_siblings", [1]), "with int: .+ states of this kind yet"),
        (lambda side: renew(side.places.mamba_pool), "with MambaPoolOfItsOwn: .+ states of this kind yet"),
        (lambda side: setattr(side.queue.scheduler, "enable_decode_hicache", True), "hierarchical-.+ this kind"),
        (lambda side: setattr(side.places, "mamba_pool", object()), "HybridLinearKVPool beside Hybrid.+ this kind yet"),
        (lambda side: setattr(side.queue.scheduler.tp_worker.model_runner, "model", torch.nn.ModuleList()), "not know"),
        (lambda side: side.cache.conv.append(side.cache.conv[0]), "of RadixLinearAttention: .+ this kind yet"),
        (lambda side: setattr(side.pool, "full_kv_pool", sparse()), "HybridLinearKVPool of DSATok.+, must be of MHATo"),
    ],
)
def test_other_states_are_refused_by_name(change: Any, text: str) -> None:
    side = Side()
    change(side)
    with refused(OperatorError, "cache_unsupported", text):
        describe(side.queue, Shard(), model_name="m", engine_id="e")


def test_states_without_an_attention_layer_are_refused_by_name() -> None:
    side = Side(layers=(STATES, []))
    with refused(OperatorError, "cache_unsupported", "states alone, must have an attention .+; fewer pipeline stages"):
        describe(side.queue, Shard(), model_name="m", engine_id="e")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda side: setattr(side.draft, "mamba_pool", Side().places.mamba_pool), "a MambaPool of its own"),
        (lambda side: module_of(side).append(KINDS["gated"].module(1)), "RadixLinearAttention"),
        (lambda side: module_of(side).append(KINDS["groups"].module(1)), "MambaMixer2"),
    ],
)
def test_a_draft_model_with_states_of_its_own_is_refused_by_name(change: Any, what: str) -> None:
    side = Side(drafts=2)
    change(side)
    with refused(OperatorError, "cache_unsupported", f"draft model of {what}: .+ beside drafts yet; needs a server"):
        describe(side.queue, Shard(), model_name="m", engine_id="e")


def module_of(side: Side) -> Any:
    (runner,) = side.queue.scheduler.draft_worker._draft_model_runners()
    return runner.model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ours", "theirs"), [(2, 4), (4, 2), (0, 3), (3, 0)])
def test_a_slot_is_what_it_is_whatever_either_side_drafts(kind: str, ours: int, theirs: int) -> None:
    """Rows of the draft come with it, or are zeros. States of drafted tokens are nobody else's."""
    latent = LATENT if kind == "kda" else None
    for tp, ranks in ((1, 1), (2, 1), (1, 2)):
        senders = [Side(kind, tp, rank, drafts=ours, attention=latent) for rank in range(tp)]
        for sender in senders:
            torch.manual_seed(5)
            for each in [each for each in sender.buffers() if each.dtype == BF16]:
                each.normal_()
            sender.put(1)
        for rank in range(ranks):
            side = Side(kind, ranks, rank, drafts=theirs, attention=latent)
            side.fill()
            before, expected = side.copy(), Side(kind, ranks, rank)
            expected.put(3)
            carry(senders, 1, side, 3)
            for found, was, whole in zip(side.buffers()[:2], before, expected.buffers(), strict=False):
                was[:, 3] = whole[:, 3]
                assert torch.equal(found.view(torch.uint8), was.view(torch.uint8)), (tp, ranks, rank)
            for found, was in zip(side.buffers()[2:], before[2:], strict=True):
                assert torch.equal(found.view(torch.uint8), was.view(torch.uint8)), "rows, or what is drafted"


@pytest.mark.parametrize("latent", [False, True], ids=["k and v", "latents"])
def test_the_draft_s_rows_are_in_the_group_of_attention(latent: bool) -> None:
    side = Side("kda" if latent else "gated", attention=LATENT if latent else None, drafts=2)
    pool = side.memory.pool
    assert (pool.model.depth, pool.model.drafts, pool.model.draft) == (LAYERS, (LAYERS,), "m")
    assert [group.kind for group in pool.groups] == ["full", "state"]
    rows = {plane.layer: plane for plane in pool.planes if not plane.group}
    assert rows.keys() == {*ATTENTION, LAYERS}
    for (layer,), own in ((ATTENTION, side.pool), ([LAYERS], side.draft)):
        buffers = own.full_kv_pool.kv_buffer if latent else [*own.full_kv_pool.k_buffer, *own.full_kv_pool.v_buffer]
        planes = [plane for plane in pool.planes if plane.layer == layer]
        for plane, buffer in zip(planes, buffers, strict=True):
            buffer.view(torch.uint8).random_(256)
            found = take_rows(held(side.memory), plane, np.arange(len(buffer)))
            assert np.array_equal(found, buffer.view(torch.uint8).numpy())
    before = side.copy()
    export_all(side.memory.storages)
    for each in (side.pool, side.draft):
        moved(each)
        own = each.full_kv_pool
        buffers = own.kv_buffer if latent else [*own.k_buffer, *own.v_buffer]
        assert own.data_ptrs.tolist() == [buffer.data_ptr() for buffer in buffers]
    for ours, was in zip(side.buffers(), before, strict=True):
        assert torch.equal(ours.view(torch.uint8), was.view(torch.uint8))


def test_a_draft_comes_after_states_that_are_beside_attention_in_one_layer() -> None:
    """Falcon-H1, with a draft model of another kind: no two layers have one number."""
    side = Side("groups", layers=([0, 1, 2, 3], [0, 1, 2, 3]))
    drafting(side.queue, plain(layer_num=1))
    model = side.memory.pool.model
    assert (model.depth, model.drafts) == (4, (8,))
    assert [layer.kind for layer in model.layers if layer] == ["full"] * 4 + ["state"] * 4 + ["full"]


@pytest.mark.parametrize("more", [{"dtypes": (torch.float8_e4m3fn, FP32)}, {"kind": "groups"}])
def test_a_slot_of_another_shape_or_dtype_is_refused(more: dict[str, Any]) -> None:
    side = Side(**more)
    side.queue.scheduler.tp_worker.model_runner.model = torch.nn.ModuleList([KINDS["one group"].module(1)])
    with refused(OperatorError, "shape_unknown", r"KV pool: states \[\(\d+, 3\), \(8, 3, \d\)\] of .+ expected \[\("):
        describe(side.queue, Shard(), model_name="m", engine_id="e")


# Which slot is offered and wanted, and when:


def told_slot(of: Any, number: int) -> list[Any]:
    """What SGLang passes beside the pages of a last chunk, and of what comes."""
    from sglang.srt.disaggregation.base.conn import StateType

    of.kv_args.state_types = [StateType.MAMBA]
    return [[np.array(number, np.int32)]]


def test_the_last_chunk_offers_the_slot_and_no_other_does() -> None:
    prefill = manager("prefill")
    state = told_slot(prefill, 5)
    made = begun(prefill)
    made.send(pages(3, 4), None, 32)
    made.send(pages(9), state, 8)
    first, last = prefill.talk.said
    assert first.blocks == (Blocks(0, 0, (3, 4)),)
    assert last.blocks == (Blocks(0, 2, (9,)), Blocks(1, 0, (5,)))


def test_the_decode_side_wants_the_slot_even_if_it_has_most_of_the_prompt() -> None:
    decode = manager("decode")
    state = told_slot(decode, 5)
    made = receiver(decode)
    made.send_metadata(pages(3), 0, state, decode_prefix_len=32)
    (want,) = decode.talk.said
    assert (want.first_token, want.end_token) == (32, 72)
    assert want.blocks == (Blocks(0, 2, (3,)), Blocks(1, 0, (5,)))


def test_who_has_no_states_tells_no_slot() -> None:
    args = SimpleNamespace(state_types=[])
    assert slot(args, [[np.array(1)]]) == () == slot(SimpleNamespace(state_types=["mamba"]), None)


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("has_states", [True, False])
def test_a_prompt_whose_state_vllm_fetches_is_computed_without_its_last_token(tokens: int, has_states: bool) -> None:
    """vLLM computes that token itself, from the state before it. Both name the whole prompt."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    from kvbridge.adapters.sglang.sender import KVBridgeSender

    prefill = manager("prefill")
    prefill.digest = lambda req: f"digest of {len(req.origin_input_ids)}"
    prefill.queue.token_to_kv_pool = Side().pool if has_states else None
    req = Req("r", "", array("q", range(tokens)), SamplingParams(custom_params={"kvbridge": {"fetched_by": "vllm"}}))
    req.logprob_start_len = tokens
    made = KVBridgeSender(prefill, "10.0.0.1:8998", 7)
    made.bind(req)
    computed = max(1, tokens - has_states)
    assert list(req.origin_input_ids) == list(range(computed)) and req.logprob_start_len == computed
    req.init_next_round_input(None)
    assert list(req.full_untruncated_fill_ids) == list(range(computed))
    assert made.pop_decode_prefix_len() == 0
    made.init(-(-computed // PAGE), 1)
    made.send(pages(*range(1, -(-computed // PAGE) + 1)), told_slot(prefill, 5), computed)
    (offer,) = prefill.talk.said
    assert (offer.tokens, offer.rendezvous) == (computed, f"room/7/digest of {tokens}")


def request(side: Side, tokens: int = 40) -> Any:
    """SGLang's, with slots of its own."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    req = Req("r", "", array("q", range(tokens)), SamplingParams())
    req.full_untruncated_fill_ids = req.origin_input_ids
    side.places.alloc([req])
    return req


class Streams(list[str]):
    """SGLang's two. What is told to them, in order."""

    def wait_stream(self, other: Any) -> None:
        assert other == "forward"
        self.append("the steps under way are over")


def matched(side: Side, is_overlapping: bool = False) -> tuple[Any, Streams]:
    """A request of which the decode side's prefix cache has all."""
    streams = Streams()
    told = {"enable_overlap": is_overlapping, "schedule_stream": streams, "forward_stream": "forward"}
    vars(side.queue.scheduler).update(told)
    return request(side), streams


@pytest.mark.parametrize("is_overlapping", [False, True])
@pytest.mark.parametrize("is_packed", [False, True], ids=["slots", "int8 checkpoints"])
def test_a_prompt_that_the_decode_sides_cache_has_whole_gets_the_caches_state(
    is_overlapping: bool, is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang copies it in the first step that computes rows of the prompt, and there is none.

    The slot may have been another request's, for which a step is still under way (`resume_retracted_reqs`).
    """
    from sglang.srt.mem_cache.mamba_checkpoint_pool import MambaCheckpointPool

    side = Side()
    req, streams = matched(side, is_overlapping)
    ours = int(req.kv.mamba_pool_idx)
    source = kept = side.places.mamba_allocator.alloc(1)
    side.put(int(source))
    to, states = side.places, side.places.mamba_pool
    if is_packed:
        heads, values, keys = side.cache.temporal.shape[2:]
        packed = MambaCheckpointPool(
            num_layers=len(STATES),
            num_slots=4,
            num_heads=heads,
            head_v_dim=values,
            head_k_dim=keys,
            conv_shapes=[tuple(side.cache.conv[0].shape[2:])],
            conv_dtype=BF16,
            temporal_dtype=FP32,
            device="cpu",
        )
        kept = packed.alloc(3)[-1:]
        packed.store_from_active(states, source, kept)
        side.places.mamba_ckpt_pool, to = packed, packed
    name = "load_to_active" if is_packed else "copy_mamba_state"
    copy = getattr(to, name)
    monkeypatch.setattr(to, name, lambda *given: (streams.append("copied"), copy(*given)))
    req.kv.mamba_cow_src_index = kept
    assert copy_prefix(side.queue, req) == ""
    assert streams == [*["the steps under way are over"] * is_overlapping, "copied"]
    assert side.cache.conv[0][:, ours].any() and torch.equal(*(side.cache.conv[0][:, i] for i in (ours, int(source))))
    ours_now, theirs = (side.cache.temporal[:, i] for i in (ours, int(source)))
    assert theirs.any() and torch.allclose(ours_now, theirs, atol=float(theirs.max()) / 100 if is_packed else 0, rtol=0)
    assert req.kv.mamba_cow_src_index is None


def test_a_prompt_whose_rows_the_decode_side_has_but_no_state_fails() -> None:
    side = Side()
    req, streams = matched(side, True)
    assert "no state" in copy_prefix(side.queue, req) and not streams
    decode = manager("decode")
    decode.queue, decode.digest = side.queue, lambda req: "ab"
    made = receiver(decode)  # it has most of another prompt
    made.bind(req, 0)
    assert "no state" in decode.failure_records[made.bootstrap_room]
    side.queue.token_to_kv_pool = None
    assert copy_prefix(side.queue, req) == "", "this model has none"


@pytest.mark.proves("G13")
@pytest.mark.parametrize("buffers", [False, True], ids=["no_buffer", "extra_buffer"])
def test_an_offered_slot_is_nobody_elses_and_is_not_written_until_its_sender_is_over(
    buffers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own prefix cache takes a copy of the state when the prompt is computed, and the slot when it is over."""
    from sglang.srt.arg_groups import overrides
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    monkeypatch.setattr(overrides, "mamba_cache_chunk_size", lambda args: 1)  # it asks for a model's configuration
    side = Side(mamba_size=12, enable_mamba_extra_buffer=buffers)
    allocator = TokenToKVPoolAllocator(TOKENS, BF16, "cpu", side.pool, False)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=side.places,
        token_to_kv_pool_allocator=allocator,
        page_size=1,
        enable_mamba_extra_buffer=buffers,
        tree_components=(ComponentType.FULL, ComponentType.MAMBA),
    )
    tree = UnifiedRadixCache(params)
    req = request(side)
    side.places.req_to_token[req.kv.req_pool_idx, :40] = allocator.alloc(40).int()
    req.kv.kv_allocated_len = 40
    if buffers:  # as the forward leaves it: a copy of the state after 40 tokens is in the first of its buffers
        req.kv.mamba_last_track_seqlen, req.kv.mamba_last_track_idx = 40, 0
    offered = int(side.places.req_index_to_mamba_index_mapping[req.kv.req_pool_idx])
    side.put(offered)
    before = [each[:, offered].clone() for each in (side.cache.conv[0], side.cache.temporal)]
    tree.checkpoint(req, up_to=40)
    assert tree.mamba_evictable_size() + tree.mamba_protected_size() == 1, "the cache has no state of it"
    assert int(side.places.req_index_to_mamba_index_mapping[req.kv.req_pool_idx]) == offered
    tree.evict_for_alloc(EvictParams(num_tokens=TOKENS, mamba_num=12))
    others = side.places.mamba_allocator.alloc(side.places.mamba_allocator.available_size())
    assert len(others) and offered not in others.tolist()
    side.places.mamba_pool.clear_slots(others)
    for each, was in zip((side.cache.conv[0], side.cache.temporal), before, strict=True):
        assert was.any() and torch.equal(each[:, offered], was)
