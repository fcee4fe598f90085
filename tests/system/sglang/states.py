"""Gated DeltaNet and LFM2 of real SGLang servers on a CPU, and their states as SGLang's own layers see them.

SGLang's kernels for them are Triton's, which its interpreter does not run (3.9), so plain torch computes the same here.
The pools, the scheduler and all that decides which state is in which slot are SGLang's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from kvbridge.adapters.sglang.on_cpu import stand_in
from tests.system.engines.states import GATED, SHORT_CONV, write_hybrid

MODEL = {name: value for name, value in GATED.items() if name != "mlp_only_layers"}  # SGLang's have experts everywhere
VARIABLE = "KVBRIDGE_TEST_STATES"
DENSE = "KVBRIDGE_TEST_DENSE"
PATIENCE_S = "120"  # token by token it is slow
ENVIRONMENT = {VARIABLE: "1", "TRITON_INTERPRET": "1"} | {
    f"SGLANG_DISAGGREGATION_{name}_TIMEOUT": PATIENCE_S for name in ("BOOTSTRAP", "WAITING")
}


def write(folder: Path, more: Mapping[str, Any] = MappingProxyType({})) -> Path:
    """`more` are other fields of its config."""
    stand_in()  # transformers imports torchvision
    return write_hybrid(folder, MODEL | dict(more))


def write_convolutions(folder: Path) -> Path:
    stand_in()
    return write_hybrid(folder, SHORT_CONV)


def register_for_gpus() -> None:
    """Where SGLang's kernels for experts and its CUDA convolution are missing: dense layers, and its Triton kernel.

    Call it in each of SGLang's processes, before it makes an engine. All else is SGLang's own.
    """
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.models import qwen3_next

    gdn_backend.causal_conv1d_fn = causal_conv1d_fn
    _be_dense(qwen3_next)


def _be_dense(models: Any) -> None:
    """SGLang's Qwen3-Next has experts in each layer. A checkpoint whose layers have none fits this."""

    class Dense(models.Qwen2MoeMLP):  # type: ignore[misc]  # SGLang is not there for the checker
        num_fused_shared_experts = 0

        def __init__(self, *, config: Any, prefix: str, quant_config: Any, **_: Any) -> None:
            sizes = config.hidden_size, config.intermediate_size, config.hidden_act
            super().__init__(*sizes, quant_config, prefix=prefix, reduce_results=False)

        def forward(self, x: Any, forward_batch: Any = None, **more: Any) -> Any:
            return super().forward(x, **more)

    models.Qwen2MoeSparseMoeBlock = Dense


def register() -> None:
    """Replace what runs on a GPU only. Call it in each of SGLang's processes, before it makes an engine."""
    import torch
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.models import lfm2, qwen3_next

    kernel = gdn_backend.TritonGDNKernel
    kernel.supports_packed_decode, kernel.extend, kernel.decode = False, _extend, _decode
    kernel.target_verify, hybrid.scatter_mamba_states_after_mtp_verify = _verify, _accept
    for models in (gdn_backend, lfm2):
        models.causal_conv1d_fn, models.causal_conv1d_update = _convolve, _convolve_one
    gdn_backend.fused_gdn_gating = _gates
    torch.cuda.synchronize = lambda device=None: None  # the module that drafts calls it
    qwen3_next.fused_qkvzba_split_reshape_cat = _split
    FusedRMSNormGated.forward = _norm
    if DENSE in os.environ:
        _be_dense(qwen3_next)


def _convolve(
    x: Any,
    weight: Any,
    bias: Any,
    conv_states: Any,
    query_start_loc: Any,
    cache_indices: Any,
    has_initial_state: Any,
    activation: str | None,
    **_: Any,
) -> Any:
    """`x` is [channels, tokens of all requests]. A slot keeps the last inputs, oldest first."""
    import torch

    starts, parts = query_start_loc.tolist(), []
    for number, (first, end) in enumerate(pairwise(starts)):
        slot = int(cache_indices[number])
        before = conv_states[slot].to(x.dtype) * bool(has_initial_state[number])
        seen = torch.cat([before, x[:, first:end]], 1)
        parts.append(torch.nn.functional.conv1d(seen[None], weight[:, None], bias, groups=len(seen))[0])
        conv_states[slot] = seen[:, seen.shape[1] - before.shape[1] :].to(conv_states.dtype)
    return _activated(torch.cat(parts, 1), activation)


def _activated(x: Any, activation: str | None) -> Any:
    import torch

    assert activation in ("silu", None)
    return torch.nn.functional.silu(x) if activation else x


def _convolve_one(
    x: Any, conv_state: Any, weight: Any, bias: Any, activation: str | None, conv_state_indices: Any, **verified: Any
) -> Any:
    """`x` is [requests, channels]; of tokens to verify [requests, channels, tokens], with a window kept after each."""
    import torch

    slots = conv_state_indices.long()
    if verified:
        kept, rows = verified["intermediate_conv_window"], verified["intermediate_state_indices"].long()
        seen = torch.cat([conv_state[slots].to(x.dtype), x], 2)
        window = conv_state.shape[2]
        for token in range(x.shape[2]):
            kept[rows, token] = seen[:, :, token + 1 : token + 1 + window].to(kept.dtype)
        out = torch.nn.functional.conv1d(seen, weight[:, None], bias, groups=seen.shape[1])
        return _activated(out, activation)
    seen = torch.cat([conv_state[slots].to(x.dtype), x[:, :, None]], 2)
    conv_state[slots] = seen[:, :, 1:].to(conv_state.dtype)
    out = (seen * weight).sum(-1)
    return _activated(out if bias is None else out + bias, activation)


def _gates(a_log: Any, a: Any, b: Any, dt_bias: Any) -> tuple[Any, Any]:
    import torch

    decay = -a_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def _split(qkvz: Any, ba: Any, keys: int, values: int, key_width: int, value_width: int) -> tuple[Any, Any, Any, Any]:
    """Of the checkpoint's order: for each key head q, k, and the v and z of its value heads; the same with b and a."""
    import torch

    each, count = values // keys, len(qkvz)
    sizes = [key_width, key_width, each * value_width, each * value_width]
    q, k, v, z = qkvz.view(count, keys, -1).split(sizes, 2)
    b, a = ba.view(count, keys, -1).split([each, each], 2)
    mixed = torch.cat([part.reshape(count, -1) for part in (q, k, v)], 1)
    return mixed, z.reshape(count, values, value_width), b.reshape(count, values), a.reshape(count, values)


def _extend(
    self: Any,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    ssm_states: Any,
    cache_indices: Any,
    query_start_loc: Any,
    keep: Callable[[int, int, Any], None] | None = None,
    **_: Any,
) -> tuple[Any, None, None]:
    """The recurrence, token by token. A fresh slot is zeros: SGLang has cleared it.

    With `keep` the slot stays, and that gets each request's place, token and state.
    """
    import torch

    repeats, width = v.shape[2] // q.shape[2], q.shape[3]
    q, k = (torch.nn.functional.normalize(each[0].float(), dim=-1).repeat_interleave(repeats, 1) for each in (q, k))
    values, decay, gate, out = v[0].float(), g[0].float().exp(), beta[0].float(), torch.empty_like(v[0].float())
    starts = query_start_loc.tolist()
    for number, (first, end) in enumerate(pairwise(starts)):
        slot = int(cache_indices[number])
        state = ssm_states[slot].float()
        for token in range(first, end):
            state = state * decay[token][:, None, None]
            missing = (values[token] - torch.einsum("hvk,hk->hv", state, k[token])) * gate[token][:, None]
            state = state + missing[:, :, None] * k[token][:, None]
            out[token] = torch.einsum("hvk,hk->hv", state, q[token]) * width**-0.5
            if keep:
                keep(number, token - first, state)
        if not keep:
            ssm_states[slot] = state.to(ssm_states.dtype)
    return out.to(v.dtype)[None], None, None


def _decode(self: Any, q: Any, k: Any, v: Any, a: Any, b: Any, *, A_log: Any, dt_bias: Any, **more: Any) -> Any:
    return _extend(self, q, k, v, *_gates(A_log, a, b, dt_bias), **more)[0]


def _verify(self: Any, A_log: Any, dt_bias: Any, q: Any, k: Any, v: Any, a: Any, b: Any, **more: Any) -> Any:
    """Of drafted tokens: the states after each of them are kept, and the slot is as it was."""
    kept, rows = more["intermediate_states_buffer"], more["intermediate_state_indices"].tolist()

    def keep(number: int, token: int, state: Any) -> None:
        kept[rows[number], token] = state.to(kept.dtype)

    return _extend(self, q, k, v, *_gates(A_log, a, b, dt_bias), keep=keep, **more)[0]


def _accept(caches: Any, slots: Any, steps: Any, tracked: Any, tracked_steps: Any, src_indices_raw: Any = None) -> None:
    """The states after the last accepted tokens go to the requests' slots."""
    import torch

    assert tracked is None and src_indices_raw is None
    requests, slots = torch.arange(len(steps)), slots.long()
    pairs = zip(
        (caches.temporal, *caches.conv), (caches.intermediate_ssm, *caches.intermediate_conv_window), strict=True
    )
    for whole, kept in pairs:
        whole[:, slots] = kept[:, requests, steps.long()]


def _norm(self: Any, x: Any, z: Any, *_: Any, **__: Any) -> Any:
    import torch

    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.float()
    return (wide * torch.nn.functional.silu(z.float())).to(x.dtype)


def keep(folder: Path, side: str, scheduler: Any, req: Any) -> None:
    """Write a request's state: "LAYER.conv PIECE" [channels, rows], "LAYER.state" [heads, ...] as bytes."""
    from sglang.srt.runtime_context import get_parallel

    places = scheduler.req_to_token_pool
    slot = int(places.req_index_to_mamba_index_mapping[req.kv.req_pool_idx])
    modules = scheduler.tp_worker.model_runner.model.modules()
    found: dict[str, Any] = {}
    for layer in modules:
        if type(layer).__name__ == "RadixLinearAttention":
            cache = places.mamba2_layer_cache(layer.layer_id)
            pieces = cache.conv[0][slot].split([layer.q_dim, layer.k_dim, layer.v_dim])
            parts = {f"conv {place}": piece for place, piece in enumerate(pieces)} | {"state": cache.temporal[slot]}
            found |= {f"{layer.layer_id}.{part}": _bytes(each) for part, each in parts.items()}
        elif type(layer).__name__ == "Lfm2ShortConv":
            found[f"{layer.layer_idx}.conv x"] = _bytes(places.mamba2_layer_cache(layer.layer_idx).conv[0][slot])
    path = folder / f"{side}-states-{req.bootstrap_room}-{get_parallel().attn_tp_rank}.npz"
    with path.with_suffix(".part").open("wb") as file:
        np.savez(file, **found)
    path.with_suffix(".part").rename(path)


def _bytes(tensor: Any) -> np.ndarray:
    import torch

    raw = tensor.contiguous().view(torch.uint8)
    return np.asarray(raw.reshape(*tensor.shape, -1).cpu().numpy())
