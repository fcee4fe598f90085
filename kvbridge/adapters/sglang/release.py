"""SGLang's release of memory, which may fail: an agent that stands still may go on and write where the memory was.

SGLang knows no answer by which a release fails, and an exception would end the server. So our agent is asked to let go
before SGLang is. If it does not, SGLang is not asked: nothing is freed, and the server goes on. The reason travels to
the tokenizer's process in a field of SGLang's answer that is not used for anything else, and becomes an error there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from ...errors import EngineError
from .building import NAME
from .weights import UPDATER, give_up_held, manager_of

TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
CACHE = "kv_cache"
REASON_BYTES = 512  # of a reason between ranks
log = logging.getLogger("sglang.srt.disaggregation.kvbridge")


def hooks() -> dict[str, Callable[..., Any]]:
    return {
        f"{UPDATER}.release_memory_occupation": _release,
        f"{UPDATER}.resume_memory_occupation": _resume,
        f"{TOKENIZER}.release_memory_occupation": _ask_release,
    }


# In the scheduler's process:


def _release(original: Callable[..., Any], updater: Any, asked: Any) -> Any:
    manager = manager_of(updater.scheduler)
    if manager is None or (asked.tags and CACHE not in asked.tags):
        return original(updater, asked)
    give_up_held(updater.scheduler)
    reason = ""
    if not updater.is_fully_idle(ignore_waiting=updater.scheduler._engine_paused):  # SGLang's assertion ends the server
        reason = "not_idle: requests run or wait: pause and finish them first"
    reason = reason or manager.let_go()
    if any(reasons := of_all_ranks(updater.scheduler, reason)):
        manager.register_buffer_to_engine()
        reason = next(filter(None, reasons))
        log.error("memory is not released: %s", reason)
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput

        return ReleaseMemoryOccupationReqOutput(rid=reason)
    return original(updater, asked)


def _resume(original: Callable[..., Any], updater: Any, asked: Any) -> Any:
    """SGLang ends over what it has not released: that is not resumed."""
    if manager_of(updater.scheduler) is None:
        return original(updater, asked)
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput

    tags = [tag for tag in asked.tags or GPU_MEMORY_ALL_TYPES if tag in updater.offload_tags]
    if not tags:
        return ResumeMemoryOccupationReqOutput()
    return original(updater, msgspec.structs.replace(asked, tags=tags))


def of_all_ranks(scheduler: Any, reason: str) -> list[str]:
    """All ranks do it, or none does: SGLang has them wait for each other. They are asked in the same turn."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.tp_size == 1:
        return [reason]
    is_local = parallel.enable_dp_attention_local_control_broadcast
    return gathered(scheduler.attn_tp_cpu_group if is_local else scheduler.tp_cpu_group, reason)


def gathered(group: Any, reason: str) -> list[str]:
    """What each rank of a process group says, cut to REASON_BYTES. As bytes: torch pickles objects that it gathers."""
    ours = torch.zeros(REASON_BYTES, dtype=torch.uint8)
    if text := reason.encode()[:REASON_BYTES]:
        ours[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    each = [torch.empty_like(ours) for _ in range(group.size())]
    group.allgather([each], [ours]).wait()
    return [bytes(said.tolist()).rstrip(b"\0").decode(errors="replace") for said in each]


# In the tokenizer's:


async def _ask_release(original: Callable[..., Any], tokenizer: Any, asked: Any, request: Any = None) -> Any:
    """SGLang's own drops the answers. Raises EngineError, which its HTTP server answers with status 400."""
    from sglang.srt.runtime_context import get_disagg

    if get_disagg().disaggregation_transfer_backend != NAME:
        return await original(tokenizer, asked, request)
    tokenizer.auto_create_handle_loop()
    answers = await tokenizer.release_memory_occupation_communicator(asked)
    if reason := next((answer.rid for answer in answers if answer.rid), ""):
        raise EngineError(reason.partition(":")[0], reason)
