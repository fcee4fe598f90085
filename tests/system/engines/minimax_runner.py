"""A prompt through MiniMax M3 in vLLM's model runner, without an engine.

    python -m tests.system.engines.minimax_runner FOLDER BLOCK_TOKENS

The model, its specs, the plan of its cache, the block table and the slots are vLLM's; its kernels are the plugin's
stand-ins. Ends with an AssertionError if a row is not where the planes say, or the pool is another than that of
`kvbridge plan`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

BLOCKS, IDS, TOKENS, LENGTH = 8, [5, 2, 6], 300, 512


def prefilled(folder: Path, block_tokens: int) -> tuple[Any, Any]:
    """vLLM's config and its plan of the cache, once a prompt of TOKENS tokens was computed in the blocks IDS."""
    import torch
    from vllm import SamplingParams
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from demo.model import prompt

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    torch.accelerator.empty_cache = lambda: None  # as vLLM's own worker leaves it out
    sizes = {"max_model_len": LENGTH, "max_num_batched_tokens": LENGTH, "num_gpu_blocks_override": BLOCKS}
    options: dict[str, Any] = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32"} | sizes
    config = EngineArgs(model=str(folder), block_size=block_tokens, **options).create_engine_config()
    request = NewRequestData(
        req_id="r",
        prompt_token_ids=prompt(TOKENS),
        mm_features=[],
        sampling_params=SamplingParams(temperature=0, max_tokens=1),
        pooling_params=None,
        block_ids=(IDS[: -(-TOKENS // block_tokens)],),
        num_computed_tokens=0,
        lora_request=None,
    )
    step = {"scheduled_new_reqs": [request], "num_scheduled_tokens": {"r": TOKENS}}
    with set_current_vllm_config(config), torch.inference_mode():
        init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        runner = CPUModelRunner(config, torch.device("cpu"))
        runner.load_model()
        specs, layers = runner.get_kv_cache_spec(), config.compilation_config.static_forward_context
        layouts = get_supported_kv_cache_layouts([each.get_attn_backend() for each in layers.values()])
        resolve_kv_cache_layout(config, [[layout.name for layout in layouts]], specs.values())
        (planned,) = get_kv_cache_configs(config, [specs], [1 << 30])
        runner.initialize_kv_cache(planned)
        scheduled = dataclasses.replace(SchedulerOutput.make_empty(), total_num_scheduled_tokens=TOKENS, **step)
        runner.execute_model(scheduled)
    return config, planned


def main(folder: Path, block_tokens: int) -> None:
    from kvbridge_proto.pool import Shard

    from kvbridge.adapters.vllm.pool import describe
    from kvbridge.models.config import read
    from kvbridge.models.described import pools_of
    from kvbridge.models.engine_command import parse
    from testing.oracle import places_of, take_rows
    from testing.planned import told
    from tests.integration.adapters.small import held
    from tests.system.engines.index_keys import read_plain_index_keys

    config, planned = prefilled(folder, block_tokens)
    caches = {name: each.kv_cache for name, each in config.compilation_config.static_forward_context.items()}
    memory = describe(caches, config, planned, Shard(), model_name="m", engine_id="e")
    planes = {f"{plane.layer}.{plane.part}": plane for plane in memory.pool.planes}
    found = read_plain_index_keys(SimpleNamespace(vllm_config=config), IDS, 0, TOKENS)
    assert sorted(found) == [f"{layer}.{part}" for layer in (1, 2, 3) for part in ("index_key", "k", "v")]
    places = places_of(IDS, range(TOKENS), block_tokens)
    others = np.setdiff1d(np.arange(BLOCKS * block_tokens), places)
    for key, rows in found.items():
        assert rows.any(axis=2).all(), f"{key}: a row was not written"
        assert np.array_equal(take_rows(held(memory), planes[key], places), rows.transpose(1, 0, 2)), key
        assert not take_rows(held(memory), planes[key], others).any(), f"{key}: more was written"
    model = read(json.loads((folder / "config.json").read_text()))
    command = parse(f"vllm --block-size {block_tokens} --dtype float32")
    assert told(pools_of(model, command, "m", "e")[0]) == told(memory.pool)


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    main(Path(sys.argv[1]), int(sys.argv[2]))
