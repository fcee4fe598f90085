"""Engines that pairs are made of: vLLM and SGLang, each rank beside its own agent, or with the engine's NIXL."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from demo.model import KV_HEADS
from kvbridge.local_agents import ask_trace
from testing.agents import AgentProcess, agent
from tests.system.cross.fleet import greedy
from tests.system.engines import marks, weights
from tests.system.engines.drafts import NGRAMS
from tests.system.engines.engine_process import EngineConfig, EngineProcess
from tests.system.engines.kinds import (
    GPT_OSS_WINDOW,
    write_alike_halves,
    write_gpt_oss,
    write_plain_sparse,
    write_sparse,
)
from tests.system.engines.states import (
    BESIDE,
    GATED_MTP,
    KDA,
    LIGHTNING,
    MAMBA1,
    MAMBA2,
    ONE_GROUP,
    QWEN35,
    SHORT_CONV,
    writer,
)
from tests.system.sglang import server, states
from tests.system.sglang.plugin import PAUSE, SEEDED
from tests.system.sglang.server import Server, ServerConfig

MOVED = re.compile(r"(\d+) bytes")
MAPPED = re.compile(r"attached: .* memory=(\S+)")
CROSSED = "Allocating a cross layer KV cache"  # vLLM's own words
START_S = 270.0  # Triton compiles what a model of states needs, for each engine
AGENT_START_S = 90.0  # while as many engines import
ANSWER_S = 240.0  # later than both engines of a pair give up and say why; KDA tunes its kernels for longer than 75
MODEL_NAME = "pairs"  # what all engines call the model
POOL_TOKENS = 24576  # of SGLang's
DECODED = 16  # tokens that are compared
LIKELY = 5  # tokens whose chances SGLang tells, at each place
ALONE = "alone"
LLAMA_8B: dict[str, Any] = {
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
LLAMA = "llama"
# Their own numbers of index heads: kernels on GPUs take 32 and 64. FA3 has few head widths.
SPARSE = {"num_attention_heads": 4, "qk_nope_head_dim": 128, "v_head_dim": 128}
MODELS: dict[str, dict[str, Any]] = {
    "dsv32": SPARSE | {"index_n_heads": 64, "index_topk_freq": 1},
    "glm5": SPARSE | {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "index_n_heads": 32},
}
GPT_OSS, LAGUNA = "gpt-oss", "laguna"  # the second has the first's widths and window, and no experts
MINIMAX = "m3"
NEMOTRON, QWEN, QWEN35_MTP = "nemotron", "qwen", "qwen35-mtp"
NEMOTRON_CYCLE, QWEN_CYCLE = "nemotron-cycle", "qwen-cycle"  # which go on with what drafts guess
QWEN_DENSE = "qwen-dense"  # for SGLang, whose kernels for experts are not everywhere
SGLANG_FLAGS = {
    LLAMA: ("--load-format", "dummy"),
    QWEN_DENSE: ("--linear-attn-backend", "triton", "--max-mamba-cache-size", "64"),
}
WIDE = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 128}  # as kernels on GPUs want them
WIDE_MAMBA2 = MAMBA2 | {"head_dim": 128, "ssm_state_size": 128}
# As many layers, heads and states as the models have, so what travels is theirs. Else as narrow as the others.
LARGE: dict[str, dict[str, Any]] = {
    "nemotron-8b": MAMBA2
    | {
        "num_hidden_layers": 52,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "ssm_state_size": 128,
        "n_groups": 8,
    },
    "qwen35-9b": QWEN35
    | WIDE
    | {
        "num_hidden_layers": 32,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "rope_parameters": QWEN35["rope_parameters"] | {"mrope_section": [11, 11, 10]},
    },
}
LARGE_CACHE = 4 << 30  # bytes; of one request about 100 MiB
STATES: dict[str, Callable[[Path], Path]] = {
    **{name: writer(fields) for name, fields in LARGE.items()},
    NEMOTRON: writer(WIDE_MAMBA2),
    NEMOTRON_CYCLE: writer(WIDE_MAMBA2, faint=0.4),
    QWEN: writer(GATED_MTP | WIDE),
    QWEN_CYCLE: writer(GATED_MTP | WIDE, faint=0.13),
    "qwen35": writer(QWEN35 | WIDE),
    QWEN35_MTP: writer(QWEN35 | WIDE | {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}),
    "kimi": writer(KDA),
    "jamba": writer(MAMBA1),
    "lfm2": writer(SHORT_CONV),
    "ring": writer(LIGHTNING),
    "granite": writer(ONE_GROUP | {"mamba_d_state": 128}),
    "falcon-h1": writer(BESIDE | {"head_dim": 128, "mamba_d_state": 128}),
}
WRITE: dict[str, Callable[[Path], Path]] = {
    **{name: partial(write_sparse, **changes) for name, changes in MODELS.items()},
    GPT_OSS: write_gpt_oss,
    LAGUNA: partial(write_alike_halves, width=64, window=GPT_OSS_WINDOW),
    **STATES,
    QWEN_DENSE: partial(states.write, more=WIDE | {"mlp_only_layers": [0, 1, 2, 3]}),
    MINIMAX: partial(write_plain_sparse, query_heads=16 * KV_HEADS),  # for each head of K and V as many as M3 has
}
DSA_PLUGIN = Path(__file__).parents[1] / "engines" / "dsa_plugin"
MINIMAX_PLUGIN = DSA_PLUGIN.with_name("minimax_plugin")
GPU_ENVIRONMENT = server.GPU_ENVIRONMENT | {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "OMP_NUM_THREADS": "4",
}


@dataclass(frozen=True)
class Side:
    """One engine: what it is called and how it differs. `gpus` are the machine's numbers, one a rank."""

    name: str
    gpus: tuple[int, ...]
    block: int = 16  # tokens; of a page, for SGLang
    kv: str = "auto"
    is_nixl: bool = False  # the engine's own connector, without agents
    model: str = LLAMA  # or one of WRITE, which are tiny

    @property
    def has_agents(self) -> bool:
        return not self.is_nixl


@dataclass(frozen=True)
class VLLM(Side):
    backend: str = "FLASH_ATTN"  # "" for vLLM's choice
    layout: str = ""
    has_graphs: bool = False
    is_crossed: bool = False  # all layers in one tensor
    has_prefixes: bool = False  # it finds prefixes of prompts in its cache
    drafts: tuple[str, int] = ("", 0)  # by which method, and how many tokens in a step
    stages: tuple[int, ...] = ()  # of pipeline parallelism: how many layers each has
    is_split: bool = False  # its ranks split the tokens of latents by decode context parallelism
    conv_order: str = "DS"  # of convolutions' rows in states; NixlConnector takes no other
    more: tuple[tuple[str, Any], ...] = ()  # any other engine arguments
    keeps_s: float = 0.0  # how long it keeps answers for the next turn
    is_noted: bool = False  # says when messages come and go, which takes it a while: for pairs with SGLang


@dataclass(frozen=True)
class SGLang(Side):
    role: str = "prefill"  # or "decode", or ALONE

    @property
    def has_agents(self) -> bool:
        return not self.is_nixl and self.role != ALONE


@dataclass(frozen=True)
class Voice:
    """What an engine alone says to one prompt, and the chances of the likeliest tokens at each place."""

    tokens: list[int]
    likely: list[dict[int, float]]


@dataclass
class Beside:
    """An engine that is up, and its agents by rank."""

    side: Side
    engine: Any
    times: Path
    agents: list[AgentProcess] = field(default_factory=list)
    dummy: str = ""  # why it has not the weights that all others have

    def noted(self, side: str, room: int | str | None = None) -> list[dict[str, Any]]:
        """What it has noted of this kind (tests.system.engines.marks): one a rank of SGLang's, vLLM's core alone."""
        return marks.noted(self.times, side, room)

    def fetched(self, request: str) -> list[tuple[int, float]]:
        """Bytes and milliseconds of this request's transfers, one a rank, by what its agents remember."""
        entries = [entry for each in self.agents for entry in ask_trace(str(each.socket), (request,)).entries]
        done = [(MOVED.match(each.text), each.seconds) for each in entries if each.what == "done"]
        return [(int(moved[1]), seconds * 1e3) for moved, seconds in done if moved and seconds is not None]

    def route(self, sender: Running) -> str:
        """How the KV comes from `sender`, as its agents found and proved it."""
        to = {each.address for each in self.agents}
        peers = [peer for each in sender.agents for peer in each.status.peers if peer.state.startswith("receiver")]
        return "; ".join(sorted({peer.route for peer in peers if peer.address in to}))

    def kill(self) -> None:
        self.engine.kill()
        for each in self.agents:
            each.kill()

    def are_agents_alive(self) -> bool:
        return all(each.process.poll() is None for each in self.agents)


@dataclass
class RunningVLLM(Beside):
    engine: EngineProcess

    def is_well(self) -> bool:
        try:
            name = f"well-{time.monotonic_ns()}"
            self.engine.submit(name, [5, 6, 7], 1)
            self.engine.result(name, 15)
        except (RuntimeError, OSError):
            return False
        return self.are_agents_alive()

    def prepare(self, is_cpu: bool) -> None:
        """Once it is ready. Without made weights it is of use all the same."""
        assert isinstance(self.side, VLLM)
        if self.side.is_crossed and CROSSED not in self.engine.log.read_text():
            raise RuntimeError(f"{self.side.name} has no cross-layer cache")
        if not is_cpu and self.side.model == LLAMA:  # others have read them
            self.dummy = self.engine.ask("weights", START_S, seed=weights.SEED)["failure"]

    def digests(self) -> dict[str, int]:
        """Of the weights that it holds (tests.system.engines.weights)."""
        return dict(self.engine.ask("digests", START_S)["digests"])

    def voice(self, tokens: list[int]) -> Voice:
        """How it goes on by itself."""
        said = self.engine.ask("likely", 60, request=f"alone-{time.monotonic_ns()}", tokens=tokens, amount=DECODED)
        places = [{int(token): chance for token, chance in each.items()} for each in said["places"]]
        return Voice(said["tokens"], places)

    def nixl_transfers(self) -> list[dict[str, float]]:
        """Those of its NixlConnector since the last call."""
        return list(self.engine.ask("transfers", 10)["transfers"])

    def held(self) -> Any:
        return self.engine.state()


@dataclass
class RunningSGLang(Beside):
    engine: Server

    def is_well(self) -> bool:
        return self.engine.process.poll() is None and self.engine.is_up() and self.are_agents_alive()

    def prepare(self, is_cpu: bool) -> None:
        is_seeded = self.side.model != LLAMA or self.engine.text().count(SEEDED) >= len(self.side.gpus)
        self.dummy = "" if is_seeded else "SGLang's dummy weights: tokens say little"

    def digests(self) -> dict[str, int]:
        return {name: value for each in self.noted("weights") for name, value in each["digests"].items()}

    def voice(self, tokens: list[int]) -> Voice:
        more = {"return_logprob": True, "top_logprobs_num": LIKELY}
        status, said = self.engine.generate(greedy(tokens, DECODED) | more, ANSWER_S)
        assert status == 200, f"alone: {said}"
        likely = [{token: value for value, token, *_ in place} for place in said["meta_info"]["output_top_logprobs"]]
        return Voice(said["output_ids"], likely)

    def held(self) -> Any:
        return self.engine.held()


Running = RunningVLLM | RunningSGLang


def handles_of(*sides: Running) -> str:
    """By which kinds of handles their agents have mapped their memory."""
    return ",".join(sorted({kinds for side in sides for each in side.agents for kinds in MAPPED.findall(each.text())}))


class Engines:
    """All that are up, by name; `start` begins in the background and may be called again after a loss."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        is_cpu: bool,
        agent_options: dict[str, str],
        dtype: str = "bfloat16",  # of what SGLang computes
    ) -> None:
        self.folder = folder
        self.is_cpu = is_cpu
        self.kept = folder / "rows"  # SGLang's, of prompts
        self.kept.mkdir()
        self.keep_rows(False)
        self.rooms = itertools.count(random.SystemRandom().getrandbits(40) << 16)
        self._dtype = dtype
        self._stack = stack
        self._agent_options = agent_options
        self._models: dict[str, Path] = {}
        self._up: dict[str, Future[Running]] = {}
        self._pool = stack.enter_context(ThreadPoolExecutor(2 if is_cpu else 48))
        self._lock = threading.Lock()
        self._attempts, self._names = itertools.count(1), itertools.count(1)

    def name(self) -> str:
        """A request id that was not used before."""
        return f"pair-{next(self._names)}"

    def keep_rows(self, are_kept: bool) -> None:
        """Whether SGLang's servers write the rows of what comes; it takes them a while."""
        pause = self.kept / PAUSE
        if are_kept:
            pause.unlink(missing_ok=True)
        else:
            pause.touch()

    def start(self, *sides: Side) -> None:
        for side in sides:
            if side.name not in self._up:
                self._up[side.name] = self._pool.submit(self._start, side, next(self._attempts))

    def get(self, side: Side) -> Running:
        """Wait for it. Raises what kept it from starting."""
        self.start(side)
        return self._up[side.name].result(START_S + AGENT_START_S)

    def names(self) -> set[str]:
        """Of those that are up, or start, or failed to."""
        return set(self._up)

    def drop(self, name: str) -> None:
        """End an engine that does not answer, or is not needed any more; its next use starts another."""
        future = self._up.pop(name, None)
        if future is not None and future.done() and future.exception() is None:
            future.result().kill()

    def _start(self, side: Side, attempt: int) -> Running:
        name = f"{side.name}-{attempt}"
        times = self.folder / f"{name}.times"
        running: Running
        if isinstance(side, VLLM):
            running = RunningVLLM(side, self._vllm(side, name, attempt), times)
        else:
            assert isinstance(side, SGLang)
            running = RunningSGLang(side, self._sglang(side, name), times)
        try:
            if side.has_agents:  # while the engine imports
                with ThreadPoolExecutor(len(side.gpus)) as pool:
                    begun = [pool.submit(self._agent, f"{name}-{rank}", gpu) for rank, gpu in enumerate(side.gpus)]
                    running.agents += [each.result() for each in begun]
            running.engine.wait_ready(START_S)
            running.prepare(self.is_cpu)
        except BaseException:
            running.kill()
            raise
        return running

    def _model(self, side: Side) -> str:
        """Its folder, which is written for the first engine."""
        with self._lock:
            if side.model not in self._models:
                folder = self.folder / f"model-{side.model}"
                if side.model != LLAMA:
                    WRITE[side.model](folder)
                elif self.is_cpu:
                    weights.write(folder)
                else:
                    folder.mkdir()
                    (folder / "config.json").write_text(json.dumps(LLAMA_8B, indent=1))
                self._models[side.model] = folder
            return str(self._models[side.model])

    def _enter(self, what: contextlib.AbstractContextManager[Any]) -> Any:
        entered = what.__enter__()
        with self._lock:
            self._stack.push(what)
        return entered

    def _agent(self, name: str, gpu: int) -> AgentProcess:
        options: dict[str, Any] = dict.fromkeys(("slot_bytes", "receive_slots", "send_slots"))  # as operators have
        options["device"] = "cpu" if self.is_cpu else f"cuda:{gpu}"
        return self._enter(agent(self.folder, name, AGENT_START_S, **options | self._agent_options))

    def _sglang(self, side: SGLang, name: str) -> Server:
        config = ServerConfig(
            role=side.role,
            gpus=() if self.is_cpu else side.gpus,
            page_size=side.block,
            tensor_parallel_size=len(side.gpus),
            dtype=self._dtype,
            kv_cache_dtype=side.kv,
            chunked_prefill_size=16384,
            max_total_tokens=POOL_TOKENS,
            backend="nixl" if side.is_nixl else "kvbridge",
            keeps_prefixes=False,
            cores=_cores(side) if self.is_cpu else "",
            flags=SGLANG_FLAGS.get(side.model, ()),
            environment=(_of_states(self.is_cpu) if side.model == QWEN_DENSE else {})
            | {
                "KVBRIDGE_TEST_ROWS": str(self.kept),
                marks.VARIABLE: str(self.folder / f"{name}.times"),
                "KVBRIDGE_TEST_SEED": str(weights.SEED),
                "KVBRIDGE_ENGINE_SOCKET": str(self.folder / f"{name}-{{rank}}.sock"),
                "KVBRIDGE_ENGINE_CONNECT_S": str(AGENT_START_S),
                "KVBRIDGE_ENGINE_MODEL_NAME": MODEL_NAME,
                "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "60",
                "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "60",
            },
        )
        return self._enter(Server(config, self._model(side), self.folder, name))

    def _vllm(self, side: VLLM, name: str, attempt: int) -> EngineProcess:
        more: dict[str, Any] = {"kv_transfer_config": self._transfer(side, name)}
        environment = {
            **({marks.VARIABLE: str(self.folder / f"{name}.times")} if side.is_noted else {}),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(5600 + 20 * attempt),
        }
        is_llama = side.model == LLAMA
        if self.is_cpu:
            more["num_gpu_blocks_override"] = (1 << 15) // side.block
            cores = _cores(side)
            if side.model in MODELS:
                more |= {"attention_backend": "CPU_MLA", "dtype": "float32"}
                environment |= _plugged(DSA_PLUGIN)
        else:
            cores = "0"
            more |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 5 << 29 if is_llama else 1 << 28}
            if is_llama:
                more["load_format"] = "dummy"
            if side.model in LARGE:
                more["kv_cache_memory_bytes"] = LARGE_CACHE
            if side.backend:
                more["attention_backend"] = side.backend
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
        if side.drafts[0]:
            more["speculative_config"] = {"method": side.drafts[0], "num_speculative_tokens": side.drafts[1]}
            more["speculative_config"] |= NGRAMS if side.drafts[0] == "ngram" else {}
        if side.stages:
            more["pipeline_parallel_size"] = len(side.stages)
            environment["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, side.stages))
        if side.is_split:
            more["decode_context_parallel_size"] = len(side.gpus)
        if side.model in STATES:
            environment["VLLM_SSM_CONV_STATE_LAYOUT"] = side.conv_order
            environment["VLLM_KIMI_K3_GEMM_AR"] = "0"  # for Kimi-Linear on one GPU, too, it imports CuTe DSL
            if side.model.startswith("qwen"):
                more["additional_config"] = {"gdn_prefill_backend": "triton"}
            if self.is_cpu:
                more["num_gpu_blocks_override"] = 128
        more |= dict(side.more)
        if side.model == MINIMAX:
            environment |= _plugged(MINIMAX_PLUGIN)
        config = EngineConfig(
            model=self._model(side),
            block_size=side.block,
            kv_cache_dtype=side.kv,
            tensor_parallel_size=len(side.gpus) // max(1, len(side.stages)),
            max_num_batched_tokens=8192,
            max_num_seqs=8,
            max_model_len=16384 if is_llama else 4096,
            enable_prefix_caching=side.has_prefixes,
            cores=cores,
            more=more,
            environment=environment,
        )
        python = os.environ.get("KVBRIDGE_TEST_VLLM_PYTHON") or sys.executable
        log = self.folder / f"{name}.log"
        return self._enter(EngineProcess(config, log, python))

    def _transfer(self, side: VLLM, name: str) -> dict[str, Any]:
        if side.is_nixl:
            device = "cpu" if self.is_cpu else "cuda"
            connector: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_buffer_device": device}
            if side.keeps_s:
                ttl_s = int(side.keeps_s)  # held so long, whoever else needs the memory
                connector["kv_connector_extra_config"] = {
                    "bidirectional_kv_xfer": True,
                    "decoder_kv_blocks_ttl": ttl_s,
                }
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
            if side.keeps_s:  # only engines that would compute fetch what others keep
                extra["kvbridge_return_s"] = side.keeps_s
            policy = "recompute" if side.keeps_s else "fail"
            connector |= {"kv_load_failure_policy": policy, "kv_connector_extra_config": extra}
        return {"kv_role": "kv_both", "engine_id": f"pairs-{name}", **connector}


def _plugged(plugin: Path) -> dict[str, str]:
    there = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{plugin}{os.pathsep}{there}" if there else str(plugin)}


def _of_states(is_cpu: bool) -> dict[str, str]:
    return {states.VARIABLE: "1", states.DENSE: "1"} | (states.ENVIRONMENT if is_cpu else {})


def _cores(side: Side) -> str:
    """Pinned on a machine of two: one a rank."""
    return "|".join(str(gpu % 2) for gpu in side.gpus)
