"""Starts SGLang 0.5.23 on a CPU: `python -m kvbridge.adapters.sglang.on_cpu` for `python -m sglang.launch_server`.

The registry has SGLang's packages for CUDA only. With a CPU build of torch two imports fail: torchvision's operators,
and a rotary embedding of vLLM. Neither is ever called on a CPU. Stand-ins replace them, also in the processes that
SGLang spawns.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types

MAINS = ("__main__", "__mp_main__")  # a spawned process runs its parent's main module under the second name
# The engine for CPUs needs an sgl-kernel that is not available. The plain engine needs only torch.
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "0"}
FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-overlap-schedule", "--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"),
    *("--disaggregation-decode-retraction-backup", "cpu_tensor"),  # its default is for GPUs; decode servers ask for it
)


def stand_in() -> None:
    """Install the stand-ins. Call it before SGLang is imported. Idempotent."""
    _module("torchvision._meta_registrations")
    _module("vllm", is_package=True)
    _module("vllm._custom_ops").rotary_embedding = _rotary_embedding  # type: ignore[attr-defined]


def _module(name: str, is_package: bool = False) -> types.ModuleType:
    if name not in sys.modules:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=is_package)
        if is_package:
            module.__path__ = []
        sys.modules[name] = module
    return sys.modules[name]


def _rotary_embedding(*args: object, **kwargs: object) -> None:
    raise NotImplementedError("vLLM's rotary embedding, which the torch_native backend never calls")


def main() -> None:
    """Run SGLang's own command with the flags that a CPU needs and this command line."""
    os.environ.update(ENVIRONMENT)
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args([*FLAGS, *sys.argv[1:]]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ in MAINS:
    stand_in()

if __name__ == "__main__":
    main()
