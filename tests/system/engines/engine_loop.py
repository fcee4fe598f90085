"""The engine's side of `engine_process`: steps a real vLLM engine, and obeys commands between steps.

vLLM's engine core runs in this process, so that tests can look at what it holds. Tensor-parallel workers are its own.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from demo.vllm_rows import before_free, joined, read_rows
from kvbridge.adapters.vllm.on_cpu import MAINS, ask_for_tiles
from tests.system.engines import marks, weights
from tests.system.engines.compressed import read_compressed
from tests.system.engines.index_keys import of_all_ranks, read_index_keys, read_plain_index_keys
from tests.system.engines.states import read_states, without_checkpoints

RANDOM = re.compile(r"-[0-9a-f]{8}\Z")
LIKELY = 20  # vLLM's own limit for the tokens whose probabilities it tells


class Loop:
    """One engine and the socket it is told things over."""

    def __init__(self, control: socket.socket, config: dict[str, Any]) -> None:
        self.control = control
        self.buffer = b""
        self.dumps: dict[str, tuple[int, int, str]] = {}
        self.began: dict[str, float] = {}
        self.first: dict[str, float] = {}  # of requests that have a token
        self.came: dict[str, float] = {}  # of requests whose KV came
        self.blocks: dict[str, list[list[int]]] = {}
        self.steps = 0
        self.nixl: list[dict[str, float]] = []
        if (config["more"].get("kv_transfer_config") or {}).get("kv_connector", "").startswith("Nixl"):
            watch_nixl(self.nixl)
        if marks.VARIABLE in os.environ:
            marks.watch()
        self.engine = _make(config)
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.drafts: dict[str, list[tuple[int, int]]] = {}
        watch_drafts(self.scheduler, self.drafts)
        self.preempted: list[str] = []
        watch_preempted(self.scheduler, self.preempted)
        self.received: dict[str, list[dict[str, np.ndarray]]] = {}
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        self.reads_states: Any = None
        if any(type(group.kv_cache_spec).__name__ == "MambaSpec" for group in groups):
            self.reads_states = read_states
        elif any(name.endswith(".swa_cache") for group in groups for name in group.layer_names):
            self.reads_states = read_compressed
        watch_received(self.scheduler, self._received)
        # A request may come and go within one step; its blocks are only known until they are freed.
        before_free(self.scheduler.kv_cache_manager, lambda request: self._remember(request.request_id))
        self.say(kind="ready")

    def _remember(self, request_id: str) -> None:
        table = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        if any(table):
            self.blocks[RANDOM.sub("", request_id)] = [list(ids) for ids in table]

    def say(self, **message: Any) -> None:
        self.control.sendall(json.dumps(message).encode() + b"\n")

    def run(self) -> None:
        while True:
            is_busy = self.scheduler.has_requests() or self.engine.has_unfinished_requests()
            for message in self.told(None if not is_busy else 0.0):
                if message["op"] == "quit":
                    return
                getattr(self, message.pop("op"))(**message)
            if self.scheduler.has_requests() or self.engine.has_unfinished_requests():
                self.step()

    def told(self, timeout_s: float | None) -> list[dict[str, Any]]:
        ready, _, _ = select.select([self.control], [], [], timeout_s)
        if not ready:
            return []
        received = self.control.recv(1 << 20)
        if not received:
            return [{"op": "quit"}]  # the test is gone
        *lines, self.buffer = (self.buffer + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def step(self) -> None:
        self.steps += 1
        outputs, now = self.engine.step(), time.perf_counter()
        for output in outputs:
            if output.finished:
                if (wanted := self.dumps.pop(output.request_id, None)) is not None:
                    self.dump(output.request_id, *wanted)  # now: the next step may give its blocks to another
                began = self.began.pop(output.request_id)
                self.say(
                    kind="finished",
                    request=output.request_id,
                    tokens=[list(each.token_ids) for each in output.outputs],
                    reason=str(output.outputs[0].finish_reason),
                    params=output.kv_transfer_params,
                    cached=output.num_cached_tokens or 0,
                    seconds=time.perf_counter() - began,
                    first_s=self.first.pop(output.request_id, now) - began,
                    came_s=self.came.pop(output.request_id, began) - began,
                )
        for request_id, request in self.scheduler.requests.items():
            self._remember(request_id)
            if request.num_output_tokens:
                self.first.setdefault(RANDOM.sub("", request_id), now)
        if not outputs and not self.scheduler.running:
            time.sleep(0.001)  # as vLLM's own loop does when nothing runs

    def submit(
        self,
        request: str,
        tokens: list[int],
        max_tokens: int,
        params: dict[str, Any] | None,
        dump: tuple[int, int, str] | None,
        answers: int,
    ) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # With this vLLM reports what the prefilling engine had cached; we want to know what this one did not compute.
        params = {name: value for name, value in (params or {}).items() if name != "remote_prefill_cached_tokens"}
        if dump is not None:
            self.dumps[request] = dump
        sampling = SamplingParams(
            n=answers,
            temperature=0 if answers == 1 else 1,  # vLLM makes several answers by sampling only
            top_k=1 if answers > 1 else 0,  # of the likeliest token
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        self.began[request] = time.perf_counter()
        self.engine.add_request(request, {"prompt_token_ids": tokens}, sampling)

    def abort(self, request: str) -> None:
        self.engine.abort_request([request])

    def dump(self, request: str, first: int, end: int, path: str) -> None:
        table = self.blocks.get(request)
        if table is None:
            self.say(kind="dumped", request=request, error=f"no blocks known for {request}")
            return
        whole, codecs = joined(self.engine.collective_rpc(read_rows, args=(table, first, end)))
        for read in (read_index_keys, read_plain_index_keys):
            whole |= of_all_ranks(self.engine.collective_rpc(read, args=(table[0], first, end)))
        with open(path, "wb") as out:
            np.savez(out, **dict[str, Any](whole))
        self.say(kind="dumped", request=request, codecs=codecs)

    def _received(self, request_id: str) -> None:
        """Keep what has come, before a step changes it. Not of a request for one token: that is timed."""
        self.came[RANDOM.sub("", request_id)] = time.perf_counter()
        request = self.scheduler.requests[request_id]
        if request.max_tokens == 1 or not self.reads_states:
            return
        self._remember(request_id)
        self.received[RANDOM.sub("", request_id)] = self._states(request_id, request.num_computed_tokens)

    def _states(self, request: str, tokens: int) -> list[dict[str, np.ndarray]]:
        table = self.blocks[RANDOM.sub("", request)]
        found: list[dict[str, np.ndarray]] = self.engine.collective_rpc(self.reads_states, args=(table, tokens))
        return found

    def states(self, request: str, tokens: int, path: str) -> None:
        """Of each rank: those that came with the request, or that it has after `tokens` tokens."""
        ranks = self.received.pop(request, None) or self._states(request, tokens)
        with open(path, "wb") as out:
            named = {f"{rank}.{key}": each for rank, found in enumerate(ranks) for key, each in found.items()}
            np.savez(out, **dict[str, Any](named))
        self.say(kind="states", ranks=len(ranks))

    def state(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.say(
            kind="state",
            requests=len(self.scheduler.requests),
            free_blocks=pool.get_num_free_blocks(),
            blocks=pool.num_gpu_blocks - 1,  # block 0 is never given out
            steps=self.steps,
            preempted=len(self.preempted),
            block_tokens=max(each.kv_cache_spec.block_size for each in self.scheduler.kv_cache_config.kv_cache_groups),
            cpu_s=usage.ru_utime + usage.ru_stime,
        )

    def drafted(self) -> None:
        """Of each request since the last time: how many tokens were drafted and accepted in each step with drafts."""
        found = dict(self.drafts)
        self.drafts.clear()
        self.say(kind="drafted", steps=found)

    def core_call(self, method: str, arguments: list[Any]) -> None:
        """What the server's own endpoints have the engine core do."""
        try:
            answer = getattr(self.core, method)(*arguments)
        except RuntimeError as error:
            answer = str(error)
        self.say(kind="core_call", answer=answer)

    def weights(self, seed: int) -> None:
        """Without them vLLM's own dummy weights stay, which engines of one size share and others do not."""
        try:
            self.engine.collective_rpc(weights.load_seeded, args=(seed,))
        except Exception as error:  # whatever another vLLM has changed in its loader
            self.say(kind="weights", failure=f"{type(error).__name__}: {error}")
            return
        self.say(kind="weights", failure="")

    def other_weights(self) -> None:
        self.engine.collective_rpc(grow_norms)
        self.say(kind="other_weights")

    def digests(self) -> None:
        """Of the first rank's weights."""
        self.say(kind="digests", digests=self.engine.collective_rpc(digests_of)[0])

    def transfers(self) -> None:
        """What came in since the last time."""
        found, self.nixl[:] = list(self.nixl), []
        self.say(kind="transfers", transfers=found)

    def likely(self, request: str, tokens: list[int], amount: int) -> None:
        """What it says, and the log probabilities of the likeliest tokens at each place; it has nothing else to do.

        It computes the prompt's last token in a step of its own, as an engine that has fetched the others, if it can.
        """
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=amount, ignore_eos=True, detokenize=False, logprobs=LIKELY)
        self.engine.add_request(request, {"prompt_token_ids": tokens}, sampling)
        last, budget = None, self.scheduler.max_num_scheduled_tokens
        if self.scheduler.scheduler_config.enable_chunked_prefill:
            self.scheduler.max_num_scheduled_tokens = max(1, min(budget, len(tokens) - 1))
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                last = output.outputs[0]  # all so far
        self.scheduler.max_num_scheduled_tokens = budget
        assert last is not None
        places = [{str(token): each.logprob for token, each in place.items()} for place in last.logprobs]
        self.say(kind="likely", tokens=list(last.token_ids), places=places)


def watch_drafts(scheduler: Any, steps: dict[str, list[tuple[int, int]]]) -> None:
    """Keep what vLLM would count of drafts, whether it logs that or not.

    It counts one step too many of a request that computes only its last token at first: it pads that step with as many
    placeholders as it drafts otherwise. That is no draft, so it is left out.
    """
    right = scheduler.make_spec_decoding_stats

    def kept(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *, request_id: str, **more: Any) -> Any:
        if num_draft_tokens and scheduler.requests[request_id].num_output_tokens:
            steps.setdefault(RANDOM.sub("", request_id), []).append((num_draft_tokens, num_accepted_tokens))
        more |= {"num_draft_tokens": num_draft_tokens, "num_accepted_tokens": num_accepted_tokens}
        return right(stats, request_id=request_id, **more)

    scheduler.make_spec_decoding_stats = kept


def watch_preempted(scheduler: Any, seen: list[str]) -> None:
    """Keep the requests that are preempted, which vLLM counts as `vllm:num_preemptions`."""
    right = scheduler._preempt_request

    def preempt(request: Any, *args: Any, **more: Any) -> Any:
        seen.append(RANDOM.sub("", request.request_id))
        return right(request, *args, **more)

    scheduler._preempt_request = preempt


def watch_received(scheduler: Any, seen: Callable[[str], None]) -> None:
    """Have `seen` called with each request that has received its prompt, before the next step."""
    finished = scheduler._update_from_kv_xfer_finished

    def finished_and_seen(output: Any) -> Any:
        for request_id in output.finished_recving or ():
            if request_id in scheduler.requests and scheduler.requests[request_id].num_computed_tokens:
                seen(request_id)
        return finished(output)

    scheduler._update_from_kv_xfer_finished = finished_and_seen


def grow_norms(worker: Any) -> None:
    """On a worker: other weights, in whatever form this platform keeps them."""
    import torch

    with torch.no_grad():
        for name, weight in worker.get_model().named_parameters():
            if name.endswith("norm.weight"):
                weight.mul_(1.5)


def digests_of(worker: Any) -> dict[str, int]:
    """On a worker."""
    return weights.digests(worker.get_model())


def watch_nixl(found: list[dict[str, float]]) -> None:
    """Every transfer of vLLM's NixlConnector, as its own telemetry has it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

    record = NixlKVConnectorStats.record_transfer

    def record_and_keep(self: Any, telemetry: Any) -> Any:
        found.append(
            {
                "ms": telemetry.xferDuration / 1e3,  # counts from the start of posting
                "post_ms": telemetry.postDuration / 1e3,
                "bytes": telemetry.totalBytes,
                "descriptors": telemetry.descCount,
            }
        )
        return record(self, telemetry)

    NixlKVConnectorStats.record_transfer = record_and_keep


def _make(config: dict[str, Any]) -> Any:
    from vllm import EngineArgs, LLMEngine
    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        without_checkpoints()
    arguments = {
        name: config[name]
        for name in (
            "model",
            "block_size",
            "kv_cache_dtype",
            "tensor_parallel_size",
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_model_len",
            "enable_prefix_caching",
        )
    }
    if config["connector"] is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KVBridgeConnector",
            kv_role="kv_both",
            kv_load_failure_policy=config["on_failure"],
            kv_connector_extra_config=config["connector"],
            **({"engine_id": config["engine_id"]} if config["engine_id"] else {}),
        )
    settings = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "seed": 0,
        "disable_log_stats": True,
        **arguments,
        **config["more"],
    }
    if isinstance(chosen := settings.get("kv_transfer_config"), dict):  # another connector than ours, spelled out
        settings["kv_transfer_config"] = KVTransferConfig(**chosen)
    return LLMEngine.from_engine_args(EngineArgs(**settings))


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    Loop(control, json.loads(sys.argv[2])).run()
    sys.stdout.flush()
    os._exit(0)  # vLLM's own teardown takes seconds and nobody needs it


if __name__ in MAINS:
    ask_for_tiles()

if __name__ == "__main__":
    main()
