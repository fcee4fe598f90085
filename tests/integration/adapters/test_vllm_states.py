"""Recurrent states: where their parts lie, for any number of ranks, and which blocks are offered and wanted when.

The oracle is numpy's: a model's whole state, and what vLLM's own layers give each rank of it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch
from kvbridge_proto.engine import Computed, Offer, Released, Want, Withdraw
from kvbridge_proto.pool import Engine, Group, Model, Shard
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.model_executor.layers.mamba import mamba_mixer, mamba_mixer2, mamba_utils, short_conv
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.linear.base import LinearAttention
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.linear_attn import BailingLinearAttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as MambaKind
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiSparseHotSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvbridge.adapters.engine.memory import Memory
from kvbridge.adapters.engine.records import WHOLE, State
from kvbridge.adapters.vllm import layers
from kvbridge.adapters.vllm.states import planes_of, state_of
from kvbridge.adapters.vllm.versions import check_groups, takes_first_token_for_decode
from kvbridge.errors import OperatorError
from kvbridge.geometry.check import check_pool
from kvbridge.geometry.overlap import overlaps
from testing.carried import OnCpu, move
from testing.pools import Held
from testing.refusals import refused
from tests.integration.adapters.small import conv_of_rank, held, whole_state
from tests.integration.adapters.test_vllm_decode_side import done, told_of_an_offer
from tests.integration.adapters.world import BLOCK, World

pytestmark = pytest.mark.vllm

BLOCKS, ROWS, PADDING, LENGTH = 5, 3, 40, 1 << 12
NAME = "model.layers.0.mixer"


@dataclass(frozen=True)
class Kind:
    """A kind of state. `conv` are its pieces: heads in all, channels of each. Channels without heads count as heads."""

    backend: str
    layer: Any  # vLLM's own class
    conv: tuple[tuple[int, int], ...]
    heads: int = 0
    values: int = 0
    keys: int = 0

    def fields(self, tp: int, more: int) -> dict[str, Any]:
        """What vLLM's layer has of it, by its own names."""
        match self.backend:
            case "GDN_ATTN" if self.layer is QwenGatedDeltaNetAttention:
                named = {"num_k_heads": self.conv[0][0], "num_v_heads": self.heads, "conv_kernel_size": ROWS + 1}
                named |= {"head_k_dim": self.keys, "head_v_dim": self.values}
            case "GDN_ATTN" | "LINEAR_ATTN":
                named = {"num_heads": self.heads, "head_dim": self.keys, "conv_size": ROWS + 1}
            case "MAMBA2_ATTN":
                groups = self.conv[1][0]
                named = {"num_heads": self.heads, "head_dim": self.values, "ssm_state_size": self.keys}
                named |= {"intermediate_size": self.heads * self.values, "conv_kernel_size": ROWS + 1}
                named |= {"n_groups": max(groups, tp), "norm": SimpleNamespace(n_groups=groups), "use_replayssm": False}
            case "MAMBA1_ATTN":
                named = {"intermediate_size": self.heads, "ssm_state_size": self.keys, "conv_kernel_size": ROWS + 1}
            case _:
                named = {"conv_dim": self.conv[0][0], "L_cache": ROWS + 1}
        return named | {"tp_size": tp, "num_spec": more}

    def of(self, tp: int, more: int, monkeypatch: pytest.MonkeyPatch) -> Any:
        """vLLM's layer on one of so many ranks, as far as it is asked."""
        layer = self.layer.__new__(self.layer)
        torch.nn.Module.__init__(layer)
        for name, value in self.fields(tp, more).items():
            object.__setattr__(layer, name, value)
        for module in (mamba_mixer, mamba_mixer2, short_conv):
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: tp)
        return layer


KINDS = {
    "gated": Kind("GDN_ATTN", QwenGatedDeltaNetAttention, ((4, 5), (4, 5), (8, 3)), 8, 3, 5),
    "kda": Kind("GDN_ATTN", KimiGatedDeltaNetAttention, ((4, 6), (4, 6), (4, 6)), 4, 6, 6),
    "groups": Kind("MAMBA2_ATTN", MambaMixer2, ((8, 3), (4, 6), (4, 6)), 8, 3, 6),
    "one group": Kind("MAMBA2_ATTN", MambaMixer2, ((8, 3), (1, 6), (1, 6)), 8, 3, 6),
    "mamba 1": Kind("MAMBA1_ATTN", MambaMixer, ((24, 1),), 24, 1, 6),
    "convolution": Kind("SHORT_CONV_ATTN", ShortConv, ((24, 1),)),
    "lightning": Kind("LINEAR_ATTN", LinearAttention, (), 4, 5, 5),
}
WITHOUT_DRAFT_ROWS = ("MAMBA1_ATTN",)


@dataclass(frozen=True)
class Side:
    tp: int
    layout: str = "SD"
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.bfloat16, torch.float32)
    more: int = 0  # rows of the convolution, for drafts

    def whole(self, kind: Kind) -> list[torch.Tensor]:
        """The model's: each piece [heads, channels, rows], then [heads, values, keys]."""
        sizes = [(heads, channels, ROWS) for heads, channels in kind.conv]
        return whole_state([*sizes, (kind.heads, kind.values, kind.keys)] if kind.heads else sizes)

    def rank(self, kind: Kind, rank: int, fill: int) -> torch.Tensor:
        """One block's bytes of a rank as vLLM packs them; what a prompt does not leave is `fill`."""
        whole, found = self.whole(kind), []
        if own := conv_of_rank(whole[: len(kind.conv)], self.tp, rank):
            conv = torch.cat(own).to(self.dtypes[0])  # [channels, rows]
            rows = ROWS + (0 if kind.backend in WITHOUT_DRAFT_ROWS else self.more)
            kept = torch.full((len(conv), rows), fill, dtype=torch.uint8).repeat_interleave(2, 1)
            kept[:, : 2 * ROWS] = conv.view(torch.uint8)
            found.append(kept.view(len(conv), -1, 2).transpose(0, 1) if self.layout == "SD" else kept)
        for state in whole[len(kind.conv) :]:
            share = kind.heads // self.tp
            mine = state[rank * share : (rank + 1) * share].to(self.dtypes[1]).contiguous()
            if kind.layer is QwenGatedDeltaNetAttention:  # on a CPU
                mine = mine.transpose(1, 2).contiguous()
            found.append(mine.view(torch.uint8))
        return torch.cat([each.reshape(-1) for each in found])


def described(kind: Kind, side: Side, rank: int, monkeypatch: pytest.MonkeyPatch) -> Held:
    """A rank's pool and its memory: the state is in block `BLOCKS - 1`, everything else 0xEE."""
    monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: side.layout == "DS")
    layer = kind.of(side.tp, side.more, monkeypatch)
    shapes = tuple(layer.get_state_shape())
    dtypes = (side.dtypes[0],) * bool(kind.conv) + (side.dtypes[1],) * bool(kind.heads)
    spec = MambaSpec(block_size=LENGTH, shapes=shapes, dtypes=dtypes)
    size = spec.page_size_bytes
    pages = torch.full((BLOCKS, size + PADDING), 0xEE, dtype=torch.uint8)
    page = pages.view(torch.int8)[:, :size].unsqueeze(1).unsqueeze(1)
    state = state_of(NAME, spec, layer)
    planes = planes_of(NAME, page, spec, state, (0, 0), BLOCKS, (rank, side.tp))
    memory = Memory.of(
        Engine(kind="vllm", version="", id=f"{side.tp}"),
        Model(name="m", layers=(state.record,)),
        Shard(tp_rank=rank, tp_size=side.tp),
        (Group(kind="state", block_tokens=LENGTH, blocks=BLOCKS),),
        [(page, plane) for plane in planes],
    )
    assert check_pool(memory.pool) == () == overlaps(memory.pool)
    return held(memory)


DTYPES = (torch.bfloat16, torch.float32)
SIDES = [
    *(Side(tp, layout) for tp, layout in product((1, 2, 4), ("SD", "DS"))),
    Side(1, "DS", more=2),
    Side(2, "SD", more=1),
    Side(2, "SD", (torch.bfloat16, torch.bfloat16)),
    Side(1, "DS", (torch.float16, torch.float32)),
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_gets_its_heads_of_every_piece_and_no_other_byte(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = KINDS[kind]
    for ours, theirs in product(SIDES, SIDES):
        senders = [described(one, ours, rank, monkeypatch) for rank in range(ours.tp)]
        for rank, sender in enumerate(senders):
            bytes_of = ours.rank(one, rank, 0xDD).numpy()
            sender.memory[0].reshape(BLOCKS, -1)[1, : len(bytes_of)] = bytes_of
        for rank in range(theirs.tp):
            receiver = described(one, theirs, rank, monkeypatch)
            move(senders, [1], receiver, [3], range(0, 300), 1 << 10, OnCpu())
            expected = np.full_like(receiver.memory[0], 0xEE).reshape(BLOCKS, -1)
            bytes_of = theirs.rank(one, rank, 0xEE).numpy()
            expected[3, : len(bytes_of)] = bytes_of
            assert np.array_equal(receiver.memory[0].reshape(BLOCKS, -1), expected), (ours, theirs, rank)


GATED = SimpleNamespace(
    get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "GDN_ATTN"), **KINDS["gated"].fields(1, 0)
)
GATED_STATE = State.gated_delta(4, 8, 5, 3, ROWS + 1)
SPEC = MambaSpec(block_size=LENGTH, shapes=((3, 8), (2, 2, 2)), dtypes=DTYPES)


def refuses(code: str, text: str, spec: Any = SPEC, of: Any = None) -> None:
    with refused(OperatorError, code, text):
        state_of(NAME, spec, of or GATED)


def test_other_states_are_refused_by_name() -> None:
    for backend in ("GDN_ATTN", "MAMBA1_ATTN", "PLE_SHORT_CONV_ATTN", "LINEAR_ATTN"):  # none of these has its fields
        other = SimpleNamespace(get_attn_backend=lambda backend=backend: SimpleNamespace(get_name=lambda: backend))
        refuses("layer_unsupported", f"MambaSpec of {backend}: .+ states of this kind yet; needs another", of=other)
    drafted = replace(SPEC, num_speculative_blocks=2)
    for kind in KINDS.values():
        backend = SimpleNamespace(get_name=lambda kind=kind: kind.backend)
        layer = SimpleNamespace(get_attn_backend=lambda backend=backend: backend, **kind.fields(1, 2))
        if kind.backend in ("MAMBA1_ATTN", "LINEAR_ATTN"):
            refuses(
                "layer_unsupported",
                f"{kind.backend}, num_speculative_tokens 2: .+ beside drafts yet; needs no --spec",
                drafted,
                layer,
            )
        else:
            assert state_of(NAME, drafted, layer).takes_drafts_back
    replaying = SimpleNamespace(**vars(GATED), use_replayssm=True)
    refuses("layer_unsupported", "whose last tokens are in a ring; needs no --use-replayssm", of=replaying)
    whole = MambaSpec(block_size=LENGTH, shapes=SPEC.shapes, dtypes=DTYPES, tp_replicated=True)
    refuses("layer_unsupported", "states of this kind yet", spec=whole)
    cached = MambaSpec(block_size=BLOCK, shapes=SPEC.shapes, dtypes=DTYPES, mamba_cache_mode="all")
    refuses("layer_unsupported", "mamba_cache_mode all: .+ of every block; needs --mamba-cache-mode align", spec=cached)


def test_a_state_may_stand_beside_rows_whose_tokens_ranks_split() -> None:
    """vLLM before 0.32 does not say that each rank has it whole."""
    layers._check(NAME, SPEC, GATED, Shard(tp_size=2, cp_size=2), 1)
    with refused(OperatorError, "context_parallel_unsupported", "MambaSpec, dcp_sharded True, decode_context_parallel"):
        layers._check(NAME, replace(SPEC, dcp_sharded=True), GATED, Shard(tp_size=2, cp_size=2), 1)


def test_a_state_is_refused_on_ranks_of_prefill_context_parallelism_as_vllm_does_itself() -> None:
    assert not any(kind.get_class().supports_pcp() for kind in MambaKind if kind is not MambaKind.CUSTOM)
    with refused(
        OperatorError, "context_parallel_unsupported", "parallel_size 2: .+ --prefill-context-parallel-size 1"
    ):
        layers._check(NAME, SPEC, GATED, Shard(tp_size=2), 2)


def test_a_state_beside_attention_in_one_layer_has_a_number_after_the_models_layers() -> None:
    attention = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "FLASH_ATTN"))
    config: Any = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=2)))

    def of(name: str, spec: Any, said: Any, state: State | None = None) -> layers.KVLayer:
        return layers.KVLayer(name, -1, 0, torch.empty(0), spec, said, WHOLE, "auto", 0, state=state)

    mixer = of("model.layers.1.mixer", SPEC, GATED, GATED_STATE)
    apart = layers._numbered([mixer, of("model.layers.0.attn", FULL, attention)], config)
    assert [each.layer for each in apart] == [1, 0]
    beside = layers._numbered([mixer, of("model.layers.1.attn", FULL, attention)], config)
    assert [each.layer for each in beside] == [3, 1]


@pytest.mark.parametrize(
    ("shapes", "dtypes", "stride"),
    [
        (((3, 60), (8, 3, 5)), DTYPES, 1),  # of another model
        (((2, 64), (8, 3, 5)), DTYPES, 1),  # too few rows
        (((3, 64), (8, 5, 3)), DTYPES, 1),
        (((3, 64), (8, 3, 5), (2, 2)), (*DTYPES, torch.float32), 1),  # ReplaySSM
        (((3, 64), (8, 3, 5)), (torch.float8_e4m3fn, torch.float32), 1),
        (((3, 64), (8, 3, 5)), DTYPES, 2),
    ],
)
def test_a_page_of_another_shape_is_refused(shapes: Any, dtypes: Any, stride: int) -> None:
    spec = MambaSpec(block_size=LENGTH, shapes=shapes, dtypes=dtypes)
    page = torch.zeros(BLOCKS, 1, 1, spec.page_size_bytes * stride, dtype=torch.int8)[..., ::stride]
    with refused(OperatorError, "shape_unknown", rf"expected \[{BLOCKS}, 1, 1, {spec.page_size_bytes}\] bytes"):
        planes_of(NAME, page, spec, GATED_STATE, (0, 0), BLOCKS, (0, 1))


# Which blocks are offered and wanted, with vLLM's real scheduler and managers:

FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
STATE = MambaSpec(block_size=1 << 11, shapes=((1, 4), (1, 2, 2)), dtypes=DTYPES)
CACHED = MambaSpec(block_size=BLOCK, shapes=STATE.shapes, dtypes=DTYPES, mamba_cache_mode="align")
MODES = {"none": STATE, "align": CACHED}
DRAFTS = 3
LIGHTNING = {f"{mode}, lightning": replace(spec, mamba_type=MambaKind.LINEAR) for mode, spec in MODES.items()}
MODES |= {f"{mode}, drafts": replace(spec, num_speculative_blocks=DRAFTS) for mode, spec in MODES.items()}
# How many blocks, and how long the shorter of two prompts is that is preempted just when it is whole.
PREEMPTED = {"none": (12, 60), "align": (13, 45), "align, drafts": (18, 45)}


def world(folder: Path, mode: str = "none", **more: Any) -> World:
    spec = (MODES | LIGHTNING)[mode]
    more |= {"caching": spec.mamba_cache_mode == "align", "drafts": spec.num_speculative_blocks}
    return World(folder, specs=[FULL, spec], **more).ready()


@pytest.mark.proves("G13")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_state_is_offered_once_it_is_that_of_all_tokens_but_the_last_and_is_held(
    tmp_path: Path, is_async: bool, mode: str
) -> None:
    one, hit = world(tmp_path, mode, async_scheduling=is_async), list(range(BLOCK * 3))
    one.request(prompt=hit, max_tokens=1)
    one.run()
    blocks, prompts = one.scheduler.kv_cache_manager.block_pool.blocks, [hit, [*hit, 1], [*hit, 1, 2], [*hit, 3, *hit]]
    prompts += [
        list(range(1000 * tokens, 1001 * tokens)) for tokens in (2, 3, BLOCK, BLOCK + 1, BLOCK + 2, 65, 66, 200)
    ]
    for prompt in prompts:
        request, tokens = one.prefill(prompt=prompt), len(prompt)
        one.steps(9)
        assert request.is_finished()
        *parts, last = one.agent.take(Offer)
        assert not any(piece.group for part in parts for piece in part.blocks), "a state that goes on changing"
        (state,) = [piece for piece in last.blocks if piece.group == 1]
        entry = (tokens - 2) // MODES[mode].block_size
        assert last.is_last and last.tokens == tokens - 1 and state.first == entry and len(state.ids) == 1
        assert 0 not in state.ids and blocks[state.ids[0]].ref_cnt == 1
        others = [one.request(40, max_tokens=3) for _ in range(4)]
        one.steps(9)
        assert all(other.is_finished() for other in others) and blocks[state.ids[0]].ref_cnt == 1
        one.agent.say(Released(number=last.number, request="r"))
        one.run()
        one.assert_empty()


@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_split_tokens_name_blocks_of_their_share_and_of_the_whole_state(tmp_path: Path, mode: str) -> None:
    """An entry of the attention's table stands for two blocks' tokens, one of the state's for one block's."""
    one = world(tmp_path, mode, tp=8, cp=2)
    for tokens in (2, 3, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK, 2 * BLOCK + 1, 2 * BLOCK + 2, 65, 66, 200):
        prompt = list(range(1000 * tokens, 1001 * tokens))
        one.prefill(prompt=prompt)
        one.steps(9)
        entries, state = -(-(tokens - 1) // (2 * BLOCK)), (tokens - 2) // MODES[mode].block_size
        for agent in one.agents:
            offers = agent.take(Offer)
            rows, states = ([piece for offer in offers for piece in offer.blocks if piece.group == i] for i in (0, 1))
            assert [piece.first + at for piece in rows for at in range(len(piece.ids))] == list(range(entries))
            assert [(piece.first, len(piece.ids)) for piece in states] == [(state, 1)]
            agent.say(Released(number=offers[-1].number, request="r"))
        one.run()
        one.assert_empty()


@pytest.mark.parametrize("mode", MODES)
def test_a_request_takes_as_many_blocks_as_agents_are_asked_for(tmp_path: Path, mode: str) -> None:
    """The state at the last boundary, the last one, and one for each drafted token."""
    one = world(tmp_path, mode)
    request = one.request(BLOCK * 3 + 5, max_tokens=9)
    one.steps(2)
    tables = one.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    taken = sum(len(ids) - ids.count(0) for ids in tables)
    assert one.connector.scheduler._tables.count(request.num_prompt_tokens) == taken
    one.finish()


@pytest.mark.proves("G13")
@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
@pytest.mark.parametrize("resets", [False, True], ids=["preempted", "reset"])
@pytest.mark.parametrize("mode", PREEMPTED)
def test_vllm_clears_no_block_that_is_offered_whole(tmp_path: Path, role: str, resets: bool, mode: str) -> None:
    """Its workers clear them before we hear that their request was preempted, while another agent may read them.

    Where batches overlap, vLLM keeps back the blocks of an engine that may receive: here its batches do not.
    """
    overlap = role == "kv_producer"
    withdraws = overlap or resets
    more = {"scheduler_reserve_full_isl": False, "long_prefill_token_threshold": 32}
    blocks, shorter = PREEMPTED[mode]
    one = world(tmp_path, mode, role=role, async_scheduling=overlap, blocks=blocks, budget=64, **more)
    one.agent.is_answering_withdrawals = True
    one.prefill(140), one.prefill(shorter)
    flight, offered, clears, gone = deque[Any](), dict[int, set[int]](), 0, 0
    named = defaultdict[int, set[int]](set)
    for number in range(40):
        with one.agent.alive():
            scheduled, said = one.begin_step()
        step, cleared = scheduled.kv_connector_metadata, set(scheduled.new_block_ids_to_zero or ())
        assert not any(cleared & blocks for blocks in offered.values()), f"step {number}"
        clears += bool(cleared)
        for message in step.before:
            gone += isinstance(message, Withdraw) and offered.pop(message.number, None) is not None
        for offer in step.after:
            named[offer.number] |= set(chain.from_iterable(piece.ids for piece in offer.blocks)) - {0}
            if offer.is_last and offer.number in {each.number for each in one.connector.scheduler._sending.values()}:
                offered[offer.number] = named[offer.number]
        flight.append((scheduled, said))
        if offered and resets:  # vLLM has not heard yet that the prompt is computed
            resets = False
            assert one.scheduler.reset_prefix_cache(reset_running_requests=True)
        if len(flight) > overlap:
            one.end_step(*flight.popleft())
        for offer in [each for each in offered if number % 8 == 7]:
            one.agent.say(Released(number=offer, request="r"))
            del offered[offer]
    assert clears > 2 and bool(gone) == withdraws
    while flight:
        one.end_step(*flight.popleft())
    one.finish()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("mode", ["none, drafts", "align, drafts"])
def test_a_state_is_not_offered_if_vllm_pads_a_step_that_begins_without_one(
    tmp_path: Path, mode: str, is_async: bool
) -> None:
    """It pads a prompt's last token if others are decoded, but not into the next block."""
    one, begin = world(tmp_path, mode, hashed=2, async_scheduling=is_async), list(range(BLOCK + 15))
    one.request(prompt=begin, max_tokens=1)
    one.run()
    other = one.request(3, max_tokens=200)
    one.steps(4)
    is_cached, offered = mode.startswith("align"), []
    for prompt in ([901, 902], [*begin[: BLOCK + 14], 903, 904], [*begin[:BLOCK], 905, 906], [907, 908, 909]):
        request = one.prefill(prompt=prompt)
        padded = 0
        while not request.is_finished():
            one.step()
            padded = max(padded, len(one.scheduled.scheduled_spec_decode_tokens.get(request.request_id, ())))
        one.steps(2)
        last = one.agent.take(Offer)[-1]
        offered.append((padded > 0, bool(last.blocks)))
        one.agent.say(Released(number=last.number, request="r"))
    assert offered == [(True, False), (False, True), (is_cached, True), (False, True)]
    one.abort(other)
    one.finish()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("engine", "more"), [("vllm", {}), ("sglang", {"fetched_by": "sglang"})])
def test_who_decodes_in_a_routers_room_decides_of_which_token_a_state_is(
    tmp_path: Path, engine: str, more: dict[str, Any], is_async: bool
) -> None:
    """vLLM computes the prompt's last token again, SGLang goes on after it. Nothing else may be added to the state."""
    one = world(tmp_path, async_scheduling=is_async)
    for tokens in (1, 2, BLOCK, BLOCK + 1, 40) if more else (2, 40):
        request, scheduled = one.prefill(tokens, bootstrap_room=7, **more), 0
        for _ in range(9):
            one.step()
            scheduled += one.scheduled.num_scheduled_tokens.get(request.request_id, 0)
        offer = one.agent.take(Offer)[-1]
        expected = tokens - (engine == "vllm")
        assert request.is_finished() and (offer.tokens, scheduled, offer.is_last) == (expected, expected, True)
        assert [(piece.group, piece.first, len(piece.ids)) for piece in offer.blocks if piece.group] == [(1, 0, 1)]
        one.agent.say(Released(number=offer.number, request="r"))
        one.run()
        one.assert_empty()


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *((kind, kind) for kind in MambaKind if kind is not MambaKind.CUSTOM),
        (MambaKind.LINEAR, BailingLinearAttentionBackend),
    ],
    ids=str,
)
def test_whether_vllm_clears_a_state_in_a_first_step_of_one_token_is_what_its_own_builder_says(
    tmp_path: Path, kind: MambaKind, backend: Any
) -> None:
    """It masks or clears what a block held before for prefills only."""
    spec = replace(STATE, mamba_type=kind)
    build = (backend.get_class() if backend is kind else backend).get_builder_cls()
    builder = build(spec, [NAME], world(tmp_path).config, torch.device("cpu"))
    for tokens in (1, 2, BLOCK + 1):
        one, starts = torch.tensor([tokens], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
        batch = {"query_start_loc": starts, "query_start_loc_cpu": starts, "seq_lens": one, "max_seq_len": tokens}
        batch |= {"num_reqs": 1, "num_actual_tokens": 1, "max_query_len": 1, "slot_mapping": torch.tensor([0])}
        batch |= {"is_prefilling": torch.tensor([True]), "seq_lens_cpu_upper_bound": one}
        said = builder.build(0, CommonAttentionMetadata(**batch, block_table_tensor=one[:, None]))
        assert bool(said.num_decodes) == (tokens > 1 or takes_first_token_for_decode(spec))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_prompt_whose_first_step_is_one_token_is_not_offered_if_vllm_does_not_clear_its_state(
    tmp_path: Path, is_async: bool
) -> None:
    """That token is its only one, or all that the step has room for. After a cached state it is no first step."""
    cached, uncached = (
        world(tmp_path / mode, f"{mode}, lightning", async_scheduling=is_async) for mode in ("align", "none")
    )
    begin = list(range(2 * BLOCK))

    def offered(
        one: World, prompt: list[int], others: int = 0, has_agents: bool = True, **more: Any
    ) -> tuple[int, str]:
        """How many tokens the last offer has, and why it was withdrawn. Agents may come after the first step."""
        if others:
            one.request(others, max_tokens=1)
        request = one.prefill(prompt=prompt, **more)
        one.connector.scheduler._agents.is_all = has_agents
        one.step()
        one.connector.scheduler._agents.is_all = True
        one.steps(6)
        assert request.is_finished()
        last, why = one.agent.take(Offer)[-1], [each.reason for each in one.agent.take(Withdraw)]
        one.agent.say(Released(number=last.number, request="r"))
        one.steps(2)
        one.assert_empty()
        return last.tokens, "".join(why)

    assert offered(cached, [*begin, 1]) == (len(begin), "")
    assert offered(cached, [*begin, 2, 3]) == (len(begin) + 1, ""), "one token after a state that was there"
    assert offered(cached, [7, 8, 9]) == (2, "")
    for case in (
        {"one": cached, "prompt": [7, 8]},
        {"one": cached, "prompt": [4], "bootstrap_room": 7, "fetched_by": "sglang"},
        {"one": uncached, "prompt": [*range(500, 540)], "others": 63},
        {"one": uncached, "prompt": [*range(600, 640)], "others": 63, "has_agents": False},
    ):
        tokens, why = offered(**case)
        assert tokens == 0 and why.startswith("vLLM takes a first step of one token for a decode")


@pytest.mark.parametrize("room", [{}, {"bootstrap_room": 7}], ids=["by name", "in a room"])
@pytest.mark.parametrize("more", [{"prompt_logprobs": 1}, {"tokens": 1}])
def test_a_prompt_that_keeps_its_last_token_is_not_offered_and_who_waits_for_it_is_told(
    tmp_path: Path, more: dict[str, Any], room: dict[str, Any]
) -> None:
    one = world(tmp_path)
    request = one.prefill(**more, **room)
    one.run()
    offer, withdrawal = one.agent.one(Offer), one.agent.one(Withdraw)
    assert request.is_finished() and (offer.tokens, offer.blocks, offer.is_last) == (0, (), True)
    assert withdrawal.number == offer.number and offer.rendezvous.startswith("room/7/") == bool(room)
    one.agent.say(Released(number=offer.number, request="r"))
    one.steps(1)
    one.assert_empty()


def test_a_prompt_without_parameters_is_not_offered(tmp_path: Path) -> None:
    one = world(tmp_path, role="kv_producer")
    one.request(40, max_tokens=1)
    one.steps(6)
    assert [(offer.tokens, offer.blocks) for offer in one.agent.take(Offer)] == [(0, ())]


def test_the_receiver_wants_the_state_after_all_tokens_but_the_last(tmp_path: Path) -> None:
    one = world(tmp_path)
    pages = one.workers[0].worker._last_blocks.pages[0]
    for page in pages:
        page.fill_(255)
    request, cleared = one.decode(70), set[int]()
    for _ in range(3):
        one.step()
        cleared |= set(one.scheduled.new_block_ids_to_zero or ())
    (want,) = one.agent.take(Want)
    assert (want.first_token, want.end_token) == (0, 69)
    table = one.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    assert {piece.group: (piece.first, list(piece.ids)) for piece in want.blocks} == {
        0: (0, list(table[0][:5])),
        1: (0, list(table[1][:1])),
    }
    zeros = {number for number in range(len(pages[0])) if not any(page[number].any() for page in pages)}
    assert zeros == {table[0][4]} and not cleared & set(table[0][:5]), "the last one, here, and none by vLLM"


@pytest.mark.parametrize("tokens", [BLOCK * 4 + 1, BLOCK * 4 + 6])
@pytest.mark.parametrize("local", [0, 1, 3, 4])
def test_the_receiver_wants_a_state_into_a_block_of_its_own_whatever_its_prefix_cache_has(
    tmp_path: Path, local: int, tokens: int
) -> None:
    """A state that ends a block is then a prefix of others. Rows that are there are not wanted again."""
    one, prompt = world(tmp_path, "align"), list(range(tokens))
    one.request(prompt=prompt[: local * BLOCK + 1], max_tokens=1)
    one.run()
    pool = one.scheduler.kv_cache_manager.block_pool
    request = one.decode(prompt=prompt)
    one.steps(2)
    (want,) = one.agent.take(Want)
    if local * BLOCK == tokens - 1:
        assert want.end_token == 0, "all of it is there"
        one.finish()
        return
    table = one.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    assert (want.first_token, want.end_token) == (local * BLOCK, tokens - 1)
    assert [piece.first for piece in want.blocks] == [local, (tokens - 2) // BLOCK]
    assert [list(piece.ids) for piece in want.blocks] == [table[0][local : -(-(tokens - 1) // BLOCK)], table[1][-1:]]
    for block in (pool.blocks[each] for piece in want.blocks for each in piece.ids):
        assert block.ref_cnt == 1 and block.block_hash is None and not block.is_null
    one.agent.say(done(want))
    one.finish()
    again = one.request(prompt=[*prompt[:-1], 7, 7, 7], max_tokens=1)
    found = one.scheduler.kv_cache_manager.get_computed_blocks(again)[1]
    assert found == (tokens - 1 if (tokens - 1) % BLOCK == 0 else local * BLOCK)


def test_rows_that_outlive_their_state_are_not_wanted_again(tmp_path: Path) -> None:
    """Of a prompt that was fetched, vLLM keeps all whole blocks, and the last state only if it ends one."""
    one, prompt = world(tmp_path, "align"), list(range(BLOCK * 4 + 6))
    for first in (0, BLOCK * 4):
        one.decode(prompt=prompt)
        one.steps(2)
        (want,) = one.agent.take(Want)
        assert (want.first_token, want.end_token) == (first, BLOCK * 4 + 5)
        one.agent.say(done(want))
        one.finish()


def test_of_two_groups_of_rows_each_row_is_there_or_comes(tmp_path: Path) -> None:
    """Of the second, vLLM's prefix cache has lost the last blocks of a prefix that it has whole of the first."""
    one = World(tmp_path, specs=[FULL, replace(FULL, dtype=torch.bfloat16), CACHED], caching=True).ready()
    prompt = list(range(4 * BLOCK + 3))
    hashes = one.request(prompt=prompt, max_tokens=1).block_hashes
    one.run()
    pool = one.scheduler.kv_cache_manager.block_pool
    for each in hashes[2:4]:
        (block,) = pool.get_cached_block(each, [1])
        pool._maybe_evict_cached_block(block)
    request = one.decode(prompt=[*prompt[: 4 * BLOCK], *range(900, 900 + BLOCK + 2)])
    one.steps(3)
    (want,) = one.agent.take(Want)
    came = {piece.group: set(range(piece.first, piece.first + len(piece.ids))) for piece in want.blocks}
    known = {found[0].block_id for each in hashes[:4] if (found := pool.get_cached_block(each, [1]))}
    table = one.scheduler.kv_cache_manager.get_block_ids(request.request_id)[1]
    cached = {entry for entry, number in enumerate(table) if number in known}
    assert set(range(want.end_token // BLOCK)) <= came[1] | cached


def test_groups_that_vllms_prefix_cache_leaves_out_are_no_reason_to_compute_rows_again(tmp_path: Path) -> None:
    """vLLM's HiSparse has some, which do not travel either. But of one that is cached, rows may be lost."""
    one = World(tmp_path, specs=[FULL, CACHED], caching=True)
    hot, other = HiSparseHotSpec(block_size=BLOCK, page_size=64, blocks_per_request=2), replace(FULL, dtype=torch.half)
    for spec, travels, is_unequal in ((hot, False, False), (other, False, True), (other, True, True)):
        group = KVCacheGroupSpec(["more"], spec, enable_kv_transfer=travels)
        one.connector._kv_cache_config = replace(one.cache, kv_cache_groups=[*one.cache.kv_cache_groups, group])
        assert one.connector.supports_divergent_local_hybrid_hits is not is_unequal, (spec, travels)


def test_windows_beside_states_are_there_whole(tmp_path: Path) -> None:
    """What a prompt left in the prefix cache of a window does not begin where a shorter one's window does."""
    width = BLOCK * 2 + 8
    window = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=width)
    one = World(tmp_path, specs=[FULL, window, MODES["align"]], caching=True).ready()
    prompt, written = list(range(BLOCK * 8 + 6)), dict[int, int]()  # entries by block
    for tokens in (prompt, [*prompt[: BLOCK * 4], *range(5000, 5010)]):
        request = one.decode(prompt=tokens)
        one.steps(2)
        (want,) = one.agent.take(Want)
        (piece,) = [each for each in want.blocks if each.group == 1]
        written |= {block: piece.first + place for place, block in enumerate(piece.ids)}
        first = (want.end_token + 1 - width) // BLOCK
        table = one.scheduler.kv_cache_manager.get_block_ids(request.request_id)[1]
        assert all(written.get(block) == entry for entry, block in enumerate(table) if entry >= first)
        one.agent.say(done(want))
        one.finish()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_vllm_copies_over_no_block_that_is_offered_or_wanted(tmp_path: Path, is_async: bool) -> None:
    """Prefixes that end inside a block are copied for whom goes on: before we hear of the step, or from our blocks."""
    one = world(tmp_path, "align", hashed=4, async_scheduling=is_async)
    prompt, copies, wanted, offered = list(range(BLOCK * 2 + 9)), 0, set[int](), dict[int, set[int]]()
    flight = deque[Any]()
    for number in range(60):
        if number % 6 == 0:
            one.prefill(prompt=[*prompt, number, *range(number)])
        if number % 6 == 3:
            one.decode(prompt=[*prompt, number, *range(5)])
        scheduled, said = one.begin_step()
        step = scheduled.kv_connector_metadata
        copied = {each.dst_block_id for each in scheduled.kv_cache_block_copies or ()}
        copies += len(copied)
        assert not copied & wanted, "it was wanted in an earlier step"
        assert not any(copied & blocks for blocks in offered.values())
        flight.append((scheduled, said))
        while len(flight) > is_async:
            one.end_step(*flight.popleft())
        for want in one.agent.take(Want):
            wanted |= {each for piece in want.blocks for each in piece.ids}
            if number % 2:
                one.agent.say(done(want))
                wanted -= {each for piece in want.blocks for each in piece.ids}
        for offer in step.after:
            offered.setdefault(offer.number, set()).update(each for piece in offer.blocks for each in piece.ids)
        if number % 12 == 11:
            for offer in offered:
                one.agent.say(Released(number=offer, request="r"))
            offered.clear()
    assert copies > 4


@pytest.mark.parametrize("mode", MODES)
def test_of_equal_requests_one_fetches_and_no_other_fails_for_it(tmp_path: Path, mode: str) -> None:
    """What the prefix cache has is not all of the prompt, and by vLLM's default a failed fetch fails its request."""
    one = world(tmp_path, mode)
    prompt = list(range(70))
    told = told_of_an_offer(prompt)
    for n in range(3):
        one.decode(prompt=prompt, name=f"{n}_cmpl-a-{n}a2b3c4d", **told)
    one.steps(2)
    (first,) = one.agent.take(Want)
    assert first.end_token == 69
    one.agent.say(done(first))
    one.finish()
    assert not any(each.end_token for each in one.agent.take(Want))
    computed = [69, 69 if mode.startswith("none") else 5]  # the first leaves a state for the second
    assert one.agent.take(Computed) == [Computed(tokens=each, reason="already_fetched") for each in computed]


def test_states_need_a_vllm_that_is_told_of_a_failed_receive_by_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pure Mamba 2 has one group."""
    cache = KVCacheConfig(num_blocks=5, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([NAME], STATE)])
    check_groups(cache)
    monkeypatch.delattr(base, "KVConnectorTransferResults")
    with refused(OperatorError, "groups_unsupported", "recurrent states, vLLM .+; needs vLLM 0.30$"):
        check_groups(cache)
