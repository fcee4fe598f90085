"""SGLang's weight updates and cache flushes, of which it tells no backend: hooks that tell our manager.

Each update makes the weights nameless until SGLang is given a version for them. With an open session
(`begin_weight_update`) a version holds from the session's end on, as until then parts of the weights may still change.
A flush alone says nothing of the weights, because all updates are seen; it only needs the prompts that nobody fetches
out of its way. The same holds before memory is released.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ..engine.names import UNNAMED, weights_name

UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
FLUSHES = "sglang.srt.managers.scheduler_components.flush_wrapper.SchedulerFlushWrapper"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
QUEUES = ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue")
UPDATES = ("disk", "distributed", "tensor", "ipc")
SOON_S = 2.0  # how long a flush without `timeout` waits for what it had given up


def hooks() -> dict[str, Callable[..., Any]]:
    return {
        **{f"{UPDATER}.update_weights_from_{source}": _change for source in UPDATES},
        f"{UPDATER}.begin_weight_update": _change,
        f"{UPDATER}.end_weight_update": _end,
        f"{SCHEDULER}.record_weight_version_change": _name,
        f"{SCHEDULER}.flush_cache": _flush,
        f"{FLUSHES}.handle": _answer_flush,
        f"{FLUSHES}.check_pending": _go_on_flushing,
    }


def manager_of(scheduler: Any) -> Any:
    """Our manager in this scheduler, or None."""
    found = (getattr(getattr(scheduler, queue, None), "kv_manager", None) for queue in QUEUES)
    return next((manager for manager in found if hasattr(manager, "weights_are")), None)


def _change(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    if (manager := manager_of(updater.scheduler)) is not None:
        manager.weights_are(UNNAMED)
    return original(updater, *args, **kwargs)


def _end(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    answer = original(updater, *args, **kwargs)
    if (manager := manager_of(updater.scheduler)) is not None and updater._session is None and manager.next_weights:
        manager.weights_are(manager.next_weights)
    return answer


def _name(original: Callable[..., Any], scheduler: Any, new_version: str | None) -> Any:
    answer = original(scheduler, new_version)
    if new_version is not None and (manager := manager_of(scheduler)) is not None:
        if scheduler.weight_updater._session is not None:
            manager.next_weights = weights_name(new_version)
        else:
            manager.weights_are(weights_name(new_version))
    return answer


def give_up_held(scheduler: Any) -> bool:
    """SGLang counts as busy while a prefilled prompt is held. Returns whether any was.

    With pipeline stages they end in a later turn, once all stages agree.
    """
    manager = manager_of(scheduler)
    if manager is None or not getattr(scheduler, "disagg_prefill_inflight_queue", None):
        return False
    manager.release()
    if manager.pp_size == 1:  # every rank does this, as they agree on what has ended
        scheduler.process_disagg_prefill_inflight_queue()
    return True


def _flush(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """For `/flush_cache`, and after an update."""
    give_up_held(scheduler)
    if (manager := manager_of(scheduler)) is not None:
        manager.kept.abandon_all()
        if manager.held is not None:
            manager.held.give_back_all()
    return original(scheduler, *args, **kwargs)


def _answer_flush(original: Callable[..., Any], flushes: Any, asked: Any) -> Any:
    """If what was held takes another turn to end, wait for it as if a `timeout` was given: SGLang would refuse."""
    if give_up_held(_scheduler(flushes)) and not flushes._is_fully_idle() and not asked.timeout_s:
        asked = msgspec.structs.replace(asked, timeout_s=SOON_S)
    return original(flushes, asked)


def _go_on_flushing(original: Callable[..., Any], flushes: Any) -> Any:
    """A flush with `timeout` lets running prompts end: these are given up too, as soon as they are held."""
    if (manager := manager_of(_scheduler(flushes))) is not None:
        manager.gives_up_at_once = flushes._pending is not None
    return original(flushes)


def _scheduler(flushes: Any) -> Any:
    return flushes._flush_cache.__self__
