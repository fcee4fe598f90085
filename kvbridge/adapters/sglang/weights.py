"""SGLang's weight updates and cache flushes, of which it tells no backend: hooks that tell our manager.

Each update makes the weights nameless until SGLang is given a version for them. With an open session
(`begin_weight_update`) a version holds from the session's end on, as until then parts of the weights may still change.
A flush alone says nothing of the weights, because all updates are seen; it only needs the prompts that nobody fetches
out of its way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..engine.weights import UNNAMED, weights_name

UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
QUEUES = ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue")
UPDATES = ("disk", "distributed", "tensor", "ipc")


def hooks() -> dict[str, Callable[..., Any]]:
    return {
        **{f"{UPDATER}.update_weights_from_{source}": _change for source in UPDATES},
        f"{UPDATER}.begin_weight_update": _change,
        f"{UPDATER}.end_weight_update": _end,
        f"{SCHEDULER}.record_weight_version_change": _name,
        f"{SCHEDULER}.flush_cache": _flush,
    }


def _manager(scheduler: Any) -> Any:
    """Our manager in this scheduler, or None."""
    found = (getattr(getattr(scheduler, queue, None), "kv_manager", None) for queue in QUEUES)
    return next((manager for manager in found if hasattr(manager, "weights_are")), None)


def _change(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    if (manager := _manager(updater.scheduler)) is not None:
        manager.weights_are(UNNAMED)
    return original(updater, *args, **kwargs)


def _end(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    answer = original(updater, *args, **kwargs)
    if (manager := _manager(updater.scheduler)) is not None and updater._session is None and manager.next_weights:
        manager.weights_are(manager.next_weights)
    return answer


def _name(original: Callable[..., Any], scheduler: Any, new_version: str | None) -> Any:
    answer = original(scheduler, new_version)
    if new_version is not None and (manager := _manager(scheduler)) is not None:
        if scheduler.weight_updater._session is not None:
            manager.next_weights = weights_name(new_version)
        else:
            manager.weights_are(weights_name(new_version))
    return answer


def _flush(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang refuses to flush while a prefilled prompt is held. With pipeline stages it ends in a later turn."""
    manager = _manager(scheduler)
    if manager is not None and getattr(scheduler, "disagg_prefill_inflight_queue", None):
        manager.release()
        if manager.pp_size == 1:  # every rank does this, as they agree on what has ended
            scheduler.process_disagg_prefill_inflight_queue()
    return original(scheduler, *args, **kwargs)
