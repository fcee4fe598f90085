"""What the tests put into SGLang's processes, by its own plugins: it keeps the KV rows of prompts, and transfer times.

Nothing of it ships: `server.py` makes the entry point, in a folder of its own on PYTHONPATH. `KVBRIDGE_TEST_ROWS` names
a folder: there the prefilling side writes a prompt's rows when it sends its last chunk, the decoding side when it has
taken the transfer for good; none while the folder has a file `pause`. `KVBRIDGE_TEST_TIMES` names a file that gets a
line of JSON when either happens, and what SGLang itself reports of the transfer. `KVBRIDGE_TEST_SEED` makes the weights
of a model that is only a config.json.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvbridge.demo.sglang_rows import keep, watch

PAUSE = "pause"
SEEDED = "kvbridge_test: seeded"  # what a rank says whose weights were made
# In a net of 32 layers, more than that for what is added to its stream lets bf16 in another order end in other tokens.
ADDED = {"o_proj": 0.35, "down_proj": 0.35}


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
        # Attention that is parallel over data: its way for CPUs is there, for SGLang's CPU engine alone.
        from sglang.srt.distributed import parallel_state
        from sglang.srt.layers import dp_attention
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
        from sglang.srt.model_executor import forward_batch_info

        parallel_state._is_cpu = forward_batch_info._is_cpu = True
        group = parallel_state.GroupCoordinator
        group.all_to_all_single = group._all_to_all_single
        dp_attention.memcpy_func = dp_attention.memcpy_cpu
        TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
    if "KVBRIDGE_TEST_SEED" in os.environ:
        HookRegistry.register("sglang.srt.model_loader.loader.initialize_dummy_weights", _seeded, HookType.AROUND)
    if "KVBRIDGE_TEST_ROWS" in os.environ or "KVBRIDGE_TEST_TIMES" in os.environ:
        watch(_seen)
    if "KVBRIDGE_TEST_TIMES" in os.environ:
        stats = "sglang.srt.observability.req_time_stats.SchedulerReqTimeStats.compute_and_observe_kv_transfer_metrics"
        HookRegistry.register(stats, _timed, HookType.AFTER)


def _dram(original: Any, kinds: Any, expected_len: int) -> list[str]:
    return ["DRAM"] * expected_len


class _Dram(str):
    """Its way for unequal numbers of ranks refuses whatever is not a GPU's, and works with this."""

    def __ne__(self, other: object) -> bool:
        return False


def _any_ranks(kind: str, kinds: list[str], context: str) -> str:
    return _Dram(kind) if context == "destination" else kind


def _seeded(original: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Weights that any sharding of the model shares, through its own loader; SGLang's dummy ones if that fails."""
    import torch

    original(model, *args, **kwargs)
    try:
        with torch.no_grad():
            model.load_weights(_weights(model, int(os.environ["KVBRIDGE_TEST_SEED"])))
    except Exception:
        logging.getLogger(__name__).exception("dummy weights stay")
        return
    print(SEEDED, flush=True)


def _weights(model: Any, seed: int) -> Iterator[tuple[str, Any]]:
    import torch

    from kvbridge.demo.model import GAINS, _shapes

    first = next(model.parameters())
    for number, (name, shape) in enumerate(_shapes(model.config.to_dict()).items()):
        if name.endswith("norm.weight"):
            yield name, torch.ones(shape, dtype=first.dtype, device=first.device)
            continue
        generator = torch.Generator(first.device).manual_seed(seed + number)
        values = torch.randn(shape, dtype=first.dtype, device=first.device, generator=generator)
        if "embed_tokens" not in name:
            gain = next((gain for part, gain in (GAINS | ADDED).items() if part in name), 1.0)
            values *= gain / math.sqrt(shape[1])
        yield name, values


def _seen(side: str, scheduler: Any, req: Any) -> None:
    if "KVBRIDGE_TEST_TIMES" in os.environ:
        _note(side=side, room=req.bootstrap_room, at_s=time.monotonic())
    if (folder := os.environ.get("KVBRIDGE_TEST_ROWS")) and not Path(folder, PAUSE).exists():
        keep(Path(folder), side, scheduler, req)


def _timed(result: Any, stats: Any, metric: Any) -> None:
    if result:
        _note(side="reported", **result)


def _note(**line: Any) -> None:
    with Path(os.environ["KVBRIDGE_TEST_TIMES"]).open("a") as file:
        file.write(json.dumps(line) + "\n")
