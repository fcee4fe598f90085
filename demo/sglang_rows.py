"""Starts SGLang as `kvbridge.adapters.sglang.on_cpu` does, and writes the KV rows of each prompt to the current folder.

The prefill side writes them (`rows.write`) when it sends its last chunk, the decode side when it commits the transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvbridge.adapters.sglang.on_cpu import MAINS, main, stand_in

from .rows import write

SENDS = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk"
TAKES = "sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req"
DTYPES = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float8_e4m3fn": "fp8_e4m3",
}
Seen = Callable[[str, Any, Any], None]  # side, scheduler, request


def watch(seen: Seen) -> None:
    """Have `seen` called at both moments. Call it in each of SGLang's processes, before it makes an engine."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def sends(scheduler: Any, req: Any, last_chunk: bool = False, end_idx: int | None = None) -> None:
        if last_chunk and req.bootstrap_room:  # no room: the server's own health check
            seen("prefill", scheduler, req)

    def takes(queue: Any, decode_req: Any) -> None:
        if decode_req.req.bootstrap_room:
            seen("decode", queue.scheduler, decode_req.req)

    HookRegistry.register(SENDS, sends, HookType.BEFORE)
    HookRegistry.register(TAKES, takes, HookType.BEFORE)


def keep(folder: Path, side: str, scheduler: Any, req: Any) -> None:
    """Write the whole prompt's rows on this rank."""
    from sglang.srt.runtime_context import get_parallel

    tokens = len(req.origin_input_ids)
    slots = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :tokens].long()
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if hasattr(pool, "layers_mapping"):
        rows = _halves(pool, slots)
    elif hasattr(pool, "full_attention_layer_id_mapping"):  # beside recurrent states
        rows = _rows(pool.full_kv_pool, slots, 0, list(pool.full_attention_layer_id_mapping))
    else:
        rows = _rows(getattr(pool, "main_pool", pool), slots, pool.start_layer)
    for layer in getattr(pool, "index_k_layer_id_mapping", ()):  # index keys in rows of their own, as MiniMax M3's
        rows[f"{layer}.index_key"] = _bytes(pool.get_index_k_buffer(layer)[slots])
    drafts = () if scheduler.draft_worker is None else scheduler.draft_worker._draft_model_runners()
    for number, runner in enumerate(drafts, start=scheduler.model_config.num_hidden_layers):  # after the model's
        own = runner.token_to_kv_pool
        rows |= _rows(getattr(own, "full_kv_pool", own), slots, number)
    if hasattr(pool, "index_key_cache"):
        rows |= _index_keys(pool, slots)
    parallel = get_parallel()
    rank = parallel.pp_rank * parallel.attn_tp_size + parallel.attn_tp_rank
    write(folder, side, req.bootstrap_room, rank, DTYPES[str(pool.dtype)], rows)


def _rows(pool: Any, slots: Any, first: int, numbers: Sequence[int] = range(1 << 16)) -> dict[str, Any]:
    """Of a pool whose first layer is number `first` of `numbers`, those of the model."""
    parts = {"latent": pool.kv_buffer} if hasattr(pool, "kv_buffer") else {"k": pool.k_buffer, "v": pool.v_buffer}
    return {
        f"{layer}.{part}": _bytes(buffer[slots])
        for part, buffers in parts.items()
        for layer, buffer in zip(numbers[first:], buffers, strict=False)
    }


def _index_keys(pool: Any, slots: Any) -> dict[str, Any]:
    """Each page has all keys, then a scale for each. Layers that use another's choice have no pages."""
    page, width, scale = pool.page_size, 128, 4
    at, place, rows = slots // page, (slots % page)[:, None], {}
    for layer, pages in enumerate(pool.index_k_with_scale_buffer, start=pool.start_layer):
        if len(pages):
            for part, start, size in (("index_key", 0, width), ("index_key_scale", page * width, scale)):
                where = start + place * size + slots.new_tensor(range(size))
                rows[f"{layer}.{part}"] = pages[at[:, None], where].cpu().numpy()[:, None]
    return rows


def _halves(pool: Any, slots: Any) -> dict[str, Any]:
    """Layers with a window have slots of their own. Rows that they do not keep are zeros."""
    mapped, rows = pool.full_to_swa_index_mapping[slots], {}
    for layer, (place, has_window) in pool.layers_mapping.items():
        half, places = (pool.swa_kv_pool, mapped) if has_window else (pool.full_kv_pool, slots)
        for part, buffers in (("k", half.k_buffer), ("v", half.v_buffer)):
            rows[f"{layer}.{part}"] = _bytes(buffers[place][places])
            rows[f"{layer}.{part}"][(places == 0).cpu().numpy()] = 0
    return rows


def _bytes(rows: Any) -> Any:
    """As uint8 [tokens, heads, row bytes]."""
    import torch

    return rows.contiguous().view(torch.uint8).cpu().numpy()


def _keep_here(side: str, scheduler: Any, req: Any) -> None:
    keep(Path.cwd(), side, scheduler, req)


if __name__ in MAINS:
    stand_in()
    watch(_keep_here)

if __name__ == "__main__":
    main()
