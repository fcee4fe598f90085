"""Engines for `vllm_pairs`: each rank beside its own agent, or all with vLLM's NixlConnector."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.agent.harness import AgentProcess, agent
from tests.system.engines import marks, weights
from tests.system.engines.engine_process import EngineConfig, EngineProcess

DONE = re.compile(r"done: request=(\S+)(?: transfer=\S+)? bytes=(\d+) ms=([\d.]+)")
CROSSED = "Allocating a cross layer KV cache"  # vLLM's own words
START_S = 150.0
AGENT_START_S = 90.0  # while as many engines import
MODEL_NAME = "pairs"  # what both engines call the model
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GPU_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "4",
}


@dataclass(frozen=True)
class Side:
    """One engine: what it is called and how it differs. `gpus` are the machine's numbers, one a rank."""

    name: str
    gpus: tuple[int, ...]
    block: int
    kv: str = "auto"
    backend: str = "FLASH_ATTN"
    layout: str = ""
    connector: str = "kvbridge"
    has_graphs: bool = False
    is_crossed: bool = False  # all layers in one tensor


@dataclass
class Running:
    """An engine that is up, and its agents by rank (none with NixlConnector)."""

    side: Side
    engine: EngineProcess
    times: Path
    agents: list[AgentProcess] = field(default_factory=list)
    weights_failure: str = ""

    def transfer(self, request: str) -> dict[str, float]:
        """How the KV of `request`, which this engine has decoded, came: ms, bytes. Empty if it did not."""
        if self.side.connector != "kvbridge":
            self.engine._say(op="transfers")
            found = self.engine._answer("transfers", 10)["transfers"]
            keys = ("ms", "post_ms", "bytes", "descriptors")
            return {key: sum(each[key] for each in found) for key in keys} if found else {}
        lines = [line for agent in self.agents for line in DONE.findall(agent.text())]
        mine = [(int(size), float(ms)) for name, size, ms in lines if name.rpartition("-")[0] == request]
        # Ranks receive side by side.
        return {"ms": max(ms for _, ms in mine), "bytes": sum(size for size, _ in mine)} if mine else {}

    def noted(self, side: str, room: int | str | None = None) -> list[dict[str, Any]]:
        """What the engine has noted of this kind (tests.system.engines.marks), but for ranks in processes of their
        own."""
        return marks.noted(self.times, side, room)

    def route(self, sender: Any) -> str:
        """How the KV comes from `sender`, as its agent found and proved it."""
        to = {each.address for each in self.agents}
        peers = [peer for each in sender.agents for peer in each.status.peers if peer.state.startswith("receiver")]
        found = {peer.route for peer in peers if peer.address in to}
        return "; ".join(sorted(found))

    def weights(self) -> None:
        """Make weights in it; what went wrong is kept and said, the engine is of use all the same."""
        self.engine._say(op="weights", seed=weights.SEED)
        self.weights_failure = self.engine._answer("weights", START_S)["failure"]

    def digests(self) -> dict[str, int]:
        """Of the weights that it holds (tests.system.engines.weights)."""
        self.engine._say(op="digests")
        return self.engine._answer("digests", START_S)["digests"]

    def likely(self, request: str, tokens: list[int], amount: int = 1) -> tuple[list[int], list[dict[int, float]]]:
        """How it goes on by itself, and the chances of the likeliest tokens at each place."""
        self.engine._say(op="likely", request=request, tokens=tokens, amount=amount)
        answer = self.engine._answer("likely", 60)
        return answer["tokens"], [{int(token): chance for token, chance in each.items()} for each in answer["places"]]

    def kill(self) -> None:
        self.engine.kill()
        for each in self.agents:
            each.kill()

    def is_well(self) -> bool:
        try:
            name = f"well-{time.monotonic_ns()}"
            self.engine.submit(name, [5, 6, 7], 1)
            self.engine.result(name, 15)
        except (RuntimeError, OSError):
            return False
        return all(each.process.poll() is None for each in self.agents)


class Engines:
    """All that are up, by name; `start` begins in the background and may be called again after a loss."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        is_cpu: bool,
        agent_options: dict[str, str],
        python: str = sys.executable,  # one that has vLLM
    ) -> None:
        self.folder = folder
        self.is_cpu = is_cpu
        self._stack = stack
        self._agent_options = agent_options
        self._python = python
        self._model = folder / "model"
        self._up: dict[str, Future[Running]] = {}
        self._pool = stack.enter_context(ThreadPoolExecutor(1 if is_cpu else 12))
        self._lock = threading.Lock()
        self._attempts = 0
        if is_cpu:
            weights.write(self._model)
        else:
            self._model.mkdir(parents=True, exist_ok=True)
            (self._model / "config.json").write_text(json.dumps(LLAMA_8B, indent=1))

    def start(self, *sides: Side) -> None:
        for side in sides:
            if side.name not in self._up:
                self._attempts += 1
                self._up[side.name] = self._pool.submit(self._start, side, self._attempts)

    def get(self, side: Side) -> Running:
        """Wait for it. Raises what kept it from starting."""
        self.start(side)
        return self._up[side.name].result(START_S + 60)

    def drop(self, side: Side) -> None:
        """Forget an engine that does not answer; its next use starts another."""
        future = self._up.pop(side.name, None)
        if future is not None and future.done() and future.exception() is None:
            future.result().kill()

    def _start(self, side: Side, attempt: int) -> Running:
        name = f"{side.name}-{attempt}"
        config = self._config(side, name, attempt)
        log = self.folder / f"{name}.log"
        engine = self._enter(EngineProcess(config, log, self._python, module="tests.system.gpu.pair_loop"))
        running = Running(side, engine, log.with_suffix(".times"))
        try:
            if side.connector == "kvbridge":  # while the engine imports
                for rank, gpu in enumerate(side.gpus):
                    running.agents.append(self._enter(self._agent(f"{name}-{rank}", gpu)))
            engine.wait_ready(START_S)
            if side.is_crossed and CROSSED not in engine.log.read_text():
                raise RuntimeError(f"{name} has no cross-layer cache")
            if not self.is_cpu:
                running.weights()
        except BaseException:
            running.kill()
            raise
        return running

    def _enter(self, what: contextlib.AbstractContextManager[Any]) -> Any:
        entered = what.__enter__()
        with self._lock:
            self._stack.push(what)
        return entered

    def _agent(self, name: str, gpu: int) -> contextlib.AbstractContextManager[AgentProcess]:
        options: dict[str, Any] = dict.fromkeys(("slot_bytes", "receive_slots", "send_slots"))  # as operators have
        options["log_level"] = "debug"  # says how long each transfer took
        options["device"] = "cpu" if self.is_cpu else f"cuda:{gpu}"
        return agent(self.folder, name, AGENT_START_S, **options | self._agent_options)

    def _config(self, side: Side, name: str, attempt: int) -> EngineConfig:
        more: dict[str, Any] = {"kv_transfer_config": self._transfer(side, name)}
        environment = {
            marks.VARIABLE: str(self.folder / f"{name}.times"),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(5600 + 20 * attempt),
        }
        if self.is_cpu:
            more["num_gpu_blocks_override"] = (1 << 15) // side.block
            cores = "|".join(str(gpu % 2) for gpu in side.gpus)
        else:
            cores = "0"
            more |= {"load_format": "dummy", "attention_backend": side.backend, "gpu_memory_utilization": 0.05}
            more |= {"kv_cache_memory_bytes": 5 << 29}
            environment |= GPU_ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, side.gpus))}
            if side.layout:
                environment["VLLM_KV_CACHE_LAYOUT"] = side.layout
            if len(side.gpus) > 1:  # its set-up asks every pair of GPUs, in processes of their own
                more["disable_custom_all_reduce"] = True
            if side.is_crossed:  # the other model runner of 0.26 does not ask the connector
                environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
            if side.has_graphs:  # without torch.compile, which would take a minute
                sizes = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
                more |= {"enforce_eager": False, "compilation_config": sizes}
        return EngineConfig(
            model=str(self._model),
            block_size=side.block,
            kv_cache_dtype=side.kv,
            tensor_parallel_size=len(side.gpus),
            max_num_batched_tokens=8192,
            max_num_seqs=8,
            max_model_len=16384,
            cores=cores,
            more=more,
            environment=environment,
        )

    def _transfer(self, side: Side, name: str) -> dict[str, Any]:
        if side.connector != "kvbridge":
            device = "cpu" if self.is_cpu else "cuda"
            connector: dict[str, Any] = {"kv_connector": side.connector, "kv_buffer_device": device}
        else:
            connector = {
                "kv_connector": "KVBridgeConnector",
                "kv_connector_module_path": "kvbridge.adapters.vllm.connector",
            }
            extra = {
                "kvbridge_socket": str(self.folder / f"{name}-{{rank}}.sock"),
                "kvbridge_connect_s": 60,
                "kvbridge_deadline_s": 20,
                "kvbridge_model_name": MODEL_NAME,
                "kvbridge_cross_layer": side.is_crossed,
            }
            connector |= {"kv_load_failure_policy": "fail", "kv_connector_extra_config": extra}
        return {"kv_role": "kv_both", "engine_id": f"pairs-{name}", **connector}
