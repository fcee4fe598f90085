"""One real vLLM engine of the demo: `<python with vLLM> -m demo.vllm_engine '<job as JSON>'`.

Reads requests from stdin, one a line, and answers each with a line on stdout. All that vLLM prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from .vllm_cpu import MAINS, ask_for_tiles


def main() -> None:
    """Make the model, or start the engine and serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = json.loads(sys.argv[1])
    if "make_model" in job:
        from .model import write_model

        write_model(Path(job["make_model"]))
        print(json.dumps({"event": "ready"}), file=answers)
        return
    engine = _engine(job)
    print(json.dumps({"event": "ready"}), file=answers)
    for line in sys.stdin:
        print(json.dumps({"event": "answer", **_run(engine, json.loads(line))}), file=answers)
    answers.flush()
    os._exit(0)  # skips vLLM's teardown, which takes seconds and is not needed


def _engine(job: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=2048,
        enable_prefix_caching=False,
        disable_log_stats=True,
        block_size=job["block_size"],
        kv_cache_dtype=job["kv_cache_dtype"],
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVBridgeConnector",
            kv_role="kv_both",
            kv_load_failure_policy="fail",
            kv_connector_extra_config={"kvbridge_socket": job["socket"], "kvbridge_model_name": "demo"},
        ),
    )


def _run(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The greedy tokens of one prompt, and the parameters that a proxy would pass to the other engine."""
    from vllm import SamplingParams

    params = request.get("params")
    sampling = SamplingParams(
        temperature=0,
        max_tokens=request["max_tokens"],
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": params} if params else None,
    )
    began = time.perf_counter()
    output = engine.generate([{"prompt_token_ids": request["prompt"]}], sampling, use_tqdm=False)[0]
    return {
        "tokens": list(output.outputs[0].token_ids),
        "reason": str(output.outputs[0].finish_reason),
        "params": getattr(output, "kv_transfer_params", None),
        "cached": output.num_cached_tokens or 0,
        "seconds": time.perf_counter() - began,
    }


if __name__ in MAINS:
    ask_for_tiles()

if __name__ == "__main__":
    main()
