"""Recurrent states in SGLang: where each part of a state lies, and which slot an offer or a want names.

A `HybridLinearKVPool` has the rows of attention. Beside it a `MambaPool` has one slot for each request's state: the
last rows of the short convolution's input, and the state proper, or one of these alone. On the prefill side nothing
writes a request's slot between its last chunk and its sender's end: SGLang's prefix cache gets a copy, and the slot
goes to the cache, or is free, only after that. So the slot is offered as it is, and held. What comes to the decode side
fills the whole slot: SGLang does not clear it.

Drafts change none of this. A slot has the state after the last token that was accepted, and is as large as without
drafts; states after each drafted token are in memory of their own, by step. The draft model's pool is of the same class
if the model's own module drafts (MTP): it has rows of its own, and the model's `MambaPool`, which it does not use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from kvbridge_proto.common import Blocks
from kvbridge_proto.pool import Group, Layer, Plane, Shard

from ...errors import OperatorError
from ..engine.memory import CODEC_OF, state_planes
from ..engine.records import Heads, State
from ..engine.unsupported import refusal
from . import drafts

STATE_GROUP = 1  # the number of the group of states; the attention layers' is 0
# Of requests' places. A unified pool's slots are not where their numbers say.
PLACES, KIND = ("HybridReqToTokenPool", "HybridMambaDecodeReqToTokenPool"), "MambaPool"
# SGLang's, of layers with a state.
DELTA, MAMBA2, LIGHTNING = "RadixLinearAttention", "MambaMixer2", "BailingMoELinearAttention"
CONVOLUTIONS = ("Lfm2ShortConv", "Lfm2MoeShortConv")
MODULES = (DELTA, MAMBA2, LIGHTNING, *CONVOLUTIONS)


@dataclass(frozen=True, slots=True)
class States:
    """The states of a rank's layers: the record of each layer, the group, and each plane with its tensor."""

    layers: dict[int, Layer]
    group: Group
    planes: list[tuple[torch.Tensor, Plane]]


def has_states(pool: Any) -> bool:
    """Whether the pool has the rows of attention only, beside recurrent states."""
    return type(pool).__name__ == "HybridLinearKVPool"


def beside(pool: Any) -> Any:
    """The pool of the rows beside its states; the pool itself if it has no states."""
    return pool.full_kv_pool if has_states(pool) else pool


def attention(pool: Any) -> tuple[int, ...]:
    """The model's numbers of the attention layers, in the order of the pool's tensors."""
    return tuple(int(layer) for layer in pool.full_attention_layer_id_mapping)


def check(queue: Any) -> None:
    """Raise OperatorError if requests have states that are not carried."""
    places, pool = queue.scheduler.req_to_token_pool, queue.token_to_kv_pool
    _check_draft(queue, getattr(pool, "mamba_pool", None))
    if not hasattr(places, "get_state_buf_infos"):  # as SGLang itself finds them
        return
    found = f"KV pool: {type(pool).__name__} beside {type(places).__name__}"
    if not has_states(pool) or type(places).__name__ not in PLACES or pool.mamba_pool is not places.mamba_pool:
        raise refusal("cache_unsupported", "sglang", "state", found)
    if getattr(queue.scheduler, "enable_decode_hicache", False):
        # It brings back the rows of a prefix and no state, and a state that is on its way looks as if it were there.
        raise refusal("cache_unsupported", "sglang", "state", f"{found} and --enable-hierarchical-cache")
    states = pool.mamba_pool
    if (kind := type(states).__name__) != KIND:
        raise refusal("cache_unsupported", "sglang", "state", f"{found} with {kind}")
    if states._slot_siblings:
        raise refusal("cache_unsupported", "sglang", "state", f"{found} with {type(states._slot_siblings[0]).__name__}")
    # Of a slot whose last tokens are in a ring the state is an older one.
    if states.enable_linear_replayssm or states.enable_linear_replayssm_spec:
        raise refusal("cache_unsupported", "sglang", "replayed state", found)


def _check_draft(queue: Any, states: Any) -> None:
    """Raise OperatorError if a draft model has states of its own: in a pool other than the model's `states`."""
    for runner in drafts.runners(queue):
        modules = [] if states is None else runner.model.modules()
        kinds = {kind for module in modules if (kind := type(module).__name__) in MODULES}
        if kinds or getattr(runner.token_to_kv_pool, "mamba_pool", states) is not states:
            what = " and ".join(sorted(kinds)) or "a MambaPool of its own"
            raise refusal("cache_unsupported", "sglang", "drafted state", f"draft model of {what}")


def first_draft(queue: Any, depth: int) -> int:
    """The number of a draft model's first layer: behind the model's, and states beside attention in one layer."""
    pool = queue.token_to_kv_pool
    return depth * (1 + (has_states(pool) and not set(attention(pool)).isdisjoint(pool.mamba_pool.mamba_layer_ids)))


def found(queue: Any, shard: Shard) -> States | None:
    """The states that requests have beside their rows; None if they have none. Raises OperatorError."""
    pool = queue.token_to_kv_pool
    if not has_states(pool):
        return None
    states = pool.mamba_pool
    state = _state(queue.scheduler.tp_worker.model_runner.model, states, shard)
    _check_shapes(states, state, shard)
    depth, both = int(queue.scheduler.model_config.hf_text_config.num_hidden_layers), attention(pool)
    # A state beside attention in one layer (Falcon-H1) has a number after the model's layers.
    numbers = [int(layer) + depth * (layer in both) for layer in states.mamba_layer_ids]
    rank, planes = (shard.tp_rank, shard.tp_size), list[tuple[torch.Tensor, Plane]]()
    for place, layer in enumerate(numbers):
        conv, own = states.mamba_cache.conv[0][place], states.mamba_cache.temporal[place].flatten(2)
        conv = conv if states.conv_slice_axis else conv.transpose(1, 2)  # KDA's is [slots, rows, channels] already
        planes += state_planes(conv, own, state, rank, layer, STATE_GROUP)
    slots = states.mamba_cache.temporal.shape[1]
    group = Group(kind="state", block_tokens=int(queue.scheduler.req_to_token_pool.max_context_len), blocks=slots)
    return States(dict.fromkeys(numbers, state.record), group, planes)


def _state(model: torch.nn.Module, states: Any, shard: Shard) -> State:
    """What the model's layers keep, of all ranks: the modules know their heads, the pool how many rows."""
    modules: dict[str, Any] = {kind: module for module in model.modules() if (kind := type(module).__name__) in MODULES}
    if len(modules) != 1 or len(states.mamba_cache.conv) != 1:
        what = " and ".join(sorted(modules)) or "layers that kvbridge does not know"
        raise refusal("cache_unsupported", "sglang", "state", f"KV pool: HybridLinearKVPool of {what}")
    ((kind, layer),) = modules.items()
    kernel = int(states.mamba_cache.conv[0].shape[3 - states.conv_slice_axis]) + 1
    if kind == DELTA:  # Gated DeltaNet, and KDA: the module counts a rank's heads
        heads = int(layer.num_k_heads) * shard.tp_size, int(layer.num_v_heads) * shard.tp_size
        return State.gated_delta(*heads, int(layer.head_k_dim), int(layer.head_v_dim), kernel)
    if kind == MAMBA2:  # if B and C have one group, SGLang counts one for each rank; the norm keeps the model's number
        of = layer.num_heads, layer.head_dim, layer.ssm_state_size, layer.norm.n_groups, kernel
        return State.mamba2(*map(int, of))
    if kind == LIGHTNING:  # keys precede values, as in vLLM (`s_ptrs` of `seg_la_p_kernel`)
        return State.lightning(int(layer.total_num_heads), int(layer.head_dim))
    return State.short_conv(int(layer.hidden_size), kernel)


def _check_shapes(states: Any, state: State, shard: Shard) -> None:
    """Raises OperatorError unless a slot has just the parts of this state, in dtypes that we know."""
    conv, own = states.mamba_cache.conv[0], states.mamba_cache.temporal
    channels = state.channels(shard.tp_rank, shard.tp_size)
    shapes = [tuple(conv.shape[2:]), tuple(own.shape[2:]) if own.numel() else ()]
    heads = [Heads.of(state.heads, shard.tp_rank, shard.tp_size).count] if state.heads else []
    expected = [
        (channels, state.rows)[:: -1 if states.conv_slice_axis else 1],
        (*heads, state.values, state.keys) if heads else (),
    ]
    dtypes = [conv.dtype, own.dtype]
    if shapes != expected or not all(dtype in CODEC_OF and dtype.itemsize > 1 for dtype in dtypes):
        raise OperatorError("shape_unknown", f"KV pool: states {shapes} of {dtypes}, expected {expected}")


def slot(args: Any, state_indices: list[Any] | None) -> tuple[Blocks, ...]:
    """The request's slot, of which SGLang tells its own backends. `args` and `state_indices` are SGLang's."""
    from sglang.srt.disaggregation.base.conn import StateType

    if StateType.MAMBA not in args.state_types or state_indices is None:
        return ()
    (number,) = state_indices[args.state_types.index(StateType.MAMBA)]
    return (Blocks(STATE_GROUP, 0, (int(number),)),)


def copy_prefix(queue: Any, req: Any) -> str:
    """The decode side's prefix cache has all of a prompt: give the request the state that the cache has of it.

    SGLang leaves that copy to the first step that computes rows of the prompt, and here there is none. The step under
    way may still write the slot, for a request that is over. Returns why there is no such state, or "".
    """
    if not has_states(queue.token_to_kv_pool):
        return ""
    if (source := req.kv.mamba_cow_src_index) is None:
        return "the prefix cache has all rows of the prompt, and no state after them"
    scheduler, places = queue.scheduler, queue.scheduler.req_to_token_pool
    if scheduler.enable_overlap:
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)
    slots = source.view(-1), req.kv.mamba_pool_idx.view(-1)
    if places.mamba_ckpt_pool is None:
        places.copy_mamba_state(*slots)
    else:  # --enable-int8-mamba-checkpoint: what the cache has is in a pool of its own
        places.mamba_ckpt_pool.load_to_active(places.mamba_pool, *slots)
    req.kv.mamba_cow_src_index = None
    return ""
