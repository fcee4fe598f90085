"""Registers `--disaggregation-transfer-backend kvbridge` with SGLang (entry point `sglang.srt.plugins`).

SGLang has no registry for backends yet. So we add the name to its list of choices and to its enum, and hook a few of
its functions. SGLang only logs errors of a plugin, but a failed registration still shows: without the name SGLang's
command line refuses the backend, and without a hook our manager refuses to start (`manager.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from . import held_pages, kept_fetches, release, stream_tokens, weights
from .building import NAME, building, resolving
from .samples import SampleRooms

UTILS = "sglang.srt.disaggregation.utils"
PREFILL_QUEUE = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue"
DECODE_QUEUE = "sglang.srt.disaggregation.decode.DecodePreallocQueue"
POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
RECEIVER = "sglang.srt.disaggregation.common.conn.CommonKVReceiver"
TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


def register() -> None:
    """Register the backend. SGLang calls this in every process, and may call it twice."""
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME in DISAGG_TRANSFER_BACKEND_CHOICES:
        return
    DISAGG_TRANSFER_BACKEND_CHOICES.append(NAME)
    _add_member(TransferBackend)
    hooks: dict[str, Callable[..., Any]] = {
        f"{UTILS}.get_kv_class": _get_kv_class,
        f"{PREFILL_QUEUE}._init_kv_manager": _init_kv_manager,
        f"{PREFILL_QUEUE}.create_sender": _create_sender,
        f"{DECODE_QUEUE}._init_kv_manager": _init_kv_manager,
        f"{DECODE_QUEUE}._create_receiver_and_enqueue": _create_receiver_and_enqueue,
        f"{DECODE_QUEUE}._send_kv_metadata": _send_kv_metadata,
        f"{DECODE_QUEUE}._ensure_prefill_info": _ensure_prefill_info,
        f"{DECODE_QUEUE}._resolve_pending_reqs": _resolve_pending_reqs,
        f"{DECODE_QUEUE}.prefetch_prefill_dp_rank_queries": _prefetch_prefill_dp_rank_queries,
        f"{RECEIVER}.query_prefill_dp_ranks": _query_prefill_dp_ranks,
        f"{POOL}.get_contiguous_buf_infos": _get_contiguous_buf_infos,
        f"{TOKENIZER}._handle_batch_request": _handle_batch_request,
        f"{TOKENIZER}._send_one_request": _send_one_request,
        **held_pages.hooks(),
        **release.hooks(),
        **kept_fetches.hooks(),
        **stream_tokens.hooks(),
        **weights.hooks(),
    }
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def _add_member(backends: Any) -> None:
    """Add our member so that it is found by name, by value, and in the enum's list."""
    member = object.__new__(backends)
    member._name_, member._value_ = NAME.upper(), NAME
    backends._member_map_[NAME.upper()] = member
    backends._value2member_map_[NAME] = member
    backends._member_names_.append(NAME.upper())
    type.__setattr__(backends, NAME.upper(), member)


def _get_kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    if transfer_backend.value != NAME or class_type.value == "kvargs":
        return original(transfer_backend, class_type)
    from .bootstrap import KVBridgeBootstrapServer
    from .manager import KVBridgeManager
    from .receiver import KVBridgeReceiver
    from .sender import KVBridgeSender

    classes = {
        "manager": KVBridgeManager,
        "sender": KVBridgeSender,
        "receiver": KVBridgeReceiver,
        "bootstrap_server": KVBridgeBootstrapServer,
    }
    return classes.get(class_type.value)


def _init_kv_manager(original: Callable[..., Any], queue: Any) -> Any:
    token = building.set(queue)
    try:
        return original(queue)
    finally:
        building.reset(token)


def _get_contiguous_buf_infos(original: Callable[..., Any], pool: Any) -> Any:
    """SGLang refuses to list the buffers of an `hnd` pool, because its own backends cannot carry one. Ours can."""
    if building.get() is None or not pool.use_hnd:
        return original(pool)
    pool.use_hnd = False
    try:
        return original(pool)
    finally:
        pool.use_hnd = True


def _create_sender(original: Callable[..., Any], queue: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    created = original(queue, req, *args, **kwargs)
    if created and hasattr(sender := req.disagg_kv_sender, "bind"):
        sender.bind(req)
    return created


def _create_receiver_and_enqueue(original: Callable[..., Any], queue: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    decode_req = original(queue, req, *args, **kwargs)
    if hasattr(receiver := decode_req.kv_receiver, "queued"):
        receiver.queued(req)
    return decode_req


def _send_kv_metadata(
    original: Callable[..., Any], queue: Any, decode_req: Any, kv_indices: Any, *args: Any, **kwargs: Any
) -> Any:
    if hasattr(receiver := decode_req.kv_receiver, "bind"):
        receiver.bind(decode_req.req, len(kv_indices))
    return original(queue, decode_req, kv_indices, *args, **kwargs)


def _ensure_prefill_info(original: Callable[..., Any], queue: Any, by_address: dict[str, list[Any]]) -> Any:
    """SGLang waits for each server's answer on the scheduler's thread. Let it ask only for those that have come."""
    if not _is_ours(queue):
        return original(queue, by_address)
    tried, now = queue._ensure_last_attempt_time, time.monotonic()
    waiting = {
        address
        for address in by_address
        if now - tried.get(address, -math.inf) >= queue._ensure_retry_interval and queue.kv_manager.is_asking(address)
    }
    ready, remaining = original(queue, {each: by_address[each] for each in by_address if each not in waiting})
    return ready, [*remaining, *(req for address in waiting for req in by_address[address])]


def _resolve_pending_reqs(original: Callable[..., Any], queue: Any) -> Any:
    token = resolving.set(queue if _is_ours(queue) else None)
    try:
        return original(queue)
    finally:
        resolving.reset(token)


def _prefetch_prefill_dp_rank_queries(original: Callable[..., Any], queue: Any) -> None:
    """SGLang asks ahead, and then waits. Our questions are on threads of their own anyway."""
    if not _is_ours(queue):
        original(queue)


def _query_prefill_dp_ranks(original: Callable[..., Any], bootstrap_addr: str, bootstrap_rooms: list[int]) -> Any:
    """The scheduler uses these numbers unchecked, and would wait for them: a wrong one would end it."""
    if (queue := resolving.get()) is None:
        return original(bootstrap_addr, bootstrap_rooms)
    return queue.kv_manager.replicas(bootstrap_addr, bootstrap_rooms)


def _is_ours(queue: Any) -> bool:
    return hasattr(queue.kv_manager, "weights_are")


def _handle_batch_request(original: Callable[..., Any], manager: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave `SampleRooms` on each prompt of the call. `_send_one_request` finds it on the requests made from it."""
    from sglang.srt.runtime_context import get_disagg

    if getattr(call, "parallel_sample_num", 1) > 1 and get_disagg().disaggregation_transfer_backend == NAME:
        rooms = SampleRooms()
        for i in range(call.batch_size):
            call[i].kvbridge_rooms = rooms
    return original(manager, call, *args, **kwargs)


def _send_one_request(original: Callable[..., Any], manager: Any, sent: Any, *args: Any, **kwargs: Any) -> Any:
    state = manager.rid_to_state.get(sent.rid)
    rooms = None if state is None else getattr(state.obj, "kvbridge_rooms", None)
    if rooms is not None:
        sent.bootstrap_room = rooms.next(sent.bootstrap_room)
    return original(manager, sent, *args, **kwargs)
