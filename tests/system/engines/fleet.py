"""Real vLLM engines that differ, and a single engine as reference."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from demo.model import prompt, write_model
from testing.kept import Kept
from testing.planned import assert_known_beforehand
from tests.system.engines.engine_process import EngineConfig, EngineProcess, Result, Rows
from tests.system.sglang.rows import assert_carried

__all__ = ["Fleet", "prompt"]

# vLLM's own words; on GPUs and on processors that have it these tests run.
needs_fp8 = pytest.mark.skipif(
    "avx512f" not in Path("/proc/cpuinfo").read_text(), reason="FP8 KV cache on CPU requires x86 with AVX-512 or AMX"
)
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}  # what vLLM's proxies send to the prefilling engine

TOKENS = 1 << 16  # room for KV in each engine; the default of a GiB would be touched whole when it is shared
CONFIGS = {
    "small": EngineConfig(model="", block_size=32, max_num_batched_tokens=256),
    "large": EngineConfig(model="", block_size=128),
    "two": EngineConfig(model="", block_size=32, tensor_parallel_size=2, cores="0|1", max_num_batched_tokens=256),
    "fp8": EngineConfig(model="", block_size=32, kv_cache_dtype="fp8", enable_prefix_caching=False),
    "large-fp8": EngineConfig(model="", block_size=128, kv_cache_dtype="fp8"),
    "sixteen": EngineConfig(model="", block_size=16),
    "two-large": EngineConfig(model="", block_size=256, tensor_parallel_size=2, cores="0|1"),
    "two-sixteen": EngineConfig(model="", block_size=16, tensor_parallel_size=2, cores="0|1"),
    "private": EngineConfig(model="", block_size=128),  # no prefix cache: no block is another request's too
    "strict": EngineConfig(model="", block_size=128, on_failure="fail"),
    "alone": EngineConfig(model="", block_size=32),
}
WITHOUT_PREFIXES = ("alone", "private")


class Fleet(Kept[EngineProcess]):
    """Engines of CONFIGS."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        dtype: str = "bfloat16",
        write: Callable[[Path], Path] = write_model,
        more: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        python: str = sys.executable,
        routes: str | None = None,
        start: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        own: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(folder, stack, len(CONFIGS), routes)
        self.dtype = dtype
        self._python = python  # one that has vLLM
        self._model = str(write(folder / "model"))
        self._more = more or {}  # engine arguments for all
        self._options = options or {}  # of the connector, for all
        self._environment = dict(environment or {})  # of all engines
        self._own = own or {}  # engine arguments for some, by name; in capitals: of their environment
        self._numbers = iter(range(1, 1_000_000))
        self.start(*start)

    def _ranks(self, name: str) -> int:
        return CONFIGS[name].tensor_parallel_size

    def _begin(self, name: str) -> EngineProcess:
        config = CONFIGS[name]
        own = self._own.get(name, {})
        more = {"num_gpu_blocks_override": TOKENS // config.block_size, "dtype": self.dtype, **self._more}
        more |= {key: value for key, value in own.items() if not key.isupper()}
        config = replace(
            config,
            model=self._model,
            enable_prefix_caching=name not in WITHOUT_PREFIXES,
            more=more,
            environment=self._environment | {key: str(value) for key, value in own.items() if key.isupper()},
        )
        if name != "alone":
            config = replace(config, engine_id=f"engine-{name}", connector=self._connector(name))
            if name not in self.agents:
                self.start_agents(name)
        engine = EngineProcess(config, self.folder / f"{name}.log", python=self._python)
        return self._stack.enter_context(engine)

    def _connector(self, name: str) -> dict[str, Any]:
        socket = str(self.folder / f"{name}-{{rank}}.sock")
        return {"kvbridge_socket": socket, "kvbridge_deadline_s": 40, **self._options}

    def name(self, what: str) -> str:
        """A request id that was not used before."""
        return f"{what}-{next(self._numbers)}"

    def alone(self, tokens: list[int], count: int) -> list[int]:
        """What one engine alone says."""
        return list(self["alone"].run(self.name("alone"), tokens, count).tokens)

    def prefill(self, name: str, tokens: list[int], **more: Any) -> tuple[str, Result]:
        """Prefill as a proxy asks for it; the result's params are for the decoding engine."""
        request = self.name(f"p-{name}")
        result = self[name].run(request, tokens, 1, PREFILL | more)
        assert result.params and result.params["do_remote_prefill"], result
        return request, result

    def fetched(self, sender: str, rendezvous: str) -> dict[str, Any]:
        """What tells an engine to fetch what this one offers, or will, under this name."""
        host, port = self.agents[sender][0].address.removeprefix("tcp://").split(":")
        where = {"remote_host": host, "remote_port": int(port), "remote_engine_id": f"engine-{sender}"}
        return {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": rendezvous, **where}

    def rows(self, name: str, request: str, first: int, end: int) -> Rows:
        return self[name].dump(request, first, end, self.folder / f"{name}-{request}.npz")

    def assert_known_beforehand(self, name: str, options: str = "") -> None:
        """`kvbridge plan --model` would have said what its pools are."""
        self.start(name)
        config = CONFIGS[name]
        command = (
            f"vllm -tp {config.tensor_parallel_size} --block-size {config.block_size} --dtype {self.dtype} {options}"
        )
        command += " --no-enable-prefix-caching" * (name in WITHOUT_PREFIXES)
        assert_known_beforehand(Path(self._model), command, [str(each.socket) for each in self.agents[name]])

    def crossed(self, sender: str, receiver: str, tokens: list[int], count: int = 12) -> tuple[Result, Rows, Rows]:
        """Prefill in one engine, decode in the other; the answer, and the KV rows of both."""
        self.start(sender, receiver)  # what is offered is not held for as long as a start-up may take
        request, prefilled = self.prefill(sender, tokens)
        ours = self.rows(sender, request, 0, len(tokens) - 1)
        wanted = self.name(f"d-{receiver}")
        answer = self[receiver].run(wanted, tokens, count, prefilled.params)
        return answer, ours, self.rows(receiver, wanted, 0, len(tokens) - 1)


def assert_same_as_alone(fleet: Fleet, sender: str, receiver: str, tokens: list[int]) -> None:
    """The rows arrive byte for byte, and what is decoded from them is what one engine alone says."""
    answer, ours, theirs = fleet.crossed(sender, receiver, tokens)
    assert answer.cached == len(tokens) - 1, "the prompt did not travel, it was computed again"
    assert_carried(ours, theirs)
    assert list(answer.tokens) == fleet.alone(tokens, 12)


def reweigh(engine: EngineProcess) -> None:
    """Other weights, as an operator loads them: the cache is reset, and that succeeds although a prompt is held."""
    engine.ask("other_weights", 60)
    assert engine.ask("core_call", 60, method="reset_prefix_cache", arguments=[True, True])["answer"] is True


def name_weights(engine: EngineProcess, version: str) -> None:
    engine.ask("core_call", 60, method="set_weight_version", arguments=[version])
