"""A real SGLang server, on the CPU or on GPUs, in its own processes, asked over HTTP.

The test's side does not need SGLang. `python` must have it. The server's output goes to `log`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.processes import SETTINGS, free_port
from testing.http_server import HttpServer

ROOT = Path(__file__).resolve().parents[3]
PLUGIN = "kvbridge_test"
LAUNCHERS = {"cpu": "kvbridge.adapters.sglang.on_cpu", "cuda": "sglang.launch_server"}
# As tests.system.gpu.sglang_pairs needs them; the torch backends need no compiler.
GPU_FLAGS = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--mem-fraction-static", "0.85"),
    *("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled", "--disable-custom-all-reduce"),
)
# NVLink multicast stays off, and servers may share GPUs.
GPU_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
}
# A prompt whose other half never comes is given up after so long.
PATIENCE_S = 20


@dataclass(frozen=True)
class ServerConfig:
    """How the server is started. `role` is "alone", "prefill" or "decode"; `backend` SGLang's name of what carries."""

    role: str = "alone"
    gpus: tuple[int, ...] = ()  # the machine's numbers of them, one a rank; none: on the CPU
    page_size: int = 16
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1  # of attention: the tensor parallel ranks are shared out over so many replicas
    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    chunked_prefill_size: int = 256
    max_total_tokens: int = 16384
    backend: str = "kvbridge"
    keeps_prefixes: bool = True  # a radix cache, on the decoding side too
    cores: str = ""  # pinned, one a rank ("0" or "0|1")
    has_tokenizer: bool = False  # else it is asked in token ids
    flags: tuple[str, ...] = ()  # any other
    environment: dict[str, str] = field(default_factory=dict)  # beside this process's

    @property
    def ranks(self) -> int:
        """Processes, each with an agent of its own."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def shards(self) -> int:
        """Ranks that have a part of one request's rows."""
        return self.ranks // self.data_parallel_size


class Server(HttpServer):
    """Start it, `wait_ready`, use it, `kill` it (or use `with`). `folder` gets its log and its test plugin."""

    def __init__(self, config: ServerConfig, model: str, folder: Path, name: str, python: str = sys.executable) -> None:
        self.config = config
        port, self.bootstrap_port = free_port(), free_port()
        flags = _flags(config, model, port, self.bootstrap_port)
        command = [python, "-m", LAUNCHERS[_device(config)], *flags]
        super().__init__(command, port, folder / f"{name}.log", _environment(config, folder) | config.environment)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()  # asked nicely it takes five seconds, and has nothing to put away

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        self.wait_up(seconds=timeout_s)

    def generate(self, body: dict[str, Any], timeout_s: float = 90.0) -> tuple[int, Any]:
        """The HTTP status and what came with it."""
        return _said(*self.ask("/generate", body, timeout_s))

    def begin(self, body: dict[str, Any]) -> http.client.HTTPConnection:
        return self.begun("/generate", body, 90.0)

    def ended(self, begun: http.client.HTTPConnection) -> tuple[int, Any]:
        """The same of what was begun."""
        with contextlib.closing(begun):
            answer = begun.getresponse()
            return _said(answer.status, answer.read().decode(errors="replace"))

    def abort(self, rid: str) -> None:
        assert self.ask("/abort_request", {"rid": rid})[0] == 200

    def held(self) -> dict[str, int]:
        """What the scheduler still has for requests; all zeros when it has nothing to do."""
        status, said = self.ask("/v1/loads")
        assert status == 200, said
        counts = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
        held: Counter[str] = Counter()
        for load in json.loads(said)["loads"]:  # one a replica
            held.update({key: load[key] for key in counts})
            held.update({key: value for key, value in load["disaggregation"].items() if key.endswith("_reqs")})
        return held

    def wait_empty(self, timeout_s: float = 30.0) -> None:
        end = time.monotonic() + timeout_s
        while any((held := self.held()).values()):
            assert time.monotonic() < end, f"not empty within {timeout_s} s: {held}\n{self.tail()}"
            time.sleep(0.1)


def _said(status: int, text: str) -> tuple[int, Any]:
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text


def _device(config: ServerConfig) -> str:
    return "cuda" if config.gpus else "cpu"


def _flags(config: ServerConfig, model: str, port: int, bootstrap: int) -> list[str]:
    flags = ["--model-path", model, "--host", "127.0.0.1", "--port", str(port)]
    flags += [] if config.has_tokenizer else ["--skip-tokenizer-init"]
    flags += GPU_FLAGS if config.gpus else ["--sleep-on-idle", "--mem-fraction-static", "0.5"]
    flags += ["--skip-server-warmup", "--dtype", config.dtype]
    flags += ["--page-size", str(config.page_size), "--tp-size", str(config.tensor_parallel_size)]
    flags += ["--pp-size", str(config.pipeline_parallel_size)]
    if config.data_parallel_size > 1:
        flags += ["--dp-size", str(config.data_parallel_size), "--enable-dp-attention"]
    flags += ["--kv-cache-dtype", config.kv_cache_dtype, "--max-total-tokens", str(config.max_total_tokens)]
    flags += ["--chunked-prefill-size", str(config.chunked_prefill_size), "--max-running-requests", "32"]
    if config.role != "alone":
        flags += ["--disaggregation-mode", config.role, "--disaggregation-transfer-backend", config.backend]
        flags += ["--disaggregation-bootstrap-port", str(bootstrap)]
    if config.role == "decode":
        flags += ["--disaggregation-decode-enable-radix-cache"] * config.keeps_prefixes
    elif not config.keeps_prefixes:
        flags += ["--disable-radix-cache"]
    return [*flags, *config.flags]


def _environment(config: ServerConfig, folder: Path) -> dict[str, str]:
    paths = [str(_plugin(folder)), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    said = {
        "PYTHONPATH": os.pathsep.join(paths),
        **SETTINGS,
        "PYTHONUNBUFFERED": "1",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(PATIENCE_S),
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(PATIENCE_S),
        "KVBRIDGE_TEST_DEVICE": _device(config),
    }
    if config.gpus:
        return said | GPU_ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, config.gpus))}
    cores = config.cores or "|".join(str(rank % 2) for rank in range(config.ranks))
    if config.cores or config.ranks > 1:
        said["SGLANG_CPU_OMP_THREADS_BIND"] = cores
    return said


def _plugin(folder: Path) -> Path:
    """A folder for PYTHONPATH that says that tests.system.sglang.plugin is a plugin of SGLang's."""
    path = folder / "plugins"
    told = path / f"{PLUGIN}-0.dist-info"
    told.mkdir(parents=True, exist_ok=True)
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 0\n")
    (told / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{PLUGIN} = tests.system.sglang.plugin:register\n")
    return path
