"""Starts vLLM as `kvbridge.adapters.vllm.on_cpu` does, and writes the KV rows of each prompt to the current folder.

A request with a room (`room_of`) has its rows written (`rows.write`) just before its blocks are freed. On the prefill
side that is when they have been fetched, on the decode side when the request ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvbridge.adapters.vllm.on_cpu import MAINS, ask_for_tiles, main

from .rows import write

LATER = 16  # tokens that may be decoded before rows are read
Part = tuple[int, int, dict[str, Any], np.ndarray]  # first head, heads of the whole model, codec, rows
Also = Callable[[Any, Sequence[Sequence[int]], int], dict[str, np.ndarray]]


def read_rows(worker: Any, ids: Sequence[Sequence[int]], first: int, end: int) -> dict[str, Part]:
    """On a worker: "LAYER.PART" -> its rows [heads, tokens, bytes] at tokens [first, end), and which heads they are.

    `ids` are the request's blocks in each group. Of a window only the rows that are still kept after LATER more tokens
    are read; the others are zeros.
    """
    import torch

    from kvbridge.adapters.vllm.block_tables import TableGroup
    from kvbridge.adapters.vllm.pool import describe
    from kvbridge.adapters.vllm.versions import shard_of

    config, runner = worker.vllm_config, worker.model_runner
    layers = config.compilation_config.static_forward_context
    caches = {name: pages_of(layer.kv_cache) for name, layer in layers.items() if hasattr(layer, "kv_cache")}
    shard = shard_of(config)
    memory = describe(caches, config, runner.kv_cache_config, shard, model_name="any", engine_id="any")
    found: dict[str, Part] = {}
    for plane in memory.pool.planes:
        if memory.pool.groups[plane.group].kind == "state":
            continue  # it is of one moment
        storage = memory.storages[plane.region]
        region = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        group = memory.pool.groups[plane.group]
        block_tokens = group.block_tokens
        tokens = np.arange(first, end)
        blocks = np.array(ids[plane.group])[tokens // block_tokens]
        within = _places(plane.token_axis)[tokens % block_tokens]
        heads = np.arange(plane.heads) * plane.head_stride
        row = (_places(plane.element_axis)[:, None] + np.arange(plane.codec.element_bytes)).ravel()
        where = (plane.offset + blocks * plane.block_stride + within)[None, :, None] + heads[:, None, None] + row
        codec = {"name": plane.codec.name, "width": plane.codec.width, "scales": list(plane.codec.scales)}
        rows = region[torch.from_numpy(where).to(storage.device)].cpu().numpy()
        rows[:, tokens < TableGroup(block_tokens, group.kind, group.window).first(end + LATER)] = 0
        found[f"{plane.layer}.{plane.part}"] = (plane.first_head, plane.total_heads, codec, rows)
    return found


def pages_of(cache: Any) -> Any:
    """A layer's tensor as connectors are handed it: a layer with a state keeps only views of its pages."""
    import torch

    if not isinstance(cache, tuple):
        return cache
    first, size = cache[0], sum(view[0].numel() * view.element_size() for view in cache)
    whole = torch.empty(0, dtype=torch.int8, device=first.device).set_(first.untyped_storage())
    stride = first.stride(0) * first.element_size()
    shape, offset = (len(first), 1, 1, size), first.storage_offset() * first.element_size()
    return whole.as_strided(shape, (stride, size, size, 1), offset)


def _places(axis: Any) -> np.ndarray:
    total = np.zeros(1, np.int64)
    for step in axis:
        total = (total[:, None] + np.arange(step.count) * step.stride).ravel()
    return total


def joined(ranks: Iterable[dict[str, Part]]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Join what `read_rows` found on each rank to [heads of the whole model, tokens, bytes]. Returns the codecs too."""
    whole: dict[str, np.ndarray] = {}
    codecs = {}
    for rank in ranks:
        for key, (first_head, total, codec, rows) in rank.items():
            if key not in whole:
                whole[key] = np.zeros((total, *rows.shape[1:]), np.uint8)
            whole[key][first_head : first_head + len(rows)] = rows
            codecs[key] = codec
    return whole, codecs


def before_free(manager: Any, seen: Callable[[Any], None]) -> None:
    """Have `seen` called with each request whose blocks this KV cache manager is about to free."""

    def seeing(free: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def see_and_free(request: Any) -> Any:
            seen(request)
            return free(request)

        return see_and_free

    for name in ("free", "pop_blocks_for_free"):
        setattr(manager, name, seeing(getattr(manager, name)))


def keep_here(also: Also | None = None) -> None:
    """Watch the engine core that this process makes. Called in each of vLLM's processes, before it makes one.

    `also` reads more of a request's prompt, or in another way: core, blocks and number of tokens -> rows like `joined`.
    """
    from vllm.v1.engine.core import EngineCore

    make = EngineCore.__init__

    def make_and_watch(core: Any, *arguments: Any, **named: Any) -> None:
        make(core, *arguments, **named)
        before_free(core.scheduler.kv_cache_manager, lambda request: _keep(core, request, also))

    EngineCore.__init__ = make_and_watch


def _keep(core: Any, request: Any, also: Also | None = None) -> None:
    params = request.kv_transfer_params or {}
    room, ids = room_of(params), core.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    if room is None or not any(ids):
        return
    rows, codecs = joined(core.collective_rpc(read_rows, args=(ids, 0, request.num_prompt_tokens)))
    rows |= also(core, ids, request.num_prompt_tokens) if also else {}
    codec = "+".join(sorted({each["name"] for each in codecs.values()}))  # rows of several are compared as they are
    by_token = {key: np.swapaxes(each, 0, 1) for key, each in rows.items()}
    side = "prefill" if params.get("do_remote_decode") else "decode"
    write(Path.cwd(), side, room, 0, codec, by_token)


def room_of(params: dict[str, Any]) -> int | None:
    """The room that the router gave the request, or that the prefilling engine has named the rendezvous after."""
    found = re.match(r"room/(\d+)/", params.get("remote_request_id") or "")
    return params.get("bootstrap_room", int(found[1]) if found else None)


if __name__ in MAINS:
    ask_for_tiles()

if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    keep_here()
