"""Tests load this into SGLang's processes through its plugins: it keeps the KV rows of prompts, and times of transfers.

It is not shipped: `server.py` makes the entry point, in its own folder on PYTHONPATH. `KVBRIDGE_TEST_ROWS` names a
folder. There the prefill side writes a prompt's rows when it sends its last chunk, and the decode side when it commits
the transfer, unless the folder has a file `pause`. `KVBRIDGE_TEST_TIMES` names a file. It gets a line of JSON at both
moments, what SGLang reports of the transfer, and the notes of `tests.system.engines.marks`. `KVBRIDGE_TEST_SEED` makes
the weights of a model that is only a config.json. `KVBRIDGE_TEST_INDEX_KEYS` lets a model with sparse attention run on
a CPU, `KVBRIDGE_TEST_STATES` one with Gated DeltaNet; with rows the states are kept, too.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from demo.sglang_replicas import rest_between_requests, spread_attention
from demo.sglang_rows import keep, watch
from tests.system.engines import marks, weights
from tests.system.sglang import drafting, states

NATIVE = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
PAUSE = "pause"
SEEDED = "kvbridge_test: seeded"  # what a rank says whose weights were made


def register() -> None:
    """SGLang calls it in each of its processes, before it makes an engine."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get("KVBRIDGE_TEST_DEVICE", "cpu") == "cpu":
        from sglang.srt.models.deepseek_common import attention_backend_handler as latents

        # There its own NIXL backend registers memory as a GPU's, and a latent's prefill reads keys that are not there.
        nixl = "sglang.srt.disaggregation.nixl.conn"
        HookRegistry.register(f"{nixl}._normalize_kv_mem_kinds", _dram, HookType.AROUND)
        HookRegistry.register(f"{nixl}._homogeneous_kv_mem_kind", _any_ranks, HookType.AFTER)
        latents.AttentionBackendRegistry.register("torch_native", latents._dispatch_mla_subtype)
        spread_attention()
        if "sglang.srt.managers.data_parallel_controller" in sys.modules:  # in its own process
            rest_between_requests()
        for name in ("forward_extend", "forward_decode"):
            HookRegistry.register(f"{NATIVE}.{name}", _attend, HookType.AROUND)
        HookRegistry.register("sglang.srt.layers.rotary_embedding.factory.get_rope", _flat_rope, HookType.AROUND)
        if drafting.VARIABLE in os.environ:
            drafting.register()
        if states.VARIABLE in os.environ:
            states.register()
    elif drafting.VARIABLE in os.environ:
        drafting.register_for_gpus()
    elif states.VARIABLE in os.environ:
        states.register_for_gpus()
    if "KVBRIDGE_TEST_INDEX_KEYS" in os.environ:
        index_without_a_gpu()
    if "KVBRIDGE_TEST_SEED" in os.environ:
        HookRegistry.register("sglang.srt.model_loader.loader.initialize_dummy_weights", _seeded, HookType.AROUND)
    if "KVBRIDGE_TEST_ROWS" in os.environ or marks.VARIABLE in os.environ:
        watch(_seen)
    if marks.VARIABLE in os.environ:
        marks.watch()
        stats = "sglang.srt.observability.req_time_stats.SchedulerReqTimeStats.compute_and_observe_kv_transfer_metrics"
        HookRegistry.register(stats, _timed, HookType.AFTER)


def index_without_a_gpu() -> None:
    """SGLang asks for a GPU's capability, and its indexers run on one. Here they choose all tokens."""
    import torch
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.layers.attention.minimax_sparse_backend import MiniMaxSparseAttnBackend

    init = Indexer.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.use_dsa_indexer_fusion = not self.is_neox_style  # as it is on CUDA

    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    Indexer.__init__, Indexer.forward = made, _index
    for name in ("forward_extend", "forward_decode"):
        setattr(MiniMaxSparseAttnBackend, name, partialmethod(_attend_to_all, name))


def _index(self: Any, x: Any, q_lora: Any, positions: Any, forward_batch: Any, layer_id: int, **_: Any) -> None:
    """Keys by the model's own weights, as SGLang's CUDA kernels write them: in each page all keys, then their scales.

    `_maybe_rotate` in dsa_indexer.py, whose matrix is a kernel's for GPUs, then `fused_store_indexer_cache` in
    fused_store_index_cache.cuh, which rounds no scale.
    """
    import torch
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    norm, width, rope = self.k_norm, self.head_dim, self.rope_head_dim
    keys = self.wk(x)[0].float()
    keys = torch.nn.functional.layer_norm(keys, (width,), norm.weight.float(), norm.bias.float(), 1e-6)
    turned = keys[:, None, :rope].to(x.dtype).contiguous()
    _, turned = self.rotary_emb(positions, turned.clone(), turned)
    keys = torch.cat([turned.reshape(-1, rope).float(), keys[:, rope:]], -1)
    if not self.use_dsa_indexer_fusion:
        matrix = torch.ones(1, 1)
        while len(matrix) < width:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        keys = (keys @ matrix * width**-0.5).bfloat16().float()
    scales = keys.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448.0
    stored = (keys * (1 / scales)).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    pool, slots = get_token_to_kv_pool(), forward_batch.out_cache_loc
    pages, page = pool.get_index_k_with_scale_buffer(layer_id=layer_id), pool.index_page_size
    at, place = (slots // page)[:, None], (slots % page)[:, None]
    pages[at, place * width + torch.arange(width)] = stored
    pages[at, page * width + place * 4 + torch.arange(4)] = scales.contiguous().view(torch.uint8)


def _attend_to_all(
    self: Any, name: str, q: Any, k: Any, v: Any, layer: Any, batch: Any, save: bool = True, **index: Any
) -> tuple[None, Any]:
    """MiniMax M3's attention: the pool's own writer keeps the rows, and SGLang's attention for CPUs reads K and V."""
    scales = (layer.k_scale_float, layer.v_scale_float, layer.idx_k_scale_float)
    self.kv_pool.set_fused_kv_index_buffer(layer, batch.out_cache_loc, k, v, index["idx_k"], index["idx_v"], *scales)
    return None, getattr(self.dense_backend, name)(q, k, v, layer, batch, False).flatten(1)


def _dram(original: Any, kinds: Any, expected_len: int) -> list[str]:
    return ["DRAM"] * expected_len


class _Dram(str):
    """Its way for unequal numbers of ranks refuses whatever is not a GPU's, and works with this."""

    def __ne__(self, other: object) -> bool:
        return False


def _any_ranks(kind: str, kinds: list[str], context: str) -> str:
    return _Dram(kind) if context == "destination" else kind


def _attend(original: Any, backend: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's attention for CPUs writes the rows of a window at their own slots, and reads them at the others'.

    It takes no sinks either, which a model may pass on as None.
    """
    assert kwargs.pop("sinks", None) is None
    if args[0].forward_mode.is_target_verify():
        args = (drafting.as_chunk(args[0]), *args[1:])
    pool, tokens = backend.token_to_kv_pool, backend.req_to_token_pool
    if not getattr(pool, "layers_mapping", {}).get(layer.layer_id, (0, False))[1]:
        return original(backend, q, k, v, layer, *args, **kwargs)
    mapped = pool.full_to_swa_index_mapping[tokens.req_to_token.long()]
    backend.req_to_token_pool = SimpleNamespace(req_to_token=mapped)
    try:
        return original(backend, q, k, v, layer, *args, **kwargs)
    finally:
        backend.req_to_token_pool = tokens


def _flat_rope(original: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers 5 keeps one record for each kind of layer. MiMo has taken from it what it needs."""
    scaling = kwargs.get("rope_scaling")
    if isinstance(scaling, dict) and any(isinstance(each, dict) for each in scaling.values()):
        kwargs["rope_scaling"] = None
    return original(*args, **kwargs)


def _seeded(original: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Weights that any sharding of the model shares, through its own loader; SGLang's dummy ones if that fails."""
    import torch

    original(model, *args, **kwargs)
    try:
        with torch.no_grad():
            like, seed = next(model.parameters()), int(os.environ["KVBRIDGE_TEST_SEED"])
            model.load_weights(weights.seeded(model.config.to_dict(), like, seed))
    except Exception:
        logging.getLogger(__name__).exception("dummy weights stay")
        return
    print(SEEDED, flush=True)
    if marks.VARIABLE in os.environ:
        marks.note(side="weights", digests=weights.digests(model))


def _seen(side: str, scheduler: Any, req: Any) -> None:
    if marks.VARIABLE in os.environ:
        marks.note(side=side, room=req.bootstrap_room, at_s=time.monotonic())
    if (folder := os.environ.get("KVBRIDGE_TEST_ROWS")) and not Path(folder, PAUSE).exists():
        keep(Path(folder), side, scheduler, req)
        if hasattr(scheduler.req_to_token_pool, "mamba_pool"):
            states.keep(Path(folder), side, scheduler, req)


def _timed(result: Any, stats: Any, metric: Any) -> None:
    if result:
        marks.note(side="reported", **result)
