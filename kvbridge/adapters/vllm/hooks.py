"""What vLLM tells no connector, but a scheduler's half must know: cache resets, pauses, and names of weights.

vLLM (0.26 to 0.33) asks a connector to reset only if its caller says so, and after its own reset has failed because
blocks are held for others to fetch. So the methods are wrapped, once a process; connectors without our half are left
alone. vLLM before 0.32 has no names for weights: its engine core gets the method, for `call_utility`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .scheduler import SchedulerSide

MARK = "is_wrapped_by_kvbridge"


def install(ours: type[Any]) -> None:
    """Wrap vLLM's methods. Called in the scheduler's process, before there is a scheduler; again changes nothing.

    `ours` is the class of our connector.
    """
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    def sides(connector: Any) -> Iterator[SchedulerSide]:
        """The scheduler's halves of our connector in this one, which may hold several (MultiConnector)."""
        for each in (connector, *getattr(connector, "_connectors", ())):
            if isinstance(each, ours):
                yield each.scheduler

    def reset(original: Callable[..., bool], scheduler: Any, *args: Any, **kwargs: Any) -> bool:
        with ExitStack() as stack:
            for side in sides(scheduler.connector):
                side.cache_is_reset()
                stack.enter_context(side.held.counted_as_free())
            return original(scheduler, *args, **kwargs)

    def pause(original: Callable[..., None], scheduler: Any, state: Any) -> None:
        original(scheduler, state)
        for side in sides(scheduler.connector):
            side.resumes() if state == PauseState.UNPAUSED else side.pauses()

    def name(original: Callable[..., None], core: Any, weight_version: str) -> None:
        original(core, weight_version)
        for side in sides(core.scheduler.connector):
            side.weights_are(weight_version)

    _wrap(Scheduler, "reset_prefix_cache", reset)
    _wrap(Scheduler, "set_pause_state", pause)
    _wrap(EngineCore, "set_weight_version", name)


def _wrap(owner: Any, method: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, method, lambda *_: None)
    if hasattr(original, MARK):
        return

    @wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapper, MARK, True)
    setattr(owner, method, wrapper)
